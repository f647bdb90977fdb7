"""Routing and grouping in one launch against the two that it replaces."""

import pytest
import torch

from nanovllm.kernels.moe.grouped import group
from nanovllm.kernels.moe.route import route
from nanovllm.kernels.moe.route_blocks import blocks_serve, route_blocks
from tests.kernels.support import DEVICE


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "block_m", "normalize"),
    [(1, 5, 2, 8, False), (3, 128, 8, 8, True), (19, 24, 3, 8, True), (33, 6, 6, 16, False), (16, 128, 8, 8, True)],
)
def test_same_as_route_and_group(num_tokens: int, num_experts: int, top_k: int, block_m: int, normalize: bool) -> None:
    torch.manual_seed(num_tokens)
    logits = torch.randn(num_tokens, num_experts, device=DEVICE).bfloat16()
    logits[:, 2] = logits[:, 1]  # among equals the lowest expert comes first
    weights, blocks = route_blocks(logits, top_k, normalize=normalize, block_m=block_m)
    expected, experts = route(logits, top_k, normalize=normalize)
    torch.testing.assert_close(weights, expected)
    pairs, block_experts = group(experts, num_experts, block_m=block_m)
    assert torch.equal(blocks.experts, block_experts) and blocks.pairs is not None
    used = int((block_experts >= 0).sum()) * block_m
    assert torch.equal(blocks.pairs[:used], pairs[:used])


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "block_m"), [(3, 5, 2, 8), (64, 128, 8, 16), (37, 24, 3, 8), (33, 6, 6, 16)]
)
def test_several_programs_and_partial_sums(num_tokens: int, num_experts: int, top_k: int, block_m: int) -> None:
    torch.manual_seed(num_tokens)
    # the interpreter rounds to bfloat16 in another way: numbers that need no rounding
    sums = torch.randint(-16, 16, (4, num_tokens, num_experts), device=DEVICE).float() / 16
    logits = sums.sum(0).bfloat16()
    arrived = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    expected, experts = route(logits, top_k, normalize=True)
    pairs, block_experts = group(experts, num_experts, block_m=block_m)
    options = {"normalize": True, "block_m": block_m, "arrived": arrived}
    for given in (logits, sums):
        weights, blocks = route_blocks(given, top_k, dtype=torch.bfloat16, **options)
        torch.testing.assert_close(weights, expected)
        assert arrived == 0 and torch.equal(blocks.experts, block_experts) and blocks.pairs is not None
        used = int((block_experts >= 0).sum()) * block_m
        assert torch.equal(blocks.pairs[:used], pairs[:used])


def test_logits_that_are_no_numbers() -> None:
    """Such a token may be given any experts; those of others do not change."""
    logits = torch.randn(3, 8, device=DEVICE).bfloat16()
    _, expected = route(logits, 2, normalize=True)
    logits[1] = float("nan")
    _, blocks = route_blocks(logits, 2, normalize=True, block_m=8)
    assert blocks.pairs is not None
    found = {
        (pair, expert)
        for expert, row in zip(blocks.experts.tolist(), blocks.pairs.view(-1, 8).tolist(), strict=True)
        for pair in row
        if expert >= 0 and pair < 6
    }
    own = {(2 * token + i, expected[token, i].item()) for token in (0, 2) for i in range(2)}
    assert own <= found and all(pair // 2 == 1 for pair, _ in found - own)


def test_served() -> None:
    assert blocks_serve(16, 128) and blocks_serve(8, 256) and not blocks_serve(17, 128) and not blocks_serve(16, 160)
    assert blocks_serve(64, 128, several=True) and not blocks_serve(65, 128, several=True)
