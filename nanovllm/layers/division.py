"""How tensor parallel ranks divide a dimension of a weight; no torch."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nanovllm.errors import ConfigError
from nanovllm.state import LayerState, PagedState

if TYPE_CHECKING:
    from nanovllm.layers.spec import Dim


def divide(dim: "Dim", rank: int, num_ranks: int) -> tuple[int, int, int]:
    """(start, size, elements kept in memory) of the part of rank `rank`."""
    if dim.pads:
        held = -(-dim.count // num_ranks)
        start = min(rank * held, dim.count)
        size = min(held, dim.count - start)
        return start * dim.unit, size * dim.unit, held * dim.unit
    if dim.count % num_ranks and not (dim.repeats and num_ranks % dim.count == 0):
        rule, remedy = "cannot be split evenly", "a divisor"
        if dim.repeats:
            rule, remedy = "can be neither split nor repeated evenly", "a divisor or a multiple"
        raise ConfigError(
            f"tensor_parallel_size={num_ranks}: the model's {dim.count} {dim.divided} {rule}; "
            f"use {remedy} of {dim.count}"
        )
    units = max(dim.count // num_ranks, 1)
    return rank * dim.count // num_ranks * dim.unit, units * dim.unit, units * dim.unit


def stage_layers(num_layers: int, pipeline_rank: int, num_stages: int) -> range:
    """The layers of a pipeline stage: evenly; what is left over goes to the stages before the last, which has the head
    to compute."""
    if num_stages > num_layers:
        raise ConfigError(
            f"pipeline_parallel_size={num_stages}: the model has only {num_layers} layers; use at most that"
        )
    each, extra = divmod(num_layers, num_stages)
    longer = range(num_stages - 1 - extra, num_stages - 1)
    counts = [each + (stage in longer) for stage in range(num_stages)]
    first = sum(counts[:pipeline_rank])
    return range(first, first + counts[pipeline_rank])


def check_stages(states: Sequence[LayerState], num_stages: int) -> None:
    """ConfigError if a layer of one stage reads the state of a layer of another. `states`: of all layers."""
    for stage in range(num_stages):
        layers = stage_layers(len(states), stage, num_stages)
        for layer in layers:
            state = states[layer]
            if isinstance(state, PagedState) and layer - state.source < layers.start:
                raise ConfigError(
                    f"pipeline_parallel_size={num_stages}: layer {layer} reads the KV cache of layer "
                    f"{layer - state.source}, which another stage has; use fewer stages, or tensor_parallel_size"
                )
