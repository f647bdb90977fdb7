/* Products with weights in float32, bfloat16 or float16. With vectors of 512 bits two tiles of W and up to BLOCK rows
 * of x have their sums in registers. Otherwise one tile has, and 16 bits are widened once for all rows of x. */
#include "products.h"

#if HAVE_SIMD

enum { VECTORS = TILE / LANES };

/* Columns c and c + 1 of a tile, c even. */
INLINE void load_columns(const void *weights, int64_t c, const int type, wide columns[2][VECTORS]) {
    EACH(i, VECTORS) {
        if (type == BFLOAT16) {
            load_pairs((const uint16_t *)weights + c * TILE + 2 * LANES * i, &columns[0][i], &columns[1][i]);
        } else {
            columns[0][i] = wide_load_as(weights, c * TILE + LANES * i, type);
            columns[1][i] = wide_load_as(weights, (c + 1) * TILE + LANES * i, type);
        }
    }
}

#if defined(__AVX512F__)

enum { AHEAD = 1024 }; /* columns of W from those that are read to those that are fetched from memory */

/* The number in all lanes of a register: gcc would load it again for each of its uses. */
INLINE wide in_all_lanes(const float *number) {
    wide all = wide_splat(*number);
    __asm__("" : "+v"(all));
    return all;
}

/* Add the products of `columns` columns of two tiles with `count` rows of x to y[tile][m ..]. As many bytes are fetched
 * from memory meanwhile, two columns of bfloat16 at a time, from where `later` says, unless it is NULL. */
INLINE void add_columns(const int count, const void *const weights[], const int type, const char *const later[],
                        const float *x, int64_t x_stride, int64_t columns, float (*const y[])[TILE], int m) {
    wide sum[BLOCK][MOST_TILES], two[MOST_TILES][2][VECTORS];
    EACH(i, count) EACH(t, MOST_TILES) sum[i][t] = wide_load(y[t][m + i]);
    for (int64_t c = 0; c < columns; c += 2) {
        EACH(t, MOST_TILES) {
            if (later) __builtin_prefetch(later[t] + c * TILE * 2);
            load_columns(weights[t], c, type, two[t]);
        }
        EACH(column, 2) EACH(i, count) {
            const wide number = in_all_lanes(x + i * x_stride + c + column);
            EACH(t, MOST_TILES) sum[i][t] = wide_multiply_add(sum[i][t], two[t][column][0], number);
        }
    }
    EACH(i, count) EACH(t, MOST_TILES) wide_store(y[t][m + i], sum[i][t]);
}

/* A part of the columns after the other, which all rows of x read from the L1 cache. A tile that is alone is computed
 * twice, which is rare. */
INLINE void dense_tiles(const Place places[], int num, const Inputs *in, int first, int count,
                        float y[][MOST_ROWS][TILE], const int type) {
    const int64_t columns = places[0].w->columns, size = panel_columns(columns), item = type == FLOAT32 ? 4 : 2;
    const float *x = in->x + first * columns;
    float (*const out[MOST_TILES])[TILE] = {y[0], y[num - 1]};
    for (int t = 0; t < num; t++) memset(y[t], 0, (size_t)count * sizeof(y[t][0]));
    for (int64_t c = 0, width; c < columns; c += width) {
        const void *part[MOST_TILES];
        const char *later[MOST_TILES];
        width = columns - c < size ? columns - c : size;
        for (int t = 0; t < MOST_TILES; t++) {
            part[t] = (const char *)tile_data(places[t < num ? t : 0]) + c * TILE * item;
            later[t] = (const char *)part[t] + AHEAD * TILE * item;
        }
        for (int m = 0; m < count; m += BLOCK)
            BY_COUNT(count - m, add_columns, part, type, m == 0 ? later : NULL, x + m * columns + c, columns, width,
                     out, m)
    }
}

#else

