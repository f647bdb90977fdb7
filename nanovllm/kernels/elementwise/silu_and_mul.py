"""The activation of a gated MLP: silu(gate) * up, or with GELU in its approximation with tanh."""

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.launch import cdiv, launch

BLOCK = 1024
MANY_ROWS = 512  # from this many rows on a program takes several of them


def silu_and_mul_reference(gate_up: Tensor, *, gelu: bool = False) -> Tensor:  # [M, 2 * N] -> [M, N]
    gate, up = gate_up.float().chunk(2, dim=-1)
    return ((F.gelu(gate, approximate="tanh") if gelu else F.silu(gate)) * up).to(gate_up.dtype)


@triton.jit(do_not_specialize=["M"])
def _silu_and_mul_kernel(
    gate_up, out, M, N, GELU: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = (m < M) & (n < N)
    m = m.to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    gate = tl.load(gate_up + m * (2 * N) + n, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + m * (2 * N) + N + n, mask=mask, other=0.0).to(tl.float32)
    inner = gate
    if GELU:  # (1 + tanh(z)) / 2 is sigmoid(2 z); 1.59577 is 2 sqrt(2 / pi)
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    tl.store(out + m * N + n, (gate * tl.sigmoid(inner) * up).to(out.dtype.element_ty), mask=mask)


def silu_and_mul(gate_up: Tensor, *, out: Tensor | None = None, gelu: bool = False, pdl: bool = False) -> Tensor:
    """gate_up [M, 2 * N], each row gate then up -> [M, N]."""
    m, n = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(m, n) if out is None else out
    assert gate_up.is_contiguous() and out.is_contiguous()
    rows = 4 if m >= MANY_ROWS else 1
    launch(
        _silu_and_mul_kernel,
        (cdiv(m, rows), cdiv(n, BLOCK)),
        gate_up,
        out,
        m,
        n,
        GELU=gelu,
        ROWS=rows,
        BLOCK=BLOCK,
        PDL=pdl,
        num_warps=4,
        pdl=pdl,
    )
    return out
