"""`LLM`: what an output contains, and its finish reasons."""

from typing import Any

import pytest

from nanovllm import LLM, RequestOutput, SamplingParams
from tests.helpers import TEXT_MODEL, assert_greedy, greedy_params, open_llm, prompt_of
from tests.llm.support import OTHERS, TEXT, one

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


def test_logprobs_of_named_tokens(llm: LLM) -> None:
    """Named tokens have the values that they have among the most likely ones, in a batch with rows that name none."""
    likely = one(llm, TEXT, greedy_params(2, logprobs=100)).outputs[0]
    assert likely.logprobs is not None
    shared = set.intersection(*(set(entry) for entry in likely.logprobs))
    named = sorted(shared)[:5]
    assert len(named) >= 2
    params = greedy_params(2, logprobs=0, logprob_token_ids=[*named, named[0]])
    both = llm.generate([TEXT, TEXT], [params, greedy_params(2, logprobs=3)], use_tqdm=False)
    first, second = (output.outputs[0] for output in both)
    assert first.token_ids == second.token_ids == likely.token_ids
    for entry, whole, token in zip(first.logprobs or [], likely.logprobs, likely.token_ids, strict=True):
        assert set(entry) == {token, *named}
        for id, logprob in entry.items():
            assert logprob.logprob == pytest.approx(whole[id].logprob, abs=1e-5)
            assert logprob.rank == (whole[id].rank if id == token else None)
    assert all(3 <= len(entry) <= 4 for entry in second.logprobs or [])


def test_tokens_of_logprobs_are_spelled_out(llm: LLM) -> None:
    output = one(llm, TEXT, greedy_params(5, logprobs=2, prompt_logprobs=1))
    decode = llm.tokenizer.decode_token  # type: ignore[union-attr]
    for entries in (output.outputs[0].logprobs or []) + (output.prompt_logprobs or [])[1:]:
        assert entries
        assert all(entry.decoded_token == decode(token) for token, entry in entries.items())
