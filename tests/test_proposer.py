"""Proposed tokens change how many steps a generation takes and nothing else: tokens and logprobs are those without."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.engine.consistency import check_scheduler
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import StructuredOutputs
from tests.helpers import TEXT_MODEL, assert_greedy, greedy_params, open_llm, prompt_of, scheduler_of

PROMPTS = [prompt_of(length, vocab_size=300) for length in (37, 5, 16, 1, 33)]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}}, "required": ["a", "b"]}


@dataclass
class TwoTokens:
    """Proposes the next two tokens of texts it has seen; each third time the first is wrong, each third the second."""

    texts: list[list[int]] = field(default_factory=list)
    num_asked: int = 0

    def propose(self, token_ids: Sequence[int], max_tokens: int) -> list[int]:
        count = len(token_ids)
        self.num_asked += 1
        following = next((text[count : count + 2] for text in self.texts if text[:count] == token_ids), [])
        wrong = self.num_asked % 3
        return [(token + 1) % 150 if index == wrong else token for index, token in enumerate(following)][:max_tokens]


def texts_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [[*output.prompt_token_ids, *part.token_ids] for output in outputs for part in output.outputs]


def count_steps(llm: LLM, params: Sequence[SamplingParams]) -> tuple[list[RequestOutput], int]:
    launch, launched = llm.llm_engine._core.executor.launch, []
    llm.llm_engine._core.executor.launch = lambda plan: launched.append(plan) or launch(plan)  # type: ignore[method-assign]
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    check_scheduler(scheduler_of(llm))
    return outputs, len(launched)


def assert_same_with_proposals(settings: list[dict[str, Any]], *, fewer_steps: bool = True, **options: Any) -> None:
    params = [SamplingParams(**({"max_tokens": 24, "seed": 3} | one)) for one in settings]
    proposer = TwoTokens()
    with open_llm(TEXT_MODEL, **options) as llm:
        expected, num_steps = count_steps(llm, params)
    proposer.texts = texts_of(expected)
    with open_llm(TEXT_MODEL, proposer=proposer, **options) as llm:
        outputs, num_verifying_steps = count_steps(llm, params)
    assert proposer.num_asked > 10
    if fewer_steps:
        assert num_verifying_steps < num_steps
    for output, wanted in zip(outputs, expected, strict=True):
        for part, wanted_part in zip(output.outputs, wanted.outputs, strict=True):
            assert part.token_ids == wanted_part.token_ids and part.text == wanted_part.text
            assert (part.finish_reason, part.stop_reason) == (wanted_part.finish_reason, wanted_part.stop_reason)
            assert (part.logprobs is None) == (wanted_part.logprobs is None)
            for entries, wanted_entries in zip(part.logprobs or [], wanted_part.logprobs or [], strict=True):
                assert list(entries) == list(wanted_entries)
                for token, entry in entries.items():
                    assert entry.logprob == pytest.approx(wanted_entries[token].logprob, abs=1e-4)
                    assert entry.rank == wanted_entries[token].rank


GREEDY = {"temperature": 0.0, "ignore_eos": True}
SAMPLED = {"temperature": 0.9, "ignore_eos": True}
KINDS: dict[str, list[dict[str, Any]]] = {
    "greedy": [GREEDY] * 5,
    "sampled": [SAMPLED, SAMPLED | {"top_k": 5}, SAMPLED | {"top_p": 0.7}, SAMPLED | {"min_p": 0.1}, GREEDY],
    "several completions": [SAMPLED | {"n": 3}] * 5,
    "penalties": [
        *(GREEDY | {"repetition_penalty": 1.8}, SAMPLED | {"frequency_penalty": 1.5, "presence_penalty": 0.5}),
        *(GREEDY | {"frequency_penalty": 2.0}, GREEDY | {"logit_bias": {7: 30.0}, "presence_penalty": 2.0}, GREEDY),
    ],
    "logprobs": [SAMPLED | {"logprobs": 3}, GREEDY | {"logprobs": 0}, GREEDY, SAMPLED | {"logprobs": 1}, GREEDY],
    "lengths": [GREEDY | {"max_tokens": count} for count in (1, 2, 3, 4, 23)],
}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_output_does_not_change(kind: str, overlap: bool) -> None:
    assert_same_with_proposals(KINDS[kind], overlap=overlap, fewer_steps=not overlap and kind != "lengths")


@pytest.mark.parametrize("overlap", [False, True])
def test_stop_tokens_stop_strings_min_tokens_and_bad_words(overlap: bool) -> None:
    with open_llm(TEXT_MODEL) as llm:
        (plain,) = llm.generate([PROMPTS[0]], SamplingParams(**SAMPLED, seed=3, max_tokens=24), use_tqdm=False)
        tokens = plain.outputs[0].token_ids
        pieces = [llm.tokenizer.decode([token]) for token in tokens]
    letters = [piece for piece in pieces[8:] if piece.strip().isalpha()]
    settings = [
        SAMPLED | {"stop_token_ids": [tokens[10]]},
        SAMPLED | {"stop_token_ids": tokens[:20], "min_tokens": 9},
        SAMPLED | {"stop": [letters[0]], "logprobs": 0},
        SAMPLED | {"bad_words": [letters[0], letters[-1]]},
        {"temperature": 0.9, "stop": [letters[-1]], "min_tokens": 5},
    ]
    assert_same_with_proposals(settings, overlap=overlap, fewer_steps=False)
    prompts = [PROMPTS[0]] * 5
    proposer = TwoTokens([[*PROMPTS[0], *tokens]])
    params = [SamplingParams(**({"max_tokens": 24, "seed": 3} | one)) for one in settings]
    with open_llm(TEXT_MODEL, overlap=overlap) as llm:
        expected = llm.generate(prompts, params, use_tqdm=False)
    with open_llm(TEXT_MODEL, overlap=overlap, proposer=proposer) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [o.outputs[0] for o in outputs[:2]] == [o.outputs[0] for o in expected[:2]]
    assert [(o["text"], o["token_ids"]) for o in outputs] == [(o["text"], o["token_ids"]) for o in expected]
    assert expected[0].outputs[0].stop_reason == tokens[10] and expected[2].outputs[0].stop_reason == letters[0]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_grammar(overlap: bool) -> None:
    form = StructuredOutputs(json=SCHEMA)
    settings = [
        *({"structured_outputs": form, "max_tokens": 60}, {"structured_outputs": form, "max_tokens": 60, "seed": 8}),
        *({"structured_outputs": form, "max_tokens": 60, "min_tokens": 30}, GREEDY),
        {"structured_outputs": StructuredOutputs(choice=["yes", "no"]), "logprobs": 1},
    ]
    assert_same_with_proposals(settings, overlap=overlap, fewer_steps=False)
    with open_llm(TEXT_MODEL, proposer=TwoTokens()) as llm:
        (output,) = llm.generate([PROMPTS[0]], SamplingParams(**settings[0], seed=3), use_tqdm=False)
    assert output.outputs[0].finish_reason == "length" or json.loads(output["text"])


@pytest.mark.parametrize("overlap", [False, True])
def test_chunked_preempted_and_from_the_prefix_cache(overlap: bool) -> None:
    family, prompts = "qwen3", [prompt_of(length) for length in (37, 16, 20, 1, 33)]
    options = {"overlap": overlap, "max_num_batched_tokens": 9, "num_kv_cache_blocks": 7}
    proposer = TwoTokens()
    with open_llm(family, proposer=proposer, **options) as llm:
        for _ in range(2):  # the second round has proposals
            outputs = llm.generate(prompts, greedy_params(20), use_tqdm=False)
            for prompt, output in zip(prompts, outputs, strict=True):
                assert_greedy(family, prompt, output["token_ids"])
            proposer.texts = texts_of(outputs)
        assert scheduler_of(llm).num_preemptions > 0
        check_scheduler(scheduler_of(llm))
