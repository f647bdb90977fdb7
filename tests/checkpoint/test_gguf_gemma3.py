"""GGUF files of Gemma 3: the tokens of transformers, tensors with llama.cpp's names and norms stored as 1 + w."""

from pathlib import Path

import gguf
import pytest
import torch

from nanovllm.checkpoint.gguf import GGUFFile
from nanovllm.errors import CheckpointError
from nanovllm.models.registry import describe, parse_config
from tests.checkpoint.gguf_files import finish
from tests.helpers import assert_greedy, greedy_params, model_dir, open_llm, prompt_of, reference

FAMILY = "gemma3-even"
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def gguf_name(name: str) -> str:
    name = name.removeprefix("model.").removesuffix(".weight")
    if name in ("embed_tokens", "norm"):
        return {"embed_tokens": "token_embd", "norm": "output_norm"}[name] + ".weight"
    _, layer, part = name.split(".", 2)
    return f"blk.{layer}.{NAMES[part]}.weight"


def write(path: Path) -> Path:
    config = reference(FAMILY).config
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_sliding_window(config.sliding_window)
    writer.add_uint32("gemma3.attention.sliding_window_pattern", 2)
    writer.add_rope_freq_base(config.rope_parameters["full_attention"]["rope_theta"])
    writer.add_float32("gemma3.rope.freq_base_swa", config.rope_parameters["sliding_attention"]["rope_theta"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(config.rope_parameters["full_attention"]["factor"])
    for name, weight in reference(FAMILY).state_dict().items():
        if name != "lm_head.weight":
            stored = weight + 1 if name.endswith("norm.weight") else weight
            writer.add_tensor(gguf_name(name), stored.contiguous().numpy())
    finish(writer)
    return path


def test_tokens_and_config_equal_those_of_the_folder(tmp_path: Path) -> None:
    path = write(tmp_path / "gemma3.gguf")
    folder, file = describe(model_dir(FAMILY)).config, describe(path).config
    assert [layer.mixer.window for layer in file.layers] == [12, None, 12]
    for theirs, ours in zip(folder.layers, file.layers, strict=True):
        assert theirs.mixer.rope == ours.mixer.rope and theirs.mixer.score_scale == ours.mixer.score_scale
    assert (file.norm_offset, folder.norm_offset) == (0.0, 1.0) and file.scales == folder.scales
    with open_llm(path, skip_tokenizer_init=True) as llm:
        prompts = [prompt_of(37), prompt_of(5)]
        for prompt, output in zip(prompts, llm.generate(prompts, greedy_params(12), use_tqdm=False), strict=True):
            assert_greedy(FAMILY, prompt, output["token_ids"])


def test_norms_are_not_rounded_for_a_16_bit_model(tmp_path: Path) -> None:
    with GGUFFile(write(tmp_path / "gemma3.gguf")) as file:
        tensors = {name: stored.read() for name, stored in file.stored_tensors(torch.bfloat16)}
    norm = reference(FAMILY).state_dict()["model.norm.weight"]
    assert torch.equal(tensors["model.norm.weight"], norm + 1)
    assert tensors["model.layers.0.self_attn.q_proj.weight"].dtype == torch.bfloat16


def test_what_the_metadata_does_not_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with GGUFFile(write(tmp_path / "gemma3.gguf")) as file:
        for key in ("attention.sliding_window_pattern", "rope.freq_base_swa", "rope.scaling.type"):
            del file.metadata[f"gemma3.{key}"]
        plain = file.hf_config()
        monkeypatch.setattr("nanovllm.checkpoint.gguf_families.gemma3.LAYERS_OF_27B", 3)
        file.metadata["gemma3.attention.key_length"] = 32
        assert file.hf_config()["query_pre_attn_scalar"] == 64 // 4
        file.metadata["gemma3.attn_logit_softcapping"] = 50.0
        with pytest.raises(CheckpointError, match=r"attn_logit_softcapping=50.0 is not implemented"):
            parse_config(file.hf_config())
    assert (plain["sliding_window_pattern"], plain["rope_local_base_freq"]) == (6, 10_000.0)
    assert plain["query_pre_attn_scalar"] == 16
