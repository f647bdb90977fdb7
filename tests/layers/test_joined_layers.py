"""The steps in which everything between two attentions is one kernel: which weights and norms each launch gets."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nanovllm.layers.joined_layers import JoinedLayers


def made_up_layer(number: int) -> SimpleNamespace:
    def linear(name: str) -> SimpleNamespace:
        return SimpleNamespace(weight=SimpleNamespace(kernel_arguments=lambda: {"weight": f"{name} {number}"}))

    class Qkv(SimpleNamespace):
        def __call__(self, x: Any, norm: Any) -> str:
            return f"projected with {norm.weight}"

    mixer = SimpleNamespace(
        qkv_proj=Qkv(weight=linear("qkv").weight),
        o_proj=linear("o"),
        attend=lambda qkv, state, step: f"attention {number} of {qkv}, {state}, {step}",
    )
    return SimpleNamespace(
        mixer=mixer,
        feed_forward=SimpleNamespace(gate_up_proj=linear("gate_up"), down_proj=linear("down")),
        input_norm=SimpleNamespace(weight=f"input norm {number}", eps=1e-6),
        ffn_norm=SimpleNamespace(weight=f"ffn norm {number}", eps=1e-6),
    )


def test_each_launch_ends_with_the_next_layers_projection(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = []

    def packed_layer(mixed: str, residual: Any, weights: Any, *others: Any, pdl: bool) -> str | None:
        launches.append((mixed, tuple(weights), others[:2]))
        return None if weights.qkv is None else f"out of {weights.qkv}"

    monkeypatch.setattr("nanovllm.layers.joined_layers.packed_layer", packed_layer)
    layers = [made_up_layer(number) for number in range(2)]
    joined = JoinedLayers(layers, SimpleNamespace(device="cpu", pdl=True))  # type: ignore[arg-type]
    joined._serves = True
    x = torch.zeros(8, 4)
    assert joined(x, [(layers[0], "first"), (layers[1], "second")], "step") is x  # type: ignore[arg-type]
    assert launches == [
        (
            "attention 0 of projected with input norm 0, first, step",
            ("o 0", "gate_up 0", "down 0", "qkv 1"),
            ("ffn norm 0", "input norm 1"),
        ),
        ("attention 1 of out of qkv 1, second, step", ("o 1", "gate_up 1", "down 1", None), ("ffn norm 1", None)),
    ]
    assert joined(torch.zeros(9, 4), [(layers[0], "first")], "step") is None  # type: ignore[arg-type]
    joined._serves = False
    assert joined(x, [(layers[0], "first")], "step") is None  # type: ignore[arg-type]
