"""Paged groups with a window: which of a sequence's blocks have left it, and which prefixes they can still serve."""

from collections.abc import Callable
from collections.abc import Sequence as Seq

from nanovllm.engine.block_pool import BlockPool
from nanovllm.engine.prefix import PrefixNode
from nanovllm.engine.sequence import Sequence


class Windows:
    def __init__(
        self, pools: Seq[BlockPool], block_size: int, *, cache_full_blocks: Callable[[Sequence, int], None]
    ) -> None:
        """`cache_full_blocks`: makes the blocks of a sequence's first tokens findable."""
        self._pools = pools  # of all groups; one without a window never frees a block
        self._block_size = block_size
        self._cache_full_blocks = cache_full_blocks

    def slide(self, seq: Sequence) -> None:
        """Free the blocks that neither the next token nor any later one can read.

        Steps in flight may still read them. The device runs steps in order, so a later step that writes a freed block
        does so after them. For the same reason these blocks can already be found: who reuses them runs later.
        """
        for pool, table in zip(self._pools, seq.block_tables, strict=True):
            first = pool.group.first_block(seq.num_computed_tokens, self._block_size)
            if first > table.first:
                self._cache_full_blocks(seq, first * self._block_size)
                for block in table.blocks[table.first : first]:
                    pool.release(block)
                table.first = first

    def num_served(self, nodes: list[PrefixNode]) -> int:
        """How many of these blocks the longest prefix has that every group with a window can serve."""
        length = len(nodes)
        while True:
            limits = [self._limit(pool, nodes[:length]) for pool in self._pools if pool.group.window is not None]
            if all(limit == length for limit in limits):
                return length
            length = min(limits)

    def _limit(self, pool: BlockPool, nodes: list[PrefixNode]) -> int:
        """len(nodes) if the group can serve this prefix, else the most blocks that a prefix it serves may have."""
        first = pool.group.first_block(len(nodes) * self._block_size, self._block_size)
        read = range(len(nodes) - 1, first - 1, -1)
        return next((index for index in read if pool.find(nodes[index]) is None), len(nodes))
