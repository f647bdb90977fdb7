"""Time that the HTTP server takes per token, measured with an engine that takes none.

Each streamed token is put into a response chunk, encoded as JSON and written to a socket by one Python process. If that
process is too slow, a fast engine waits for it. So this benchmark runs the app and the web server of `nanovllm serve`
with an engine that has every token at once, and measures it twice:

  at full speed    many streams; each gets its next token as soon as the last one is written. The report includes the
                   server's CPU seconds, which say more than the elapsed time on a busy machine
  at a fixed pace  every few milliseconds each of some streams gets a token, all at the same moment, as at the end of a
                   batch's step. Each token contains the time at which it left the engine, and the client computes how
                   much later it received it. Only tokens sent while all streams are open count

Every token is one event and one write, as with an engine that gives each stream one token per step. Server and client
are separate processes. The client only counts; its CPU time shows whether it was the bottleneck.
"""

import argparse
import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from statistics import median, quantiles
from typing import TYPE_CHECKING

from nanovllm.bench.arguments import count
from nanovllm.bench.http_stream import Server, fetch, parse_server
from nanovllm.bench.report import Report, Row, machine, medians_of
from nanovllm.bench.tiny_model import NO_MODEL
from nanovllm.config import Config
from nanovllm.errors import EngineError
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.engine.deltas import Delta
    from nanovllm.remote.messages import EngineStats, EngineView
    from nanovllm.text.tokenizer import Tokenizer

MODEL = "nothing"
MAX_MODEL_LEN = 1 << 20
WORD = " token"
EXTRA_FRAMES = 2  # the role and [DONE]
PATH = "/v1/chat/completions"
STAMP = re.compile(rb'"content":"(\d+)"')
CPU = re.compile(rb"^process_cpu_seconds_total (\S+)$", re.MULTILINE)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--streams", type=count, default=256, help="Number of streams at full speed. Default: %(default)s."
    )
    parser.add_argument("--tokens", type=count, default=200, help="Tokens of each of them. Default: %(default)s.")
    parser.add_argument(
        "--paced-streams", type=count, default=64, help="Number of streams at a fixed pace. Default: %(default)s."
    )
    parser.add_argument("--paced-tokens", type=count, default=200, help="Tokens of each of them. Default: %(default)s.")
    parser.add_argument(
        "--pace-ms", type=count, default=20, help="Milliseconds between two of their tokens. Default: %(default)s."
    )
    parser.add_argument("--rounds", type=count, default=3, help="Number of measurements. Default: %(default)s.")


def run(args: argparse.Namespace) -> Report:
    cores = _cores()
    with _running_on(cores[:-1]), running_server(args.pace_ms / 1000, cores[-1:]) as server:
        asyncio.run(_at_full_speed(server, args.streams, min(args.tokens, 20)))  # warm-up
        results = [_measure(server, args) for _ in range(args.rounds)]
    rows = [{"round": str(number), **result} for number, result in enumerate(results, 1)]
    if len(rows) > 1:
        rows.append({"round": "median", **medians_of(results)})
    settings = {name: getattr(args, name) for name in ("streams", "tokens", "paced_streams", "paced_tokens", "pace_ms")}
    return Report("server-overhead", machine(), settings, rows)


def _measure(server: Server, args: argparse.Namespace) -> Row:
    speed = asyncio.run(_at_full_speed(server, args.streams, args.tokens))
    return speed | asyncio.run(_at_a_pace(server, args.paced_streams, args.paced_tokens))


def _cores() -> list[int]:
    """The cores that this process may run on; empty if the system does not tell."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


@contextmanager
def _running_on(cores: list[int]) -> Iterator[None]:
    """Run this process on these cores: the kernel tends to place the reader of a socket on the writer's core."""
    before = _cores()
    if cores:
        os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        if cores:
            os.sched_setaffinity(0, before)


# --- the client -------------------------------------------------------------------------------------------------------


async def _at_full_speed(server: Server, num_streams: int, num_tokens: int) -> Row:
    cpu, own_cpu, began = await _cpu_seconds(server), time.process_time(), time.perf_counter()
    await _read_streams(server, num_streams, num_tokens, paced=False)
    seconds, own_seconds = time.perf_counter() - began, time.process_time() - own_cpu
    cpu_seconds = await _cpu_seconds(server) - cpu
    total = num_streams * num_tokens
    return {
        "tokens_per_s": total / seconds,
        "tokens_per_server_cpu_s": total / cpu_seconds,
        "server_cpu": cpu_seconds / seconds,
        "client_cpu": own_seconds / seconds,
    }


async def _at_a_pace(server: Server, num_streams: int, num_tokens: int) -> Row:
    streams = await _read_streams(server, num_streams, num_tokens, paced=True)
    all_begun, one_ended = max(min(stream.delays) for stream in streams), min(max(stream.delays) for stream in streams)
    delays = [
        nanoseconds / 1e6
        for stream in streams
        for stamp, nanoseconds in stream.delays.items()
        if all_begun < stamp < one_ended
    ]
    if len(delays) < 2:
        raise EngineError(f"{num_tokens} tokens are too few: the first stream ends before the last begins")
    return {"added_ms_p50": median(delays), "added_ms_p99": quantiles(delays, n=100)[98], "added_ms_max": max(delays)}


