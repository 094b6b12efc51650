/* SPDX-License-Identifier: Apache-2.0 */
/*
** Routed rows: the tokens of two micro-batches, each with fewer than its capacity, in the order of experts; pieces of
** them through experts and back, against plain sums in f64; the gradient of the choice; refusals.
*/
#include "op_case.h"
#include "tensor/routing.h"

enum { E = 6, K = 2, C = 4, CAP = 16, MICROS = 2, MOST = MICROS * CAP * K };

static const int64_t LEN[MICROS][3] = {{5, 3}, {4, 3, 4}}, ID[MICROS][3] = {{40, 7}, {11, 2, 99}};
static const int64_t TOKENS[MICROS] = {8, 11};

static void assert_error(bs_status got, bs_status want, const char *part)
{
    if (got != want || !strstr(bs_error()->msg, part))
        fail_msg("status %s, message \"%s\"; expected %s with \"%s\"", bs_status_name(got),
                 bs_error()->msg, bs_status_name(want), part);
}

/* ---- a step of a layer whose expert e gives (e + 1) times its rows ---- */

typedef struct step {
    bs_routing *r;
    bool reads; /* meta has nothing to read */
    float z[MICROS * CAP * E], x[MICROS * CAP * C], dy[MICROS * CAP * C], w[MICROS * CAP * K];
    int id[MICROS * CAP * K]; /* -1: no token */
    bs_place xs, dys, ws, sums, dxs, dws;
    int n, entry[MOST]; /* choices in the order of experts */
    int64_t offset[E + 1];
} step;

static bs_place places(fixture *f, int64_t cols, const float *v)
{
    bs_place p = fix_place(f, MICROS * CAP, cols, v);
    p.rows = p.capacity = CAP;
    return p;
}

static void read_all(fixture *f, const bs_place *p, float *v)
{
    bs_place all = *p;
    all.rows = MICROS * CAP;
    fix_read(f, &all, v);
}

static bool is_token(int t)
{
    return t % CAP < TOKENS[t / CAP];
}

/* The K largest logits of a row, in the order of experts. */
static void choose(const float *z, int *id)
{
    int n = 0;
    for (int e = 0; e < E; e++) {
        int above = 0;
        for (int o = 0; o < E; o++)
            above += z[o] > z[e];
        if (above < K)
            id[n++] = e;
    }
    assert_int_equal(n, K);
}

static void step_open(fixture *f, const char *spec, step *s)
{
    fix_open(f, spec, CAP);
    for (int j = 0; j < MICROS; j++)
        fix_rows(f, j, j ? 3 : 2, LEN[j], ID[j]);
    ok(bs_batch_begin(f->batch, MICROS));
    fix_floats(f, s->z, MICROS * CAP * E);
    fix_floats(f, s->x, MICROS * CAP * C);
    fix_floats(f, s->dy, MICROS * CAP * C);
    s->reads = strcmp(spec, "meta") != 0;
    s->n = 0;
    for (int t = 0; t < MICROS * CAP; t++) {
        if (is_token(t)) {
            choose(s->z + t * E, s->id + t * K);
            continue;
        }
        for (int i = 0; i < K; i++)
            s->id[t * K + i] = -1;
        for (int c = 0; c < C; c++) /* what lies beyond a micro-batch's tokens must not be looked at */
            s->x[t * C + c] = s->dy[t * C + c] = NAN;
    }
    for (int e = 0; e < E; e++) {
        s->offset[e] = s->n;
        for (int i = 0; i < MOST; i++)
            if (s->id[i] == e)
                s->entry[s->n++] = i;
    }
    s->offset[E] = s->n;
    s->xs = places(f, C, s->x);
    s->dys = places(f, C, s->dy);
    s->ws = places(f, K, NULL);
    s->sums = places(f, C, NULL);
    s->dxs = places(f, C, NULL);
    s->dws = places(f, K, NULL);
    ok(bs_routing_open(f->e, f->batch, &(bs_routing_cfg){.experts = E, .chosen = K}, &s->r));
}

static const bs_route_cfg ROUTE = {.kind = BS_ROUTE_SOFTMAX, .chosen = K, .groups = 1, .scale = 1.0};

