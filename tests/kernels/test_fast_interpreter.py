"""What fast_interpreter.py changes in Triton's interpreter does what was there before."""

import pytest
import torch
import triton
import triton.language as tl

from tests.kernels.support import DEVICE

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="needs Triton's interpreter: there is a GPU")


@triton.jit
def _tripled(x):
    return x + x * tl.full(x.shape, 2, x.dtype)


@triton.jit
def _triple_kernel(numbers):
    for i in tl.static_range(2):
        at = numbers + 4 * i + tl.arange(0, 4)
        tl.store(at, _tripled(tl.load(at)))


def test_the_language_is_itself_between_kernels() -> None:
    names = ("load", "arange", "range", "static_range", "reduce", "store")
    before = [getattr(tl, name) for name in names]
    numbers = torch.arange(8, dtype=torch.int32)
    for turn in (3, 9):
        _triple_kernel[(1,)](numbers)
        assert torch.equal(numbers, turn * torch.arange(8, dtype=torch.int32))
        assert [getattr(tl, name) for name in names] == before
