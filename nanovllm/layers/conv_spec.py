"""The weight of a causal convolution, in which every channel has its own filter; no torch."""

from collections.abc import Iterator
from dataclasses import replace

from nanovllm.layers.spec import TensorPart
from nanovllm.layers.stored_spec import StoredWeight


class ConvWeight(StoredWeight):
    """[channels, 1, kernel size]: `rows` are the channels, `columns` the taps, the oldest input's first."""

    def shard_shape(self, rank: int, num_ranks: int) -> tuple[int, ...]:
        channels, taps = super().shard_shape(rank, num_ranks)
        return channels, 1, taps

    def parts(self, rank: int, num_ranks: int) -> Iterator[TensorPart]:
        for part in super().parts(rank, num_ranks):
            channels, taps = part.shape
            yield replace(part, shape=(channels, 1, taps))