static void route(fixture *f, step *s)
{
    for (int j = 0; j < MICROS; j++) {
        bs_tensor *z, *w;
        float *at = s->w + j * CAP * K;
        fix_scope(f, j, false, false);
        z = fix_from(f, TOKENS[j], E, s->z + j * CAP * E);
        ok(bs_op_route(z, &ROUTE, s->r, &w));
        if (s->reads)
            fix_values(w, at);
        for (int64_t i = TOKENS[j] * K; i < CAP * K; i++)
            at[i] = NAN;
        bs_tensor_release(z);
        bs_tensor_release(w);
        bs_scope_close(f->e);
    }
    ok(bsi_engine_write(f->e, bsi_place_addr(&s->ws), s->w, sizeof s->w));
    ok(bs_routing_sort(s->r));
}

static void step_close(fixture *f, step *s)
{
    bs_routing_close(s->r);
    fix_close(f);
}

static bs_status open_piece(const fixture *f, const step *s, int64_t begin, int64_t rows, bool tape)
{
    return bs_scope_open(
        f->e, &(bs_scope_cfg){
                  .label = "routed rows", .routing = s->r, .begin = begin, .rows = rows, .tape = tape});
}

/* ---- the order ---- */

static void test_order(void **state)
{
    (void)state;
    fixture f;
    static step s;
    int64_t offset[E + 1];
    float x[MOST * C], w[MOST];
    int32_t pos[MOST], id[MOST];
    bsi_micro m;
    bs_tensor *t;
    step_open(&f, "check:cpu", &s);
    fix_seal(&f);
    assert_error(bs_routing_sort(s.r), BS_STATE, "nothing has been routed");
    assert_error(bs_routing_offsets(s.r, offset), BS_STATE, "nothing has been routed");
    route(&f, &s);
    assert_int_equal(bs_routing_experts(s.r), E);
    assert_int_equal(s.n, (TOKENS[0] + TOKENS[1]) * K);
    ok(bs_routing_offsets(s.r, offset));
    assert_memory_equal(offset, s.offset, sizeof offset);
    for (int begin = 0; begin < s.n; begin += CAP) {
        int n = BSI_MIN(CAP, s.n - begin);
        ok(open_piece(&f, &s, begin, n, false));
        ok(bs_op_take_rows(f.e, &s.xs, CAP * C, &t));
        assert_int_equal(bs_tensor_capacity(t), CAP);
        fix_values(t, x + begin * C);
        bs_tensor_release(t);
        ok(bs_op_take_weights(f.e, &s.ws, CAP * K, &t));
        fix_values(t, w + begin);
        bs_tensor_release(t);
        bsi_routing_piece(s.r, begin, n, &m);
        ok(bsi_engine_read(f.e, m.pos, (size_t)n * sizeof *pos, pos + begin));
        ok(bsi_engine_read(f.e, m.row_id, (size_t)n * sizeof *id, id + begin));
        bs_scope_close(f.e);
    }
    for (int i = 0; i < s.n; i++) {
        int token = s.entry[i] / K, j = token / CAP, at = token % CAP, row = 0;
        for (; at >= LEN[j][row]; row++)
            at -= (int)LEN[j][row];
        assert_memory_equal(x + i * C, s.x + token * C, C * sizeof *x);
        assert_true(w[i] == s.w[s.entry[i]]);
        assert_int_equal(pos[i], at);
        assert_int_equal(id[i], ID[j][row]);
    }
    step_close(&f, &s);
}

/* Rows keep their positions: rotated among those of an expert, they are what they are in their micro-batch. */
static void test_positions(void **state)
{
    (void)state;
    fixture f;
    static step s;
    bs_array *freq;
    bs_rope *rope;
    bs_tensor *x, *y;
    float want[MICROS * CAP * C], got[CAP * C];
    step_open(&f, "check:cpu", &s);
    ok(bs_array_new(BS_DTYPE_F32, 1, (int64_t[]){C / 2}, &freq));
    ((float *)freq->data)[0] = 1.0f;
    ((float *)freq->data)[1] = 0.25f;
    ok(bs_rope_new(f.e, freq, 1.0, BS_ROPE_HALF, &rope));
    bs_array_free(freq);
    fix_seal(&f);
    route(&f, &s);
    for (int j = 0; j < MICROS; j++) {
        fix_scope(&f, j, false, false);
        x = fix_from(&f, TOKENS[j], C, s.x + j * CAP * C);
        ok(bs_op_rope(x, rope, 1, &y));
        fix_values(y, want + j * CAP * C);
        bs_tensor_release(x);
        bs_tensor_release(y);
        bs_scope_close(f.e);
    }
    for (int begin = 0; begin < s.n; begin += 7) {
        int n = BSI_MIN(7, s.n - begin);
        ok(open_piece(&f, &s, begin, n, false));
        ok(bs_op_take_rows(f.e, &s.xs, CAP * C, &x));
        ok(bs_op_rope(x, rope, 1, &y));
        fix_values(y, got);
        for (int i = 0; i < n; i++)
            assert_memory_equal(got + i * C, want + s.entry[begin + i] / K * C, C * sizeof *got);
        bs_tensor_release(x);
        bs_tensor_release(y);
        bs_scope_close(f.e);
    }
    bs_rope_free(rope);
    step_close(&f, &s);
}

