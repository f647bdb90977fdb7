"""Rotary frequencies of models whose context was extended after training."""

import math

import torch
from torch import Tensor

from nanovllm.layers.rope_spec import LinearScaling, ListedScaling, Llama3Scaling, LongScaling, YarnScaling
from nanovllm.layers.spec import RopeSpec


def scaled_frequencies(frequencies: Tensor, rope: RopeSpec, *, max_position: int) -> tuple[Tensor, float]:
    """The scaled [n] frequencies, and what their cosines and sines are multiplied with.

    `max_position`: the longest sequence of the engine.
    """
    scaling = rope.scaling
    if isinstance(scaling, LinearScaling):
        return frequencies / scaling.factor, 1.0
    if isinstance(scaling, ListedScaling):
        return frequencies / torch.tensor(scaling.factors), 1.0
    if isinstance(scaling, LongScaling):
        is_long = max_position > scaling.original_length
        factors = scaling.long_factors if is_long else scaling.short_factors
        return frequencies / torch.tensor(factors), scaling.amplitude
    if isinstance(scaling, Llama3Scaling):
        turns = scaling.original_length * frequencies / (2 * math.pi)
        high = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        return _blend(frequencies, high, scaling.factor), 1.0
    assert isinstance(scaling, YarnScaling), scaling
    return _blend(frequencies, _yarn_high(len(frequencies), rope.theta, scaling), scaling.factor), scaling.amplitude


def _blend(frequencies: Tensor, high: Tensor, factor: float) -> Tensor:
    """Divided by `factor` where `high` is 0 or less, kept where it is 1 or more."""
    high = high.clamp(0.0, 1.0)
    return (1 - high) * frequencies / factor + high * frequencies


def _yarn_high(count: int, theta: float, scaling: YarnScaling) -> Tensor:  # [count]
    def index_of(turns: float) -> float:
        """The index, not rounded, of the frequency that makes this many turns within the original length."""
        return count * math.log(scaling.original_length / (turns * 2 * math.pi)) / math.log(theta)

    first, last = index_of(scaling.fast_turns), index_of(scaling.slow_turns)
    if scaling.rounds_bounds:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * count - 1)
    if first == last:
        last += 0.001
    return 1 - (torch.arange(count, dtype=torch.float32) - first) / (last - first)
