"""Which part of a model one rank holds: some of the layers, and of each its heads and columns. No torch."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from nanovllm.distributed.group import Rank
from nanovllm.layers.spec import LayerSpec, Weight, norm_weight
from nanovllm.models.spec import ModelSpec
from nanovllm.state import LayerState

NumBytes = Callable[[str, Weight, tuple[int, ...]], int]


@dataclass(frozen=True)
class Shard:
    model: ModelSpec
    layers: range  # of the model, held by this rank
    tensor_rank: int
    tensor_parallel_size: int

    @property
    def has_embedding(self) -> bool:
        return self.layers.start == 0

    @property
    def has_head(self) -> bool:
        """And the norm before it."""
        return self.layers.stop == self.model.num_layers

    @property
    def layer_specs(self) -> tuple[LayerSpec, ...]:
        return self.model.layers[self.layers.start : self.layers.stop]

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """Every parameter that this rank holds with its prefix in checkpoints, a tied head counted once."""
        if self.has_embedding:
            yield "", self.model.embedding_weight()
        for index, layer in zip(self.layers, self.layer_specs, strict=True):
            for prefix, weight in layer.weights():
                if self.tensor_rank == 0 or not weight.on_first_rank:
                    yield f"model.layers.{index}.{prefix}", weight
        if self.has_head:
            yield "model.norm.", norm_weight(self.model.hidden_size)
            if not (self.model.tie_word_embeddings and self.has_embedding):
                yield "", self.model.head_weight()

    def num_bytes(self, of_weight: NumBytes) -> int:
        """`of_weight`: from a weight's prefix, the weight, and the shape that this rank holds, to its bytes."""
        rank, size = self.tensor_rank, self.tensor_parallel_size
        return sum(of_weight(prefix, weight, weight.shard_shape(rank, size)) for prefix, weight in self.weights())

    def layer_states(self, dtype: str) -> list[LayerState]:
        """What each of this rank's layers keeps, of its KV heads, in a KV cache of this dtype."""
        return [layer.mixer.state(dtype, self.tensor_parallel_size) for layer in self.layer_specs]

    def widest_activation(self) -> int:
        """Most numbers that a linear of this rank's layers gives for one token."""
        rank, size = self.tensor_rank, self.tensor_parallel_size
        matrices = [w for layer in self.layer_specs for _, w in layer.weights() if w.columns is not None]
        return max(weight.shard_shape(rank, size)[-2] * max(weight.num_active, 1) for weight in matrices)


def shard_of(model: ModelSpec, rank: Rank) -> Shard:
    """ConfigError where the model cannot be divided like that."""
    layers = range(model.num_layers)
    if rank.pipeline_parallel_size > 1:
        from nanovllm.layers.division import stage_layers

        layers = stage_layers(model.num_layers, rank.pipeline_rank, rank.pipeline_parallel_size)
    shard = Shard(model, layers, rank.tensor_rank, rank.tensor_parallel_size)
    for _, weight in shard.weights():
        weight.shard_shape(shard.tensor_rank, shard.tensor_parallel_size)
    return shard
