"""The benchmark of the gated delta net's kernels, with tiny heads in the interpreter and a clock of its own."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from nanovllm.bench.delta_net import DECODES, NUM_ROWS, PROMPTS, make_layer, measure, qwen3_5_9b

CPU = torch.device("cpu")

# from Triton 3.6's interpreter, for a loop whose bound is an argument
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")


def test_every_case_is_run_and_reported() -> None:
    spec = replace(qwen3_5_9b(), hidden_size=8, num_key_heads=1, num_value_heads=2, key_dim=8, value_dim=8)
    layer, ticks, states = make_layer(spec, CPU, dtype=torch.float32, num_rows=4), itertools.count(1), []
    lines: list[str] = []

    def in_graph(run: Any, calls: Sequence[Any]) -> float:
        before = layer.state.clone()
        run(calls[0])
        states.append(layer.state.clone())
        layer.state.copy_(before)
        return next(ticks) * 1e-6

    measure(
        layer,
        dtype=torch.float32,
        decodes=[1, 3],
        prompts=[(2, 70)],
        in_graph=in_graph,
        one_by_one=lambda run: in_graph(lambda _: run(), [None]),
        say=lines.append,
    )
    for ours, plain in zip(states[::2], states[1::2], strict=True):
        torch.testing.assert_close(ours[1:], plain[1:], rtol=1e-4, atol=1e-4)
    assert [line.split()[:2] for line in lines[::2]] == [["decode", "1"], ["decode", "3"], ["prompts", "2"]]


def test_shapes() -> None:
    spec = qwen3_5_9b()
    assert (spec.num_key_heads, spec.num_value_heads, spec.key_dim, spec.value_dim) == (16, 32, 128, 128)
    assert max(DECODES) <= NUM_ROWS and max(count for count, _ in PROMPTS) <= NUM_ROWS
