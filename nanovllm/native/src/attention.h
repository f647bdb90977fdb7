/* Attention over a paged KV cache: each token of a step attends to the tokens of its sequence up to itself. */
#pragma once
#include "floats.h"

/* Positions that one chunk of work reads: a fixed number, so that results do not depend on the batch. */
enum { SEGMENT = 128 };

/* Tokens of one sequence that are computed together. */
enum { MOST_TOKENS = 8 };

typedef struct {
    int num_heads, num_kv_heads, head_dim, block_size;
    int window;                     /* positions that a token attends to, itself included; 0 = all */
    float scale;
    const float *queries;           /* [token][head] */
    int64_t query_stride;           /* floats from one token to the next */
    int head_stride;                /* floats from one head to the next: at least head_dim */
    const void *keys;               /* [block][kv_head][head_dim][position in the block] */
    const void *values;             /* [block][kv_head][position in the block][head_dim] */
    int type;                       /* of the numbers in keys and values: see floats.h */
    const int32_t *positions;       /* [token] */
    const int32_t *const *tables;   /* [token]: the blocks of its sequence */
    int64_t table_offset;           /* from there to the blocks of the layer's group */
    const int32_t *first_segments;  /* [token]: the index in `partial` of its first segment */
    float *partial;                 /* [segment][head][head_dim + LANES]: weighted values, and sums of the weights */
    float *largest;                 /* [segment][head]: the largest score */
} Attention;

/* How many tokens before `end`, from `token` on, are computed together: neighbours in one sequence, which read the same
 * segments. */
int tokens_together(const Attention *a, int token, int end);

/* What the queries of these tokens for one KV head gather from one segment of positions, into
 * `partial`. The order of additions does not depend on `num_tokens`. */
void attend_segment(const Attention *a, int token, int num_tokens, int kv_head, int segment);

/* The segments of a token added up, in order: [head][head_dim]. `sinks`: of each head a score that takes part in the
 * softmax and has no value; NULL = none. */
void attend_merge(const Attention *a, int token, const float *sinks, float *out);

static inline int num_segments(const Attention *a, int token) { return a->positions[token] / SEGMENT + 1; }
