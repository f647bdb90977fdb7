#include "step.h"
#include <math.h>
#include <stdlib.h>
#include <time.h>
#include "attention.h"
#include "pool.h"
#include "simd.h"

int simd_available(void) { return HAVE_SIMD; }

#if HAVE_SIMD

enum { PASS_ROWS = 256, PASS_SEGMENTS = 2048 }; /* of a part of a step: they bound the memory of its activations */
enum { MOST_OUTPUTS = 3, PRODUCT_CHUNKS = 8 }; /* matrices of one product; least chunks per thread: none waits long */
enum { CHUNK_NUMBERS = 4096 };                 /* of x, that are rounded or split in one chunk */

/* Rows of activations, and the same as the matrices need it that read them: rounded to int8, or split into parts. */
typedef struct {
    float *x;
    Rounded *rounded;
    uint16_t *parts;
} Rows;

/* Tokens that attend to the same segment of positions, and are computed together. */
typedef struct {
    int32_t token, num_tokens, segment;
} AttentionJob;

struct Engine {
    Model model;
    Pool *pool;
    int num_threads;
    float *residual, *last; /* [PASS_ROWS][hidden]: of all tokens, and of those that are wanted */
    float *qkv;             /* [PASS_ROWS][q | k | v] */
    Rows normed, mixed, activated;
    float *partial, *largest; /* of attention */
    float *routed, *shares; /* [PASS_ROWS][num_experts] logits of the router, and [PASS_ROWS][experts_per_token] */
    int32_t *chosen;        /* [PASS_ROWS][experts_per_token] */
    Rows gathered;          /* the inputs of one expert */
    float *expert_output;   /* [PASS_ROWS][hidden] */
    int32_t expert_rows[PASS_ROWS];
    float expert_shares[PASS_ROWS];
    int32_t first_segments[PASS_ROWS];
    AttentionJob jobs[PASS_SEGMENTS];
    const int32_t *tables[PASS_ROWS];
    double seconds[NUM_PARTS]; /* since engine_seconds was called */
};

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Call work(argument, i) for all i below `count` on all threads; the time counts for `part`. */
static void run(Engine *e, int part, void (*work)(void *, int), void *argument, int count) {
    const double begin = now();
    pool_run(e->pool, work, argument, count);
    e->seconds[part] += now() - begin;
}

void engine_seconds(Engine *e, double seconds[NUM_PARTS]) {
    memcpy(seconds, e->seconds, sizeof(e->seconds));
    memset(e->seconds, 0, sizeof(e->seconds));
}

/* --- memory ------------------------------------------------------------------------------------------------------- */

static int64_t qkv_size(const Model *m) { return (int64_t)(m->num_heads + 2 * m->num_kv_heads) * m->head_dim; }

static int make_rows(Rows *rows, int64_t columns) {
    rows->x = malloc(PASS_ROWS * columns * sizeof(float));
    rows->rounded = aligned_alloc(64, PASS_ROWS / LANES * (columns / GROUP + 1) * sizeof(Rounded));
    rows->parts = aligned_alloc(64, PASS_ROWS * columns * PARTS * sizeof(uint16_t));
    return rows->x && rows->rounded && rows->parts;
}

static void free_rows(Rows *rows) {
    free(rows->x);
    free(rows->rounded);
    free(rows->parts);
}

void engine_destroy(Engine *e) {
    if (e == NULL) return;
    if (e->pool) pool_destroy(e->pool);
    free_rows(&e->normed);
    free_rows(&e->mixed);
    free_rows(&e->activated);
    free_rows(&e->gathered);
    free(e->routed);
    free(e->shares);
    free(e->chosen);
    free(e->expert_output);
    free(e->residual);
    free(e->last);
    free(e->qkv);
    free(e->partial);
    free(e->largest);
    free(e);
}

/* The memory of a mixture of experts. */
static int make_experts(Engine *e) {
    const Model *m = &e->model;
    if (m->num_experts == 0) return 1;
    e->routed = malloc(PASS_ROWS * m->num_experts * sizeof(float));
    e->shares = malloc(PASS_ROWS * m->experts_per_token * sizeof(float));
    e->chosen = malloc(PASS_ROWS * m->experts_per_token * sizeof(int32_t));
    e->expert_output = malloc(PASS_ROWS * m->hidden * sizeof(float));
    return make_rows(&e->gathered, m->hidden) && e->routed && e->shares && e->chosen && e->expert_output;
}

