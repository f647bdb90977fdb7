"""Where the engine of a client runs: in a child process, or in a thread of this one."""

import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Protocol

from nanovllm.remote.service import serve
from nanovllm.utils.child_process import start_child


class Host(Protocol):
    pid: int | None

    def wait(self, timeout: float) -> str | None:
        """Wait up to `timeout` seconds; returns how the engine ended, or None if it still runs."""
        ...

    def kill(self) -> None: ...


class ProcessHost:
    """A child process, whose output goes to this process's stderr. `environment` is added to the inherited one."""

    def __init__(self, sock: socket.socket, environment: Mapping[str, str]) -> None:
        self._process = start_child([sys.executable, "-m", "nanovllm.remote.service"], sock, environment)
        self.pid: int | None = self._process.pid

    def wait(self, timeout: float) -> str | None:
        try:
            return f"its process ended with exit status {self._process.wait(timeout)}"
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        self._process.kill()


class ThreadHost:
    """A thread of this process."""

    pid: int | None = None

    def __init__(self, sock: socket.socket) -> None:
        self._thread = threading.Thread(target=serve, args=(sock,), name="nanovllm-engine", daemon=True)
        self._thread.start()

    def wait(self, timeout: float) -> str | None:
        self._thread.join(timeout)
        return None if self._thread.is_alive() else "its thread ended"

    def kill(self) -> None:
        """Does nothing: a thread cannot be ended from outside. It ends once the socket is closed."""
