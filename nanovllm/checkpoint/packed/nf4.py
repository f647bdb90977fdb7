"""bitsandbytes' 4-bit weights: codes of a table of 16 numbers, times the largest absolute value of a block of weights.

They are unpacked when they are loaded. The largest values may themselves be 8-bit codes (double quantization).
"""

import json
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanovllm.checkpoint.stored import Part, Stored

STATE = "weight.quant_state.bitsandbytes__nf4"  # JSON in the bytes of a tensor
PARTS = ("weight", "weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map")


@dataclass(frozen=True)
class Nf4Tensor:
    """A weight, [out, in]; implements `Stored`."""

    state: dict[str, Any]
    parts: dict[str, Stored]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.state["shape"])

    def read(self, part: Part = ()) -> Tensor:
        """Dequantized, in float32."""
        codes = self.parts["weight"].read().flatten()
        if codes.dtype != torch.uint8 or 2 * codes.numel() != math.prod(self.shape):
            raise ValueError(f"its {codes.numel()} {codes.dtype} bytes do not hold a weight of {list(self.shape)}")
        nibbles = torch.stack([codes >> 4, codes & 15], dim=-1).flatten()  # the first of two in the high half
        numbers = self.parts["weight.quant_map"].read().float()[nibbles.int()]
        largest = self._largest().repeat_interleave(self.state["blocksize"])[: numbers.numel()]
        if largest.shape != numbers.shape or not torch.isfinite(largest).all():
            raise ValueError("its blocks do not all have a finite largest value")
        return (numbers * largest).view(self.shape)[part]

    def _largest(self) -> Tensor:
        """The largest absolute value of each block."""
        found = self.parts["weight.absmax"].read()
        if "weight.nested_absmax" not in self.parts:
            return found.float()
        table = self.parts["weight.nested_quant_map"].read().float()
        scale = self.parts["weight.nested_absmax"].read().float().repeat_interleave(self.state["nested_blocksize"])
        return table[found.int()] * scale[: found.numel()] + self.state["nested_offset"]


def unpack_nf4(found: dict[str, Stored]) -> Nf4Tensor:
    """Takes a weight's tensors out of `found`."""
    try:
        state = json.loads(bytes(found.pop(STATE).read().tolist()))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{STATE} cannot be read: {error}") from error
    parts = {name: found.pop(name) for name in PARTS if name in found}
    missing = [name for name in PARTS[:3] if name not in parts]
    if missing or state.keys() < {"shape", "blocksize"}:
        raise ValueError(f"{', '.join(missing) or 'the shape'} is missing")
    return Nf4Tensor(state, parts)
