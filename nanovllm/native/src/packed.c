/* Products with weights of 4 or 8 bits that have a scale per group of columns, and rows of x rounded to int8. */
#include "products.h"

#if HAVE_SIMD

enum { PANEL_GROUPS = 48 }; /* groups of a quad that are unpacked at a time, for the L1 cache */

/* What a sum of products of codes starts with: a float whose low bits hold the sum, an integer below 2^22. */
static const f32x4 INT_ZERO = {12582912.0f, 12582912.0f, 12582912.0f, 12582912.0f}; /* 1.5 * 2^23 */

/* A group of columns of a quad, unpacked. */
typedef struct {
    s8x16 part[8];                       /* columns 4 i to 4 i + 3 of the four rows */
    f32x4 scale, minimum, minus_zero;    /* minus_zero: -INT_ZERO * scale */
    f32x4 first_scale, first_minus_zero; /* INT8_BY_16: of the first 16 columns, and `scale` is of the others */
} Group;

/* Where the next group of a quad is. */
typedef struct {
    const uint8_t *codes;
    int64_t at; /* the index of its scale */
    int left;   /* groups with this scale */
} Reader;

INLINE int code_bytes(int type) { return type == INT4 ? 64 : 128; }
INLINE int scale_step(int type) { return type == INT8_BY_16 ? 2 * QUAD : QUAD; }

/* Without the last two bits of a float32, so that the product with INT_ZERO is exact. */
INLINE f32x4 load_scales(const void *scales, int64_t index, int half_scales) {
    if (half_scales) return load_halves((const uint16_t *)scales + index);
    return (f32x4)((u32x4)load((const float *)scales + index) & ~3u);
}

INLINE Reader reader_of(const Matrix *w, int quad, const int type) {
    const int groups = w->columns / GROUP;
    return (Reader){
        .codes = (const uint8_t *)w->data + (int64_t)quad * groups * code_bytes(type),
        .at = (int64_t)quad * (groups / w->groups_per_scale) * scale_step(type),
        .left = w->groups_per_scale,
    };
}

/* Unpack the next group, and begin to fetch the same group of the next quad from memory. */
INLINE void read_group(Reader *reader, const Matrix *w, const int type, const int has_minima, const int half_scales,
                       Group *group) {
    const int64_t quad_bytes = (int64_t)(w->columns / GROUP) * code_bytes(type);
    for (int i = 0; i < code_bytes(type); i += 64) __builtin_prefetch(reader->codes + quad_bytes + i);
    for (int i = 0; i < code_bytes(type) / 16; i++) {
        const s8x16 bytes = load_bytes(reader->codes + 16 * i);
        group->part[i] = type == INT4 ? bytes & 15 : bytes;
        if (type == INT4) group->part[i + 4] = (s8x16)((u8x16)bytes >> 4);
    }
    group->scale = load_scales(w->scales, reader->at + (type == INT8_BY_16 ? QUAD : 0), half_scales);
    group->minus_zero = -INT_ZERO * group->scale;
    if (type == INT8_BY_16) {
        group->first_scale = load_scales(w->scales, reader->at, half_scales);
        group->first_minus_zero = -INT_ZERO * group->first_scale;
    }
    if (has_minima) group->minimum = load_scales(w->minima, reader->at, half_scales);
    reader->codes += code_bytes(type);
    if (--reader->left == 0) reader->left = w->groups_per_scale, reader->at += scale_step(type);
}

