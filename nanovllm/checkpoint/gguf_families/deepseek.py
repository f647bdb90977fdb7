"""DeepSeek-V2 and -V3, GLM-4.7-Flash: kv_b_proj is stored as two tensors, whose first is transposed for each head."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from nanovllm.checkpoint.gguf_families import GGUFFamily

if TYPE_CHECKING:
    from nanovllm.checkpoint.gguf import GGUFFile
    from nanovllm.checkpoint.stored import Stored

SOFTMAX, SIGMOID = 1, 2  # expert_gating_func
GLM_FLASH = ((47, 48), 154880)  # layers and vocabulary of files that do not state it and mean the second


def _config(file: GGUFFile, plain: dict[str, Any]) -> dict[str, Any]:
    rotated = file.count("rope.dimension_count")
    whole = file.count("attention.key_length_mla", default=plain["head_dim"])
    values = file.count("attention.value_length_mla", default=file.get("attention.value_length"))
    groups, chosen = file.count("expert_group_count", default=1), file.count("expert_group_used_count", default=1)
    config: dict[str, Any] = {
        "num_key_value_heads": plain["num_attention_heads"],
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": whole - rotated,
        "v_head_dim": values,
        "kv_lora_rank": file.count("attention.kv_lora_rank"),
        "q_lora_rank": file.get("attention.q_lora_rank") and file.count("attention.q_lora_rank"),
        "partial_rotary_factor": 1.0,  # of the rotated part
        "rope_scaling": _rope_scaling(file, plain["rope_scaling"]),
        "first_k_dense_replace": file.get("leading_dense_block_count") or 0,
        "n_routed_experts": file.count("expert_count"),
        "num_experts_per_tok": file.count("expert_used_count"),
        "n_shared_experts": file.count("expert_shared_count"),
        "moe_intermediate_size": file.count("expert_feed_forward_length"),
        "routed_scaling_factor": file.real("expert_weights_scale", default=1.0),
        "norm_topk_prob": bool(file.get("expert_weights_norm")),
        "n_group": groups,
        "topk_group": chosen,
    }
    if _scoring(file, plain) == SIGMOID:
        return config | {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    return config | {"topk_method": "greedy" if groups == 1 else "group_limited_greedy"}


def _scoring(file: GGUFFile, plain: dict[str, Any]) -> int:
    layers, vocabulary = GLM_FLASH
    is_flash = plain["num_hidden_layers"] in layers and plain["vocab_size"] == vocabulary
    scoring = file.get("expert_gating_func") or (SIGMOID if is_flash else SOFTMAX)
    if scoring not in (SOFTMAX, SIGMOID):
        raise file.refuse(
            f"metadata expert_gating_func is {scoring}; known are {SOFTMAX} (softmax), {SIGMOID} (sigmoid)"
        )
    return scoring


def _rope_scaling(file: GGUFFile, scaling: dict[str, Any] | None) -> dict[str, Any] | None:
    """The file has a tenth of mscale_all_dim, which mscale equals in every published model."""
    if scaling is None or scaling["rope_type"] != "yarn":
        return scaling
    scale = 10 * file.real("rope.scaling.yarn_log_multiplier")
    return scaling | {"mscale": scale, "mscale_all_dim": scale}


def _tensors(file: GGUFFile, tensors: Iterable[tuple[str, Stored]]) -> Iterator[tuple[str, Stored]]:
    from nanovllm.checkpoint.gguf_families.changed import KeysAndValues

    found: dict[str, dict[str, Stored]] = {}  # the two tensors of each layer
    for name, tensor in tensors:
        module, _, part = name.removesuffix("_b_proj.weight").rpartition(".")
        if not name.endswith(("k_b_proj.weight", "v_b_proj.weight")) or part == "kv":
            yield name, tensor
            continue
        both = found.setdefault(module, {})
        both[part] = tensor
        if len(both) == 2:
            yield f"{module}.kv_b_proj.weight", KeysAndValues(both["k"], both["v"])


NAMES = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ffn_gate_up_exps": "mlp.experts.gate_up_proj",
    **{f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")},
}
FAMILIES = {
    "deepseek2": GGUFFamily(
        hf_class="DeepseekV2ForCausalLM",
        model_type="deepseek_v2",
        names=NAMES,
        partial_rotary=True,
        experts=True,
        config=_config,
        tensors=_tensors,
    )
}
