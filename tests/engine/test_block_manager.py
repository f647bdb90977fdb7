"""The block manager: sharing, eviction order, exact block keys, and what it must refuse."""

import pytest

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.consistency import check_blocks
from nanovllm.engine.sequence import Sequence
from nanovllm.sampling_params import SamplingParams
from nanovllm.state import BlockGroup

from .oracle import table_of


def make_manager(num_blocks: int = 8, block_size: int = 4, **options: object) -> BlockManager:
    return BlockManager(groups=(BlockGroup(num_blocks),), block_size=block_size, **options)


def make_seq(*token_ids: int, salt: str | None = None, prompt_logprobs: int | None = None) -> Sequence:
    params = SamplingParams(max_tokens=16, prompt_logprobs=prompt_logprobs)
    return Sequence("request", list(token_ids), params, max_num_tokens=len(token_ids) + 16, cache_salt=salt)


def compute(manager: BlockManager, seq: Sequence) -> None:
    """Mark all tokens of the sequence as computed."""
    seq.num_computed_tokens = seq.num_tokens
    manager.cache_full_blocks(seq, seq.num_tokens)


def run(manager: BlockManager, seq: Sequence) -> Sequence:
    assert manager.allocate(seq)
    compute(manager, seq)
    return seq


def run_and_free(manager: BlockManager, *token_ids: int, salt: str | None = None) -> list[int]:
    seq = run(manager, make_seq(*token_ids, salt=salt))
    blocks = table_of(seq)
    manager.free(seq)
    return blocks


def num_hits(manager: BlockManager, *token_ids: int, salt: str | None = None) -> int:
    """Number of tokens that a new sequence would find in the cache; changes only the order of last use."""
    seq = make_seq(*token_ids, salt=salt)
    assert manager.allocate(seq)
    hits = seq.num_computed_tokens
    manager.free(seq)
    return hits


def append(manager: BlockManager, seq: Sequence) -> bool:
    """One more block, as if all positions of the others had been computed."""
    seq.num_computed_tokens = len(table_of(seq)) * manager.block_size
    return manager.append(seq) is not None


def test_blocks_for_rounds_up() -> None:
    manager = make_manager(block_size=4)
    assert [manager.blocks_for(n) for n in (0, 1, 4, 5, 8, 9)] == [0, 1, 1, 2, 2, 3]


def test_allocate_takes_just_enough_and_free_gives_all_back() -> None:
    manager = make_manager(num_blocks=3)
    seq = make_seq(*range(9))
    assert manager.allocate(seq)
    assert len(set(table_of(seq))) == 3 and manager.num_available == 0
    check_blocks(manager, [seq])
    manager.free(seq)
    assert manager.num_available == 3 and table_of(seq) == [] and seq.num_computed_tokens == 0
    check_blocks(manager, [])


def test_allocate_that_fails_changes_nothing() -> None:
    manager = make_manager(num_blocks=3)
    run_and_free(manager, *range(8))
    seq = make_seq(*range(13))
    assert not manager.allocate(seq)
    assert table_of(seq) == [] and manager.num_available == 3
    check_blocks(manager, [])


def test_a_hit_that_nobody_uses_is_not_counted_twice() -> None:
    """Two blocks are cached and one is free; four are needed, two of which are the cached ones. One is missing."""
    manager = make_manager(num_blocks=3)
    run_and_free(manager, *range(8))
    assert not manager.allocate(make_seq(*range(8), *range(5)))
    assert manager.allocate(make_seq(*range(8), *range(4)))


def test_append_until_none_is_left() -> None:
    manager = make_manager(num_blocks=2)
    seq = make_seq(1)
    assert manager.allocate(seq) and append(manager, seq) and not append(manager, seq)
    assert sorted(table_of(seq)) == [0, 1]
    check_blocks(manager, [seq])


# --- hits -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens, expected", [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8)])
def test_a_full_prompt_hit_leaves_a_token_to_compute(num_tokens: int, expected: int) -> None:
    manager = make_manager()
    run_and_free(manager, *range(12))
    assert num_hits(manager, *range(num_tokens)) == expected


