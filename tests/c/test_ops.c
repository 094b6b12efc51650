/* SPDX-License-Identifier: Apache-2.0 */
/* Every op but those that read rows (test_ops_rows.c), forward and backward, against its formula. */
#include "op_case.h"

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

static double clamp64(double x, double least, double most)
{
    return x < least ? least : x > most ? most : x;
}

static void glu_clamped_ref(const opcase *c, double *const *in, double *y)
{
    for (int64_t i = 0; i < c->y_rows * c->y_cols; i++) {
        double g = clamp64(in[0][2 * i], -INFINITY, c->d[1]);
        y[i] = (clamp64(in[0][2 * i + 1], -c->d[1], c->d[1]) + 1.0) * g / (1.0 + exp(-c->d[0] * g));
    }
}

static bs_status glu_clamped_op(const opcase *c, bs_tensor *const *x, bs_tensor **y)
{
    return bs_op_glu_clamped(x[0], c->d[0], c->d[1], y);
}

/* Numbers are in [-1, 1): one limit is beyond all, one is not. */
static void test_glu_clamped(void **state)
{
    (void)state;
    fixture f;
    float v[T * 3];
    bs_tensor *y;
    start(&f);
    fix_seal(&f);
    for (int k = 0; k < 2; k++) {
        opcase c = {.name = "glu_clamped",
                    .n_x = 1,
                    .rows = {T},
                    .cols = {10},
                    .y_rows = T,
                    .y_cols = 5,
                    .d = {1.702, k ? 0.6 : 7.0},
                    .op = glu_clamped_op,
                    .ref = glu_clamped_ref};
        check(&f, &c);
    }
    fix_scope(&f, 0, false, false);
    bs_tensor *x = fix_from(&f, T, 3, fix_floats(&f, v, T * 3));
    assert_int_equal(bs_op_glu_clamped(x, 1.702, 7.0, &y), BS_SHAPE);
    assert_non_null(strstr(bs_error()->msg, "an even number of channels"));
    bs_tensor_release(x);
    bs_scope_close(f.e);
    fix_close(&f);
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

/* ---- linear ---------------------------------------------------------------------------------- */

enum { IN = 6, OUT = 5, RANK = 2, STEP = 5 };
enum {
    WITH_BIAS = 1,
    WITH_LORA = 2,
    WITH_DROPOUT = 4,
    TRAIN_BASE = 8,
    FROZEN_A = 16,
    FROZEN_B = 32,
    RESIDUAL = 64,
    TRANSPOSED = 128 /* the weight lies as [in, out] */
};
enum { I_X, I_R, I_W, I_BIAS, I_A, I_B }; /* without a residual, one less from I_W on */

static int input(const opcase *c, int i)
{
    return c->n[0] & RESIDUAL ? i : i - 1;
}

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
            double sum = c->n[0] & WITH_BIAS ? in[input(c, I_BIAS)][o] : 0.0;
            if (c->n[0] & RESIDUAL)
                sum += in[I_R][t * OUT + o];
            for (int64_t i = 0; i < IN; i++)
                sum += in[I_X][t * IN + i] *
                       in[input(c, I_W)][c->n[0] & TRANSPOSED ? i * OUT + o : o * IN + i];
            for (int64_t r = 0; r < RANK && (c->n[0] & WITH_LORA); r++)
                for (int64_t i = 0; i < IN; i++) {
                    double x = in[I_X][t * IN + i];
                    if (c->n[0] & WITH_DROPOUT)
                        x = masked(x, t, i, 0.25);
                    sum += 1.5 * x * in[input(c, I_A)][r * IN + i] * in[input(c, I_B)][o * RANK + r];
                }
            y[t * OUT + o] = sum;
        }
}

