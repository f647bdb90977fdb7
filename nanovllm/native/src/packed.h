/* What products with packed weights share, and what they hand to the matrix unit. */
#pragma once
#include "products.h"

#if HAVE_SIMD

/* Where the next group of a strip is. */
typedef struct {
    const uint8_t *codes;
    int64_t at; /* the index of its scales */
    int left;   /* groups with these scales */
} Reader;

INLINE int group_bytes(int type) { return STRIP * GROUP / (type == INT4 ? 2 : 1); }
INLINE int scale_step(int type) { return type == INT8_BY_16 ? 2 * STRIP : STRIP; }

INLINE Reader reader_of(const Matrix *w, int strip, const int type) {
    const int groups = w->columns / GROUP;
    return (Reader){
        .codes = (const uint8_t *)w->data + (int64_t)strip * groups * group_bytes(type),
        .at = (int64_t)strip * (groups / w->groups_per_scale) * scale_step(type),
        .left = w->groups_per_scale,
    };
}

INLINE void go_on(Reader *reader, const Matrix *w, const int type) {
    reader->codes += group_bytes(type);
    if (--reader->left == 0) reader->left = w->groups_per_scale, reader->at += scale_step(type);
}

/* Call a function with the matrix, and as its last arguments with constants: its type, whether it has minima, and
 * whether scales and minima are float16. With 4 bits it always has minima; only files with Q6_K have INT8_BY_16. */
#define BY_SCALES(function, w, type, minima, ...)                  \
    if ((w)->half_scales) function(w, __VA_ARGS__, type, minima, 1); \
    else function(w, __VA_ARGS__, type, minima, 0);
#define BY_KIND(function, w, ...)                                                  \
    if ((w)->type == INT4) BY_SCALES(function, w, INT4, 1, __VA_ARGS__)            \
    else if ((w)->type == INT8_BY_16) function(w, __VA_ARGS__, INT8_BY_16, 0, 0);  \
    else if ((w)->minima) BY_SCALES(function, w, INT8, 1, __VA_ARGS__)             \
    else BY_SCALES(function, w, INT8, 0, __VA_ARGS__)

/* Scales or minima of the rows of a strip. Without the last two bits of a float32, so that the product with INT_ZERO is
 * exact. */
INLINE wide load_scales(const void *scales, int64_t index, const int half_scales) {
    if (half_scales) return wide_load_halves((const uint16_t *)scales + index);
    return (wide)((uwide)wide_load((const float *)scales + index) & ~3u);
}

#if defined(__AVX512F__)
/* What a sum of products of codes starts with: a float whose low bits hold the sum, an integer below 2^22. */
enum { INT_ZERO = 0x4B400000 }; /* 1.5 * 2^23 */

/* What scales a sum of products of codes. */
typedef struct {
    wide scale, minus_zero; /* minus_zero: of INT_ZERO times scale */
} Scale;

/* The sum, without INT_ZERO, times the scale. */
INLINE wide scaled(wide sum, const Scale *s) { return wide_multiply_add(s->minus_zero, sum, s->scale); }

/* A group of a strip for the matrix unit: [4 columns][row of the strip][column]. */
typedef struct {
    int8_t codes[GROUP / 4][STRIP * 4];
    Scale scale[2]; /* of the first and of the last 16 columns */
    wide minimum;
} UnpackedGroup;
enum { PANEL_GROUPS = 24 }; /* groups that are unpacked at a time, for the L1 cache */

/* Whether the matrix unit multiplies bytes here. */
int have_amx_bytes(void);
/* Add the products of unpacked groups with `count` rows of x, of which [rows / LANES][x_groups] are given, to y. */
void amx_add_groups(const UnpackedGroup *panel, int groups, const Rounded *x, int64_t x_groups, int count, int by_16,
                    int has_minima, float y[][TILE]);
#endif

#endif