def test_a_shared_prefix_is_one_set_of_blocks() -> None:
    manager = make_manager()
    first = run(manager, make_seq(*range(8), 100))
    second = make_seq(*range(8), 200)
    assert manager.allocate(second)
    assert table_of(second)[:2] == table_of(first)[:2] and table_of(second)[2] != table_of(first)[2]
    assert manager.num_available == 8 - 4
    check_blocks(manager, [first, second])
    manager.free(first)
    assert manager.num_available == 8 - 3, "the shared blocks are still the second's"
    check_blocks(manager, [second])


def test_only_full_computed_blocks_are_found() -> None:
    manager = make_manager()
    seq = make_seq(*range(12))
    assert manager.allocate(seq)
    assert num_hits(manager, *range(12)) == 0
    manager.cache_full_blocks(seq, 7)
    assert num_hits(manager, *range(12)) == 4
    manager.cache_full_blocks(seq, 8)
    assert num_hits(manager, *range(12)) == 8


def test_two_sequences_that_computed_the_same_prefix_keep_their_own_blocks() -> None:
    """Both were admitted before either was computed: later sequences find the first one's blocks and both continue."""
    manager = make_manager(num_blocks=12)
    first, second = make_seq(*range(8)), make_seq(*range(8))
    assert manager.allocate(first) and manager.allocate(second)
    compute(manager, first)
    compute(manager, second)
    assert not set(table_of(first)) & set(table_of(second))
    assert first.prefix is second.prefix
    check_blocks(manager, [first, second])
    second.token_ids += [8, 9, 10, 11]
    assert append(manager, second)
    compute(manager, second)
    third = make_seq(*range(13))
    assert manager.allocate(third)
    assert table_of(third)[:3] == [*table_of(first), table_of(second)[2]]
    check_blocks(manager, [first, second, third])


def test_the_same_tokens_behind_another_prefix_are_not_found() -> None:
    manager = make_manager()
    run_and_free(manager, 1, 1, 1, 1, 5, 6, 7, 8)
    run_and_free(manager, 2, 2, 2, 2)
    assert num_hits(manager, 2, 2, 2, 2, 5, 6, 7, 8, 9) == 4
    assert num_hits(manager, 5, 6, 7, 8, 9) == 0


def test_an_identity_is_never_used_again() -> None:
    """A child of an evicted block is not found after the new content of its parent's block."""
    manager = make_manager(num_blocks=3, block_size=1)
    first, second = make_seq(1), make_seq(1)
    assert manager.allocate(first) and manager.allocate(second)
    compute(manager, first)
    compute(manager, second)  # the parent of the next block is the first sequence's block
    parent = table_of(first)[0]
    second.token_ids.append(5)
    assert append(manager, second)
    compute(manager, second)
    manager.free(first)
    other = run(manager, make_seq(2))
    assert table_of(other) == [parent], "the parent's block was evicted and holds another token now"
    manager.free(second)
    prompt = make_seq(2, 5, 0)
    assert manager.allocate(prompt)
    assert prompt.num_computed_tokens == 1
    check_blocks(manager, [other, prompt])


@pytest.mark.parametrize("salt, expected", [("a", 8), ("b", 0), ("", 0), (None, 0)])
def test_a_salt_keeps_tenants_apart(salt: str | None, expected: int) -> None:
    manager = make_manager()
    run_and_free(manager, *range(8), salt="a")
    assert num_hits(manager, *range(9), salt=salt) == expected


def test_prompt_logprobs_skip_the_cache_until_they_are_there() -> None:
    manager = make_manager()
    run_and_free(manager, *range(8))
    seq = make_seq(*range(9), prompt_logprobs=0)
    assert manager.allocate(seq) and seq.num_computed_tokens == 0
    manager.free(seq)
    seq.prompt_logprobs = [object()] * 8
    assert manager.allocate(seq) and seq.num_computed_tokens == 8


def test_without_prefix_caching_nothing_is_found() -> None:
    manager = make_manager(enable_prefix_caching=False)
    run_and_free(manager, *range(8))
    assert num_hits(manager, *range(9)) == 0


