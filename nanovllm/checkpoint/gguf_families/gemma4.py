"""Gemma 4 (text). Sizes of heads and KV heads differ between layers with windows and those without."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nanovllm.checkpoint.gguf_families import GGUFFamily, layer_types, windowed_layers

if TYPE_CHECKING:
    from nanovllm.checkpoint.gguf import GGUFFile

KV_HEADS, MLP_SIZE = "attention.head_count_kv", "feed_forward_length"


def _config(file: GGUFFile, plain: dict[str, Any]) -> dict[str, Any]:
    num_layers, whole = plain["num_hidden_layers"], plain["head_dim"]
    windowed = windowed_layers(file, num_layers, period=6)
    if len(windowed) != num_layers or all(windowed) or not any(windowed):
        raise file.refuse("metadata attention.sliding_window_pattern must name layers with and without windows")
    size = file.count("attention.key_length_swa", default=whole)
    if file.count("rope.dimension_count_swa", default=size) != size:
        raise file.refuse("metadata rope.dimension_count_swa: partial rotation of layers with windows is not supported")
    kv_heads = file.per_layer(KV_HEADS) or [plain["num_key_value_heads"]] * num_layers
    widths = file.per_layer(MLP_SIZE) or [plain["intermediate_size"]] * num_layers
    shared = file.get("attention.shared_kv_layers") or 0
    first = num_layers - shared
    doubles = widths[-1] == 2 * widths[0]
    if widths != [widths[0]] * first + [widths[0] * (2 if doubles else 1)] * shared:
        raise file.refuse(f"metadata {MLP_SIZE}: only layers that share KV may be wider, and twice as wide")
    full = [index for index in range(num_layers) if not windowed[index]]
    per_layer = {str(index): {"head_dim": whole, "num_key_value_heads": kv_heads[index]} for index in full}
    tables = [info.shape[0] for name, info in file.tensors.items() if name == "per_layer_token_embd.weight"]
    config = {
        "hidden_activation": "gelu_pytorch_tanh",
        "intermediate_size": widths[0],
        "use_double_wide_mlp": doubles,
        "head_dim": size,
        "global_head_dim": whole,
        "num_key_value_heads": kv_heads[windowed.index(True)],
        "per_layer_config": per_layer,
        "attention_k_eq_v": f"blk.{full[0]}.attn_v.weight" not in file.tensors,
        "num_kv_shared_layers": shared,
        "sliding_window": file.count("attention.sliding_window"),
        "layer_types": layer_types(windowed),
        "rope_scaling": None,
        "rope_parameters": {
            "sliding_attention": {"rope_theta": file.real("rope.freq_base_swa", default=10_000.0)},
            "full_attention": {"rope_theta": plain["rope_theta"], **(plain["rope_scaling"] or {})},
        },
        "final_logit_softcapping": file.get("final_logit_softcapping") or None,
        "hidden_size_per_layer_input": file.get("embedding_length_per_layer_input") or 0,
        "vocab_size_per_layer_input": tables[0] if tables else plain["vocab_size"],
    }
    if file.get("expert_count"):
        config |= {
            "enable_moe_block": True,
            "num_experts": file.count("expert_count"),
            "top_k_experts": file.count("expert_used_count"),
            "moe_intermediate_size": file.count("expert_feed_forward_length"),
        }
    return config


NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm": "post_feedforward_layernorm",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "layer_output_scale.weight": "layer_scalar",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "ffn_gate_inp": "moe.router.proj",
    "ffn_gate_inp.scale": "moe.router.scale",
    "ffn_down_exps.scale": "moe.router.per_expert_scale",
    **{f"ffn_{part}_exps": f"moe.experts.{part}_proj" for part in ("gate_up", "gate", "up", "down")},
}
TOP_NAMES = {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
FAMILIES = {
    "gemma4": GGUFFamily(
        hf_class="Gemma4ForCausalLM",
        model_type="gemma4_text",
        names=NAMES,
        top_names=TOP_NAMES,
        experts=True,
        uneven=frozenset({KV_HEADS, MLP_SIZE}),
        config=_config,
    )
}
