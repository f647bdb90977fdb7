"""What a mixture of experts computes before the chosen experts, in one launch for tens to hundreds of tokens: the norm,
the router and its choice.

A program reads the whole router for one or two tokens, most of it before the kernel before this one has ended. So this
is for small routers: with many experts, or for more tokens, reading it from L2 would take longer than three launches.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.launch import cdiv, launch, next_power_of_2
from nanovllm.kernels.linear.few_rows import _replaced
from nanovllm.kernels.linear.one_row import columns_of
from nanovllm.kernels.moe.route import top_experts

MOST_TOKENS = 256
ONE_EACH = 128  # up to this many tokens a program has one, which is about as many as there are multiprocessors
MOST_EXPERTS, LONGEST_ROWS = 32, 4096
NUM_WARPS = 8
BLOCK_K = 256
MOST_AHEAD = 3  # blocks of the router that registers hold before the wait


def route_tokens_serves(num_experts: int, hidden_size: int) -> bool:
    return num_experts <= MOST_EXPERTS and hidden_size <= LONGEST_ROWS


@triton.jit
def _normed(token, inside, x, sums, gains, normed_out, num_tokens, eps, K: tl.constexpr, SPLITS: tl.constexpr):
    """Add the partial sums to a token's row, in place, and write the norm of the result, if the token is `inside`."""
    column = tl.arange(0, gains.shape[0])
    mask, own = column < K, column < tl.where(inside, K, 0)
    value = tl.load(x + token * K + column, mask=mask, other=0.0).to(tl.float32)
    if SPLITS > 0:
        for split in tl.static_range(SPLITS):
            at = sums + (split * num_tokens + token) * K + column
            value += tl.load(at, mask=mask, other=0.0)
        rounded = value.to(x.dtype.element_ty)
        tl.store(x + token * K + column, rounded, mask=own)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / K + eps)
    tl.store(normed_out + token * K + column, (value * scale * gains).to(x.dtype.element_ty), mask=own)


