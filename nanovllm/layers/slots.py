"""Where a checkpoint's tensors go in the weights of this rank."""

from nanovllm.checkpoint.stored import Slot
from nanovllm.layers.spec import Weight
from nanovllm.weights.format import StoredWeight


def slots_of(spec: Weight, weight: StoredWeight, rank: int = 0, num_ranks: int = 1) -> dict[str, Slot]:
    """By checkpoint name, relative to the layer's part."""
    return {part.name: Slot(weight, part.shape, part.index, part.part) for part in spec.parts(rank, num_ranks)}
