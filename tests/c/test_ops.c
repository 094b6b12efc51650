/* SPDX-License-Identifier: Apache-2.0 */
/*
** Every op, forward and backward, against its formula in f64: the value directly, each gradient by
** central differences of the f64 formula (step 1e-5: their own error is below 1e-9), so that the
** bounds are those of f32 arithmetic alone.
*/
#include "tensor_fixture.h"

enum { MAX_IN = 5, MAX_ELEMS = 128, T = 8 };

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

/* ---- elementwise ----------------------------------------------------------------------------- */

static double act64(double x, int64_t act)
{
    switch (act) {
    case BS_ACT_SILU:
        return x / (1.0 + exp(-x));
    case BS_ACT_GELU_TANH:
        return 0.5 * x * (1.0 + tanh(sqrt(2.0 / M_PI) * (x + 0.044715 * x * x * x)));
    case BS_ACT_GELU_ERF:
        return 0.5 * x * (1.0 + erf(x / sqrt(2.0)));
    default:
        return x > 0.0 ? x : 0.0;
    }
}

static void act_ref(const opcase *c, double *const *in, double *y)
{
    for (int64_t i = 0; i < elems(c, 0); i++)
        y[i] = act64(in[0][i], c->n[0]);
}

static void glu_ref(const opcase *c, double *const *in, double *y)
{
    for (int64_t i = 0; i < elems(c, 0); i++)
        y[i] = act64(in[0][i], c->n[0]) * in[1][i];
}

static void add_ref(const opcase *c, double *const *in, double *y)
{
    for (int64_t i = 0; i < elems(c, 0); i++)
        y[i] = in[0][i] + in[1][i];
}

static void mul_ref(const opcase *c, double *const *in, double *y)
{
    for (int64_t i = 0; i < elems(c, 0); i++)
        y[i] = in[0][i] * in[1][i];
}

static void scale_ref(const opcase *c, double *const *in, double *y)
{
    for (int64_t i = 0; i < elems(c, 0); i++)
        y[i] = in[0][i] * c->d[0];
}

static void square_ref(const opcase *c, double *const *in, double *y)
{
    for (int64_t i = 0; i < elems(c, 0); i++)
        y[i] = in[0][i] * in[0][i];
}

static bs_status act_op(const opcase *c, bs_tensor *const *x, bs_tensor **y)
{
    return bs_op_act(x[0], (bs_act)c->n[0], y);
}

static bs_status glu_op(const opcase *c, bs_tensor *const *x, bs_tensor **y)
{
    return bs_op_glu(x[0], x[1], (bs_act)c->n[0], y);
}

static bs_status add_op(const opcase *c, bs_tensor *const *x, bs_tensor **y)
{
    (void)c;
    return bs_op_add(x[0], x[1], y);
}

static bs_status mul_op(const opcase *c, bs_tensor *const *x, bs_tensor **y)
{
    (void)c;
    return bs_op_mul(x[0], x[1], y);
}

static bs_status scale_op(const opcase *c, bs_tensor *const *x, bs_tensor **y)
{
    return bs_op_scale(x[0], c->d[0], y);
}

static bs_status square_op(const opcase *c, bs_tensor *const *x, bs_tensor **y)
{
    (void)c;
    return bs_op_mul(x[0], x[0], y);
}

static void test_elementwise(void **state)
{
    (void)state;
    fixture f;
    start(&f);
    fix_seal(&f);
    static opcase cases[] = {
        {.name = "add", .n_x = 2, .op = add_op, .ref = add_ref},
        {.name = "mul", .n_x = 2, .op = mul_op, .ref = mul_ref},
        {.name = "mul with itself", .n_x = 1, .op = square_op, .ref = square_ref},
        {.name = "scale", .n_x = 1, .d = {-1.75}, .op = scale_op, .ref = scale_ref},
        {.name = "act", .n_x = 1, .op = act_op, .ref = act_ref},
        {.name = "glu", .n_x = 2, .op = glu_op, .ref = glu_ref}};
    for (size_t i = 0; i < BSI_COUNT(cases); i++) {
        opcase *c = &cases[i];
        for (int k = 0; k < MAX_IN; k++) {
            c->rows[k] = c->y_rows = T;
            c->cols[k] = c->y_cols = 5;
        }
        int acts = c->op == act_op || c->op == glu_op ? BS_ACT_RELU : 0;
        for (c->n[0] = 0; c->n[0] <= acts; c->n[0]++)
            check(&f, c);
    }
    fix_close(&f);
}

