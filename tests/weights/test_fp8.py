"""fp8 checkpoints: what the file means, the product with rounded inputs, and every way to load them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanovllm.errors import CheckpointError
from nanovllm.weights.forms import Fp8Form
from nanovllm.weights.fp8 import Fp8Format
from nanovllm.weights.stacked import StackedWeight
from tests.helpers import edit_config, open_llm
from tests.weights.packed_files import (
    PROMPTS,
    PackedFiles,
    check_greedy,
    check_plan,
    generate,
    write_packed,
)

BLOCK = 16
NAN = float("nan")


def by_block(weight: Tensor, size: int = BLOCK) -> tuple[Tensor, Tensor, Tensor]:
    """fp8 numbers, a scale for each block, and what they stand for, block by block."""
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    down, across = -(-weight.shape[0] // size), -(-weight.shape[1] // size)
    scales, dense = torch.empty(down, across), torch.empty_like(weight)
    for i in range(down):
        for j in range(across):
            block = slice(i * size, (i + 1) * size), slice(j * size, (j + 1) * size)
            scales[i, j] = weight[block].abs().max() / 400
            codes[block] = (weight[block] / scales[i, j]).to(torch.float8_e4m3fn)
            dense[block] = codes[block].float() * scales[i, j]
    return codes, scales, dense


def pack_blocks(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
    if module == "lm_head" or module.endswith("1.self_attn.v_proj"):
        return None
    codes, scales, dense = by_block(weight)
    return {"weight": codes, "weight_scale_inv": scales}, dense


def pack_rows(module: str, weight: Tensor, scale_shape: tuple[int, ...] = (-1, 1)) -> tuple[dict[str, Tensor], Tensor]:
    scale = weight.abs().amax(dim=1) / 300
    codes = (weight / scale[:, None]).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale.view(scale_shape)}, codes.float() * scale[:, None]


def pack_whole(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
    if module == "lm_head":
        return None
    scale = weight.abs().max() / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    found = {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(0.3)}
    return found, codes.float() * scale


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
BLOCKS = FP8 | {"weight_block_size": [BLOCK, BLOCK], "modules_to_not_convert": ["lm_head", "layers.1.self_attn.v_proj"]}
EIGHT_BITS = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
COMPRESSED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "ignore": [],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": EIGHT_BITS | {"strategy": "channel"},
            "input_activations": EIGHT_BITS | {"strategy": "token", "dynamic": True},
        }
    },
}
WEIGHT_ONLY = COMPRESSED | {
    "format": "naive-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": EIGHT_BITS | {"strategy": "channel"}}},
}

# Two ranks cut blocks of 16 columns in parts, and blocks of 16 rows of an expert, of which each rank has 12.
WEIGHT_ONLY_BLOCKS = WEIGHT_ONLY | {
    "ignore": ["lm_head", r"re:.*layers\.1\.self_attn\.v_proj"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": EIGHT_BITS | {"strategy": "block", "block_structure": [BLOCK, BLOCK]},
        }
    },
}


def token_rounding(group: int | None) -> Any:
    """x rounded to fp8 with one scale per token and `group` numbers, one number after the other; None = all."""

    def rounded(x: Tensor) -> Tensor:
        pieces = x.split(group or x.shape[-1], dim=-1)
        scales = [piece.abs().amax(dim=-1, keepdim=True) / 448 for piece in pieces]
        codes = [(piece / scale).to(torch.float8_e4m3fn) for piece, scale in zip(pieces, scales, strict=True)]
        return torch.cat([code.float() * scale for code, scale in zip(codes, scales, strict=True)], dim=-1)

    return rounded


@pytest.fixture
def plain_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs are not rounded: a sum in another order would round one to the next number, and move logits far."""
    monkeypatch.setattr("nanovllm.weights.fp8.round_inputs", lambda x, group: x.float())


@pytest.mark.usefixtures("plain_inputs")
@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe", "llama-bias"])
def test_blocks(tmp_path: Path, name: str) -> None:
    check_greedy(write_packed(name, tmp_path, pack_blocks, BLOCKS), max_num_batched_tokens=16, max_num_seqs=4)


@pytest.mark.usefixtures("plain_inputs")
@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
def test_rows(tmp_path: Path, name: str) -> None:
    """The head is packed, too: the config does not leave it out."""
    check_greedy(write_packed(name, tmp_path, pack_rows, COMPRESSED))


@pytest.mark.usefixtures("plain_inputs")
def test_one_scale_for_all_and_static_inputs(tmp_path: Path) -> None:
    """q, k and v are fused and keep their own scales."""
    check_greedy(write_packed("llama-bias", tmp_path, pack_whole, FP8 | {"activation_scheme": "static"}))


def test_blocks_without_rounded_inputs(tmp_path: Path) -> None:
    check_greedy(write_packed("qwen3-moe", tmp_path, pack_blocks, WEIGHT_ONLY_BLOCKS))


def test_inputs_are_rounded_unless_the_config_has_none(tmp_path: Path) -> None:
    files = write_packed("llama", tmp_path, pack_rows, WEIGHT_ONLY)
    check_greedy(files)
    weight_only = generate(files.packed)
    edit_config(files.packed, lambda raw: raw.update(quantization_config=COMPRESSED))
    assert generate(files.packed) != weight_only


