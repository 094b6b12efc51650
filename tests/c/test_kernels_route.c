/* SPDX-License-Identifier: Apache-2.0 */
/*
** Routing of a mixture of experts: the choice and its weights against a formula in f64, the gradient against
** differences, the sort by expert, rows to and from its order in any pieces.
*/
#include "kernel_test.h"

enum { MOST_EXPERTS = 1024 };

typedef struct route_case {
    int64_t E, k, kind, groups, kept, renorm;
    double scale;
    bool biased;
} route_case;

static const route_case cases[] = {
    {8, 2, BSK_ROUTE_SOFTMAX, 1, 1, 0, 1.0, false},   {128, 8, BSK_ROUTE_SOFTMAX, 1, 1, 1, 1.0, false},
    {37, 5, BSK_ROUTE_SOFTMAX, 0, 0, 1, 0.5, true},   {512, 11, BSK_ROUTE_SOFTMAX, 1, 1, 0, 2.5, false},
    {128, 8, BSK_ROUTE_SIGMOID, 1, 1, 1, 2.5, true},  {128, 8, BSK_ROUTE_SIGMOID, 1, 1, 0, 1.0, false},
    {256, 8, BSK_ROUTE_SIGMOID, 8, 4, 1, 2.5, true},  {60, 4, BSK_ROUTE_SIGMOID, 5, 2, 0, 1.0, true},
    {60, 4, BSK_ROUTE_SIGMOID, 15, 3, 1, 1.5, false}, {7, 3, BSK_ROUTE_SOFTMAX, 7, 4, 1, 1.0, false},
    {64, 6, BSK_ROUTE_SOFTMAX, 4, 1, 0, 1.0, true},   {32, 4, BSK_ROUTE_CHOSEN, 1, 1, 0, 1.0, false},
    {129, 4, BSK_ROUTE_CHOSEN, 1, 1, 1, 1.5, true},   {1, 1, BSK_ROUTE_SOFTMAX, 1, 1, 0, 1.0, false},
    {1, 1, BSK_ROUTE_CHOSEN, 1, 1, 0, 1.0, false},    {9, 1, BSK_ROUTE_SIGMOID, 1, 1, 1, 1.0, true},
    {11, 1, BSK_ROUTE_CHOSEN, 1, 1, 0, 3.0, false},   {13, 13, BSK_ROUTE_SOFTMAX, 1, 1, 1, 1.0, true},
    {33, 33, BSK_ROUTE_SIGMOID, 1, 1, 1, 1.0, false}, {16, 16, BSK_ROUTE_CHOSEN, 4, 4, 0, 1.0, false},
    {1024, 9, BSK_ROUTE_SIGMOID, 32, 5, 1, 1, true},
};

static bsk_call route_call(const route_case *r, int64_t T)
{
    return (bsk_call){.n = {T, r->E, r->k, r->kind, r->groups, r->kept, r->renorm}, .f = {r->scale}};
}

static double score(const route_case *r, const double *z, int64_t e)
{
    double sum = 0;
    for (int64_t i = 0; i < r->E; i++)
        sum += exp(z[i] - z[e]);
    return r->kind == BSK_ROUTE_SOFTMAX   ? 1 / sum
           : r->kind == BSK_ROUTE_SIGMOID ? 1 / (1 + exp(-z[e]))
                                          : z[e];
}

/* Weights of the experts id of a row of logits. */
static void weights(const route_case *r, const double *z, const int32_t *id, double *w)
{
    double sum = 0;
    for (int64_t i = 0; i < r->k; i++) {
        double s = score(r, z, id[i]);
        w[i] = r->kind == BSK_ROUTE_CHOSEN ? exp(s) : s;
        sum += w[i];
    }
    for (int64_t i = 0; i < r->k; i++)
        w[i] *= r->scale / (r->renorm || r->kind == BSK_ROUTE_CHOSEN ? sum : 1);
}

/* Entries of c before which `at` comes in order: larger, or as large and earlier. */
static int64_t rank(const double *c, const bool *counts, int64_t n, int64_t at)
{
    int64_t before = 0;
    for (int64_t e = 0; e < n; e++)
        before += counts[e] && (c[e] > c[at] || (c[e] == c[at] && e < at));
    return before;
}

