"""Greedy tokens equal transformers', family by family, whatever way the engine takes to them."""

from itertools import product

import pytest

from tests.helpers import (
    FAMILIES,
    assert_greedy,
    generate_by_reference,
    greedy_params,
    open_llm,
    prompt_of,
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
        num_kvcache_blocks=7 if tight else 64,
    )
    with llm:
        for round_ in range(1 + prefix_cache):  # the second one finds the first one's blocks
            outputs = llm.generate(PROMPTS, greedy_params(MAX_TOKENS), use_tqdm=False)
            for prompt, output in zip(PROMPTS, outputs, strict=True):
                assert len(output["token_ids"]) == MAX_TOKENS
                assert_greedy(family, prompt, output["token_ids"])
            assert (scheduler_of(llm).num_preemptions > 0) == tight
            if not prefix_cache:
                assert all(output.num_cached_tokens == 0 for output in outputs)
            if round_ and not tight:
                assert [o.num_cached_tokens for o in outputs] == [(len(p) - 1) // 16 * 16 for p in PROMPTS]
        scheduler_of(llm).check()
        assert scheduler_of(llm).block_manager.num_available == scheduler_of(llm).config.num_blocks


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loop_of_transformers_agrees(family: str) -> None:
    with open_llm(family) as llm:
        (output,) = llm.generate(PROMPTS[0], greedy_params(MAX_TOKENS), use_tqdm=False)
    assert output["token_ids"] == generate_by_reference(family, PROMPTS[0], MAX_TOKENS)
