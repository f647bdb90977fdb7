#include "attention.h"
#include <math.h>
#include "simd.h"

#if HAVE_SIMD

/* Positions of a block, and queries of one KV head, at a time. */
enum { PART = 32, MOST_QUERIES = 24 };
/* Queries whose sums are in registers, for VECTORS vectors of positions or of numbers of a head. */
#if defined(__AVX2__)
enum { IN_REGISTERS = 6, VECTORS = 2 };
#else
enum { IN_REGISTERS = 3, VECTORS = 4 }; /* gcc has too few registers for four */
#endif

/* What a query has gathered from a segment. */
typedef struct {
    float *values, *sums, *largest;
} State;

static State state_of(const Attention *a, int token, int segment, int head) {
    const int64_t index = (int64_t)(a->first_segments[token] + segment) * a->num_heads + head;
    float *values = a->partial + index * (a->head_dim + LANES);
    return (State){values, values + a->head_dim, a->largest + index};
}

/* Positions of a block, from number `offset` of it on: their keys begin at keys + offset, a number of a head after the
 * other, and their values at values + offset * head_dim. */
typedef struct {
    int64_t block; /* the index of its first number for a KV head, in `keys` and in `values` */
    int offset;
} Spot;

static Spot spot_of(const Attention *a, const int32_t *blocks, int kv_head, int position) {
    const int64_t block = (int64_t)blocks[position / a->block_size] * a->num_kv_heads + kv_head;
    return (Spot){block * a->block_size * a->head_dim, position % a->block_size};
}

/* The scores of as many positions as `vectors` vectors have, for each of `num` queries. With `fetches` the values of
 * the first `count` are fetched from memory meanwhile. */
INLINE void scores_of(const int num, const int vectors, const Attention *a, const float *const queries[], Spot at,
                      int count, int fetches, const int type, float scores[][PART]) {
    const int64_t key = at.block + at.offset, value = at.block + (int64_t)at.offset * a->head_dim;
    wide sum[IN_REGISTERS][VECTORS], keys[VECTORS];
    EACH(q, num) EACH(j, vectors) sum[q][j] = wide_splat(0);
#define ADD_NUMBER(lane)                                                                              \
    EACH(j, vectors)                                                                                  \
        keys[j] = wide_load_as(a->keys, key + (int64_t)(d + lane) * a->block_size + LANES * j, type); \
    EACH(q, num) EACH(j, vectors) sum[q][j] = WIDE_ADD_LANE(sum[q][j], keys[j], here[q], lane);
    for (int d = 0; d < a->head_dim; d += 4) {
        Lanes here[IN_REGISTERS];
        for (int i = 0; fetches && i < 4 * count; i += 16) fetch_as(a->values, value + d * count + i, type);
        EACH(q, num) here[q] = load_lanes(queries[q] + d);
        EACH_LANE(ADD_NUMBER)
    }
    EACH(q, num) EACH(j, vectors) wide_store(scores[q] + LANES * j, sum[q][j] * wide_splat(a->scale));
}

/* Hide the scores of positions before `first` and from `end` on; the largest of the others and of `most`. */
INLINE float largest_score(float scores[PART], int first, int end, float most) {
    wide largest = wide_splat(most);
    for (int p = 0; p < first; p++) scores[p] = -INFINITY;
    for (int p = end; p < PART; p++) scores[p] = -INFINITY;
    for (int p = 0; p < PART; p += LANES) largest = wide_larger(largest, wide_load(scores + p));
    return wide_largest_of(largest);
}

/* Turn scores into weights relative to the largest one, those of hidden positions into 0, and add them to `sum`. */
INLINE wide weights_of(float scores[PART], int first, int end, float largest, wide sum) {
    for (int p = 0; p < PART; p += LANES)
        wide_store(scores + p, exponential(wide_load(scores + p) - wide_splat(largest)));
    for (int p = 0; p < first; p++) scores[p] = 0;
    for (int p = end; p < PART; p++) scores[p] = 0;
    for (int p = 0; p < PART; p += LANES) sum += wide_load(scores + p);
    return sum;
}

/* Multiply `vectors` vectors of the weighted values of `num` queries so far, from number d of a head on, with `decay`
 * and add those of positions p to `end` - 1. With `fetches` the same numbers of the next keys are fetched from memory
 * meanwhile. */