Engine *engine_create(const Model *model, int num_threads) {
    Engine *e = calloc(1, sizeof(Engine));
    if (e == NULL) return NULL;
    const Model *m = &e->model;
    e->model = *model;
    e->num_threads = num_threads;
    const int64_t mixed = (int64_t)m->num_heads * m->head_dim;
    e->residual = malloc(PASS_ROWS * m->hidden * sizeof(float));
    e->last = malloc(PASS_ROWS * m->hidden * sizeof(float));
    e->qkv = malloc(PASS_ROWS * qkv_size(m) * sizeof(float));
    e->partial = aligned_alloc(64, PASS_SEGMENTS * (int64_t)m->num_heads * (m->head_dim + LANES) * sizeof(float));
    e->largest = malloc(PASS_SEGMENTS * (int64_t)m->num_heads * sizeof(float));
    int made = make_rows(&e->normed, m->hidden) & make_rows(&e->mixed, mixed);
    made &= make_rows(&e->activated, m->intermediate) & make_experts(e);
    e->pool = pool_create(num_threads);
    if (made && e->residual && e->last && e->qkv && e->partial && e->largest && e->pool) return e;
    engine_destroy(e);
    return NULL;
}

/* --- rows --------------------------------------------------------------------------------------------------------- */

static void norm_row(const float *x, const float *weight, int size, float eps, float *out) {
    wide sum = wide_splat(0);
    f32x4 rest = splat(0); /* of what does not fill a vector */
    int i = 0;
    for (; i + LANES <= size; i += LANES) sum = wide_multiply_add(sum, wide_load(x + i), wide_load(x + i));
    for (; i < size; i += 4) rest = multiply_add(rest, load(x + i), load(x + i));
    const float scale = 1.0f / sqrtf((wide_sum_of(sum) + sum_of(rest)) / (float)size + eps);
    for (i = 0; i + LANES <= size; i += LANES)
        wide_store(out + i, wide_load(x + i) * wide_splat(scale) * wide_load(weight + i));
    for (; i < size; i += 4) store(out + i, load(x + i) * splat(scale) * load(weight + i));
}

/* y = silu(y) * up, of one tile */
static void activate(float y[TILE], const float up[TILE]) {
    for (int i = 0; i < TILE; i += LANES) {
        const wide gate = wide_load(y + i), size = exponential(-wide_absolute(gate)); /* e^-|x| cannot overflow */
        const swide positive = gate > wide_splat(0);
        const wide one = wide_splat(1), top = (wide)(((swide)one & positive) | ((swide)size & ~positive));
        wide_store(y + i, gate * top / (one + size) * wide_load(up + i));
    }
}

/* Rows that are brought into the forms of the matrices that read them. Rows that are rounded together share cache
 * lines, so a chunk has LANES of them, and as many columns as make it long enough. */
typedef struct {
    const Rows *rows;
    int count, columns, forms, chunk_columns;
} Forming;

static int chunks_per_rows(const Forming *job) { return (job->columns + job->chunk_columns - 1) / job->chunk_columns; }

static void form_chunk(void *argument, int chunk) {
    const Forming *job = argument;
    const int first = chunk / chunks_per_rows(job) * LANES, column = chunk % chunks_per_rows(job) * job->chunk_columns;
    const int left = job->columns - column, columns = left < job->chunk_columns ? left : job->chunk_columns;
    for (int row = first; row < first + LANES && row < job->count; row++) {
        const float *x = job->rows->x + (int64_t)row * job->columns + column;
        const int64_t group = (int64_t)(row / LANES) * (job->columns / GROUP) + column / GROUP;
        if (job->forms & ROUNDED) round_row(x, columns, job->rows->rounded + group, row % LANES);
        if (job->forms & SPLIT) split_row(x, column, columns, job->columns, job->rows->parts, row);
    }
}

