"""Flash attention of long prefill chunks over the paged cache, on Hopper.

A program has a tile of queries, as in prefill.py, and walks the key tiles from the newest to the oldest, so that the
tiles that need a mask come first (and last, with a window). A producer warp copies keys and values through the block
table with TMA into two shared-memory stages each. Two consumer warpgroups have half of the queries each. A warpgroup
starts the scores of the next key tile before it multiplies the probabilities of this one by its values, and computes
its softmax while the tensor cores do the latter. The warpgroups take turns in starting their products, so that the
softmax of one runs during the products of the other.

Written in Gluon, as kernels/linear/many_rows.py. Tests without a GPU only compile the kernel. prefill.py is the
reference, and faster for short prompts.
"""

import math

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from nanovllm.kernels.launch import launch

ROWS = gl.constexpr(64)  # queries per warpgroup
TILE = gl.constexpr(128)  # positions of a key tile
HEAD_DIM = gl.constexpr(128)
HALF = gl.constexpr(64)  # of the head: what one row of a swizzled shared-memory tile holds
STAGES = gl.constexpr(2)

SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2))
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
QUERIES = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
OUTPUT = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))

# names of Triton 3.7 and later, or of 3.6
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier
_async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_Memory = gl.shared_memory_descriptor
_view = getattr(_Memory, "reinterpret", None) or _Memory._reinterpret