/* Add the products of a group with the first `count` rows of a block of x. */
INLINE void add_group(const int count, const Group *w, const Rounded *x, const int type, const int has_minima,
                      f32x4 sum[BLOCK]) {
#define ADD_ROW(row)                                                                                             \
    if (count > row) {                                                                                           \
        const s8x16 low = load_bytes(x->codes[row]), high = load_bytes(x->codes[row] + 16);                      \
        s32x4 dot = (s32x4)INT_ZERO;                                                                             \
        dot = DOT_LANE(dot, w->part[0], low, 0);                                                                 \
        dot = DOT_LANE(dot, w->part[1], low, 1);                                                                 \
        dot = DOT_LANE(dot, w->part[2], low, 2);                                                                 \
        dot = DOT_LANE(dot, w->part[3], low, 3);                                                                 \
        if (has_minima) sum[row] = ADD_LANE(sum[row], w->minimum, minus_sums, row);                              \
        if (type == INT8_BY_16) {                                                                                \
            const f32x4 first = multiply_add(w->first_minus_zero, (f32x4)dot, w->first_scale);                   \
            sum[row] = ADD_LANE(sum[row], first, scales, row);                                                   \
            dot = (s32x4)INT_ZERO;                                                                               \
        }                                                                                                        \
        dot = DOT_LANE(dot, w->part[4], high, 0);                                                                \
        dot = DOT_LANE(dot, w->part[5], high, 1);                                                                \
        dot = DOT_LANE(dot, w->part[6], high, 2);                                                                \
        dot = DOT_LANE(dot, w->part[7], high, 3);                                                                \
        sum[row] = ADD_LANE(sum[row], multiply_add(w->minus_zero, (f32x4)dot, w->scale), scales, row);           \
    }
    const Lanes scales = load_lanes(x->scales), minus_sums = load_lanes(x->minus_sums);
    ADD_ROW(0)
    ADD_ROW(1)
    ADD_ROW(2)
    ADD_ROW(3)
#undef ADD_ROW
}

/* The products of a quad with at most BLOCK rows of x: each group is unpacked into registers. */
INLINE void direct_product(const int count, const Matrix *w, const Rounded *x, int quad, const int type,
                           const int has_minima, const int half_scales, float y[][TILE]) {
    Reader reader = reader_of(w, quad, type);
    f32x4 sum[BLOCK] = {splat(0), splat(0), splat(0), splat(0)};
    for (int g = 0; g < w->columns / GROUP; g++) {
        Group group;
        read_group(&reader, w, type, has_minima, half_scales, &group);
        add_group(count, &group, x + g, type, has_minima, sum);
    }
#pragma GCC unroll 4
    for (int m = 0; m < count; m++) store(y[m], sum[m]);
}

/* Add the products of unpacked groups with at most BLOCK rows of x to y. */
INLINE void panel_product(const int count, const Group *panel, const Rounded *x, int groups, const int type,
                          const int has_minima, float y[][TILE]) {
    f32x4 sum[BLOCK];
#pragma GCC unroll 4
    for (int m = 0; m < count; m++) sum[m] = load(y[m]);
    for (int g = 0; g < groups; g++) add_group(count, panel + g, x + g, type, has_minima, sum);
#pragma GCC unroll 4
    for (int m = 0; m < count; m++) store(y[m], sum[m]);
}

#if defined(__ARM_FEATURE_DOTPROD)
/* The same for BLOCK rows in assembly. Compilers copy INT_ZERO and minus_zero from a register to where they are added
 * to, which takes a pipe of arithmetic: here they are loaded each time. The sums of codes of the rows are computed in
 * turn, because each waits for the one before it. v0 to v7: parts. v8: scale, v9: minimum. v10, v11: scales and
 * minus_sums of x. v12 to v15: sums. v16 to v19: sums of codes. v20 to v27: codes of x. v28 to v31: scaled sums. */
#define DOT_ROWS(part, a, b, c, d, lane)                                                                          \
    "sdot v16.4s, v" part ".16b, v" a ".4b[" lane "]\nsdot v17.4s, v" part ".16b, v" b ".4b[" lane "]\n"         \
    "sdot v18.4s, v" part ".16b, v" c ".4b[" lane "]\nsdot v19.4s, v" part ".16b, v" d ".4b[" lane "]\n"
