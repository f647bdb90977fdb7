"""Qwen3-MoE: Qwen3 with a mixture of experts in place of most MLPs."""

from typing import Any

from nanovllm.models import qwen3
from nanovllm.models.spec import MoeConfig, count


def differences(raw: dict[str, Any]) -> dict[str, Any]:
    num_layers = raw["num_hidden_layers"]
    num_experts = count(raw, "num_local_experts" if "num_local_experts" in raw else "num_experts")  # newer, older name
    step = count({"decoder_sparse_step": 1} | raw, "decoder_sparse_step")
    dense = set(raw.get("mlp_only_layers") or ()) | {i for i in range(num_layers) if (i + 1) % step}
    window = raw.get("sliding_window") if raw.get("use_sliding_window") else None
    return qwen3.differences(raw) | {
        "windows": (window,) * num_layers,
        "moe": MoeConfig(
            num_experts=num_experts,
            num_experts_per_token=count(raw, "num_experts_per_tok", most=num_experts),
            intermediate_size=count(raw, "moe_intermediate_size"),
            norm_topk_prob=bool(raw.get("norm_topk_prob", False)),
            dense_layers=frozenset(dense),
        ),
    }
