/* SPDX-License-Identifier: Apache-2.0 */
/*
** optim.c: the optimizer's kernels: sums in a fixed order, AdamW (Loshchilov & Hutter 2019). Sums
** are f64: at most 64 parts, whose borders depend on N only, each summed in order and then added in
** order.
*/
#include "cpu.h"
#include "kernels.h"

enum { PARTS = 64, PART_MIN = 8192 };

struct sum {
    const float *x; /* [N] */
    int64_t N, grain;
    double part[PARTS];
    bool squares;
};

BSK_WIDE static void sum_part(void *arg, int64_t i)
{
    struct sum *p = arg;
    const float *x = p->x + i * p->grain;
    int64_t n = BSI_MIN(p->grain, p->N - i * p->grain), j = 0;
    if (p->squares) {
        p->part[i] = bsk_dot(x, x, n);
        return;
    }
    double lane[4] = {0};
    for (; j + 4 <= n; j += 4)
        for (int l = 0; l < 4; l++)
            lane[l] += (double)x[j + l];
    for (; j < n; j++)
        lane[0] += (double)x[j];
    p->part[i] = (lane[0] + lane[1]) + (lane[2] + lane[3]);
}

static void sum_all(bsk_par *par, const float *x, double *out, int64_t N, bool squares)
{
    struct sum p = {
        .x = x, .N = N, .grain = BSI_MAX((N + PARTS - 1) / PARTS, PART_MIN), .squares = squares};
    int64_t parts = N > 0 ? (N + p.grain - 1) / p.grain : 0;
    double total = 0;
    if (parts > 0)
        par->run(par, parts, sum_part, &p);
    for (int64_t i = 0; i < parts; i++)
        total += p.part[i];
    *out = total;
}

void bsk_sum_f32(bsk_par *par, const float *x, double *out, int64_t N)
{
    sum_all(par, x, out, N, false);
}

void bsk_sumsq_f32(bsk_par *par, const float *x, double *out, int64_t N)
{
    sum_all(par, x, out, N, true);
}

struct adamw {
    float *p, *m, *v; /* [N] */
    const float *g;   /* [N] */
    double lr, beta1, beta2, eps, decay, bc1, bc2, gscale;
};

/* State is f32, the arithmetic of an element is f64 and rounded once per result. */
BSK_WIDE static void adamw_body(const void *arg, int64_t first, int64_t end)
{
    const struct adamw a = *(const struct adamw *)arg;
    double keep = 1.0 - a.lr * a.decay, inv1 = 1.0 / a.bc1, inv2 = 1.0 / a.bc2;
    for (int64_t i = first; i < end; i++) {
        double g = (double)a.g[i] * a.gscale;
        double m = a.beta1 * (double)a.m[i] + (1.0 - a.beta1) * g;
        double v = a.beta2 * (double)a.v[i] + (1.0 - a.beta2) * g * g;
        double p = (double)a.p[i] * keep - a.lr * (m * inv1) / (sqrt(v * inv2) + a.eps);
        a.m[i] = (float)m;
        a.v[i] = (float)v;
        a.p[i] = (float)p;
    }
}

void bsk_adamw_f32(bsk_par *par, float *p, const float *g, float *m, float *v, int64_t N,
                   const double f[8])
{
    struct adamw a = {p, m, v, g, f[0], f[1], f[2], f[3], f[4], f[5], f[6], f[7]};
    bsk_chunks(par, N, 4, adamw_body, &a);
}
