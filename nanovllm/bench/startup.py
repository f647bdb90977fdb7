"""Time from the start of a process to the first token of an answer.

A command that answers one prompt spends most of its time before the first token: the interpreter starts, torch is
imported (the largest part), the tokenizer is built, the weights are loaded and converted for the kernels, and the
first step runs. This benchmark starts a new process for each run, which records the time of each phase on the system's
monotonic clock, so the time before the first line of Python is included. From the second run on the files are in the
page cache; the first row may include reading from disk.

  interpreter    from the fork to the first line of nanovllm
  torch          importing torch; on a CPU a thread has begun to load its largest library before
  tokenizer      vocabulary, merges, chat template
  weights        the model and its KV cache, without the import of torch
  first step     from the loaded engine to the first token
  other          the rest: nanovllm's own imports, reading the config

"weights" includes everything that the engine builds: on a GPU also the warm-up and the CUDA graphs. If the engine
records its own phases, "engine phases" shows their medians. With --model-shape there is no tokenizer, and the prompt
consists of a few token ids.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from nanovllm.bench.arguments import count
from nanovllm.bench.report import Report, Row, environment, medians_of, peak_memory
from nanovllm.errors import EngineError

PROMPT = "What is the capital of Germany?"
TOKEN_IDS = [1, 2, 3]  # the prompt without a tokenizer
CHILD = "from nanovllm.bench.startup import child; child()"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--runs",
        type=count,
        default=5,
        metavar="N",
        help="Number of processes to start and measure. Default: %(default)s.",
    )


def run(args: argparse.Namespace, engine: dict[str, Any]) -> Report:
    runs = [_run_once(engine) for _ in range(args.runs)]
    results: list[Row] = [found["result"] for found in runs]
    rows: list[Row] = [{"run": str(number), **result} for number, result in enumerate(results, 1)]
    rows.append({"run": "median", **medians_of(results)})
    settings = {"prompt": runs[0]["prompt"]}
    if runs[0]["phases"]:
        settings["engine_phases"] = medians_of([found["phases"] for found in runs])
    return Report("startup", runs[0]["environment"], settings, rows)


def _run_once(engine: dict[str, Any]) -> dict[str, Any]:
    """Start a process that answers the prompt, and return what it recorded."""
    import subprocess

    command = [sys.executable, "-c", CHILD, json.dumps(engine), repr(time.monotonic())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise EngineError(f"the measured process ended with exit status {done.returncode}: {lines[-1]}")
    return json.loads(done.stdout)


# --- in the measured process ------------------------------------------------------------------------------------------


def child() -> None:
    """Load the model as `nanovllm generate` does, stop at the first token, print the seconds of each phase."""
    entered = time.monotonic()
    engine, begin = json.loads(sys.argv[1]), float(sys.argv[2])
    phases = Phases()
    sys.meta_path.insert(0, ImportWatch("torch", phases))

    from nanovllm import LLM, SamplingParams
    from nanovllm.engine import llm_engine, load_tokenizer

    phases.watch(load_tokenizer, "load_tokenizer", "tokenizer")
    phases.watch(llm_engine.LLMEngine, "_build_core", "weights")
    with LLM(**engine) as llm:
        opened = time.monotonic()
        next(llm.stream(_prompt(llm), SamplingParams(temperature=0.0)))
        first_token = time.monotonic()
        found = {"environment": environment(llm), "phases": getattr(llm, "startup_seconds", {})}
        found["prompt"] = PROMPT if llm.tokenizer is not None else f"{len(TOKEN_IDS)} token ids"
    seconds = {
        "interpreter": entered - begin,
        "torch": phases["torch"],
        "tokenizer": phases["tokenizer"],
        "weights": phases["weights"] - phases["torch"],  # torch is imported during this phase
        "first_step": first_token - opened,
    }
    total = first_token - begin
    result: Row = {**seconds, "other": total - sum(seconds.values()), "total_seconds": total, **peak_memory()}
    print(json.dumps({**found, "result": result}))


def _prompt(llm: Any) -> Any:
    """The question, rendered with the chat template if there is one; without a tokenizer, token ids."""
    from nanovllm.errors import RequestError

    if llm.tokenizer is None:
        return TOKEN_IDS
    try:
        return llm.render_chat([{"role": "user", "content": PROMPT}])
    except RequestError:
        return PROMPT


class Phases(dict[str, float]):
    """Seconds spent in each timed part; 0 for a part that never ran."""

    def __missing__(self, name: str) -> float:
        return 0.0

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        begin = time.monotonic()
        try:
            yield
        finally:
            self[name] += time.monotonic() - begin

    def watch(self, owner: Any, attribute: str, name: str) -> None:
        """Replace `owner.attribute` by a function that times every call."""
        function: Callable[..., Any] = getattr(owner, attribute)

        def timed_function(*args: Any, **kwargs: Any) -> Any:
            with self.timed(name):
                return function(*args, **kwargs)

        setattr(owner, attribute, timed_function)


class ImportWatch(MetaPathFinder):
    """Times the import of one package when it happens."""

    def __init__(self, name: str, phases: Phases) -> None:
        self._name = name
        self._phases = phases

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            loader, execute = spec.loader, spec.loader.exec_module

            def timed_execute(module: ModuleType) -> None:
                with self._phases.timed(self._name):
                    execute(module)

            loader.exec_module = timed_execute  # type: ignore[method-assign]
        return spec
