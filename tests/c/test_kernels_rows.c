/* SPDX-License-Identifier: Apache-2.0 */
/* Norm, rope and the kernels over rows: forward against f64, backward against f64 formulas or
 * differences. */
#include "kernel_test.h"

/* Launches on 1, 2, 3 threads; operand `out` (n floats) must have equal bits each time. It is restored
   to its first content before every launch and holds the result at the end. */
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

/* Row counts and widths: empty, one, primes, and enough for several chunks. */
static const int64_t shapes[][2] = {{0, 5}, {1, 1}, {1, 13}, {7, 64}, {3, 67}, {131, 257}, {1031, 129}};

static void test_rmsnorm(void **state)
{
    (void)state;
    for (size_t i = 0; i < BSI_COUNT(shapes); i++)
        for (int one = 0; one < 2; one++) {
            int64_t T = shapes[i][0], C = shapes[i][1], n = T * C;
            float *x = array(n, 3), *w = array(C, 1), *y = array_of(n, NAN), *rstd = array_of(T, NAN);
            launch_all(BSK_RMSNORM, (bsk_call){.p = {x, w, y, rstd}, .n = {T, C, one}, .f = {1e-3}}, 2,
                       n);
            for (int64_t t = 0; t < T; t++) {
                double ss = 0;
                for (int64_t c = 0; c < C; c++)
                    ss += (double)x[t * C + c] * (double)x[t * C + c];
                double r = 1 / sqrt(ss / (double)C + 1e-3);
                near_("rstd", (double)rstd[t] / r, 1, 1e-7);
                for (int64_t c = 0; c < C; c++)
                    near_("y", (double)y[t * C + c], (double)x[t * C + c] * r * ((double)w[c] + one),
                          3e-7);
            }
            array_free(x, n);
            array_free(w, C);
            array_free(y, n);
            array_free(rstd, T);
        }
}

/* sum(dy * y) of the norm in f64, with element `at` of x or w (which < 0: neither) moved by h. */
static double norm_objective(const float *x, const float *w, const float *dy, int64_t T, int64_t C,
                             int one, int64_t at_x, int64_t at_w, double h)
{
    double sum = 0;
    for (int64_t t = 0; t < T; t++) {
        double ss = 0, dot = 0;
        for (int64_t c = 0; c < C; c++) {
            double xi = (double)x[t * C + c] + (at_x == t * C + c ? h : 0);
            double wi = (double)w[c] + one + (at_w == c ? h : 0);
            ss += xi * xi;
            dot += xi * wi * (double)dy[t * C + c];
        }
        sum += dot / sqrt(ss / (double)C + 1e-3);
    }
    return sum;
}

static void test_rmsnorm_bwd(void **state)
{
    (void)state;
    for (size_t i = 0; i < BSI_COUNT(shapes); i++)
        for (int variant = 0; variant < 4; variant++) {
            int64_t T = shapes[i][0], C = shapes[i][1], n = T * C, one = variant & 1, add = variant / 2;
            float *x = array(n, 2), *w = array(C, 1), *dy = array(n, 1), *y = array(n, 0),
                  *rstd = array(T, 0);
            float *dx = array(n, 1), *dw = array(C, 1), *dx0 = array_copy(dx, n),
                  *dw0 = array_copy(dw, C);
            if (!add)
                for (int64_t j = 0; j < n; j++)
                    dx[j] = NAN;
            launch(BSK_RMSNORM, (bsk_call){.p = {x, w, y, rstd}, .n = {T, C, one}, .f = {1e-3}},
                   &team2);
            bsk_call c = {.p = {x, w, rstd, dy, dx, NULL}, .n = {T, C, one, add}};
            launch_all(BSK_RMSNORM_BWD, c, 4, n);
            float *kept = array_copy(dx, n), *scratch = array_copy(add ? dx0 : dx, n);
            c.p[4] = scratch; /* with dw present, dx is the same */
            c.p[5] = dw;
            launch_all(BSK_RMSNORM_BWD, c, 5, C);
            double h = 1e-4;
            for (int64_t k = 0; k < n; k += 1 + n / 50) {
                double want = (norm_objective(x, w, dy, T, C, (int)one, k, -1, h) -
                               norm_objective(x, w, dy, T, C, (int)one, k, -1, -h)) /
                              (2 * h);
                near_("dx", (double)kept[k], want + (add ? (double)dx0[k] : 0), 1e-5);
            }
            for (int64_t k = 0; k < C && T; k += 1 + C / 20) {
                double want = (norm_objective(x, w, dy, T, C, (int)one, -1, k, h) -
                               norm_objective(x, w, dy, T, C, (int)one, -1, k, -h)) /
                              (2 * h);
                near_("dw", (double)dw[k], want + (double)dw0[k], 1e-6);
            }
            array_free(x, n), array_free(w, C), array_free(dy, n), array_free(y, n),
                array_free(rstd, T);
            array_free(dx, n), array_free(dw, C), array_free(dx0, n), array_free(dw0, C);
            array_free(kept, n), array_free(scratch, n);
        }
}

