"""What a load test sends, and when: drawn at random, the published workload, lines of a file, or a recorded trace.

A trace holds the times and lengths of real requests but never their words. Two kinds are read. Azure's has three
columns (TIMESTAMP, ContextTokens, GeneratedTokens). Mooncake's has a JSON object a line (timestamp in milliseconds,
input_length, output_length, hash_ids); there each number of `hash_ids` stands for one block of 512 tokens of the
prompt, and requests that share numbers from the start on share that much of their prompt. The tokens made here for a
block follow from its number alone, so a server's prefix cache finds as much to reuse as it found when the trace was
recorded.
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

TOKENS_OF_A_HASH = 512  # Mooncake's block
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MOONCAKE_FIELDS = ("timestamp", "input_length", "output_length")
WORDS = (
    *("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state"),
    *("family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week", "company", "system"),
    *("program", "question", "work", "government", "number", "night", "point", "home", "water", "room", "mother"),
    *("area", "money", "story", "fact", "month", "lot", "right", "study", "book", "eye", "job", "word", "business"),
)
BLOCK_STREAM, PROMPT_STREAM, LENGTH_STREAM, ARRIVAL_STREAM = range(4)  # keep draws of one seed apart

Prompt = str | list[int] | list[dict[str, Any]]  # text, token ids, or the messages of a chat


@dataclass(frozen=True)
class Request:
    make_prompt: Callable[[], Prompt]  # called just before sending: the prompts of a trace would not fit into memory
    output_len: int
    due: float | None = None  # seconds after the start; None: as soon as it may be sent


# --- drawn ------------------------------------------------------------------------------------------------------------


def random_requests(
    *, count: int, input_len: int, output_len: int, range_ratio: float, seed: int, vocab_size: int | None = None
) -> list[Request]:
    """Lengths are drawn evenly from (1 - range_ratio) to (1 + range_ratio) times the one asked for."""
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
    """Seconds after the start, the first 0: gaps from a gamma distribution with mean 1 / rate.

    A burstiness of 1 makes the gaps exponential, a Poisson process; less makes bursts, more makes them even.
    """
    random = np.random.default_rng((seed, ARRIVAL_STREAM))
    gaps = random.gamma(burstiness, 1 / (rate * burstiness), size=count - 1)
    return [0.0, *np.cumsum(gaps).tolist()]


def scheduled(requests: Sequence[Request], times: Sequence[float]) -> list[Request]:
    return [replace(request, due=due) for request, due in zip(requests, times, strict=True)]


def text_of(tokens: Iterable[int]) -> str:
    """About as many words as there are tokens; the same tokens make the same words."""
    return " ".join(WORDS[token % len(WORDS)] for token in tokens)


# --- from files -------------------------------------------------------------------------------------------------------


def file_requests(path: Path, *, output_len: int, is_chat: bool = False, count: int | None = None) -> list[Request]:
    """A JSON object a line: "prompt" (text or token ids) or "messages", and "output_tokens" if not `output_len`."""
    requests = []
    for where, row in _json_lines(path, count):
        prompt: Any = row.get("prompt", row.get("messages"))
        if not _is_prompt(prompt):
            raise ConfigError(f'{where}: needs "prompt" (a text or token ids) or "messages"')
        if isinstance(prompt[0], int if is_chat else dict):
            raise ConfigError(f"{where}: token ids go to /v1/completions only, messages to /v1/chat/completions only")
        wanted = _length(row, "output_tokens", where) if "output_tokens" in row else output_len
        requests.append(Request(partial(_as_it_is, prompt), wanted))
    return _not_empty(requests, path)


def _is_prompt(value: Any) -> bool:
    if isinstance(value, str):
        return value != ""
    if not isinstance(value, list) or not value:
        return False
    return all(type(token) is int for token in value) or all(isinstance(message, dict) for message in value)


def _as_it_is(prompt: Prompt) -> Prompt:
    return prompt


def trace_requests(
    path: Path, *, speedup: float = 1.0, limit: int | None = None, seed: int = 0, vocab_size: int | None = None
) -> list[Request]:
    """The first `limit` requests of a trace, at their times divided by `speedup`; inf: with no times at all."""
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
    """The first `limit` rows of a trace of either kind, in the order of their times; at least one."""
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
                f"or has a JSON object a line with {', '.join(MOONCAKE_FIELDS)}"
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
            raise ConfigError(f"{where}: timestamp={milliseconds!r} is no number of milliseconds")
        if not isinstance(hash_ids, list) or not all(type(block) is int and block >= 0 for block in hash_ids):
            raise ConfigError(f"{where}: hash_ids must be a list of integers of at least 0")
        num_input, num_output = (_length(row, name, where) for name in MOONCAKE_FIELDS[1:])
        yield TraceRow(milliseconds / 1000, num_input, num_output, tuple(hash_ids))


def _trace_prompt(row: TraceRow, key: tuple[int, int], vocab_size: int | None) -> list[int]:
    """The blocks its hashes name, and tokens of its own for what they leave over."""
    seed, index = key
    tokens: list[int] = []
    for block in row.hash_ids:
        tokens += _random_tokens((seed, BLOCK_STREAM, block), TOKENS_OF_A_HASH, vocab_size)
    num_own = max(0, row.input_len - len(tokens))
    return tokens[: row.input_len] + _random_tokens((seed, PROMPT_STREAM, index), num_own, vocab_size)


def _json_lines(path: Path, limit: int | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each line with the words that say where it stands."""
    with path.open(encoding="utf-8") as file:
        filled = ((number, line) for number, line in enumerate(file, 1) if line.strip())
        for number, line in islice(filled, limit):
            where = f"{path}, line {number}"
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ConfigError(f"{where}: {error}") from None
            if not isinstance(row, dict):
                raise ConfigError(f"{where}: is no JSON object")
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
        raise ConfigError(f"{where}: TIMESTAMP={text!r} is no date and time") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _not_empty(found: list[Any], path: Path) -> list[Any]:
    if not found:
        raise ConfigError(f"{path}: holds no request")
    return found
