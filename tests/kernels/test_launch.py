"""A compiled kernel is reused for launches with the same argument kinds, and for no others."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from nanovllm.kernels import launch as launches
from nanovllm.kernels.launch import launch


class Compiled:
    def __init__(self) -> None:
        self.runs: list[tuple] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args: self.runs.append((grid, *args))


class FakeKernel:
    """Like Triton's: the first launch with some argument kinds compiles, and returns the compiled kernel."""

    device_caches: dict = {}
    arg_names = ["x", "bias", "eps", "n", "BLOCK", "PDL"]

    def __init__(self) -> None:
        self.compiled: list[Compiled] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Compiled]:
        def compile(*args: Any, **options: Any) -> Compiled:
            assert launches.loading_lock.locked(), "other threads might load at the same time"
            self.compiled.append(Compiled())
            return self.compiled[-1]

        return compile


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> FakeKernel:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(launches, "_compiled", {})
    return FakeKernel()


def test_the_second_launch_reuses_the_compiled_kernel(kernel: FakeKernel) -> None:
    x, other = torch.zeros(8), torch.ones(64)
    launch(kernel, (3, 2), x, None, 1e-6, 32, BLOCK=64, PDL=True, num_warps=4, pdl=True)
    launch(kernel, (5,), other, None, 1e-5, 48, PDL=True, BLOCK=64, num_warps=4, pdl=True)
    assert len(kernel.compiled) == 2  # the order of options is part of the key: sorting would cost time
    launch(kernel, (5,), other, None, 1e-5, 48, BLOCK=64, PDL=True, num_warps=4, pdl=True)
    assert len(kernel.compiled) == 2
    assert kernel.compiled[0].runs == [((5, 1, 1), other.data_ptr(), None, 1e-5, 48, 64, True)]


def test_other_argument_kinds_are_compiled_separately(kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(64)
    launch(kernel, (1,), x, x, 0.5, 32, BLOCK=64, PDL=False)
    different = [
        lambda: launch(kernel, (1,), x[1:], x, 0.5, 32, BLOCK=64, PDL=False),  # not aligned
        lambda: launch(kernel, (1,), x.half(), x, 0.5, 32, BLOCK=64, PDL=False),
        lambda: launch(kernel, (1,), x, None, 0.5, 32, BLOCK=64, PDL=False),
        lambda: launch(kernel, (1,), x, x, 0.5, 33, BLOCK=64, PDL=False),
        lambda: launch(kernel, (1,), x, x, 0.5, 1, BLOCK=64, PDL=False),
        lambda: launch(kernel, (1,), x, x, 0.5, 2**40, BLOCK=64, PDL=False),
        lambda: launch(kernel, (1,), x, x, 0.5, 32, BLOCK=32, PDL=False),
        lambda: launch(kernel, (1,), x, x, 0.5, 32, BLOCK=64, PDL=False, pdl=True),
    ]
    for number, run in enumerate(different, start=2):
        run()
        assert len(kernel.compiled) == number
        run()
        assert len(kernel.compiled) == number and len(kernel.compiled[-1].runs) == 1
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    launch(kernel, (1,), x, x, 0.5, 32, BLOCK=64, PDL=False)
    assert len(kernel.compiled) == len(different) + 2
