"""What arrives when: rows of a trace, or requests drawn around shared prefixes.

A simulated prompt is a row of pieces, each a name and a length. Its tokens are the piece's name, then filler. Two
prompts so have exactly those first tokens in common that their first equal pieces hold, which is all that a prefix
cache sees of a text; and a prompt of a hundred thousand tokens is made in microseconds.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from nanovllm.bench.traces import TOKENS_OF_A_HASH, TraceRow, arrivals, read_trace
from nanovllm.errors import ConfigError

FILLER = 0
GENERATED = 1 << 62  # the token that every simulated step gives; no prompt holds it

Piece = tuple[int, int]  # name (not FILLER or GENERATED), number of tokens


@dataclass(frozen=True, slots=True)
class Arrival:
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
    """The requests of a trace at its own times, or squeezed or stretched to `rate` requests a second."""
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
            yield _shared(number), min(left, TOKENS_OF_A_HASH)
            left -= TOKENS_OF_A_HASH
    if left > 0:
        yield _own(index), left


def at_rate(found: Sequence[Arrival], rate: float) -> list[Arrival]:
    seconds = found[-1].seconds
    if not seconds:
        raise ConfigError(f"rate={rate:g}: the trace's requests all come at once, so its times cannot be scaled")
    factor = (len(found) - 1) / rate / seconds
    return [replace(arrival, seconds=arrival.seconds * factor) for arrival in found]


@dataclass(frozen=True)
class Synthetic:
    """Requests of several groups; those of one group begin with the same tokens."""

    groups: int = 256
    prefix: tuple[int, int] = (1024, 1024)  # tokens that a group shares; drawn once a group between these
    unique: tuple[int, int] = (64, 256)  # tokens of a prompt's own
    output: tuple[int, int] = (64, 192)
    skew: float = 0.0  # the k-th group is asked for in proportion to 1 / k ** skew; 0: all alike

    @classmethod
    def parse(cls, text: str) -> "Synthetic":
        """'groups=64,prefix=512:2048': what is left out keeps its default."""
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
        """A Poisson process of `rate` requests a second."""
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
