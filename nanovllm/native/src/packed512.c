/* Products with packed weights and vectors of 512 bits: 16 rows of W at a time. A few rows of x are multiplied by the
 * byte products of AVX512, with or without VNNI, more on the matrix unit (AMX) where there is one; all add in the same
 * order. */
#include "packed.h"

#if defined(__AVX512F__)

enum { AHEAD = 8192 }; /* bytes */
#if defined(__AVX512VNNI__)
enum { ADDED = 128 }; /* to codes of 8 bits, because the instruction multiplies unsigned ones of W */
#else
enum { ADDED = 0 };
#endif

INLINE Scale scale_of(wide scale) { return (Scale){scale, scale * wide_splat(-12582912.0f)}; }

/* The scales of a group, of its first and its last 16 columns, and its minima. */
INLINE void read_scales(const Reader *reader, const Matrix *w, const int type, const int has_minima,
                        const int half_scales, Scale scale[2], wide *minimum) {
    scale[0] = scale_of(load_scales(w->scales, reader->at, half_scales));
    if (type == INT8_BY_16) scale[1] = scale_of(load_scales(w->scales, reader->at + STRIP, half_scales));
    if (has_minima) *minimum = load_scales(w->minima, reader->at, half_scales);
}

/* The codes of a group: columns 4 i to 4 i + 3 of all rows of the strip. Those of the group that is AHEAD are fetched
 * from memory. */
INLINE void read_codes(const Reader *reader, const int type, __m512i part[8]) {
    const __m512i low_halves = _mm512_set1_epi8(15);
#pragma GCC unroll 8
    for (int i = 0; i < group_bytes(type) / 64; i++) {
        __builtin_prefetch(reader->codes + AHEAD + 64 * i);
        part[i] = _mm512_loadu_si512(reader->codes + 64 * i);
        if (type == INT4) {
            part[i + 4] = _mm512_and_si512(_mm512_srli_epi16(part[i], 4), low_halves);
            part[i] = _mm512_and_si512(part[i], low_halves);
        }
    }
}

/* Four columns of a row of x, in each of the 16 places. */
INLINE __m512i four_codes(const int8_t *codes) {
    int32_t four;
    memcpy(&four, codes, 4);
    return _mm512_set1_epi32(four);
}

/* `zero` plus the products of codes of W, of 4 * `num` columns, with those of a row of x. `zero` makes up for what
 * was ADDED to those of W. */
INLINE wide dot_codes(const __m512i *w, const int num, const int8_t *x, int32_t zero, const int type) {
    __m512i sum = _mm512_set1_epi32(zero);
#if defined(__AVX512VNNI__)
    (void)type;
#pragma GCC unroll 8
    for (int i = 0; i < num; i++) sum = _mm512_dpbusd_epi32(sum, w[i], four_codes(x + 4 * i));
#else
    const __m512i ones = _mm512_set1_epi16(1);
    __m512i pairs = _mm512_setzero_si512(); /* sums of 16 bits: up to 16 products of 4-bit codes, or 2 of 8 bits */
#pragma GCC unroll 8
    for (int i = 0; i < num; i++) {
        const __m512i four = four_codes(x + 4 * i);
        if (type == INT4) {
            pairs = _mm512_add_epi16(pairs, _mm512_maddubs_epi16(w[i], four));
        } else { /* the sign of w goes to x */
            const __m512i other = _mm512_mask_sub_epi8(four, _mm512_movepi8_mask(w[i]), ones ^ ones, four);
            const __m512i two = _mm512_maddubs_epi16(_mm512_abs_epi8(w[i]), other);
            sum = _mm512_add_epi32(sum, _mm512_madd_epi16(two, ones));
        }
    }
    if (type == INT4) sum = _mm512_add_epi32(sum, _mm512_madd_epi16(pairs, ones));
#endif
    return (wide)sum;
}