#define ADD_ROWS(a, b, c, d, scales)                                                                              \
    "fmla v12.4s, v" a ".4s, v" scales ".s[0]\nfmla v13.4s, v" b ".4s, v" scales ".s[1]\n"                       \
    "fmla v14.4s, v" c ".4s, v" scales ".s[2]\nfmla v15.4s, v" d ".4s, v" scales ".s[3]\n"
#define BLOCK_PRODUCT(add_minima)                                                                                 \
    __asm__ volatile(                                                                                             \
        "ld1 {v12.4s}, [%[y]], %[y_stride]\nld1 {v13.4s}, [%[y]], %[y_stride]\n"                                 \
        "ld1 {v14.4s}, [%[y]], %[y_stride]\nld1 {v15.4s}, [%[y]]\n"                                              \
        "1: ldp q0, q1, [%[w]]\nldp q20, q21, [%[x]]\nldr q16, [%[zero]]\n"                                      \
        "ldp q22, q23, [%[x], #32]\nldr q17, [%[zero]]\nldp q24, q25, [%[x], #64]\nldr q18, [%[zero]]\n"        \
        "ldp q26, q27, [%[x], #96]\nldr q19, [%[zero]]\nldp q2, q3, [%[w], #32]\n"                               \
        "ldp q4, q5, [%[w], #64]\nldp q6, q7, [%[w], #96]\n"                                                     \
        DOT_ROWS("0", "20", "22", "24", "26", "0") DOT_ROWS("1", "20", "22", "24", "26", "1")                     \
        "ldp q10, q11, [%[x], #128]\nldp q8, q9, [%[w], #128]\n"                                                 \
        DOT_ROWS("2", "20", "22", "24", "26", "2") DOT_ROWS("3", "20", "22", "24", "26", "3")                     \
        "ldr q28, [%[w], #160]\nldr q29, [%[w], #160]\nldr q30, [%[w], #160]\nldr q31, [%[w], #160]\n"           \
        DOT_ROWS("4", "21", "23", "25", "27", "0") add_minima DOT_ROWS("5", "21", "23", "25", "27", "1")          \
        DOT_ROWS("6", "21", "23", "25", "27", "2") DOT_ROWS("7", "21", "23", "25", "27", "3")                     \
        "fmla v28.4s, v8.4s, v16.4s\nfmla v29.4s, v8.4s, v17.4s\n"                                               \
        "fmla v30.4s, v8.4s, v18.4s\nfmla v31.4s, v8.4s, v19.4s\n" ADD_ROWS("28", "29", "30", "31", "10")        \
        "add %[x], %[x], %[x_size]\nadd %[w], %[w], %[w_size]\nsubs %w[groups], %w[groups], #1\nb.gt 1b\n"       \
        "st1 {v15.4s}, [%[y]]\nsub %[y], %[y], %[y_stride]\nst1 {v14.4s}, [%[y]]\nsub %[y], %[y], %[y_stride]\n" \
        "st1 {v13.4s}, [%[y]]\nsub %[y], %[y], %[y_stride]\nst1 {v12.4s}, [%[y]]\n"                              \
        : [w] "+r"(panel), [x] "+r"(x), [y] "+r"(y), [groups] "+r"(groups)                                        \
        : [y_stride] "r"(sizeof(y[0])), [x_size] "i"(sizeof(Rounded)), [w_size] "i"(sizeof(Group)),               \
          [zero] "r"(&INT_ZERO)                                                                                   \
        : "cc", "memory", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v12", "v13", \
          "v14", "v15", "v16", "v17", "v18", "v19", "v20", "v21", "v22", "v23", "v24", "v25", "v26", "v27",       \
          "v28", "v29", "v30", "v31")

INLINE void block_product(const Group *panel, const Rounded *x, int groups, const int has_minima, float y[][TILE]) {
    if (has_minima)
        BLOCK_PRODUCT(ADD_ROWS("9", "9", "9", "9", "11"));
    else
        BLOCK_PRODUCT("");
}
#else
INLINE void block_product(const Group *panel, const Rounded *x, int groups, const int has_minima, float y[][TILE]) {
    panel_product(BLOCK, panel, x, groups, INT8, has_minima, y);
}
#endif

static void add_panel(const Group *panel, const Rounded *x, int groups, int count, int type, int has_minima,
                      float y[][TILE]) {
    if (type == INT8_BY_16)
        BY_COUNT(count, panel_product, panel, x, groups, INT8_BY_16, 0, y)
    else if (count >= BLOCK)
        block_product(panel, x, groups, has_minima, y);
    else if (has_minima)
        BY_COUNT(count, panel_product, panel, x, groups, INT8, 1, y)
    else
        BY_COUNT(count, panel_product, panel, x, groups, INT8, 0, y)
}

/* The products of a quad with any number of rows: some groups at a time are unpacked into memory. */
INLINE void quad_product(const Matrix *w, const Inputs *in, int quad, int first, int count, const int type,
                         const int has_minima, const int half_scales, float y[][TILE]) {
    const int groups = w->columns / GROUP;
    const Rounded *x = in->rounded + (int64_t)(first / BLOCK) * groups;
    if (count <= BLOCK) {
        BY_COUNT(count, direct_product, w, x, quad, type, has_minima, half_scales, y)
        return;
    }
    Group panel[PANEL_GROUPS];
    Reader reader = reader_of(w, quad, type);
    for (int m = 0; m < count; m++) store(y[m], splat(0));
    for (int g = 0, here; g < groups; g += here) {
        here = groups - g < PANEL_GROUPS ? groups - g : PANEL_GROUPS;
        for (int i = 0; i < here; i++) read_group(&reader, w, type, has_minima, half_scales, panel + i);
        for (int m = 0; m < count; m += BLOCK)
            add_panel(panel, x + (int64_t)(m / BLOCK) * groups + g, here, count - m, type, has_minima, y + m);
    }
}

/* Compiled for each type, with and without minima, and for both types of scales. */
#define BY_SCALES(type)                                                                       \
    if (w->minima && w->half_scales) quad_product(w, in, quad, first, count, type, 1, 1, out); \
    else if (w->minima) quad_product(w, in, quad, first, count, type, 1, 0, out);              \
    else if (w->half_scales) quad_product(w, in, quad, first, count, type, 0, 1, out);         \
    else quad_product(w, in, quad, first, count, type, 0, 0, out);

void packed_product(const Matrix *w, const Inputs *in, int tile, int first, int count, float y[][TILE]) {
    for (int i = 0; i < TILE / QUAD && (tile * TILE + i * QUAD) < w->rows; i++) {
        const int quad = tile * (TILE / QUAD) + i;
        float(*out)[TILE] = (float(*)[TILE])(y[0] + i * QUAD);
        switch (w->type) {
            case INT4: BY_SCALES(INT4) break;
            case INT8: BY_SCALES(INT8) break;
            default: quad_product(w, in, quad, first, count, INT8_BY_16, 0, 0, out); /* of Q6_K alone */
        }
    }
}

void round_row(const float *x, int columns, Rounded *rounded, int row) {
    for (int g = 0; g < columns / GROUP; g++, x += GROUP, rounded++) {
        f32x4 most = splat(0);
        for (int i = 0; i < GROUP; i += 4) most = larger(most, absolute(load(x + i)));
        const float size = largest_of(most);
        const f32x4 inverse = splat(size > 0 ? 127.0f / size : 0.0f);
        s32x4 total = {0, 0, 0, 0};
        for (int i = 0; i < GROUP; i += 4) {
            s32x4 code = round_to_int(load(x + i) * inverse);
            total += code;
            const s8x4 small = __builtin_convertvector(code, s8x4);
            memcpy(rounded->codes[row] + i, &small, 4);
        }
        rounded->scales[row] = size / 127.0f;
        rounded->minus_sums[row] = -rounded->scales[row] * (float)(total[0] + total[1] + total[2] + total[3]);
    }
}

static float scale_at(const Matrix *w, const void *scales, int64_t index) {
    return load_scales(scales, index - index % QUAD, w->half_scales)[index % QUAD];
}

void packed_row(const Matrix *w, int row, float *out) {
    const int groups = w->columns / GROUP, lane = row % QUAD;
    const int size = (w->type == INT8_BY_16 ? 16 : GROUP) * w->groups_per_scale; /* columns that share a scale */
    const uint8_t *quad = (const uint8_t *)w->data + (int64_t)(row / QUAD) * groups * code_bytes(w->type);
    for (int c = 0; c < w->columns; c++) {
        const int i = c % GROUP;
        float code;
        if (w->type == INT4) {
            uint8_t both = quad[(c / GROUP) * 64 + i % 16 / 4 * 16 + lane * 4 + i % 4];
            code = i < 16 ? both & 15 : both >> 4;
        } else {
            code = (int8_t)quad[(c / GROUP) * 128 + i / 4 * 16 + lane * 4 + i % 4];
        }
        const int64_t at = ((int64_t)(row / QUAD) * (w->columns / size) + c / size) * QUAD + lane;
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
    for (int i = 0; i < GROUP * bits / 8; i += 4) memcpy(to + i * QUAD, bytes + i, 4);
}

void pack_codes(const uint8_t *codes, int rows, int columns, int bits, uint8_t *out) {
    const int64_t row_bytes = (int64_t)columns * bits / 8, group_bytes = GROUP * bits / 8;
    memset(out + rows / QUAD * QUAD * row_bytes, 0, rows % QUAD ? (size_t)(QUAD * row_bytes) : 0);
    for (int row = 0; row < rows; row++) {
        const uint8_t *from = codes + row * row_bytes;
        uint8_t *quad = out + row / QUAD * QUAD * row_bytes + row % QUAD * 4;
        for (int64_t at = 0; at < row_bytes; at += group_bytes) pack_group(from + at, bits, quad + at * QUAD);
    }
}

static int is_finite_half(uint16_t half) { return (half & 0x7C00) != 0x7C00; }

int pack_blocks(const uint8_t *blocks, int rows, int columns, int bits, uint8_t *codes, uint16_t *scales,
                uint16_t *minima) {
    const int groups = columns / GROUP, code_bytes = GROUP * bits / 8;
    int all_finite = 1;
    if (rows % QUAD) {
        const int64_t last = (int64_t)(rows / QUAD) * groups * QUAD;
        memset(codes + last * code_bytes, 0, (size_t)(groups * QUAD * code_bytes));
        memset(scales + last, 0, (size_t)(groups * QUAD) * sizeof *scales);
        if (minima) memset(minima + last, 0, (size_t)(groups * QUAD) * sizeof *minima);
    }
    for (int row = 0; row < rows; row++) {
        int64_t at = (int64_t)(row / QUAD) * groups * QUAD + row % QUAD; /* the scale of the row's first group */
        uint8_t *to = codes + (int64_t)(row / QUAD) * groups * QUAD * code_bytes + row % QUAD * 4;
        for (int g = 0; g < groups; g++, at += QUAD, to += QUAD * code_bytes, blocks += code_bytes) {
            memcpy(scales + at, blocks, 2);
            all_finite &= is_finite_half(scales[at]);
            blocks += 2;
            if (minima) {
                memcpy(minima + at, blocks, 2);
                all_finite &= is_finite_half(minima[at]);
                minima[at] ^= 0x8000; /* what the file adds, a minimum subtracts */
                blocks += 2;
            }
            for (int i = 0; i < code_bytes; i += 4) memcpy(to + i * QUAD, blocks + i, 4);
        }
    }
    return all_finite;
}

#endif