/* The same for the layer norm, with the bias; which: 0 x, 1 w, 2 b, 3 nothing. */
static double layer_objective(const float *x, const float *w, const float *b, const float *dy,
                              int64_t T, int64_t C, int which, int64_t at, double h)
{
    double sum = 0;
    for (int64_t t = 0; t < T; t++) {
        double mean = 0, var = 0, dot = 0, rest = 0;
        for (int64_t c = 0; c < C; c++)
            mean += ((double)x[t * C + c] + (which == 0 && at == t * C + c ? h : 0)) / (double)C;
        for (int64_t c = 0; c < C; c++) {
            double d = (double)x[t * C + c] + (which == 0 && at == t * C + c ? h : 0) - mean;
            var += d * d / (double)C;
            dot += d * ((double)w[c] + (which == 1 && at == c ? h : 0)) * (double)dy[t * C + c];
            rest += ((double)b[c] + (which == 2 && at == c ? h : 0)) * (double)dy[t * C + c];
        }
        sum += dot / sqrt(var + 1e-3) + rest;
    }
    return sum;
}

static double layer_slope(const float *x, const float *w, const float *b, const float *dy, int64_t T,
                          int64_t C, int which, int64_t at)
{
    const double h = 1e-4;
    return (layer_objective(x, w, b, dy, T, C, which, at, h) -
            layer_objective(x, w, b, dy, T, C, which, at, -h)) /
           (2 * h);
}

static void test_layernorm(void **state)
{
    (void)state;
    for (size_t i = 0; i < BSI_COUNT(shapes); i++) {
        int64_t T = shapes[i][0], C = shapes[i][1], n = T * C;
        float *x = array(n, 1), *w = array(C, 1), *b = array(C, 1), *y = array_of(n, NAN),
              *stats = array_of(2 * T, NAN);
        for (int64_t j = 0; j < n; j++)
            x[j] += 5; /* a mean that would drown a variance taken as mean(x^2) - mean^2 in f32 */
        launch_all(BSK_LAYERNORM, (bsk_call){.p = {x, w, b, y, stats}, .n = {T, C}, .f = {1e-3}}, 3, n);
        for (int64_t t = 0; t < T; t++) {
            double mean = 0, var = 0;
            for (int64_t c = 0; c < C; c++)
                mean += (double)x[t * C + c] / (double)C;
            for (int64_t c = 0; c < C; c++)
                var += ((double)x[t * C + c] - mean) * ((double)x[t * C + c] - mean) / (double)C;
            double r = 1 / sqrt(var + 1e-3);
            near_("mean", (double)stats[2 * t] / mean, 1, 1e-7);
            near_("rstd", (double)stats[2 * t + 1] / r, 1, 1e-7);
            for (int64_t c = 0; c < C; c++) /* mean near 5 is rounded by 2.4e-7, and r is at most 32 */
                near_("y", (double)y[t * C + c],
                      ((double)x[t * C + c] - mean) * r * (double)w[c] + (double)b[c],
                      2.4e-7 * r + 3e-7);
        }
        array_free(x, n), array_free(w, C), array_free(b, C), array_free(y, n);
        array_free(stats, 2 * T);
    }
}

