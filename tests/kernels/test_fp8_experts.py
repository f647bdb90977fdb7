"""Experts with fp8 weights and rounded inputs: the product on a Hopper GPU, elsewhere only compiled; what rounds inputs
also in the interpreter."""

from collections import Counter
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.kernels.elementwise.rms_norm import add_partial_sums_reference, rms_norm_reference
from nanovllm.kernels.features import gluon_usable
from nanovllm.kernels.linear.fp8_inputs import RoundedInputs, round_inputs, round_inputs_reference
from nanovllm.kernels.linear.packed import PackedWords, dequantize_reference
from nanovllm.kernels.moe.experts import experts_forward
from nanovllm.kernels.moe.fp8_slots import Blocks, norm_and_round, round_slots
from nanovllm.kernels.moe.grouped import group
from nanovllm.kernels.moe.packed import choose_kernel, fp8_serves
from nanovllm.kernels.moe.route_rows import Choice, route_rows
from nanovllm.kernels.moe.tiles import Fp8ExpertTile, fp8_expert_tiles
from nanovllm.kernels.moe.weights import PackedExperts
from tests.kernels.hopper import compile_for_hopper
from tests.kernels.packed_weights import random_packed
from tests.kernels.support import DEVICE

# from Triton 3.6's interpreter, for a loop whose bound is an argument
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
TOLERANCE = 4e-3
FORMS = {"fp8": {"group": 0}, "fp8_block": {"group": 128, "scale_rows": 128}}
COMPILE = """
from nanovllm.kernels.linear import fp8_inputs
from nanovllm.kernels.linear.packed import PackedWords
from nanovllm.kernels.moe import fp8_experts, fp8_slots, grouped
from nanovllm.kernels.moe.tiles import Fp8ExpertTile
from nanovllm.kernels.moe.weights import PackedExperts

def ignore(*_, **__):
    pass

fp8_inputs.launch = fp8_slots.launch = grouped.launch = ignore
fp8_experts.launch, fp8_experts.num_sms = compile, lambda: 132

def weight(n, k, rows, group):
    words = torch.empty(8, n, k // 4, dtype=torch.int32)
    return PackedWords("fp8", 64, words, torch.empty(8, n // rows, k // group), rows, rounds_inputs=True)

per_row = PackedExperts(weight(512, 512, 1, 512), weight(512, 256, 1, 256))
per_block = PackedExperts(weight(512, 384, 128, 128), weight(384, 256, 128, 128))
for tokens, layer, tile in (
    (1, per_row, Fp8ExpertTile(8, 1, 8, 2, 4)),
    (40, per_block, Fp8ExpertTile(16, 2, 6, 2, 2)),
    (40, per_row, Fp8ExpertTile(8, 4, 6)),
):
    x, routing = (torch.empty(tokens, size, dtype=torch.bfloat16) for size in (layer.down.shape[1], 2))
    experts = torch.empty(tokens, 2, dtype=torch.int32)
    fp8_experts.fp8_experts(x, layer, routing, experts, x, None, tiles=(tile, tile), pdl=True)
"""


def test_compiles_for_hopper(tmp_path: Path) -> None:
    found = compile_for_hopper(COMPILE, tmp_path)
    assert Counter(one.kernel for one in found) == {"_fp8_experts_kernel": 6}
    assert all(one.instructions == ("wgmma", "cp.async.bulk.tensor") for one in found)
    # 2 pairs; 8 experts + 80 // 16 blocks; 8 + 80 // 8 blocks
    assert [one.num_programs for one in found] == [2 * 8, 2 * 8, 13 * 4, 13 * 3, 18 * 2, 18 * 2]


def packed(form: str, num_experts: int, rows: int, columns: int) -> PackedWords:
    one = random_packed(num_experts, rows, columns, kind="fp8", scale_type=torch.float32, **FORMS[form])
    return one._replace(rounds_inputs=True)


def layer_of(form: str, hidden: int, size: int, num_experts: int = 6) -> PackedExperts:
    return PackedExperts(packed(form, num_experts, 2 * size, hidden), packed(form, num_experts, hidden, size))


def same(actual: RoundedInputs, expected: RoundedInputs, rows: Tensor | None = None) -> None:
    """In these rows."""
    chosen = slice(None) if rows is None else rows
    codes = (one.codes.view(torch.uint8)[chosen] for one in (actual, expected))
    assert torch.equal(*codes)
    torch.testing.assert_close(actual.scale[:, chosen], expected.scale[:, chosen])