async def _read_streams(server: Server, num_streams: int, num_tokens: int, *, paced: bool) -> list["_Stream"]:
    body = {
        "messages": [{"role": "user", "content": "count"}],
        "stream": True,
        "max_tokens": num_tokens,
        "seed": int(paced),  # tells the engine which of the two measurements runs
    }
    message = server.message("POST", PATH, json.dumps(body).encode())
    loop = asyncio.get_running_loop()
    connect = partial(loop.create_connection, partial(_Stream, message, loop), server.host, server.port)
    streams = [(await connect())[1] for _ in range(num_streams)]
    await asyncio.gather(*(stream.ended for stream in streams))
    for stream in streams:
        if stream.num_frames != num_tokens + EXTRA_FRAMES:
            raise EngineError(f"a stream of {num_tokens} tokens had {stream.num_frames} events: {stream.rest!r}")
    return streams


class _Stream(asyncio.Protocol):
    """Counts events, and records the delay of those that contain the time at which they left the engine."""

    def __init__(self, message: bytes, loop: asyncio.AbstractEventLoop) -> None:
        self.num_frames = 0
        self.delays: dict[int, int] = {}  # delay by the time at which the token left the engine, both in ns
        self.rest = b""
        self.ended: asyncio.Future[None] = loop.create_future()
        self._message = message

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(self._message)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic_ns()
        *frames, self.rest = (self.rest + data).split(b"\n\n")
        self.num_frames += len(frames)
        stamps = [int(found[1]) for frame in frames if (found := STAMP.search(frame))]
        self.delays |= {stamp: now - stamp for stamp in stamps}

    def connection_lost(self, error: Exception | None) -> None:
        self.ended.set_result(None)


async def _cpu_seconds(server: Server) -> float:
    found = CPU.search(await fetch(server, "/metrics"))
    assert found is not None
    return float(found[1])


@contextmanager
def running_server(pace: float, core: list[int]) -> Iterator[Server]:
    """Start the server. Its port accepts connections at once; they are answered when it is ready."""
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        command = [sys.executable, "-m", "nanovllm.bench.server_overhead", str(listener.fileno()), str(pace)]
        command += map(str, core)
        process = subprocess.Popen(command, pass_fds=[listener.fileno()], stdin=subprocess.DEVNULL)
        port = listener.getsockname()[1]
    try:
        yield parse_server(f"http://127.0.0.1:{port}")
    finally:
        process.terminate()
        process.wait()


# --- in the server's process ------------------------------------------------------------------------------------------


class InstantEngine:
    """Has every token at once. A request with seed 1 gets tokens at a fixed pace, and each token is the time."""

    def __init__(self, pace: float) -> None:
        self.tokenizer: Tokenizer | None = _tokenizer()
        self.config = Config(max_model_len=MAX_MODEL_LEN)
        self.max_num_seqs = 4096
        self.model_config = MODEL_CONFIG
        self.max_model_len = MAX_MODEL_LEN
        self.model_name = MODEL
        self._pace = pace
        self._tick = asyncio.Event()
        self._stamp = ""
        self._clock: asyncio.Task[None] | None = None
        self._num_paced = 0

    async def submit(
        self,
        token_ids: list[int],
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> "AsyncGenerator[Delta, None]":
        from nanovllm.engine.deltas import Delta

        assert params.max_tokens is not None
        with self._running_clock(params.seed == 1):
            for number in range(1, params.max_tokens + 1):
                if params.seed == 1:
                    await self._tick.wait()
                    text = self._stamp
                else:
                    await asyncio.sleep(0)
                    text = WORD
                finished = "length" if number == params.max_tokens else None
                yield Delta(request_id, 0, text, [number], finish_reason=finished)

    @contextmanager
    def _running_clock(self, is_paced: bool) -> Iterator[None]:
        """Run the clock while any paced request is open."""
        self._num_paced += is_paced
        if self._num_paced and self._clock is None:
            self._clock = asyncio.ensure_future(self._go())
        try:
            yield
        finally:
            self._num_paced -= is_paced

    async def _go(self) -> None:
        while self._num_paced:
            await asyncio.sleep(self._pace)
            self._stamp = str(time.monotonic_ns())
            self._tick.set()
            self._tick.clear()
        self._clock = None

    async def check_health(self) -> None:
        pass

    async def stats(self) -> "EngineStats":
        from nanovllm.remote.messages import EngineStats

        return EngineStats(0, 0, 1, 1, 0, 0, 0, 0, 0, 0)

    async def view(self) -> "AsyncGenerator[EngineView, None]":
        raise EngineError("this engine has no view")
        yield

    async def embed(self, token_ids: list[int], pooling: str) -> list[float]:
        return [1.0]

    async def close(self) -> None:
        pass


MODEL_CONFIG = replace(NO_MODEL, max_position=MAX_MODEL_LEN, eos_token_ids=(1,))


def _tokenizer() -> "Tokenizer":
    """A vocabulary of one word and a chat template that writes the messages only."""
    import tokenizers

    from nanovllm.text.tokenizer import Tokenizer

    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"count": 0, "?": 1}, unk_token="?"))
    backend.decoder = tokenizers.decoders.Fuse()
    return Tokenizer(backend, chat_template="{% for message in messages %}{{ message['content'] }}{% endfor %}")


async def _serve(listener: socket.socket, pace: float) -> None:
    from nanovllm.server.lifecycle import serve
    from nanovllm.server.settings import ServerSettings

    engine = InstantEngine(pace)

    async def load() -> InstantEngine:
        return engine

    await serve(listener, ServerSettings(max_queued_requests=1 << 16), load)


def main() -> None:
    fd, pace, *core = sys.argv[1:]
    if core:
        os.sched_setaffinity(0, map(int, core))
    with socket.socket(fileno=int(fd)) as listener:
        asyncio.run(_serve(listener, float(pace)))


if __name__ == "__main__":
    main()
