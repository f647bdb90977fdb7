"""`nanovllm serve` with two ranks: the errors that clients get when one of them dies."""

import os
import signal

import httpx
import psutil

from tests.executor.processes import all_gone, until
from tests.server.test_serve import CHAT, ENDLESS, HELLO, Process


def test_a_killed_worker_is_told_to_everyone() -> None:
    server = Process("--tensor-parallel-size", "2")
    try:
        server.wait_until_ready()
        (engine,) = psutil.Process(server.process.pid).children()
        workers = [child.pid for child in engine.children()]
        assert len(workers) == 2
        with httpx.stream("POST", server.url + CHAT, json=ENDLESS, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            os.kill(workers[0], signal.SIGKILL)
            assert "engine_dead" in "".join(lines)
        assert until(lambda: httpx.get(server.url + "/health", timeout=10).status_code == 503)
        assert httpx.post(server.url + CHAT, json=HELLO, timeout=10).status_code == 503
        assert all_gone([*workers, engine.pid])
        status, errors = server.end()
        assert status == 0
        assert "rank 0 was killed by signal 9" in errors
    finally:
        if server.process.poll() is None:
            server.process.kill()
        server.process.communicate()
