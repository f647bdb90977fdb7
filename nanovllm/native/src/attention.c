#include "attention.h"
#include <math.h>
#include "simd.h"

#if HAVE_SIMD

enum { PART = 32, MOST_HEADS = 4 }; /* positions of a block, and query heads of one KV head, at a time */

static float *partial_of(const Attention *a, int token, int segment, int head) {
    const int64_t index = (int64_t)(a->first_segments[token] + segment) * a->num_heads + head;
    return a->partial + index * (a->head_dim + 2);
}

/* The index in `keys`, and in `values`, of a position. */
static int64_t index_of(const Attention *a, const int32_t *blocks, int kv_head, int position) {
    const int64_t block = blocks[position / a->block_size];
    return ((block * a->num_kv_heads + kv_head) * a->block_size + position % a->block_size) * a->head_dim;
}

/* The scores of PART or fewer positions, whose keys begin at `at`, for each of `heads` queries; the rest are 0. Their
 * values are fetched from memory meanwhile. */
INLINE void scores_of(const Attention *a, const float *const queries[], const int heads, int64_t at, int count,
                      const int type, float scores[][PART]) {
    const int dim = a->head_dim;
    const f32x4 scale = splat(a->scale);
    for (int p = 0; p < PART; p += 4) {
        f32x4 sum[MOST_HEADS][4];
        int64_t key[4];
        for (int h = 0; h < heads; h++)
            for (int j = 0; j < 4; j++) sum[h][j] = splat(0);
        for (int j = 0; j < 4; j++) key[j] = at + (int64_t)(p + j < count ? p + j : 0) * dim;
        for (int d = 0; p < count && d < dim; d += 4) {
            f32x4 keys[4];
            if (d % 16 == 0)
                for (int j = 0; j < 4; j++) fetch_as(a->values, key[j] + d, type);
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) keys[j] = load_as(a->keys, key[j] + d, type);
#pragma GCC unroll 4
            for (int h = 0; h < heads; h++) {
                const f32x4 query = load(queries[h] + d);
#pragma GCC unroll 4
                for (int j = 0; j < 4; j++) sum[h][j] = multiply_add(sum[h][j], query, keys[j]);
            }
        }
#pragma GCC unroll 4
        for (int h = 0; h < heads; h++)
            store(scores[h] + p, sums_of(sum[h][0], sum[h][1], sum[h][2], sum[h][3]) * scale);
    }
}

/* Turn scores into weights relative to the largest score so far; what the sums so far are multiplied with. */
INLINE float weights_of(float scores[PART], int count, float *most, float *total) {
    for (int p = count; p < PART; p++) scores[p] = -INFINITY;
    f32x4 largest = splat(*most), sum = splat(0);
    for (int p = 0; p < PART; p += 4) largest = larger(largest, load(scores + p));
    const float before = *most, now = largest_of(largest);
    for (int p = 0; p < PART; p += 4) store(scores + p, exponential(load(scores + p) - splat(now)));
    for (int p = count; p < PART; p++) scores[p] = 0;
    for (int p = 0; p < PART; p += 4) sum += load(scores + p);
    const float decay = exponential(splat(before - now))[0];
    *most = now;
    *total = *total * decay + sum_of(sum);
    return decay;
}

/* Add PART or fewer positions, from index `at` on, to the weighted values, largest scores and sums of `heads` query
 * heads. Keys from index `next` on are fetched from memory meanwhile. */
INLINE void add_part(const Attention *a, const float *const queries[], float *const states[], const int heads,
                     int64_t at, int64_t next, int count, const int type) {
    const int dim = a->head_dim;
    float weights[MOST_HEADS][PART], decay[MOST_HEADS];
    scores_of(a, queries, heads, at, count, type, weights);
    for (int h = 0; h < heads; h++) decay[h] = weights_of(weights[h], count, states[h] + dim, states[h] + dim + 1);
    for (int d = 0; d < dim; d += 16) {
        f32x4 sum[MOST_HEADS][4];
#pragma GCC unroll 4
        for (int h = 0; h < heads; h++)
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) sum[h][j] = load(states[h] + d + 4 * j) * splat(decay[h]);
        for (int p = 0; p < count; p++) {
            f32x4 values[4];
            fetch_as(a->keys, next + (int64_t)p * dim + d, type);
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) values[j] = load_as(a->values, at + (int64_t)p * dim + d + 4 * j, type);
#pragma GCC unroll 4
            for (int h = 0; h < heads; h++)
#pragma GCC unroll 4
                for (int j = 0; j < 4; j++) sum[h][j] = multiply_add(sum[h][j], splat(weights[h][p]), values[j]);
        }
