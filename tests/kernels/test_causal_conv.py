"""The causal convolution's kernels against the plain form, which tests/test_oracle.py compares with transformers."""

import itertools
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.kernels.delta_net import causal_conv as kernels
from nanovllm.kernels.delta_net.causal_conv import causal_conv
from nanovllm.layers.causal_conv import causal_conv as plain
from tests.kernels.delta_net_inputs import (
    STEPS,
    TOLERANCE,
    UNTOUCHED,
    Part,
    chunk,
    make_state,
    num_tokens,
    sequences_of,
)
from tests.kernels.support import DEVICE

CHANNELS = 40  # more than one tile of the smaller ones below
CASES = list(itertools.product(STEPS, (3, 4), TOLERANCE))
if DEVICE == "cpu":  # the interpreter is slow: each step with other types
    CASES = [(name, 3 + turn % 2, list(TOLERANCE)[turn % 3]) for turn, name in enumerate([*STEPS, "decodes"])]

# from Triton 3.6's interpreter, for a loop whose bound is an argument
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "TILE_CHANNELS", 32)
    monkeypatch.setattr(kernels, "PART_CHANNELS", 16)
    monkeypatch.setattr(kernels, "FEW_SEQS_CHANNELS", 32)


def make(parts: Sequence[Part], kernel_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What in_proj gives, [num_tokens, 3 * channels]; weight; bias; state."""
    torch.manual_seed(num_tokens(parts) + kernel_size)
    wide = torch.randn(num_tokens(parts), 3 * CHANNELS, device=DEVICE).to(dtype)
    weight, bias = torch.randn(CHANNELS, 1, kernel_size, device=DEVICE), torch.randn(CHANNELS, device=DEVICE)
    return wide, weight.to(dtype), bias.to(dtype), make_state(6, kernel_size - 1, CHANNELS)


@pytest.mark.parametrize(("name", "kernel_size", "dtype"), CASES)
def test_equals_torch(name: str, kernel_size: int, dtype: torch.dtype) -> None:
    parts = STEPS[name]
    seqs = sequences_of(parts)
    wide, weight, _, state = make(parts, kernel_size, dtype)
    x, expected_state = wide[:, CHANNELS : 2 * CHANNELS], state.clone()
    expected = F.silu(plain(x, weight, None, expected_state, seqs))
    out = causal_conv(x, weight, None, state, seqs, silu=True, few=seqs.have_few_tokens)
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert torch.equal(state[1:], expected_state[1:]) and (state[0] == UNTOUCHED).all()


@pytest.mark.parametrize(
    ("name", "dtype", "few"),
    [
        ("decodes", torch.float16, False),
        ("decodes", torch.float32, True),
        ("few tokens", torch.float16, True),
        ("decodes and prompts", torch.float32, False),
    ],
)
def test_gated(name: str, dtype: torch.dtype, few: bool) -> None:
    """LFM2's c * (conv(b * h) + bias): the products are rounded as in the plain form."""
    seqs = sequences_of(STEPS[name])
    wide, weight, bias, state = make(STEPS[name], 3, dtype)
    b, c, h = wide.chunk(3, dim=-1)
    expected_state = state.clone()
    expected = c * plain(b * h, weight, bias, expected_state, seqs).to(dtype)
    out = causal_conv(h, weight, bias, state, seqs, times_and_after=(b, c), few=few)
    torch.testing.assert_close(out, expected, rtol=2 * TOLERANCE[dtype], atol=2 * TOLERANCE[dtype])
    assert torch.equal(state[1:], expected_state[1:]) and (state[0] == UNTOUCHED).all()


def test_any_division_gives_the_same_bits() -> None:
    wide, weight, _, state = make([chunk(1, 0, 30)], 4, torch.float32)
    x = wide[:, :CHANNELS]
    whole = causal_conv(x, weight, None, state, sequences_of([chunk(1, 0, 30)]))
    parts = [chunk(2, 0, 7), chunk(2, 7, 1), chunk(2, 8, 2), chunk(2, 10, 20)]
    pieces = [
        causal_conv(x[part.start : part.start + part.num_new], weight, None, state, sequences_of([part]))
        for part in parts
    ]
    assert torch.equal(torch.cat(pieces), whole) and torch.equal(state[2], state[1])


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: the interpreter knows no dependent launch")
@pytest.mark.parametrize("name", STEPS)
def test_dependent_launch(name: str) -> None:
    seqs = sequences_of(STEPS[name])
    wide, weight, _, state = make(STEPS[name], 4, torch.bfloat16)
    x, expected_state = wide[:, :CHANNELS], state.clone()
    expected = plain(x, weight, None, expected_state, seqs)
    out = causal_conv(x, weight, None, state, seqs, few=seqs.have_few_tokens, pdl=True)
    torch.testing.assert_close(out.float(), expected, rtol=2**-7, atol=2**-7)
    assert torch.equal(state[1:], expected_state[1:])
