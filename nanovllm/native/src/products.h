/* Products with a weight matrix, y = x W^T + b, of rows of x that are floats or int8 with a scale per 32 columns. */
#pragma once
#include <stdint.h>
#include "floats.h"

enum { INT4 = FLOAT16 + 1, INT8, INT8_BY_16, FP4 }; /* the packed types of a matrix; FP4 is MXFP4 */
enum { GROUP = 32, STRIP = LANES };            /* packed: columns that share a scale of x; rows of W in one vector */
enum { TILE = 16, MOST_TILES = 2, MOST_ROWS = 64 }; /* of a product: rows of a tile of W, tiles and rows of x at most */
enum { BLOCK = LANES == 16 ? 8 : 4 };               /* rows of x whose sums are in registers */
enum { MOST_PARTS = 3 };                       /* numbers of bfloat16 whose sum is one of x, for AMX */
enum { PANEL = 192 };                          /* columns of a tile that are widened at a time, for the L1 cache */

typedef struct {
    int32_t type, rows, columns;
    int32_t half_scales;      /* whether scales and minima are float16, else float32 */
    int32_t groups_per_scale; /* groups of GROUP columns that share a scale, and a minimum */
    const void *data;     /* dense: in tiles of 16 rows, see pack. Packed: in strips */
    const void *scales;   /* packed: [strip][scale of a row][row of the strip]; INT8_BY_16 has two scales per group */
    const void *minima;   /* w = q * scale - minimum; NULL = none */
    const float *bias;    /* NULL = none */
} Matrix;

/* A group of columns of LANES rows of x: x = code * scale. */
typedef struct {
    int8_t codes[LANES][GROUP];
    float scales[LANES], minus_sums[LANES]; /* minus_sums: of code * scale, times -1 */
#if defined(__AVX512F__)
    int32_t zeros[2][LANES]; /* INT_ZERO minus what packed.c adds to W times the sum of the codes, and of the last 16 */
#endif
} Rounded;

typedef struct {
    const float *x;         /* [rows][columns] */
    const Rounded *rounded; /* [rows / LANES][columns / GROUP], for packed matrices */
    const uint16_t *parts;  /* [rows / 16][columns / 32][num_parts][16][32] in bfloat16, for AMX */
    int rows, columns, num_parts;
} Inputs;

/* Rows TILE * tile .. TILE * tile + 15 of W. */
typedef struct {
    const Matrix *w;
    int tile;
} Place;

/* Columns of a tile in float32, and those that are needed next: they are widened during a product. */
typedef struct {
    float numbers[2][PANEL * TILE];
    int current;
    const void *held; /* what numbers[current] were; NULL = nothing */
} Panels;

/* The outputs of `num` tiles, at most MOST_TILES, for `count` (1 to MOST_ROWS) rows of x from `first`, a multiple of
 * MOST_ROWS, into y[tile][row][output]; what is past the last row of x or W is undefined. The order of additions
 * depends on neither `num` nor `count`. Who calls for several products says which tile is next, hands on `panels`,
 * which hold nothing at first, and calls end_products after the last. */
void product_tiles(const Place places[], int num, Place next, const Inputs *in, int first, int count, Panels *panels,
                   float y[][MOST_ROWS][TILE]);
void end_products(void);
void dense_products(const Place places[], int num, Place next, const Inputs *in, int first, int count, Panels *panels,
                    float y[][MOST_ROWS][TILE]);
void amx_products(const Place places[], int num, const Inputs *in, int first, int count,
                  float y[][MOST_ROWS][TILE]);
void packed_product(const Matrix *w, const Inputs *in, int tile, int first, int count, float y[][TILE]);

/* Twice the numbers of FP4, whose scales are halved. */
static const int8_t fp4_codes[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

/* Round a row of x, the `row`th of LANES that are together. */
void round_row(const float *x, int columns, Rounded *rounded, int row);

/* Whether there is the matrix unit of x86 (AMX), and whether products with a matrix run on it. */
#if defined(__AVX512VNNI__) && (__clang_major__ >= 12 || (__GNUC__ >= 11 && !defined(__clang__)))
#define KNOWS_AMX 1
extern int have_amx;
#else
#define KNOWS_AMX 0
enum { have_amx = 0 };
#endif
int uses_amx(const Matrix *w);
/* Split columns of row `row` of x, from column `first` on, a multiple of 32, into parts for it: 1, which rounds them to
 * bfloat16, or 3, which is exact. */
void split_row(const float *x, int first, int columns, int all_columns, uint16_t *parts, int num_parts, int row);

/* Row `row` of W in float32, and `count` rows of it. */
void matrix_row(const Matrix *w, int row, float *out);
void matrix_rows(const Matrix *w, const int64_t *rows, int64_t count, float *out);

/* A weight in the order in which products read it: [rows][groups][items] of `size` bytes (2 or 4), where a group begins
 * every `stride` bytes, as [strip of `together` rows][group][item][row]. Dense: an item is a number, or two columns in
 * bfloat16, and TILE rows are together. Packed: an item is a scale, or the codes of four columns, and STRIP rows are
 * together. Rows after the last are not written. */
void pack(const uint8_t *from, int rows, int groups, int stride, int items, int size, int together, uint8_t *out);

/* Groups of 4-bit codes, with an even column in the low half of a byte and the next one in its high half: columns 0 to
 * 15 become the low halves of the bytes that hold columns 16 to 31, as in a GGUF file. */
void order_halves(const uint8_t *codes, int64_t num_groups, uint8_t *out);

static inline int has_4_bits(int type) { return type == INT4 || type == FP4; }
static inline int group_bytes(int type) { return STRIP * GROUP / (has_4_bits(type) ? 2 : 1); } /* of a strip */
static inline int is_packed(const Matrix *w) { return w->type >= INT4; }
/* What a product reads instead of floats: bits of a set. */
enum { ROUNDED = 1, SPLIT = 2 };
static inline int form_of(const Matrix *w) { return is_packed(w) ? ROUNDED : uses_amx(w) ? SPLIT : 0; }
static inline int num_tiles(const Matrix *w) { return (w->rows + TILE - 1) / TILE; }
/* What a dense tile is read from. */
static inline const void *tile_data(Place p) {
    return (const char *)p.w->data + (int64_t)p.tile * p.w->columns * TILE * (p.w->type == FLOAT32 ? 4 : 2);
}
/* How many columns are widened at a time: all columns in equal parts where they can be so divided. */
static inline int64_t panel_columns(int64_t columns) {
    for (int64_t parts = (columns + PANEL - 1) / PANEL, i = parts; i < 2 * parts; i++)
        if (columns % (4 * i) == 0) return columns / i;
    return PANEL;
}

/* Call a function whose first argument, the number of rows of x, at most BLOCK, is a constant. */
#if defined(__AVX512F__)
#define MORE_COUNTS(function, ...)               \
    case 4: function(4, __VA_ARGS__); break;     \
    case 5: function(5, __VA_ARGS__); break;     \
    case 6: function(6, __VA_ARGS__); break;     \
    case 7: function(7, __VA_ARGS__); break;
#else
#define MORE_COUNTS(function, ...)
#endif
#define BY_COUNT(count, function, ...)               \
    switch (count) {                                 \
        case 1: function(1, __VA_ARGS__); break;     \
        case 2: function(2, __VA_ARGS__); break;     \
        case 3: function(3, __VA_ARGS__); break;     \
        MORE_COUNTS(function, __VA_ARGS__)           \
        default: function(BLOCK, __VA_ARGS__);       \
    }
