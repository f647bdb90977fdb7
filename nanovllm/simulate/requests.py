"""The requests of a simulation: rows of a trace, or random requests that share prefixes.

A simulated prompt is a list of pieces, each with an id and a length. The tokens of a piece are its id, then filler. So
two prompts have exactly the tokens of their equal first pieces in common, which is all that a prefix cache depends on,
and a prompt of a hundred thousand tokens is made in microseconds.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from nanovllm.bench.traces import TOKENS_PER_HASH, TraceRow, arrivals, read_trace
from nanovllm.errors import ConfigError

FILLER = 0
GENERATED = 1 << 62  # the token that every simulated step samples; no prompt contains it

Piece = tuple[int, int]  # id (not FILLER or GENERATED), number of tokens


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request and the time at which it arrives."""

    seconds: float
    pieces: tuple[Piece, ...]
    output_len: int

    @property
    def input_len(self) -> int:
        return sum(length for _, length in self.pieces)

    def prompt(self) -> list[int]:
        tokens: list[int] = []
        for name, length in self.pieces:
            tokens.append(name)
            tokens += [FILLER] * (length - 1)
        return tokens


def trace_arrivals(path: Path, *, limit: int | None = None, rate: float | None = None) -> list[Arrival]:
    """The requests of a trace at their recorded times, or with times scaled to `rate` requests per second."""
    rows = read_trace(path, limit)
    start = rows[0].seconds
    found = [
        Arrival(row.seconds - start, tuple(_pieces_of(row, index)), row.output_len) for index, row in enumerate(rows)
    ]
    return found if rate is None else at_rate(found, rate)


def _pieces_of(row: TraceRow, index: int) -> Iterator[Piece]:
    left = row.input_len
    for number in row.hash_ids:
        if left > 0:
            yield _shared(number), min(left, TOKENS_PER_HASH)
            left -= TOKENS_PER_HASH
    if left > 0:
        yield _own(index), left


def at_rate(found: Sequence[Arrival], rate: float) -> list[Arrival]:
    seconds = found[-1].seconds
    if not seconds:
        raise ConfigError(f"rate={rate:g}: all requests of the trace have the same time, so the times cannot be scaled")
    factor = (len(found) - 1) / rate / seconds
    return [replace(arrival, seconds=arrival.seconds * factor) for arrival in found]


@dataclass(frozen=True)
class Synthetic:
    """Random requests in groups; the prompts of a group begin with the same tokens."""

    groups: int = 256
    prefix: tuple[int, int] = (1024, 1024)  # tokens that a group shares, from low to high; drawn once per group
    unique: tuple[int, int] = (64, 256)  # further tokens of each prompt
    output: tuple[int, int] = (64, 192)
    skew: float = 0.0  # the k-th group gets requests in proportion to 1 / k ** skew

    @classmethod
    def parse(cls, text: str) -> "Synthetic":
        """Parse 'groups=64,prefix=512:2048'; fields that are not given keep their defaults."""
        given: dict[str, str] = {}
        for part in filter(None, text.split(",")):
            name, equals, value = part.partition("=")
            if not equals or name not in {field.name for field in fields(cls)}:
                known = ", ".join(field.name for field in fields(cls))
                raise ConfigError(f"synthetic: {part!r} is not of the form name=value with one of the names {known}")
            given[name] = value
        read: dict[str, Callable[[str], Any]] = {"groups": lambda value: _span("groups", value)[0], "skew": _skew}
        values: dict[str, Any] = {
            name: read[name](value) if name in read else _span(name, value) for name, value in given.items()
        }
        return cls(**values)

    def arrivals(self, *, count: int, rate: float, seed: int) -> list[Arrival]:
        """`count` requests that arrive as a Poisson process of `rate` requests per second."""
        random = np.random.default_rng(seed)
        popularity = np.arange(1, self.groups + 1) ** -self.skew
        groups = random.choice(self.groups, size=count, p=popularity / popularity.sum()).tolist()
        prefixes = random.integers(*self.prefix, size=self.groups, endpoint=True).tolist()
        uniques = random.integers(*self.unique, size=count, endpoint=True).tolist()
        outputs = random.integers(*self.output, size=count, endpoint=True).tolist()
        times = arrivals(count, rate=rate, burstiness=1.0, seed=seed)
        return [
            Arrival(times[index], ((_shared(group), prefixes[group]), (_own(index), uniques[index])), outputs[index])
            for index, group in enumerate(groups)
        ]


def _shared(number: int) -> int:
    return 1 + number % (GENERATED - 1)


def _own(index: int) -> int:
    return -1 - index


def _span(name: str, text: str) -> tuple[int, int]:
    low, colon, high = text.partition(":")
    ends = (low, high if colon else low)
    if not all(end.isdecimal() and int(end) >= 1 for end in ends) or int(ends[0]) > int(ends[1]):
        raise ConfigError(f"synthetic: {name}={text!r} must be an integer of at least 1, or two as low:high")
    return int(ends[0]), int(ends[1])


def _skew(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ConfigError(f"synthetic: skew={text!r} must be a number of at least 0")
    return value
