"""What the expert kernels that have warps of their own for loads are compiled for, as all their warps are told.

The fields are constants of Triton, but for those of Fp8Sizes.
"""

from typing import Any, NamedTuple


class WideForm(NamedTuple):
    """Of packed_wide.py."""

    N: Any  # rows of the weight; gated: half of them
    K: Any
    DISTANCE: Any
    ALPHA: Any  # of the activation, as the next two
    LIMIT: Any
    GELU: Any
    TILES: Any  # of a block
    CHOICES: Any  # of a token, or 1
    LEAST: Any  # pairs of a block that are multiplied: these, twice as many or all; or always all


class Fp8Form(NamedTuple):
    """Of fp8_experts.py."""

    N: Any  # rows of the weight; gated: half of them
    K: Any
    GATED: Any
    TILES: Any  # of a block
    BLOCKED: Any  # scales are of 128 columns
    SCALE_ROWS: Any  # of the weight that share a scale
    TOP_K: Any
    ALPHA: Any  # of the activation, as the next two
    LIMIT: Any
    GELU: Any
    NUM_EXPERTS: Any
    SINGLE: Any  # every pair is a block by itself
    BY_CHOICE: Any  # rows of the result are in the order of choices, then tokens


class Fp8Sizes(NamedTuple):
    """Of a call of fp8_experts.py."""

    num_pairs: Any
    num_tiles: Any
    num_blocks: Any
    x_scale_stride: Any
