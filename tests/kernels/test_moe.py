"""The experts in a fixed number of launches equal a loop over tokens and their experts."""

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from nanovllm.kernels.moe import tiles as moe_tiles
from nanovllm.kernels.moe.experts import experts_forward, experts_forward_reference
from nanovllm.kernels.moe.grouped import group, grouped_forward
from nanovllm.kernels.moe.tiles import Tile, Tiles, choose_tiles
from nanovllm.kernels.moe.weights import ExpertWeights
from nanovllm.layers.moe import MoE, choose_experts
from nanovllm.layers.moe_spec import ClampedGlu, MoeSpec
from tests.kernels.support import DEVICE
from tests.layers.build import context

# from Triton 3.6's interpreter, for a loop whose bound is an argument
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")

HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter's tl.dot reads bfloat16 as integers
TILES = [moe_tiles.DECODE_TILES, moe_tiles.MEDIUM_TILES, moe_tiles.LARGE_TILES, moe_tiles.PREFILL_TILES]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


class Case(NamedTuple):
    x: Tensor
    gate_up: Tensor
    down: Tensor
    weights: Tensor
    experts: Tensor


BIASED = {"alpha": 1.702, "limit": 0.7}  # a clamped activation, with biases


def biases_of(case: Case) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(len(case.x))
    made = {
        f"{name}_bias": torch.randn(getattr(case, name).shape[:2], generator=generator) for name in ("gate_up", "down")
    }
    return {name: bias.to(DEVICE, case.x.dtype) for name, bias in made.items()}


def make_case(
    num_tokens: int, top_k: int, num_experts: int, *, hidden: int = 48, size: int = 24, dtype: torch.dtype
) -> Case:
    generator = torch.Generator().manual_seed(num_tokens * 100 + top_k * 10 + num_experts)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    experts = torch.rand(num_tokens, num_experts, generator=generator).argsort(dim=1)[:, :top_k]
    case = Case(
        x=normal(num_tokens, hidden).to(dtype),
        gate_up=(normal(num_experts, 2 * size, hidden) / hidden**0.5).to(dtype),
        down=(normal(num_experts, hidden, size) / size**0.5).to(dtype),
        weights=torch.rand(num_tokens, top_k, generator=generator).to(dtype),
        experts=experts.contiguous(),
    )
    return Case(*(tensor.to(DEVICE) for tensor in case))


def check(actual: Tensor, case: Case, residual: Tensor | None = None, **form: Any) -> None:
    expected = experts_forward_reference(*case, residual=residual, **form).double()
    error = (actual.double() - expected).abs().max() / expected.abs().max()
    assert error < TOLERANCE[actual.dtype]


@pytest.mark.parametrize(
    "num_tokens, top_k, num_experts, dtype",
    [
        (1, 1, 6, torch.float32),
        (1, 8, 16, torch.bfloat16),
        (4, 3, 6, torch.float32),
        (5, 2, 16, torch.float32),  # most experts have no token
        (7, 8, 16, HALF),
        (40, 1, 6, torch.float16),
        (37, 4, 6, HALF),
        (80, 4, 4, HALF),  # several blocks per expert
        (40, 6, 6, torch.float32),  # every expert has every token
    ],
)
def test_equals_token_by_token(num_tokens: int, top_k: int, num_experts: int, dtype: torch.dtype) -> None:
    case = make_case(num_tokens, top_k, num_experts, dtype=dtype)
    check(experts_forward(*case), case)


@pytest.mark.parametrize("num_tokens", [3, 20])
def test_biases_and_the_clamped_activation(num_tokens: int) -> None:
    case = make_case(num_tokens, 2, 6, dtype=torch.float32)
    case.experts[0, 1] = -1
    form = {**BIASED, **biases_of(case)}
    check(experts_forward(*case, **form), case, **form)


@pytest.mark.parametrize("num_tokens", [3, 20])
def test_gelu(num_tokens: int) -> None:
    case = make_case(num_tokens, 2, 6, dtype=torch.float32)
    check(experts_forward(*case, gelu=True), case, gelu=True)


@pytest.mark.parametrize("hidden, size, dtype", [(136, 72, HALF), (264, 20, torch.float32), (20, 264, torch.float32)])
@pytest.mark.parametrize("num_tokens", [1, 7])
def test_sizes_of_several_tiles(num_tokens: int, hidden: int, size: int, dtype: torch.dtype) -> None:
    case = make_case(num_tokens, 2, 3, hidden=hidden, size=size, dtype=dtype)
    check(experts_forward(*case), case)


@pytest.mark.parametrize("tiles", TILES)
def test_every_tile_shape(tiles: Tiles) -> None:
    case = make_case(20, 2, 3, hidden=144, size=72, dtype=HALF)
    out = torch.empty_like(case.x)
    layer = ExpertWeights(case.gate_up, case.down)
    assert grouped_forward(case.x, layer, case.weights, case.experts, out, None, tiles, pdl=False) is out
    check(out, case)


@pytest.mark.parametrize("num_tokens", [1, 20])
def test_all_tokens_on_one_expert(num_tokens: int) -> None:
    case = make_case(num_tokens, 2, 6, dtype=torch.float32)
    case.experts.fill_(3)
    check(experts_forward(*case), case)


@pytest.mark.parametrize("num_tokens", [3, 6])
def test_int32_and_choices_of_no_expert(num_tokens: int) -> None:
    case = make_case(num_tokens, 2, 6, dtype=torch.float32)
    case = case._replace(experts=case.experts.to(torch.int32))
    case.experts[1] = -1
    case.experts[2, 1] = 6
    check(experts_forward(*case), case)
    assert not experts_forward(*case)[1].any()


