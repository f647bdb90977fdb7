"""The interface of attention backends that plan a step of decodes on the device, without data from the host."""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from nanovllm.attention.backend import AttentionBackend

UNEVEN = 6  # the longest sequence of an uneven batch has more than this many times the mean length


class DeviceBackend(AttentionBackend, Protocol):
    def decode_step(
        self, rows: Tensor, positions: Tensor, *, blocks: Mapping[int | None, Tensor], lengths: Tensor, stream_k: bool
    ) -> Any:
        """The same as `prepare` for a step of decodes alone, whose positions only the device knows.

        `rows` and `positions` are [n]; `blocks` and `lengths` are those of all rows of the request table; `stream_k`
        if the lengths are `uneven`. A position is the length of its row - 1, so it is -1 for padding. The caller writes
        the positions between this call and `forward`. If kernels read them earlier than that, this call writes them.
        """
        ...


def uneven(lengths: np.ndarray) -> bool:
    """Whether some sequences are so much longer than the others that the whole step would wait for them."""
    return len(lengths) > 0 and lengths.max() * len(lengths) > UNEVEN * max(lengths.sum(), 1)
