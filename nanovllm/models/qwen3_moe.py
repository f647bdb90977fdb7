"""Qwen3-MoE: Qwen3 with a mixture of experts in place of most MLPs."""

from typing import Any

from nanovllm.layers.moe_spec import MoeSpec
from nanovllm.models.changes import with_experts
from nanovllm.models.spec import ModelSpec, count, llama_shaped


def spec(raw: dict[str, Any]) -> ModelSpec:
    raw = {"num_key_value_heads": 4, **raw}
    num_layers, bias = raw["num_hidden_layers"], bool(raw.get("attention_bias", False))
    num_experts = count(raw, "num_local_experts" if "num_local_experts" in raw else "num_experts")  # newer, older name
    step = count({"decoder_sparse_step": 1} | raw, "decoder_sparse_step")
    dense = set(raw.get("mlp_only_layers") or ())
    window = raw["sliding_window"] if raw.get("use_sliding_window") else None
    moe = MoeSpec(
        hidden_size=count(raw, "hidden_size"),
        intermediate_size=count(raw, "moe_intermediate_size"),
        num_experts=num_experts,
        num_experts_per_token=count(raw, "num_experts_per_tok", most=num_experts),
        norm_topk_prob=bool(raw.get("norm_topk_prob", False)),
    )
    experts = {i: moe for i in range(num_layers) if (i + 1) % step == 0 and i not in dense}
    windows = (window,) * num_layers
    return with_experts(llama_shaped(raw, qk_norm=True, qkv_bias=bias, o_bias=bias, windows=windows), experts)
