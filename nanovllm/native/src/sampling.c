#include "sampling.h"
#include <math.h>
#include "simd.h"

#if HAVE_SIMD

/* Random numbers y between 0 and 1 for LANES tokens from `first` on, as nanovllm/layers/noise.py makes them. */
static wide random_numbers(uint32_t key, uint32_t first) {
    uwide x;
    for (uint32_t i = 0; i < LANES; i++) x[i] = key + (first + i) * 0x9E3779B9u;
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x = (x ^ (x >> 15)) * 0x846CA68Bu;
    x ^= x >> 16;
    const float below_one = 1.0f - 0x1p-24f;
    const wide whole = __builtin_convertvector((swide)(x & 0x7FFFFFFF), wide);
    return (whole + wide_splat(0.5f)) * wide_splat(below_one / 0x1p31f);
}

/* A token's noise is -log(-log1p(-y)), which is at most -log(y), and this at most ln 2 for each power of two below
 * 1. */
static wide largest_noise(wide y) {
    const swide powers = 127 - (swide)((uwide)y >> 23);
    return __builtin_convertvector(powers, wide) * wide_splat(0.6931472f) + wide_splat(1e-4f);
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
    for (int32_t first = 0; first < vocab; first += LANES) {
        const int count = vocab - first < LANES ? vocab - first : LANES;
        wide scaled = wide_splat(-INFINITY);
        if (count == LANES) scaled = wide_load(logits + first);
        else memcpy(&scaled, logits + first, (size_t)count * sizeof(float));
        scaled /= wide_splat(temperature);
        const wide y = random_numbers(key, (uint32_t)first);
        if (wide_largest_of(scaled + largest_noise(y)) <= best) continue;
        for (int i = 0; i < count; i++) {
            const float score = scaled[i] - logf(-log1pf(-y[i]));
            if (score > best) best = score, token = first + i;
        }
    }
    return token;
}

#endif
