"""`LLM`: prompts, outputs, finish reasons, the step loop, conversations, beam search, threads."""

import gc
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import transformers

from nanovllm import LLM, BeamSearchParams, RequestOutput, SamplingParams
from nanovllm.errors import ConfigError, RequestError
from tests.helpers import (
    TEXT_MODEL,
    TOKENIZER,
    assert_greedy,
    copy_of,
    edit_config,
    greedy_params,
    model_dir,
    open_llm,
    prompt_of,
    reference_logprobs,
    scheduler_of,
)

TEXT = "Natalia sold 48 clips"
OTHERS = ["Hello, how many apples", "x", "There were 12 eggs in the basket."]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with open_llm(TEXT_MODEL) as llm:
        yield llm


@pytest.fixture(scope="module")
def free(llm: LLM) -> RequestOutput:
    """The model's greedy output without stop conditions."""
    return one(llm, TEXT, greedy_params(40))


def one(llm: LLM, prompt: Any, params: SamplingParams) -> RequestOutput:
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    return output


def encode(llm: LLM, text: str) -> list[int]:
    assert llm.tokenizer is not None
    return llm.tokenizer.encode(text)


# --- prompts ----------------------------------------------------------------------------------------------------------


def test_the_garbage_collector_does_not_look_through_the_prompts(llm: LLM) -> None:
    collections = []

    def count(phase: str, info: dict[str, int]) -> None:
        collections.append(phase)

    prompts = [[1 + number % 7] * 8 for number in range(400)]
    gc.callbacks.append(count)
    try:
        llm.generate(prompts, greedy_params(2), use_tqdm=False)
        during = collections.count("start")
    finally:
        gc.callbacks.remove(count)
    assert during <= 1  # when all have finished
    assert gc.get_threshold()[0] < 10_000


