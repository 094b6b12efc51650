/* SPDX-License-Identifier: Apache-2.0 */
/*
** The kernels of the cuda device against the CPU kernels, which are the specification: the same inputs
** (rounded to bf16 first where operands are bf16), through the device layer, in odd sizes and with
** operands that are not aligned. A trial is run twice and must give the same bits; what a kernel writes
** starts as NaN; the bytes between operands must stay as they were. One line per trial; exit 77: no
** GPU. --check: on check:cuda. --only=a,b: trials whose names begin so; --every=n: about one in n of
** them, always the same ones (for tools that make kernels slow). Compiled a second time the program runs the
** plain kernels on the CPU (cuda_on_cpu.h), where there is no GPU.
*/
#include "kernel_trial.h"

#include <math.h>

/* ---- the operations ---- */

static const bs_dtype types[] = {BS_DTYPE_F32, BS_DTYPE_BF16};

static void try_gemm(void)
{
    static const int64_t shapes[][3] = {
        {37, 129, 65}, {1, 64, 300}, {256, 512, 384}, {130, 8, 1000}, {5, 7, 0}};
    for (size_t s = 0; s < BSI_COUNT(shapes); s++)
        for (int v = 0; v < 12; v++) { /* transposes; f32, bf16, bf16 to f32 */
            int64_t ta = v & 1, tb = v >> 1 & 1, M = shapes[s][0], N = shapes[s][1], K = shapes[s][2],
                    pad = 3 * (v & 1);
            bs_dtype dtype = v < 4 ? BS_DTYPE_F32 : BS_DTYPE_BF16;
            trial t = trial_of(BSK_GEMM, "gemm", dtype);
            t.out = v < 8 ? dtype : BS_DTYPE_F32;
            int64_t lda = (ta ? M : K) + pad, ldb = (tb ? K : N) + pad, ldc = N + pad;
            numbers(&t, A, BSI_READ, BSI_MAX((ta ? K : M) * lda, (int64_t)1), 1);
            numbers(&t, A, BSI_READ, BSI_MAX((tb ? N : K) * ldb, (int64_t)1), 1);
            bool other = v % 2 == 1 && s != 1; /* added from elsewhere */
            if (other)
                written(&t, O, M * ldc);
            else
                numbers(&t, O, BSI_READWRITE, M * ldc, 1);
            if (other)
                numbers(&t, O, BSI_READ, M * ldc, 1);
            SIZES(&t, ta, tb, M, N, K, BSI_MAX(lda, 1), BSI_MAX(ldb, 1), ldc);
            t.f[0] = 0.5;
            t.f[1] = v % 3 == 0 ? 0.0 : 1.0;
            note(&t, ta ? "T" : "N", M), note(&t, tb ? "T" : "N", N), note(&t, "K", K);
            run(&t);
        }
}

/* Groups of no rows, of a few, of more than a tile; rows before the first and after the last; matrices apart. */
static void try_gemm_grouped(void)
{
    enum { E = 7, ROWS = 500 };
    static const int32_t offset[E + 1] = {3, 3, 8, 136, 136, 137, 300, 491};
    static const int64_t shapes[][2] = {{384, 200}, {72, 64}, {264, 136}, {33, 17}, {1, 5}};
    for (size_t s = 0; s < BSI_COUNT(shapes); s++)
        for (int v = 0; v < 6; v++) { /* both ways to lie; f32, bf16, bf16 to f32 */
            int64_t N = shapes[s][0], K = shapes[s][1], apart = s == 2 ? 24 : 0;
            trial t = trial_of(BSK_GEMM_GROUPED, "gemm_grouped", v < 2 ? BS_DTYPE_F32 : BS_DTYPE_BF16);
            t.out = v < 4 ? t.dtype : BS_DTYPE_F32;
            numbers(&t, A, BSI_READ, ROWS * K, 1);
            numbers(&t, A, BSI_READ, E * (N * K + apart), 1);
            numbers(&t, O, BSI_READWRITE, ROWS * N, 1);
            memcpy(put(&t, I, BSI_READ, E + 1)->value, offset, sizeof offset);
            SIZES(&t, E, v & 1, ROWS - 30, N, K, N * K + apart, 5);
            t.f[0] = s == 1 || v == 3 ? 1.0 : 0.0;
            t.shift = s == 3;
            note(&t, v & 1 ? "T" : "N", N), note(&t, "K", K);
            run(&t);
        }
}

static void try_bias_grouped(void)
{
    enum { E = 7, ROWS = 461 };
    static const int32_t offset[E + 1] = {3, 3, 8, 136, 136, 137, 300, 491};
    for (int v = 0; v < 4; v++) {
        int64_t C = v < 2 ? 264 : 19, apart = v < 2 ? 8 : 3;
        trial t = trial_of(BSK_BIAS_GROUPED, "bias_grouped", types[v & 1]);
        numbers(&t, A, BSI_READWRITE, ROWS * C, 1);
        numbers(&t, A, BSI_READ, E * (C + apart), 1);
        memcpy(put(&t, I, BSI_READ, E + 1)->value, offset, sizeof offset);
        SIZES(&t, E, ROWS, C, C + apart, 5);
        t.shift = v == 2;
        note(&t, "C", C);
        run(&t);
    }
}

static void try_flat(bsk_op op, const char *name, int in, int out, bool act, int scalar)
{
    static const int64_t lengths[] = {1, 1000, 4099};
    for (int v = 0; v < 2; v++)
        for (size_t s = 0; s < BSI_COUNT(lengths); s++)
            for (int64_t a = 0; a < (act ? 4 : 1); a++) {
                trial t = trial_of(op, name, types[v]);
                int64_t N = lengths[s];
                for (int i = 0; i < in; i++)
                    numbers(&t, A, BSI_READ, N, 4);
                for (int i = 0; i < out; i++)
                    written(&t, A, N);
                if (op == BSK_AXPY)
                    t.p[1].mode = BSI_READWRITE;
                SIZES(&t, N, a);
                t.f[0] = scalar ? -0.75 : 0.0;
                t.shift = s == 1;
                note(&t, "N", N);
                if (act)
                    note(&t, "act", a);
                run(&t);
            }
}

