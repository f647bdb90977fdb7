"""Decode attention over latents, and the products around it, against plain torch: output, and writes to the cache."""

import random
from pathlib import Path

import pytest
import torch

from nanovllm.kernels.attention.latent_decode import (
    FEW_SPLITS,
    MAX_SPLITS,
    latent_decode,
    latent_decode_reference,
    latent_parts,
    num_splits,
)
from nanovllm.kernels.attention.latent_rows import (
    absorb_and_store,
    absorb_reference,
    merge_and_project,
    merge_and_project_reference,
)
from nanovllm.kernels.attention.latent_store import latent_store, latent_store_reference
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
        self.queries = queries[:, : heads * (PLAIN + ROTATED)].unflatten(1, (heads, -1))
        self.rotated = self.queries[..., PLAIN:]
        self.norm_weight = torch.randn(latent).to(DEVICE, dtype)
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
    latent_store(ours.new, ours.cache, ours.norm_weight, 1e-5, **ours.arguments())
    latent_store_reference(theirs.new, theirs.cache, theirs.norm_weight, 1e-5, **theirs.arguments())
    torch.testing.assert_close(ours.cache, theirs.cache, rtol=2e-3, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize(("heads", "latent", "dtype"), [(4, 24, torch.float32), (3, 96, torch.float16)])
def test_absorb_and_store(heads: int, latent: int, dtype: torch.dtype) -> None:
    ours, theirs = Inputs(heads, latent, dtype), Inputs(heads, latent, dtype)
    kv_b = torch.randn(heads, PLAIN + 20, latent).to(DEVICE, dtype)
    absorbed = absorb_and_store(ours.queries, kv_b, ours.new, ours.cache, ours.norm_weight, 1e-5, **ours.arguments())
    expected = absorb_reference(theirs.queries[..., :PLAIN], kv_b[:, :PLAIN])
    torch.testing.assert_close(absorbed, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    latent_store_reference(theirs.new, theirs.cache, theirs.norm_weight, 1e-5, **theirs.arguments())
    torch.testing.assert_close(ours.cache, theirs.cache, rtol=2e-3, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize(("value", "dtype", "splits"), [(20, torch.float32, 2), (32, torch.float16, 16)])
def test_merge_and_project(value: int, dtype: torch.dtype, splits: int) -> None:
    """The parts of a sequence that is shorter than there are parts, too."""
    inputs = Inputs(4, 32, dtype)
    up_v = torch.randn(4, PLAIN + value, 32).to(DEVICE, dtype)[:, PLAIN:]
    how = dict(scale=0.2, splits=splits, **inputs.arguments())
    parts, sums = latent_parts(inputs.absorbed, inputs.rotated, inputs.cache, **how)
    out = merge_and_project(parts, sums, up_v, positions=inputs.positions)
    real = inputs.positions >= 0
    expected = merge_and_project_reference(parts[:, :, real], sums[:, :, real], up_v)
    torch.testing.assert_close(out[real], expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    # the same as merging first
    merged = latent_decode(inputs.absorbed, inputs.rotated, inputs.cache, **how)
    expected = torch.bmm(merged.double(), up_v.double().transpose(1, 2)).transpose(0, 1).flatten(1)
    torch.testing.assert_close(out[real].double(), expected[real], rtol=1e-2, atol=1e-2)


def test_splits() -> None:
    assert num_splits(1, 20, num_sms=132) == FEW_SPLITS
    assert num_splits(1, 20, num_sms=132, long=True) == MAX_SPLITS
    assert num_splits(64, 20, num_sms=132) == 8
    assert num_splits(264, 16, num_sms=132) == 1
    assert num_splits(66, 128, num_sms=132) == 1


def test_splits_on_hopper() -> None:
    """The fastest of those measured on an H200 with about 1,000 positions, and more parts for long sequences."""
    found = {n: num_splits(n, 20, num_sms=132, hopper=True) for n in (1, 8, 64, 256)}
    assert found == {1: 16, 8: 8, 64: 2, 256: 1}
    assert [num_splits(n, 20, num_sms=132, hopper=True, long=True) for n in (1, 8)] == [64, 16]


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "splits"), [(20, 1), (20, 4), (16, 2), (16, 8), (40, 1)])
def test_on_hopper(heads: int, splits: int) -> None:
    from nanovllm.kernels.features import gluon_usable

    if not gluon_usable():
        pytest.skip("the kernel runs on Hopper")
    torch.manual_seed(0)
    lengths = (1, 0, 64, 65, 300, 1000)
    cache = torch.randn(256, 32, 576, device="cuda").bfloat16()
    blocks = torch.randperm(255, device="cuda")[: 6 * 32].add(1).view(6, 32).int()
    rows, positions = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in (range(6), lengths))
    angles = torch.rand(1024, 32, device="cuda") * 6.3
    same = dict(rows=rows, positions=positions - 1, blocks=blocks, cos_sin=torch.cat([angles.cos(), angles.sin()], -1))
    absorbed = torch.randn(heads, 6, 512, device="cuda").bfloat16()
    rotated = torch.randn(6, heads, 256, device="cuda").bfloat16()[..., 192:]
    out = latent_decode(absorbed, rotated, cache, scale=0.06, splits=splits, hopper=True, pdl=True, **same)
    expected = latent_decode_reference(absorbed, rotated, cache, scale=0.06, **same)
    real = positions > 0
    torch.testing.assert_close(out[:, real], expected[:, real], rtol=2e-2, atol=2e-2)


COMPILE = """
from nanovllm.kernels.attention import latent_decode, latent_decode_hopper, latent_rows, latent_store
from nanovllm.kernels.moe import route_groups
for module in (latent_decode, latent_decode_hopper, latent_rows, latent_store, route_groups):
    module.launch = compile
def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype)
numbers = empty(8, dtype=torch.int32)
same = dict(rows=numbers, positions=numbers, blocks=empty(9, 64, dtype=torch.int32), pdl=True)
same["cos_sin"] = empty(4096, 64, dtype=torch.float32)
cache, queries, kv_b = empty(64, 32, 576), empty(8, 20, 256), empty(20, 448, 512)
latent_decode.latent_decode(empty(20, 8, 512), queries[..., 192:], cache, scale=0.1, splits=8, **same)
latent_decode.latent_parts(empty(20, 8, 512), queries[..., 192:], cache, scale=0.1, splits=1, hopper=True, **same)
latent_decode.latent_parts(empty(20, 8, 512), queries[..., 192:], cache, scale=0.1, splits=2, hopper=True, **same)
latent_store.latent_store(empty(8, 576), cache, empty(512), 1e-6, **same)
latent_rows.absorb_and_store(queries, kv_b, empty(8, 576), cache, empty(512), 1e-6, **same)
parts, sums = empty(32, 20, 8, 512, dtype=torch.float32), empty(32, 20, 8, dtype=torch.float32)
latent_rows.merge_and_project(parts, sums, kv_b[:, 192:], positions=numbers, pdl=True)
logits, bias = empty(8, 256, dtype=torch.float32), empty(256, dtype=torch.float32)
how = dict(top_k=8, num_groups=8, num_chosen_groups=4, normalize=True, scaling=2.5, least_sum=1e-20)
route_groups.route_in_groups(logits, bias, dtype=torch.bfloat16, pdl=True, **how)
"""


def test_compiles_for_hopper(tmp_path: Path) -> None:
    """Attention with the sizes of GLM-4.7-Flash, the router with those of DeepSeek-V3."""
    found = compile_for_hopper(COMPILE, tmp_path)
    hopper = ["_latent_decode_hopper_kernel"] * 2
    around = ["_latent_store_kernel", "_absorb_kernel", "_project_kernel"]
    names = ["_latent_decode_kernel", "_latent_merge_kernel", *hopper, *around, "_route_groups_kernel"]
    assert [one.kernel for one in found] == names
    assert all("wgmma" in one.instructions for one in found if one.kernel in hopper)
