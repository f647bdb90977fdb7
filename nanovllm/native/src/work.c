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

static void form_chunk(void *argument, int chunk) {
    const Forming *job = argument;
    const int first = chunk / chunks_per_rows(job) * LANES, column = chunk % chunks_per_rows(job) * job->chunk_columns;
    const int left = job->columns - column, columns = left < job->chunk_columns ? left : job->chunk_columns;
    for (int row = first; row < first + LANES && row < job->count; row++) {
        const float *x = job->rows->x + (int64_t)row * job->columns + column;
        const int64_t group = (int64_t)(row / LANES) * (job->columns / GROUP) + column / GROUP;
        if (job->forms & ROUNDED) round_row(x, columns, job->rows->rounded + group, row % LANES);
        if (have_amx && job->forms & SPLIT)
            split_row(x, column, columns, job->columns, job->rows->parts, job->rows->num_parts, row);
    }
}

void form_inputs(Engine *e, int part, const Rows *rows, int count, int columns, int forms) {
    const int together = count < LANES ? count : LANES;
    Forming job = {rows, count, columns, forms, CHUNK_NUMBERS / together / GROUP * GROUP};
    if (forms) engine_run(e, part, form_chunk, &job, (count + LANES - 1) / LANES * chunks_per_rows(&job));
}

/* y = silu(y) * up, of one tile, or gelu(y) * up: with tanh, y times the logistic function of a polynomial */
INLINE void activate(float y[TILE], const float up[TILE], const int gelu) {
    for (int i = 0; i < TILE; i += LANES) {
        const wide x = wide_load(y + i), one = wide_splat(1);
        const wide gate = gelu ? x * wide_splat(1.5957691216f) * (one + wide_splat(0.044715f) * x * x) : x;
        const wide size = exponential(-wide_absolute(gate)); /* e^-|x| cannot overflow */
        const swide positive = gate > wide_splat(0);
        const wide top = (wide)(((swide)one & positive) | ((swide)size & ~positive));
        wide_store(y + i, x * top / (one + size) * wide_load(up + i));
    }
}

/* How a product is divided: num_tiles of all outputs, with a gate of the first matrix. */
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
        if (job->mode == GATE_SILU) activate(y[m], up[m], 0);
        if (job->mode == GATE_GELU) activate(y[m], up[m], 1);
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
    const int gated = job->mode >= GATE_SILU;
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
            finish_tile(job, which[k], places[k].tile, first, count, y[k], gated ? y[k + 1] : NULL);
    }
    if (have_amx) end_products();
}

void run_product(Engine *e, int part, const Product *job) {
    int tiles = 0;
    for (int i = 0; i < job->num_outputs; i++) tiles += num_tiles(job->matrices[i]);
    /* dense512.c computes two tiles at a time, which a gate has anyway */
    const int step = LANES == 16 && job->mode < GATE_SILU && !is_packed(job->matrices[0]) ? MOST_TILES : 1;
    const int share = tiles / (e->num_threads * PRODUCT_CHUNKS), per_chunk = share > step ? share / step * step : step;
    ProductChunks all = {job, tiles, per_chunk, (tiles + per_chunk - 1) / per_chunk};
    engine_run(e, part, product_chunk, &all, all.chunks_per_rows * ((job->in.rows + MOST_ROWS - 1) / MOST_ROWS));
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
            for (here = 0; here < MOST_OUTPUTS && i + here < num; to += job.matrices[here++]->rows)
                job.matrices[here] = &matrices[i + here], job.outputs[here] = to;
            job.num_outputs = here;
            run_product(e, QKV, &job);
        }
    }
}

#endif
