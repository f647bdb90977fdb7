/* Vectors of 128 bits: four floats, four 32-bit integers, sixteen bytes. On Arm with dotprod, x86 with AVX2 and FMA.
 * `wide` is a vector of LANES floats: 16 with AVX512, 8 with AVX2, 4 on Arm. */
#pragma once
#include <stdint.h>
#include <string.h>

typedef float f32x4 __attribute__((vector_size(16)));
typedef int32_t s32x4 __attribute__((vector_size(16)));
typedef uint32_t u32x4 __attribute__((vector_size(16)));
typedef int8_t s8x16 __attribute__((vector_size(16)));

#define INLINE static inline __attribute__((always_inline))
#define EACH(variable, limit) _Pragma("GCC unroll 8") for (int variable = 0; variable < limit; variable++)

#if defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#define HAVE_SIMD 1

INLINE f32x4 multiply_add(f32x4 sum, f32x4 a, f32x4 b) {
    return (f32x4)vfmaq_f32((float32x4_t)sum, (float32x4_t)a, (float32x4_t)b);
}
INLINE s32x4 round_to_int(f32x4 x) { return (s32x4)vcvtnq_s32_f32((float32x4_t)x); }
INLINE f32x4 larger(f32x4 a, f32x4 b) { return (f32x4)vmaxq_f32((float32x4_t)a, (float32x4_t)b); }
INLINE f32x4 smaller(f32x4 a, f32x4 b) { return (f32x4)vminq_f32((float32x4_t)a, (float32x4_t)b); }
INLINE float largest_of(f32x4 a) { return vmaxvq_f32((float32x4_t)a); }
INLINE f32x4 absolute(f32x4 a) { return (f32x4)vabsq_f32((float32x4_t)a); }
INLINE f32x4 load_halves(const uint16_t *p) { return (f32x4)vcvt_f32_f16(vld1_f16((const __fp16 *)p)); }
INLINE f32x4 load_small(const int8_t *p) {
    const int8x8_t bytes = vreinterpret_s8_s32(vld1_dup_s32((const int32_t *)p));
    return (f32x4)vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(bytes))));
}
INLINE f32x4 load_bfloat16(const uint16_t *p) { /* zeros between the numbers: a shift has only one of two pipes */
    return (f32x4)vzip1q_u16(vdupq_n_u16(0), vcombine_u16(vld1_u16(p), vdup_n_u16(0)));
}
INLINE void store_halves(uint16_t *p, f32x4 x) { vst1_f16((__fp16 *)p, vcvt_f16_f32((float32x4_t)x)); }
/* sum[i] += the products of w[4 i .. 4 i + 3] and x[4 lane .. 4 lane + 3] */
#define DOT_LANE(sum, w, x, lane) ((s32x4)vdotq_laneq_s32((int32x4_t)(sum), (int8x16_t)(w), (int8x16_t)(x), lane))
/* Four numbers that are used one by one: in a register, from where gcc would not take them by itself. */
typedef f32x4 Lanes;
INLINE Lanes load_lanes(const float *p) {
    float32x4_t v = vld1q_f32(p);
    __asm__("" : "+w"(v));
    return (Lanes)v;
}
/* sum + a * x[lane] */
#define ADD_LANE(sum, a, x, lane) \
    ((f32x4)vfmaq_laneq_f32((float32x4_t)(sum), (float32x4_t)(a), (float32x4_t)(x), lane))
#define EACH_LANE(macro) macro(0) macro(1) macro(2) macro(3) /* the instruction needs constants */

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>
#define HAVE_SIMD 1

INLINE f32x4 multiply_add(f32x4 sum, f32x4 a, f32x4 b) {
    return (f32x4)_mm_fmadd_ps((__m128)a, (__m128)b, (__m128)sum);
}
/* Where one of the two is NaN, the second. */
INLINE f32x4 larger(f32x4 a, f32x4 b) { return (f32x4)_mm_max_ps((__m128)a, (__m128)b); }
INLINE f32x4 smaller(f32x4 a, f32x4 b) { return (f32x4)_mm_min_ps((__m128)a, (__m128)b); }
INLINE float largest_of(f32x4 v) {
    const float a = v[0] > v[1] ? v[0] : v[1], b = v[2] > v[3] ? v[2] : v[3];
    return a > b ? a : b;
}
INLINE void store_halves(uint16_t *p, f32x4 x) {
    _mm_storel_epi64((__m128i *)p, _mm_cvtps_ph((__m128)x, _MM_FROUND_TO_NEAREST_INT));
}
typedef const float *Lanes; /* in memory: a load fills a vector with one number */
INLINE Lanes load_lanes(const float *p) { return p; }
#define EACH_LANE(macro) for (int lane = 0; lane < 4; lane++) { macro(lane) }
#else
#define HAVE_SIMD 0
#endif

