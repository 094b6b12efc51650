/* SPDX-License-Identifier: Apache-2.0 */
/*
** gemm.c: C = alpha op(A) op(B) + beta C, row-major. With a BLAS, C is cut into a grid of tiles
** that is a function of M, N, K only and every tile is one single-threaded BLAS call, so the bits
** do not depend on the number of threads. Without one, plain blocked loops. beta 0 never reads C.
*/
#include "cpu.h"

enum {
    BLOCK = 64,      /* plain: C is done in tiles of BLOCK x BLOCK, K in steps of BLOCK */
    SMALL = 1 << 18, /* multiplications that are not worth a second thread */
    FEW = 4          /* tiles that two to four threads share evenly */
};

struct gemm {
    bool ta, tb;
    int64_t M, N, K;
    float alpha, beta;
    const float *A, *B; /* op(A) [M,K], op(B) [K,N] */
    float *C;           /* [M,N] */
    int64_t lda, ldb, ldc;
    int64_t tile_m, tile_n; /* of the BLAS grid */
};

/* block[i][j] = x[i][j], or x[j][i] when t, for i < m and j < n; x has leading dimension ld. */
static void pack(float (*block)[BLOCK], const float *x, int64_t ld, bool t, int m, int n)
{
    if (t)
        for (int j = 0; j < n; j++)
            for (int i = 0; i < m; i++)
                block[i][j] = x[j * ld + i];
    else
        for (int i = 0; i < m; i++)
            memcpy(block[i], x + i * ld, (size_t)n * sizeof *x);
}

typedef float lanes __attribute__((vector_size(32), may_alias));

/* acc[i][j] += sum over k < kn of a[i][k] * b[k][j], k in order; in steps of 4 rows and 16 columns. A sum stays in
   one lane of a register over all k, so the vector width changes no bits. 4 x 2 sums, one of a and two of b fit
   into the sixteen registers of a machine without AVX-512. */
BSK_WIDE static void multiply(float (*acc)[BLOCK], float (*a)[BLOCK], float (*b)[BLOCK], int m, int n,
                              int kn)
{
    for (int i = 0; i < m; i += 4)
        for (int j = 0; j < n; j += 16) {
            lanes sum[4][2];
            for (int r = 0; r < 4; r++)
                for (int l = 0; l < 2; l++)
                    sum[r][l] = *(const lanes *)&acc[i + r][j + 8 * l];
            for (int k = 0; k < kn; k++) {
                const lanes *row = (const lanes *)&b[k][j];
                for (int r = 0; r < 4; r++)
                    for (int l = 0; l < 2; l++)
                        sum[r][l] += a[i + r][k] * row[l];
            }
            for (int r = 0; r < 4; r++)
                for (int l = 0; l < 2; l++)
                    *(lanes *)&acc[i + r][j + 8 * l] = sum[r][l];
        }
}

/* C's rows [i0, i0+m), columns [j0, j0+n); m, n <= BLOCK. What multiply does past m and n stays in acc.
 */
static void plain_tile(const struct gemm *g, int64_t i0, int64_t j0, int m, int n)
{
    _Alignas(32) float acc[BLOCK][BLOCK] = {{0}}, a[BLOCK][BLOCK] = {{0}}, b[BLOCK][BLOCK] = {{0}};
    for (int64_t k0 = 0; k0 < g->K; k0 += BLOCK) {
        int kn = (int)BSI_MIN(BLOCK, g->K - k0);
        pack(a, g->A + (g->ta ? k0 * g->lda + i0 : i0 * g->lda + k0), g->lda, g->ta, m, kn);
        pack(b, g->B + (g->tb ? j0 * g->ldb + k0 : k0 * g->ldb + j0), g->ldb, g->tb, kn, n);
        multiply(acc, a, b, m, n, kn);
    }
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j++) {
            float *c = g->C + (i0 + i) * g->ldc + j0 + j;
            *c = g->beta == 0.0f ? g->alpha * acc[i][j] : g->alpha * acc[i][j] + g->beta * *c;
        }
}

static void plain_task(void *arg, int64_t task)
{
    const struct gemm *g = arg;
    int64_t across = (g->N + BLOCK - 1) / BLOCK;
    int64_t i = task / across * BLOCK, j = task % across * BLOCK;
    plain_tile(g, i, j, (int)BSI_MIN(BLOCK, g->M - i), (int)BSI_MIN(BLOCK, g->N - j));
}

void bsk_gemm_plain_f32(bsk_par *par, bool ta, bool tb, int64_t M, int64_t N, int64_t K, float alpha,
                        const float *A, int64_t lda, const float *B, int64_t ldb, float beta, float *C,
                        int64_t ldc)
{
    struct gemm g = {ta, tb, M, N, K, alpha, beta, A, B, C, lda, ldb, ldc, 0, 0};
    if (M <= 0 || N <= 0)
        return;
    int64_t tasks = ((M + BLOCK - 1) / BLOCK) * ((N + BLOCK - 1) / BLOCK);
    if (M * N * K <= SMALL)
        par = &bsk_par_serial;
    par->run(par, tasks, plain_task, &g);
}

/* ---- with a BLAS ---- */

/* Values of cblas.h. */
enum { ROW_MAJOR = 101, NO_TRANS = 111, TRANS = 112 };