static void test_layernorm_bwd(void **state)
{
    (void)state;
    for (size_t i = 0; i < BSI_COUNT(shapes); i++)
        for (int64_t add = 0; add < 2; add++) {
            int64_t T = shapes[i][0], C = shapes[i][1], n = T * C;
            float *x = array(n, 2), *w = array(C, 1), *b = array(C, 1), *dy = array(n, 1),
                  *y = array(n, 0), *stats = array(2 * T, 0), *dx = array(n, 1), *dw = array(C, 1),
                  *db = array(C, 1);
            float *dx0 = array_copy(dx, n), *dw0 = array_copy(dw, C), *db0 = array_copy(db, C);
            for (int64_t j = 0; j < n && !add; j++)
                dx[j] = NAN;
            launch(BSK_LAYERNORM, (bsk_call){.p = {x, w, b, y, stats}, .n = {T, C}, .f = {1e-3}},
                   &team2);
            bsk_call c = {.p = {x, w, stats, dy, dx, NULL, NULL}, .n = {T, C, add}};
            launch_all(BSK_LAYERNORM_BWD, c, 4, n);
            float *kept = array_copy(dx, n), *scratch = array_copy(add ? dx0 : dx, n);
            c.p[4] = scratch;
            c.p[5] = dw; /* each of dw and db without the other */
            launch_all(BSK_LAYERNORM_BWD, c, 5, C);
            c.p[5] = NULL;
            c.p[6] = db;
            launch_all(BSK_LAYERNORM_BWD, c, 6, C);
            for (int64_t k = 0; k < n; k += 1 + n / 50)
                near_("dx", (double)kept[k],
                      layer_slope(x, w, b, dy, T, C, 0, k) + (add ? (double)dx0[k] : 0), 1e-5);
            for (int64_t k = 0; k < C && T; k += 1 + C / 20) {
                near_("dw", (double)dw[k], layer_slope(x, w, b, dy, T, C, 1, k) + (double)dw0[k], 1e-6);
                near_("db", (double)db[k], layer_slope(x, w, b, dy, T, C, 2, k) + (double)db0[k], 1e-6);
            }
            array_free(x, n), array_free(w, C), array_free(b, C), array_free(dy, n), array_free(y, n);
            array_free(stats, 2 * T), array_free(dx, n), array_free(dw, C), array_free(db, C);
            array_free(dx0, n), array_free(dw0, C), array_free(db0, C);
            array_free(kept, n), array_free(scratch, n);
        }
}

/* rmsnorm and rope one after the other, to the bit; the backward of both to rounding. */
static void test_norm_rope(void **state)
{
    (void)state;
    enum { T = 5, H = 3, D = 12, N = T * H * D };
    const int32_t pos[T] = {0, 3, 1000, 7, 0};
    float *x = array(N, 2), *w = array(D, 1), *dy = array(N, 1), *freq = array(D / 2, 1);
    float *y = array_of(N, NAN), *z = array_of(N, NAN), *want = array_of(N, NAN),
          *rstd = array_of(T * H, NAN), *rstd2 = array_of(T * H, NAN), *dw = array_of(D, 2),
          *dw2 = array_of(D, 2), *dx = array_of(N, NAN), *dx2 = array_of(N, 3);
    for (int v = 0; v < 8; v++) { /* style, one_plus, all or 4 of 6 frequencies */
        int style = v & 1;
        bool one_plus = v & 2;
        int64_t F = v & 4 ? 4 : 6;
        bsk_norm_rope a = {T, H, D, F, style, one_plus, 1e-5f, 1.5f, pos, freq};
        bsk_rmsnorm_f32(&team2, x, w, z, rstd, T * H, D, one_plus, 1e-5f);
        bsk_rope_f32(&team2, z, pos, freq, want, T, H, D, F, style, false, 1.5f);
        bsk_norm_rope_f32(&team3, &a, x, w, y, rstd2);
        same_bits("y", y, want, N);
        same_bits("rstd", rstd, rstd2, T * H);
        for (int add = 0; add < 2; add++) {
            for (int i = 0; i < N; i++)
                dx[i] = dx2[i] = 3;
            for (int i = 0; i < D; i++)
                dw[i] = dw2[i] = 2;
            bsk_rope_f32(&team2, dy, pos, freq, z, T, H, D, F, style, true, 1.5f);
            bsk_rmsnorm_bwd_f32(&team2, x, w, rstd, z, dx, dw, T * H, D, one_plus, add);
            bsk_norm_rope_bwd_f32(&team3, &a, x, w, rstd, dy, dx2, dw2, add);
            for (int i = 0; i < N; i++)
                near_("dx", (double)dx2[i], (double)dx[i], 2e-6);
            for (int i = 0; i < D; i++)
                near_("dw", (double)dw2[i], (double)dw[i], 2e-6);
        }
    }
    float *all[] = {x, dy, y, z, want, dx, dx2};
    for (size_t i = 0; i < BSI_COUNT(all); i++)
        array_free(all[i], N);
    array_free(w, D);
    array_free(dw, D);
    array_free(dw2, D);
    array_free(freq, D / 2);
    array_free(rstd, T * H);
    array_free(rstd2, T * H);
}

