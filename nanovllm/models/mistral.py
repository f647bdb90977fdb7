"""Mistral: Llama with a sliding window in every layer, unless the config says null."""

from typing import Any

from nanovllm.models.spec import ModelSpec, llama_shaped


def spec(raw: dict[str, Any]) -> ModelSpec:
    return llama_shaped(raw, windows=(raw.get("sliding_window", 4096),) * raw["num_hidden_layers"])
