"""The blocks of one paged group: which are free, which are in use, and which hold a known prefix.

A block is free, in use (reference count > 0), or cached: no sequence uses it, but its content can still be found.
Cached blocks are handed out only when no free block is left, least recently used first.
"""

from collections import OrderedDict
from collections.abc import Iterable

from nanovllm.engine.prefix import PrefixNode, PrefixTable
from nanovllm.state import BlockGroup


class BlockPool:
    def __init__(self, group: BlockGroup, prefixes: PrefixTable) -> None:
        self.group = group
        self._prefixes = prefixes
        self._ref_count = [0] * group.num_blocks
        self._free = list(range(group.num_blocks - 1, -1, -1))  # the block freed last is reused first, still warm
        self.cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._node_of: dict[int, PrefixNode] = {}  # of every block that can be found
        self._block_of: dict[PrefixNode, int] = {}

    @property
    def num_available(self) -> int:
        """Blocks that can be handed out now."""
        return len(self._free) + len(self.cached)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def find(self, node: PrefixNode) -> int | None:
        """The block that holds a prefix's last tokens."""
        return self._block_of.get(node)

    def num_idle(self, nodes: Iterable[PrefixNode]) -> int:
        """How many of these prefixes' blocks are cached and not in use."""
        return sum(self._ref_count[self._block_of[node]] == 0 for node in nodes)

    def take(self) -> int:
        """A block that no sequence uses: a free one, else the least recently used cached one."""
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self.cached.popitem(last=False)
            node = self._node_of.pop(block)
            del self._block_of[node]
            self._prefixes.release(node)
        self._ref_count[block] = 1
        return block

    def acquire(self, node: PrefixNode) -> int:
        """The block that holds a prefix's last tokens, now in use once more."""
        block = self._block_of[node]
        if self._ref_count[block] == 0:
            del self.cached[block]
        self._ref_count[block] += 1
        return block

    def release(self, block: int) -> None:
        self._ref_count[block] -= 1
        if self._ref_count[block]:
            return
        if block in self._node_of:
            self.cached[block] = None
        else:
            self._free.append(block)

    def register(self, node: PrefixNode, block: int) -> None:
        """The block holds the prefix's last tokens, computed. If another block does too, that one stays known."""
        if node not in self._block_of:
            self._block_of[node] = block
            self._node_of[block] = node
            node.num_uses += 1

    def forget_prefixes(self) -> None:
        """Blocks in use stay in use, but none can be found."""
        for node in self._block_of:
            self._prefixes.release(node)
        self._block_of.clear()
        self._node_of.clear()
        self._free.extend(self.cached)
        self.cached.clear()
