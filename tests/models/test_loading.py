"""Checkpoints in different layouts give the same weights."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanovllm import LLM
from tests.helpers import FAMILIES, assert_greedy, copy_of, greedy_params, model_dir, open_llm, prompt_of

PROMPT = prompt_of(20)


def answer(model: Path) -> list[int]:
    with open_llm(model) as llm:
        return llm.generate(PROMPT, greedy_params(8), use_tqdm=False)[0]["token_ids"]


def rewrite(folder: Path, tensors: dict[str, torch.Tensor], file: str = "model.safetensors") -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / file)


def test_the_layouts_that_the_oracle_covers() -> None:
    """Checks the fixtures: another version of transformers may write other layouts."""
    sharded = {name for name in FAMILIES if (model_dir(name) / "model.safetensors.index.json").exists()}
    assert sharded == {name for name, family in FAMILIES.items() if family.sharded}
    per_expert = load_file(model_dir("qwen3-moe") / "model.safetensors")
    assert "model.layers.0.mlp.experts.5.gate_proj.weight" in per_expert
    stacked = [load_file(file) for file in model_dir("qwen3-moe-stacked").glob("*.safetensors")]
    assert any("model.layers.1.mlp.experts.gate_up_proj" in tensors for tensors in stacked)


def test_experts_stacked_apart_and_together(tmp_path: Path) -> None:
    folder = copy_of("qwen3-moe", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    expected = answer(folder)
    assert_greedy("qwen3-moe", PROMPT, expected)
    for layer in (0, 2):
        experts = f"model.layers.{layer}.mlp.experts"
        for part in ("gate", "up", "down"):
            names = [f"{experts}.{index}.{part}_proj.weight" for index in range(6)]
            tensors[f"{experts}.{part}_proj.weight"] = torch.stack([tensors.pop(name) for name in names])
    rewrite(folder, tensors)
    assert answer(folder) == expected
    for layer in (0, 2):
        experts = f"model.layers.{layer}.mlp.experts"
        parts = [tensors.pop(f"{experts}.{part}_proj.weight") for part in ("gate", "up")]
        tensors[f"{experts}.gate_up_proj"] = torch.cat(parts, dim=1)
        tensors[f"{experts}.down_proj"] = tensors.pop(f"{experts}.down_proj.weight")
    rewrite(folder, tensors)
    assert answer(folder) == expected


def test_what_may_lie_beside_the_weights(tmp_path: Path) -> None:
    folder = copy_of("llama-old-rope3", tmp_path)
    expected = answer(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()  # tied: the embedding is used instead
    rewrite(folder, tensors)
    rewrite(folder, {"another.layout": torch.zeros(2)}, "consolidated.safetensors")
    assert answer(folder) == expected


def test_files_without_an_index(tmp_path: Path) -> None:
    folder = copy_of("llama", tmp_path)
    (folder / "model.safetensors.index.json").unlink()
    assert_greedy("llama", PROMPT, answer(folder))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_another_type_are_converted(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = copy_of("qwen3", tmp_path)
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(folder / "model.safetensors").items()}
    rewrite(folder, tensors)
    converted = answer(folder)
    rewrite(folder, {name: tensor.float() for name, tensor in tensors.items()})
    assert answer(folder) == converted


@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
def test_dummy_weights(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((model_dir(name) / "config.json").read_text())

    def run(seed: int) -> list[int]:
        options = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 64, "num_kv_cache_blocks": 4}
        with LLM(tmp_path, device="cpu", seed=seed, **options) as llm:
            return llm.generate(PROMPT, greedy_params(16), use_tqdm=False)[0]["token_ids"]

    assert run(0) == run(0) != run(1)
