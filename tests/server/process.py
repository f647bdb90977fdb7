"""`nanovllm serve` in a separate process, with a tiny model of a long context, logging to a file."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import httpx
import psutil

from tests.helpers import TEXT_MODEL, copy_of, edit_config

ROOT = Path(__file__).parents[2]
CONTEXT = 12_288
OPTIONS = {
    "--device": "cpu",
    "--dtype": "float32",
    "--max-model-len": str(CONTEXT),
    "--num-kv-cache-blocks": "1024",
    "--max-num-seqs": "64",
}


class ServerProcess:
    """A server process that is ready. It logs to a file: a full pipe that nobody reads would block it."""

    def __init__(self, folder: Path, log: IO[str], **options: str) -> None:
        given = OPTIONS | {"--" + name.replace("_", "-"): value for name, value in options.items()}
        command = [sys.executable, "-m", "nanovllm", "serve", str(folder), "--port", "0"]
        self._log = log
        self.process = subprocess.Popen(
            [*command, *(word for pair in given.items() for word in pair)],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().split()[-1]
        deadline = time.monotonic() + 60
        while httpx.get(self.url + "/health", timeout=10).status_code != 200:
            assert self.process.poll() is None and time.monotonic() < deadline, self.log()
            time.sleep(0.05)

    @property
    def engine(self) -> psutil.Process:
        (child,) = psutil.Process(self.process.pid).children()
        return child

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read()

    def metric(self, name: str) -> float:
        text = httpx.get(self.url + "/metrics", timeout=30).text
        (value,) = re.findall(rf"^vllm:{name}\{{.*\}} (\S+)$", text, re.MULTILINE)
        return float(value)

    def wait_until_idle(self, seconds: float) -> None:
        """Wait until no request is running or waiting and all blocks are free."""
        deadline = time.monotonic() + seconds
        while any(map(self.metric, ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"))):
            assert time.monotonic() < deadline, httpx.get(self.url + "/metrics").text
            time.sleep(0.05)

    def close(self) -> None:
        """Stop the server with SIGTERM. Its engine ends with it, even while suspended by SIGSTOP."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(30)
            finally:
                self.process.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextmanager
def server_process(folder: Path, **options: str) -> Iterator[ServerProcess]:
    """Run a server with a model of `CONTEXT` tokens, which is written to `folder`."""
    model = copy_of(TEXT_MODEL, folder)
    edit_config(model, lambda config: config.update(max_position_embeddings=CONTEXT))
    with tempfile.TemporaryFile("w+") as log:
        server = ServerProcess(model, log, **options)
        try:
            yield server
        finally:
            server.close()
