"""Qwen2 and Qwen2.5: biases on query, key and value, none on the output; upper layers may have a sliding window."""

from typing import Any

from nanovllm.models.spec import ModelSpec, llama_shaped


def spec(raw: dict[str, Any]) -> ModelSpec:
    return llama_shaped(raw, qkv_bias=True, windows=layer_windows(raw))


def layer_windows(raw: dict[str, Any]) -> tuple[int | None, ...]:
    """Qwen's way to say which layers have a sliding window: `layer_types`, or all from `max_window_layers` on."""
    num_layers = raw["num_hidden_layers"]
    window = raw.get("sliding_window")
    if not window or not raw.get("use_sliding_window", False):
        return (None,) * num_layers
    kinds = raw.get("layer_types")
    if kinds is None:
        first = raw.get("max_window_layers", num_layers)
        kinds = ["sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)]
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
