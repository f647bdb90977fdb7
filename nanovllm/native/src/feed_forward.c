/* The feed-forward part of a layer: an MLP, or a mixture of experts. */
#include "engine.h"
#include <math.h>
#include <stdlib.h>

#if HAVE_SIMD

enum { MOST_JOBS = EXPERT_ROWS / LANES }; /* experts that are computed together */

/* activation(gate(x)) * up(x), in `activated` */
static Product activation_of(const Engine *e, const Matrix *gate, const Matrix *up, Inputs inputs) {
    return (Product){.matrices = {gate, up}, .outputs = {e->activated.x}, .stride = gate->rows, .num_outputs = 1,
                     .mode = GATE, .in = inputs};
}

static void activate(Engine *e, const Matrix *gate, const Matrix *up, const Rows *inputs, int rows) {
    const Product job = activation_of(e, gate, up, inputs_of(inputs, rows, gate->columns));
    run_products(e, GATE_UP, &job, 1);
}

static void run_mlp(Pass *p) {
    Engine *e = p->e;
    const Layer *layer = p->layer;
    const int forms = form_of(&layer->gate) | form_of(&layer->up);
    const Rows normed = normed_rows(e, p->x, p->num_rows, layer->ffn_norm, e->model.eps, forms);
    activate(e, &layer->gate, &layer->up, &normed, p->num_rows);
    add_product(p, DOWN, &layer->down, &e->activated, layer->after_ffn);
}

/* --- a mixture of experts ----------------------------------------------------------------------------------------- */

/* Set the scores of all experts that are not in one of the best groups to -infinity. */
static void keep_groups(const Router *r, float *scores) {
    const int size = r->num_experts / r->num_groups;
    float worth[r->num_groups];
    for (int g = 0; g < r->num_groups; g++) {
        float best = -INFINITY, second = -INFINITY;
        for (int i = g * size; i < (g + 1) * size; i++) {
            second = fmaxf(second, fminf(best, scores[i]));
            best = fmaxf(best, scores[i]);
        }
        worth[g] = r->uses_sigmoid ? best + second : best;
    }
    for (int g = 0; g < r->num_groups; g++) {
        int better = 0; /* groups */
        for (int other = 0; other < r->num_groups; other++)
            better += worth[other] > worth[g] || (worth[other] == worth[g] && other < g);
        for (int i = g * size; better >= r->chosen_groups && i < (g + 1) * size; i++) scores[i] = -INFINITY;
    }
}

static int ascending(const void *a, const void *b) { return *(const int32_t *)a - *(const int32_t *)b; }

/* The experts of a token: those with the best scores, the first of equal ones. */
static void route_chunk(void *argument, int row) {
    const Pass *p = argument;
    const Router *r = &p->e->model.router;
    float *scores = p->e->routed + (int64_t)row * r->num_experts, *shares = p->e->shares + row * r->per_token;
    float ranks[r->num_experts], most = scores[0], total = 0, kept = r->least_sum;
    int32_t *chosen = p->e->chosen + row * r->per_token;
    for (int i = 1; i < r->num_experts; i++) most = fmaxf(most, scores[i]);
    for (int i = 0; i < r->num_experts; i++)
        total += scores[i] = r->uses_sigmoid ? 1 / (1 + expf(-scores[i])) : expf(scores[i] - most);
    for (int i = 0; i < r->num_experts; i++) {
        if (!r->uses_sigmoid) scores[i] /= total;
        ranks[i] = scores[i] + (p->layer->choice_bias ? p->layer->choice_bias[i] : 0);
    }
    if (r->num_groups > 1) keep_groups(r, ranks);
    for (int k = 0; k < r->per_token; k++) {
        int best = 0;
        for (int i = 1; i < r->num_experts; i++) best = ranks[i] > ranks[best] ? i : best;
        chosen[k] = best;
        kept += scores[best];
        ranks[best] = -INFINITY;
    }
    qsort(chosen, (size_t)r->per_token, sizeof(*chosen), ascending);
    for (int k = 0; k < r->per_token; k++) {
        const float factor = p->layer->expert_factors ? p->layer->expert_factors[chosen[k]] : 1;
        shares[k] = scores[chosen[k]] / (r->normalizes ? kept : 1) * r->scaling * factor;
    }
}

