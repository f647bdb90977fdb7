"""Gemma 3 (text). Norms are stored as 1 + w."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nanovllm.checkpoint.gguf_families import GGUFFamily

if TYPE_CHECKING:
    from nanovllm.checkpoint.gguf import GGUFFile

LAYERS_OF_27B = 62


def _config(file: GGUFFile, plain: dict[str, Any]) -> dict[str, Any]:
    """What the metadata does not state is as in llama.cpp: with 62 layers, queries have another scale."""
    width = plain["hidden_size"] // plain["num_attention_heads"]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": width if plain["num_hidden_layers"] == LAYERS_OF_27B else plain["head_dim"],
        "sliding_window": file.count("attention.sliding_window"),
        "sliding_window_pattern": file.count("attention.sliding_window_pattern", default=6),
        "rope_local_base_freq": file.real("rope.freq_base_swa", default=10_000.0),
        "attn_logit_softcapping": file.get("attn_logit_softcapping"),
        "final_logit_softcapping": file.get("final_logit_softcapping") or None,
        "norm_offset": 0.0,  # the file has 1 + w
    }


NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
FAMILIES = {"gemma3": GGUFFamily(hf_class="Gemma3ForCausalLM", model_type="gemma3_text", names=NAMES, config=_config)}
