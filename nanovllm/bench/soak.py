"""Soak test: load a server with difficult requests for minutes and check that none is lost and nothing leaks.

A leak of a few bytes, of a block or of a task does not show in a test of a second, and a request is mostly lost through
a rare combination, such as a client that disconnects in the step in which another request is refused. So many users
send random requests at the same time: plain and structured outputs, streamed or not, several prompts per request,
embeddings. Some disconnect before or after the first token, some send invalid requests, and every few seconds a burst
exceeds the queue. --seed repeats the same requests; their timing varies from run to run.

Every request must end, either in a complete answer of the requested form or in a proper refusal (429 for any request,
another 4xx only for an invalid one). After the last request no sequence may run or wait, every KV cache block must be
free, and the processes must hold about as much memory and as many open files as after the warm-up, which sends the same
kind of load.

Without --base-url the program starts a server with a short queue, for --model or for a tiny model with random weights.
At the end it stops the server, which must exit with status 0 and without a traceback in its log. For a server given by
--base-url, its processes and its log are not checked. The exit status is 1 if any check failed.
"""

import argparse
import asyncio
import contextlib
import json
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanovllm.bench.http_stream import EventReader, RequestFailed, Server, exchange, fetch, parse_server
from nanovllm.bench.report import MIB, Row, table
from nanovllm.bench.tiny_model import write_tiny_model
from nanovllm.errors import EngineError

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
MAX_NUM_SEQS, MAX_QUEUED = 8, 16  # limits of the server that this program starts
NUM_USERS = 16
BURST_SIZE = 3 * (MAX_NUM_SEQS + MAX_QUEUED)
SECONDS_BETWEEN_BURSTS = 7.0
WARM_UP_SECONDS = 60.0  # at most a fifth of the whole time
ANSWER_SECONDS = 120.0  # a request that takes longer counts as lost
QUIET_SECONDS = 15.0  # time to free everything after the last request
LOAD_SECONDS = 120.0
GROWTH, GROWTH_MIB, GROWTH_FILES = 1.1, 32.0, 4  # allowed growth of memory (factor, plus MiB) and of open files
COMPLAINTS = re.compile(r"Traceback|was destroyed|never retrieved|never awaited")


# --- random requests --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SoakRequest:
    """One request and how to check its answer."""

    kind: str
    path: str
    body: bytes
    streams: bool = False
    is_invalid: bool = False
    disconnect_after: float | None = None  # seconds
    fits: Callable[[str], bool] = lambda text: True  # whether a finished text has the requested form


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
CODE = "[A-Z]{2}-[0-9]{3}"
CHOICES = ["yes", "no", "perhaps"]


def _is_person(text: str) -> bool:
    value = json.loads(text)
    return set(value) == {"name", "age"} and len(value["name"]) <= 8 and 0 <= value["age"] <= 99


FORMS: list[tuple[dict[str, Any], Callable[[str], bool]]] = [
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": PERSON}}}, _is_person),
    ({"structured_outputs": {"regex": CODE}}, lambda text: re.fullmatch(CODE, text) is not None),
    ({"structured_outputs": {"choice": CHOICES}}, CHOICES.__contains__),
    ({"structured_outputs": {"grammar": 'start: "a" "b"+ "c"'}}, lambda text: re.fullmatch("ab+c", text) is not None),
]
INVALID: list[tuple[str, bytes]] = [
    (CHAT, b"{"),
    (CHAT, b'{"messages": "\xff"}'),
    (CHAT, b'{"a":' * 10_000),
    (CHAT, b'{"messages": []}'),
    (CHAT, b'{"messages": [{"role": "user", "content": "Hi"}], "temperature": -1}'),
    (CHAT, b'{"messages": [{"role": "user", "content": "Hi"}], "model": "another"}'),
    (COMPLETIONS, b'{"prompt": "Hi", "max_tokens": "many"}'),
    (COMPLETIONS, b'{"prompt": [999999999]}'),
    (COMPLETIONS, json.dumps({"prompt": "x" * 1_000_000}).encode()),
    (COMPLETIONS, b'{"prompt": "Hi", "structured_outputs": {"regex": "("}}'),
    (COMPLETIONS, b'{"prompt": "Hi", "structured_outputs": {"json": {"type": "nothing"}}}'),
    (EMBEDDINGS, b'{"input": []}'),
    ("/v1/nowhere", b"{}"),
]


