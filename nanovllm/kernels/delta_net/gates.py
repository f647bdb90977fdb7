"""Parts of the kernels of the gated delta net: lengths of queries and keys, decay, and the norm with an output gate."""

import triton
import triton.language as tl

L2_EPS = tl.constexpr(1e-6)


@triton.jit
def inverse_length(x, AXIS: tl.constexpr):
    """What makes the vectors along an axis, in float32, of length 1."""
    return tl.rsqrt(tl.sum(x * x, axis=AXIS) + L2_EPS)


@triton.jit
def log_decay(a, dt_bias, A_log):
    """The logarithm of the factor by which a token lets the state decay, all in float32."""
    x = a + dt_bias
    softplus = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
    return -tl.exp(A_log) * softplus


@triton.jit
def gated_norm(x, weight, z, eps, SIZE: tl.constexpr, AXIS: tl.constexpr, DTYPE: tl.constexpr):
    """The RMS norm of the SIZE numbers along the axis, times weight and silu(z); rounded to DTYPE as torch rounds.

    `x` is float32 and zero in its padding; `weight` and `z` are float32.
    """
    normed = x * tl.rsqrt(tl.sum(x * x, axis=AXIS, keep_dims=True) / SIZE + eps)
    normed = (normed.to(DTYPE).to(tl.float32) * weight).to(DTYPE).to(tl.float32)
    return (normed * (z * tl.sigmoid(z))).to(DTYPE)
