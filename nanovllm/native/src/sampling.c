#include "sampling.h"
#include <math.h>
#include "simd.h"

#if HAVE_SIMD

static const float LARGEST_NOISE = 22.3f; /* -log(-log1p(-x)) for the smallest x below, rounded up */

/* As nanovllm/layers/noise.py computes it. */
static float gumbel(uint32_t key, uint32_t token) {
    uint32_t x = key + token * 0x9E3779B9u;
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x = (x ^ (x >> 15)) * 0x846CA68Bu;
    x ^= x >> 16;
    const float below_one = 1.0f - 0x1p-24f;
    return -logf(-log1pf(((float)(x & 0x7FFFFFFF) + 0.5f) * (-below_one / 0x1p31f)));
}

int32_t most_likely_token(const float *logits, int32_t vocab) {
    f32x4 most[4];
    int32_t i = 0;
    float best = -INFINITY;
    for (int j = 0; j < 4; j++) most[j] = splat(-INFINITY);
    for (; i + 16 <= vocab; i += 16)
        for (int j = 0; j < 4; j++) most[j] = larger(most[j], load(logits + i + 4 * j));
    for (; i < vocab; i++) best = logits[i] > best ? logits[i] : best;
    const float rest = largest_of(larger(larger(most[0], most[1]), larger(most[2], most[3])));
    best = rest > best ? rest : best;
    for (i = 0; i < vocab; i++)
        if (logits[i] == best) return i;
    return 0;
}

int32_t draw_token(const float *logits, int32_t vocab, float temperature, uint32_t key) {
    float best = -INFINITY;
    int32_t token = 0;
    for (int32_t i = 0; i < vocab; i++) {
        const float scaled = logits[i] / temperature;
        if (scaled + LARGEST_NOISE <= best) continue;
        const float score = scaled + gumbel(key, (uint32_t)i);
        if (score > best) best = score, token = i;
    }
    return token;
}

#endif
