"""The linear for thousands of rows: compared to plain torch on a Hopper GPU; elsewhere only compiled for one."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nanovllm.kernels.features import gluon_usable
from nanovllm.kernels.linear.many_rows_tile import num_groups
from nanovllm.kernels.linear.one_row import linear_reference
from nanovllm.kernels.select import LinearCase, row_class, select_linear
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


@pytest.mark.parametrize(
    ("rows", "groups", "kernel"),
    [  # gate and up projection of Qwen3-8B: what measured fastest on an H200
        (384, 2, "cublas"),
        (512, 2, "many_rows"),
        (640, 2, "many_rows"),
        (768, 3, "many_rows"),
        (832, 2, "cublas"),
        (1024, 2, "many_rows"),
        (1920, 2, "many_rows"),
        (2304, 3, "many_rows"),
        (2560, 2, "many_rows"),
        (4224, 3, "many_rows"),
        (16384, 3, "many_rows"),
    ],
)
def test_the_fastest_is_chosen(rows: int, groups: int, kernel: str) -> None:
    case = LinearCase(
        format="dense",
        rows=row_class(rows),
        outputs=24576,
        inputs=4096,
        half=True,
        bfloat16=True,
        bias=False,
        gated=True,
        added=False,
        whole=True,
        deterministic=False,
        gluon=True,
    )
    chosen = select_linear(case)
    assert chosen is not None and chosen.name == kernel
    assert num_groups(rows, 24576, 4096, gated=True) == groups
    qkv = select_linear(replace(case, outputs=6144, gated=False))
    assert qkv is not None and qkv.name == ("many_rows" if rows in (640, 1920, 2560, 4224) else "cublas")


@pytest.mark.parametrize("rows", [1, 256, 257, 320, 321, 2000, 2047, 2048, 2049, 4608, 4609, 100000])
def test_a_class_of_rows_lies_between_the_same_bounds(rows: int) -> None:
    found = row_class(rows)
    assert row_class(found) == found
    for bound in (256, 2047, 4608):
        assert (rows <= bound) == (found <= bound)


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
    results = []
    for groups in (2, 3):
        monkeypatch.setattr(kernels, "num_groups", lambda *args, groups=groups, **options: groups)
        results.append(kernels.many_rows_linear(x, weight, gated=True))
    assert torch.equal(*results)
