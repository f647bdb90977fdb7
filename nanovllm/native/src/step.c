#include "step.h"
#include <math.h>
#include <stdlib.h>
#include "engine.h"

#if HAVE_SIMD

void engine_seconds(Engine *e, double seconds[NUM_PARTS]) {
    memcpy(seconds, e->seconds, sizeof(e->seconds));
    memset(e->seconds, 0, sizeof(e->seconds));
}

/* --- memory ------------------------------------------------------------------------------------------------------- */

static int64_t larger_size(int64_t a, int64_t b) { return a > b ? a : b; }

/* Floats from one token to the next in `qkv`. */
static int64_t qkv_size(const Model *m) {
    return larger_size((int64_t)(m->num_heads + 2 * m->num_kv_heads) * m->head_dim, m->conv_taps ? 3 * m->hidden : 0);
}

/* Memory that lasts as long as the engine; NULL without any. */
static void *reserve(Engine *e, int64_t bytes) {
    return e->blocks[e->num_blocks++] = aligned_alloc(64, ((size_t)bytes + 64) / 64 * 64);
}

static float *reserve_floats(Engine *e, int64_t rows, int64_t columns) {
    return reserve(e, rows * columns * (int64_t)sizeof(float));
}

static Rows reserve_rows(Engine *e, int64_t columns) {
    return (Rows){
        .x = reserve_floats(e, PASS_ROWS, columns),
        .rounded = reserve(e, PASS_ROWS / LANES * (columns / GROUP + 1) * (int64_t)sizeof(Rounded)),
        .parts = reserve(e, PASS_ROWS * columns * e->model.num_parts * (int64_t)sizeof(uint16_t)),
        .num_parts = e->model.num_parts,
    };
}

void engine_destroy(Engine *e) {
    if (e == NULL) return;
    if (e->pool) pool_destroy(e->pool);
    for (int i = 0; i < e->num_blocks; i++) free(e->blocks[i]);
    free(e);
}

Engine *engine_create(const Model *model, int num_threads) {
    Engine *e = calloc(1, sizeof(Engine));
    if (e == NULL) return NULL;
    const Model *m = &e->model;
    e->model = *model;
    e->num_threads = num_threads;
    e->residual = reserve_floats(e, PASS_ROWS, m->hidden);
    e->last = reserve_floats(e, PASS_ROWS, m->hidden);
    e->product = reserve_floats(e, PASS_ROWS, m->hidden);
    e->qkv = reserve_floats(e, PASS_ROWS, qkv_size(m));
    e->partial = reserve_floats(e, PASS_SEGMENTS * m->num_heads, m->head_dim + LANES);
    e->largest = reserve_floats(e, PASS_SEGMENTS, m->num_heads);
    e->normed = reserve_rows(e, m->hidden);
    e->mixed = reserve_rows(e, larger_size((int64_t)m->num_heads * m->head_dim, m->conv_taps ? m->hidden : 0));
    e->activated = reserve_rows(e, m->intermediate);
    if (m->num_experts) {
        e->routed = reserve_floats(e, PASS_ROWS, m->num_experts);
        e->shares = reserve_floats(e, PASS_ROWS, m->experts_per_token);
        e->chosen = reserve(e, PASS_ROWS * m->experts_per_token * (int64_t)sizeof(int32_t));
        e->gathered = reserve_rows(e, m->hidden);
    }
    e->pool = pool_create(num_threads);
    int made = e->pool != NULL;
    for (int i = 0; i < e->num_blocks; i++) made &= e->blocks[i] != NULL;
    if (made) return e;
    engine_destroy(e);
    return NULL;
}

Engine *engine_for_products(int columns, int num_threads) {
    const Model widths = {.hidden = columns, .num_parts = MOST_PARTS};
    return engine_create(&widths, num_threads);
}

/* --- a layer ------------------------------------------------------------------------------------------------------ */

/* The norm of x, into `out` or, with `adds`, added to it. */
static void norm_row(const float *x, const float *weight, int size, float eps, float *out, int adds) {
    wide sum = wide_splat(0);
    f32x4 rest = splat(0); /* of what does not fill a vector */
    int i = 0;
    for (; i + LANES <= size; i += LANES) sum = wide_multiply_add(sum, wide_load(x + i), wide_load(x + i));
    for (; i < size; i += 4) rest = multiply_add(rest, load(x + i), load(x + i));
    const float scale = 1.0f / sqrtf((wide_sum_of(sum) + sum_of(rest)) / (float)size + eps);
    for (i = 0; i + LANES <= size; i += LANES) {
        const wide normed = wide_load(x + i) * wide_splat(scale) * wide_load(weight + i);
        wide_store(out + i, adds ? wide_load(out + i) + normed : normed);
    }
    for (; i < size; i += 4) {
        const f32x4 normed = load(x + i) * splat(scale) * load(weight + i);
        store(out + i, adds ? load(out + i) + normed : normed);
    }
}

