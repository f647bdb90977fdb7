"""Put the tensors that a quantized checkpoint keeps for one weight (numbers, scales, zeros) together as one tensor."""

import re
from collections.abc import Iterable, Iterator

from nanovllm.checkpoint.packed import groups
from nanovllm.checkpoint.packed.fp8 import Fp8Tensor
from nanovllm.checkpoint.stored import Stored
from nanovllm.errors import CheckpointError
from nanovllm.weights.forms import Form, GroupForm, Packing

# Scales of activations and of the KV cache, which are computed here for every token
UNUSED = re.compile(r"\.(input_scale|input_zero_point|input_global_scale|output_scale|[qkv]_scale)$")
FP8_SCALES = ("weight_scale_inv", "weight_scale")


def packed_tensors(
    tensors: Iterable[tuple[str, Stored]], packing: Packing, *, source: str
) -> Iterator[tuple[str, Stored]]:
    """(name, tensor) with a module's packed weight as one tensor, under the name of the unpacked weight."""
    modules: dict[str, dict[str, Stored]] = {}
    for name, tensor in tensors:
        module, _, own = name.rpartition(".")
        if modules.setdefault(module, {}).setdefault(own, tensor) is not tensor:
            raise CheckpointError(f"{source}: {name} occurs twice")
    for module, found in modules.items():
        try:
            weight = _packed_weight(found, packing.layout, packing.form_of(module) or packing.forms[0])
        except ValueError as error:
            raise CheckpointError(f"{source}: {module}: {error}") from error
        if weight is not None:
            yield f"{module}.weight", weight
        for own, tensor in found.items():
            if not UNUSED.search(f".{own}"):
                yield f"{module}.{own}", tensor


def _packed_weight(found: dict[str, Stored], layout: str, form: Form) -> Stored | None:
    """Takes the tensors of a packed weight out of `found`, a module's tensors; None if it has no packed weight."""
    if isinstance(form, GroupForm):
        if "qweight" in found:
            if layout == "awq":
                return groups.awq(found, form)
            return groups.gptq(found, form, zeros_less_one=layout == "gptq")
        return groups.compressed(found, form) if "weight_packed" in found else None
    for name in FP8_SCALES:
        if "weight" in found and name in found:
            return Fp8Tensor(found.pop("weight"), found.pop(name), form.block)
    return None
