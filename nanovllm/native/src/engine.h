/* What the parts of a step share: its memory, its tokens, and the work that is divided among the threads. */
#pragma once
#include "attention.h"
#include "pool.h"
#include "step.h"

#if HAVE_SIMD

enum { PASS_ROWS = 256, PASS_SEGMENTS = 2048 }; /* of a part of a step: they bound the memory of its activations */
enum { EXPERT_ROWS = 2 * PASS_ROWS };           /* inputs of experts that are computed together */
enum { MOST_BLOCKS = 32 };                      /* of memory */

/* Rows of activations, and the same as the matrices need it that read them: rounded to int8, or split into parts. */
typedef struct {
    float *x;
    Rounded *rounded;
    uint16_t *parts;
    int num_parts;
} Rows;

/* Tokens that attend to the same segment of positions, and are computed together. */
typedef struct {
    int32_t token, num_tokens, segment;
} AttentionJob;

struct Engine {
    Model model;
    Pool *pool;
    int num_threads, num_blocks;
    void *blocks[MOST_BLOCKS];       /* all memory below */
    float *residual, *last;          /* [PASS_ROWS][hidden]: of all tokens, and of those that are wanted */
    float *inputs;                   /* [PASS_ROWS][inputs_size]: what the input matrices of a layer give */
    int64_t inputs_size;
    float *product;                  /* [EXPERT_ROWS][hidden]: before a norm or a share is applied to it */
    float *sum, *own_inputs;         /* [PASS_ROWS][hidden] of MLP and experts; [PASS_ROWS][layer][own_size] */
    Rows normed, mixed, activated;
    float *partial, *largest;        /* of attention */
    float *routed, *shares;          /* [PASS_ROWS][num_experts] logits of the router, [PASS_ROWS][per_token] */
    int32_t *chosen, *expert_rows;   /* [PASS_ROWS][per_token]: experts, ascending, and their rows of `gathered` */
    Rows gathered;                   /* the inputs of experts */
    int32_t gathered_tokens[EXPERT_ROWS];
    int32_t first_segments[PASS_ROWS];
    AttentionJob jobs[PASS_SEGMENTS];
    const int32_t *tables[PASS_ROWS];
    int32_t state_rows[PASS_ROWS];
    int32_t first_tokens[PASS_ROWS + 1]; /* of each sequence in a part of a step, then the number of tokens */
    double seconds[NUM_PARTS];           /* since engine_seconds was called */
};

/* The tokens of a part of a step, in one layer. */
typedef struct {
    Engine *e;
    const Layer *layer;
    const int32_t *tokens, *positions, *wanted; /* wanted: the tokens that are kept, NULL = all */
    int num_tokens, num_rows, first_wanted;     /* num_rows: those that are kept */
    int num_sequences, num_jobs;                /* num_jobs: of attention, for each KV head */
    Attention attention;
    int64_t group_stride; /* from the block tables of a group to those of the next */
    float *x;             /* [num_rows][hidden]: the residual of the kept tokens */
} Pass;

/* The token of a row that is kept. */
static inline int token_of(const Pass *p, int row) { return p->wanted ? p->wanted[row] - p->first_wanted : row; }

/* Call work(argument, i) for all i below `count` on all threads; the time counts for `part`. */
void engine_run(Engine *e, int part, void (*work)(void *, int), void *argument, int count);

/* Bring rows into the `forms` in which matrices read them. */
void form_inputs(Engine *e, int part, const Rows *rows, int count, int columns, int forms);

/* Row `row` of `rows`, from `x`, in the `forms` in which matrices read it. */
void form_row(const Rows *rows, const float *x, int row, int columns, int forms);

enum { STORE, ADD, GATE };

/* y[i] = x W[i]^T, which is stored. With ADD it is added to y, with GATE y[0] = activation(x W[0]^T) * (x W[1]^T). */
typedef struct {
    const Matrix *matrices[MOST_INPUTS];
    float *outputs[MOST_INPUTS];
    int64_t stride; /* of all outputs: floats from one row to the next */
    int num_outputs, mode;
    Inputs in;
} Product;

/* Compute products, which do not depend on one another. */
void run_products(Engine *e, int part, const Product *jobs, int num);

/* The product of a matrix, stored in `out` or, with mode ADD, added to it. */
void multiply(Engine *e, int part, const Matrix *w, const Rows *inputs, int rows, float *out, int mode);

/* Add the product of a matrix with the kept rows, or the norm of this product, to x. */
void add_product(Pass *p, int part, const Matrix *w, const Rows *inputs, const float *norm);

/* The norm of x, into `out` or, with `adds`, added to it. */
void norm_row(const float *x, const float *weight, int size, float eps, float *out, int adds);
void norm_rows(Engine *e, const float *x, int rows, const float *weight, float *out, int adds);

/* The norm of rows of x, or x itself where there is no norm: what matrices of these `forms` read. */
Rows normed_rows(Engine *e, float *x, int rows, const float *weight, float eps, int forms);

/* What mixes the tokens of a layer: its inputs are in `inputs`, and the kept rows go to `mixed`. */
void run_attention(Pass *p);
void run_convolution(Pass *p);
void run_delta_net(Pass *p);

/* Add what the MLP, or the mixture of experts, makes of x to it. */
void run_feed_forward(Pass *p);

/* Channels i to i + LANES - 1 of `size` of a causal convolution: of a token's own inputs, `newest`, and those of the
 * tokens before, which the sequence's state holds, the newest at its end. They move up in it, from token to token and
 * from one part of a step to the next. A sequence begins with zeros, whatever its state holds. */
INLINE wide convolve(const Pass *p, int token, int size, int i, wide newest) {
    const Layer *layer = p->layer;
    const int num_before = p->e->model.conv_taps - 1;
    float *state = layer->states + (int64_t)p->e->state_rows[token] * layer->state_stride + i;
    wide sum = newest * wide_load(layer->filters + num_before * size + i);
    for (int k = 0; k < num_before; k++) {
        const wide input = p->positions[token] ? wide_load(state + k * size) : wide_splat(0);
        sum = wide_multiply_add(sum, input, wide_load(layer->filters + k * size + i));
        if (k > 0) wide_store(state + (k - 1) * size, input);
    }
    if (num_before > 0) wide_store(state + (num_before - 1) * size, newest);
    return layer->filter_bias ? sum + wide_load(layer->filter_bias + i) : sum;
}

static inline Inputs inputs_of(const Rows *rows, int count, int columns) {
    return (Inputs){rows->x, rows->rounded, rows->parts, count, columns, rows->num_parts};
}

#endif
