"""Changes to the layers of a Llama-shaped model, for families that differ in little else; no torch."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from nanovllm.layers.moe_spec import MoeSpec
from nanovllm.layers.refine import refine
from nanovllm.layers.spec import AttentionSpec
from nanovllm.layers.stored_spec import StoredAttentionSpec, StoredMlpSpec
from nanovllm.models.partial_rope import read_partial_rope
from nanovllm.models.spec import ModelSpec


def change_attention(model: ModelSpec, change: Callable[[int, AttentionSpec], AttentionSpec]) -> ModelSpec:
    """`change` gets the number of a layer and its attention, and returns what the layer has instead."""
    layers = []
    for index, layer in enumerate(model.layers):
        assert isinstance(layer.mixer, AttentionSpec)
        layers.append(replace(layer, mixer=change(index, layer.mixer)))
    return replace(model, layers=tuple(layers))


def with_experts(model: ModelSpec, experts: Mapping[int, MoeSpec]) -> ModelSpec:
    """With experts in place of the MLPs of these layers."""
    layers = enumerate(model.layers)
    return replace(
        model, layers=tuple(replace(layer, feed_forward=experts.get(i, layer.feed_forward)) for i, layer in layers)
    )


def change_storage(
    model: ModelSpec, raw: dict[str, Any], *, rotated_share: float, interleaved: bool = False, qkv_as_one: bool = False
) -> ModelSpec:
    """With gate and up stored as one tensor, and rotary positions of a part of each head, by the config `raw`."""
    first, max_position = model.layers[0].mixer, model.max_position
    assert isinstance(first, AttentionSpec)
    rope = read_partial_rope(raw, head_dim=first.head_dim, max_position=max_position, share=rotated_share)

    def stored(_: int, own: AttentionSpec) -> AttentionSpec:
        return refine(StoredAttentionSpec, own, rope=rope, interleaved=interleaved, as_one=qkv_as_one)

    changed = change_attention(model, stored)
    return replace(
        changed,
        layers=tuple(replace(one, feed_forward=refine(StoredMlpSpec, one.feed_forward)) for one in changed.layers),
        max_position=max_position if rope.scaling is None else rope.scaling.longest(max_position),
    )
