/* Products with packed weights. A group of columns of a strip of W is unpacked into registers and multiplied with a few
 * rows of x as bytes. For many rows some groups at a time are unpacked into memory, and multiplied with all of them:
 * with AVX512 on the matrix unit (AMX), where there is one. All add in the same order. */
#include "packed.h"

#if HAVE_SIMD

enum { PANEL_GROUPS = LANES == 16 ? 16 : 48 }; /* groups of a strip that are unpacked at a time, for the L1 cache */
enum { SCALES = 32 };                          /* of a row that are brought to float32 at a time, for the same */

/* The forms of codes; see Matrix. */
enum { BITS_4, TABLE, BITS_5, BITS_6, BITS_8 };
#define BY_FORM(w, function, ...)                                    \
    switch ((w)->bits) {                                             \
        case 4:                                                      \
            if ((w)->table) function(TABLE, w, __VA_ARGS__);         \
            else function(BITS_4, w, __VA_ARGS__);                   \
            break;                                                   \
        case 5: function(BITS_5, w, __VA_ARGS__); break;             \
        case 6: function(BITS_6, w, __VA_ARGS__); break;             \
        default: function(BITS_8, w, __VA_ARGS__);                   \
    }

INLINE int bits_of(const int form) { return form == BITS_8 ? 8 : form == BITS_6 ? 6 : form == BITS_5 ? 5 : 4; }

/* Whether the instruction multiplies signed codes, and what is added to them where it wants unsigned ones. */
#if defined(__ARM_FEATURE_DOTPROD)
enum { AS_SIGNED = 1, EXCESS = 0 };
#elif defined(__AVX512VNNI__)
enum { AS_SIGNED = 0, EXCESS = 128 };
#else
enum { AS_SIGNED = 0, EXCESS = 0 };
#endif

/* --- scales --- */

INLINE int groups_together(const Matrix *w) { return has_two_scales(w) ? 1 : w->groups_per_scale; }

/* Scales or minima of the rows of a strip. Those in float32 without their last two bits, which small integers in units
 * and float16 do not need: so that the product with ZERO is exact. */
INLINE wide load_numbers(const void *numbers, int64_t index, const int type) {
    if (type == SMALL_INTEGER) return wide_load_small((const int8_t *)numbers + index);
    if (type == FLOAT16) return wide_load_halves((const uint16_t *)numbers + index);
    return (wide)((uwide)wide_load((const float *)numbers + index) & ~3u);
}

enum { NO_MINIMA, STORED, ZEROS, MIDDLE }; /* minima: in the type of the scales, or an integer times the scale */

INLINE void scales_as(const Matrix *w, int64_t first, int num, char *to, int stride, const int type, const int two,
                      const int minima) {
    wide unit = wide_splat(1), minimum_unit = unit;
    for (int64_t i = first; i < first + num; i++, to += stride) {
        const int64_t at = i * STRIP;
        wide scale = load_numbers(w->scales, two ? 2 * at + STRIP : at, type), minimum = scale;
        if (two) minimum = load_numbers(w->scales, 2 * at, type);
        if (minima == STORED) minimum = load_numbers(w->minima, at, type);
        if (type == SMALL_INTEGER) {
            if (i == first || (i & (w->groups_per_unit - 1)) == 0) {
                const uint16_t *units = w->units + i / w->groups_per_unit * (two ? STRIP : 2 * STRIP);
                unit = minimum_unit = wide_load_halves(units);
                if (!two) minimum_unit = wide_load_halves(units + STRIP);
            }
            scale *= unit, minimum *= minimum_unit;
        }
        if (minima == ZEROS) minimum = scale * load_numbers(w->minima, at, SMALL_INTEGER);
        if (minima == MIDDLE) minimum = scale * wide_splat(w->bits == 4 ? 8 : 16);
        *(Scales *)to = (Scales){scale, minimum, minus_zero_of(scale)};
    }
}

