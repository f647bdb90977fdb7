"""Bytes of a rank's weights, without loading them."""

from nanovllm.config import Config
from nanovllm.layers.spec import Weight
from nanovllm.models.parameters import num_bytes
from nanovllm.models.shard import Shard


def weight_bytes(config: Config, shard: Shard, *, itemsize: int) -> int:
    """`itemsize`: of weights that are not packed."""
    from nanovllm.weights.formats import weight_formats

    formats = weight_formats(config.quantization, shard.model.packing)

    def of_weight(prefix: str, weight: Weight, shape: tuple[int, ...]) -> int:
        return formats.of(prefix, weight, config.tensor_parallel_size).num_bytes(shape, itemsize)

    return num_bytes(shard, of_weight)