@pytest.mark.parametrize(("form", "splits"), [("fp8", 0), ("fp8_block", 3)])
def test_norm_and_round(form: str, splits: int) -> None:
    torch.manual_seed(splits)
    x, norm_weight = (torch.randn(*shape, device=DEVICE).bfloat16() for shape in ((3, 384), (384,)))
    sums = torch.randn(splits, 3, 384, device=DEVICE) if splits else None
    added = x.clone() if sums is None else add_partial_sums_reference(x, sums)
    normed, rounded = norm_and_round(x, norm_weight, 1e-6, packed(form, 2, 128, 384), partial_sums=sums)
    torch.testing.assert_close(x, added)
    torch.testing.assert_close(normed, rms_norm_reference(x, norm_weight, 1e-6))
    same(rounded, round_inputs(normed, len(rounded.scale), 64))


@pytest.mark.parametrize("form", FORMS)
def test_round_slots(form: str) -> None:
    torch.manual_seed(0)
    num_tokens, num_experts, block_m = 7, 4, 8
    experts = torch.rand(num_tokens, num_experts).argsort(dim=1)[:, :2].to(DEVICE, torch.int32).contiguous()
    experts[-1, 0] = num_experts
    weight = packed(form, num_experts, 128, 256)
    pairs, block_experts = group(experts, num_experts, block_m=block_m)
    hidden = torch.randn(len(pairs), 256, device=DEVICE).bfloat16()
    rounded = round_slots(hidden, Blocks(block_experts, pairs), experts.numel(), weight)
    used = (block_experts >= 0).repeat_interleave(block_m) & (pairs < experts.numel())
    assert used.sum() == experts.numel() - 1
    same(rounded, round_inputs(hidden, len(rounded.scale), 64), used)

    every = experts.view(-1)
    rounded = round_slots(hidden[: len(every)], Blocks(every), len(every), weight)
    same(rounded, round_inputs(hidden[: len(every)], len(rounded.scale), 64), every < num_experts)


@pytest.mark.parametrize(("form", "hidden"), [("fp8", 1152), ("fp8_block", 1152), ("fp8", 256)])
def test_rounded_beside_the_router(form: str, hidden: int) -> None:
    torch.manual_seed(hidden)
    x, norm_weight, router = (
        torch.randn(*shape, device=DEVICE).bfloat16() for shape in ((2, hidden), (hidden,), (6, hidden))
    )
    options = {"choice": Choice(2, True), "arrived": torch.zeros(2, dtype=torch.int32, device=DEVICE)}
    options |= {"partial_sums": torch.randn(3, 2, hidden, device=DEVICE)}
    plain = route_rows(x, norm_weight, 1e-6, router, **options)
    routed = route_rows(x, norm_weight, 1e-6, router, **options, rounded_for=packed(form, 6, 128, hidden))
    for one, other in zip(plain[:4], routed[:4], strict=True):
        assert torch.equal(one, other)
    assert plain.rounded is None and routed.rounded is not None
    same(routed.rounded, round_inputs(routed.normed, len(routed.rounded.scale), 64))


def test_which_weights_are_served() -> None:
    layer = layer_of("fp8_block", 256, 128)
    assert fp8_serves(layer) and fp8_serves(layer_of("fp8", 256, 128))
    assert choose_kernel(layer, 8, 2, torch.bfloat16, gluon=True) == "fp8"
    assert choose_kernel(layer, 8, 2, torch.bfloat16, gluon=False) == "tiled"
    assert choose_kernel(layer, 8, 2, torch.float32, gluon=True) == "tiled"
    exact = layer.down._replace(rounds_inputs=False)
    for other in (layer._replace(down=exact), layer_of("fp8", 256, 64), layer._replace(down_bias=torch.zeros(6, 256))):
        assert not fp8_serves(other)


# --- on a GPU ---------------------------------------------------------------------------------------------------------


def hidden_reference(x: Tensor, layer: PackedExperts, experts: Tensor) -> Tensor:
    """What gate_up gives, [T, k, size] float32; zeros for a choice that is no expert."""
    gate_ups = dequantize_reference(layer.gate_up)
    out = torch.zeros(*experts.shape, layer.down.shape[2], device=x.device)
    rounded = round_inputs_reference(x, layer.gate_up.scale.shape[-1])
    for expert in range(len(gate_ups)):
        tokens, choices = (experts == expert).nonzero(as_tuple=True)
        gate, up = (rounded[tokens] @ gate_ups[expert].T).chunk(2, dim=1)
        out[tokens, choices] = (F.gelu(gate, approximate="tanh") if layer.gelu else F.silu(gate)) * up
    return out


def down_reference(hidden: Tensor, layer: PackedExperts, weights: Tensor, experts: Tensor) -> Tensor:
    """[T, k, H] float32 of [T, k, size]; zeros for a choice that is no expert."""
    downs = dequantize_reference(layer.down)
    out = torch.zeros(*experts.shape, layer.down.shape[1], device=hidden.device)
    rounded = round_inputs_reference(hidden.flatten(0, 1), layer.down.scale.shape[-1]).view(hidden.shape)
    for expert in range(len(downs)):
        at = (experts == expert).nonzero(as_tuple=True)
        out[at] = (rounded[at] @ downs[expert].T) * weights[at].float()[:, None]
    return out


