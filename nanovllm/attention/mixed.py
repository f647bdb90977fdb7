"""Attention layers of different sizes: each size has a backend of its own."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from nanovllm.attention.backend import BatchGeometry, LayerAttention, LayerCache
from nanovllm.errors import ConfigError
from nanovllm.layers.spec import AttentionSpec, RopeSpec

if TYPE_CHECKING:
    from nanovllm.attention.interface import AttentionBackend

Size = tuple[int, int]  # heads of queries, keys and values together, and their numbers


class MixedBackend:
    """Implements `AttentionBackend`. It plans steps on the host, so that decode steps are no CUDA graphs."""

    plans_on_device = False

    def __init__(
        self,
        layers: Sequence[AttentionSpec],
        ropes: Sequence[RopeSpec],  # of all layers
        make: Callable[[Sequence[AttentionSpec]], "AttentionBackend"],  # from layers of one size
    ) -> None:
        self._sizes: list[Size] = [(layer.num_heads + 2 * layer.num_kv_heads, layer.head_dim) for layer in layers]
        by_size: dict[Size, list[AttentionSpec]] = {}
        for size, layer in zip(self._sizes, layers, strict=True):
            others = by_size.setdefault(size, [])
            if others and others[0].num_heads != layer.num_heads:
                raise ConfigError(f"layers of {others[0].num_heads} and of {layer.num_heads} heads: not told apart")
            others.append(layer)
        self._backends = {size: make(own) for size, own in by_size.items()}
        self._ropes: dict[Size, dict[int, int]] = {}  # from the number of a rope among all, to that in its backend
        for size, own in by_size.items():
            numbers = dict.fromkeys(ropes.index(layer.rope) for layer in own)
            self._ropes[size] = {number: index for index, number in enumerate(numbers)}
        first = self._backends[self._sizes[0]]
        self.shape, self.block_size = first.shape, first.block_size

    def make_cache(self, num_blocks: Mapping[int | None, int]) -> list[LayerCache]:
        made = {size: iter(backend.make_cache(num_blocks)) for size, backend in self._backends.items()}
        return [next(made[size]) for size in self._sizes]

    def prepare(self, geometry: BatchGeometry, upload: Callable[[np.ndarray], Tensor]) -> dict[Size, Any]:
        return {size: backend.prepare(geometry, upload) for size, backend in self._backends.items()}

    def forward(self, qkv: Tensor, layer: LayerAttention, cache: LayerCache, step: dict[Size, Any]) -> Tensor:
        size = (qkv.shape[1], qkv.shape[2])
        own = replace(layer, rope=self._ropes[size][layer.rope])
        return self._backends[size].forward(qkv, own, cache, step[size])
