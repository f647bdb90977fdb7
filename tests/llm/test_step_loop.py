"""`LLM`: streams, the step loop, and several callers of one engine."""

from itertools import zip_longest
from typing import Any

import pytest

from nanovllm import LLM, RequestOutput, SamplingParams
from nanovllm.engine.consistency import check_scheduler
from tests.helpers import TEXT_MODEL, greedy_params, open_llm, scheduler_of
from tests.llm.support import OTHERS, TEXT, one

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
    check_scheduler(scheduler_of(llm))
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
        check_scheduler(scheduler_of(llm))
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
        check_scheduler(scheduler_of(llm))


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
