#include "products.h"
#include "simd.h"

#if HAVE_SIMD

enum { BLOCK_ROWS = 4, PACKED_ROWS = 8 }; /* rows of x whose sums are in registers: of dense, and of packed weights */
enum { PANEL = 768 };                     /* columns of a dense tile that are widened at a time, for the L1 cache */
enum { INT_ZERO = 0x4B400000 }; /* as a float 1.5 * 2^23: a float with this exponent holds an integer in its low bits */

INLINE f32x4 load_scales(const void *scales, int64_t index, int half_scales) {
    return half_scales ? load_halves((const uint16_t *)scales + index) : load((const float *)scales + index);
}

/* A sum of products of codes as floats: faster than a conversion, and exact below 2^22. */
INLINE f32x4 as_floats(s32x4 sum) { return (f32x4)sum - splat(12582912.0f); }

INLINE s32x4 start(void) { return (s32x4){INT_ZERO, INT_ZERO, INT_ZERO, INT_ZERO}; }

INLINE void unpack_group(const uint8_t *codes, int type, s8x16 part[8]) {
    for (int i = 0; i < (type == INT4 ? 4 : 8); i++) {
        s8x16 bytes = load_bytes(codes + 16 * i);
        if (type == INT4) {
            part[i] = bytes & 15;
            part[i + 4] = (s8x16)((u8x16)bytes >> 4);
        } else {
            part[i] = bytes;
        }
    }
}

INLINE void packed_tile(const int count, const Matrix *w, const Inputs *in, int tile, int first, const int type,
                        const int has_minima, const int half_scales, float y[][TILE]) {
    const int groups = w->columns / GROUP, code_bytes = type == INT4 ? 64 : 128;
    const int scale_step = type == INT8_BY_16 ? 2 * TILE : TILE, groups_per_scale = w->groups_per_scale;
    const uint8_t *codes = (const uint8_t *)w->data + (int64_t)tile * groups * code_bytes;
    const int8_t *x = in->codes + (int64_t)first * in->columns;
    const float *x_scales = in->scales + (int64_t)first * groups, *x_sums = in->sums + (int64_t)first * groups;
    int64_t at = (int64_t)tile * (groups / groups_per_scale) * scale_step;
    int left = groups_per_scale; /* groups with the scale at `at` */
    f32x4 sum[PACKED_ROWS];
#pragma GCC unroll 8
    for (int m = 0; m < count; m++) sum[m] = splat(0);
    for (int g = 0; g < groups; g++, codes += code_bytes, x += GROUP) {
        s8x16 part[8];
        /* the codes of the next tile, from memory */
        for (int i = 0; i < code_bytes; i += 64) __builtin_prefetch(codes + groups * code_bytes + i);
        unpack_group(codes, type, part);
        f32x4 scale = load_scales(w->scales, at, half_scales), second = scale, minimum = splat(0);
        if (type == INT8_BY_16) second = load_scales(w->scales, at + TILE, half_scales);
        if (has_minima) minimum = load_scales(w->minima, at, half_scales);
#pragma GCC unroll 8
        for (int m = 0; m < count; m++) {
            const int8_t *row = x + (int64_t)m * in->columns;
            const s8x16 low = load_bytes(row), high = load_bytes(row + 16);
            const f32x4 x_scale = splat(x_scales[m * groups + g]);
            s32x4 dot = start(), other = start();
            dot = DOT_LANE(dot, part[0], low, 0);
            dot = DOT_LANE(dot, part[1], low, 1);
            dot = DOT_LANE(dot, part[2], low, 2);
            dot = DOT_LANE(dot, part[3], low, 3);
            if (type != INT8_BY_16) other = dot;
            other = DOT_LANE(other, part[4], high, 0);
            other = DOT_LANE(other, part[5], high, 1);
            other = DOT_LANE(other, part[6], high, 2);
            other = DOT_LANE(other, part[7], high, 3);
            if (type == INT8_BY_16) sum[m] = multiply_add(sum[m], as_floats(dot), scale * x_scale);
            sum[m] = multiply_add(sum[m], as_floats(other), second * x_scale);
            if (has_minima) sum[m] = multiply_add(sum[m], -minimum, splat(x_sums[m * groups + g]));
            if (m % 4 == 3) __asm__ volatile("" ::: "memory"); /* there are no registers for more rows at once */
        }
        if (--left == 0) left = groups_per_scale, at += scale_step;
    }
#pragma GCC unroll 8
    for (int m = 0; m < count; m++) store(y[m], sum[m]);
}

