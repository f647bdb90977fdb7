/* Weights in the order in which products read them, and their rows, which an embedding reads. */
#include "products.h"

#if HAVE_SIMD

int rows_of_strip(void) { return STRIP; }

void pack(const uint8_t *from, int rows, int groups, int stride, int items, int size, int together, uint8_t *out) {
    for (int row = 0; row < rows; row++) {
        uint8_t *to = out + ((int64_t)(row / together) * groups * items * together + row % together) * size;
        for (int g = 0; g < groups; g++, from += stride)
            for (int i = 0; i < items; i++, to += together * size)
                if (size == 4) memcpy(to, from + 4 * i, 4);
                else if (size == 2) memcpy(to, from + 2 * i, 2);
                else *to = from[i];
    }
}

/* Or `count` numbers of `bits` bits, times 1 << shift, to codes; see Blocks. */
INLINE void unpack_as(const uint8_t *from, const int bits, const int together, int count, int shift, uint8_t *codes) {
    for (int done = 0; done < count; from += together)
        for (int at = 0; at < 8; at += bits)
            for (int i = 0; i < together; i++, done++) codes[done] |= (from[i] >> at & ((1 << bits) - 1)) << shift;
}

static void unpack(const uint8_t *from, int bits, int together, int count, int shift, uint8_t *codes) {
    if (bits == 8) memcpy(codes, from, (size_t)count);
    else if (bits == 4 && together == 1) unpack_as(from, 4, 1, count, shift, codes);
    else if (bits == 4) unpack_as(from, 4, together, count, shift, codes);
    else unpack_as(from, bits, together, count, shift, codes);
}

/* The high bits of codes: in how many items, and where item `i` of 8-bit codes has its. */
static uint32_t *high_bits(uint32_t *items, int bits, int i) { return items + 4 + i * (bits - 4) / 8; }

INLINE void pack_group(const uint8_t codes[GROUP], const int bits, uint8_t *out) {
    uint32_t bytes[8], items[8] = {0};
    memcpy(bytes, codes, GROUP);
    for (int i = 0; i < 8; i++) {
        items[i % 4] |= (bytes[i] & 0x0f0f0f0f) << i / 4 * 4;
        if (bits > 4) *high_bits(items, bits, i) |= (bytes[i] >> 4 & 0x03030303) << i * (bits - 4) % 8;
    }
    for (int i = 0; i < bits; i++) memcpy(out + i * STRIP * 4, bits == 8 ? &bytes[i] : &items[i], 4);
}

static void unpack_group(const uint8_t *group, int bits, uint8_t codes[GROUP]) {
    const uint32_t mask = bits == 5 ? 0x01010101 : 0x03030303;
    uint32_t bytes[8], items[8] = {0};
    for (int i = 0; i < bits; i++) memcpy(&items[i], group + i * STRIP * 4, 4);
    for (int i = 0; i < 8; i++) {
        bytes[i] = items[i % 4] >> i / 4 * 4 & 0x0f0f0f0f;
        if (bits > 4) bytes[i] |= (*high_bits(items, bits, i) >> i * (bits - 4) % 8 & mask) << 4;
    }
    memcpy(codes, bits == 8 ? items : bytes, GROUP);
}

enum { MOST_COLUMNS = 256 }; /* of a block */

INLINE void pack_as(const int bits, const uint8_t *from, int rows, int blocks, const Blocks *layout, uint8_t *out) {
    const int groups = layout->columns / GROUP, low = bits < 8 ? 4 : 8;
    for (int row = 0; row < rows; row++) {
        uint8_t *to = out + (int64_t)(row / STRIP) * blocks * groups * bits * STRIP * 4 + row % STRIP * 4;
        for (int block = 0; block < blocks; block++, from += layout->bytes) {
            uint8_t codes[MOST_COLUMNS];
            if (bits < 8) memset(codes, 0, (size_t)layout->columns);
            unpack(from + layout->low_at, low, layout->low_together, layout->columns, 0, codes);
            if (low < bits)
                unpack(from + layout->high_at, bits - 4, layout->high_together, layout->columns, 4, codes);
            for (int g = 0; g < groups; g++, to += bits * STRIP * 4) pack_group(codes + g * GROUP, bits, to);
        }
    }
}

void pack_codes(const uint8_t *from, int rows, int blocks, const Blocks *layout, uint8_t *out) {
    switch (layout->bits) {
        case 4: pack_as(4, from, rows, blocks, layout, out); break;
        case 5: pack_as(5, from, rows, blocks, layout, out); break;
        case 6: pack_as(6, from, rows, blocks, layout, out); break;
        default: pack_as(8, from, rows, blocks, layout, out);
    }
}

static float number_at(const void *numbers, int64_t index, int type) {
    if (type == SMALL_INTEGER) return ((const int8_t *)numbers)[index];
    return wide_load_as(numbers, index / LANES * LANES, type)[index % LANES];
}

static void dense_row(const Matrix *w, int row, float *out) {
    const void *tile = tile_data((Place){w, row / TILE});
    const int together = w->type == BFLOAT16 ? 2 : 1; /* columns side by side */
    for (int64_t c = 0; c < w->columns; c++)
        out[c] = number_at(tile, (c / together * TILE + row % TILE) * together + c % together, w->type);
}

static void packed_row(const Matrix *w, int row, float *out) {
    const int groups = w->columns / GROUP, lane = row % STRIP;
    const int size = w->groups_per_scale ? w->groups_per_scale * GROUP : GROUP / 2; /* columns that share a scale */
    const int64_t first = (int64_t)(row / STRIP) * groups;                          /* group */
    for (int c = 0; c < w->columns; c++) {
        uint8_t codes[GROUP];
        if (c % GROUP == 0)
            unpack_group((const uint8_t *)w->data + (first + c / GROUP) * group_bytes(w) + lane * 4, w->bits, codes);
        const uint8_t code = codes[c % GROUP];
        const int middle = w->minima ? 0 : 1 << (w->bits - 1);
        const int number = w->table ? w->table[code] : w->bits == 8 ? (int8_t)code : code - middle;
        const int64_t at = (first * GROUP / size + c / size) * STRIP + lane;
        float scale = number_at(w->scales, at, w->scale_type);
        float minimum = w->minima ? number_at(w->minima, at, w->minimum_type) : 0.0f;
        if (w->units) {
            const int64_t unit = (first + c / GROUP) / w->groups_per_unit * (w->minima ? 2 : 1) * STRIP + lane;
            scale *= number_at(w->units, unit, FLOAT16);
            if (w->minima) minimum *= number_at(w->units, unit + STRIP, FLOAT16);
        } else if (w->minimum_type == SMALL_INTEGER) {
            minimum *= scale;
        }
        out[c] = (float)number * scale - minimum;
    }
}

void matrix_rows(const Matrix *w, const int64_t *rows, int64_t count, float *out) {
    for (int64_t i = 0; i < count; i++) matrix_row(w, (int)rows[i], out + i * w->columns);
}

void matrix_row(const Matrix *w, int row, float *out) {
    if (is_packed(w))
        packed_row(w, row, out);
    else
        dense_row(w, row, out);
}

#endif