/* A job for each row: the norm of x. */
typedef struct {
    const float *x, *weight;
    int size;
    float eps, *out;
    int adds;
} Norm;

static void norm_chunk(void *argument, int row) {
    const Norm *job = argument;
    const int64_t at = (int64_t)row * job->size;
    norm_row(job->x + at, job->weight, job->size, job->eps, job->out + at, job->adds);
}

/* The tokens of a part of a step, in one layer. */
typedef struct {
    Engine *e;
    const Layer *layer;
    const int32_t *tokens, *positions, *wanted; /* wanted: NULL = all */
    int num_tokens, num_rows, first_wanted;     /* num_rows: those that are wanted */
    Attention attention;
    int64_t group_stride; /* from the block tables of a group to those of the next */
    int num_jobs; /* of attention, for each KV head */
    float *x; /* the residual of these rows */
} Pass;

static void embed_chunk(void *argument, int row) {
    const Pass *p = argument;
    const Model *m = &p->e->model;
    float *x = p->e->residual + (int64_t)row * m->hidden;
    matrix_row(&m->embedding, p->tokens[row], x);
    for (int i = 0; m->embedding_scale != 1 && i < m->hidden; i++) x[i] *= m->embedding_scale;
}

static void rotate(float *x, const float *table, int head_dim) {
    const int half = head_dim / 2;
    for (int i = 0; i < half; i++) {
        const float cosine = table[i], sine = table[half + i], a = x[i], b = x[half + i];
        x[i] = a * cosine - b * sine;
        x[half + i] = b * cosine + a * sine;
    }
}

/* Norm `count` heads of queries or keys: each by itself, or all as one. */
static void norm_heads(const Model *m, float *heads, int count, const float *weight) {
    const int all = count * m->head_dim, size = m->norms_all_heads ? all : m->head_dim;
    for (int i = 0; weight && i < all; i += size)
        norm_row(heads + i, weight, size, m->head_norm_eps, heads + i, 0);
}

/* Norm, scale and rotate the queries and keys of a token, and store its key and value. */
static void rotate_chunk(void *argument, int token) {
    const Pass *p = argument;
    const Model *m = &p->e->model;
    const Layer *layer = p->layer;
    const int dim = m->head_dim, position = p->positions[token];
    float *heads = p->e->qkv + token * qkv_size(m), *keys = heads + m->num_heads * dim;
    norm_heads(m, heads, m->num_heads, layer->q_norm);
    norm_heads(m, keys, m->num_kv_heads, layer->k_norm);
    for (int i = 0; m->query_scales && i < m->num_heads * dim; i++) heads[i] *= m->query_scales[position];
    for (int h = 0; h < m->num_heads + m->num_kv_heads; h++)
        rotate(heads + h * dim, layer->rotary + (int64_t)position * dim, dim);
    const float *values = keys + m->num_kv_heads * dim;
    const int64_t block = (p->attention.tables[token] + p->attention.table_offset)[position / m->block_size];
    for (int h = 0; h < m->num_kv_heads; h++) {
        const int64_t at = (block * m->num_kv_heads + h) * m->block_size * dim, offset = position % m->block_size;
        for (int d = 0; d < dim; d += 4) {
            const f32x4 key = load(keys + h * dim + d), value = load(values + h * dim + d);
            store_apart(layer->keys, at + d * m->block_size + offset, m->block_size, key, m->kv_type);
            store_as(layer->values, at + offset * dim + d, value, m->kv_type);
        }
    }
}

static void attend_chunk(void *argument, int chunk) {
    const Pass *p = argument;
    const int kv_heads = p->e->model.num_kv_heads;
    const AttentionJob *job = &p->e->jobs[chunk / kv_heads];
    attend_segment(&p->attention, job->token, job->num_tokens, chunk % kv_heads, job->segment);
}