def check(actual: Tensor, expected: Tensor) -> None:
    assert (actual.float() - expected).norm() <= TOLERANCE * expected.norm()


def compare(layer: PackedExperts, experts: Tensor, tile: Fp8ExpertTile | None, dtype: torch.dtype) -> None:
    """`tile` None: as they are chosen. What gate_up gives differs in its last bits, and some of it is then rounded to
    another number of fp8: `down` is compared with the product of the kernel's own `hidden`."""
    from nanovllm.kernels.moe import fp8_experts

    num_tokens, size = len(experts), layer.down.shape[1]
    x, residual = (torch.randn(num_tokens, size, device=DEVICE).to(dtype) for _ in range(2))
    residual /= 1024  # about as large as what the experts add to it
    weights, experts = torch.rand(experts.shape, device=DEVICE).to(dtype), experts.to(DEVICE, torch.int32).contiguous()
    num_experts = len(layer.down.words)
    hidden = torch.zeros(*experts.shape, layer.down.shape[2], device=DEVICE, dtype=dtype)

    def keep_hidden(slots: Tensor, blocks: Blocks, num_pairs: int, weight: PackedWords, *, pdl: bool) -> RoundedInputs:
        pairs = torch.arange(num_pairs, device=DEVICE) if blocks.pairs is None else blocks.pairs.long()
        expert = blocks.experts.repeat_interleave(len(slots) // len(blocks.experts))
        used = (expert >= 0) & (expert < num_experts) & (pairs < num_pairs)
        hidden.flatten(0, 1)[pairs[used]] = slots[used]
        return round_slots(slots, blocks, num_pairs, weight, pdl=pdl)

    tiles = fp8_expert_tiles(num_tokens, num_experts, 2) if tile is None else (tile, tile)
    with mock.patch.object(fp8_experts, "round_slots", keep_hidden):
        out = fp8_experts.fp8_experts(
            x, layer, weights, experts, torch.empty_like(x), residual, tiles=tiles, pdl=gluon_usable()
        )
    check(hidden, hidden_reference(x, layer, experts))
    expected = down_reference(hidden, layer, weights, experts)
    check(out, expected.sum(1) + residual.float())
    rounded = round_inputs(x, layer.gate_up.scale.shape[-1], layer.gate_up.distance)
    blocks = fp8_experts.blocks_of(experts, num_experts, tiles[0], pdl=gluon_usable())
    sums = fp8_experts.fp8_expert_sums(rounded, layer, weights, blocks, tiles, by_choice=True, pdl=gluon_usable())
    chosen = ((experts >= 0) & (experts < num_experts)).T
    check(sums[chosen], expected.transpose(0, 1)[chosen])
    if tile is None:
        options = {"gelu": layer.gelu, "residual": residual, "out": torch.empty_like(x)}
        assert torch.equal(out, experts_forward(x, layer.gate_up, layer.down, weights, experts, **options, pdl=True))


TILES = (
    None,
    Fp8ExpertTile(8, 1, 6, 2, 4),
    Fp8ExpertTile(8, 2, 6, 2, 2),
    Fp8ExpertTile(16, 4, 6),
    Fp8ExpertTile(64, 2, 8),
    Fp8ExpertTile(128, 2, 6),
)


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tile", range(len(TILES)))
def test_against_torch(form: str, tile: int) -> None:
    """Odd numbers of tokens, experts without tokens, all tokens on the same experts, and choices that are no expert."""
    if not gluon_usable():
        pytest.skip("needs a GPU of the kind the kernel is written for")
    torch.manual_seed(tile)
    for hidden, size in ((1280, 384), (256, 1152)):
        layer = layer_of(form, hidden, size)
        for num_tokens in (1, 3, 17, 64, 300):
            anywhere = torch.rand(num_tokens, 6).argsort(dim=1)[:, :2]
            compare(layer, anywhere, TILES[tile], torch.bfloat16)
            compare(layer._replace(gelu=True), anywhere % 3, TILES[tile], torch.float16)
            compare(layer, torch.tensor([[4, 1]]).expand(num_tokens, 2), TILES[tile], torch.bfloat16)
            anywhere[-1] = torch.tensor([6, -1])
            compare(layer, anywhere, TILES[tile], torch.bfloat16)


@pytest.mark.gpu
def test_many_tiles_per_program(monkeypatch: pytest.MonkeyPatch) -> None:
    if not gluon_usable():
        pytest.skip("needs a GPU of the kind the kernel is written for")
    from nanovllm.kernels.moe import fp8_experts

    monkeypatch.setattr(fp8_experts, "num_sms", lambda: 3)
    torch.manual_seed(0)
    for num_tokens in (1, 200):
        experts = torch.rand(num_tokens, 6).argsort(dim=1)[:, :2]
        compare(layer_of("fp8_block", 1280, 384), experts, fp8_expert_tiles(num_tokens, 6, 2)[0], torch.bfloat16)
