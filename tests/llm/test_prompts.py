"""`LLM`: forms of a prompt and conversations."""

import gc
from pathlib import Path
from typing import Any

import pytest
import transformers

from nanovllm import LLM, RequestOutput
from nanovllm.engine.consistency import check_scheduler
from nanovllm.errors import RequestError
from tests.helpers import (
    TEXT_MODEL,
    TOKENIZER,
    assert_greedy,
    copy_of,
    greedy_params,
    open_llm,
    prompt_of,
    scheduler_of,
)
from tests.llm.support import OTHERS, TEXT, encode, one

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
        check_scheduler(scheduler_of(llm))


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
        check_scheduler(scheduler_of(llm))


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
