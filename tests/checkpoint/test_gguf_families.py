"""GGUF files of the other families, in the layout of llama.cpp's converter: greedy tokens of transformers."""

import json
from pathlib import Path

import pytest
import torch

from nanovllm.checkpoint.gguf import GGUFFile
from nanovllm.checkpoint.packed.fp4 import dequantize
from nanovllm.cli.main import main
from nanovllm.errors import CheckpointError
from nanovllm.models.registry import describe
from nanovllm.weights.forms import Fp4Form
from tests.checkpoint.gguf_families import write_family
from tests.helpers import assert_greedy, greedy_params, open_llm, prompt_of

FILES = [  # family of tests/helpers.py, architecture
    ("deepseek-v2-gguf", "deepseek2"),
    ("deepseek-v3-gguf", "deepseek2"),
    ("gemma4", "gemma4"),
    ("gemma4-e", "gemma4"),
    ("gemma4-moe", "gemma4"),
    ("glm-4.7-flash", "deepseek2"),
    ("glm4", "glm4"),
    ("gpt-oss-gguf", "gpt-oss"),
    ("granite", "granite"),
    ("lfm2-attention-last", "lfm2"),
    ("lfm2-moe-gguf", "lfm2moe"),
    ("ministral3", "mistral3"),
    ("mistral-small-3", "mistral3"),
    ("olmo2-plain", "olmo2"),
    ("olmo3", "olmo2"),
    ("phi3-window", "phi3"),
    ("phi4-mini", "phi3"),
    ("qwen3-next-gguf", "qwen3next"),
    ("qwen3.5-gguf", "qwen35"),
    ("qwen3.5-moe", "qwen35moe"),
    ("smollm3-even", "smollm3"),
]


@pytest.mark.parametrize(("name", "architecture"), FILES)
def test_tokens_are_those_of_transformers(tmp_path: Path, name: str, architecture: str) -> None:
    path = write_family(tmp_path / "model.gguf", name, architecture)
    with open_llm(path, skip_tokenizer_init=True) as llm:
        prompts = [prompt_of(37), prompt_of(5)]
        for prompt, output in zip(prompts, llm.generate(prompts, greedy_params(12), use_tqdm=False), strict=True):
            assert_greedy(name, prompt, output["token_ids"])


@pytest.mark.parametrize(
    ("name", "architecture", "kind", "module"),
    [
        ("phi4-mini", "phi3", "Q4_0", "self_attn.qkv_proj"),
        ("phi4-mini", "phi3", "Q8_0", "self_attn.qkv_proj"),
        ("lfm2-attention-last", "lfm2", "Q8_0", "conv.in_proj"),
        ("qwen3.5-gguf", "qwen35", "Q8_0", "linear_attn.in_proj_qkv"),
        ("qwen3.5-wide", "qwen35", "Q8_0", "linear_attn.out_proj"),
        ("gemma4-moe", "gemma4", "Q8_0", "moe.experts.0.up_proj"),
    ],
)
def test_packed_weights_equal_unpacked_ones(
    tmp_path: Path, name: str, architecture: str, kind: str, module: str
) -> None:
    """Rows of these modules are brought into another order or divided, packed ones, too."""
    path = write_family(tmp_path / "model.gguf", name, architecture, packed=kind)
    prompt, answers = prompt_of(20), []
    for quantization in (None, "gguf"):
        with open_llm(path, skip_tokenizer_init=True, quantization=quantization, cpu_kernels="torch") as llm:
            answers += llm.generate([prompt], greedy_params(12, logprobs=1), use_tqdm=False)
    unpacked, packed = answers
    assert unpacked["token_ids"] == packed["token_ids"]
    model = describe(path).config.packing
    assert model is not None and dict(model.modules)[f"model.layers.0.{module}"].bits == int(kind[1])