static void form_inputs(Engine *e, int part, const Rows *rows, int count, int columns, int forms) {
    const int together = count < LANES ? count : LANES;
    Forming job = {rows, count, columns, forms, CHUNK_NUMBERS / together / GROUP * GROUP};
    if (forms) run(e, part, form_chunk, &job, (count + LANES - 1) / LANES * chunks_per_rows(&job));
}

static Inputs inputs_of(const Rows *rows, int count, int columns) {
    return (Inputs){rows->x, rows->rounded, rows->parts, count, columns};
}

/* A job for each row: the norm of x. */
typedef struct {
    const float *x, *weight;
    int size;
    float eps, *out;
} Norm;

static void norm_chunk(void *argument, int row) {
    const Norm *job = argument;
    const int64_t at = (int64_t)row * job->size;
    norm_row(job->x + at, job->weight, job->size, job->eps, job->out + at);
}

/* --- products ----------------------------------------------------------------------------------------------------- */

enum { STORE, ADD, GATE };

/* y[i] = x W[i]^T. With ADD it is added to y, and with GATE y[0] = silu(x W[0]^T) * (x W[1]^T). */
typedef struct {
    const Matrix *matrices[MOST_OUTPUTS];
    float *outputs[MOST_OUTPUTS];
    int64_t stride; /* of all outputs: floats from one row to the next */
    int num_outputs, mode;
    Inputs in;
} Product;

/* How it is divided: num_tiles of all outputs, with GATE of the first matrix. */
typedef struct {
    const Product *product;
    int num_tiles, tiles_per_chunk, chunks_per_rows;
} ProductChunks;

static void finish_tile(const Product *job, int which, int tile, int first, int count, float y[][TILE],
                        float up[][TILE]) {
    const int rows = job->matrices[which]->rows, at = tile * TILE;
    const int width = rows - at < TILE ? rows - at : TILE;
    for (int m = 0; m < count; m++) {
        float *out = job->outputs[which] + (first + m) * job->stride + at;
        if (job->mode == GATE) activate(y[m], up[m]);
        for (int r = 0; width == TILE && r < TILE; r += LANES)
            wide_store(out + r, job->mode == ADD ? wide_load(out + r) + wide_load(y[m] + r) : wide_load(y[m] + r));
        for (int r = 0; width < TILE && r < width; r++) out[r] = job->mode == ADD ? out[r] + y[m][r] : y[m][r];
    }
}

/* Tile `index` of all outputs: its matrix's number. */
static int place_of(const Product *job, int index, Place *place) {
    int which = 0;
    for (; index >= num_tiles(job->matrices[which]); which++) index -= num_tiles(job->matrices[which]);
    *place = (Place){job->matrices[which], index};
    return which;
}

/* Some tiles for MOST_ROWS rows. The chunks of the same rows follow one another: the rows stay in the L2 cache. */
static void product_chunk(void *argument, int chunk) {
    const ProductChunks *all = argument;
    const Product *job = all->product;
    const int first = chunk / all->chunks_per_rows * MOST_ROWS, left_rows = job->in.rows - first;
    const int count = left_rows < MOST_ROWS ? left_rows : MOST_ROWS;
    const int begin = chunk % all->chunks_per_rows * all->tiles_per_chunk, left = all->num_tiles - begin;
    const int end = begin + (left < all->tiles_per_chunk ? left : all->tiles_per_chunk);
    Panels panels;
    panels.current = 0;
    panels.held = NULL;
    for (int i = begin; i < end;) {
        float y[MOST_TILES][MOST_ROWS][TILE];
        Place places[MOST_TILES], next;
        int num = 0, which[MOST_TILES];
        for (; i < end && num < MOST_TILES; i++) {
            which[num] = place_of(job, i, &places[num]);
            num++;
            if (job->mode == GATE) places[num] = (Place){job->matrices[1], places[num - 1].tile}, num++;
        }
        place_of(job, i < all->num_tiles ? i : 0, &next);
        product_tiles(places, num, next, &job->in, first, count, &panels, y);
        for (int k = 0; k < num; k += job->mode == GATE ? 2 : 1)
            finish_tile(job, which[k], places[k].tile, first, count, y[k], job->mode == GATE ? y[k + 1] : NULL);
    }
    end_products();
}