/* Add the products of `columns` columns of a tile with `count` rows of x to y. */
INLINE void add_columns(const int count, const void *weights, const int type, const float *x, int64_t x_stride,
                        int64_t columns, float y[][TILE]) {
    wide sum[BLOCK][VECTORS], two[2][VECTORS];
    EACH(m, count) EACH(i, VECTORS) sum[m][i] = wide_load(y[m] + LANES * i);
#define ADD_COLUMN(lane) \
    EACH(m, count) EACH(i, VECTORS) sum[m][i] = WIDE_ADD_LANE(sum[m][i], two[lane % 2][i], here[m], lane);
    for (int64_t c = 0; c < columns; c += 4) {
        Lanes here[BLOCK];
        EACH(m, count) here[m] = load_lanes(x + m * x_stride + c);
        load_columns(weights, c, type, two);
        ADD_COLUMN(0)
        ADD_COLUMN(1)
        load_columns(weights, c + 2, type, two);
        ADD_COLUMN(2)
        ADD_COLUMN(3)
    }
    EACH(m, count) EACH(i, VECTORS) wide_store(y[m] + LANES * i, sum[m][i]);
}

/* `columns` columns of a tile in float32. What is `ahead` of them is brought into the L2 cache meanwhile. */
INLINE void widen(const uint16_t *weights, int64_t columns, int64_t ahead, const int type, float *out) {
    for (int64_t c = 0; c < columns; c += 2) {
        wide two[2][VECTORS];
        __builtin_prefetch(weights + ahead + c * TILE, 0, 2);
        load_columns(weights, c, type, two);
        EACH(i, 2 * VECTORS) wide_store(out + c * TILE + LANES * i, two[i / VECTORS][i % VECTORS]);
    }
}

/* Add the products of `columns` columns of a tile in float32 with BLOCK rows of x to y. With `from`, as many columns of
 * bfloat16 there are widened into `to`, and what is `ahead` of them is brought into the L2 cache. */
#if defined(__aarch64__)
/* In assembly, because compilers copy the 16 sums between registers, which takes the pipes of arithmetic. v0 to v15:
 * the sums of row 0, 1, 2, 3. v16 to v19: four columns of each row of x. v20 to v23: a column of W. Widening takes the
 * pipes of integers, which are free: of 4 numbers in a register every other one stays, with zeros below it. */
#define ADD_ROW(a, b, c, d, x, lane)                                                                   \
    "fmla v" a ".4s, v20.4s, v" x ".s[" lane "]\nfmla v" b ".4s, v21.4s, v" x ".s[" lane "]\n"         \
    "fmla v" c ".4s, v22.4s, v" x ".s[" lane "]\nfmla v" d ".4s, v23.4s, v" x ".s[" lane "]\n"
#define ADD_LANES(lane, meanwhile1, meanwhile2)                                                        \
    "ldp q20, q21, [%[w]], #32\nldp q22, q23, [%[w]], #32\n"                                           \
    ADD_ROW("0", "1", "2", "3", "16", lane) ADD_ROW("4", "5", "6", "7", "17", lane) meanwhile1         \
    ADD_ROW("8", "9", "10", "11", "18", lane) ADD_ROW("12", "13", "14", "15", "19", lane) meanwhile2
#define MOVE_SUMS(op)                                                                                  \
    op " q0, q1, [%[y]]\n" op " q2, q3, [%[y], #32]\n" op " q4, q5, [%[y], #64]\n"                     \
    op " q6, q7, [%[y], #96]\n" op " q8, q9, [%[y], #128]\n" op " q10, q11, [%[y], #160]\n"            \
    op " q12, q13, [%[y], #192]\n" op " q14, q15, [%[y], #224]\n"
#define WIDEN(at, odd_at)                                                                              \
    "ldp x9, x10, [%[from], #" at "]\nand x11, %[mask], x9, lsl #16\nand x12, %[mask], x10, lsl #16\n" \
    "and x9, x9, %[mask]\nand x10, x10, %[mask]\nstp x11, x12, [%[to], #" at "]\n"                     \
    "stp x9, x10, [%[to], #" odd_at "]\n"