/* Call a function whose first argument, the number of rows of x, is a constant. */
#define BY_COUNT(count, function, ...)               \
    switch (count) {                                 \
        case 1: function(1, __VA_ARGS__); break;     \
        case 2: function(2, __VA_ARGS__); break;     \
        case 3: function(3, __VA_ARGS__); break;     \
        default: function(4, __VA_ARGS__);           \
    }
#define PACKED(...)                                                                                    \
    if (count == PACKED_ROWS) packed_tile(PACKED_ROWS, w, in, tile, first, __VA_ARGS__, y);            \
    else BY_COUNT(count, packed_tile, w, in, tile, first, __VA_ARGS__, y)

/* Compiled for each number of rows, with and without minima, and for both types of scales. */
#define BY_SCALES(type)                                                                       \
    if (w->minima && w->half_scales) { PACKED(type, 1, 1) }                                   \
    else if (w->minima) { PACKED(type, 1, 0) }                                                \
    else if (w->half_scales) { PACKED(type, 0, 1) }                                           \
    else { PACKED(type, 0, 0) }

static void packed_rows(const Matrix *w, const Inputs *in, int tile, int first, int count, float y[][TILE]) {
    switch (w->type) {
        case INT4: BY_SCALES(INT4) break;
        case INT8: BY_SCALES(INT8) break;
        default: PACKED(INT8_BY_16, 0, 0) /* of Q6_K alone */
    }
}

/* Add the products of `columns` columns of TILE rows of W with `count` rows of x to the sums of each pair of rows. The
 * columns of a row of W are `step` apart. They are kept in `panel` and the same part of the `next` tile is fetched from
 * memory, unless these are NULL. */
INLINE void add_columns(const int count, const void *const rows[TILE], const int type, const int step, float *panel,
                        const char *next, const float *x, int64_t x_stride, int columns, f32x4 sums[][TILE]) {
    f32x4 sum[BLOCK_ROWS][TILE];
#pragma GCC unroll 4
    for (int m = 0; m < count; m++)
#pragma GCC unroll 4
        for (int r = 0; r < TILE; r++) sum[m][r] = sums[m][r];
#pragma GCC unroll 2
    for (int64_t c = 0; c < columns; c += 4) {
        f32x4 weights[TILE];
        if (next) fetch_as(next, TILE * c, type);
#pragma GCC unroll 4
        for (int r = 0; r < TILE; r++) {
            weights[r] = load_as(rows[r], c * step, type);
            if (panel) store(panel + TILE * c + 4 * r, weights[r]);
        }
#pragma GCC unroll 4
        for (int m = 0; m < count; m++) {
            const f32x4 here = load(x + m * x_stride + c);
#pragma GCC unroll 4
            for (int r = 0; r < TILE; r++) sum[m][r] = multiply_add(sum[m][r], weights[r], here);
        }
    }
#pragma GCC unroll 4
    for (int m = 0; m < count; m++)
#pragma GCC unroll 4
        for (int r = 0; r < TILE; r++) sums[m][r] = sum[m][r];
}

/* The same with the weights from a panel, for any number of rows. */
static void add_panel(const float *panel, const float *x, int64_t x_stride, int count, int columns,
                      f32x4 sums[][TILE]) {
    const void *const rows[TILE] = {panel, panel + 4, panel + 8, panel + 12};
    for (; count > 0; count -= BLOCK_ROWS, x += BLOCK_ROWS * x_stride, sums += BLOCK_ROWS)
        BY_COUNT(count, add_columns, rows, FLOAT32, TILE, NULL, NULL, x, x_stride, columns, sums)
}

