"""C programs with sanitizers, and Python processes whose native library has them.

A whole Python test runs under the address sanitizer in a child process:

    environment = sanitized_environment("address,undefined", cache=tmp_path)
    subprocess.run([sys.executable, "-m", "pytest", "tests/native/test_x.py"], env=environment, check=True)
"""

import functools
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from nanovllm.native.build import SOURCES

# The search for leaks at the end takes many seconds, and Python itself keeps memory until it exits.
OPTIONS = {"ASAN_OPTIONS": "detect_leaks=0"}
STRICT = ("-std=c11", "-g", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread", f"-I{SOURCES}")


def run_program(program: Path, *arguments: int) -> None:
    command = [str(program), *map(str, arguments)]
    done = subprocess.run(command, env={**os.environ, **OPTIONS}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


def build_program(sources: Sequence[Path], output: Path, sanitizers: str = "", flags: Sequence[str] = ()) -> Path:
    """Compile and link a program with the given sanitizers ("thread", "address,undefined"); skips without them."""
    require(sanitizers)
    command = ["cc", *STRICT, *_flags(sanitizers), *flags, *map(str, sources), "-o", str(output), "-lm"]
    subprocess.run(command, check=True, timeout=120)
    return output


def sanitized_environment(sanitizers: str, cache: Path) -> dict[str, str]:
    """The environment of a Python process that compiles and loads the native library with the given sanitizers."""
    require(sanitizers)
    runtime = {"address": "libasan.so", "thread": "libtsan.so", "undefined": "libubsan.so"}[sanitizers.split(",")[0]]
    preload = subprocess.check_output(["cc", f"-print-file-name={runtime}"], text=True).strip()
    return {
        **os.environ,
        "CC": str(_compiler(sanitizers, cache / "cc")),
        "LD_PRELOAD": preload,
        **OPTIONS,
        "NANOVLLM_CACHE": str(cache),
    }


def _compiler(sanitizers: str, path: Path) -> Path:
    """A program that compiles with sanitizers, and with -O1 instead of what is asked for: a fraction of the time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    flags = " ".join(_flags(sanitizers))
    path.write_text(
        f"""#!/bin/sh
for argument; do
    shift
    case $argument in -O*) ;; *) set -- "$@" "$argument" ;; esac
done
exec cc -g1 -O1 {flags} "$@"
"""
    )
    path.chmod(0o755)
    return path


@functools.cache
def works(sanitizers: str) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        program, source = Path(folder, "program"), Path(folder, "program.c")
        source.write_text("int main(void) { return 0; }\n")
        try:
            subprocess.run(["cc", *_flags(sanitizers), str(source), "-o", str(program)], check=True, timeout=60)
            subprocess.run([str(program)], env={**os.environ, **OPTIONS}, check=True, timeout=60)
        except (OSError, subprocess.CalledProcessError):
            return False
    return True


def require(sanitizers: str) -> None:
    if not works(sanitizers):
        pytest.skip(f"needs a cc with the sanitizers {sanitizers}" if sanitizers else "needs cc")


def _flags(sanitizers: str) -> list[str]:
    return [f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"] if sanitizers else []