@pytest.mark.parametrize("num_tokens", [2, 11])
def test_residual_and_out(num_tokens: int) -> None:
    case = make_case(num_tokens, 2, 6, dtype=torch.float32)
    residual = torch.randn(case.x.shape, device=DEVICE)
    before = residual.clone()
    out = torch.empty_like(case.x)
    assert experts_forward(*case, out=out, residual=residual) is out
    check(out, case, before)
    assert torch.equal(residual, before)
    assert experts_forward(*case, residual=residual) is residual
    assert torch.equal(residual, out)


def test_no_tokens() -> None:
    case = make_case(0, 2, 6, dtype=torch.float32)
    assert experts_forward(*case).shape == (0, 48)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_deterministic_bits_do_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    case = make_case(70, 3, 6, dtype=dtype)
    whole = experts_forward(*case, deterministic=True)
    check(whole, case)
    for rows in (slice(0, 1), slice(41, 43), slice(17, 60)):
        part = case._replace(x=case.x[rows], weights=case.weights[rows], experts=case.experts[rows])
        assert torch.equal(experts_forward(*part, deterministic=True), whole[rows])


@pytest.mark.parametrize("num_pairs, num_experts, block_m", [(1, 6, 16), (33, 16, 16), (1500, 6, 64), (2048, 128, 16)])
def test_groups(num_pairs: int, num_experts: int, block_m: int) -> None:
    """Each (token, expert) pair once, in a block of its expert, in order, in as few blocks as possible."""
    if DEVICE == "cpu":
        num_experts = min(num_experts, 32)
    experts = torch.randint(0, num_experts, (num_pairs,), generator=torch.Generator().manual_seed(num_pairs))
    pairs, block_experts = group(experts.to(DEVICE), num_experts, block_m=block_m)
    blocks = pairs.view(-1, block_m).tolist()
    found: list[tuple[int, int]] = []
    for block, expert in zip(blocks, block_experts.tolist(), strict=True):
        assert -1 <= expert < num_experts
        if expert >= 0:
            found += [(expert, pair) for pair in block if pair != num_pairs]
    assert found == sorted((expert, pair) for pair, expert in enumerate(experts.tolist()))
    used = (block_experts >= 0).sum().item()
    assert used == sum(-(-count // block_m) for count in torch.bincount(experts).tolist())
    assert (block_experts[used:] == -1).all()


def test_largest_first() -> None:
    """Experts with more pairs come first, else the order is that of the experts."""
    counts = [3, 0, 9, 3, 20, 1]
    experts = torch.tensor([expert for expert, count in enumerate(counts) for _ in range(count)])
    experts = experts[torch.randperm(len(experts), generator=torch.Generator().manual_seed(0))]
    pairs, block_experts = group(experts.to(DEVICE), len(counts), block_m=16, largest_first=True)
    assert block_experts.tolist() == [4, 4, 2, 0, 3, 5] + [-1] * (len(block_experts) - 6)
    found = [pair for pair in pairs[: 6 * 16].tolist() if pair != len(experts)]
    assert found == [pair for expert in (4, 2, 0, 3, 5) for pair in (experts == expert).nonzero()[:, 0].tolist()]


@pytest.mark.parametrize("biased", [False, True])
def test_equals_the_layer_on_a_cpu(biased: bool) -> None:
    spec = MoeSpec(hidden_size=48, intermediate_size=24, num_experts=6, num_experts_per_token=2, norm_topk_prob=True)
    if biased:
        spec = replace(spec, bias=True, activation=ClampedGlu(**BIASED))
    layer = MoE(spec, context())
    generator = torch.Generator().manual_seed(0)
    for tensor in (layer.gate_up.tensor, layer.down.tensor, *layer._biases.values()):
        tensor.normal_(0.0, 0.3, generator=generator)
    x = torch.randn(12, 48, generator=generator)
    weights, experts = choose_experts(torch.randn(12, 6, generator=generator), 2, normalize=True)
    inputs = (x, layer.gate_up.tensor, layer.down.tensor, weights, experts)
    form = {name: bias.to(DEVICE) for name, bias in layer._biases.items()} | (BIASED if biased else {})
    actual = experts_forward(*(tensor.to(DEVICE) for tensor in inputs), **form)
    torch.testing.assert_close(actual.cpu(), layer.forward(x, weights, experts), atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 24])
@pytest.mark.parametrize("pdl", [False, True])
def test_one_graph_serves_any_routing(num_tokens: int, pdl: bool) -> None:
    case = make_case(num_tokens, 4, 16, dtype=torch.bfloat16)
    out = torch.empty_like(case.x)
    experts_forward(*case, out=out, pdl=pdl)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        experts_forward(*case, out=out, pdl=pdl)
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        choices = torch.rand(num_tokens, 16, generator=generator).argsort(dim=1)[:, :4]
        case.experts.copy_(choices if seed else torch.full_like(choices, 5))
        out.zero_()
        graph.replay()
        check(out, case)


def test_tiles_follow_the_tokens_per_expert() -> None:
    sizes = [choose_tiles(mean, torch.bfloat16, deterministic=False).block_m for mean in (0.1, 4, 16, 60, 1000)]
    assert sizes == sorted(sizes) and sizes[0] == 16 and sizes[-1] == 128
    deterministic = {choose_tiles(mean, torch.bfloat16, deterministic=True) for mean in (0.1, 4, 16, 60, 1000)}
    assert len(deterministic) == 1 and isinstance(deterministic.pop().down, Tile)
