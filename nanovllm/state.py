"""The state that layers keep of a sequence between steps: a cache in blocks of tokens, or one tensor per row. No torch.

Layers that keep the same kind of state over the same window form a group: they store and free the same tokens, so one
block table serves all of them. Everything that manages memory works on groups.
"""

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from nanovllm.row_state import RowState

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


@dataclass(frozen=True)
class PagedState:
    """State of every token, such as keys and values, kept in blocks."""

    bytes_per_token: int
    window: int | None = None  # tokens that are read at most, the newest included; None = all. Older ones are freed
    source: int = 0  # above 0: it is the state of the layer that is this many before, and takes no memory of its own


LayerState: TypeAlias = "PagedState | RowState"


@dataclass(frozen=True)
class BlockGroup:
    """A paged group as the control plane sees it."""

    num_blocks: int
    window: int | None = None

    def first_block(self, position: int, block_size: int) -> int:
        """The first block that a token at this position reads."""
        if self.window is None:
            return 0
        return max(position - self.window + 1, 0) // block_size

    def most_blocks(self, block_size: int) -> int:
        """With a window: the most blocks that a sequence needs at once, one of them for the token being computed."""
        assert self.window is not None
        return -(-(self.window - 1) // block_size) + 1

    def blocks_needed(self, num_tokens: int, block_size: int) -> int:
        """The most blocks that a sequence needs at once on its way to this many computed tokens."""
        blocks = -(-num_tokens // block_size)
        return blocks if self.window is None else min(blocks, self.most_blocks(block_size))

    def max_num_tokens(self, block_size: int) -> float:
        """How many tokens of one sequence can be computed at most; infinity if a window never fills the blocks."""
        if self.window is not None and self.num_blocks >= self.most_blocks(block_size):
            return math.inf
        return self.num_blocks * block_size


@dataclass(frozen=True)
class StateGroup:
    """Layers whose state is allocated and freed together."""

    paged: bool  # else one state per row
    window: int | None  # of a paged group; None = full attention
    layers: tuple[int, ...]
    num_bytes: int  # of all its layers: per token in a paged group, per sequence in a group of row states

    def bytes_per_block(self, block_size: int) -> int:
        assert self.paged
        return self.num_bytes * block_size


def state_groups(layer_states: Seq[LayerState]) -> tuple[StateGroup, ...]:
    """The groups of a model from the state of each of its layers.

    Order: full attention, then windows from the largest to the smallest, then states per row.
    """
    found: dict[tuple[bool, int | None], dict[int, int]] = {}  # by kind: the bytes of each of its layers
    for layer, state in enumerate(layer_states):
        if not isinstance(state, PagedState):
            found.setdefault((False, None), {})[layer] = state.bytes_per_row
        elif not state.source:
            found.setdefault((True, state.window), {})[layer] = state.bytes_per_token
    kinds = sorted(found, key=lambda kind: (not kind[0], kind[1] is not None, -(kind[1] or 0)))
    return tuple(StateGroup(*kind, tuple(found[kind]), sum(found[kind].values())) for kind in kinds)


@dataclass(frozen=True)
class CacheLayout:
    """How many blocks each paged group of a model gets, from the number of blocks of the first.

    Memory is divided as `max_num_seqs` sequences of equal length would use it, with the greatest length that fits. So
    every group has as many blocks as the first, which keeps the most of each sequence, unless its window is shorter
    than that length: then it has blocks for that many windows, as many again for cached prefixes, and blocks for the
    tokens that one step adds.
    """

    windows: tuple[int | None, ...]  # of the groups
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_tokens: int  # of a step

    def blocks_needed(self, window: int | None) -> int:
        """The most blocks that a sequence of max_model_len tokens needs at once."""
        return BlockGroup(0, window).blocks_needed(self.max_model_len, self.block_size)

    def groups(self, num_blocks: int) -> tuple[BlockGroup, ...]:
        """`num_blocks`: of the first group."""
        new_tokens = -(-self.max_num_tokens // self.block_size)
        groups = [BlockGroup(num_blocks, window) for window in self.windows[:1]]
        for window in self.windows[1:]:
            most = 2 * self.max_num_seqs * self.blocks_needed(window) + new_tokens
            groups.append(BlockGroup(min(num_blocks, most), window))
        return tuple(groups)
