"""Draws simulated runs as an SVG: latency distributions, cache hits, and how busy each replica was."""

from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

import numpy as np

from nanovllm.bench.plot import GAP, LEFT, PANEL_HEIGHT, PANEL_WIDTH, SMALL, TEXT, TOP, Panel, round_up
from nanovllm.bench.report import Row
from nanovllm.simulate.fleet import Outcome
from nanovllm.simulate.metrics import duration, latencies, measure
from nanovllm.simulate.runs import Limits

WIDTH, HEIGHT = 960, 540  # pixels
SEARCH_HEIGHT = 290
COLOURS = ("#3b6fb6", "#d98a29", "#4f9e5b", "#8a5ba6")
LIMIT_COLOUR = "#c43c35"
LATENCIES = {"ttft": "time to first token", "tpot": "time per output token", "e2e": "end-to-end latency"}
SEARCHED = {
    "ttft_p99_ms": "time to first token, p99",
    "tpot_p99_ms": "time per output token, p99",
    "cache_hit_percent": "prompt tokens found in the cache",
}
MAX_PERCENT = 99  # end of a curve: the slowest requests would compress the rest


def draw_runs(outcomes: Mapping[str, Outcome], caption: str) -> str:
    lines = _head(caption, HEIGHT)
    measured = {name: latencies(outcome) for name, outcome in outcomes.items()}
    for column, (key, title) in enumerate(LATENCIES.items()):
        series = {name: [1e3 * second for second in found[key]] for name, found in measured.items()}
        lines += _distributions(_left(column), title, series)
    lines += _hits(_left(0), {name: measure(outcome)["cache_hit_percent"] for name, outcome in outcomes.items()})
    lines += _busy(_left(1), outcomes)
    lines += _legend(_left(2), list(outcomes))
    return "\n".join([*lines, "</svg>", ""])


def draw_search(rows: Mapping[int, Row], limits: Limits, caption: str) -> str:
    """The p99 latency of each number of replicas that was tried, with the limit as a line."""
    lines = _head(caption, SEARCH_HEIGHT)
    for column, (key, title) in enumerate(SEARCHED.items()):
        limit = getattr(limits, key, None)
        points = [(number, row[key]) for number, row in rows.items() if row[key] is not None]
        most = round_up(max([value for _, value in points] + [limit or 0.0]))
        panel = Panel(_left(column), TOP, round_up(max(rows)), most)
        lines += [f'<text x="{panel.left}" y="{TOP - 22}" {TEXT}>{title}</text>']
        lines += panel.frame("replicas", "percent" if key.endswith("percent") else "ms")
        lines += _line(panel, points, COLOURS[column])
        lines += [f'<circle cx="{panel.x(x):.1f}" cy="{panel.y(y):.1f}" r="3"/>' for x, y in points]
        if limit is not None:
            lines += _line(panel, [(0, limit), (panel.max_x, limit)], LIMIT_COLOUR)
    return "\n".join([*lines, "</svg>", ""])


def _head(caption: str, height: int) -> list[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">',
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        f'<text x="{LEFT}" y="24" {TEXT} font-weight="bold">{escape(caption)}</text>',
    ]


def _left(column: int) -> int:
    return LEFT + column * (PANEL_WIDTH + GAP)


def _lower_top() -> int:
    return TOP + PANEL_HEIGHT + GAP + 16


def _distributions(left: int, title: str, series: Mapping[str, Sequence[float]]) -> list[str]:
    percents = np.linspace(0, MAX_PERCENT, 2 * MAX_PERCENT + 1)
    curves = [np.percentile(values, percents) if values else np.zeros(0) for values in series.values()]
    panel = Panel(left, TOP, round_up(max((float(curve[-1]) for curve in curves if curve.size), default=1.0)), 100)
    lines = [f'<text x="{left}" y="{TOP - 22}" {TEXT}>{title}</text>', *panel.frame("ms", "% of requests at most")]
    for colour, curve in zip(COLOURS, curves, strict=False):
        lines += _line(panel, list(zip(curve.tolist(), percents.tolist(), strict=False)), colour)
    return lines


def _hits(left: int, percents: Mapping[str, float]) -> list[str]:
    """One bar per policy."""
    panel = Panel(left, _lower_top(), len(percents), 100)
    lines = [
        f'<rect x="{left}" y="{panel.top}" width="{PANEL_WIDTH}" height="{PANEL_HEIGHT}" fill="#fafafa" '
        'stroke="#ccc"/>',
        f'<text x="{left}" y="{panel.top - 6}" {SMALL}>% of prompt tokens found in the prefix cache</text>',
    ]
    for index, (percent, colour) in enumerate(zip(percents.values(), COLOURS, strict=False)):
        x, y = panel.x(index + 0.2), panel.y(percent)
        width, height = panel.x(index + 0.8) - x, panel.y(0) - y
        lines.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>'
            f'<text x="{x + width / 2:.1f}" y="{y - 4:.1f}" text-anchor="middle" {SMALL}>{percent:.1f}</text>'
        )
    return lines


def _busy(left: int, outcomes: Mapping[str, Outcome]) -> list[str]:
    """One line per policy over its replicas, the busiest first; a single replica is a horizontal line."""
    panel = Panel(left, _lower_top(), round_up(max(len(outcome.busy_seconds) for outcome in outcomes.values())), 100)
    lines = panel.frame("replicas, busiest first", "% of the time busy")
    for colour, outcome in zip(COLOURS, outcomes.values(), strict=False):
        seconds = duration(outcome) or 1.0
        percents = sorted((100 * busy / seconds for busy in outcome.busy_seconds), reverse=True)
        points = [*enumerate(percents), (len(percents), percents[-1])]
        lines += _line(panel, points if len(percents) > 1 else [(0, percents[0]), (panel.max_x, percents[0])], colour)
    return lines


def _legend(left: int, names: Sequence[str]) -> list[str]:
    return [
        f'<rect x="{left}" y="{_lower_top() + 18 * row}" width="10" height="10" fill="{colour}"/>'
        f'<text x="{left + 16}" y="{_lower_top() + 18 * row + 9}" {TEXT}>{escape(name)}</text>'
        for row, (name, colour) in enumerate(zip(names, COLOURS, strict=False))
    ]


def _line(panel: Panel, points: Sequence[tuple[float, float]], colour: str) -> list[str]:
    path = " ".join(f"{panel.x(x):.1f},{panel.y(y):.1f}" for x, y in points)
    return [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>']
