/* What mixes the tokens of a sequence: attention, and gated short convolutions. Delta nets are in delta.c. */
#include "engine.h"
#include <math.h>

#if HAVE_SIMD

enum { CHANNELS = 128 }; /* of a convolution, that a thread computes at a time */

/* --- attention ---------------------------------------------------------------------------------------------------- */

static void rotate(float *x, const float *table, int head_dim) {
    const int half = head_dim / 2;
    for (int i = 0; i < half; i++) {
        const float cosine = table[i], sine = table[half + i], a = x[i], b = x[half + i];
        x[i] = a * cosine - b * sine;
        x[half + i] = b * cosine + a * sine;
    }
}

/* Norm, scale and rotate `count` heads of queries or keys, which are `stride` apart. */
static void rotate_heads(const Pass *p, float *heads, int count, int stride, const float *norm, float scale,
                         int position) {
    const Model *m = &p->e->model;
    const int dim = p->layer->head_dim;
    if (norm && m->norms_all_heads) norm_row(heads, norm, count * dim, m->head_norm_eps, heads, 0);
    for (int h = 0; h < count; h++, heads += stride) {
        if (norm && !m->norms_all_heads) norm_row(heads, norm, dim, m->head_norm_eps, heads, 0);
        for (int i = 0; scale != 1 && i < dim; i++) heads[i] *= scale;
        rotate(heads, p->layer->rotary + (int64_t)position * dim, dim);
    }
}

/* Rotate the queries and keys of a token, and store its key and value. */
static void rotate_chunk(void *argument, int token) {
    const Pass *p = argument;
    const Model *m = &p->e->model;
    const Layer *layer = p->layer;
    const int dim = layer->head_dim, kv_heads = layer->num_kv_heads, size = m->block_size;
    const int position = p->positions[token], offset = position % size;
    const int64_t block = (p->attention.tables[token] + p->attention.table_offset)[position / size];
    float *queries = p->e->inputs + token * p->e->inputs_size, *keys = queries + layer->inputs[0].rows;
    const float *values = layer->num_inputs > 2 ? keys + kv_heads * dim : keys;
    rotate_heads(p, queries, m->num_heads, p->attention.head_stride, layer->q_norm,
                 m->query_scales ? m->query_scales[position] : 1, position);
    if (layer->num_inputs == 1) return;
    for (int h = 0; h < kv_heads; h++, values += dim) { /* before the keys change */
        float normed[dim];
        if (layer->v_norm) norm_row(values, layer->v_norm, dim, m->head_norm_eps, normed, 0);
        const int64_t at = ((block * kv_heads + h) * size + offset) * dim;
        for (int d = 0; d < dim; d += 4)
            store_as(layer->values, at + d, load((layer->v_norm ? normed : values) + d), m->kv_type);
    }
    rotate_heads(p, keys, kv_heads, dim, layer->k_norm, 1, position);
    for (int h = 0; h < kv_heads; h++)
        for (int d = 0; d < dim; d += 4)
            store_apart(layer->keys, ((block * kv_heads + h) * dim + d) * size + offset, size, load(keys + h * dim + d),
                        m->kv_type);
}

static void attend_chunk(void *argument, int chunk) {
    const Pass *p = argument;
    const int kv_heads = p->layer->num_kv_heads;
    const AttentionJob *job = &p->e->jobs[chunk / kv_heads];
    attend_segment(&p->attention, job->token, job->num_tokens, chunk % kv_heads, job->segment);
}

static void merge_chunk(void *argument, int row) {
    const Pass *p = argument;
    const int heads = p->e->model.num_heads, dim = p->layer->head_dim, token = token_of(p, row);
    float *out = p->e->mixed.x + (int64_t)row * heads * dim;
    attend_merge(&p->attention, token, p->layer->sinks, out);
    if (!p->e->model.gates_queries) return;
    const float *gates = p->attention.queries + token * p->attention.query_stride + dim; /* each after its query */
    for (int h = 0; h < heads; h++, out += dim, gates += 2 * dim)
        for (int i = 0; i < dim; i += LANES)
            wide_store(out + i, wide_load(out + i) * logistic(wide_load(gates + i)));
}

void run_attention(Pass *p) {
    Engine *e = p->e;
    const Model *m = &e->model;
    const Layer *layer = p->layer;
    p->attention = (Attention){
        .num_heads = m->num_heads, .num_kv_heads = layer->num_kv_heads, .head_dim = layer->head_dim,
        .block_size = m->block_size, .window = layer->window, .scale = layer->scale, .keys = layer->keys,
        .values = layer->values, .type = m->kv_type, .queries = e->inputs, .query_stride = e->inputs_size,
        .head_stride = layer->head_dim * (m->gates_queries ? 2 : 1), .positions = p->positions, .tables = e->tables,
        .table_offset = layer->group * p->group_stride, .first_segments = e->first_segments, .partial = e->partial,
        .largest = e->largest,
    };
    engine_run(e, ROTATION, rotate_chunk, p, p->num_tokens);
    if (p->num_rows == 0) return;
    engine_run(e, ATTENTION, attend_chunk, p, p->num_jobs * layer->num_kv_heads);
    engine_run(e, ATTENTION, merge_chunk, p, p->num_rows);
}

/* --- convolution -------------------------------------------------------------------------------------------------- */

/* The convolution of b * h, times c. */
static void convolve_chunk(void *argument, int chunk) {
    const Pass *p = argument;
    const int size = p->e->model.hidden, begin = chunk * CHANNELS;
    const int end = begin + CHANNELS < size ? begin + CHANNELS : size;
    for (int token = 0, row = 0; token < p->num_tokens; token++) {
        const int is_kept = row < p->num_rows && token_of(p, row) == token;
        const float *b = p->e->inputs + token * p->e->inputs_size, *c = b + size, *h = c + size;
        for (int i = begin; i < end; i += LANES) {
            const wide sum = convolve(p, token, size, i, wide_load(b + i) * wide_load(h + i));
            if (is_kept) wide_store(p->e->mixed.x + (int64_t)row * size + i, sum * wide_load(c + i));
        }
        row += is_kept;
    }
}

void run_convolution(Pass *p) {
    engine_run(p->e, STATES, convolve_chunk, p, (p->e->model.hidden + CHANNELS - 1) / CHANNELS);
}

#endif