INLINE void dense_tile(const Matrix *w, const Inputs *in, int tile, int first, int count, const int type,
                       float y[][TILE]) {
    const int64_t columns = w->columns, item = type == FLOAT32 ? 4 : 2;
    const float *x = in->x + first * columns;
    const char *next = (const char *)w->data + (tile + 1) * TILE * columns * item;
    const void *rows[TILE];
    float panel[TILE * PANEL];
    f32x4 sums[MOST_ROWS][TILE];
    memset(sums, 0, (size_t)count * sizeof(sums[0]));
    for (int64_t c = 0, here; c < columns; c += here, x += here, next += TILE * here * item) {
        here = columns - c < PANEL ? columns - c : PANEL;
        for (int r = 0; r < TILE; r++) {
            const int row = tile * TILE + r < w->rows ? tile * TILE + r : w->rows - 1; /* past the last: not used */
            rows[r] = (const char *)w->data + (row * columns + c) * item;
        }
        if (count > BLOCK_ROWS) {
            add_columns(BLOCK_ROWS, rows, type, 1, panel, next, x, columns, (int)here, sums);
            add_panel(panel, x + BLOCK_ROWS * columns, columns, count - BLOCK_ROWS, (int)here, sums + BLOCK_ROWS);
        } else {
            BY_COUNT(count, add_columns, rows, type, 1, NULL, next, x, columns, (int)here, sums)
        }
    }
    for (int m = 0; m < count; m++) store(y[m], sums_of(sums[m][0], sums[m][1], sums[m][2], sums[m][3]));
}

void product_tile(const Matrix *w, const Inputs *in, int tile, int first, int count, float y[][TILE]) {
    switch (w->type) {
        case FLOAT32: dense_tile(w, in, tile, first, count, FLOAT32, y); break;
        case BFLOAT16: dense_tile(w, in, tile, first, count, BFLOAT16, y); break;
        case FLOAT16: dense_tile(w, in, tile, first, count, FLOAT16, y); break;
        default:
            for (int m = 0, rows; m < count; m += rows) {
                const int left = count - m;
                rows = left >= PACKED_ROWS ? PACKED_ROWS : left < 4 ? left : 4;
                packed_rows(w, in, tile, first + m, rows, y + m);
            }
    }
    if (w->bias == NULL) return;
    for (int m = 0; m < count; m++)
        for (int r = 0; r < TILE && tile * TILE + r < w->rows; r++) y[m][r] += w->bias[tile * TILE + r];
}

void round_row(const float *x, int columns, int8_t *codes, float *scales, float *sums) {
    for (int g = 0; g < columns / GROUP; g++, x += GROUP, codes += GROUP) {
        f32x4 most = splat(0);
        for (int i = 0; i < GROUP; i += 4) most = larger(most, absolute(load(x + i)));
        const float size = largest_of(most);
        const f32x4 inverse = splat(size > 0 ? 127.0f / size : 0.0f);
        s32x4 total = {0, 0, 0, 0};
        for (int i = 0; i < GROUP; i += 4) {
            s32x4 code = round_to_int(load(x + i) * inverse);
            total += code;
            const s8x4 small = __builtin_convertvector(code, s8x4);
            memcpy(codes + i, &small, 4);
        }
        scales[g] = size / 127.0f;
        sums[g] = scales[g] * (float)(total[0] + total[1] + total[2] + total[3]);
    }
}

static float scale_at(const Matrix *w, const void *scales, int64_t index) {
    return load_scales(scales, index - index % TILE, w->half_scales)[index % TILE];
}