static void try_expand(void)
{
    static const bs_dtype from[] = {BS_DTYPE_F32, BS_DTYPE_BF16, BS_DTYPE_F16};
    for (int v = 0; v < 6; v++) {
        trial t = trial_of(BSK_EXPAND, "expand", BS_DTYPE_F32);
        bs_dtype src = from[v % 3];
        int64_t N = 2051;
        operand *o =
            put(&t, src == BS_DTYPE_F32 ? F : SCRATCH, BSI_READ, src == BS_DTYPE_F32 ? N : 2 * N);
        for (int64_t i = 0; i < N; i++) {
            float x = (float)(3 * uniform());
            uint16_t h = src == BS_DTYPE_BF16 ? bsi_f32_to_bf16(x) : bsi_f32_to_f16(x);
            if (src == BS_DTYPE_F32)
                ((float *)o->value)[i] = x;
            else
                ((uint16_t *)o->value)[i] = h;
        }
        written(&t, O, N);
        SIZES(&t, src, N);
        t.f[0] = 0.5;
        t.out = types[v / 3];
        t.bound = v < 3 ? 0 : 4e-3; /* f32 is exact */
        note(&t, bs_dtype_name(src), N);
        run(&t);
    }
}

static const int64_t row_shapes[][2] = {{37, 128}, {5, 1000}, {3, 4099}, {130, 1},
                                        {9, 4096}, {70, 40},  {3, 6000}, {2, 9001}};

/* Every code with every scale, the kinds of scale that are special among them. */
static void try_expand_mxfp4(void)
{
    enum { GROUPS = 300 };
    for (int v = 0; v < 2; v++) {
        trial t = trial_of(BSK_EXPAND_MXFP4, "expand_mxfp4", types[v]);
        int32_t *blocks = put(&t, I, BSI_READ, GROUPS * 4)->value,
                *scales = put(&t, I, BSI_READ, (GROUPS + 3) / 4)->value;
        for (int64_t i = 0; i < GROUPS * 4; i++)
            blocks[i] = (int32_t)((uint32_t)i * 2654435761u);
        for (int64_t i = 0; i < GROUPS; i++)
            ((uint8_t *)scales)[i] =
                (uint8_t)(v && i % 256 > 250 ? 100 : i); /* bf16 ends before 2^128 as f32 does */
        written(&t, O, GROUPS * 32);
        SIZES(&t, GROUPS * 32);
        t.bound = 0;
        run(&t);
    }
}

static void try_norm(void)
{
    for (int v = 0; v < 2; v++)
        for (size_t s = 0; s < BSI_COUNT(row_shapes); s++) {
            int64_t T = row_shapes[s][0], C = row_shapes[s][1];
            trial t = trial_of(BSK_RMSNORM, "rmsnorm", types[v]);
            numbers(&t, A, BSI_READ, T * C, 2);
            numbers(&t, A, BSI_READ, C, 1);
            written(&t, A, T * C);
            written(&t, F, T);
            SIZES(&t, T, C, s & 1);
            t.f[0] = 1e-5;
            note(&t, "T", T), note(&t, "C", C);
            run(&t);

            t = trial_of(BSK_RMSNORM_BWD, "rmsnorm_bwd", types[v]);
            numbers(&t, A, BSI_READ, T * C, 2);
            numbers(&t, A, BSI_READ, C, 1);
            float *rstd = numbers(&t, F, BSI_READ, T, 1);
            for (int64_t i = 0; i < T; i++)
                rstd[i] = 0.8f + 0.1f * rstd[i];
            numbers(&t, A, BSI_READ, T * C, 1);
            numbers(&t, A, BSI_READWRITE, T * C, 1);
            if (s & 1)
                absent(&t, F);
            else
                numbers(&t, F, BSI_READWRITE, C, 1);
            SIZES(&t, T, C, s & 1, s == 2);
            if (s != 2)
                t.p[4].mode = BSI_WRITE;
            t.floor = 0.02;
            note(&t, "T", T), note(&t, "C", C);
            run(&t);
        }
}

static void try_layernorm(void)
{
    for (int v = 0; v < 2; v++)
        for (size_t s = 0; s < BSI_COUNT(row_shapes); s++) {
            int64_t T = row_shapes[s][0], C = row_shapes[s][1];
            trial t = trial_of(BSK_LAYERNORM, "layernorm", types[v]);
            numbers(&t, A, BSI_READ, T * C, 2);
            numbers(&t, A, BSI_READ, C, 1);
            numbers(&t, A, BSI_READ, C, 1);
            written(&t, A, T * C);
            written(&t, F, 2 * T);
            SIZES(&t, T, C);
            t.f[0] = 1e-5;
            t.floor = 0.02;
            note(&t, "T", T), note(&t, "C", C);
            run(&t);

            t = trial_of(BSK_LAYERNORM_BWD, "layernorm_bwd", types[v]);
            numbers(&t, A, BSI_READ, T * C, 2);
            numbers(&t, A, BSI_READ, C, 1);
            float *stats = numbers(&t, F, BSI_READ, 2 * T, 1);
            for (int64_t i = 0; i < T; i++) {
                stats[2 * i] *= 0.1f;
                stats[2 * i + 1] = 0.8f + 0.1f * stats[2 * i + 1];
            }
            numbers(&t, A, BSI_READ, T * C, 1);
            numbers(&t, A, BSI_READWRITE, T * C, 1);
            for (int k = 0; k < 2; k++)
                if (s & 1)
                    absent(&t, F);
                else
                    numbers(&t, F, BSI_READWRITE, C, 1);
            SIZES(&t, T, C, s == 2);
            if (s != 2)
                t.p[4].mode = BSI_WRITE;
            t.floor = 0.02;
            note(&t, "T", T), note(&t, "C", C);
            run(&t);
        }
}