#if HAVE_SIMD
INLINE f32x4 splat(float x) { return (f32x4){x, x, x, x}; }
INLINE f32x4 load(const float *p) { f32x4 v; memcpy(&v, p, 16); return v; }
INLINE void store(float *p, f32x4 v) { memcpy(p, &v, 16); }
INLINE s8x16 load_bytes(const void *p) { s8x16 v; memcpy(&v, p, 16); return v; }
/* To the nearest, of two to the even one; NaN stays NaN. */
INLINE void store_bfloat16(uint16_t *p, f32x4 x) {
    const u32x4 bits = (u32x4)x, rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16, nan = (u32x4)(x != x);
    const u32x4 kept = (rounded & ~nan) | (((bits >> 16) | 0x40) & nan);
    for (int i = 0; i < 4; i++) p[i] = (uint16_t)kept[i];
}

INLINE float sum_of(f32x4 v) { return (v[0] + v[1]) + (v[2] + v[3]); }

#if defined(__AVX2__)
#if defined(__AVX512F__)
enum { LANES = 16 };
#define X86(name) _mm512_##name
typedef __m512 Floats;
typedef __m512i Ints;
typedef __m256i HalfInts; /* half of the bits */
#else
enum { LANES = 8 };
#define X86(name) _mm256_##name
typedef __m256 Floats;
typedef __m256i Ints;
typedef __m128i HalfInts;
#endif
typedef float wide __attribute__((vector_size(4 * LANES)));
typedef int32_t swide __attribute__((vector_size(4 * LANES)));
typedef uint32_t uwide __attribute__((vector_size(4 * LANES)));
INLINE wide wide_load(const float *p) { return (wide)X86(loadu_ps)(p); }
INLINE void wide_store(float *p, wide v) { X86(storeu_ps)(p, (Floats)v); }
INLINE wide wide_splat(float x) { return (wide)X86(set1_ps)(x); }
INLINE HalfInts load_half_ints(const uint16_t *p) { HalfInts v; memcpy(&v, p, sizeof(v)); return v; }
INLINE wide wide_load_halves(const uint16_t *p) { return (wide)X86(cvtph_ps)(load_half_ints(p)); }
INLINE wide wide_load_bfloat16(const uint16_t *p) {
    return (wide)X86(slli_epi32)(X86(cvtepu16_epi32)(load_half_ints(p)), 16);
}
INLINE wide wide_load_small(const int8_t *p) {
    __m128i bytes = _mm_setzero_si128();
    memcpy(&bytes, p, LANES);
    return (wide)X86(cvtepi32_ps)(X86(cvtepi8_epi32)(bytes));
}
INLINE wide wide_multiply_add(wide sum, wide a, wide b) {
    return (wide)X86(fmadd_ps)((Floats)a, (Floats)b, (Floats)sum);
}
INLINE wide wide_larger(wide a, wide b) { return (wide)X86(max_ps)((Floats)a, (Floats)b); }
INLINE wide wide_absolute(wide a) { return (wide)((uwide)a & 0x7fffffff); }
INLINE swide wide_round_to_int(wide x) { return (swide)X86(cvtps_epi32)((Floats)x); }
#define WIDE_ADD_LANE(sum, a, x, lane) wide_multiply_add(sum, a, wide_splat((x)[lane]))
#if defined(__AVX512F__)
INLINE float wide_largest_of(wide a) { return _mm512_reduce_max_ps((__m512)a); }
INLINE float wide_sum_of(wide a) { return _mm512_reduce_add_ps((__m512)a); }
INLINE int32_t wide_sum_of_ints(swide a) { return _mm512_reduce_add_epi32((__m512i)a); }
/* The bytes of a, negative where those of b are. */
INLINE Ints with_signs(Ints a, Ints b) {
    return _mm512_mask_sub_epi8(a, _mm512_movepi8_mask(b), _mm512_setzero_si512(), a);
}
INLINE uwide or_masked(uwide a, uwide b, uint32_t mask) {
    return (uwide)_mm512_ternarylogic_epi32((__m512i)a, (__m512i)b, _mm512_set1_epi32((int)mask), 0xF8);
}
INLINE Ints in_all_quarters(s8x16 bytes) { return _mm512_broadcast_i32x4((__m128i)bytes); }
#else
INLINE f32x4 low_half(wide a) { return (f32x4)_mm256_castps256_ps128((__m256)a); }
INLINE f32x4 high_half(wide a) { return (f32x4)_mm256_extractf128_ps((__m256)a, 1); }
INLINE float wide_largest_of(wide a) { return largest_of(larger(low_half(a), high_half(a))); }
INLINE float wide_sum_of(wide a) { return sum_of(low_half(a) + high_half(a)); }
INLINE int32_t wide_sum_of_ints(swide a) {
    const s32x4 halves = (s32x4)low_half((wide)a) + (s32x4)high_half((wide)a);
    return (halves[0] + halves[1]) + (halves[2] + halves[3]);
}
INLINE Ints with_signs(Ints a, Ints b) { return _mm256_sign_epi8(a, b); } /* 0 where b is, whose product is 0 */
INLINE uwide or_masked(uwide a, uwide b, uint32_t mask) { return a | (b & mask); }
INLINE Ints in_all_quarters(s8x16 bytes) { return _mm256_broadcastsi128_si256((__m128i)bytes); }
#endif
#else
typedef f32x4 wide;
typedef s32x4 swide;
typedef u32x4 uwide;
enum { LANES = 4 };
#define wide_load load
#define wide_store store
#define wide_splat splat
#define wide_load_halves load_halves
#define wide_load_small load_small
#define wide_load_bfloat16 load_bfloat16
#define wide_multiply_add multiply_add
#define wide_larger larger
#define wide_largest_of largest_of
#define wide_absolute absolute
#define wide_sum_of sum_of
INLINE int32_t wide_sum_of_ints(s32x4 v) { return v[0] + v[1] + v[2] + v[3]; }
#define wide_round_to_int round_to_int
#define WIDE_ADD_LANE ADD_LANE
INLINE uwide or_masked(uwide a, uwide b, uint32_t mask) { return a | (b & mask); }
#endif

