"""Which part of a model one rank holds: some of the layers, and of each its heads and columns. No torch."""

from dataclasses import dataclass

from nanovllm.distributed.group import Rank
from nanovllm.layers.spec import LayerSpec
from nanovllm.models.spec import ModelSpec
from nanovllm.state import LayerState


@dataclass(frozen=True)
class Shard:
    model: ModelSpec
    layers: range  # of the model, held by this rank
    tensor_rank: int = 0
    tensor_parallel_size: int = 1

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

    def layer_states(self, dtype: str) -> list[LayerState]:
        """What each of this rank's layers keeps, of its KV heads, in a KV cache of this dtype."""
        return [layer.mixer.state(dtype, self.tensor_parallel_size) for layer in self.layer_specs]


def whole_model(model: ModelSpec) -> Shard:
    return Shard(model, range(model.num_layers))


def shard_of(model: ModelSpec, rank: Rank) -> Shard:
    """ConfigError where the model cannot be divided like that."""
    if rank.world_size == 1:
        return whole_model(model)
    from nanovllm.layers.division import check_stages, stage_layers

    check_stages(whole_model(model).layer_states("float32"), rank.pipeline_parallel_size)
    layers = stage_layers(model.num_layers, rank.pipeline_rank, rank.pipeline_parallel_size)
    shard = Shard(model, layers, rank.tensor_rank, rank.tensor_parallel_size)
    for layer in shard.layer_specs:
        for _, weight in layer.weights():
            weight.shard_shape(rank.tensor_rank, rank.tensor_parallel_size)  # refuses what cannot be divided
    return shard