static void try_rows(void)
{
    for (int v = 0; v < 2; v++)
        for (size_t s = 0; s < BSI_COUNT(row_shapes); s++) {
            int64_t T = row_shapes[s][0], C = row_shapes[s][1], first = C / 3, n = (C + 1) / 2, G = 5;
            trial t = trial_of(BSK_BIAS, "bias", types[v]);
            numbers(&t, A, BSI_READWRITE, T * C, 1), numbers(&t, A, BSI_READ, C, 1);
            SIZES(&t, T, C);
            note(&t, "T", T), note(&t, "C", C);
            run(&t);

            t = trial_of(BSK_COLSUM, "colsum", types[v]);
            numbers(&t, A, BSI_READ, T * C, 1), numbers(&t, F, BSI_READWRITE, C, 1);
            SIZES(&t, T, C);
            run(&t);

            t = trial_of(BSK_SOFTMAX, "softmax", types[v]);
            numbers(&t, A, BSI_READ, T * C, 6), written(&t, A, T * C);
            SIZES(&t, T, C);
            run(&t);

            t = trial_of(BSK_SOFTMAX_BWD, "softmax_bwd", types[v]);
            numbers(&t, A, BSI_READ, T * C, 1), numbers(&t, A, BSI_READ, T * C, 1),
                written(&t, A, T * C);
            SIZES(&t, T, C);
            run(&t);

            t = trial_of(BSK_COLUMNS, "columns", types[v]);
            numbers(&t, A, BSI_READ, T * C, 1), written(&t, A, T * n);
            SIZES(&t, T, C, first, n);
            t.bound = 0;
            run(&t);

            t = trial_of(BSK_COLUMNS_BWD, "columns_bwd", types[v]);
            numbers(&t, A, BSI_READ, T * n, 1), written(&t, A, T * C);
            SIZES(&t, T, C, first, n);
            t.bound = 0;
            run(&t);

            t = trial_of(BSK_ROW_SCALE, "row_scale", types[v]);
            numbers(&t, A, BSI_READ, T * C, 1), numbers(&t, A, BSI_READ, T * G, 1),
                written(&t, A, T * C);
            SIZES(&t, T, C, G, 3);
            run(&t);

            t = trial_of(BSK_ROW_SCALE_BWD, "row_scale_bwd", types[v]);
            numbers(&t, A, BSI_READ, T * C, 1), numbers(&t, A, BSI_READ, T * G, 1);
            numbers(&t, A, BSI_READ, T * C, 1), written(&t, A, T * C), written(&t, A, T * G);
            SIZES(&t, T, C, G, 3);
            run(&t);

            t = trial_of(BSK_GATHER_ROWS, "gather_rows", types[v]);
            numbers(&t, A, BSI_READ, T * C, 1), ints(&t, 2 * T + 1, T), written(&t, A, (2 * T + 1) * C);
            SIZES(&t, 2 * T + 1, C);
            t.bound = 0;
            run(&t);

            t = trial_of(BSK_DROPOUT, "dropout", types[v]);
            numbers(&t, A, BSI_READ, T * C, 1), ints(&t, T, 1000), ints(&t, T, 100000),
                written(&t, A, T * C);
            SIZES(&t, T, C, 123456789, 987654321, 17);
            t.f[0] = 0.25;
            run(&t);

            if (v == 0) {
                t = trial_of(BSK_ROW_MUL, "row_mul", types[v]);
                numbers(&t, F, BSI_READWRITE, T * C, 1), numbers(&t, F, BSI_READ, T, 1);
                SIZES(&t, T, C);
                run(&t);
            }
        }
}

/* Many entries of the index on few rows, more of them than a block looks at in a step. */
static void try_scatter(void)
{
    static const int64_t shapes[][3] = {
        {37, 128, 20}, {5000, 40, 30}, {3, 1000, 7}, {2500, 8, 1}}; /* n, C, rows */
    for (int v = 0; v < 2; v++)
        for (size_t s = 0; s < BSI_COUNT(shapes); s++) {
            int64_t n = shapes[s][0], C = shapes[s][1], rows = shapes[s][2];
            trial t = trial_of(BSK_SCATTER_ROWS, "scatter_rows", types[v]);
            numbers(&t, A, BSI_READ, n * C, 1), ints(&t, n, rows),
                numbers(&t, A, BSI_READWRITE, rows * C, 1);
            SIZES(&t, n, C);
            t.f[0] = 0.5;
            note(&t, "n", n), note(&t, "C", C);
            run(&t);
        }
}

/* ---- routing ---- */

/* Logits in [-4, 4), apart by more than scores are rounded in f32; in some rows some are equal. */
static void distinct(float *z, int64_t E, int64_t step)
{
    for (int64_t e = 0; e < E; e++)
        z[e] = (float)((e * step + step) % E - E / 2) * 8.0f / (float)E;
    for (int64_t e = 0; e + 3 < E && step % 4 == 1; e += 5)
        z[e + 3] = z[e];
}

typedef struct route_case {
    int64_t T, E, k, kind, groups, kept, renorm, biased;
} route_case;

static void route_sizes(trial *t, const route_case *r)
{
    bool forward = t->op == BSK_ROUTE;
    SIZES(t, r->T, r->E, r->k, r->kind, forward ? r->groups : 0, forward ? r->kept : 0, r->renorm);
    t->f[0] = 1.5;
    t->shift = r->E == 37;
    t->floor = 0.01;
    note(t, "T", r->T), note(t, "E", r->E), note(t, "k", r->k), note(t, "kind", r->kind);
    note(t, "groups", r->groups), note(t, "bias", r->biased);
}

