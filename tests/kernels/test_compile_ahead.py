"""Kernels are compiled ahead of time: each kind once, by compile workers, in the background, and none is launched."""

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
    """A compiled kernel that fails if two launchers are loaded at the same time."""

    src = metadata = None
    being_loaded = threading.Lock()

    @property
    def run(self) -> None:
        assert self.being_loaded.acquire(blocking=False), "two are loaded at a time"
        threading.Event().wait(0.02)  # long enough for another thread to enter, if it could
        self.being_loaded.release()


class FakeKernel:
    """Writes the id of the process that compiled it to disk, as Triton writes the compiled kernel."""

    def __init__(self, folder: Path, name: str = "fake") -> None:
        self.folder = folder
        self.__name__ = name
        self.workers_hang_at: int | None = None
        self.hanging, self.hangs = os.pipe()
        self.loaded_here: queue.SimpleQueue[int] = queue.SimpleQueue()

    def warmup(self, *args: Any, grid: tuple[int, ...], **options: Any) -> Any:
        if args[-1] < 0:
            raise ValueError("no such kernel")
        if args[-1] == self.workers_hang_at and os.getpid() != HERE:
            os.write(self.hangs, os.getpid().to_bytes(4, "big"))
            signal.pause()
        file = self.folder / str(args[-1])
        if not file.exists():
            file.write_text(str(os.getpid()))
        if os.getpid() == HERE:
            self.loaded_here.put(args[-1])
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
    driver = SimpleNamespace(cache=tmp_path, setting="", launcher_cls=lambda src, metadata: None)
    monkeypatch.setattr(ahead, "DriverSnapshot", lambda: driver)
    (tmp_path / "compiled").mkdir()
    return FakeKernel(tmp_path / "compiled")


def test_each_kind_is_compiled_once_by_workers(kernel: FakeKernel) -> None:
    x = torch.zeros(8)

    def launches() -> None:
        for size in (1, 2, 1, 2):
            launch(kernel, (1,), x, size)

    with compile_ahead(launches) as wait:
        wait()
    assert sorted(kernel.compiled_by()) == ["1", "2"] and HERE not in kernel.compiled_by().values()


def test_no_workers_are_forked_for_kernels_loaded_before(kernel: FakeKernel) -> None:
    for size, by_workers in ((1, True), (1, False), (2, True)):
        with compile_ahead(lambda size=size: launch(kernel, (1,), size)) as wait:
            wait()
        [(name, compiler)] = kernel.compiled_by().items()
        assert name == str(size) and (compiler != HERE) == by_workers
        (kernel.folder / name).unlink()


def test_kernels_are_loaded_while_other_workers_compile(kernel: FakeKernel) -> None:
    kernel.workers_hang_at = 2
    with compile_ahead(lambda: [launch(kernel, (1,), size) for size in (1, 2)]):
        assert kernel.loaded_here.get(timeout=30) == 1
        os.read(kernel.hanging, 4)
    assert kernel.loaded_here.empty() and list(kernel.compiled_by()) == ["1"]


def test_the_slowest_kernels_are_compiled_first(kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})
    long, longest = (
        FakeKernel(kernel.folder, SLOW_TO_COMPILE[-1]),
        FakeKernel(kernel.folder, SLOW_TO_COMPILE[0]),
    )
    long.workers_hang_at = 2
    launched = ((kernel, 1), (long, 2), (longest, 3))
    with compile_ahead(lambda: [launch(one, (1,), number) for one, number in launched]):
        os.read(long.hanging, 4)
        assert list(kernel.compiled_by()) == ["3"]


def test_the_slowest_kernels_exist() -> None:
    sources = "".join(file.read_text() for file in Path(ahead.__file__).parent.rglob("*.py"))
    assert all(f"def {name}(" in sources for name in SLOW_TO_COMPILE)


def test_launchers_are_loaded_one_at_a_time(kernel: FakeKernel) -> None:
    x = torch.zeros(64)
    kinds = [(x, 1), (x, 2), (x[1:], 1), (x[1:], 2), (x.half(), 1), (x.half(), 2)]
    with compile_ahead(lambda: [launch(kernel, (1,), *args) for args in kinds]) as wait:
        wait()


def test_a_failure_is_raised_and_leaves_no_marker(kernel: FakeKernel, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such kernel"), compile_ahead(lambda: launch(kernel, (1,), -1)) as wait:
        wait()
    assert [file.name for file in tmp_path.iterdir()] == ["compiled"]


def test_workers_that_hang_are_stopped_and_replaced(
    kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ahead, "TIMEOUT_SECONDS", 0.1)
    kernel.workers_hang_at = 1
    with compile_ahead(lambda: launch(kernel, (1,), 1)) as wait:
        wait()
    assert kernel.compiled_by() == {"1": HERE}
    assert "did not end within" in caplog.text


def test_workers_are_stopped_when_the_body_fails(kernel: FakeKernel) -> None:
    kernel.workers_hang_at = 1
    with pytest.raises(FileNotFoundError), compile_ahead(lambda: launch(kernel, (1,), 1)):
        worker = int.from_bytes(os.read(kernel.hanging, 4), "big")
        raise FileNotFoundError("no weights")
    with pytest.raises(ProcessLookupError):
        os.kill(worker, 0)
    assert not kernel.compiled_by()


def test_launches_in_the_body_run(kernel: FakeKernel) -> None:
    with compile_ahead(lambda: None), pytest.raises(AssertionError, match="must not run"):
        launch(kernel, (1,), 1)
