"""The kernels for packed weights by tile shape: which is fastest for each product of a model and each number of rows.

Every product is timed as a layer runs it (with the norm before qkv and gate_up up to 16 rows, the gate, the residual),
in a CUDA graph over copies of the weight that are together larger than the L2 cache. For each case it prints the time,
the bytes of the weight per second and the products per second of the fastest tile, of the one that the kernels choose
now (marked with *), and of the 16-bit weight with cuBLAS. Kernels are compiled first, by all cores.

    python -m nanovllm.bench.packed_kernels --formats int4 fp8_block --rows 1 8 64
"""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.kernels.features import gluon_usable
from nanovllm.kernels.linear.at_once_tile import MOST_BYTES, AtOnceTile, at_once_tile
from nanovllm.kernels.linear.fp8_inputs import fp8_linear, fp8_split_k_linear, fp8_tile, scaled_mm_linear
from nanovllm.kernels.linear.packed import PackedWords
from nanovllm.kernels.linear.packed_dequantize import packed_dequantize
from nanovllm.kernels.linear.packed_rows import RowTile, packed_rows_linear, row_tile
from nanovllm.kernels.linear.packed_tiled import PackedTile, packed_split_k_linear, packed_tile, packed_tiled_linear
from nanovllm.kernels.linear.tiled import num_sms
from nanovllm.kernels.linear.wide_tile import MAX_SPLITS, MICROSECONDS, wide_tile
from nanovllm.kernels.select import LinearCase, select_linear

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 8192)
FORMATS = ("int4", "int8", "fp8", "fp8_block", "mxfp4")
MOST_AT_ONCE_ROWS, MOST_ROW_ROWS, MOST_TILED_ROWS, MOST_SPLIT_ROWS = 8, 16, 256, 64
MOST_WIDE_ROWS, MOST_WIDE_SPLIT_ROWS = 2048, 128
COPIED_BYTES = 1 << 28  # of the copies of a weight: several times the L2 cache

AT_ONCE_TILES = tuple(
    AtOnceTile(*shape, programs)
    for shape in ((1, 4, 1), (1, 8, 1), (2, 4, 1), (2, 8, 1), (1, 4, 2), (2, 4, 4), (4, 4, 4), (2, 8, 2), (4, 4, 6))
    for programs in (2, 3, 4)
)
ROW_TILES = (RowTile(1, 4, 2), RowTile(1, 4, 4), RowTile(1, 8, 2), RowTile(2, 4, 1), RowTile(2, 4, 2), RowTile(2, 8, 2))
TILES = (
    PackedTile(16, 64),
    PackedTile(16, 128, num_warps=8),
    PackedTile(32, 64),
    PackedTile(32, 128, num_warps=8),
    PackedTile(64, 64),
    PackedTile(64, 128, num_warps=8),
    PackedTile(128, 64),
    PackedTile(128, 128, num_warps=8, most_stages=4),
)


@dataclass(frozen=True)
class Shape:
    name: str
    outputs: int
    inputs: int
    normed: bool = False
    gated: bool = False
    added: bool = False


QWEN3_8B = (
    Shape("qkv", 6144, 4096, normed=True),
    Shape("o", 4096, 4096, added=True),
    Shape("gate_up", 24576, 4096, normed=True, gated=True),
    Shape("down", 4096, 12288, added=True),
)


@dataclass(frozen=True)
class Candidate:
    name: str
    run: Callable[[Any], Tensor]  # of a weight
    chosen: bool  # the kernels' own choice


