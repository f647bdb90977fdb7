"""All between two attentions in one kernel: compared to plain torch on a Hopper GPU; elsewhere only compiled."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.kernels.compile_ahead import Job, compile_ahead
from nanovllm.kernels.features import gluon_usable
from nanovllm.kernels.launch import record_launches
from nanovllm.kernels.linear.packed import PackedWords, dequantize_reference
from nanovllm.kernels.select import SLOW_TO_COMPILE, LinearCase, compiled_sizes, joins_layers
from tests.kernels.hopper import compile_for_hopper
from tests.kernels.packed_weights import random_packed

COMPILE = """
from nanovllm.kernels.linear import packed_layer
from nanovllm.kernels.linear.layer_events import COUNTERS
from nanovllm.kernels.linear.packed import PackedWords

def check(kernel, grid, *args, pdl=False, **options):
    assert options["launch_cooperative_grid"], "programs wait for each other"
    compile(kernel, grid, *args, **options)
    ptx = kernel.warmup(*args, grid=grid, **options).asm["ptx"]
    events = options["INNER_BLOCKS"] + 2  # without q, k and v nothing follows the last one
    counted, awaited = ptx.count("red.release.gpu"), ptx.count("ld.acquire.gpu")
    assert (counted, awaited) == (events, events if options["QKV_TILES"] else events - 1), "each once"

