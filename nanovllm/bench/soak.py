"""A server under abuse for minutes: no request is lost, and nothing is left over.

A leak of a few bytes, of a block or of a task shows in no test that lasts a second, and what loses a request is seldom
one request: it is a client that leaves in the very step in which another is turned away. So here many users ask at
random, at once, for everything: plain and structured answers, in one piece and streamed, several at a time, embeddings;
some leave before the first token and some behind it, some send nonsense, and every few seconds more come than the queue
holds. The draw is repeated by --seed; how it interleaves is left to chance, which is the point.

Every request must end: in a whole answer of the form that was asked for, or in a refusal that it deserved (429 for any;
another 4xx for nonsense alone). When all have ended, no sequence runs or waits, every block of the KV cache is free,
and the processes hold about as much memory and as many open files as after the warm-up, which is a soak of its own.

Without --base-url a server is started for this, on --model or on a tiny model with random weights, with a short queue;
at the end it is told to stop, and must do so without a word of complaint. Of a server that runs already neither its
processes nor its log are looked at. The exit status is 1 if anything was not as it should be.
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
MAX_NUM_SEQS, MAX_QUEUED = 8, 16  # of a server of our own
NUM_USERS = 16
BURST_SIZE = 3 * (MAX_NUM_SEQS + MAX_QUEUED)
SECONDS_BETWEEN_BURSTS = 7.0
WARM_UP_SECONDS = 60.0  # or a fifth of the whole, where that is less
ANSWER_SECONDS = 120.0  # a request that takes longer is lost
QUIET_SECONDS = 15.0  # for everything to be given back when no request is open
LOAD_SECONDS = 120.0
GROWTH, GROWTH_MIB, GROWTH_FILES = 1.1, 32.0, 4  # how much more is "about as much"
COMPLAINTS = re.compile(r"Traceback|was destroyed|never retrieved|never awaited")


# --- what is asked ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ask:
    """One request, and what to make of its answer."""

    kind: str
    path: str
    body: bytes
    streams: bool = False
    is_bad: bool = False
    leaves_after: float | None = None  # seconds
    fits: Callable[[str], bool] = lambda text: True  # a text that came to its end


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
NONSENSE: list[tuple[str, bytes]] = [
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


class Draw:
    """Requests at random."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def request(self) -> Ask:
        kinds = [self._plain, self._structured, self._many, self._embedding, self._leaving, self._nonsense]
        return self._random.choices(kinds, weights=[4, 3, 1, 1, 3, 2])[0]()

    def short(self) -> Ask:
        return self._chat("burst", {"max_tokens": 4}, streams=self._random.random() < 0.5)

    def _plain(self) -> Ask:
        return self._chat("plain", {"max_tokens": self._random.randint(1, 80)}, streams=self._random.random() < 0.5)

    def _structured(self) -> Ask:
        fields, fits = self._random.choice(FORMS)
        return self._chat("structured", {**fields, "max_tokens": 120}, streams=self._random.random() < 0.5, fits=fits)

    def _many(self) -> Ask:
        body = {"prompt": [self._text() for _ in range(3)], "n": 2, "max_tokens": 16, "logprobs": 1}
        return Ask("several at once", COMPLETIONS, json.dumps(body).encode())

    def _embedding(self) -> Ask:
        return Ask("embedding", EMBEDDINGS, json.dumps({"input": [self._text(), self._text()]}).encode())

    def _leaving(self) -> Ask:
        fields = {"max_tokens": 1000, "ignore_eos": True, "n": self._random.choice([1, 1, 2])}
        asked = self._chat("leaving", fields, streams=self._random.random() < 0.7)
        return Ask("leaving", asked.path, asked.body, asked.streams, leaves_after=self._random.expovariate(4.0))

    def _nonsense(self) -> Ask:
        path, body = self._random.choice(NONSENSE)
        return Ask("nonsense", path, body, is_bad=True)

    def _chat(
        self, kind: str, fields: dict[str, Any], *, streams: bool, fits: Callable[[str], bool] = lambda text: True
    ) -> Ask:
        messages = [{"role": "user", "content": self._text()}]
        body = {"messages": messages, "seed": self._random.randrange(1 << 30), "stream": streams, **fields}
        return Ask(kind, CHAT, json.dumps(body).encode(), streams, fits=fits)

    def _text(self) -> str:
        """Of few beginnings and many ends, so that some of it is found in the cache."""
        return "word " * self._random.choice([1, 8, 30]) + str(self._random.randrange(1000))