/* ---- sums ---- */

/* One piece of expert e, forward, or on a tape and back. */
static void pass_piece(fixture *f, const step *s, int e, int64_t begin, int64_t rows, bool back)
{
    bs_tensor *x, *w, *scaled, *y, *dy, *g;
    ok(open_piece(f, s, begin, rows, back));
    ok(bs_op_take_rows(f->e, &s->xs, CAP * C, &x));
    ok(bs_op_take_weights(f->e, &s->ws, CAP * K, &w));
    if (back) {
        ok(bs_tensor_want_grad(x));
        ok(bs_tensor_want_grad(w));
    }
    ok(bs_op_scale(x, e + 1, &scaled));
    ok(bs_op_row_scale(scaled, w, 0, &y));
    if (!back) {
        ok(bs_op_add_rows(y, &s->sums, CAP * C));
    } else {
        ok(bs_op_take_rows(f->e, &s->dys, CAP * C, &dy));
        ok(bs_scope_backward(f->e, 1, &y, &dy));
        bs_tensor_release(dy);
        ok(bs_tensor_grad(x, &g));
        ok(bs_op_add_rows(g, &s->dxs, CAP * C));
        bs_tensor_release(g);
        ok(bs_tensor_grad(w, &g));
        ok(bs_op_add_weights(g, &s->dws, CAP * K));
        bs_tensor_release(g);
    }
    bs_tensor *all[] = {x, w, scaled, y};
    for (size_t i = 0; i < BSI_COUNT(all); i++)
        bs_tensor_release(all[i]);
    bs_scope_close(f->e);
}

typedef struct result {
    float sum[MICROS * CAP * C], dx[MICROS * CAP * C], dw[MICROS * CAP * K];
} result;

/* All experts, in pieces of at most `most` rows. */
static void pass(fixture *f, const step *s, int64_t most, result *out)
{
    const bs_place *to[] = {&s->sums, &s->dxs, &s->dws};
    float *values[] = {out->sum, out->dx, out->dw};
    for (int i = 0; i < 3; i++)
        ok(bsi_fill(f->e->compute, bsi_place_addr(to[i]), 0,
                    (size_t)(MICROS * CAP * to[i]->channels) * sizeof(float)));
    for (int back = 0; back < 2; back++)
        for (int e = 0; e < E; e++)
            for (int64_t at = s->offset[e]; at < s->offset[e + 1]; at += most)
                pass_piece(f, s, e, at, BSI_MIN(most, s->offset[e + 1] - at), back);
    for (int i = 0; i < 3; i++)
        read_all(f, to[i], values[i]);
}

static void near(double got, double want)
{
    if (!(fabs(got - want) <= 1e-5 * (1.0 + fabs(want))))
        fail_msg("%.9g, %.9g is expected", got, want);
}

static void check_sums(const step *s, const result *r)
{
    for (int t = 0; t < MICROS * CAP; t++)
        for (int c = 0; c < C; c++) {
            double factor = 0.0;
            for (int i = 0; i < K && is_token(t); i++)
                factor += (s->id[t * K + i] + 1) * (double)s->w[t * K + i];
            near((double)r->sum[t * C + c], is_token(t) ? factor * (double)s->x[t * C + c] : 0.0);
            near((double)r->dx[t * C + c], is_token(t) ? factor * (double)s->dy[t * C + c] : 0.0);
        }
    for (int i = 0; i < MOST; i++) {
        double want = 0.0;
        for (int c = 0; c < C && s->id[i] >= 0; c++)
            want += (s->id[i] + 1) * (double)s->x[i / K * C + c] * (double)s->dy[i / K * C + c];
        near((double)r->dw[i], want);
    }
}

static void test_pieces(void **state)
{
    (void)state;
    fixture f;
    static step s;
    static result whole, cut;
    step_open(&f, "check:cpu", &s);
    fix_seal(&f);
    route(&f, &s);
    pass(&f, &s, CAP, &whole);
    check_sums(&s, &whole);
    for (int most = 1; most < 7; most++) {
        pass(&f, &s, most, &cut);
        assert_memory_equal(&cut, &whole, sizeof cut); /* to the bit */
    }
    step_close(&f, &s);
}

