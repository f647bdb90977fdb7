/* The work of a step that is divided among the threads: rows in the forms in which matrices read them, and products. */
#include "engine.h"
#include <time.h>

#if HAVE_SIMD

enum { CHUNK_NUMBERS = 4096 }; /* of x, that are rounded or split in one chunk */
enum { PRODUCT_CHUNKS = 8 };   /* of a product, at least, for each thread: none waits long */

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

void engine_run(Engine *e, int part, void (*work)(void *, int), void *argument, int count) {
    const double begin = now();
    pool_run(e->pool, work, argument, count);
    e->seconds[part] += now() - begin;
}

/* Rows that are brought into the forms of the matrices that read them. Rows that are rounded together share cache
 * lines, so a chunk has LANES of them, and as many columns as make it long enough. */
typedef struct {
    const Rows *rows;
    int count, columns, forms, chunk_columns;
} Forming;

static int chunks_per_rows(const Forming *job) { return (job->columns + job->chunk_columns - 1) / job->chunk_columns; }

/* Columns from `first` on of a row. */
static void form_columns(const Rows *rows, const float *x, int row, int first, int columns, int all_columns,
                         int forms) {
    const int64_t group = (int64_t)(row / LANES) * (all_columns / GROUP) + first / GROUP;
    if (forms & ROUNDED) round_row(x, columns, rows->rounded + group, row % LANES);
    if (have_amx && forms & SPLIT) split_row(x, first, columns, all_columns, rows->parts, rows->num_parts, row);
}

void form_row(const Rows *rows, const float *x, int row, int columns, int forms) {
    form_columns(rows, x, row, 0, columns, columns, forms);
}

static void form_chunk(void *argument, int chunk) {
    const Forming *job = argument;
    const int first = chunk / chunks_per_rows(job) * LANES, column = chunk % chunks_per_rows(job) * job->chunk_columns;
    const int left = job->columns - column, columns = left < job->chunk_columns ? left : job->chunk_columns;
    for (int row = first; row < first + LANES && row < job->count; row++)
        form_columns(job->rows, job->rows->x + (int64_t)row * job->columns + column, row, column, columns, job->columns,
                     job->forms);
}

void form_inputs(Engine *e, int part, const Rows *rows, int count, int columns, int forms) {
    const int together = count < LANES ? count : LANES;
    Forming job = {rows, count, columns, forms, CHUNK_NUMBERS / together / GROUP * GROUP};
    if (forms) engine_run(e, part, form_chunk, &job, (count + LANES - 1) / LANES * chunks_per_rows(&job));
}

/* gate * sigmoid(alpha * gate) * (up + 1), with gate at most the limit and up between it and -limit. */
INLINE wide clamped(wide gate, wide up, const Model *m) {
    const wide limit = wide_splat(m->clamp_limit);
    gate = -wide_larger(-gate, -limit);
    up = -wide_larger(-wide_larger(up, -limit), -limit);
    return gate * logistic(gate * wide_splat(m->clamp_alpha)) * (up + wide_splat(1));
}

/* y = activation(y) * up, of one tile. */
INLINE void activate(float y[TILE], const float up[TILE], const Model *m) {
    for (int i = 0; i < TILE; i += LANES) {
        const wide x = wide_load(y + i), factor = wide_load(up + i);
        if (m->activation == CLAMPED)
            wide_store(y + i, clamped(x, factor, m));
        else
            wide_store(y + i, (m->activation == GELU ? gelu(x) : x * logistic(x)) * factor);
    }
}

/* How a product is divided: num_tiles of all outputs, with a gate of the first matrix. */
typedef struct {
    const Product *product;
    int num_tiles, tiles_per_chunk, chunks_per_rows, first_chunk;
} ProductChunks;

typedef struct {
    const Model *model;
    const ProductChunks *products;
} ProductJobs;

