"""Llama 2 and 3 (and SmolLM2): the plain shape; some derivatives add biases."""

from typing import Any

from nanovllm.models.spec import ModelSpec, llama_shaped


def spec(raw: dict[str, Any]) -> ModelSpec:
    bias = bool(raw.get("attention_bias", False))
    return llama_shaped(raw, qkv_bias=bias, o_bias=bias, mlp_bias=bool(raw.get("mlp_bias", False)))