def test_mxfp4_experts_stay_packed(tmp_path: Path) -> None:
    path = write_family(tmp_path / "model.gguf", "gpt-oss-gguf", "gpt-oss", packed="MXFP4")
    answers = []
    for quantization in (None, "gguf"):
        with open_llm(path, skip_tokenizer_init=True, quantization=quantization) as llm:
            answers += llm.generate([prompt_of(20)], greedy_params(12), use_tqdm=False)
    assert answers[0]["token_ids"] == answers[1]["token_ids"]
    packing = describe(path).config.packing
    assert packing is not None and packing.form_of("model.layers.0.mlp.experts.0.gate_proj") == Fp4Form(32)
    with GGUFFile(path) as file:
        stored = dict(file.stored_tensors(torch.float32))["model.layers.1.mlp.experts.down_proj.weight"]
        expert = stored.pieces((slice(2, 3), slice(None), slice(32, 64)), 16, torch.device("cpu"))
        assert torch.equal(dequantize(expert, 16), stored.read()[2, :, 32:])  # which the gguf package dequantizes


def test_layers_that_propose_tokens_are_skipped(tmp_path: Path) -> None:
    path = write_family(
        tmp_path / "model.gguf",
        "qwen3.5-gguf",
        "qwen35",
        more=("blk.3.nextn.enorm.weight", "blk.3.attn_norm.weight"),
        block_count=4,
        nextn_predict_layers=1,
    )
    with open_llm(path, skip_tokenizer_init=True) as llm:
        (output,) = llm.generate([prompt_of(9)], greedy_params(8), use_tqdm=False)
        assert_greedy("qwen3.5-gguf", prompt_of(9), output["token_ids"])


def test_a_yarn_multiplier_of_zero_is_none(tmp_path: Path) -> None:
    values = {"zero": 0.0, "none": None, "one": 1.0}
    paths = {
        name: write_family(tmp_path / name, "ministral3", "mistral3", rope__scaling__yarn_log_multiplier=value)
        for name, value in values.items()
    }
    zero, none, one = (describe(path).config for path in paths.values())
    assert zero == none != one


def test_the_plan_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_family(tmp_path / "model.gguf", "granite", "granite", packed="Q8_0")
    assert main(["plan", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["architecture"] == "GraniteForCausalLM"


@pytest.mark.parametrize(
    ("name", "architecture", "key", "value", "message"),
    [
        ("granite", "granite", "logit_scale", None, "metadata logit_scale is None"),
        ("granite", "granite", "rope__scaling__finetuned", False, "without RoPE"),
        ("granite", "granite", "rope__dimension_count", 8, "partial rotation is not supported"),
        ("granite", "granite", "expert_count", 4, "expert_count is 4 in a granite model"),
        ("glm4", "glm4", "rope__dimension_sections", [1, 2, 1, 0], "rope.dimension_sections"),
        ("glm4", "glm4", "rope__dimension_count", 64, "rope.dimension_count is 64 of 32"),
        ("deepseek-v2-gguf", "deepseek2", "expert_gating_func", 3, "expert_gating_func is 3"),
        ("deepseek-v2-gguf", "deepseek2", "rope__scaling__yarn_log_multiplier", None, "yarn_log_multiplier is None"),
        ("lfm2-moe-gguf", "lfm2moe", "expert_gating_func", 1, "expert_gating_func is 1; it must be 2"),
        ("lfm2-moe-gguf", "lfm2moe", "expert_weights_scale", 1.5, "does not scale the experts"),
        ("ministral3", "mistral3", "rope__scaling__type", "linear", "attention.temperature_scale needs"),
        ("ministral3", "mistral3", "attention__sliding_window", 8, "llama.cpp computes no windows"),
        ("gemma4", "gemma4", "rope__dimension_count_swa", 8, "rope.dimension_count_swa"),
        ("gemma4", "gemma4", "feed_forward_length", [80, 160, 80], "feed_forward_length: only layers that share KV"),
        ("phi4-mini", "phi3", "rope__dimension_count", 8, r"must be F32 of shape \(4,\)"),
    ],
)
def test_what_is_not_understood_is_refused(
    tmp_path: Path, name: str, architecture: str, key: str, value: object, message: str
) -> None:
    path = write_family(tmp_path / "model.gguf", name, architecture, **{key: value})
    with pytest.raises(CheckpointError, match=message):
        describe(path)