/* Some experts that are computed together: each has rows for the tokens that chose it, from a multiple of LANES on. */
typedef struct {
    Pass *pass;
    const float *normed; /* [row][hidden]: their inputs */
    float *out;          /* [row][hidden]: what they are added to */
    int begin, end, num_jobs, forms;
    Product gates[MOST_JOBS], downs[MOST_JOBS];
} Experts;

/* The rows of `rows` from `first` on. */
static Inputs rows_from(const Rows *rows, int first, int count, int columns) {
    const Rows from = {rows->x + (int64_t)first * columns, rows->rounded + first / LANES * (columns / GROUP),
                       rows->parts + (int64_t)first * columns * rows->num_parts, rows->num_parts};
    return inputs_of(&from, count, columns);
}

/* Take as many experts as fit, from number `begin` on. `counts`: how many tokens chose each. */
static void take_experts(Experts *x, int begin, const int counts[]) {
    Engine *e = x->pass->e;
    const Router *r = &e->model.router;
    const int hidden = e->model.hidden, num_pairs = x->pass->num_rows * r->per_token;
    int rows[r->num_experts], first = 0; /* rows: the next one of each */
    x->begin = x->end = begin;
    x->num_jobs = x->forms = 0;
    for (; x->end < r->num_experts && first + counts[x->end] <= EXPERT_ROWS; x->end++) {
        const Matrix *gate = x->pass->layer->experts + 3 * x->end, *up = gate + 1, *down = gate + 2;
        const int count = counts[x->end];
        rows[x->end] = first;
        if (count == 0) continue;
        Product *job = &x->gates[x->num_jobs];
        *job = activation_of(e, gate, up, rows_from(&e->gathered, first, count, hidden));
        job->outputs[0] += (int64_t)first * gate->rows;
        x->downs[x->num_jobs++] = (Product){
            .matrices = {down}, .outputs = {e->product + (int64_t)first * hidden}, .stride = hidden, .num_outputs = 1,
            .mode = STORE, .in = rows_from(&e->activated, first, count, down->columns)};
        x->forms |= form_of(gate) | form_of(up) | form_of(down);
        first += (count + LANES - 1) / LANES * LANES;
    }
    for (int i = 0; i < num_pairs; i++)
        if (e->chosen[i] >= begin && e->chosen[i] < x->end) e->expert_rows[i] = rows[e->chosen[i]]++;
}

/* Whether these experts have pair `pair` of a token and an expert. */
static int takes(const Experts *x, int pair) {
    const int expert = x->pass->e->chosen[pair];
    return x->begin <= expert && expert < x->end;
}

static void gather_chunk(void *argument, int pair) {
    const Experts *x = argument;
    const Engine *e = x->pass->e;
    const int64_t size = e->model.hidden, token = pair / e->model.router.per_token;
    if (!takes(x, pair)) return;
    float *to = e->gathered.x + e->expert_rows[pair] * size;
    memcpy(to, x->normed + token * size, (size_t)size * sizeof(float));
    form_row(&e->gathered, to, e->expert_rows[pair], (int)size, x->forms);
}

static void form_chunk(void *argument, int pair) {
    const Experts *x = argument;
    const Engine *e = x->pass->e;
    const int size = x->downs[0].in.columns, row = e->expert_rows[pair];
    if (takes(x, pair)) form_row(&e->activated, e->activated.x + (int64_t)row * size, row, size, x->forms);
}

/* x = x + share * y */
static void add_share(float *x, const float *y, float share, int size) {
    for (int i = 0; i < size; i += 4) store(x + i, multiply_add(load(x + i), load(y + i), splat(share)));
}

/* A row's experts are added in the order of their numbers. */
static void add_chunk(void *argument, int row) {
    const Experts *x = argument;
    const Engine *e = x->pass->e;
    const int size = e->model.hidden, per_token = e->model.router.per_token;
    for (int pair = row * per_token; pair < (row + 1) * per_token; pair++)
        if (takes(x, pair))
            add_share(x->out + (int64_t)row * size, e->product + (int64_t)e->expert_rows[pair] * size,
                      e->shares[pair], size);
}

