"""gpt-oss. Experts are stacks of gate, up and down with biases, mostly in MXFP4."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nanovllm.checkpoint.gguf_families import GGUFFamily, layer_types, windowed_layers

if TYPE_CHECKING:
    from nanovllm.checkpoint.gguf import GGUFFile


def _config(file: GGUFFile, plain: dict[str, Any]) -> dict[str, Any]:
    """YaRN's bounds are not rounded, as the model's own config has it; the metadata does not state that."""
    return {
        "num_local_experts": file.count("expert_count"),
        "num_experts_per_tok": file.count("expert_used_count"),
        "intermediate_size": file.count("expert_feed_forward_length"),
        "sliding_window": file.count("attention.sliding_window"),
        "layer_types": layer_types(windowed_layers(file, plain["num_hidden_layers"], period=2)),
        "rope_scaling": plain["rope_scaling"] and plain["rope_scaling"] | {"truncate": False},
    }


NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_sinks.weight": "self_attn.sinks",
    "ffn_gate_inp": "mlp.router",
}
FAMILIES = {
    "gpt-oss": GGUFFamily(hf_class="GptOssForCausalLM", model_type="gpt_oss", names=NAMES, experts=True, config=_config)
}