#define NEXT_PAIR "prfm pldl2keep, [%[from], %[ahead]]\nadd %[from], %[from], #64\nadd %[to], %[to], #128\n"
#define ADD_BLOCK(widen0, widen1, widen2, widen3)                                                      \
    __asm__ volatile(                                                                                  \
        MOVE_SUMS("ldp")                                                                               \
        "1:\nldr q16, [%[x]], #16\nldr q17, [%[x1]], #16\nldr q18, [%[x2]], #16\nldr q19, [%[x3]], #16\n" \
        ADD_LANES("0", widen0, widen1) ADD_LANES("1", widen2, widen3)                                  \
        ADD_LANES("2", widen0, widen1) ADD_LANES("3", widen2, widen3)                                  \
        "subs %[columns], %[columns], #4\nb.gt 1b\n"                                                   \
        MOVE_SUMS("stp")                                                                               \
        : [x] "+r"(x), [x1] "+r"(x1), [x2] "+r"(x2), [x3] "+r"(x3), [w] "+r"(weights),                 \
          [columns] "+r"(columns), [from] "+r"(from), [to] "+r"(to)                                    \
        : [y] "r"(y), [mask] "r"(0xffff0000ffff0000), [ahead] "r"(ahead * 2)                           \
        : "cc", "memory", "x9", "x10", "x11", "x12", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", \
          "v10", "v11", "v12", "v13", "v14", "v15", "v16", "v17", "v18", "v19", "v20", "v21", "v22", "v23")

static void add_block(const float *weights, const float *x, int64_t x_stride, int64_t columns, float y[][TILE],
                      const uint16_t *from, int64_t ahead, float *to) {
    const float *x1 = x + x_stride, *x2 = x1 + x_stride, *x3 = x2 + x_stride;
    if (from)
        ADD_BLOCK(WIDEN("0", "64"), WIDEN("16", "80"), WIDEN("32", "96"), WIDEN("48", "112") NEXT_PAIR);
    else
        ADD_BLOCK("", "", "", "");
}
#else
static void add_block(const float *weights, const float *x, int64_t x_stride, int64_t columns, float y[][TILE],
                      const uint16_t *from, int64_t ahead, float *to) {
    if (from) widen(from, columns, ahead, BFLOAT16, to);
    add_columns(BLOCK, weights, FLOAT32, x, x_stride, columns, y);
}
#endif

INLINE void dense_tile(Place here, Place next, const Inputs *in, int first, int count, Panels *panels, float y[][TILE],
                       const int type) {
    const int64_t columns = here.w->columns, ahead = columns * TILE, size = panel_columns(columns);
    const float *x = in->x + first * columns;
    memset(y, 0, (size_t)count * sizeof(y[0]));
    if (count < BLOCK) {
        BY_COUNT(count, add_columns, tile_data(here), type, x, columns, columns, y)
        return;
    }
    for (int64_t c = 0, width; c < columns; c += width) {
        width = columns - c < size ? columns - c : size;
        const float *part = (const float *)tile_data(here) + c * TILE;
        const uint16_t *after = NULL; /* what is widened meanwhile */
        if (type != FLOAT32) {
            const uint16_t *weights = (const uint16_t *)tile_data(here) + c * TILE;
            part = panels->numbers[panels->current];
            if (panels->held != weights) widen(weights, width, ahead, type, panels->numbers[panels->current]);
            if (type == BFLOAT16 && next.w->type == BFLOAT16 && columns % size == 0)
                after = c + width < columns ? weights + width * TILE : tile_data(next);
            panels->held = after;
            panels->current ^= 1;
        }
        int m = 0;
        for (; m + BLOCK <= count; m += BLOCK)
            add_block(part, x + m * columns + c, columns, width, y + m, m == 0 ? after : NULL, ahead,
                      panels->numbers[panels->current]);
        if (m < count) BY_COUNT(count - m, add_columns, part, FLOAT32, x + m * columns + c, columns, width, y + m)
    }
}

#endif

void dense_products(const Place places[], int num, Place next, const Inputs *in, int first, int count, Panels *panels,
                    float y[][MOST_ROWS][TILE]) {
#if defined(__AVX512F__)
    (void)next, (void)panels;
    BY_TYPE(places[0].w->type, dense_tiles, places, num, in, first, count, y)
#else
    for (int i = 0; i < num; i++) {
        const Place after = i + 1 < num ? places[i + 1] : next;
        BY_TYPE(places[i].w->type, dense_tile, places[i], after, in, first, count, panels, y[i])
    }
#endif
}

#endif
