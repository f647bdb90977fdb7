"""Sampling in the whole engine: seeds, distributions, and logits processors against a loop on transformers' logits."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from nanovllm import LLM, SamplingParams
from tests.helpers import (
    TEXT_MODEL,
    assert_distributed,
    assert_greedy,
    greedy_params,
    open_llm,
    prompt_of,
    reference_logits,
    reference_logprobs,
    scheduler_of,
)

FAMILY = "qwen3"
SHARED = prompt_of(32, seed=7)
PROMPTS = [SHARED + prompt_of(9), prompt_of(5), SHARED + prompt_of(18), prompt_of(31), SHARED, prompt_of(16)]
NEVER = float("-inf")


def tokens_of(llm: LLM, prompts: list[list[int]], params: Any) -> list[list[int]]:
    return [output["token_ids"] for output in llm.generate(prompts, params, use_tqdm=False)]


# --- seeds ------------------------------------------------------------------------------------------------------------


SEEDED = [
    SamplingParams(temperature=1.0, seed=1, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=0.7, top_p=0.9, seed=2, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=1.3, top_k=20, seed=1, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=1.0, min_p=0.05, seed=2**63 + 5, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=-9, repetition_penalty=1.2, max_tokens=20, ignore_eos=True),
]


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    """The tokens of each seeded request when it runs alone in a new engine."""
    answers = []
    for prompt, params in zip(PROMPTS, SEEDED, strict=True):
        with open_llm(FAMILY, enable_prefix_caching=False) as llm:
            answers += tokens_of(llm, [prompt], params)
    return answers


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overlap": True},
        {"max_num_batched_tokens": 8},
        {"num_kv_cache_blocks": 6, "overlap": True},
        {"num_kv_cache_blocks": 6, "max_num_batched_tokens": 8},
    ],
    ids=str,
)
def test_a_seeded_request_draws_the_same_in_any_company(options: dict[str, Any], alone: list[list[int]]) -> None:
    strangers = SamplingParams(temperature=2.0, max_tokens=9, ignore_eos=True)
    with open_llm(FAMILY, **options) as llm:
        for order in ([0, 1, 2, 3, 4, 5], [5, 3, 1, 4, 2, 0]):  # the second time with prefix hits
            prompts = [PROMPTS[i] for i in order] + [SHARED, prompt_of(3)]
            outputs = tokens_of(llm, prompts, [SEEDED[i] for i in order] + [strangers] * 2)
            assert outputs[:6] == [alone[i] for i in order]
        assert (scheduler_of(llm).num_preemptions > 0) == ("num_kv_cache_blocks" in options)


def test_seeds_differ_and_completions_of_one_request_differ() -> None:
    params = [SamplingParams(seed=seed, n=4, max_tokens=12, ignore_eos=True) for seed in (1, 2)]
    with open_llm(FAMILY) as llm:
        one, two = llm.generate([SHARED, SHARED], params, use_tqdm=False)
        again = llm.generate(SHARED, params[0], use_tqdm=False)[0]
        single = llm.generate(SHARED, params[0].clone(n=1), use_tqdm=False)[0]
    texts = [tuple(completion.token_ids) for output in (one, two) for completion in output.outputs]
    assert len(set(texts)) == 8
    assert [c.token_ids for c in again.outputs] == [c.token_ids for c in one.outputs]
    assert single["token_ids"] == one.outputs[0].token_ids
    assert [completion.index for completion in one.outputs] == [0, 1, 2, 3]


def test_requests_without_a_seed_follow_the_engines() -> None:
    def run(seed: int) -> list[list[int]]:
        with open_llm(FAMILY, seed=seed) as llm:
            return tokens_of(llm, [SHARED] * 3, SamplingParams(max_tokens=12, ignore_eos=True))

    first, again, other = run(0), run(0), run(1)
    assert first == again
    assert len({tuple(tokens) for tokens in first + other}) == 6


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 1e-6},
        {"temperature": 1e-42},
        {"temperature": 5.0, "min_p": 1.0},
    ],
    ids=str,
)
def test_what_amounts_to_greedy(settings: dict[str, Any]) -> None:
    with open_llm(FAMILY) as llm:
        outputs = tokens_of(llm, PROMPTS, SamplingParams(max_tokens=10, ignore_eos=True, **settings))
    for prompt, tokens in zip(PROMPTS, outputs, strict=True):
        assert_greedy(FAMILY, prompt, tokens)


# --- distributions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.6, "top_p": 0.95}], ids=str)
def test_first_and_second_tokens_are_distributed_as_the_model_says(settings: dict[str, Any]) -> None:
    prompt = prompt_of(6)
    params = [SamplingParams(n=128, seed=seed, max_tokens=2, ignore_eos=True, **settings) for seed in range(10)]
    with open_llm(FAMILY, max_num_seqs=256, num_kv_cache_blocks=512) as llm:
        outputs = llm.generate([prompt] * len(params), params, use_tqdm=False)
    draws = np.array([completion.token_ids for output in outputs for completion in output.outputs])
    logits = reference_logits(FAMILY, prompt)[-1] / settings.get("temperature", 1.0)
    assert_distributed(draws[:, 0], _nucleus(logits, settings.get("top_p", 1.0)))
    common = np.bincount(draws[:, 0]).argmax()
    logits = reference_logits(FAMILY, [*prompt, int(common)])[-1] / settings.get("temperature", 1.0)
    assert_distributed(draws[draws[:, 0] == common, 1], _nucleus(logits, settings.get("top_p", 1.0)))


def _nucleus(logits: torch.Tensor, top_p: float) -> np.ndarray:
    """The most likely tokens up to a mass of `top_p`, renormalised: [vocab]."""
    probabilities = logits.double().softmax(dim=-1).numpy()
    order = np.argsort(-probabilities)
    before = np.cumsum(probabilities[order]) - probabilities[order]
    probabilities[order[before >= top_p]] = 0.0
    return probabilities / probabilities.sum()


# --- logits processors ------------------------------------------------------------------------------------------------

Edit = Callable[[torch.Tensor, list[int], list[int]], torch.Tensor]  # [vocab] logits, prompt, generated


def plain_loop(name: str, prompt: list[int], max_tokens: int, edit: Edit) -> list[int]:
    """Greedy decoding with transformers' logits, one forward pass per token."""
    generated: list[int] = []
    while len(generated) < max_tokens:
        logits = edit(reference_logits(name, prompt + generated)[-1].clone(), prompt, generated)
        generated.append(int(logits.argmax()))
    return generated


