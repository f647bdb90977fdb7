/* Products with weights in float32, bfloat16 or float16. */
#include "products.h"

#if HAVE_SIMD

enum { PANEL = 384, VECTORS = TILE / 4 }; /* columns of a tile that are widened at a time, for the L1 cache */

/* Add the products of `columns` columns of a tile, [column][TILE], with `count` rows of x to y. */
INLINE void add_columns(const int count, const void *weights, const int type, const float *x, int64_t x_stride,
                        int64_t columns, float y[][TILE]) {
    f32x4 sum[BLOCK][VECTORS];
#pragma GCC unroll 4
    for (int m = 0; m < count; m++)
#pragma GCC unroll 4
        for (int i = 0; i < VECTORS; i++) sum[m][i] = load(y[m] + 4 * i);
#define ADD_COLUMN(lane)                                                                       \
    {                                                                                          \
        f32x4 column[VECTORS];                                                                 \
        load_two_as(weights, (c + lane) * TILE, type, column);                                 \
        load_two_as(weights, (c + lane) * TILE + TILE / 2, type, column + 2);                  \
        _Pragma("GCC unroll 4") for (int m = 0; m < count; m++)                                \
            _Pragma("GCC unroll 4") for (int i = 0; i < VECTORS; i++)                          \
                sum[m][i] = ADD_LANE(sum[m][i], column[i], here[m], lane);                     \
    }
    for (int64_t c = 0; c < columns; c += 4) {
        f32x4 here[BLOCK];
#pragma GCC unroll 4
        for (int m = 0; m < count; m++) here[m] = load_lanes(x + m * x_stride + c);
        ADD_COLUMN(0)
        ADD_COLUMN(1)
        ADD_COLUMN(2)
        ADD_COLUMN(3)
    }
#pragma GCC unroll 4
    for (int m = 0; m < count; m++)
#pragma GCC unroll 4
        for (int i = 0; i < VECTORS; i++) store(y[m] + 4 * i, sum[m][i]);
}

/* The same for BLOCK rows of x and weights in float32. */
#if defined(__aarch64__)
/* In assembly, because compilers copy the 16 sums between registers, which takes the pipes of arithmetic. v0 to v15:
 * the sums of row 0, 1, 2, 3. v16 to v19: four columns of each row of x. v20 to v23: a column of W. */
#define ADD_ROW(a, b, c, d, x, lane)                                                                   \
    "fmla v" a ".4s, v20.4s, v" x ".s[" lane "]\nfmla v" b ".4s, v21.4s, v" x ".s[" lane "]\n"         \
    "fmla v" c ".4s, v22.4s, v" x ".s[" lane "]\nfmla v" d ".4s, v23.4s, v" x ".s[" lane "]\n"
#define ADD_LANES(lane)                                                                                \
    "ldp q20, q21, [%[w]], #32\nldp q22, q23, [%[w]], #32\n"                                           \
    ADD_ROW("0", "1", "2", "3", "16", lane) ADD_ROW("4", "5", "6", "7", "17", lane)                    \
    ADD_ROW("8", "9", "10", "11", "18", lane) ADD_ROW("12", "13", "14", "15", "19", lane)
#define MOVE_SUMS(op)                                                                                  \
    op " q0, q1, [%[y]]\n" op " q2, q3, [%[y], #32]\n" op " q4, q5, [%[y], #64]\n"                     \
    op " q6, q7, [%[y], #96]\n" op " q8, q9, [%[y], #128]\n" op " q10, q11, [%[y], #160]\n"            \
    op " q12, q13, [%[y], #192]\n" op " q14, q15, [%[y], #224]\n"