@pytest.mark.parametrize(("overlap", "priority", "before"), [(True, 0, 3), (True, [0] * 6, 6), (False, 0, 6)])
def test_the_device_starts_before_the_last_prompt_is_in(
    overlap: bool, priority: Any, before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three of six prompts fill a first step. With priorities, or without overlap, all are added before it."""
    prompts = [prompt_of(20, seed=seed) for seed in range(6)]
    with open_llm("llama", overlap=overlap, max_num_batched_tokens=50) as llm:
        added, launched = [], []
        engine, executor = llm.llm_engine, llm.llm_engine._core.executor
        add, launch = engine.add_request, executor.launch
        monkeypatch.setattr(engine, "add_request", lambda *args, **kw: added.append(add(*args, **kw)) or added[-1])
        monkeypatch.setattr(
            executor, "launch", lambda plan: launched.append((len(added), len(plan.row_steps))) or launch(plan)
        )
        for _ in range(2):
            outputs = llm.generate(prompts, greedy_params(5), use_tqdm=False, priority=priority)
            for prompt, output in zip(prompts, outputs, strict=True):
                assert_greedy("llama", prompt, output["token_ids"])
            assert launched[0] == (before, 3)
            added.clear()
            launched.clear()
            llm.reset_prefix_cache()
            while llm.llm_engine.has_work:
                llm.step()
        with pytest.raises(RequestError, match="^prompt 4: the prompt is empty"):
            llm.generate([*prompts[:4], [], prompts[5]], greedy_params(5), use_tqdm=False, priority=priority)
        assert llm.is_finished() and bool(launched) == (before < 4)
        assert_greedy("llama", prompts[0], llm.generate(prompts[0], greedy_params(5), use_tqdm=False)[0]["token_ids"])
        scheduler_of(llm).check()


def test_ctrl_c_while_prompts_are_taken_in_leaves_none_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [prompt_of(20, seed=seed) for seed in range(6)]
    with open_llm("llama", overlap=True, max_num_batched_tokens=50) as llm:
        add = llm.llm_engine.add_request

        def interrupted(prompt: Any, *args: Any, **kw: Any) -> str:
            if prompt is prompts[4]:
                raise KeyboardInterrupt
            return add(prompt, *args, **kw)

        monkeypatch.setattr(llm.llm_engine, "add_request", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(prompts, greedy_params(5), use_tqdm=False)
        assert llm.is_finished() and llm.llm_engine.has_work, "a step was under way"
        monkeypatch.undo()
        for prompt, output in zip(prompts, llm.generate(prompts, greedy_params(5), use_tqdm=False), strict=True):
            assert_greedy("llama", prompt, output["token_ids"])
        scheduler_of(llm).check()


def test_forms_of_a_prompt(llm: LLM, free: RequestOutput) -> None:
    ids = encode(llm, TEXT)
    assert_greedy(TEXT_MODEL, ids, free["token_ids"])
    forms: list[Any] = [
        TEXT,
        [TEXT],
        (TEXT,),
        ids,
        tuple(ids),
        [ids],
        {"prompt": TEXT},
        {"prompt_token_ids": ids},
        [{"prompt_token_ids": tuple(ids), "cache_salt": "mine"}],
    ]
    for form in forms:
        output = one(llm, form, greedy_params(40))
        assert (output["text"], output.prompt_token_ids) == (free["text"], ids)
        assert output.prompt == (TEXT if "Natalia" in str(form) else None)
    both = one(llm, {"prompt": "shown", "prompt_token_ids": ids}, greedy_params(40))
    assert (both.prompt, both["token_ids"]) == ("shown", free["token_ids"])


def test_several_prompts_of_several_forms_keep_their_order(llm: LLM) -> None:
    prompts: list[Any] = [OTHERS[0], {"prompt": OTHERS[1]}, encode(llm, OTHERS[2])]
    outputs = llm.generate(prompts, greedy_params(8), use_tqdm=False)
    assert [output.prompt for output in outputs] == [OTHERS[0], OTHERS[1], None]
    for text, output in zip(OTHERS, outputs, strict=True):
        assert output.prompt_token_ids == encode(llm, text)
        assert_greedy(TEXT_MODEL, output.prompt_token_ids, output["token_ids"])
    assert llm.generate([], use_tqdm=False) == []


def test_parameters_for_all_and_for_each(llm: LLM) -> None:
    outputs = llm.generate(OTHERS, [greedy_params(count) for count in (3, 1, 7)], use_tqdm=False)
    assert [len(output["token_ids"]) for output in outputs] == [3, 1, 7]
    default = llm.generate(OTHERS[0], use_tqdm=False)[0]
    assert len(default["token_ids"]) == 64 or default.outputs[0].finish_reason == "stop"


def test_token_ids_only() -> None:
    with open_llm(TEXT_MODEL, skip_tokenizer_init=True) as llm:
        output = one(llm, prompt_of(5), greedy_params(4, logprobs=1))
        assert llm.tokenizer is None
    assert (output.prompt, output["text"], len(output["token_ids"])) == (None, "", 4)
    assert [entry.decoded_token for entry in output.outputs[0].logprobs[0].values()] == [None]  # type: ignore[index]


def test_a_tokenizer_from_elsewhere(tmp_path: Path, free: RequestOutput) -> None:
    folder = copy_of(TEXT_MODEL, tmp_path)
    (folder / "tokenizer.json").unlink()
    with LLM(folder, tokenizer=str(TOKENIZER), device="cpu", max_model_len=128, num_kv_cache_blocks=4) as llm:
        assert one(llm, TEXT, greedy_params(40))["text"] == free["text"]


# --- outputs ----------------------------------------------------------------------------------------------------------


def test_both_faces_of_an_output(llm: LLM, free: RequestOutput) -> None:
    completion = free.outputs[0]
    assert free["text"] == completion.text
    assert free["token_ids"] == completion.token_ids
    assert free.finished and completion.finished
    with pytest.raises(KeyError, match="'text' and 'token_ids'"):
        free["logprobs"]
    assert llm.tokenizer is not None
    assert completion.text == llm.tokenizer.decode(completion.token_ids)


def test_moments_are_in_order_and_the_first_token_is_not_the_last(llm: LLM) -> None:
    outputs = llm.generate([TEXT, *OTHERS], greedy_params(30), use_tqdm=False)
    outputs += [output for output in llm.stream(TEXT, greedy_params(30)) if output.finished]
    for output in outputs:
        times = output.metrics
        moments = [times.arrival_time, times.first_scheduled_time, times.first_token_time, times.finished_time]
        assert None not in moments
        assert moments == sorted(moments)  # type: ignore[type-var]
        waited, decoded = moments[2] - moments[0], moments[3] - moments[2]  # type: ignore[operator]
        assert waited > 0 and decoded > 0


def test_number_of_cached_tokens() -> None:
    prompt = prompt_of(50)
    with open_llm(TEXT_MODEL) as llm:
        counts = [one(llm, prompt, greedy_params(1)).num_cached_tokens for _ in range(2)]
        counts.append(one(llm, prompt[:48], greedy_params(1)).num_cached_tokens)  # one token is always computed
        counts.append(one(llm, prompt[:20] + [5] * 30, greedy_params(1)).num_cached_tokens)
        salted = {"prompt_token_ids": prompt, "cache_salt": "tenant"}
        counts += [one(llm, salted, greedy_params(1)).num_cached_tokens for _ in range(2)]
        llm.reset_prefix_cache()
        counts.append(one(llm, prompt, greedy_params(1)).num_cached_tokens)
    assert counts == [0, 48, 32, 16, 0, 48, 0]


def test_completions_of_one_prompt(llm: LLM) -> None:
    output = one(llm, TEXT, SamplingParams(n=5, seed=3, max_tokens=10, ignore_eos=True))
    assert len({tuple(completion.token_ids) for completion in output.outputs}) == 5
    assert [completion.index for completion in output.outputs] == list(range(5))
    assert output["text"] == output.outputs[0].text


def test_progress_bar(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate([TEXT, *OTHERS], greedy_params(8))
    shown = capsys.readouterr().err
    assert "4/4" in shown and "prefill" in shown and "decode" in shown and "tok/s" in shown
    llm.generate(TEXT, greedy_params(2), use_tqdm=False)
    assert capsys.readouterr().err == ""


# --- finish reasons ---------------------------------------------------------------------------------------------------


def ending(output: RequestOutput) -> tuple[str | None, int | str | None]:
    return output.outputs[0].finish_reason, output.outputs[0].stop_reason


def test_length(llm: LLM) -> None:
    assert ending(one(llm, TEXT, greedy_params(5))) == ("length", None)
    to_the_end = one(llm, TEXT, SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))
    assert len(to_the_end.prompt_token_ids) + len(to_the_end["token_ids"]) == llm.max_model_len
    assert ending(to_the_end) == ("length", None)


def test_without_max_tokens_the_cache_is_the_limit() -> None:
    with open_llm(TEXT_MODEL, num_kv_cache_blocks=2) as llm:
        output = one(llm, prompt_of(20), SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))
    assert len(output["token_ids"]) == 13  # the last of 33 tokens needs no slot in the 2 blocks
    assert_greedy(TEXT_MODEL, prompt_of(20), output["token_ids"])


@pytest.mark.parametrize("eos", [2, 0])
def test_every_end_of_sequence_id_counts(llm: LLM, eos: int) -> None:
    settings: dict[str, Any] = {"temperature": 0.0, "max_tokens": 6, "logit_bias": {eos: 100.0}}
    ended = one(llm, TEXT, SamplingParams(**settings))
    assert (ended["token_ids"], ended["text"], ending(ended)) == ([eos], "", ("stop", None))
    ignored = one(llm, TEXT, SamplingParams(ignore_eos=True, **settings))
    assert (ignored["token_ids"], ending(ignored)) == ([eos] * 6, ("length", None))
    late = one(llm, TEXT, SamplingParams(min_tokens=3, **settings))
    assert len(late["token_ids"]) == 4 and late["token_ids"][-1] == eos and eos not in late["token_ids"][:3]
    shown = one(llm, TEXT, SamplingParams(skip_special_tokens=False, include_stop_str_in_output=True, **settings))
    assert shown["text"] == llm.tokenizer.decode_token(eos)  # type: ignore[union-attr]


def test_stop_token_ids(llm: LLM, free: RequestOutput) -> None:
    tokens = free["token_ids"]
    stop = tokens[10]
    first = tokens.index(stop)
    stopped = one(llm, TEXT, greedy_params(40, stop_token_ids=[stop]))
    assert stopped["token_ids"] == tokens[: first + 1]
    assert ending(stopped) == ("stop", stop)
    assert stopped["text"] == llm.tokenizer.decode(tokens[:first])  # type: ignore[union-attr]
    included = one(llm, TEXT, greedy_params(40, stop_token_ids=[stop], include_stop_str_in_output=True))
    assert included["text"] == llm.tokenizer.decode(tokens[: first + 1])  # type: ignore[union-attr]
    late = one(llm, TEXT, greedy_params(40, stop_token_ids=[stop], min_tokens=first + 5))
    assert len(late["token_ids"]) > first + 5 and stop not in late["token_ids"][: first + 5]


STOPS = ["cest", "界da", "ми", "ирate", " has", "🙃😀", "day", "never"]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("stop", STOPS)
def test_stop_strings(stop: str, overlap: bool, free: RequestOutput) -> None:
    text = free["text"]
    with open_llm(TEXT_MODEL, overlap=overlap) as llm:
        output = one(llm, TEXT, greedy_params(40, stop=[stop, "never said"], logprobs=0))
        included = one(llm, TEXT, greedy_params(40, stop=stop, include_stop_str_in_output=True))
        decode = llm.tokenizer.decode  # type: ignore[union-attr]
    if stop not in text:
        assert (output["text"], ending(output)) == (text, ("length", None))
        return
    assert output["text"] == text[: text.index(stop)]
    assert included["text"] == text[: text.index(stop) + len(stop)]
    assert ending(output) == ending(included) == ("stop", stop)
    tokens = free["token_ids"]
    needed = next(count for count in range(len(tokens)) if stop in decode(tokens[:count]))
    assert output["token_ids"] == included["token_ids"] == tokens[:needed]
    assert len(output.outputs[0].logprobs) == needed  # type: ignore[arg-type]


def test_the_stop_strings_are_worth_testing(free: RequestOutput) -> None:
    assert [stop for stop in STOPS if stop not in free["text"]] == ["never"]


def test_min_tokens_passes_over_a_stop_string(llm: LLM, free: RequestOutput) -> None:
    assert free["text"].count("day") > 1
    first = one(llm, TEXT, greedy_params(40, stop="day"))
    second = one(llm, TEXT, greedy_params(40, stop="day", min_tokens=len(first["token_ids"])))
    assert second["text"] == free["text"][: free["text"].index("day", len(first["text"]) + 1)]


def test_special_tokens_in_the_text(llm: LLM) -> None:
    settings: dict[str, Any] = {"logit_bias": {1: 100.0}}
    assert one(llm, TEXT, greedy_params(2, **settings))["text"] == ""
    assert one(llm, TEXT, greedy_params(2, skip_special_tokens=False, **settings))["text"] == "<|im_start|>" * 2


def test_without_text(llm: LLM, free: RequestOutput) -> None:
    output = one(llm, TEXT, greedy_params(40, detokenize=False, logprobs=1))
    assert (output["text"], output["token_ids"]) == ("", free["token_ids"])
    assert {entry.decoded_token for entry in output.outputs[0].logprobs[0].values()} == {None}  # type: ignore[index]


def test_tokens_of_logprobs_are_spelled_out(llm: LLM) -> None:
    output = one(llm, TEXT, greedy_params(5, logprobs=2, prompt_logprobs=1))
    decode = llm.tokenizer.decode_token  # type: ignore[union-attr]
    for entries in (output.outputs[0].logprobs or []) + (output.prompt_logprobs or [])[1:]:
        assert entries
        assert all(entry.decoded_token == decode(token) for token, entry in entries.items())


# --- the step loop ----------------------------------------------------------------------------------------------------


def test_stream_grows_to_what_generate_gives(llm: LLM) -> None:
    prompts = [TEXT, *OTHERS]
    params = [
        greedy_params(20, logprobs=1),
        greedy_params(9, stop="никогда"),
        SamplingParams(n=2, seed=5, max_tokens=15, ignore_eos=True),
        greedy_params(20, detokenize=False),
    ]
    expected = llm.generate(prompts, params, use_tqdm=False)
    seen: dict[str, list[RequestOutput]] = {}
    for output in llm.stream(prompts, params):
        seen.setdefault(output.request_id, []).append(output)
    assert len(seen) == 4
    for outputs, wanted in zip(seen.values(), expected, strict=True):
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        assert [c.text for c in outputs[-1].outputs] == [c.text for c in wanted.outputs]
        assert [c.token_ids for c in outputs[-1].outputs] == [c.token_ids for c in wanted.outputs]
        assert [c.finish_reason for c in outputs[-1].outputs] == [c.finish_reason for c in wanted.outputs]
        for before, after in zip(outputs, outputs[1:], strict=False):
            grown = zip(before.outputs, after.outputs, strict=True)
            for old, new in grown:
                assert new.text.startswith(old.text)
                assert new.token_ids[: len(old.token_ids)] == old.token_ids
        assert len(outputs) >= len(wanted["token_ids"])  # one output per token


def test_a_stop_string_is_never_streamed_not_even_its_beginning(llm: LLM, free: RequestOutput) -> None:
    wanted = free["text"][: free["text"].index("ирate")]
    shown = [output["text"] for output in llm.stream(TEXT, greedy_params(40, stop="ирate"))]
    assert shown[-1] == wanted
    assert all(wanted.startswith(text) for text in shown)


def test_leaving_a_stream_aborts_it(llm: LLM, free: RequestOutput) -> None:
    stream = llm.stream([TEXT, *OTHERS], greedy_params(30))
    next(stream)
    assert llm.num_unfinished_requests == 4
    stream.close()  # type: ignore[attr-defined]
    assert llm.is_finished()
    scheduler_of(llm).check()
    assert scheduler_of(llm).block_manager.num_available == scheduler_of(llm).config.num_blocks
    assert one(llm, TEXT, greedy_params(40))["token_ids"] == free["token_ids"]


@pytest.mark.parametrize("overlap", [False, True])
def test_driving_the_loop_by_hand(overlap: bool, free: RequestOutput) -> None:
    with open_llm(TEXT_MODEL, overlap=overlap) as llm:
        names = [llm.add_request(TEXT, greedy_params(10)), llm.add_request(OTHERS[0], greedy_params(25))]
        assert not llm.is_finished() and llm.num_unfinished_requests == 2
        done = {}
        for step in range(100):
            if step == 3:
                names.append(llm.add_request(TEXT, greedy_params(12), request_id="mine"))
            if step == 5:
                llm.abort(names[1])
                llm.abort(["unknown", names[1]])
            done |= {output.request_id: output for output in llm.step()}
            if llm.is_finished():
                break
        assert names[2] == "mine" and len(set(names)) == 3
        assert set(done) == {names[0], "mine"}
        assert done[names[0]]["token_ids"] == free["token_ids"][:10]
        assert done["mine"]["token_ids"] == free["token_ids"][:12]
        assert llm.step() == []
        scheduler_of(llm).check()
        assert scheduler_of(llm).block_manager.num_available == scheduler_of(llm).config.num_blocks
        assert llm.add_request(TEXT, greedy_params(1), request_id="mine") == "mine"  # the id can be used again


def test_a_request_of_higher_priority_goes_first() -> None:
    with open_llm(TEXT_MODEL, max_num_seqs=1) as llm:
        names = [
            llm.add_request(text, greedy_params(3), priority=rank)
            for text, rank in zip(OTHERS, (5, 0, -5), strict=True)
        ]
        ended = []
        while not llm.is_finished():
            ended += [output.request_id for output in llm.step()]
    assert ended == names[::-1]


@pytest.mark.parametrize("overlap", [False, True])
def test_an_interrupted_step_leaves_the_engine_usable(
    overlap: bool, free: RequestOutput, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_llm(TEXT_MODEL, overlap=overlap) as llm:
        executor = llm.llm_engine._core.executor
        launch, calls = executor.launch, iter(range(100))

        def interrupted(plan: Any) -> Any:
            if next(calls) == 4:
                raise KeyboardInterrupt
            return launch(plan)

        monkeypatch.setattr(executor, "launch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([TEXT, *OTHERS], greedy_params(40), use_tqdm=False)
        assert llm.is_finished()
        assert one(llm, TEXT, greedy_params(40))["token_ids"] == free["token_ids"]
        scheduler_of(llm).check()


# --- conversations ----------------------------------------------------------------------------------------------------


def test_chat_writes_what_transformers_writes(llm: LLM) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(TOKENIZER)
    conversations = [
        [{"role": "user", "content": "How many eggs?"}],
        [
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": "你好"},
            {"role": "assistant", "content": "Hi."},
            {"role": "user", "content": "And 12 more?"},
        ],
    ]
    outputs = llm.chat(conversations, greedy_params(6), use_tqdm=False)
    for conversation, output in zip(conversations, outputs, strict=True):
        ids = theirs.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False)
        assert output.prompt_token_ids == ids
        assert output.prompt == theirs.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
        assert_greedy(TEXT_MODEL, ids, output["token_ids"])
    single = llm.chat(conversations[0], greedy_params(6), use_tqdm=False)
    assert [output["token_ids"] for output in single] == [outputs[0]["token_ids"]]


def test_chat_options(llm: LLM) -> None:
    messages = [{"role": "user", "content": "2 + 2?"}]
    thinking = llm.chat(messages, greedy_params(1), use_tqdm=False)[0]
    without = llm.chat(messages, greedy_params(1), use_tqdm=False, chat_template_kwargs={"enable_thinking": False})[0]
    assert without.prompt == f"{thinking.prompt}<think>\n\n</think>\n\n"
    begun = [*messages, {"role": "assistant", "content": "It is "}]
    continued = llm.chat(
        begun, greedy_params(1), use_tqdm=False, add_generation_prompt=False, continue_final_message=True
    )[0]
    assert continued.prompt is not None and continued.prompt.endswith("assistant\nIt is ")
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    assert '"name": "add"' in str(llm.chat(messages, greedy_params(1), use_tqdm=False, tools=tools)[0].prompt)
    streamed = list(llm.stream(llm.render_chat(messages), greedy_params(5)))
    assert streamed[-1]["token_ids"] == llm.chat(messages, greedy_params(5), use_tqdm=False)[0]["token_ids"]


# --- beam search ------------------------------------------------------------------------------------------------------

Beam = tuple[list[int], float]


def plain_beam_search(prompt: list[int], params: BeamSearchParams, eos: set[int]) -> list[Beam]:
    """Beam search by vLLM's rules with transformers' logprobs: tokens and cumulative logprob of the best beams."""
    eos = set() if params.ignore_eos else eos

    def score(beam: Beam) -> float:
        length = len(beam[0]) - (beam[0][-1] in eos)
        return beam[1] / length**params.length_penalty

    live: list[Beam] = [(prompt, 0.0)]
    done: list[Beam] = []
    for _ in range(params.max_tokens):
        children = []
        for tokens, total in live:
            best = reference_logprobs("llama", tokens)[-1].topk(2 * params.beam_width)
            scored = zip(best.indices.tolist(), best.values.tolist(), strict=True)
            children += [([*tokens, token], total + logprob) for token, logprob in scored]
        done += [child for child in children if child[0][-1] in eos]
        going = [child for child in children if child[0][-1] not in eos]
        live = sorted(going, key=score, reverse=True)[: params.beam_width]
    return sorted(done + live, key=score, reverse=True)[: params.beam_width]


@pytest.fixture(scope="module")
def beam_llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """A model with 20 end tokens, so that some beams end."""
    folder = copy_of("llama", tmp_path_factory.mktemp("beams"))
    edit_config(folder, lambda config: config.update(eos_token_id=list(range(20))))
    with open_llm(folder, max_num_seqs=16) as llm:
        yield llm


@pytest.mark.parametrize(
    "params",
    [
        BeamSearchParams(beam_width=1, max_tokens=5, ignore_eos=True),
        BeamSearchParams(beam_width=3, max_tokens=8),
        BeamSearchParams(beam_width=4, max_tokens=6, ignore_eos=True),
        BeamSearchParams(beam_width=4, max_tokens=6, length_penalty=0.0),
        BeamSearchParams(beam_width=4, max_tokens=6, length_penalty=-1.5),
    ],
    ids=str,
)
def test_beam_search(beam_llm: LLM, params: BeamSearchParams) -> None:
    prompts = [prompt_of(2), prompt_of(30)]  # with the short one the length penalty matters
    reasons = set()
    for prompt, output in zip(prompts, beam_llm.beam_search(prompts, params), strict=True):
        expected = plain_beam_search(prompt, params, set(range(20)))
        assert [beam.tokens for beam in output.sequences] == [tokens for tokens, _ in expected]
        for beam, (tokens, total) in zip(output.sequences, expected, strict=True):
            assert beam.cum_logprob == pytest.approx(total, abs=1e-4)
            by_eos = tokens[-1] < 20 and not params.ignore_eos
            assert (beam.finish_reason, beam.stop_reason) == (("stop", tokens[-1]) if by_eos else ("length", None))
            reasons.add(beam.finish_reason)
    assert "length" in reasons if params.ignore_eos else "stop" in reasons
    assert beam_llm.is_finished()


def test_a_beam_of_one_is_greedy(llm: LLM, free: RequestOutput) -> None:
    (output,) = llm.beam_search(TEXT, BeamSearchParams(beam_width=1, max_tokens=12, ignore_eos=True))
    (beam,) = output.sequences
    assert beam.tokens == encode(llm, TEXT) + free["token_ids"][:12]
    assert beam.text == llm.tokenizer.decode(free["token_ids"][:12])  # type: ignore[union-attr]


# --- plan, limits, cache types ----------------------------------------------------------------------------------------


def test_plan_tells_what_opening_takes(capsys: pytest.CaptureFixture[str]) -> None:
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_cache_memory_bytes": 10**6}
    plan = LLM.plan(model_dir("llama"), kv_cache_block_size=16, max_model_len=128, **options)
    assert capsys.readouterr().out == f"{plan}\n"
    files = model_dir("llama").glob("*.safetensors")
    assert plan.weight_bytes <= sum(file.stat().st_size for file in files) < plan.weight_bytes + 20_000
    assert plan.kv_cache_bytes <= 10**6 < plan.kv_cache_bytes + plan.kv_bytes_per_token * 16
    assert "kv_cache_memory_bytes" in str(plan) and f"{plan.num_tokens:,} tokens" in str(plan)
    with open_llm("llama", num_kv_cache_blocks=-1, max_model_len=128, **options) as llm:
        assert scheduler_of(llm).config.num_blocks == plan.num_blocks


def test_a_small_step_lowers_the_default_number_of_sequences() -> None:
    with LLM(model_dir(TEXT_MODEL), device="cpu", max_num_batched_tokens=5, num_kv_cache_blocks=64) as llm:
        assert (llm.config.max_num_batched_tokens, llm.config.max_num_seqs) == (5, 5)
        outputs = llm.generate([prompt_of(9)] * 7, greedy_params(4), use_tqdm=False)
        assert [len(output["token_ids"]) for output in outputs] == [4] * 7


def test_earlier_spellings_of_options_are_keywords_of_llm() -> None:
    old: dict[str, Any] = {"kvcache_block_size": 16, "num_kvcache_blocks": 8}
    with LLM(model_dir(TEXT_MODEL), device="cpu", max_model_len=128, **old) as llm:
        config = scheduler_of(llm).config
        assert (config.block_size, config.num_blocks) == (16, 8)
    plan = LLM.plan(model_dir(TEXT_MODEL), device="cpu", max_model_len=128, **old)
    assert (plan.block_size, plan.num_blocks) == (16, 8)
    with pytest.raises(ConfigError, match="two spellings"):
        LLM(model_dir(TEXT_MODEL), device="cpu", kv_cache_block_size=32, **old)


def test_length_is_limited_by_the_model() -> None:
    with open_llm("llama", max_model_len=4096) as llm:
        assert llm.max_model_len == 512


def test_cache_in_16_bits() -> None:
    """A 16-bit cache rounds, so logprobs are compared with a tolerance."""
    prompt = prompt_of(30)
    with open_llm("llama", kv_cache_dtype="bfloat16", max_num_batched_tokens=8) as llm:
        output = one(llm, prompt, greedy_params(1, prompt_logprobs=0))
    expected = reference_logprobs("llama", prompt)
    errors = [
        abs(entries[token].logprob - expected[i, token].item())
        for i, (token, entries) in enumerate(zip(prompt[1:], (output.prompt_logprobs or [])[1:], strict=True))
        if entries is not None
    ]
    assert 1e-5 < sum(errors) / len(errors) < 0.05


# --- several callers of one engine ------------------------------------------------------------------------------------


def test_generate_keeps_the_outputs_of_others(llm: LLM, free: RequestOutput) -> None:
    name = llm.add_request(TEXT, greedy_params(3))
    outputs = llm.generate(OTHERS, greedy_params(20), use_tqdm=False)
    assert [len(output["token_ids"]) for output in outputs] == [20] * len(OTHERS)
    assert not llm.is_finished()
    (kept,) = llm.step()
    assert (kept.request_id, kept["token_ids"]) == (name, free["token_ids"][:3])
    assert llm.is_finished()


def test_two_streams_take_turns(llm: LLM, free: RequestOutput) -> None:
    turns = list(zip_longest(llm.stream(TEXT, greedy_params(6)), llm.stream(TEXT, greedy_params(9))))
    for number, outputs in zip((6, 9), zip(*turns, strict=True), strict=True):
        grown = [output["token_ids"] for output in outputs if output is not None]
        assert grown == [free["token_ids"][: len(ids)] for ids in grown]
        assert len(grown[-1]) == number
    assert llm.is_finished()


def test_streamed_logprobs_grow_to_those_of_generate(llm: LLM, free: RequestOutput) -> None:
    params = greedy_params(20, logprobs=2, prompt_logprobs=1, stop=free["text"][9:12])
    whole = one(llm, TEXT, params)
    outputs = list(llm.stream(TEXT, params))
    for output in outputs:
        completion = output.outputs[0]
        assert completion.logprobs == whole.outputs[0].logprobs[: len(completion.token_ids)]  # type: ignore[index]
    assert outputs[-1].outputs == whole.outputs
    assert outputs[-1].prompt_logprobs == whole.prompt_logprobs
