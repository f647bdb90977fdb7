"""The sequences of a step, for layers that keep a state per row of the request table."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from nanovllm.kernels.delta_net.sequences import CHUNK

FEW_TOKENS = 8  # of a sequence


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
    # the new tokens of the last sequences in chunks of CHUNK, for kernels; None where all sequences have few tokens
    chunks: Tensor | None = None  # [num_chunks, 2] sequence, and number of the chunk in it
    first_chunks: Tensor | None = None  # [num_seqs] index in `chunks` of each sequence's first one

    @property
    def have_few_tokens(self) -> bool:
        """Whether kernels compute each sequence token by token, as those that decode."""
        return max(self.chunk_sizes, default=1) <= FEW_TOKENS

    @classmethod
    def of(cls, upload: Callable[[np.ndarray], Tensor], *arrays: np.ndarray, num_decodes: int) -> "Sequences":
        """`arrays`: the first five fields, on the host. `num_decodes`: the first sequences, with one new token each."""
        rows, starts, first_tokens, num_new, token_seqs = map(upload, arrays)
        seqs = cls(rows, starts, first_tokens, num_new, token_seqs, tuple(arrays[3][num_decodes:].tolist()))
        if seqs.have_few_tokens:
            return seqs
        counts = -(-arrays[3] // CHUNK)
        counts[:num_decodes] = 0
        first_chunks = np.cumsum(counts) - counts
        owners = np.repeat(np.arange(len(counts)), counts)
        chunks = np.stack([owners, np.arange(len(owners)) - first_chunks[owners]], axis=1)
        return replace(seqs, chunks=upload(chunks), first_chunks=upload(first_chunks))
