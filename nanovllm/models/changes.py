"""Changes to the layers of a Llama-shaped model, for families that differ in little else; no torch."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from nanovllm.layers.spec import AttentionSpec, MlpSpec
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


def change_storage(
    model: ModelSpec, raw: dict[str, Any], *, rotated_share: float, interleaved: bool = False, qkv_as_one: bool = False
) -> ModelSpec:
    """With gate and up stored as one tensor, and rotary positions of a part of each head, by the config `raw`."""
    layers, max_position = [], model.max_position
    for layer in model.layers:
        own, mlp = layer.mixer, layer.feed_forward
        assert isinstance(own, AttentionSpec) and isinstance(mlp, MlpSpec)
        rope = read_partial_rope(raw, head_dim=own.head_dim, max_position=model.max_position, share=rotated_share)
        if rope.scaling is not None:
            max_position = rope.scaling.longest(model.max_position)
        mixer = StoredAttentionSpec.of(own, rope=rope, interleaved=interleaved, as_one=qkv_as_one)
        layers.append(replace(layer, mixer=mixer, feed_forward=StoredMlpSpec.of(mlp)))
    return replace(model, layers=tuple(layers), max_position=max_position)