static void try_route_case(const route_case *r, bs_dtype dtype)
{
    trial t = trial_of(BSK_ROUTE, "route", dtype), b = trial_of(BSK_ROUTE_BWD, "route_bwd", dtype);
    int64_t n = r->T * r->k;
    float *z = numbers(&t, A, BSI_READ, r->T * r->E, 0);
    for (int64_t i = 0; i < r->T; i++)
        distinct(z + i * r->E, r->E, 2 * i + 1);
    for (int64_t e = 0; e < r->E && r->T > 8; e += 3) { /* what is no number, or too large for one */
        z[4 * r->E + e / 2] = NAN;
        z[5 * r->E + e] = -INFINITY;
        z[6 * r->E + e / 7] = INFINITY;
    }
    float *bias = numbers(&t, F, BSI_READ, r->biased ? r->E : 0, 0);
    for (int64_t e = 0; e < r->E && r->biased; e++)
        bias[e] = (float)(e % 7) * 0.125f;
    written(&t, A, n), written(&t, I, n);
    route_sizes(&t, r);
    round_inputs(&t);
    run_cpu(&t);
    memcpy(numbers(&b, A, BSI_READ, r->T * r->E, 0), z, (size_t)(r->T * r->E) * sizeof *z);
    memcpy(put(&b, I, BSI_READ, n)->value, t.p[3].value, (size_t)n * sizeof(int32_t));
    numbers(&b, A, BSI_READ, n, 1), written(&b, A, r->T * r->E);
    route_sizes(&b, r);
    run(&t);
    run(&b);
}

static void try_route(void)
{
    static const route_case cases[] = {
        {70, 128, 8, BSK_ROUTE_SOFTMAX, 1, 1, 1, 0},   {5, 37, 5, BSK_ROUTE_SOFTMAX, 0, 0, 0, 1},
        {9, 32, 4, BSK_ROUTE_CHOSEN, 1, 1, 0, 0},      {3, 128, 4, BSK_ROUTE_CHOSEN, 1, 1, 0, 1},
        {33, 128, 8, BSK_ROUTE_SIGMOID, 1, 1, 1, 1},   {17, 256, 8, BSK_ROUTE_SIGMOID, 8, 4, 1, 1},
        {6, 60, 4, BSK_ROUTE_SIGMOID, 15, 3, 0, 0},    {4, 512, 11, BSK_ROUTE_SOFTMAX, 1, 1, 1, 0},
        {2, 1024, 40, BSK_ROUTE_SIGMOID, 64, 9, 1, 1}, {3, 37, 37, BSK_ROUTE_SOFTMAX, 1, 1, 1, 0},
        {5, 1, 1, BSK_ROUTE_CHOSEN, 1, 1, 0, 0},       {7, 9, 1, BSK_ROUTE_SIGMOID, 9, 2, 0, 0},
        {3, 300, 300, BSK_ROUTE_SIGMOID, 1, 1, 0, 1},
    };
    for (size_t i = 0; i < BSI_COUNT(cases); i++)
        for (int v = 0; v < 2; v++)
            try_route_case(&cases[i], types[v]);
}

/* Experts of entries: in no order; in runs; some left out, all left out; one for all. */
static int32_t expert_of(int64_t i, int64_t n, int64_t E, int how)
{
    switch (how) {
    case 0:
        return (int32_t)((uniform() + 1) / 2 * (double)E);
    case 1:
        return (int32_t)(i * E / n);
    case 2:
        return i % 3 == 1 ? -1 : i % 5 == 2 ? (int32_t)E : (int32_t)(i * 7919 % E);
    case 3:
        return -1;
    default:
        return (int32_t)E - 1;
    }
}

static void try_sort(void)
{
    static const int64_t shapes[][2] = {{1, 1},     {100, 7},     {2048, 128},  {2049, 128},
                                        {9001, 60}, {4100, 1024}, {40000, 128}, {2048 * 70 + 5, 1024},
                                        {70000, 1}}; /* n, E */
    for (size_t s = 0; s < BSI_COUNT(shapes); s++)
        for (int how = 0; how < 5; how++) {
            int64_t n = shapes[s][0], E = shapes[s][1];
            trial t = trial_of(BSK_SORT_ROWS, "sort_rows", BS_DTYPE_F32);
            if (SHORT && n > 10000)
                continue;
            int32_t *id = put(&t, I, BSI_READ, n)->value;
            for (int64_t i = 0; i < n; i++)
                id[i] = expert_of(i, n, E, how);
            written(&t, I, n), written(&t, I, n), written(&t, I, E + 1);
            written(&t, SCRATCH, (int64_t)bsk_sort_scratch(n, E));
            SIZES(&t, n, E);
            t.shift = s == 3;
            note(&t, "n", n), note(&t, "E", E), note(&t, "how", how);
            run(&t);
        }
}

