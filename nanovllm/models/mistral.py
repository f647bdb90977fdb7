"""Mistral: Llama with a sliding window over every layer, unless the config says null."""

from typing import Any


def differences(raw: dict[str, Any]) -> dict[str, Any]:
    return {"windows": (raw.get("sliding_window", 4096),) * raw["num_hidden_layers"]}
