"""fp8 (e4m3) keys and values with one scale per token and head."""

import torch
import triton
import triton.language as tl
from torch import Tensor

LARGEST = tl.constexpr(448.0)
MIN_SCALE = tl.constexpr(1e-10)
# fp8 numbers enter dot products as float16. Probabilities are multiplied by a value's scale and by this factor, so that
# products with small scales do not underflow in float16; the result is divided by it at the end.
LIFT = tl.constexpr(256.0)


def quantize_reference(x: Tensor) -> tuple[Tensor, Tensor]:  # [..., head_dim] -> the same in fp8, scales [...]
    x, largest = x.float(), LARGEST.value
    scale = (x.abs().amax(-1) / largest).clamp(min=MIN_SCALE.value).bfloat16()
    return (x / scale.float().unsqueeze(-1)).clamp(-largest, largest).to(torch.float8_e4m3fn), scale


@triton.jit
def scale_of(magnitude, INTERPRETED: tl.constexpr):
    """The scale of numbers whose largest magnitude is given."""
    scale = tl.maximum(tl.div_rn(magnitude, LARGEST), MIN_SCALE)
    if INTERPRETED:
        scale = _rounded(scale, 16)
    return scale.to(tl.bfloat16)


@triton.jit
def scaled(x, scale, INTERPRETED: tl.constexpr):
    """Divide float32 numbers by their scale and clamp them to the range of fp8."""
    values = tl.clamp(tl.div_rn(x, scale.to(tl.float32) + tl.zeros_like(x)), -LARGEST, LARGEST)
    if INTERPRETED:
        # Below 2**-6 fp8 has steps of 2**-9, as float32 has near 24576. A zero keeps its sign.
        size = tl.abs(values)
        size = tl.where(size < 0.015625, (size + 24576.0) - 24576.0, _rounded(size, 20))
        values = tl.where(values.to(tl.int32, bitcast=True) < 0, -size, size)
    return values


@triton.jit
def _rounded(x, DROPPED: tl.constexpr):
    """Round to the nearest float32 whose last DROPPED bits are zero. The interpreter's own conversions truncate."""
    bits = x.to(tl.int32, bitcast=True)
    bits += (1 << (DROPPED - 1)) - 1 + ((bits >> DROPPED) & 1)
    return (bits & -(1 << DROPPED)).to(tl.float32, bitcast=True)


@triton.jit
def unpack(pairs, dtype: tl.constexpr, INTERPRETED: tl.constexpr):
    """Convert the fp8 numbers in the low and in the high bytes of 16-bit items."""
    if INTERPRETED:
        low = pairs.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(dtype)
        high = (pairs >> 8).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(dtype)
    else:
        # Two items per register: separate low from high bytes, then convert two numbers at a time.
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 sorted;
            .reg .b16 low, high;
            prmt.b32 sorted, $2, 0, 0x3120;
            mov.b32 {low, high}, sorted;
            cvt.rn.f16x2.e4m3x2 $0, low;
            cvt.rn.f16x2.e4m3x2 $1, high;
            }""",
            "=r,=r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    return low, high
