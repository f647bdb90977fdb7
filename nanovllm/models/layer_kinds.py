"""The kind of each layer, as a config states it in `layer_types`; no torch."""

from collections.abc import Sequence
from typing import Any

from nanovllm.errors import CheckpointError

SLIDING, FULL = "sliding_attention", "full_attention"


def layer_kinds(raw: dict[str, Any], *, known: tuple[str, ...], otherwise: Sequence[str]) -> list[str]:
    """One of `known` for each layer; `otherwise` where the config has no such list."""
    kinds = raw.get("layer_types")
    if kinds is None:
        kinds = list(otherwise)
    if len(kinds) != raw["num_hidden_layers"] or not set(kinds) <= set(known):
        raise CheckpointError(f"config: layer_types={kinds} must say {' or '.join(known)} for each layer")
    return kinds


def every(period: int, kind: str, others: str, num_layers: int) -> list[str]:
    """`kind` for every `period`-th layer."""
    return [kind if (index + 1) % period == 0 else others for index in range(num_layers)]


def attention_kinds(raw: dict[str, Any], *, full_every: int) -> list[str]:
    """Windowed or full attention; where the config does not say, every `full_every`-th layer is full."""
    otherwise = every(full_every, FULL, SLIDING, raw["num_hidden_layers"])
    return layer_kinds(raw, known=(SLIDING, FULL), otherwise=otherwise)
