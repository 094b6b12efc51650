/* SPDX-License-Identifier: Apache-2.0 */
/* The ops that read the rows of a micro-batch: rotation, norm and rotation, attention. */
#include "op_case.h"

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
                    const bool half = c->n[2] == BSK_ROPE_HALF;
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

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_rope), cmocka_unit_test(test_norm_rope),
                                       cmocka_unit_test(test_attention),
                                       cmocka_unit_test(test_rows_are_isolated)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
