"""Reads how a config scales the frequencies of the rotary position embedding; no torch."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from nanovllm.errors import CheckpointError
from nanovllm.layers.rope_spec import (
    LinearScaling,
    ListedScaling,
    Llama3Scaling,
    LongScaling,
    RopeScaling,
    YarnScaling,
)


class Parameters:
    """What a config says about rotary positions."""

    def __init__(self, values: Mapping[str, Any], *, max_position: int, num_frequencies: int) -> None:
        self._values = values
        self.max_position = max_position
        self._num_frequencies = num_frequencies

    def number(self, name: str, default: float | None = None) -> float:
        value = self._values.get(name)
        return _positive(name, default if value is None else value)

    def optional(self, name: str) -> float | None:
        """None where it is missing or 0."""
        return self.number(name) if self._values.get(name) else None

    def flag(self, name: str, default: bool) -> bool:
        return bool(self._values.get(name, default))

    def factors(self, name: str) -> tuple[float, ...]:
        values = self._values.get(name)
        if not isinstance(values, list) or len(values) != self._num_frequencies:
            raise CheckpointError(f"config: {name} of the rope must be a list of {self._num_frequencies} numbers")
        return tuple(_positive(name, value) for value in values)

    @property
    def original_length(self) -> int:
        length = int(self.number("original_max_position_embeddings", self.max_position))
        if length < 2:
            raise CheckpointError(f"config: original_max_position_embeddings={length} must be at least 2")
        return length

    @property
    def stretch(self) -> float:
        """How many times the original length the model can have."""
        return self.number("factor", self.max_position / self.original_length)


def _positive(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
        raise CheckpointError(f"config: {name}={value!r} of the rope must be a finite number above 0")
    return float(value)


def _llama3(p: Parameters) -> RopeScaling:
    return Llama3Scaling(
        factor=p.number("factor"),
        low_freq_factor=p.number("low_freq_factor", 1.0),
        high_freq_factor=p.number("high_freq_factor", 4.0),
        original_length=p.original_length,
    )


def _yarn(p: Parameters) -> RopeScaling:
    def amplitude(weight: float) -> float:
        return 1.0 + 0.1 * weight * math.log(p.stretch) if p.stretch > 1 else 1.0

    numerator, denominator = p.optional("mscale"), p.optional("mscale_all_dim")
    inferred = amplitude(1.0)
    if numerator is not None and denominator is not None:
        inferred = amplitude(numerator) / amplitude(denominator)
    return YarnScaling(
        factor=p.stretch,
        slow_turns=p.number("beta_slow", 1.0),
        fast_turns=p.number("beta_fast", 32.0),
        rounds_bounds=p.flag("truncate", True),
        amplitude=p.number("attention_factor", inferred),
        original_length=p.original_length,
    )


def _longrope(p: Parameters) -> RopeScaling:
    inferred = 1.0
    if p.stretch > 1:
        inferred = math.sqrt(1 + math.log(p.stretch) / math.log(p.original_length))
    return LongScaling(
        short_factors=p.factors("short_factor"),
        long_factors=p.factors("long_factor"),
        amplitude=p.number("attention_factor", inferred),
        original_length=p.original_length,
    )


ROPE_TYPES: dict[str, Callable[[Parameters], RopeScaling | None]] = {
    "default": lambda p: None,
    # changes frequencies for sequences longer than max_position_embeddings, which the engine refuses
    "dynamic": lambda p: None,
    "linear": lambda p: LinearScaling(p.number("factor")),
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "gguf_factors": lambda p: ListedScaling(p.factors("factors")),
}


def read_scaling(
    rope_type: str, values: Mapping[str, Any], *, max_position: int, num_frequencies: int
) -> RopeScaling | None:
    """`values`: what the config says about rotary positions. `max_position`: its longest sequence."""
    if rope_type not in ROPE_TYPES:
        raise CheckpointError(f"rope_type={rope_type!r} is not implemented; known: {', '.join(ROPE_TYPES)}")
    return ROPE_TYPES[rope_type](Parameters(values, max_position=max_position, num_frequencies=num_frequencies))