static void merge_chunk(void *argument, int row) {
    const Pass *p = argument;
    const Model *m = &p->e->model;
    const int size = m->num_heads * m->head_dim, token = p->wanted ? p->wanted[row] - p->first_wanted : row;
    attend_merge(&p->attention, token, p->e->mixed.x + (int64_t)row * size);
    if (p->wanted)
        memcpy(p->x + (int64_t)row * m->hidden, p->e->residual + (int64_t)token * m->hidden,
               (size_t)m->hidden * sizeof(float));
}

/* Some channels of a convolution of b * h, times c, one token after the other. Their states hold the newest inputs of the
 * tokens before, also from one part of a step to the next. A sequence begins with zeros, whatever its state holds. */
static void convolve_chunk(void *argument, int chunk) {
    const Pass *p = argument;
    const Layer *layer = p->layer;
    const int size = p->e->model.hidden, num_before = p->e->model.conv_taps - 1;
    const int begin = chunk * CHANNELS, end = begin + CHANNELS < size ? begin + CHANNELS : size;
    for (int token = 0, row = 0; token < p->num_tokens; token++) {
        const int is_wanted = !p->wanted || (row < p->num_rows && p->wanted[row] == p->first_wanted + token);
        const float *b = p->e->qkv + token * qkv_size(&p->e->model), *c = b + size, *h = c + size;
        float *state = layer->states + (int64_t)p->e->state_rows[token] * layer->state_stride;
        float *out = p->e->mixed.x + (int64_t)row * size, *x = p->x + (int64_t)row * size;
        for (int i = begin; i < end; i += 4) {
            const f32x4 newest = load(b + i) * load(h + i);
            f32x4 sum = newest * load(layer->filters + num_before * size + i);
            for (int k = 0; k < num_before; k++) {
                const f32x4 input = p->positions[token] ? load(state + k * size + i) : splat(0);
                sum = multiply_add(sum, input, load(layer->filters + k * size + i));
                if (k > 0) store(state + (k - 1) * size + i, input);
            }
            if (num_before > 0) store(state + (num_before - 1) * size + i, newest);
            if (layer->filter_bias) sum += load(layer->filter_bias + i);
            if (is_wanted) store(out + i, sum * load(c + i));
            if (is_wanted && p->wanted) store(x + i, load(p->e->residual + (int64_t)token * size + i));
        }
        row += is_wanted;
    }
}

/* The norm of x, or x itself where there is no norm: what matrices of these `forms` read. */
static Rows normed_rows(Engine *e, float *x, int rows, const float *weight, float eps, int forms) {
    Rows found = e->normed;
    Norm norm = {x, weight, e->model.hidden, eps, found.x, 0};
    if (weight)
        engine_run(e, NORMS, norm_chunk, &norm, rows);
    else
        found.x = x;
    form_inputs(e, NORMS, &found, rows, e->model.hidden, forms);
    return found;
}

/* The product of a matrix, stored in `out` or, with mode ADD, added to it. */
static void multiply(Engine *e, int part, const Matrix *w, const Rows *inputs, int rows, float *out, int mode) {
    form_inputs(e, part, inputs, rows, w->columns, form_of(w));
    Product job = {.matrices = {w}, .outputs = {out}, .stride = w->rows, .num_outputs = 1, .mode = mode,
                   .in = inputs_of(inputs, rows, w->columns)};
    run_product(e, part, &job);
}

/* Add the product of a matrix, or the norm of this product, to x. */
static void add_product(Pass *p, int part, const Matrix *w, const Rows *inputs, const float *norm) {
    Engine *e = p->e;
    multiply(e, part, w, inputs, p->num_rows, norm ? e->product : p->x, norm ? STORE : ADD);
    if (norm == NULL) return;
    Norm after = {e->product, norm, e->model.hidden, e->model.eps, p->x, 1};
    engine_run(e, NORMS, norm_chunk, &after, p->num_rows);
}

/* activation(gate(x)) * up(x), in `activated` */
static void activate_rows(Engine *e, const Matrix *gate, const Matrix *up, const Rows *inputs, int rows) {
    Product job = {.matrices = {gate, up}, .outputs = {e->activated.x}, .stride = gate->rows, .num_outputs = 1,
                   .mode = e->model.uses_gelu ? GATE_GELU : GATE_SILU, .in = inputs_of(inputs, rows, gate->columns)};
    run_product(e, GATE_UP, &job);
}

static void run_mlp(Pass *p) {
    Engine *e = p->e;
    const Layer *layer = p->layer;
    const int forms = form_of(&layer->gate) | form_of(&layer->up);
    const Rows normed = normed_rows(e, p->x, p->num_rows, layer->ffn_norm, e->model.eps, forms);
    activate_rows(e, &layer->gate, &layer->up, &normed, p->num_rows);
    add_product(p, DOWN, &layer->down, &e->activated, layer->after_ffn);
}

