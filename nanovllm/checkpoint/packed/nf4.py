"""bitsandbytes' 4-bit weights: codes of a table of 16 numbers, times the largest absolute value of a block of weights.

They are unpacked when they are loaded. The largest values may themselves be 8-bit codes (double quantization).
"""

import json
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanovllm.checkpoint.packed.tensor import check_floats, taken
from nanovllm.checkpoint.stored import Part, Stored

STATE = "weight.quant_state.bitsandbytes__nf4"  # JSON in the bytes of a tensor
PARTS = ("weight.absmax", "weight.quant_map")
NESTED_PARTS = ("weight.nested_absmax", "weight.nested_quant_map")


@dataclass(frozen=True)
class Nf4Tensor:
    """A weight, [out, in]; implements `Stored`."""

    state: dict[str, Any]
    codes: Stored
    parts: dict[str, Stored]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.state["shape"])

    def read(self, part: Part = ()) -> Tensor:
        """Dequantized, in float32."""
        codes = self.codes.read().flatten()
        if codes.dtype != torch.uint8 or 2 * codes.numel() != math.prod(self.shape):
            raise ValueError(f"its {codes.numel()} {codes.dtype} bytes do not hold a weight of {list(self.shape)}")
        nibbles = torch.stack([codes >> 4, codes & 15], dim=-1).flatten()  # the first of two in the high half
        largest, table = (self.parts[name].read() for name in PARTS)
        if NESTED_PARTS[0] in self.parts:
            if largest.dtype != torch.uint8 or not len(largest):
                raise ValueError(f"{PARTS[0]} holds {len(largest)} {largest.dtype}, and codes (torch.uint8) are needed")
            scale, numbers = (self.parts[name].read() for name in NESTED_PARTS)
            largest = _numbers(largest, numbers, scale, self.state["nested_blocksize"]) + self.state["nested_offset"]
        return _numbers(nibbles, table, largest, self.state["blocksize"]).view(self.shape)[part]


def _numbers(codes: Tensor, table: Tensor, largest: Tensor, size: int) -> Tensor:
    """What codes, one per byte, stand for: numbers of a table, times the largest value of their block of this size."""
    table = check_floats(table, "numbers of a table").float()
    if len(table) <= int(codes.max()) or not (table[1:] >= table[:-1]).all() or table[0] == table[-1]:
        raise ValueError(f"its table of {len(table)} numbers is too short, or they do not rise")
    largest = check_floats(largest, "largest values").float()
    if len(largest) != -(-len(codes) // size) or not torch.isfinite(largest).all() or not largest.any():
        raise ValueError("its blocks do not all have a finite largest value")
    return table[codes.int()] * largest.repeat_interleave(size)[: len(codes)]


def unpack_nf4(found: dict[str, Stored]) -> Nf4Tensor:
    """Takes a weight's tensors out of `found`."""
    octets = found.pop(STATE).read().flatten()
    try:
        if octets.dtype != torch.uint8:
            raise ValueError(f"it holds {octets.dtype}")
        state = json.loads(bytes(octets.tolist()))
    except ValueError as error:
        raise ValueError(f"{STATE} cannot be read: {error}") from error
    is_nested = NESTED_PARTS[0] in found
    sizes = ("blocksize", "nested_blocksize") if is_nested else ("blocksize",)
    if not isinstance(state, dict) or not isinstance(state.get("shape"), list) or not state["shape"]:
        raise ValueError(f"{STATE} cannot be read: it has no shape")
    if not all(isinstance(size, int) and size > 0 for size in (*state["shape"], *map(state.get, sizes))):
        raise ValueError(f"{STATE} cannot be read: a size is missing or not positive")
    if is_nested and not isinstance(state.get("nested_offset"), int | float):
        raise ValueError(f"{STATE} cannot be read: the offset of nested scales is missing")
    if "weight" not in found:
        raise ValueError("weight is missing")
    names = PARTS + NESTED_PARTS if is_nested else PARTS
    return Nf4Tensor(state, found.pop("weight"), {name: taken(found, name, 1) for name in names})