/* `num` of the scales of all strips, from number `first` on, `stride` bytes apart. */
static void read_scales(const Matrix *w, int64_t first, int num, Scales *out, int stride) {
#define AS(type, two, minima) scales_as(w, first, num, (char *)out, stride, type, two, minima)
#define BY_MINIMA(type)                                        \
    do {                                                       \
        if (!has_minima(w)) AS(type, 0, NO_MINIMA);            \
        else if (!w->minima) AS(type, 0, MIDDLE);              \
        else if (w->minimum_type != type) AS(type, 0, ZEROS);  \
        else AS(type, 0, STORED);                              \
    } while (0)
    if (has_two_scales(w)) AS(SMALL_INTEGER, 1, NO_MINIMA);
    else if (w->units) AS(SMALL_INTEGER, 0, STORED);
    else if (w->scale_type == FLOAT16) BY_MINIMA(FLOAT16);
    else BY_MINIMA(FLOAT32);
}

/* --- codes --- */

/* The numbers of a table that 4-bit codes stand for. */
INLINE Codes look_up(s8x16 table, Codes codes) {
#if defined(__ARM_FEATURE_DOTPROD)
    return (Codes)vqtbl1q_s8((int8x16_t)table, (uint8x16_t)codes);
#else
    return (Codes)X86(shuffle_epi8)(in_all_quarters(table), (Ints)codes);
#endif
}

/* Item `i` of a group. Begin to fetch a later one from memory: the same of the next strip, or one that is a fixed
 * distance ahead. */
INLINE Codes load_codes(const uint8_t *codes, int i, int64_t ahead) {
    Codes found;
    memcpy(&found, codes + i * sizeof(Codes), sizeof(Codes));
    if (i * sizeof(Codes) % 64 == 0) __builtin_prefetch(codes + i * sizeof(Codes) + ahead);
    return found;
}

/* Add the high bits of codes, `bits` of each, to the low halves. */
INLINE void add_high_bits(const uint8_t *codes, const int bits, int64_t ahead, Codes part[8]) {
    Codes high[2];
    EACH(i, bits) high[i] = load_codes(codes, 4 + i, ahead);
    EACH(i, 8) {
        const uwide here = (uwide)high[i * bits / 8];
        const int shift = i * bits % 8 - 4;
        part[i] = (Codes)or_masked((uwide)part[i], shift < 0 ? here << -shift : here >> shift,
                                   (bits == 1 ? 0x01010101u : 0x03030303u) << 4);
    }
}

/* Where the codes of a strip are, and what unpacks them: in registers, because the compiler expects that codes are
 * unpacked into any memory. */
typedef struct {
    const uint8_t *codes; /* of the next group */
    int64_t ahead;
    s8x16 table;
} Reader;

INLINE Reader reader_of(const int form, const Matrix *w, int strip, int group) {
    const int64_t strip_bytes = (int64_t)(w->columns / GROUP) * group_bytes(w);
    return (Reader){
        .codes = (const uint8_t *)w->data + strip * strip_bytes + (int64_t)group * group_bytes(w),
        .ahead = LANES == 16 ? 8192 : strip_bytes,
        .table = form == TABLE ? load_bytes(w->table) : (s8x16){0},
    };
}

/* Unpack the next group. Codes of 6 bits are 32 too large and others without minima are too large by EXCESS, or
 * `as_signed` as they should be. */
INLINE void unpack(const int form, Reader *reader, const int as_signed, Codes part[8]) {
    const uint8_t *codes = reader->codes;
    const int64_t ahead = reader->ahead;
    const int8_t excess = as_signed ? 0 : (int8_t)EXCESS;
    reader->codes += bits_of(form) * sizeof(Codes);
    if (form == BITS_8) {
        EACH(i, 8) part[i] = load_codes(codes, i, ahead) ^ excess;
        return;
    }
    EACH(i, 4) {
        part[i + 4] = load_codes(codes, i, ahead);
        part[i] = part[i + 4] & 15;
        part[i + 4] = (Codes)((UnsignedCodes)part[i + 4] >> 4);
    }
    if (form == BITS_5) add_high_bits(codes, 1, ahead, part);
    if (form == BITS_6) add_high_bits(codes, 2, ahead, part);
    if (form == BITS_6 && as_signed) EACH(i, 8) part[i] -= 32;
    if (form == TABLE) EACH(i, 8) part[i] = look_up(reader->table ^ excess, part[i]);
}

