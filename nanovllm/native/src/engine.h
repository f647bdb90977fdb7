/* What the parts of a step share: its memory, and the work that is divided among the threads. */
#pragma once
#include "attention.h"
#include "pool.h"
#include "step.h"

#if HAVE_SIMD

enum { PASS_ROWS = 256, PASS_SEGMENTS = 2048 }; /* of a part of a step: they bound the memory of its activations */
enum { MOST_OUTPUTS = 3, MOST_BLOCKS = 32 };    /* matrices of one product; blocks of memory */
enum { CHANNELS = 128 };                        /* of a convolution, that a thread computes at a time */

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
    float *qkv;                      /* [PASS_ROWS][q | k | v], or of a convolution [PASS_ROWS][b | c | h] */
    float *product;                  /* [PASS_ROWS][hidden]: what a norm or a share is applied to before it is added */
    Rows normed, mixed, activated;
    float *partial, *largest;        /* of attention */
    float *routed, *shares;          /* [PASS_ROWS][num_experts] logits of the router, [PASS_ROWS][experts_per_token] */
    int32_t *chosen;                 /* [PASS_ROWS][experts_per_token] */
    Rows gathered;                   /* the inputs of one expert */
    int32_t expert_rows[PASS_ROWS];
    float expert_shares[PASS_ROWS];
    int32_t first_segments[PASS_ROWS];
    AttentionJob jobs[PASS_SEGMENTS];
    const int32_t *tables[PASS_ROWS];
    int32_t state_rows[PASS_ROWS];
    double seconds[NUM_PARTS];       /* since engine_seconds was called */
};

/* Call work(argument, i) for all i below `count` on all threads; the time counts for `part`. */
void engine_run(Engine *e, int part, void (*work)(void *, int), void *argument, int count);

/* Bring rows into the `forms` in which matrices read them. */
void form_inputs(Engine *e, int part, const Rows *rows, int count, int columns, int forms);

enum { STORE, ADD, GATE_SILU, GATE_GELU };

/* y[i] = x W[i]^T, which is stored. With ADD it is added to y, and with a gate y[0] = silu(x W[0]^T) * (x W[1]^T), or
 * the same with gelu. */
typedef struct {
    const Matrix *matrices[MOST_OUTPUTS];
    float *outputs[MOST_OUTPUTS];
    int64_t stride; /* of all outputs: floats from one row to the next */
    int num_outputs, mode;
    Inputs in;
} Product;

void run_product(Engine *e, int part, const Product *job);

static inline Inputs inputs_of(const Rows *rows, int count, int columns) {
    return (Inputs){rows->x, rows->rounded, rows->parts, count, columns, rows->num_parts};
}

#endif