/* ---- along rows ------------------------------------------------------------------------------ */

static void rmsnorm_ref(const opcase *c, double *const *in, double *y)
{
    int64_t C = c->cols[1];
    for (int64_t t = 0; t < elems(c, 0) / C; t++) {
        const double *x = in[0] + t * C;
        double ss = 0.0;
        for (int64_t i = 0; i < C; i++)
            ss += x[i] * x[i];
        for (int64_t i = 0; i < C; i++)
            y[t * C + i] = x[i] / sqrt(ss / (double)C + c->d[0]) * (in[1][i] + (double)c->n[0]);
    }
}

static bs_status rmsnorm_op(const opcase *c, bs_tensor *const *x, bs_tensor **y)
{
    return bs_op_rmsnorm(x[0], c->w, c->d[0], c->n[0] != 0, y);
}

static void test_rmsnorm(void **state)
{
    (void)state;
    const bs_dtype stored[] = {BS_DTYPE_F32, BS_DTYPE_BF16, BS_DTYPE_F16};
    for (int64_t k = 0; k < 12;
         k++) { /* dtype x one_plus x trainable; the row is 3 heads of the weight */
        fixture f;
        start(&f);
        fix_seal(&f);
        static opcase c;
        c = (opcase){.name = "rmsnorm",
                     .n_x = 1,
                     .n_w = 1,
                     .rows = {T, 1},
                     .cols = {12, 4},
                     .y_rows = T,
                     .y_cols = 12,
                     .n = {k & 1},
                     .d = {1e-3},
                     .op = rmsnorm_op,
                     .ref = rmsnorm_ref};
        bs_tensor_info info =
            fix_weight(&f, "norm", stored[k / 4], 1, (int64_t[]){4}, fix_floats(&f, c.v[1], 4));
        if (k & 2)
            c.grad[1] = fix_place(&f, 1, 4, NULL);
        ok(bs_weight_new(f.e, 0, &info, &(bs_param_ref){.grad = c.grad[1]}, &c.w));
        check(&f, &c);
        bs_weight_free(c.w);
        fix_close(&f);
    }
}

static void layernorm_ref(const opcase *c, double *const *in, double *y)
{
    int64_t C = c->cols[1];
    for (int64_t t = 0; t < elems(c, 0) / C; t++) {
        const double *x = in[0] + t * C;
        double mean = 0.0, var = 0.0;
        for (int64_t i = 0; i < C; i++)
            mean += x[i] / (double)C;
        for (int64_t i = 0; i < C; i++)
            var += (x[i] - mean) * (x[i] - mean) / (double)C;
        for (int64_t i = 0; i < C; i++)
            y[t * C + i] = (x[i] - mean) / sqrt(var + c->d[0]) * in[1][i] + in[2][i];
    }
}

static bs_status layernorm_op(const opcase *c, bs_tensor *const *x, bs_tensor **y)
{
    return bs_op_layernorm(x[0], c->w, c->b, c->d[0], y);
}

static void test_layernorm(void **state)
{
    (void)state;
    const bs_dtype stored[] = {BS_DTYPE_F32, BS_DTYPE_BF16, BS_DTYPE_F16};
    for (int k = 0; k < 12; k++) { /* dtype x weight trainable x bias trainable; 3 heads in a row */
        fixture f;
        start(&f);
        fix_seal(&f);
        static opcase c;
        c = (opcase){.name = "layernorm",
                     .n_x = 1,
                     .n_w = 2,
                     .rows = {T, 1, 1},
                     .cols = {12, 4, 4},
                     .y_rows = T,
                     .y_cols = 12,
                     .d = {1e-3},
                     .op = layernorm_op,
                     .ref = layernorm_ref};
        bs_weight **w[] = {&c.w, &c.b};
        for (int i = 0; i < 2; i++) {
            bs_tensor_info info = fix_weight(&f, i ? "bias" : "norm", stored[k / 4], 1, (int64_t[]){4},
                                             fix_floats(&f, c.v[1 + i], 4));
            if (k & (1 << i))
                c.grad[1 + i] = fix_place(&f, 1, 4, NULL);
            ok(bs_weight_new(f.e, 0, &info, &(bs_param_ref){.grad = c.grad[1 + i]}, w[i]));
        }
        check(&f, &c);
        bs_weight_free(c.w);
        bs_weight_free(c.b);
        fix_close(&f);
    }
}

