"""Cases in which an engine of several ranks must give the same answers as one rank, with any executor."""

from typing import Any

import pytest

from nanovllm import LLM, RequestOutput, SamplingParams
from nanovllm.engine.consistency import check_scheduler
from nanovllm.sampling_params import StructuredOutputs
from tests.helpers import greedy_params, scheduler_of

TEXTS = ["Natalia sold 48 clips", "Hello, how many apples", "x", "There were 12 eggs in the basket."]
JSON_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CASES: dict[str, SamplingParams] = {
    "greedy": greedy_params(24),
    "sampled": SamplingParams(temperature=1.0, top_p=0.9, top_k=50, max_tokens=16, seed=7),
    "several": SamplingParams(temperature=0.8, n=3, max_tokens=12, seed=3),
    "penalties": SamplingParams(temperature=0.0, max_tokens=16, repetition_penalty=1.3, logit_bias={5: 2.0}),
    "stops": SamplingParams(temperature=0.0, max_tokens=40, stop=["e", "\ud800"], bad_words=["a"], min_tokens=3),
    "logprobs": greedy_params(8, logprobs=3, prompt_logprobs=2),
    "choice": SamplingParams(
        temperature=0.0, max_tokens=20, structured_outputs=StructuredOutputs(choice=["green", "grey", "blue"])
    ),
    "json": SamplingParams(temperature=0.0, max_tokens=30, structured_outputs=StructuredOutputs(json=JSON_SCHEMA)),
}


def answers(llm: LLM, params: SamplingParams) -> list[RequestOutput]:
    return llm.generate(TEXTS, params, use_tqdm=False)


def assert_same(found: list[RequestOutput], wanted: list[RequestOutput]) -> None:
    for mine, theirs in zip(found, wanted, strict=True):
        assert _told(mine) == _told(theirs)
        _assert_near(mine.prompt_logprobs, theirs.prompt_logprobs)
        for ours, one in zip(mine.outputs, theirs.outputs, strict=True):
            _assert_near(ours.logprobs, one.logprobs)


def _told(output: RequestOutput) -> list[Any]:
    return [(each.token_ids, each.text, each.finish_reason, each.stop_reason) for each in output.outputs]


def _assert_near(found: Any, wanted: Any) -> None:
    assert (found is None) == (wanted is None)
    for mine, theirs in zip(found or [], wanted or [], strict=True):
        assert (mine or {}).keys() == (theirs or {}).keys()
        for token, score in (mine or {}).items():
            assert score.logprob == pytest.approx(theirs[token].logprob, abs=1e-4)


def assert_abort_harms_no_other(llm: LLM, wanted: list[RequestOutput]) -> None:
    """`wanted`: the answers of the greedy case."""
    names = [llm.add_request(text, CASES["greedy"]) for text in TEXTS]
    for _ in range(5):
        llm.step()
    llm.abort(names[1])
    done = {}
    while not llm.is_finished():
        done |= {output.request_id: output for output in llm.step()}
    assert done.keys() == set(names) - {names[1]}
    assert_same([done[names[0]], *(done[name] for name in names[2:])], [wanted[0], *wanted[2:]])
    check_scheduler(scheduler_of(llm))
