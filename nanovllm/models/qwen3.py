"""Qwen3 (dense): each head's query and key pass an RMSNorm before they are rotated."""

from typing import Any

from nanovllm.models.spec import layer_windows


def differences(raw: dict[str, Any]) -> dict[str, Any]:
    bias = bool(raw.get("attention_bias", False))
    return {"qk_norm": True, "qkv_bias": bias, "o_bias": bias, "windows": layer_windows(raw)}
