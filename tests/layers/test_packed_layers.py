"""An MLP and a mixture of experts with packed weights: the same numbers with kernels as with plain operations."""

from typing import Any

import pytest
import torch

from nanovllm.checkpoint.packed import words
from nanovllm.checkpoint.packed.tensor import InMemory
from nanovllm.kernels.features import gluon_usable
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.mlp import MLP
from nanovllm.layers.moe import MoE
from nanovllm.layers.moe_spec import MoeSpec
from nanovllm.layers.residual import Residual
from nanovllm.layers.spec import MlpSpec
from nanovllm.layers.split_k_residual import SplitKResidual
from nanovllm.weights import fp4, fp8, groups
from nanovllm.weights.formats import weight_formats
from tests.kernels.support import DEVICE
from tests.layers.build import context, make_norm

HIDDEN = 128
EXPERTS = MoeSpec(
    hidden_size=HIDDEN, intermediate_size=128, num_experts=4, num_experts_per_token=2, norm_topk_prob=True
)
LAYERS: dict[str, tuple[type, Any]] = {
    "mlp": (MLP, MlpSpec(hidden_size=HIDDEN, intermediate_size=128)),
    "experts": (MoE, EXPERTS),
}

# from Triton 3.6's interpreter, for a loop whose bound is an argument
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")


@pytest.fixture(autouse=True)
def in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights have the order of words on a CPU too."""
    for module in (groups, fp8, fp4):
        monkeypatch.setattr(module, "words_on", lambda device, *sizes: words.word_order(*sizes))


def built(
    kind: type,
    spec: Any,
    quantization: str,
    dtype: torch.dtype,
    *,
    kernels: bool,
    gluon: bool = False,
    deterministic: bool = False,
) -> tuple[Any, RMSNorm]:
    """A layer with random weights, and a norm before it."""
    with_these = context(
        dtype,
        torch.device(DEVICE),
        weight_formats=weight_formats(quantization),
        kernels=kernels,
        gluon=gluon,
        deterministic=deterministic and kernels,
    )
    torch.manual_seed(0)
    layer, norm = kind(spec, with_these), make_norm(spec.hidden_size, with_these)
    for slot in layer.slots().values():
        slot.load(InMemory(torch.randn(slot.shape) * 0.2))
    layer.finish_loading()
    norm.weight.uniform_(0.5, 1.5)
    norm.finish_loading()
    return layer, norm


@pytest.mark.parametrize(
    ("layer", "quantization", "deterministic"),
    [("mlp", "int4", False), ("mlp", "fp8", False), ("mlp", "int4", True), ("experts", "int4", False)],
)
def test_same_numbers(layer: str, quantization: str, deterministic: bool) -> None:
    kind, spec = LAYERS[layer]
    options: dict[str, Any] = {"dtype": torch.float16, "deterministic": deterministic}
    plain, expected_norm = built(kind, spec, quantization, kernels=False, **options)
    found, norm = built(kind, spec, quantization, kernels=True, **options)
    for rows in (1, 20) if layer == "mlp" else (3,):
        x = torch.randn(rows, HIDDEN, device=DEVICE).half()
        expected = plain(Residual(x.clone()), norm=expected_norm).rows.float()
        actual = found(SplitKResidual(x.clone()), norm=norm).rows.float()
        # of what is added to x; with fp8 the plain computation rounds inputs and some kernels do not
        error = (actual - expected).abs().max() / (expected - x.float()).abs().max()
        assert error < (0.08 if quantization == "fp8" else 0.01), rows


def error_of_two_layers(kind: type, spec: Any, rows: int) -> float:
    """In fp8: the norm of the second has sums to add."""
    results = []
    for kernels in (False, True):
        layer, norm = built(kind, spec, "fp8", torch.bfloat16, kernels=kernels, gluon=kernels and gluon_usable())
        torch.manual_seed(rows)
        x = torch.randn(rows, spec.hidden_size, device=DEVICE).bfloat16()
        stream = SplitKResidual(x) if kernels else Residual(x)
        for _ in range(2):
            stream = layer(stream, norm=norm)
        results.append(stream.rows.float())
    return float((results[0] - results[1]).norm() / results[0].norm())


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 64])
def test_one_layer_after_another(rows: int) -> None:
    """With weights large enough for the kernels for Hopper."""
    # Numbers between two of fp8 differ: kernels do not round gate and up before their product, which alone makes 0.043.
    # Without rounding the inputs it would be 0.065.
    assert error_of_two_layers(MLP, MlpSpec(hidden_size=2048, intermediate_size=2048), rows) < 0.055


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 7, 70])
def test_experts_one_after_another(rows: int) -> None:
    """Every expert is chosen: of two that are nearly as good the kernels could take the other one."""
    spec = MoeSpec(hidden_size=512, intermediate_size=256, num_experts=4, num_experts_per_token=4, norm_topk_prob=True)
    assert error_of_two_layers(MoE, spec, rows) < 0.055
