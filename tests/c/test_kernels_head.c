/* SPDX-License-Identifier: Apache-2.0 */
/* The head's kernels in any tiling against a full softmax in f64. */
#include "kernel_test.h"

enum { T = 6, C = 5, V = 70 };

struct head {
    float *x, *w; /* [T,C], [V,C] */
    int32_t label[T];
    float cap;
    double loss[T];  /* expected */
    double dx[T][C]; /* expected, of mean loss */
    double dl[T][V]; /* expected, of mean loss by raw logits */
};

static double raw(const struct head *h, int t, int j)
{
    float sum = 0; /* as a plain GEMM computes it, so that both sides start from the same logits */
    for (int c = 0; c < C; c++)
        sum += h->x[t * C + c] * h->w[j * C + c];
    return (double)sum;
}

static void expected(struct head *h)
{
    double cap = (double)h->cap;
    for (int t = 0; t < T; t++) {
        double l[V], slope[V], sum = 0, others = 0, ly;
        for (int j = 0; j < V; j++) {
            double r = raw(h, t, j), u = cap > 0 ? tanh(r / cap) : 0;
            l[j] = cap > 0 ? cap * u : r;
            slope[j] = cap > 0 ? 1 - u * u : 1;
        }
        ly = l[h->label[t]];
        for (int j = 0; j < V; j++) {
            sum += exp(l[j] - ly);
            others += j == h->label[t] ? 0 : exp(l[j] - ly);
        }
        h->loss[t] = log1p(others);
        for (int c = 0; c < C; c++)
            h->dx[t][c] = 0;
        for (int j = 0; j < V; j++) {
            double p = j == h->label[t] ? -others / sum : exp(l[j] - ly) / sum;
            h->dl[t][j] = p * slope[j] / T;
            for (int c = 0; c < C; c++)
                h->dx[t][c] += h->dl[t][j] * (double)h->w[j * C + c];
        }
    }
}

/* |got - want| <= tol * (largest |want| of the row): gradients of learned labels must stay exact. */
static void near_row(const char *what, const float *got, const double *want, int n, double tol)
{
    double size = 0;
    for (int i = 0; i < n; i++)
        size = fmax(size, fabs(want[i]));
    for (int i = 0; i < n; i++)
        if (!(fabs((double)got[i] - want[i]) <= tol * size))
            fail_msg("%s: %d: got %.9g, want %.9g of %.3g", what, i, (double)got[i], want[i], size);
}

/* Runs the head in tiles of `tile` rows of W, through the table as the driver does. */
static void run_head(struct head *h, int tile, bsk_par *par, double tol)
{
    float m[T], s[T], ly[T], factor[T], acc[T * C] = {0}, wy[T * C] = {0}, loss[T], dx[T * C];
    float logits[T * V], inv = 1.0f / T;
    for (int t = 0; t < T; t++) {
        m[t] = -INFINITY;
        s[t] = 0;
        ly[t] = NAN;
    }
    double capd = (double)h->cap;
    for (int first = 0; first < V; first += tile) {
        int n = BSI_MIN(tile, V - first);
        float *w = h->w + first * C;
        bsk_gemm_plain_f32(par, false, true, T, n, C, 1, h->x, C, w, C, 0, logits, n);
        launch(BSK_HEAD_TILE,
               (bsk_call){.p = {logits, h->label, m, s, ly, factor, logits},
                          .n = {T, n, first, h->cap > 0},
                          .f = {capd}},
               par);
        launch(BSK_ROW_MUL, (bsk_call){.p = {acc, factor}, .n = {T, C}}, par);
        bsk_gemm_plain_f32(par, false, false, T, C, n, 1, logits, n, w, C, 1, acc, C);
        launch(BSK_HEAD_PICK,
               (bsk_call){.p = {w, h->label, ly, wy}, .n = {T, C, first, n, h->cap > 0}, .f = {capd}},
               par);
    }
    launch(BSK_HEAD_FINISH, (bsk_call){.p = {m, s, ly, acc, wy, loss, dx}, .n = {T, C}, .f = {1.0 / T}},
           par);
    for (int t = 0; t < T; t++) {
        if (!(fabs((double)loss[t] - h->loss[t]) <= tol * h->loss[t] + 1e-30))
            fail_msg("loss %d: got %.9g, want %.9g", t, (double)loss[t], h->loss[t]);
        near_row("dx", dx + t * C, h->dx[t], C, 8 * tol);
    }
    float alone[T];
    launch(BSK_HEAD_FINISH,
           (bsk_call){.p = {m, s, ly, NULL, NULL, alone, NULL}, .n = {T, C}, .f = {1.0 / T}}, par);
    same_bits("loss without dx", alone, loss, T);
    for (int first = 0; first < V; first += tile) {
        int n = BSI_MIN(tile, V - first);
        bsk_gemm_plain_f32(par, false, true, T, n, C, 1, h->x, C, h->w + first * C, C, 0, logits, n);
        launch(BSK_HEAD_DLOGITS,
               (bsk_call){.p = {logits, h->label, m, s, ly, logits},
                          .n = {T, n, first, h->cap > 0},
                          .f = {(double)inv, capd}},
               par);
        for (int t = 0; t < T; t++)
            near_row("dlogits", logits + t * n, h->dl[t] + first, n, 8 * tol);
    }
}

