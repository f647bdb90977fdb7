"""Draws latencies and throughput against the request rate as an SVG, from one row of metrics per rate."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from nanovllm.bench.plot import GAP, LEFT, PANEL_WIDTH, SMALL, TEXT, WIDTH, round_up
from nanovllm.bench.report import Row

HEIGHT, TOP, PANEL_HEIGHT = 420, 96, 250  # pixels
LABEL_WIDTH = 22  # pixels that the label of a rate needs
MAX_DECADES_WITH_STEPS = 2  # a longer logarithmic axis labels only powers of ten
LATENCIES = {"ttft": "time to first token", "itl": "inter-token latency"}
MEDIAN, P99, COMPLETED, GOOD, LIMIT, OFFERED = "#3b6fb6", "#d98a29", "#4f9e5b", "#8250a8", "#c43c35", "#999"


@dataclass(frozen=True)
class Curve:
    """A line through one point per rate; rates without a value are left out."""

    name: str
    colour: str
    values: Sequence[float | None]
    dash: str = "none"


@dataclass(frozen=True)
class Axis:
    """Maps values to a share of the axis, 0 to 1."""

    low: float
    high: float
    is_log: bool

    def share(self, value: float) -> float:
        if self.is_log:  # pieces that arrive together have a latency of 0, which is drawn at the low end
            return math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        if not self.is_log:
            return [self.low + (self.high - self.low) * part / 4 for part in range(5)]
        is_short = math.log10(self.high / self.low) <= MAX_DECADES_WITH_STEPS + 1e-9
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        found = [step * 10.0**decade for decade in decades for step in ((1, 2, 5) if is_short else (1,))]
        return [tick for tick in found if self.low * 0.999 <= tick <= self.high * 1.001]


def log_axis(values: Sequence[float]) -> Axis:
    """From 1, 2 or 5 times a power of ten below the smallest value to one above the largest."""
    positive = [value for value in values if value > 0] or [1.0]
    low, high = _round_log(min(positive), up=False), _round_log(max(positive), up=True)
    return Axis(low, high if high > low else 10 * low, is_log=True)


def _round_log(value: float, *, up: bool) -> float:
    decade = math.floor(math.log10(value))
    steps = [step * 10.0**exponent for exponent in (decade, decade + 1) for step in (1, 2, 5)]
    if up:
        return next(step for step in steps if step >= value * 0.999)
    return next(step for step in reversed(steps) if step <= value * 1.001)


# --- drawing ----------------------------------------------------------------------------------------------------------


def draw_rates(rows: Sequence[Row], caption: str, limits: Mapping[str, float]) -> str:
    """One panel for each latency and one for requests per second.

    `rows` are the metrics of `serve_metrics.measure` with the `request_rate`. `limits` are those of the goodput, in
    milliseconds by name.
    """
    rows = sorted(rows, key=lambda row: row["request_rate"])
    rates = [row["request_rate"] for row in rows]
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<text x="{LEFT}" y="28" {TEXT} font-weight="bold">{escape(caption)}</text>',
    ]
    for index, (name, title) in enumerate(LATENCIES.items()):
        curves = [
            Curve("median", MEDIAN, [row[f"median_{name}_ms"] for row in rows]),
            Curve("p99", P99, [row[f"p99_{name}_ms"] for row in rows]),
        ]
        if name in limits:
            curves.append(Curve(f"limit {limits[name]:g} ms", LIMIT, [limits[name]] * len(rows), dash="5 4"))
        lines += _panel(index, f"{title}, ms", rates, curves, log_axis(_values(curves)))
    curves = [
        Curve("sent", OFFERED, rates, dash="2 3"),
        Curve("completed", COMPLETED, [row["request_throughput"] for row in rows]),
    ]
    if limits:
        curves.append(Curve("within limits", GOOD, [row["request_goodput"] for row in rows]))
    lines += _panel(2, "requests per second", rates, curves, Axis(0.0, round_up(max(_values(curves))), is_log=False))
    failed = ", ".join(f"{row['failed']} at {row['request_rate']:g}/s" for row in rows if row["failed"])
    if failed:
        lines.append(f'<text x="{LEFT}" y="{HEIGHT - 12}" {SMALL}>failed requests: {failed}</text>')
    return "\n".join([*lines, "</svg>", ""])


def _values(curves: Sequence[Curve]) -> list[float]:
    return [value for curve in curves for value in curve.values if value is not None]


def _panel(index: int, title: str, rates: Sequence[float], curves: Sequence[Curve], axis: Axis) -> list[str]:
    left, bottom = LEFT + index * (PANEL_WIDTH + GAP), TOP + PANEL_HEIGHT
    widest = round_up(max(rates))
    xs = [left + PANEL_WIDTH * rate / widest for rate in rates]
    lines = [
        f'<text x="{left}" y="{TOP - 30}" {TEXT}>{title}</text>',
        f'<rect x="{left}" y="{TOP}" width="{PANEL_WIDTH}" height="{PANEL_HEIGHT}" fill="#fafafa" stroke="#ccc"/>',
        f'<text x="{left + PANEL_WIDTH / 2:g}" y="{bottom + 34}" text-anchor="middle" {SMALL}>requests sent per '
        "second</text>",
    ]
    for tick in axis.ticks():
        y = bottom - PANEL_HEIGHT * axis.share(tick)
        lines.append(f'<path d="M{left} {y:.1f}h{PANEL_WIDTH}" stroke="#e4e4e4"/>')
        lines.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end" {SMALL}>{tick:g}</text>')
    lines += _rate_labels(rates, xs, bottom)
    legend_x = float(left)
    for curve in curves:
        lines += _legend_entry(curve, legend_x)
        legend_x += 30 + 5.6 * len(curve.name)
        lines += _curve(curve, xs, [None if v is None else bottom - PANEL_HEIGHT * axis.share(v) for v in curve.values])
    return lines


def _rate_labels(rates: Sequence[float], xs: Sequence[float], bottom: int) -> list[str]:
    """A mark for every rate, and its number where there is room."""
    lines = []
    free_from = -math.inf
    for rate, x in zip(rates, xs, strict=True):
        lines.append(f'<path d="M{x:.1f} {bottom}v4" stroke="#888"/>')
        if x - LABEL_WIDTH / 2 >= free_from:
            lines.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle" {SMALL}>{rate:g}</text>')
            free_from = x + LABEL_WIDTH / 2
    return lines


def _legend_entry(curve: Curve, x: float) -> list[str]:
    return [
        f'<path d="M{x:.1f} {TOP - 14}h14" stroke="{curve.colour}" stroke-width="2" stroke-dasharray="{curve.dash}"/>',
        f'<text x="{x + 18:.1f}" y="{TOP - 10}" {SMALL}>{escape(curve.name)}</text>',
    ]


def _curve(curve: Curve, xs: Sequence[float], ys: Sequence[float | None]) -> list[str]:
    points = [(x, y) for x, y in zip(xs, ys, strict=True) if y is not None]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    lines = [
        f'<polyline points="{path}" fill="none" stroke="{curve.colour}" stroke-width="1.8" '
        f'stroke-dasharray="{curve.dash}"/>'
    ]
    if curve.dash == "none":
        lines += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{curve.colour}"/>' for x, y in points]
    return lines
