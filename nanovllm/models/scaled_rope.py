"""Reads how a config scales the frequencies of the rotary position embedding; no torch."""

from collections.abc import Mapping
from typing import Any

from nanovllm.errors import CheckpointError
from nanovllm.layers.spec import RopeSpec

ROPE_TYPES = ("default", "linear", "llama3", "gguf_factors")


def read_scaled_rope(rope_type: str, parameters: Mapping[str, Any], *, theta: float, max_position: int) -> RopeSpec:
    """`parameters`: what the config says about rotary positions. `max_position`: the model's longest sequence."""
    if rope_type not in ROPE_TYPES:
        raise CheckpointError(f"rope_type={rope_type!r} is not implemented; known: {', '.join(ROPE_TYPES)}")
    return RopeSpec(
        theta=theta,
        rope_type=rope_type,
        factor=float(parameters.get("factor", 1.0)),
        low_freq_factor=float(parameters.get("low_freq_factor", 1.0)),
        high_freq_factor=float(parameters.get("high_freq_factor", 4.0)),
        original_max_position=int(parameters.get("original_max_position_embeddings", max_position)),
        factors=tuple(float(f) for f in parameters.get("factors", ())),
    )
