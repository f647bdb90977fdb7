"""Checkpoints of the state per row, at block boundaries, so that models that keep one have a prefix cache too.

A checkpoint is a copy of a row's state after some full blocks of tokens, found by the prefix that these are. A prefix
is reused up to the last block for which there is a checkpoint. Every sequence leaves these behind:

  prompt   after the last full block before its last known token, where another request with this prompt continues
  fork     where it leaves a known prefix whose blocks are cached, but that has no checkpoint: a third request that
           begins with the same tokens continues from there
  newest   after the newest full block at whose end one of its steps began, in place of the one before: here it goes on
           after a preemption, and so does a conversation

Its prompt is computed in chunks that end at the first two. If no checkpoint is free, the least recently used one is
replaced. The device makes the copies between two steps, in the order in which they were asked for here; so a checkpoint
can be found at once.
"""

from collections import OrderedDict

from nanovllm.config import SchedulerConfig
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.prefix import PrefixNode
from nanovllm.engine.sequence import Sequence
from nanovllm.plan import NewBlocks
from nanovllm.row_state import num_checkpoints


class CheckpointedBlocks(BlockManager):
    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(groups=config.groups, block_size=config.block_size)
        self.extends_chunks = True
        self.found_by: OrderedDict[PrefixNode, int] = OrderedDict()  # checkpoints, least recently used first
        self._free = list(range(num_checkpoints(config) - 1, -1, -1))
        self._newest: dict[Sequence, PrefixNode] = {}
        self._unshared: set[PrefixNode] = set()  # newest checkpoints that no other sequence has asked for
        self._kept: dict[Sequence, set[int]] = {}  # of running sequences: after how many tokens one is to be kept
        self._restored: dict[Sequence, int] = {}  # checkpoints of admitted sequences whose row has no state yet
        self._num_known_blocks = 0  # whose keys and values are cached, of the sequence that was matched last

    # --- a sequence is admitted, runs and leaves ----------------------------------------------------------------------

    def allocate(self, seq: Sequence) -> bool:
        if not super().allocate(seq):
            return False
        last = (seq.num_tokens - 1) // self.block_size
        self._kept[seq] = {self._num_known_blocks * self.block_size, last * self.block_size}
        if seq.num_computed_tokens:
            self._touch(seq.prefix)
            self._restored[seq] = self.found_by[seq.prefix]
        return True

    def _match(self, seq: Sequence) -> list[PrefixNode]:
        nodes = super()._match(seq)
        self._num_known_blocks = length = len(nodes)
        while length and nodes[length - 1] not in self.found_by:
            length -= 1
            if self._windows is not None:
                length = self._windows.num_served(nodes[:length])
        return nodes[:length]

    def extend(self, seq: Sequence, end: int) -> tuple[int, list[NewBlocks]]:
        """As in a BlockManager. The row's state is restored or saved first; a chunk of a prompt ends where the next
        checkpoint is to be kept, or with a full block."""
        start, size = seq.num_computed_tokens, self.block_size
        checkpoint = self._restored.pop(seq, None)
        if checkpoint is None:
            self._save(seq)
        else:
            self.state_copies.append((seq.row, checkpoint, True))
        end = min([end, *(kept for kept in self._kept[seq] if kept > start)])
        if end < seq.num_tokens and end // size * size > start:
            end = end // size * size
        return super().extend(seq, end)

    def free(self, seq: Sequence) -> None:
        """As in a BlockManager; the checkpoints stay."""
        for kept in (self._kept, self._newest, self._restored):
            kept.pop(seq, None)
        super().free(seq)

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def _save(self, seq: Sequence) -> None:
        """Keep the state of the sequence's row if its computed tokens fill whole blocks."""
        num_tokens = seq.num_computed_tokens
        if not num_tokens or num_tokens % self.block_size or seq.redo_from is not None:
            return
        self.cache_full_blocks(seq, num_tokens)
        node = seq.prefix
        if node in self.found_by:
            self._touch(node)
            return
        before = self._newest.pop(seq, None)
        if before is not None and before in self._unshared:
            self._drop(before)
        elif not self._free:
            self._drop(next(iter(self.found_by)))
        self.found_by[node] = checkpoint = self._free.pop()
        node.num_uses += 1
        self.state_copies.append((seq.row, checkpoint, False))
        if num_tokens not in self._kept[seq]:
            self._newest[seq] = node
            self._unshared.add(node)

    def _touch(self, node: PrefixNode) -> None:
        self.found_by.move_to_end(node)
        self._unshared.discard(node)

    def _drop(self, node: PrefixNode) -> None:
        self._free.append(self.found_by.pop(node))
        self._unshared.discard(node)
        self.prefixes.release(node)

    def reset_prefix_cache(self) -> None:
        super().reset_prefix_cache()
        while self.found_by:
            self._drop(next(iter(self.found_by)))
