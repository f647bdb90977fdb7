"""Groups of layer state."""

from nanovllm.state import PagedState, RowState, StateGroup, state_groups


def test_layers_of_equal_kind_and_window_are_one_group() -> None:
    full, wide, narrow, row = PagedState(8), PagedState(4, window=64), PagedState(8, window=16), RowState((5, 5))
    assert state_groups([full, full]) == (StateGroup(True, None, (0, 1), 16),)
    assert state_groups([row, narrow, full, wide, row, narrow]) == (
        StateGroup(True, None, (2,), 8),
        StateGroup(True, 64, (3,), 4),
        StateGroup(True, 16, (1, 5), 16),
        StateGroup(False, None, (0, 4), 200),
    )
    assert state_groups([row, narrow])[0].bytes_per_block(32) == 256