/* A bias of another length or block is refused before anything is launched. */
static void test_layernorm_refused(void **state)
{
    (void)state;
    fixture f;
    float v[24], w[8] = {1, 1, 1, 1, 1, 1, 1, 1};
    bs_weight *norm, *longer, *far;
    bs_tensor *y;
    start(&f);
    fix_seal(&f);
    bs_tensor_info four = fix_weight(&f, "norm", BS_DTYPE_F32, 1, (int64_t[]){4}, w);
    bs_tensor_info eight = fix_weight(&f, "longer", BS_DTYPE_F32, 1, (int64_t[]){8}, w);
    ok(bs_weight_new(f.e, 0, &four, NULL, &norm));
    ok(bs_weight_new(f.e, 0, &eight, NULL, &longer));
    ok(bs_weight_new(f.e, 1, &four, NULL, &far));
    fix_rows(&f, 0, 1, (int64_t[]){3}, NULL);
    fix_scope(&f, 0, false, false);
    bs_tensor *x = fix_from(&f, 3, 8, fix_floats(&f, v, 24));
    uint64_t launches = fix_launches(&f);
    assert_int_equal(bs_op_layernorm(x, norm, longer, 1e-5, &y), BS_SHAPE);
    assert_int_equal(bs_op_layernorm(x, norm, far, 1e-5, &y), BS_SHAPE);
    assert_int_equal(bs_op_layernorm(x, norm, norm, -1.0, &y), BS_ARG);
    assert_int_equal(fix_launches(&f), launches);
    bs_tensor_release(x);
    bs_scope_close(f.e);
    bs_weight_free(norm);
    bs_weight_free(longer);
    bs_weight_free(far);
    fix_close(&f);
}

static void softmax_ref(const opcase *c, double *const *in, double *y)
{
    int64_t C = c->cols[0];
    for (int64_t t = 0; t < c->rows[0]; t++) {
        double sum = 0.0;
        for (int64_t i = 0; i < C; i++)
            sum += exp(in[0][t * C + i]);
        for (int64_t i = 0; i < C; i++)
            y[t * C + i] = exp(in[0][t * C + i]) / sum;
    }
}

static bs_status softmax_op(const opcase *c, bs_tensor *const *x, bs_tensor **y)
{
    (void)c;
    return bs_op_softmax(x[0], y);
}

static void columns_ref(const opcase *c, double *const *in, double *y)
{
    for (int64_t t = 0; t < c->rows[0]; t++)
        for (int64_t i = 0; i < c->n[1]; i++)
            y[t * c->n[1] + i] = in[0][t * c->cols[0] + c->n[0] + i];
}

static bs_status columns_op(const opcase *c, bs_tensor *const *x, bs_tensor **y)
{
    return bs_op_columns(x[0], c->n[0], c->n[1], y);
}

static void row_scale_ref(const opcase *c, double *const *in, double *y)
{
    for (int64_t t = 0; t < c->rows[0]; t++)
        for (int64_t i = 0; i < c->cols[0]; i++)
            y[t * c->cols[0] + i] = in[0][t * c->cols[0] + i] * in[1][t * c->cols[1] + c->n[0]];
}

static bs_status row_scale_op(const opcase *c, bs_tensor *const *x, bs_tensor **y)
{
    return bs_op_row_scale(x[0], x[1], c->n[0], y);
}

static void labelled_ref(const opcase *c, double *const *in, double *y)
{
    int64_t n = 0, at = 0; /* odd tokens of each row are labels of the ones before */
    for (int r = 0; r < 2; at += ROW_LEN[r], r++)
        for (int64_t t = 1; t < ROW_LEN[r]; t++)
            if (t % 2) {
                memcpy(y + n * c->cols[0], in[0] + (at + t - 1) * c->cols[0],
                       (size_t)c->cols[0] * sizeof(double));
                n++;
            }
    assert_int_equal(n, c->y_rows);
}

static bs_status labelled_op(const opcase *c, bs_tensor *const *x, bs_tensor **y)
{
    (void)c;
    return bs_op_labelled(x[0], y);
}

