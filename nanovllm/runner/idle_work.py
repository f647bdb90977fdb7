"""What an engine that serves does on a GPU while nobody waits, so that no step under load has to.

A decode step of a new size first records its graph, which takes some 30 ms. A step with prompts has a graph only if it
was recorded here. And cuBLAS has many kernels, from which it chooses by the number of rows. It loads one when it first
chooses it, which takes 4 ms and often waits until the GPU has computed all that was launched. Tokens that are ready
then wait for the next step, too.
"""

import sys
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.layers.linear import Linear
from nanovllm.models.decoder import Decoder
from nanovllm.weights.dense import DenseWeight

if TYPE_CHECKING:  # imports Triton, which may not be installed
    from nanovllm.runner.decode_step import DecodeStep
    from nanovllm.runner.prompt_graphs import PromptGraphs

ENDED = object()
SPARED_BYTES = 2 << 30  # while less memory of the GPU is free, graphs are only recorded where a step needs them
SMALLEST = 64  # number of rows that is tried, where steps with prompts have no graphs
DISTANCES = ((4608, 16), (sys.maxsize, 256))  # between numbers of rows that are tried, up to a number


def sizes_to_try(smallest: int, largest: int) -> list[int]:
    """The largest first, so that torch reuses its memory for smaller ones."""
    sizes = [smallest]
    while sizes[-1] < largest:
        sizes.append(sizes[-1] + next(distance for most, distance in DISTANCES if sizes[-1] < most))
    return [min(size, largest) for size in reversed(sizes)]


@torch.inference_mode()
def idle_work(
    model: Decoder,
    decode: "DecodeStep | None",
    prompts: "PromptGraphs | None",
    states: list[Any],
    *,
    max_num_tokens: int,
) -> Iterator[None]:
    """Does a piece each time that the next one is asked for; a request that comes meanwhile waits for that piece."""
    recordings = iter(()) if decode is None else decode.recordings(states)
    smallest = SMALLEST
    if prompts is not None:
        yield from while_memory_is_free(prompts.recordings(states))
        if prompts.is_recorded:
            smallest = max(SMALLEST, *prompts.sizes)
    yield from islice(recordings, 1)  # so that the graphs' memory has its size before requests take others
    weights = dense_weights(model)
    for size in sizes_to_try(smallest, max_num_tokens):
        for weight in weights:
            multiply(weight, size, adds=weight.shape[0] == model.spec.hidden_size)
        if weights and weights[0].is_cuda:
            torch.cuda.synchronize()  # a piece ends here, not when the GPU gets to it
        yield
    yield from while_memory_is_free(recordings)


def while_memory_is_free(recordings: Iterator[object]) -> Iterator[None]:
    """Go through them as long as SPARED_BYTES are free: the memory of a large step's graph is not that of the step."""
    while torch.cuda.is_available() and torch.cuda.mem_get_info()[0] >= SPARED_BYTES:
        if next(recordings, ENDED) is ENDED:
            return
        yield


def dense_weights(model: Decoder) -> list[Tensor]:
    """One of each shape."""
    found: dict[tuple[int, ...], Tensor] = {}
    for layer in model.layers:
        for part in (layer.mixer, layer.feed_forward):
            for linear in vars(part).values():
                if isinstance(linear, Linear) and isinstance(linear.weight, DenseWeight):
                    found.setdefault(linear.weight.shape, linear.weight.tensor)
    return list(found.values())


def multiply(weight: Tensor, num_rows: int, *, adds: bool) -> None:
    """As steps do with cuBLAS (kernels/linear/run.py); the results are not used."""
    x = weight.new_zeros(num_rows, weight.shape[1])
    y = F.linear(x, weight)
    if adds:
        y.addmm_(x, weight.t())