/* All tokens to the same two experts: the others have no rows, these more than a scope holds. */
static void test_crowded(void **state)
{
    (void)state;
    fixture f;
    static step s;
    static result r;
    int64_t offset[E + 1];
    step_open(&f, "check:cpu", &s);
    fix_seal(&f);
    s.n = 0;
    for (int t = 0; t < MICROS * CAP; t++)
        for (int e = 0; e < E; e++)
            s.z[t * E + e] += e == 1 || e == 4 ? 10.0f : 0.0f;
    for (int i = 0; i < MOST; i++)
        s.id[i] = s.id[i] < 0 ? -1 : i % K ? 4 : 1;
    for (int e = 0; e < K; e++)
        for (int i = e; i < MOST; i += K)
            if (s.id[i] >= 0)
                s.entry[s.n++] = i;
    route(&f, &s);
    ok(bs_routing_offsets(s.r, offset));
    const int64_t n = TOKENS[0] + TOKENS[1], want[] = {0, 0, n, n, n, 2 * n, 2 * n};
    assert_memory_equal(offset, want, sizeof want);
    memcpy(s.offset, want, sizeof want);
    assert_true(n > CAP);
    pass(&f, &s, CAP, &r);
    check_sums(&s, &r);
    step_close(&f, &s);
}

/* A step with one micro-batch after one with two: what the other had is no choice any more. */
static void test_fewer_micros(void **state)
{
    (void)state;
    fixture f;
    static step s;
    int64_t offset[E + 1];
    step_open(&f, "check:cpu", &s);
    fix_seal(&f);
    route(&f, &s);
    fix_rows(&f, 0, 1, (int64_t[]){3}, NULL);
    ok(bs_batch_begin(f.batch, 1));
    fix_scope(&f, 0, false, false);
    bs_tensor *z = fix_from(&f, 3, E, s.z), *w;
    ok(bs_op_route(z, &ROUTE, s.r, &w));
    bs_tensor_release(z);
    bs_tensor_release(w);
    bs_scope_close(f.e);
    ok(bs_routing_sort(s.r));
    ok(bs_routing_offsets(s.r, offset));
    assert_int_equal(offset[E], 3 * K);
    step_close(&f, &s);
}

/* ---- a group of experts in one product ---- */

enum { OUT = 5, FIRST = 1, GROUP = 4 }; /* experts 1 to 4 */

typedef struct group {
    bs_linear *l;
    bool turned, biased;
    float w[GROUP][OUT * C], b[GROUP][OUT];
} group;

static void group_open(fixture *f, bs_dtype stored, bool turned, bool biased, group *g)
{
    bs_tensor_info w[GROUP], b[GROUP];
    const bs_tensor_info *next[GROUP], *next_bias[GROUP];
    *g = (group){.turned = turned, .biased = biased};
    for (int e = 0; e < GROUP; e++) { /* as a block has them: expert by expert */
        const int64_t dim[] = {turned ? C : OUT, turned ? OUT : C};
        w[e] = fix_weight(f, "w", stored, 2, dim, fix_floats(f, g->w[e], OUT * C));
        b[e] = fix_weight(f, "b", stored, 1, (int64_t[]){OUT}, fix_floats(f, g->b[e], OUT));
        if (e) {
            next[e - 1] = &w[e];
            next_bias[e - 1] = &b[e];
        }
    }
    bs_linear_cfg cfg = {.weight = &w[0],
                         .bias = biased ? &b[0] : NULL,
                         .transposed = turned,
                         .grouped = true,
                         .first_expert = FIRST,
                         .n_next = GROUP - 1,
                         .next = next,
                         .next_bias = biased ? next_bias : NULL,
                         .name = "group"};
    ok(bs_linear_new(f->e, &cfg, &g->l));
}

/* Products of the group's rows, in pieces, and the gradients that dy gives their inputs; in the order of experts. */
static void group_pass(fixture *f, const step *s, const group *g, int64_t most, const float *dy,
                       float *y, float *dx)
{
    bs_tensor *x, *out, *d, *grad;
    int64_t end = s->offset[FIRST + GROUP];
    for (int64_t at = s->offset[FIRST]; at < end; at += most) {
        int64_t n = BSI_MIN(most, end - at);
        ok(open_piece(f, s, at, n, true));
        ok(bs_op_take_rows(f->e, &s->xs, CAP * C, &x));
        ok(bs_tensor_want_grad(x));
        ok(bs_op_linear(x, g->l, NULL, &out));
        fix_values(out, y + at * OUT);
        d = fix_from(f, n, OUT, dy + at * OUT);
        ok(bs_scope_backward(f->e, 1, &out, &d));
        ok(bs_tensor_grad(x, &grad));
        fix_values(grad, dx + at * C);
        bs_tensor *all[] = {x, out, d, grad};
        for (size_t i = 0; i < BSI_COUNT(all); i++)
            bs_tensor_release(all[i]);
        bs_scope_close(f->e);
    }
}

