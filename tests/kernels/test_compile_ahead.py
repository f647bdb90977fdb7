"""Kernels compiled ahead of time: each variant once, by child processes, in the background; none is run."""

import os
import queue
import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nanovllm.kernels import compile_ahead as ahead
from nanovllm.kernels.compile_ahead import compile_ahead
from nanovllm.kernels.launch import launch
from nanovllm.kernels.select import SLOW_TO_COMPILE

HERE = os.getpid()


class Compiled:
    """A compiled kernel whose launcher must not be loaded while another is being loaded."""

    src = metadata = None
    being_loaded = threading.Lock()

    @property
    def run(self) -> None:
        assert self.being_loaded.acquire(blocking=False), "two are loaded at a time"
        threading.Event().wait(0.02)  # long enough for other threads to enter, if they are allowed to
        self.being_loaded.release()


class FakeKernel:
    """Writes to disk which process compiled it, as Triton writes what it compiled."""

    def __init__(self, folder: Path, name: str = "fake") -> None:
        self.folder = folder
        self.__name__ = name
        self.children_hang_at: int | None = None
        self.hanging, self.hangs = os.pipe()
        self.known_here: queue.SimpleQueue[int] = queue.SimpleQueue()

    def warmup(self, *args: Any, grid: tuple[int, ...], **options: Any) -> Any:
        if args[-1] < 0:
            raise ValueError("no such kernel")
        if args[-1] == self.children_hang_at and os.getpid() != HERE:
            os.write(self.hangs, os.getpid().to_bytes(4, "big"))
            signal.pause()
        file = self.folder / str(args[-1])
        if not file.exists():
            file.write_text(str(os.getpid()))
        if os.getpid() == HERE:
            self.known_here.put(args[-1])
        return Compiled()

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        raise AssertionError("must not run")

    def compiled_by(self) -> dict[str, int]:
        return {file.name: int(file.read_text()) for file in self.folder.iterdir()}


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeKernel:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(ahead, "prepare_triton", lambda: None)
    parent = SimpleNamespace(cache=tmp_path, setting="", launcher_cls=lambda src, metadata: None)
    monkeypatch.setattr(ahead, "Parent", lambda: parent)
    (tmp_path / "compiled").mkdir()
    return FakeKernel(tmp_path / "compiled")


def test_each_kind_once_and_by_children(kernel: FakeKernel) -> None:
    x = torch.zeros(8)

    def launches() -> None:
        for size in (1, 2, 1, 2):
            launch(kernel, (1,), x, size)

    with compile_ahead(launches) as wait:
        wait()
    assert sorted(kernel.compiled_by()) == ["1", "2"] and HERE not in kernel.compiled_by().values()


def test_what_was_loaded_once_needs_no_children(kernel: FakeKernel) -> None:
    for size, by_children in ((1, True), (1, False), (2, True)):
        with compile_ahead(lambda size=size: launch(kernel, (1,), size)) as wait:
            wait()
        [(name, compiler)] = kernel.compiled_by().items()
        assert name == str(size) and (compiler != HERE) == by_children
        (kernel.folder / name).unlink()


def test_what_one_child_has_compiled_is_loaded_while_another_goes_on(kernel: FakeKernel) -> None:
    kernel.children_hang_at = 2
    with compile_ahead(lambda: [launch(kernel, (1,), size) for size in (1, 2)]):
        assert kernel.known_here.get(timeout=30) == 1
        os.read(kernel.hanging, 4)
    assert kernel.known_here.empty() and list(kernel.compiled_by()) == ["1"]


def test_what_takes_longest_is_begun_first(kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})
    long, longest = FakeKernel(kernel.folder, SLOW_TO_COMPILE[-1]), FakeKernel(kernel.folder, SLOW_TO_COMPILE[0])
    long.children_hang_at = 2
    launched = ((kernel, 1), (long, 2), (longest, 3))
    with compile_ahead(lambda: [launch(one, (1,), number) for one, number in launched]):
        os.read(long.hanging, 4)
        assert list(kernel.compiled_by()) == ["3"]


def test_all_that_is_said_to_take_long_is_there() -> None:
    sources = "".join(file.read_text() for file in Path(ahead.__file__).parent.rglob("*.py"))
    assert all(f"def {name}(" in sources for name in SLOW_TO_COMPILE)


def test_launchers_are_loaded_one_at_a_time(kernel: FakeKernel) -> None:
    x = torch.zeros(64)
    kinds = [(x, 1), (x, 2), (x[1:], 1), (x[1:], 2), (x.half(), 1), (x.half(), 2)]
    with compile_ahead(lambda: [launch(kernel, (1,), *args) for args in kinds]) as wait:
        wait()


def test_a_failure_is_told_and_nothing_is_known_then(kernel: FakeKernel, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such kernel"), compile_ahead(lambda: launch(kernel, (1,), -1)) as wait:
        wait()
    assert [file.name for file in tmp_path.iterdir()] == ["compiled"]


def test_children_that_hang_are_not_needed(
    kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ahead, "PATIENCE", 0.1)
    kernel.children_hang_at = 1
    with compile_ahead(lambda: launch(kernel, (1,), 1)) as wait:
        wait()
    assert kernel.compiled_by() == {"1": HERE}
    assert "have not ended within" in caplog.text


def test_children_end_with_what_was_done_beside_them(kernel: FakeKernel) -> None:
    kernel.children_hang_at = 1
    with pytest.raises(FileNotFoundError), compile_ahead(lambda: launch(kernel, (1,), 1)):
        child = int.from_bytes(os.read(kernel.hanging, 4), "big")
        raise FileNotFoundError("no weights")
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
    assert not kernel.compiled_by()


def test_launches_within_run(kernel: FakeKernel) -> None:
    with compile_ahead(lambda: None), pytest.raises(AssertionError, match="must not run"):
        launch(kernel, (1,), 1)
