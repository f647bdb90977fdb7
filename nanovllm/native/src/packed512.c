/* Products with packed weights and vectors of 512 bits: 16 rows of W at a time. A few rows of x are multiplied by the
 * byte products of AVX512-VNNI, more on the matrix unit (AMX) where there is one; both add in the same order. */
#include "packed.h"

#if defined(__AVX512F__)

enum { AHEAD = 8192 }; /* bytes */

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

/* The products of a strip with `count` rows of x from row `row` of LANES on. The instruction multiplies unsigned codes
 * of W: those of 8 bits are increased by 128, for which `zeros` make up. */
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
        for (int i = 0; type != INT4 && i < 8; i++) part[i] = _mm512_xor_si512(part[i], _mm512_set1_epi8(-128));
#pragma GCC unroll 8
        for (int m = 0; m < count; m++) {
            const wide x_scale = wide_splat(x->scales[row + m]);
            const int32_t zero = x->zeros[0][row + m], last_zero = x->zeros[1][row + m];
            const int32_t first_zero = type == INT8 ? zero : zero - last_zero + INT_ZERO;
            __m512i dot = _mm512_set1_epi32(type == INT4 ? INT_ZERO : first_zero);
            if (has_minima) sum[m] = wide_multiply_add(sum[m], minimum, wide_splat(x->minus_sums[row + m]));
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++) {
                dot = _mm512_dpbusd_epi32(dot, part[i], four_codes(x->codes[row + m] + 4 * i));
                if (type == INT8_BY_16 && i == 3) {
                    sum[m] = wide_multiply_add(sum[m], scaled((wide)dot, &scale[0]), x_scale);
                    dot = _mm512_set1_epi32(last_zero);
                }
            }
            sum[m] = wide_multiply_add(sum[m], scaled((wide)dot, &scale[type == INT8_BY_16]), x_scale);
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
        rounded->zeros[0][row] = INT_ZERO - 128 * (sums[0] + sums[1]);
        rounded->zeros[1][row] = INT_ZERO - 128 * sums[1];
        rounded->minus_sums[row] = -rounded->scales[row] * (float)(sums[0] + sums[1]);
    }
}

#endif
