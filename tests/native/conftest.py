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


@pytest.fixture
def fake_zig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install a package ziglang that hands its arguments to cc, without Zig's own; they are in the returned file."""
    package, arguments = tmp_path / "site" / "ziglang", tmp_path / "zig-arguments"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(
        "import os, pathlib, sys\n"
        f"pathlib.Path({str(arguments)!r}).write_text(' '.join(sys.argv[1:]))\n"
        "assert os.environ['ZIG_GLOBAL_CACHE_DIR']\n"
        "first = sys.argv.index('-std=c11')\n"
        "rest = [a for a in sys.argv[first:] if a not in ('-mcpu=any', '-rtlib=none')]\n"
        "os.execvp('cc', ['cc', '-DANSWER=7', *rest])\n"
    )
    info = package.with_name("ziglang-0.1.dist-info")
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ziglang\nVersion: 0.1\n")
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    return arguments


def cached_library(folders: dict[str, Path]) -> Path:
    """Where the library will be in the cache. Its folder is made, as the package makes it."""
    folders["cache"].mkdir(mode=0o700, parents=True)
    return folders["cache"] / cached_name(next(find_compilers()), LEVEL, folders["sources"])


def compile_library(code: str, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(path)], input=code, text=True, check=True)
    return path