static void add_shared_chunk(void *argument, int row) {
    const Pass *p = argument;
    const int64_t size = p->e->model.hidden, at = row * size;
    add_share(p->x + at, p->e->product + at, 1 / (1 + expf(-p->e->routed[row])), (int)size);
}

/* Add the expert that all tokens pass, maybe times sigmoid(shared_gate(x)). */
static void run_shared(Pass *p, const Rows *normed) {
    Engine *e = p->e;
    const Layer *layer = p->layer;
    const int is_gated = layer->shared_gate.rows > 0;
    activate(e, &layer->gate, &layer->up, normed, p->num_rows);
    multiply(e, DOWN, &layer->down, &e->activated, p->num_rows, is_gated ? e->product : p->x, is_gated ? STORE : ADD);
    if (!is_gated) return;
    multiply(e, ROUTING, &layer->shared_gate, normed, p->num_rows, e->routed, STORE);
    engine_run(e, ROUTING, add_shared_chunk, p, p->num_rows);
}

/* Choose the experts of each token. */
static void route(Pass *p, const Rows *normed) {
    multiply(p->e, ROUTING, &p->layer->router, normed, p->num_rows, p->e->routed, STORE);
    engine_run(p->e, ROUTING, route_chunk, p, p->num_rows);
}

/* Add what the chosen experts make of `normed` to `out`. */
static void add_experts(Pass *p, const Rows *normed, float *out) {
    Engine *e = p->e;
    const Router *r = &e->model.router;
    const int num_pairs = p->num_rows * r->per_token;
    int counts[r->num_experts];
    memset(counts, 0, sizeof(counts));
    for (int i = 0; i < num_pairs; i++) counts[e->chosen[i]]++;
    for (Experts x = {.pass = p, .normed = normed->x, .out = out}; x.end < r->num_experts;) {
        take_experts(&x, x.end, counts);
        engine_run(e, ROUTING, gather_chunk, &x, num_pairs);
        run_products(e, GATE_UP, x.gates, x.num_jobs);
        engine_run(e, ROUTING, form_chunk, &x, num_pairs);
        run_products(e, DOWN, x.downs, x.num_jobs);
        engine_run(e, ROUTING, add_chunk, &x, p->num_rows);
    }
}

static void run_experts(Pass *p) {
    const Layer *layer = p->layer;
    const int has_shared = layer->gate.rows > 0, forms = has_shared ? form_of(&layer->gate) | form_of(&layer->up) : 0;
    const Rows normed = normed_rows(p->e, p->x, p->num_rows, layer->ffn_norm, p->e->model.eps, forms);
    route(p, &normed);
    add_experts(p, &normed, p->x);
    if (has_shared) run_shared(p, &normed);
}

/* An MLP and a mixture of experts, both of x: norm(norm(mlp) + norm(experts)) is added to it. */
static void run_both(Pass *p) {
    Engine *e = p->e;
    const Layer *layer = p->layer;
    const float eps = e->model.eps;
    const size_t size = (size_t)p->num_rows * (size_t)e->model.hidden;
    float *sum = e->sum, *of_experts = sum + (int64_t)PASS_ROWS * e->model.hidden;
    Rows normed = normed_rows(e, p->x, p->num_rows, layer->ffn_norm, eps, form_of(&layer->gate) | form_of(&layer->up));
    activate(e, &layer->gate, &layer->up, &normed, p->num_rows);
    multiply(e, DOWN, &layer->down, &e->activated, p->num_rows, e->product, STORE);
    norm_rows(e, e->product, p->num_rows, layer->after_mlp, sum, 0);
    normed = normed_rows(e, p->x, p->num_rows, layer->router_norm, eps, 0);
    route(p, &normed);
    memset(of_experts, 0, size * sizeof(float));
    normed = normed_rows(e, p->x, p->num_rows, layer->experts_norm, eps, 0);
    add_experts(p, &normed, of_experts);
    norm_rows(e, of_experts, p->num_rows, layer->after_experts, sum, 1);
    norm_rows(e, sum, p->num_rows, layer->after_ffn, p->x, 1);
}

void run_feed_forward(Pass *p) {
    if (p->layer->router_norm)
        run_both(p);
    else if (p->layer->experts)
        run_experts(p);
    else
        run_mlp(p);
}

#endif