void matrix_row(const Matrix *w, int row, float *out) {
    if (!is_packed(w)) {
        const char *data = (const char *)w->data + (int64_t)row * w->columns * (w->type == FLOAT32 ? 4 : 2);
        for (int c = 0; c < w->columns; c += 4) store(out + c, load_as(data, c, w->type));
        return;
    }
    const int groups = w->columns / GROUP, lane = row % TILE;
    const int size = (w->type == INT8_BY_16 ? 16 : GROUP) * w->groups_per_scale; /* columns that share a scale */
    const uint8_t *tile = (const uint8_t *)w->data + (int64_t)(row / TILE) * groups * (w->type == INT4 ? 64 : 128);
    for (int c = 0; c < w->columns; c++) {
        const int i = c % GROUP;
        float code;
        if (w->type == INT4) {
            uint8_t both = tile[(c / GROUP) * 64 + i % 16 / 4 * 16 + lane * 4 + i % 4];
            code = i < 16 ? both & 15 : both >> 4;
        } else {
            code = (int8_t)tile[(c / GROUP) * 128 + i / 4 * 16 + lane * 4 + i % 4];
        }
        const int64_t at = ((int64_t)(row / TILE) * (w->columns / size) + c / size) * TILE + lane;
        out[c] = code * scale_at(w, w->scales, at) - (w->minima ? scale_at(w, w->minima, at) : 0.0f);
    }
}

/* A group of a row: 4 bytes for each 4 columns, or with 4 bits 4 bytes for 4 columns and those 16 columns later. */
static void pack_group(const uint8_t *from, int bits, uint8_t *to) {
    uint8_t halves[16];
    for (int i = 0; bits == 4 && i < 8; i++) { /* byte i has columns 2 i and 2 i + 1 */
        halves[2 * i] = (uint8_t)((from[i] & 15) | from[i + 8] << 4);
        halves[2 * i + 1] = (uint8_t)(from[i] >> 4 | (from[i + 8] & 0xF0));
    }
    const uint8_t *bytes = bits == 4 ? halves : from;
    for (int i = 0; i < GROUP * bits / 8; i += 4) memcpy(to + i * TILE, bytes + i, 4);
}

void pack_codes(const uint8_t *codes, int rows, int columns, int bits, uint8_t *out) {
    const int64_t row_bytes = (int64_t)columns * bits / 8, group_bytes = GROUP * bits / 8;
    memset(out + rows / TILE * TILE * row_bytes, 0, rows % TILE ? (size_t)(TILE * row_bytes) : 0);
    for (int row = 0; row < rows; row++) {
        const uint8_t *from = codes + row * row_bytes;
        uint8_t *tile = out + row / TILE * TILE * row_bytes + row % TILE * 4;
        for (int64_t at = 0; at < row_bytes; at += group_bytes) pack_group(from + at, bits, tile + at * TILE);
    }
}

static int is_finite_half(uint16_t half) { return (half & 0x7C00) != 0x7C00; }

int pack_blocks(const uint8_t *blocks, int rows, int columns, int bits, uint8_t *codes, uint16_t *scales,
                uint16_t *minima) {
    const int groups = columns / GROUP, code_bytes = GROUP * bits / 8;
    int all_finite = 1;
    if (rows % TILE) {
        const int64_t last = (int64_t)(rows / TILE) * groups * TILE;
        memset(codes + last * code_bytes, 0, (size_t)(groups * TILE * code_bytes));
        memset(scales + last, 0, (size_t)(groups * TILE) * sizeof *scales);
        if (minima) memset(minima + last, 0, (size_t)(groups * TILE) * sizeof *minima);
    }
    for (int row = 0; row < rows; row++) {
        int64_t at = (int64_t)(row / TILE) * groups * TILE + row % TILE; /* the scale of the row's first group */
        uint8_t *to = codes + (int64_t)(row / TILE) * groups * TILE * code_bytes + row % TILE * 4;
        for (int g = 0; g < groups; g++, at += TILE, to += TILE * code_bytes, blocks += code_bytes) {
            memcpy(scales + at, blocks, 2);
            all_finite &= is_finite_half(scales[at]);
            blocks += 2;
            if (minima) {
                memcpy(minima + at, blocks, 2);
                all_finite &= is_finite_half(minima[at]);
                minima[at] ^= 0x8000; /* what the file adds, a minimum subtracts */
                blocks += 2;
            }
            for (int i = 0; i < code_bytes; i += 4) memcpy(to + i * TILE, blocks + i, 4);
        }
    }
    return all_finite;
}

#endif
