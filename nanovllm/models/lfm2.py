"""LFM2 and LFM2.5: gated short convolutions in place of attention in most layers; Qwen3's attention. Some have experts
in all but the first layers."""

from dataclasses import replace
from typing import Any

from nanovllm.checkpoint.names import FileNames
from nanovllm.layers.grouped_moe_spec import GroupedMoeSpec
from nanovllm.layers.short_conv_spec import ShortConvSpec
from nanovllm.layers.spec import LayerSpec
from nanovllm.models.changes import with_experts
from nanovllm.models.known_values import check_known
from nanovllm.models.layer_kinds import FULL, layer_kinds
from nanovllm.models.spec import ModelSpec, count, llama_shaped

MOE = "Lfm2MoeForCausalLM"
KNOWN = {"use_expert_bias": (True,), "block_use_swiglu": (True,), "use_pos_enc": (True,)}  # other values are refused
NAMES = FileNames(
    renamed=(
        (r"\.embedding_norm\.", ".norm."),
        (r"\.operator_norm\.", ".input_layernorm."),
        (r"\.ffn_norm\.", ".post_attention_layernorm."),
        (r"\.feed_forward\.expert_bias$", ".mlp.gate.e_score_correction_bias"),
        (r"\.feed_forward\.", ".mlp."),
        (r"\.w1\.", ".gate_proj."),
        (r"\.w3\.", ".up_proj."),
        (r"\.w2\.", ".down_proj."),
        (r"\.self_attn\.out_proj\.", ".self_attn.o_proj."),
        (r"\.([qk])_layernorm\.", r".\1_norm."),
    )
)


def spec(raw: dict[str, Any]) -> ModelSpec:
    check_known(raw, KNOWN)
    raw = {"rope_theta": raw.get("theta", 1e6), "num_key_value_heads": 8, **raw, "intermediate_size": _mlp_size(raw)}
    raw["rms_norm_eps"] = raw.get("norm_eps", 1e-5)
    raw["tie_word_embeddings"] = raw.get("tie_embedding", raw.get("tie_word_embeddings", True))
    model = llama_shaped(raw, qk_norm=True)
    attends = raw.get("full_attn_idxs")
    otherwise = [FULL if attends is None or index in attends else "conv" for index in range(model.num_layers)]
    kinds = layer_kinds(raw, known=(FULL, "conv"), otherwise=otherwise)
    conv = ShortConvSpec(
        hidden_size=model.hidden_size, kernel_size=count(raw, "conv_L_cache"), bias=bool(raw.get("conv_bias"))
    )

    def layer(own: LayerSpec, kind: str) -> LayerSpec:
        return replace(own, mixer=conv, mixer_name="conv") if kind == "conv" else own

    model = replace(model, layers=tuple(map(layer, model.layers, kinds)), file_names=NAMES)
    if raw["architectures"][0] != MOE:
        return model
    experts = _experts(raw)
    return with_experts(model, {index: experts for index in range(raw.get("num_dense_layers", 2), model.num_layers)})


def _experts(raw: dict[str, Any]) -> GroupedMoeSpec:
    num_experts = count(raw, "num_experts")
    return GroupedMoeSpec(
        hidden_size=count(raw, "hidden_size"),
        intermediate_size=count(raw, "moe_intermediate_size"),
        num_experts=num_experts,
        num_experts_per_token=count(raw, "num_experts_per_tok", most=num_experts),
        norm_topk_prob=bool(raw.get("norm_topk_prob", True)),
        shared_size=0,
        gated=False,
        scoring="sigmoid",
        num_groups=1,
        num_chosen_groups=1,
        scaling=float(raw.get("routed_scaling_factor", 1.0)),
        least_sum=1e-6,
    )


def _mlp_size(raw: dict[str, Any]) -> int:
    size = count(raw, "block_ff_dim" if "block_ff_dim" in raw else "intermediate_size")
    if raw["architectures"][0] == MOE or not raw.get("block_auto_adjust_ff_dim", True):
        return size
    size, factor = int(2 * size / 3), raw.get("block_ffn_dim_multiplier", 1.0)
    if factor is None:
        return size
    multiple = raw.get("block_multiple_of", 256)
    return -(-int(factor * size) // multiple) * multiple