/* Rows in pieces that lie apart, in the order of their experts and back, in a window. */
static void try_order(void)
{
    static const int64_t shapes[][5] = {
        {60, 128, 4, 20, 2560},  {60, 72, 4, 20, 2000}, {30, 33, 2, 10, 331}, {300, 1, 1, 100, 104},
        {12, 4104, 9, 6, 30000}, {7, 2048, 1, 7, 0}}; /* R, C, k, rows, stride */
    for (size_t s = 0; s < BSI_COUNT(shapes); s++)
        for (int v = 0; v < 2; v++) {
            int64_t R = shapes[s][0], C = shapes[s][1], k = shapes[s][2], rows = shapes[s][3],
                    stride = shapes[s][4], n = R * k, size = (R / rows - 1) * stride + rows * C,
                    begin = n / 5, end = n - n / 7;
            trial t = trial_of(BSK_TAKE_ROWS, "take_rows", types[v]),
                  b = trial_of(BSK_SUM_ROWS, "sum_rows", types[v]);
            numbers(&t, A, BSI_READ, size, 1);
            int32_t *order = ints(&t, n, n);
            written(&t, A, n * C);
            numbers(&b, A, BSI_READ, (end - begin) * C, 1);
            int32_t *place = ints(&b, n, n);
            for (int64_t i = 0; i < n; i += 6)
                order[n - 1 - i] = place[i] = -1;
            for (int64_t i = 0; i < k; i++)
                place[(R - 1) * k + i] =
                    (int32_t)(i % 2 ? n - 1 : 0); /* a row without any in the window */
            numbers(&b, F, BSI_READWRITE, size, 1);
            SIZES(&t, n, C, k, rows, stride);
            SIZES(&b, R, C, k, begin, end - begin, rows, stride);
            t.bound = b.bound = 0;
            t.shift = b.shift = s == 1;
            note(&t, "C", C), note(&t, "k", k), note(&b, "C", C), note(&b, "k", k);
            run(&t);
            run(&b);
        }
}

static void try_glu_clamped(void)
{
    static const int64_t shapes[][2] = {{1, 1}, {5, 200}, {7, 999}, {3, 1368}, {2, 33}}; /* T, H */
    for (size_t s = 0; s < BSI_COUNT(shapes); s++)
        for (int v = 0; v < 2; v++) {
            int64_t T = shapes[s][0], H = shapes[s][1];
            trial t = trial_of(BSK_GLU_CLAMPED, "glu_clamped", types[v]),
                  b = trial_of(BSK_GLU_CLAMPED_BWD, "glu_clamped_bwd", types[v]);
            for (trial *p = &t; p; p = p == &t ? &b : NULL) {
                float *x = numbers(p, A, BSI_READ, 2 * T * H, 11);
                for (int64_t i = 0; i < 2 * T * H; i += 7)
                    x[i] = i % 2 ? -7.0f : 7.0f; /* at the limit */
                if (p == &b)
                    numbers(p, A, BSI_READ, T * H, 1);
                written(p, A, (p == &b ? 2 : 1) * T * H);
                SIZES(p, T, H);
                p->f[0] = 1.702;
                p->f[1] = 7.0;
                p->shift = s == 1;
                note(p, "T", T), note(p, "H", H);
                run(p);
            }
        }
}

static void try_norm_rope(void)
{
    static const int64_t shapes[][4] = {{37, 4, 128, 64}, {5, 11, 80, 16},  {7, 2, 64, 32},
                                        {3, 1, 10, 3},    {4, 2, 300, 130}, {70, 1, 128, 64},
                                        {9, 33, 128, 64}, {35, 3, 256, 128}}; /* T, H, D, freqs */
    for (int v = 0; v < 8 * (int)BSI_COUNT(shapes); v++) {
        const int64_t *s = shapes[v / 8];
        bs_dtype dtype = types[v & 1];
        bool half = dtype == BS_DTYPE_BF16;
        int64_t n = s[0] * s[1] * s[2], style = v >> 1 & 1 ? BSK_ROPE_INTERLEAVED : BSK_ROPE_HALF,
                more = v >> 2 & 1;
        trial t = trial_of(BSK_NORM_ROPE, "norm_rope", dtype),
              b = trial_of(BSK_NORM_ROPE_BWD, "norm_rope_bwd", dtype);
        for (trial *p = &t; p; p = p == &t ? &b : NULL) {
            numbers(p, A, BSI_READ, n, 1.5);
            numbers(p, A, BSI_READ, s[2], 1);
            ints(p, s[0], 5000);
            float *freq = numbers(p, F, BSI_READ, s[3], 0);
            for (int64_t j = 0; j < s[3]; j++)
                freq[j] = (float)pow(10000.0, -(double)j / (double)s[3]);
            note(p, "D", s[2]), note(p, "freqs", s[3]), note(p, "style", style), note(p, "more", more);
        }
        written(&t, A, n);
        written(&t, F, s[0] * s[1]);
        SIZES(&t, s[0], s[1], s[2], s[3], style, more);
        t.f[0] = 1e-6;
        t.f[1] = 1.1;
        t.bound = half ? 4e-3 : 1e-5;
        float *rstd = numbers(&b, F, BSI_READ, s[0] * s[1], 1);
        for (int64_t i = 0; i < s[0] * s[1]; i++)
            rstd[i] = 0.5f + fabsf(rstd[i]);
        numbers(&b, A, BSI_READ, n, 1);
        numbers(&b, A, BSI_READWRITE, n, 1);
        numbers(&b, F, BSI_READWRITE, more ? s[2] : 0, 1);
        SIZES(&b, s[0], s[1], s[2], s[3], style, !more, v % 3 == 0);
        b.f[0] = 1.1;
        b.bound = half ? 6e-3 : 2e-5;
        run(&t);
        run(&b);
    }
}

static void try_rope(void)
{
    static const int64_t shapes[][4] = {
        {37, 4, 128, 64}, {5, 3, 80, 16}, {7, 2, 64, 32}, {3, 1, 10, 3}}; /* T, H, D, freqs */
    for (int v = 0; v < 16; v++) {
        const int64_t *s = shapes[v / 4];
        trial t = trial_of(BSK_ROPE, "rope", types[v & 1]);
        numbers(&t, A, BSI_READ, s[0] * s[1] * s[2], 1);
        ints(&t, s[0], 5000);
        float *freq = numbers(&t, F, BSI_READ, s[3], 0);
        for (int64_t j = 0; j < s[3]; j++)
            freq[j] = (float)pow(10000.0, -(double)j / (double)s[3]);
        written(&t, A, s[0] * s[1] * s[2]);
        SIZES(&t, s[0], s[1], s[2], s[3], v >> 1 & 1 ? BSK_ROPE_INTERLEAVED : BSK_ROPE_HALF,
              v % 3 == 0);
        t.f[0] = 1.1;
        note(&t, "D", s[2]), note(&t, "freqs", s[3]), note(&t, "style", t.n[4]);
        run(&t);
    }
}