@pytest.mark.usefixtures("plain_inputs")
def test_modelopt_file(tmp_path: Path) -> None:
    files = write_packed("llama", tmp_path, pack_whole, {})
    edit_config(files.packed, lambda raw: raw.pop("quantization_config"))
    quantization = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_*"]}
    content = {"producer": {"name": "modelopt"}, "quantization": quantization}
    (files.packed / "hf_quant_config.json").write_text(json.dumps(content))
    check_greedy(files)


@pytest.mark.parametrize(("pack", "config"), [(pack_blocks, BLOCKS), (pack_rows, COMPRESSED)])
def test_a_plan_counts_its_bytes(tmp_path: Path, pack: Any, config: dict[str, Any]) -> None:
    check_plan(write_packed("qwen3-moe", tmp_path, pack, config))


def test_dummy_weights_have_the_packed_format(tmp_path: Path) -> None:
    files = write_packed("qwen3-moe", tmp_path, pack_blocks, BLOCKS)
    for file in files.packed.glob("*.safetensors*"):
        file.unlink()
    check_plan(files, load_format="dummy")
    assert len(generate(files.packed, load_format="dummy")) == len(PROMPTS)


def test_formats_of_a_layer(tmp_path: Path) -> None:
    files = write_packed("qwen3-moe", tmp_path, pack_blocks, BLOCKS)
    with open_llm(files.packed) as llm:
        layers = llm.llm_engine._core.executor.model.layers
        mixers = [layer.mixer.qkv_proj.weight for layer in layers]
        assert [weight.format_name for weight in mixers] == ["fp8_block", "stacked", "fp8_block"]
        assert isinstance(mixers[1], StackedWeight)
        assert [weight.format_name for weight in mixers[1].weights] == ["fp8_block", "fp8_block", "dense"]
        assert layers[0].feed_forward.router.weight.format_name == "dense"
        assert layers[0].feed_forward.gate_up.format_name == "fp8_block"


@pytest.mark.parametrize("block", [None, (16, 16), (128, 128), (8, 32)])
@pytest.mark.parametrize("num_rows", [1, 5])
def test_product(block: tuple[int, int] | None, num_rows: int) -> None:
    """Against float64, block by block, with numbers of rows and columns that blocks do not divide."""
    torch.manual_seed(num_rows)
    weight = Fp8Format(Fp8Form(block)).empty((40, 72), dtype=torch.float32, device=torch.device("cpu"))
    weight.tensor.copy_(torch.randn(40, 72))
    weight.scale.uniform_(0.01, 1.0)
    x, bias = torch.randn(num_rows, 72), torch.randn(40)
    rows, columns = block or (1, 72)
    inputs = token_rounding(columns)(x).double()
    expected = bias.double().expand(num_rows, 40).clone()
    for n in range(40):
        for k in range(72):
            w = weight.tensor[n, k].double() * weight.scale[n // rows, k // columns].double()
            expected[:, n] += inputs[:, k] * w
    torch.testing.assert_close(weight.matmul(x, bias).double(), expected, atol=1e-4, rtol=1e-5)


# --- bad files --------------------------------------------------------------------------------------------------------


def without_scale(tensors: dict[str, Tensor], name: str) -> None:
    del tensors[f"{name}.weight_scale_inv"]


def wrong_scale_shape(tensors: dict[str, Tensor], name: str) -> None:
    tensors[f"{name}.weight_scale_inv"] = torch.ones(2, 2)


def zero_scale(tensors: dict[str, Tensor], name: str) -> None:
    tensors[f"{name}.weight_scale_inv"][1, 0] = 0


def nan_scale(tensors: dict[str, Tensor], name: str) -> None:
    tensors[f"{name}.weight_scale_inv"][1, 0] = NAN


def nan_weight(tensors: dict[str, Tensor], name: str) -> None:
    tensors[f"{name}.weight"][1, 0] = NAN


def wrong_type(tensors: dict[str, Tensor], name: str) -> None:
    tensors[f"{name}.weight"] = tensors[f"{name}.weight"].float()


def wrong_shape(tensors: dict[str, Tensor], name: str) -> None:
    tensors[f"{name}.weight"] = tensors[f"{name}.weight"][:-1].clone()


def unknown_tensor(tensors: dict[str, Tensor], name: str) -> None:
    tensors[f"{name}.weight_zero"] = torch.ones(1)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> PackedFiles:
    return write_packed("qwen3", tmp_path_factory.mktemp("fp8"), pack_blocks, BLOCKS)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without_scale, r"up_proj.weight: .*stored in fp8, but the file has no scale"),
        (wrong_scale_shape, r"up_proj.weight: the scales have shape \[2, 2\], and \[5, 3\] is needed"),
        (zero_scale, r"up_proj.weight: a scale is zero"),
        (nan_scale, r"up_proj.weight: a scale is zero, negative, infinite or NaN"),
        (nan_weight, r"up_proj.weight: a weight is NaN"),
        (wrong_type, r"up_proj.weight: the weight's type is torch.float32"),
        (wrong_shape, r"up_proj.weight has shape \[79, 48\], and the config asks for \[80, 48\]"),
        (unknown_tensor, r"1 unexpected: model.layers.1.mlp.up_proj.weight_zero"),
    ],
)
def test_bad_files(good: PackedFiles, tmp_path: Path, damage: Any, message: str) -> None:
    tensors: dict[str, Tensor] = {}
    for file in good.packed.glob("*.safetensors"):
        tensors |= load_file(file)
    damage(tensors, "model.layers.1.mlp.up_proj")
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((good.packed / "config.json").read_text())
    with pytest.raises(CheckpointError, match=message):
        open_llm(tmp_path)
