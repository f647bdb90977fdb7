#include "attention.h"
#include <math.h>
#include "simd.h"

#if HAVE_SIMD

/* Positions of a block, and queries of one KV head, at a time; and queries whose sums are in registers: gcc has too few
 * for four. */
enum { PART = 32, MOST_QUERIES = 24, IN_REGISTERS = 3 };
enum { VECTORS = 16 / LANES }; /* of the 16 numbers of a head that are added up at a time */

static float *partial_of(const Attention *a, int token, int segment, int head) {
    const int64_t index = (int64_t)(a->first_segments[token] + segment) * a->num_heads + head;
    return a->partial + index * (a->head_dim + 2);
}

/* The index in `keys`, and in `values`, of a position. */
static int64_t index_of(const Attention *a, const int32_t *blocks, int kv_head, int position) {
    const int64_t block = blocks[position / a->block_size];
    return ((block * a->num_kv_heads + kv_head) * a->block_size + position % a->block_size) * a->head_dim;
}

/* The scores of PART or fewer positions, whose keys begin at `at`, for each of `num` queries; the rest are 0. With
 * `fetches` their values are fetched from memory meanwhile. */
INLINE void scores_of(const int num, const Attention *a, const float *const queries[], int64_t at, int count,
                      int fetches, const int type, float scores[][PART]) {
    const int dim = a->head_dim;
    const f32x4 scale = splat(a->scale);
    for (int p = 0; p < PART; p += 4) {
        wide sum[IN_REGISTERS][4];
        int64_t key[4];
        for (int q = 0; q < num; q++)
            for (int j = 0; j < 4; j++) sum[q][j] = wide_splat(0);
        for (int j = 0; j < 4; j++) key[j] = at + (int64_t)(p + j < count ? p + j : 0) * dim;
        for (int d = 0; p < count && d < dim; d += 16) {
            for (int j = 0; fetches && j < 4; j++) fetch_as(a->values, key[j] + d, type);
#pragma GCC unroll 4
            for (int i = d; i < d + 16; i += LANES) {
                wide keys[4];
#pragma GCC unroll 4
                for (int j = 0; j < 4; j++) keys[j] = wide_load_as(a->keys, key[j] + i, type);
#pragma GCC unroll 4
                for (int q = 0; q < num; q++) {
                    const wide query = wide_load(queries[q] + i);
#pragma GCC unroll 4
                    for (int j = 0; j < 4; j++) sum[q][j] = wide_multiply_add(sum[q][j], query, keys[j]);
                }
            }
        }
#pragma GCC unroll 4
        for (int q = 0; q < num; q++)
            store(scores[q] + p, wide_sums_of(sum[q][0], sum[q][1], sum[q][2], sum[q][3]) * scale);
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

/* Multiply the weighted values of `num` queries so far with `decay` and add those of `count` positions from index `at`
 * on. With `fetches` the keys from index `next` on are fetched from memory meanwhile. */
INLINE void add_values(const int num, const Attention *a, float *const states[], const float decay[], int64_t at,
                       int64_t next, int count, int fetches, const int type, float weights[][PART]) {
    const int dim = a->head_dim;
#define ADD_SPLAT(sum, a, x, index) wide_multiply_add(sum, a, wide_splat((x)[index]))
#define ADD_POSITION(position, add, weight, index)                                                             \
    {                                                                                                          \
        wide values[VECTORS];                                                                                  \
        if (fetches) fetch_as(a->keys, next + (int64_t)(position) * dim + d, type);                            \
        _Pragma("GCC unroll 4") for (int j = 0; j < VECTORS; j++)                                              \
            values[j] = wide_load_as(a->values, at + (int64_t)(position) * dim + d + LANES * j, type);         \
        _Pragma("GCC unroll 4") for (int q = 0; q < num; q++)                                                  \
            _Pragma("GCC unroll 4") for (int j = 0; j < VECTORS; j++)                                          \
                sum[q][j] = add(sum[q][j], values[j], weight, index);                                          \
    }
    for (int d = 0; d < dim; d += 16) {
        wide sum[IN_REGISTERS][VECTORS];
        int p = 0;
#pragma GCC unroll 4
        for (int q = 0; q < num; q++)
#pragma GCC unroll 4
            for (int j = 0; j < VECTORS; j++)
                sum[q][j] = wide_load(states[q] + d + LANES * j) * wide_splat(decay[q]);
        for (; p + 4 <= count; p += 4) {
            Lanes here[IN_REGISTERS];
#pragma GCC unroll 4
            for (int q = 0; q < num; q++) here[q] = load_lanes(weights[q] + p);
            ADD_POSITION(p, WIDE_ADD_LANE, here[q], 0)
            ADD_POSITION(p + 1, WIDE_ADD_LANE, here[q], 1)
            ADD_POSITION(p + 2, WIDE_ADD_LANE, here[q], 2)
            ADD_POSITION(p + 3, WIDE_ADD_LANE, here[q], 3)
        }
        for (; p < count; p++) ADD_POSITION(p, ADD_SPLAT, weights[q], p)
#pragma GCC unroll 4
        for (int q = 0; q < num; q++)
#pragma GCC unroll 4
            for (int j = 0; j < VECTORS; j++) wide_store(states[q] + d + LANES * j, sum[q][j]);
    }
}

/* Call a function whose first argument, the number of queries, is a constant. */
#define BY_QUERIES(num, function, ...)               \
    switch (num) {                                   \
        case 1: function(1, __VA_ARGS__); break;     \
        case 2: function(2, __VA_ARGS__); break;     \
        default: function(3, __VA_ARGS__);           \
    }

/* How many of the queries that are left have their sums in registers next: four are two and two. */
static int next_queries(int left) { return left == 4 ? 2 : left < IN_REGISTERS ? left : IN_REGISTERS; }

/* Add positions, at most PART in one block, to the weighted values, largest scores and sums of queries. A query attends
 * to the positions before its `end`; it has weights of 0 for those after it. */
INLINE void add_part(const Attention *a, int num, const float *const queries[], float *const states[],
                     const int ends[], int position, int64_t at, int64_t next, int count, const int type) {
    float weights[MOST_QUERIES][PART], decay[MOST_QUERIES];
    for (int q = 0, here; q < num; q += here) {
        here = next_queries(num - q);
        BY_QUERIES(here, scores_of, a, queries + q, at, count, q == 0, type, weights + q)
    }
    for (int q = 0; q < num; q++) {
        const int own = ends[q] - position < count ? ends[q] - position : count;
        decay[q] = weights_of(weights[q], own, states[q] + a->head_dim, states[q] + a->head_dim + 1);
    }
    for (int q = 0, here; q < num; q += here) {
        here = next_queries(num - q);
        BY_QUERIES(here, add_values, a, states + q, decay + q, at, next, count, q == 0, type, weights + q)
    }
}

/* The same for the queries of tokens for one KV head. */
static void add_positions(const Attention *a, int token, int num_tokens, int kv_head, int segment, int position,
                          int64_t at, int64_t next, int count) {
    const int heads = a->num_heads / a->num_kv_heads;
    for (int first = 0; first < num_tokens * heads; first += MOST_QUERIES) {
        const int left = num_tokens * heads - first, num = left < MOST_QUERIES ? left : MOST_QUERIES;
        const float *queries[MOST_QUERIES];
        float *states[MOST_QUERIES];
        int ends[MOST_QUERIES];
        for (int q = 0; q < num; q++) {
            const int own = token + (first + q) / heads, head = kv_head * heads + (first + q) % heads;
            queries[q] = a->queries + own * a->query_stride + (int64_t)head * a->head_dim;
            states[q] = partial_of(a, own, segment, head);
            ends[q] = a->positions[own] + 1;
        }
        switch (a->type) {
            case FLOAT32: add_part(a, num, queries, states, ends, position, at, next, count, FLOAT32); break;
            case BFLOAT16: add_part(a, num, queries, states, ends, position, at, next, count, BFLOAT16); break;
            default: add_part(a, num, queries, states, ends, position, at, next, count, FLOAT16);
        }
    }
}

int tokens_together(const Attention *a, int token, int end) {
    int count = 1;
    while (token + count < end && a->tables[token + count] == a->tables[token] &&
           a->positions[token + count] == a->positions[token] + count && a->positions[token + count] % MOST_TOKENS)
        count++;
    return count;
}

void attend_segment(const Attention *a, int token, int num_tokens, int kv_head, int segment) {
    const int heads = a->num_heads / a->num_kv_heads, dim = a->head_dim, size = a->block_size;
    const int last = a->positions[token + num_tokens - 1] + 1, first = segment * SEGMENT;
    const int end = first + SEGMENT < last ? first + SEGMENT : last;
    const int begin = a->window && last - a->window > first ? last - a->window : first;
    const int32_t *blocks = a->tables[token] + a->table_offset;
    for (int q = 0; q < num_tokens * heads; q++) {
        float *state = partial_of(a, token + q / heads, segment, kv_head * heads + q % heads);
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
        add_positions(a, token, num_tokens, kv_head, segment, position, at, next, count);
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
