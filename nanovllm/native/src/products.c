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
    int amx = 1;
    for (int i = 0; i < num; i++) amx &= uses_amx(places[i].w);
    if (amx) amx_products(places, num, in, first, count, y);
    for (int i = 0; i < num; i++) {
        if (is_packed(places[i].w))
            packed_product(places[i].w, in, places[i].tile, first, count, y[i]);
        else if (!amx && uses_amx(places[i].w))
            amx_products(places + i, 1, in, first, count, y + i);
        else if (!amx)
            dense_product(places[i], i + 1 < num ? places[i + 1] : next, in, first, count, panels, y[i]);
        add_bias(places[i], count, y[i]);
    }
}

void matrix_row(const Matrix *w, int row, float *out) {
    if (is_packed(w))
        packed_row(w, row, out);
    else
        dense_row(w, row, out);
}

#endif
