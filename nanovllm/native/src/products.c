#include "products.h"

#if HAVE_SIMD

static void add_bias(Place here, int count, float y[][TILE]) {
    const int at = here.tile * TILE;
    if (here.w->bias == NULL) return;
    for (int m = 0; m < count; m++)
        for (int r = 0; r < TILE && at + r < here.w->rows; r++) y[m][r] += here.w->bias[at + r];
}

void product_tiles(const Place places[], int num, Place next, const Inputs *in, int first, int count, Panels *panels,
                   float y[][MOST_ROWS][TILE]) {
    for (int i = 0, here = 1; i < num; i += here) {
        const Matrix *w = places[i].w;
        here = i + 1 < num && uses_amx(w) && uses_amx(places[i + 1].w) ? 2 : 1;
        if (uses_amx(w))
            amx_products(places + i, here, in, first, count, y + i);
        else if (is_packed(w))
            packed_product(w, in, places[i].tile, first, count, y[i]);
        else
            dense_product(places[i], i + 1 < num ? places[i + 1] : next, in, first, count, panels, y[i]);
    }
    for (int i = 0; i < num; i++) add_bias(places[i], count, y[i]);
}

void matrix_row(const Matrix *w, int row, float *out) {
    if (is_packed(w))
        packed_row(w, row, out);
    else
        dense_row(w, row, out);
}

#endif
