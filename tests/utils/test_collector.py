import gc

import pytest

from nanovllm.utils.collector import YOUNG_OBJECTS, collector_calmed, collector_paused


@pytest.mark.parametrize("was_on", [True, False])
def test_collector_is_as_before_whatever_happened(was_on: bool) -> None:
    before = gc.isenabled()
    try:
        gc.enable() if was_on else gc.disable()
        with pytest.raises(KeyError), collector_paused():
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() == was_on
    finally:
        gc.enable() if before else gc.disable()


def test_objects_made_in_a_pause_are_old() -> None:
    """A collection of young objects, which comes soon after a pause, does not scan them."""
    assert gc.isenabled()
    with collector_paused():
        made: list[int] = []
    assert any(found is made for found in gc.get_objects(generation=2))


@pytest.mark.parametrize(
    ("before", "within"),
    [(700, YOUNG_OBJECTS), (0, 0), (2 * YOUNG_OBJECTS, 2 * YOUNG_OBJECTS)],  # 0: the user has turned collection off
)
def test_a_calm_collector_is_as_before_whatever_happened(before: int, within: int) -> None:
    at_first = gc.get_threshold()
    try:
        gc.set_threshold(before, 11, 12)
        with pytest.raises(KeyError), collector_calmed():
            assert gc.get_threshold()[0] == within
            raise KeyError
        assert gc.get_threshold() == (before, 11, 12)
    finally:
        gc.set_threshold(*at_first)


def test_two_threads_leave_the_collector_as_it_was() -> None:
    at_first = gc.get_threshold()
    one, other = collector_calmed(), collector_calmed()
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    other.__exit__(None, None, None)
    assert gc.get_threshold() == at_first
