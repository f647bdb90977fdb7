/* Products with a weight matrix, y = x W^T + b, of rows of x that are floats or int8 with a scale per 32 columns. */
#pragma once
#include <stdint.h>
#include "floats.h"

enum { PACKED = FLOAT16 + 1 };        /* the type of a matrix of integers with scales */
enum { SMALL_INTEGER = FLOAT16 + 1 }; /* the type of scales and minima of 8 bits */
enum { GROUP = 32, STRIP = LANES };            /* packed: columns that share a scale of x; rows of W in one vector */
enum { TILE = 16, MOST_TILES = 2, MOST_ROWS = 64 }; /* of a product: rows of a tile of W, tiles and rows of x at most */
enum { BLOCK = LANES == 16 ? 8 : 4 };               /* rows of x whose sums are in registers */
enum { MOST_PARTS = 3 };                       /* numbers of bfloat16 whose sum is one of x, for AMX */
enum { PANEL = 192 };                          /* columns of a tile that are widened at a time, for the L1 cache */

typedef struct {
    int32_t type, rows, columns;
    const void *data;         /* dense: in tiles of 16 rows, see pack. Packed: in strips, see pack_codes */
    const float *bias;        /* NULL = none */
    /* packed: w = (code - middle) * scale - minimum, where the middle is 0 with minima or a table, and in 8 bits.
     * Small integers as scales and minima are in units that some groups share; as minima alone in those of the scale */
    int32_t bits;             /* of a code: 4, 5, 6 or 8, which are signed */
    int32_t scale_type, minimum_type;
    int32_t groups_per_scale; /* groups of GROUP columns that share a scale, and a minimum; 0: a group has two scales */
    const int8_t *table;      /* 16 numbers that 4-bit codes stand for; NULL = themselves */
    const void *scales;       /* [strip][scale of a row][row of the strip] */
    const void *minima;       /* the same; NULL = none */
    int32_t groups_per_unit;  /* groups that share a unit: a power of two */
    const uint16_t *units;    /* [strip][unit of a row][of scales, of minima if any][row], float16; NULL = none */
} Matrix;

/* A group of columns of LANES rows of x: x = code * scale. */
typedef struct {
    int8_t codes[LANES][GROUP];
    float scales[LANES], minus_sums[LANES]; /* minus_sums: of code * scale, times -1 */
#if !defined(__ARM_FEATURE_DOTPROD)
    int32_t zeros[2][LANES]; /* INT_ZERO minus 128 times the sum of the codes, and 32 times that of the last 16 */
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

/* A weight in the order in which products read it: [rows][groups][items] of `size` bytes (1, 2 or 4), where a group
 * begins every `stride` bytes, as [strip of `together` rows][group][item][row]. Dense: an item is a number, or two
 * columns in bfloat16, and TILE rows are together. Packed: an item is a scale, and STRIP rows are together. Rows after
 * the last are not written. */
void pack(const uint8_t *from, int rows, int groups, int stride, int items, int size, int together, uint8_t *out);

/* Where codes are in the blocks of a file: all 8 bits or the low 4, and what is left. Of `together` bytes the lowest
 * bits come first, then the next ones. */
typedef struct {
    int32_t columns, bytes, bits;
    int32_t low_at, low_together, high_at, high_together;
} Blocks;

/* The codes of [rows][blocks] in strips: [strip][group][item][row], where an item has 4 bytes. In 8 bits item i is
 * columns 4 i to 4 i + 3. In fewer the first four have the low halves of these columns, and as high halves those of
 * columns 16 later. After them come the high bits of all columns: columns 4 i to 4 i + 3 have theirs side by side, each
 * in its byte. */
void pack_codes(const uint8_t *from, int rows, int blocks, const Blocks *layout, uint8_t *out);

static inline int group_bytes(const Matrix *w) { return STRIP * 4 * w->bits; } /* of a strip */
static inline int is_packed(const Matrix *w) { return w->type == PACKED; }
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