/* --- products --- */

/* What a sum of products begins with: INT_ZERO minus the products of what codes of W are too large by. `which`: of all
 * columns of a group, or 1 the first half, 2 the other. */
INLINE int32_t zero_of(const int form, const Rounded *x, const int which, int row) {
#if !defined(__ARM_FEATURE_DOTPROD)
    const int32_t all = x->zeros[0][row] - INT_ZERO, last = x->zeros[1][row] - INT_ZERO;
    if (form == BITS_6) return INT_ZERO + (which == 2 ? last : all / 4 - last);
    if (EXCESS && (form == BITS_8 || form == TABLE))
        return INT_ZERO + (which == 0 ? all : which == 1 ? all - 4 * last : 4 * last);
#endif
    (void)form, (void)x, (void)which, (void)row;
    return INT_ZERO;
}

/* `zero` plus the products of codes of W, of 4 * `num` columns, with those of a row of x. */
#if defined(__ARM_FEATURE_DOTPROD)
INLINE wide dot_codes(const int form, const Codes *w, const int num, const int8_t *x, int32_t zero) {
    s32x4 sum = {zero, zero, zero, zero};
    (void)form;
    EACH(i, num / 4) {
        const s8x16 codes = load_bytes(x + 16 * i);
        sum = DOT_LANE(sum, w[4 * i], codes, 0);
        sum = DOT_LANE(sum, w[4 * i + 1], codes, 1);
        sum = DOT_LANE(sum, w[4 * i + 2], codes, 2);
        sum = DOT_LANE(sum, w[4 * i + 3], codes, 3);
    }
    return (wide)sum;
}
#else
INLINE wide dot_codes(const int form, const Codes *w, const int num, const int8_t *x, int32_t zero) {
    /* of so many items 16 bits hold the sum of the products of two columns; 0: and W is signed */
    const int together = form == BITS_4 ? 8 : form == BITS_5 ? 4 : form == BITS_6 ? 2 : 0;
    const Ints ones = X86(set1_epi16)(1);
    Ints sum = X86(set1_epi32)(zero), pairs = ones ^ ones;
    EACH(i, num) {
        int32_t columns;
        memcpy(&columns, x + 4 * i, 4);
        Ints four = X86(set1_epi32)(columns), codes = (Ints)w[i];
#if defined(__AVX512VNNI__)
        sum = _mm512_dpbusd_epi32(sum, codes, four);
#else
        if (together == 0) four = with_signs(four, codes), codes = X86(abs_epi8)(codes);
        pairs = X86(add_epi16)(pairs, X86(maddubs_epi16)(codes, four));
        if (together == 0 || (i + 1) % together == 0) {
            sum = X86(add_epi32)(sum, X86(madd_epi16)(pairs, ones));
            pairs = ones ^ ones;
        }
#endif
    }
    return (wide)sum;
}
#endif

#if defined(__AVX512F__)
#define EACH_ROW(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7)
#else
#define EACH_ROW(X) X(0) X(1) X(2) X(3)
#endif

/* Add the products of a group, without minima, with `count` rows of x from row `row` of LANES on. */
INLINE void add_products(const int count, const int form, const Codes *w, const Scales *s,
                         const Rounded *x, int row, wide sum[BLOCK]) {
    const Lanes scales = load_lanes(x->scales + row);
    const wide first_scale = s->minimum, first_minus_zero = minus_zero_of(first_scale);
#define ADD_ROW(m)                                                                                            \
    if (count > m) {                                                                                          \
        const int8_t *codes = x->codes[row + m];                                                              \
        if (form == BITS_6) {                                                                                     \
            const wide first = dot_codes(form, w, 4, codes, zero_of(form, x, 1, row + m));                    \
            const wide last = dot_codes(form, w + 4, 4, codes + 16, zero_of(form, x, 2, row + m));            \
            sum[m] = WIDE_ADD_LANE(sum[m], scaled(first, first_scale, first_minus_zero), scales, m);          \
            sum[m] = WIDE_ADD_LANE(sum[m], scaled(last, s->scale, s->minus_zero), scales, m);                 \
        } else {                                                                                              \
            const wide all = dot_codes(form, w, 8, codes, zero_of(form, x, 0, row + m));                      \
            sum[m] = WIDE_ADD_LANE(sum[m], scaled(all, s->scale, s->minus_zero), scales, m);                  \
        }                                                                                                     \
    }
    EACH_ROW(ADD_ROW)
}