/* The choice by ranks, in the order of numbers. */
static void choice(const route_case *r, const double *z, const float *bias, int32_t *id)
{
    double c[MOST_EXPERTS], sum[MOST_EXPERTS];
    bool all[MOST_EXPERTS], open[MOST_EXPERTS];
    int64_t groups = BSI_MAX(r->groups, 1), size = r->E / groups;
    for (int64_t e = 0; e < r->E; e++) {
        c[e] = score(r, z, e) + (bias ? (double)bias[e] : 0);
        all[e] = true;
    }
    for (int64_t g = 0; g < groups; g++) {
        sum[g] = 0;
        for (int64_t e = 0; e < size; e++)
            if (rank(c + g * size, all, size, e) < 2)
                sum[g] += c[g * size + e];
    }
    for (int64_t e = 0; e < r->E; e++)
        open[e] = groups == 1 || rank(sum, all, groups, e / size) < r->kept;
    for (int64_t e = 0; e < r->E; e++)
        if (open[e] && rank(c, open, r->E, e) < r->k)
            *id++ = (int32_t)e;
}

/* Launches on 1, 2, 3 threads; operands a and b ([n] 4-byte words each; b may be none) have equal bits. */
static void launch_all(bsk_op op, bsk_call c, int a, int b, int64_t n)
{
    float *first[2] = {NULL, NULL}, *start = array_copy(c.p[a], n);
    for (int p = 0; p < 3; p++) {
        memcpy(c.p[a], start, (size_t)n * sizeof *start);
        launch(op, c, pars[p]);
        for (int i = 0; i < (b < 0 ? 1 : 2); i++) {
            if (!first[i])
                first[i] = array_copy(c.p[i ? b : a], n);
            same_bits(bsk_cpu[op].name, first[i], c.p[i ? b : a], n);
        }
    }
    array_free(start, n), array_free(first[0], n);
    if (first[1])
        array_free(first[1], n);
}

static int32_t *indices(int64_t n)
{
    int32_t *p = calloc((size_t)n + 1, sizeof *p);
    assert_non_null(p);
    p[n] = 54321;
    return p;
}

static void indices_free(int32_t *p, int64_t n)
{
    assert_int_equal(p[n], 54321);
    free(p);
}

static const int64_t row_counts[] = {0, 1, 301};

static void test_route(void **state)
{
    (void)state;
    for (size_t i = 0; i < BSI_COUNT(cases) * BSI_COUNT(row_counts); i++) {
        const route_case *r = &cases[i / BSI_COUNT(row_counts)];
        int64_t T = r->E > 256 ? BSI_MIN(row_counts[i % 3], 40) : row_counts[i % 3], n = T * r->k;
        float *z = array(T * r->E, 3), *bias = r->biased ? array(r->E, 0.3) : NULL,
              *w = array_of(n, NAN);
        int32_t *id = indices(n), want[MOST_EXPERTS];
        bsk_call c = route_call(r, T);
        c.p[0] = z, c.p[1] = bias, c.p[2] = w, c.p[3] = id;
        launch_all(BSK_ROUTE, c, 2, 3, n);
        for (int64_t t = 0; t < T; t++) {
            double row[MOST_EXPERTS], share[MOST_EXPERTS];
            for (int64_t e = 0; e < r->E; e++)
                row[e] = (double)z[t * r->E + e];
            choice(r, row, bias, want);
            assert_memory_equal(want, id + t * r->k, (size_t)r->k * sizeof *want);
            weights(r, row, want, share);
            for (int64_t j = 0; j < r->k; j++)
                near_("weight", (double)w[t * r->k + j] / share[j], 1, 1e-6);
        }
        array_free(z, T * r->E), array_free(w, n), indices_free(id, n);
        if (bias)
            array_free(bias, r->E);
    }
}

