"""Kernels compiled ahead: each kind once, beside other work, and none run."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nanovllm import kernels
from nanovllm.kernels import compile_ahead, launch


class FakeKernel:
    def __init__(self, may_compile: threading.Event) -> None:
        self.may_compile = may_compile
        self.compiled: list[tuple] = []

    def warmup(self, *args: Any, grid: tuple[int, ...], **options: Any) -> Any:
        assert self.may_compile.wait(10)
        if args[-1] < 0:
            raise ValueError("no such kernel")
        self.compiled.append(args)
        return SimpleNamespace(run=None)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        raise AssertionError("must not run")


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> FakeKernel:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(kernels, "prepare_triton", lambda: None)
    return FakeKernel(threading.Event())


def test_each_kind_once_and_beside_other_work(kernel: FakeKernel) -> None:
    x = torch.zeros(8)

    def launches() -> None:
        for size in (1, 2, 1, 2):
            launch(kernel, (1,), x, size)

    with compile_ahead(launches) as wait:
        kernel.may_compile.set()  # comes only because nobody has waited yet
        wait()
    assert sorted(args[-1] for args in kernel.compiled) == [1, 2]


def test_a_failure_is_told(kernel: FakeKernel) -> None:
    kernel.may_compile.set()
    with pytest.raises(ValueError, match="no such kernel"), compile_ahead(lambda: launch(kernel, (1,), -1)) as wait:
        wait()


def test_launches_within_run(kernel: FakeKernel) -> None:
    with compile_ahead(lambda: None), pytest.raises(AssertionError, match="must not run"):
        launch(kernel, (1,), 1)
