"""The sweep of tile shapes, with tiny products in the interpreter and a clock of its own."""

import itertools
import time

import pytest
import torch

from nanovllm.bench import packed_kernels
from nanovllm.bench.packed_kernels import Candidate, Shape, candidates, inputs, measure, random_weight
from nanovllm.kernels.linear.one_row import linear_reference
from nanovllm.kernels.linear.packed import dequantize_reference

CPU = torch.device("cpu")
SHAPES = (Shape("plain", 128, 256), Shape("gate_up", 128, 256, normed=True, gated=True))


@pytest.mark.parametrize("form", packed_kernels.FORMATS)
def test_weights_can_be_computed_with(form: str) -> None:
    dense = dequantize_reference(random_weight(form, 128, 256, CPU))
    assert dense.shape == (128, 256) and torch.isfinite(dense).all() and dense.abs().max() > 0


@pytest.mark.parametrize("gluon", [False, True])
def test_one_candidate_is_the_choice(gluon: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_kernels, "gluon_usable", lambda: gluon)
    monkeypatch.setattr(packed_kernels, "num_sms", lambda: 132)
    for form, m, shape in itertools.product(packed_kernels.FORMATS, packed_kernels.ROWS, packed_kernels.QWEN3_8B):
        small = Shape(shape.name, 128, shape.inputs, gated=shape.gated, added=shape.added)
        weight, x = random_weight(form, 128, shape.inputs, CPU), torch.empty(m, 1).expand(m, shape.inputs)
        found = list(candidates(small, weight, x))
        assert sum(one.chosen for one in found) == 1, (form, m, shape, [one.name for one in found])


def test_every_case_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    ticks, x = itertools.count(1), inputs(SHAPES[0], 1, CPU)

    def timer(run: object, weights: object) -> float:
        return next(ticks) * 1e-6

    measure(SHAPES, ["int4"], [1, 64], CPU, timer, until=time.monotonic() + 60)
    lines = capsys.readouterr().out.splitlines()
    assert all(any(f"{shape.name:8} {m:5} rows" in line for line in lines) for shape in SHAPES for m in (1, 64))
    weight = random_weight("int4", 128, 256, CPU)
    one: Candidate = next(candidates(SHAPES[0], weight, x))
    expected = linear_reference(x, dequantize_reference(weight))
    assert (one.run(weight) - expected).abs().max() / expected.abs().max() < 0.02
    measure(SHAPES, ["int4"], [1], CPU, timer, until=0)
    assert "were not measured" in capsys.readouterr().out
