"""Qwen3-Next and Qwen3.5, dense and with experts: a gated delta net in three of four layers, attention with an output
gate in the others, norms whose weights are stored as w - 1. Of Qwen3.5 the text model."""

from dataclasses import replace
from typing import Any

from nanovllm.errors import CheckpointError
from nanovllm.layers.delta_net_spec import DeltaNetSpec
from nanovllm.layers.gated_attention_spec import GatedAttentionSpec
from nanovllm.layers.refine import refine
from nanovllm.layers.shared_expert_spec import SharedExpertSpec
from nanovllm.layers.spec import LayerSpec
from nanovllm.models.known_values import check_known
from nanovllm.models.layer_kinds import FULL, every, layer_kinds
from nanovllm.models.partial_rope import read_partial_rope, without_rope
from nanovllm.models.spec import ModelSpec, count, llama_shaped
from nanovllm.models.text_part import text_part

LINEAR = "linear_attention"
DENSE = ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration")
KNOWN = {"attn_output_gate": (True,), "output_gate_type": ("silu", "swish")}  # other values are refused


def spec(raw: dict[str, Any]) -> ModelSpec:
    raw = text_part(raw, known=("qwen3_5_text", "qwen3_5_moe_text"))
    raw = {"head_dim": 256, "num_key_value_heads": 4 if raw["architectures"][0] in DENSE else 2, **raw}
    check_known(raw, KNOWN)
    if not raw.get("mlp_only_layers") and raw.get("decoder_sparse_step", 1) == 1:
        raw.setdefault("intermediate_size", raw.get("moe_intermediate_size"))  # no layer has an MLP
    bias, offset = bool(raw.get("attention_bias", False)), raw.get("norm_offset", 1.0)  # 0 in GGUF files
    model = llama_shaped(without_rope(raw), qk_norm=True, qkv_bias=bias, o_bias=bias)
    rope = read_partial_rope(raw, head_dim=raw["head_dim"], max_position=model.max_position, share=0.25)
    delta_net, experts = _delta_net(raw, model), _experts(raw, model)

    def layer(own: LayerSpec, kind: str, index: int) -> LayerSpec:
        changes: dict[str, Any] = {"norm_offset": offset, "feed_forward": experts.get(index, own.feed_forward)}
        if kind == LINEAR:
            return replace(own, mixer=delta_net, mixer_name="linear_attn", **changes)
        return replace(own, mixer=refine(GatedAttentionSpec, own.mixer, rope=rope, qk_norm_offset=offset), **changes)

    layers = tuple(map(layer, model.layers, _kinds(raw, model.num_layers), range(model.num_layers)))
    max_position = model.max_position if rope.scaling is None else rope.scaling.longest(model.max_position)
    return replace(model, layers=layers, norm_offset=offset, max_position=max_position)


def _kinds(raw: dict[str, Any], num_layers: int) -> list[str]:
    otherwise = every(raw.get("full_attention_interval", 4), FULL, LINEAR, num_layers)
    return layer_kinds(raw, known=(LINEAR, FULL), otherwise=otherwise)


def _delta_net(raw: dict[str, Any], model: ModelSpec) -> DeltaNetSpec:
    num_key_heads, num_value_heads = count(raw, "linear_num_key_heads"), count(raw, "linear_num_value_heads")
    if num_value_heads % num_key_heads:
        raise CheckpointError(f"linear_num_value_heads={num_value_heads} is no multiple of {num_key_heads} key heads")
    return DeltaNetSpec(
        hidden_size=model.hidden_size,
        num_key_heads=num_key_heads,
        num_value_heads=num_value_heads,
        key_dim=count(raw, "linear_key_head_dim"),
        value_dim=count(raw, "linear_value_head_dim"),
        kernel_size=count(raw, "linear_conv_kernel_dim"),
        norm_eps=model.norm_eps,
        by_key_head=raw.get("linear_by_key_head", model.architecture == "Qwen3NextForCausalLM"),
    )


def _experts(raw: dict[str, Any], model: ModelSpec) -> dict[int, SharedExpertSpec]:
    """Of the layers that have experts."""
    if model.architecture in DENSE or raw.get("num_experts") == 0:
        return {}
    num_experts = count(raw, "num_local_experts" if raw.get("num_local_experts") else "num_experts")
    step, dense = raw.get("decoder_sparse_step", 1), set(raw.get("mlp_only_layers") or ())
    experts = SharedExpertSpec(
        hidden_size=model.hidden_size,
        intermediate_size=count(raw, "moe_intermediate_size"),
        num_experts=num_experts,
        num_experts_per_token=count(raw, "num_experts_per_tok", most=num_experts),
        norm_topk_prob=bool(raw.get("norm_topk_prob", True)),
        shared_size=count(raw, "shared_expert_intermediate_size"),
    )
    return {i: experts for i in range(model.num_layers) if (i + 1) % step == 0 and i not in dense}
