"""MXFP4 and NVFP4 checkpoints against a dequantization written here."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanovllm.errors import CheckpointError
from tests.helpers import open_llm
from tests.weights.packed_files import PROMPTS, PackedFiles, check_greedy, check_plan, generate, write_packed

NUMBERS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
FOUR_BITS = {"num_bits": 4, "type": "float", "symmetric": True, "dynamic": False}


def nearest(values: Tensor) -> Tensor:
    """The number of e2m1 with the same sign that is nearest."""
    return NUMBERS[(values.abs().unsqueeze(-1) - NUMBERS).abs().argmin(dim=-1)] * values.sign()


def by_group(weight: Tensor, size: int, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers of e2m1, packed by compressed-tensors, and what they stand for, group by group."""
    from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8

    numbers, dense = torch.empty_like(weight), torch.empty_like(weight)
    for group in range(weight.shape[1] // size):
        columns = slice(group * size, (group + 1) * size)
        numbers[:, columns] = nearest(weight[:, columns] / scales[:, group, None])
        dense[:, columns] = numbers[:, columns] * scales[:, group, None]
    return pack_fp4_to_uint8(numbers), dense


def mx(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    exponent = weight.unflatten(1, (-1, 32)).abs().amax(dim=-1).log2().floor().int() - 2
    packed, dense = by_group(weight, 32, 2.0**exponent)
    return packed, (exponent + 127).to(torch.uint8), dense


def pack_mx(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
    if module == "lm_head" or "experts" not in module:
        return None
    packed, scales, dense = mx(weight)
    return {"weight_packed": packed, "weight_scale": scales}, dense


def nv(weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    whole = weight.abs().max() / 2000
    scales = (weight.unflatten(1, (-1, 16)).abs().amax(dim=-1) / 6 / whole).to(torch.float8_e4m3fn)
    packed, dense = by_group(weight, 16, scales.float() * whole)
    return packed, scales, whole, dense


def pack_nv(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
    if module == "lm_head":
        return None
    packed, scales, whole, dense = nv(weight)
    stored = {"weight_packed": packed, "weight_scale": scales, "weight_global_scale": (1 / whole).reshape(1)}
    return stored | {"input_global_scale": torch.ones(1)}, dense


def pack_modelopt(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
    if module == "lm_head":
        return None
    packed, scales, whole, dense = nv(weight)
    return {"weight": packed, "weight_scale": scales, "weight_scale_2": whole, "input_scale": torch.ones(())}, dense


def compressed(layout: str, targets: list[str], **weights: Any) -> dict[str, Any]:
    inputs = FOUR_BITS | {"strategy": "tensor_group", "group_size": 16, "dynamic": "local"}
    group = {"targets": targets, "weights": FOUR_BITS | weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "ignore": ["lm_head"],
        "config_groups": {"g": group},
    }


NV = compressed("nvfp4-pack-quantized", ["Linear"], strategy="tensor_group", group_size=16)
MX = compressed("mxfp4-pack-quantized", ["re:.*experts.*"], strategy="group", group_size=32)
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]}
GPT_OSS = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def write_stacked(folder: Path) -> PackedFiles:
    """In the layout of gpt-oss: one tensor for all experts, the rows of gate and up in turn."""
    files = write_packed("qwen3-moe-wide", folder, pack_mx, GPT_OSS)
    tensors: dict[str, Tensor] = {}
    for file in files.packed.glob("*.safetensors*"):
        tensors |= load_file(file) if file.suffix == ".safetensors" else {}
        file.unlink()
    for layer in range(3):
        prefix = f"model.layers.{layer}.mlp.experts"
        for ours, theirs in (("weight_packed", "blocks"), ("weight_scale", "scales")):
            of: dict[str, Tensor] = {
                name: torch.stack([tensors.pop(f"{prefix}.{expert}.{name}_proj.{ours}") for expert in range(6)])
                for name in ("gate", "up", "down")
            }
            gate_up = torch.stack([of["gate"], of["up"]], dim=2).flatten(1, 2)
            for name, stack in (("gate_up_proj", gate_up), ("down_proj", of["down"])):
                shaped = stack.unflatten(-1, (-1, 16)) if theirs == "blocks" else stack
                tensors[f"{prefix}.{name}_{theirs}"] = shaped.contiguous()
    save_file(tensors, files.packed / "model.safetensors")
    return files


@pytest.mark.parametrize(
    ("name", "pack", "config"),
    [("llama", pack_nv, NV), ("llama", pack_modelopt, MODELOPT), ("qwen3-moe-wide", pack_mx, MX)],
)
def test_layouts(tmp_path: Path, name: str, pack: Any, config: dict[str, Any]) -> None:
    files = write_packed(name, tmp_path, pack, config)
    check_greedy(files)
    check_plan(files)


def test_experts_of_gpt_oss(tmp_path: Path) -> None:
    files = write_stacked(tmp_path)
    check_greedy(files)
    for file in files.packed.glob("*.safetensors*"):
        file.unlink()
    check_plan(files, load_format="dummy")
    assert len(generate(files.packed, load_format="dummy")) == len(PROMPTS)


def test_dummy_weights(tmp_path: Path) -> None:
    files = write_packed("llama", tmp_path, pack_nv, NV)
    assert len(generate(files.packed, load_format="dummy")) == len(PROMPTS)


@pytest.mark.parametrize(
    ("own", "change", "message"),
    [
        ("weight_scale", lambda t: t[:, :-1], r"scales have shape \[96, 4\], and \[96, 5\] is needed"),
        (
            "weight_scale",
            lambda t: t.float(),
            "with torch.float32 scales, and torch.uint8 with torch.float8_e4m3fn is needed",
        ),
        ("weight_scale", lambda t: t.view(torch.uint8).fill_(0x7F).view(t.dtype), "a scale is NaN"),
        ("weight_global_scale", lambda t: None, "the scale of the whole tensor is missing"),
        ("weight_global_scale", lambda t: t * 0, "a scale is zero"),
        ("weight_packed", lambda t: t[:-1], r"has shape \[95, 80\], and the config asks for \[96, 80\]"),
    ],
)
def test_bad_files(tmp_path: Path, own: str, change: Any, message: str) -> None:
    files = write_packed("llama", tmp_path, pack_nv, NV)
    tensors: dict[str, Tensor] = {}
    for file in files.packed.glob("*.safetensors*"):
        tensors |= load_file(file) if file.suffix == ".safetensors" else {}
        file.unlink()
    changed = change(tensors.pop(f"model.layers.1.mlp.down_proj.{own}"))
    if changed is not None:
        tensors[f"model.layers.1.mlp.down_proj.{own}"] = changed.contiguous()
    save_file(tensors, files.packed / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"down_proj.*{message}"):
        open_llm(files.packed)
