"""The requests of a load test: random, the published workload, lines of a file, or a recorded trace.

A trace contains the times and lengths of real requests, not their text. Two formats are supported. Azure's has three
columns (TIMESTAMP, ContextTokens, GeneratedTokens). Mooncake's has one JSON object per line (timestamp in milliseconds,
input_length, output_length, hash_ids); each number of `hash_ids` stands for one block of 512 prompt tokens, and
requests whose `hash_ids` begin with the same numbers share that part of their prompts. The tokens of a block depend on
its number only, so a server's prefix cache can reuse as much as it could when the trace was recorded.
"""

import csv
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from nanovllm.bench.workload import LARGEST_TOKEN, make_workload
from nanovllm.errors import ConfigError

TOKENS_PER_HASH = 512  # of a Mooncake trace
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MOONCAKE_FIELDS = ("timestamp", "input_length", "output_length")
WORDS = (
    *("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state"),
    *("family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week", "company", "system"),
    *("program", "question", "work", "government", "number", "night", "point", "home", "water", "room", "mother"),
    *("area", "money", "story", "fact", "month", "lot", "right", "study", "book", "eye", "job", "word", "business"),
)
BLOCK_STREAM, PROMPT_STREAM, LENGTH_STREAM, ARRIVAL_STREAM = range(
    4
)  # part of the key of each random generator, so that one seed gives independent streams

Prompt = str | list[int] | list[dict[str, Any]]  # text, token ids, or the messages of a chat


@dataclass(frozen=True)
class Request:
    make_prompt: Callable[[], Prompt]  # called just before sending: all prompts of a trace would not fit into memory
    output_len: int
    due: float | None = None  # seconds after the start; None means as soon as possible


# --- random requests --------------------------------------------------------------------------------------------------


def random_requests(
    *, count: int, input_len: int, output_len: int, range_ratio: float, seed: int, vocab_size: int | None = None
) -> list[Request]:
    """Requests whose lengths are drawn uniformly from (1 - range_ratio) to (1 + range_ratio) times the given ones."""
    random = np.random.default_rng((seed, LENGTH_STREAM))
    draw = partial(_draw_lengths, random, range_ratio=range_ratio, count=count)
    lengths = zip(draw(input_len), draw(output_len), strict=True)
    return [
        Request(partial(_random_tokens, (seed, PROMPT_STREAM, index), num_input, vocab_size), num_output)
        for index, (num_input, num_output) in enumerate(lengths)
    ]


def _draw_lengths(random: np.random.Generator, length: int, *, range_ratio: float, count: int) -> list[int]:
    low, high = math.floor(length * (1 - range_ratio)), math.ceil(length * (1 + range_ratio))
    return random.integers(max(1, low), max(1, high), size=count, endpoint=True).tolist()


def _random_tokens(key: Sequence[int], count: int, vocab_size: int | None) -> list[int]:
    return np.random.default_rng(key).integers(0, vocab_size or LARGEST_TOKEN + 1, size=count).tolist()


def published_requests(*, count: int, seed: int, vocab_size: int | None = None) -> list[Request]:
    workload = make_workload(num_seqs=count, seed=seed, vocab_size=vocab_size)
    pairs = zip(workload.prompts, workload.output_lens, strict=True)
    return [Request(partial(list, prompt), output_len) for prompt, output_len in pairs]


def arrivals(count: int, *, rate: float, burstiness: float, seed: int) -> list[float]:
    """Arrival times in seconds, beginning with 0. The gaps are from a gamma distribution with mean 1 / rate.

    With a burstiness of 1 the gaps are exponential (a Poisson process); less gives bursts, more gives regular gaps.
    """
    random = np.random.default_rng((seed, ARRIVAL_STREAM))
    gaps = random.gamma(burstiness, 1 / (rate * burstiness), size=count - 1)
    return [0.0, *np.cumsum(gaps).tolist()]


def scheduled(requests: Sequence[Request], times: Sequence[float]) -> list[Request]:
    return [replace(request, due=due) for request, due in zip(requests, times, strict=True)]


def text_of(tokens: Iterable[int]) -> str:
    """One word per token; the same tokens give the same words."""
    return " ".join(WORDS[token % len(WORDS)] for token in tokens)


# --- from files -------------------------------------------------------------------------------------------------------


def file_requests(path: Path, *, output_len: int, is_chat: bool = False, count: int | None = None) -> list[Request]:
    """Read one JSON object per line: "prompt" (text or token ids) or "messages", and optionally "output_tokens"."""
    requests = []
    for where, row in _json_lines(path, count):
        prompt: Any = row.get("prompt", row.get("messages"))
        if not _is_prompt(prompt):
            raise ConfigError(f'{where}: needs "prompt" (a text or token ids) or "messages"')
        if isinstance(prompt[0], int if is_chat else dict):
            raise ConfigError(f"{where}: token ids go to /v1/completions only, messages to /v1/chat/completions only")
        wanted = _length(row, "output_tokens", where) if "output_tokens" in row else output_len
        requests.append(Request(partial(_unchanged, prompt), wanted))
    return _not_empty(requests, path)


