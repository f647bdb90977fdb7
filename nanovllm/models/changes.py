"""Changes to the attention of a Llama-shaped model, for families that differ in little else; no torch."""

from collections.abc import Callable
from dataclasses import replace

from nanovllm.layers.spec import AttentionSpec
from nanovllm.models.spec import ModelSpec


def change_attention(model: ModelSpec, change: Callable[[int, AttentionSpec], AttentionSpec]) -> ModelSpec:
    """`change` gets the number of a layer and its attention, and returns what the layer has instead."""
    layers = []
    for index, layer in enumerate(model.layers):
        assert isinstance(layer.mixer, AttentionSpec)
        layers.append(replace(layer, mixer=change(index, layer.mixer)))
    return replace(model, layers=tuple(layers))
