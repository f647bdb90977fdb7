"""gpt-oss with experts in MXFP4, in the layout of its own files, and its config."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanovllm.bench.shapes import shape_folder
from nanovllm.errors import CheckpointError
from nanovllm.models.registry import describe, parse_config
from tests.helpers import edit_config, model_dir, open_llm
from tests.weights.packed_files import PackedFiles, check_greedy, check_plan
from tests.weights.test_fp4 import GPT_OSS, mx


def write(folder: Path) -> PackedFiles:
    """The experts' weights of the family's checkpoint become blocks and scales; their biases stay."""
    source, files = model_dir("gpt-oss-wide"), PackedFiles(folder / "packed", folder / "dense")
    dense = load_file(source / "model.safetensors")
    stored = dict(dense)
    for name in [name for name in dense if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        packed, scales, rounded = zip(*(mx(expert.t()) for expert in stored.pop(name)), strict=True)
        stored[f"{name}_blocks"] = torch.stack(packed).unflatten(-1, (-1, 16))
        stored[f"{name}_scales"] = torch.stack(scales)
        dense[name] = torch.stack(rounded).transpose(1, 2).contiguous()
    for target, tensors in ((files.packed, stored), (files.dense, dense)):
        target.mkdir()
        shutil.copy(source / "config.json", target)
        save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    edit_config(files.packed, lambda raw: raw.update(quantization_config=GPT_OSS))
    return files


def test_tokens_equal_those_of_the_dequantized_model(tmp_path: Path) -> None:
    files = write(tmp_path)
    check_greedy(files)
    check_plan(files)
    with open_llm(files.packed) as llm:
        moe = llm.llm_engine._core.executor.model.layers[0].feed_forward
        assert moe.gate_up.format_name == moe.down.format_name == "mxfp4"
        assert moe.router.weight.format_name == "dense"


def test_a_missing_bias_is_named(tmp_path: Path) -> None:
    files = write(tmp_path)
    tensors = load_file(files.packed / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.down_proj_bias"]
    save_file(tensors, files.packed / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"6 missing: model.layers.1.mlp.experts.0.down_proj.bias"):
        open_llm(files.packed)


def test_the_published_config() -> None:
    """Its dtype is not stated, and layers with a window come first."""
    model = describe(shape_folder("gpt-oss-20b")).config
    assert model.dtype == "bfloat16" and model.packing is not None
    assert model.windows == (None, 128) and model.max_position == 131072
    assert [layer.mixer.window for layer in model.layers[:3]] == [128, None, 128]  # type: ignore[attr-defined]


def test_a_missing_number_of_experts_is_named() -> None:
    raw = {"architectures": ["GptOssForCausalLM"], "num_hidden_layers": 2, "rope_theta": 150000.0}
    with pytest.raises(CheckpointError, match="num_local_experts"):
        parse_config(raw)