#pragma GCC unroll 4
        for (int h = 0; h < heads; h++)
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) store(states[h] + d + 4 * j, sum[h][j]);
    }
}

/* Compiled for each number of heads and each type of KV cache. */
#define BY_HEADS(type)                                                              \
    switch (heads) {                                                                \
        case 1: add_part(a, queries, states, 1, at, next, count, type); break;      \
        case 2: add_part(a, queries, states, 2, at, next, count, type); break;      \
        case 3: add_part(a, queries, states, 3, at, next, count, type); break;      \
        default: add_part(a, queries, states, 4, at, next, count, type);            \
    }

static void add_heads(const Attention *a, const float *const queries[], float *const states[], int heads, int64_t at,
                      int64_t next, int count) {
    switch (a->type) {
        case FLOAT32: BY_HEADS(FLOAT32) break;
        case BFLOAT16: BY_HEADS(BFLOAT16) break;
        default: BY_HEADS(FLOAT16)
    }
}

void attend_segment(const Attention *a, int token, int kv_head, int segment) {
    const int heads = a->num_heads / a->num_kv_heads, dim = a->head_dim, size = a->block_size;
    const int last = a->positions[token] + 1, first = segment * SEGMENT;
    const int end = first + SEGMENT < last ? first + SEGMENT : last;
    const int begin = a->window && last - a->window > first ? last - a->window : first;
    const int32_t *blocks = a->tables[token] + a->table_offset;
    for (int h = 0; h < heads; h++) {
        float *state = partial_of(a, token, segment, kv_head * heads + h);
        memset(state, 0, (size_t)dim * sizeof(float));
        state[dim] = -1e30f;
        state[dim + 1] = 0;
    }
    const int next_head = (kv_head + 1) % a->num_kv_heads; /* of this segment, which the same thread often has next */
    for (int position = begin, count; position < end; position += count) {
        count = PART - position % PART;
        if (count > size - position % size) count = size - position % size;
        if (count > end - position) count = end - position;
        const int after = position + count;
        const int64_t at = index_of(a, blocks, kv_head, position);
        const int64_t next = index_of(a, blocks, after < end ? kv_head : next_head, after < end ? after : begin);
        for (int first = 0; first < heads; first += MOST_HEADS) {
            const int here = heads - first < MOST_HEADS ? heads - first : MOST_HEADS;
            const float *queries[MOST_HEADS];
            float *states[MOST_HEADS];
            for (int h = 0; h < here; h++) {
                const int head = kv_head * heads + first + h;
                queries[h] = a->queries + token * a->query_stride + (int64_t)head * dim;
                states[h] = partial_of(a, token, segment, head);
            }
            add_heads(a, queries, states, here, at, next, count);
        }
    }
}

void attend_merge(const Attention *a, int token, float *out) {
    const int segments = num_segments(a, token), dim = a->head_dim;
    for (int head = 0; head < a->num_heads; head++, out += dim) {
        float most = -1e30f, total = 0;
        for (int s = 0; s < segments; s++) most = fmaxf(most, partial_of(a, token, s, head)[dim]);
        memset(out, 0, (size_t)dim * sizeof(float));
        for (int s = 0; s < segments; s++) {
            const float *state = partial_of(a, token, s, head);
            const float weight = exponential(splat(state[dim] - most))[0];
            total = fmaf(state[dim + 1], weight, total);
            for (int d = 0; d < dim; d += 4)
                store(out + d, multiply_add(load(out + d), load(state + d), splat(weight)));
        }
        const f32x4 inverse = splat(1.0f / total);
        for (int d = 0; d < dim; d += 4) store(out + d, load(out + d) * inverse);
    }
}

#endif
