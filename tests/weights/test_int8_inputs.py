"""int8 checkpoints of compressed-tensors: weights as stored, inputs rounded per token."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nanovllm.errors import CheckpointError
from nanovllm.weights.forms import Int8Form
from nanovllm.weights.int8_inputs import Int8InputsFormat
from tests.helpers import edit_config, open_llm
from tests.weights.packed_files import check_greedy, check_plan, generate, write_packed

EIGHT_BITS = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False}


def pack(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """With scales for rows, or for q projections one for all; the largest number is not 127, as in a clipped weight."""
    scale = weight.abs().amax(dim=1, keepdim=True) / 101
    if module.endswith("q_proj"):
        scale = scale.max().reshape(1)
    codes = (weight / scale).round().to(torch.int8)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale


def config(inputs: dict[str, Any] | None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": EIGHT_BITS | {"strategy": "channel"}, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"group_0": group}}


WEIGHT_ONLY, W8A8 = config(None), config(EIGHT_BITS | {"strategy": "token", "dynamic": True})


@pytest.mark.parametrize("name", ["llama-bias", "qwen3-moe"])
def test_weights(tmp_path: Path, name: str) -> None:
    files = write_packed(name, tmp_path, pack, WEIGHT_ONLY)
    check_greedy(files)
    check_plan(files)
    weight_only = generate(files.packed)
    edit_config(files.packed, lambda raw: raw.update(quantization_config=W8A8))
    check_plan(files)
    assert generate(files.packed) != weight_only


@pytest.mark.parametrize("num_rows", [1, 4])
def test_product(num_rows: int) -> None:
    torch.manual_seed(num_rows)
    form = Int8InputsFormat(Int8Form(), quantizes=False)
    weight = form.empty((12, 40), dtype=torch.float32, device=torch.device("cpu"))
    weight.tensor.copy_(torch.randint(-127, 128, (12, 40)))
    weight.scale.uniform_(0.01, 0.1)
    x, bias = torch.randn(num_rows, 40), torch.randn(12)
    x[0, :5] = 0
    expected = torch.empty(num_rows, 12, dtype=torch.float64)
    for row in range(num_rows):
        scale = float(x[row].abs().max()) / 127
        codes = torch.tensor([round(float(value) / scale) for value in x[row]])
        for n in range(12):
            total = int((codes * weight.tensor[n].long()).sum())
            expected[row, n] = total * scale * float(weight.scale[n]) + float(bias[n])
    torch.testing.assert_close(weight.matmul(x, bias).double(), expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(weight.matmul(torch.zeros(1, 40)), torch.zeros(1, 12))


def test_bad_files(tmp_path: Path) -> None:
    def without_scale(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        stored, dense = pack(module, weight)
        if module.endswith("1.mlp.up_proj"):
            del stored["weight_scale"]
        return stored, dense

    files = write_packed("qwen3", tmp_path, without_scale, W8A8)
    with pytest.raises(CheckpointError, match="1.mlp.up_proj.weight: .*stored in int8, but the file has no scale"):
        open_llm(files.packed)
