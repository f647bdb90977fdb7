"""Qwen2 and Qwen2.5: biases on query, key and value, none on the output; upper layers may have a sliding window."""

from typing import Any

from nanovllm.models.layer_kinds import FULL, SLIDING, layer_kinds
from nanovllm.models.spec import ModelSpec, llama_shaped


def spec(raw: dict[str, Any]) -> ModelSpec:
    return llama_shaped({"num_key_value_heads": 32, **raw}, qkv_bias=True, windows=layer_windows(raw))


def layer_windows(raw: dict[str, Any]) -> tuple[int | None, ...]:
    """Qwen's way to say which layers have a sliding window: `layer_types`, or all from `max_window_layers` on."""
    num_layers = raw["num_hidden_layers"]
    window = raw["sliding_window"] if raw.get("use_sliding_window", False) else None
    first = raw.get("max_window_layers", 28)
    otherwise = [SLIDING if window and layer >= first else FULL for layer in range(num_layers)]
    kinds = layer_kinds(raw, known=(SLIDING, FULL), otherwise=otherwise)
    return tuple(window if kind == SLIDING else None for kind in kinds)