/* --- a mixture of experts ----------------------------------------------------------------------------------------- */

/* The experts of a token: those with the largest probabilities, the first of equal ones. */
static void route_chunk(void *argument, int row) {
    const Pass *p = argument;
    const Model *m = &p->e->model;
    float *scores = p->e->routed + (int64_t)row * m->num_experts, most = scores[0], total = 0, kept = 0;
    float *shares = p->e->shares + row * m->experts_per_token;
    int32_t *chosen = p->e->chosen + row * m->experts_per_token;
    for (int i = 1; i < m->num_experts; i++) most = fmaxf(most, scores[i]);
    for (int i = 0; i < m->num_experts; i++) total += scores[i] = expf(scores[i] - most);
    for (int k = 0; k < m->experts_per_token; k++) {
        int best = 0;
        for (int i = 1; i < m->num_experts; i++) best = scores[i] > scores[best] ? i : best;
        chosen[k] = best;
        shares[k] = scores[best];
        kept += scores[best];
        scores[best] = -1.0f; /* below every probability */
    }
    for (int k = 0; k < m->experts_per_token; k++) shares[k] /= m->normalize_shares ? kept : total;
}

static void gather_chunk(void *argument, int index) {
    const Pass *p = argument;
    const int size = p->e->model.hidden;
    const float *from = p->e->normed.x + (int64_t)p->e->expert_rows[index] * size;
    memcpy(p->e->gathered.x + (int64_t)index * size, from, (size_t)size * sizeof(float));
}

static void add_share_chunk(void *argument, int index) {
    const Pass *p = argument;
    const int64_t size = p->e->model.hidden;
    const float *from = p->e->product + index * size;
    float *to = p->x + p->e->expert_rows[index] * size;
    const f32x4 share = splat(p->e->expert_shares[index]);
    for (int i = 0; i < size; i += 4) store(to + i, multiply_add(load(to + i), load(from + i), share));
}

/* The rows of this pass that chose `expert`; how many. */
static int rows_of_expert(const Pass *p, int expert) {
    const int per_token = p->e->model.experts_per_token;
    int count = 0;
    for (int i = 0; i < p->num_rows * per_token; i++) {
        if (p->e->chosen[i] != expert) continue;
        p->e->expert_rows[count] = i / per_token;
        p->e->expert_shares[count++] = p->e->shares[i];
    }
    return count;
}

/* One expert after the other, each on all its rows: a row's experts are added in the order of their numbers. */
static void run_experts(Pass *p) {
    Engine *e = p->e;
    const Layer *layer = p->layer;
    const Model *m = &e->model;
    const Rows normed = normed_rows(e, p->x, p->num_rows, layer->ffn_norm, m->eps, 0);
    multiply(e, ROUTING, &layer->router, &normed, p->num_rows, e->routed, STORE);
    engine_run(e, ROUTING, route_chunk, p, p->num_rows);
    for (int expert = 0; expert < m->num_experts; expert++) {
        const int count = rows_of_expert(p, expert);
        if (count == 0) continue;
        const Matrix *gate = layer->experts + 3 * expert, *up = gate + 1, *down = gate + 2;
        engine_run(e, ROUTING, gather_chunk, p, count);
        form_inputs(e, ROUTING, &e->gathered, count, m->hidden, form_of(gate) | form_of(up));
        activate_rows(e, gate, up, &e->gathered, count);
        multiply(e, DOWN, down, &e->activated, count, e->product, STORE);
        engine_run(e, ROUTING, add_share_chunk, p, count);
    }
}

static void run_attention(Pass *p) {
    Engine *e = p->e;
    const Layer *layer = p->layer;
    p->attention.keys = layer->keys;
    p->attention.values = layer->values;
    p->attention.window = layer->window;
    p->attention.table_offset = layer->group * p->group_stride;
    engine_run(e, ROTATION, rotate_chunk, p, p->num_tokens);
    if (p->num_rows == 0) return;
    engine_run(e, ATTENTION, attend_chunk, p, p->num_jobs * e->model.num_kv_heads);
    engine_run(e, ATTENTION, merge_chunk, p, p->num_rows);
}

