"""The sequences of a step, for layers that keep a state per row of the request table."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import Tensor


@dataclass(frozen=True)
class Sequences:
    """The sequences of a step, whose new tokens lie side by side; [num_seqs] int32 each, on the device.

    A layer with a `RowState` has a tensor [max_num_seqs + 1, *shape] and reads and writes it at `rows`. What it finds
    there was written by the tokens before `starts`, or, where `starts` is 0, by an earlier sequence: then it must take
    the state to be zero. Row 0 is padding, with a start of -1; what is written there is never used.
    """

    rows: Tensor  # of the request table
    starts: Tensor  # position of the first new token
    first_tokens: Tensor  # index of the first new token among the step's tokens
    num_new: Tensor
    token_seqs: Tensor  # [num_tokens] number of the sequence that each token belongs to
    # on the host: new tokens of each of the last sequences; all before these have one. The tokens are in this order
    chunk_sizes: tuple[int, ...] = ()

    @classmethod
    def of(cls, upload: Callable[[np.ndarray], Tensor], *arrays: np.ndarray, num_decodes: int) -> "Sequences":
        """`arrays`: the first five fields, on the host. `num_decodes`: the first sequences, with one new token each."""
        rows, starts, first_tokens, num_new, token_seqs = map(upload, arrays)
        return cls(rows, starts, first_tokens, num_new, token_seqs, tuple(arrays[3][num_decodes:].tolist()))
