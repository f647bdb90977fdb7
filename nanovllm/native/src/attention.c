#include "attention.h"
#include <math.h>
#include "simd.h"

#if HAVE_SIMD

enum { PART = 16 }; /* positions whose scores are computed before their values are added; divides a block */

static float *partial_of(const Attention *a, int token, int segment, int head) {
    const int64_t index = (int64_t)(a->first_segments[token] + segment) * a->num_heads + head;
    return a->partial + index * (a->head_dim + 2);
}

/* The scores of PART or fewer positions; the rest are 0. */
INLINE void scores_of(const float *query, const void *keys, int64_t at, int count, int head_dim, float scale, const int type,
                      float *scores) {
    for (int p = 0; p < PART; p += 4) {
        f32x4 sum[4] = {splat(0), splat(0), splat(0), splat(0)};
        int64_t key[4];
        for (int j = 0; j < 4; j++) key[j] = at + (int64_t)(p + j < count ? p + j : 0) * head_dim;
        if (p < count)
            for (int d = 0; d < head_dim; d += 4) {
                const f32x4 q = load(query + d);
#pragma GCC unroll 4
                for (int j = 0; j < 4; j++) sum[j] = multiply_add(sum[j], q, load_as(keys, key[j] + d, type));
            }
        for (int j = 0; j < 4; j++) scores[p + j] = sum_of(sum[j]) * scale;
    }
}

/* Add PART or fewer positions, whose keys and values begin at `at`, to a head's weighted values, largest score and sum. */
INLINE void add_part(const Attention *a, const float *query, int64_t at, int count, const int type, float *state) {
    const int head_dim = a->head_dim;
    float scores[PART];
    scores_of(query, a->keys, at, count, head_dim, a->scale, type, scores);
    float most = state[head_dim];
    for (int p = 0; p < count; p++) most = scores[p] > most ? scores[p] : most;
    for (int p = count; p < PART; p++) scores[p] = -INFINITY;
    f32x4 total = splat(0);
    for (int p = 0; p < PART; p += 4) {
        f32x4 weight = exponential(load(scores + p) - splat(most));
        store(scores + p, weight);
    }
    for (int p = count; p < PART; p++) scores[p] = 0;
    for (int p = 0; p < PART; p += 4) total += load(scores + p);
    const float decay = exponential(splat(state[head_dim] - most))[0];
    state[head_dim + 1] = state[head_dim + 1] * decay + sum_of(total);
    state[head_dim] = most;
    for (int d = 0; d < head_dim; d += 16) {
        f32x4 sum[4];
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) sum[j] = load(state + d + 4 * j) * splat(decay);
        for (int p = 0; p < count; p++) {
            const f32x4 weight = splat(scores[p]);
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++)
                sum[j] = multiply_add(sum[j], weight, load_as(a->values, at + (int64_t)p * head_dim + d + 4 * j, type));
        }
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) store(state + d + 4 * j, sum[j]);
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
    for (int position = begin, count; position < end; position += count) {
        const int64_t block = blocks[position / size];
        const int64_t at = ((block * a->num_kv_heads + kv_head) * size + position % size) * dim;
        count = PART - position % PART;
        if (count > end - position) count = end - position;
        for (int h = 0; h < heads; h++) {
            const int head = kv_head * heads + h;
            const float *query = a->queries + token * a->query_stride + (int64_t)head * dim;
            float *state = partial_of(a, token, segment, head);
            if (a->type == FLOAT32) add_part(a, query, at, count, FLOAT32, state);
            if (a->type == BFLOAT16) add_part(a, query, at, count, BFLOAT16, state);
            if (a->type == FLOAT16) add_part(a, query, at, count, FLOAT16, state);
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
            for (int d = 0; d < dim; d += 4) store(out + d, multiply_add(load(out + d), load(state + d), splat(weight)));
        }
        const f32x4 inverse = splat(1.0f / total);
        for (int d = 0; d < dim; d += 4) store(out + d, load(out + d) * inverse);
    }
}

#endif
