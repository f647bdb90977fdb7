"""The format of each weight of a quantized checkpoint."""

import math
from dataclasses import replace

from nanovllm.errors import CheckpointError
from nanovllm.layers.spec import Weight
from nanovllm.weights.dense import DenseFormat
from nanovllm.weights.format import WeightFormat
from nanovllm.weights.forms import HEAD, INT4, Form, Fp4Form, Fp8Form, GroupForm, Int8Form, Packing


def made_while_loading(quantization: str) -> Packing:
    """fp8 with a scale per row, or 4 bits with a scale and a zero for each 128 columns; the head in 8-bit integers."""
    return Packing(quantization, ((r"^lm_head$", HEAD), ("", Fp8Form() if quantization == "fp8" else INT4)))


def packed_format(packing: Packing, prefix: str, weight: Weight, num_ranks: int, *, quantizes: bool) -> WeightFormat:
    """`quantizes`: the format converts dense tensors as well; otherwise it refuses them."""
    if not weight.packable:
        return DenseFormat()
    modules = [(prefix + name.format(0)).removesuffix(".weight") for name in weight.names]
    forms = [packing.form_of(module) for module in modules]  # that of the first expert is that of all
    ordered = any(isinstance(form, GroupForm) and form.ordered for form in forms)  # each part in its own order
    if len(set(forms)) == 1 and (len(set(modules)) == 1 or not ordered):
        return _make(forms[0], weight, num_ranks, quantizes)
    from nanovllm.weights.stacked import StackedFormat

    parts = [replace(weight, names=(name,), rows=(rows,)) for name, rows in zip(weight.names, weight.rows, strict=True)]
    formats = tuple(_make(form, part, num_ranks, quantizes) for form, part in zip(forms, parts, strict=True))
    return StackedFormat(formats, tuple(part.shard_shape(0, num_ranks)[-2] for part in parts))


def _make(form: Form | None, weight: Weight, num_ranks: int, quantizes: bool) -> WeightFormat:
    if form is None:
        return DenseFormat()
    if isinstance(form, Int8Form):
        from nanovllm.weights.int8_inputs import Int8InputsFormat

        return Int8InputsFormat(form, quantizes=quantizes)
    rows, columns = part_starts(weight, num_ranks)
    if isinstance(form, Fp8Form):
        from nanovllm.weights.fp8 import Fp8Format

        return Fp8Format(form, starts=(rows, columns), quantizes=quantizes)
    assert weight.columns is not None
    num_columns = weight.columns.size
    if isinstance(form, Fp4Form):
        from nanovllm.weights.fp4 import Fp4Format

        _check_groups(weight, num_ranks, form.group_size, form.group_in(columns), bits=4)
        return Fp4Format(form, start=columns, quantizes=quantizes)
    from nanovllm.weights.groups import GroupFormat

    if quantizes:
        form = form.dividing(num_columns)
    _check_groups(weight, num_ranks, form.group_size, form.sizes_in(num_columns, columns)[0], bits=form.bits)
    return GroupFormat(form, columns=num_columns, start=columns, quantizes=quantizes)


def _check_groups(weight: Weight, num_ranks: int, stored: int, held: int, *, bits: int) -> None:
    """`stored`, `held`: columns of a group in the checkpoint, and of one that the ranks' parts do not cut."""
    assert weight.columns is not None
    if (stored and weight.columns.size % stored) or held * bits % 8:
        raise CheckpointError(
            f"{weight.names[0]}: groups of {stored} columns with {bits} bits do not divide {weight.columns.size} "
            f"columns on {num_ranks} ranks"
        )


def part_starts(weight: Weight, num_ranks: int) -> tuple[int, int]:
    """The largest numbers of rows and columns that divide where the ranks' parts begin, in the checkpoint's tensors and
    in memory; 0 where all begin at 0."""
    rows = columns = 0
    one = replace(weight, num_experts=0)
    for rank in range(num_ranks):
        for part in one.parts(rank, num_ranks):
            (here,) = part.index
            assert isinstance(here, slice)
            read_rows, read_columns = (*part.part, slice(0), slice(0))[:2]
            rows = math.gcd(rows, here.start, read_rows.start or 0)
            columns = math.gcd(columns, read_columns.start or 0)
    return rows, columns
