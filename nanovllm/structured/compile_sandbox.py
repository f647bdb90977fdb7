"""Compile each grammar in a child process first, with limits on CPU time and memory.

llguidance limits most of the cost of compiling, but not all: `{"multipleOf": 99999999}` compiles forever, in native
code that a thread cannot interrupt. A grammar that exceeds the limits ends the child process only.
"""

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanovllm.errors import RequestError

WORKER = Path(__file__).with_name("compile_sandbox_worker.py")
CPU_SECONDS = 1.0  # per grammar
MEMORY_BYTES = 2 << 30


class SandboxNotStartedError(RequestError):
    """The child process ended before it read a grammar."""


class CompileSandbox:
    """Owns the child process. Starts it for the first grammar, and again after a grammar has ended it.

    Safe to share between threads.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        special_tokens: Mapping[int, str],
        eos_token_id: int,
        limits: Mapping[str, Any],
        cpu_seconds: float = CPU_SECONDS,
    ) -> None:
        self._settings = {
            "vocab_size": vocab_size,
            "special_tokens": dict(special_tokens),
            "eos_token_id": eos_token_id,
            "limits": dict(limits),
            "cpu_seconds": cpu_seconds,
            "memory_bytes": MEMORY_BYTES,
        }
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def translate(self, kind: str, text: str) -> str:
        """Translate a grammar into llguidance's own language. RequestError if it does not compile within the limits, of
        the subclass SandboxNotStartedError if the reason is not the grammar.

        `kind` is json, regex, choice or grammar.
        """
        with self._lock:
            line = self._ask({"kind": kind, "text": text})
        if not line:
            raise RequestError(
                f"{kind}: compiling it takes more than {self._settings['cpu_seconds']:g} s of CPU time or "
                f"{MEMORY_BYTES >> 30} GiB of memory; simplify it"
            )
        reply: dict[str, str] = json.loads(line)
        if "refusal" in reply:
            raise RequestError(f"{kind}: {_short(reply['refusal'])}")
        return reply["grammar"]

    def _ask(self, request: Mapping[str, str]) -> str:
        """The worker's reply; empty if the worker exceeded a limit and ended."""
        if self._process is None or self._process.poll() is not None:
            self._end()
            self._process = self._start()  # raises SandboxNotStartedError
        _send(self._process, request)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._end()
        return line

    def _start(self) -> "subprocess.Popen[str]":
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
            process = subprocess.Popen(
                [sys.executable, str(WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                encoding="utf-8",
                start_new_session=True,  # Ctrl-C must not reach it; it ends when its stdin is closed
            )
            assert process.stdout is not None
            try:
                _send(process, self._settings)
                ready = process.stdout.readline()
            except BrokenPipeError:
                ready = ""
            if not ready:
                process.communicate()
                errors.seek(0)
                reason = (errors.read().strip().splitlines() or [f"exit status {process.returncode}"])[-1]
                raise SandboxNotStartedError(f"the process that compiles grammars did not start: {_short(reason)}")
        return process

    def close(self) -> None:
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._process is None:
            return
        process, self._process = self._process, None
        process.kill()
        process.communicate()


def _send(process: "subprocess.Popen[str]", message: Mapping[str, Any]) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(message) + "\n")
    process.stdin.flush()


def _short(message: str) -> str:
    """llguidance's error in one line, without the quoted grammar and without its hint at an option that is not here."""
    line = " ".join(message.partition(" Enable 'coerce_one_of'")[0].replace("<non-verbose/>", "").split())
    return line if len(line) <= 300 else line[:297] + "..."
