"""Llama 2 and 3 (and SmolLM2): the plain shape; some derivatives add biases."""

from typing import Any


def differences(raw: dict[str, Any]) -> dict[str, Any]:
    bias = bool(raw.get("attention_bias", False))
    return {"qkv_bias": bias, "o_bias": bias, "mlp_bias": bool(raw.get("mlp_bias", False))}
