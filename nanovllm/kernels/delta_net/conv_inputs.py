"""The inputs of a causal convolution, as parts of kernels: a sequence's new ones, and before them those in its state.

The new inputs of a sequence have the numbers 0, 1, 2, ...; the newest of those before, which its state holds, is -1.
With GATED an input is the product of two numbers (LFM2), rounded as a tensor of them would be.
"""

import triton
import triton.language as tl


@triton.jit
def load_new_inputs(x, times, at, mask, GATED: tl.constexpr):
    """The new inputs at these places of x, in float32."""
    new = tl.load(x + at, mask=mask, other=0.0)
    if GATED:
        factor = tl.load(times + at, mask=mask, other=0.0)
        new = (new.to(tl.float32) * factor.to(tl.float32)).to(x.dtype.element_ty)
    return new.to(tl.float32)


@triton.jit
def load_inputs(
    x,  # new inputs
    times,  # what they are multiplied by
    before,  # [KERNEL - 1, channels] the inputs in the sequence's state
    first,  # int64 index in x of the sequence's first new input
    number,
    channel,
    inside,  # mask
    kept_channels,  # of the state: all, or 0 where it is that of another sequence
    x_stride,
    channels,
    KERNEL: tl.constexpr,
    GATED: tl.constexpr,
):
    """The inputs with these numbers of these channels, in float32; shapes are broadcast."""
    token = first + number
    # bounds rather than conditions: the interpreter cannot combine a scalar condition with a mask
    is_new = inside & (channel < tl.where(token < first, 0, channels))
    new = load_new_inputs(x, times, token * x_stride + channel, is_new, GATED)
    is_old = inside & (channel < tl.where(token < first, kept_channels, 0))
    old = tl.load(before + (KERNEL - 1 + number) * channels + channel, mask=is_old, other=0.0)
    return new + old


@triton.jit
def convolved(
    x,
    times,
    before,
    weight,  # [channels, 1, KERNEL]
    first,
    number,
    channel,
    inside,
    kept_channels,
    x_stride,
    channels,
    KERNEL: tl.constexpr,
    GATED: tl.constexpr,
):
    """The result for the inputs with these numbers, in float32; arguments as those of `load_inputs`."""
    known = channel < channels
    w = tl.load(weight + channel * KERNEL + KERNEL - 1, mask=known, other=0.0).to(tl.float32)
    y = w * load_inputs(
        x, times, before, first, number, channel, inside, kept_channels, x_stride, channels, KERNEL, GATED
    )
    for tap in tl.static_range(KERNEL - 1):
        at = number - (KERNEL - 1) + tap
        value = load_inputs(
            x, times, before, first, at, channel, inside, kept_channels, x_stride, channels, KERNEL, GATED
        )
        w = tl.load(weight + channel * KERNEL + tap, mask=known, other=0.0).to(tl.float32)
        y = tl.fma(w, value, y)  # stated, so that every compilation rounds alike
    return y


@triton.jit
def store_newest_inputs(
    x,
    times,
    before,
    first,
    num_new,
    channel,
    inside,
    start,  # position of the first new input; negative: nothing is stored
    x_stride,
    channels,
    KERNEL: tl.constexpr,
    TAPS: tl.constexpr,  # KERNEL - 1, rounded up to a power of 2
    GATED: tl.constexpr,
):
    """Put a sequence's newest inputs of [n] channels into its state. The program must have these channels for itself,
    and needs what it replaces no more."""
    tap = tl.arange(0, TAPS)[:, None]
    mask = inside[None, :] & (tap < KERNEL - 1)
    stored = mask & (tap < tl.where(start >= 0, KERNEL - 1, 0))
    newest = load_inputs(
        x,
        times,
        before,
        first,
        num_new - (KERNEL - 1) + tap,
        channel[None, :],
        mask,
        tl.where(start > 0, channels, 0),
        x_stride,
        channels,
        KERNEL=KERNEL,
        GATED=GATED,
    )
    tl.debug_barrier()  # all threads have read what others are about to replace
    tl.store(before + tap * channels + channel[None, :], newest, mask=stored)