static void check(float size, float cap, double tol)
{
    struct head h = {.x = array(T * C, (double)size), .w = array(V * C, 1), .cap = cap};
    for (int t = 0; t < T; t++)
        h.label[t] = (t * 17 + 69) % V; /* the first is the last column */
    expected(&h);
    static const int tiles[] = {V, 33, 16, 7, 1};
    for (size_t i = 0; i < BSI_COUNT(tiles); i++)
        run_head(&h, tiles[i], pars[i % 3], tol);
    array_free(h.x, T * C);
    array_free(h.w, V * C);
}

static void test_tilings(void **state)
{
    (void)state;
    check(1.0f, 0, 2e-6);
    check(6.0f, 0, 4e-6);
    check(3.0f, 2.0f, 8e-6);
}

/* The label's row of W points along x: p is 1 - 1e-9 and less, and the gradient must not be rounding
 * noise. */
static void test_learned(void **state)
{
    (void)state;
    static const float sizes[] = {3.0f, 10.0f, 30.0f, 70.0f};
    for (size_t i = 0; i < BSI_COUNT(sizes); i++) {
        struct head h = {.x = array(T * C, 1), .w = array(V * C, 0.1)};
        double norm = 0;
        for (int c = 0; c < C; c++)
            norm += (double)h.x[c] * (double)h.x[c];
        for (int t = 0; t < T; t++) { /* all rows about the same, with the same label */
            h.label[t] = 40;
            for (int c = 0; c < C; c++)
                h.x[t * C + c] = h.x[c] * (1.0f + 0.01f * (float)t);
        }
        for (int c = 0; c < C; c++)
            h.w[40 * C + c] = (float)((double)(sizes[i] * h.x[c]) / norm);
        expected(&h);
        assert_true(i == 0 || h.loss[0] < 0.01);
        run_head(&h, V, &bsk_par_serial, 2e-5);
        run_head(&h, 11, &team2, 2e-5);
        array_free(h.x, T * C);
        array_free(h.w, V * C);
    }
}

/* Nothing but the label has weight: loss 0, no gradient, no NaN; also before any other column was seen.
 */
static void test_only_label(void **state)
{
    (void)state;
    int32_t label[1] = {3};
    float logits[4] = {-INFINITY, -INFINITY, -INFINITY, 5.0f}, m = -INFINITY, s = 0, ly = NAN,
          factor = NAN;
    launch(BSK_HEAD_TILE,
           (bsk_call){.p = {logits, label, &m, &s, &ly, &factor, logits}, .n = {1, 1, 3, 0}},
           &bsk_par_serial); /* logits[0] is column 3 here */
    assert_true(ly == -INFINITY && s == 0 && factor == 0 && logits[0] == 0);
    logits[0] = -INFINITY;
    launch(BSK_HEAD_TILE,
           (bsk_call){.p = {logits, label, &m, &s, &ly, &factor, logits}, .n = {1, 4, 0, 0}},
           &bsk_par_serial);
    assert_true(ly == 5.0f && s == 0 && m == -INFINITY && factor == 0);
    for (int j = 0; j < 4; j++)
        assert_true(logits[j] == 0);
    float acc[2] = {0, 0}, wy[2] = {1, 2}, loss = NAN, dx[2] = {NAN, NAN};
    launch(BSK_HEAD_FINISH, (bsk_call){.p = {&m, &s, &ly, acc, wy, &loss, dx}, .n = {1, 2}, .f = {1}},
           &bsk_par_serial);
    assert_true(loss == 0 && dx[0] == 0 && dx[1] == 0);
    float again[4] = {-INFINITY, -INFINITY, -INFINITY, 5.0f};
    launch(BSK_HEAD_DLOGITS,
           (bsk_call){.p = {again, label, &m, &s, &ly, again}, .n = {1, 4, 0, 0}, .f = {1, 0}},
           &bsk_par_serial);
    for (int j = 0; j < 4; j++)
        assert_true(again[j] == 0);
}