static void test_rows(void **state)
{
    (void)state;
    fixture f;
    start(&f);
    fix_seal(&f);
    static opcase cases[] = {{.name = "softmax",
                              .n_x = 1,
                              .rows = {T},
                              .cols = {7},
                              .y_rows = T,
                              .y_cols = 7,
                              .op = softmax_op,
                              .ref = softmax_ref},
                             {.name = "columns",
                              .n_x = 1,
                              .rows = {T},
                              .cols = {7},
                              .y_rows = T,
                              .y_cols = 3,
                              .n = {2, 3},
                              .op = columns_op,
                              .ref = columns_ref},
                             {.name = "row_scale",
                              .n_x = 2,
                              .rows = {T, T},
                              .cols = {5, 3},
                              .y_rows = T,
                              .y_cols = 5,
                              .n = {1},
                              .op = row_scale_op,
                              .ref = row_scale_ref},
                             {.name = "labelled",
                              .n_x = 1,
                              .rows = {T},
                              .cols = {5},
                              .y_rows = 3,
                              .y_cols = 5,
                              .op = labelled_op,
                              .ref = labelled_ref}};
    for (size_t i = 0; i < BSI_COUNT(cases); i++)
        check(&f, &cases[i]);
    fix_close(&f);
}

/* Rows of a table in the order of the tokens; an id beyond it names its position. */
static void test_embed(void **state)
{
    (void)state;
    fixture f;
    float v[6 * 3], got[5 * 3];
    bs_tensor *y;
    bs_weight *w;
    start(&f);
    fix_seal(&f);
    bs_tensor_info info =
        fix_weight(&f, "embed", BS_DTYPE_F32, 2, (int64_t[]){6, 3}, fix_floats(&f, v, 18));
    ok(bs_weight_new(f.e, 0, &info, NULL, &w));
    const int64_t len[] = {4, 1}, ids[] = {5, 0, 5, 2, 1}, wrong[] = {5, 0, 5, 6, 1};
    bs_micro m = {.n_rows = 2, .row_len = len, .ids = ids};
    ok(bs_batch_set(f.batch, 0, &m));
    ok(bs_batch_begin(f.batch, 1));
    assert_int_equal(bs_op_embed(f.e, w, &y), BS_STATE); /* no scope */
    fix_scope(&f, 0, false, false);
    ok(bs_op_embed(f.e, w, &y));
    assert_int_equal(bs_tensor_dim(y, 0), 5);
    fix_values(y, got);
    for (int t = 0; t < 5; t++)
        assert_memory_equal(got + 3 * t, v + 3 * ids[t], 3 * sizeof(float));
    bs_tensor_release(y);
    bs_scope_close(f.e);
    m.ids = wrong;
    ok(bs_batch_set(f.batch, 0, &m));
    ok(bs_batch_begin(f.batch, 1));
    fix_scope(&f, 0, false, false);
    assert_int_equal(bs_op_embed(f.e, w, &y), BS_ARG);
    assert_non_null(strstr(bs_error()->msg, "token 3: id 6"));
    bs_scope_close(f.e);
    bs_weight_free(w);
    fix_close(&f);
}

/* ---- rope and attention ---------------------------------------------------------------------- */

static void rope_ref(const opcase *c, double *const *in, double *y)
{
    int64_t H = c->n[0], D = c->cols[0] / H, F = c->n[1], at = 0;
    for (int64_t i = 0; i < elems(c, 0); i++)
        y[i] = in[0][i];
    for (int r = 0; r < 2; at += ROW_LEN[r], r++)
        for (int64_t t = 0; t < ROW_LEN[r]; t++)
            for (int64_t h = 0; h < H; h++)
                for (int64_t k = 0; k < F; k++) {
                    const bool half = c->n[2] == BS_ROPE_HALF;
                    int64_t base = ((at + t) * H + h) * D, a = base + (half ? k : 2 * k),
                            b = base + (half ? k + F : 2 * k + 1);
                    double phi = (double)t * (double)(float)pow(0.3, (double)k);
                    double cosine = cos(phi) * c->d[0], sine = sin(phi) * c->d[0];
                    y[a] = in[0][a] * cosine - in[0][b] * sine;
                    y[b] = in[0][b] * cosine + in[0][a] * sine;
                }
}

static bs_status rope_op(const opcase *c, bs_tensor *const *x, bs_tensor **y)
{
    return bs_op_rope(x[0], c->rope, (int)c->n[0], y);
}

