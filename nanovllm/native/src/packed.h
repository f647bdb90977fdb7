/* What products with packed weights share with the matrix unit. */
#pragma once
#include "products.h"

#if HAVE_SIMD

/* What a sum of products of codes starts with: a float whose low bits hold the sum, an integer below 2^22. */
enum { INT_ZERO = 0x4B400000 };
#define ZERO 12582912.0f /* the same as a float: 1.5 * 2^23 */

/* The codes of a strip in four columns: [row of the strip][column]. */
typedef int8_t Codes __attribute__((vector_size(STRIP * 4)));
typedef uint8_t UnsignedCodes __attribute__((vector_size(STRIP * 4)));

/* A group of columns of a strip, unpacked. */
typedef struct {
    Codes part[8];                     /* columns 4 i to 4 i + 3 */
    wide scale, minimum, minus_zero;   /* minus_zero: of ZERO times scale */
    wide first_scale, first_minus_zero; /* INT8_BY_16: of the first 16 columns, and `scale` is of the others */
} Group;

/* A sum of products of codes, without ZERO, times the scale. */
INLINE wide scaled(wide sum, wide scale, wide minus_zero) { return wide_multiply_add(minus_zero, sum, scale); }

/* Add the products of unpacked groups with `count` rows of x, of which [rows / LANES][x_groups] are given, to y. */
void amx_add_groups(const Group *panel, int groups, const Rounded *x, int64_t x_groups, int count, int by_16,
                    int has_minima, float y[][TILE]);

#endif