static double matrix(const group *g, int e, int o, int c)
{
    return (double)g->w[e][g->turned ? c * OUT + o : o * C + c];
}

static void check_group(const step *s, const group *g, const float *dy, const float *y, const float *dx)
{
    for (int e = 0; e < GROUP; e++)
        for (int64_t i = s->offset[FIRST + e]; i < s->offset[FIRST + e + 1]; i++) {
            const float *x = s->x + s->entry[i] / K * C;
            for (int o = 0; o < OUT; o++) {
                double want = g->biased ? (double)g->b[e][o] : 0.0;
                for (int c = 0; c < C; c++)
                    want += (double)x[c] * matrix(g, e, o, c);
                near((double)y[i * OUT + o], want);
            }
            for (int c = 0; c < C; c++) {
                double want = 0.0;
                for (int o = 0; o < OUT; o++)
                    want += (double)dy[i * OUT + o] * matrix(g, e, o, c);
                near((double)dx[i * C + c], want);
            }
        }
}

static void test_group(void **state)
{
    (void)state;
    const bs_dtype stored[] = {BS_DTYPE_F32, BS_DTYPE_BF16};
    for (int k = 0; k < 8; k++) { /* dtype x transposed x bias */
        fixture f;
        static step s;
        static group g;
        static float dy[MOST * OUT], y[2][MOST * OUT], dx[2][MOST * C];
        step_open(&f, "check:cpu", &s);
        fix_seal(&f);
        group_open(&f, stored[k / 4], k & 1, k & 2, &g);
        fix_floats(&f, dy, MOST * OUT);
        route(&f, &s);
        memset(y, 0, sizeof y);
        memset(dx, 0, sizeof dx);
        group_pass(&f, &s, &g, CAP, dy, y[0], dx[0]);
        check_group(&s, &g, dy, y[0], dx[0]);
        for (int most = 1; most < CAP; most += 4) {
            group_pass(&f, &s, &g, most, dy, y[1], dx[1]);
            assert_memory_equal(y[0], y[1], sizeof y[0]);
            assert_memory_equal(dx[0], dx[1], sizeof dx[0]);
        }
        bs_linear_free(g.l);
        step_close(&f, &s);
    }
}

static void test_group_refused(void **state)
{
    (void)state;
    fixture f;
    static step s;
    static group g;
    float v[OUT * C] = {0};
    bs_tensor *x, *r, *y;
    bs_linear *l = NULL;
    step_open(&f, "check:cpu", &s);
    fix_seal(&f);
    group_open(&f, BS_DTYPE_F32, false, false, &g);
    bs_tensor_info w[4];
    for (int i = 0; i < 4; i++) {
        if (i == 2) /* what lies between the second and the third moves the third */
            fix_weight(&f, "between", BS_DTYPE_F32, 1, (int64_t[]){C}, v);
        w[i] = fix_weight(&f, i < 3 ? "like" : "other", i < 3 ? BS_DTYPE_F32 : BS_DTYPE_BF16, 2,
                          (int64_t[]){OUT, C}, v);
    }
    const bs_tensor_info *apart[] = {&w[1], &w[2]}, *other[] = {&w[3]}, *before[] = {&w[0]};
    bs_linear_cfg cfg = {.weight = &w[0], .grouped = true, .n_next = 2, .next = apart, .name = "bad"};
    assert_error(bs_linear_new(f.e, &cfg, &l), BS_SHAPE, "'like' does not follow 'like'");
    cfg.n_next = 1;
    cfg.next = other;
    assert_error(bs_linear_new(f.e, &cfg, &l), BS_SHAPE, "'other' does not follow 'like'");
    cfg.weight = &w[1];
    cfg.next = before;
    assert_error(bs_linear_new(f.e, &cfg, &l), BS_SHAPE, "does not follow");
    cfg.n_next = 0;
    cfg.base_weight.grad = fix_place(&f, OUT, C, NULL);
    assert_error(bs_linear_new(f.e, &cfg, &l), BS_UNSUPPORTED, "does not train");
    assert_null(l);
    route(&f, &s);
    fix_scope(&f, 0, false, false);
    x = fix_from(&f, TOKENS[0], C, s.x);
    assert_error(bs_op_linear(x, g.l, NULL, &y), BS_STATE, "is not of routed rows");
    bs_tensor_release(x);
    bs_scope_close(f.e);
    ok(open_piece(&f, &s, s.offset[FIRST], 1, false));
    x = fix_from(&f, 1, C, v);
    r = fix_from(&f, 1, OUT, v);
    bs_place at;
    bs_status st = bs_op_linear(x, g.l, r, &y);
    if (st == BS_OK) /* launched when it is read */
        st = bs_tensor_place(y, &at);
    assert_error(st, BS_UNSUPPORTED, "takes no residual");
    bs_tensor_release(x);
    bs_tensor_release(r);
    bs_scope_close(f.e);
    bs_linear_free(g.l);
    step_close(&f, &s);
}