/* A NaN logit must show in the loss. */
static void test_nan(void **state)
{
    (void)state;
    int32_t label[1] = {0};
    float logits[20] = {0}, m = -INFINITY, s = 0, ly = 0, factor, loss = 0;
    logits[13] = NAN;
    launch(BSK_HEAD_TILE,
           (bsk_call){.p = {logits, label, &m, &s, &ly, &factor, logits}, .n = {1, 20, 0, 0}},
           &bsk_par_serial);
    launch(BSK_HEAD_FINISH,
           (bsk_call){.p = {&m, &s, &ly, NULL, NULL, &loss, NULL}, .n = {1, 1}, .f = {1}},
           &bsk_par_serial);
    assert_true(isnan(loss));
}

/* Long rows: chunks and threads do not change bits. */
static void test_threads(void **state)
{
    (void)state;
    enum { ROWS = 9, WIDE = 5003 };
    float *logits = array(ROWS * WIDE, 8), *first = NULL;
    int32_t label[ROWS];
    for (int t = 0; t < ROWS; t++)
        label[t] = t * 500;
    for (int p = 0; p < 3; p++) {
        float *l = array_copy(logits, ROWS * WIDE), m[ROWS], s[ROWS], ly[ROWS], factor[ROWS];
        for (int t = 0; t < ROWS; t++) {
            m[t] = -INFINITY;
            s[t] = 0;
        }
        launch(BSK_HEAD_TILE,
               (bsk_call){.p = {l, label, m, s, ly, factor, l}, .n = {ROWS, WIDE, 0, 1}, .f = {30.0}},
               pars[p]);
        for (int t = 0; t < ROWS; t++) {
            double sum = 0;
            for (int j = 0; j < WIDE; j++)
                sum += j == label[t] ? 0
                                     : exp(30 * tanh((double)logits[t * WIDE + j] / 30) - (double)m[t]);
            near_("s", (double)s[t] / sum, 1, 2e-6);
        }
        if (!first)
            first = array_copy(l, ROWS * WIDE);
        same_bits("threads", first, l, ROWS * WIDE);
        array_free(l, ROWS * WIDE);
    }
    array_free(first, ROWS * WIDE);
    array_free(logits, ROWS * WIDE);
}

/* P beside the logits has the bits of P in their place, and leaves them alone. */
static void test_apart(void **state)
{
    (void)state;
    enum { ROWS = 5, WIDE = 301 };
    float *logits = array(ROWS * WIDE, 9), *kept = array_copy(logits, ROWS * WIDE);
    float *place = array(ROWS * WIDE, 0), *apart = array_of(ROWS * WIDE, NAN);
    int32_t label[ROWS] = {0, 7, 300, 301, 150}; /* one is in another tile */
    for (int cap = 0; cap < 2; cap++) {
        float m[2][ROWS], s[2][ROWS], ly[2][ROWS], factor[2][ROWS];
        memcpy(place, kept, ROWS * WIDE * sizeof *place);
        for (int k = 0; k < 2; k++) {
            for (int t = 0; t < ROWS; t++) {
                m[k][t] = -INFINITY;
                s[k][t] = 0;
                ly[k][t] = 3;
            }
            launch(BSK_HEAD_TILE,
                   (bsk_call){.p = {k ? logits : place, label, m[k], s[k], ly[k], factor[k],
                                    k ? apart : place},
                              .n = {ROWS, WIDE, 0, cap},
                              .f = {8}},
                   pars[k]);
        }
        same_bits("P of the softmax", apart, place, ROWS * WIDE);
        same_bits("sums", s[1], s[0], ROWS);
        memcpy(place, kept, ROWS * WIDE * sizeof *place);
        for (int k = 0; k < 2; k++)
            launch(BSK_HEAD_DLOGITS,
                   (bsk_call){.p = {k ? logits : place, label, m[0], s[0], ly[0], k ? apart : place},
                              .n = {ROWS, WIDE, 0, cap},
                              .f = {0.25, 8}},
                   pars[k]);
        same_bits("gradient of the logits", apart, place, ROWS * WIDE);
        same_bits("logits", logits, kept, ROWS * WIDE);
    }
    array_free(logits, ROWS * WIDE);
    array_free(kept, ROWS * WIDE);
    array_free(place, ROWS * WIDE);
    array_free(apart, ROWS * WIDE);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_tilings),    cmocka_unit_test(test_learned),
        cmocka_unit_test(test_only_label), cmocka_unit_test(test_apart),
        cmocka_unit_test(test_nan),        cmocka_unit_test(test_threads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
