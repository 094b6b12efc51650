/* SPDX-License-Identifier: Apache-2.0 */
/* Sums in f64 and AdamW against an f64 reference. */
#include "kernel_test.h"

static void test_sums(void **state)
{
    (void)state;
    static const int64_t sizes[] = {0, 1, 3, 5, 8191, 8192, 8193, 100003, 64 * 8192 + 5};
    for (size_t i = 0; i < BSI_COUNT(sizes); i++) {
        int64_t n = sizes[i];
        float *x = array(n, 3);
        double sum = 0, squares = 0, got, first[2] = {0, 0};
        for (int64_t j = 0; j < n; j++) {
            sum += (double)x[j];
            squares += (double)x[j] * (double)x[j];
        }
        for (int p = 0; p < 3; p++) {
            got = NAN;
            launch(BSK_SUM, (bsk_call){.p = {x, &got}, .n = {n}}, pars[p]);
            near_("sum", got, sum, 1e-12 * (1 + sqrt((double)n)));
            first[0] = p ? first[0] : got;
            assert_true(got == first[0]);
            launch(BSK_SUMSQ, (bsk_call){.p = {x, &got}, .n = {n}}, pars[p]);
            near_("sumsq", got, squares, 1e-12);
            first[1] = p ? first[1] : got;
            assert_true(got == first[1]);
        }
        array_free(x, n);
    }
}

static void test_sum_cancels(void **state)
{
    (void)state;
    float x[5] = {1e8f, 1.0f, -1e8f, 0.25f, 0.5f}; /* f32 would lose the small ones */
    double got = NAN;
    launch(BSK_SUM, (bsk_call){.p = {x, &got}, .n = {5}}, &team2);
    assert_true(got == 1.75);
}

/* One step from the state that the kernel itself left, so that errors do not pile up: each result is
   the f64 one, rounded. */
static void test_adamw(void **state)
{
    (void)state;
    enum { N = 40009, STEPS = 12 };
    const double lr = 3e-4, b1 = 0.9, b2 = 0.95, eps = 1e-8, decay = 0.1, gscale = 0.37;
    float *p0 = array(N, 1), *g = array(N, 0), *p[3], *m[3], *v[3];
    double *long_p = malloc(N * sizeof *long_p), *long_m = calloc(N, sizeof *long_m);
    double *long_v = calloc(N, sizeof *long_v);
    for (int k = 0; k < 3; k++) {
        p[k] = array_copy(p0, N);
        m[k] = array_of(N, 0);
        v[k] = array_of(N, 0);
    }
    for (int i = 0; i < N; i++)
        long_p[i] = (double)p0[i];
    for (int t = 1; t <= STEPS; t++) {
        double bc1 = 1 - pow(b1, t), bc2 = 1 - pow(b2, t);
        for (int i = 0; i < N; i++)
            g[i] = i % 7 == 0 ? 0.0f : (float)uniform() * (i % 3 ? 1e-3f : 10.0f);
        float *pp = array_copy(p[0], N), *pm = array_copy(m[0], N), *pv = array_copy(v[0], N);
        for (int k = 0; k < 3; k++)
            launch(BSK_ADAMW,
                   (bsk_call){.p = {p[k], g, m[k], v[k]},
                              .n = {N},
                              .f = {lr, b1, b2, eps, decay, bc1, bc2, gscale}},
                   pars[k]);
        for (int i = 0; i < N; i++) {
            double gi = (double)g[i] * gscale, wm = b1 * (double)pm[i] + (1 - b1) * gi;
            double wv = b2 * (double)pv[i] + (1 - b2) * gi * gi;
            double wp = (double)pp[i] * (1 - lr * decay) - lr * (wm / bc1) / (sqrt(wv / bc2) + eps);
            if (fabs((double)p[0][i] - wp) > 6.1e-8 * fabs(wp) ||
                fabs((double)m[0][i] - wm) > 6.1e-8 * fabs(wm) ||
                fabs((double)v[0][i] - wv) > 6.1e-8 * fabs(wv))
                fail_msg("step %d element %d: p %.9g want %.9g, m %.9g want %.9g", t, i,
                         (double)p[0][i], wp, (double)m[0][i], wm);
            /* The same in f64 from the beginning: rounding of the state stays small. */
            long_m[i] = b1 * long_m[i] + (1 - b1) * gi;
            long_v[i] = b2 * long_v[i] + (1 - b2) * gi * gi;
            long_p[i] =
                long_p[i] * (1 - lr * decay) - lr * (long_m[i] / bc1) / (sqrt(long_v[i] / bc2) + eps);
        }
        array_free(pp, N);
        array_free(pm, N);
        array_free(pv, N);
    }
    for (int i = 0; i < N; i++)
        near_("p after 12 steps", (double)p[0][i], long_p[i], 4e-7);
    for (int k = 0; k < 3; k++) {
        same_bits("p", p[k], p[0], N);
        same_bits("m", m[k], m[0], N);
        same_bits("v", v[k], v[0], N);
    }
    for (int k = 0; k < 3; k++) {
        array_free(p[k], N);
        array_free(m[k], N);
        array_free(v[k], N);
    }
    array_free(p0, N);
    array_free(g, N);
    free(long_p);
    free(long_m);
    free(long_v);
}

/* The copy is the new p, rounded to what is asked; without one the same p comes out. */
static void test_adamw_copy(void **state)
{
    (void)state;
    enum { N = 9001 };
    float *p = array(N, 1), *g = array(N, 1), *m = array_of(N, 0), *v = array_of(N, 0);
    static uint16_t half[N];
    static float same[N];
    void *const copy[] = {NULL, same, half};
    float *first = NULL;
    for (int k = 0; k < 3; k++) {
        float *q = array_copy(p, N), *mk = array_copy(m, N), *vk = array_copy(v, N);
        launch(BSK_ADAMW,
               (bsk_call){.p = {q, g, mk, vk, copy[k]},
                          .n = {N},
                          .f = {0.1, 0.9, 0.99, 1e-8, 0.01, 0.1, 0.01, 1},
                          .out = k == 2 ? BS_DTYPE_BF16 : BS_DTYPE_F32},
               pars[k]);
        if (k == 0)
            first = array_copy(q, N);
        same_bits("p", q, first, N);
        array_free(q, N);
        array_free(mk, N);
        array_free(vk, N);
    }
    same_bits("copy", same, first, N);
    for (int i = 0; i < N; i++)
        assert_int_equal(half[i], bsi_f32_to_bf16(first[i]));
    array_free(first, N);
    array_free(p, N);
    array_free(g, N);
    array_free(m, N);
    array_free(v, N);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sums),
        cmocka_unit_test(test_sum_cancels),
        cmocka_unit_test(test_adamw),
        cmocka_unit_test(test_adamw_copy),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
