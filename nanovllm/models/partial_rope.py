"""Reads the rotary positions of families that may rotate a part of each head; no torch."""

from dataclasses import replace
from typing import Any

from nanovllm.errors import CheckpointError
from nanovllm.layers.spec import RopeSpec
from nanovllm.models.spec import read_rope

PLACES = ("rope_parameters", "rope_scaling")
SHARE = "partial_rotary_factor"


def without_rope(raw: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in raw.items() if name not in (*PLACES, SHARE)}


def check_rope_is_stated(raw: dict[str, Any]) -> None:
    """For families whose usual rotary positions are scaled: which scaling is meant is not guessed."""
    if not any(raw.get(name) for name in (*PLACES, "rope_theta")):
        raise CheckpointError(f"config: rope_parameters is missing for {raw['architectures'][0]}")


def read_partial_rope(raw: dict[str, Any], *, head_dim: int, max_position: int, share: float) -> RopeSpec:
    """`share`: of each head, unless the config states another."""
    plain = {name: value for name, value in raw.items() if name != SHARE}
    share = raw.get(SHARE) or share
    for place in PLACES:
        stated = dict(raw.get(place) or {})
        share = stated.pop(SHARE, share)
        plain[place] = stated
    rotated = int(head_dim * share)
    if not 0 < share <= 1 or rotated < 2 or rotated % 2 or head_dim % 2:
        raise CheckpointError(f"config: {SHARE}={share} must rotate an even number of a head's {head_dim} numbers")
    rope = read_rope(plain, head_dim=rotated, max_position=max_position)
    return rope if rotated == head_dim else replace(rope, rotated_dim=rotated)
