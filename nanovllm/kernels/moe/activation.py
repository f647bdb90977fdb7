"""What experts make of gate and up."""

import triton
import triton.language as tl


@triton.jit
def gated(gate, up, ALPHA: tl.constexpr, LIMIT: tl.constexpr, GELU: tl.constexpr):
    """silu(gate) * up; with GELU gelu(gate) * up; with a LIMIT above 0 the clamped form of layers/moe.py."""
    if GELU:  # as in elementwise/silu_and_mul.py
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        return gate * tl.sigmoid(inner) * up
    if LIMIT == 0:
        return gate * tl.sigmoid(gate) * up
    gate = tl.minimum(gate, LIMIT)
    up = tl.maximum(tl.minimum(up, LIMIT), -LIMIT)
    return gate * tl.sigmoid(ALPHA * gate) * (up + 1)
