import gc

from nanovllm.utils.short_pauses import short_pauses


class Stream:
    def __init__(self) -> None:
        self.parts = [[] for _ in range(100)]


def num_full_collections() -> int:
    return gc.get_stats()[2]["collections"]


def open_and_close(num_streams: int) -> int:
    """How many collections of all objects it takes that streams come and go, 600 of which are open."""
    before, streams = num_full_collections(), [Stream() for _ in range(600)]
    for number in range(num_streams):
        streams[number % 600] = Stream()
        if number % 600 == 599:  # all end, and others come
            streams = []
            streams = [Stream() for _ in range(600)]
    return num_full_collections() - before


def test_streams_come_and_go_without_a_collection_of_all_objects() -> None:
    at_first = gc.get_threshold()
    assert open_and_close(6000) > 0
    with short_pauses():
        assert open_and_close(6000) == 0
        assert gc.get_freeze_count() > 1000
    assert gc.get_threshold() == at_first and gc.get_freeze_count() == 0