packed_layer.launch = check
def weight(n, k, zero):
    zero = torch.empty(n, k // 128, dtype=torch.uint8) if zero else None
    words, scale = torch.empty(n, k // 8, dtype=torch.int32), torch.empty(n, k // 128, dtype=torch.float16)
    return PackedWords("int4", 64, words, scale, zero=zero)

x = torch.empty(8, 4096, dtype=torch.bfloat16)
counters = torch.zeros(COUNTERS, dtype=torch.int64)
for zero in (False, True):
    o, gate_up, down = weight(4096, 4096, zero), weight(8192, 4096, zero), weight(4096, 4096, zero)
    qkv = weight(6144, 4096, zero) if zero else None
    weights = packed_layer.LayerWeights(o, gate_up, down, qkv)
    packed_layer.packed_layer(x, x.clone(), weights, x[0], x[0] if zero else None, 1e-6, counters, pdl=zero)
"""
EPS = 1e-6
CASES = (12288, True), (12288, False), (14336, True)  # inner size, with zeros
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


def test_which_linears_it_may_compute() -> None:
    gate_up, down = replace(WHOLE, outputs=24576, gated=True, added=False), replace(WHOLE, inputs=12288)
    qkv = replace(WHOLE, outputs=6144, added=False)
    assert joins_layers(WHOLE, gate_up, down, qkv) and joins_layers(replace(WHOLE, rows=1), gate_up, down, qkv)
    for change in (
        {"rows": 9},
        {"deterministic": True},
        {"gluon": False},
        {"bias": True},
        {"bfloat16": False},
        {"whole": False},
        {"group": 64},
        {"format": "int8_groups"},
    ):
        assert not joins_layers(WHOLE, gate_up, down, replace(qkv, **change)), change


def test_which_sizes_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    from nanovllm.kernels.linear import packed_layer as file

    def layer(
        hidden: int = 4096, inner: int = 12288, attended: int = 4096, qkv: int = 6144, **types: torch.dtype
    ) -> Any:
        def weight(n: int, k: int) -> PackedWords:
            scale = torch.empty(n, k // 128, dtype=types.get("scale", torch.float16), device="meta")
            zero = torch.empty(n, k // 128, dtype=types["zero"], device="meta") if "zero" in types else None
            return PackedWords("int4", 64, torch.empty(n, k // 8, dtype=torch.int32, device="meta"), scale, zero=zero)

        linears = (hidden, attended), (2 * inner, hidden), (hidden, inner), (qkv, hidden)
        return file.LayerWeights(*(weight(*shape) for shape in linears))

    monkeypatch.setattr(file, "num_sms", lambda: 132)
    qwen3, llama, with_zeros = layer(), layer(inner=14336), layer(zero=torch.uint8)
    for served in (qwen3, llama, with_zeros, layer(attended=2048, qkv=4096)):
        assert file.packed_layer_serves([served, served])
    assert not file.packed_layer_serves([qwen3, llama]) and not file.packed_layer_serves([qwen3, with_zeros])
    for refused in (
        layer(hidden=5120),
        layer(inner=11008),
        layer(inner=15 * 2048),
        layer(attended=8192),
        layer(qkv=5120),
        layer(qkv=8192),
        layer(scale=torch.bfloat16),
        layer(zero=torch.int32),
    ):
        assert not file.packed_layer_serves([refused])
    monkeypatch.setattr(file, "num_sms", lambda: 114)
    assert not file.packed_layer_serves([qwen3])


def reference(x: Tensor, residual: Tensor, weights: list[PackedWords], norms: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The new residual, and q, k and v."""
    o, gate_up, down, qkv = map(dequantize_reference, weights)
    after = (residual.float() + x.float() @ o.T).bfloat16().float()
    gate, up = (F.rms_norm(after, after.shape[1:], norms[0].float(), EPS) @ gate_up.T).chunk(2, dim=1)
    after = (after + (F.silu(gate) * up) @ down.T).bfloat16().float()
    return after, F.rms_norm(after, after.shape[1:], norms[1].float(), EPS) @ qkv.T


def test_two_kinds_serve_all_steps_of_few_rows() -> None:
    """So that no step waits for a kernel that was not compiled for the sizes that a start launches."""
    from nanovllm.kernels.linear.layer_events import COUNTERS
    from nanovllm.kernels.linear.packed_layer import LayerWeights, packed_layer

    def weight(n: int, k: int) -> PackedWords:
        return PackedWords("int4", 64, torch.empty(n, k // 8, dtype=torch.int32), torch.empty(n, k // 128).half())

    weights = weight(4096, 4096), weight(8192, 4096), weight(4096, 4096), weight(6144, 4096)
    norm, counters = torch.empty(4096).bfloat16(), torch.zeros(COUNTERS, dtype=torch.int64)
    kinds: dict[int, set[tuple]] = {}
    for m in range(1, 9):
        x = torch.empty(m, 4096).bfloat16()
        jobs: list[Job] = []
        with record_launches(lambda *launch, jobs=jobs: jobs.append(Job(*launch))):
            packed_layer(x, x, LayerWeights(*weights), norm, norm, EPS, counters)
            packed_layer(x, x, LayerWeights(*weights[:3]), norm, None, EPS, counters)
        kinds[m] = {job.kind() for job in jobs}
    compiled = [kinds[m] for m in compiled_sizes() if m <= 8]
    assert all(len(found) == 2 and found in compiled for found in kinds.values())
    assert "_packed_layer_kernel" in SLOW_TO_COMPILE


class Layer:
    """Random weights on the GPU, in the order of `LayerWeights`."""

    def __init__(self, inner: int, *, zero: bool) -> None:
        from nanovllm.kernels.linear.layer_events import COUNTERS

        shapes = (4096, 4096), (2 * inner, 4096), (4096, inner), (6144, 4096)
        self.weights = [random_packed(n, k, kind="int4", group=128, zero=zero) for n, k in shapes]
        self.norms = [torch.rand(4096, device="cuda").bfloat16() + 0.5 for _ in range(2)]
        self.counters = torch.zeros(COUNTERS, dtype=torch.int64, device="cuda")

    def run(self, x: Tensor, residual: Tensor, *, qkv: bool = True) -> Tensor | None:
        from nanovllm.kernels.linear.packed_layer import LayerWeights, packed_layer

        weights, norm = LayerWeights(*self.weights[: 4 if qkv else 3]), self.norms[1] if qkv else None
        return packed_layer(x, residual, weights, self.norms[0], norm, EPS, self.counters, pdl=True)


@pytest.fixture(scope="module")
def layers() -> dict[tuple[int, bool], Layer]:
    """By inner size and whether weights have zeros. All their kernels are compiled at once, by all cores."""
    if not gluon_usable():
        pytest.skip("needs a GPU of the kind the kernel is written for")
    torch.manual_seed(0)
    found = {case: Layer(case[0], zero=case[1]) for case in CASES}
    x = torch.randn(8, 4096, device="cuda").bfloat16()
    with compile_ahead(lambda: [one.run(x, x, qkv=qkv) for one in found.values() for qkv in (True, False)]) as wait:
        wait()
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_against_torch(case: tuple[int, bool], layers: dict[tuple[int, bool], Layer]) -> None:
    """Also many times in a graph, with programmatic dependent launch: every result is the same."""
    layer = layers[case]
    for m in (1, 3, 8):
        x, before = (torch.randn(m, 4096, device="cuda").bfloat16() for _ in range(2))

        def run(*, qkv: bool = True, x: Tensor = x, before: Tensor = before) -> tuple[Tensor, Tensor | None]:
            residual = before.clone()
            return residual, layer.run(x, residual, qkv=qkv)

        first, projected = run()
        expected, expected_qkv = reference(x, before, layer.weights, layer.norms)
        assert projected is not None
        close(first, expected)
        close(projected, expected_qkv)
        last, nothing = run(qkv=False)
        assert nothing is None and torch.equal(last, first)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = [run() for _ in range(10)]
        for _ in range(20):
            graph.replay()
        for residual, again in results:
            assert again is not None and torch.equal(residual, first) and torch.equal(again, projected)
    used = layer.counters[: case[0] // 2048 + 2].tolist()
    assert len(set(used)) == 1 and used[0] % 128 == 0, "launches add equally to all counters that they use"


TWO_STREAMS = """
import torch
from nanovllm.kernels.linear.layer_events import COUNTERS
from nanovllm.kernels.linear.packed_layer import LayerWeights, packed_layer
from tests.kernels.packed_weights import random_packed

torch.manual_seed(0)
shapes = (4096, 4096), (24576, 4096), (4096, 12288), (6144, 4096)
weights = LayerWeights(*(random_packed(n, k, kind="int4", group=128) for n, k in shapes))
norm = torch.ones(4096, device="cuda").bfloat16()
x, before = (torch.randn(8, 4096, device="cuda").bfloat16() for _ in range(2))

class Engine:
    def __init__(self):
        self.stream, self.graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        self.counters = torch.zeros(COUNTERS, dtype=torch.int64, device="cuda")
        self.run()
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph, stream=self.stream):
            self.results = [self.run() for _ in range(30)]

    def run(self):
        residual = before.clone()
        return residual, packed_layer(x, residual, weights, norm, norm, 1e-6, self.counters, pdl=True)

engines = Engine(), Engine()
for _ in range(30):
    for engine in engines:
        with torch.cuda.stream(engine.stream):
            engine.graph.replay()
torch.cuda.synchronize()
first = engines[0].results[0]
assert all(torch.equal(a, b) for engine in engines for one in engine.results for a, b in zip(one, first))
"""


@pytest.mark.gpu
def test_launches_of_two_streams_end(layers: dict[tuple[int, bool], Layer]) -> None:
    """As of two engines of one process, whose programs must not each hold a part of the multiprocessors and wait."""
    assert layers  # have compiled the kernel, which the other process only loads
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    subprocess.run([sys.executable, "-c", TWO_STREAMS], env=environment, timeout=90, check=True)


def close(actual: Tensor, expected: Tensor) -> None:
    error = (actual.double() - expected.double()).abs().max() / expected.double().abs().max()
    assert actual.dtype == torch.bfloat16 and error < 2e-2, error