def penalize(repetition: float = 1.0, frequency: float = 0.0, presence: float = 0.0) -> Edit:
    def edit(logits: torch.Tensor, prompt: list[int], generated: list[int]) -> torch.Tensor:
        logits = RepetitionPenaltyLogitsProcessor(repetition)(torch.tensor([prompt + generated]), logits[None])[0]
        for token in set(generated):
            logits[token] -= frequency * generated.count(token) + presence
        return logits

    return edit


def mask(*refused: int, only: set[int] | None = None) -> Edit:
    def edit(logits: torch.Tensor, prompt: list[int], generated: list[int]) -> torch.Tensor:
        for token in range(len(logits)):
            if token in refused or (only is not None and token not in only):
                logits[token] = NEVER
        return logits

    return edit


def bias(biases: dict[int, float]) -> Edit:
    def edit(logits: torch.Tensor, prompt: list[int], generated: list[int]) -> torch.Tensor:
        for token, value in biases.items():
            logits[token] += value
        return logits

    return edit


SHAPED: dict[str, tuple[dict[str, Any], Edit]] = {
    "repetition": ({"repetition_penalty": 1.4}, penalize(repetition=1.4)),
    "frequency": ({"frequency_penalty": 1.7}, penalize(frequency=1.7)),
    "presence": ({"presence_penalty": -1.5}, penalize(presence=-1.5)),
    "all penalties": (
        {"repetition_penalty": 1.2, "frequency_penalty": 0.6, "presence_penalty": 0.9},
        penalize(1.2, 0.6, 0.9),
    ),
    "logit_bias": ({"logit_bias": {11: 6.0, 12: 5.5, 13: -100.0}}, bias({11: 6.0, 12: 5.5, 13: -100.0})),
    "allowed": ({"allowed_token_ids": list(range(0, 160, 3))}, mask(only=set(range(0, 160, 3)))),
    "nothing": ({}, lambda logits, prompt, generated: logits),
}


