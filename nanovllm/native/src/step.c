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

/* Memory that lasts as long as the engine; NULL without any. */
static void *reserve(Engine *e, int64_t bytes) {
    return e->blocks[e->num_blocks++] = aligned_alloc(64, ((size_t)bytes + 64) / 64 * 64);
}

static float *reserve_floats(Engine *e, int64_t rows, int64_t columns) {
    return reserve(e, rows * columns * (int64_t)sizeof(float));
}

static Rows reserve_rows(Engine *e, int64_t rows, int64_t columns) {
    return (Rows){
        .x = reserve_floats(e, rows, columns),
        .rounded = reserve(e, rows / LANES * (columns / GROUP + 1) * (int64_t)sizeof(Rounded)),
        .parts = reserve(e, rows * columns * e->model.num_parts * (int64_t)sizeof(uint16_t)),
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
    const Router *r = &e->model.router;
    const int rows = model->router.num_experts ? EXPERT_ROWS : PASS_ROWS; /* of experts, or of an MLP */
    int64_t mixed = 0, intermediate = 0, partial = 0;
    e->model = *model;
    e->num_threads = num_threads;
    for (const Layer *layer = m->layers; layer < m->layers + m->num_layers; layer++) {
        int64_t inputs = 0;
        for (int i = 0; i < layer->num_inputs; i++) inputs += layer->inputs[i].rows;
        e->inputs_size = larger_size(e->inputs_size, inputs);
        mixed = larger_size(mixed, layer->o.columns);
        intermediate = larger_size(intermediate, layer->gate.rows);
        intermediate = larger_size(intermediate, layer->own_gate.rows);
        if (layer->experts) intermediate = larger_size(intermediate, layer->experts->rows);
        if (layer->kind == ATTENTION_LAYER) partial = larger_size(partial, layer->head_dim + LANES);
    }
    e->residual = reserve_floats(e, PASS_ROWS, m->hidden);
    e->last = reserve_floats(e, PASS_ROWS, m->hidden);
    e->product = reserve_floats(e, rows, m->hidden);
    e->inputs = reserve_floats(e, PASS_ROWS, e->inputs_size);
    e->partial = reserve_floats(e, PASS_SEGMENTS * m->num_heads, partial);
    e->largest = reserve_floats(e, PASS_SEGMENTS, m->num_heads);
    e->normed = reserve_rows(e, PASS_ROWS, m->hidden);
    e->mixed = reserve_rows(e, PASS_ROWS, mixed);
    e->activated = reserve_rows(e, rows, intermediate);
    if (r->num_experts) {
        e->routed = reserve_floats(e, PASS_ROWS, r->num_experts);
        e->shares = reserve_floats(e, PASS_ROWS, r->per_token);
        e->chosen = reserve(e, PASS_ROWS * r->per_token * (int64_t)sizeof(int32_t));
        e->expert_rows = reserve(e, PASS_ROWS * r->per_token * (int64_t)sizeof(int32_t));
        e->gathered = reserve_rows(e, EXPERT_ROWS, m->hidden);
        e->sum = reserve_floats(e, 2 * PASS_ROWS, m->hidden);
    }
    if (m->own_size) e->own_inputs = reserve_floats(e, PASS_ROWS, m->own_table.columns);
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

void norm_row(const float *x, const float *weight, int size, float eps, float *out, int adds) {
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

void norm_rows(Engine *e, const float *x, int rows, const float *weight, float *out, int adds) {
    Norm norm = {x, weight, e->model.hidden, e->model.eps, out, adds};
    engine_run(e, NORMS, norm_chunk, &norm, rows);
}

static void embed_chunk(void *argument, int row) {
    const Pass *p = argument;
    const Model *m = &p->e->model;
    float *x = p->e->residual + (int64_t)row * m->hidden;
    matrix_row(&m->embedding, p->tokens[row], x);
    for (int i = 0; m->embedding_scale != 1 && i < m->hidden; i++) x[i] *= m->embedding_scale;
}

/* The own inputs of a token in all layers: (norm(projection(x)) + row of the table) / sqrt(2). */
static void own_inputs_chunk(void *argument, int row) {
    const Pass *p = argument;
    const Model *m = &p->e->model;
    const int size = m->own_size, width = m->own_table.columns;
    const float half = sqrtf(0.5f), scale = 1 / sqrtf((float)m->hidden);
    float *x = p->e->own_inputs + (int64_t)row * width, looked_up[width];
    matrix_row(&m->own_table, p->tokens[row], looked_up);
    for (int i = 0; i < width; i++) x[i] *= scale;
    for (int i = 0; i < width; i += size) norm_row(x + i, m->own_norm, size, m->eps, x + i, 0);
    for (int i = 0; i < width; i++) x[i] = (x[i] + looked_up[i] * m->own_scale) * half;
}

static void embed(Pass *p) {
    Engine *e = p->e;
    const Model *m = &e->model;
    engine_run(e, EMBEDDING, embed_chunk, p, p->num_tokens);
    if (!m->own_size) return;
    const Rows x = normed_rows(e, e->residual, p->num_tokens, NULL, 0, 0);
    multiply(e, EMBEDDING, &m->own_projection, &x, p->num_tokens, e->own_inputs, STORE);
    engine_run(e, EMBEDDING, own_inputs_chunk, p, p->num_tokens);
}

Rows normed_rows(Engine *e, float *x, int rows, const float *weight, float eps, int forms) {
    Rows found = e->normed;
    Norm norm = {x, weight, e->model.hidden, eps, found.x, 0};
    if (weight)
        engine_run(e, NORMS, norm_chunk, &norm, rows);
    else
        found.x = x;
    form_inputs(e, NORMS, &found, rows, e->model.hidden, forms);
    return found;
}

void multiply(Engine *e, int part, const Matrix *w, const Rows *inputs, int rows, float *out, int mode) {
    form_inputs(e, part, inputs, rows, w->columns, form_of(w));
    Product job = {.matrices = {w}, .outputs = {out}, .stride = w->rows, .num_outputs = 1, .mode = mode,
                   .in = inputs_of(inputs, rows, w->columns)};
    run_products(e, part, &job, 1);
}

void add_product(Pass *p, int part, const Matrix *w, const Rows *inputs, const float *norm) {
    Engine *e = p->e;
    multiply(e, part, w, inputs, p->num_rows, norm ? e->product : p->x, norm ? STORE : ADD);
    if (norm) norm_rows(e, e->product, p->num_rows, norm, p->x, 1);
}

static void gate_own_chunk(void *argument, int row) {
    const Pass *p = argument;
    const Model *m = &p->e->model;
    const int size = m->own_size, layer = (int)(p->layer - m->layers);
    const float *input = p->e->own_inputs + ((int64_t)token_of(p, row) * m->num_layers + layer) * size;
    float *x = p->e->activated.x + (int64_t)row * size;
    for (int i = 0; i < size; i += LANES) wide_store(x + i, gelu(wide_load(x + i)) * wide_load(input + i));
}

static void scale_chunk(void *argument, int row) {
    const Pass *p = argument;
    const int size = p->e->model.hidden;
    float *x = p->x + (int64_t)row * size;
    for (int i = 0; i < size; i += 4) store(x + i, load(x + i) * splat(p->layer->factor));
}

/* Add what the layer makes of its own input of each token. */
static void add_own_input(Pass *p) {
    Engine *e = p->e;
    const Rows x = normed_rows(e, p->x, p->num_rows, NULL, 0, 0);
    multiply(e, GATE_UP, &p->layer->own_gate, &x, p->num_rows, e->activated.x, STORE);
    engine_run(e, GATE_UP, gate_own_chunk, p, p->num_rows);
    add_product(p, DOWN, &p->layer->own_projection, &e->activated, p->layer->own_norm);
}

static void run_layer(Pass *p) {
    Engine *e = p->e;
    const Layer *layer = p->layer;
    const int hidden = e->model.hidden;
    int forms = 0;
    for (int i = 0; i < layer->num_inputs; i++) forms |= form_of(&layer->inputs[i]);
    const Rows normed = normed_rows(e, e->residual, p->num_tokens, layer->input_norm, e->model.eps, forms);
    Product inputs = {.stride = e->inputs_size, .num_outputs = layer->num_inputs,
                      .in = inputs_of(&normed, p->num_tokens, hidden)};
    for (int i = 0, at = 0; i < layer->num_inputs; at += layer->inputs[i++].rows)
        inputs.matrices[i] = &layer->inputs[i], inputs.outputs[i] = e->inputs + at;
    run_products(e, layer->kind == ATTENTION_LAYER ? QKV : STATE_INPUTS, &inputs, 1);
    if (layer->kind == ATTENTION_LAYER)
        run_attention(p);
    else if (layer->kind == CONVOLUTION_LAYER)
        run_convolution(p);
    else
        run_delta_net(p);
    for (int row = 0; p->wanted && row < p->num_rows; row++)
        memcpy(p->x + (int64_t)row * hidden, e->residual + (int64_t)token_of(p, row) * hidden,
               (size_t)hidden * sizeof(float));
    if (p->num_rows == 0) return;
    add_product(p, OUTPUT, &layer->o, &e->mixed, layer->after_attention);
    run_feed_forward(p);
    if (layer->own_gate.rows) add_own_input(p);
    if (layer->factor != 1) engine_run(e, NORMS, scale_chunk, p, p->num_rows);
}

/* --- a step ------------------------------------------------------------------------------------------------------- */

/* Prepare a part of the step that begins at token `first`; how many tokens it has. */
static int begin_pass(Pass *p, const Step *step, int first) {
    Engine *e = p->e;
    int count = 0, segments = 0;
    p->num_sequences = p->num_jobs = 0;
    for (; first + count < step->num_tokens && count < PASS_ROWS; count++) {
        const int own = step->positions[first + count] / SEGMENT + 1;
        if (count > 0 && segments + own > PASS_SEGMENTS) break;
        e->first_segments[count] = segments;
        segments += own;
        const int32_t sequence = step->sequences[first + count];
        e->tables[count] = step->tables + (int64_t)sequence * step->table_stride;
        e->state_rows[count] = step->rows[sequence];
        if (count == 0 || e->tables[count] != e->tables[count - 1]) e->first_tokens[p->num_sequences++] = count;
    }
    e->first_tokens[p->num_sequences] = count;
    p->tokens = step->tokens + first;
    p->positions = step->positions + first;
    p->num_tokens = count;
    const Attention neighbours = {.positions = p->positions, .tables = e->tables};
    for (int token = 0, together; token < count; token += together) {
        together = tokens_together(&neighbours, token, count);
        for (int s = 0; s < num_segments(&neighbours, token); s++)
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
        embed(&pass);
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
