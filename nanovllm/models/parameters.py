"""Every parameter of a model, or of the part that one rank holds: for checkpoint files and memory plans. No torch."""

from collections.abc import Callable, Iterator

from nanovllm.layers.spec import Weight, norm_weight
from nanovllm.models.shard import Shard, whole_model
from nanovllm.models.spec import ModelSpec


def parameters(shard: Shard) -> Iterator[tuple[str, Weight]]:
    """Every parameter that this rank holds with its prefix in checkpoints, a tied head counted once."""
    model = shard.model
    if shard.has_embedding:
        yield "", model.embedding_weight()
        if model.per_layer is not None:
            yield from model.per_layer.weights()
    for index, layer in zip(shard.layers, shard.layer_specs, strict=True):
        for prefix, weight in layer.weights():
            if shard.tensor_rank == 0 or not weight.on_first_rank:
                yield f"model.layers.{index}.{prefix}", weight
    if shard.has_head:
        yield "model.norm.", norm_weight(model.hidden_size, model.norm_offset)
        if not (model.tie_word_embeddings and shard.has_embedding):
            yield "", model.head_weight()


def num_parameters(model: ModelSpec) -> int:
    """All weights, counted once where embedding and head are tied."""
    return sum(weight.num_parameters for _, weight in parameters(whole_model(model)))


def tensor_names(model: ModelSpec) -> frozenset[str]:
    """The names of all tensors that a checkpoint may have; a tied head may be stored too."""
    named = parameters(whole_model(model))
    names = {prefix + name for prefix, weight in named for name in names_of(weight)}
    return frozenset(names | {"lm_head.weight"})


def names_of(weight: Weight) -> Iterator[str]:
    """Of its tensors in checkpoints, relative to the part of the layer."""
    for name in weight.names:
        yield from map(name.format, range(max(weight.num_experts, 1)))


def num_bytes(shard: Shard, of_weight: Callable[[str, Weight, tuple[int, ...]], int]) -> int:
    """`of_weight`: from a weight's prefix, the weight, and the shape that this rank holds, to its bytes."""
    rank, size = shard.tensor_rank, shard.tensor_parallel_size
    return sum(of_weight(prefix, weight, weight.shard_shape(rank, size)) for prefix, weight in parameters(shard))


def widest_activation(shard: Shard) -> int:
    """Most numbers that a linear of this rank's layers gives for one token."""
    rank, size = shard.tensor_rank, shard.tensor_parallel_size
    matrices = [w for layer in shard.layer_specs for _, w in layer.weights() if w.columns is not None]
    return max(weight.shard_shape(rank, size)[-2] * max(weight.num_active, 1) for weight in matrices)
