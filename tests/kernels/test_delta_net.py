"""The kernels of the gated delta net against the plain form, which tests/test_oracle.py compares with transformers."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

from nanovllm.kernels.delta_net.chunk_factors import chunk_factors
from nanovllm.kernels.delta_net.head_norm import norm_heads, norm_heads_reference
from nanovllm.kernels.delta_net.sequences import CHUNK
from nanovllm.kernels.delta_net.weights import DeltaNetShape, DeltaNetWeights
from nanovllm.kernels.features import dependent_launch
from nanovllm.layers.delta_net import DeltaNet
from nanovllm.layers.delta_net_kernels import DeltaNetKernels
from nanovllm.layers.delta_net_spec import DeltaNetSpec
from tests.kernels.delta_net_inputs import STEPS, UNTOUCHED, Part, chunk, decode, make_state, num_tokens, sequences_of
from tests.kernels.support import DEVICE
from tests.layers.build import context

SMALL = DeltaNetSpec(
    hidden_size=8, num_key_heads=2, num_value_heads=4, key_dim=8, value_dim=16, kernel_size=4, norm_eps=1e-6
)
ODD = replace(SMALL, num_key_heads=1, num_value_heads=2, key_dim=24, value_dim=40, kernel_size=3)
FULL = replace(SMALL, num_key_heads=1, num_value_heads=2, key_dim=128, value_dim=128)
# the interpreter's dot products read bfloat16 as integers
HALVES = [torch.float16, torch.bfloat16] if DEVICE == "cuda" else [torch.float16]
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2**-7, torch.bfloat16: 2**-4}

# from Triton 3.6's interpreter, for a loop whose bound is an argument
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")


class Layer:
    """The plain form and the kernels of one layer, with random weights, inputs and states."""

    def __init__(self, spec: DeltaNetSpec, tokens: int, dtype: torch.dtype, *, deterministic: bool = False) -> None:
        torch.manual_seed(tokens + spec.value_dim)
        self.spec = spec
        self.plain = DeltaNet(spec, context(dtype, torch.device(DEVICE), deterministic=deterministic))
        self.held = self.plain.held
        for name, (low, high) in {"conv": (-1, 1), "norm": (0.5, 1.5), "dt_bias": (-3, 1), "A_log": (-2, 1)}.items():
            self.held[name].uniform_(low, high)
        self.kernels = DeltaNetKernels(spec, self.held, deterministic=deterministic, pdl=False)
        width = spec.num_channels + spec.num_value_heads * spec.value_dim
        self.inputs = torch.randn(tokens, width, device=DEVICE).to(dtype)
        self.gates = torch.randn(tokens, 2 * spec.num_value_heads, device=DEVICE).to(dtype)
        (size,) = spec.state("").shape
        self.state = make_state(6, size)

    def run(self, how: object, parts: Sequence[Part], begin: int = 0) -> tuple[Tensor, Tensor]:
        """The results and the states after a step, from the states of the layer on."""
        state, used = self.state.clone(), slice(begin, begin + num_tokens(parts))
        return how(self.inputs[used], self.gates[used], state, sequences_of(parts)), state  # type: ignore[operator]


def check(layer: Layer, parts: Sequence[Part], dtype: torch.dtype) -> None:
    expected, expected_state = layer.run(layer.plain.compute, parts)
    out, state = layer.run(layer.kernels, parts)
    real = torch.tensor([part.start >= 0 for part in parts for _ in range(part.num_new)], device=DEVICE)
    assert out.dtype == dtype and torch.isfinite(out).all()
    torch.testing.assert_close(out[real], expected[real], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    torch.testing.assert_close(state[1:], expected_state[1:], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert (state[0] == UNTOUCHED).all()
    kept = (layer.spec.kernel_size - 1) * layer.spec.num_channels
    assert torch.equal(state[1:, :kept], expected_state[1:, :kept])


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("decodes", SMALL),
        ("few tokens", ODD),
        ("a prompt", SMALL),
        ("prompts", ODD),
        ("decodes and prompts", ODD),
    ],
)
def test_equals_torch(name: str, spec: DeltaNetSpec) -> None:
    parts = STEPS[name]
    check(Layer(spec, num_tokens(parts), torch.float32), parts, torch.float32)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("parts", [[decode(1, 4)], [chunk(2, 30, 100)]], ids=["decode", "prompt"])
def test_full_heads_in_16_bits(parts: list[Part], dtype: torch.dtype) -> None:
    check(Layer(FULL, num_tokens(parts), dtype), parts, dtype)


def test_equal_keys_that_never_decay() -> None:
    """The system is then a triangle of ones, whose powers are huge: what a repeated token leads to."""
    spec = replace(SMALL, num_key_heads=1, num_value_heads=1)
    layer = Layer(spec, CHUNK, torch.float32)
    layer.inputs[:] = layer.inputs[:1].clone()
    layer.gates[:] = torch.tensor([9.0, -20.0])  # beta nearly 1, no decay
    check(layer, [chunk(1, 5, CHUNK)], torch.float32)


def test_a_state_is_carried_from_step_to_step() -> None:
    """A prompt in chunks of any size, then decoded, gives what the whole sequence gives at once."""
    layer = Layer(ODD, 90, torch.float32)
    whole, expected_state = layer.run(layer.plain.compute, [chunk(1, 0, 90)])
    outs, begin = [], 0
    for size in (67, 1, 2, 19, 1):
        part = decode(1, begin) if size == 1 else chunk(1, begin, size)
        out, layer.state = layer.run(layer.kernels, [part], begin)
        outs.append(out)
        begin += size
    torch.testing.assert_close(torch.cat(outs), whole, rtol=2e-4, atol=2e-4)
    torch.testing.assert_close(layer.state[1], expected_state[1], rtol=2e-4, atol=2e-4)


def test_deterministic_gives_the_same_bits_for_any_division() -> None:
    layer = Layer(ODD, 10, torch.float32, deterministic=True)
    expected, _ = layer.run(layer.plain.compute, [chunk(1, 0, 10)])
    whole, after = layer.run(layer.kernels, [chunk(1, 0, 10)])
    torch.testing.assert_close(whole, expected, rtol=1e-4, atol=1e-4)
    outs = []
    for begin, size in ((0, 7), (7, 1), (8, 2)):
        part = decode(2, begin) if size == 1 else chunk(2, begin, size)
        out, layer.state = layer.run(layer.kernels, [part], begin)
        outs.append(out)
    assert torch.equal(torch.cat(outs), whole) and torch.equal(layer.state[2], after[1])


def test_chunk_factors_solve_the_system() -> None:
    """Against the recurrence of transformers: the corrections of a chunk that starts from a state of zero."""
    torch.manual_seed(0)
    shape = DeltaNetShape(key_heads=1, value_heads=1, key_dim=16, value_dim=16, kernel_size=4, eps=1e-6)
    x, gates = torch.randn(50, shape.channels, device=DEVICE), torch.randn(50, 2, device=DEVICE)
    ones = torch.ones(1, device=DEVICE)
    weights = DeltaNetWeights(conv=ones, dt_bias=-ones, A_log=0 * ones, norm=ones)
    seqs = sequences_of([chunk(1, 0, 50)])
    assert seqs.chunks is not None
    found = chunk_factors(x, gates, weights, seqs.chunks, seqs, shape)
    q, k, v = x[None, :, None].split(16, dim=-1)
    decay = -F.softplus(gates[:, 1:] - 1)[None]
    expected, _ = torch_recurrent_gated_delta_rule(
        q, k, v, decay, gates[None, :, :1].sigmoid(), None, False, use_qk_l2norm_in_kernel=True
    )
    values = F.pad(v[0, :, 0], (0, 0, 0, CHUNK - 50))
    out = found.within[0, 0] @ (found.solved[0, 0] @ values)
    torch.testing.assert_close(out[:50], expected[0, :, 0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "dim"), [(3, 16), (2, 40), (1, 128)])
def test_norm_of_heads(heads: int, dim: int, dtype: torch.dtype) -> None:
    torch.manual_seed(dim)
    x, wide = torch.randn(7, heads * dim, device=DEVICE).to(dtype), torch.randn(7, 3 * heads * dim, device=DEVICE)
    z, weight = wide.to(dtype)[:, heads * dim : 2 * heads * dim], torch.rand(dim, device=DEVICE).to(dtype)
    expected = norm_heads_reference(x.unflatten(1, (heads, dim)), z.unflatten(1, (heads, dim)), weight, 1e-6).flatten(1)
    norm_heads(x, z, weight, 1e-6)
    rounding = 1e-5 if dtype == torch.float32 else 2**-6
    torch.testing.assert_close(x, expected, rtol=rounding, atol=rounding)


def test_chunks_of_a_step() -> None:
    """Each token of the last sequences is in one chunk, and a sequence finds its own."""
    seqs = sequences_of([decode(2, 4), *STEPS["prompts"]])
    assert seqs.chunks is not None and seqs.first_chunks is not None
    assert seqs.chunks.tolist() == [[1, 0], [2, 0], [3, 0], [3, 1], [3, 2]]
    assert seqs.first_chunks.tolist() == [0, 0, 1, 2]
    assert sequences_of(STEPS["few tokens"]).chunks is None


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: the interpreter knows no graphs and no dependent launch")
@pytest.mark.parametrize("name", ["decodes", "decodes and prompts"])
def test_full_size_in_a_graph(name: str) -> None:
    """Qwen3.5-9B's heads; the decodes as they are replayed, with dependent launches."""
    spec = replace(FULL, num_key_heads=16, num_value_heads=32)
    parts = STEPS[name]
    layer = Layer(spec, num_tokens(parts), torch.bfloat16)
    layer.kernels = DeltaNetKernels(spec, layer.held, deterministic=False, pdl=dependent_launch())
    check(layer, parts, torch.bfloat16)
    expected, expected_state = layer.run(layer.kernels, parts)
    before, seqs = layer.state.clone(), sequences_of(parts)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer.kernels(layer.inputs, layer.gates, layer.state, seqs)
    layer.state.copy_(before)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected) and torch.equal(layer.state, expected_state)