/* The products of a strip with `count` rows of x from row `row` of LANES on. */
INLINE void few_rows(const int count, const Matrix *w, int strip, const Rounded *x, int row, float y[][TILE],
                     const int type, const int has_minima, const int half_scales) {
    Reader reader = reader_of(w, strip, type);
    wide sum[BLOCK];
    for (int m = 0; m < count; m++) sum[m] = wide_splat(0);
    for (int g = 0; g < w->columns / GROUP; g++, x++, go_on(&reader, w, type)) {
        __m512i part[8];
        Scale scale[2];
        wide minimum;
        read_codes(&reader, type, part);
        read_scales(&reader, w, type, has_minima, half_scales, scale, &minimum);
#pragma GCC unroll 8
        for (int i = 0; ADDED && type != INT4 && i < 8; i++) part[i] = _mm512_xor_si512(part[i], _mm512_set1_epi8(-128));
#pragma GCC unroll 8
        for (int m = 0; m < count; m++) {
            const int8_t *codes = x->codes[row + m];
            const wide x_scale = wide_splat(x->scales[row + m]);
            const int32_t zero = type == INT4 ? INT_ZERO : x->zeros[0][row + m], last_zero = x->zeros[1][row + m];
            if (has_minima) sum[m] = wide_multiply_add(sum[m], minimum, wide_splat(x->minus_sums[row + m]));
            if (type == INT8_BY_16) {
                const wide first = dot_codes(part, 4, codes, zero - last_zero + INT_ZERO, type);
                const wide last = dot_codes(part + 4, 4, codes + 16, last_zero, type);
                sum[m] = wide_multiply_add(sum[m], scaled(first, &scale[0]), x_scale);
                sum[m] = wide_multiply_add(sum[m], scaled(last, &scale[1]), x_scale);
            } else {
                sum[m] = wide_multiply_add(sum[m], scaled(dot_codes(part, 8, codes, zero, type), &scale[0]), x_scale);
            }
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < count; m++) wide_store(y[m], sum[m]);
}

/* The products of a strip with any number of rows on the matrix unit. */
INLINE void many_rows(const Matrix *w, int strip, const Rounded *x, int count, float y[][TILE], const int type,
                      const int has_minima, const int half_scales) {
    const int groups = w->columns / GROUP;
    UnpackedGroup panel[PANEL_GROUPS];
    Reader reader = reader_of(w, strip, type);
    for (int m = 0; m < (count + 15) / 16 * 16; m++) wide_store(y[m], wide_splat(0));
    for (int g = 0, here; g < groups; g += here) {
        here = groups - g < PANEL_GROUPS ? groups - g : PANEL_GROUPS;
        for (int i = 0; i < here; i++, go_on(&reader, w, type)) {
            __m512i part[8];
            read_codes(&reader, type, part);
            read_scales(&reader, w, type, has_minima, half_scales, panel[i].scale, &panel[i].minimum);
#pragma GCC unroll 8
            for (int j = 0; j < 8; j++) _mm512_store_si512(panel[i].codes[j], part[j]);
        }
        amx_add_groups(panel, here, x + g, groups, count, type == INT8_BY_16, has_minima, y);
    }
}

INLINE void strip_product(const Matrix *w, int strip, const Inputs *in, int first, int count, float y[][TILE],
                          const int type, const int has_minima, const int half_scales) {
    const int groups = w->columns / GROUP;
    const Rounded *x = in->rounded + (int64_t)(first / LANES) * groups;
    if (count > BLOCK && have_amx_bytes()) {
        many_rows(w, strip, x, count, y, type, has_minima, half_scales);
        return;
    }
    for (int m = 0; m < count; m += BLOCK) {
        const Rounded *here = x + (int64_t)(m / LANES) * groups;
        BY_COUNT(count - m, few_rows, w, strip, here, m % LANES, y + m, type, has_minima, half_scales)
    }
}

void packed_product(const Matrix *w, const Inputs *in, int tile, int first, int count, float y[][TILE]) {
    BY_KIND(strip_product, w, tile, in, first, count, y)
}

void round_row(const float *x, int columns, Rounded *rounded, int row) {
    for (int g = 0; g < columns / GROUP; g++, x += GROUP, rounded++) {
        const __m512 first = _mm512_loadu_ps(x), last = _mm512_loadu_ps(x + 16);
        const float size = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(first), _mm512_abs_ps(last)));
        const __m512 inverse = _mm512_set1_ps(size > 0 ? 127.0f / size : 0.0f);
        const __m512i codes[2] = {_mm512_cvtps_epi32(first * inverse), _mm512_cvtps_epi32(last * inverse)};
        const int sums[2] = {_mm512_reduce_add_epi32(codes[0]), _mm512_reduce_add_epi32(codes[1])};
        _mm_storeu_si128((__m128i *)rounded->codes[row], _mm512_cvtepi32_epi8(codes[0]));
        _mm_storeu_si128((__m128i *)(rounded->codes[row] + 16), _mm512_cvtepi32_epi8(codes[1]));
        rounded->scales[row] = size / 127.0f;
        rounded->zeros[0][row] = INT_ZERO - ADDED * (sums[0] + sums[1]);
        rounded->zeros[1][row] = INT_ZERO - ADDED * sums[1];
        rounded->minus_sums[row] = -rounded->scales[row] * (float)(sums[0] + sums[1]);
    }
}

#endif
