"""Mistral: Llama with a sliding window over every layer, where the config names one."""

from typing import Any


def differences(raw: dict[str, Any]) -> dict[str, Any]:
    return {"windows": (raw.get("sliding_window"),) * raw["num_hidden_layers"]}
