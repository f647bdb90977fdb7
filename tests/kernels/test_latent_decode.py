"""Decode attention over latents against plain torch: output, and writes to the cache."""

import random
from pathlib import Path

import pytest
import torch

from nanovllm.kernels.attention.latent_decode import (
    MAX_SPLITS,
    latent_decode,
    latent_decode_reference,
    latent_store,
    latent_store_reference,
    num_splits,
)
from tests.kernels.hopper import compile_for_hopper
from tests.kernels.support import DEVICE

# from Triton 3.6's interpreter, for a loop whose bound is an argument
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")

LENGTHS = (1, 0, 17, 50)  # the newest token included; 0 = padding
ROTATED, PLAIN, MAX_POSITION, BLOCK_SIZE = 16, 12, 128, 16
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3}


class Inputs:
    """Sequences in a cache that is NaN wherever nothing may be read."""

    def __init__(self, heads: int, latent: int, dtype: torch.dtype, block_size: int = BLOCK_SIZE) -> None:
        torch.manual_seed(0)
        needed = [-(-length // block_size) for length in LENGTHS]
        numbers = random.Random(0).sample(range(1, sum(needed) + 1), sum(needed))
        blocks = torch.zeros(len(LENGTHS) + 1, max(needed), dtype=torch.int32)
        cache = torch.full((sum(needed) + 1, block_size, latent + ROTATED), float("nan"))
        for row, (length, count) in enumerate(zip(LENGTHS, needed, strict=True), start=1):
            for i in range(count):
                block = blocks[row, i] = numbers.pop()
                filled = min(block_size, length - i * block_size)
                cache[block, :filled] = torch.randn(filled, latent + ROTATED)
        self.cache, self.blocks = cache.to(DEVICE, dtype), blocks.to(DEVICE)
        rows = [row if length else 0 for row, length in enumerate(LENGTHS, start=1)]
        self.rows = torch.tensor(rows, dtype=torch.int32, device=DEVICE)
        self.positions = torch.tensor(LENGTHS, dtype=torch.int32, device=DEVICE) - 1
        self.absorbed = torch.randn(heads, len(LENGTHS), latent).to(DEVICE, dtype)
        queries = torch.randn(len(LENGTHS), heads * (PLAIN + ROTATED) + latent + ROTATED).to(DEVICE, dtype)
        self.rotated = queries[:, : heads * (PLAIN + ROTATED)].unflatten(1, (heads, -1))[..., PLAIN:]
        self.new = queries[:, -latent - ROTATED :]
        angles = torch.rand(MAX_POSITION, ROTATED // 2) * 6.3
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1).to(DEVICE)

    def arguments(self) -> dict[str, torch.Tensor]:
        return {name: getattr(self, name) for name in ("rows", "positions", "blocks", "cos_sin")}


@pytest.mark.parametrize(
    ("heads", "latent", "block_size", "dtype", "splits"),
    [(4, 32, 16, torch.float32, 1), (40, 24, 48, torch.float16, 4)],
)
def test_decode(heads: int, latent: int, block_size: int, dtype: torch.dtype, splits: int) -> None:
    inputs = Inputs(heads, latent, dtype, block_size)
    scale = 0.7 * latent**-0.5
    queries = (inputs.absorbed, inputs.rotated, inputs.cache)
    out = latent_decode(*queries, scale=scale, splits=splits, **inputs.arguments())
    expected = latent_decode_reference(*queries, scale=scale, **inputs.arguments())
    real = inputs.positions >= 0
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(out[:, real], expected[:, real], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("latent", "dtype"), [(24, torch.float32), (64, torch.float16)])
def test_store(latent: int, dtype: torch.dtype) -> None:
    ours, theirs = Inputs(4, latent, dtype), Inputs(4, latent, dtype)
    latent_store(ours.new, ours.cache, **ours.arguments())
    latent_store_reference(theirs.new, theirs.cache, **theirs.arguments())
    torch.testing.assert_close(ours.cache, theirs.cache, rtol=1e-3, atol=1e-6, equal_nan=True)


def test_splits() -> None:
    assert num_splits(1, 20, num_sms=132) == MAX_SPLITS
    assert num_splits(8, 20, num_sms=132) == 64
    assert num_splits(64, 20, num_sms=132) == 8
    assert num_splits(264, 16, num_sms=132) == 1
    assert num_splits(66, 128, num_sms=132) == 1


COMPILE = """
from nanovllm.kernels.attention import latent_decode as module
from nanovllm.kernels.moe import route_groups
module.launch = route_groups.launch = compile
def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype)
numbers = empty(8, dtype=torch.int32)
same = dict(rows=numbers, positions=numbers, blocks=empty(9, 64, dtype=torch.int32))
same["cos_sin"] = empty(4096, 64, dtype=torch.float32)
cache, queries = empty(64, 32, 576), empty(8, 20, 256)
module.latent_decode(empty(20, 8, 512), queries[..., 192:], cache, scale=0.1, splits=8, **same)
module.latent_store(empty(8, 576), cache, **same)
logits, bias = empty(8, 256, dtype=torch.float32), empty(256, dtype=torch.float32)
how = dict(top_k=8, num_groups=8, num_chosen_groups=4, normalize=True, scaling=2.5, least_sum=1e-20)
route_groups.route_in_groups(logits, bias, dtype=torch.bfloat16, pdl=True, **how)
"""


def test_compiles_for_hopper(tmp_path: Path) -> None:
    """Attention with the sizes of GLM-4.7-Flash, the router with those of DeepSeek-V3."""
    found = [one.kernel for one in compile_for_hopper(COMPILE, tmp_path)]
    attention = ["_latent_decode_kernel", "_latent_merge_kernel", "_latent_store_kernel"]
    assert found == [*attention, "_route_groups_kernel"]
