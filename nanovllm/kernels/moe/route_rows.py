"""What a mixture of experts computes before the chosen experts, in one launch for one to a few tokens: the norm, the
router's choice, and if there is a shared expert its gate and up.

Each program multiplies a few rows of a weight with the normalized row of one token. The last of a token's programs that
compute the router's logits chooses the experts, while others still read the shared expert's weights. For experts whose
inputs are rounded to fp8 one more program rounds the normalized row.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.launch import cdiv, launch
from nanovllm.kernels.linear.fp8_inputs import LARGEST, RoundedInputs, _pair
from nanovllm.kernels.linear.one_row import columns_of, weight_rows
from nanovllm.kernels.linear.packed import PackedWords, interpreted
from nanovllm.kernels.moe.fp8_slots import empty_rounded
from nanovllm.kernels.moe.route_groups import choose_experts

ROWS = 4  # of a weight per program
NUM_WARPS = 4
LONG_ROWS = 4096  # above, twice as many warps, whose registers hold ROWS of a weight


class Choice(NamedTuple):
    """How experts are chosen; for groups see `GroupedMoeSpec`."""

    top_k: int
    normalize: bool
    num_groups: int = 1
    num_chosen_groups: int = 1
    scaling: float = 1.0
    least_sum: float = 0.0


class Routed(NamedTuple):
    rows: Tensor  # [T, hidden], before the norm, with partial sums added
    normed: Tensor  # [T, hidden]
    weights: Tensor  # [T, top_k]
    experts: Tensor  # [T, top_k] int32
    shared: Tensor | None  # [T, shared_size]: silu(gate) * up of the shared expert, maybe times sigmoid(shared_gate)
    rounded: RoundedInputs | None = None  # the normalized rows, rounded


def route_rows_reference(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    router: Tensor,
    *,
    router_bias: Tensor | None = None,
    shared_gate_up: Tensor | None = None,
    shared_gate: Tensor | None = None,
    partial_sums: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The rows, the normalized rows, the router's logits and the shared expert's result; see `Routed`."""
    rows = x if partial_sums is None else (x.float() + partial_sums.sum(0)).to(x.dtype)
    normed = F.rms_norm(rows.float(), x.shape[-1:], norm_weight.float(), eps).to(x.dtype)
    logits = F.linear(normed.float(), router.float(), None if router_bias is None else router_bias.float())
    if shared_gate_up is None:
        return rows, normed, logits.to(router.dtype), None
    gate, up = F.linear(normed.float(), shared_gate_up.float()).chunk(2, dim=-1)
    shared = F.silu(gate) * up
    if shared_gate is not None:
        shared = shared * F.linear(normed.float(), shared_gate.float()).sigmoid()
    return rows, normed, logits.to(router.dtype), shared.to(x.dtype)


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
def _normed(row, gains, K: tl.constexpr, SPLITS: tl.constexpr, BLOCK_K: tl.constexpr):
    """The norm of a row plus its partial sums, rounded to its type, as tiles of BLOCK_K columns. A token's first
    program writes both rows, too."""
    x, sums, _, eps, sums_stride, rows_out, normed_out = row
    k = tl.arange(0, BLOCK_K)
    values = _tiles(x + k, k, K, BLOCK_K)
    summed = ()  # type: tuple
    squares = tl.zeros([BLOCK_K], tl.float32)
    for step in tl.static_range(len(values)):
        value = values[step].to(tl.float32)
        for split in tl.static_range(SPLITS):
            value += columns_of(sums + split * sums_stride + k, k, step * BLOCK_K, K, BLOCK_K)
        value = value.to(x.dtype.element_ty).to(tl.float32)
        squares += value * value
        summed += (value,)
    scale = tl.rsqrt(tl.sum(squares, 0) / K + eps)
    tiles = ()  # type: tuple
    for step in tl.static_range(len(values)):
        tiles += ((summed[step] * scale * gains[step].to(tl.float32)).to(x.dtype.element_ty),)
    if tl.program_id(0) == 0:
        for step in tl.static_range(len(tiles)):
            column = step * BLOCK_K + k
            tl.store(normed_out + column, tiles[step], mask=column < K)
            if SPLITS > 0:
                tl.store(rows_out + column, summed[step].to(x.dtype.element_ty), mask=column < K)
    return tiles


