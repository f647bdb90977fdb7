"""Checks for tests: whether the scheduler's queues, rows and blocks agree with each other.

Each function raises AssertionError if they do not. It reads the private state of what it checks.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.block_pool import BlockPool
from nanovllm.engine.checkpoints import CheckpointedBlocks
from nanovllm.engine.prefix import PrefixNode, PrefixTable
from nanovllm.engine.sequence import Sequence, SequenceStatus

if TYPE_CHECKING:
    from nanovllm.engine.scheduler import Scheduler


def check_scheduler(scheduler: "Scheduler") -> None:
    """Check the queues, the rows and all blocks."""
    running = scheduler.running
    for queue in (scheduler.waiting, scheduler.prefilling, scheduler.decoding):
        assert queue == sorted(queue, key=lambda seq: seq.order), "a queue is out of order"
    assert all(seq.status is SequenceStatus.WAITING and not seq.block_tables for seq in scheduler.waiting)
    assert all(seq.status is SequenceStatus.RUNNING for seq in running)
    rows = sorted([seq.row for seq in running] + scheduler._rows)
    assert rows == list(range(1, scheduler.config.max_num_seqs + 1)), "a row is lost or used twice"
    assert scheduler._num_guided == sum(seq.guide is not None for seq in running)
    for seq in running:
        for table in seq.block_tables:
            assert len(table.blocks) >= scheduler.block_manager.blocks_for(seq.num_computed_tokens)
    check_blocks(scheduler.block_manager, running)


def check_blocks(manager: BlockManager, live: Iterable[Sequence]) -> None:
    """Every block and every prefix is accounted for. `live`: the running sequences."""
    live = list(live)
    uses: dict[PrefixNode, int] = {}
    for seq in live:
        assert len(seq.block_tables) == len(manager.pools)
        uses[seq.prefix] = uses.get(seq.prefix, 0) + 1
    for index, pool in enumerate(manager.pools):
        tables = [seq.block_tables[index] for seq in live]
        check_pool(pool, [table.held for table in tables])
        for node in pool._block_of:
            uses[node] = uses.get(node, 0) + 1
        for seq, table in zip(live, tables, strict=True):
            needed = pool.group.first_block(seq.num_computed_tokens, manager.block_size)
            assert table.first <= needed, "a block was freed that the next token reads"
            if manager.enable_prefix_caching:
                assert table.first <= seq.num_cached_blocks, "a block was freed before it could be found"
    if isinstance(manager, CheckpointedBlocks):
        check_checkpoints(manager, live)
        for node in manager.found_by:
            uses[node] = uses.get(node, 0) + 1
    check_prefixes(manager.prefixes, uses)


def check_checkpoints(manager: CheckpointedBlocks, live: list[Sequence]) -> None:
    """Free + findable = all, and nothing is kept of a sequence that has left."""
    used = list(manager.found_by.values())
    assert sorted(used + manager._free) == list(range(len(used) + len(manager._free))), "a checkpoint is lost"
    assert manager._unshared <= manager.found_by.keys()
    for kept in (manager._kept, manager._newest, manager._restored):
        assert kept.keys() <= set(live), "a sequence that has left keeps checkpoints"


def check_pool(pool: BlockPool, held: Iterable[list[int]]) -> None:
    """Free + cached + in use = all. `held`: the blocks of each running sequence."""
    uses = [0] * pool.group.num_blocks
    for blocks in held:
        assert len(set(blocks)) == len(blocks), "a sequence holds a block twice"
        for block in blocks:
            uses[block] += 1
    assert uses == pool._ref_count, "reference counts differ from the block tables"
    idle = pool._free + list(pool.cached)
    assert len(set(idle)) == len(idle), "a block is idle twice"
    assert sorted(idle) == [b for b in range(pool.group.num_blocks) if not uses[b]], "free + cached + in use != all"
    assert all(block in pool._node_of for block in pool.cached), "a cached block cannot be found"
    assert not any(block in pool._node_of for block in pool._free), "a free block can still be found"
    assert {node: block for block, node in pool._node_of.items()} == pool._block_of


def check_prefixes(table: PrefixTable, uses: dict[PrefixNode, int]) -> None:
    """The nodes are those in use. `uses`: by blocks and sequences, of each node."""
    known = list(table._nodes.values())
    counted = dict.fromkeys(known, 0)
    for node in known:
        assert node.parent is table.root or node.parent in counted, "a prefix lacks its parent"
        if node.parent is not table.root:
            counted[node.parent] += 1
    for node, count in uses.items():
        if node is not table.root:
            assert node in counted, "a prefix in use is not known"
            counted[node] += count
    assert all(node.num_uses == count > 0 for node, count in counted.items()), "uses of prefixes are counted wrong"