/* What a head knows of T tokens after earlier tiles. */
static void head_state(trial *t, int64_t T, uint8_t mode)
{
    float *m = numbers(t, F, mode, T, 2), *s = numbers(t, F, mode, T, 1);
    for (int64_t i = 0; i < T; i++) {
        s[i] = 3.0f + s[i];
        if (i % 5 == 0 && (mode & BSI_WRITE))
            m[i] = -INFINITY, s[i] = 0.0f; /* nothing seen so far */
    }
    numbers(t, F, mode, T, 2);
}

static void try_head(void)
{
    static const int64_t shapes[][2] = {{37, 1000}, {5, 4099}, {3, 8}, {9, 1}}; /* T, V */
    for (int v = 0; v < 2; v++)
        for (size_t s = 0; s < BSI_COUNT(shapes); s++) {
            int64_t T = shapes[s][0], V = shapes[s][1], first = 100, C = 200 + (int64_t)s, cap = s & 1;
            trial t = trial_of(BSK_HEAD_TILE, "head_tile", types[v]);
            numbers(&t, F, BSI_READ, T * V, 5);
            int32_t *label = ints(&t, T, 2 * V);
            for (int64_t i = 0; i < T; i++)
                label[i] += 100;
            head_state(&t, T, BSI_READWRITE);
            written(&t, F, T);
            written(&t, A, T * V);
            t.p[6].cpu_same = 1;
            SIZES(&t, T, V, first, cap);
            t.f[0] = 3.0;
            t.floor = 0.02;
            note(&t, "T", T), note(&t, "V", V), note(&t, "cap", cap);
            run(&t);

            t = trial_of(BSK_HEAD_DLOGITS, "head_dlogits", types[v]);
            numbers(&t, F, BSI_READ, T * V, 2);
            label = ints(&t, T, 2 * V);
            for (int64_t i = 0; i < T; i++)
                label[i] += 100;
            head_state(&t, T, BSI_READ);
            written(&t, A, T * V);
            t.p[5].cpu_same = 1;
            SIZES(&t, T, V, first, cap);
            t.f[0] = 0.125;
            t.f[1] = 3.0;
            t.floor = 1e-4;
            note(&t, "T", T), note(&t, "V", V), note(&t, "cap", cap);
            run(&t);

            t = trial_of(BSK_HEAD_PICK, "head_pick", types[v]);
            numbers(&t, A, BSI_READ, V * C, 1);
            label = ints(&t, T, 2 * V);
            for (int64_t i = 0; i < T; i++)
                label[i] += 100;
            numbers(&t, F, BSI_READ, T, 2);
            numbers(&t, F, BSI_READWRITE, T * C, 1);
            SIZES(&t, T, C, first, V, cap);
            t.f[0] = 3.0;
            run(&t);

            t = trial_of(BSK_HEAD_FINISH, "head_finish", types[v]);
            head_state(&t, T, BSI_READ);
            numbers(&t, F, BSI_READ, T * C, 1), numbers(&t, F, BSI_READ, T * C, 1);
            written(&t, F, T);
            written(&t, A, T * C);
            SIZES(&t, T, C);
            t.f[0] = 0.125;
            run(&t);
        }
}

static void try_optim(void)
{
    static const int64_t lengths[] = {1, 1000, 300007};
    for (size_t s = 0; s < BSI_COUNT(lengths); s++) {
        int64_t N = lengths[s];
        for (int v = 0; v < 2; v++) {
            trial t = trial_of(v ? BSK_SUMSQ : BSK_SUM, v ? "sumsq" : "sum", BS_DTYPE_F32);
            numbers(&t, F, BSI_READ, N, 1);
            written(&t, D, 1);
            SIZES(&t, N);
            t.shift = s == 1;
            t.bound = 1e-12;
            note(&t, "N", N);
            run(&t);

            t = trial_of(BSK_ADAMW, "adamw", BS_DTYPE_F32);
            numbers(&t, F, BSI_READWRITE, N, 1), numbers(&t, F, BSI_READ, N, 1);
            numbers(&t, F, BSI_READWRITE, N, 0.1);
            float *square = numbers(&t, F, BSI_READWRITE, N, 0.1);
            for (int64_t i = 0; i < N; i++)
                square[i] = fabsf(square[i]);
            t.out = v ? BS_DTYPE_BF16 : BS_DTYPE_F32;
            if (v)
                written(&t, O, N);
            else
                absent(&t, O);
            SIZES(&t, N);
            const double f[] = {1e-2, 0.9, 0.95, 1e-8, 0.1, 0.3, 0.2, 0.5};
            memcpy(t.f, f, sizeof f);
            t.shift = s == 1;
            t.bound = v ? 4e-3 : 1e-6;
            t.p[4].cpu_same = v ? 1 : 0; /* the copy is p rounded */
            note(&t, "N", N);
            run(&t);
        }
    }
}

/* ---- attention ---- */

enum { NO_SINKS, SINKS, HIGH_SINKS /* far above every score */ };

typedef struct attention_case {
    int64_t H, K, D, window;
    double cap;
    int sinks;
} attention_case;

static void put_sinks(trial *t, const attention_case *a)
{
    if (a->sinks == NO_SINKS)
        return;
    float *v = numbers(t, A, BSI_READ, a->H, 3);
    for (int64_t h = 0; a->sinks == HIGH_SINKS && h < a->H; h++)
        v[h] += 256;
}