@triton.jit
def _products(weights, normed, ROWS: tl.constexpr, BLOCK_K: tl.constexpr):
    """[ROWS]: each row of the weight times the normalized row."""
    products = tl.zeros([ROWS, BLOCK_K], tl.float32)
    for step in tl.static_range(len(weights)):
        products += weights[step].to(tl.float32) * normed[step].to(tl.float32)[None, :]
    return tl.sum(products, 1)


@triton.jit
def _dot(weights, normed, BLOCK_K: tl.constexpr):
    """One row of a weight times the normalized row."""
    products = tl.zeros([BLOCK_K], tl.float32)
    for step in tl.static_range(len(weights)):
        products += weights[step].to(tl.float32) * normed[step].to(tl.float32)
    return tl.sum(products, 0)


@triton.jit
def _logits_of(
    own, row, router, router_bias, logits, K: tl.constexpr, SPLITS: tl.constexpr, NUM_EXPERTS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write the logits of the experts `own` of one token."""
    weights, gains = _read_ahead(router, tl.minimum(own, NUM_EXPERTS - 1), row[2], K, BLOCK_K, PDL)
    found = _products(weights, _normed(row, gains, K, SPLITS, BLOCK_K), ROWS, BLOCK_K)
    if router_bias is not None:
        found += tl.load(router_bias + own, mask=own < NUM_EXPERTS, other=0.0).to(tl.float32)
    found = tl.where(found == found, found, float("-inf"))  # what is no number could not be ranked
    tl.store(logits + own, found.to(logits.dtype.element_ty), mask=own < NUM_EXPERTS)


@triton.jit
def _shared_hidden(
    first, row, shared_gate_up, shared_gate, shared_out, K: tl.constexpr, SPLITS: tl.constexpr, SHARED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write silu(gate) * up of the shared expert for one token, columns `first` and following."""
    k = tl.arange(0, BLOCK_K)
    gates = ()  # type: tuple
    if shared_gate is not None:
        gates = _tiles(shared_gate + k, k, K, BLOCK_K)
    rows = weight_rows(tl.arange(0, ROWS), first, SHARED, True)
    weights, gains = _read_ahead(shared_gate_up, rows, row[2], K, BLOCK_K, PDL)
    normed = _normed(row, gains, K, SPLITS, BLOCK_K)
    gate, up = tl.split(tl.reshape(_products(weights, normed, ROWS, BLOCK_K), (ROWS // 2, 2)))
    hidden = gate * tl.sigmoid(gate) * up
    if shared_gate is not None:  # down(hidden) is to be multiplied with it
        hidden *= tl.sigmoid(_dot(gates, normed, BLOCK_K))
    n = first + tl.arange(0, ROWS // 2)
    tl.store(shared_out + n, hidden.to(shared_out.dtype.element_ty), mask=n < SHARED)


@triton.jit
def _round(
    row, codes, scale, scale_stride, K: tl.constexpr, SPLITS: tl.constexpr, GROUPS: tl.constexpr,
    DISTANCE: tl.constexpr, BLOCK_K: tl.constexpr, LARGEST: tl.constexpr, INTERPRETED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write the codes of the normalized row, in pairs, and a scale for the row or for every 2 * DISTANCE columns."""
    NUM: tl.constexpr = BLOCK_K // (2 * DISTANCE)
    k = tl.arange(0, BLOCK_K)
    gains = _tiles(row[2] + k, k, K, BLOCK_K)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    normed = _normed(row, gains, K, SPLITS, BLOCK_K)
    whole = tl.zeros([1], tl.float32)
    for step in tl.static_range(len(normed)):
        whole = tl.maximum(whole, tl.max(tl.abs(normed[step].to(tl.float32)), 0))
    for step in tl.static_range(len(normed)):
        parts = tl.reshape(normed[step].to(tl.float32), (NUM, 2, DISTANCE))
        first, second = tl.split(tl.permute(parts, (0, 2, 1)))
        group = step * NUM + tl.arange(0, NUM)
        largest = whole if GROUPS == 1 else tl.max(tl.maximum(tl.abs(first), tl.abs(second)), 1)
        s = tl.where(largest == 0, 1.0, largest / LARGEST)
        pair = _pair(first / s[:, None], second / s[:, None], LARGEST, INTERPRETED)
        column = group[:, None] * DISTANCE + tl.arange(0, DISTANCE)[None, :]
        tl.store(codes + column, pair, mask=column < K // 2)
        if GROUPS > 1:
            tl.store(scale + group * scale_stride, s, mask=group < GROUPS)
    if GROUPS == 1:
        tl.store(scale + tl.arange(0, 1), tl.where(whole == 0, 1.0, whole / LARGEST))


@triton.jit
def _scores(logits, bias_of_choice, expert, NUM_EXPERTS: tl.constexpr):
    """The scores of these experts (logits; with `bias_of_choice` their sigmoid), and the scores they are ranked by."""
    inside = expert < NUM_EXPERTS
    # other multiprocessors wrote these: bypass this one's L1 cache
    scores = tl.load(logits + expert, mask=inside, other=float("-inf"), cache_modifier=".cg").to(tl.float32)
    ranking = scores
    if bias_of_choice is not None:
        scores = tl.sigmoid(scores)
        ranking = tl.where(inside, scores + tl.load(bias_of_choice + expert, mask=inside, other=0.0), float("-inf"))
    return scores, ranking


@triton.jit
def _choose(
    logits, bias_of_choice, weights_out, experts_out, scaling, least_sum,
    NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    """Write the weights and the experts of one token. An expert's rank is the number of those that are better, or as
    good and before it. Other than in a loop over the choices, warps need not wait for each other."""
    EXPERTS: tl.constexpr = triton.next_power_of_2(NUM_EXPERTS)
    OTHERS: tl.constexpr = min(EXPERTS, 32)
    expert = tl.arange(0, EXPERTS)
    scores, ranking = _scores(logits, bias_of_choice, expert, NUM_EXPERTS)
    if bias_of_choice is None:
        scores = tl.exp(scores - tl.max(scores, 0))
        scores = scores / tl.sum(scores, 0)
    better = tl.zeros([OTHERS, EXPERTS], tl.int32)
    for first in tl.static_range(0, EXPERTS, OTHERS):
        other = first + tl.arange(0, OTHERS)[:, None]
        _, others = _scores(logits, bias_of_choice, other, NUM_EXPERTS)
        before = (others == ranking[None, :]) & (other < expert[None, :])
        better += ((others > ranking[None, :]) | before).to(tl.int32)
    rank = tl.sum(better, 0)
    chosen = (expert < NUM_EXPERTS) & (rank < TOP_K)
    if NORMALIZE:
        scores = scores / (tl.sum(tl.where(chosen, scores, 0.0), 0) + least_sum)
    tl.store(weights_out + rank, (scores * scaling).to(weights_out.dtype.element_ty), mask=chosen)
    tl.store(experts_out + rank, expert, mask=chosen)


@triton.jit
def _choose_in_groups(
    logits, bias_of_choice, weights_out, experts_out, scaling, least_sum, NUM_EXPERTS: tl.constexpr,
    NUM_GROUPS: tl.constexpr, NUM_CHOSEN_GROUPS: tl.constexpr, TOP_K: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    """Write the weights and the experts of one token."""
    expert, choice = tl.arange(0, triton.next_power_of_2(NUM_EXPERTS)), tl.arange(0, triton.next_power_of_2(TOP_K))
    inside = expert < NUM_EXPERTS
    biases = 0.0
    if bias_of_choice is not None:
        biases = tl.load(bias_of_choice + expert, mask=inside, other=0.0)
    found = tl.load(logits + expert, mask=inside, other=float("-inf"), cache_modifier=".cg").to(tl.float32)
    weights, chosen = choose_experts(
        found, biases, scaling, least_sum,
        NUM_EXPERTS, NUM_GROUPS, NUM_CHOSEN_GROUPS, TOP_K, bias_of_choice is not None, NORMALIZE,
    )  # fmt: skip
    tl.store(weights_out + choice, weights.to(weights_out.dtype.element_ty), mask=choice < TOP_K)
    tl.store(experts_out + choice, chosen, mask=choice < TOP_K)


@triton.jit
def _route_rows_kernel(
    x,  # [T, K]
    sums,  # [SPLITS, T, K] float32, or None
    norm_weight,  # [K]
    router,  # [NUM_EXPERTS, K]
    router_bias,  # [NUM_EXPERTS], or None
    bias_of_choice,  # [NUM_EXPERTS] float32, or None: softmax scores
    shared_gate_up,  # [2 * SHARED, K], or None
    shared_gate,  # [K], or None
    logits,  # [T, NUM_EXPERTS], of the router's type
    arrived,  # [T], zeros before and after
    rows_out,  # [T, K]; written with partial sums
    normed_out,  # [T, K]
    weights_out,  # [T, TOP_K]
    experts_out,  # [T, TOP_K]
    shared_out,  # [T, SHARED], or None
    codes,  # [T, K / 2], or None
    scale,  # [GROUPS, T]
    eps,
    scaling,
    least_sum,
    sums_stride,  # of a split
    scale_stride,
    K: tl.constexpr,
    SPLITS: tl.constexpr,
    GROUPS: tl.constexpr,
    DISTANCE: tl.constexpr,
    LARGEST: tl.constexpr,
    SHARED: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    NUM_CHOSEN_GROUPS: tl.constexpr,
    TOP_K: tl.constexpr,
    NORMALIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (i, t): ROWS of the router for token t, or for i after those, of the shared expert's gate_up; the last
    rounds the normalized row."""
    ROUTERS: tl.constexpr = (NUM_EXPERTS + ROWS - 1) // ROWS
    program, token = tl.program_id(0), tl.program_id(1).to(tl.int64)
    x += token * K
    rows_out += token * K
    normed_out += token * K
    logits += token * NUM_EXPERTS
    if SPLITS > 0:
        sums += token * K
    row = x, sums, norm_weight, eps, sums_stride, rows_out, normed_out
    if program < ROUTERS:
        own = program * ROWS + tl.arange(0, ROWS)
        _logits_of(own, row, router, router_bias, logits, K, SPLITS, NUM_EXPERTS, ROWS, BLOCK_K, PDL)
        tl.debug_barrier()  # orders all threads' stores before the one thread that increments the counter
        if tl.atomic_add(arrived + token, 1, sem="acq_rel", scope="gpu") == ROUTERS - 1:
            tl.store(arrived + token, 0)
            weights_out += token * TOP_K
            experts_out += token * TOP_K
            if NUM_GROUPS == 1:
                _choose(
                    logits, bias_of_choice, weights_out, experts_out, scaling, least_sum, NUM_EXPERTS, TOP_K, NORMALIZE
                )
            else:
                _choose_in_groups(
                    logits, bias_of_choice, weights_out, experts_out, scaling, least_sum,
                    NUM_EXPERTS, NUM_GROUPS, NUM_CHOSEN_GROUPS, TOP_K, NORMALIZE,
                )  # fmt: skip
    elif codes is not None and program == tl.num_programs(0) - 1:
        codes += token * (K // 2)
        _round(row, codes, scale + token, scale_stride, K, SPLITS, GROUPS, DISTANCE, BLOCK_K, LARGEST, INTERPRETED, PDL)
    elif SHARED > 0:
        first = (program - ROUTERS) * (ROWS // 2)
        shared_out += token * SHARED
        _shared_hidden(first, row, shared_gate_up, shared_gate, shared_out, K, SPLITS, SHARED, ROWS, BLOCK_K, PDL)


def route_rows(
    x: Tensor,  # [T, hidden], before the norm; each token reads the weights by itself
    norm_weight: Tensor,  # [hidden]
    eps: float,
    router: Tensor,  # [experts, hidden], of x's type or float32
    *,
    choice: Choice,
    arrived: Tensor,  # [T or more] int32, zeros
    router_bias: Tensor | None = None,  # [experts], added to the logits
    bias_of_choice: Tensor | None = None,  # [experts] float32, added to sigmoid scores for the choice; None = softmax
    shared_gate_up: Tensor | None = None,  # [2 * shared_size, hidden]: the gate rows, then the up rows
    shared_gate: Tensor | None = None,  # [1, hidden]: the shared expert's result is multiplied with sigmoid of it
    partial_sums: Tensor | None = None,  # [splits, T, hidden], float32 or of x's type: added to x before the norm
    rounded_for: PackedWords | None = None,  # the experts' weight whose inputs are rounded
    pdl: bool = False,
) -> Routed:
    """Everything that comes before the chosen experts. `arrived` is zeros again afterwards."""
    (num_tokens, hidden_size), num_experts = x.shape, router.shape[0]
    tensors = (x, norm_weight, router, router_bias, shared_gate_up, shared_gate, partial_sums)
    assert all(tensor is None or tensor.is_contiguous() for tensor in tensors) and num_tokens <= len(arrived)
    num_warps = NUM_WARPS if hidden_size <= LONG_ROWS else 2 * NUM_WARPS
    shared_size = 0 if shared_gate_up is None else shared_gate_up.shape[0] // 2
    logits = torch.empty(num_tokens, num_experts, dtype=router.dtype, device=x.device)
    routed = Routed(
        rows=x if partial_sums is None else torch.empty_like(x),  # other programs still read x
        normed=torch.empty_like(x),
        weights=x.new_empty(num_tokens, choice.top_k),
        experts=torch.empty(num_tokens, choice.top_k, dtype=torch.int32, device=x.device),
        shared=None if shared_gate_up is None else x.new_empty(num_tokens, shared_size),
        rounded=None if rounded_for is None else empty_rounded(num_tokens, rounded_for),
    )
    codes, scale = (None, None) if routed.rounded is None else routed.rounded
    launch(
        _route_rows_kernel,
        (cdiv(num_experts, ROWS) + cdiv(shared_size, ROWS // 2) + (codes is not None), num_tokens),
        x,
        partial_sums,
        norm_weight,
        router,
        router_bias,
        bias_of_choice,
        shared_gate_up,
        shared_gate,
        logits,
        arrived,
        *routed[:5],
        None if codes is None else codes.view(torch.uint16),
        scale,
        eps,
        choice.scaling,
        choice.least_sum,
        x.numel(),
        0 if scale is None else scale.stride(0),
        K=hidden_size,
        GROUPS=0 if scale is None else len(scale),
        DISTANCE=0 if rounded_for is None else rounded_for.distance,
        LARGEST=LARGEST,
        SPLITS=0 if partial_sums is None else partial_sums.shape[0],
        SHARED=shared_size,
        NUM_EXPERTS=num_experts,
        NUM_GROUPS=choice.num_groups,
        NUM_CHOSEN_GROUPS=choice.num_chosen_groups,
        TOP_K=choice.top_k,
        NORMALIZE=choice.normalize,
        ROWS=ROWS,
        BLOCK_K=256 * num_warps,
        INTERPRETED=interpreted(_route_rows_kernel),
        PDL=pdl,
        num_warps=num_warps,
        pdl=pdl,
    )
    return routed