static void run_product(Engine *e, int part, const Product *job) {
    int tiles = 0;
    for (int i = 0; i < job->num_outputs; i++) tiles += num_tiles(job->matrices[i]);
    const int share = tiles / (e->num_threads * PRODUCT_CHUNKS);
    const int per_chunk = share > MOST_TILES ? share / MOST_TILES * MOST_TILES : MOST_TILES;
    ProductChunks all = {job, tiles, per_chunk, (tiles + per_chunk - 1) / per_chunk};
    run(e, part, product_chunk, &all, all.chunks_per_rows * ((job->in.rows + MOST_ROWS - 1) / MOST_ROWS));
}

/* --- a layer ------------------------------------------------------------------------------------------------------ */

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
    matrix_row(&m->embedding, p->tokens[row], p->e->residual + (int64_t)row * m->hidden);
}

static void rotate(float *x, const float *table, int head_dim) {
    const int half = head_dim / 2;
    for (int i = 0; i < half; i++) {
        const float cosine = table[i], sine = table[half + i], a = x[i], b = x[half + i];
        x[i] = a * cosine - b * sine;
        x[half + i] = b * cosine + a * sine;
    }
}

/* Norm and rotate the queries and keys of a token, and store its key and value. */
static void rotate_chunk(void *argument, int token) {
    const Pass *p = argument;
    const Model *m = &p->e->model;
    const int dim = m->head_dim, position = p->positions[token];
    float *heads = p->e->qkv + token * qkv_size(m);
    for (int h = 0; h < m->num_heads + m->num_kv_heads; h++) {
        const float *norm = h < m->num_heads ? p->layer->q_norm : p->layer->k_norm;
        if (norm) norm_row(heads + h * dim, norm, dim, m->head_norm_eps, heads + h * dim);
        rotate(heads + h * dim, p->layer->rotary + (int64_t)position * dim, dim);
    }
    const float *key = heads + m->num_heads * dim, *value = key + m->num_kv_heads * dim;
    const int64_t block = (p->attention.tables[token] + p->attention.table_offset)[position / m->block_size];
    for (int h = 0; h < m->num_kv_heads; h++) {
        const int64_t at = (block * m->num_kv_heads + h) * m->block_size * dim, offset = position % m->block_size;
        for (int d = 0; d < dim; d += 4) {
            store_apart(p->layer->keys, at + d * m->block_size + offset, m->block_size, load(key + h * dim + d),
                        m->kv_type);
            store_as(p->layer->values, at + offset * dim + d, load(value + h * dim + d), m->kv_type);
        }
    }
}

