"""Which sequence holds which blocks of the paged cache, group by group, and which prefixes can be reused.

A group with full attention keeps every block of a sequence; they are allocated when the sequence is admitted. A group
with a window keeps the blocks that the next token can still read (`windows.py`); they are allocated chunk by chunk.

The prefix cache is exact: `prefix.py` says how a block is identified. A prefix is reused if every group can serve it: a
group with full attention needs all its blocks, a group with a window only those that the next token reads.
"""

from collections.abc import Sequence as Seq

from nanovllm.engine.block_pool import BlockPool
from nanovllm.engine.prefix import ROOT_DIGEST, BlockKey, Digest, PrefixNode, PrefixTable, blake2b_256
from nanovllm.engine.sequence import BlockTable, Sequence
from nanovllm.plan import NewBlocks
from nanovllm.state import BlockGroup


class BlockManager:
    def __init__(
        self,
        *,
        groups: Seq[BlockGroup],
        block_size: int,
        enable_prefix_caching: bool = True,
        digest: Digest = blake2b_256,
    ) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.prefixes = PrefixTable(block_size=block_size, digest=digest)
        self.pools = tuple(BlockPool(group, self.prefixes) for group in groups)
        self._full_pools = [pool for pool in self.pools if pool.group.window is None]
        self._windows = None
        self.extends_chunks = len(self._full_pools) < len(self.pools)  # `extend` is called for each chunk of a prompt
        if self.extends_chunks:
            from nanovllm.engine.windows import Windows

            self._windows = Windows(self.pools, block_size, cache_full_blocks=self.cache_full_blocks)
        self.state_copies: list[tuple[int, int, bool]] = []  # for the next plan, of a state per row
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0

    @property
    def num_blocks(self) -> int:
        return sum(pool.group.num_blocks for pool in self.pools)

    @property
    def num_available(self) -> int:
        """Blocks of all groups that can be handed out now."""
        return sum(pool.num_available for pool in self.pools)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    # --- a sequence is admitted, grows and leaves ---------------------------------------------------------------------

    def allocate(self, seq: Sequence) -> bool:
        """Admit a waiting sequence: reuse its cached prefix and allocate blocks. False if too few are available.

        Groups with full attention get blocks for all known tokens; groups with a window get theirs with each `extend`.
        On success `num_computed_tokens` says how many tokens need no computing. At least one always does, since the
        next token is sampled from the last one's hidden state.
        """
        hits = self._match(seq)
        num_new = self.blocks_for(seq.num_tokens) - len(hits)
        firsts = [pool.group.first_block(len(hits) * self.block_size, self.block_size) for pool in self.pools]
        for pool, first in zip(self.pools, firsts, strict=True):
            needed = num_new
            if pool.group.window is not None:
                needed = min(num_new, pool.group.most_blocks(self.block_size) - (len(hits) - first))
            if needed > pool.num_available - pool.num_idle(hits[first:]):
                return False
        seq.prefix = hits[-1] if hits else self.prefixes.root
        seq.prefix.num_uses += 1  # before blocks are taken, which may evict it
        seq.block_tables = []
        for pool, first in zip(self.pools, firsts, strict=True):
            blocks = [0] * first + [pool.acquire(node) for node in hits[first:]]
            if pool.group.window is None:
                blocks += [pool.take() for _ in range(num_new)]
            seq.block_tables.append(BlockTable(blocks, first))
        seq.num_computed_tokens = len(hits) * self.block_size
        seq.num_cached_blocks = len(hits)
        self.num_queried_tokens += seq.num_tokens
        self.num_hit_tokens += seq.num_computed_tokens
        return True

    def is_covered(self, seq: Sequence) -> bool:
        """Whether every group has a block for the sequence's next token."""
        return all(len(table.blocks) * self.block_size > seq.num_computed_tokens for table in seq.block_tables)

    def append(self, seq: Sequence) -> list[NewBlocks] | None:
        """Blocks for the sequence's next token in every group that lacks them; None if one cannot be had."""
        end, new_blocks = self.extend(seq, seq.num_computed_tokens + 1)
        return new_blocks if end > seq.num_computed_tokens else None

    def extend(self, seq: Sequence, end: int) -> tuple[int, list[NewBlocks]]:
        """Before the tokens [num_computed_tokens, end) are computed: free what has left the windows, and allocate
        blocks for them as far as every group has any. Returns up to which token there are, and the new blocks."""
        if self._windows is not None:
            self._windows.slide(seq)
        for group, pool in enumerate(self.pools):
            end = min(end, (len(seq.block_tables[group].blocks) + pool.num_available) * self.block_size)
        new_blocks = []
        for group, pool in enumerate(self.pools):
            blocks = seq.block_tables[group].blocks
            num_held, num_needed = len(blocks), self.blocks_for(end)
            while len(blocks) < num_needed:
                blocks.append(pool.take())
            if num_needed > num_held:
                new_blocks.append(NewBlocks(seq.row, num_held, tuple(blocks[num_held:]), group))
        return end, new_blocks

    def free(self, seq: Sequence) -> None:
        """Give all blocks back, the last ones first: they are then also evicted first."""
        for pool, table in zip(self.pools, seq.block_tables, strict=True):
            for block in reversed(table.held):
                pool.release(block)
        self.prefixes.release(seq.prefix)
        seq.block_tables = []
        seq.num_computed_tokens = 0
        seq.num_cached_blocks = 0
        seq.prefix = self.prefixes.root

    # --- the prefix cache ---------------------------------------------------------------------------------------------

    def cache_full_blocks(self, seq: Sequence, num_tokens: int) -> None:
        """Make the blocks findable that the sequence's first `num_tokens` tokens, now computed, have filled."""
        if not self.enable_prefix_caching:
            return
        for index in range(seq.num_cached_blocks, num_tokens // self.block_size):
            node = self.prefixes.extend(seq.prefix, self._key(seq, index), seq.extras)
            node.num_uses += 1
            seq.prefix.num_uses -= 1  # the node keeps its parent in use
            for pool, table in zip(self.pools, seq.block_tables, strict=True):
                pool.register(node, table.blocks[index])
            seq.prefix = node
            seq.num_cached_blocks = index + 1

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix. Blocks in use stay in use but are no longer findable."""
        for pool in self.pools:
            pool.forget_prefixes()

    def _match(self, seq: Sequence) -> list[PrefixNode]:
        """The longest prefix that every group can serve, block by block, leaving at least one token to compute."""
        if not self.enable_prefix_caching or seq.needs_all_positions:
            return []
        nodes: list[PrefixNode] = []
        parent = self.prefixes.root
        for index in range((seq.num_tokens - 1) // self.block_size):
            node = self.prefixes.find(parent, self._key(seq, index), seq.extras)
            if node is None or any([pool.find(node) is None for pool in self._full_pools]):
                break
            nodes.append(node)
            parent = node
        return nodes if self._windows is None else nodes[: self._windows.num_served(nodes)]

    def _key(self, seq: Sequence, index: int) -> BlockKey:
        """The key of a full block. It is kept, since a sequence may be matched many times before it is admitted."""
        keys = seq.block_keys
        if index == len(keys):
            _, parent_digest = keys[-1] if keys else (b"", ROOT_DIGEST)
            start = index * self.block_size
            keys.append(self.prefixes.key(parent_digest, seq.token_ids[start : start + self.block_size], seq.extras))
        return keys[index]