def _is_prompt(value: Any) -> bool:
    if isinstance(value, str):
        return value != ""
    if not isinstance(value, list) or not value:
        return False
    return all(type(token) is int for token in value) or all(isinstance(message, dict) for message in value)


def _unchanged(prompt: Prompt) -> Prompt:
    return prompt


def trace_requests(
    path: Path, *, speedup: float = 1.0, limit: int | None = None, seed: int = 0, vocab_size: int | None = None
) -> list[Request]:
    """The first `limit` requests of a trace, at their times divided by `speedup`; with inf they have no due time."""
    rows = read_trace(path, limit)
    return [
        Request(
            partial(_trace_prompt, row, (seed, index), vocab_size),
            row.output_len,
            due=None if math.isinf(speedup) else (row.seconds - rows[0].seconds) / speedup,
        )
        for index, row in enumerate(rows)
    ]


@dataclass(frozen=True)
class TraceRow:
    seconds: float
    input_len: int
    output_len: int
    hash_ids: tuple[int, ...] = ()


def read_trace(path: Path, limit: int | None = None) -> list[TraceRow]:
    """The first `limit` rows of a trace in either format, ordered by time. A trace without rows is refused."""
    with path.open(encoding="utf-8") as file:
        is_json = file.read(1) == "{"
    read = _read_mooncake if is_json else _read_azure
    return sorted(_not_empty(list(read(path, limit)), path), key=lambda row: row.seconds)


def _read_azure(path: Path, limit: int | None) -> Iterator[TraceRow]:
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file)
        missing = [name for name in AZURE_COLUMNS if name not in (rows.fieldnames or [])]
        if missing:
            raise ConfigError(
                f"{path}: no column {missing[0]}; a trace is a CSV file with the columns {', '.join(AZURE_COLUMNS)}, "
                f"or has one JSON object per line with {', '.join(MOONCAKE_FIELDS)}"
            )
        for row in islice(rows, limit):
            where = f"{path}, line {rows.line_num}"
            num_input, num_output = (_length(row, name, where) for name in AZURE_COLUMNS[1:])
            yield TraceRow(_moment(row["TIMESTAMP"], where), num_input, num_output)


def _read_mooncake(path: Path, limit: int | None) -> Iterator[TraceRow]:
    for where, row in _json_lines(path, limit):
        milliseconds: Any = row.get("timestamp")
        hash_ids = row.get("hash_ids", [])
        if type(milliseconds) not in (int, float) or not math.isfinite(milliseconds):
            raise ConfigError(f"{where}: timestamp={milliseconds!r} is not a number of milliseconds")
        if not isinstance(hash_ids, list) or not all(type(block) is int and block >= 0 for block in hash_ids):
            raise ConfigError(f"{where}: hash_ids must be a list of integers of at least 0")
        num_input, num_output = (_length(row, name, where) for name in MOONCAKE_FIELDS[1:])
        yield TraceRow(milliseconds / 1000, num_input, num_output, tuple(hash_ids))


def _trace_prompt(row: TraceRow, key: tuple[int, int], vocab_size: int | None) -> list[int]:
    """The tokens of the row's blocks, filled up to its length with tokens that no other request has."""
    seed, index = key
    tokens: list[int] = []
    for block in row.hash_ids:
        tokens += _random_tokens((seed, BLOCK_STREAM, block), TOKENS_PER_HASH, vocab_size)
    num_own = max(0, row.input_len - len(tokens))
    return tokens[: row.input_len] + _random_tokens((seed, PROMPT_STREAM, index), num_own, vocab_size)


def _json_lines(path: Path, limit: int | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """The object of each line, with its file and line number for error messages."""
    with path.open(encoding="utf-8") as file:
        filled = ((number, line) for number, line in enumerate(file, 1) if line.strip())
        for number, line in islice(filled, limit):
            where = f"{path}, line {number}"
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ConfigError(f"{where}: {error}") from None
            if not isinstance(row, dict):
                raise ConfigError(f"{where}: not a JSON object")
            yield where, row


def _length(row: dict[str, Any], name: str, where: str) -> int:
    value = row.get(name)
    number = int(value) if isinstance(value, str) and value.strip().isdecimal() else value
    if type(number) is not int or number < 1:
        raise ConfigError(f"{where}: {name}={value!r} must be an integer of at least 1")
    return number


def _moment(text: str, where: str) -> float:
    try:
        moment = datetime.fromisoformat(text)
    except (ValueError, TypeError):
        raise ConfigError(f"{where}: TIMESTAMP={text!r} is not a date and time") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _not_empty(found: list[Any], path: Path) -> list[Any]:
    if not found:
        raise ConfigError(f"{path}: contains no request")
    return found