class RequestGenerator:
    """Makes random requests; the same seed makes the same requests."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def request(self) -> SoakRequest:
        kinds = [self._plain, self._structured, self._many, self._embedding, self._disconnecting, self._invalid]
        return self._random.choices(kinds, weights=[4, 3, 1, 1, 3, 2])[0]()

    def short(self) -> SoakRequest:
        return self._chat("burst", {"max_tokens": 4}, streams=self._random.random() < 0.5)

    def _plain(self) -> SoakRequest:
        return self._chat("plain", {"max_tokens": self._random.randint(1, 80)}, streams=self._random.random() < 0.5)

    def _structured(self) -> SoakRequest:
        fields, fits = self._random.choice(FORMS)
        return self._chat("structured", {**fields, "max_tokens": 120}, streams=self._random.random() < 0.5, fits=fits)

    def _many(self) -> SoakRequest:
        body = {"prompt": [self._text() for _ in range(3)], "n": 2, "max_tokens": 16, "logprobs": 1}
        return SoakRequest("several at once", COMPLETIONS, json.dumps(body).encode())

    def _embedding(self) -> SoakRequest:
        return SoakRequest("embedding", EMBEDDINGS, json.dumps({"input": [self._text(), self._text()]}).encode())

    def _disconnecting(self) -> SoakRequest:
        fields = {"max_tokens": 1000, "ignore_eos": True, "n": self._random.choice([1, 1, 2])}
        request = self._chat("disconnecting", fields, streams=self._random.random() < 0.7)
        return SoakRequest(
            "disconnecting", request.path, request.body, request.streams, disconnect_after=self._random.expovariate(4.0)
        )

    def _invalid(self) -> SoakRequest:
        path, body = self._random.choice(INVALID)
        return SoakRequest("invalid", path, body, is_invalid=True)

    def _chat(
        self, kind: str, fields: dict[str, Any], *, streams: bool, fits: Callable[[str], bool] = lambda text: True
    ) -> SoakRequest:
        messages = [{"role": "user", "content": self._text()}]
        body = {"messages": messages, "seed": self._random.randrange(1 << 30), "stream": streams, **fields}
        return SoakRequest(kind, CHAT, json.dumps(body).encode(), streams, fits=fits)

    def _text(self) -> str:
        """Texts share a few beginnings, so that the prefix cache is used."""
        return "word " * self._random.choice([1, 8, 30]) + str(self._random.randrange(1000))


# --- sending ----------------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """How the requests of each kind ended."""

    ends: Counter[tuple[str, str]] = field(default_factory=Counter)
    seconds: dict[str, list[float]] = field(default_factory=dict)  # latencies of answered requests, by kind
    failures: list[str] = field(default_factory=list)

    def rows(self) -> list[Row]:
        kinds = sorted({kind for kind, _ in self.ends})
        return [self._row(kind, [kind]) for kind in kinds] + [self._row("all", kinds)]

    def _row(self, name: str, kinds: list[str]) -> Row:
        ends = {
            end: sum(self.ends[kind, end] for kind in kinds)
            for end in ("answered", "429", "refused", "disconnected", "lost")
        }
        times = sorted(time for kind in kinds for time in self.seconds.get(kind, []))
        return {
            "requests": name,
            "sent": sum(ends.values()),
            **ends,
            "median_s": times[len(times) // 2] if times else 0.0,
            "longest_s": times[-1] if times else 0.0,
        }


async def send_one(server: Server, request: SoakRequest, tally: Tally) -> None:
    began = time.monotonic()
    try:
        async with asyncio.timeout(request.disconnect_after or ANSWER_SECONDS):
            end = await _outcome_of(server, request)
    except TimeoutError:
        end = "disconnected" if request.disconnect_after is not None else "lost: no answer"
    if end.startswith("lost"):
        tally.failures.append(f"{request.kind}: {end}")
    tally.ends[request.kind, end.partition(":")[0]] += 1
    if end == "answered":
        tally.seconds.setdefault(request.kind, []).append(time.monotonic() - began)


async def _outcome_of(server: Server, request: SoakRequest) -> str:
    """How the request ended: "answered", "429", "refused", or "lost: " with a reason."""
    body = bytearray()
    try:
        await exchange(server, server.message("POST", request.path, request.body), body.extend)
    except RequestFailed as failure:
        if failure.kind == "HTTP 429":
            return "429"
        is_refusal = re.fullmatch(r"HTTP 4\d\d", failure.kind)
        return "refused" if request.is_invalid and is_refusal else f"lost: {failure}"
    if request.is_invalid:
        return "lost: an invalid request was answered"
    wrong = what_is_wrong(request, bytes(body))
    return f"lost: {wrong}" if wrong else "answered"


def what_is_wrong(request: SoakRequest, body: bytes) -> str | None:
    """What is wrong with the body of an answer; None if it is complete and has the requested form."""
    try:
        answers = _streamed(body) if request.streams else _whole(request.path, json.loads(body))
        if not answers:
            return "the answer is empty"
        for text, end in answers:
            if end not in ("stop", "length"):
                return f"finish_reason is {end}"
            if end == "stop" and not request.fits(text):
                return f"not of the requested form: {text!r}"
    except (ValueError, LookupError, TypeError) as error:
        return f"{type(error).__name__}: {error}: {body[-200:]!r}"
    return None


def _whole(path: str, answer: dict[str, Any]) -> list[tuple[str, str | None]]:
    """(text, finish_reason) of each choice, or of each embedding."""
    if path == EMBEDDINGS:
        return [("", "stop" if item["embedding"] else None) for item in answer["data"]]
    if path == COMPLETIONS:
        return [(choice["text"], choice["finish_reason"]) for choice in answer["choices"]]
    return [(choice["message"]["content"] or "", choice["finish_reason"]) for choice in answer["choices"]]


def _streamed(body: bytes) -> list[tuple[str, str | None]]:
    """(text, finish_reason) of each choice of a streamed answer."""
    *events, last = EventReader().feed(body)
    if last != b"[DONE]":
        raise ValueError("the stream has no end")
    texts: dict[int, str] = {}
    ends: dict[int, str | None] = {}
    for chunk in map(json.loads, events):
        for choice in chunk["choices"]:
            index = choice["index"]
            texts[index] = texts.get(index, "") + (choice["delta"].get("content") or "")
            ends[index] = choice["finish_reason"] or ends.get(index)
    return [(text, ends[index]) for index, text in texts.items()]


async def send_load(server: Server, *, seconds: float, seed: int, tally: Tally) -> None:
    """Several users send one request after another, with bursts in between; returns when all requests have ended."""
    end = time.monotonic() + seconds

    async def user(draw: RequestGenerator) -> None:
        while time.monotonic() < end:
            await send_one(server, draw.request(), tally)

    async def send_bursts(draw: RequestGenerator) -> None:
        while time.monotonic() < end:
            await asyncio.gather(*(send_one(server, draw.short(), tally) for _ in range(BURST_SIZE)))
            await asyncio.sleep(min(SECONDS_BETWEEN_BURSTS, max(0.0, end - time.monotonic())))

    async with asyncio.TaskGroup() as group:
        for number in range(NUM_USERS):
            group.create_task(user(RequestGenerator(seed * 1000 + number)))
        group.create_task(send_bursts(RequestGenerator(seed * 1000 + NUM_USERS)))


# --- resources in use -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Usage:
    """What a server uses at one moment."""

    running: float
    waiting: float
    cache_in_use: float  # fraction of the KV cache
    memory_mib: dict[str, float]  # by process
    open_files: dict[str, float]  # by process

    @property
    def is_idle(self) -> bool:
        return self.running == self.waiting == self.cache_in_use == 0


async def current_usage(server: Server, pid: int | None) -> Usage:
    """Read the server's metrics, and the memory and open files of its processes if `pid` is given."""
    text = (await fetch(server, "/metrics")).decode()
    found = dict(re.findall(r"^vllm:(\w+)\{.*\} (\S+)$", text, re.MULTILINE))
    processes = {} if pid is None else _processes(pid)
    return Usage(
        running=float(found["num_requests_running"]),
        waiting=float(found["num_requests_waiting"]),
        cache_in_use=float(found["kv_cache_usage_perc"]),
        memory_mib={name: _memory_mib(process) for name, process in processes.items()},
        open_files={name: float(len(list((process / "fd").iterdir()))) for name, process in processes.items()},
    )


