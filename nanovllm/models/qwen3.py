"""Qwen3 (dense): each head's query and key pass an RMSNorm before they are rotated."""

from typing import Any

from nanovllm.models.qwen2 import layer_windows
from nanovllm.models.spec import ModelSpec, llama_shaped


def spec(raw: dict[str, Any]) -> ModelSpec:
    raw = {"head_dim": 128, "num_key_value_heads": 32, **raw}
    bias = bool(raw.get("attention_bias", False))
    return llama_shaped(raw, qk_norm=True, qkv_bias=bias, o_bias=bias, windows=layer_windows(raw))
