/* Sampling from the whole vocabulary. */
#pragma once
#include <stdint.h>

/* The token with the largest logit, the first of equal ones; 0 where all are NaN. */
int32_t most_likely_token(const float *logits, int32_t vocab);

/* The token with the largest logit / temperature + noise, the first of equal ones. Noise is computed only for tokens
 * that it could let win. */
int32_t draw_token(const float *logits, int32_t vocab, float temperature, uint32_t key);