static void run_layer(Pass *p) {
    Engine *e = p->e;
    const Layer *layer = p->layer;
    const Model *m = &e->model;
    const int forms = form_of(&layer->q) | form_of(&layer->k) | form_of(&layer->v);

    const Rows normed = normed_rows(e, e->residual, p->num_tokens, layer->input_norm, m->eps, forms);
    Product qkv = {.matrices = {&layer->q, &layer->k, &layer->v}, .stride = qkv_size(m), .num_outputs = 3,
                   .outputs = {e->qkv, e->qkv + layer->q.rows, e->qkv + layer->q.rows + layer->k.rows},
                   .in = inputs_of(&normed, p->num_tokens, m->hidden)};
    run_product(e, layer->filters ? GATES : QKV, &qkv);
    if (layer->filters)
        engine_run(e, CONVOLUTION, convolve_chunk, p, (m->hidden + CHANNELS - 1) / CHANNELS);
    else
        run_attention(p);
    if (p->num_rows == 0) return;
    add_product(p, OUTPUT, &layer->o, &e->mixed, layer->after_attention);
    if (layer->experts)
        run_experts(p);
    else
        run_mlp(p);
}

/* --- a step ------------------------------------------------------------------------------------------------------- */

/* Prepare a part of the step that begins at token `first`; how many tokens it has. */
static int begin_pass(Pass *p, const Step *step, int first) {
    Engine *e = p->e;
    int count = 0, segments = 0;
    for (; first + count < step->num_tokens && count < PASS_ROWS; count++) {
        const int own = step->positions[first + count] / SEGMENT + 1;
        if (count > 0 && segments + own > PASS_SEGMENTS) break;
        e->first_segments[count] = segments;
        segments += own;
        const int32_t sequence = step->sequences[first + count];
        e->tables[count] = step->tables + (int64_t)sequence * step->table_stride;
        e->state_rows[count] = step->rows[sequence];
    }
    const Model *m = &e->model;
    p->tokens = step->tokens + first;
    p->positions = step->positions + first;
    p->num_tokens = count;
    p->num_jobs = 0;
    p->attention = (Attention){
        .num_heads = m->num_heads, .num_kv_heads = m->num_kv_heads, .head_dim = m->head_dim,
        .block_size = m->block_size, .scale = m->scale, .type = m->kv_type,
        .queries = e->qkv, .query_stride = qkv_size(m), .positions = p->positions,
        .tables = e->tables, .first_segments = e->first_segments, .partial = e->partial, .largest = e->largest,
    };
    for (int token = 0, together; token < count; token += together) {
        together = tokens_together(&p->attention, token, count);
        for (int s = 0; s < num_segments(&p->attention, token); s++)
            e->jobs[p->num_jobs++] = (AttentionJob){token, together, s};
    }
    return count;
}

void engine_logits(Engine *e, float *hidden, int num_rows, float *logits) {
    const Model *m = &e->model;
    for (int64_t first = 0; first < num_rows; first += PASS_ROWS) {
        const int count = num_rows - first < PASS_ROWS ? (int)(num_rows - first) : PASS_ROWS;
        const Rows normed = normed_rows(e, hidden + first * m->hidden, count, m->last_norm, m->last_norm_eps, 0);
        multiply(e, HEAD, &m->head, &normed, count, logits + first * m->head.rows, STORE);
    }
}

void engine_step(Engine *e, const Step *step) {
    const Model *m = &e->model;
    Pass pass = {.e = e, .group_stride = (int64_t)step->num_sequences * step->table_stride};
    int num_done = 0; /* of the wanted tokens */
    for (int first = 0; first < step->num_tokens;) {
        const int count = begin_pass(&pass, step, first);
        engine_run(e, EMBEDDING, embed_chunk, &pass, count);
        for (int i = 0; i < m->num_layers; i++) {
            pass.layer = &m->layers[i];
            pass.num_rows = count;
            pass.x = e->residual;
            pass.wanted = NULL;
            if (i == m->num_layers - 1) {
                int end = num_done;
                while (end < step->num_wanted && step->wanted[end] < first + count) end++;
                pass.num_rows = end - num_done;
                pass.x = e->last;
                pass.wanted = step->wanted + num_done;
                pass.first_wanted = first;
            }
            run_layer(&pass);
        }
        memcpy(step->hidden + (int64_t)num_done * m->hidden, e->last,
               (size_t)pass.num_rows * m->hidden * sizeof(float));
        num_done += pass.num_rows;
        first += count;
    }
    if (step->logits) engine_logits(e, step->hidden, step->num_wanted, step->logits);
}

#endif
