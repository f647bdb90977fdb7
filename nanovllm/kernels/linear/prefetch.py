"""Asking for memory that will be read soon."""

import triton
import triton.language as tl


@triton.jit
def prefetch(pointers):
    """Has the cache lines of these addresses brought to L2, and does not wait. Not known to the interpreter."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )
