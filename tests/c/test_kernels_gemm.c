/* SPDX-License-Identifier: Apache-2.0 */
/* GEMM against f64 sums: transposes, leading dimensions, odd sizes, alpha and beta, threads. */
#include "kernel_test.h"

#include <dlfcn.h>

typedef void gemm_fn(bsk_par *par, bool ta, bool tb, int64_t M, int64_t N, int64_t K, float alpha,
                     const float *A, int64_t lda, const float *B, int64_t ldb, float beta, float *C,
                     int64_t ldc);

struct shape {
    bool ta, tb;
    int64_t M, N, K;
    float alpha, beta;
};

static double want_at(const struct shape *s, const float *A, int64_t lda, const float *B, int64_t ldb,
                      int64_t i, int64_t j, double *size)
{
    double sum = 0;
    *size = 0;
    for (int64_t k = 0; k < s->K; k++) {
        double a = (double)(s->ta ? A[k * lda + i] : A[i * lda + k]);
        double b = (double)(s->tb ? B[j * ldb + k] : B[k * ldb + j]);
        sum += a * b;
        *size += fabs(a * b);
    }
    return sum;
}

/* One shape on 1, 2, 3 threads: near f64, equal bits, nothing written between N and ldc. */
static void check(gemm_fn *fn, struct shape s)
{
    int64_t ra = s.ta ? s.K : s.M, ca = s.ta ? s.M : s.K, lda = ca + 3;
    int64_t rb = s.tb ? s.N : s.K, cb = s.tb ? s.K : s.N, ldb = cb + 5, ldc = s.N + 2;
    float *A = array(ra * lda, 1), *B = array(rb * ldb, 1), *C0 = array(s.M * ldc, 1), *first = NULL;
    for (int p = 0; p < 3; p++) {
        float *C = array_copy(C0, s.M * ldc);
        if (s.beta == 0.0f) /* what beta 0 overwrites may be anything */
            for (int64_t i = 0; i < s.M * ldc; i++)
                C[i] = i % ldc < s.N ? NAN : C0[i];
        fn(pars[p], s.ta, s.tb, s.M, s.N, s.K, s.alpha, A, lda, B, ldb, s.beta, C, ldc);
        for (int64_t i = 0; i < s.M && p == 0; i++)
            for (int64_t j = 0; j < ldc; j++) {
                double size, c0 = (double)C0[i * ldc + j];
                if (j >= s.N) {
                    assert_true(C[i * ldc + j] == C0[i * ldc + j]);
                    continue;
                }
                double want = (double)s.alpha * want_at(&s, A, lda, B, ldb, i, j, &size);
                if (s.beta != 0.0f)
                    want += (double)s.beta * c0;
                if (!(fabs((double)C[i * ldc + j] - want) <= 1e-6 * (size + fabs(want)) + 1e-7))
                    fail_msg("ta %d tb %d M %lld N %lld K %lld at %lld,%lld: got %g, want %g", s.ta,
                             s.tb, (long long)s.M, (long long)s.N, (long long)s.K, (long long)i,
                             (long long)j, (double)C[i * ldc + j], want);
            }
        if (!first)
            first = array_copy(C, s.M * ldc);
        same_bits("threads", first, C, s.M * ldc);
        array_free(C, s.M * ldc);
    }
    array_free(first, s.M * ldc);
    array_free(A, ra * lda);
    array_free(B, rb * ldb);
    array_free(C0, s.M * ldc);
}

static void all_shapes(gemm_fn *fn)
{
    static const int64_t size[][3] = {{1, 1, 1},     {1, 97, 64},   {3, 2, 5},     {16, 16, 16},
                                      {17, 61, 129}, {64, 64, 64},  {65, 130, 63}, {2, 300, 3},
                                      {300, 2, 7},   {257, 33, 40}, {80, 70, 200}, {5, 513, 129},
                                      {130, 129, 65}};
    for (size_t i = 0; i < BSI_COUNT(size); i++)
        for (int t = 0; t < 4; t++) {
            struct shape s = {(t & 1) != 0, (t & 2) != 0, size[i][0], size[i][1],
                              size[i][2],   1.0f,         0.0f};
            check(fn, s);
            s.alpha = -0.75f;
            s.beta = t < 2 ? 1.0f : 0.5f;
            check(fn, s);
        }
}

static void test_plain(void **state)
{
    (void)state;
    all_shapes(bsk_gemm_plain_f32);
}

static void test_gemm(void **state)
{
    (void)state;
    all_shapes(bsk_gemm_f32);
    check(bsk_gemm_f32,
          (struct shape){false, true, 300, 530, 70, 1.0f, 1.0f}); /* several tiles each way */
}

static void test_empty(void **state)
{
    (void)state;
    gemm_fn *const fns[2] = {bsk_gemm_f32, bsk_gemm_plain_f32};
    for (int f = 0; f < 2; f++) {
        float c[6] = {1, 2, 3, 4, 5, 6};
        fns[f](&team2, false, true, 0, 3, 4, 1, NULL, 4, NULL, 4, 0, c, 3);
        fns[f](&team2, false, true, 2, 0, 4, 1, NULL, 4, NULL, 4, 0, c, 3);
        assert_true(c[0] == 1 && c[5] == 6);
        fns[f](&team2, true, false, 2, 3, 0, 1, NULL, 1, NULL, 1, 0.5f, c, 3); /* K = 0: C = beta C */
        assert_true(c[0] == 0.5f && c[5] == 3.0f);
        c[1] = NAN;
        fns[f](&team2, true, false, 2, 3, 0, 1, NULL, 1, NULL, 1, 0, c, 3);
        assert_true(c[0] == 0 && c[1] == 0 && c[5] == 0);
    }
}

/* Plain: a row's bits are a function of that row of A and of B only. */
static void test_plain_rows(void **state)
{
    (void)state;
    enum { M = 67, N = 70, K = 90 };
    float *A = array(M * K, 1), *B = array(N * K, 1), *C = array(M * N, 1), row[N];
    bsk_gemm_plain_f32(&team3, false, true, M, N, K, 1, A, K, B, K, 0, C, N);
    for (int i = 0; i < M; i++) {
        bsk_gemm_plain_f32(&bsk_par_serial, false, true, 1, N, K, 1, A + i * K, K, B, K, 0, row, N);
        same_bits("row", row, C + i * N, N);
        float chain = 0;
        for (int k = 0; k < K; k++)
            chain += A[i * K + k] * B[k]; /* one chain of multiply-adds, k in order */
        assert_true(chain == row[0]);
    }
    array_free(A, M * K);
    array_free(B, N * K);
    array_free(C, M * N);
}

/* NaN and infinity reach the elements that they belong to, and only those. */
static void test_nan(void **state)
{
    (void)state;
    enum { M = 70, N = 66, K = 9 };
    gemm_fn *const fns[2] = {bsk_gemm_f32, bsk_gemm_plain_f32};
    for (int f = 0; f < 2; f++) {
        float *A = array(M * K, 1), *B = array(K * N, 1), *C = array_of(M * N, NAN);
        A[65 * K + 3] = NAN;
        fns[f](&team2, false, false, M, N, K, 1, A, K, B, N, 0, C, N);
        for (int i = 0; i < M * N; i++)
            assert_int_equal(isnan(C[i]) != 0, i / N == 65);
        array_free(A, M * K);
        array_free(B, K * N);
        array_free(C, M * N);
    }
}

