/* Products with weights in bfloat16 on the matrix unit of x86 (AMX), whose tiles have 16 rows of 64 bytes. It
 * multiplies bfloat16 and adds in float32, so a number of x becomes three of bfloat16, its parts, whose sum it is. */
#define _GNU_SOURCE
#include "products.h"

#if defined(__AVX512VNNI__) && (__clang_major__ >= 12 || (__GNUC__ >= 11 && !defined(__clang__)))
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#define AMX __attribute__((target("amx-tile,amx-bf16,avx512bf16")))
enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 }; /* of Linux */
enum { TILE_NUMBERS = 512, STRIDE = 64 }; /* numbers of a tile; bytes of its rows */
enum { ROWS = 16, COLUMNS = 32 };         /* of x in a tile */
enum { AHEAD = 16384 };                   /* numbers of W from those that are read to those that are fetched */

static int have_amx;

/* Whether the CPU has it, and the system lets this process use it. */
__attribute__((constructor)) static void ask_for_amx(void) {
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d >> 22 & 1) || !(d >> 24 & 1)) return; /* bfloat16, tiles */
    if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || !(a >> 5 & 1)) return;                    /* AVX512_BF16 */
    have_amx = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

int uses_amx(const Matrix *w) { return have_amx && w->type == BFLOAT16 && w->columns % COLUMNS == 0; }

AMX void split_row(const float *x, int columns, uint16_t *parts, int row) {
    uint16_t *to = parts + (int64_t)(row / ROWS) * ROWS * columns * PARTS + row % ROWS * COLUMNS;
    for (int c = 0; c < columns; c += COLUMNS)
        for (int half = 0; half < COLUMNS; half += 16) {
            __m512 rest = _mm512_loadu_ps(x + c + half);
            for (int part = 0; part < PARTS; part++) {
                const __m256i rounded = (__m256i)_mm512_cvtneps_pbh(rest);
                uint16_t *at = to + (c / COLUMNS * PARTS + part) * TILE_NUMBERS + half;
                _mm256_storeu_si256((__m256i *)at, rounded);
                rest -= (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(rounded), 16);
            }
        }
}

/* Tile registers: 0 to 2 the sums of 16 rows of x with each part, 3 to 5 those of the next 16 rows, 6 x, 7 W. */
AMX static void set_tiles(int rows) {
    struct {
        uint8_t palette, start, unused[14];
        uint16_t bytes[16]; /* of a row */
        uint8_t rows[16];
    } tiles = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        tiles.bytes[i] = STRIDE;
        tiles.rows[i] = i == 7 ? 16 : (uint8_t)rows;
    }
    __asm__ volatile("ldtilecfg %0" : : "m"(tiles)); /* the intrinsic of gcc names only 8 bytes of it */
}

#define ZERO_SUMS(sum0, sum1, sum2) \
    _tile_zero(sum0);               \
    _tile_zero(sum1);               \
    _tile_zero(sum2);
#define ADD_PART(sum, from)       \
    _tile_loadd(6, from, STRIDE); \
    _tile_dpbf16ps(sum, 6, 7);
#define ADD_PARTS(sum0, sum1, sum2, from)       \
    ADD_PART(sum0, from)                        \
    ADD_PART(sum1, (from) + TILE_NUMBERS)       \
    ADD_PART(sum2, (from) + 2 * TILE_NUMBERS)
#define STORE_SUMS(sum0, sum1, sum2, count, y)                                                     \
    _tile_stored(sum0, sums[0], STRIDE);                                                           \
    _tile_stored(sum1, sums[1], STRIDE);                                                           \
    _tile_stored(sum2, sums[2], STRIDE);                                                           \
    for (int m = 0; m < (count); m++) {                                                            \
        const __m512 rest = _mm512_load_ps(sums[1][m]) + _mm512_load_ps(sums[2][m]);               \
        _mm512_storeu_ps((y)[m], _mm512_load_ps(sums[0][m]) + rest);                               \
    }

AMX void amx_product(Place here, const Inputs *in, int first, int count, float y[][TILE]) {
    const int64_t columns = here.w->columns, row_tile = columns * ROWS * PARTS;
    const uint16_t *weights = (const uint16_t *)here.w->data + here.tile * columns * TILE;
    _Alignas(64) float sums[PARTS][ROWS][TILE];
    set_tiles(count < ROWS ? count : ROWS);
    for (int done = 0; done < count; done += 2 * ROWS) {
        const uint16_t *x = in->parts + (first + done) / ROWS * row_tile, *w = weights;
        const int left = count - done;
        ZERO_SUMS(0, 1, 2)
        ZERO_SUMS(3, 4, 5)
        for (int64_t c = 0; c < columns; c += COLUMNS, w += TILE_NUMBERS, x += PARTS * TILE_NUMBERS) {
            for (int i = 0; done == 0 && i < TILE_NUMBERS; i += STRIDE / 2) __builtin_prefetch(w + AHEAD + i, 0, 2);
            _tile_loadd(7, w, STRIDE);
            ADD_PARTS(0, 1, 2, x)
            if (left > ROWS) {
                ADD_PARTS(3, 4, 5, x + row_tile)
            }
        }
        STORE_SUMS(0, 1, 2, left < ROWS ? left : ROWS, y + done)
        if (left > ROWS) {
            STORE_SUMS(3, 4, 5, left < 2 * ROWS ? left - ROWS : ROWS, y + done + ROWS)
        }
    }
    _tile_release();
}

#else
int uses_amx(const Matrix *w) { return (void)w, 0; }
void split_row(const float *x, int columns, uint16_t *parts, int row) {
    (void)x, (void)columns, (void)parts, (void)row;
}
void amx_product(Place here, const Inputs *in, int first, int count, float y[][TILE]) {
    (void)here, (void)in, (void)first, (void)count, (void)y;
}
#endif