static void attention_sizes(trial *t, const attention_case *a, int64_t T, int64_t rows)
{
    SIZES(t, T, a->H, a->K, a->D, rows, a->window, T + 5);
    t->f[0] = 1.0 / sqrt((double)a->D) * 2.0;
    t->f[1] = a->cap;
    note(t, "H", a->H), note(t, "K", a->K), note(t, "D", a->D), note(t, "window", a->window);
    note(t, "cap", (int64_t)a->cap), note(t, "rows", rows);
}

/* The gradient of the sinks of a forward trial that has run on the CPU. */
static trial sinks_trial(const attention_case *a, int64_t T, bs_dtype dtype, const trial *forward)
{
    int64_t q = T * a->H * a->D;
    trial s = trial_of(BSK_SINKS_BWD, "sinks_bwd", dtype);
    memcpy(numbers(&s, A, BSI_READ, q, 0), forward->p[4].value, (size_t)q * sizeof(float));
    numbers(&s, A, BSI_READ, q, 1);
    memcpy(numbers(&s, F, BSI_READ, T * a->H, 0), forward->p[5].value,
           (size_t)(T * a->H) * sizeof(float));
    memcpy(numbers(&s, A, BSI_READ, a->H, 0), forward->p[7].value, (size_t)a->H * sizeof(float));
    numbers(&s, F, BSI_READWRITE, a->H, 1);
    SIZES(&s, T, a->H, a->D);
    s.bound = 1e-4;
    return s;
}

static void try_attention_case(const attention_case *a, const int32_t *cu, int64_t rows, bs_dtype dtype)
{
    int64_t T = cu[rows], q = T * a->H * a->D, kv = T * a->K * a->D;
    bool half = dtype == BS_DTYPE_BF16;
    trial t = trial_of(BSK_ATTENTION, "attention", dtype);
    float *in[3];
    for (int i = 0; i < 3; i++)
        in[i] = numbers(&t, A, BSI_READ, i == 0 ? q : kv, 1.5);
    memcpy(put(&t, I, BSI_READ, rows + 1)->value, cu, (size_t)(rows + 1) * sizeof *cu);
    written(&t, A, q);
    written(&t, F, T * a->H);
    written(&t, SCRATCH, (int64_t)bsk_attention_scratch(T + 5, a->H, a->K, a->D));
    free(t.p[6].value);
    t.p[6].value = must_alloc((size_t)t.p[6].n);
    put_sinks(&t, a);
    attention_sizes(&t, a, T, rows);
    t.bound = half ? 6e-3 : 1e-5;

    trial b = trial_of(BSK_ATTENTION_BWD, "attention_bwd", dtype);
    round_inputs(&t);
    for (int i = 0; i < 3; i++)
        memcpy(numbers(&b, A, BSI_READ, t.p[i].n, 0), in[i], (size_t)t.p[i].n * sizeof(float));
    memcpy(put(&b, I, BSI_READ, rows + 1)->value, cu, (size_t)(rows + 1) * sizeof *cu);
    float *o = numbers(&b, A, BSI_READ, q, 0), *lse = numbers(&b, F, BSI_READ, T * a->H, 0);
    numbers(&b, A, BSI_READ, q, 1);
    for (int i = 0; i < 3; i++)
        written(&b, A, i == 0 ? q : kv);
    written(&b, SCRATCH, (int64_t)bsk_attention_bwd_scratch(T + 5, a->H, a->K, a->D));
    attention_sizes(&b, a, T, rows);
    run_cpu(&t);
    memcpy(o, t.p[4].value, (size_t)q * sizeof *o);
    memcpy(lse, t.p[5].value, (size_t)(T * a->H) * sizeof *lse);
    b.bound = half ? 1.2e-2 : 5e-5;
    b.floor = 0.05;
    trial s = {0};
    if (a->sinks)
        s = sinks_trial(a, T, dtype, &t);
    run(&t);
    run(&b);
    if (a->sinks)
        run(&s);
}

static void try_attention(void)
{
    static const int32_t one[] = {0, 333}, many[] = {0, 1, 70, 71, 200, 333, 461}, tiny[] = {0, 3},
                         few[] = {0, 1, 9, 10, 35};
    static const attention_case cases[] = {
        {2, 2, 128, 0, 0, NO_SINKS},  {8, 1, 128, 0, 0, NO_SINKS},    {8, 2, 128, 7, 0, NO_SINKS},
        {4, 1, 128, 1, 0, NO_SINKS},  {4, 1, 128, 100, 20, NO_SINKS}, {4, 4, 64, 0, 0, NO_SINKS},
        {8, 1, 64, 7, 0, NO_SINKS},   {4, 2, 80, 0, 0, NO_SINKS},     {4, 1, 96, 0, 5, NO_SINKS},
        {4, 1, 256, 0, 0, NO_SINKS},  {2, 1, 256, 9, 5, NO_SINKS},    {4, 2, 40, 0, 0, NO_SINKS},
        {4, 1, 40, 7, 5, NO_SINKS},   {4, 1, 128, 0, 0, SINKS},       {4, 2, 64, 7, 5, SINKS},
        {2, 1, 40, 0, 0, SINKS},      {4, 1, 128, 0, 0, HIGH_SINKS},  {4, 2, 64, 0, 5, HIGH_SINKS},
        {2, 1, 40, 0, 0, HIGH_SINKS},
    };
    for (size_t i = 0; i < BSI_COUNT(cases); i++)
        for (int v = 0; v < 2; v++) {
            if (SHORT) {
                try_attention_case(&cases[i], few, 4, types[v]);
                continue;
            }
            try_attention_case(&cases[i], many, 6, types[v]);
            try_attention_case(&cases[i], one, 1, types[v]);
            try_attention_case(&cases[i], tiny, 1, types[v]);
        }
    /* More tiles of keys than are on the chip at once; more tiles of queries than processors. */
    static const int32_t deep[] = {0, 900, 1500};
    static const attention_case large[] = {{4, 1, 128, 0, 0, NO_SINKS},
                                           {4, 2, 64, 700, 0, SINKS},
                                           {64, 8, 128, 0, 0, SINKS},
                                           {64, 64, 64, 0, 5, NO_SINKS}};
    for (int i = 0; i < (SHORT ? 0 : 4); i++)
        try_attention_case(&large[i], i < 2 ? deep : many, i < 2 ? 2 : 6, BS_DTYPE_BF16);
}

