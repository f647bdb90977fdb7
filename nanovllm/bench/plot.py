"""Draws a load test as an SVG: each latency over the time of the test, and its distribution."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

import numpy as np

from nanovllm.bench.load import Outcome

WIDTH, HEIGHT = 960, 520  # pixels
PANEL_WIDTH, PANEL_HEIGHT, GAP = 240, 170, 64  # GAP: space between panels for the labels of the axes
LEFT, TOP = 64, 72
NUM_QUANTILES = 200  # points of a curve
LABELLED_QUANTILES = {50: "median", 99: "p99"}
TEXT = 'font-family="sans-serif" font-size="12" fill="#222"'
SMALL = 'font-family="sans-serif" font-size="10" fill="#555"'
FAILED = "#c43c35"
COLUMNS = {
    "time to first token": ("#3b6fb6", lambda outcome: outcome.first_token_seconds),
    "time per output token": ("#d98a29", lambda outcome: outcome.seconds_per_token),
    "end-to-end latency": ("#4f9e5b", lambda outcome: outcome.seconds),
}


@dataclass(frozen=True)
class Panel:
    """A rectangle with two axes from 0 to a round number."""

    left: int
    top: int
    max_x: float
    max_y: float

    def x(self, value: float) -> float:
        return self.left + PANEL_WIDTH * value / self.max_x

    def y(self, value: float) -> float:
        return self.top + PANEL_HEIGHT * (1 - value / self.max_y)

    def frame(self, label_x: str, label_y: str) -> list[str]:
        bottom, right = self.top + PANEL_HEIGHT, self.left + PANEL_WIDTH
        lines = [
            f'<rect x="{self.left}" y="{self.top}" width="{PANEL_WIDTH}" height="{PANEL_HEIGHT}" fill="#fafafa" '
            'stroke="#ccc"/>',
            f'<text x="{right}" y="{bottom + 28}" text-anchor="end" {SMALL}>{label_x}</text>',
            f'<text x="{self.left}" y="{self.top - 6}" {SMALL}>{label_y}</text>',
        ]
        for part in range(3):
            x, y = self.max_x * part / 2, self.max_y * part / 2
            lines.append(f'<text x="{self.x(x):.1f}" y="{bottom + 14}" text-anchor="middle" {SMALL}>{x:g}</text>')
            lines.append(f'<text x="{self.left - 5}" y="{self.y(y) + 4:.1f}" text-anchor="end" {SMALL}>{y:g}</text>')
        return lines


def draw(outcomes: Sequence[Outcome], caption: str) -> str:
    start = min(outcome.begin for outcome in outcomes)
    seconds = round_up(max(outcome.begin for outcome in outcomes) - start)
    failed = [outcome.begin - start for outcome in outcomes if outcome.failure is not None]
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<text x="{LEFT}" y="24" {TEXT} font-weight="bold">{escape(caption)}</text>',
    ]
    if failed:
        lines.append(f'<text x="{LEFT}" y="{HEIGHT - 10}" {SMALL}>red: failed requests, {len(failed)}</text>')
    for index, (title, (colour, latency)) in enumerate(COLUMNS.items()):
        points = [
            (outcome.begin - start, found * 1e3)
            for outcome in outcomes
            if outcome.failure is None and (found := latency(outcome)) is not None
        ]
        left = LEFT + index * (PANEL_WIDTH + GAP)
        most = round_up(max((y for _, y in points), default=1.0))
        over_time = Panel(left, TOP, seconds, most)
        distribution = Panel(left, TOP + PANEL_HEIGHT + GAP, most, 100)
        lines.append(f'<text x="{left}" y="{TOP - 22}" {TEXT}>{title}</text>')
        lines += over_time.frame("seconds into the test", "ms")
        lines += _dots(over_time, points, colour) + _failures(over_time, failed)
        lines += distribution.frame("ms", "% of requests at most")
        lines += _curve(distribution, [y for _, y in points], colour)
    return "\n".join([*lines, "</svg>", ""])


def _dots(panel: Panel, points: Sequence[tuple[float, float]], colour: str) -> list[str]:
    """All dots in one path: a line of length 0 with round ends is a dot."""
    path = "".join(f"M{panel.x(x):.1f} {panel.y(y):.1f}h0" for x, y in points)
    return [f'<path d="{path}" stroke="{colour}" stroke-opacity="0.6" stroke-width="3" stroke-linecap="round"/>']


def _failures(panel: Panel, times: Sequence[float]) -> list[str]:
    """Short strokes on the time axis."""
    path = "".join(f"M{panel.x(time):.1f} {panel.y(0):.1f}v-8" for time in times)
    return [f'<path d="{path}" stroke="{FAILED}"/>'] if path else []


def _curve(panel: Panel, values: Sequence[float], colour: str) -> list[str]:
    if not values:
        return []
    percents = np.linspace(0, 100, NUM_QUANTILES + 1)
    points = " ".join(
        f"{panel.x(value):.1f},{panel.y(percent):.1f}"
        for percent, value in zip(percents, np.percentile(values, percents), strict=True)
    )
    lines = [f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>']
    corner = (
        panel.left + PANEL_WIDTH - 8,
        panel.top + PANEL_HEIGHT - 26,
    )  # a curve that ends at the top does not reach it
    for row, (percent, name) in enumerate(LABELLED_QUANTILES.items()):
        value = float(np.percentile(values, percent))
        text = f"{name} {value:.4g} ms"
        lines.append(f'<circle cx="{panel.x(value):.1f}" cy="{panel.y(percent):.1f}" r="3" fill="{colour}"/>')
        lines.append(f'<text x="{corner[0]}" y="{corner[1] + 16 * row}" text-anchor="end" {SMALL}>{text}</text>')
    return lines


def round_up(value: float) -> float:
    """Round up to a number with few digits whose half has few digits too, because an axis shows both."""
    if value <= 0:
        return 1.0
    unit = 10.0 ** math.floor(math.log10(value))
    return next(step * unit for step in (1, 1.2, 1.6, 2, 3, 4, 5, 6, 8, 10, 12) if step * unit >= value)
