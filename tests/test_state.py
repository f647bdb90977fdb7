"""Groups of layer state."""

from dataclasses import replace

from nanovllm.row_state import RowState
from nanovllm.runner.memory_budget import num_blocks_in
from nanovllm.state import BlockGroup, CacheLayout, PagedState, StateGroup, state_groups


def test_layers_of_equal_kind_and_window_are_one_group() -> None:
    full, wide, narrow, row = PagedState(8), PagedState(4, window=64), PagedState(8, window=16), RowState((5, 5))
    assert state_groups([full, full]) == (StateGroup(True, None, (0, 1), 16),)
    assert state_groups([row, narrow, full, wide, row, narrow]) == (
        StateGroup(True, None, (2,), 8),
        StateGroup(True, 64, (3,), 4),
        StateGroup(True, 16, (1, 5), 16),
        StateGroup(False, None, (0, 4), 224),  # 100 bytes each, padded to whole 16
    )
    assert state_groups([row, narrow])[0].bytes_per_block(32) == 256


def test_a_group_knows_what_a_token_reads() -> None:
    group = BlockGroup(9, window=6)
    for position in range(40):
        assert group.first_block(position, 4) == max(0, position - 5) // 4
        assert BlockGroup(9).first_block(position, 4) == 0
    # the worst case is a token at the beginning of a block
    assert group.most_blocks(4) == max(p // 4 - group.first_block(p, 4) + 1 for p in range(40)) == 3


LAYOUT = CacheLayout(windows=(None, 64), block_size=16, max_model_len=1024, max_num_seqs=4, max_num_tokens=32)


def test_groups_have_as_many_blocks_as_the_first_unless_their_windows_need_fewer() -> None:
    assert LAYOUT.blocks_needed(64) == 5 and LAYOUT.blocks_needed(None) == 64
    most = 2 * 4 * 5 + 2  # four windows, as many for cached prefixes, and a step's tokens
    assert LAYOUT.groups(30) == (BlockGroup(30), BlockGroup(30, 64))
    assert LAYOUT.groups(100) == (BlockGroup(100), BlockGroup(most, 64))
    assert replace(LAYOUT, windows=(64,)).groups(100) == (BlockGroup(100, 64),), "the first group has all of them"
    assert replace(LAYOUT, windows=()).groups(100) == ()


def test_memory_is_used_up_and_not_exceeded() -> None:
    for num_bytes in range(0, 9000, 37):
        num_blocks = num_blocks_in(num_bytes, LAYOUT, (30, 20))
        assert num_blocks is not None

        def takes(number: int) -> int:
            full, windowed = LAYOUT.groups(number)
            return 30 * full.num_blocks + 20 * windowed.num_blocks

        assert takes(num_blocks) <= num_bytes < takes(num_blocks + 1)
    assert num_blocks_in(1000, replace(LAYOUT, windows=(None,)), (30,)) == 33
    assert num_blocks_in(1000, LAYOUT, (0, 0)) is None, "a rank without paged layers has no limit"
