"""`nanovllm serve` in a separate process, with a real engine."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.helpers import TEXT_MODEL, model_dir, open_llm

ROOT = Path(__file__).parents[2]
CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "How many?"}], "temperature": 0}
ENDLESS = {**HELLO, "ignore_eos": True, "max_tokens": 200, "stream": True}


class Process:
    def __init__(self, *options: str) -> None:
        command = [sys.executable, "-m", "nanovllm", "serve", str(model_dir(TEXT_MODEL)), "--port", "0", *options]
        small = ["--device", "cpu", "--dtype", "float32", "--num-kv-cache-blocks", "64", "--max-model-len", "256"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            [*command, *small], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().split()[-1]

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + 60
        while httpx.get(self.url + "/health", timeout=10).status_code != 200:
            assert self.process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        self.process.send_signal(number)
        _, errors = self.process.communicate(timeout=30)
        return self.process.returncode, errors


@pytest.fixture
def serve() -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def start(*options: str) -> Process:
        started.append(Process(*options))
        return started[-1]

    yield start
    for server in started:
        if server.process.poll() is None:
            server.process.kill()
        server.process.communicate()


def test_it_responds_as_the_engine_does_and_ends_on_ctrl_c(serve: Callable[..., Process]) -> None:
    server = serve("--served-model-name", "tiny")
    loading = httpx.get(server.url + "/health", timeout=10)
    assert loading.status_code == 503 and loading.json()["error"]["code"] == "loading"
    server.wait_until_ready()
    answer = httpx.post(server.url + CHAT, json={**HELLO, "max_tokens": 12, "model": "tiny"}, timeout=30).json()
    with open_llm(TEXT_MODEL) as llm:
        from nanovllm import SamplingParams

        expected = llm.chat(HELLO["messages"], SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)[0]
    assert answer["choices"][0]["message"]["content"] == expected["text"]
    vectors = httpx.post(server.url + "/v1/embeddings", json={"input": ["one", "two"]}, timeout=30).json()
    assert len(vectors["data"]) == 2 and vectors["data"][0]["embedding"] != vectors["data"][1]["embedding"]
    code, errors = server.end(signal.SIGINT)
    assert code == 0 and "Traceback" not in errors, errors


def test_sigterm_finishes_open_requests_first(serve: Callable[..., Process]) -> None:
    server = serve()
    server.wait_until_ready()
    with httpx.stream("POST", server.url + CHAT, json=ENDLESS, timeout=60) as response:
        lines = response.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    assert server.process.wait(30) == 0


def test_a_killed_engine_fails_all_requests(serve: Callable[..., Process]) -> None:
    server = serve()
    server.wait_until_ready()
    answers: list[Any] = []

    def ask() -> None:
        answers.append(httpx.post(server.url + CHAT, json={**ENDLESS, "n": 4}, timeout=60).text)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    with httpx.stream("POST", server.url + CHAT, json=ENDLESS, timeout=60) as response:
        lines = response.iter_lines()
        next(lines)
        for child in psutil.Process(server.process.pid).children():
            child.kill()
        assert "engine_dead" in "".join(lines)
    for thread in threads:
        thread.join(30)
    assert len(answers) == 3 and all("[DONE]" in text or "engine_dead" in text for text in answers)
    assert httpx.get(server.url + "/health", timeout=10).status_code == 503
    assert httpx.post(server.url + CHAT, json=HELLO, timeout=10).status_code == 503
    assert server.end()[0] == 0


def test_a_model_that_does_not_load_ends_the_server(serve: Callable[..., Process], tmp_path: Path) -> None:
    server = serve("--tokenizer", str(tmp_path))
    _, errors = server.process.communicate(timeout=60)
    assert server.process.returncode == 1
    assert errors.startswith("nanovllm: error: ") and "tokenizer.json" in errors and "Traceback" not in errors


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nanovllm", "serve", *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)


def test_a_port_in_use_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = run("--port", str(taken.getsockname()[1]))
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "cannot listen on 127.0.0.1" in done.stderr and "in use" in done.stderr


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--port", "99999"], "port=99999"),
        (["--ssl-keyfile", "key.pem"], "ssl_certfile"),
        (["--port", "0", "--ssl-certfile", "no-such-file.pem"], "ssl_certfile or ssl_keyfile cannot be used"),
        (["--port", "0", "--tool-call-parser", "morse"], "morse"),
        (["--request-timeout", "nan"], "request_timeout"),
        (["a", "--model", "b"], "two models"),
    ],
)
def test_wrong_options(options: list[str], told: str) -> None:
    done = run(*options)
    assert done.returncode == 2 and told in done.stderr and "Traceback" not in done.stderr, done.stderr
