"""A small library in place of the package's own, for tests of how it is built and loaded."""

import logging
import subprocess
from pathlib import Path

import pytest

from nanovllm.native.build import cached_name
from nanovllm.native.compiler import find_compilers
from nanovllm.native.cpu import CpuLevel
from tests.native.sanitizers import require

# For every CPU.
LEVEL = CpuLevel("any", machine="any", features=frozenset(), cc_flags=("-DANSWER=42",), zig_cpu="any")


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    """Arguments of find_library."""
    sources = tmp_path / "src"
    sources.mkdir()
    (sources / "answer.h").write_text("enum { OFFSET = 0 };\n")
    (sources / "answer.c").write_text('#include "answer.h"\nint answer(void) { return ANSWER + OFFSET; }\n')
    return {"sources": sources, "prebuilt": tmp_path / "prebuilt", "cache": tmp_path / "cache" / "native"}


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """The log with the line that says that the library is compiled; with cc as the compiler."""
    require("")
    monkeypatch.delenv("CC", raising=False)
    caplog.set_level(logging.INFO, logger="nanovllm")
    return caplog


def cached_library(folders: dict[str, Path]) -> Path:
    """Where the library will be in the cache. Its folder is made, as the package makes it."""
    folders["cache"].mkdir(mode=0o700, parents=True)
    return folders["cache"] / cached_name(next(find_compilers()), LEVEL, folders["sources"])


def compile_library(code: str, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(path)], input=code, text=True, check=True)
    return path
