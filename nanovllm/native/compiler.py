"""The C compilers of this machine: the system's, and Zig's from PyPI."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from nanovllm.native.cpu import CpuLevel

# -ffast-math is left out: gcc before version 13 then links code that flushes denormal numbers in the whole process.
FLAGS = ("-std=c11", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math")
LIBRARY_FLAGS = ("-fPIC", "-shared", "-pthread")
# Without -rtlib=none Zig compiles its own runtime first, which takes seconds. With `defs` the linker reports a function
# that is missing without it.
ZIG_FLAGS = ("-O3", "-rtlib=none", "-Wl,-z,defs", "-s")
TIME_LIMIT = 120  # seconds


class CompileError(Exception):
    """A compiler failed. The message names it and has the first line of what it reported."""


@dataclass(frozen=True)
class Compiler:
    command: tuple[str, ...]
    is_zig: bool = False

    @property
    def name(self) -> str:
        return "ziglang" if self.is_zig else self.command[0]

    def version(self) -> str:
        # Zig takes long to start: pip knows its version.
        return importlib.metadata.version("ziglang") if self.is_zig else run([*self.command, "--version"])

    def flags(self, level: CpuLevel) -> tuple[str, ...]:
        cpu = (f"-mcpu={level.zig_cpu}", *ZIG_FLAGS) if self.is_zig else level.cc_flags
        return (*FLAGS, *cpu, *LIBRARY_FLAGS)

    def compile(self, sources: Iterable[Path], flags: Iterable[str], output: Path) -> None:
        """Compile and link the sources into `output`, whose folder is left with other files too.

        Zig compiles the sources side by side when it gets all of them; for others, each is compiled by its own process.
        """
        inputs = sources if self.is_zig else self._objects(sources, flags, output.parent)
        cache = str(output.parent / "zig-cache")
        command = [*self.command, *flags, "-o", str(output), *map(str, inputs), "-lm"]
        run(command, {"ZIG_GLOBAL_CACHE_DIR": cache, "ZIG_LOCAL_CACHE_DIR": cache})

    def _objects(self, sources: Iterable[Path], flags: Iterable[str], folder: Path) -> list[Path]:
        """Compile each source, as many at a time as there are cores; the first error ends the rest."""

        def compile_one(source: Path) -> Path:
            target = folder / f"{source.stem}.o"
            run([*self.command, *flags, "-c", "-o", str(target), str(source)])
            return target

        pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
        try:
            return list(pool.map(compile_one, sources))
        finally:
            pool.shutdown(cancel_futures=True)


def find_compilers() -> Iterator[Compiler]:
    """The compilers to try, in order: CC or cc, then Zig."""
    command = os.environ.get("CC", "").split() or ["cc"]
    if shutil.which(command[0]):
        yield Compiler(tuple(command))
    if zig := find_zig():
        yield zig


def find_zig() -> Compiler | None:
    if not list(importlib.metadata.distributions(name="ziglang")):
        return None
    # -P: a folder called ziglang in the current directory is not run.
    return Compiler((sys.executable, "-P", "-m", "ziglang", "cc"), is_zig=True)


def run(command: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """What the command printed; CompileError if it fails."""
    what = "ziglang" if "ziglang" in command else command[0]
    try:
        done = subprocess.run(
            command,
            env={**os.environ, "LC_ALL": "C", **(environment or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIME_LIMIT,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompileError(f"{what}: {error}") from error
    if done.returncode != 0:
        raise CompileError(f"{what}: {first_error(done.stderr) or f'exit status {done.returncode}'}")
    return done.stdout


def first_error(output: str) -> str:
    """The first line with an error, else the first line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line.lower()), lines[0] if lines else "")
