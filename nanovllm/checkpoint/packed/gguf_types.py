"""The types of tensors in GGUF files whose blocks stay packed, and the form that each has in memory. No torch."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

from nanovllm.weights.forms import Form, Fp4Form, GroupForm, Packing

FORMS = {
    "Q4_0": GroupForm(4, 32),
    "Q4_1": GroupForm(4, 32, minimum=True),
    "Q5_0": GroupForm(8, 32),
    "Q5_1": GroupForm(8, 32, minimum=True),
    "Q8_0": GroupForm(8, 32),
    "Q4_K": GroupForm(4, 32, minimum=True, scale_dtype="uint8", unit_size=256),
    "Q5_K": GroupForm(8, 32, minimum=True, scale_dtype="uint8", unit_size=256),
    "Q6_K": GroupForm(8, 16, scale_dtype="int8", unit_size=256),
}
ALL_FORMS: dict[str, Form] = {**FORMS, "MXFP4": Fp4Form(32)}


def packing_of(types: Iterable[tuple[str, str]], column_blocks: Mapping[str, int]) -> Packing:
    """`types`: the Hugging Face names of a file's tensors, and their types. Tensors of other types are unpacked.

    The experts of a layer are one tensor, maybe gate and up in one; the first one's module stands for all.
    `column_blocks`: of tensors whose names end so, how many neighbouring columns keep their order.
    """
    found: list[tuple[str, Form]] = []
    for name, kind in types:
        size = next((size for ending, size in column_blocks.items() if name.endswith(ending)), 0)
        form = in_blocks(ALL_FORMS.get(kind), size) if size else ALL_FORMS.get(kind)
        if form is not None:
            stack = name.replace(".experts.", ".experts.0.").removesuffix(".weight")
            found += ((module, form) for module in _modules_of(stack))
    return Packing("gguf", modules=tuple(found))


def in_blocks(form: Form | None, size: int) -> GroupForm | None:
    """The form of a matrix of which each `size` neighbouring columns move together; None = it cannot stay packed."""
    if not isinstance(form, GroupForm) or size % form.group_size:
        return None
    return replace(form, unit_size=math.gcd(form.unit_size, size)) if form.unit_size else form


def _modules_of(stack: str) -> tuple[str, ...]:
    both = stack.endswith(".experts.0.gate_up_proj")
    return tuple(stack.replace("gate_up", part) for part in ("gate", "up")) if both else (stack,)
