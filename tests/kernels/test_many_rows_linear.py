"""The linear for thousands of rows: compared to plain torch on a Hopper GPU; elsewhere only compiled for one."""

from pathlib import Path

import pytest
import torch

from nanovllm.kernels.features import gluon_usable
from nanovllm.kernels.linear.one_row import linear_reference
from tests.kernels.hopper import Compiled, compile_for_hopper

COMPILE = """
from nanovllm.kernels.linear import many_rows as many_rows_linear

many_rows_linear.launch, many_rows_linear.num_sms = compile, lambda: 132
for m, k, gated in ((2048, 512, False), (2048, 512, True), (8192, 4096, True)):
    x, weight = torch.empty(m, k, dtype=torch.bfloat16), torch.empty(1024, k, dtype=torch.bfloat16)
    assert many_rows_linear.many_rows_linear(x, weight, gated=gated).shape == (m, 512 if gated else 1024)
"""


def test_compiles_for_hopper(tmp_path: Path) -> None:
    found = compile_for_hopper(COMPILE, tmp_path)
    instructions = ("wgmma", "cp.async.bulk.tensor")
    assert found == [Compiled("_many_rows_kernel", programs, instructions) for programs in (64, 64, 132)]


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 64, 65, 129, 330, 2048, 4100])
@pytest.mark.parametrize(("n", "k"), [(256, 192), (768, 256), (2048, 320), (6144, 1024), (4096, 2048), (24576, 4096)])
def test_many_rows(m: int, n: int, k: int) -> None:
    if not gluon_usable():
        pytest.skip("needs a GPU of the kind the kernel is written for")
    from nanovllm.kernels.linear.many_rows import many_rows_linear

    torch.manual_seed(m + n + k)
    wide = torch.randn(m, 2 * k, device="cuda").bfloat16()
    weight = (torch.randn(n, k, device="cuda") * k**-0.5).bfloat16()
    for x in (wide[:, :k], wide[:, k:].contiguous()):  # a row may be part of a wider one
        for gated in (False, True):
            expected = linear_reference(x, weight, gated=gated)
            actual = many_rows_linear(x, weight, gated=gated)
            error = (actual.float() - expected.float()).norm() / expected.float().norm()
            assert actual.shape == expected.shape and error < 1e-2, error
            assert torch.equal(actual, many_rows_linear(x, weight, gated=gated)), "not the same when run again"


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 64, 65, 129, 191, 193, 330, 2048, 4100])
@pytest.mark.parametrize(("n", "k"), [(256, 192), (768, 256), (2048, 320), (24576, 4096)])
def test_three_groups_give_what_two_do(m: int, n: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if not gluon_usable():
        pytest.skip("needs a GPU of the kind the kernel is written for")
    from nanovllm.kernels.linear import many_rows as kernels

    torch.manual_seed(m + n + k)
    x = torch.randn(m, k, device="cuda").bfloat16()
    weight = (torch.randn(n, k, device="cuda") * k**-0.5).bfloat16()
    two = kernels.many_rows_linear(x, weight, gated=True)
    monkeypatch.setattr(kernels, "THREE_GROUPS", (1, 1))
    assert torch.equal(kernels.many_rows_linear(x, weight, gated=True), two)
