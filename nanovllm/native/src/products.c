#include "products.h"

#if HAVE_SIMD

void product_tile(Place here, Place next, const Inputs *in, int first, int count, Panels *panels, float y[][TILE]) {
    const Matrix *w = here.w;
    const int tile = here.tile;
    if (is_packed(w))
        packed_product(w, in, tile, first, count, y);
    else if (uses_amx(w))
        amx_product(here, in, first, count, y);
    else
        dense_product(here, next, in, first, count, panels, y);
    if (w->bias == NULL) return;
    for (int m = 0; m < count; m++)
        for (int r = 0; r < TILE && tile * TILE + r < w->rows; r++) y[m][r] += w->bias[tile * TILE + r];
}

void matrix_row(const Matrix *w, int row, float *out) {
    if (is_packed(w))
        packed_row(w, row, out);
    else
        dense_row(w, row, out);
}

#endif