static bs_rope *make_rope(fixture *f, int64_t n_freq, double scaling, bs_rope_style style)
{
    bs_array *freq;
    bs_rope *r;
    ok(bs_array_new(BS_DTYPE_F32, 1, &n_freq, &freq));
    for (int64_t k = 0; k < n_freq; k++)
        bs_array_set(freq, k, pow(0.3, (double)k));
    ok(bs_rope_new(f->e, freq, scaling, style, &r));
    bs_array_free(freq);
    return r;
}

static void test_rope(void **state)
{
    (void)state;
    for (int k = 0; k < 4; k++) { /* style x (whole head, first 4 of 6 entries) */
        fixture f;
        start(&f);
        static opcase c;
        c = (opcase){.name = "rope",
                     .n_x = 1,
                     .rows = {T},
                     .cols = {12},
                     .y_rows = T,
                     .y_cols = 12,
                     .n = {2, k & 1 ? 2 : 3, k / 2},
                     .d = {1.25},
                     .op = rope_op,
                     .ref = rope_ref};
        c.rope = make_rope(&f, c.n[1], c.d[0], (bs_rope_style)c.n[2]);
        fix_seal(&f);
        check(&f, &c);
        bs_rope_free(c.rope);
        fix_close(&f);
    }
}

/* in[1] is the weight of a head; d[1] is eps, n[3] one_plus */
static void norm_rope_ref(const opcase *c, double *const *in, double *y)
{
    static double normed[MAX_ELEMS];
    int64_t D = c->cols[1];
    for (int64_t h = 0; h < elems(c, 0) / D; h++) {
        double sum = 0.0;
        for (int64_t i = 0; i < D; i++)
            sum += in[0][h * D + i] * in[0][h * D + i];
        for (int64_t i = 0; i < D; i++)
            normed[h * D + i] =
                in[0][h * D + i] / sqrt(sum / (double)D + c->d[1]) * ((double)c->n[3] + in[1][i]);
    }
    rope_ref(c, (double *[]){normed}, y);
}

static bs_status norm_rope_op(const opcase *c, bs_tensor *const *x, bs_tensor **y)
{
    return bs_op_norm_rope(x[0], c->w, c->d[1], c->n[3] != 0, c->rope, (int)c->n[0], y);
}

static void test_norm_rope(void **state)
{
    (void)state;
    for (int k = 0; k < 16; k++) { /* style, whole head or 4 of 6 entries, one_plus, trainable */
        fixture f;
        static opcase c;
        start(&f);
        c = (opcase){.name = "norm_rope",
                     .n_x = 1,
                     .n_w = 1,
                     .rows = {T, 1},
                     .cols = {12, 6},
                     .y_rows = T,
                     .y_cols = 12,
                     .n = {2, k & 1 ? 2 : 3, k >> 1 & 1, k >> 2 & 1},
                     .d = {1.25, 1e-3},
                     .op = norm_rope_op,
                     .ref = norm_rope_ref};
        c.rope = make_rope(&f, c.n[1], c.d[0], (bs_rope_style)c.n[2]);
        fix_seal(&f);
        bs_tensor_info info =
            fix_weight(&f, "q_norm", BS_DTYPE_BF16, 1, (int64_t[]){6}, fix_floats(&f, c.v[1], 6));
        if (k & 8)
            c.grad[1] = fix_place(&f, 1, 6, NULL);
        ok(bs_weight_new(f.e, 0, &info, &(bs_param_ref){.grad = c.grad[1]}, &c.w));
        check(&f, &c);
        if (k == 0) {
            bs_tensor *y;
            fix_scope(&f, 0, true, false);
            bs_tensor *x = fix_from(&f, T, 12, c.v[0]);
            assert_int_equal(bs_op_norm_rope(x, c.w, 0.0, false, c.rope, 3, &y), BS_SHAPE);
            assert_non_null(strstr(bs_error()->msg, "as 3 heads with weight 'q_norm' [6]"));
            bs_tensor_release(x);
            bs_scope_close(f.e);
        }
        bs_weight_free(c.w);
        bs_rope_free(c.rope);
        fix_close(&f);
    }
}

