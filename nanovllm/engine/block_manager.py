"""Who owns which block of the paged KV cache, and which blocks hold a known prefix.

A block is free, in use (reference count > 0), or cached: nobody uses it, but its content is still findable. Cached
blocks are handed out again only when no free one is left, least recently used first.

The prefix cache is exact. A full block's identity is a number that stands for (its parent's identity, its tokens, the
salt). Identities are never reused, block numbers are; a dictionary compares whole keys, so no hash collision and no
crafted prompt can hand over another sequence's KV.
"""

from collections import OrderedDict
from collections.abc import Iterable
from itertools import count
from struct import Struct
from typing import NamedTuple

from nanovllm.engine.sequence import Sequence

ROOT = 0  # the identity before the first block


class BlockKey(NamedTuple):
    parent: int  # identity of the block before
    token_ids: bytes
    salt: str | None


class BlockManager:
    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        key_type: type[BlockKey] = BlockKey,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._key_type = key_type
        self._packed = Struct(f"{block_size}q").pack  # a full block's tokens as bytes
        self._ref_count = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # content unknown; the last freed is reused first, still warm
        self._cached: OrderedDict[int, None] = OrderedDict()  # content known, nobody uses it; oldest first
        self._identities = count(ROOT + 1)
        self._key_of: dict[int, BlockKey] = {}  # block -> key, for every findable block
        self._found: dict[BlockKey, tuple[int, int]] = {}  # key -> (block, identity)
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0

    @property
    def num_available(self) -> int:
        """Blocks that can be handed out now."""
        return len(self._free) + len(self._cached)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    # --- a sequence comes, grows and goes -----------------------------------------------------------------------------

    def allocate(self, seq: Sequence) -> bool:
        """Give a waiting sequence blocks for all its known tokens, sharing its cached prefix; False if they lack.

        On success `num_computed_tokens` says how many tokens need no computing. At least one always does, since the
        next token is sampled from the last one's hidden state.
        """
        hits = self._match(seq)
        num_new = self.blocks_for(seq.num_tokens) - len(hits)
        num_revived = sum(self._ref_count[block] == 0 for block, _ in hits)
        if num_new > self.num_available - num_revived:
            return False
        for block, _ in hits:
            self._acquire(block)
        seq.block_table = [block for block, _ in hits]
        seq.block_table += [self._take() for _ in range(num_new)]
        seq.num_computed_tokens = len(hits) * self.block_size
        seq.num_cached_blocks = len(hits)
        seq.last_cached_block = hits[-1][1] if hits else ROOT
        self.num_queried_tokens += seq.num_tokens
        self.num_hit_tokens += seq.num_computed_tokens
        return True

    def append(self, seq: Sequence) -> bool:
        """One more block at the end of the sequence's table; False if none is left."""
        if not self.num_available:
            return False
        seq.block_table.append(self._take())
        return True

    def free(self, seq: Sequence) -> None:
        """Give all blocks back, the last ones first: they are then also reused first."""
        for block in reversed(seq.block_table):
            self._release(block)
        seq.block_table = []
        seq.num_computed_tokens = 0
        seq.num_cached_blocks = 0
        seq.last_cached_block = ROOT

    # --- the prefix cache ---------------------------------------------------------------------------------------------

    def cache_full_blocks(self, seq: Sequence, num_tokens: int) -> None:
        """Make the blocks findable that the sequence's first `num_tokens` tokens, now computed, have filled."""
        if not self.enable_prefix_caching:
            return
        for index in range(seq.num_cached_blocks, num_tokens // self.block_size):
            key = self._key(seq, index, seq.last_cached_block)
            known = self._found.get(key)
            if known is None:
                block = seq.block_table[index]
                known = self._found[key] = (block, next(self._identities))
                self._key_of[block] = key
            seq.last_cached_block = known[1]
            seq.num_cached_blocks = index + 1

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix. Blocks in use stay in use but are no longer findable."""
        self._found.clear()
        self._key_of.clear()
        self._free.extend(self._cached)
        self._cached.clear()

    def _match(self, seq: Sequence) -> list[tuple[int, int]]:
        """The longest cached prefix, as (block, identity) pairs, leaving at least one token to compute."""
        wants_prompt_scores = seq.params.prompt_logprobs is not None and not seq.prompt_logprobs
        if not self.enable_prefix_caching or wants_prompt_scores:
            return []
        hits: list[tuple[int, int]] = []
        parent = ROOT
        for index in range((seq.num_tokens - 1) // self.block_size):
            known = self._found.get(self._key(seq, index, parent))
            if known is None:
                break
            hits.append(known)
            parent = known[1]
        return hits

    def _key(self, seq: Sequence, index: int, parent: int) -> BlockKey:
        start = index * self.block_size
        token_ids = seq.token_ids[start : start + self.block_size]
        return self._key_type(parent, self._packed(*token_ids), seq.cache_salt)

    # --- single blocks ------------------------------------------------------------------------------------------------

    def _take(self) -> int:
        """A block nobody uses: one without known content if there is one, else the least recently used cached one."""
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            del self._found[self._key_of.pop(block)]
        self._ref_count[block] = 1
        return block

    def _acquire(self, block: int) -> None:
        if self._ref_count[block] == 0:
            del self._cached[block]
        self._ref_count[block] += 1

    def _release(self, block: int) -> None:
        self._ref_count[block] -= 1
        if self._ref_count[block]:
            return
        if block in self._key_of:
            self._cached[block] = None
        else:
            self._free.append(block)

    # --- what must always hold ----------------------------------------------------------------------------------------

    def check(self, live: Iterable[Sequence]) -> None:
        """Raise AssertionError unless free + cached + in use = all, and reference counts are those of the tables."""
        uses = [0] * self.num_blocks
        for seq in live:
            assert len(set(seq.block_table)) == len(seq.block_table), f"{seq} holds a block twice"
            for block in seq.block_table:
                uses[block] += 1
        assert uses == self._ref_count, "reference counts differ from the block tables"
        idle = self._free + list(self._cached)
        assert len(set(idle)) == len(idle), "a block is idle twice"
        assert sorted(idle) == [b for b in range(self.num_blocks) if not uses[b]], "free + cached + in use != all"
        assert all(block in self._key_of for block in self._cached), "a cached block cannot be found"
        assert not any(block in self._key_of for block in self._free), "a free block can still be found"
        assert {key: block for block, key in self._key_of.items()} == {k: b for k, (b, _) in self._found.items()}
