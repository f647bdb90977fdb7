"""An MLP and a mixture of experts with packed weights: the same numbers with kernels as with plain operations."""

from typing import Any

import pytest
import torch

from nanovllm.checkpoint.packed import words
from nanovllm.checkpoint.packed.tensor import InMemory
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


@pytest.mark.parametrize(
    ("layer", "quantization", "deterministic"),
    [("mlp", "int4", False), ("mlp", "fp8", False), ("mlp", "int4", True), ("experts", "int4", False)],
)
def test_same_numbers(layer: str, quantization: str, deterministic: bool) -> None:
    device, (kind, spec) = torch.device(DEVICE), LAYERS[layer]
    built = {}
    for kernels in (False, True):
        options = {"kernels": kernels, "deterministic": deterministic and kernels}
        with_these = context(torch.float16, device, weight_formats=weight_formats(quantization), **options)
        torch.manual_seed(0)
        built[kernels] = kind(spec, with_these), make_norm(HIDDEN, with_these)
        for slot in built[kernels][0].slots().values():
            slot.load(InMemory(torch.randn(slot.shape) * 0.2))
        built[kernels][0].finish_loading()
        built[kernels][1].weight.uniform_(0.5, 1.5)
        built[kernels][1].finish_loading()
    for rows in (1, 20) if layer == "mlp" else (3,):
        x = torch.randn(rows, HIDDEN, device=device).half()
        plain, expected_norm = built[False]
        found, norm = built[True]
        expected = plain(Residual(x.clone()), norm=expected_norm).rows.float()
        actual = found(SplitKResidual(x.clone()), norm=norm).rows.float()
        # of what is added to x; with fp8 the plain computation rounds inputs and some kernels do not
        error = (actual - expected).abs().max() / (expected - x.float()).abs().max()
        assert error < (0.08 if quantization == "fp8" else 0.01), rows
