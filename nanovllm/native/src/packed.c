/* Products with packed weights. A group of columns of a strip of W is unpacked into registers and multiplied with a few
 * rows of x as bytes. For many rows some groups at a time are unpacked into memory, and multiplied with all of them:
 * with AVX512 on the matrix unit (AMX), where there is one. All add in the same order. */
#include "packed.h"

#if HAVE_SIMD

enum { PANEL_GROUPS = LANES == 16 ? 24 : 48 }; /* groups of a strip that are unpacked at a time, for the L1 cache */
#if defined(__AVX512VNNI__)
enum { ADDED = 128 }; /* to codes of 8 bits, because the instruction multiplies unsigned ones of W */
#else
enum { ADDED = 0 };
#endif

/* Where the next group of a strip is. */
typedef struct {
    const uint8_t *codes;
    int64_t at; /* the index of its scales */
    int left;   /* groups with these scales */
} Reader;

INLINE int scale_step(int type) { return type == INT8_BY_16 ? 2 * STRIP : STRIP; }

INLINE Reader reader_of(const Matrix *w, int strip, const int type) {
    const int groups = w->columns / GROUP;
    return (Reader){
        .codes = (const uint8_t *)w->data + (int64_t)strip * groups * group_bytes(type),
        .at = (int64_t)strip * (groups / w->groups_per_scale) * scale_step(type),
        .left = w->groups_per_scale,
    };
}

/* Call a function with the matrix, and as its last arguments with constants: its type, whether it has minima, and
 * whether scales and minima are float16. With 4 bits it always has minima; only files with Q6_K have INT8_BY_16. */
#define BY_SCALES(function, w, type, minima, ...)                  \
    if ((w)->half_scales) function(w, __VA_ARGS__, type, minima, 1); \
    else function(w, __VA_ARGS__, type, minima, 0);
#define BY_KIND(function, w, ...)                                                  \
    if ((w)->type == INT4) BY_SCALES(function, w, INT4, 1, __VA_ARGS__)            \
    else if ((w)->type == FP4) BY_SCALES(function, w, FP4, 0, __VA_ARGS__)         \
    else if ((w)->type == INT8_BY_16) function(w, __VA_ARGS__, INT8_BY_16, 0, 0);  \
    else if ((w)->minima) BY_SCALES(function, w, INT8, 1, __VA_ARGS__)             \
    else BY_SCALES(function, w, INT8, 0, __VA_ARGS__)

/* Scales or minima of the rows of a strip. Without the last two bits of a float32, so that the product with INT_ZERO is
 * exact. */
INLINE wide load_scales(const void *scales, int64_t index, const int half_scales) {
    if (half_scales) return wide_load_halves((const uint16_t *)scales + index);
    return (wide)((uwide)wide_load((const float *)scales + index) & ~3u);
}

/* The numbers that 4-bit codes of FP4 stand for. */
INLINE Codes look_up(Codes codes) {
    const s8x16 table = load_bytes(fp4_codes);
#if defined(__ARM_FEATURE_DOTPROD)
    return (Codes)vqtbl1q_s8((int8x16_t)table, (uint8x16_t)codes);
#elif defined(__AVX512F__)
    return (Codes)_mm512_shuffle_epi8(_mm512_broadcast_i32x4((__m128i)table), (__m512i)codes);
#else
    return (Codes)_mm_shuffle_epi8((__m128i)table, (__m128i)codes);
#endif
}

/* Unpack the next group, and begin to fetch a later one from memory: the same of the next strip, or one that is a fixed
 * distance ahead. */
INLINE void read_group(Reader *reader, const Matrix *w, const int type, const int has_minima, const int half_scales,
                       Group *group) {
    const int64_t ahead = LANES == 16 ? 8192 : (int64_t)(w->columns / GROUP) * group_bytes(type);
    for (int i = 0; i < group_bytes(type); i += 64) __builtin_prefetch(reader->codes + ahead + i);
    EACH(i, group_bytes(type) / (int)sizeof(Codes)) {
        Codes codes;
        memcpy(&codes, reader->codes + i * (int)sizeof(Codes), sizeof(Codes));
        group->part[i] = has_4_bits(type) ? codes & 15 : codes;
        if (has_4_bits(type)) group->part[i + 4] = (Codes)((UnsignedCodes)codes >> 4);
        if (type == FP4) group->part[i] = look_up(group->part[i]), group->part[i + 4] = look_up(group->part[i + 4]);
    }
    group->scale = load_scales(w->scales, reader->at + (type == INT8_BY_16 ? STRIP : 0), half_scales);
    group->minus_zero = group->scale * wide_splat(-ZERO);
    if (type == INT8_BY_16) {
        group->first_scale = load_scales(w->scales, reader->at, half_scales);
        group->first_minus_zero = group->first_scale * wide_splat(-ZERO);
    }
    if (has_minima) group->minimum = load_scales(w->minima, reader->at, half_scales);
    reader->codes += group_bytes(type);
    if (--reader->left == 0) reader->left = w->groups_per_scale, reader->at += scale_step(type);
}

