"""Which kernel runs a linear or a mixture of experts: one table, by weight format, number of rows, shape and device.

The first entry of the table that serves a case is taken. Bounds are those within which a kernel measured fastest on an
H200. The same table says for which batch sizes steps are recorded as graphs, which sizes a start runs once so that
their kernels are compiled, in which order kernels are compiled, and how the profiler names what it sees. No torch.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass

from nanovllm.kernels.linear.at_once_tile import at_once_tile
from nanovllm.kernels.linear.many_rows_tile import GROUP_ROWS, TILE_OUTPUTS, utilization

EIGHT_ROWS = 8  # an operand of the tensor cores
FEW_ROWS = 16
SOME_ROWS = 32
TENS_OF_ROWS = 64  # up to here our tiles beat cuBLAS for weights of any size, above only for small ones
HUNDREDS_OF_ROWS = 256
THOUSANDS_OF_ROWS = 2048  # from here on the tensor cores are the limit
TILE_ROWS = (16, 32, 64, 128, 256)  # numbers of rows up to which the tiled kernel has another tile
FP8_ROWS = (EIGHT_ROWS, 16, 32, 64, 128, 192, 256)  # and fp8_some_rows
WIDE_ROWS = (EIGHT_ROWS, *TILE_ROWS, 512)  # and packed_wide, which has one more up to THOUSANDS_OF_ROWS
EXPERT_ROWS = 4  # up to this many tokens, each (token, expert) pair reads its expert instead of being grouped

NARROW_INPUTS = 1024
WIDE_INPUTS = 2048  # from here on reading a weight takes the time, not starting to
WIDE_AT_ONCE = 4096  # for `packed_at_once`: smaller weights were not measured
ENOUGH_OUTPUTS = 5632  # enough for tiles on nearly every multiprocessor
MANY_OUTPUTS = 16384  # a vocabulary
LARGEST_DELTA_NET_HEAD = 128
LONGEST_INPUTS = 32768  # of a kernel whose loop over the inputs is unrolled

PACKED = ("int4_groups", "int8_groups", "fp8", "fp8_block", "mxfp4", "nvfp4")
FOUR_BITS = ("int4_groups", "mxfp4", "nvfp4")
INTEGERS = ("int4_groups", "int8_groups")
WIDE_FORMATS = ("int4_groups", "int8_groups", "mxfp4")
FP8 = ("fp8", "fp8_block")
LEAST_UTILIZATION = 0.86  # of `many_rows`, to be faster than cuBLAS and a kernel for the gate
LEAST_UTILIZATION_PLAIN = 0.9  # and to be faster than cuBLAS alone
MOST_COMPARED_ROWS = 4608  # up to here this was measured
SUMMED_GROUP = 128  # columns that have one scale: if as many or more, `packed_wide` scales the sums of their products
FP8_GROUP = 128  # columns that have one scale, or a multiple of it
SHORTEST_DISTANCE = 32  # between the pairs of a word, so that those of a thread have one scale
LONGEST_DISTANCE = 64


@dataclass(frozen=True)
class LinearCase:
    """Everything that decides which kernel runs a linear."""

    format: str  # of the weight
    rows: int
    outputs: int
    inputs: int
    half: bool  # activations have 16 bits
    bfloat16: bool
    bias: bool
    gated: bool  # silu(gate) * up of the result is wanted
    added: bool  # the result is added to a residual
    whole: bool  # no other rank adds to the result
    deterministic: bool
    gluon: bool  # kernels written in Gluon run on this device
    distance: int = 0  # between the pairs of a packed weight's words; 0 = its words have another order
    group: int = 0  # its columns that have one scale
    scale_rows: int = 1  # and its rows
    rounds_inputs: bool = False  # a packed weight's product rounds its inputs to fp8
    minimum: bool = False  # a packed weight's groups have a minimum


@dataclass(frozen=True)
class LinearKernel:
    name: str
    formats: tuple[str, ...] = ("dense",)
    min_rows: int = 1
    max_rows: int = sys.maxsize
    norm: bool = False  # computes the norm before the product itself
    gate: bool = False  # computes the activation itself
    add: bool = False  # adds to the residual itself
    splits: bool = False  # gives partial sums, which the next norm adds to the residual
    serves: Callable[[LinearCase], bool] = lambda case: True
    compiled_for: tuple[int, ...] = ()  # numbers of rows up to which it is compiled separately
    symbol: str | None = None  # of our kernel, as profilers show it


def _few_rows(case: LinearCase) -> bool:
    if not case.half or case.inputs % 8:  # a row must be made of whole 16 bytes
        return False
    if min(case.outputs, case.inputs) >= WIDE_INPUTS:
        return case.inputs <= WIDE_INPUTS and case.outputs < ENOUGH_OUTPUTS
    return case.gated or case.outputs < MANY_OUTPUTS


def _split_k(case: LinearCase) -> bool:
    most = TENS_OF_ROWS
    if case.outputs <= WIDE_INPUTS:
        most = HUNDREDS_OF_ROWS if case.outputs <= NARROW_INPUTS else HUNDREDS_OF_ROWS // 2
    return case.half and case.added and case.whole and case.rows <= most


def _tiled(case: LinearCase) -> bool:
    if case.format != "dense":  # cuBLAS would need the weight in 16 bits, written and read in every step
        return case.half
    most = HUNDREDS_OF_ROWS if case.inputs <= NARROW_INPUTS else TENS_OF_ROWS
    if not case.half or case.added or case.rows > most:
        return False
    fewest = 2 if case.outputs >= ENOUGH_OUTPUTS or case.gated else SOME_ROWS + 1
    return case.rows >= fewest and (case.gated or case.outputs < MANY_OUTPUTS)


def _many_rows(case: LinearCase) -> bool:
    if not case.gluon or not case.bfloat16 or case.bias or case.added:
        return False
    # whole tiles, and rows of the weight long enough to fill the pipeline
    if case.outputs % TILE_OUTPUTS or case.inputs % 64 or case.inputs < 192:
        return False
    if case.rows >= THOUSANDS_OF_ROWS and (case.gated or case.inputs <= WIDE_INPUTS):
        return True
    if case.rows > MOST_COMPARED_ROWS or (not case.gated and case.outputs >= MANY_OUTPUTS):
        return False
    least = LEAST_UTILIZATION if case.gated else LEAST_UTILIZATION_PLAIN
    return utilization(case.rows, case.outputs, case.inputs, gated=case.gated) >= least


def _packed_rows(case: LinearCase) -> bool:
    if case.format in FP8 and case.gated and case.rows > 1:  # `packed_tiled` is faster
        return False
    return case.half and case.distance >= SHORTEST_DISTANCE and case.inputs <= LONGEST_INPUTS


def _packed_tiles(case: LinearCase) -> bool:
    return case.half and case.distance > 0


def _wide_for_few_rows(case: LinearCase) -> bool:
    """Weights so large that `packed_wide` is faster than `packed_rows`, which needs no launch for the norm."""
    if min(case.outputs, case.inputs) < WIDE_INPUTS:
        return False
    large = max(case.outputs, case.inputs) >= ENOUGH_OUTPUTS
    return case.format == "int8_groups" or (case.format == "int4_groups" and case.group >= SUMMED_GROUP and large)


def _packed_at_once(case: LinearCase) -> bool:
    if not case.gluon or not case.half or case.deterministic or case.minimum or case.distance != LONGEST_DISTANCE:
        return False
    if case.format == "int8_groups":  # with more rows `packed_wide` is faster, groups were not measured
        served = case.rows == 1 and case.group == case.inputs
    else:
        served = case.group >= SUMMED_GROUP and (case.group == case.inputs or case.group.bit_count() == 1)
    if not served or min(case.outputs, case.inputs) < WIDE_AT_ONCE:
        return False
    bits = 4 if case.format in FOUR_BITS else 8
    return at_once_tile(case.outputs, case.inputs, bits, split=case.added and case.whole) is not None


def _packed_wide(case: LinearCase) -> bool:
    if not case.gluon or not case.half or case.deterministic or case.minimum:
        return False
    if case.rows <= EIGHT_ROWS and not _wide_for_few_rows(case):
        return False
    # with groups of 32 columns only tens of rows were measured
    return case.distance == LONGEST_DISTANCE or (case.distance == SHORTEST_DISTANCE and case.rows <= TENS_OF_ROWS)


def _packed_wide_split_k(case: LinearCase) -> bool:
    return _packed_wide(case) and case.added and case.whole


def _packed_tiled(case: LinearCase) -> bool:
    most = HUNDREDS_OF_ROWS // 2 if case.format in FOUR_BITS else HUNDREDS_OF_ROWS
    return _packed_tiles(case) and not case.deterministic and case.rows <= most


def _packed_dequantized(case: LinearCase) -> bool:
    return case.distance > 0 and not case.deterministic and (case.half or not case.rounds_inputs)


def _fp8_inputs(case: LinearCase) -> bool:
    whole_groups = case.distance > 0 and case.group % FP8_GROUP == 0
    return case.rounds_inputs and whole_groups and case.half and not case.deterministic


def _fp8(case: LinearCase) -> bool:
    most = HUNDREDS_OF_ROWS if case.gated else HUNDREDS_OF_ROWS // 2
    return _fp8_inputs(case) and FEW_ROWS < case.rows <= most


def _fp8_some_rows(case: LinearCase) -> bool:
    scales = case.group in (FP8_GROUP, case.inputs)
    large = case.rows > FEW_ROWS or min(case.outputs, case.inputs) >= WIDE_INPUTS
    return case.gluon and _fp8_inputs(case) and scales and large and case.outputs % 16 == 0


def _fp8_scaled_mm(case: LinearCase) -> bool:
    plain = case.bfloat16 and not case.bias and not case.gated
    return case.gluon and _fp8_inputs(case) and plain and case.outputs % 16 == 0


def _fp8_many_rows(case: LinearCase) -> bool:
    # one scale per row, or per block that holds whole tiles
    scales = case.format == "fp8" or (case.group == FP8_GROUP < case.inputs and case.scale_rows % 64 == 0)
    return case.gluon and _fp8_inputs(case) and scales and case.outputs % 128 == 0


# One row only reads the weight: norm, gate and residual cost nothing within the same kernel. For a few rows the kernels
# of a layer overlap, each fetching its weight before the one before it has ended. For tens of rows they are short, and
# few launches count. For thousands of rows the tensor cores are the limit.
LINEAR_KERNELS = (
    LinearKernel("deterministic", ("dense", "int8"), serves=lambda case: case.deterministic, symbol="_matmul_kernel"),
    LinearKernel("one_row", ("dense", "int8"), 1, 1, norm=True, gate=True, add=True, symbol="_one_row_kernel"),
    LinearKernel(
        "few_rows",
        min_rows=2,
        max_rows=FEW_ROWS,
        norm=True,
        gate=True,
        add=True,
        serves=lambda case: case.inputs < WIDE_INPUTS and _few_rows(case),
        compiled_for=(8, FEW_ROWS),
        symbol="_few_rows_kernel",
    ),
    LinearKernel(  # rows too long to be normalized in the same pass
        "few_rows",
        min_rows=2,
        max_rows=FEW_ROWS,
        add=True,
        serves=lambda case: case.inputs >= WIDE_INPUTS and not case.gated and _few_rows(case),
        compiled_for=(8, FEW_ROWS),
        symbol="_few_rows_kernel",
    ),
    LinearKernel(
        "split_k",
        ("dense", "int8"),
        min_rows=2,
        max_rows=HUNDREDS_OF_ROWS,
        add=True,
        splits=True,
        serves=_split_k,
        compiled_for=TILE_ROWS,
        symbol="_tiled_kernel",
    ),
    LinearKernel(
        "tiled",
        ("dense", "int8"),
        min_rows=2,
        max_rows=HUNDREDS_OF_ROWS,
        gate=True,
        serves=_tiled,
        compiled_for=TILE_ROWS,
        symbol="_tiled_kernel",
    ),
    LinearKernel("many_rows", min_rows=HUNDREDS_OF_ROWS + 1, gate=True, serves=_many_rows, symbol="_many_rows_kernel"),
    LinearKernel("dequantized", ("int8",), symbol="_dequantize_kernel"),  # to the model's dtype, then cuBLAS
    LinearKernel(  # cuBLAS adds a bias or a residual, not both: this one leaves the residual to the next norm
        "cublas_bias",
        add=True,
        splits=True,
        serves=lambda case: case.bias and case.added and case.whole,
    ),
    LinearKernel("cublas", add=True),
    LinearKernel(
        "packed_deterministic",
        PACKED,
        serves=lambda case: case.deterministic and _packed_tiles(case),
        symbol="_packed_tiled_kernel",
    ),
    LinearKernel(
        "packed_at_once_split_k",
        INTEGERS,
        max_rows=EIGHT_ROWS,
        add=True,
        splits=True,
        serves=lambda case: case.added and case.whole and _packed_at_once(case),
        compiled_for=(EIGHT_ROWS,),
        symbol="_packed_at_once_kernel",
    ),
    LinearKernel(
        "packed_at_once",
        INTEGERS,
        max_rows=EIGHT_ROWS,
        gate=True,
        serves=_packed_at_once,
        compiled_for=(EIGHT_ROWS,),
        symbol="_packed_at_once_kernel",
    ),
    LinearKernel(
        "packed_wide_split_k",
        WIDE_FORMATS,
        max_rows=HUNDREDS_OF_ROWS // 2,
        add=True,
        splits=True,
        serves=_packed_wide_split_k,
        compiled_for=WIDE_ROWS[:5],
        symbol="_packed_wide_kernel",
    ),
    LinearKernel(
        "packed_wide",
        WIDE_FORMATS,
        max_rows=THOUSANDS_OF_ROWS - 1,
        gate=True,
        serves=_packed_wide,
        compiled_for=WIDE_ROWS,
        symbol="_packed_wide_kernel",
    ),
    LinearKernel(
        "fp8_some_rows_split_k",
        FP8,
        max_rows=HUNDREDS_OF_ROWS,
        add=True,
        splits=True,
        serves=lambda case: case.added and case.whole and _fp8_some_rows(case),
        compiled_for=FP8_ROWS,
        symbol="_fp8_some_rows_kernel",
    ),
    LinearKernel(
        "fp8_some_rows",
        FP8,
        max_rows=HUNDREDS_OF_ROWS,
        norm=True,
        gate=True,
        serves=_fp8_some_rows,
        compiled_for=FP8_ROWS,
        symbol="_fp8_some_rows_kernel",
    ),
    LinearKernel(
        "packed_rows",
        PACKED,
        max_rows=FEW_ROWS,
        norm=True,
        gate=True,
        add=True,
        serves=lambda case: not case.deterministic and _packed_rows(case),
        compiled_for=(1, 2, 8, FEW_ROWS),
        symbol="_packed_rows_kernel",
    ),
    LinearKernel(  # torch's; the next norm adds the result to the residual in the pass that rounds its own
        "fp8_scaled_mm_sum",
        ("fp8",),
        min_rows=HUNDREDS_OF_ROWS + 1,
        add=True,
        splits=True,
        serves=lambda case: case.added and case.whole and _fp8_scaled_mm(case),
    ),
    LinearKernel("fp8_scaled_mm", ("fp8",), min_rows=HUNDREDS_OF_ROWS + 1, norm=True, serves=_fp8_scaled_mm),
    LinearKernel(
        "fp8_many_rows_sum",
        FP8,
        min_rows=HUNDREDS_OF_ROWS + 1,
        add=True,
        splits=True,
        serves=lambda case: case.added and case.whole and _fp8_many_rows(case),
        symbol="_fp8_many_rows_kernel",
    ),
    LinearKernel(
        "fp8_many_rows",
        FP8,
        min_rows=HUNDREDS_OF_ROWS + 1,
        norm=True,
        gate=True,
        serves=_fp8_many_rows,
        symbol="_fp8_many_rows_kernel",
    ),
    LinearKernel(
        "fp8_split_k",
        FP8,
        max_rows=HUNDREDS_OF_ROWS,
        add=True,
        splits=True,
        serves=lambda case: _fp8(case) and _split_k(case),
        compiled_for=TILE_ROWS,
        symbol="_fp8_kernel",
    ),
    LinearKernel("fp8", FP8, gate=True, serves=_fp8, compiled_for=TILE_ROWS, symbol="_fp8_kernel"),
    LinearKernel(
        "packed_split_k",
        PACKED,
        max_rows=HUNDREDS_OF_ROWS,
        add=True,
        splits=True,
        serves=lambda case: not case.deterministic and case.distance > 0 and _split_k(case),
        compiled_for=TILE_ROWS,
        symbol="_packed_tiled_kernel",
    ),
    LinearKernel(
        "packed_tiled",
        PACKED,
        max_rows=HUNDREDS_OF_ROWS,
        gate=True,
        serves=_packed_tiled,
        compiled_for=TILE_ROWS,
        symbol="_packed_tiled_kernel",
    ),
    LinearKernel(  # to the model's dtype, then as a dense weight
        "packed_many_rows",
        PACKED,
        min_rows=HUNDREDS_OF_ROWS + 1,
        gate=True,
        serves=lambda case: _packed_dequantized(case) and _many_rows(case),
        symbol="_packed_dequantize_kernel",
    ),
    LinearKernel(
        "packed_dequantized",
        PACKED,
        add=True,
        serves=_packed_dequantized,
        symbol="_packed_dequantize_kernel",
    ),
)


def select_linear(case: LinearCase) -> LinearKernel | None:
    """None for a format without kernels, such as one that somebody adds: its own product on torch is used."""
    for kernel in LINEAR_KERNELS:
        in_range = kernel.min_rows <= case.rows <= kernel.max_rows
        if case.format in kernel.formats and in_range and kernel.serves(case):
            return kernel
    return None


def joins_layers(*linears: LinearCase) -> bool:
    """Whether `packed_layer` may compute o, gate and up, down, and q, k and v, if it serves their sizes."""
    int4 = all(one.format == "int4_groups" and one.group == SUMMED_GROUP and _packed_at_once(one) for one in linears)
    return int4 and all(one.bfloat16 and one.whole and not one.bias and one.rows <= EIGHT_ROWS for one in linears)


def delta_net_serves(key_dim: int, value_dim: int) -> bool:
    """Whether our kernels compute a gated delta net with heads of these sizes, whose states they keep in registers."""
    return max(key_dim, value_dim) <= LARGEST_DELTA_NET_HEAD


def latent_on_hopper(latent_size: int, rotated_size: int, *, half: bool, gluon: bool) -> bool:
    """Whether the kernel for Hopper attends to a cache of latents (MLA): it has the sizes of DeepSeek's models."""
    return gluon and half and (latent_size, rotated_size) == (512, 64)