/* Against a product for each group; rows of no group stay. */
static void test_grouped(void **state)
{
    (void)state;
    enum { E = 4, ROWS = 60, N = 19, K = 23, STRIDE = N * K + 5 };
    static const int32_t offset[E + 1] = {2, 2, 40, 41, 57};
    int32_t table[E + 1];
    float *A = array(ROWS * K, 1), *B = array(E * STRIDE, 1), *C0 = array(ROWS * N, 1);
    for (int v = 0; v < 4; v++) {
        bool tb = v & 1;
        float beta = v & 2 ? 0.5f : 0.0f;
        float *C = array_copy(C0, ROWS * N), *want = array_copy(C0, ROWS * N);
        for (int e = 0; e < E; e++)
            for (int64_t i = offset[e]; i < offset[e + 1]; i++)
                bsk_gemm_plain_f32(&bsk_par_serial, false, tb, 1, N, K, 1, A + i * K, K, B + e * STRIDE,
                                   tb ? K : N, beta, want + i * N, N);
        bsk_call c = {.p = {A, B, C, memcpy(table, offset, sizeof offset)},
                      .n = {E, tb, ROWS, N, K, STRIDE, 0},
                      .f = {(double)beta},
                      .par = &bsk_par_serial};
        bsk_cpu[BSK_GEMM_GROUPED].fn(&c);
        for (int64_t i = 0; i < ROWS * N; i++)
            assert_true(fabsf(C[i] - want[i]) <= 1e-5f);
        for (int64_t i = 0; i < ROWS * N; i++)
            if (i < offset[0] * N || i >= offset[E] * N)
                assert_true(C[i] == C0[i]);
        array_free(C, ROWS * N);
        array_free(want, ROWS * N);
    }
    array_free(A, ROWS * K);
    array_free(B, E * STRIDE);
    array_free(C0, ROWS * N);
}

static void test_table(void **state)
{
    (void)state;
    enum { M = 4, N = 3, K = 5 };
    float *A = array(M * K, 1), *B = array(N * K, 1), *C = array(M * N, 1), *D = array_copy(C, M * N);
    bsk_gemm_f32(&team2, false, true, M, N, K, 2, A, K, B, K, 1, C, N);
    launch(BSK_GEMM, (bsk_call){.p = {A, B, D}, .n = {0, 1, M, N, K, K, K, N}, .f = {2, 1}}, &team2);
    same_bits("table", C, D, M * N);
    /* added from elsewhere, rows further apart than they are long */
    float *from = array(M * (N + 2), 1), *to = array_of(M * (N + 2), NAN),
          *want = array_copy(from, M * (N + 2));
    bsk_gemm_f32(&team2, false, true, M, N, K, 2, A, K, B, K, 0.5f, want, N + 2);
    launch(BSK_GEMM,
           (bsk_call){.p = {A, B, to, from}, .n = {0, 1, M, N, K, K, K, N + 2}, .f = {2, 0.5}}, &team2);
    for (int i = 0; i < M; i++) {
        same_bits("table, added", to + i * (N + 2), want + i * (N + 2), N);
        assert_true(isnan(to[i * (N + 2) + N]) && isnan(to[i * (N + 2) + N + 1]));
    }
    array_free(from, M * (N + 2));
    array_free(to, M * (N + 2));
    array_free(want, M * (N + 2));
    array_free(A, M * K);
    array_free(B, N * K);
    array_free(C, M * N);
    array_free(D, M * N);
    for (int i = 0; i < BSK_OP_COUNT; i++) {
        assert_non_null(bsk_cpu[i].name);
        assert_non_null(bsk_cpu[i].fn);
    }
    const char *name = bsk_cpu_gemm_name();
    bool there = BS_HAVE_BLAS && dlopen("libopenblas.so.0", RTLD_NOW | RTLD_LOCAL);
    assert_string_equal(name, there ? "openblas" : "plain");
}

int main(void)
{
    if (!bsk_cpu_init(4))
        return 1;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_plain),      cmocka_unit_test(test_gemm), cmocka_unit_test(test_empty),
        cmocka_unit_test(test_plain_rows), cmocka_unit_test(test_nan),  cmocka_unit_test(test_grouped),
        cmocka_unit_test(test_table),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
