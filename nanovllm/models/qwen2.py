"""Qwen2 and Qwen2.5: biases on query, key and value, none on the output; upper layers may have a sliding window."""

from typing import Any

from nanovllm.models.spec import ModelSpec, layer_windows, llama_shaped


def spec(raw: dict[str, Any]) -> ModelSpec:
    return llama_shaped(raw, qkv_bias=True, windows=layer_windows(raw))
