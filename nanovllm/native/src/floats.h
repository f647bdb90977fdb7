/* Numbers in float32, bfloat16 or float16: loaded as float32, and stored rounded to the nearest. */
#pragma once
#include "simd.h"

enum { FLOAT32, BFLOAT16, FLOAT16 };

/* Call a function whose last argument, a type, is a constant. */
#define BY_TYPE(type, function, ...)                          \
    switch (type) {                                           \
        case FLOAT32: function(__VA_ARGS__, FLOAT32); break;   \
        case BFLOAT16: function(__VA_ARGS__, BFLOAT16); break; \
        default: function(__VA_ARGS__, FLOAT16);              \
    }

#if HAVE_SIMD
INLINE wide wide_load_as(const void *numbers, int64_t index, const int type) {
    if (type == FLOAT32) return wide_load((const float *)numbers + index);
    const uint16_t *halves = (const uint16_t *)numbers + index;
    return type == BFLOAT16 ? wide_load_bfloat16(halves) : wide_load_halves(halves);
}

/* The first and the second numbers of LANES pairs of bfloat16. */
INLINE void load_pairs(const uint16_t *pairs, wide *first, wide *second) {
    uint32_t __attribute__((vector_size(sizeof(wide)))) v;
    memcpy(&v, pairs, sizeof(v));
    *first = (wide)(v << 16), *second = (wide)(v & 0xffff0000);
}

/* Begin to read the cache line of a number from memory. */
INLINE void fetch_as(const void *numbers, int64_t index, const int type) {
    __builtin_prefetch((const char *)numbers + index * (type == FLOAT32 ? 4 : 2));
}

INLINE void store_as(void *numbers, int64_t index, f32x4 x, const int type) {
    if (type == FLOAT32) {
        store((float *)numbers + index, x);
    } else if (type == BFLOAT16) {
        store_bfloat16((uint16_t *)numbers + index, x);
    } else { /* the largest number instead of infinity */
        store_halves((uint16_t *)numbers + index, larger(splat(-65504), smaller(splat(65504), x)));
    }
}

/* The same for numbers that are `stride` apart. */
INLINE void store_apart(void *numbers, int64_t index, int64_t stride, f32x4 x, const int type) {
    if (type == FLOAT32) {
        for (int i = 0; i < 4; i++) ((float *)numbers)[index + i * stride] = x[i];
    } else {
        uint16_t halves[4];
        store_as(halves, 0, x, type);
        for (int i = 0; i < 4; i++) ((uint16_t *)numbers)[index + i * stride] = halves[i];
    }
}
#endif
