"""The native library is compiled once and found again. Where that fails there is none, and one log line says why."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from nanovllm.native import build
from nanovllm.native.build import find_library, prebuilt_name
from nanovllm.native.compiler import find_zig
from nanovllm.native.prebuild import prebuild
from tests.native.conftest import LEVEL, cached_library, compile_library

COMPILING = "compiling the native library for this CPU with {} (once, takes seconds)"
NO_LIBRARY = "no native library, the CPU runs torch's operations, which are slower: "


def answer(folders: dict[str, Path]) -> int | None:
    library = find_library(LEVEL, **folders)
    return library.answer() if library else None


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_compiled_once_then_found(folders: dict[str, Path], log: pytest.LogCaptureFixture) -> None:
    assert answer(folders) == 42
    assert log.messages == [COMPILING.format("cc")]
    kept = files(folders["cache"])
    assert len(kept) == 1
    assert answer(folders) == 42
    assert len(log.messages) == 1 and files(folders["cache"]) == kept


def test_compiled_again_after_a_change(
    folders: dict[str, Path], log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(folders)
    (folders["sources"] / "answer.h").write_text("enum { OFFSET = 1 };\n")
    assert answer(folders) == 43
    monkeypatch.setenv("CC", "cc -UANSWER -DANSWER=0")  # options before ours, which win: another command, same result
    assert answer(folders) == 43
    assert len(files(folders["cache"])) == 3


def test_several_sources(folders: dict[str, Path], log: pytest.LogCaptureFixture) -> None:
    """Each is compiled by its own process; an error in any of them is the reason that is given."""
    (folders["sources"] / "more.c").write_text("int more(void) { return 1; }\n")
    (folders["sources"] / "answer.c").write_text("int more(void);\nint answer(void) { return ANSWER + more(); }\n")
    assert answer(folders) == 43
    (folders["sources"] / "last.c").write_text("int last(void) { return unknown; }\n")
    assert answer(folders) is None
    assert "last.c:1:" in log.messages[-1]
    assert len(files(folders["cache"])) == 1


def test_several_processes_compile_at_once(folders: dict[str, Path], log: pytest.LogCaptureFixture) -> None:
    script = f"""
import sys
import tomllib
from pathlib import Path
from nanovllm.native.build import find_library
from tests.native.conftest import LEVEL
sources, prebuilt, cache = map(Path, {[str(path) for path in folders.values()]})
sys.stdin.readline()
print(find_library(LEVEL, sources=sources, prebuilt=prebuilt, cache=cache).answer())
"""
    command = [sys.executable, "-c", script]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "cwd": Path(__file__).parents[2], "text": True}
    processes = [subprocess.Popen(command, **pipes) for _ in range(4)]
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    assert [process.communicate(timeout=120)[0] for process in processes] == ["42\n"] * 4
    assert len(files(folders["cache"])) == 1


def test_a_damaged_file_is_replaced(folders: dict[str, Path], log: pytest.LogCaptureFixture) -> None:
    path = cached_library(folders)
    path.write_bytes(b"no library")
    path.chmod(0o600)
    assert answer(folders) == 42
    assert log.messages[0].startswith("a native library in the cache is not used but replaced: ")


def test_no_compiler(
    folders: dict[str, Path], log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.metadata.distributions", lambda name: [])
    assert answer(folders) is None
    assert log.messages == [f"{NO_LIBRARY}no C compiler was found; install gcc or clang, or run `pip install ziglang`"]


def test_source_that_does_not_compile(folders: dict[str, Path], log: pytest.LogCaptureFixture) -> None:
    (folders["sources"] / "answer.c").write_text("\nint answer(void) { return unknown; }\n")
    assert answer(folders) is None
    compiling, failed = log.messages
    assert compiling == COMPILING.format("cc")
    assert failed.startswith(f"{NO_LIBRARY}cc: ") and "answer.c:2:" in failed and "error: " in failed
    assert "\n" not in failed and not files(folders["cache"])


@pytest.mark.parametrize("command", ["false", "/", "no-such-compiler --option"])
def test_compiler_that_does_not_work(
    command: str, folders: dict[str, Path], log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", command)
    monkeypatch.setattr("importlib.metadata.distributions", lambda name: [])
    assert answer(folders) is None
    assert len(log.messages) == 1 and log.messages[0].startswith(NO_LIBRARY)


def test_zig_where_cc_does_not_work(
    folders: dict[str, Path], log: pytest.LogCaptureFixture, fake_zig: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "false")
    assert answer(folders) == 7
    assert log.messages == [COMPILING.format("ziglang")]
    assert fake_zig.read_text().startswith("cc -std=c11 ")


def test_prebuild_makes_what_is_looked_for(
    folders: dict[str, Path], log: pytest.LogCaptureFixture, fake_zig: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prebuild(find_zig(), [LEVEL], sources=folders["sources"], folder=folders["prebuilt"])
    assert fake_zig.read_text().startswith("cc -target any-linux-gnu.2.28 ")
    monkeypatch.setenv("CC", "false")
    assert answer(folders) == 7
    assert not log.messages


def test_package_has_the_sources() -> None:
    root = Path(build.__file__).parents[2]
    patterns = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["nanovllm"]
    packed = {path for pattern in patterns for path in (root / "nanovllm").glob(pattern)}
    assert build.source_files(build.SOURCES) and set(build.SOURCES.iterdir()) <= packed


def test_unknown_cpu(log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "this_cpu", lambda: None)
    assert build.library.__wrapped__() is None
    assert len(log.messages) == 1 and "AVX2" in log.messages[0]


def test_prebuilt_library_needs_no_compiler(
    folders: dict[str, Path], log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = prebuilt_name(LEVEL, folders["sources"])
    compile_library("int answer(void) { return 1; }", folders["prebuilt"] / name)
    monkeypatch.setenv("CC", "false")
    assert answer(folders) == 1
    assert not log.messages and not folders["cache"].exists()


def test_prebuilt_library_of_other_sources_is_not_used(folders: dict[str, Path], log: pytest.LogCaptureFixture) -> None:
    name = prebuilt_name(LEVEL, folders["sources"])
    compile_library("int answer(void) { return 1; }", folders["prebuilt"] / name)
    (folders["sources"] / "more.c").write_text("int more;\n")
    assert answer(folders) == 42


def test_cache_that_cannot_be_written(folders: dict[str, Path], log: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file in place of the folder")
    assert answer(folders) == 42
    assert len(log.messages) == 2 and "compiled at every start" in log.messages[0]


def test_umask_gives_nobody_access(folders: dict[str, Path], log: pytest.LogCaptureFixture) -> None:
    folders["cache"].parent.mkdir(mode=0o755)
    before = os.umask(0)
    try:
        assert answer(folders) == 42
    finally:
        os.umask(before)
    (path,) = folders["cache"].iterdir()
    assert path.stat().st_mode & 0o777 == path.parent.stat().st_mode & 0o777 == 0o700