/* Add the products of a group with `count` rows of x. */
INLINE void add_group(const int count, const int form, const int minima, const Codes part[8], const Scales *scales,
                      const Rounded *x, int row, wide sum[BLOCK]) {
    if (form == BITS_4 || form == BITS_5 || (form == BITS_8 && minima)) {
        const Lanes minus_sums = load_lanes(x->minus_sums + row);
#define ADD_MINIMUM(m) if (count > m) sum[m] = WIDE_ADD_LANE(sum[m], scales->minimum, minus_sums, m);
        EACH_ROW(ADD_MINIMUM)
    }
    add_products(count, form, part, scales, x, row, sum);
}

/* Add the products of the groups of `num` scales with at most BLOCK rows of x, from row `row` of LANES on, to y: each
 * group is unpacked into registers. */
INLINE void direct_product(const int count, const int form, const Matrix *w, Reader reader, const Scales *scales,
                           int num, const Rounded *x, int row, float y[][TILE]) {
    const int minima = has_minima(w), together = groups_together(w);
    wide sum[BLOCK];
    EACH(m, count) sum[m] = wide_load(y[m]);
    for (; num > 0; num--, scales++)
        for (int g = together; g > 0; g--, x++) {
            Codes part[8];
            unpack(form, &reader, AS_SIGNED, part);
            add_group(count, form, minima, part, scales, x, row, sum);
        }
    EACH(m, count) wide_store(y[m], sum[m]);
}

#if !defined(__AVX512F__)
/* The same of unpacked groups. */
INLINE void panel_product(const int count, const int form, const Matrix *w, const Group *panel, int groups,
                          const Rounded *x, int row, float y[][TILE]) {
    const int minima = has_minima(w);
    wide sum[BLOCK];
    EACH(m, count) sum[m] = wide_load(y[m]);
    for (; groups > 0; groups--, panel++, x++) add_group(count, form, minima, panel->part, &panel->scales, x, row, sum);
    EACH(m, count) wide_store(y[m], sum[m]);
}
#endif

#if defined(__ARM_FEATURE_DOTPROD)
/* The same for BLOCK rows in assembly. Compilers copy INT_ZERO and minus_zero from a register to where they are added
 * to, which takes a pipe of arithmetic: here they are loaded each time. The sums of codes of the rows are computed in
 * turn, because each waits for the one before it. v0 to v7: parts. v8: scale, v9: minimum. v10, v11: scales and
 * minus_sums of x. v12 to v15: sums. v16 to v19: sums of codes. v20 to v27: codes of x. v28 to v31: scaled sums. */
static const s32x4 zeros = {INT_ZERO, INT_ZERO, INT_ZERO, INT_ZERO};
#define DOT_ROWS(part, a, b, c, d, lane)                                                                          \
    "sdot v16.4s, v" part ".16b, v" a ".4b[" lane "]\nsdot v17.4s, v" part ".16b, v" b ".4b[" lane "]\n"         \
    "sdot v18.4s, v" part ".16b, v" c ".4b[" lane "]\nsdot v19.4s, v" part ".16b, v" d ".4b[" lane "]\n"
#define ADD_ROWS(a, b, c, d, scales)                                                                              \
    "fmla v12.4s, v" a ".4s, v" scales ".s[0]\nfmla v13.4s, v" b ".4s, v" scales ".s[1]\n"                       \
    "fmla v14.4s, v" c ".4s, v" scales ".s[2]\nfmla v15.4s, v" d ".4s, v" scales ".s[3]\n"