static void attend_chunk(void *argument, int chunk) {
    const Pass *p = argument;
    const int kv_heads = p->e->model.num_kv_heads, together = p->layer->window ? 1 : MOST_TOKENS;
    const AttentionJob *job = &p->e->jobs[chunk / kv_heads];
    for (int t = 0; t < job->num_tokens; t += together)
        attend_segment(&p->attention, job->token + t, job->num_tokens < together ? job->num_tokens : together,
                       chunk % kv_heads, job->segment);
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

static void norm_rows(Engine *e, const float *x, int rows, const float *weight, float eps, int forms) {
    Norm norm = {x, weight, e->model.hidden, eps, e->normed.x};
    run(e, NORMS, norm_chunk, &norm, rows);
    form_inputs(e, NORMS, &e->normed, rows, e->model.hidden, forms);
}

/* down(silu(gate(x)) * up(x)), into `out`, with mode STORE or ADD. `weights`: gate, up, down. */
static void gated_product(Pass *p, const Matrix *const weights[3], const Rows *inputs, int rows, float *out, int mode) {
    Engine *e = p->e;
    const int hidden = e->model.hidden, width = weights[2]->columns;
    Product gate = {{weights[0], weights[1]}, {e->activated.x}, width, 1, GATE, inputs_of(inputs, rows, hidden)};
    run_product(e, GATE_UP, &gate);
    form_inputs(e, DOWN, &e->activated, rows, width, form_of(weights[2]));
    Product down = {{weights[2]}, {out}, hidden, 1, mode, inputs_of(&e->activated, rows, width)};
    run_product(e, DOWN, &down);
}

static void run_mlp(Pass *p) {
    const Layer *layer = p->layer;
    const Matrix *const weights[] = {&layer->gate, &layer->up, &layer->down};
    const int forms = form_of(&layer->gate) | form_of(&layer->up);
    norm_rows(p->e, p->x, p->num_rows, layer->ffn_norm, p->e->model.eps, forms);
    gated_product(p, weights, &p->e->normed, p->num_rows, p->x, ADD);
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
    const float *from = p->e->expert_output + index * size;
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
    norm_rows(e, p->x, p->num_rows, layer->ffn_norm, m->eps, form_of(&layer->router));
    Product router = {{&layer->router}, {e->routed}, m->num_experts, 1, STORE,
                      inputs_of(&e->normed, p->num_rows, m->hidden)};
    run_product(e, ROUTING, &router);
    run(e, ROUTING, route_chunk, p, p->num_rows);
    for (int expert = 0; expert < m->num_experts; expert++) {
        const int count = rows_of_expert(p, expert);
        if (count == 0) continue;
        const Matrix *first = layer->experts + 3 * expert, *const weights[] = {first, first + 1, first + 2};
        run(e, ROUTING, gather_chunk, p, count);
        form_inputs(e, ROUTING, &e->gathered, count, m->hidden, form_of(weights[0]) | form_of(weights[1]));
        gated_product(p, weights, &e->gathered, count, e->expert_output, STORE);
        run(e, ROUTING, add_share_chunk, p, count);
    }
}

static void run_layer(Pass *p) {
    Engine *e = p->e;
    const Layer *layer = p->layer;
    const Model *m = &e->model;
    const int heads = m->num_heads * m->head_dim, keys = m->num_kv_heads * m->head_dim;
    const int forms = form_of(&layer->q) | form_of(&layer->k) | form_of(&layer->v);

    norm_rows(e, e->residual, p->num_tokens, layer->input_norm, m->eps, forms);
    Product qkv = {{&layer->q, &layer->k, &layer->v}, {e->qkv, e->qkv + heads, e->qkv + heads + keys}, qkv_size(m), 3,
                   STORE, inputs_of(&e->normed, p->num_tokens, m->hidden)};
    run_product(e, QKV, &qkv);
    p->attention.keys = layer->keys;
    p->attention.values = layer->values;
    p->attention.window = layer->window;
    p->attention.table_offset = layer->group * p->group_stride;
    run(e, ROTATION, rotate_chunk, p, p->num_tokens);
    if (p->num_rows == 0) return;
    run(e, ATTENTION, attend_chunk, p, p->num_jobs * m->num_kv_heads);
    run(e, ATTENTION, merge_chunk, p, p->num_rows);
    form_inputs(e, ATTENTION, &e->mixed, p->num_rows, heads, form_of(&layer->o));
    Product o = {{&layer->o}, {p->x}, m->hidden, 1, ADD, inputs_of(&e->mixed, p->num_rows, heads)};
    run_product(e, OUTPUT, &o);

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
        e->tables[count] = step->tables + (int64_t)step->sequences[first + count] * step->table_stride;
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

void engine_logits(Engine *e, const float *hidden, int num_rows, float *logits) {
    const Model *m = &e->model;
    for (int first = 0; first < num_rows; first += PASS_ROWS) {
        const int count = num_rows - first < PASS_ROWS ? num_rows - first : PASS_ROWS;
        norm_rows(e, hidden + (int64_t)first * m->hidden, count, m->last_norm, m->last_norm_eps, form_of(&m->head));
        Product head = {{&m->head}, {logits + (int64_t)first * m->head.rows}, m->head.rows, 1, STORE,
                        inputs_of(&e->normed, count, m->hidden)};
        run_product(e, HEAD, &head);
    }
}

void engine_step(Engine *e, const Step *step) {
    const Model *m = &e->model;
    Pass pass = {.e = e, .group_stride = (int64_t)step->num_sequences * step->table_stride};
    int num_done = 0; /* of the wanted tokens */
    for (int first = 0; first < step->num_tokens;) {
        const int count = begin_pass(&pass, step, first);
        run(e, EMBEDDING, embed_chunk, &pass, count);
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
