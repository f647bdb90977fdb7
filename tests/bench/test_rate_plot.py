"""The picture of latencies against the request rate: its points are where the numbers are."""

from typing import Any
from xml.etree import ElementTree

import pytest

from nanovllm.bench.rate_plot import Axis, draw_rates, log_axis

SVG = "{http://www.w3.org/2000/svg}"
LEFT, TOP, PANEL_WIDTH, PANEL_HEIGHT, GAP = 64, 96, 240, 250, 64  # of the panels, in pixels


def row_of(rate: float, *, ttft: float | None, itl: float | None, failed: int = 0, **more: float) -> dict[str, Any]:
    return {
        **{"request_rate": rate, "request_throughput": rate / 2, "failed": failed},
        **{"median_ttft_ms": ttft, "p99_ttft_ms": ttft and 10 * ttft},
        **{"median_itl_ms": itl, "p99_itl_ms": itl and 10 * itl},
        **more,
    }


def curves(root: ElementTree.Element) -> list[list[tuple[float, float]]]:
    lines = [line.attrib["points"].split() for line in root.iter(f"{SVG}polyline")]
    return [[tuple(map(float, point.split(","))) for point in line] for line in lines]


def texts(root: ElementTree.Element) -> list[str]:
    return [text.text or "" for text in root.iter(f"{SVG}text")]


def test_points_are_where_the_numbers_are() -> None:
    rows = [row_of(rate, ttft=10 * rate, itl=5.0, request_goodput=rate / 4) for rate in (20, 10, 5)]  # in any order
    root = ElementTree.fromstring(draw_rates(rows, 'a <model> & "more"', {"ttft": 100.0, "itl": 7.5}))
    ttft, ttft_p99, ttft_limit, itl, itl_p99, itl_limit, sent, completed, good = curves(root)
    # The axis of TTFT is logarithmic and goes from 50 to 2,000; that of the rates is linear and goes from 0 to 20.
    assert ttft[0] == pytest.approx((LEFT + PANEL_WIDTH / 4, TOP + PANEL_HEIGHT), abs=0.1)
    assert ttft_p99[-1] == pytest.approx((LEFT + PANEL_WIDTH, TOP), abs=0.1)
    assert ttft_limit[0][1] == ttft_limit[-1][1] == ttft[1][1]  # the median at 10 requests/s is at the limit
    assert itl[0][1] == itl[2][1] > itl_limit[0][1] > itl_p99[0][1] and itl[0][0] == ttft[0][0] + PANEL_WIDTH + GAP
    bottom = TOP + PANEL_HEIGHT
    for line, slope in ((sent, 1.0), (completed, 0.5), (good, 0.25)):  # from 0 to 20, too
        assert [bottom - y for _, y in line] == pytest.approx(
            [slope * rate / 20 * PANEL_HEIGHT for rate in (5, 10, 20)], abs=0.1
        )
    assert {'a <model> & "more"', "median", "p99", "limit 100 ms", "limit 7.5 ms", "within limits"} <= {*texts(root)}
    assert texts(root).count("20") >= 3 and "failed" not in " ".join(texts(root))


def test_everything_is_inside_the_picture() -> None:
    rows = [row_of(rate, ttft=0.04 * rate**3, itl=0.001 * rate) for rate in (1, 2, 3, 100, 101, 200)]
    root = ElementTree.fromstring(draw_rates(rows, "wide", {}))
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    points = [point for curve in curves(root) for point in curve]
    assert len(points) == 6 * 6 and all(0 <= x <= width and 0 <= y <= height for x, y in points)
    places = [(float(text.attrib["x"]), float(text.attrib["y"])) for text in root.iter(f"{SVG}text")]
    assert all(0 <= x <= width and 0 <= y <= height for x, y in places)
    shown = texts(root)
    assert shown.count("200") >= 3 and "3" not in shown  # there is no room for the label beside 1
    assert "within limits" not in shown


def test_a_rate_without_an_answer_has_no_point() -> None:
    rows = [row_of(4, ttft=10.0, itl=None), row_of(8, ttft=20.0, itl=None), row_of(16, ttft=None, itl=None, failed=9)]
    root = ElementTree.fromstring(draw_rates(rows, "overload", {}))
    assert [len(curve) for curve in curves(root)] == [2, 2, 0, 0, 3, 3]
    assert "failed requests: 9 at 16/s" in texts(root)


@pytest.mark.parametrize(
    ("values", "ends", "ticks"),
    [
        ([12, 80], (10, 100), [10, 20, 50, 100]),
        ([3.0, 4.0], (2, 5), [2, 5]),
        ([1.0], (1, 10), [1, 2, 5, 10]),
        ([0.5, 0.5], (0.5, 5), [0.5, 1, 2, 5]),
        ([7, 4345], (5, 5000), [10, 100, 1000]),
        ([0.0], (1, 10), [1, 2, 5, 10]),
        ([], (1, 10), [1, 2, 5, 10]),
    ],
)
def test_logarithmic_axis(values: list[float], ends: tuple[float, float], ticks: list[float]) -> None:
    axis = log_axis(values)
    assert (axis.low, axis.high) == pytest.approx(ends)
    assert axis.ticks() == pytest.approx(ticks)
    assert (axis.share(axis.low), axis.share(axis.high)) == pytest.approx((0, 1))
    assert axis.share(0.0) == 0


def test_linear_axis() -> None:
    axis = Axis(0.0, 80.0, is_log=False)
    assert axis.ticks() == [0, 20, 40, 60, 80] and axis.share(20) == 0.25