/* The codes of a group as dot_codes reads them. */
INLINE void add_to_codes(Group *group, const int type) {
    EACH(i, 8) if (ADDED && type != INT4) group->part[i] ^= (int8_t)ADDED;
}

/* INT_ZERO plus the products of codes of W, of 4 * `num` columns, with those of a row of x. `zero` is INT_ZERO minus
 * what was ADDED to those of W. */
#if defined(__AVX512F__)
INLINE wide dot_codes(const Codes *w, const int num, const int8_t *x, int32_t zero, const int type) {
    __m512i sum = _mm512_set1_epi32(zero), pairs = _mm512_setzero_si512();
    const __m512i ones = _mm512_set1_epi16(1);
    EACH(i, num) {
        int32_t columns;
        memcpy(&columns, x + 4 * i, 4);
        const __m512i four = _mm512_set1_epi32(columns), codes = (__m512i)w[i];
#if defined(__AVX512VNNI__)
        sum = _mm512_dpbusd_epi32(sum, codes, four);
#else
        if (type == INT4) { /* 16 bits hold the sum of 16 products */
            pairs = _mm512_add_epi16(pairs, _mm512_maddubs_epi16(codes, four));
        } else { /* the sign of w goes to x */
            const __m512i other = _mm512_mask_sub_epi8(four, _mm512_movepi8_mask(codes), ones ^ ones, four);
            sum = _mm512_add_epi32(sum, _mm512_madd_epi16(_mm512_maddubs_epi16(_mm512_abs_epi8(codes), other), ones));
        }
#endif
    }
    return (wide)(ADDED || type != INT4 ? sum : _mm512_add_epi32(sum, _mm512_madd_epi16(pairs, ones)));
}
#else
INLINE wide dot_codes(const Codes *w, const int num, const int8_t *x, int32_t zero, const int type) {
    s32x4 sum = {zero, zero, zero, zero};
    (void)type;
    EACH(i, num / 4) {
        const s8x16 codes = load_bytes(x + 16 * i);
        sum = DOT_LANE(sum, w[4 * i], codes, 0);
        sum = DOT_LANE(sum, w[4 * i + 1], codes, 1);
        sum = DOT_LANE(sum, w[4 * i + 2], codes, 2);
        sum = DOT_LANE(sum, w[4 * i + 3], codes, 3);
    }
    return (wide)sum;
}
#endif

/* The scaled products of a group with a row of x: of INT8_BY_16 those of the last 16 columns, with `first` of the
 * others. */
INLINE wide group_product(const Group *w, const Rounded *x, int row, const int type, const int first) {
#if defined(__AVX512VNNI__)
    const int32_t zero = type == INT4 ? INT_ZERO : x->zeros[0][row], last_zero = x->zeros[1][row];
#else
    const int32_t zero = INT_ZERO, last_zero = INT_ZERO;
#endif
    const int8_t *codes = x->codes[row];
    if (first) {
        const int32_t first_zero = zero - last_zero + INT_ZERO;
        return scaled(dot_codes(w->part, 4, codes, first_zero, type), w->first_scale, w->first_minus_zero);
    }
    const wide sum = type == INT8_BY_16 ? dot_codes(w->part + 4, 4, codes + 16, last_zero, type)
                                        : dot_codes(w->part, 8, codes, zero, type);
    return scaled(sum, w->scale, w->minus_zero);
}

/* Add the products of a group with `count` rows of x, from row `row` of LANES on. */
INLINE void add_group(const int count, const Group *w, const Rounded *x, int row, const int type, const int has_minima,
                      wide sum[BLOCK]) {
    const Lanes scales = load_lanes(x->scales + row), minus_sums = load_lanes(x->minus_sums + row);
#define ADD_ROW(m)                                                                                                  \
    if (count > m) {                                                                                                \
        if (has_minima) sum[m] = WIDE_ADD_LANE(sum[m], w->minimum, minus_sums, m);                                  \
        if (type == INT8_BY_16) sum[m] = WIDE_ADD_LANE(sum[m], group_product(w, x, row + m, type, 1), scales, m);   \
        sum[m] = WIDE_ADD_LANE(sum[m], group_product(w, x, row + m, type, 0), scales, m);                           \
    }
    ADD_ROW(0) ADD_ROW(1) ADD_ROW(2) ADD_ROW(3)
#if defined(__AVX512F__)
    ADD_ROW(4) ADD_ROW(5) ADD_ROW(6) ADD_ROW(7)
#endif
#undef ADD_ROW
}

