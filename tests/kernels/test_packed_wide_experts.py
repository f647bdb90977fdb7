"""The warp-specialized kernel for MXFP4 experts: compared to plain torch on a Hopper GPU; elsewhere only compiled."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from nanovllm.kernels.features import gluon_usable
from nanovllm.kernels.linear.packed import dequantize_reference
from nanovllm.kernels.linear.wide_tile import WideTile
from nanovllm.kernels.moe.experts import experts_forward, experts_forward_reference
from nanovllm.kernels.moe.weights import PackedExperts
from tests.kernels.hopper import compile_for_hopper
from tests.kernels.packed_weights import CASES, random_packed

COMPILE = """
from nanovllm.kernels.linear.packed import PackedWords
from nanovllm.kernels.moe import packed_wide
from nanovllm.kernels.moe.weights import PackedExperts

# of each tile one product, because each takes seconds: gate_up, gate_up, down, gate_up
def compile_some(kernel, grid, *args, **options):
    is_gate_up = len(args[1].shape) == 3
    if kernel is packed_wide._gather_kernel or is_gate_up == (tile.block_m != 32):
        compile(kernel, grid, *args, **options)

# what is tested elsewhere is not compiled
packed_wide.launch, packed_wide.num_sms = compile_some, lambda: 132
packed_wide.group = lambda *_, block_m, largest_first, pdl: (torch.empty(8 * block_m, dtype=torch.int32), choices)
packed_wide.sum_choices = lambda *_, pdl: None

def weight(rows, columns):
    words = torch.empty(8, rows, columns // 8, dtype=torch.int32)
    scale = torch.empty(8, rows, columns // 32, dtype=torch.uint8)
    return PackedWords("fp4", 16 if columns % 128 else 32, words, scale)

choices = torch.empty(8, dtype=torch.int32)
bias = torch.empty(8, 1024, dtype=torch.bfloat16)
layer = PackedExperts(weight(1024, 320), weight(320, 512), bias, bias[:, :320], alpha=1.7, limit=7.0)
x, routing = torch.empty(40, 320, dtype=torch.bfloat16), torch.empty(40, 2, dtype=torch.bfloat16)
experts = torch.empty(40, 2, dtype=torch.int32)
for tile in packed_wide.EXPERT_TILES:
    packed_wide.packed_wide_experts(x, layer, routing, experts, x, None, tile, pdl=True)
"""


def test_compiles_for_hopper(tmp_path: Path) -> None:
    compiled = compile_for_hopper(COMPILE, tmp_path)
    gathers, products = compiled[::2], compiled[1::2]
    assert [one.kernel for one in gathers] == 4 * ["_gather_kernel"]
    assert [one.num_programs for one in gathers] == [8 * 16, 8 * 16, 8 * 32, 8 * 64]
    assert [one.kernel for one in products] == 4 * ["_packed_wide_experts_kernel"]
    assert [one.num_programs for one in products] == [8 * 16, 8 * 8, 8 * 2, 8 * 6]
    assert all(one.instructions == ("wgmma", "cp.async.bulk.tensor") for one in products)


def layer_of(hidden: int, size: int, num_experts: int) -> PackedExperts:
    """As in gpt-oss."""
    shapes = (2 * size, hidden), (hidden, size)
    weights = (random_packed(num_experts, *shape, **CASES["mxfp4"]) for shape in shapes)
    biases = (torch.randn(num_experts, shape[0], device="cuda").bfloat16() for shape in shapes)
    return PackedExperts(*weights, *biases, alpha=1.7, limit=7.0)


def compare(layer: PackedExperts, experts: Tensor, tile: WideTile | None, *, in_parts: bool = False) -> None:
    """`tile` None: with the kernel that is chosen."""
    (_, hidden, _), num_tokens = layer.down.shape, experts.shape[0]
    x, residual = (torch.randn(num_tokens, hidden, device="cuda").bfloat16() for _ in range(2))
    weights, experts = torch.rand(experts.shape, device="cuda").bfloat16(), experts.to("cuda", torch.int32).contiguous()
    options = layer._asdict()
    gate_up, down = options.pop("gate_up"), options.pop("down")
    dense = (dequantize_reference(weight) for weight in (gate_up, down))
    expected = experts_forward_reference(x, *dense, weights, experts, residual=residual, **options).double()
    if tile is None:
        actual = experts_forward(x, gate_up, down, weights, experts, residual=residual, pdl=True, **options)
    else:
        from nanovllm.kernels.moe.packed_wide import packed_wide_experts

        if in_parts:
            parts = packed_wide_experts(x, layer, weights, experts, x, None, tile, in_parts=True, pdl=True)
            actual = residual + parts.double().sum(0)
            assert (actual - expected).abs().max() / expected.abs().max() < 2e-2
        out = torch.empty_like(x)
        actual = packed_wide_experts(x, layer, weights, experts, out, residual, tile, pdl=True)
    error = (actual.double() - expected).abs().max() / expected.abs().max()
    assert error < 2e-2, error


@pytest.mark.gpu
@pytest.mark.parametrize("tile", [0, 1, 2, 3, None])
@pytest.mark.parametrize(("hidden", "size"), [(2880, 320), (1024, 384), (192, 64), (448, 640)])
def test_against_torch(hidden: int, size: int, tile: int | None) -> None:
    """Odd numbers of tokens, experts without tokens, all tokens on the same experts, and choices that are no expert."""
    if not gluon_usable():
        pytest.skip("needs a GPU of the kind the kernel is written for")
    from nanovllm.kernels.moe.packed_wide import EXPERT_TILES

    torch.manual_seed(hidden)
    layer, wide_tile = layer_of(hidden, size, 6), None if tile is None else EXPERT_TILES[tile]
    for num_tokens in (1, 3, 8, 17, 64, 131, 300):
        anywhere = torch.rand(num_tokens, 6).argsort(dim=1)[:, :2]
        compare(layer, anywhere, wide_tile, in_parts=True)
        compare(layer, anywhere % 3, wide_tile)
        compare(layer, torch.tensor([[4, 1]]).expand(num_tokens, 2), wide_tile)
        anywhere[-1] = torch.tensor([6, -1])
        compare(layer, anywhere, wide_tile)


@pytest.mark.gpu
@pytest.mark.parametrize("tile", [0, 1, 2, 3])
def test_many_tiles_per_program(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if not gluon_usable():
        pytest.skip("needs a GPU of the kind the kernel is written for")
    from nanovllm.kernels.moe import packed_wide

    monkeypatch.setattr(packed_wide, "num_sms", lambda: 3)
    torch.manual_seed(0)
    compare(layer_of(576, 448, 6), torch.rand(200, 6).argsort(dim=1)[:, :2], packed_wide.EXPERT_TILES[tile])