static void test_rope(void **state)
{
    (void)state;
    enum { H = 3 };
    static const int64_t cases[][3] = {{1, 2, 1}, {5, 10, 3}, {37, 64, 32}, {4, 300, 130}, {0, 4, 2}};
    for (size_t i = 0; i < BSI_COUNT(cases); i++)
        for (int style = 0; style < 2; style++) {
            int64_t T = cases[i][0], D = cases[i][1], F = cases[i][2], n = T * H * D;
            float *x = array(n, 1), *y = array_of(n, NAN), *back = array_of(n, NAN),
                  *freq = array(F, 1);
            int32_t pos[64];
            for (int t = 0; t < 64; t++)
                pos[t] = t * t;
            double scaling = 1.25;
            bsk_call c = {.p = {x, pos, freq, y}, .n = {T, H, D, F, style, 0}, .f = {scaling}};
            launch_all(BSK_ROPE, c, 3, n);
            for (int64_t k = 0; k < n; k++) {
                int64_t t = k / (H * D), e = k % D, j = style ? e / 2 : e % F;
                if (e >= 2 * F) {
                    assert_true(y[k] == x[k]);
                    continue;
                }
                bool second = style ? e % 2 : e >= F;
                int64_t other = style ? (second ? k - 1 : k + 1) : (second ? k - F : k + F);
                double angle =
                    (double)((float)pos[t] * freq[j]); /* the angle itself is f32 by definition */
                double want =
                    (double)x[k] * cos(angle) + (second ? 1 : -1) * (double)x[other] * sin(angle);
                near_("rope", (double)y[k], want * scaling, 4e-7);
            }
            c.p[0] = y, c.p[3] = back, c.n[5] = 1; /* the transpose: back to x, times scaling^2 */
            launch(BSK_ROPE, c, &team2);
            for (int64_t k = 0; k < n; k++)
                near_("inverse", (double)back[k],
                      (double)x[k] * (k % D < 2 * F ? scaling * scaling : 1), 1e-6);
            c.p[0] = x, c.p[3] = x, c.n[5] = 0; /* in place */
            launch(BSK_ROPE, c, &team2);
            same_bits("in place", x, y, n);
            array_free(x, n), array_free(y, n), array_free(back, n), array_free(freq, F);
        }
}

static void test_bias_colsum(void **state)
{
    (void)state;
    for (size_t i = 0; i < BSI_COUNT(shapes); i++) {
        int64_t T = shapes[i][0], C = shapes[i][1], n = T * C;
        float *x = array(n, 1), *b = array(C, 1), *y = array_copy(x, n), *sum = array_copy(b, C);
        launch_all(BSK_BIAS, (bsk_call){.p = {y, b}, .n = {T, C}}, 0, n);
        launch_all(BSK_COLSUM, (bsk_call){.p = {x, sum}, .n = {T, C}}, 1, C);
        for (int64_t k = 0; k < n; k++)
            assert_true(y[k] == x[k] + b[k % C]);
        for (int64_t c = 0; c < C; c++) {
            double want = (double)b[c];
            for (int64_t t = 0; t < T; t++)
                want += (double)x[t * C + c];
            assert_true(sum[c] == (float)want);
        }
        array_free(x, n), array_free(b, C), array_free(y, n), array_free(sum, C);
    }
}

