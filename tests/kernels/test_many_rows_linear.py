"""The linear for thousands of rows: compared to plain torch on a Hopper GPU; elsewhere only compiled for one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nanovllm.kernels.features import gluon_usable
from nanovllm.kernels.linear.one_row import linear_reference

COMPILE = """
import torch, triton
from triton.backends.compiler import GPUTarget
from nanovllm.kernels.linear import many_rows as many_rows_linear

class NoDriver:
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0
    def get_current_target(self): return GPUTarget("cuda", 90, 32)

def compile(kernel, grid, *args, **options):
    compiled = kernel.warmup(*args, grid=grid, **options)
    ptx = compiled.asm["ptx"]
    print(grid, compiled.metadata.shared, "wgmma" in ptx, "cp.async.bulk.tensor" in ptx, len(compiled.asm["cubin"]) > 0)

triton.runtime.driver.set_active(NoDriver())
many_rows_linear.launch, many_rows_linear.num_sms = compile, lambda: 132
for m, k, gated in ((2048, 512, False), (2048, 512, True), (8192, 4096, True)):
    x, weight = torch.empty(m, k, dtype=torch.bfloat16), torch.empty(1024, k, dtype=torch.bfloat16)
    print(many_rows_linear.many_rows_linear(x, weight, gated=gated).shape)
"""
SHARED_MEMORY = 232_448  # bytes that one program may use on Hopper


def test_compiles_for_hopper(tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 6, done.stderr
    assert lines[1::2] == [f"torch.Size([{m}, {n}])" for m, n in ((2048, 1024), (2048, 512), (8192, 512))]
    for line, programs in zip(lines[::2], (64, 64, 132), strict=True):
        grid, shared, *found = line.rsplit(" ", 4)
        assert grid == f"({programs},)" and int(shared) <= SHARED_MEMORY and found == ["True"] * 3


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
