"""Gemma 4: the spelling of published configs, what is refused, and layers that share keys and values."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanovllm import LLM
from nanovllm.distributed.group import Rank
from nanovllm.errors import CheckpointError, ConfigError
from nanovllm.layers.spec import MlpSpec
from nanovllm.models.registry import describe, parse_config
from nanovllm.models.shard import shard_of
from nanovllm.runner.memory_budget import cache_bytes
from tests.helpers import (
    assert_greedy,
    copy_of,
    edit_config,
    greedy_params,
    model_dir,
    open_llm,
    prompt_of,
    reference_logprobs,
)


def raw_config(**changes: Any) -> dict[str, Any]:
    return json.loads((model_dir("gemma4") / "config.json").read_text()) | changes


def test_both_spellings_of_the_size_of_full_attention() -> None:
    new = raw_config()
    assert new.pop("per_layer_config") == {"2": {"head_dim": 32, "num_key_value_heads": 1}}
    published = new | {"global_head_dim": 32, "num_global_key_value_heads": 1}
    assert parse_config(published) == parse_config(raw_config())
    text = {"architectures": ["Gemma4ForConditionalGeneration"], "text_config": published, "dtype": "float32"}
    assert parse_config(text).layers == parse_config(raw_config()).layers
    sliding, full = (parse_config(published).layers[index].mixer for index in (0, 2))
    assert (sliding.head_dim, sliding.num_kv_heads, sliding.values_are_keys) == (16, 2, False)
    assert (full.head_dim, full.num_kv_heads, full.values_are_keys, full.scale) == (32, 1, True, 1.0)
    apart = parse_config(published | {"attention_k_eq_v": False}).layers[2].mixer
    assert (apart.num_kv_heads, apart.values_are_keys) == (2, False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 100},
            "vocab_size_per_layer_input=100 is below vocab_size=160",
        ),
        ({"num_kv_shared_layers": 1}, "num_kv_shared_layers=1 leaves no layer of every kind"),
        ({"enable_moe_block": True, "num_experts": 4}, "moe_intermediate_size=None must be"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all' is not implemented"),
        ({"hidden_activation": "relu"}, "hidden_activation='relu'"),
    ],
)
def test_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        parse_config(raw_config(**changes))


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # on a CPU without bfloat16 arithmetic
@pytest.mark.parametrize("name", ["gemma4", "gemma4-e", "gemma4-moe"])
def test_16_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With as many tokens as the norms of a CPU have a path of their own for, and with more."""
    monkeypatch.setattr("nanovllm.runner.device.cpu_has_bfloat16", lambda: True)
    prompts = [prompt_of(4), prompt_of(40)]
    with open_llm(name, dtype="bfloat16") as llm:
        outputs = llm.generate(prompts, greedy_params(2, logprobs=1), use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = reference_logprobs(name, prompt + output["token_ids"])[len(prompt) - 1 :]
        for position, entries in enumerate(output.outputs[0].logprobs or []):
            for token, entry in entries.items():
                assert abs(entry.logprob - expected[position, token].item()) < 0.3


# --- layers that share keys and values --------------------------------------------------------------------------------


def test_shared_layers_take_no_memory() -> None:
    """Of five layers two have no keys and values: one of full attention, and one with a window."""
    options = {"device": "cpu", "dtype": "float32", "num_kv_cache_blocks": 4, "kv_cache_block_size": 16}
    plan = LLM.plan(str(model_dir("gemma4-e")), **options)
    sliding, full = 2 * 2 * 16 * 4, 2 * 2 * 32 * 4  # bytes per token: keys and values of two heads
    assert [(group.num_layers, group.bytes_per_token) for group in plan.groups] == [(1, full), (2, 2 * sliding)]
    assert plan.kv_bytes_per_token == full + 2 * sliding
    with open_llm("gemma4-e") as llm:
        runner: Any = llm.llm_engine._core.executor
        states = runner.states
        assert states[3] is states[2] and states[4] is states[1] and len({id(state) for state in states}) == 3
        held = sum(state.kv.numel() * 4 for state in states[:3])
        assert held == cache_bytes(runner.cache_size) == 64 * 16 * plan.kv_bytes_per_token


def test_whose_keys_and_values_are_read() -> None:
    """As in E2B: 35 layers, every fifth of full attention, the last twenty without keys and values."""
    kinds = ["full_attention" if index % 5 == 4 else "sliding_attention" for index in range(35)]
    changes = {"num_hidden_layers": 35, "layer_types": kinds, "num_kv_shared_layers": 20, "per_layer_config": {}}
    model = parse_config(raw_config(**changes, use_double_wide_mlp=True))
    sources = [getattr(layer.mixer, "source", None) for layer in model.layers]
    assert sources == [None] * 15 + [14 if kind == "full_attention" else 13 for kind in kinds[15:]]
    widths = [layer.feed_forward.intermediate_size for layer in model.layers if isinstance(layer.feed_forward, MlpSpec)]
    assert widths == [80] * 15 + [160] * 20


def test_a_stage_must_have_the_layers_whose_keys_and_values_it_reads() -> None:
    model = describe(model_dir("gemma4-e")).config
    for rank in range(2):
        with pytest.raises(ConfigError, match="layer 3 reads the KV cache of layer 2, which another stage has"):
            shard_of(model, Rank(rank, 1, 2))


def test_a_published_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It has towers, which are skipped with a notice, and keys and values of layers that do not use them."""
    folder = copy_of("gemma4-e", tmp_path)
    edit_config(folder, lambda raw: raw.update(text_config=dict(raw), architectures=["Gemma4ForConditionalGeneration"]))
    tensors = load_file(folder / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model.", 1): one for name, one in tensors.items()}
    unused = {
        f"model.language_model.layers.{layer}.self_attn.{name}.weight": torch.zeros(3)
        for layer in (3, 4)
        for name in ("k_proj", "v_proj", "k_norm")
    }
    towers = {f"model.{name}.weight": torch.zeros(3) for name in ("vision_tower.x", "audio_tower.x", "embed_audio.x")}
    save_file(renamed | unused | towers, folder / "model.safetensors")
    with caplog.at_level(logging.WARNING, logger="nanovllm"), open_llm(folder) as llm:
        (output,) = llm.generate([prompt_of(37)], greedy_params(8), use_tqdm=False)
    assert_greedy("gemma4-e", prompt_of(37), output["token_ids"])
    assert all(f"{tower} (1 tensors)" in caplog.text for tower in ("vision_tower", "audio_tower", "embed_audio"))
    save_file(renamed | {"model.language_model.layers.2.self_attn.x": torch.zeros(3)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="1 unexpected: model.layers.2.self_attn.x"):
        open_llm(folder)


def test_a_published_file_of_12b(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Images and sounds have projections in place of towers."""
    folder = copy_of("gemma4-unified", tmp_path)
    wrapper = {"architectures": ["Gemma4UnifiedForConditionalGeneration"], "model_type": "gemma4_unified"}
    edit_config(folder, lambda raw: raw.update(text_config=dict(raw), **wrapper))
    tensors = load_file(folder / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model.", 1): one for name, one in tensors.items()}
    other = ("vision_embedder.patch_dense", "embed_vision.embedding_projection", "embed_audio.embedding_projection")
    save_file(renamed | {f"model.{name}.weight": torch.zeros(3) for name in other}, folder / "model.safetensors")
    with caplog.at_level(logging.WARNING, logger="nanovllm"), open_llm(folder) as llm:
        (output,) = llm.generate([prompt_of(37)], greedy_params(8), use_tqdm=False)
    assert_greedy("gemma4-unified", prompt_of(37), output["token_ids"])
    assert all(f"{one.partition('.')[0]} (1 tensors)" in caplog.text for one in other)
    raw = json.loads((folder / "config.json").read_text())["text_config"]
    for name in ("sliding_window", "max_position_embeddings"):
        del raw[name]
    left_out = parse_config(raw | wrapper)
    assert (left_out.layers[0].mixer.window, left_out.max_position) == (1024, 262144)
    with pytest.raises(CheckpointError, match="model_type='gemma4_text'; known here: gemma4_unified_text"):
        parse_config({**wrapper, "text_config": raw | {"model_type": "gemma4_text"}})
