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

/* Tile registers: 0 and 1 the sums of 16 rows of x with each matrix's tile, 2 and 3 those of the next 16 rows, 4 and 5 W,
 * 6 and 7 x. */
AMX static void set_tiles(int rows) {
    struct {
        uint8_t palette, start, unused[14];
        uint16_t bytes[16]; /* of a row */
        uint8_t rows[16];
    } tiles = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        tiles.bytes[i] = STRIDE;
        tiles.rows[i] = i == 4 || i == 5 ? 16 : (uint8_t)rows;
    }
    __asm__ volatile("ldtilecfg %0" : : "m"(tiles)); /* the intrinsic of gcc names only 8 bytes of it */
}

/* Add the parts of 16 rows of x, times one or two tiles of W. */
#define ADD_PARTS(sum, other_sum, register_of_x, from)                          \
    for (int part = 0; part < PARTS; part++) {                                  \
        _tile_loadd(register_of_x, (from) + part * TILE_NUMBERS, STRIDE);       \
        _tile_dpbf16ps(sum, register_of_x, 4);                                  \
        if (other_w) _tile_dpbf16ps(other_sum, register_of_x, 5);               \
    }
#define STORE_SUMS(sum, y, count)                                                                   \
    _tile_stored(sum, sums, STRIDE);                                                                \
    for (int m = 0; m < (count); m++) _mm512_storeu_ps((y)[m], _mm512_load_ps(sums[m]));

AMX static void fetch_ahead(const uint16_t *w) {
    for (int i = 0; i < TILE_NUMBERS; i += STRIDE / 2) __builtin_prefetch(w + AHEAD + i, 0, 2);
}

static const uint16_t *numbers_of(Place place) {
    return place.w ? (const uint16_t *)place.w->data + place.tile * (int64_t)place.w->columns * TILE : NULL;
}

AMX void amx_products(Place here, Place other, const Inputs *in, int first, int count, float y[][TILE],
                      float other_y[][TILE]) {
    const int64_t columns = here.w->columns, row_tile = columns * ROWS * PARTS;
    _Alignas(64) float sums[ROWS][TILE];
    set_tiles(count < ROWS ? count : ROWS);
    for (int done = 0; done < count; done += 2 * ROWS) {
        const uint16_t *x = in->parts + (first + done) / ROWS * row_tile;
        const uint16_t *w = numbers_of(here), *other_w = numbers_of(other);
        const int left = count - done, rows = left < ROWS ? left : ROWS, more = left < 2 * ROWS ? left - ROWS : ROWS;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t c = 0; c < columns; c += COLUMNS, w += TILE_NUMBERS, x += PARTS * TILE_NUMBERS) {
            if (done == 0) fetch_ahead(w);
            _tile_loadd(4, w, STRIDE);
            if (other_w) {
                if (done == 0) fetch_ahead(other_w);
                _tile_loadd(5, other_w, STRIDE);
                other_w += TILE_NUMBERS;
            }
            ADD_PARTS(0, 1, 6, x)
            if (more > 0) ADD_PARTS(2, 3, 7, x + row_tile)
        }
        STORE_SUMS(0, y + done, rows)
        STORE_SUMS(2, y + done + ROWS, more)
        if (other_w) {
            STORE_SUMS(1, other_y + done, rows)
            STORE_SUMS(3, other_y + done + ROWS, more)
        }
    }
    _tile_release();
}

#else
int uses_amx(const Matrix *w) { return (void)w, 0; }
void split_row(const float *x, int columns, uint16_t *parts, int row) {
    (void)x, (void)columns, (void)parts, (void)row;
}
void amx_products(Place here, Place other, const Inputs *in, int first, int count, float y[][TILE],
                  float other_y[][TILE]) {
    (void)here, (void)other, (void)in, (void)first, (void)count, (void)y, (void)other_y;
}
#endif