static void test_softmax(void **state)
{
    (void)state;
    for (size_t i = 0; i < BSI_COUNT(shapes); i++) {
        int64_t T = shapes[i][0], C = shapes[i][1], n = T * C;
        float *x = array(n, 20), *y = array_of(n, NAN), *dy = array(n, 1), *dx = array_of(n, NAN);
        launch_all(BSK_SOFTMAX, (bsk_call){.p = {x, y}, .n = {T, C}}, 1, n);
        launch_all(BSK_SOFTMAX_BWD, (bsk_call){.p = {y, dy, dx}, .n = {T, C}}, 2, n);
        for (int64_t t = 0; t < T; t++) {
            double m = -INFINITY, sum = 0, dot = 0;
            for (int64_t c = 0; c < C; c++)
                m = fmax(m, (double)x[t * C + c]);
            for (int64_t c = 0; c < C; c++)
                sum += exp((double)x[t * C + c] - m);
            for (int64_t c = 0; c < C; c++)
                dot += exp((double)x[t * C + c] - m) / sum * (double)dy[t * C + c];
            for (int64_t c = 0; c < C; c++) {
                double p = exp((double)x[t * C + c] - m) / sum;
                near_("softmax", (double)y[t * C + c], p, 1e-6);
                near_("softmax_bwd", (double)dx[t * C + c], p * ((double)dy[t * C + c] - dot), 1e-6);
            }
        }
        launch(BSK_SOFTMAX, (bsk_call){.p = {x, x}, .n = {T, C}}, &team2);
        same_bits("in place", x, y, n);
        array_free(x, n), array_free(y, n), array_free(dy, n), array_free(dx, n);
    }
    float masked[3] = {-INFINITY, 2.0f, -INFINITY}; /* as a masked router gives */
    launch(BSK_SOFTMAX, (bsk_call){.p = {masked, masked}, .n = {1, 3}}, &team2);
    assert_true(masked[0] == 0 && masked[1] == 1 && masked[2] == 0);
}

static void test_columns_rows(void **state)
{
    (void)state;
    for (size_t i = 0; i < BSI_COUNT(shapes); i++) {
        int64_t T = shapes[i][0], C = shapes[i][1], n = T * C, first = C / 3, w = C - first - C / 4;
        int64_t G = 5, column = 3;
        float *x = array(n, 1), *y = array_of(T * w, NAN), *back = array_of(n, NAN);
        launch_all(BSK_COLUMNS, (bsk_call){.p = {x, y}, .n = {T, C, first, w}}, 1, T * w);
        launch_all(BSK_COLUMNS_BWD, (bsk_call){.p = {y, back}, .n = {T, C, first, w}}, 1, n);
        for (int64_t k = 0; k < n; k++) {
            bool in = k % C >= first && k % C < first + w;
            assert_true(back[k] == (in ? x[k] : 0.0f));
        }
        float *g = array(T * G, 1), *z = array_of(n, NAN), *dz = array(n, 1),
              *dg = array_of(T * G, NAN);
        launch_all(BSK_ROW_SCALE, (bsk_call){.p = {x, g, z}, .n = {T, C, G, column}}, 2, n);
        bsk_call b = {.p = {x, g, dz, back, dg}, .n = {T, C, G, column}};
        launch_all(BSK_ROW_SCALE_BWD, b, 3, n);
        launch_all(BSK_ROW_SCALE_BWD, b, 4, T * G);
        for (int64_t k = 0; k < n; k++) {
            assert_true(z[k] == x[k] * g[k / C * G + column]);
            assert_true(back[k] == dz[k] * g[k / C * G + column]);
        }
        for (int64_t k = 0; k < T * G; k++) {
            double want = 0;
            for (int64_t c = 0; c < C && k % G == column; c++)
                want += (double)x[k / G * C + c] * (double)dz[k / G * C + c];
            near_("dg", (double)dg[k], want, 1e-7);
        }
        float *factor = array(T, 1), *m = array_copy(x, n);
        launch_all(BSK_ROW_MUL, (bsk_call){.p = {m, factor}, .n = {T, C}}, 0, n);
        for (int64_t k = 0; k < n; k++)
            assert_true(m[k] == x[k] * factor[k / C]);
        array_free(x, n), array_free(y, T * w), array_free(back, n), array_free(g, T * G),
            array_free(z, n);
        array_free(dz, n), array_free(dg, T * G), array_free(factor, T), array_free(m, n);
    }
}

