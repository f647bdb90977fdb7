"""Norm and rotation of keys and their store with their values, against plain torch."""

import pytest
import torch

from nanovllm.kernels.attention.rope_store import rope_store, rope_store_reference
from tests.kernels.support import DEVICE

FP8 = torch.float8_e4m3fn
POSITIONS = [0, 15, 16, 47, -1, 48, 95, 96, 31, -1]
ROWS = [1, 1, 1, 1, 0, 1, 1, 1, 2, 2]  # the row of a padding token may be anything
NUM_BLOCKS, MAX_POSITION = 32, 128


def cos_sin_table(head_dim: int) -> torch.Tensor:
    angles = torch.rand(MAX_POSITION, head_dim // 2) * 6.3
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def quarter_turns(head_dim: int) -> torch.Tensor:
    """Rotations that only swap the halves and change signs, so that nothing is rounded."""
    turns = torch.randint(4, (MAX_POSITION, head_dim // 2))
    cos, sin = torch.tensor([1.0, 0, -1, 0]), torch.tensor([0.0, 1, 0, -1])
    return torch.cat([cos[turns], sin[turns]], dim=-1)


def run_both(qkv, cache_dtype, table, *, heads, kv_heads, block_size, norm=None):
    """(cache, scales) after the kernel and after the reference; both start from the same random values."""
    head_dim = qkv.shape[2]
    cache = torch.randn(2, NUM_BLOCKS, kv_heads, block_size, head_dim).to(cache_dtype)
    scales = torch.randn(cache.shape[:4]).bfloat16() if cache_dtype == FP8 else None
    max_blocks = -(-MAX_POSITION // block_size)
    blocks = torch.randperm(NUM_BLOCKS - 1)[: 3 * max_blocks].view(3, max_blocks) + 1
    results = []
    for function in (rope_store, rope_store_reference):
        state = [None if t is None else t.clone().to(DEVICE) for t in (cache, scales)]
        function(
            qkv.to(DEVICE),
            *state,
            rows=torch.tensor(ROWS, dtype=torch.int32, device=DEVICE),
            positions=torch.tensor(POSITIONS, dtype=torch.int32, device=DEVICE),
            blocks=blocks.int().to(DEVICE),
            k_norm=None if norm is None else norm.to(DEVICE),
            eps=1e-6,
            cos_sin=table.to(DEVICE),
            num_heads=heads,
            num_kv_heads=kv_heads,
        )
        results.append(state)
    return results


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size", "dtype", "normed"),
    [
        (4, 2, 128, 32, torch.float32, True),
        (14, 2, 64, 16, torch.float32, False),
        (3, 3, 80, 48, torch.float32, False),
        (5, 1, 96, 64, torch.float16, True),
        (16, 8, 128, 32, torch.bfloat16, True),
        (2, 1, 256, 32, torch.float32, True),
    ],
)
def test_against_reference(heads, kv_heads, head_dim, block_size, dtype, normed):
    torch.manual_seed(0)
    qkv = torch.randn(len(POSITIONS), heads + 2 * kv_heads, head_dim).to(dtype)
    norm = torch.randn(head_dim).to(dtype) if normed else None
    shape = {"heads": heads, "kv_heads": kv_heads, "block_size": block_size}
    (cache_1, _), (cache_2, _) = run_both(qkv, dtype, cos_sin_table(head_dim), norm=norm, **shape)
    # one unit in the last place (the interpreter truncates to bfloat16 instead of rounding)
    tolerance = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(cache_1, cache_2, rtol=tolerance, atol=1e-6)
    # copied values are equal; slots of no token are unchanged
    assert torch.equal(cache_1[1], cache_2[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_without_rounding_every_bit_is_the_references(dtype):
    torch.manual_seed(1)
    qkv = torch.randn(len(POSITIONS), 4 + 2 * 2, 64).to(dtype)
    (cache_1, _), (cache_2, _) = run_both(qkv, dtype, quarter_turns(64), heads=4, kv_heads=2, block_size=16)
    assert torch.equal(cache_1, cache_2)


@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_fp8_cache_without_rounding(head_dim):
    """Values that fp8 represents exactly, times a power of two as the scale, so that the interpreter rounds nothing."""
    torch.manual_seed(2)
    kv_heads, heads = 2, 4
    qkv = torch.randn(len(POSITIONS), heads + 2 * kv_heads, head_dim).clamp(-400, 400).to(FP8).float()
    qkv[:, heads:, head_dim // 2] = 448.0  # the largest of its head: the scale is 1 before the next line
    qkv *= torch.exp2(torch.randint(-6, 3, qkv.shape[:2])).unsqueeze(-1)
    kernel, reference = run_both(
        qkv.bfloat16(), FP8, quarter_turns(head_dim), heads=heads, kv_heads=kv_heads, block_size=32
    )
    assert torch.equal(kernel[1], reference[1])
    assert torch.equal(kernel[0].view(torch.uint8), reference[0].view(torch.uint8))


def test_fp8_scale_of_zeros_is_not_zero():
    qkv = torch.zeros(len(POSITIONS), 4, 64)
    kernel, reference = run_both(qkv, FP8, quarter_turns(64), heads=2, kv_heads=1, block_size=32)
    torch.testing.assert_close(kernel[1], reference[1], rtol=2**-7, atol=0.0)
    assert torch.equal(kernel[0].view(torch.uint8), reference[0].view(torch.uint8))


@pytest.mark.gpu
def test_fp8_cache_on_random_values():
    torch.manual_seed(3)
    qkv = torch.randn(len(POSITIONS), 32 + 2 * 8, 128).bfloat16()
    norm = torch.rand(128).bfloat16()
    kernel, reference = run_both(qkv, FP8, cos_sin_table(128), norm=norm, heads=32, kv_heads=8, block_size=32)
    torch.testing.assert_close(kernel[1], reference[1], rtol=2**-7, atol=0.0)
    torch.testing.assert_close(kernel[0].float(), reference[0].float(), rtol=2**-3, atol=2**-9)
    assert (kernel[0].view(torch.uint8) != reference[0].view(torch.uint8)).float().mean() < 1e-3
