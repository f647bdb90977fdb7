"""llama.cpp as a peer in comparisons: npm's node-llama-cpp in a process of its own, or PyPI's xllamacpp in this one.

Both generate greedily, ignore end-of-sequence tokens, reuse no prefix, and have one slot for each request of the
largest workload. node-llama-cpp has a library for each kind of CPU; xllamacpp has one for all CPUs, which on Arm is
slower.
"""

import importlib.metadata
import importlib.util
import json
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from nanovllm.errors import NanoError

if TYPE_CHECKING:
    from nanovllm.bench.workload import Workload

NODE, PYTHON = "node-llama-cpp", "xllamacpp"
NODE_PROGRAM = Path(__file__).with_suffix(".mjs")
# Node finds packages from the current folder up if a script comes on the command line.
FIND = f'import * as found from "{NODE}"; console.log(await found.getModuleVersion(), import.meta.resolve("{NODE}"));'


class Peer(Protocol):
    name: str
    version: str

    def lengths(self, workload: "Workload") -> list[int]:
        """Generate; the number of tokens of each output."""
        ...

    def close(self) -> None: ...


def open_peer(name: str | None, path: Path, threads: int, workloads: "Sequence[Workload]") -> Peer:
    """`name` None = node-llama-cpp if it is installed, else xllamacpp."""
    if name in (None, NODE) and (found := _find_in_node()) is not None:
        return NodeLlamaCpp(*found, path, threads, workloads)
    if name in (None, PYTHON) and importlib.util.find_spec(PYTHON) is not None:
        return XLlamaCpp(path, threads, workloads)
    commands = {NODE: f"npm install {NODE} (in this folder or one above it)", PYTHON: f"pip install {PYTHON}"}
    how = " or ".join(commands.values()) if name is None else commands[name]
    raise NanoError(f"this comparison needs llama.cpp: {how}")


def run_peer(peer: Peer, workload: "Workload") -> None:
    lengths = peer.lengths(workload)
    if lengths != workload.output_lens:
        raise NanoError(f"llama.cpp made outputs of {lengths} tokens instead of {workload.output_lens}")


def _sizes(workloads: "Sequence[Workload]") -> tuple[int, int]:
    """The largest number of requests, and of tokens of a request."""
    lengths = [
        len(prompt) + output_len
        for workload in workloads
        for prompt, output_len in zip(workload.prompts, workload.output_lens, strict=True)
    ]
    return max(len(workload.prompts) for workload in workloads), max(lengths) + 8


def _find_in_node() -> tuple[str, str] | None:
    """Version and address of the package."""
    if shutil.which("node") is None:
        return None
    done = subprocess.run(["node", "--input-type=module", "--eval", FIND], capture_output=True, text=True)
    version, _, address = done.stdout.strip().partition(" ")
    return (version, address) if done.returncode == 0 else None


class NodeLlamaCpp:
    name = NODE

    def __init__(self, version: str, address: str, path: Path, threads: int, workloads: "Sequence[Workload]") -> None:
        self.version = version
        arguments = (NODE_PROGRAM, address, path, threads, *_sizes(workloads))
        command = ["node", *map(str, arguments)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._read("ready")

    def lengths(self, workload: "Workload") -> list[int]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": workload.prompts, "lengths": workload.output_lens}) + "\n")
        self._process.stdin.flush()
        return [int(length) for length in json.loads(self._read("["))]

    def _read(self, expected: str) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.startswith(expected):
            raise NanoError(f"{NODE} ended with exit code {self._process.wait()} after: {line!r}")
        return line

    def close(self) -> None:
        self._process.communicate()  # ends its input


class XLlamaCpp:
    """The server inside the package, called without HTTP."""

    name = PYTHON

    def __init__(self, path: Path, threads: int, workloads: "Sequence[Workload]") -> None:
        import xllamacpp

        self.version = importlib.metadata.version(PYTHON)
        slots, length = _sizes(workloads)
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_parallel, params.n_ctx = slots, slots * length
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        params.verbosity = -1  # no log
        self._server = xllamacpp.Server(params)
        self._clients = ThreadPoolExecutor(slots)

    def lengths(self, workload: "Workload") -> list[int]:
        return list(self._clients.map(self._complete, workload.prompts, workload.output_lens))

    def _complete(self, prompt: list[int], output_len: int) -> int:
        request = {"prompt": prompt, "max_tokens": output_len, "temperature": 0.0}
        answer: Any = self._server.handle_completions({**request, "ignore_eos": True, "cache_prompt": False})
        if "usage" not in answer:
            raise NanoError(f"llama.cpp refused a request: {answer}")
        return int(answer["usage"]["completion_tokens"])

    def close(self) -> None:
        self._clients.shutdown()