/* Of equal values the lower index; of what a score cannot tell apart, the larger logit. */
static void test_ties(void **state)
{
    (void)state;
    static const float rows[][8] = {
        {1, 2, 2, 2, 2, 0, 3, 1},
        {0, 0, 0, 0, 0, 0, 0, 0},
        {-0.0f, 0, -0.0f, 0, 0, 0, 0, 0},
        {0, 0, 0, 0, 5, 5, 5, 5},
        {90, 91, 90, 92, 1, 93, 94, 95},
        {-900, 0, -800, -700, -600, -600, -1, -900},
        {1, 2, 3, 4, 5, 6, 7, 8},
        {-INFINITY, 1, -INFINITY, -INFINITY, -INFINITY, 1, -INFINITY, 1},
    };
    static const int32_t want[][4] = {{1, 2, 3, 6}, {0, 1, 2, 3}, {0, 1, 2, 3}, {4, 5, 6, 7},
                                      {3, 5, 6, 7}, {1, 4, 5, 6}, {4, 5, 6, 7}, {0, 1, 5, 7}};
    for (int64_t kind = BSK_ROUTE_SOFTMAX; kind <= BSK_ROUTE_CHOSEN; kind++) {
        float z[BSI_COUNT(rows)][8], w[BSI_COUNT(rows)][4];
        int32_t id[BSI_COUNT(rows)][4];
        memcpy(z, rows, sizeof z);
        launch(BSK_ROUTE,
               (bsk_call){.p = {z, NULL, w, id}, .n = {BSI_COUNT(rows), 8, 4, kind, 1, 1, 0}, .f = {1}},
               &team2);
        assert_memory_equal(id, want, sizeof id);
        /* Equal groups: the first ones. */
        launch(BSK_ROUTE, (bsk_call){.p = {z[1], NULL, w, id}, .n = {1, 8, 4, kind, 4, 2, 0}, .f = {1}},
               &bsk_par_serial);
        assert_memory_equal(id[0], want[1], sizeof id[0]);
    }
}

/* NaN is chosen first and seen in the weights; ids stay distinct, in order and in range. */
static void test_route_nan(void **state)
{
    (void)state;
    for (size_t i = 0; i < BSI_COUNT(cases); i++)
        for (int64_t bad = 0; bad < 4; bad++) {
            const route_case *r = &cases[i];
            float *z = array(r->E, 3), *bias = r->biased ? array(r->E, 0.3) : NULL, *w = array(r->k, 1);
            int32_t *id = indices(r->k);
            int64_t at = bad * (r->E - 1) / 3;
            z[at] = NAN;
            for (int64_t e = 0; e < r->E && bad == 3; e++)
                z[e] = e % 3 == 0 ? NAN : e % 3 == 1 ? INFINITY : -INFINITY;
            bsk_call c = route_call(r, 1);
            c.p[0] = z, c.p[1] = bias, c.p[2] = w, c.p[3] = id;
            launch(BSK_ROUTE, c, &bsk_par_serial);
            bool seen = false, chosen = false;
            for (int64_t j = 0; j < r->k; j++) {
                assert_true(id[j] >= 0 && id[j] < r->E && (j == 0 || id[j] > id[j - 1]));
                seen = seen || isnan(w[j]);
                chosen = chosen || id[j] == at;
            }
            assert_true(seen && (chosen || bad == 3 || r->kind == BSK_ROUTE_SOFTMAX));
            array_free(z, r->E), array_free(w, r->k), indices_free(id, r->k);
            if (bias)
                array_free(bias, r->E);
        }
}