def random_weight(form: str, n: int, k: int, device: torch.device) -> PackedWords:
    bits = 4 if form in ("int4", "mxfp4") else 8
    words = torch.randint(-(2**31), 2**31 - 1, (n, k * bits // 32), dtype=torch.int32, device=device)
    if form.startswith("fp8"):
        words &= 0x3F3F3F3F  # no NaN
    group = {"int4": 128, "int8": 128, "fp8": k, "fp8_block": 128, "mxfp4": 32}[form]
    rows = 128 if form == "fp8_block" else 1
    scale_type = {"mxfp4": torch.uint8, "int4": torch.float16, "int8": torch.float16}.get(form, torch.float32)
    scale = torch.full((-(-n // rows), k // group), 100 if form == "mxfp4" else 2**-10, device=device).to(scale_type)
    zero = torch.full((n, k // group), 8, dtype=torch.uint8, device=device) if form == "int4" else None
    kind = {"mxfp4": "fp4", "fp8_block": "fp8"}.get(form, form)
    return PackedWords(kind, min(64, group), words, scale, rows, zero, rounds_inputs=kind == "fp8")


def num_bytes(weight: PackedWords) -> int:
    return sum(one.nbytes for one in weight.pointers if one is not None)


def candidates(shape: Shape, weight: PackedWords, x: Tensor) -> Iterator[Candidate]:
    m = x.shape[0]
    width = shape.outputs // 2 if shape.gated else shape.outputs
    residual = torch.zeros(m, width, dtype=x.dtype, device=x.device) if shape.added else None
    norm = torch.ones(shape.inputs, dtype=x.dtype, device=x.device) if shape.normed else None
    pdl = x.device.type == "cuda"
    near = [tile for tile in TILES if m / 4 <= tile.block_m < 2 * max(m, 16) or (m > 128 and tile.block_m == 128)]
    own = chosen_kernel(shape, weight, m)

    def tiled(name: str, kernels: Sequence[str], linear: Any, split_k: Any, best: PackedTile) -> Iterator[Candidate]:
        for tile in dict.fromkeys((best, *near)):
            label, chosen = f"{name} {tile.block_m}x{tile.block_n} {tile.num_warps} warps", tile == best
            if shape.added and m <= MOST_SPLIT_ROWS:
                run = partial(split_k, x, pdl=pdl, tile=tile)
                yield Candidate(f"{label}, split K", run, chosen and own in kernels)
            else:
                yield Candidate(
                    label, partial(linear, x, gated=shape.gated, pdl=pdl, tile=tile), chosen and own in kernels
                )

    if m <= MOST_ROW_ROWS:
        options: dict[str, Any] = {"norm_weight": norm, "eps": 1e-6, "residual": residual, "gated": shape.gated}
        best = row_tile(m, shape.outputs, shape.inputs, weight.bits, weight.scale.shape[-1])
        for tile in dict.fromkeys((best, *ROW_TILES)):
            label = f"rows {16 * tile.sixteens} {tile.num_warps} warps {tile.num_ahead} ahead"
            run = partial(packed_rows_linear, x, pdl=pdl, tile=tile, **options)
            yield Candidate(label, run, tile == best and own == "packed_rows")
    if m <= MOST_AT_ONCE_ROWS and gluon_usable() and weight.kind in ("int4", "int8"):
        yield from at_once(shape, weight, x, chosen=own.startswith("packed_at_once"))
    if m <= MOST_TILED_ROWS:
        names, tile_of = ("packed_tiled", "packed_split_k"), packed_tile(m, shape.outputs, weight.bits)
        yield from tiled("tiled", names, packed_tiled_linear, packed_split_k_linear, tile_of)
    if m <= MOST_WIDE_ROWS and gluon_usable() and weight.minimum is None:
        yield from wide(shape, weight, x, chosen=own.startswith("packed_wide"))
    if m > MOST_ROW_ROWS and weight.rounds_inputs:
        names, tile_of = ("fp8", "fp8_split_k"), fp8_tile(m, shape.outputs)
        yield from tiled("fp8", names, fp8_linear, fp8_split_k_linear, tile_of)
        if weight.scale.shape[-1] == 1 and not shape.gated:
            yield Candidate("torch._scaled_mm", partial(scaled_mm_linear, x), own.startswith("fp8_scaled_mm"))
    if weight.rounds_inputs and gluon_usable():
        yield from fp8_on_hopper(shape, weight, x, own)
    if m > MOST_SPLIT_ROWS:
        yield Candidate("unpacked, cuBLAS", partial(_unpacked, x, pdl=pdl), own == "packed_dequantized")


def at_once(shape: Shape, weight: PackedWords, x: Tensor, *, chosen: bool) -> Iterator[Candidate]:
    from nanovllm.kernels.linear.packed_at_once import packed_at_once_linear, packed_at_once_split_k_linear

    best = at_once_tile(shape.outputs, shape.inputs, weight.bits, split=shape.added)
    for tile in dict.fromkeys((best, *AT_ONCE_TILES)):
        fits = tile is not None and tile.divides(shape.inputs, weight.bits) and (shape.added or tile.splits == 1)
        if tile is None or not fits or tile.num_bytes(shape.inputs, weight.bits) > MOST_BYTES:
            continue
        label = f"at once {16 * tile.sixteens} {tile.num_warps} warps, {tile.programs} programs"
        if shape.added:
            run = partial(packed_at_once_split_k_linear, x, pdl=True, tile=tile)
            yield Candidate(f"{label}, split K {tile.splits}", run, chosen and tile == best)
        else:
            run = partial(packed_at_once_linear, x, gated=shape.gated, pdl=True, tile=tile)
            yield Candidate(label, run, chosen and tile == best)


def wide(shape: Shape, weight: PackedWords, x: Tensor, *, chosen: bool) -> Iterator[Candidate]:
    from nanovllm.kernels.linear.packed_wide import packed_wide_linear, packed_wide_split_k_linear

    m, split = x.shape[0], shape.added and x.shape[0] <= MOST_WIDE_SPLIT_ROWS
    options: dict[str, Any] = {"most_splits": MAX_SPLITS if split else 1, "num_sms": num_sms()}
    best = wide_tile(m, shape.outputs, shape.inputs, **options)
    near = [tile for tile in MICROSECONDS if min(m / 4, 128) <= tile.block_m < 2 * max(m, 16)]
    for tile, splits in dict.fromkeys((best, *((tile, n) for tile in near for n in ((1, 2, 4) if split else (1,))))):
        label = f"wide {tile.block_m}x{tile.rows}, {tile.k_parts} K parts"
        if split:
            run = partial(packed_wide_split_k_linear, x, pdl=True, tile=tile, splits=splits)
            yield Candidate(f"{label}, split K {splits}", run, chosen and (tile, splits) == best)
        else:
            run = partial(packed_wide_linear, x, gated=shape.gated, pdl=True, tile=tile)
            yield Candidate(label, run, chosen and (tile, splits) == best)


def fp8_on_hopper(shape: Shape, weight: PackedWords, x: Tensor, own: str) -> Iterator[Candidate]:
    from nanovllm.kernels.linear.fp8_many_rows import fp8_many_rows_linear
    from nanovllm.kernels.linear.fp8_some_rows import (
        FP8_TILES,
        fp8_some_rows_linear,
        fp8_some_rows_split_k_linear,
        some_rows_tile,
    )

    m, blocked = x.shape[0], weight.scale.shape[-1] > 1
    if m <= MOST_TILED_ROWS:
        best = some_rows_tile(m, shape.outputs, shape.inputs, split=shape.added, blocked=blocked)
        for tile in dict.fromkeys((best, *FP8_TILES)):
            if not best.x_rows / 2 <= tile.x_rows <= 2 * best.x_rows or (tile.splits > 1) != (best.splits > 1):
                continue
            if blocked and tile.x_rows != tile.piece:
                continue
            label = f"Hopper {tile.x_rows}x{64 * tile.groups}" + (f", {tile.splits} splits" if shape.added else "")
            chosen = tile == best and own in ("fp8_some_rows", "fp8_some_rows_split_k")
            if shape.added:
                yield Candidate(label, partial(fp8_some_rows_split_k_linear, x, pdl=True, tile=tile), chosen)
            else:
                yield Candidate(label, partial(fp8_some_rows_linear, x, gated=shape.gated, pdl=True, tile=tile), chosen)
    else:
        run = partial(fp8_many_rows_linear, x, gated=shape.gated)
        yield Candidate("Hopper, many rows", run, own.startswith("fp8_many_rows"))


def chosen_kernel(shape: Shape, weight: PackedWords, rows: int) -> str:
    """What the engine runs."""
    fp8 = "fp8" if weight.scale_rows == 1 else "fp8_block"
    kernel = select_linear(
        LinearCase(
            format={"int4": "int4_groups", "int8": "int8_groups", "fp4": "mxfp4", "fp8": fp8}[weight.kind],
            rows=rows,
            outputs=shape.outputs,
            inputs=shape.inputs,
            half=True,
            bfloat16=True,
            bias=False,
            gated=shape.gated,
            added=shape.added,
            whole=True,
            deterministic=False,
            gluon=gluon_usable(),
            distance=weight.distance,
            group=shape.inputs // weight.scale.shape[-1],
            scale_rows=weight.scale_rows,
            rounds_inputs=weight.rounds_inputs,
            minimum=weight.minimum is not None,
        )
    )
    assert kernel is not None
    return kernel.name


def _unpacked(x: Tensor, weight: PackedWords, *, pdl: bool) -> Tensor:
    return F.linear(x, packed_dequantize(weight, x.dtype, pdl=pdl))


def seconds_in_graph(run: Callable[[Any], Tensor], weights: Sequence[Any], *, repeats: int = 5) -> float:
    """The median time of one call, from a CUDA graph that calls `run` once for each weight."""
    for weight in weights[:2]:
        run(weight)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            run(weight)
    graph.replay()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000 / len(weights))
    return sorted(times)[repeats // 2]


def copies(weight: PackedWords, rows: int) -> list[PackedWords]:
    count = 2 if rows > MOST_TILED_ROWS else max(2, COPIED_BYTES // num_bytes(weight))
    clones = [weight._replace(words=weight.words.clone(), scale=weight.scale.clone()) for _ in range(count - 1)]
    return [weight, *clones]


def inputs(shape: Shape, m: int, device: torch.device) -> Tensor:
    return torch.randn(m, shape.inputs, device=device).bfloat16()


def compile_all(shapes: Sequence[Shape], formats: Sequence[str], rows: Sequence[int], device: torch.device) -> None:
    from nanovllm.kernels.compile_ahead import compile_ahead

    def launches() -> None:
        for form in formats:
            for shape in shapes:
                weight = random_weight(form, shape.outputs, shape.inputs, device)
                for m in rows:
                    for one in candidates(shape, weight, inputs(shape, m, device)):
                        if one.name not in ("unpacked, cuBLAS", "torch._scaled_mm"):
                            one.run(weight)

    with compile_ahead(launches) as wait:
        wait()


def measure(
    shapes: Sequence[Shape],
    formats: Sequence[str],
    rows: Sequence[int],
    device: torch.device,
    timer: Callable[[Callable[[Any], Tensor], Sequence[Any]], float],
    *,
    until: float,
    say: Callable[[str], None] = print,
) -> None:
    """`timer`: of a function of one weight, and the weights to call it with. Stops at the time `until`."""
    for form in formats:
        for shape in shapes:
            first = random_weight(form, shape.outputs, shape.inputs, device)
            for m in rows:
                if time.monotonic() > until:
                    say(f"time is used up: {form} {shape.name} {m} rows and what follows were not measured")
                    return
                x, weights = inputs(shape, m, device), copies(first, m)
                found = [(timer(one.run, weights), one) for one in candidates(shape, first, x)]
                dense = [torch.empty(shape.outputs, shape.inputs, dtype=x.dtype, device=device) for _ in range(4)]
                lines = [(*min(found, key=lambda pair: pair[0]), num_bytes(first))]
                lines += [(*pair, num_bytes(first)) for pair in found if pair[1].chosen and pair != lines[0][:2]]
                cublas = Candidate("16 bits, cuBLAS", partial(F.linear, x), False)
                for taken, one, read in [*lines, (timer(cublas.run, dense), cublas, dense[0].nbytes)]:
                    per_second = 2 * m * shape.outputs * shape.inputs / taken / 1e12
                    say(
                        f"{form:9} {shape.name:8} {m:5} rows  {taken * 1e6:9.1f} us {read / taken / 1e9:7.0f} GB/s "
                        f"{per_second:7.1f} TFLOP/s  {one.name}{' *' if one.chosen else ''}"
                    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=["int4", "fp8_block"])
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--seconds", type=float, default=230.0, help="no new case is begun after this time")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise SystemExit("needs a GPU")
    until, device = time.monotonic() + options.seconds, torch.device("cuda")
    compile_all(QWEN3_8B, options.formats, options.rows, device)
    print(f"compiled, {until - time.monotonic():.0f} s are left")
    measure(QWEN3_8B, options.formats, options.rows, device, seconds_in_graph, until=until)


if __name__ == "__main__":
    main()
