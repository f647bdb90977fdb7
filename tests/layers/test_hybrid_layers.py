"""Layers with a state per row: the same numbers and states with kernels as with plain operations."""

from typing import Any

import pytest
import torch

from nanovllm.checkpoint.packed.tensor import InMemory
from nanovllm.layers.delta_net import DeltaNet
from nanovllm.layers.delta_net_spec import DeltaNetSpec
from nanovllm.layers.residual import Residual
from nanovllm.layers.short_conv import ShortConv
from nanovllm.layers.short_conv_spec import ShortConvSpec
from nanovllm.layers.split_k_residual import SplitKResidual
from nanovllm.layers.step import Step
from tests.kernels.delta_net_inputs import STEPS, make_state, num_tokens, sequences_of
from tests.kernels.support import DEVICE
from tests.layers.build import context, make_norm

HIDDEN = 32
SPECS: dict[type, Any] = {
    DeltaNet: DeltaNetSpec(
        hidden_size=HIDDEN,
        num_key_heads=1,
        num_value_heads=2,
        key_dim=16,
        value_dim=8,
        kernel_size=4,
        norm_eps=1e-6,
    ),
    ShortConv: ShortConvSpec(hidden_size=HIDDEN, kernel_size=3, bias=True),
}

# from Triton 3.6's interpreter, for a loop whose bound is an argument
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", ["a decode", "decodes", "decodes and prompts"])
@pytest.mark.parametrize("kind", SPECS)
def test_same_numbers(kind: type, name: str, deterministic: bool) -> None:
    if DEVICE == "cpu" and deterministic and kind is DeltaNet and name != "a decode":
        name = "few tokens"  # token by token, the interpreter would take long
    spec, parts, device = SPECS[kind], STEPS[name], torch.device(DEVICE)
    torch.manual_seed(0)
    x = torch.randn(num_tokens(parts), HIDDEN, device=device)
    first_state = make_state(6, *spec.state("").shape)
    found = {}
    for kernels in (False, True):
        torch.manual_seed(1)
        built_with = context(torch.float32, device, kernels=kernels, deterministic=deterministic)
        layer, norm = kind(spec, built_with), make_norm(HIDDEN, built_with)
        for slot in layer.slots().values():
            slot.load(InMemory(torch.randn(slot.shape) * 0.5))
        layer.finish_loading()
        rows, state = SplitKResidual(x.clone()) if kernels else Residual(x.clone()), first_state.clone()
        found[kernels] = layer.mix(rows, state, Step(None, sequences_of(parts)), norm=norm), state
    real = torch.tensor([part.start >= 0 for part in parts for _ in range(part.num_new)], device=device)
    torch.testing.assert_close(found[True][0][real], found[False][0][real], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[True][1][1:], found[False][1][1:], rtol=1e-4, atol=1e-4)
    assert torch.equal(found[True][1][0], first_state[0])  # what padding does not touch: only kernels see to that
