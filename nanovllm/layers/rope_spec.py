"""How rotary frequencies differ in a model whose context was extended after its first training. No torch."""

from dataclasses import dataclass


class RopeScaling:
    def longest(self, max_position: int) -> int:
        """Positions that the model can have; `max_position`: those that its config states."""
        return max_position


@dataclass(frozen=True)
class LinearScaling(RopeScaling):
    factor: float  # divides every frequency


@dataclass(frozen=True)
class ListedScaling(RopeScaling):
    factors: tuple[float, ...]  # each divides one frequency


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling(RopeScaling):
    """Low frequencies are divided by `factor`, high ones kept, those between blended."""

    factor: float
    low_freq_factor: float  # turns within the original length up to which a frequency is low
    high_freq_factor: float  # and from which it is high
    original_length: int


@dataclass(frozen=True, kw_only=True)
class YarnScaling(RopeScaling):
    """As Llama 3, but blended by the number of the frequency; cosines and sines are multiplied with `amplitude`."""

    factor: float
    slow_turns: float  # within the original length, up to which a frequency is low
    fast_turns: float  # and from which it is high
    rounds_bounds: bool  # the first and the last blended number are rounded to integers
    amplitude: float
    original_length: int

    def longest(self, max_position: int) -> int:
        """Configs often keep the original limit when they add the scaling."""
        return max(max_position, int(self.factor * self.original_length))


@dataclass(frozen=True, kw_only=True)
class LongScaling(RopeScaling):
    """Two lists of factors. All sequences of an engine use the same, so that cached keys fit every sequence."""

    short_factors: tuple[float, ...]  # where the longest sequence has at most the original length
    long_factors: tuple[float, ...]  # where it may be longer
    amplitude: float
    original_length: int