static void test_route_bwd(void **state)
{
    (void)state;
    for (size_t i = 0; i < BSI_COUNT(cases); i++) {
        const route_case *r = &cases[i];
        int64_t T = r->E > 256 ? 2 : 23, n = T * r->k;
        float *z = array(T * r->E, 2), *w = array(n, 0), *dw = array(n, 1),
              *dz = array_of(T * r->E, NAN);
        int32_t *id = indices(n);
        bsk_call c = route_call(r, T), b = route_call(r, T);
        c.p[0] = z, c.p[2] = w, c.p[3] = id;
        launch(BSK_ROUTE, c, &team2);
        b.n[4] = b.n[5] = 0;
        b.p[0] = z, b.p[1] = id, b.p[2] = dw, b.p[3] = dz;
        launch_all(BSK_ROUTE_BWD, b, 3, -1, T * r->E);
        for (int64_t t = 0; t < T; t++)
            for (int64_t e = 0; e < r->E; e += 1 + r->E / 60) {
                double row[MOST_EXPERTS], up[MOST_EXPERTS], down[MOST_EXPERTS], slope = 0, h = 1e-4;
                for (int64_t j = 0; j < r->E; j++)
                    row[j] = (double)z[t * r->E + j];
                row[e] += h;
                weights(r, row, id + t * r->k, up);
                row[e] -= 2 * h;
                weights(r, row, id + t * r->k, down);
                for (int64_t j = 0; j < r->k; j++)
                    slope += (double)dw[t * r->k + j] * (up[j] - down[j]) / (2 * h);
                near_("dz", (double)dz[t * r->E + e], slope, 1e-7);
            }
        b.p[3] = z; /* in place */
        launch(BSK_ROUTE_BWD, b, &team3);
        same_bits("in place", z, dz, T * r->E);
        array_free(z, T * r->E), array_free(w, n), array_free(dw, n), array_free(dz, T * r->E);
        indices_free(id, n);
    }
}

static void check_sorted(const int32_t *id, int64_t n, int64_t E)
{
    int32_t *order = indices(n), *place = indices(n), *offset = indices(E + 1);
    char *scratch = malloc(bsk_sort_scratch(n, E) + 1);
    bsk_call c = {.p = {(void *)(uintptr_t)id, order, place, offset, scratch}, .n = {n, E}};
    memset(order, 0x77, (size_t)n * sizeof *order);
    memset(place, 0x77, (size_t)n * sizeof *place);
    memset(offset, 0x77, (size_t)(E + 1) * sizeof *offset);
    launch(BSK_SORT_ROWS, c, &team2);
    int64_t at = 0;
    for (int64_t e = 0; e < E; e++) {
        assert_int_equal(offset[e], at);
        for (int64_t i = 0; i < n; i++)
            if (id[i] == e) {
                assert_int_equal(order[at], i);
                assert_int_equal(place[i], at++);
            }
    }
    assert_int_equal(offset[E], at);
    for (; at < n; at++)
        assert_int_equal(order[at], -1);
    for (int64_t i = 0; i < n; i++)
        assert_true(place[i] == -1 || (id[i] >= 0 && id[i] < E));
    free(scratch);
    indices_free(order, n), indices_free(place, n), indices_free(offset, E + 1);
}

static void test_sort(void **state)
{
    (void)state;
    static const int64_t shapes[][2] = {{0, 1},     {0, 8},    {1, 1},     {7, 3},
                                        {5000, 37}, {4096, 1}, {300, 1024}};
    for (size_t i = 0; i < BSI_COUNT(shapes); i++)
        for (int v = 0; v < 4; v++) { /* all; some left out; every other expert empty; none */
            int64_t n = shapes[i][0], E = shapes[i][1];
            int32_t *id = indices(n);
            for (int64_t j = 0; j < n; j++) {
                id[j] = (int32_t)((uniform() + 1) / 2 * (double)E);
                if (v == 2)
                    id[j] &= ~1;
                if (v == 3 || (v == 1 && j % 3 == 1))
                    id[j] = j % 2 ? -1 : (int32_t)E + (int32_t)(j % 5);
            }
            check_sorted(id, n, E);
            indices_free(id, n);
        }
}

/* Rows in pieces that lie apart, in the order of experts and back, in windows. */
typedef struct pieces_case {
    int64_t R, C, k, rows, stride, E;
} pieces_case;

static const pieces_case moves[] = {
    {1, 1, 1, 1, 1, 1},         {12, 5, 2, 12, 60, 4},   {60, 7, 3, 20, 150, 8},
    {300, 33, 4, 50, 1650, 16}, {96, 1, 1, 32, 40, 128}, {1000, 129, 2, 100, 13000, 5},
};

static int64_t where(const pieces_case *m, int64_t r)
{
    return r / m->rows * m->stride + r % m->rows * m->C;
}

