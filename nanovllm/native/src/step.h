/* A step of a decoder: tokens of any sequences in, hidden states and logits out. The new tokens of a
 * sequence lie side by side. */
#pragma once
#include <stdint.h>
#include "products.h"

/* What mixes the tokens of a sequence, and what its input matrices give. */
enum {
    ATTENTION_LAYER,   /* q, k, v; with gates_queries each head of q is a query, then its gate. Without v the values are
                        * the keys, and with q alone keys and values are those of an earlier layer */
    CONVOLUTION_LAYER, /* b, c, h */
    DELTA_NET_LAYER,   /* q, k, v, z, b, a */
};
enum { MOST_INPUTS = 6 };

typedef struct {
    int32_t kind, num_inputs;
    Matrix inputs[MOST_INPUTS], o;
    Matrix gate, up, down;              /* the MLP, or the expert that all tokens pass; no rows = none */
    Matrix router, shared_gate;         /* of a mixture of experts; shared_gate: no rows = none */
    const Matrix *experts;              /* [expert][gate, up, down]; NULL = no mixture */
    const float *choice_bias;           /* [expert], for the choice alone; NULL = none */
    const float *expert_factors;        /* [expert], of what it gives; NULL = none */
    const float *input_norm, *ffn_norm; /* [hidden], before a part of the layer; NULL = none */
    const float *after_attention, *after_ffn; /* [hidden], norms of what a part gives; NULL = none */
    /* [hidden], norms of a mixture of experts that is added to an MLP: before the router and the experts, and of what
     * the MLP and the experts give; NULL = the experts are not beside an MLP */
    const float *router_norm, *experts_norm, *after_mlp, *after_experts;
    Matrix own_gate, own_projection;    /* x + norm(projection(gelu(gate(x)) * own input)); no rows = none */
    const float *own_norm;              /* [hidden] */
    const float *q_norm, *k_norm, *v_norm; /* [head_dim], or of all heads; NULL = none */
    const float *rotary;                /* [position][head_dim]: cosines, then sines */
    const float *sinks;                 /* [head] scores that take part in the softmax; NULL = none */
    void *keys, *values;                /* as attention.h says, of the type kv_type */
    const float *filters;               /* of a convolution, [conv_taps][channel], of the oldest input first */
    const float *filter_bias;           /* [channel]; NULL = none */
    const float *decay, *decay_bias;    /* of a delta net, [value head]: the factor is e^(decay * softplus(a + bias)) */
    const float *out_norm;              /* of a delta net, [value_dim] */
    float *states;                      /* [row][state_stride]: [conv_taps - 1][channel] newest inputs, oldest first,
                                         * then of a delta net [value head][key_dim][value_dim] */
    int32_t num_kv_heads, head_dim;     /* of attention */
    float scale, factor;                /* of scores; of the residual after the layer */
    int32_t window, group;              /* window: 0 = none; group: whose block tables it reads */
    int32_t state_stride;               /* floats from one row of `states` to the next */
} Layer;

/* How a token's experts are chosen, by softmax or sigmoid scores. Of `num_groups` groups of experts only the best
 * chosen_groups take part: those with the largest best score, or sum of the two best ones of sigmoid. */
typedef struct {
    int32_t num_experts, per_token; /* 0 = no mixture of experts */
    int32_t uses_sigmoid, normalizes /* shares, so that they add up to 1 */, num_groups, chosen_groups;
    float scaling, least_sum;       /* of all shares; added to the sum that normalized shares are divided by */
} Router;

enum { SILU, GELU, CLAMPED };

typedef struct {
    int32_t num_layers, hidden, num_heads, block_size;
    int32_t kv_type;         /* see floats.h */
    int32_t num_parts;       /* see split_row */
    int32_t activation;      /* of gates */
    int32_t norms_all_heads; /* q_norm spans all query heads, k_norm all KV heads */
    int32_t gates_queries;   /* what a query gathers is multiplied with sigmoid(gate) */
    int32_t conv_taps;       /* of convolutions */
    int32_t num_key_heads, num_value_heads, key_dim, value_dim; /* of delta nets; value_dim: a multiple of 32 */
    int32_t own_size;               /* of the input that each layer has of its own; 0 = there is none */
    float eps, head_norm_eps, last_norm_eps, embedding_scale, own_scale; /* own_scale: of rows of own_table */
    float clamp_alpha, clamp_limit; /* of CLAMPED */
    Router router;
    const float *query_scales;      /* [position]; NULL = none */
    const Layer *layers;
    Matrix embedding, head;
    Matrix own_table, own_projection; /* own inputs of all layers: of a token, and from its embedding */
    const float *own_norm;            /* [own_size], of each layer's part of the projection */
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
    EMBEDDING, NORMS, QKV, ROTATION, ATTENTION, STATE_INPUTS, STATES, OUTPUT, ROUTING, GATE_UP, DOWN, HEAD, NUM_PARTS
};

Engine *engine_create(const Model *model, int num_threads); /* NULL = no memory or threads */
void engine_destroy(Engine *engine);
void engine_step(Engine *engine, const Step *step);
void engine_logits(Engine *engine, float *hidden, int num_rows, float *logits);

/* An engine without a model, for products of x, [rows][at most `columns`]: out = x W^T, or added to it, where W are
 * matrices with the same columns, one below the other. */
Engine *engine_for_products(int columns, int num_threads);
void engine_products(Engine *engine, const Matrix *matrices, int num, const float *x, int rows, float *out, int adds);

void engine_seconds(Engine *engine, double seconds[NUM_PARTS]); /* of each part since the last call */