INLINE void add_values(const int num, const int vectors, const Attention *a, const State states[], const float decay[],
                       int d, Spot at, Spot next, int p, int end, int fetches, const int type, float weights[][PART]) {
    const int64_t value = at.block + (int64_t)at.offset * a->head_dim + d;
    wide sum[IN_REGISTERS][VECTORS];
#define ADD_SPLAT(sum, a, x, index) wide_multiply_add(sum, a, wide_splat((x)[index]))
#define ADD_POSITION(position, add, weight, index)                                                     \
    {                                                                                                  \
        wide values[VECTORS];                                                                          \
        EACH(j, vectors)                                                                               \
            values[j] = wide_load_as(a->values, value + (position) * a->head_dim + LANES * j, type);   \
        EACH(q, num) EACH(j, vectors) sum[q][j] = add(sum[q][j], values[j], weight, index);            \
    }
    for (int i = 0; fetches && i < LANES * vectors; i++)
        for (int k = 0; k < PART; k += 16)
            fetch_as(a->keys, next.block + next.offset + (d + i) * a->block_size + k, type);
    EACH(q, num) EACH(j, vectors) sum[q][j] = wide_load(states[q].values + d + LANES * j) * wide_splat(decay[q]);
    for (; p + 4 <= end; p += 4) {
        Lanes here[IN_REGISTERS];
        EACH(q, num) here[q] = load_lanes(weights[q] + p);
#define ADD_NEXT(lane) ADD_POSITION(p + lane, WIDE_ADD_LANE, here[q], lane)
        EACH_LANE(ADD_NEXT)
    }
    for (; p < end; p++) ADD_POSITION(p, ADD_SPLAT, weights[q], p)
    EACH(q, num) EACH(j, vectors) wide_store(states[q].values + d + LANES * j, sum[q][j]);
}

/* Call a function whose first two arguments, the numbers of queries and of vectors, are constants. */
#if defined(__AVX2__)
#define MORE_QUERIES(function, ...)                   \
    case 3: function(3, VECTORS, __VA_ARGS__); break; \
    case 4: function(4, VECTORS, __VA_ARGS__); break;
#else
#define MORE_QUERIES(function, ...)
#endif
#define BY_QUERIES(num, function, ...)                      \
    switch (num) {                                          \
        case 1: function(1, VECTORS, __VA_ARGS__); break;   \
        case 2: function(2, VECTORS, __VA_ARGS__); break;   \
        MORE_QUERIES(function, __VA_ARGS__)                 \
        default: function(IN_REGISTERS, VECTORS, __VA_ARGS__); \
    }

/* How many of the queries that are left have their sums in registers next: a number that BY_QUERIES knows, so not 5. */
static int next_queries(int left) {
    if (left <= IN_REGISTERS && left != 5) return left;
    return left < (3 * IN_REGISTERS + 1) / 2 ? (left + 1) / 2 : IN_REGISTERS;
}

/* The positions that a query attends to, from those of a part on. */
typedef struct {
    int begin, end;
} Seen;

/* Add positions `first` to `count` - 1 of those from `at` on, at most PART in one block, to the weighted values, the
 * largest scores and the sums of queries. Positions that a query does not attend to have weights of 0. */
INLINE void add_part(const Attention *a, int num, const float *const queries[], const State states[],
                     const Seen seen[], Spot at, Spot next, int first, int count, const int type) {
    enum { WIDTH = VECTORS * LANES };
    float weights[MOST_QUERIES][PART], decay[(MOST_QUERIES + LANES - 1) / LANES * LANES];
    for (int q = 0, here; q < num; q += here) {
        here = next_queries(num - q);
        for (int p = 0; p < count; p += WIDTH) {
            const int own = count - p < WIDTH ? count - p : WIDTH;
            const Spot part = {at.block, at.offset + p};
            float(*scores)[PART] = (float(*)[PART])(weights[q] + p);
            if (LANES < 16 || own > LANES) /* else one vector is enough: each query by itself, which compiles faster */
                BY_QUERIES(here, scores_of, a, queries + q, part, own, q == 0, type, scores)
            else
                for (int i = 0; i < here; i++)
                    scores_of(1, 1, a, queries + q + i, part, own, q + i == 0, type, scores + i);
        }
    }
    for (int q = 0; q < num; q++) {
        const float before = *states[q].largest;
        *states[q].largest = largest_score(weights[q], seen[q].begin, seen[q].end, before);
        decay[q] = before - *states[q].largest;
    }
    for (int q = 0; q < num; q += LANES) wide_store(decay + q, exponential(wide_load(decay + q)));
    for (int q = 0; q < num; q++) {
        const wide sum = wide_load(states[q].sums) * wide_splat(decay[q]);
        wide_store(states[q].sums, weights_of(weights[q], seen[q].begin, seen[q].end, *states[q].largest, sum));
    }
    for (int q = 0, here; q < num; q += here) {
        here = next_queries(num - q);
        for (int d = 0; d < a->head_dim; d += WIDTH)
            if (LANES < 16 || a->head_dim - d >= WIDTH)
                BY_QUERIES(here, add_values, a, states + q, decay + q, d, at, next, first, count, q == 0, type,
                           weights + q)
            else
                for (int i = 0; i < here; i++)
                    add_values(1, 1, a, states + q + i, decay + q + i, d, at, next, first, count, q + i == 0, type,
                               weights + q + i);
    }
}