#define BLOCK_PRODUCT(add_minima)                                                                                 \
    __asm__ volatile(                                                                                             \
        "ld1 {v12.4s}, [%[y]], %[y_stride]\nld1 {v13.4s}, [%[y]], %[y_stride]\n"                                 \
        "ld1 {v14.4s}, [%[y]], %[y_stride]\nld1 {v15.4s}, [%[y]]\n"                                              \
        "1: ldp q0, q1, [%[w]]\nldp q20, q21, [%[x]]\nldr q16, [%[zero]]\n"                                      \
        "ldp q22, q23, [%[x], #32]\nldr q17, [%[zero]]\nldp q24, q25, [%[x], #64]\nldr q18, [%[zero]]\n"        \
        "ldp q26, q27, [%[x], #96]\nldr q19, [%[zero]]\nldp q2, q3, [%[w], #32]\n"                               \
        "ldp q4, q5, [%[w], #64]\nldp q6, q7, [%[w], #96]\n"                                                     \
        DOT_ROWS("0", "20", "22", "24", "26", "0") DOT_ROWS("1", "20", "22", "24", "26", "1")                     \
        "ldp q10, q11, [%[x], #128]\nldp q8, q9, [%[w], #128]\n"                                                 \
        DOT_ROWS("2", "20", "22", "24", "26", "2") DOT_ROWS("3", "20", "22", "24", "26", "3")                     \
        "ldr q28, [%[w], #160]\nldr q29, [%[w], #160]\nldr q30, [%[w], #160]\nldr q31, [%[w], #160]\n"           \
        DOT_ROWS("4", "21", "23", "25", "27", "0") add_minima DOT_ROWS("5", "21", "23", "25", "27", "1")          \
        DOT_ROWS("6", "21", "23", "25", "27", "2") DOT_ROWS("7", "21", "23", "25", "27", "3")                     \
        "fmla v28.4s, v8.4s, v16.4s\nfmla v29.4s, v8.4s, v17.4s\n"                                               \
        "fmla v30.4s, v8.4s, v18.4s\nfmla v31.4s, v8.4s, v19.4s\n" ADD_ROWS("28", "29", "30", "31", "10")        \
        "add %[x], %[x], %[x_size]\nadd %[w], %[w], %[w_size]\nsubs %w[groups], %w[groups], #1\nb.gt 1b\n"       \
        "st1 {v15.4s}, [%[y]]\nsub %[y], %[y], %[y_stride]\nst1 {v14.4s}, [%[y]]\nsub %[y], %[y], %[y_stride]\n" \
        "st1 {v13.4s}, [%[y]]\nsub %[y], %[y], %[y_stride]\nst1 {v12.4s}, [%[y]]\n"                              \
        : [w] "+r"(panel), [x] "+r"(x), [y] "+r"(y), [groups] "+r"(groups)                                        \
        : [y_stride] "r"(sizeof(y[0])), [x_size] "i"(sizeof(Rounded)), [w_size] "i"(sizeof(Group)),               \
          [zero] "r"(&zeros)                                                                                      \
        : "cc", "memory", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v12", "v13", \
          "v14", "v15", "v16", "v17", "v18", "v19", "v20", "v21", "v22", "v23", "v24", "v25", "v26", "v27",       \
          "v28", "v29", "v30", "v31")

INLINE void block_product(const Group *panel, const Rounded *x, int groups, const int has_minima, float y[][TILE]) {
    if (has_minima)
        BLOCK_PRODUCT(ADD_ROWS("9", "9", "9", "9", "11"));
    else
        BLOCK_PRODUCT("");
}
#endif

/* Unpack groups of a strip from number `first` on. */
INLINE void fill_panel(const int form, const Matrix *w, int strip, int first, int groups, Group *panel) {
    const int together = groups_together(w);
    Reader reader = reader_of(form, w, strip, first);
    for (int i = 0; i < groups; i++) unpack(form, &reader, AS_SIGNED || LANES == 16, panel[i].part);
    const int64_t scale = ((int64_t)strip * (w->columns / GROUP) + first) / together;
    if (together == 1) read_scales(w, scale, groups, &panel->scales, sizeof(Group));
    for (int i = 0; i < groups && together > 1; i++)
        if (i == 0 || (first + i) % together == 0)
            read_scales(w, scale + (i + first % together) / together, 1, &panel[i].scales, 0);
        else panel[i].scales = panel[i - 1].scales;
}

/* The products of a strip with any number of rows, some groups at a time. */
INLINE void strip_product(const int form, const Matrix *w, int strip, const Inputs *in, int first, int count,
                          float y[][TILE]) {
    const int groups = w->columns / GROUP, together = groups_together(w), num_scales = groups / together;
    const Rounded *x = in->rounded + (int64_t)(first / LANES) * groups;
    for (int m = 0; m < (count + LANES - 1) / LANES * LANES; m++) wide_store(y[m], wide_splat(0));
    if (count <= BLOCK || (LANES == 16 && !have_amx)) {
        Scales scales[SCALES];
        for (int i = 0, here; i < num_scales; i += here) {
            here = num_scales - i < SCALES ? num_scales - i : SCALES;
            read_scales(w, (int64_t)strip * num_scales + i, here, scales, sizeof(Scales));
            const Reader reader = reader_of(form, w, strip, i * together);
            for (int m = 0; m < count; m += BLOCK) {
                const Rounded *rows = x + m / LANES * groups + i * together;
                BY_COUNT(count - m, direct_product, form, w, reader, scales, here, rows, m % LANES, y + m)
            }
        }
        return;
    }
    Group panel[PANEL_GROUPS];
    for (int g = 0, here; g < groups; g += here) {
        here = groups - g < PANEL_GROUPS ? groups - g : PANEL_GROUPS;
        fill_panel(form, w, strip, g, here, panel);
#if defined(__AVX512F__)
        amx_add_groups(w, panel, here, x + g, groups, count, y);
#else
        for (int m = 0; m < count; m += BLOCK) {
            const Rounded *rows = x + m / LANES * groups + g;
#if defined(__ARM_FEATURE_DOTPROD)
            if (count - m >= BLOCK && !has_two_scales(w)) {
                block_product(panel, rows, here, has_minima(w), y + m);
                continue;
            }
#endif
            BY_COUNT(count - m, panel_product, form, w, panel, here, rows, m % LANES, y + m)
        }
#endif
    }
}

void packed_product(const Matrix *w, const Inputs *in, int tile, int first, int count, float y[][TILE]) {
    for (int i = 0; i < TILE / STRIP && (tile * TILE + i * STRIP) < w->rows; i++) {
        const int strip = tile * (TILE / STRIP) + i;
        float(*out)[TILE] = (float(*)[TILE])(y[0] + i * STRIP);
        BY_FORM(w, strip_product, strip, in, first, count, out)
    }
}

void round_row(const float *x, int columns, Rounded *rounded, int row) {
    for (int g = 0; g < columns / GROUP; g++, x += GROUP, rounded++) {
        wide most = wide_splat(0);
        EACH(i, GROUP / LANES) most = wide_larger(most, wide_absolute(wide_load(x + i * LANES)));
        const float size = wide_largest_of(most);
        const wide inverse = wide_splat(size > 0 ? 127.0f / size : 0.0f);
        swide total = {0}, last = {0}; /* of all codes, and of the last 16 */
        EACH(i, GROUP / LANES) {
            const swide codes = wide_round_to_int(wide_load(x + i * LANES) * inverse);
            const Bytes narrow = __builtin_convertvector(codes, Bytes);
            memcpy(rounded->codes[row] + i * LANES, &narrow, LANES);
            total += codes;
            if (i * LANES >= 16) last += codes;
        }
        const int32_t sum = wide_sum_of_ints(total);
        rounded->scales[row] = size / 127.0f;
        rounded->minus_sums[row] = -rounded->scales[row] * (float)sum;
#if !defined(__ARM_FEATURE_DOTPROD)
        const int32_t last_sum = wide_sum_of_ints(last);
        rounded->zeros[0][row] = INT_ZERO - 128 * sum;
        rounded->zeros[1][row] = INT_ZERO - 32 * last_sum;
#endif
    }
}

#endif