/* ---- the gradient of the choice ---- */

static bs_routing *routing; /* of the case at hand */

enum { KIND, GROUPS, KEPT, RENORM, BIASED };

static bs_route_cfg case_cfg(const opcase *c)
{
    return (bs_route_cfg){.kind = (bs_route_kind)c->n[KIND],
                          .chosen = K,
                          .groups = c->n[GROUPS],
                          .kept = c->n[KEPT],
                          .renorm = c->n[RENORM] != 0,
                          .scale = c->d[0],
                          .bias = c->n[BIASED] ? c->w : NULL};
}

static bs_status route_op(const opcase *c, bs_tensor *const *x, bs_tensor **y)
{
    bs_route_cfg cfg = case_cfg(c);
    return bs_op_route(x[0], &cfg, routing, y);
}

static double score(const opcase *c, const double *z, int e)
{
    double sum = 0.0;
    if (c->n[KIND] == BS_ROUTE_SIGMOID)
        return 1.0 / (1.0 + exp(-z[e]));
    if (c->n[KIND] == BS_ROUTE_CHOSEN)
        return z[e];
    for (int o = 0; o < E; o++)
        sum += exp(z[o]);
    return exp(z[e]) / sum;
}

/* Groups of two: the score of one is its sum. */
static bool kept(const opcase *c, const double *s, int e)
{
    int above = 0;
    for (int g = 0; g < c->n[GROUPS] && c->n[GROUPS] > 1; g++)
        above += s[2 * g] + s[2 * g + 1] > s[e / 2 * 2] + s[e / 2 * 2 + 1];
    return above < c->n[KEPT];
}

static void route_ref(const opcase *c, double *const *in, double *y)
{
    for (int t = 0; t < T; t++) {
        const double *z = in[0] + t * E;
        double s[E], p[K], sum = 0.0;
        int n = 0;
        for (int e = 0; e < E; e++)
            s[e] = score(c, z, e) + (c->n[BIASED] ? (double)c->v[5][e] : 0.0);
        for (int e = 0; e < E; e++) {
            int above = 0;
            for (int o = 0; o < E; o++)
                above += kept(c, s, o) && s[o] > s[e];
            if (kept(c, s, e) && above < K && n < K)
                p[n++] = c->n[KIND] == BS_ROUTE_CHOSEN ? exp(z[e]) : score(c, z, e);
        }
        assert_int_equal(n, K);
        for (int i = 0; i < K; i++)
            sum += p[i];
        for (int i = 0; i < K; i++)
            y[t * K + i] = c->d[0] * p[i] / (c->n[RENORM] || c->n[KIND] == BS_ROUTE_CHOSEN ? sum : 1.0);
    }
}

static void test_gradient(void **state)
{
    (void)state;
    const bs_dtype stored[] = {BS_DTYPE_F32, BS_DTYPE_BF16, BS_DTYPE_F16}; /* the bias */
    for (int k = 0; k < 3 * 2 * 2 * 2; k++) { /* kind x renorm x bias x groups */
        fixture f;
        static opcase c;
        start(&f);
        c = (opcase){.name = "route",
                     .n_x = 1,
                     .rows = {T},
                     .cols = {E},
                     .y_rows = T,
                     .y_cols = K,
                     .n = {k % 3, k / 12 ? 3 : 1, k / 12 ? 2 : 1, k / 3 % 2, k / 6 % 2},
                     .d = {2.5},
                     .op = route_op,
                     .ref = route_ref};
        ok(bs_routing_open(f.e, f.batch, &(bs_routing_cfg){.experts = E, .chosen = K}, &routing));
        fix_seal(&f);
        bs_tensor_info info = fix_weight(&f, "correction", stored[k / 3 % 3], 1, (int64_t[]){E},
                                         fix_floats(&f, c.v[5], E));
        ok(bs_weight_new(f.e, 0, &info, NULL, &c.w));
        check(&f, &c);
        bs_weight_free(c.w);
        bs_routing_close(routing);
        fix_close(&f);
    }
}