static void add_block(const float *weights, const float *x, int64_t x_stride, int64_t columns, float y[][TILE]) {
    const float *x1 = x + x_stride, *x2 = x1 + x_stride, *x3 = x2 + x_stride;
    __asm__ volatile(
        MOVE_SUMS("ldp")
        "1:\nldr q16, [%[x]], #16\nldr q17, [%[x1]], #16\nldr q18, [%[x2]], #16\nldr q19, [%[x3]], #16\n"
        ADD_LANES("0") ADD_LANES("1") ADD_LANES("2") ADD_LANES("3")
        "subs %[columns], %[columns], #4\nb.gt 1b\n"
        MOVE_SUMS("stp")
        : [x] "+r"(x), [x1] "+r"(x1), [x2] "+r"(x2), [x3] "+r"(x3), [w] "+r"(weights), [columns] "+r"(columns)
        : [y] "r"(y)
        : "cc", "memory", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v12", "v13", "v14",
          "v15", "v16", "v17", "v18", "v19", "v20", "v21", "v22", "v23");
}
#else
static void add_block(const float *weights, const float *x, int64_t x_stride, int64_t columns, float y[][TILE]) {
    add_columns(BLOCK, weights, FLOAT32, x, x_stride, columns, y);
}
#endif

/* `count` numbers, a multiple of 64, in float32. What is `ahead` of them is brought into the L2 cache meanwhile. */
INLINE void widen(const uint16_t *numbers, int64_t count, int64_t ahead, const int type, float *out) {
    for (int64_t i = 0; i < count; i += 32) {
        __builtin_prefetch(numbers + ahead + i, 0, 2);
#pragma GCC unroll 4
        for (int j = 0; j < 32; j += 8) {
            f32x4 two[2];
            load_two_as(numbers, i + j, type, two);
            store(out + i + j, two[0]);
            store(out + i + j + 4, two[1]);
        }
    }
}

INLINE void dense_tile(const Matrix *w, const Inputs *in, int tile, int first, int count, const int type,
                       float y[][TILE]) {
    const int64_t columns = w->columns, tile_size = columns * TILE;
    const float *x = in->x + first * columns;
    const char *weights = (const char *)w->data + tile * tile_size * (type == FLOAT32 ? 4 : 2);
    memset(y, 0, (size_t)count * sizeof(y[0]));
    if (count < BLOCK) {
        BY_COUNT(count, add_columns, weights, type, x, columns, columns, y)
        return;
    }
    for (int64_t c = 0, here; c < columns; c += here) {
        float panel[PANEL * TILE];
        here = columns - c < PANEL ? columns - c : PANEL;
        if (type != FLOAT32) widen((const uint16_t *)weights + c * TILE, here * TILE, tile_size, type, panel);
        const float *part = type == FLOAT32 ? (const float *)weights + c * TILE : panel;
        int m = 0;
        for (; m + BLOCK <= count; m += BLOCK) add_block(part, x + m * columns + c, columns, here, y + m);
        if (m < count) BY_COUNT(count - m, add_columns, part, FLOAT32, x + m * columns + c, columns, here, y + m)
    }
}

void dense_product(const Matrix *w, const Inputs *in, int tile, int first, int count, float y[][TILE]) {
    switch (w->type) {
        case FLOAT32: dense_tile(w, in, tile, first, count, FLOAT32, y); break;
        case BFLOAT16: dense_tile(w, in, tile, first, count, BFLOAT16, y); break;
        default: dense_tile(w, in, tile, first, count, FLOAT16, y);
    }
}

void dense_row(const Matrix *w, int row, float *out) {
    const int64_t tile = (int64_t)(row / TILE) * w->columns * TILE;
    for (int64_t c = 0; c < w->columns; c++)
        out[c] = load_as(w->data, tile + c * TILE + row % TILE / 4 * 4, w->type)[row % 4];
}

#define TRANSPOSE(number)                                                                                  \
    for (int64_t c = 0; c < columns; c++)                                                                  \
        for (int64_t r = 0; r < TILE; r++)                                                                 \
            ((number *)out)[(tile * columns + c) * TILE + r] =                                             \
                tile * TILE + r < rows ? ((const number *)weight)[(tile * TILE + r) * columns + c] : 0;

void pack_dense(const void *weight, int rows, int columns, int size, void *out) {
    for (int64_t tile = 0; tile * TILE < rows; tile++) {
        if (size == 4) {
            TRANSPOSE(uint32_t)
        } else {
            TRANSPOSE(uint16_t)
        }
    }
}

#endif
