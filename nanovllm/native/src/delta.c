/* Gated delta nets (layers/delta_net.py): queries, keys and values pass a causal convolution; each value head has a
 * matrix that every token decays and corrects. Tokens are computed one after the other, so that their bits do not
 * depend on where a prompt is divided. */
#include "engine.h"
#include <math.h>

#if HAVE_SIMD

enum { CHANNELS = 128 }; /* of the convolution, that a thread computes at a time */
enum { VECTORS = LANES == 16 ? 2 : 4, COLUMNS = VECTORS * LANES }; /* of a state, that are computed together */
enum { MOST_KEYS = 256 }; /* rows of a state */

/* The inputs of a token. */
typedef struct {
    float *q, *k; /* [key head][key_dim] */
    float *v, *z; /* [value head][value_dim] */
    float *b, *a; /* [value head] */
} Token;

static Token inputs_of_token(const Pass *p, int token) {
    const Matrix *w = p->layer->inputs;
    float *q = p->e->inputs + token * p->e->inputs_size, *k = q + w[0].rows, *v = k + w[1].rows, *z = v + w[2].rows;
    return (Token){q, k, v, z, z + w[3].rows, z + w[3].rows + w[4].rows};
}

static int num_channels(const Model *m) {
    return 2 * m->num_key_heads * m->key_dim + m->num_value_heads * m->value_dim;
}

static void convolve_chunk(void *argument, int chunk) {
    const Pass *p = argument;
    const int size = num_channels(&p->e->model), begin = chunk * CHANNELS;
    const int end = begin + CHANNELS < size ? begin + CHANNELS : size;
    for (int token = 0; token < p->num_tokens; token++)
        for (int i = begin; i < end; i += LANES) {
            float *x = inputs_of_token(p, token).q + i;
            const wide sum = convolve(p, token, size, i, wide_load(x));
            wide_store(x, sum * logistic(sum));
        }
}

/* Divide a vector by its length. */
static void normalize(float *x, int size, float scale) {
    wide sum = wide_splat(0);
    for (int i = 0; i < size; i += LANES) sum = wide_multiply_add(sum, wide_load(x + i), wide_load(x + i));
    const wide inverse = wide_splat(scale / sqrtf(wide_sum_of(sum) + 1e-6f));
    for (int i = 0; i < size; i += LANES) wide_store(x + i, wide_load(x + i) * inverse);
}

/* Bring queries and keys to their lengths, and turn b and a into the factors of corrections and of states. */
static void prepare_chunk(void *argument, int token) {
    const Pass *p = argument;
    const Model *m = &p->e->model;
    const Token t = inputs_of_token(p, token);
    for (int h = 0; h < m->num_key_heads; h++) {
        normalize(t.q + h * m->key_dim, m->key_dim, 1 / sqrtf((float)m->key_dim));
        normalize(t.k + h * m->key_dim, m->key_dim, 1);
    }
    for (int h = 0; h < m->num_value_heads; h++) {
        const float x = t.a[h] + p->layer->decay_bias[h], softplus = x > 20 ? x : log1pf(expf(x));
        t.b[h] = 1 / (1 + expf(-t.b[h]));
        t.a[h] = expf(p->layer->decay[h] * softplus);
    }
}

/* Some columns of one value head: state = factor * state + k (beta (v - factor * state^T k))^T; the result, state^T q,
 * takes the place of v. */
static void delta_token(const Model *m, const Token *t, int head, int column, float state[][COLUMNS]) {
    const int key_head = head / (m->num_value_heads / m->num_key_heads), dim = m->key_dim;
    const float *q = t->q + key_head * dim, *k = t->k + key_head * dim;
    const wide factor = wide_splat(t->a[head]), beta = wide_splat(t->b[head]);
    wide known[VECTORS], found[VECTORS], new[VECTORS];
    float product = 0; /* of q and k */
    EACH(i, VECTORS) known[i] = found[i] = wide_splat(0);
    for (int row = 0; row < dim; row++) {
        product += q[row] * k[row];
        EACH(i, VECTORS) {
            const wide before = wide_load(state[row] + i * LANES);
            known[i] = wide_multiply_add(known[i], before, wide_splat(k[row]));
            found[i] = wide_multiply_add(found[i], before, wide_splat(q[row]));
        }
    }
    EACH(i, VECTORS) {
        float *v = t->v + head * m->value_dim + column + i * LANES;
        new[i] = (wide_load(v) - factor * known[i]) * beta;
        wide_store(v, wide_multiply_add(factor * found[i], wide_splat(product), new[i]));
    }
    for (int row = 0; row < dim; row++)
        EACH(i, VECTORS) {
            float *numbers = state[row] + i * LANES;
            wide_store(numbers, wide_multiply_add(factor * wide_load(numbers), wide_splat(k[row]), new[i]));
        }
}

/* Columns of a state do not depend on one another: a thread takes some of a head, which stay in its L1 cache for all
 * tokens of a sequence. They are copied, because rows of a state are so far apart that few would fit in it. */
static void delta_chunk(void *argument, int chunk) {
    const Pass *p = argument;
    const Model *m = &p->e->model;
    const int per_head = m->value_dim / COLUMNS, column = chunk % per_head * COLUMNS;
    const int head = chunk / per_head % m->num_value_heads, sequence = chunk / per_head / m->num_value_heads;
    const int first = p->e->first_tokens[sequence], end = p->e->first_tokens[sequence + 1];
    const size_t before = (size_t)(m->conv_taps - 1) * (size_t)num_channels(m);
    float *held = p->layer->states + (int64_t)p->e->state_rows[first] * p->layer->state_stride + before;
    held += (int64_t)head * m->key_dim * m->value_dim + column;
    _Alignas(64) float state[MOST_KEYS][COLUMNS];
    for (int row = 0; row < m->key_dim; row++)
        if (p->positions[first] == 0) /* whatever its state holds */
            memset(state[row], 0, sizeof(state[row]));
        else
            memcpy(state[row], held + (int64_t)row * m->value_dim, sizeof(state[row]));
    for (int token = first; token < end; token++) {
        const Token t = inputs_of_token(p, token);
        delta_token(m, &t, head, column, state);
    }
    for (int row = 0; row < m->key_dim; row++)
        memcpy(held + (int64_t)row * m->value_dim, state[row], sizeof(state[row]));
}

/* The norm of each head, times silu(z). */
static void gate_chunk(void *argument, int row) {
    const Pass *p = argument;
    const Model *m = &p->e->model;
    const Token t = inputs_of_token(p, token_of(p, row));
    const int dim = m->value_dim, size = m->num_value_heads * dim;
    float *out = p->e->mixed.x + (int64_t)row * size;
    for (int i = 0; i < size; i += dim) norm_row(t.v + i, p->layer->out_norm, dim, m->eps, out + i, 0);
    for (int i = 0; i < size; i += LANES) {
        const wide z = wide_load(t.z + i);
        wide_store(out + i, wide_load(out + i) * z * logistic(z));
    }
}

void run_delta_net(Pass *p) {
    Engine *e = p->e;
    const Model *m = &e->model;
    engine_run(e, STATES, convolve_chunk, p, (num_channels(m) + CHANNELS - 1) / CHANNELS);
    engine_run(e, STATES, prepare_chunk, p, p->num_tokens);
    engine_run(e, STATES, delta_chunk, p, p->num_sequences * m->num_value_heads * (m->value_dim / COLUMNS));
    engine_run(e, STATES, gate_chunk, p, p->num_rows);
}

#endif
