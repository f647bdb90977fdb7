"""Metrics, report and plot of a load test: computed by hand, with vLLM's names."""

import json
from array import array
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from nanovllm.bench.http_stream import RequestFailed
from nanovllm.bench.load import Outcome
from nanovllm.bench.plot import draw, round_up
from nanovllm.bench.serve_metrics import ServeReport, is_good, measure, peak_concurrency

SVG = "{http://www.w3.org/2000/svg}"

LATENCIES_OF_ONE = ["100.00", "100.00", "150.00", "150.00"]  # TTFT and ITL of one request in a table


def outcome_of(begin: float, *pieces: float, tokens: int | None = None, sent: float | None = None) -> Outcome:
    return Outcome(
        begin=begin,
        sent=begin if sent is None else sent,
        ended=pieces[-1],
        piece_times=array("d", pieces),
        num_input_tokens=10,
        num_output_tokens=len(pieces) if tokens is None else tokens,
        wanted_output_tokens=3,
    )


def failed_outcome(begin: float, ended: float) -> Outcome:
    return replace(outcome_of(begin, ended, tokens=0), failure=RequestFailed("HTTP 429", "busy"))


def test_metrics_by_hand() -> None:
    outcomes = [
        outcome_of(0.0, 0.1, 0.2, 0.4),
        outcome_of(0.5, 0.8, 1.3, tokens=6),  # two pieces, but six tokens
        outcome_of(1.0, 2.0, sent=1.5),
        failed_outcome(0.2, 0.3),
    ]
    row = measure(outcomes, {"ttft": 300.5, "tpot": 120.0})
    expected = {
        **{"completed": 3, "failed": 1, "failures": {"HTTP 429": 1}, "duration": 2.0},
        **{"total_input_tokens": 30, "total_output_tokens": 10, "request_throughput": 1.5},
        **{"output_throughput": 5.0, "total_token_throughput": 20.0, "max_concurrent_requests": 2},
        **{"shorter_than_asked": 1, "request_goodput": 0.5},
        **{"mean_ttft_ms": 1400 / 3, "median_ttft_ms": 300.0, "p99_ttft_ms": 300 + 0.98 * 700},
        **{"mean_tpot_ms": 125.0, "median_tpot_ms": 125.0},
        **{"mean_itl_ms": 800 / 3, "median_itl_ms": 200.0},
        **{"mean_e2el_ms": 2200 / 3, "median_e2el_ms": 800.0},
    }
    for name, value in expected.items():
        assert row[name] == (value if isinstance(value, dict) else pytest.approx(value)), name
    assert row["request_goodput"] == pytest.approx(0.5)


def test_goodput_takes_every_limit() -> None:
    outcome = outcome_of(0.0, 0.1, 0.2, 0.3)
    assert is_good(outcome, {"ttft": 101, "tpot": 101, "e2el": 301})
    assert not is_good(outcome, {"ttft": 99})
    assert not is_good(outcome, {"ttft": 101, "e2el": 299})
    assert is_good(outcome_of(0.0, 0.1), {"tpot": 1, "itl": 1})  # there is no second token


def test_goodput_takes_the_longest_time_between_two_pieces() -> None:
    stalled = outcome_of(0.0, 0.1, 0.11, 0.12, 0.22)
    assert is_good(stalled, {"tpot": 41, "itl": 101})
    assert not is_good(stalled, {"tpot": 41, "itl": 99})
    row = measure([stalled, outcome_of(0.0, 0.1, 0.15, 0.2)], {"ttft": 150.0, "itl": 60.0})
    assert row["request_goodput"] == pytest.approx(1 / row["duration"])


def test_peak_concurrency() -> None:
    assert peak_concurrency([outcome_of(0, 1), outcome_of(1, 2), outcome_of(2, 3)]) == 1
    assert peak_concurrency([outcome_of(0, 3), outcome_of(1, 2), outcome_of(1.5, 4), outcome_of(3.5, 5)]) == 3


