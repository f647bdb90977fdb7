"""Qwen2 and Qwen2.5: biases on query, key and value, none on the output; upper layers may slide."""

from typing import Any

from nanovllm.models.spec import layer_windows


def differences(raw: dict[str, Any]) -> dict[str, Any]:
    return {"qkv_bias": True, "windows": layer_windows(raw)}
