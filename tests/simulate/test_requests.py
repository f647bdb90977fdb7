"""Requests: prompts share exactly the prefixes that the trace says; synthetic ones follow their specification."""

from collections import Counter
from pathlib import Path

import pytest

from nanovllm.bench.traces import read_trace
from nanovllm.errors import ConfigError
from nanovllm.simulate.requests import Arrival, Synthetic, trace_arrivals

EXCERPT = Path(__file__).parent.parent / "data" / "traces" / "mooncake_excerpt.jsonl"


def num_common(left: list[int], right: list[int]) -> int:
    count = 0
    while count < min(len(left), len(right)) and left[count] == right[count]:
        count += 1
    return count


def test_prompts_of_a_trace_share_their_hashed_blocks() -> None:
    rows, arrivals = read_trace(EXCERPT, 30), trace_arrivals(EXCERPT, limit=30)
    assert [arrival.input_len for arrival in arrivals] == [row.input_len for row in rows]
    assert [len(arrival.prompt()) for arrival in arrivals] == [row.input_len for row in rows]
    for index, row in enumerate(rows):
        for other in range(index):
            ids = zip(row.hash_ids, rows[other].hash_ids, strict=False)
            same = next((number for number, (left, right) in enumerate(ids) if left != right), None)
            if same is not None:
                assert num_common(arrivals[index].prompt(), arrivals[other].prompt()) == 512 * same


def test_times_begin_at_zero_and_scale_to_a_rate() -> None:
    own, scaled = trace_arrivals(EXCERPT), trace_arrivals(EXCERPT, rate=5.0)
    assert own[0].seconds == scaled[0].seconds == 0
    assert scaled[-1].seconds == pytest.approx((len(own) - 1) / 5)
    factor = scaled[-1].seconds / own[-1].seconds
    assert [arrival.seconds for arrival in scaled] == pytest.approx([arrival.seconds * factor for arrival in own])


def test_a_trace_without_hashes_shares_nothing(tmp_path: Path) -> None:
    file = tmp_path / "azure.csv"
    file.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,5,2\n2023-11-16 18:15:46.68,7,3\n")
    first, second = trace_arrivals(file)
    assert (len(first.prompt()), len(second.prompt()), second.output_len) == (5, 7, 3)
    assert num_common(first.prompt(), second.prompt()) == 0
    with pytest.raises(ConfigError, match="all requests of the trace have the same time"):
        trace_arrivals(file, rate=1.0)


def test_more_tokens_than_hashes_are_the_requests_own(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    line = '{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [4]}\n'
    file.write_text(line * 2)
    first, second = trace_arrivals(file)
    assert num_common(first.prompt(), second.prompt()) == 512


def test_drawn_requests() -> None:
    spec = Synthetic.parse("groups=5,prefix=10:20,unique=3,output=2:4,skew=1")
    arrivals = spec.arrivals(count=2000, rate=50, seed=3)
    assert arrivals == spec.arrivals(count=2000, rate=50, seed=3)
    assert arrivals != spec.arrivals(count=2000, rate=50, seed=4)
    assert 1999 / arrivals[-1].seconds == pytest.approx(50, rel=0.1)
    assert {arrival.output_len for arrival in arrivals} == {2, 3, 4}
    prefixes = dict(arrival.pieces[0] for arrival in arrivals)
    assert len(prefixes) == 5
    assert all(10 <= length <= 20 for length in prefixes.values())
    assert all(arrival.input_len == prefixes[arrival.pieces[0][0]] + 3 for arrival in arrivals)
    shares = Counter(arrival.pieces[0][0] for arrival in arrivals)
    assert shares[1] / shares[5] == pytest.approx(5, rel=0.4)  # the 5th group's share is 1/5 of the first's


def test_prompts_of_a_group_share_its_prefix_alone() -> None:
    same = [Arrival(0.0, ((1, 8), (-1, 4)), 1), Arrival(0.0, ((1, 8), (-2, 4)), 1), Arrival(0.0, ((2, 8), (-3, 4)), 1)]
    first, second, other = (arrival.prompt() for arrival in same)
    assert (num_common(first, second), num_common(first, other)) == (8, 0)


@pytest.mark.parametrize(
    "text", ["groups", "group=3", "groups=0", "prefix=4:2", "unique=-1", "output=1.5", "skew=x", "skew=-1", "skew=nan"]
)
def test_wrong_specifications(text: str) -> None:
    with pytest.raises(ConfigError, match="synthetic"):
        Synthetic.parse(text)
