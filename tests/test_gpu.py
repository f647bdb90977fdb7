"""The same plain torch code on a CUDA device: greedy tokens equal transformers', and closing gives the memory back."""

import pytest

from tests.helpers import FAMILIES, assert_greedy, greedy_params, open_llm, scheduler_of
from tests.test_oracle import MAX_TOKENS, PAIRS, PROMPTS

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("overlap", "prefix_cache", "chunked", "tight"), PAIRS)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens(family: str, overlap: int, prefix_cache: int, chunked: int, tight: int) -> None:
    llm = open_llm(
        family,
        device="cuda",
        overlap=bool(overlap),
        enable_prefix_caching=bool(prefix_cache),
        max_num_batched_tokens=8 if chunked else 512,
        num_kvcache_blocks=7 if tight else 64,
    )
    with llm:
        for _ in range(1 + prefix_cache):
            outputs = llm.generate(PROMPTS, greedy_params(MAX_TOKENS), use_tqdm=False)
            for prompt, output in zip(PROMPTS, outputs, strict=True):
                assert_greedy(family, prompt, output["token_ids"])
        assert (scheduler_of(llm).num_preemptions > 0) == tight
        scheduler_of(llm).check()


def test_the_cache_is_sized_from_free_memory_and_given_back() -> None:
    import torch

    torch.cuda.init()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    free, total = torch.cuda.mem_get_info()
    share = 0.2 + 1 - free / total
    with open_llm("llama", device="cuda", num_kvcache_blocks=-1, gpu_memory_utilization=share, max_num_seqs=2) as llm:
        # two sequences of 256 tokens are all that can run, so no more blocks are taken than they need
        assert scheduler_of(llm).config.num_blocks == 2 * 256 // 16
        llm.generate(PROMPTS, greedy_params(MAX_TOKENS), use_tqdm=False)
        assert torch.cuda.memory_allocated() > before
    assert torch.cuda.memory_allocated() == before