def test_a_digest_collision_hands_over_nothing() -> None:
    manager = make_manager(num_blocks=12, digest=lambda content: b"the same")
    run_and_free(manager, *range(8))
    run_and_free(manager, *range(50, 58))
    assert num_hits(manager, *range(9)) == 8
    assert num_hits(manager, *range(50, 54), *range(4, 8), 0) == 4
    assert num_hits(manager, *range(9), salt="a") == 0
    check_blocks(manager, [])


def test_large_token_ids_are_told_apart() -> None:
    """Digests read whole integers: 1 and 1 + 2**32 differ, and so do (1, 256) and (256, 1)."""
    manager = make_manager(block_size=2)
    run_and_free(manager, 1, 256)
    assert num_hits(manager, 1, 256, 0) == 2
    assert num_hits(manager, 1 + 2**32, 256, 0) == 0
    assert num_hits(manager, 256, 1, 0) == 0


# --- windows ----------------------------------------------------------------------------------------------------------


def make_windowed(*groups: tuple[int, int | None], block_size: int = 4) -> BlockManager:
    return BlockManager(groups=[BlockGroup(*group) for group in groups], block_size=block_size)


def prefill(manager: BlockManager, seq: Sequence, chunk: int, *others: Sequence) -> list[int]:
    """Compute a sequence's tokens chunk by chunk; how many blocks it then holds in the last group after each."""
    assert manager.allocate(seq)
    held = []
    while seq.num_computed_tokens < seq.num_tokens:
        end, _ = manager.extend(seq, min(seq.num_computed_tokens + chunk, seq.num_tokens))
        assert end > seq.num_computed_tokens
        seq.num_computed_tokens = end
        manager.cache_full_blocks(seq, end)
        check_blocks(manager, [seq, *others])
        held.append(len(seq.block_tables[-1].held))
    return held


def test_a_prompt_longer_than_the_cache_runs_through_a_window() -> None:
    manager = make_windowed((4, 8))  # 16 tokens
    seq = make_seq(*range(50))
    held = prefill(manager, seq, 50)
    assert max(held) == 4 and len(table_of(seq)) == 13
    for position in range(50, 90):
        seq.token_ids.append(position)
        assert manager.append(seq) is not None
        assert len(seq.block_tables[0].held) <= BlockGroup(4, 8).most_blocks(4) == 3
        seq.num_computed_tokens += 1
    check_blocks(manager, [seq])
    manager.free(seq)
    assert manager.num_available == 4
    check_blocks(manager, [])


def test_blocks_that_left_the_window_serve_others() -> None:
    manager = make_windowed((6, 8))
    first, second = make_seq(*range(12)), make_seq(*range(100, 112))
    prefill(manager, first, 4)
    prefill(manager, second, 4, first)
    check_blocks(manager, [first, second])
    assert not set(first.block_tables[0].held) & set(second.block_tables[0].held)


@pytest.mark.parametrize("chunk", [3, 4, 8, 40])
def test_a_windowed_prefix_is_found_from_its_last_window_alone(chunk: int) -> None:
    manager = make_windowed((12, 8))
    first = make_seq(*range(40))
    prefill(manager, first, chunk)
    assert num_hits(manager, *range(41)) == 40
    manager.free(first)
    assert num_hits(manager, *range(41)) == 40
    second = make_seq(*range(41))
    assert manager.allocate(second)
    (table,) = second.block_tables
    assert table.first == 8 and len(table.held) == 2, "position 40 reads from position 33 on"
    check_blocks(manager, [second])


def test_a_hit_needs_every_group() -> None:
    """Evicting one block of the last window moves the hit to the longest prefix whose window is whole."""
    manager = make_windowed((10, None), (5, 4))
    run = make_seq(*range(20))
    prefill(manager, run, 20)
    manager.free(run)
    other = make_seq(100)  # takes the block that was freed first: of positions [16, 20)
    assert manager.allocate(other) and manager.extend(other, 1)[0] == 1
    assert manager.pools[0].num_available == 9 and manager.pools[1].num_available == 4
    assert num_hits(manager, *range(21)) == 16
    check_blocks(manager, [other])


