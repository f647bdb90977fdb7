"""DeepSeek-V2 and -V3, GLM-4.7-Flash: multi-head latent attention, experts chosen in groups beside shared ones, and an
MLP in the first layers. MTP layers, which files have after the last layer, are skipped."""

import math
from dataclasses import replace
from typing import Any

from nanovllm.checkpoint.names import FileNames
from nanovllm.errors import CheckpointError
from nanovllm.layers.grouped_moe_spec import GroupedMoeSpec
from nanovllm.layers.latent_spec import LatentAttentionSpec
from nanovllm.layers.spec import AttentionSpec
from nanovllm.models.changes import change_attention, with_experts
from nanovllm.models.known_values import check_known
from nanovllm.models.spec import ModelSpec, count, llama_shaped

V2, V3, GLM = "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM"
LATENT_NORM_EPS = 1e-6  # whatever the config says of the other norms
SOFTMAX = {"topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": False}
SIGMOID = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True}
DEFAULTS: dict[str, dict[str, Any]] = {  # which files may leave out
    V2: {**SOFTMAX, "first_k_dense_replace": 0, "routed_scaling_factor": 1.0},
    V3: {**SIGMOID, "first_k_dense_replace": 3, "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 1},
    GLM: {**SIGMOID, "first_k_dense_replace": 1, "routed_scaling_factor": 1.8, "rms_norm_eps": 1e-5},
}
KNOWN_V3 = {"topk_method": ("noaux_tc",), "scoring_func": ("sigmoid",), "attention_bias": (False,)}
KNOWN: dict[str, dict[str, tuple[Any, ...]]] = {  # other values are refused
    V2: {
        "topk_method": ("greedy", "group_limited_greedy"),
        "scoring_func": ("softmax",),
        "norm_topk_prob": (False,),
        "rope_interleave": (True,),
        "attention_bias": (False,),
        "mlp_bias": (False,),
    },
    V3: KNOWN_V3,
    GLM: KNOWN_V3,
}


def spec(raw: dict[str, Any]) -> ModelSpec:
    architecture = raw["architectures"][0]
    raw = {"rope_interleave": True} | DEFAULTS[architecture] | raw
    raw |= {"head_dim": count(raw, "qk_rope_head_dim")}
    check_known(raw, KNOWN[architecture])
    heads, kv_heads = count(raw, "num_attention_heads"), raw.get("num_key_value_heads")
    if kv_heads not in (None, heads):
        raise CheckpointError(f"config: num_key_value_heads={kv_heads} must be the number of heads, {heads}")
    model = llama_shaped(raw)
    model = change_attention(model, lambda _, own: _attention(raw, own))
    experts = _experts(raw, architecture)
    model = with_experts(model, {index: experts for index in _sparse_layers(raw, model.num_layers)})
    return replace(model, file_names=_without_mtp(raw, model.num_layers))


def _attention(raw: dict[str, Any], own: AttentionSpec) -> LatentAttentionSpec:
    latent, rotated = count(raw, "kv_lora_rank"), own.head_dim
    plain = count(raw, "qk_nope_head_dim")
    if rotated % 2:
        raise CheckpointError(f"config: qk_rope_head_dim={rotated} must be even")
    return LatentAttentionSpec(
        hidden_size=own.hidden_size,
        num_heads=own.num_heads,
        num_kv_heads=1,
        head_dim=latent + rotated,
        rope=own.rope,
        scale=(plain + rotated) ** -0.5 * _score_factor(raw),
        latent_size=latent,
        rotated_size=rotated,
        plain_size=plain,
        value_size=count(raw, "v_head_dim"),
        query_rank=None if raw["q_lora_rank"] is None else count(raw, "q_lora_rank"),
        latent_norm_eps=LATENT_NORM_EPS,
        interleaved=bool(raw["rope_interleave"]),
    )


def _score_factor(raw: dict[str, Any]) -> float:
    """What YaRN multiplies the attention scores with; 1 in a model whose context was not extended."""
    rope = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    weight = rope.get("mscale_all_dim")
    if rope.get("rope_type", rope.get("type", "default")) == "default" or not weight:
        return 1.0
    return (0.1 * weight * math.log(max(rope["factor"], 1.0)) + 1.0) ** 2


def _sparse_layers(raw: dict[str, Any], num_layers: int) -> list[int]:
    """Those that have experts."""
    kinds, interval = raw.get("mlp_layer_types"), count({"moe_layer_freq": 1} | raw, "moe_layer_freq")
    if kinds is None:
        return [index for index in range(raw["first_k_dense_replace"], num_layers) if index % interval == 0]
    if len(kinds) != num_layers or not set(kinds) <= {"dense", "sparse"}:
        raise CheckpointError(f"config: mlp_layer_types={kinds} must say dense or sparse for each layer")
    return [index for index, kind in enumerate(kinds) if kind == "sparse"]


def _experts(raw: dict[str, Any], architecture: str) -> GroupedMoeSpec:
    num_experts, groups = count(raw, "n_routed_experts"), 1
    if raw["topk_method"] != "greedy":
        groups = count(raw, "n_group", most=num_experts)
    chosen_groups = count(raw, "topk_group", most=groups) if groups > 1 else 1
    if num_experts % groups or (architecture != V2 and num_experts < 2 * groups):
        raise CheckpointError(f"config: n_group={groups} does not divide {num_experts} experts, two or more in each")
    size = count(raw, "moe_intermediate_size")
    return GroupedMoeSpec(
        hidden_size=count(raw, "hidden_size"),
        intermediate_size=size,
        num_experts=num_experts,
        num_experts_per_token=count(raw, "num_experts_per_tok", most=num_experts // groups * chosen_groups),
        norm_topk_prob=bool(raw["norm_topk_prob"]),
        shared_size=count(raw, "n_shared_experts") * size,
        shared_name="shared_experts",
        gated=False,
        scoring=raw["scoring_func"],
        num_groups=groups,
        num_chosen_groups=chosen_groups,
        scaling=float(raw["routed_scaling_factor"]),
    )


def _without_mtp(raw: dict[str, Any], num_layers: int) -> FileNames | None:
    num_mtp = raw.get("num_nextn_predict_layers", raw.get("num_mtp_layers")) or 0
    numbers = "|".join(map(str, range(num_layers, num_layers + num_mtp)))
    return FileNames(((rf"^model\.layers\.({numbers})\.", r"mtp.layers.\1."),)) if num_mtp else None
