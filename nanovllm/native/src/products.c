#include "products.h"

#if HAVE_SIMD

static void add_bias(Place here, int count, float y[][TILE]) {
    const int at = here.tile * TILE;
    if (here.w->bias == NULL) return;
    for (int m = 0; m < count; m++)
        for (int r = 0; r < TILE && at + r < here.w->rows; r++) y[m][r] += here.w->bias[at + r];
}

int uses_amx(const Matrix *w) { return have_amx && w->type == BFLOAT16 && w->columns % GROUP == 0; }

/* Whether two tiles are multiplied by one call. */
static int together(Place a, Place b) {
    return !is_packed(a.w) && a.w->type == b.w->type && a.w->columns == b.w->columns && uses_amx(a.w) == uses_amx(b.w);
}

void product_tiles(const Place places[], int num, Place next, const Inputs *in, int first, int count, Panels *panels,
                   float y[][MOST_ROWS][TILE]) {
    for (int i = 0, here = 1; i < num; i += here) {
        const Matrix *w = places[i].w;
        here = i + 1 < num && together(places[i], places[i + 1]) ? 2 : 1;
        if (have_amx && uses_amx(w))
            amx_products(places + i, here, in, first, count, y + i);
        else if (is_packed(w))
            packed_product(w, in, places[i].tile, first, count, y[i]);
        else
            dense_products(places + i, here, i + here < num ? places[i + here] : next, in, first, count, panels, y + i);
    }
    for (int i = 0; i < num; i++) add_bias(places[i], count, y[i]);
}

#endif