@gluon.jit
def _produce(kv, table, kv_head, value_rows, memory, tile, KV_HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr):
    """The producer warp: copy the keys and values of all tiles, the newest first."""
    BLOCKS: gl.constexpr = TILE // BLOCK_SIZE  # per tile
    ks, vs, k_full, k_empty, v_full, v_empty, turns, cleared = memory
    first_position, low, high, last_tile, num_tiles = tile
    last_block = (high - 1) // BLOCK_SIZE
    for it in range(num_tiles):
        first_block = (last_tile - it) * BLOCKS
        rows: gl.tuple = ()
        for b in gl.static_range(BLOCKS):
            block = gl.load(table + gl.minimum(first_block + b, last_block))
            rows = rows + ((block * KV_HEADS + kv_head) * BLOCK_SIZE,)
        slot = it % STAGES
        # waiting for parity 1 of a new barrier returns at once
        mbarrier.wait(k_empty.index(slot), (it // STAGES + 1) & 1)
        mbarrier.expect(k_full.index(slot), TILE * HEAD_DIM * 2)
        for b in gl.static_range(BLOCKS):
            for h in gl.static_range(2):
                part = ks.index((slot * 2 + h) * BLOCKS + b)
                _async_load(kv, [rows[b], h * HALF], k_full.index(slot), part)
        mbarrier.wait(v_empty.index(slot), (it // STAGES + 1) & 1)
        mbarrier.expect(v_full.index(slot), TILE * HEAD_DIM * 2)
        for b in gl.static_range(BLOCKS):
            for h in gl.static_range(2):
                part = vs.index((slot * 2 + h) * BLOCKS + b)
                _async_load(kv, [value_rows + rows[b], h * HALF], v_full.index(slot), part)


@gluon.jit
def _load_queries(
    qs,
    q_base,
    cos_sin,
    q_norm,
    eps,
    num_rows,
    G: gl.constexpr,
    TOKEN_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    NORM: gl.constexpr,
):
    """Norm and rotate this warpgroup's queries, and put them into shared memory."""
    rows = G * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, QUERIES))
    cols = gl.arange(0, HALF, gl.SliceLayout(0, QUERIES))
    used = (rows < num_rows)[:, None] & (cols >= 0)[None, :]
    pointers = q_base + ((rows // GROUP * TOKEN_HEADS + rows % GROUP) * HEAD_DIM)[:, None] + cols[None, :]
    x1 = gl.load(pointers, mask=used, other=0.0).to(gl.float32)
    x2 = gl.load(pointers + HALF, mask=used, other=0.0).to(gl.float32)
    angles = cos_sin + (rows // GROUP * HEAD_DIM)[:, None] + cols[None, :]
    cos = gl.load(angles, mask=used, other=0.0)
    sin = gl.load(angles + HALF, mask=used, other=0.0)
    if NORM:
        mean = (gl.sum(x1 * x1, 1) + gl.sum(x2 * x2, 1)) / HEAD_DIM
        factor = gl.rsqrt(mean + eps)[:, None]
        x1 = x1 * factor * gl.load(q_norm + cols).to(gl.float32)[None, :]
        x2 = x2 * factor * gl.load(q_norm + HALF + cols).to(gl.float32)[None, :]
    qs.index(2 * G).store((x1 * cos - x2 * sin).to(qs.dtype))
    qs.index(2 * G + 1).store((x2 * cos + x1 * sin).to(qs.dtype))
    fence_async_shared()
    _barrier()


@gluon.jit
def _begin_scores(q, ks, it):
    """Start the scores of the it-th key tile, whose keys have arrived."""
    scores = gl.zeros([ROWS, TILE], gl.float32, SCORES)
    return warpgroup_mma(q, ks.index(it % STAGES).permute([1, 0]), scores, use_acc=False, is_async=True)


@gluon.jit
def _begin_values(acc, p, vs, v_full, it):
    """Start adding the values of the it-th key tile, weighted by the probabilities `p`."""
    slot = it % STAGES
    mbarrier.wait(v_full.index(slot), it // STAGES & 1)
    return warpgroup_mma(p, vs.index(slot), acc, is_async=True)


@gluon.jit
def _clear_values(vs, v_full, cleared, it, tile, low, high, G: gl.constexpr):
    """Zero the values of a tile that lie outside the positions low to high: a probability of 0 times NaN is NaN.

    Each warpgroup clears half of the head dimensions and waits for the other.
    """
    slot = it % STAGES
    mbarrier.wait(v_full.index(slot), it // STAGES & 1)
    half = _view(vs, vs.dtype, [2 * STAGES, TILE, HALF], SHARED).index(2 * slot + G)
    positions = tile * TILE + gl.arange(0, TILE, gl.SliceLayout(1, QUERIES))
    inside = (positions >= low) & (positions < high)
    values = half.load(QUERIES)
    half.store(gl.where(inside[:, None], values, gl.zeros_like(values)))
    fence_async_shared()
    _barrier()
    mbarrier.arrive(cleared, count=1)
    mbarrier.wait(cleared, 0)


@gluon.jit
def _release(empty, it):
    _barrier()  # all four warps have finished reading
    mbarrier.arrive(empty.index(it % STAGES), count=1)


@gluon.jit
def _exp2(x):
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _softmax(
    scores,
    largest,
    total,
    score_scale,
    first_position,
    q_positions,
    WINDOW: gl.constexpr,
    MASKED: gl.constexpr,
    DTYPE: gl.constexpr,
):
    """Probabilities of a tile relative to the new maximum, and the factor for what was summed before."""
    if MASKED:
        positions = first_position + gl.arange(0, TILE, gl.SliceLayout(0, SCORES))
        visible = positions[None, :] <= q_positions[:, None]
        if WINDOW > 0:
            visible = visible & (positions[None, :] > (q_positions - WINDOW)[:, None])
        scores = gl.where(visible, scores, float("-inf"))
    new_largest = gl.maximum(largest, gl.max(scores, 1) * score_scale)
    p = _exp2(gl.fma(scores, gl.full_like(scores, score_scale), gl.zeros_like(scores) - new_largest[:, None]))
    shrink = _exp2(largest - new_largest)
    total = total * shrink + gl.sum(p, 1)
    return gl.convert_layout(p.to(DTYPE), gl.DotOperandLayout(0, SCORES, 2)), new_largest, total, shrink


@gluon.jit
def _take_in(
    state,
    begin,
    end,
    scored,
    memory,
    tile,
    G: gl.constexpr,
    WINDOW: gl.constexpr,
    MASKED: gl.constexpr,
):
    """Add the key tiles begin to end, counted from the newest, to the state of the online softmax."""
    acc, p, largest, total = state
    q, q_positions, score_scale = scored
    ks, vs, k_full, k_empty, v_full, v_empty, turns, cleared = memory
    first_position, low, high, last_tile, num_tiles = tile
    k_tiles = _view(ks, ks.dtype, [STAGES, TILE, HEAD_DIM], SHARED)
    v_tiles = _view(vs, vs.dtype, [STAGES, TILE, HEAD_DIM], SHARED)
    for it in range(begin, end):
        scores = _begin_scores(q, k_tiles, it)
        acc = _begin_values(acc, p, v_tiles, v_full, it - 1)
        mbarrier.arrive(turns.index(1 - G), count=1)
        scores = warpgroup_mma_wait(1, deps=[scores])
        _release(k_empty, it)
        new_p, largest, total, shrink = _softmax(
            scores, largest, total, score_scale, (last_tile - it) * TILE, q_positions, WINDOW, MASKED, ks.dtype
        )
        # These waits are loops. They stand between the softmax and the wait for the product before it, because the
        # compiler does not move code over a loop; without them it computes the softmax after that product.
        following = it + 1
        mbarrier.wait(k_full.index(following % STAGES), following // STAGES & 1, pred=following < num_tiles)
        mbarrier.wait(turns.index(G), (it + 1 + G) & 1)
        acc, p, new_p, shrink = warpgroup_mma_wait(0, deps=[acc, p, new_p, shrink])
        _release(v_empty, it - 1)
        acc = acc * shrink[:, None]
        p = new_p
    return acc, p, largest, total


@gluon.jit
def _attend(
    queries,
    memory,
    tile,
    G: gl.constexpr,
    HEADS: gl.constexpr,
    KV_HEADS: gl.constexpr,
    WINDOW: gl.constexpr,
    NORM: gl.constexpr,
):
    """Consumer warpgroup G: attention of its queries."""
    GROUP: gl.constexpr = HEADS // KV_HEADS
    q_base, angles, q_norm, eps, out_base, num_rows, score_scale, num_masked, num_inside, qs = queries
    ks, vs, k_full, k_empty, v_full, v_empty, turns, cleared = memory
    first_position, low, high, last_tile, num_tiles = tile
    _load_queries(qs, q_base, angles, q_norm, eps, num_rows, G, HEADS + 2 * KV_HEADS, GROUP, NORM)
    q = _view(qs, qs.dtype, [2, ROWS, HEAD_DIM], SHARED).index(G)
    rows = G * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
    q_positions = first_position + rows // GROUP

    mbarrier.wait(k_full.index(0), 0)
    scores = _begin_scores(q, _view(ks, ks.dtype, [STAGES, TILE, HEAD_DIM], SHARED), 0)
    scores = warpgroup_mma_wait(0, deps=[scores])
    _release(k_empty, 0)
    largest = gl.full([ROWS], -1e30, gl.float32, gl.SliceLayout(1, SCORES))  # finite, for rows that see no key yet
    total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, SCORES))
    p, largest, total, shrink = _softmax(
        scores, largest, total, score_scale, last_tile * TILE, q_positions, WINDOW, True, ks.dtype
    )
    _clear_values(vs, v_full, cleared.index(0), 0, last_tile, low, high, G)
    mbarrier.wait(k_full.index(1), 0, pred=num_tiles > 1)
    if G == 1:
        mbarrier.wait(turns.index(1), 0)
    state = gl.zeros([ROWS, HEAD_DIM], gl.float32, SCORES), p, largest, total
    scored = q, q_positions, score_scale
    state = _take_in(state, 1, num_masked, scored, memory, tile, G, WINDOW, True)
    state = _take_in(state, num_masked, num_inside, scored, memory, tile, G, WINDOW, False)
    if WINDOW > 0:
        state = _take_in(state, num_inside, num_tiles, scored, memory, tile, G, WINDOW, True)
    if G == 0:
        mbarrier.arrive(turns.index(1), count=1)  # the other warpgroup waits for one turn more than it takes
    if WINDOW > 0:
        _clear_values(vs, v_full, cleared.index(1), num_tiles - 1, last_tile - num_tiles + 1, low, high, G)
    acc, p, largest, total = state
    acc = _begin_values(acc, p, _view(vs, vs.dtype, [STAGES, TILE, HEAD_DIM], SHARED), v_full, num_tiles - 1)
    acc, p = warpgroup_mma_wait(0, deps=[acc, p])
    result = gl.convert_layout((acc * (1.0 / total)[:, None]).to(qs.dtype), OUTPUT)
    rows = G * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, OUTPUT))
    cols = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, OUTPUT))
    pointers = out_base + ((rows // GROUP * HEADS + rows % GROUP) * HEAD_DIM)[:, None] + cols[None, :]
    gl.store(pointers, result, mask=(rows < num_rows)[:, None] & (cols >= 0)[None, :])


# views into a step's packed buffer have any alignment: compile one kernel for all
@gluon.jit(
    do_not_specialize=["num_blocks", "max_blocks"],
    do_not_specialize_on_alignment=["chunk_rows", "chunk_starts", "chunk_first_tokens", "chunk_num_new", "tiles"],
)
def _long_prefill_kernel(
    q_source,
    kv,
    out,
    q_norm,
    cos_sin,
    chunk_rows,
    chunk_starts,
    chunk_first_tokens,
    chunk_num_new,
    tiles,
    blocks,
    eps,
    max_blocks,
    num_blocks,
    score_scale,  # times log2(e), for exp2
    HEADS: gl.constexpr,
    KV_HEADS: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    WINDOW: gl.constexpr,  # 0: none
    NORM: gl.constexpr,
):
    GROUP: gl.constexpr = HEADS // KV_HEADS
    TOKENS: gl.constexpr = 2 * ROWS // GROUP
    TILE_BLOCKS: gl.constexpr = TILE // BLOCK_SIZE
    kv_head = gl.program_id(1)
    chunk = gl.load(tiles + 2 * gl.program_id(0))
    first_new = gl.load(tiles + 2 * gl.program_id(0) + 1) * TOKENS  # of the tile, relative to the chunk
    start = gl.load(chunk_starts + chunk)
    num_new = gl.minimum(gl.load(chunk_num_new + chunk) - first_new, TOKENS)
    table = blocks + gl.load(chunk_rows + chunk).to(gl.int64) * max_blocks
    first_token = gl.load(chunk_first_tokens + chunk).to(gl.int64) + first_new
    first_position = start + first_new
    last_position = first_position + num_new - 1

    # Key tiles that some query sees, and those that every query sees whole. Counted from the newest: `num_masked`
    # tiles with a mask, then those without up to `num_inside`, then those that a window cuts.
    low = gl.maximum(first_position - WINDOW + 1, 0) if WINDOW > 0 else first_position * 0
    last_tile = last_position // TILE
    num_tiles = last_tile - low // TILE + 1
    num_masked = gl.minimum(gl.maximum(last_tile + 1 - (first_position + 1) // TILE, 1), num_tiles)
    num_inside = num_tiles
    if WINDOW > 0:
        first_whole = gl.maximum(last_position - WINDOW + TILE, 0) // TILE
        num_inside = gl.minimum(gl.maximum(last_tile + 1 - first_whole, num_masked), num_tiles)

    qs = gl.allocate_shared_memory(q_source.dtype.element_ty, [4, ROWS, HALF], SHARED)
    ks = gl.allocate_shared_memory(kv.dtype, [STAGES * 2 * TILE_BLOCKS, BLOCK_SIZE, HALF], SHARED)
    vs = gl.allocate_shared_memory(kv.dtype, [STAGES * 2 * TILE_BLOCKS, BLOCK_SIZE, HALF], SHARED)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(k_full.index(s), count=1)
        mbarrier.init(k_empty.index(s), count=2)
        mbarrier.init(v_full.index(s), count=1)
        mbarrier.init(v_empty.index(s), count=2)
    cleared = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for g in gl.static_range(2):
        mbarrier.init(turns.index(g), count=1)
        mbarrier.init(cleared.index(g), count=2)
    fence_async_shared()
    _barrier()

    TOKEN_HEADS: gl.constexpr = HEADS + 2 * KV_HEADS
    q_base = q_source + (first_token * TOKEN_HEADS + kv_head * GROUP) * HEAD_DIM
    out_base = out + (first_token * HEADS + kv_head * GROUP) * HEAD_DIM
    angles = cos_sin + first_position.to(gl.int64) * HEAD_DIM
    num_rows = num_new * GROUP
    value_rows = num_blocks * (KV_HEADS * BLOCK_SIZE)
    memory = ks, vs, k_full, k_empty, v_full, v_empty, turns, cleared
    tile = first_position, low, last_position + 1, last_tile, num_tiles
    queries = q_base, angles, q_norm, eps, out_base, num_rows, score_scale, num_masked, num_inside, qs
    gl.warp_specialize(
        [
            (_attend, (queries, memory, tile, 0, HEADS, KV_HEADS, WINDOW, NORM)),
            (_attend, (queries, memory, tile, 1, HEADS, KV_HEADS, WINDOW, NORM)),
            (_produce, (kv, table, kv_head, value_rows, memory, tile, KV_HEADS, BLOCK_SIZE)),
        ],
        worker_num_warps=[4, 1],
        worker_num_regs=[240, 24],
    )


def long_prefill(
    q_source: Tensor,  # [num_tokens, heads + 2 * kv_heads, head_dim]
    cache: Tensor,  # [2, num_blocks, kv_heads, block_size, head_dim], with the chunks' own keys and values
    *,
    q_norm: Tensor | None,  # [head_dim]
    eps: float,
    cos_sin: Tensor,  # [max_position, head_dim] float32
    chunk_rows: Tensor,  # [num_chunks], rows of `blocks`
    chunk_starts: Tensor,  # [num_chunks], position of a chunk's first token
    chunk_first_tokens: Tensor,  # [num_chunks] index of that token in q_source
    chunk_num_new: Tensor,  # [num_chunks]
    tiles: Tensor,  # [num_tiles, 2], from `query_tiles` with 2 * ROWS // group tokens per tile
    blocks: Tensor,  # [num_rows, max_blocks]
    num_heads: int,
    num_kv_heads: int,
    window: int | None,
    scale: float,  # of the scores before the softmax
    out: Tensor,  # [num_tokens, heads * head_dim]; only the chunks' tokens are written
) -> None:
    block_size = cache.shape[3]
    assert cache.shape[4] == HEAD_DIM.value and TILE.value % block_size == 0 and cache.dtype == q_source.dtype
    assert q_source.is_contiguous() and cache.is_contiguous() and out.is_contiguous() and cos_sin.is_contiguous()
    assert tiles.is_contiguous() and blocks.stride(1) == 1 and out.dtype == q_source.dtype
    rows = cache.view(-1, cache.shape[4])
    launch(
        _long_prefill_kernel,
        (tiles.shape[0], num_kv_heads),
        q_source,
        TensorDescriptor(rows, list(rows.shape), list(rows.stride()), [block_size, HALF.value], SHARED.value),
        out,
        cos_sin if q_norm is None else q_norm,
        cos_sin,
        chunk_rows,
        chunk_starts,
        chunk_first_tokens,
        chunk_num_new,
        tiles,
        blocks,
        eps,
        blocks.stride(0),
        cache.shape[1],
        scale * math.log2(math.e),
        HEADS=num_heads,
        KV_HEADS=num_kv_heads,
        BLOCK_SIZE=block_size,
        WINDOW=window or 0,
        NORM=q_norm is not None,
        num_warps=4,
    )