@triton.jit(do_not_specialize=["num_tokens"])
def _route_tokens_kernel(
    x,  # [T, K]; partial sums are added in place
    sums,  # [SPLITS, T, K], or None
    norm_weight,  # [K]
    router,  # [NUM_EXPERTS, K]
    router_bias,  # [NUM_EXPERTS], or None
    normed_out,  # [T, K]
    logits_out,  # [T, NUM_EXPERTS], of the router's type
    weights_out,  # [T, TOP_K]
    experts_out,  # [T, TOP_K]
    num_tokens,
    eps,
    K: tl.constexpr,
    SPLITS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    NORMALIZE: tl.constexpr,
    TOKENS: tl.constexpr,  # per program
    ROW: tl.constexpr,  # K, padded to a power of two
    EXPERTS: tl.constexpr,  # NUM_EXPERTS, padded to a power of two
    CHOICES: tl.constexpr,  # TOP_K, padded to a power of two
    BLOCK_K: tl.constexpr,
    MOST_AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    AHEAD: tl.constexpr = min(STEPS, MOST_AHEAD)
    first = tl.program_id(0).to(tl.int64) * TOKENS
    expert, choice, k = tl.arange(0, EXPERTS), tl.arange(0, CHOICES), tl.arange(0, BLOCK_K)
    own = expert < NUM_EXPERTS
    pointers = router + tl.minimum(expert, NUM_EXPERTS - 1)[:, None] * K + k[None, :]
    ahead = ()  # type: tuple
    for step in tl.static_range(AHEAD):
        ahead += (columns_of(pointers, k[None, :], step * BLOCK_K, K, BLOCK_K),)
    column = tl.arange(0, ROW)
    gains = tl.load(norm_weight + column, mask=column < K, other=0.0).to(tl.float32)
    bias = tl.zeros([EXPERTS], tl.float32)
    if router_bias is not None:
        bias = tl.load(router_bias + expert, mask=own, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    for i in tl.static_range(TOKENS):
        token = tl.minimum(first + i, num_tokens - 1)
        _normed(token, first + i < num_tokens, x, sums, gains, normed_out, num_tokens, eps, K, SPLITS)
    tl.debug_barrier()  # the normalized rows are read by other threads than wrote them
    products = ()  # type: tuple
    for _ in tl.static_range(TOKENS):
        products += (tl.zeros([EXPERTS, BLOCK_K], tl.float32),)
    for step in tl.static_range(STEPS):
        w = ahead[step] if step < AHEAD else columns_of(pointers, k[None, :], step * BLOCK_K, K, BLOCK_K)
        for i in tl.static_range(TOKENS):
            token = tl.minimum(first + i, num_tokens - 1)
            row = columns_of(normed_out + token * K + k, k, step * BLOCK_K, K, BLOCK_K)
            products = _replaced(products, i, products[i] + w.to(tl.float32) * row.to(tl.float32)[None, :])
    for i in tl.static_range(TOKENS):
        token = tl.minimum(first + i, num_tokens - 1)
        found = tl.sum(products[i], 1) + bias
        found = tl.where(found == found, found, -6e4)  # what is no number could not be ranked
        # rounded as if the router were a linear of its own
        tl.store(logits_out + token * NUM_EXPERTS + expert, found.to(router.dtype.element_ty), mask=own)
    tl.debug_barrier()  # each warp has logits of a few experts: read back, each has all of them
    for i in tl.static_range(TOKENS):
        token = tl.minimum(first + i, num_tokens - 1)
        found = tl.load(logits_out + token * NUM_EXPERTS + expert, mask=own, other=float("-inf"))
        weights, chosen = top_experts(found.to(tl.float32), expert, choice, TOP_K, NORMALIZE)
        inside = choice < tl.where(first + i < num_tokens, TOP_K, 0)
        tl.store(weights_out + token * TOP_K + choice, weights.to(weights_out.dtype.element_ty), mask=inside)
        tl.store(experts_out + token * TOP_K + choice, chosen, mask=inside)


def route_tokens(
    x: Tensor,  # [T, hidden], before the norm
    norm_weight: Tensor,  # [hidden]
    eps: float,
    router: Tensor,  # [experts, hidden], of x's type
    *,
    top_k: int,
    normalize: bool,
    router_bias: Tensor | None = None,  # [experts], added to the logits
    partial_sums: Tensor | None = None,  # [splits, T, hidden], float32 or of x's type: added to x in place
    pdl: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """The normalized rows, and for each token the weights, of x's type, and the experts, int32, [T, top_k]."""
    (num_tokens, hidden_size), num_experts = x.shape, router.shape[0]
    tensors = (x, norm_weight, router, router_bias, partial_sums)
    assert all(tensor is None or tensor.is_contiguous() for tensor in tensors)
    assert route_tokens_serves(num_experts, hidden_size)
    tokens_each = 1 if num_tokens <= ONE_EACH else 2
    normed, weights = torch.empty_like(x), x.new_empty(num_tokens, top_k)
    logits = torch.empty(num_tokens, num_experts, dtype=router.dtype, device=x.device)
    experts = torch.empty(num_tokens, top_k, dtype=torch.int32, device=x.device)
    launch(
        _route_tokens_kernel,
        (cdiv(num_tokens, tokens_each),),
        x,
        partial_sums,
        norm_weight,
        router,
        router_bias,
        normed,
        logits,
        weights,
        experts,
        num_tokens,
        eps,
        K=hidden_size,
        SPLITS=0 if partial_sums is None else partial_sums.shape[0],
        NUM_EXPERTS=num_experts,
        TOP_K=top_k,
        NORMALIZE=normalize,
        TOKENS=tokens_each,
        ROW=next_power_of_2(hidden_size),
        EXPERTS=next_power_of_2(num_experts),
        CHOICES=next_power_of_2(top_k),
        BLOCK_K=BLOCK_K,
        MOST_AHEAD=MOST_AHEAD,
        PDL=pdl,
        num_warps=NUM_WARPS,
        pdl=pdl,
    )
    return normed, weights, experts
