#include "products.h"

#if HAVE_SIMD

static void add_bias(Place here, int count, float y[][TILE]) {
    const int at = here.tile * TILE;
    if (here.w->bias == NULL) return;
    for (int m = 0; m < count; m++)
        for (int r = 0; r < TILE && at + r < here.w->rows; r++) y[m][r] += here.w->bias[at + r];
}

static void product_tile(Place here, Place next, const Inputs *in, int first, int count, Panels *panels,
                         float y[][TILE]) {
    if (is_packed(here.w))
        packed_product(here.w, in, here.tile, first, count, y);
    else if (uses_amx(here.w))
        amx_products(here, (Place){NULL, 0}, in, first, count, y, NULL);
    else
        dense_product(here, next, in, first, count, panels, y);
    add_bias(here, count, y);
}

void product_tiles(Place here, Place other, Place next, const Inputs *in, int first, int count, Panels *panels,
                   float y[][TILE], float other_y[][TILE]) {
    if (other.w && uses_amx(here.w) && uses_amx(other.w)) {
        amx_products(here, other, in, first, count, y, other_y);
        add_bias(here, count, y);
        add_bias(other, count, other_y);
        return;
    }
    product_tile(here, other.w ? other : next, in, first, count, panels, y);
    if (other.w) product_tile(other, next, in, first, count, panels, other_y);
}

void matrix_row(const Matrix *w, int row, float *out) {
    if (is_packed(w))
        packed_row(w, row, out);
    else
        dense_row(w, row, out);
}

#endif
