/* Numbers in float32, bfloat16 or float16: loaded as float32, and stored rounded to the nearest. */
#pragma once
#include "simd.h"

enum { FLOAT32, BFLOAT16, FLOAT16 };

#if HAVE_SIMD
INLINE f32x4 load_as(const void *numbers, int64_t index, const int type) {
    if (type == FLOAT32) return load((const float *)numbers + index);
    const uint16_t *halves = (const uint16_t *)numbers + index;
    return type == BFLOAT16 ? load_bfloat16(halves) : load_halves(halves);
}

/* The first and the second numbers of four pairs of bfloat16. */
INLINE void load_pairs(const uint16_t *pairs, f32x4 *first, f32x4 *second) {
    u32x4 v;
    memcpy(&v, pairs, 16);
    *first = (f32x4)(v << 16), *second = (f32x4)(v & 0xffff0000);
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
    } else {
        store_halves((uint16_t *)numbers + index, x);
    }
}
#endif