/* The products of a strip with at most BLOCK rows of x: each group is unpacked into registers. */
INLINE void direct_product(const int count, const Matrix *w, int strip, const Rounded *x, int row, float y[][TILE],
                           const int type, const int has_minima, const int half_scales) {
    Reader reader = reader_of(w, strip, type);
    wide sum[BLOCK];
    EACH(m, count) sum[m] = wide_splat(0);
    for (int g = 0; g < w->columns / GROUP; g++) {
        Group group;
        read_group(&reader, w, type, has_minima, half_scales, &group);
        add_to_codes(&group, type);
        add_group(count, &group, x + g, row, type, has_minima, sum);
    }
    EACH(m, count) wide_store(y[m], sum[m]);
}

#if defined(__AVX512F__)
#define add_panel amx_add_groups
#else
/* Add the products of unpacked groups with at most BLOCK rows of x to y. */
INLINE void panel_product(const int count, const Group *panel, const Rounded *x, int groups, const int type,
                          const int has_minima, float y[][TILE]) {
    wide sum[BLOCK];
    EACH(m, count) sum[m] = wide_load(y[m]);
    for (int g = 0; g < groups; g++) add_group(count, panel + g, x + g, 0, type, has_minima, sum);
    EACH(m, count) wide_store(y[m], sum[m]);
}

#if defined(__ARM_FEATURE_DOTPROD)
/* The same for BLOCK rows in assembly. Compilers copy INT_ZERO and minus_zero from a register to where they are added
 * to, which takes a pipe of arithmetic: here they are loaded each time. The sums of codes of the rows are computed in
 * turn, because each waits for the one before it. v0 to v7: parts. v8: scale, v9: minimum. v10, v11: scales and
 * minus_sums of x. v12 to v15: sums. v16 to v19: sums of codes. v20 to v27: codes of x. v28 to v31: scaled sums. */
static const s32x4 zeros = {INT_ZERO, INT_ZERO, INT_ZERO, INT_ZERO};
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
          [zero] "r"(&zeros)                                                                                      \
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

/* Add the products of unpacked groups with `count` rows of x, of which [rows / LANES][x_groups] are given, to y. */
static void add_panel(const Group *panel, int groups, const Rounded *x, int64_t x_groups, int count, int by_16,
                      int has_minima, float y[][TILE]) {
    for (; count > 0; count -= BLOCK, x += x_groups, y += BLOCK)
        if (by_16)
            BY_COUNT(count, panel_product, panel, x, groups, INT8_BY_16, 0, y)
        else if (count >= BLOCK)
            block_product(panel, x, groups, has_minima, y);
        else if (has_minima)
            BY_COUNT(count, panel_product, panel, x, groups, INT8, 1, y)
        else
            BY_COUNT(count, panel_product, panel, x, groups, INT8, 0, y)
}
#endif

/* The products of a strip with any number of rows. */
INLINE void strip_product(const Matrix *w, int strip, const Inputs *in, int first, int count, float y[][TILE],
                          const int type, const int has_minima, const int half_scales) {
    const int groups = w->columns / GROUP;
    const Rounded *x = in->rounded + (int64_t)(first / LANES) * groups;
    if (count <= BLOCK || (LANES == 16 && !have_amx)) {
        for (int m = 0; m < count; m += BLOCK)
            BY_COUNT(count - m, direct_product, w, strip, x + (int64_t)(m / LANES) * groups, m % LANES, y + m, type,
                     has_minima, half_scales)
        return;
    }
    Group panel[PANEL_GROUPS];
    Reader reader = reader_of(w, strip, type);
    for (int m = 0; m < (count + LANES - 1) / LANES * LANES; m++) wide_store(y[m], wide_splat(0));
    for (int g = 0, here; g < groups; g += here) {
        here = groups - g < PANEL_GROUPS ? groups - g : PANEL_GROUPS;
        for (int i = 0; i < here; i++) read_group(&reader, w, type, has_minima, half_scales, panel + i);
        add_panel(panel, here, x + g, groups, count, type == INT8_BY_16, has_minima, y);
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
        wide most = wide_splat(0);
        EACH(i, GROUP / LANES) most = wide_larger(most, wide_absolute(wide_load(x + i * LANES)));
        const float size = wide_largest_of(most);
        const wide inverse = wide_splat(size > 0 ? 127.0f / size : 0.0f);
        swide total = {0}, last = {0}; /* of all codes, and of the last 16 */
        EACH(i, GROUP / LANES) {
            const swide codes = wide_round_to_int(wide_load(x + i * LANES) * inverse);
            const Bytes narrow = __builtin_convertvector(codes, Bytes);
            memcpy(rounded->codes[row] + i * LANES, &narrow, LANES);
            total += codes;
            if (i * LANES >= 16) last += codes;
        }
        const int32_t sum = wide_sum_of_ints(total);
        rounded->scales[row] = size / 127.0f;
        rounded->minus_sums[row] = -rounded->scales[row] * (float)sum;
#if defined(__AVX512F__)
        rounded->zeros[0][row] = INT_ZERO - ADDED * sum;
        rounded->zeros[1][row] = INT_ZERO - ADDED * wide_sum_of_ints(last);
#endif
    }
}

#endif
