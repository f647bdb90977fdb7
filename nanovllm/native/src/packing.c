/* Packed weights in the order in which products read them. */
#include "packed.h"

#if HAVE_SIMD

int rows_of_strip(void) { return STRIP; }

static float scale_at(const Matrix *w, const void *scales, int64_t index) {
    if (!w->half_scales) return ((const float *)scales)[index];
    return load_halves((const uint16_t *)scales + index - index % 4)[index % 4];
}

void packed_row(const Matrix *w, int row, float *out) {
    const int groups = w->columns / GROUP, lane = row % STRIP, group_size = group_bytes(w->type);
    const int size = (w->type == INT8_BY_16 ? 16 : GROUP) * w->groups_per_scale; /* columns that share a scale */
    const uint8_t *strip = (const uint8_t *)w->data + (int64_t)(row / STRIP) * groups * group_size;
    for (int c = 0; c < w->columns; c++) {
        const uint8_t *group = strip + c / GROUP * group_size;
        const int i = w->type == INT4 ? c % 16 : c % GROUP;
        const uint8_t byte = group[i / 4 * STRIP * 4 + lane * 4 + i % 4];
        float code = (int8_t)byte;
        if (w->type == INT4) code = c % GROUP < 16 ? byte & 15 : byte >> 4;
        const int64_t at = ((int64_t)(row / STRIP) * (w->columns / size) + c / size) * STRIP + lane;
        out[c] = code * scale_at(w, w->scales, at) - (w->minima ? scale_at(w, w->minima, at) : 0.0f);
    }
}

/* A group of a row: 4 bytes for each 4 columns, or with 4 bits 4 bytes for 4 columns and those 16 columns later. */
static void pack_group(const uint8_t *from, int bits, uint8_t *to) {
    uint8_t halves[16];
    for (int i = 0; bits == 4 && i < 8; i++) { /* byte i has columns 2 i and 2 i + 1 */
        halves[2 * i] = (uint8_t)((from[i] & 15) | from[i + 8] << 4);
        halves[2 * i + 1] = (uint8_t)(from[i] >> 4 | (from[i + 8] & 0xF0));
    }
    const uint8_t *bytes = bits == 4 ? halves : from;
    for (int i = 0; i < GROUP * bits / 8; i += 4) memcpy(to + i * STRIP, bytes + i, 4);
}

void pack_codes(const uint8_t *codes, int rows, int columns, int bits, uint8_t *out) {
    const int64_t row_bytes = (int64_t)columns * bits / 8, group_size = GROUP * bits / 8;
    for (int row = 0; row < rows; row++) {
        const uint8_t *from = codes + row * row_bytes;
        uint8_t *strip = out + row / STRIP * STRIP * row_bytes + row % STRIP * 4;
        for (int64_t at = 0; at < row_bytes; at += group_size) pack_group(from + at, bits, strip + at * STRIP);
    }
}

static int is_finite_half(uint16_t half) { return (half & 0x7C00) != 0x7C00; }

int pack_blocks(const uint8_t *blocks, int rows, int columns, int bits, uint8_t *codes, uint16_t *scales,
                uint16_t *minima) {
    const int groups = columns / GROUP, code_bytes = GROUP * bits / 8;
    int all_finite = 1;
    for (int row = 0; row < rows; row++) {
        int64_t at = (int64_t)(row / STRIP) * groups * STRIP + row % STRIP; /* the scale of the row's first group */
        uint8_t *to = codes + (int64_t)(row / STRIP) * groups * STRIP * code_bytes + row % STRIP * 4;
        for (int g = 0; g < groups; g++, at += STRIP, to += STRIP * code_bytes, blocks += code_bytes) {
            memcpy(scales + at, blocks, 2);
            all_finite &= is_finite_half(scales[at]);
            blocks += 2;
            if (minima) {
                memcpy(minima + at, blocks, 2);
                all_finite &= is_finite_half(minima[at]);
                minima[at] ^= 0x8000; /* what the file adds, a minimum subtracts */
                blocks += 2;
            }
            for (int i = 0; i < code_bytes; i += 4) memcpy(to + i * STRIP, blocks + i, 4);
        }
    }
    return all_finite;
}

#endif