static bs_status linear_op(const opcase *c, bs_tensor *const *x, bs_tensor **y)
{
    return bs_op_linear(x[I_X], c->l, c->n[0] & RESIDUAL ? x[I_R] : NULL, y);
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
                 .rows = {[I_X] = T},
                 .cols = {[I_X] = IN},
                 .y_rows = T,
                 .y_cols = OUT,
                 .n = {flags},
                 .train = (flags & WITH_DROPOUT) != 0,
                 .op = linear_op,
                 .ref = linear_ref};
    if (flags & RESIDUAL) {
        c.n_x = 2;
        c.rows[I_R] = T;
        c.cols[I_R] = OUT;
    }
    const bool turned = (flags & TRANSPOSED) != 0;
    const int64_t shape[][2] = {
        {turned ? IN : OUT, turned ? OUT : IN}, {1, OUT}, {RANK, IN}, {OUT, RANK}};
    for (int i = I_W; i <= I_B; i++) {
        c.rows[input(&c, i)] = shape[i - I_W][0];
        c.cols[input(&c, i)] = shape[i - I_W][1];
        fix_floats(&f, c.v[input(&c, i)], elems(&c, input(&c, i)));
    }
    const int iw = input(&c, I_W), ib = input(&c, I_BIAS), ia = input(&c, I_A), il = input(&c, I_B);
    bs_tensor_info w = fix_weight(&f, "proj.weight", stored, 2, shape[0], c.v[iw]);
    bs_tensor_info b = fix_weight(&f, "proj.bias", stored, 1, (int64_t[]){OUT}, c.v[ib]);
    bs_linear_cfg cfg = {.block = 0, .weight = &w, .name = "proj", .scale = 1.5f, .dropout = 0.25f};
    cfg.transposed = turned;
    if (flags & WITH_BIAS)
        cfg.bias = &b;
    if (flags & TRAIN_BASE) {
        cfg.base_weight.grad = c.grad[iw] = fix_place(&f, shape[0][0], shape[0][1], NULL);
        if (flags & WITH_BIAS)
            cfg.base_bias.grad = c.grad[ib] = fix_place(&f, OUT, 1, NULL);
    }
    if (flags & WITH_LORA) {
        cfg.lora_a.value = fix_place(&f, RANK, IN, c.v[ia]);
        cfg.lora_b.value = fix_place(&f, OUT, RANK, c.v[il]);
        if (!(flags & FROZEN_A))
            cfg.lora_a.grad = c.grad[ia] = fix_place(&f, RANK, IN, NULL);
        if (!(flags & FROZEN_B))
            cfg.lora_b.grad = c.grad[il] = fix_place(&f, OUT, RANK, NULL);
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
    for (size_t i = 0; i < 4 * BSI_COUNT(flags); i++) {
        int flag = flags[i / 4] | (i % 2 ? RESIDUAL : 0) | (i % 4 / 2 ? TRANSPOSED : 0);
        check_linear(BS_DTYPE_F32, flag);
        check_linear(BS_DTYPE_BF16, flag);
        check_linear(BS_DTYPE_F16, flag);
    }
}

/* A weight that is packed is unpacked once a visit, and is then as any other. */
enum { P_ROWS = 3, P_IN = 32, P_OUT = 4 };

static void packed_ref(const opcase *c, double *const *in, double *y)
{
    (void)c;
    for (int t = 0; t < P_ROWS; t++)
        for (int o = 0; o < P_OUT; o++) {
            y[t * P_OUT + o] = 0.0;
            for (int i = 0; i < P_IN; i++)
                y[t * P_OUT + o] += in[0][t * P_IN + i] * in[1][o * P_IN + i];
        }
}

static bs_status packed_op(const opcase *c, bs_tensor *const *x, bs_tensor **y)
{
    return bs_op_linear(x[0], c->l, NULL, y);
}

static void test_packed(void **state)
{
    (void)state;
    fixture f;
    static float v[P_ROWS * P_IN], got[P_ROWS * P_OUT];
    static opcase c;
    bs_tensor *y;
    bs_weight *none;
    start(&f);
    fix_seal(&f);
    c = (opcase){.name = "packed linear",
                 .n_x = 1,
                 .n_w = 1,
                 .rows = {P_ROWS, P_OUT},
                 .cols = {P_IN, P_IN},
                 .y_rows = P_ROWS,
                 .y_cols = P_OUT,
                 .op = packed_op,
                 .ref = packed_ref};
    fix_weight(&f, "before", BS_DTYPE_BF16, 1, (int64_t[]){3}, v); /* offsets that are not zero */
    bs_tensor_info w = fix_packed(&f, "proj.weight", P_OUT, P_IN, c.v[1]);
    bs_linear_cfg cfg = {.weight = &w, .name = "proj"};
    cfg.base_weight.grad = c.grad[1] = fix_place(&f, P_OUT, P_IN, NULL);
    ok(bs_linear_new(f.e, &cfg, &c.l));
    check(&f, &c);
    fix_visit(&f, true);
    fix_scope(&f, 0, false, false);
    bs_tensor *x = fix_from(&f, P_ROWS, P_IN, fix_floats(&f, v, P_ROWS * P_IN));
    for (int use = 0; use < 3; use++) {
        uint64_t launches = fix_launches(&f);
        ok(bs_op_linear(x, c.l, NULL, &y));
        fix_values(y, got);
        assert_int_equal(fix_launches(&f) - launches, use ? 1 : 2);
        bs_tensor_release(y);
    }
    bs_tensor_release(x);
    bs_scope_close(f.e);
    w.packing = BS_PLAIN; /* as scales are */
    assert_int_equal(bs_weight_new(f.e, 0, &w, NULL, &none), BS_DTYPE);
    assert_non_null(strstr(bs_error()->msg, "is stored as u8"));
    bs_linear_free(c.l);
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
                                       cmocka_unit_test(test_glu_clamped),
                                       cmocka_unit_test(test_rmsnorm),
                                       cmocka_unit_test(test_layernorm),
                                       cmocka_unit_test(test_layernorm_refused),
                                       cmocka_unit_test(test_rows),
                                       cmocka_unit_test(test_embed),
                                       cmocka_unit_test(test_linear),
                                       cmocka_unit_test(test_packed),
                                       cmocka_unit_test(test_no_rows)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
