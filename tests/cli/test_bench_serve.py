"""`nanovllm bench serve` as a process: JSON document, plot, refused options, exit codes."""

import asyncio
import json
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from nanovllm.cli.main import main

Cli = Callable[..., subprocess.CompletedProcess[str]]


class TinyServer:
    """A server in a thread: lists one model, streams the requested number of tokens, refuses chosen requests."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.heads: list[str] = []
        self.refused_from: int | None = None  # the number of the first request that gets a 429
        self.num_unready = 0  # number of requests for its models that are answered with 503
        self._listening = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def __enter__(self) -> "TinyServer":
        self._thread.start()
        assert self._listening.wait(30)
        return self

    def __exit__(self, *failure: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    async def _run(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._listening.set()
        async with server:
            await self._stop.wait()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.heads.append(head)
        if head.startswith("GET /v1/models ") and self.num_unready:
            self.num_unready -= 1
            writer.write(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 7\r\n\r\nloading")
        elif head.startswith("GET /v1/models "):
            body = json.dumps({"object": "list", "data": [{"id": "first-model"}, {"id": "second"}]}).encode()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        else:
            length = next(int(line[15:]) for line in head.split("\r\n") if line.startswith("Content-Length:"))
            self.requests.append(json.loads(await reader.readexactly(length)))
            await self._complete(self.requests[-1], writer)
        await writer.drain()
        writer.close()

    async def _complete(self, request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if self.refused_from is not None and len(self.requests) > self.refused_from:
            writer.write(b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 4\r\n\r\nbusy")
            return
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
        for index in range(request["max_tokens"]):
            finish = "length" if index == request["max_tokens"] - 1 else None
            choice = {"index": 0, "text": "x", "delta": {"content": "x"}, "finish_reason": finish}
            writer.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
            await writer.drain()
        writer.write(b"data: [DONE]\n\n")


@pytest.fixture
def server() -> Iterator[TinyServer]:
    with TinyServer() as tiny:
        yield tiny


SMALL = ["--num-prompts", "6", "--random-input-len", "8", "--random-output-len", "4"]


def test_document_and_picture(cli: Cli, server: TinyServer, tmp_path: Path) -> None:
    picture = tmp_path / "load.svg"
    options = ["--request-rate", "100", "--goodput", "ttft:60000", "tpot:60000", "--plot", picture, "--json"]
    done = cli("bench", "serve", "--base-url", server.url, "--api-key", "secret", *SMALL, *options)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["benchmark"], found["environment"]["model"]) == ("serve", "first-model")
    assert found["settings"]["load"] == "100 requests/s, burstiness 1"
    (row,) = found["results"]
    assert (row["completed"], row["failed"], row["failures"]) == (6, 0, {})
    assert (row["total_input_tokens"], row["total_output_tokens"], row["shorter_than_asked"]) == (48, 24, 0)
    assert row["request_goodput"] == row["request_throughput"] == pytest.approx(6 / row["duration"])
    assert all(row[f"{kind}_{name}_ms"] >= 0 for kind in ("mean", "median", "p99") for name in ("ttft", "itl", "e2el"))
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")
    assert all("\r\nAuthorization: Bearer secret\r\n" in head for head in server.heads)
    assert {request["model"] for request in server.requests} == {"first-model"}
    assert all(request["ignore_eos"] is True and len(request["prompt"]) == 8 for request in server.requests)


def test_several_rates(server: TinyServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "rates.svg"
    options = ["--request-rate", "50,100,200", "--goodput", "ttft:60000", "itl:60000", "--plot", str(picture)]
    assert main(["bench", "serve", "--base-url", server.url, *SMALL, *options, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["settings"]["load"] == "50, 100, 200 requests/s, burstiness 1"
    assert found["settings"]["goodput"] == {"ttft": 60000, "itl": 60000}
    assert [(row["request_rate"], row["completed"]) for row in found["results"]] == [(50, 6), (100, 6), (200, 6)]
    assert all(row["request_goodput"] == row["request_throughput"] for row in found["results"])
    prompts = {tuple(request["prompt"]) for request in server.requests}
    assert len(prompts) == 18  # a prefix cache knows none of them
    titles = [text.text for text in ElementTree.parse(picture).getroot().iter("{http://www.w3.org/2000/svg}text")]
    assert "first-model, 6 requests per rate" in titles and "time to first token, ms" in titles


def test_rates_that_fail_do_not_hide_the_others(server: TinyServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.refused_from = 6
    assert main(["bench", "serve", "--base-url", server.url, *SMALL, "--request-rate", "100,200"]) == 0
    first, second, failure = capsys.readouterr().out.splitlines()[-3:]
    assert first.split()[:3] == ["100.00", "6", "0"] and second.split()[:3] == ["200.00", "0", "6"]
    assert failure == "failed: HTTP 429: busy"


def test_failures_are_shown_and_do_not_end_the_run(cli: Cli, server: TinyServer) -> None:
    server.refused_from = 4
    done = cli("bench", "serve", "--base-url", server.url, "--max-concurrency", "1", *SMALL)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "Successful requests:                     4" in lines
    assert "  HTTP 429:                              2" in lines and "failed: HTTP 429: busy" in lines
    assert "Peak concurrent requests:                1" in lines


def test_options_reach_the_server(server: TinyServer, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "serve", "--base-url", server.url, "--model", "mine", "--endpoint", "/v1/chat/completions"]
    options = ["--no-ignore-eos", "--temperature", "0.5", "--extra-body", '{"top_p": 0.9}', *SMALL]
    assert main([*command, *options]) == 0
    assert "Successful requests:                     6" in capsys.readouterr().out
    request = server.requests[0]
    assert (request["model"], request["temperature"], request["top_p"]) == ("mine", 0.5, 0.9)
    assert "ignore_eos" not in request and "prompt" not in request
    assert len(request["messages"][0]["content"].split()) == 8
    assert not [head for head in server.heads if "/v1/models" in head]


def test_a_trace(server: TinyServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.csv"
    rows = [f"2023-11-16 18:17:0{second}.0000000,{7 + second},{2 + second}" for second in range(4)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    options = ["--trace", str(trace), "--trace-speedup", "100", "--trace-limit", "3", "--json"]
    assert main(["bench", "serve", "--base-url", server.url, *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["results"][0]["completed"], found["settings"]["dataset"]) == (3, "trace trace.csv")
    assert found["settings"]["load"] == "arrivals of the trace, 100 times as fast"
    sizes = [(len(request["prompt"]), request["max_tokens"]) for request in server.requests]
    assert sorted(sizes) == [(7, 2), (8, 3), (9, 4)]


def test_a_file_and_the_published_workload(
    server: TinyServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one"}\n{"prompt": "two", "output_tokens": 3}\n')
    options = ["--dataset-name", "custom", "--dataset-path", str(file), "--custom-output-len", "2"]
    assert main(["bench", "serve", "--base-url", server.url, *options]) == 0
    sizes = {(request["prompt"], request["max_tokens"]) for request in server.requests}
    assert sizes == {("one", 2), ("two", 3)}
    options = ["--dataset-name", "published", "--num-prompts", "2", "--max-concurrency", "1"]
    assert main(["bench", "serve", "--base-url", server.url, *options]) == 0
    assert server.requests[-1]["temperature"] == 0.6
    assert 100 <= len(server.requests[-1]["prompt"]) <= 1024
    capsys.readouterr()


def test_nobody_there(capsys: pytest.CaptureFixture[str]) -> None:
    with TinyServer() as gone:
        pass
    for options, message in {
        (): "is not ready: connection refused",
        ("--ready-timeout", "0.3"): "is not ready: connection refused",
        ("--model", "x"): "no request succeeded: connection refused",
    }.items():
        assert main(["bench", "serve", "--base-url", gone.url, *SMALL, *options]) == 1
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert message in err


def test_ready_timeout_waits_for_the_server(server: TinyServer, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "serve", "--base-url", server.url, *SMALL]
    server.num_unready = 2
    assert main(command) == 1
    assert "is not ready: HTTP 503: loading" in capsys.readouterr().err
    server.num_unready = 2
    assert main([*command, "--ready-timeout", "60"]) == 0
    assert "Successful requests:                     6" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--request-rate", "0"], "'0' must be a number above 0"),
        (["--request-rate", "nan"], "'nan' must be a number above 0"),
        (["--max-concurrency", "0"], "'0' must be an integer of at least 1"),
        (["--random-range-ratio", "1"], "'1' must be at least 0 and below 1"),
        (["--temperature", "inf"], "'inf' must be a number of at least 0"),
        (["--seed", "-1"], "'-1' must be an integer of at least 0"),
        (["--request-rate", "4,0"], "'0' must be a number above 0"),
        (["--request-rate", "4,inf"], "'inf' must be a finite number above 0"),
        (["--request-rate", "4,"], "'' is not a number"),
        (["--goodput", "latency:5"], "'latency:5': write ttft:MS, tpot:MS, itl:MS or e2el:MS"),
        (["--goodput", "ttft:soon"], "'soon' is not a number"),
        (["--extra-body", "[1]"], "'[1]' is not a JSON object"),
        (["--endpoint", "/v1/embeddings"], "invalid choice"),
        (["--base-url", "127.0.0.1:8000"], "base_url='127.0.0.1:8000': write http://host:port"),
        (["--burstiness", "2"], "--burstiness needs --request-rate"),
        (["--dataset-name", "custom"], "--dataset-name custom and --dataset-path FILE must be given together"),
        (["--dataset-path", "x.jsonl"], "--dataset-name custom and --dataset-path FILE must be given together"),
        (["--trace-limit", "3"], "need --trace FILE"),
        (["--trace", "x", "--request-rate", "3"], "--request-rate cannot be used with --trace"),
        (["--trace", "x", "--num-prompts", "3"], "--num-prompts cannot be used with --trace"),
        (["--plot", "no/such/folder/x.svg"], "there is no folder no/such/folder"),
        (["--request-rte", "3"], "did you mean --request-rate?"),
        (["--tensor-parallel-size", "2"], "unknown option --tensor-parallel-size"),
    ],
)
def test_refusals(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", *options]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err


def test_a_trace_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--trace", "no-such-trace.csv"]) == 1
    assert "no-such-trace.csv" in capsys.readouterr().err