typedef int8_t Bytes __attribute__((vector_size(LANES)));

/* e^x for x <= 0, or x >= 0 below 88, to 2 ulp: 2^n times a polynomial (Taylor) on [-ln 2 / 2, ln 2 / 2] */
INLINE wide exponential(wide x) {
    x = wide_larger(x, wide_splat(-87.0f));
    const wide shift = wide_splat(12582912.0f); /* 1.5 * 2^23: a sum with it is an integer, in its lowest bits */
    const wide sum = wide_multiply_add(shift, x, wide_splat(1.44269504f)), whole = sum - shift;
    wide r = wide_multiply_add(x, whole, wide_splat(-0.693359375f)); /* ln 2 in two parts */
    r = wide_multiply_add(r, whole, wide_splat(2.12194440e-4f));
    wide p = wide_splat(1.0f / 720);
    p = wide_multiply_add(wide_splat(1.0f / 120), p, r);
    p = wide_multiply_add(wide_splat(1.0f / 24), p, r);
    p = wide_multiply_add(wide_splat(1.0f / 6), p, r);
    p = wide_multiply_add(wide_splat(0.5f), p, r);
    p = wide_multiply_add(wide_splat(1.0f), p, r);
    p = wide_multiply_add(wide_splat(1.0f), p, r);
    return (wide)((uwide)p + ((uwide)sum << 23));
}

/* 1 / (1 + e^-x) */
INLINE wide logistic(wide x) {
    const wide one = wide_splat(1), size = exponential(-wide_absolute(x)); /* e^-|x| cannot overflow */
    const swide positive = x > wide_splat(0);
    return (wide)(((swide)one & positive) | ((swide)size & ~positive)) / (one + size);
}

/* With tanh: x times the logistic function of a polynomial. */
INLINE wide gelu(wide x) {
    return x * logistic(x * wide_splat(1.5957691216f) * (wide_splat(1) + wide_splat(0.044715f) * x * x));
}
#endif
