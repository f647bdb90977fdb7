/* Products with weights in float32, bfloat16 or float16 and vectors of 512 bits: two tiles of W and up to BLOCK rows
 * of x have their sums in registers, and each number of x that is loaded is multiplied with both tiles. */
#include "products.h"

#if defined(__AVX512F__)

enum { AHEAD = 1024 }; /* columns of W from those that are read to those that are fetched from memory */

/* Columns c and c + 1 of a tile, c even. */
INLINE void load_columns(const void *weights, int64_t c, const int type, wide columns[2]) {
    if (type == BFLOAT16) {
        load_pairs((const uint16_t *)weights + c * TILE, &columns[0], &columns[1]);
    } else {
        columns[0] = wide_load_as(weights, c * TILE, type);
        columns[1] = wide_load_as(weights, (c + 1) * TILE, type);
    }
}

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
    wide sum[BLOCK][MOST_TILES], two[MOST_TILES][2];
#define EACH(variable, limit) _Pragma("GCC unroll 8") for (int variable = 0; variable < limit; variable++)
#define EACH_SUM EACH(i, count) EACH(t, MOST_TILES)
    EACH_SUM sum[i][t] = wide_load(y[t][m + i]);
    for (int64_t c = 0; c < columns; c += 2) {
        EACH(t, MOST_TILES) {
            if (later) __builtin_prefetch(later[t] + c * TILE * 2);
            load_columns(weights[t], c, type, two[t]);
        }
        EACH(column, 2) EACH(i, count) {
            const wide number = in_all_lanes(x + i * x_stride + c + column);
            EACH(t, MOST_TILES) sum[i][t] = wide_multiply_add(sum[i][t], two[t][column], number);
        }
    }
    EACH_SUM wide_store(y[t][m + i], sum[i][t]);
}

/* A part of the columns after the other, which all rows of x read from the L1 cache. A tile that is alone is computed
 * twice, which is rare. */
INLINE void dense_tiles(const int type, const Place places[], int num, const Inputs *in, int first, int count,
                        float y[][MOST_ROWS][TILE]) {
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

void dense_products(const Place places[], int num, Place next, const Inputs *in, int first, int count, Panels *panels,
                    float y[][MOST_ROWS][TILE]) {
    (void)next, (void)panels;
    switch (places[0].w->type) {
        case FLOAT32: dense_tiles(FLOAT32, places, num, in, first, count, y); break;
        case BFLOAT16: dense_tiles(BFLOAT16, places, num, in, first, count, y); break;
        default: dense_tiles(FLOAT16, places, num, in, first, count, y);
    }
}

#endif
