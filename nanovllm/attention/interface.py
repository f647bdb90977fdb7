"""The interface of attention backends. `sdpa.py` is the plain implementation that the others are tested against."""

from collections.abc import Callable, Mapping
from enum import Enum, auto
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from nanovllm.attention.backend import BatchGeometry, CacheShape, LayerAttention, LayerCache

UNEVEN = 6  # the longest sequence of an uneven batch has more than this many times the mean length
LONG, FEW = 16_384, 8  # tokens of a long sequence; sequences of a batch that leaves a GPU idle


class Lengths(Enum):
    """The lengths of the sequences of a decode step. They decide how attention divides sequences among programs."""

    SIMILAR = auto()
    LONG = auto()  # a few long sequences: each needs more programs to read its cache at full speed
    UNEVEN = auto()  # some are so much longer than the others that the whole step would wait for them

    @classmethod
    def of(cls, lengths: np.ndarray) -> "Lengths":
        if len(lengths) == 0:
            return cls.SIMILAR
        longest = lengths.max()
        if longest * len(lengths) > UNEVEN * max(lengths.sum(), 1):
            return cls.UNEVEN
        return cls.LONG if longest >= LONG and len(lengths) <= FEW else cls.SIMILAR


class AttentionBackend(Protocol):
    shape: CacheShape
    block_size: int
    plans_on_device: bool  # it is a `DeviceBackend`

    def make_cache(self, num_blocks: Mapping[int | None, int]) -> list[LayerCache]:
        """A cache for each layer, with as many blocks as its window's group has."""
        ...

    def prepare(self, geometry: BatchGeometry, upload: Callable[[np.ndarray], Tensor]) -> Any:
        """Prepare what all layers of a step use, such as indices and masks.

        `upload` copies an array to the device together with the step's other arrays; the tensor that it returns is
        filled when `forward` runs.
        """
        ...

    def forward(self, qkv: Tensor, layer: LayerAttention, cache: LayerCache, step: Any) -> Tensor:
        """Normalize and rotate queries and keys, store keys and values in the cache, and attend.

        `qkv` is the output of the projection, [num_tokens, heads + 2 * kv_heads, head_dim], and may be overwritten.
        `step` comes from `prepare` or `decode_step`. Returns [num_tokens, heads * head_dim].
        """
        ...


class DeviceBackend(AttentionBackend, Protocol):
    """Plans a step of decodes on the device, without data from the host."""

    def decode_step(
        self,
        rows: Tensor,
        positions: Tensor,
        *,
        blocks: Mapping[int | None, Tensor],
        lengths: Tensor,
        kind: Lengths,
    ) -> Any:
        """The same as `prepare` for a step of decodes alone, whose positions only the device knows.

        `rows` and `positions` are [n]; `blocks` and `lengths` are those of all rows of the request table; `kind`
        is that of the lengths. A position is the length of its row - 1, so it is -1 for padding. The caller writes the
        positions between this call and `forward`. If kernels read them earlier than that, this call writes them.
        """
        ...
