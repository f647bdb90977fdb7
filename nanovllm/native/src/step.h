/* A step of a Llama-shaped decoder: tokens of any sequences in, hidden states and logits out. The new tokens of a
 * sequence lie side by side. */
#pragma once
#include <stdint.h>
#include "products.h"

typedef struct {
    Matrix q, k, v, o, gate, up, down;  /* of a convolution q, k and v are b, c and h */
    Matrix router;                      /* of a mixture of experts, which has no gate, up and down of its own */
    const Matrix *experts;              /* [expert][gate, up, down]; NULL = no mixture */
    const float *input_norm, *ffn_norm; /* [hidden], before a part of the layer; NULL = none */
    const float *after_attention, *after_ffn; /* [hidden], norms of what a part gives; NULL = none */
    const float *q_norm, *k_norm;       /* [head_dim] or of all heads; NULL = none */
    const float *rotary;                /* [position][head_dim]: cosines, then sines */
    void *keys, *values;                /* as attention.h says, of the type kv_type */
    const float *filters;               /* [conv_taps][hidden], of the oldest input first; NULL = attention */
    const float *filter_bias;           /* [hidden]; NULL = none */
    float *states;                      /* [row][state_stride]: [conv_taps - 1][hidden] newest inputs, the oldest first */
    int32_t window, group;              /* window: 0 = none; group: whose block tables it reads */
    int32_t state_stride;               /* floats from one row of `states` to the next */
} Layer;

typedef struct {
    int32_t num_layers, hidden, intermediate /* the largest */, num_heads, num_kv_heads, head_dim, block_size;
    int32_t num_experts, experts_per_token; /* 0 = no mixture of experts */
    int32_t kv_type;                        /* see floats.h */
    int32_t normalize_shares;               /* whether the shares of a token's experts add up to 1 */
    int32_t num_parts;                      /* see split_row */
    int32_t uses_gelu;                      /* in place of silu */
    int32_t norms_all_heads;                /* q_norm spans all query heads, k_norm all KV heads */
    int32_t conv_taps;                      /* of layers with a convolution; 0 = there are none */
    float eps, head_norm_eps, last_norm_eps, scale, embedding_scale;
    const float *query_scales;              /* [position]; NULL = none */
    const Layer *layers;
    Matrix embedding, head;
    const float *last_norm; /* [hidden] */
} Model;

typedef struct {
    int32_t num_tokens, num_wanted, num_sequences, table_stride;
    const int32_t *tokens, *positions; /* [num_tokens] */
    const int32_t *sequences;          /* [num_tokens]: the row of `tables` that a token reads */
    const int32_t *tables;             /* [group][sequence][table_stride] numbers of blocks */
    const int32_t *rows;               /* [sequence]: where layers have its state */
    const int32_t *wanted;             /* [num_wanted] tokens, ascending, whose hidden states are needed */
    float *hidden;                     /* [num_wanted][hidden]: as the last layer leaves them */
    float *logits;                     /* [num_wanted][vocabulary]; NULL = not needed */
} Step;

typedef struct Engine Engine;

/* The parts of a step whose times are measured. */
enum {
    EMBEDDING, NORMS, QKV, ROTATION, ATTENTION, GATES, CONVOLUTION, OUTPUT, ROUTING, GATE_UP, DOWN, HEAD, NUM_PARTS
};

Engine *engine_create(const Model *model, int num_threads); /* NULL = no memory or threads */
void engine_destroy(Engine *engine);
void engine_step(Engine *engine, const Step *step);
void engine_logits(Engine *engine, float *hidden, int num_rows, float *logits);

/* An engine without a model, for products of x, [rows][at most `columns`]: out = x W^T, or added to it, where W are
 * matrices with the same columns, one below the other. */
Engine *engine_for_products(int columns, int num_threads);
void engine_products(Engine *engine, const Matrix *matrices, int num, const float *x, int rows, float *out, int adds);

/* The tokens of a step in a layer with the gated delta rule. */
typedef struct {
    int32_t num_sequences, num_heads, key_dim, value_dim; /* value_dim: a multiple of 32; key_dim: at most 256 */
    const float *q, *k;                /* [token][head][key_dim] */
    const float *v;                    /* [token][head][value_dim] */
    const float *factor, *beta;        /* [token][head]; factor: of the state */
    float *out;                        /* [token][head][value_dim] */
    float *states;                     /* [row][head][key_dim][value_dim], replaced */
    int64_t state_stride;              /* floats from one row to the next */
    const int64_t *rows, *first_tokens, *num_new; /* of each sequence */
    const uint8_t *is_new;             /* of each sequence: whether it begins with zeros, whatever its state holds */
} DeltaRule;

void engine_delta_rule(Engine *engine, const DeltaRule *rule);

void engine_seconds(Engine *engine, double seconds[NUM_PARTS]); /* of each part since the last call */