def test_report_has_vllms_names() -> None:
    report = ServeReport("serve", {"model": "tiny"}, {"requests": 1}, [measure([outcome_of(0.0, 0.1, 0.25)])])
    text = str(report)
    assert text.startswith(
        "serve\n\nmodel     tiny\nrequests  1\n\n============ Serving Benchmark Result ============\n"
    )
    for line in (
        *("Successful requests:                     1", "Benchmark duration (s):                  0.25"),
        *("Total input tokens:                      10", "Total generated tokens:                  2"),
        *("Request throughput (req/s):              4.00", "Output token throughput (tok/s):         8.00"),
        *("Total Token throughput (tok/s):          48.00", "Peak concurrent requests:                1"),
        *("Mean TTFT (ms):                          100.00", "Median TPOT (ms):                        150.00"),
        *("P99 ITL (ms):                            150.00", "P99 E2EL (ms):                           250.00"),
        *("---------------Time to First Token----------------", "-----Time per Output Token (excl. 1st token)------"),
    ):
        assert line in text.splitlines(), line
    document = json.loads(report.to_json())
    assert (document["benchmark"], document["results"][0]["mean_ttft_ms"]) == ("serve", pytest.approx(100))


def test_report_of_several_rates_is_a_table() -> None:
    outcomes = [outcome_of(0.0, 0.1, 0.25)]
    rows = [
        {"request_rate": 4.0, **measure(outcomes, {"itl": 200.0})},
        {"request_rate": 8.0, **measure([*outcomes, failed_outcome(0.0, 0.5)], {"itl": 100.0})},
        {"request_rate": 16.0, **measure([failed_outcome(0.0, 0.5)], {"itl": 100.0})},
    ]
    *_, head, first, second, third, failure = str(ServeReport("serve", {"model": "tiny"}, {}, rows)).splitlines()
    assert [head.split()[0], *first.split()] == ["rate", "4.00", "1", "0", "4.00", "4.00", "8.00", *LATENCIES_OF_ONE]
    assert second.split() == ["8.00", "1", "1", "2.00", "0.000", "4.00", *LATENCIES_OF_ONE]
    assert third.split() == ["16.00", "0", "1", "0.000", "0.000", "0.000", "-", "-", "-", "-"]
    assert failure == "failed: HTTP 429: busy"
    assert "good req/s" in head and "good" not in str(
        ServeReport("serve", {"model": "tiny"}, {}, [measure(outcomes)] * 2)
    )


# --- the plot ---------------------------------------------------------------------------------------------------------


def test_plot_is_a_picture_of_every_request() -> None:
    outcomes = [outcome_of(i * 0.1, i * 0.1 + 0.2, i * 0.1 + 0.3 + 0.01 * i) for i in range(50)]
    outcomes.append(failed_outcome(2.0, 2.5))
    picture = draw(outcomes, 'a <model> & "more"')
    root = ElementTree.fromstring(picture)
    paths = [path.attrib["d"] for path in root.iter(f"{SVG}path")]
    assert [path.count("M") for path in paths] == [50, 1, 50, 1, 50, 1]  # dots, and the failure, three times
    assert len(list(root.iter(f"{SVG}polyline"))) == 3
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert 'a <model> & "more"' in texts and "red: failed requests, 1" in texts
    assert any(text and text.startswith("p99 200 ms") for text in texts)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for line in root.iter(f"{SVG}polyline"):
        points = [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
        assert all(0 <= x <= width and 0 <= y <= height for x, y in points)
        assert points == sorted(points, key=lambda point: (point[0], -point[1]))  # a CDF never decreases


def test_plot_of_single_tokens_and_of_one_moment() -> None:
    root = ElementTree.fromstring(draw([outcome_of(5.0, 5.1), outcome_of(5.0, 5.2)], "one"))
    assert len(list(root.iter(f"{SVG}polyline"))) == 2  # nothing to draw for the time per output token


@pytest.mark.parametrize(
    ("value", "end"), [(0, 1), (1, 1), (1.01, 1.2), (3.5, 4), (97, 100), (0.0042, 0.005), (850, 1000)]
)
def test_axes_end_at_round_numbers(value: float, end: float) -> None:
    assert round_up(value) == pytest.approx(end)
