"""Greedy tokens and logprobs equal those of transformers, for every family and every mode of the engine."""

from itertools import product

import pytest
from torch import Tensor

from nanovllm import Logprob, SamplingParams
from nanovllm.engine.consistency import check_scheduler
from tests.helpers import (
    FAMILIES,
    assert_greedy,
    generate_by_reference,
    greedy_params,
    open_llm,
    prompt_of,
    reference_logprobs,
    scheduler_of,
)

MAX_TOKENS = 20
SHARED = prompt_of(32, seed=7)  # two full blocks
PROMPTS = [
    SHARED + prompt_of(19),  # several blocks
    prompt_of(15),
    prompt_of(1),
    SHARED + prompt_of(1),
    prompt_of(16),
    prompt_of(17),
    SHARED,
    SHARED[:16] + prompt_of(20),
]

# overlap, prefix cache, chunked prefill, preemption: every pair of values of every two axes
PAIRS = [(0, 0, 0, 0), (0, 1, 1, 1), (1, 0, 1, 1), (1, 1, 0, 1), (1, 1, 1, 0)]
CASES = [("llama", *way) for way in product((0, 1), repeat=4)]
CASES += [(family, *way) for family in FAMILIES if family != "llama" for way in PAIRS]


@pytest.mark.parametrize(("family", "overlap", "prefix_cache", "chunked", "tight"), CASES)
def test_greedy_tokens(family: str, overlap: int, prefix_cache: int, chunked: int, tight: int) -> None:
    llm = open_llm(
        family,
        overlap=bool(overlap),
        enable_prefix_caching=bool(prefix_cache),
        max_num_batched_tokens=8 if chunked else 512,
        num_kv_cache_blocks=7 if tight else 64,
    )
    with llm:
        for round_ in range(1 + prefix_cache):  # the second round finds the blocks of the first
            outputs = llm.generate(PROMPTS, greedy_params(MAX_TOKENS), use_tqdm=False)
            for prompt, output in zip(PROMPTS, outputs, strict=True):
                assert len(output["token_ids"]) == MAX_TOKENS
                assert_greedy(family, prompt, output["token_ids"])
            assert (scheduler_of(llm).num_preemptions > 0) == tight
            if not prefix_cache:
                assert all(output.num_cached_tokens == 0 for output in outputs)
            if round_ and not tight:
                assert [o.num_cached_tokens for o in outputs] == [(len(p) - 1) // 16 * 16 for p in PROMPTS]
        check_scheduler(scheduler_of(llm))
        assert scheduler_of(llm).block_manager.num_available == scheduler_of(llm).config.num_blocks


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loop_of_transformers_agrees(family: str) -> None:
    with open_llm(family) as llm:
        (output,) = llm.generate(PROMPTS[0], greedy_params(MAX_TOKENS), use_tqdm=False)
    expected = generate_by_reference(family, PROMPTS[0], MAX_TOKENS)
    assert output["token_ids"] == expected
    assert len(set(expected)) > 2, "a model that repeats itself proves little"


# --- logprobs ---------------------------------------------------------------------------------------------------------

WAYS = {
    "whole": {},
    "chunked": {"max_num_batched_tokens": 8},
    "overlapped, chunked, preempted": {"overlap": True, "max_num_batched_tokens": 8, "num_kv_cache_blocks": 7},
}


def assert_scores(entries: dict[int, Logprob], expected: Tensor, token: int, num_top: int) -> None:
    """Compare one position's logprobs, the token and the `num_top` most likely, to [vocab] reference logprobs."""
    values, ids = expected.topk(num_top)
    assert set(entries) == {token, *ids.tolist()}
    assert next(iter(entries)) == token
    for other, entry in entries.items():
        assert abs(entry.logprob - expected[other].item()) < 1e-4
        assert entry.rank == (expected > expected[other]).sum().item() + 1


@pytest.mark.parametrize(
    ("family", "way"),
    [("llama", "chunked")] + [(family, way) for family in FAMILIES for way in WAYS if way != "chunked"],
)
def test_logprobs(family: str, way: str) -> None:
    """Logprobs of prompt and completion; requests of one batch ask for different numbers of them."""
    wishes = [(5, 3), (0, None), (None, 0), (2, 7), (None, None)]
    params = [greedy_params(MAX_TOKENS, logprobs=a, prompt_logprobs=b) for a, b in wishes]
    prompts = [PROMPTS[0], PROMPTS[3], SHARED, PROMPTS[0], PROMPTS[5]]
    with open_llm(family, **WAYS[way]) as llm:
        llm.generate(PROMPTS[3:4], greedy_params(1), use_tqdm=False)  # puts the shared prefix into the cache
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert (scheduler_of(llm).num_preemptions > 0) == ("preempted" in way)
    for output, (num_top, num_prompt_top) in zip(outputs, wishes, strict=True):
        prompt, completion = output.prompt_token_ids, output.outputs[0]
        assert_greedy(family, prompt, completion.token_ids)
        expected = reference_logprobs(family, prompt + completion.token_ids)
        if num_top is None:
            assert completion.logprobs is None and completion.cumulative_logprob is None
        else:
            assert completion.logprobs is not None and len(completion.logprobs) == MAX_TOKENS
            total = 0.0
            for i, (entries, token) in enumerate(zip(completion.logprobs, completion.token_ids, strict=True)):
                assert_scores(entries, expected[len(prompt) - 1 + i], token, num_top)
                total += entries[token].logprob
            assert completion.cumulative_logprob == pytest.approx(total)
        if num_prompt_top is None:
            assert output.prompt_logprobs is None
            assert output.num_cached_tokens > 0 or prompt[:16] != SHARED[:16] or "preempted" in way
        else:
            assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(prompt)
            assert output.prompt_logprobs[0] is None
            for i, entries in enumerate(output.prompt_logprobs[1:], 1):
                assert entries is not None
                assert_scores(entries, expected[i - 1], prompt[i], num_prompt_top)


def test_logprobs_are_the_models_own_whatever_shapes_the_draw() -> None:
    """Logprobs are computed before temperature, penalties and masks, as is vLLM's default."""
    params = SamplingParams(
        temperature=0.3, top_k=5, seed=1, max_tokens=10, ignore_eos=True, logprobs=2,
        repetition_penalty=1.5, logit_bias={7: 5.0}, allowed_token_ids=list(range(40)),
    )  # fmt: skip
    with open_llm("llama") as llm:
        (output,) = llm.generate(PROMPTS[1], params, use_tqdm=False)
    expected = reference_logprobs("llama", output.prompt_token_ids + output["token_ids"])
    for i, (entries, token) in enumerate(zip(output.outputs[0].logprobs, output["token_ids"], strict=True)):  # type: ignore[arg-type]
        assert_scores(entries, expected[len(PROMPTS[1]) - 1 + i], token, 2)


def test_a_prompt_of_one_token_has_no_scores() -> None:
    with open_llm("llama") as llm:
        (output,) = llm.generate(PROMPTS[2], greedy_params(3, prompt_logprobs=5), use_tqdm=False)
    assert output.prompt_logprobs == [None]


def test_completions_of_one_prompt_share_its_scores() -> None:
    with open_llm("llama") as llm:
        (output,) = llm.generate(SHARED, greedy_params(3, n=3, prompt_logprobs=1, logprobs=1), use_tqdm=False)
        assert scheduler_of(llm).block_manager.num_hit_tokens == 2 * 16  # the others do not compute it again
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(SHARED)
    expected = reference_logprobs("llama", SHARED + output["token_ids"])
    for completion in output.outputs:
        assert completion.token_ids == output["token_ids"]
        for i, entries in enumerate(completion.logprobs or []):
            assert_scores(entries, expected[len(SHARED) - 1 + i], completion.token_ids[i], 1)