void bsk_gemm_one(bool ta, bool tb, int64_t M, int64_t N, int64_t K, float alpha, const float *A,
                  int64_t lda, const float *B, int64_t ldb, float beta, float *C, int64_t ldc)
{
    if (M <= 0 || N <= 0)
        return;
    if (!bsk_sgemm || K <= 0) /* BLAS wants leading dimensions of at least 1 even then */
        bsk_gemm_plain_f32(&bsk_par_serial, ta, tb, M, N, BSI_MAX(K, 0), alpha, A, lda, B, ldb, beta, C,
                           ldc);
    else
        bsk_sgemm(ROW_MAJOR, ta ? TRANS : NO_TRANS, tb ? TRANS : NO_TRANS, (int)M, (int)N, (int)K,
                  alpha, A, (int)lda, B, (int)ldb, beta, C, (int)ldc);
}

/* n cut into the fewest tiles of at most `most`, all about equal, in whole units of 16. Equal, because the last
   tile is waited for; 16, because a BLAS kernel works on whole vectors. */
static int64_t tile_size(int64_t n, int64_t most)
{
    int64_t tiles = (n + most - 1) / most;
    return ((n + tiles - 1) / tiles + 15) / 16 * 16;
}

static int64_t tiles_of(const struct gemm *g)
{
    return ((g->M + g->tile_m - 1) / g->tile_m) * ((g->N + g->tile_n - 1) / g->tile_n);
}

/* A function of M, N, K alone: how OpenBLAS rounds depends on the shape of a call, so a grid that followed the
   number of threads would change bits. Tiles of up to 256 x 256, or wide ones for few rows, since a tile packs its
   part of A and of B; smaller ones, down to 64, where they would otherwise be too few for the threads. */
static void cut(struct gemm *g)
{
    int64_t m = 256, n = g->M <= 16 ? 512 : 256, least = g->M <= 16 ? 256 : 64;
    for (;;) {
        g->tile_m = tile_size(g->M, m);
        g->tile_n = tile_size(g->N, n);
        bool by_m = g->tile_m > 64, by_n = g->tile_n > least;
        if (tiles_of(g) >= FEW || (!by_m && !by_n))
            return;
        if (by_n && (g->tile_n >= g->tile_m || !by_m))
            n = BSI_MAX(n / 2, least);
        else
            m = BSI_MAX(m / 2, 64);
    }
}

static void blas_task(void *arg, int64_t task)
{
    const struct gemm *g = arg;
    int64_t across = (g->N + g->tile_n - 1) / g->tile_n;
    int64_t i = task / across * g->tile_m, j = task % across * g->tile_n;
    bsk_gemm_one(g->ta, g->tb, BSI_MIN(g->tile_m, g->M - i), BSI_MIN(g->tile_n, g->N - j), g->K,
                 g->alpha, g->A + (g->ta ? i : i * g->lda), g->lda, g->B + (g->tb ? j * g->ldb : j),
                 g->ldb, g->beta, g->C + i * g->ldc + j, g->ldc);
}

void bsk_gemm_f32(bsk_par *par, bool ta, bool tb, int64_t M, int64_t N, int64_t K, float alpha,
                  const float *A, int64_t lda, const float *B, int64_t ldb, float beta, float *C,
                  int64_t ldc)
{
    struct gemm g = {ta, tb, M, N, K, alpha, beta, A, B, C, lda, ldb, ldc, M, N};
    if (M <= 0 || N <= 0)
        return;
    if (!bsk_sgemm) {
        bsk_gemm_plain_f32(par, ta, tb, M, N, K, alpha, A, lda, B, ldb, beta, C, ldc);
        return;
    }
    if (M * N * K > SMALL)
        cut(&g);
    par->run(par, tiles_of(&g), blas_task, &g);
}

static int64_t group_start(const bsk_grouped *g, int64_t e)
{
    return BSI_MIN(BSI_MAX(g->offset[e] - g->begin, 0), g->M);
}

void bsk_gemm_grouped_f32(bsk_par *par, const bsk_grouped *g, const float *A, const float *B, float *C)
{
    int64_t ldb = g->tb ? g->K : g->N;
    for (int64_t e = 0; e < g->E; e++) {
        int64_t first = group_start(g, e), rows = group_start(g, e + 1) - first;
        bsk_gemm_f32(par, false, g->tb, rows, g->N, g->K, 1.0f, A + first * g->K, g->K,
                     B + e * g->stride, ldb, g->beta, C + first * g->N, g->N);
    }
}

struct grouped_bias {
    const bsk_grouped *g;
    float *y;
    const float *b;
};

static void grouped_bias_body(const void *arg, int64_t first, int64_t end)
{
    const struct grouped_bias *p = arg;
    const bsk_grouped *g = p->g;
    for (int64_t e = 0; e < g->E; e++)
        for (int64_t t = BSI_MAX(group_start(g, e), first); t < BSI_MIN(group_start(g, e + 1), end);
             t++)
            for (int64_t c = 0; c < g->N; c++)
                p->y[t * g->N + c] += p->b[e * g->stride + c];
}

void bsk_bias_grouped_f32(bsk_par *par, const bsk_grouped *g, float *y, const float *b)
{
    const struct grouped_bias p = {g, y, b};
    bsk_chunks(par, g->M, g->N, grouped_bias_body, &p);
}
