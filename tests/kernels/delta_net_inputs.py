"""Sequences and layers for the tests of the kernels of hybrid models."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nanovllm.layers.sequences import Sequences
from tests.kernels.support import DEVICE

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}
UNTOUCHED = 7.0


@dataclass(frozen=True)
class Part:
    """New tokens of one sequence."""

    row: int
    start: int  # position of the first; -1: padding
    num_new: int = 1
    chunk: bool = False  # of a prompt, whatever its length


def decode(row: int, start: int) -> Part:
    return Part(row, start)


def chunk(row: int, start: int, num_new: int) -> Part:
    return Part(row, start, num_new, chunk=True)


PADDING = decode(0, -1)
STEPS = {
    "a decode": [decode(3, 5)],
    "decodes": [decode(3, 5), decode(1, 1), PADDING, PADDING],
    "few tokens": [decode(2, 9), chunk(4, 3, 2), chunk(1, 0, 4)],
    "a prompt": [chunk(2, 0, 63)],
    "prompts": [chunk(4, 64, 64), chunk(1, 0, 1), chunk(2, 3, 130)],
    "decodes and prompts": [decode(2, 9), decode(5, 1), chunk(1, 32, 65), chunk(3, 0, 9)],
}


def sequences_of(parts: Sequence[Part]) -> Sequences:
    num_decodes = sum(not part.chunk for part in parts)
    assert not any(part.chunk for part in parts[:num_decodes])
    num_new = np.array([part.num_new for part in parts])
    rows, starts = (np.array([getattr(part, name) for part in parts]) for name in ("row", "start"))
    token_seqs = np.repeat(np.arange(len(parts)), num_new)

    def upload(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array.astype(np.int32)).to(DEVICE)

    return Sequences.of(
        upload, rows, starts, np.cumsum(num_new) - num_new, num_new, token_seqs, num_decodes=num_decodes
    )


def num_tokens(parts: Sequence[Part]) -> int:
    return sum(part.num_new for part in parts)


def make_state(num_rows: int, *shape: int) -> Tensor:
    """One layer's states among those of others: [num_rows, *shape] with gaps between rows. Row 0 is never used."""
    size = int(np.prod(shape))
    wide = torch.full((num_rows, size + 48), UNTOUCHED, device=DEVICE)
    state = wide[:, 16 : 16 + size].unflatten(1, shape)
    state[1:] = torch.randn(num_rows - 1, *shape, device=DEVICE)
    return state
