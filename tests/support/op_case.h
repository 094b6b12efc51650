/* SPDX-License-Identifier: Apache-2.0 */
/*
** op_case.h: an op, forward and backward, against its formula in f64: the value directly, each gradient by
** central differences of the formula (step 1e-5: their own error is below 1e-9), so that the bounds are
** those of f32 arithmetic alone. Included by one file of a program.
*/
#ifndef OP_CASE_H
#define OP_CASE_H

#include "tensor_fixture.h"

enum { MAX_IN = 6, MAX_ELEMS = 128, T = 8 };

/* Sums of at most 32 products of numbers of order 1 in f32 (unit roundoff 6e-8), relative to the norm.
 */
static const double TOLERANCE = 1e-6;
static const int64_t ROW_LEN[] = {5, 3}, ROW_ID[] = {40, 7};

typedef struct opcase {
    const char *name;
    int n_x, n_w;                       /* tensors, then weights */
    int64_t rows[MAX_IN], cols[MAX_IN]; /* of each of them */
    int64_t y_rows, y_cols;
    bs_status (*op)(const struct opcase *c, bs_tensor *const *x, bs_tensor **y);
    void (*ref)(const struct opcase *c, double *const *in, double *y);
    int64_t n[6];
    double d[3];
    bool train;
    bs_weight *w, *b;
    bs_linear *l;
    bs_rope *rope;
    bs_attention_cfg attention;
    float v[MAX_IN][MAX_ELEMS];
    bs_place grad[MAX_IN]; /* of weights; mem NULL: frozen */
} opcase;

static int64_t elems(const opcase *c, int i)
{
    return c->rows[i] * c->cols[i];
}

/* sum of y * r in f64 */
static double loss(const opcase *c, double *const *in, const float *r)
{
    static double y[MAX_ELEMS];
    double sum = 0.0;
    c->ref(c, in, y);
    for (int64_t i = 0; i < c->y_rows * c->y_cols; i++)
        sum += y[i] * (double)r[i];
    return sum;
}

static void compare(const opcase *c, const char *what, int which, const float *got, const double *want,
                    int64_t n)
{
    double diff = 0.0, norm = 0.0;
    for (int64_t i = 0; i < n; i++) {
        diff += ((double)got[i] - want[i]) * ((double)got[i] - want[i]);
        norm += want[i] * want[i];
    }
    if (!(sqrt(diff) <= TOLERANCE * sqrt(norm)))
        fail_msg("%s: %s %d differs by %.3g (bound %.3g)", c->name, what, which,
                 norm > 0 ? sqrt(diff / norm) : sqrt(diff), TOLERANCE);
}

static void check_gradient(const opcase *c, double *const *in, const float *r, int i, const float *got,
                           double times)
{
    static double want[MAX_ELEMS];
    const double h = 1e-5;
    for (int64_t j = 0; j < elems(c, i); j++) {
        double keep = in[i][j];
        in[i][j] = keep + h;
        double up = loss(c, in, r);
        in[i][j] = keep - h;
        want[j] = times * (up - loss(c, in, r)) / (2.0 * h);
        in[i][j] = keep;
    }
    compare(c, "gradient", i, got, want, elems(c, i));
}

/* One forward and backward; inputs whose bit is set in mask want a gradient. */
static void run_once(fixture *f, const opcase *c, unsigned mask, const float *r, float *y,
                     float dx[MAX_IN][MAX_ELEMS])
{
    bs_tensor *x[MAX_IN], *out, *g, *grad;
    fix_scope(f, 0, true, c->train);
    for (int i = 0; i < c->n_x; i++) {
        x[i] = fix_from(f, c->rows[i], c->cols[i], c->v[i]);
        if (mask & (1u << i))
            ok(bs_tensor_want_grad(x[i]));
    }
    ok(c->op(c, x, &out));
    fix_values(out, y);
    assert_int_equal(bs_tensor_dim(out, 0), c->y_rows);
    g = fix_from(f, c->y_rows, c->y_cols, r);
    ok(bs_scope_backward(f->e, 1, &out, &g));
    for (int i = 0; i < c->n_x; i++) {
        if (mask & (1u << i)) {
            ok(bs_tensor_grad(x[i], &grad));
            assert_non_null(grad);
            fix_values(grad, dx[i]);
            bs_tensor_release(grad);
        }
        bs_tensor_release(x[i]);
    }
    bs_tensor_release(out);
    bs_tensor_release(g);
    bs_scope_close(f->e);
}

/* v of the tensors must not be filled by the caller; v of the weights must. */
static void check(fixture *f, opcase *c)
{
    static double in64[MAX_IN][MAX_ELEMS], y64[MAX_ELEMS];
    static float dx[MAX_IN][MAX_ELEMS], y[MAX_ELEMS], r[MAX_ELEMS];
    double *in[MAX_IN];
    int n = c->n_x + c->n_w;
    for (int i = 0; i < n; i++) {
        assert_true(elems(c, i) <= MAX_ELEMS);
        if (i < c->n_x)
            fix_floats(f, c->v[i], elems(c, i));
        for (int64_t j = 0; j < elems(c, i); j++)
            in64[i][j] = (double)c->v[i][j];
        in[i] = in64[i];
    }
    fix_floats(f, r, c->y_rows * c->y_cols);
    c->ref(c, in, y64);
    unsigned all = (1u << c->n_x) - 1, runs = 0;
    for (unsigned mask = all;; mask--) { /* every choice of wanted inputs, all of them first */
        bool trains = mask != 0;
        for (int i = c->n_x; i < n; i++)
            trains = trains || c->grad[i].mem;
        if (trains) {
            run_once(f, c, mask, r, y, dx);
            runs++;
            compare(c, "value", 0, y, y64, c->y_rows * c->y_cols);
            for (int i = 0; i < c->n_x; i++)
                if (mask & (1u << i))
                    check_gradient(c, in, r, i, dx[i], 1.0);
        }
        if (mask == 0)
            break;
    }
    for (int i = c->n_x; i < n; i++) /* accumulators hold the sum of all runs */
        if (c->grad[i].mem) {
            fix_read(f, &c->grad[i], dx[i]);
            check_gradient(c, in, r, i, dx[i], runs);
        }
}

static void start(fixture *f)
{
    fix_open(f, "check:cpu", 16);
    fix_rows(f, 0, 2, ROW_LEN, ROW_ID);
}

#endif
