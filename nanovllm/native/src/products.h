/* Products with a weight matrix, y = x W^T + b, of rows of x that are floats or int8 with a scale per 32 columns. */
#pragma once
#include <stdint.h>
#include "floats.h"

enum { INT4 = FLOAT16 + 1, INT8, INT8_BY_16 }; /* the packed types of a matrix */
enum { GROUP = 32, TILE = 4, MOST_ROWS = 32 }; /* columns that share a scale of x; rows of W, and of x, at a time */

typedef struct {
    int32_t type, rows, columns;
    int32_t half_scales;      /* whether scales and minima are float16, else float32 */
    int32_t groups_per_scale; /* groups of GROUP columns that share a scale, and a minimum */
    const void *data;     /* dense: row after row. Packed: tiles of 4 rows, see pack_codes */
    const void *scales;   /* packed: [tile][scale of a row][row of the tile]; INT8_BY_16 has two scales per group */
    const void *minima;   /* w = q * scale - minimum; NULL = none */
    const float *bias;    /* NULL = none */
} Matrix;

typedef struct {
    const float *x;      /* [rows][columns] */
    const int8_t *codes; /* the same rounded: x = code * scale */
    const float *scales; /* [rows][columns / GROUP] */
    const float *sums;   /* of each group's code * scale */
    int rows, columns;
} Inputs;

/* Outputs 4 * tile .. 4 * tile + 3 of `count` (1 to MOST_ROWS) rows of x from `first`, into y[row][output]. The order
 * of additions does not depend on `count`. */
void product_tile(const Matrix *w, const Inputs *in, int tile, int first, int count, float y[][TILE]);

/* Round a row of x: int8 codes with one scale per GROUP columns. */
void round_row(const float *x, int columns, int8_t *codes, float *scales, float *sums);

/* Row `row` of W in float32. */
void matrix_row(const Matrix *w, int row, float *out);

/* Codes of a weight, [rows][columns] int8 or [rows][columns / 2] with the even column in the low half of a byte, in
 * tiles of 4 rows: [tile][group of 32 columns][4 columns][row of the tile][column]. With 4 bits, columns 0 to 15 of a
 * group are the low halves of the bytes that hold columns 16 to 31. Missing rows of the last tile are 0. */
void pack_codes(const uint8_t *codes, int rows, int columns, int bits, uint8_t *out);

/* The same from blocks of a GGUF file, [rows][columns / GROUP], that have the codes in this order after one float16
 * number, the scale, or with `minima` two, which become scales and minima of a Matrix. Returns whether all of them are
 * finite. */
int pack_blocks(const uint8_t *blocks, int rows, int columns, int bits, uint8_t *codes, uint16_t *scales,
                uint16_t *minima);

static inline int is_packed(const Matrix *w) { return w->type >= INT4; }
static inline int num_tiles(const Matrix *w) { return (w->rows + TILE - 1) / TILE; }