/* Which of `count` positions from `position` on a token attends to. */
static Seen seen_of(const Attention *a, int token, int position, int count) {
    const int end = a->positions[token] + 1 - position, begin = a->window ? end - a->window : 0;
    return (Seen){begin < 0 ? 0 : begin < count ? begin : count, end < count ? end : count};
}

/* The same for the queries of tokens for one KV head. */
static void add_positions(const Attention *a, int token, int num_tokens, int kv_head, int segment, int position,
                          Spot at, Spot next, int first_position, int count) {
    const int heads = a->num_heads / a->num_kv_heads;
    for (int first = 0; first < num_tokens * heads; first += MOST_QUERIES) {
        const int left = num_tokens * heads - first, num = left < MOST_QUERIES ? left : MOST_QUERIES;
        const float *queries[MOST_QUERIES];
        State states[MOST_QUERIES];
        Seen seen[MOST_QUERIES];
        for (int q = 0, own = token + first / heads, h = first % heads; q < num; q++, h++) {
            if (h == heads) h = 0, own++;
            queries[q] = a->queries + own * a->query_stride + (int64_t)(kv_head * heads + h) * a->head_stride;
            states[q] = state_of(a, own, segment, kv_head * heads + h);
            seen[q] = seen_of(a, own, position, count);
        }
        BY_TYPE(a->type, add_part, a, num, queries, states, seen, at, next, first_position, count)
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
    const int seen = a->window ? a->positions[token] + 1 - a->window : 0, begin = seen > first ? seen : first;
    const int32_t *blocks = a->tables[token] + a->table_offset;
    for (int q = 0; q < num_tokens * heads; q++) {
        const State state = state_of(a, token + q / heads, segment, kv_head * heads + q % heads);
        memset(state.values, 0, (size_t)(dim + LANES) * sizeof(float));
        *state.largest = -1e30f;
    }
    const int next_head = (kv_head + 1) % a->num_kv_heads; /* of this segment, which the same thread often has next */
    for (int position = begin / 16 * 16, count; position < end; position += count) { /* whole vectors of keys */
        count = PART - position % PART;
        if (count > size - position % size) count = size - position % size;
        if (count > end - position) count = end - position;
        const int after = position + count, skipped = begin > position ? begin - position : 0;
        const Spot at = spot_of(a, blocks, kv_head, position);
        const Spot next = spot_of(a, blocks, after < end ? kv_head : next_head, after < end ? after : begin / 16 * 16);
        add_positions(a, token, num_tokens, kv_head, segment, position, at, next, skipped, count);
    }
}

void attend_merge(const Attention *a, int token, const float *sinks, float *out) {
    const int segments = num_segments(a, token), dim = a->head_dim;
    for (int head = 0; head < a->num_heads; head++, out += dim) {
        float most = sinks ? sinks[head] : -1e30f;
        wide sums = wide_splat(0);
        for (int s = 0; s < segments; s++) most = fmaxf(most, *state_of(a, token, s, head).largest);
        memset(out, 0, (size_t)dim * sizeof(float));
        for (int s = 0; s < segments; s++) {
            const State state = state_of(a, token, s, head);
            const wide weight = exponential(wide_splat(*state.largest - most));
            sums = wide_multiply_add(sums, wide_load(state.sums), weight);
            for (int d = 0; d < dim; d += LANES)
                wide_store(out + d, wide_multiply_add(wide_load(out + d), wide_load(state.values + d), weight));
        }
        const float sink = sinks ? expf(sinks[head] - most) : 0;
        const wide inverse = wide_splat(1.0f / (wide_sum_of(sums) + sink));
        for (int d = 0; d < dim; d += LANES) wide_store(out + d, wide_load(out + d) * inverse);
    }
}

#endif