static void test_gather_scatter(void **state)
{
    (void)state;
    enum { T = 11, N = 300, C = 150 };
    int32_t index[N];
    for (int i = 0; i < N; i++)
        index[i] = (i * 7 + i / 3) % T; /* every row many times */
    float *x = array(T * C, 1), *y = array_of(N * C, NAN), *dx = array(T * C, 1),
          *want = array_copy(dx, T * C);
    launch_all(BSK_GATHER_ROWS, (bsk_call){.p = {x, index, y}, .n = {N, C}}, 2, N * C);
    launch_all(BSK_SCATTER_ROWS, (bsk_call){.p = {y, index, dx}, .n = {N, C}, .f = {0.5}}, 2, T * C);
    for (int i = 0; i < N; i++)
        for (int c = 0; c < C; c++) {
            assert_true(y[i * C + c] == x[index[i] * C + c]);
            want[index[i] * C + c] += 0.5f * y[i * C + c];
        }
    same_bits("scatter in order", dx, want, T * C);
    launch(BSK_SCATTER_ROWS, (bsk_call){.p = {NULL, NULL, dx}, .n = {0, C}, .f = {1}}, &team2);
    launch(BSK_GATHER_ROWS, (bsk_call){.p = {x, NULL, NULL}, .n = {0, C}}, &team2);
    same_bits("nothing", dx, want, T * C);
    array_free(x, T * C), array_free(y, N * C), array_free(dx, T * C), array_free(want, T * C);
}

static void test_dropout(void **state)
{
    (void)state;
    enum { T = 200, C = 331 };
    int32_t row[T], pos[T];
    for (int t = 0; t < T; t++) {
        row[t] = 1000 + t / 50;
        pos[t] = t % 50;
    }
    const double prob = 0.3;
    float *x = array_of(T * C, 1), *y = array_of(T * C, NAN), *z = array_of(T * C, NAN);
    bsk_call c = {.p = {x, row, pos, y}, .n = {T, C, (int64_t)0xFFFFFFF1u, 7, 3}, .f = {prob}};
    launch_all(BSK_DROPOUT, c, 3, T * C);
    int64_t zeros = 0, pairs = 0;
    for (int k = 0; k < T * C; k++) {
        const uint32_t counter[4] = {3, (uint32_t)row[k / C], (uint32_t)pos[k / C],
                                     (uint32_t)(k % C / 4)};
        uint32_t word[4];
        bsi_philox(counter, (const uint32_t[2]){0xFFFFFFF1u, 7}, word);
        assert_true(y[k] == (bsi_uniform(word[k % C % 4]) < 0.3f ? 0.0f : 1.0f / (1.0f - 0.3f)));
        zeros += y[k] == 0;
        pairs += k > 0 && y[k] == 0 && y[k - 1] == 0;
    }
    /* 66200 draws: five standard deviations are 0.0089 and about as much for neighbours */
    near_("rate", (double)zeros / (T * C), prob, 0.0069);
    near_("independent neighbours", (double)pairs / (T * C), prob * prob, 0.0069);
    /* A token keeps its mask wherever it is placed: rows 50.. alone, and a single token. */
    c.p[1] = row + 50, c.p[2] = pos + 50, c.p[3] = z, c.n[0] = 50;
    launch(BSK_DROPOUT, c, &team2);
    same_bits("placement", z, y + 50 * C, 50 * C);
    c.n[4] = 4; /* another step, another mask */
    launch(BSK_DROPOUT, c, &team2);
    assert_memory_not_equal(z, y + 50 * C, 50 * C * sizeof *z);
    c.f[0] = 0;
    launch(BSK_DROPOUT, c, &team2);
    same_bits("nothing dropped", z, x, 50 * C);
    array_free(x, T * C), array_free(y, T * C), array_free(z, T * C);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rmsnorm),      cmocka_unit_test(test_rmsnorm_bwd),
        cmocka_unit_test(test_layernorm),    cmocka_unit_test(test_layernorm_bwd),
        cmocka_unit_test(test_rope),         cmocka_unit_test(test_norm_rope),
        cmocka_unit_test(test_bias_colsum),  cmocka_unit_test(test_softmax),
        cmocka_unit_test(test_columns_rows), cmocka_unit_test(test_gather_scatter),
        cmocka_unit_test(test_dropout),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