static void attention_ref(const opcase *c, double *const *in, double *y)
{
    const bs_attention_cfg *a = &c->attention;
    int64_t H = a->heads, K = a->kv_heads, D = a->head_dim, at = 0;
    double scale = a->scale != 0.0 ? a->scale : pow((double)D, -0.5), p[T];
    for (int r = 0; r < 2; at += ROW_LEN[r], r++)
        for (int64_t h = 0; h < H; h++)
            for (int64_t i = 0; i < ROW_LEN[r]; i++) {
                const double *q = in[0] + ((at + i) * H + h) * D;
                double *o = y + ((at + i) * H + h) * D, sum = 0.0;
                int64_t kv = h / (H / K);
                memset(o, 0, (size_t)D * sizeof *o);
                for (int64_t j = 0; j <= i; j++) {
                    const double *k = in[1] + ((at + j) * K + kv) * D;
                    double s = 0.0;
                    for (int64_t e = 0; e < D; e++)
                        s += q[e] * k[e] * scale;
                    if (a->softcap > 0.0)
                        s = a->softcap * tanh(s / a->softcap);
                    p[j] = a->window == 0 || i - j < a->window ? exp(s) : 0.0;
                    sum += p[j];
                }
                if (a->sinks)
                    sum += exp(in[3][h]);
                for (int64_t j = 0; j <= i; j++)
                    for (int64_t e = 0; e < D; e++)
                        o[e] += p[j] / sum * in[2][((at + j) * K + kv) * D + e];
            }
}

static bs_status attention_op(const opcase *c, bs_tensor *const *x, bs_tensor **y)
{
    return bs_op_attention(x[0], x[1], x[2], &c->attention, y);
}

static void test_attention(void **state)
{
    (void)state;
    for (int k = 0; k < 16; k++) { /* bits: window, softcap, sinks, trainable sinks */
        fixture f;
        static opcase c;
        if ((k & 12) == 8)
            continue;
        start(&f);
        fix_seal(&f);
        c = (opcase){.name = "attention",
                     .n_x = 3,
                     .n_w = k & 4 ? 1 : 0,
                     .rows = {T, T, T, 1},
                     .cols = {12, 6, 6, 4},
                     .y_rows = T,
                     .y_cols = 12,
                     .op = attention_op,
                     .ref = attention_ref,
                     .attention = {.heads = 4,
                                   .kv_heads = 2,
                                   .head_dim = 3,
                                   .scale = k & 1 ? 0.9 : 0.0,
                                   .window = k & 1 ? 2 : 0,
                                   .softcap = k & 2 ? 0.7 : 0.0}};
        if (k & 4) {
            bs_tensor_info info =
                fix_weight(&f, "sinks", BS_DTYPE_BF16, 1, (int64_t[]){4}, fix_floats(&f, c.v[3], 4));
            if (k & 8)
                c.grad[3] = fix_place(&f, 1, 4, NULL);
            ok(bs_weight_new(f.e, 0, &info, &(bs_param_ref){.grad = c.grad[3]}, &c.w));
            c.attention.sinks = c.w;
        }
        check(&f, &c);
        bs_weight_free(c.w);
        fix_close(&f);
    }
}

/* ---- linear ---------------------------------------------------------------------------------- */

enum { IN = 6, OUT = 5, RANK = 2, STEP = 5 };
enum { WITH_BIAS = 1, WITH_LORA = 2, WITH_DROPOUT = 4, TRAIN_BASE = 8, FROZEN_A = 16, FROZEN_B = 32 };
enum { I_X, I_W, I_BIAS, I_A, I_B };

static double masked(double x, int64_t t, int64_t channel, double p)
{
    uint32_t key[2], out[4];
    int r = t >= ROW_LEN[0];
    bsi_philox_key(11, "proj", key);
    bsi_philox((uint32_t[]){STEP, (uint32_t)ROW_ID[r], (uint32_t)(t - (r ? ROW_LEN[0] : 0)),
                            (uint32_t)channel / 4},
               key, out);
    return (double)bsi_uniform(out[channel % 4]) < p ? 0.0 : x / (1.0 - p);
}

static void linear_ref(const opcase *c, double *const *in, double *y)
{
    for (int64_t t = 0; t < T; t++)
        for (int64_t o = 0; o < OUT; o++) {
            double sum = c->n[0] & WITH_BIAS ? in[I_BIAS][o] : 0.0;
            for (int64_t i = 0; i < IN; i++)
                sum += in[I_X][t * IN + i] * in[I_W][o * IN + i];
            for (int64_t r = 0; r < RANK && (c->n[0] & WITH_LORA); r++)
                for (int64_t i = 0; i < IN; i++) {
                    double x = in[I_X][t * IN + i];
                    if (c->n[0] & WITH_DROPOUT)
                        x = masked(x, t, i, 0.25);
                    sum += 1.5 * x * in[I_A][r * IN + i] * in[I_B][o * RANK + r];
                }
            y[t * OUT + o] = sum;
        }
}

