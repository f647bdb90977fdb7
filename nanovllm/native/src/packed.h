/* What products with packed weights share with the matrix unit.
 *
 * In memory a weight takes about as many bits as in its file: its code, and its share of scales and of minima or zeros.
 *
 *   type        code   per 32 columns                                     bits per weight
 *   Q4_0        4      scale in float16                                   4.5
 *   Q4_1        4      scale and minimum in float16                       5
 *   Q4_K        4      scale and minimum of 8 bits; per 256 two units     4.625
 *   Q5_0        4 + 1  as Q4_0                                            5.5
 *   Q5_1        4 + 1  as Q4_1                                            6
 *   Q5_K        4 + 1  as Q4_K                                            5.625
 *   Q6_K        4 + 2  two scales of 8 bits; per 256 one unit             6.5625
 *   Q8_0        8      as Q4_0                                            8.5
 *   MXFP4       4      scale in float16; codes stand for a table's        4.5
 *   int4, GPTQ  4, 8   per group of the form a scale, and a zero of 8 bits
 *   int8        8      per row a scale in float32
 *
 * Matrix (products.h) says where scales, minima and units are, pack_codes how codes lie in a strip. Units become those
 * of fewer columns where these are in another order than in the file. */
#pragma once
#include "products.h"

#if HAVE_SIMD

/* What a sum of products of codes starts with: a float whose low bits hold the sum, an integer below 2^22. */
enum { INT_ZERO = 0x4B400000 };
#define ZERO 12582912.0f /* the same as a float: 1.5 * 2^23 */

/* The codes of a strip in four columns: [row of the strip][column]. */
typedef int8_t Codes __attribute__((vector_size(STRIP * 4)));
typedef uint8_t UnsignedCodes __attribute__((vector_size(STRIP * 4)));

/* What sums of products of codes are multiplied with. With two scales `minimum` is that of the first 16 columns. */
typedef struct {
    wide scale, minimum, minus_zero; /* minus_zero: of ZERO times scale */
} Scales;

/* A group of columns of a strip, unpacked. */
typedef struct {
    Codes part[8]; /* columns 4 i to 4 i + 3 */
    Scales scales;
} Group;

INLINE wide minus_zero_of(wide scale) { return scale * wide_splat(-ZERO); }
/* A sum of products of codes, without ZERO, times the scale. */
INLINE wide scaled(wide sum, wide scale, wide minus_zero) { return wide_multiply_add(minus_zero, sum, scale); }

static inline int has_two_scales(const Matrix *w) { return w->groups_per_scale == 0; }
/* Where codes of 4 or 5 bits have none stored, minima are 8 or 16 scales: 0 is in the middle. */
static inline int has_minima(const Matrix *w) { return w->minima || (w->bits < 6 && !w->table); }

/* Add the products of unpacked groups of W with `count` rows of x to y. Given are [rows / LANES][x_groups] of x. */
void amx_add_groups(const Matrix *w, const Group *panel, int groups, const Rounded *x, int64_t x_groups, int count,
                    float y[][TILE]);

#endif
