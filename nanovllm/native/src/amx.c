/* Products on the matrix unit of x86 (AMX), whose tiles have 16 rows of 64 bytes: of bytes, and with weights in
 * bfloat16. Those are added in float32. A number of x becomes three of bfloat16, its parts, whose sum it is, or is
 * rounded to one. */
#define _GNU_SOURCE
#include "packed.h"

#if KNOWS_AMX
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#define AMX __attribute__((target("amx-tile,amx-bf16,amx-int8,avx512bf16")))
enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 }; /* of Linux */
enum { TILE_NUMBERS = 512, STRIDE = 64 }; /* numbers of a tile; bytes of its rows */
enum { ROWS = 16, COLUMNS = 32 };         /* of x in a tile */
enum { AHEAD = 4096 };                    /* numbers of W from those that are read to those that are fetched */

int have_amx;

/* Whether the CPU has it, and the system lets this process use it. */
__attribute__((constructor)) static void ask_for_amx(void) {
    const unsigned needed = 1u << 22 | 1u << 24 | 1u << 25; /* bfloat16, tiles, bytes */
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & needed) != needed) return;
    if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || !(a >> 5 & 1)) return; /* AVX512_BF16 */
    have_amx = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

AMX void split_row(const float *x, int first, int columns, int all_columns, uint16_t *parts, int num_parts, int row) {
    uint16_t *to = parts + ((int64_t)(row / ROWS) * all_columns + first) * ROWS * num_parts + row % ROWS * COLUMNS;
    for (int c = 0; c < columns; c += COLUMNS)
        for (int half = 0; half < COLUMNS; half += 16) {
            __m512 rest = _mm512_loadu_ps(x + c + half);
            for (int part = 0; part < num_parts; part++) {
                const __m256i rounded = (__m256i)_mm512_cvtneps_pbh(rest);
                uint16_t *at = to + (c / COLUMNS * num_parts + part) * TILE_NUMBERS + half;
                _mm256_storeu_si256((__m256i *)at, rounded);
                rest -= (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(rounded), 16);
            }
        }
}

/* Tile registers: 0 to 3 sums, 4 and 5 W, 6 and 7 x. */
typedef struct {
    uint8_t palette, start, unused[14];
    uint16_t bytes[16]; /* of a row */
    uint8_t rows[16];
} TileShapes;
#define SHAPES(count, x_bytes)                                                             \
    {.palette = 1, .bytes = {64, 64, 64, 64, 64, 64, x_bytes, x_bytes},                    \
     .rows = {count, count, count, count, x_bytes / 4, x_bytes / 4, count, count}}
static const TileShapes GROUPS = SHAPES(16, GROUP), HALF_GROUPS = SHAPES(16, GROUP / 2);
static const TileShapes WHOLE_ROWS[] = { /* of 1 to 16 rows of x */
    SHAPES(1, 64), SHAPES(2, 64),  SHAPES(3, 64),  SHAPES(4, 64),  SHAPES(5, 64),  SHAPES(6, 64),  SHAPES(7, 64),
    SHAPES(8, 64), SHAPES(9, 64),  SHAPES(10, 64), SHAPES(11, 64), SHAPES(12, 64), SHAPES(13, 64), SHAPES(14, 64),
    SHAPES(15, 64), SHAPES(16, 64),
};

static _Thread_local const TileShapes *loaded;

/* Loading shapes takes as long as ten products of tiles. */
AMX static void use_shapes(const TileShapes *shapes) {
    if (loaded == shapes) return;
    __asm__ volatile("ldtilecfg %0" : : "m"(*shapes)); /* the intrinsic of gcc names only 8 bytes of it */
    loaded = shapes;
}

AMX void end_products(void) {
    if (loaded) _tile_release();
    loaded = NULL;
}

static const uint16_t *numbers_of(Place place) {
    return (const uint16_t *)place.w->data + place.tile * (int64_t)place.w->columns * TILE;
}

INLINE void fetch_ahead(const uint16_t *w) {
    for (int i = 0; i < TILE_NUMBERS; i += STRIDE / 2) __builtin_prefetch(w + AHEAD + i);
}

/* Add the parts of 16 rows of x, times one or two tiles of W. */
#define ADD_PARTS(sum, other_sum, register_of_x, from)                    \
    for (int part = 0; part < num_parts; part++) {                        \
        _tile_loadd(register_of_x, (from) + part * TILE_NUMBERS, STRIDE); \
        _tile_dpbf16ps(sum, register_of_x, 4);                            \
        if (num > 1) _tile_dpbf16ps(other_sum, register_of_x, 5);         \
    }

