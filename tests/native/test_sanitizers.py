"""The helpers for sanitizers find what they should."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.native.sanitizers import build_program, run_program, sanitized_environment

RACE = """
#include <pthread.h>
static int x;
static void *add(void *unused) { x++; return unused; }
int main(void) {
    pthread_t thread;
    pthread_create(&thread, NULL, add, NULL);
    x++;
    pthread_join(thread, NULL);
    return x - 2; /* a variable that is never read could be left out */
}
"""
OUT_OF_BOUNDS = """
#include <stdlib.h>
int answer(void) {
    volatile int *x = malloc(4 * sizeof(int));
    return x[4];
}
"""


def test_thread_sanitizer_finds_a_race(tmp_path: Path) -> None:
    source = tmp_path / "race.c"
    source.write_text(RACE)
    program = build_program([source], tmp_path / "race", "thread")
    with pytest.raises(AssertionError, match="ThreadSanitizer: data race"):
        run_program(program)


@pytest.mark.parametrize(
    ("sanitizers", "report"), [("address", "heap-buffer-overflow"), ("address,undefined", "runtime error")]
)
def test_a_python_process_with_sanitizers(
    sanitizers: str, report: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    (folders["sources"] / "answer.c").write_text(OUT_OF_BOUNDS)
    script = f"""
from pathlib import Path
from nanovllm.native.build import cache_dir, find_library
from tests.native.conftest import LEVEL
library = find_library(LEVEL, sources=Path({str(folders["sources"])!r}), prebuilt=Path(), cache=cache_dir() / "native")
print("loaded", flush=True)
library.answer()
"""
    environment = sanitized_environment(sanitizers, cache=tmp_path / "cache")
    command, root = [sys.executable, "-c", script], Path(__file__).parents[2]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0 and done.stdout == "loaded\n"
    assert report in done.stderr and "answer.c:5" in done.stderr
