"""gpt-oss: attention with sinks and, in every other layer, a window; experts with biases and a clamped activation."""

from typing import Any

from nanovllm.layers.moe_spec import ClampedGlu, MoeSpec
from nanovllm.layers.refine import refine
from nanovllm.layers.sink_spec import SinkAttentionSpec
from nanovllm.models.changes import change_attention, with_experts
from nanovllm.models.layer_kinds import SLIDING, attention_kinds
from nanovllm.models.partial_rope import check_rope_is_stated
from nanovllm.models.spec import ModelSpec, count, llama_shaped

DEFAULTS: dict[str, Any] = {"rms_norm_eps": 1e-5, "head_dim": 64, "num_key_value_heads": 8}  # which files may leave out


def spec(raw: dict[str, Any]) -> ModelSpec:
    # the published configs leave the dtype out
    raw = {"dtype": raw.get("torch_dtype") or "bfloat16", **DEFAULTS, **raw}
    check_rope_is_stated(raw)
    num_layers, num_experts = count(raw, "num_hidden_layers"), count(raw, "num_local_experts")
    kinds = attention_kinds(raw, full_every=2)
    bias = bool(raw.get("attention_bias", True))
    moe = MoeSpec(
        hidden_size=count(raw, "hidden_size"),
        intermediate_size=count(raw, "intermediate_size"),
        num_experts=num_experts,
        num_experts_per_token=count(raw, "num_experts_per_tok", most=num_experts),
        norm_topk_prob=True,  # a softmax over the chosen experts is one over all of them, normalized
        activation=ClampedGlu(alpha=float(raw.get("swiglu_alpha", 1.702)), limit=float(raw.get("swiglu_limit", 7.0))),
        bias=True,
        router_name="router",
    )
    model = llama_shaped(
        raw,
        windows=[raw["sliding_window"] if kind == SLIDING else None for kind in kinds],
        qkv_bias=bias,
        o_bias=bias,
    )
    model = with_experts(model, dict.fromkeys(range(num_layers), moe))
    return change_attention(model, lambda _, own: refine(SinkAttentionSpec, own))
