"""Random packed weights of every kind, for tests of the kernels that read them."""

from typing import Any

import torch
from torch import Tensor

from nanovllm.kernels.linear.packed import PackedWords
from tests.kernels.support import DEVICE

# every kind, with a scale for each group, row or block, with and without zeros, minima and units
CASES: dict[str, dict[str, Any]] = {
    "int4": {"kind": "int4", "group": 128},
    "int4 zero": {"kind": "int4", "group": 128, "zero": True},
    "int4 zero 32": {"kind": "int4", "group": 32, "zero": True},
    "int4 minimum": {"kind": "int4", "group": 32, "minimum": True, "units": 2},
    "int4 rows": {"kind": "int4", "group": 0},
    "int8": {"kind": "int8", "group": 64, "scale_type": torch.float32},
    "int8 zero": {"kind": "int8", "group": 128, "zero": True},
    "int8 rows": {"kind": "int8", "group": 0, "scale_type": torch.float32},
    "fp8 rows": {"kind": "fp8", "group": 0, "scale_type": torch.float32},
    "fp8 blocks": {"kind": "fp8", "group": 128, "scale_type": torch.float32, "scale_rows": 8},
    "mxfp4": {"kind": "fp4", "group": 32, "scale_type": torch.uint8},
    "nvfp4": {"kind": "fp4", "group": 16, "scale_type": torch.float8_e4m3fn, "units": 1},
}
WIDE = [name for name, case in CASES.items() if case["group"] == 0 or case["group"] >= 32]  # MIN_DISTANCE


def random_packed(
    *shape: int,
    kind: str,
    group: int,
    zero: bool = False,
    minimum: bool = False,
    units: int = 0,
    scale_type: torch.dtype = torch.float16,
    scale_rows: int = 1,
) -> PackedWords:
    """[N, K], or [E, N, K] for experts; `group` 0: one scale per row."""
    *outer, n, k = shape
    bits = 4 if kind in ("int4", "fp4") else 8
    groups = k // (group or k)
    words = torch.randint(0, 256, (*outer, n, k * bits // 8), dtype=torch.uint8)
    if kind == "fp8":
        words[words & 0x7F == 0x7F] = 0  # NaN
    largest = {"int4": 8, "int8": 128, "fp8": 448, "fp4": 6}[kind]
    down = -(-n // scale_rows)
    scale = (0.2 + torch.rand(*outer, down, groups)) / (largest * k**0.5)
    if scale_type == torch.uint8:
        scale = scale.log2().round().add(127)
    elif units:
        scale = scale * 64  # not too small for its type
    sized: dict[str, Tensor] = {}
    if zero:
        low, high, dtype = (0, 16, torch.uint8) if kind == "int4" else (-128, 128, torch.int8)
        sized["zero"] = torch.randint(low, high, (*outer, n, groups), dtype=dtype)
    if units:
        sized["scale_unit"] = (0.5 + torch.rand(*outer, n, units)) / 64
    if minimum:
        sized["minimum"] = torch.rand(*outer, n, groups).to(scale_type)
        sized["minimum_unit"] = torch.rand(*outer, n, units) / k**0.5
    distance = next(d for d in (64, 32, 16) if (group or k) % d == 0 and k % (d * 16 // bits) == 0)
    tensors = {name: one.to(DEVICE) for name, one in sized.items()}
    words, scale = words.to(DEVICE).view(torch.int32), scale.to(scale_type).to(DEVICE)
    return PackedWords(kind, distance, words, scale, scale_rows, **tensors)