/* ---- refusals ---- */

static void refuse_open(fixture *f)
{
    bs_routing *r = NULL;
    const bs_routing_cfg wrong[] = {{.experts = 0, .chosen = 1},
                                    {.experts = 4, .chosen = 0},
                                    {.experts = 4, .chosen = 5},
                                    {.experts = BSK_ROUTE_EXPERTS + 1, .chosen = 1},
                                    {.experts = -1, .chosen = -1}};
    for (size_t i = 0; i < BSI_COUNT(wrong); i++)
        assert_error(bs_routing_open(f->e, f->batch, &wrong[i], &r), BS_ARG, "experts");
    const bs_routing_cfg pieces[] = {{4, 2, -1}, {4, 2, CAP * MICROS * 2 + 1}};
    for (size_t i = 0; i < BSI_COUNT(pieces); i++)
        assert_error(bs_routing_open(f->e, f->batch, &pieces[i], &r), BS_ARG, "piece");
    assert_null(r);
}

static void refuse_route(fixture *f, const step *s, bs_weight *shorter)
{
    bs_tensor *y, *z, *narrow, *wide, *few;
    bs_route_cfg cfg = ROUTE;
    float v[CAP * (E + 1)] = {0};
    fix_scope(f, 0, false, false);
    z = fix_from(f, TOKENS[0], E, v);
    narrow = fix_from(f, TOKENS[0], 1, v);
    wide = fix_from(f, TOKENS[0], E + 1, v);
    few = fix_from(f, TOKENS[0] - 1, E, v);
    uint64_t launches = fix_launches(f);
    assert_error(bs_op_route(wide, &cfg, s->r, &y), BS_SHAPE, "up to 6 experts");
    assert_error(bs_op_route(narrow, &cfg, s->r, &y), BS_ARG, "2 of 1 experts");
    assert_error(bs_op_route(few, &cfg, s->r, &y), BS_SHAPE, "7 rows");
    cfg.chosen = K + 1;
    assert_error(bs_op_route(z, &cfg, s->r, &y), BS_ARG, "opened for 2");
    const int64_t groups[][2] = {{4, 1}, {3, 0}, {3, 4}, {6, 1}};
    for (size_t i = 0; i < BSI_COUNT(groups); i++) {
        cfg = ROUTE;
        cfg.groups = groups[i][0];
        cfg.kept = groups[i][1];
        assert_error(bs_op_route(z, &cfg, s->r, &y), BS_ARG, "groups of equal size");
    }
    cfg = ROUTE;
    cfg.bias = shorter;
    assert_error(bs_op_route(z, &cfg, s->r, &y), BS_SHAPE, "'shorter' has 5 entries, 6 are expected");
    assert_int_equal(fix_launches(f), launches);
    bs_tensor *all[] = {z, narrow, wide, few};
    for (size_t i = 0; i < BSI_COUNT(all); i++)
        bs_tensor_release(all[i]);
    bs_scope_close(f->e);
}

static void refuse_scopes(fixture *f, const step *s)
{
    bs_tensor *z, *y;
    float v[CAP * E] = {0};
    const int64_t wrong[][2] = {{-1, 4}, {0, 0}, {0, CAP + 1}, {MOST - 3, 4}, {MOST, 1}};
    for (size_t i = 0; i < BSI_COUNT(wrong); i++)
        assert_error(open_piece(f, s, wrong[i][0], wrong[i][1], false), BS_ARG, "routed rows from");
    fix_scope(f, 0, false, false);
    assert_error(bs_op_take_rows(f->e, &s->xs, CAP * C, &y), BS_STATE, "is not of routed rows");
    assert_error(bs_op_take_weights(f->e, &s->ws, CAP * K, &y), BS_STATE, "is not of routed rows");
    z = fix_from(f, TOKENS[0], C, v);
    assert_error(bs_op_add_rows(z, &s->sums, CAP * C), BS_STATE, "is not of routed rows");
    assert_error(bs_op_add_weights(z, &s->dws, CAP * K), BS_STATE, "is not of routed rows");
    bs_tensor_release(z);
    bs_scope_close(f->e);
    ok(bs_scope_open(f->e, &(bs_scope_cfg){.label = "free"}));
    z = fix_from(f, TOKENS[0], E, v);
    assert_error(bs_op_route(z, &ROUTE, s->r, &y), BS_ARG, "no micro-batch of the routing's batch");
    bs_tensor_release(z);
    bs_scope_close(f->e);
}

