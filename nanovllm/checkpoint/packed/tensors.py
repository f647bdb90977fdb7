"""Put the tensors that a quantized checkpoint keeps for one weight (numbers, scales, zeros) together as one tensor."""

import re
from collections.abc import Callable, Iterable, Iterator

from nanovllm.checkpoint.packed import fp4, groups, nf4
from nanovllm.checkpoint.packed.fp8 import Fp8Tensor
from nanovllm.checkpoint.packed.int8 import Int8Tensor
from nanovllm.checkpoint.packed.tensor import taken
from nanovllm.checkpoint.stored import Stored
from nanovllm.errors import CheckpointError
from nanovllm.utils.logging import get_logger
from nanovllm.weights.forms import Form, Fp4Form, Fp8Form, GroupForm, Int8Form, Packing

# Scales of activations and of the KV cache, which are computed here for every token
UNUSED = re.compile(
    r"\.(input_scale|activation_scale|input_zero_point|input_global_scale|output_scale|([qkv]|kv)_scale)$"
)
SCALES = ("weight_scale_inv", "weight_scale")


def packed_tensors(
    tensors: Iterable[tuple[str, Stored]], packing: Packing, *, source: str, is_known: Callable[[str], bool]
) -> Iterator[tuple[str, Stored]]:
    """(name, tensor) with a module's packed weight as one tensor, under the name of the unpacked weight.

    `is_known`: whether the model has a tensor of this name. GPTQ files may have biases of zeros that it does not have.
    """
    if packing.layout == "bitsandbytes":
        get_logger(__name__).warning(
            f"{source}: bitsandbytes' 4-bit weights are unpacked: they take the memory of dense weights"
        )
    modules: dict[str, dict[str, Stored]] = {}
    for name, tensor in tensors:
        module, own = _split(name)
        if modules.setdefault(module, {}).setdefault(own, tensor) is not tensor:
            raise CheckpointError(f"{source}: {name} occurs twice")
    for module, found in modules.items():
        try:
            yield from ((f"{module}.{own}", tensor) for own, tensor in _packed_weights(module, found, packing))
        except ValueError as error:
            raise CheckpointError(f"{source}: {module}: {error}") from error
        for own, tensor in found.items():
            name = f"{module}.{own}"
            of_gptq = own == "bias" and packing.layout.startswith("gptq") and not is_known(name)
            if not UNUSED.search(f".{own}") and not (of_gptq and not tensor.read().any()):
                yield name, tensor


def _split(name: str) -> tuple[str, str]:
    """Module and name in it. bitsandbytes keeps x.weight.absmax beside x.weight: both belong to module x."""
    module, found, own = name.partition(".weight.")
    if found:
        return module, f"weight.{own}"
    module, _, own = name.rpartition(".")
    return module, own


def _packed_weights(module: str, found: dict[str, Stored], packing: Packing) -> Iterator[tuple[str, Stored]]:
    """The packed weight of a module, or those of its experts. Their tensors are taken out of `found`."""
    if packing.layout == "bitsandbytes":
        if nf4.STATE in found:
            yield "weight", nf4.unpack_nf4(found)
        return
    form = packing.form_of(module) or packing.forms[0]
    if packing.layout == "mxfp4":
        assert isinstance(form, Fp4Form)
        yield from fp4.unstack_experts(found, form)
        return
    weight = _packed_weight(found, packing.layout, form)
    if weight is not None:
        yield "weight", weight


def _packed_weight(found: dict[str, Stored], layout: str, form: Form) -> Stored | None:
    """None if the module has no packed weight."""
    if isinstance(form, GroupForm):
        if "qweight" in found:
            if layout == "awq":
                return groups.awq(found, form)
            return groups.gptq(found, form, zeros_less_one=layout == "gptq")
        return groups.compressed(found, form) if "weight_packed" in found else None
    scale_name = next((name for name in SCALES if name in found), None)
    name = next((name for name in ("weight_packed", "weight") if name in found), None)
    if scale_name is None or name is None:
        return None
    codes, scale = taken(found, name, 2), found.pop(scale_name)
    if isinstance(form, Fp8Form):
        return Fp8Tensor(codes, scale, form.block)
    if isinstance(form, Int8Form):
        return Int8Tensor(codes, scale)
    divisor, factor = found.pop("weight_global_scale", None), found.pop("weight_scale_2", None)
    divides = divisor is not None
    return fp4.Fp4Tensor(form, codes, scale, divisor if divides else factor, divides)
