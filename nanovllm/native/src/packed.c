/* Products with packed weights and vectors of 128 bits: 4 rows of W at a time. */
#include "packed.h"

#if HAVE_SIMD && !defined(__AVX512F__)

enum { PANEL_GROUPS = 48 }; /* groups of a strip that are unpacked at a time, for the L1 cache */

/* What a sum of products of codes starts with: a float whose low bits hold the sum, an integer below 2^22. */
static const f32x4 INT_ZERO = {12582912.0f, 12582912.0f, 12582912.0f, 12582912.0f}; /* 1.5 * 2^23 */

/* A group of columns of a strip, unpacked. */
typedef struct {
    s8x16 part[8];                       /* columns 4 i to 4 i + 3 of the four rows */
    f32x4 scale, minimum, minus_zero;    /* minus_zero: -INT_ZERO * scale */
    f32x4 first_scale, first_minus_zero; /* INT8_BY_16: of the first 16 columns, and `scale` is of the others */
} Group;

/* Unpack the next group, and begin to fetch the same group of the next strip from memory. */
INLINE void read_group(Reader *reader, const Matrix *w, const int type, const int has_minima, const int half_scales,
                       Group *group) {
    const int64_t strip_bytes = (int64_t)(w->columns / GROUP) * group_bytes(type);
    for (int i = 0; i < group_bytes(type); i += 64) __builtin_prefetch(reader->codes + strip_bytes + i);
    for (int i = 0; i < group_bytes(type) / 16; i++) {
        const s8x16 bytes = load_bytes(reader->codes + 16 * i);
        group->part[i] = type == INT4 ? bytes & 15 : bytes;
        if (type == INT4) group->part[i + 4] = (s8x16)((u8x16)bytes >> 4);
    }
    group->scale = load_scales(w->scales, reader->at + (type == INT8_BY_16 ? STRIP : 0), half_scales);
    group->minus_zero = -INT_ZERO * group->scale;
    if (type == INT8_BY_16) {
        group->first_scale = load_scales(w->scales, reader->at, half_scales);
        group->first_minus_zero = -INT_ZERO * group->first_scale;
    }
    if (has_minima) group->minimum = load_scales(w->minima, reader->at, half_scales);
    go_on(reader, w, type);
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

/* The products of a strip with at most BLOCK rows of x: each group is unpacked into registers. */
INLINE void direct_product(const int count, const Matrix *w, const Rounded *x, int strip, const int type,
                           const int has_minima, const int half_scales, float y[][TILE]) {
    Reader reader = reader_of(w, strip, type);
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

/* The products of a strip with any number of rows: some groups at a time are unpacked into memory. */
INLINE void strip_product(const Matrix *w, int strip, const Inputs *in, int first, int count, float y[][TILE],
                          const int type, const int has_minima, const int half_scales) {
    const int groups = w->columns / GROUP;
    const Rounded *x = in->rounded + (int64_t)(first / BLOCK) * groups;
    if (count <= BLOCK) {
        BY_COUNT(count, direct_product, w, x, strip, type, has_minima, half_scales, y)
        return;
    }
    Group panel[PANEL_GROUPS];
    Reader reader = reader_of(w, strip, type);
    for (int m = 0; m < count; m++) store(y[m], splat(0));
    for (int g = 0, here; g < groups; g += here) {
        here = groups - g < PANEL_GROUPS ? groups - g : PANEL_GROUPS;
        for (int i = 0; i < here; i++) read_group(&reader, w, type, has_minima, half_scales, panel + i);
        for (int m = 0; m < count; m += BLOCK)
            add_panel(panel, x + (int64_t)(m / BLOCK) * groups + g, here, count - m, type, has_minima, y + m);
    }
}

void packed_product(const Matrix *w, const Inputs *in, int tile, int first, int count, float y[][TILE]) {
    for (int i = 0; i < TILE / STRIP && (tile * TILE + i * STRIP) < w->rows; i++) {
        const int strip = tile * (TILE / STRIP) + i;
        float(*out)[TILE] = (float(*)[TILE])(y[0] + i * STRIP);
        BY_KIND(strip_product, w, strip, in, first, count, out)
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

#endif