/* In a scope of routed rows: what needs a micro-batch, and rows of another shape or type. */
static void refuse_rows(fixture *f, const step *s, bs_weight *table)
{
    bs_tensor *x, *narrow, *y;
    float v[4 * C] = {0};
    const bs_attention_cfg attention = {.heads = 1, .kv_heads = 1, .head_dim = C};
    bs_place half = s->sums;
    half.dtype = BS_DTYPE_BF16;
    ok(open_piece(f, s, 2, 4, false));
    x = fix_from(f, 4, C, v);
    narrow = fix_from(f, 3, C, v);
    uint64_t launches = fix_launches(f);
    assert_error(bs_op_route(x, &ROUTE, s->r, &y), BS_ARG, "no micro-batch of the routing's batch");
    assert_error(bs_op_attention(x, x, x, &attention, &y), BS_STATE, "is of routed rows");
    assert_error(bs_op_labelled(x, &y), BS_STATE, "is of routed rows");
    assert_error(bs_op_last(x, &y), BS_STATE, "is of routed rows");
    assert_error(bs_op_embed(f->e, table, &y), BS_STATE, "is of routed rows");
    assert_error(bs_op_add_rows(narrow, &s->sums, CAP * C), BS_SHAPE, "of 4 routed rows");
    assert_error(bs_op_add_rows(x, &s->dws, CAP * K), BS_SHAPE, "rows of 2");
    assert_error(bs_op_add_weights(x, &s->dws, CAP * K), BS_SHAPE, "add_weights");
    assert_error(bs_op_add_rows(x, &half, CAP * C), BS_SHAPE, "bf16 rows");
    assert_error(bs_op_take_rows(f->e, &half, CAP * C, &y), BS_DTYPE, "rows are bf16");
    assert_int_equal(fix_launches(f), launches);
    bs_tensor_release(x);
    bs_tensor_release(narrow);
    bs_scope_close(f->e);
}

static void test_refused(void **state)
{
    (void)state;
    fixture f;
    static step s;
    float v[E * E] = {0};
    bs_weight *w[2];
    step_open(&f, "check:cpu", &s);
    refuse_open(&f);
    fix_seal(&f);
    bs_tensor_info info[] = {fix_weight(&f, "shorter", BS_DTYPE_F32, 1, (int64_t[]){E - 1}, v),
                             fix_weight(&f, "table", BS_DTYPE_F32, 2, (int64_t[]){E, E}, v)};
    for (int i = 0; i < 2; i++)
        ok(bs_weight_new(f.e, 0, &info[i], NULL, &w[i]));
    refuse_route(&f, &s, w[0]);
    route(&f, &s);
    refuse_scopes(&f, &s);
    refuse_rows(&f, &s, w[1]);
    for (int i = 0; i < 2; i++)
        bs_weight_free(w[i]);
    step_close(&f, &s);
}

/* ---- memory ---- */

static void memory_of(const char *spec, bs_engine_stats *out)
{
    fixture f;
    static step s;
    step_open(&f, spec, &s);
    fix_seal(&f);
    route(&f, &s);
    for (int back = 0; back < 2; back++)
        pass_piece(&f, &s, 0, 0, CAP, back);
    bs_engine_stats_get(f.e, out);
    step_close(&f, &s);
}

/* A piece of any length takes what a full one takes, and as much on a device that computes nothing. */
static void test_memory(void **state)
{
    (void)state;
    fixture f;
    static step s;
    bs_engine_stats cpu, meta;
    memory_of("check:cpu", &cpu);
    memory_of("meta", &meta);
    assert_int_equal(cpu.fixed_bytes, meta.fixed_bytes);
    assert_int_equal(cpu.arena_peak, meta.arena_peak);
    step_open(&f, "check:cpu", &s);
    fix_seal(&f);
    route(&f, &s);
    for (int back = 0; back < 2; back++)
        pass_piece(&f, &s, 0, 0, 1, back);
    assert_int_equal(fix_arena_peak(&f), meta.arena_peak);
    step_close(&f, &s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_order),         cmocka_unit_test(test_positions),
        cmocka_unit_test(test_pieces),        cmocka_unit_test(test_crowded),
        cmocka_unit_test(test_fewer_micros),  cmocka_unit_test(test_group),
        cmocka_unit_test(test_group_refused), cmocka_unit_test(test_gradient),
        cmocka_unit_test(test_refused),       cmocka_unit_test(test_memory)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