/* Sums 0 and 1 are of 16 rows of x with each of two tiles, 2 and 3 those of the next 16 rows. */
AMX INLINE void multiply(const Place places[], int num, const Inputs *in, const int num_parts, int first, int count,
                         float y[][MOST_ROWS][TILE]) {
    const int64_t row_tile = (int64_t)in->columns * ROWS * num_parts;
    use_shapes(&WHOLE_ROWS[count < ROWS ? count - 1 : ROWS - 1]);
    for (int m = 0; m < count; m += 2 * ROWS) {
        const uint16_t *x = in->parts + (first + m) / ROWS * row_tile;
        const uint16_t *w = numbers_of(places[0]), *other_w = num > 1 ? numbers_of(places[1]) : NULL;
        const int more = count - m > ROWS;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int c = 0; c < in->columns; c += COLUMNS, w += TILE_NUMBERS, x += num_parts * TILE_NUMBERS) {
            if (m == 0) fetch_ahead(w);
            _tile_loadd(4, w, STRIDE);
            if (num > 1) {
                if (m == 0) fetch_ahead(other_w);
                _tile_loadd(5, other_w, STRIDE);
                other_w += TILE_NUMBERS;
            }
            ADD_PARTS(0, 1, 6, x)
            if (more) ADD_PARTS(2, 3, 7, x + row_tile)
        }
        _tile_stored(0, y[0][m], STRIDE);
        if (num > 1) _tile_stored(1, y[1][m], STRIDE);
        if (more) _tile_stored(2, y[0][m + ROWS], STRIDE);
        if (more && num > 1) _tile_stored(3, y[1][m + ROWS], STRIDE);
    }
}

AMX void amx_products(const Place places[], int num, const Inputs *in, int first, int count,
                      float y[][MOST_ROWS][TILE]) {
    if (in->num_parts == 1)
        multiply(places, num, in, 1, first, count, y);
    else
        multiply(places, num, in, MOST_PARTS, first, count, y);
}

/* For each of 16 rows: gcc does not keep an array of sums in registers. */
#define EACH_ROW(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13) X(14) X(15)

/* Add the products of groups with 16 rows of x to y: of two groups, or of the halves of one, at a time. While this unit
 * is at work the others compute one vector per cycle, which limits this loop. */
AMX INLINE void add_groups(const Group *w, int groups, const Rounded *x, const int by_16, const int has_minima,
                           float y[][TILE]) {
    _Alignas(64) static const int32_t zeros[ROWS][TILE] = {[0 ... ROWS - 1] = {[0 ... TILE - 1] = INT_ZERO}};
    _Alignas(64) float products[2][ROWS][TILE];
#define LOAD_SUM(m) wide sum##m = wide_load(y[m]);
    EACH_ROW(LOAD_SUM)
    for (int g = 0; g < groups; g += by_16 ? 1 : 2, w += by_16 ? 1 : 2, x += by_16 ? 1 : 2) {
        const Group *next_w = by_16 ? w : w + 1;
        const Rounded *next_x = by_16 ? x : x + 1;
        const int two = by_16 || g + 1 < groups;
        _tile_loadd(0, zeros, STRIDE);
        _tile_loadd(4, w->part, STRIDE);
        _tile_loadd(6, x->codes, GROUP);
        _tile_dpbssd(0, 6, 4);
        if (two) {
            _tile_loadd(1, zeros, STRIDE);
            _tile_loadd(5, &next_w->part[by_16 ? 4 : 0], STRIDE);
            _tile_loadd(7, next_x->codes[0] + (by_16 ? 16 : 0), GROUP);
            _tile_dpbssd(1, 7, 5);
        }
        _tile_stored(0, products[0], STRIDE);
        if (two) _tile_stored(1, products[1], STRIDE);
#define ADD_MINIMUM(m) sum##m = wide_multiply_add(sum##m, minimum, wide_splat(minus_sums[m]));
#define ADD_PRODUCT(m) \
    sum##m = wide_multiply_add(sum##m, scaled(wide_load(product[m]), scale, zero), wide_splat(scales[m]));
#define ADD_GROUP(w, x, which)                                                   \
    {                                                                            \
        const float *minus_sums = (x)->minus_sums, *scales = (x)->scales;        \
        const float(*product)[TILE] = (const float(*)[TILE])products[which];     \
        const Scales *s = &(w)->scales;                                          \
        const wide minimum = s->minimum;                                         \
        const int first = by_16 && which == 0;                                   \
        const wide scale = first ? minimum : s->scale;                           \
        const wide zero = first ? minus_zero_of(minimum) : s->minus_zero;        \
        if (has_minima) {                                                        \
            EACH_ROW(ADD_MINIMUM)                                                \
        }                                                                        \
        EACH_ROW(ADD_PRODUCT)                                                    \
    }
        ADD_GROUP(w, x, 0)
        if (two) ADD_GROUP(next_w, next_x, 1)
    }
#define STORE_SUM(m) wide_store(y[m], sum##m);
    EACH_ROW(STORE_SUM)
}

AMX void amx_add_groups(const Matrix *w, const Group *panel, int groups, const Rounded *x, int64_t x_groups, int count,
                        float y[][TILE]) {
    use_shapes(has_two_scales(w) ? &HALF_GROUPS : &GROUPS);
    for (int m = 0; m < count; m += ROWS, x += x_groups) {
        if (has_two_scales(w))
            add_groups(panel, groups, x, 1, 0, y + m);
        else if (has_minima(w))
            add_groups(panel, groups, x, 0, 1, y + m);
        else
            add_groups(panel, groups, x, 0, 0, y + m);
    }
}

#endif
