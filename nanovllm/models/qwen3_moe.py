"""Qwen3-MoE: Qwen3 with a mixture of experts in place of most MLPs."""

from typing import Any

from nanovllm.models import qwen3
from nanovllm.model_config import MoeConfig


def differences(raw: dict[str, Any]) -> dict[str, Any]:
    num_layers = raw["num_hidden_layers"]
    step = raw.get("decoder_sparse_step", 1)
    dense = set(raw.get("mlp_only_layers") or ()) | {i for i in range(num_layers) if (i + 1) % step}
    window = raw.get("sliding_window") if raw.get("use_sliding_window") else None
    return qwen3.differences(raw) | {
        "windows": (window,) * num_layers,
        "moe": MoeConfig(
            num_experts=raw["num_local_experts" if "num_local_experts" in raw else "num_experts"],  # newer, older name
            num_experts_per_token=raw["num_experts_per_tok"],
            intermediate_size=raw["moe_intermediate_size"],
            norm_topk_prob=bool(raw.get("norm_topk_prob", False)),
            dense_layers=frozenset(dense),
        ),
    }
