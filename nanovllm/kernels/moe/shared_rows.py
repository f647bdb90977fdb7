"""A mixture of experts beside a shared expert for one to a few tokens, in three launches.

The first launch computes what needs no chosen expert: the norm, the router's choice, and gate and up of the shared
expert. Few programs compute the router's logits; the last of them to finish chooses the experts, while the others still
read the shared expert's weights. The other two launches are those of rows.py; the second adds the shared expert, too.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.launch import cdiv, launch
from nanovllm.kernels.linear.one_row import columns_of, weight_rows
from nanovllm.kernels.moe.experts import ROW_TOKENS
from nanovllm.kernels.moe.route_groups import choose_experts
from nanovllm.kernels.moe.rows import rows_forward
from nanovllm.kernels.moe.tiles import row_tiles
from nanovllm.kernels.moe.weights import ExpertWeights

ROWS = 4  # of a weight per program
NUM_WARPS = 4


class GroupChoice(NamedTuple):
    """How experts are chosen; see `GroupedMoeSpec`."""

    top_k: int
    num_groups: int
    num_chosen_groups: int
    normalize: bool
    scaling: float
    least_sum: float


class Routed(NamedTuple):
    normed: Tensor  # [T, hidden]
    weights: Tensor  # [T, top_k]
    experts: Tensor  # [T, top_k] int32
    shared: Tensor  # [T, shared_size]: silu(gate) * up of the shared expert


def first_launch_reference(
    x: Tensor, norm_weight: Tensor, eps: float, router: Tensor, shared_gate_up: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The normalized rows, the router's logits and the shared expert's silu(gate) * up."""
    normed = F.rms_norm(x.float(), x.shape[-1:], norm_weight.float(), eps).to(x.dtype)
    gate, up = F.linear(normed.float(), shared_gate_up.float()).chunk(2, dim=-1)
    return normed, F.linear(normed.float(), router), (F.silu(gate) * up).to(x.dtype)