/* New tokens of rows of a cache: runs, single ones, the first and the last place. */
static void try_cache_case(const attention_case *a, bs_dtype dtype)
{
    enum { ROWS = 3, CAPACITY = 301, TOKENS = 40 };
    int64_t C = a->K * a->D, cached = ROWS * CAPACITY * C;
    trial t = trial_of(BSK_ATTENTION_CACHE, "attention_cache", dtype),
          p = trial_of(BSK_CACHE_PUT, "cache_put", dtype);
    int32_t row[TOKENS], pos[TOKENS];
    for (int32_t i = 0; i < TOKENS; i++) {
        row[i] = i < 20 ? 2 : i % 3;
        pos[i] = i < 20    ? 100 + i
                 : i == 39 ? CAPACITY - 1
                           : (i - 20) * 5; /* no place is written twice */
    }
    numbers(&t, A, BSI_READ, TOKENS * a->H * a->D, 1.5);
    numbers(&t, A, BSI_READ, cached, 1.5), numbers(&t, A, BSI_READ, cached, 1.5);
    memcpy(put(&t, I, BSI_READ, TOKENS)->value, row, sizeof row);
    memcpy(put(&t, I, BSI_READ, TOKENS)->value, pos, sizeof pos);
    written(&t, A, TOKENS * a->H * a->D);
    written(&t, SCRATCH, (int64_t)bsk_attention_scratch(CAPACITY, a->H, a->K, a->D));
    free(t.p[6].value);
    t.p[6].value = must_alloc((size_t)t.p[6].n);
    put_sinks(&t, a);
    attention_sizes(&t, a, TOKENS, ROWS);
    t.n[6] = CAPACITY;
    t.bound = dtype == BS_DTYPE_BF16 ? 6e-3 : 1e-5;
    run(&t);

    numbers(&p, A, BSI_READ, TOKENS * C, 1);
    memcpy(put(&p, I, BSI_READ, TOKENS)->value, row, sizeof row);
    memcpy(put(&p, I, BSI_READ, TOKENS)->value, pos, sizeof pos);
    numbers(&p, A, BSI_READWRITE, cached, 1);
    SIZES(&p, TOKENS, C, ROWS, CAPACITY);
    p.bound = 0;
    run(&p);
}

static void try_cache(void)
{
    static const attention_case cases[] = {{8, 2, 128, 0, 0, NO_SINKS},  {4, 1, 64, 7, 0, NO_SINKS},
                                           {4, 4, 40, 0, 5, NO_SINKS},   {2, 1, 256, 90, 0, NO_SINKS},
                                           {6, 3, 80, 1, 2.5, NO_SINKS}, {4, 2, 33, 0, 0, NO_SINKS},
                                           {4, 1, 64, 0, 0, SINKS},      {4, 1, 64, 0, 0, HIGH_SINKS}};
    for (size_t i = 0; i < BSI_COUNT(cases); i++)
        for (int v = 0; v < 2; v++)
            try_cache_case(&cases[i], types[v]);
}

static void try_all(void)
{
    try_gemm();
    try_gemm_grouped();
    try_bias_grouped();
    try_expand();
    try_expand_mxfp4();
    try_flat(BSK_ADD, "add", 2, 1, false, 0);
    try_flat(BSK_MUL, "mul", 2, 1, false, 0);
    try_flat(BSK_AXPY, "axpy", 2, 0, false, 1);
    try_flat(BSK_SCALE, "scale", 1, 1, false, 1);
    try_flat(BSK_ACT, "act", 1, 1, true, 0);
    try_flat(BSK_ACT_BWD, "act_bwd", 2, 1, true, 0);
    try_flat(BSK_GLU, "glu", 2, 1, true, 0);
    try_flat(BSK_GLU_BWD, "glu_bwd", 3, 2, true, 0);
    trial t = trial_of(BSK_SOFTCAP, "softcap", BS_DTYPE_F32);
    numbers(&t, F, BSI_READWRITE, 1003, 90);
    SIZES(&t, 1003);
    t.f[0] = 30;
    run(&t);
    try_norm();
    try_layernorm();
    try_rows();
    try_scatter();
    try_route();
    try_sort();
    try_order();
    try_glu_clamped();
    try_rope();
    try_norm_rope();
    try_head();
    try_optim();
    try_attention();
    try_cache();
}

int main(int argc, char **argv)
{
    const char *spec = "cuda";
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--check") == 0)
            spec = "check:cuda";
        else if (strncmp(argv[i], "--only=", 7) == 0)
            only = argv[i] + 7;
        else if (strncmp(argv[i], "--every=", 8) == 0 && atoi(argv[i] + 8) > 0)
            every = (unsigned)atoi(argv[i] + 8);
        else {
            fprintf(stderr, "usage: %s [--check] [--only=NAME,...] [--every=N]\n", argv[0]);
            return 2;
        }
    }
    bs_status st = open_device(spec);
    if (st != BS_OK) {
        printf("no cuda device: %s\n", bs_error()->msg);
        return st == BS_UNSUPPORTED ? 77 : 1;
    }
    setvbuf(stdout, NULL, _IOLBF, 0);
    try_all();
    printf("%d passed, %d failed\n", passed, failed);
    close_device();
    return failed || passed == 0 ? 1 : 0;
}