static void test_move_rows(void **state)
{
    (void)state;
    for (size_t i = 0; i < BSI_COUNT(moves); i++) {
        const pieces_case *m = &moves[i];
        int64_t n = m->R * m->k, size = (m->R / m->rows) * m->stride, C = m->C;
        int32_t *id = indices(n), *order = indices(n), *place = indices(n), *offset = indices(m->E + 1);
        float *x = array(size, 1), *y = array_of(n * C, NAN), *sum = array(size, 1),
              *was = array_copy(sum, size);
        for (int64_t j = 0; j < n; j++)
            id[j] = j % 7 == 3 ? -1 : (int32_t)((uniform() + 1) / 2 * (double)m->E);
        void *scratch = malloc(bsk_sort_scratch(n, m->E));
        launch(BSK_SORT_ROWS, (bsk_call){.p = {id, order, place, offset, scratch}, .n = {n, m->E}},
               &team2);
        bsk_call take = {.p = {x, order, y}, .n = {n, C, m->k, m->rows, m->stride}};
        launch_all(BSK_TAKE_ROWS, take, 2, -1, n * C);
        for (int64_t j = 0; j < n; j++)
            for (int64_t c = 0; c < C; c++)
                assert_true(y[j * C + c] == (order[j] < 0 ? 0.0f : x[where(m, order[j] / m->k) + c]));
        for (int64_t j = offset[m->E] * C; j < n * C; j++)
            y[j] = NAN; /* what no row has a place in is not read */
        for (int64_t j = 0; j < offset[m->E] * C; j++)
            y[j] = (float)uniform();
        bsk_call add = {.p = {y, place, sum}, .n = {m->R, C, m->k, 0, n, m->rows, m->stride}};
        launch_all(BSK_SUM_ROWS, add, 2, -1, size);
        float *want = array_copy(was, size);
        for (int64_t j = 0; j < n; j++)
            for (int64_t c = 0; c < C && place[j] >= 0; c++)
                want[where(m, j / m->k) + c] += y[place[j] * C + c];
        same_bits("sum", sum, want, size); /* what lies between the pieces, too */
        array_free(x, size), array_free(y, n * C), array_free(sum, size), array_free(was, size);
        array_free(want, size), free(scratch);
        indices_free(id, n), indices_free(order, n), indices_free(place, n),
            indices_free(offset, m->E + 1);
    }
}

/* A row's experts have rising numbers, and so its places rise: any cut into windows adds in the same order. */
static void test_windows(void **state)
{
    (void)state;
    enum { R = 150, C = 19, K = 3, E = 10, N = R * K };
    static const int64_t windows[] = {N, 1, 7, 64, 149};
    int32_t id[N], order[N], place[N], offset[E + 1], scratch[4 * E];
    float *y = array(N * C, 1), *was = array(R * C, 1), *want = array_copy(was, R * C),
          *part = array(N * C, 0);
    for (int i = 0; i < N; i++)
        id[i] = i % K == 0 ? i % 4 : i % K == 1 ? 4 + i % 3 : i % 5 == 0 ? -1 : 7 + i % 3;
    launch(BSK_SORT_ROWS, (bsk_call){.p = {id, order, place, offset, scratch}, .n = {N, E}}, &team2);
    for (size_t w = 0; w < BSI_COUNT(windows); w++) {
        float *sum = array_copy(was, R * C);
        for (int64_t begin = 0; begin < N; begin += windows[w]) {
            int64_t n = BSI_MIN(windows[w], N - begin);
            memcpy(part, y + begin * C, (size_t)(n * C) * sizeof *part); /* begins with the window */
            bsk_call c = {.p = {part, place, sum}, .n = {R, C, K, begin, n, R, 0}};
            launch(BSK_SUM_ROWS, c, pars[w % 3]);
        }
        if (w == 0)
            memcpy(want, sum, R * C * sizeof *want);
        same_bits("window", sum, want, R * C);
        array_free(sum, R * C);
    }
    array_free(y, N * C), array_free(was, R * C), array_free(want, R * C), array_free(part, N * C);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_route),     cmocka_unit_test(test_ties), cmocka_unit_test(test_route_nan),
        cmocka_unit_test(test_route_bwd), cmocka_unit_test(test_sort), cmocka_unit_test(test_move_rows),
        cmocka_unit_test(test_windows),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