def test_the_door_knows_windows() -> None:
    group = BlockGroup(3, window=9)
    assert group.most_blocks(4) == 3 and group.blocks_needed(1000, 4) == 3 and group.blocks_needed(5, 4) == 2
    assert group.max_num_tokens(4) == float("inf") and BlockGroup(2, window=9).max_num_tokens(4) == 8
    assert BlockGroup(3, window=10).most_blocks(4) == 4 and BlockGroup(3, window=1).most_blocks(4) == 1


# --- eviction --------------------------------------------------------------------------------------------------------


def test_unknown_content_goes_first_then_the_least_recently_used_last_blocks_first() -> None:
    manager = make_manager(num_blocks=5, block_size=1)
    old = run_and_free(manager, 1, 2)
    young = run_and_free(manager, 3, 4)
    free = ({*range(5)} - {*old, *young}).pop()
    seq = make_seq(9)
    assert manager.allocate(seq)
    for _ in range(4):
        assert append(manager, seq)
    assert table_of(seq) == [free, old[1], old[0], young[1], young[0]]


def test_a_hit_makes_a_block_young_again() -> None:
    manager = make_manager(num_blocks=4, block_size=1)
    old, young = run_and_free(manager, 1), run_and_free(manager, 2)
    assert num_hits(manager, 1, 7) == 1
    seq = make_seq(5, 6, 7)
    assert manager.allocate(seq)
    assert young[0] in table_of(seq) and old[0] not in table_of(seq)
    assert num_hits(manager, 1) == 0 and manager.num_available == 1
    check_blocks(manager, [seq])


def test_an_evicted_block_is_no_longer_found() -> None:
    manager = make_manager(num_blocks=2)
    run_and_free(manager, *range(8))
    run_and_free(manager, 50)  # takes the last block
    assert num_hits(manager, *range(8)) == 4
    run_and_free(manager, *range(60, 68))
    assert num_hits(manager, *range(8)) == 0
    check_blocks(manager, [])


def test_a_block_still_shared_is_never_evicted() -> None:
    manager = make_manager(num_blocks=4)
    first = run(manager, make_seq(*range(8)))
    second = make_seq(*range(9))
    assert manager.allocate(second)
    manager.free(first)
    third = make_seq(1)
    assert manager.allocate(third) and not append(manager, third)
    assert not set(table_of(third)) & set(table_of(second))
    check_blocks(manager, [second, third])


def test_reset_forgets_everything_and_frees_nothing_in_use() -> None:
    manager = make_manager()
    run_and_free(manager, *range(8))
    seq = run(manager, make_seq(*range(50, 58)))
    manager.reset_prefix_cache()
    check_blocks(manager, [seq])
    assert num_hits(manager, *range(9)) == 0 and num_hits(manager, *range(50, 59)) == 0
    seq.token_ids += range(58, 62)
    assert append(manager, seq)
    compute(manager, seq)
    manager.free(seq)
    assert manager.num_available == 8
    check_blocks(manager, [])


def test_statistics_count_what_was_asked_and_what_was_found() -> None:
    manager = make_manager()
    run_and_free(manager, *range(8))
    num_hits(manager, *range(9))
    assert (manager.num_queried_tokens, manager.num_hit_tokens) == (8 + 9, 8)


# --- check() itself can fail ------------------------------------------------------------------------------------------


def test_check_sees_a_leaked_block() -> None:
    manager = make_manager()
    assert manager.allocate(make_seq(1))
    with pytest.raises(AssertionError, match="reference counts"):
        check_blocks(manager, [])


def test_check_sees_a_block_given_back_twice() -> None:
    manager = make_manager()
    seq = make_seq(1)
    assert manager.allocate(seq)
    tables = seq.block_tables
    manager.free(seq)
    seq.block_tables, seq.prefix = tables, manager.prefixes.root
    seq.prefix.num_uses += 1
    manager.free(seq)
    with pytest.raises(AssertionError):
        check_blocks(manager, [])
