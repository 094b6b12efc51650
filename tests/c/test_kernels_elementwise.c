/* SPDX-License-Identifier: Apache-2.0 */
/* Activations, gated activations, expansion of stored dtypes, products and sums, element by element. */
#include "kernel_test.h"

static double sigmoid(double x)
{
    return 1 / (1 + exp(-x));
}

static double act(double x, int which)
{
    switch (which) {
    case BSK_SILU:
        return x * sigmoid(x);
    case BSK_GELU_TANH:
        return 0.5 * x * (1 + tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
    case BSK_GELU_ERF:
        return 0.5 * x * (1 + erf(x / sqrt(2)));
    default:
        return x > 0 ? x : 0;
    }
}

static double slope(double x, int which)
{
    double h = 1e-5;
    return (act(x + h, which) - act(x - h, which)) / (2 * h);
}

static const int64_t sizes[] = {0, 1, 7, 16, 33, 50021};

/* Launches on 1, 2, 3 threads and compares the bits of operand `out`. */
static void launch_all(bsk_op op, bsk_call c, int out, int64_t n)
{
    float *start = array_copy(c.p[out], n), *first = NULL;
    for (int p = 0; p < 3; p++) {
        memcpy(c.p[out], start, (size_t)n * sizeof *start);
        launch(op, c, pars[p]);
        if (!first)
            first = array_copy(c.p[out], n);
        same_bits(bsk_cpu[op].name, first, c.p[out], n);
    }
    array_free(start, n);
    array_free(first, n);
}

static void test_act(void **state)
{
    (void)state;
    for (size_t i = 0; i < BSI_COUNT(sizes); i++)
        for (int a = BSK_SILU; a <= BSK_RELU; a++) {
            int64_t n = sizes[i];
            float *x = array(n, 12), *y = array_of(n, NAN), *dy = array(n, 1), *dx = array_of(n, NAN);
            launch_all(BSK_ACT, (bsk_call){.p = {x, y}, .n = {n, a}}, 1, n);
            launch_all(BSK_ACT_BWD, (bsk_call){.p = {x, dy, dx}, .n = {n, a}}, 2, n);
            for (int64_t k = 0; k < n; k++) {
                near_("act", (double)y[k], act((double)x[k], a), 5e-7);
                near_("act_bwd", (double)dx[k], (double)dy[k] * slope((double)x[k], a), 2e-6);
                assert_true(y[k] == bsk_act_f32(x[k], a));
            }
            launch(BSK_ACT, (bsk_call){.p = {x, x}, .n = {n, a}}, &team2);
            same_bits("in place", x, y, n);
            array_free(x, n), array_free(y, n), array_free(dy, n), array_free(dx, n);
        }
}

/* Small arguments keep their relative accuracy, large ones do not overflow, NaN stays. */
static void test_act_ends(void **state)
{
    (void)state;
    static const float x[] = {1e-30f, -1e-20f, 1e-6f, -3e-4f, 0.02f, 0.6f,
                              0.63f,  -0.9f,   4.0f,  -7.0f,  20.0f};
    for (size_t i = 0; i < BSI_COUNT(x); i++)
        for (int a = BSK_SILU; a <= BSK_GELU_ERF; a++) {
            double want = act((double)x[i], a), got = (double)bsk_act_f32(x[i], a);
            if (!(fabs(got - want) <=
                  4e-7 * fabs(want) + 4e-7 * (x[i] < -1))) /* the tail cancels in 1 + t */
                fail_msg("act %d of %g: got %.9g, want %.9g", a, (double)x[i], got, want);
            near_("slope", (double)bsk_act_grad_f32(x[i], a), slope((double)x[i], a), 2e-6);
        }
    for (int a = BSK_SILU; a <= BSK_RELU; a++) {
        assert_true(bsk_act_f32(3e38f, a) == 3e38f);
        assert_true(bsk_act_f32(-1e30f, a) == 0.0f && bsk_act_f32(0.0f, a) == 0.0f);
        assert_true(isnan(bsk_act_f32(NAN, a)));
        assert_true(bsk_act_grad_f32(200.0f, a) == 1.0f && bsk_act_grad_f32(-200.0f, a) == 0.0f);
    }
}

static void test_glu(void **state)
{
    (void)state;
    for (size_t i = 0; i < BSI_COUNT(sizes); i++)
        for (int a = BSK_SILU; a <= BSK_RELU; a++) {
            int64_t n = sizes[i];
            float *g = array(n, 6), *u = array(n, 2), *y = array_of(n, NAN), *dy = array(n, 1);
            float *dg = array_of(n, NAN), *du = array_of(n, NAN);
            launch_all(BSK_GLU, (bsk_call){.p = {g, u, y}, .n = {n, a}}, 2, n);
            bsk_call b = {.p = {g, u, dy, dg, du}, .n = {n, a}};
            launch_all(BSK_GLU_BWD, b, 3, n);
            launch_all(BSK_GLU_BWD, b, 4, n);
            for (int64_t k = 0; k < n; k++) {
                double gk = (double)g[k], uk = (double)u[k], d = (double)dy[k];
                near_("glu", (double)y[k], act(gk, a) * uk, 5e-7);
                near_("dg", (double)dg[k], d * uk * slope(gk, a), 3e-6);
                near_("du", (double)du[k], d * act(gk, a), 5e-7);
            }
            launch(BSK_GLU_BWD, (bsk_call){.p = {g, u, dy, g, u}, .n = {n, a}}, &team2);
            same_bits("in place", g, dg, n);
            same_bits("in place", u, du, n);
            array_free(g, n), array_free(u, n), array_free(y, n), array_free(dy, n);
            array_free(dg, n), array_free(du, n);
        }
}

static double clamped(double g, double u, double limit)
{
    g = fmin(g, limit);
    return (fmax(fmin(u, limit), -limit) + 1) * g * sigmoid(1.702 * g);
}

/* Gates and ups in turn. At a limit itself the gradient is that of its inner side. */
static void test_glu_clamped(void **state)
{
    (void)state;
    const double limit = 7, h = 1e-5;
    for (size_t i = 0; i < BSI_COUNT(sizes); i++) {
        int64_t n = sizes[i];
        float *x = array(2 * n, 11), *y = array_of(n, NAN), *dy = array(n, 1),
              *dx = array_of(2 * n, NAN);
        for (int64_t k = 0; k < n; k += 5)
            x[2 * k + k % 2] = k % 4 ? 7.0f : -7.0f;
        bsk_call f = {.p = {x, y}, .n = {n, 1}, .f = {1.702, limit}};
        bsk_call b = {.p = {x, dy, dx}, .n = {1, n}, .f = {1.702, limit}};
        launch_all(BSK_GLU_CLAMPED, f, 1, n);
        launch_all(BSK_GLU_CLAMPED_BWD, b, 2, 2 * n);
        for (int64_t k = 0; k < n; k++) {
            double g = (double)x[2 * k], u = (double)x[2 * k + 1], d = (double)dy[k];
            double dg = (clamped(g + h, u, limit) - clamped(g - h, u, limit)) / (2 * h),
                   du = (clamped(g, u + h, limit) - clamped(g, u - h, limit)) / (2 * h);
            near_("glu_clamped", (double)y[k], clamped(g, u, limit), 1e-6);
            near_("dg", (double)dx[2 * k], d * dg * (g == limit ? 2 : 1), 1e-5);
            near_("du", (double)dx[2 * k + 1], d * du * (fabs(u) == limit ? 2 : 1), 1e-5);
        }
        b.p[2] = x;
        launch(BSK_GLU_CLAMPED_BWD, b, &team2);
        same_bits("in place", x, dx, 2 * n);
        array_free(x, 2 * n), array_free(y, n), array_free(dy, n), array_free(dx, 2 * n);
    }
    float x[] = {NAN, 1, 1, NAN, 1e30f, 1e30f, -1e30f, -1e30f}, y[4];
    launch(BSK_GLU_CLAMPED, (bsk_call){.p = {x, y}, .n = {2, 2}, .f = {1.702, limit}}, &team2);
    assert_true(isnan(y[0]) && isnan(y[1]) && y[2] > 55.9f && y[2] <= 56.0f && y[3] == 0.0f);
}

static void test_arithmetic(void **state)
{
    (void)state;
    for (size_t i = 0; i < BSI_COUNT(sizes); i++) {
        int64_t n = sizes[i];
        float *a = array(n, 1), *b = array(n, 1), *y = array_of(n, NAN), *cap = array(n, 90);
        launch_all(BSK_ADD, (bsk_call){.p = {a, b, y}, .n = {n}}, 2, n);
        for (int64_t k = 0; k < n; k++)
            assert_true(y[k] == a[k] + b[k]);
        launch_all(BSK_MUL, (bsk_call){.p = {a, b, y}, .n = {n}}, 2, n);
        for (int64_t k = 0; k < n; k++)
            assert_true(y[k] == a[k] * b[k]);
        launch_all(BSK_AXPY, (bsk_call){.p = {a, y}, .n = {n}, .f = {-0.3}}, 1, n);
        for (int64_t k = 0; k < n; k++)
            assert_true(y[k] == a[k] * b[k] + -0.3f * a[k]);
        launch_all(BSK_SCALE, (bsk_call){.p = {a, y}, .n = {n}, .f = {0.7}}, 1, n);
        for (int64_t k = 0; k < n; k++)
            assert_true(y[k] == 0.7f * a[k]);
        float *raw = array_copy(cap, n);
        launch_all(BSK_SOFTCAP, (bsk_call){.p = {cap}, .n = {n}, .f = {30.0}}, 0, n);
        for (int64_t k = 0; k < n; k++)
            near_("softcap", (double)cap[k], 30 * tanh((double)raw[k] / 30), 4e-7);
        array_free(a, n), array_free(b, n), array_free(y, n), array_free(cap, n), array_free(raw, n);
    }
}

/* Every 16-bit pattern, against the reference conversions. */
static void test_expand(void **state)
{
    (void)state;
    enum { N = 65536 };
    uint16_t *half = malloc(N * sizeof *half);
    float *y = array_of(N, 0), *single = array(N, 5);
    for (int i = 0; i < N; i++)
        half[i] = (uint16_t)i;
    for (int bf16 = 0; bf16 < 2; bf16++) {
        int dtype = bf16 ? BS_DTYPE_BF16 : BS_DTYPE_F16;
        launch_all(BSK_EXPAND, (bsk_call){.p = {half, y}, .n = {dtype, N}, .f = {1}}, 1, N);
        for (int i = 0; i < N; i++) {
            float want = bf16 ? bsi_bf16_to_f32(half[i]) : bsi_f16_to_f32(half[i]);
            assert_true(isnan(want) ? isnan(y[i]) : memcmp(&want, &y[i], 4) == 0);
        }
        launch(BSK_EXPAND, (bsk_call){.p = {half, y}, .n = {dtype, 0x3C01}, .f = {0.5}}, &team2);
        assert_true(y[0x3C00] == 0.5f * (bf16 ? bsi_bf16_to_f32(0x3C00) : 1.0f));
    }
    launch_all(BSK_EXPAND, (bsk_call){.p = {single, y}, .n = {BS_DTYPE_F32, N - 3}, .f = {2}}, 1, N);
    for (int i = 0; i < N - 3; i++)
        assert_true(y[i] == 2.0f * single[i]);
    array_free(y, N);
    array_free(single, N);
    free(half);
}

/* The same rounded to bf16, nearest even, from every source type and on any threads. */
static void test_expand_rounds(void **state)
{
    (void)state;
    enum { N = 40001 };
    static uint16_t half[N], got[N + 1];
    float *single = array(N, 3);
    single[0] = NAN;
    single[1] = INFINITY;
    for (int i = 0; i < N; i++)
        half[i] = (uint16_t)(i % 0x7C00); /* finite in both */
    static const int dtypes[] = {BS_DTYPE_F32, BS_DTYPE_BF16, BS_DTYPE_F16};
    for (int k = 0; k < 9; k++) {
        int dtype = dtypes[k / 3];
        const void *src = dtype == BS_DTYPE_F32 ? (void *)single : half;
        got[N] = 0x1234;
        launch(
            BSK_EXPAND,
            (bsk_call){
                .p = {(void *)(uintptr_t)src, got}, .n = {dtype, N}, .f = {0.7}, .out = BS_DTYPE_BF16},
            pars[k % 3]);
        for (int i = 0; i < N; i++) {
            float v = dtype == BS_DTYPE_F32    ? single[i]
                      : dtype == BS_DTYPE_BF16 ? bsi_bf16_to_f32(half[i])
                                               : bsi_f16_to_f32(half[i]);
            assert_int_equal(got[i], bsi_f32_to_bf16(0.7f * v));
        }
        assert_int_equal(got[N], 0x1234);
    }
    array_free(single, N);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_act),           cmocka_unit_test(test_act_ends),
        cmocka_unit_test(test_glu),           cmocka_unit_test(test_glu_clamped),
        cmocka_unit_test(test_arithmetic),    cmocka_unit_test(test_expand),
        cmocka_unit_test(test_expand_rounds),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
