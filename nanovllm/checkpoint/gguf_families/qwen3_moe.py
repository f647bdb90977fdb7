"""Qwen3 with experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nanovllm.checkpoint.gguf_families import GGUFFamily

if TYPE_CHECKING:
    from nanovllm.checkpoint.gguf import GGUFFile


def _config(file: GGUFFile, plain: dict[str, Any]) -> dict[str, Any]:
    normed = file.get("expert_weights_norm")
    return {
        "num_experts": file.count("expert_count"),
        "num_experts_per_tok": file.count("expert_used_count"),
        "moe_intermediate_size": file.count("expert_feed_forward_length"),
        "norm_topk_prob": True if normed is None else bool(normed),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


FAMILIES = {
    "qwen3moe": GGUFFamily(hf_class="Qwen3MoeForCausalLM", model_type="qwen3_moe", experts=True, config=_config)
}
