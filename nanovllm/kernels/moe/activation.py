"""What experts make of gate and up."""

import triton
import triton.language as tl


@triton.jit
def gated(gate, up, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """silu(gate) * up; with a LIMIT above 0, the clamped form of layers/moe.py."""
    if LIMIT == 0:
        return gate * tl.sigmoid(gate) * up
    gate = tl.minimum(gate, LIMIT)
    up = tl.maximum(tl.minimum(up, LIMIT), -LIMIT)
    return gate * tl.sigmoid(ALPHA * gate) * (up + 1)
