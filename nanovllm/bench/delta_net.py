"""The kernels of the gated delta net at Qwen3.5-9B's shapes, beside the plain form on torch and beside fla-core.

Times one layer between its projections: convolution, delta rule, norm and gate. Decode steps run in a CUDA graph, with
other rows in every call, so that states come from memory and not from the L2 cache; for these the bytes of the states,
read and written, per second are printed, too. Prompts are launched one by one. What is printed of `fla`, where it is
installed, is the delta rule alone, without convolution, gates and norm; docs/models.md compares the rules.

    python -m nanovllm.bench.delta_net
"""

import argparse
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanovllm.bench.packed_kernels import seconds_in_graph
from nanovllm.bench.shapes import shape_folder
from nanovllm.checkpoint.dummy import load_dummy
from nanovllm.layers.context import BuildContext
from nanovllm.layers.delta_net import DeltaNet
from nanovllm.layers.delta_net_kernels import DeltaNetKernels
from nanovllm.layers.delta_net_spec import DeltaNetSpec
from nanovllm.layers.sequences import Sequences
from nanovllm.models.registry import describe

DECODES = (1, 8, 64, 256)
PROMPTS = ((1, 4096), (64, 960))
NUM_ROWS = 512
MOST_CALLS = 32  # of a graph
REPEATS = 5
FLA = "fla (rule alone)"

Compute = Callable[[Tensor, Tensor, Tensor, Sequences], Tensor]  # from inputs, gates and states of a step


def qwen3_5_9b() -> DeltaNetSpec:
    mixers = [layer.mixer for layer in describe(shape_folder("qwen3.5-9b")).config.layers]
    return next(mixer for mixer in mixers if isinstance(mixer, DeltaNetSpec))


@dataclass(frozen=True)
class Layer:
    spec: DeltaNetSpec
    plain: Compute
    kernels: Compute
    state: Tensor  # [rows + 1, size]


def make_layer(spec: DeltaNetSpec, device: torch.device, *, dtype: torch.dtype, num_rows: int) -> Layer:
    context = BuildContext.on(device, dtype=dtype, attention=None)
    layer = DeltaNet(spec, context)
    load_dummy(layer.slots(), 0, dtype=dtype, device=device)
    (size,) = spec.state("").shape
    state = torch.randn(num_rows + 1, size, device=device)
    return Layer(spec, layer.compute, DeltaNetKernels(spec, layer.held, deterministic=False, pdl=context.pdl), state)


def inputs(spec: DeltaNetSpec, num_tokens: int, like: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What the projections of a layer give."""
    width = spec.num_channels + spec.num_value_heads * spec.value_dim
    x = like.new_empty(num_tokens, width, dtype=dtype).normal_()
    return x, like.new_empty(num_tokens, 2 * spec.num_value_heads, dtype=dtype).normal_()


def sequences(rows: np.ndarray, num_new: int, device: torch.device, *, decodes: bool) -> Sequences:
    """Sequences with as many new tokens each, in the middle of their texts."""
    counts, numbers = np.full(len(rows), num_new), np.arange(len(rows))
    arrays = rows, np.full(len(rows), 512), numbers * num_new, counts, np.repeat(numbers, counts)
    return Sequences.of(
        lambda array: torch.from_numpy(array.astype(np.int32)).to(device),
        *arrays,
        num_decodes=len(rows) if decodes else 0,
    )


def seconds_of_calls(run: Callable[[], Any]) -> float:
    """The median time of a call."""
    run()
    times = []
    for _ in range(REPEATS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000)
    return sorted(times)[REPEATS // 2]


def fla_rule(spec: DeltaNetSpec, num_seqs: int, num_new: int, like: Tensor, dtype: torch.dtype) -> Callable[..., Any]:
    """The delta rule of fla-core for a step; it needs no arguments."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

    heads, num_tokens = spec.num_value_heads, num_seqs * num_new
    shape = (num_seqs, 1, heads) if num_new == 1 else (1, num_tokens, heads)
    q, k = (like.new_empty(*shape, spec.key_dim, dtype=dtype).normal_() for _ in range(2))
    v = like.new_empty(*shape, spec.value_dim, dtype=dtype).normal_()
    decay, beta = -torch.rand(shape, device=like.device), torch.rand(shape, device=like.device).to(dtype)
    options: dict[str, Any] = dict(output_final_state=True, use_qk_l2norm_in_kernel=True)
    options["initial_state"] = like.new_empty(num_seqs, heads, spec.key_dim, spec.value_dim).normal_()
    if num_new == 1:
        return lambda *_: fused_recurrent_gated_delta_rule(q, k, v, g=decay, beta=beta, **options)
    options["cu_seqlens"] = torch.arange(0, num_tokens + 1, num_new, device=like.device)
    return lambda *_: chunk_gated_delta_rule(q, k, v, g=decay, beta=beta, **options)


def measure(
    layer: Layer,
    *,
    dtype: torch.dtype,
    decodes: Sequence[int],
    prompts: Sequence[tuple[int, int]],
    in_graph: Callable[[Callable[[Any], Any], Sequence[Any]], float],
    one_by_one: Callable[[Callable[[], Any]], float],
    say: Callable[[str], None] = print,
) -> None:
    """`in_graph`: the time of a call of a function, given its arguments; `one_by_one`: of a function without any."""
    spec, state, device = layer.spec, layer.state, layer.state.device
    has_fla = importlib.util.find_spec("fla") is not None
    ways = {"kernels": layer.kernels, "torch": layer.plain}
    num_rows = len(state) - 1
    for count in decodes:
        parts = *inputs(spec, count, state, dtype), state
        calls = [
            sequences(1 + (call * count + np.arange(count)) % num_rows, 1, device, decodes=True)
            for call in range(max(2, min(MOST_CALLS, num_rows // count)))
        ]
        times = {name: in_graph(partial(way, *parts), calls) for name, way in ways.items()}
        if has_fla:
            times[FLA] = in_graph(fla_rule(spec, count, 1, state, dtype), calls)
        moved = 2 * count * state.shape[1] * state.itemsize
        for name, taken in times.items():
            say(f"decode {count:4} rows         {name:17} {taken * 1e6:10.1f} us {moved / taken / 1e9:7.0f} GB/s")
    for count, length in prompts:
        parts = *inputs(spec, count * length, state, dtype), state
        seqs = sequences(1 + np.arange(count), length, device, decodes=False)
        times = {name: one_by_one(partial(way, *parts, seqs)) for name, way in ways.items()}
        if has_fla:
            times[FLA] = one_by_one(fla_rule(spec, count, length, state, dtype))
        for name, taken in times.items():
            say(f"prompts {count:3} x {length:5} tokens {name:17} {taken * 1e6:10.1f} us")


@torch.inference_mode()
def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise SystemExit("needs a GPU")
    dtype = torch.bfloat16
    layer = make_layer(qwen3_5_9b(), torch.device("cuda"), dtype=dtype, num_rows=NUM_ROWS)
    measure(
        layer, dtype=dtype, decodes=DECODES, prompts=PROMPTS, in_graph=seconds_in_graph, one_by_one=seconds_of_calls
    )


if __name__ == "__main__":
    main()