@triton.jit
def _tiles(pointers, k, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """All K columns, as tiles of BLOCK_K; `pointers` are those of the first tile, `k` its columns."""
    tiles = ()  # type: tuple
    for step in tl.static_range((K + BLOCK_K - 1) // BLOCK_K):
        tiles += (columns_of(pointers, k, step * BLOCK_K, K, BLOCK_K),)
    return tiles


@triton.jit
def _read_ahead(weight, rows, norm_weight, K: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr):
    """These rows of a weight and the norm's weight, as tiles. Then wait for the kernel before, which writes neither."""
    k = tl.arange(0, BLOCK_K)
    weights = _tiles(weight + rows.to(tl.int64)[:, None] * K + k[None, :], k[None, :], K, BLOCK_K)
    gains = _tiles(norm_weight + k, k, K, BLOCK_K)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    return weights, gains


@triton.jit
def _normed(x, gains, eps, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """The norm of a row, rounded to its type, as tiles of BLOCK_K columns."""
    k = tl.arange(0, BLOCK_K)
    values = _tiles(x + k, k, K, BLOCK_K)
    squares = tl.zeros([BLOCK_K], tl.float32)
    for step in tl.static_range(len(values)):
        squares += values[step].to(tl.float32) * values[step].to(tl.float32)
    scale = tl.rsqrt(tl.sum(squares, 0) / K + eps)
    tiles = ()  # type: tuple
    for step in tl.static_range(len(values)):
        normed = values[step].to(tl.float32) * scale * gains[step].to(tl.float32)
        tiles += (normed.to(x.dtype.element_ty),)
    return tiles


@triton.jit
def _products(weights, normed, ROWS: tl.constexpr, BLOCK_K: tl.constexpr):
    """[ROWS]: each row of the weight times the normalized row."""
    products = tl.zeros([ROWS, BLOCK_K], tl.float32)
    for step in tl.static_range(len(weights)):
        products += weights[step].to(tl.float32) * normed[step].to(tl.float32)[None, :]
    return tl.sum(products, 1)


@triton.jit
def _logits_of(
    x, norm_weight, eps, router, logits, normed_out, own,
    K: tl.constexpr, NUM_EXPERTS: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write the logits of the experts `own` of one token; those of the first experts write the normalized row, too."""
    weights, gains = _read_ahead(router, tl.minimum(own, NUM_EXPERTS - 1), norm_weight, K, BLOCK_K, PDL)
    normed = _normed(x, gains, eps, K, BLOCK_K)
    if tl.program_id(0) == 0:
        for step in tl.static_range(len(normed)):
            column = step * BLOCK_K + tl.arange(0, BLOCK_K)
            tl.store(normed_out + column, normed[step], mask=column < K)
    tl.store(logits + own, _products(weights, normed, ROWS, BLOCK_K), mask=own < NUM_EXPERTS)


@triton.jit
def _shared_hidden(
    x, norm_weight, eps, shared_gate_up, shared_out, first,
    K: tl.constexpr, SHARED: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write silu(gate) * up of the shared expert for one token, columns `first` and following."""
    rows = weight_rows(tl.arange(0, ROWS), first, SHARED, True)
    weights, gains = _read_ahead(shared_gate_up, rows, norm_weight, K, BLOCK_K, PDL)
    result = _products(weights, _normed(x, gains, eps, K, BLOCK_K), ROWS, BLOCK_K)
    gate, up = tl.split(tl.reshape(result, (ROWS // 2, 2)))
    n = first + tl.arange(0, ROWS // 2)
    hidden = gate * tl.sigmoid(gate) * up
    tl.store(shared_out + n, hidden.to(shared_out.dtype.element_ty), mask=n < SHARED)


@triton.jit
def _route_rows_kernel(
    x,  # [T, K]
    norm_weight,  # [K]
    router,  # [NUM_EXPERTS, K] float32
    bias,  # [NUM_EXPERTS] float32, or None: softmax scores
    shared_gate_up,  # [2 * SHARED, K]
    logits,  # [T, NUM_EXPERTS] float32
    arrived,  # [T], zeros before and after
    normed_out,  # [T, K]
    weights_out,  # [T, TOP_K]
    experts_out,  # [T, TOP_K]
    shared_out,  # [T, SHARED]
    eps,
    scaling,
    least_sum,
    K: tl.constexpr,
    SHARED: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    NUM_CHOSEN_GROUPS: tl.constexpr,
    TOP_K: tl.constexpr,
    NORMALIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (i, t): ROWS of the router for token t, or for i after those, of the shared expert's gate_up."""
    ROUTERS: tl.constexpr = (NUM_EXPERTS + ROWS - 1) // ROWS
    program, token = tl.program_id(0), tl.program_id(1).to(tl.int64)
    x += token * K
    logits += token * NUM_EXPERTS
    if program >= ROUTERS:
        _shared_hidden(
            x, norm_weight, eps, shared_gate_up, shared_out + token * SHARED, (program - ROUTERS) * (ROWS // 2),
            K, SHARED, ROWS, BLOCK_K, PDL,
        )  # fmt: skip
    else:
        _logits_of(
            x, norm_weight, eps, router, logits, normed_out + token * K, program * ROWS + tl.arange(0, ROWS),
            K, NUM_EXPERTS, ROWS, BLOCK_K, PDL,
        )  # fmt: skip
        tl.debug_barrier()  # orders all threads' stores before the one thread that increments the counter
        if tl.atomic_add(arrived + token, 1, sem="acq_rel", scope="gpu") == ROUTERS - 1:
            tl.store(arrived + token, 0)
            expert = tl.arange(0, triton.next_power_of_2(NUM_EXPERTS))
            inside = expert < NUM_EXPERTS
            biases = 0.0
            if bias is not None:
                biases = tl.load(bias + expert, mask=inside, other=0.0)
            # other multiprocessors wrote these: bypass this one's L1 cache
            found = tl.load(logits + expert, mask=inside, other=float("-inf"), cache_modifier=".cg")
            weights, chosen = choose_experts(
                found, biases, scaling, least_sum,
                NUM_EXPERTS, NUM_GROUPS, NUM_CHOSEN_GROUPS, TOP_K, bias is not None, NORMALIZE,
            )  # fmt: skip
            choice = tl.arange(0, triton.next_power_of_2(TOP_K))
            at = token * TOP_K + choice
            tl.store(weights_out + at, weights.to(weights_out.dtype.element_ty), mask=choice < TOP_K)
            tl.store(experts_out + at, chosen, mask=choice < TOP_K)


def route_rows(
    x: Tensor,  # [T, hidden], before the norm; T up to ROW_TOKENS
    norm_weight: Tensor,  # [hidden]
    eps: float,
    router: Tensor,  # [experts, hidden] float32
    bias: Tensor | None,  # [experts] float32, added to sigmoid scores for the choice alone; None = softmax scores
    shared_gate_up: Tensor,  # [2 * shared_size, hidden]: the gate rows, then the up rows
    choice: GroupChoice,
    arrived: Tensor,  # [ROW_TOKENS] int32, zeros
    *,
    pdl: bool = False,
) -> Routed:
    """Everything that comes before the chosen experts. `arrived` is zeros again afterwards."""
    (num_tokens, hidden_size), num_experts, shared_size = x.shape, router.shape[0], shared_gate_up.shape[0] // 2
    tensors = (x, norm_weight, router, shared_gate_up)
    assert all(tensor.is_contiguous() for tensor in tensors) and num_tokens <= ROW_TOKENS
    logits = torch.empty(num_tokens, num_experts, dtype=torch.float32, device=x.device)
    routed = Routed(
        normed=torch.empty_like(x),
        weights=x.new_empty(num_tokens, choice.top_k),
        experts=torch.empty(num_tokens, choice.top_k, dtype=torch.int32, device=x.device),
        shared=x.new_empty(num_tokens, shared_size),
    )
    launch(
        _route_rows_kernel,
        (cdiv(num_experts, ROWS) + cdiv(shared_size, ROWS // 2), num_tokens),
        x,
        norm_weight,
        router,
        bias,
        shared_gate_up,
        logits,
        arrived,
        *routed,
        eps,
        choice.scaling,
        choice.least_sum,
        K=hidden_size,
        SHARED=shared_size,
        NUM_EXPERTS=num_experts,
        NUM_GROUPS=choice.num_groups,
        NUM_CHOSEN_GROUPS=choice.num_chosen_groups,
        TOP_K=choice.top_k,
        NORMALIZE=choice.normalize,
        ROWS=ROWS,
        BLOCK_K=256 * NUM_WARPS,
        PDL=pdl,
        num_warps=NUM_WARPS,
        pdl=pdl,
    )
    return routed


def shared_rows_forward(
    x: Tensor,  # [T, hidden], before the norm; T up to ROW_TOKENS
    norm_weight: Tensor,  # [hidden]
    eps: float,
    *,
    router: Tensor,  # [experts, hidden] float32
    bias: Tensor | None,  # [experts] float32
    choice: GroupChoice,
    gate_up: Tensor,  # [experts, 2 * size, hidden]: the gate rows, then the up rows
    down: Tensor,  # [experts, hidden, size]
    shared_gate_up: Tensor,  # [2 * shared_size, hidden]
    shared_down: Tensor,  # [hidden, shared_size]
    arrived: Tensor,  # [ROW_TOKENS] int32, zeros
    out: Tensor,  # [T, hidden]; may be x
    residual: Tensor | None,  # [T, hidden], added to the result; may be x
    pdl: bool = False,
) -> Tensor:
    """The sum of the chosen experts and the shared one for norm(x). Returns `out`."""
    assert all(tensor.is_contiguous() for tensor in (gate_up, down, shared_down, out))
    routed = route_rows(x, norm_weight, eps, router, bias, shared_gate_up, choice, arrived, pdl=pdl)
    layer = ExpertWeights(gate_up, down)
    shared, tiles = (routed.shared, shared_down), row_tiles(x.dtype, shared=True)
    return rows_forward(
        routed.normed, layer, routed.weights, routed.experts, out, residual, *tiles, shared=shared, pdl=pdl
    )