static bs_status linear_op(const opcase *c, bs_tensor *const *x, bs_tensor **y)
{
    return bs_op_linear(x[0], c->l, y);
}

static void check_linear(bs_dtype stored, int flags)
{
    fixture f;
    start(&f);
    fix_seal(&f);
    static opcase c;
    c = (opcase){.name = "linear",
                 .n_x = 1,
                 .n_w = 4,
                 .rows = {T, OUT, 1, RANK, OUT},
                 .cols = {IN, IN, OUT, IN, RANK},
                 .y_rows = T,
                 .y_cols = OUT,
                 .n = {flags},
                 .train = (flags & WITH_DROPOUT) != 0,
                 .op = linear_op,
                 .ref = linear_ref};
    for (int i = I_W; i <= I_B; i++)
        fix_floats(&f, c.v[i], elems(&c, i));
    bs_tensor_info w = fix_weight(&f, "proj.weight", stored, 2, (int64_t[]){OUT, IN}, c.v[I_W]);
    bs_tensor_info b = fix_weight(&f, "proj.bias", stored, 1, (int64_t[]){OUT}, c.v[I_BIAS]);
    bs_linear_cfg cfg = {.block = 0, .weight = &w, .name = "proj", .scale = 1.5f, .dropout = 0.25f};
    if (flags & WITH_BIAS)
        cfg.bias = &b;
    if (flags & TRAIN_BASE) {
        cfg.base_weight.grad = c.grad[I_W] = fix_place(&f, OUT, IN, NULL);
        if (flags & WITH_BIAS)
            cfg.base_bias.grad = c.grad[I_BIAS] = fix_place(&f, OUT, 1, NULL);
    }
    if (flags & WITH_LORA) {
        cfg.lora_a.value = fix_place(&f, RANK, IN, c.v[I_A]);
        cfg.lora_b.value = fix_place(&f, OUT, RANK, c.v[I_B]);
        if (!(flags & FROZEN_A))
            cfg.lora_a.grad = c.grad[I_A] = fix_place(&f, RANK, IN, NULL);
        if (!(flags & FROZEN_B))
            cfg.lora_b.grad = c.grad[I_B] = fix_place(&f, OUT, RANK, NULL);
    }
    ok(bs_linear_new(f.e, &cfg, &c.l));
    check(&f, &c);
    bs_linear_free(c.l);
    fix_close(&f);
}

static void test_linear(void **state)
{
    (void)state;
    const int flags[] = {0,
                         WITH_BIAS,
                         TRAIN_BASE,
                         WITH_BIAS | TRAIN_BASE,
                         WITH_LORA,
                         WITH_BIAS | WITH_LORA,
                         WITH_LORA | WITH_DROPOUT,
                         WITH_BIAS | WITH_LORA | WITH_DROPOUT,
                         WITH_BIAS | WITH_LORA | WITH_DROPOUT | TRAIN_BASE,
                         WITH_LORA | WITH_DROPOUT | FROZEN_A,
                         WITH_LORA | WITH_DROPOUT | FROZEN_B,
                         WITH_LORA | FROZEN_A | FROZEN_B};
    for (size_t i = 0; i < BSI_COUNT(flags); i++) {
        check_linear(BS_DTYPE_F32, flags[i]);
        check_linear(BS_DTYPE_BF16, flags[i]);
        check_linear(BS_DTYPE_F16, flags[i]);
    }
}

/* ---- rows do not see each other -------------------------------------------------------------- */

typedef struct pair { /* forward and dq, dk, dv over the rows of a micro-batch */
    float y[4][MAX_ELEMS];
} pair;