# --- asking -----------------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """How the requests ended, by their kind."""

    ends: Counter[tuple[str, str]] = field(default_factory=Counter)
    seconds: dict[str, list[float]] = field(default_factory=dict)  # of those answered
    failures: list[str] = field(default_factory=list)

    def rows(self) -> list[Row]:
        kinds = sorted({kind for kind, _ in self.ends})
        return [self._row(kind, [kind]) for kind in kinds] + [self._row("all", kinds)]

    def _row(self, name: str, kinds: list[str]) -> Row:
        ends = {
            end: sum(self.ends[kind, end] for kind in kinds) for end in ("answered", "429", "refused", "left", "lost")
        }
        times = sorted(time for kind in kinds for time in self.seconds.get(kind, []))
        return {
            "requests": name,
            "sent": sum(ends.values()),
            **ends,
            "median_s": times[len(times) // 2] if times else 0.0,
            "longest_s": times[-1] if times else 0.0,
        }


async def ask_one(server: Server, asked: Ask, tally: Tally) -> None:
    began = time.monotonic()
    try:
        async with asyncio.timeout(asked.leaves_after or ANSWER_SECONDS):
            end = await _end_of(server, asked)
    except TimeoutError:
        end = "left" if asked.leaves_after is not None else "lost: no answer"
    if end.startswith("lost"):
        tally.failures.append(f"{asked.kind}: {end}")
    tally.ends[asked.kind, end.partition(":")[0]] += 1
    if end == "answered":
        tally.seconds.setdefault(asked.kind, []).append(time.monotonic() - began)


async def _end_of(server: Server, asked: Ask) -> str:
    """answered, 429, refused, or lost with a reason."""
    body = bytearray()
    try:
        await exchange(server, server.message("POST", asked.path, asked.body), body.extend)
    except RequestFailed as failure:
        if failure.kind == "HTTP 429":
            return "429"
        is_refusal = re.fullmatch(r"HTTP 4\d\d", failure.kind)
        return "refused" if asked.is_bad and is_refusal else f"lost: {failure}"
    if asked.is_bad:
        return "lost: nonsense was answered"
    wrong = what_is_wrong(asked, bytes(body))
    return f"lost: {wrong}" if wrong else "answered"


def what_is_wrong(asked: Ask, body: bytes) -> str | None:
    """With the body of an answer; None if it is whole and of the form that was asked for."""
    try:
        answers = _streamed(body) if asked.streams else _whole(asked.path, json.loads(body))
        if not answers:
            return "nothing was answered"
        for text, end in answers:
            if end not in ("stop", "length"):
                return f"finish_reason is {end}"
            if end == "stop" and not asked.fits(text):
                return f"not of the form asked for: {text!r}"
    except (ValueError, LookupError, TypeError) as error:
        return f"{type(error).__name__}: {error}: {body[-200:]!r}"
    return None


def _whole(path: str, answer: dict[str, Any]) -> list[tuple[str, str | None]]:
    """(text, finish_reason) of each part of an answer."""
    if path == EMBEDDINGS:
        return [("", "stop" if item["embedding"] else None) for item in answer["data"]]
    if path == COMPLETIONS:
        return [(choice["text"], choice["finish_reason"]) for choice in answer["choices"]]
    return [(choice["message"]["content"] or "", choice["finish_reason"]) for choice in answer["choices"]]


def _streamed(body: bytes) -> list[tuple[str, str | None]]:
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


async def abuse(server: Server, *, seconds: float, seed: int, tally: Tally) -> None:
    """Users who ask one after another, and bursts between; returns when every request has ended."""
    end = time.monotonic() + seconds

    async def user(draw: Draw) -> None:
        while time.monotonic() < end:
            await ask_one(server, draw.request(), tally)

    async def crowd(draw: Draw) -> None:
        while time.monotonic() < end:
            await asyncio.gather(*(ask_one(server, draw.short(), tally) for _ in range(BURST_SIZE)))
            await asyncio.sleep(min(SECONDS_BETWEEN_BURSTS, max(0.0, end - time.monotonic())))

    async with asyncio.TaskGroup() as group:
        for number in range(NUM_USERS):
            group.create_task(user(Draw(seed * 1000 + number)))
        group.create_task(crowd(Draw(seed * 1000 + NUM_USERS)))


# --- what is left over ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Holdings:
    """What a server has taken and not given back."""

    running: float
    waiting: float
    cache_in_use: float  # of the KV cache, 1 is all
    memory_mib: dict[str, float]  # of each process
    open_files: dict[str, float]

    @property
    def is_quiet(self) -> bool:
        return self.running == self.waiting == self.cache_in_use == 0


async def holdings(server: Server, pid: int | None) -> Holdings:
    text = (await fetch(server, "/metrics")).decode()
    found = dict(re.findall(r"^vllm:(\w+)\{.*\} (\S+)$", text, re.MULTILINE))
    processes = {} if pid is None else _processes(pid)
    return Holdings(
        running=float(found["num_requests_running"]),
        waiting=float(found["num_requests_waiting"]),
        cache_in_use=float(found["kv_cache_usage_perc"]),
        memory_mib={name: _memory_mib(process) for name, process in processes.items()},
        open_files={name: float(len(list((process / "fd").iterdir()))) for name, process in processes.items()},
    )


def _processes(pid: int) -> dict[str, Path]:
    """The server and its children as /proc shows them; nothing on systems without it."""
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


async def when_quiet(server: Server, pid: int | None) -> Holdings:
    """What is held once everything has been given back, or when that takes too long."""
    deadline = time.monotonic() + QUIET_SECONDS
    while True:
        held = await holdings(server, pid)
        if held.is_quiet or time.monotonic() > deadline:
            return held
        await asyncio.sleep(0.1)


def compare(before: Holdings, after: Holdings) -> list[Row]:
    rows: list[Row] = [
        _left_over("sequences running", before.running, after.running, most=0),
        _left_over("sequences waiting", before.waiting, after.waiting, most=0),
        _left_over("KV cache in use", before.cache_in_use, after.cache_in_use, most=0),
    ]
    for name, memory in before.memory_mib.items():
        now = after.memory_mib.get(name, 0.0)
        rows.append(_left_over(f"memory of the {name}, MiB", memory, now, most=memory * GROWTH + GROWTH_MIB))
    for name, files in before.open_files.items():
        now = after.open_files.get(name, 0.0)
        rows.append(_left_over(f"open files of the {name}", files, now, most=files + GROWTH_FILES))
    return rows


def _left_over(name: str, before: float, after: float, *, most: float) -> Row:
    return {
        "left_over": name,
        "before": before,
        "after": after,
        "most": most,
        "verdict": "ok" if after <= most else "NO",
    }


# --- a server of our own ----------------------------------------------------------------------------------------------


@dataclass
class OwnServer:
    url: str
    pid: int
    complaint: str | None = None  # known when it has ended


@contextlib.contextmanager
def own_server(model: str | None) -> Iterator[OwnServer]:
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
    server = parse_server(url)
    await _wait_until_ready(server)
    warm_up = min(WARM_UP_SECONDS, seconds / 5)
    tally = Tally()
    await abuse(server, seconds=warm_up, seed=seed, tally=tally)
    before = await when_quiet(server, pid)
    await abuse(server, seconds=seconds - warm_up, seed=seed + 1, tally=tally)
    return tally, compare(before, await when_quiet(server, pid))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m nanovllm.bench.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="default: %(default)g")
    parser.add_argument("--base-url", metavar="URL", help="a server that runs already")
    parser.add_argument("--model", help="for a server of our own; default: a tiny model with random weights")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
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