def _processes(pid: int) -> dict[str, Path]:
    """The /proc folders of the server and its children; empty on systems without /proc."""
    found: dict[str, Path] = {}
    server = Path(f"/proc/{pid}")
    if server.exists():
        found["server"] = server
        children = (server / "task" / str(pid) / "children").read_text().split()
        found |= {
            f"engine {number}" if number else "engine": Path(f"/proc/{child}") for number, child in enumerate(children)
        }
    return found


def _memory_mib(process: Path) -> float:
    (line,) = (line for line in (process / "status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024 / MIB


async def usage_when_idle(server: Server, pid: int | None) -> Usage:
    """Wait until no request and no block is in use, or until QUIET_SECONDS have passed, and return the usage."""
    deadline = time.monotonic() + QUIET_SECONDS
    while True:
        usage = await current_usage(server, pid)
        if usage.is_idle or time.monotonic() > deadline:
            return usage
        await asyncio.sleep(0.1)


def compare(before: Usage, after: Usage) -> list[Row]:
    """One row per resource, with a verdict whether it has grown more than allowed."""
    rows: list[Row] = [
        _resource_row("sequences running", before.running, after.running, limit=0),
        _resource_row("sequences waiting", before.waiting, after.waiting, limit=0),
        _resource_row("KV cache in use", before.cache_in_use, after.cache_in_use, limit=0),
    ]
    for name, memory in before.memory_mib.items():
        now = after.memory_mib.get(name, 0.0)
        rows.append(_resource_row(f"memory of the {name}, MiB", memory, now, limit=memory * GROWTH + GROWTH_MIB))
    for name, files in before.open_files.items():
        now = after.open_files.get(name, 0.0)
        rows.append(_resource_row(f"open files of the {name}", files, now, limit=files + GROWTH_FILES))
    return rows


def _resource_row(name: str, before: float, after: float, *, limit: float) -> Row:
    return {
        "resource": name,
        "before": before,
        "after": after,
        "limit": limit,
        "verdict": "ok" if after <= limit else "NO",
    }


# --- the server under test --------------------------------------------------------------------------------------------


@dataclass
class OwnServer:
    url: str
    pid: int
    complaint: str | None = None  # what was wrong with its exit or its log; set when it has ended


@contextlib.contextmanager
def own_server(model: str | None) -> Iterator[OwnServer]:
    """Start a server, stop it at the end, and check its exit status and its log."""
    import subprocess

    with tempfile.TemporaryDirectory(prefix="nanovllm-soak-") as folder, open(Path(folder) / "log", "w+") as log:
        options = ["--max-num-seqs", str(MAX_NUM_SEQS), "--max-queued-requests", str(MAX_QUEUED)]
        if model is None:
            write_tiny_model(Path(folder))
            model, options = folder, [*options, "--load-format", "dummy", "--num-kv-cache-blocks", "128"]
        command = [sys.executable, "-m", "nanovllm", "serve", model, "--port", "0", *options]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process:
            assert process.stdout is not None
            server = OwnServer(process.stdout.readline().rpartition(" ")[2].strip(), process.pid)
            try:
                if not server.url:
                    raise EngineError(f"the server did not start: {_read(log).strip()}")
                yield server
                process.send_signal(signal.SIGTERM)
                status = process.wait(QUIET_SECONDS)
            finally:
                process.kill()
        text = _read(log)
        if status != 0:
            server.complaint = f"the server ended with status {status}"
        elif found := COMPLAINTS.search(text):
            server.complaint = f"the server's log has: {text[max(0, found.start() - 200) :][:2000]}"


def _read(log: Any) -> str:
    log.seek(0)
    return log.read()


async def _wait_until_ready(server: Server) -> None:
    deadline = time.monotonic() + LOAD_SECONDS
    while True:
        try:
            await fetch(server, "/health")
            return
        except RequestFailed as failure:
            if time.monotonic() > deadline:
                raise EngineError(f"the server at {server.authority} is not ready: {failure}") from None
        await asyncio.sleep(0.1)


# --- the program ------------------------------------------------------------------------------------------------------


async def soak(url: str, *, pid: int | None, seconds: float, seed: int) -> tuple[Tally, list[Row]]:
    """Warm up, send the load, and compare the resources in use before and after it."""
    server = parse_server(url)
    await _wait_until_ready(server)
    warm_up = min(WARM_UP_SECONDS, seconds / 5)
    tally = Tally()
    await send_load(server, seconds=warm_up, seed=seed, tally=tally)
    before = await usage_when_idle(server, pid)
    await send_load(server, seconds=seconds - warm_up, seed=seed + 1, tally=tally)
    return tally, compare(before, await usage_when_idle(server, pid))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m nanovllm.bench.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="Length of the test in minutes. Default: %(default)g."
    )
    parser.add_argument("--base-url", metavar="URL", help="URL of a running server to test. Default: start one.")
    parser.add_argument(
        "--model", help="Model of the server that is started. Default: a tiny model with random weights."
    )
    parser.add_argument("--seed", type=int, default=0, help="Random seed of the requests. Default: %(default)s.")
    args = parser.parse_args(arguments)

    seconds, complaint = 60 * args.minutes, None
    if args.base_url is not None:
        tally, rows = asyncio.run(soak(args.base_url, pid=None, seconds=seconds, seed=args.seed))
    else:
        with own_server(args.model) as server:
            tally, rows = asyncio.run(soak(server.url, pid=server.pid, seconds=seconds, seed=args.seed))
        complaint = server.complaint
    print(f"{table(tally.rows())}\n\n{table(rows)}")
    wrong = [*dict.fromkeys(tally.failures), *([complaint] if complaint else [])]
    for line in wrong[:20]:
        print(line, file=sys.stderr)
    return 1 if wrong or any(row["verdict"] != "ok" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
