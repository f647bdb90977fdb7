"""Qwen3-MoE: Qwen3 with a mixture of experts in place of most MLPs."""

from typing import Any

from nanovllm.errors import CheckpointError
from nanovllm.model_config import MoeConfig
from nanovllm.models import qwen3


def differences(raw: dict[str, Any]) -> dict[str, Any]:
    num_layers = raw["num_hidden_layers"]
    num_experts = _count(raw, "num_local_experts" if "num_local_experts" in raw else "num_experts")  # newer, older name
    step = _count({"decoder_sparse_step": 1} | raw, "decoder_sparse_step")
    dense = set(raw.get("mlp_only_layers") or ()) | {i for i in range(num_layers) if (i + 1) % step}
    window = raw.get("sliding_window") if raw.get("use_sliding_window") else None
    return qwen3.differences(raw) | {
        "windows": (window,) * num_layers,
        "moe": MoeConfig(
            num_experts=num_experts,
            num_experts_per_token=_count(raw, "num_experts_per_tok", most=num_experts),
            intermediate_size=_count(raw, "moe_intermediate_size"),
            norm_topk_prob=bool(raw.get("norm_topk_prob", False)),
            dense_layers=frozenset(dense),
        ),
    }


def _count(raw: dict[str, Any], name: str, most: int | None = None) -> int:
    value = raw[name]
    if not isinstance(value, int) or value < 1 or (most is not None and value > most):
        limit = "" if most is None else f" and at most {most}"
        raise CheckpointError(f"config: {name}={value!r} must be an integer of at least 1{limit}")
    return value