def row_class(rows: int) -> int:
    """A number of rows for which the table chooses alike: so few numbers that a choice can be kept for each."""
    if rows <= HUNDREDS_OF_ROWS:
        return rows
    rounded = -(-rows // GROUP_ROWS) * GROUP_ROWS
    return min(rounded, THOUSANDS_OF_ROWS - 1 if rows < THOUSANDS_OF_ROWS else MOST_COMPARED_ROWS + 1)


# --- what else depends on the table -----------------------------------------------------------------------------------


def compiled_sizes() -> list[int]:
    """Numbers of rows for which a decode step launches kernels of its own."""
    return sorted({1, *(rows for kernel in LINEAR_KERNELS for rows in kernel.compiled_for)})


def warm_up_sizes(max_num_tokens: int) -> list[int]:
    """Step sizes, in tokens, that a start runs once: the largest, the largest in which gate and linear are separate
    kernels, one just below the kernels for thousands of rows, and one in which gate and linear of dense weights are
    separate kernels, because they do not fill the tiles of `many_rows`."""
    sizes = [max_num_tokens, 2 * THOUSANDS_OF_ROWS, THOUSANDS_OF_ROWS - 1, HUNDREDS_OF_ROWS + 1]
    return list(dict.fromkeys(min(size, max_num_tokens) for size in sizes))


def graph_sizes(largest: int) -> list[int]:
    """The batch sizes that get a graph of their own; a batch runs in the next larger one."""
    sizes = [1, 2, 4, 8, *range(16, 128, 8), *range(128, 512, 16), *range(512, largest, 64)]
    return [size for size in sizes if size < largest] + [largest]


# What takes longest to compile, longest first: begun last, all would wait for it.
SLOW_TO_COMPILE = (
    "_long_prefill_kernel",
    "_many_rows_kernel",
    "_fp8_many_rows_kernel",
    "_fp8_some_rows_kernel",
    "_fp8_experts_kernel",
    "_small_batch_attention_kernel",
    "_decode_kernel",
    "_cut_kernel",
    "_packed_wide_kernel",
    "_packed_layer_kernel",
    "_packed_at_once_kernel",
    "_packed_wide_experts_kernel",
    "_latent_decode_hopper_kernel",
    "_packed_expert_rows_kernel",
    "_packed_rows_kernel",
    "_packed_tiled_kernel",
    "_few_rows_kernel",
    "_tiled_kernel",
    "_chunk_factors_kernel",
    "_chunk_states_kernel",
)


def linear_symbols() -> list[str]:
    """The names of our linear and expert kernels in a profile, and of those that project for latent attention."""
    experts = {"_experts_kernel", "_fp8_experts_kernel", "_packed_experts_kernel", "_row_kernel"}
    experts |= {"_packed_expert_rows_kernel", "_packed_wide_experts_kernel"}
    experts |= {"_route_rows_kernel", "_route_tokens_kernel"}
    others = {"_absorb_kernel", "_project_kernel", "_packed_layer_kernel"}
    return sorted({kernel.symbol for kernel in LINEAR_KERNELS if kernel.symbol} | experts | others)
