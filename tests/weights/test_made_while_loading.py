"""quantization="fp8" and "int4": 16-bit checkpoints are packed while they are loaded, one tensor at a time."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from nanovllm import LLM
from nanovllm.bench.shapes import SHAPES
from nanovllm.weights.int8 import dequantize_rows, quantize_rows
from tests.helpers import model_dir, open_llm
from tests.weights.packed_files import PackedFiles, check_greedy, memory_of, write_packed
from tests.weights.test_groups import AWQ, pack_awq


def rounded(module: str, weight: Tensor, quantization: str) -> Tensor:
    if module == "lm_head":
        return dequantize_rows(*quantize_rows(weight), torch.float32)
    if quantization == "fp8":
        scale = weight.abs().amax(dim=1, keepdim=True) / 448
        return (weight / scale).to(torch.float8_e4m3fn).float() * scale
    size = next(size for size in (128, 64, 32, 16, 8) if weight.shape[1] % size == 0)
    groups = weight.reshape(-1, size)
    low, high = groups.amin(dim=1, keepdim=True).clamp(max=0), groups.amax(dim=1, keepdim=True).clamp(min=0)
    scale = ((high - low) / 15).half().float()
    zero = (-low / scale).round()
    return (((groups / scale).round() + zero).clamp(0, 15) - zero).mul(scale).view(weight.shape)


@pytest.mark.parametrize("quantization", ["fp8", "int4"])
@pytest.mark.parametrize("name", ["llama-bias", "qwen3-moe"])
def test_tokens(tmp_path: Path, name: str, quantization: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs are not rounded here: tests/weights/test_fp8.py has the product with rounded ones."""
    monkeypatch.setattr("nanovllm.weights.fp8.round_inputs", lambda x, group: x.float())

    def pack(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
        return ({"weight": weight}, rounded(module, weight, quantization))

    files = write_packed(name, tmp_path, pack, {})
    check_greedy(files, quantization=quantization)


@pytest.mark.parametrize("quantization", ["fp8", "int8", "int4"])
def test_a_plan_counts_its_bytes(quantization: str) -> None:
    planned, held = [], []
    for option in (None, quantization):
        options = {"quantization": option, "device": "cpu", "dtype": "float32", "num_kv_cache_blocks": 4}
        options["cpu_kernels"] = "torch"
        planned.append(LLM.plan(str(model_dir("qwen3-moe")), **options).weight_bytes)
        with open_llm("qwen3-moe", quantization=option, load_format="dummy", cpu_kernels="torch") as llm:
            held.append(memory_of(llm))
    assert 0 < planned[0] - planned[1] == held[0] - held[1]


def test_bytes_of_a_real_shape() -> None:
    """4 bits, and a 2-byte scale and a 1-byte zero for each 128 inputs; the head 8 bits and a 4-byte scale per row."""
    options = {"device": "cpu", "dtype": "float32", "num_kv_cache_blocks": 4, "load_format": "dummy"}
    dense, packed = (
        LLM.plan(str(SHAPES / "qwen3-8b"), quantization=quantization, **options).weight_bytes
        for quantization in (None, "int4")
    )
    layer = 4096 * (4096 + 2 * 1024 + 4096 + 3 * 12288)
    head = 151_936 * (3 * 4096 - 4)
    assert dense - packed == 36 * (4 * layer - layer // 2 - 3 * layer // 128) + head


def test_a_packed_checkpoint_can_be_packed_again(tmp_path: Path) -> None:
    """The option decides: AWQ weights are unpacked and rounded to 8 bits."""
    files = write_packed("qwen3", tmp_path, lambda module, weight: pack_awq(weight), AWQ)
    with open_llm(files.packed, quantization="int8") as llm:
        assert llm.llm_engine._core.executor.model.layers[0].mixer.qkv_proj.weight.format_name == "int8"
    check_greedy(PackedFiles(files.packed, files.dense), quantization="int8", most=0.5)
