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
                else memcpy(to, from + 2 * i, 2);
    }
}

void order_halves(const uint8_t *codes, int64_t num_groups, uint8_t *out) {
    for (int64_t g = 0; g < num_groups; g++, codes += GROUP / 2, out += GROUP / 2)
        for (int i = 0; i < 8; i++) { /* byte i has columns 2 i and 2 i + 1 */
            out[2 * i] = (uint8_t)((codes[i] & 15) | codes[i + 8] << 4);
            out[2 * i + 1] = (uint8_t)(codes[i] >> 4 | (codes[i + 8] & 0xF0));
        }
}

static float number_at(const void *numbers, int64_t index, int type) {
    return wide_load_as(numbers, index / LANES * LANES, type)[index % LANES];
}

static void dense_row(const Matrix *w, int row, float *out) {
    const void *tile = tile_data((Place){w, row / TILE});
    const int together = w->type == BFLOAT16 ? 2 : 1; /* columns side by side */
    for (int64_t c = 0; c < w->columns; c++)
        out[c] = number_at(tile, (c / together * TILE + row % TILE) * together + c % together, w->type);
}

static void packed_row(const Matrix *w, int row, float *out) {
    const int groups = w->columns / GROUP, lane = row % STRIP, group_size = group_bytes(w->type);
    const int size = (w->type == INT8_BY_16 ? 16 : GROUP) * w->groups_per_scale; /* columns that share a scale */
    const int scale_type = w->half_scales ? FLOAT16 : FLOAT32;
    const uint8_t *strip = (const uint8_t *)w->data + (int64_t)(row / STRIP) * groups * group_size;
    for (int c = 0; c < w->columns; c++) {
        const int i = c % (has_4_bits(w->type) ? 16 : GROUP);
        const uint8_t byte = strip[c / GROUP * group_size + i / 4 * STRIP * 4 + lane * 4 + i % 4];
        float code = (int8_t)byte;
        if (has_4_bits(w->type)) {
            const int half = c % GROUP < 16 ? byte & 15 : byte >> 4;
            code = w->type == FP4 ? fp4_codes[half] : (float)half;
        }
        const int64_t at = ((int64_t)(row / STRIP) * (w->columns / size) + c / size) * STRIP + lane;
        const float minimum = w->minima ? number_at(w->minima, at, scale_type) : 0.0f;
        out[c] = code * number_at(w->scales, at, scale_type) - minimum;
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