SHAPED_PROMPTS = [SHARED[:20] + [i + 3] for i in range(len(SHAPED))]


@pytest.fixture(scope="module")
def shaped() -> list[list[int]]:
    """The tokens that the plain loop generates for each set of parameters."""
    edits = [edit for _, edit in SHAPED.values()]
    return [plain_loop(FAMILY, prompt, 16, edit) for prompt, edit in zip(SHAPED_PROMPTS, edits, strict=True)]


@pytest.mark.parametrize("options", [{}, {"overlap": True, "num_kv_cache_blocks": 6}], ids=str)
def test_stages_in_one_batch_and_no_trace_of_them_afterwards(options: dict[str, Any], shaped: list[list[int]]) -> None:
    """Two rounds in the same rows: first all sets of parameters at once, then plain requests."""
    params = [greedy_params(16, **settings) for settings, _ in SHAPED.values()]
    with open_llm(FAMILY, max_num_seqs=len(SHAPED), **options) as llm:
        assert tokens_of(llm, SHAPED_PROMPTS, params) == shaped
        assert (scheduler_of(llm).num_preemptions > 0) == bool(options)
        plain = tokens_of(llm, SHAPED_PROMPTS, greedy_params(16))
    for prompt, tokens in zip(SHAPED_PROMPTS, plain, strict=True):
        assert_greedy(FAMILY, prompt, tokens)


def test_bad_words_of_one_and_of_several_tokens() -> None:
    prompt = "Natalia sold 48 clips"
    with open_llm(TEXT_MODEL) as llm:
        free = llm.generate(prompt, greedy_params(36), use_tqdm=False)[0]
        text, tokens = free["text"], free["token_ids"]
        assert "мир" in text and " number pl" in text, "the model has changed: choose other words"
        words = ["мир", "number pl"]
        cleaned = llm.generate(prompt, greedy_params(36, bad_words=words), use_tqdm=False)[0]
        banned = {tuple(llm.tokenizer.encode(form, False)) for word in words for form in (word, " " + word)}  # type: ignore[union-attr]

        def edit(logits: torch.Tensor, prompt: list[int], generated: list[int]) -> torch.Tensor:
            for word in banned:
                if tuple(generated[len(generated) - len(word) + 1 :] if len(word) > 1 else ()) == word[:-1]:
                    logits[word[-1]] = NEVER
            return logits

        expected = plain_loop(TEXT_MODEL, free.prompt_token_ids, 36, edit)
        assert cleaned["token_ids"] == expected != tokens
        assert "мир" not in cleaned["text"] and "number pl" not in cleaned["text"]
        again = llm.generate(prompt, greedy_params(36), use_tqdm=False)[0]
        assert again["token_ids"] == tokens


def test_logprobs_of_a_preempted_seeded_request_are_those_of_its_tokens() -> None:
    params = [params.clone(logprobs=1) for params in SEEDED]
    with open_llm(FAMILY, num_kv_cache_blocks=6, overlap=True) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        assert scheduler_of(llm).num_preemptions > 0
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        expected = reference_logprobs(FAMILY, prompt + output["token_ids"])
        for i, (entries, token) in enumerate(zip(output.outputs[0].logprobs, output["token_ids"], strict=True)):  # type: ignore[arg-type]
            assert abs(entries[token].logprob - expected[len(prompt) - 1 + i, token].item()) < 1e-4