static void finish_tile(const Product *job, const Model *m, int which, int tile, int first, int count, float y[][TILE],
                        float up[][TILE]) {
    const int rows = job->matrices[which]->rows, at = tile * TILE;
    const int width = rows - at < TILE ? rows - at : TILE;
    for (int row = 0; row < count; row++) {
        float *out = job->outputs[which] + (first + row) * job->stride + at;
        if (job->mode == GATE) activate(y[row], up[row], m);
        for (int r = 0; width == TILE && r < TILE; r += LANES)
            wide_store(out + r, job->mode == ADD ? wide_load(out + r) + wide_load(y[row] + r) : wide_load(y[row] + r));
        for (int r = 0; width < TILE && r < width; r++) out[r] = job->mode == ADD ? out[r] + y[row][r] : y[row][r];
    }
}

/* Tile `index` of all outputs: its matrix's number. */
static int place_of(const Product *job, int index, Place *place) {
    int which = 0;
    for (; index >= num_tiles(job->matrices[which]); which++) index -= num_tiles(job->matrices[which]);
    *place = (Place){job->matrices[which], index};
    return which;
}

/* Some tiles of a product for MOST_ROWS rows. The chunks of the same rows follow one another: the rows stay in the L2
 * cache. */
static void product_chunk(void *argument, int chunk) {
    const ProductJobs *jobs = argument;
    const ProductChunks *all = jobs->products;
    while (chunk >= all[1].first_chunk) all++;
    chunk -= all->first_chunk;
    const Product *job = all->product;
    const int gated = job->mode == GATE;
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
            if (gated) places[num] = (Place){job->matrices[1], places[num - 1].tile}, num++;
        }
        place_of(job, i < all->num_tiles ? i : 0, &next);
        product_tiles(places, num, next, &job->in, first, count, &panels, y);
        for (int k = 0; k < num; k += gated ? 2 : 1)
            finish_tile(job, jobs->model, which[k], places[k].tile, first, count, y[k], gated ? y[k + 1] : NULL);
    }
    if (have_amx) end_products();
}

void run_products(Engine *e, int part, const Product *jobs, int num) {
    ProductChunks all[num + 1];
    int tiles = 0, chunks = 0;
    for (int i = 0; i < num; i++) {
        all[i] = (ProductChunks){.product = &jobs[i]};
        for (int k = 0; k < jobs[i].num_outputs; k++) all[i].num_tiles += num_tiles(jobs[i].matrices[k]);
        tiles += all[i].num_tiles;
    }
    const int share = tiles / (e->num_threads * PRODUCT_CHUNKS);
    for (int i = 0; i < num; i++) {
        /* with AVX512 dense.c computes two tiles at a time, which a gate has anyway */
        const int step = LANES == 16 && jobs[i].mode != GATE && !is_packed(jobs[i].matrices[0]) ? MOST_TILES : 1;
        all[i].tiles_per_chunk = share > step ? share / step * step : step;
        all[i].chunks_per_rows = (all[i].num_tiles + all[i].tiles_per_chunk - 1) / all[i].tiles_per_chunk;
        all[i].first_chunk = chunks;
        chunks += all[i].chunks_per_rows * ((jobs[i].in.rows + MOST_ROWS - 1) / MOST_ROWS);
    }
    all[num].first_chunk = chunks;
    ProductJobs work = {&e->model, all};
    engine_run(e, part, product_chunk, &work, chunks);
}

void engine_products(Engine *e, const Matrix *matrices, int num, const float *x, int rows, float *out, int adds) {
    const int columns = matrices->columns;
    int stride = 0, forms = 0;
    for (int i = 0; i < num; i++) stride += matrices[i].rows, forms |= form_of(&matrices[i]);
    for (int64_t first = 0; first < rows; first += PASS_ROWS) {
        const int count = rows - first < PASS_ROWS ? (int)(rows - first) : PASS_ROWS;
        Rows inputs = e->normed;
        inputs.x = (float *)x + first * columns;
        form_inputs(e, QKV, &inputs, count, columns, forms);
        float *to = out + first * stride;
        for (int i = 0, here; i < num; i += here) {
            Product job = {.stride = stride, .mode = adds ? ADD : STORE, .in = inputs_of(&inputs, count, columns)};
            for (here = 0; here < MOST_INPUTS && i + here < num; to += job.matrices[here++]->rows)
                job.matrices[here] = &matrices[i + here], job.outputs[here] = to;
            job.num_outputs = here;
            run_products(e, QKV, &job, 1);
        }
    }
}

#endif