static void rope_attention(fixture *f, bs_rope *rope, int64_t first, int64_t n, float v[3][MAX_ELEMS],
                           const float *r, pair *out)
{
    bs_tensor *x[3], *rot[2], *y, *g, *grad;
    fix_scope(f, 0, true, false);
    for (int i = 0; i < 3; i++) {
        x[i] = fix_from(f, n, 8, v[i] + first * 8);
        ok(bs_tensor_want_grad(x[i]));
    }
    ok(bs_op_rope(x[0], rope, 2, &rot[0]));
    ok(bs_op_rope(x[1], rope, 2, &rot[1]));
    ok(bs_op_attention(rot[0], rot[1], x[2],
                       &(bs_attention_cfg){.heads = 2, .kv_heads = 2, .head_dim = 4}, &y));
    fix_values(y, out->y[0] + first * 8);
    g = fix_from(f, n, 8, r + first * 8);
    ok(bs_scope_backward(f->e, 1, &y, &g));
    for (int i = 0; i < 3; i++) {
        ok(bs_tensor_grad(x[i], &grad));
        fix_values(grad, out->y[1 + i] + first * 8);
        bs_tensor_release(grad);
        bs_tensor_release(x[i]);
    }
    bs_tensor *all[] = {rot[0], rot[1], y, g};
    for (size_t i = 0; i < BSI_COUNT(all); i++)
        bs_tensor_release(all[i]);
    bs_scope_close(f->e);
}

static void test_rows_are_isolated(void **state)
{
    (void)state;
    fixture f;
    static float v[3][MAX_ELEMS], r[MAX_ELEMS];
    static pair together, alone;
    start(&f);
    bs_rope *rope = make_rope(&f, 2, 1.0, BS_ROPE_HALF);
    fix_seal(&f);
    for (int i = 0; i < 3; i++)
        fix_floats(&f, v[i], T * 8);
    fix_floats(&f, r, T * 8);
    rope_attention(&f, rope, 0, T, v, r, &together);
    for (int64_t i = 0, at = 0; i < 2; at += ROW_LEN[i], i++) {
        fix_rows(&f, 0, 1, &ROW_LEN[i], NULL);
        rope_attention(&f, rope, at, ROW_LEN[i], v, r, &alone);
    }
    assert_memory_equal(&together, &alone, sizeof together); /* to the bit */
    bs_rope_free(rope);
    fix_close(&f);
}

/* An empty tensor passes through every op that a micro-batch without labelled rows meets. */
static void test_no_rows(void **state)
{
    (void)state;
    fixture f;
    float v[4 * 4], w[4] = {1, 1, 1, 1}, got[16];
    start(&f);
    fix_seal(&f);
    bs_tensor_info info = fix_weight(&f, "norm", BS_DTYPE_F32, 1, (int64_t[]){4}, w);
    bs_weight *norm;
    ok(bs_weight_new(f.e, 0, &info, NULL, &norm));
    fix_rows(&f, 0, 4, (int64_t[]){1, 1, 1, 1}, NULL); /* rows of one token train nothing */
    fix_scope(&f, 0, true, false);
    bs_tensor *x = fix_from(&f, 4, 4, fix_floats(&f, v, 16)), *l, *y, *z, *s, *m, *dx, *vw, *g;
    ok(bs_tensor_want_grad(x));
    ok(bs_op_labelled(x, &l));
    ok(bs_op_rmsnorm(l, norm, 1e-6, false, &y));
    ok(bs_op_glu(y, y, BS_ACT_SILU, &z));
    ok(bs_op_softmax(z, &s));
    ok(bs_op_columns(s, 1, 2, &m));
    ok(bs_op_view(m, 2, (int64_t[]){0, 1}, &vw));
    assert_int_equal(bs_tensor_dim(vw, 0), 0);
    assert_int_equal(bs_tensor_capacity(vw), 8);
    g = fix_from(&f, 0, 1, NULL);
    ok(bs_scope_backward(f.e, 1, &vw, &g));
    ok(bs_tensor_grad(x, &dx));
    fix_values(dx, got);
    for (int i = 0; i < 16; i++)
        assert_true(got[i] == 0.0f);
    bs_tensor *all[] = {x, l, y, z, s, m, dx, vw, g};
    for (size_t i = 0; i < BSI_COUNT(all); i++)
        bs_tensor_release(all[i]);
    bs_weight_free(norm);
    fix_close(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_elementwise),
                                       cmocka_unit_test(test_rmsnorm),
                                       cmocka_unit_test(test_layernorm),
                                       cmocka_unit_test(test_layernorm_refused),
                                       cmocka_unit_test(test_rows),
                                       cmocka_unit_test(test_embed),
                                       cmocka_unit_test(test_rope),
                                       cmocka_unit_test(test_norm_rope),
                                       cmocka_unit_test(test_attention),
                                       cmocka_unit_test(test_linear),
                                       cmocka_unit_test(test_rows_are_isolated),
                                       cmocka_unit_test(test_no_rows)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
