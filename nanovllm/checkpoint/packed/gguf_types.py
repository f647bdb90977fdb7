"""The types of tensors in GGUF files whose blocks stay packed, and the form that each has in memory. No torch."""

from collections.abc import Iterable

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


def packing_of(types: Iterable[tuple[str, str]]) -> Packing:
    """`types`: the Hugging Face names of a file's tensors, and their types. Tensors of other types are unpacked.

    The experts of a layer are one tensor, maybe gate and up in one; the first one's module stands for all.
    """
    stacks = ((name.replace(".experts.", ".experts.0.").removesuffix(".weight"), kind) for name, kind in types)
    modules = ((module, kind) for stack, kind in stacks for module in _modules_of(stack))
    return Packing("gguf", modules=tuple((module, ALL_FORMS[kind]) for module, kind in modules if kind in ALL_FORMS))


def _modules_of(stack: str) -> tuple[str, ...]:
    both = stack.endswith(".experts.0.gate_up_proj")
    return tuple(stack.replace("gate_up", part) for part in ("gate", "up")) if both else (stack,)
