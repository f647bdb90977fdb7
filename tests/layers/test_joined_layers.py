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


def test_the_first_step_launches_the_linears_that_end_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """That step only compiles kernels, and without these the first prompt would wait for its last layer's."""
    launched: list[tuple[str, int]] = []

    class Linear(SimpleNamespace):
        def __call__(self, x: Any, norm: Any = None, add_to: Any = None) -> Any:
            launched.append((self.name, len(x)))
            if add_to is not None:
                add_to.add_later(torch.zeros(2, *x.shape))
            return add_to

    weight = SimpleNamespace(shape=(4, 4))
    mixer = SimpleNamespace(o_proj=Linear(name="o", weight=weight), qkv_proj=Linear(name="qkv"))

    def feed_forward(x: Any, norm: str) -> Any:
        launched.append((norm, len(x)))
        return x

    layer = SimpleNamespace(mixer=mixer, feed_forward=feed_forward, ffn_norm="feed forward", input_norm="input")
    monkeypatch.setattr("nanovllm.layers.split_k_residual.add_partial_sums", lambda *_, pdl: None)
    monkeypatch.setattr(JoinedLayers, "_all_served", lambda self: True)
    context = SimpleNamespace(device="cpu", pdl=True, dtype=torch.float32)
    joined = JoinedLayers([layer], context)  # type: ignore[arg-type]
    attended = SimpleNamespace(mixer=SimpleNamespace(qkv_proj=lambda x, norm: None), input_norm="input")
    with pytest.raises(AssertionError):  # nothing was projected: this step is not computed
        joined(torch.zeros(1, 4), [(attended, "state")], "step")  # type: ignore[arg-type]
    names = "o", "feed forward", "qkv", "o", "feed forward"
    assert launched == [(name, rows) for rows in (1, 8) for name in names]


@pytest.mark.parametrize("change", [{}, {"activation": "gelu"}, {"fuses": False}, {"eps": 1e-5}, {"mixer": object()}])
def test_which_layers_are_joined(change: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from nanovllm.layers.attention import Attention
    from nanovllm.layers.mlp import MLP

    def layer(change: dict[str, Any]) -> SimpleNamespace:
        made = made_up_layer(0)
        mixer, feed_forward = object.__new__(Attention), object.__new__(MLP)
        linear = SimpleNamespace(bias=None)
        mixer.o_proj = mixer.qkv_proj = feed_forward.gate_up_proj = feed_forward.down_proj = linear  # type: ignore
        linear.weight = made.mixer.o_proj.weight
        feed_forward.activation = change.get("activation", "silu")
        made.ffn_norm = SimpleNamespace(fuses=change.get("fuses", True), eps=change.get("eps", 1e-6))
        made.mixer, made.feed_forward = change.get("mixer", mixer), feed_forward
        return made

    monkeypatch.setattr("nanovllm.layers.joined_layers.linear_case", lambda *_, **__: "case")
    monkeypatch.setattr("nanovllm.layers.joined_layers.joins_layers", lambda *cases: cases == ("case",) * 4)
    monkeypatch.setattr("nanovllm.layers.joined_layers.packed_layer_serves", lambda layers: len(layers) == 2)
    context = SimpleNamespace(device="cpu", group=SimpleNamespace(size=1), dtype=None, deterministic=False, gluon=True)
    joined = JoinedLayers([layer({}), layer(change)], context)  # type: ignore[arg-type]
    assert joined._all_served() == (change == {})
