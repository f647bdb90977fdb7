"""All between two attentions in one kernel: compared to plain torch on a Hopper GPU; elsewhere only compiled."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.kernels.features import gluon_usable
from nanovllm.kernels.linear.packed import PackedWords, dequantize_reference
from nanovllm.kernels.select import LinearCase, joins_layers
from tests.kernels.hopper import compile_for_hopper
from tests.kernels.packed_weights import random_packed

COMPILE = """
from nanovllm.kernels.linear import packed_layer
from nanovllm.kernels.linear.packed import PackedWords

packed_layer.launch = compile
def weight(n, k, zero):
    zero = torch.empty(n, k // 128, dtype=torch.uint8) if zero else None
    words, scale = torch.empty(n, k // 8, dtype=torch.int32), torch.empty(n, k // 128, dtype=torch.float16)
    return PackedWords("int4", 64, words, scale, zero=zero)

x, counter = torch.empty(8, 4096, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.int64)
for zero in (False, True):
    o, gate_up, down = weight(4096, 4096, zero), weight(8192, 4096, zero), weight(4096, 4096, zero)
    qkv = weight(6144, 4096, zero) if zero else None
    weights = packed_layer.LayerWeights(o, gate_up, down, qkv)
    packed_layer.packed_layer(x, x.clone(), weights, x[0], x[0] if zero else None, 1e-6, counter, pdl=zero)
"""
EPS = 1e-6
WHOLE = LinearCase(
    format="int4_groups",
    rows=8,
    outputs=4096,
    inputs=4096,
    half=True,
    bfloat16=True,
    bias=False,
    gated=False,
    added=True,
    whole=True,
    deterministic=False,
    gluon=True,
    distance=64,
    group=128,
)


def test_compiles_for_hopper(tmp_path: Path) -> None:
    found = compile_for_hopper(COMPILE, tmp_path)
    assert [one.num_programs for one in found] == [128, 128]
    assert all("cp.async.bulk.tensor" in one.instructions for one in found)


def qwen3_8b(**change: Any) -> list[LinearCase]:
    o = replace(WHOLE, **change)
    gate_up, qkv = replace(o, outputs=24576, gated=True, added=False), replace(o, outputs=6144, added=False)
    return [o, gate_up, replace(o, inputs=12288), qkv]


def test_which_layers_it_computes() -> None:
    assert joins_layers(*qwen3_8b()) and joins_layers(*qwen3_8b(rows=1))
    for change in (
        {"rows": 9},
        {"deterministic": True},
        {"gluon": False},
        {"bias": True},
        {"bfloat16": False},
        {"whole": False},
        {"group": 64},
        {"format": "int8_groups"},
        {"outputs": 5120},
        {"inputs": 8192},
    ):
        assert not joins_layers(*qwen3_8b(**change)), change


def reference(x: Tensor, residual: Tensor, weights: list[PackedWords], norms: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The new residual, and q, k and v."""
    o, gate_up, down, qkv = map(dequantize_reference, weights)
    after = (residual.float() + x.float() @ o.T).bfloat16().float()
    gate, up = (F.rms_norm(after, after.shape[1:], norms[0].float(), EPS) @ gate_up.T).chunk(2, dim=1)
    after = (after + (F.silu(gate) * up) @ down.T).bfloat16().float()
    return after, F.rms_norm(after, after.shape[1:], norms[1].float(), EPS) @ qkv.T


@pytest.mark.gpu
@pytest.mark.parametrize("zero", [False, True])
def test_against_torch(zero: bool) -> None:
    """Also many times in a graph, with programmatic dependent launch: every result is the same."""
    if not gluon_usable():
        pytest.skip("needs a GPU of the kind the kernel is written for")
    from nanovllm.kernels.linear.packed_layer import LayerWeights, packed_layer

    torch.manual_seed(0)
    shapes = (4096, 4096), (24576, 4096), (4096, 12288), (6144, 4096)
    weights = [random_packed(n, k, kind="int4", group=128, zero=zero) for n, k in shapes]
    norms = [torch.rand(4096, device="cuda").bfloat16() + 0.5 for _ in range(2)]
    counter = torch.zeros(1, dtype=torch.int64, device="cuda")
    for m in (1, 3, 8):
        x, before = (torch.randn(m, 4096, device="cuda").bfloat16() for _ in range(2))

        def run(weights: list[PackedWords], x: Tensor = x, before: Tensor = before) -> tuple[Tensor, Tensor | None]:
            residual, norm = before.clone(), norms[1] if len(weights) == 4 else None
            projected = packed_layer(x, residual, LayerWeights(*weights), norms[0], norm, EPS, counter, pdl=True)
            return residual, projected

        first, projected = run(weights)
        expected, expected_qkv = reference(x, before, weights, norms)
        assert projected is not None
        close(first, expected)
        close(projected, expected_qkv)
        last, nothing = run(weights[:3])
        assert nothing is None and torch.equal(last, first)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = [run(weights) for _ in range(10)]
        for _ in range(20):
            graph.replay()
        for residual, again in results:
            assert again is not None and torch.equal(residual, first) and torch.equal(again, projected)


def close(actual: Tensor, expected: Tensor) -> None:
    error = (actual.double() - expected.double()).abs().max() / expected.double().abs().max()
    assert actual.dtype == torch.bfloat16 and error < 2e-2, error
