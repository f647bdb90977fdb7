/* The gated delta rule of layers/delta_rule.py, one token after the other. Columns of a state do not depend on one
 * another: a thread takes some of a head, which stay in its L1 cache for all tokens of a sequence. */
#include "engine.h"

#if HAVE_SIMD

enum { VECTORS = LANES == 16 ? 2 : 4, COLUMNS = VECTORS * LANES }; /* of a state, that are computed together */
enum { MOST_KEYS = 256 };                                         /* rows of a state */

/* One token: state = factor * state + k (beta (v - factor * state^T k))^T; out = state^T q. */
static void delta_token(const DeltaRule *d, int64_t token, int head, int column, float state[][COLUMNS]) {
    const int64_t at = token * d->num_heads + head;
    const float *q = d->q + at * d->key_dim, *k = d->k + at * d->key_dim;
    const wide factor = wide_splat(d->factor[at]), beta = wide_splat(d->beta[at]);
    wide known[VECTORS], found[VECTORS], new[VECTORS];
    float product = 0; /* of q and k */
    EACH(i, VECTORS) known[i] = found[i] = wide_splat(0);
    for (int row = 0; row < d->key_dim; row++) {
        product += q[row] * k[row];
        EACH(i, VECTORS) {
            const wide before = wide_load(state[row] + i * LANES);
            known[i] = wide_multiply_add(known[i], before, wide_splat(k[row]));
            found[i] = wide_multiply_add(found[i], before, wide_splat(q[row]));
        }
    }
    const int64_t out = at * d->value_dim + column;
    EACH(i, VECTORS) {
        new[i] = (wide_load(d->v + out + i * LANES) - factor * known[i]) * beta;
        wide_store(d->out + out + i * LANES, wide_multiply_add(factor * found[i], wide_splat(product), new[i]));
    }
    for (int row = 0; row < d->key_dim; row++)
        EACH(i, VECTORS) {
            float *numbers = state[row] + i * LANES;
            wide_store(numbers, wide_multiply_add(factor * wide_load(numbers), wide_splat(k[row]), new[i]));
        }
}

static void delta_chunk(void *argument, int chunk) {
    const DeltaRule *d = argument;
    const int per_head = d->value_dim / COLUMNS, head = chunk / per_head % d->num_heads;
    const int sequence = chunk / per_head / d->num_heads, column = chunk % per_head * COLUMNS;
    const int64_t first = d->first_tokens[sequence];
    float *held = d->states + d->rows[sequence] * d->state_stride + (int64_t)head * d->key_dim * d->value_dim + column;
    _Alignas(64) float state[MOST_KEYS][COLUMNS]; /* a copy: rows of `held` are so far apart that few fit in the cache */
    for (int row = 0; row < d->key_dim; row++)
        if (d->is_new[sequence])
            memset(state[row], 0, sizeof(state[row]));
        else
            memcpy(state[row], held + (int64_t)row * d->value_dim, sizeof(state[row]));
    for (int64_t token = first; token < first + d->num_new[sequence]; token++)
        delta_token(d, token, head, column, state);
    for (int row = 0; row < d->key_dim; row++)
        memcpy(held + (int64_t)row * d->value_dim, state[row], sizeof(state[row]));
}

void engine_delta_rule(Engine *e, const DeltaRule *d) {
    engine_run(e, ATTENTION, delta_chunk, (void *)d, d->num_sequences * d->num_heads * (d->value_dim / COLUMNS));
}

#endif
