/* SPDX-License-Identifier: Apache-2.0 */
/*
** cpu.h: what the CPU kernels share: the fixed task grid, vectorisable exp/tanh/sigmoid, sums and
** maxima in lanes. Private to kernels/cpu. Kernels own no memory and no state; they run on the
** thread that calls them and on the threads of the bsk_par that they are given. A chunk's borders
** depend on sizes only, and sums keep one fixed order, so results are the same bits for any number
** of threads.
*/
#ifndef BSK_CPU_H
#define BSK_CPU_H

#include "base/base.h"
#include "bsk.h"

#include <math.h>
#include <string.h>

/* A loop that is compiled twice, for 128 and for 256 bit vectors, and chosen when the program is
   loaded. The bits are the same: no contraction into fused operations, no reordered sums. Sanitizers
   run before their own setup when a resolver is instrumented, so they get the plain build. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) &&                                 \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define BSK_WIDE __attribute__((target_clones("avx2", "default")))
#else
#define BSK_WIDE
#endif
#define BSK_INLINE static inline __attribute__((always_inline))

/* body works on items [first, end). */
typedef void bsk_body(const void *arg, int64_t first, int64_t end);
/* Runs body over [0, n) in chunks of equal length. cost: elements touched per item; a chunk is some ten
   microseconds of work, and small inputs are one chunk on the calling thread. */
void bsk_chunks(bsk_par *par, int64_t n, int64_t cost, bsk_body *body, const void *arg);

/* cblas_sgemm of a BLAS that bsk_cpu_init has loaded (blas.c); NULL: plain loops. */
typedef void bsk_sgemm_fn(int order, int ta, int tb, int m, int n, int k, float alpha, const float *a,
                          int lda, const float *b, int ldb, float beta, float *c, int ldc);
extern bsk_sgemm_fn *bsk_sgemm;

/* C = alpha op(A) op(B) + beta C on the calling thread; arguments as bsk_gemm_f32. */
void bsk_gemm_one(bool ta, bool tb, int64_t M, int64_t N, int64_t K, float alpha, const float *A,
                  int64_t lda, const float *B, int64_t ldb, float beta, float *C, int64_t ldc);

/* e^x for x <= 0, within 2 units in the last place; 0 below -87.3 (the result would be subnormal); NaN
   for NaN. x = n ln 2 + r with |r| <= ln(2)/2, ln 2 in two parts so that n ln 2 is exact enough, and
   the series of e^r up to r^7 (the next term is below 6e-9). */
BSK_INLINE float bsk_exp_neg(float x)
{
    const float round =
        12582912.0f; /* 1.5 * 2^23: adding it leaves the nearest integer in the low bits */
    float t = (x < -87.3f ? -87.3f : x) * 1.44269504f + round;
    float n = t - round;
    float r = (x < -87.3f ? -87.3f : x) - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.0f / 5040;
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    uint32_t bits;
    memcpy(&bits, &t, 4);
    bits = (bits << 23) + 0x3F800000u; /* n of t's low bits becomes the exponent of 2^n */
    float scale;
    memcpy(&scale, &bits, 4);
    return x < -87.3f ? 0.0f : p * scale;
}

BSK_INLINE float bsk_sigmoid(float x)
{
    float e = bsk_exp_neg(-fabsf(x)), r = 1.0f / (1.0f + e);
    return x >= 0 ? r : e * r;
}

/* tanh within 3 units in the last place: an odd polynomial fitted for the relative error below 0.625,
   else by exp. */
BSK_INLINE float bsk_tanh(float x)
{
    float a = fabsf(x), z = x * x;
    float p = -0.00609455496f;
    p = p * z + 0.0209956945f;
    p = p * z - 0.0538505966f;
    p = p * z + 0.133327677f;
    p = p * z - 0.333333289f;
    p = x + x * z * p;
    float e = bsk_exp_neg(-2.0f * a), big = (1.0f - e) / (1.0f + e);
    return a < 0.625f ? p : copysignf(big, x);
}

#define BSK_LANES 8

/* max(start, x[0..n)); NaN entries are passed over. */
BSK_INLINE float bsk_max(const float *x, int64_t n, float start)
{
    float lane[BSK_LANES];
    for (int l = 0; l < BSK_LANES; l++)
        lane[l] = start;
    int64_t i = 0;
    for (; i + BSK_LANES <= n; i += BSK_LANES)
        for (int l = 0; l < BSK_LANES; l++)
            lane[l] = x[i + l] > lane[l] ? x[i + l] : lane[l];
    for (; i < n; i++)
        lane[0] = x[i] > lane[0] ? x[i] : lane[0];
    for (int l = 1; l < BSK_LANES; l++)
        lane[0] = lane[l] > lane[0] ? lane[l] : lane[0];
    return lane[0];
}

/* x[i] = e^(x[i] - m), m >= max(x); returns the sum: lanes of f32 in runs of 512, the runs in f64. */
BSK_INLINE double bsk_exp_sum(float *x, int64_t n, float m)
{
    double sum = 0;
    for (int64_t at = 0; at < n; at += 512) {
        int64_t end = BSI_MIN(at + 512, n), i = at;
        float lane[BSK_LANES] = {0};
        for (; i + BSK_LANES <= end; i += BSK_LANES)
            for (int l = 0; l < BSK_LANES; l++)
                lane[l] += x[i + l] = bsk_exp_neg(x[i + l] - m);
        for (; i < end; i++)
            lane[0] += x[i] = bsk_exp_neg(x[i] - m);
        for (int l = 0; l < BSK_LANES; l++)
            sum += (double)lane[l];
    }
    return sum;
}

/* sum of a[i] * b[i] in f64, four lanes. */
BSK_INLINE double bsk_dot(const float *a, const float *b, int64_t n)
{
    double lane[4] = {0};
    int64_t i = 0;
    for (; i + 4 <= n; i += 4)
        for (int l = 0; l < 4; l++)
            lane[l] += (double)a[i + l] * (double)b[i + l];
    for (; i < n; i++)
        lane[0] += (double)a[i] * (double)b[i];
    return (lane[0] + lane[1]) + (lane[2] + lane[3]);
}

#endif
