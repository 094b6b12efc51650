/* SPDX-License-Identifier: Apache-2.0 */
/*
** norm.c: RMSNorm (Zhang & Sennrich 2019), y = x * rstd * w with rstd = 1/sqrt(mean(x^2) + eps),
** where w is the weight or 1 + weight. Sums over a row are f64, rounded once to f32.
*/
#include "cpu.h"

struct norm {
    const float *x, *w, *dy; /* [T,C], [C], [T,C] */
    const float *rstd_in;    /* [T] */
    float *y, *rstd, *dw;    /* [T,C] (dx in the backward), [T], [C] */
    int64_t T, C;
    float one, eps; /* one: added to the weight */
    bool add;
};

static void forward_body(const void *arg, int64_t first, int64_t end)
{
    const struct norm *p = arg;
    for (int64_t t = first; t < end; t++) {
        const float *x = p->x + t * p->C;
        float *y = p->y + t * p->C;
        float r = (float)(1.0 / sqrt(bsk_dot(x, x, p->C) / (double)p->C + (double)p->eps));
        p->rstd[t] = r;
        for (int64_t c = 0; c < p->C; c++)
            y[c] = x[c] * r * (p->one + p->w[c]);
    }
}

void bsk_rmsnorm_f32(bsk_par *par, const float *x, const float *w, float *y, float *rstd, int64_t T,
                     int64_t C, bool one_plus, float eps)
{
    struct norm p = {
        .x = x, .w = w, .y = y, .rstd = rstd, .C = C, .one = one_plus ? 1.0f : 0.0f, .eps = eps};
    bsk_chunks(par, T, 2 * C, forward_body, &p);
}

/* With g = dy * w: dx = rstd * (g - x * rstd^2 * mean(g * x)). */
static void dx_body(const void *arg, int64_t first, int64_t end)
{
    const struct norm *p = arg;
    for (int64_t t = first; t < end; t++) {
        const float *x = p->x + t * p->C, *dy = p->dy + t * p->C, *w = p->w;
        float *dx = p->y + t * p->C, r = p->rstd_in[t], one = p->one;
        double lane[4] = {0};
        int64_t c = 0;
        for (; c + 4 <= p->C; c += 4)
            for (int l = 0; l < 4; l++)
                lane[l] += (double)(dy[c + l] * (one + w[c + l])) * (double)x[c + l];
        for (; c < p->C; c++)
            lane[0] += (double)(dy[c] * (one + w[c])) * (double)x[c];
        double mean = ((lane[0] + lane[1]) + (lane[2] + lane[3])) / (double)p->C;
        float k = (float)(mean * (double)r * (double)r);
        if (p->add)
            for (c = 0; c < p->C; c++)
                dx[c] += r * (dy[c] * (one + w[c]) - x[c] * k);
        else
            for (c = 0; c < p->C; c++)
                dx[c] = r * (dy[c] * (one + w[c]) - x[c] * k);
    }
}

enum { COLUMNS = 64 };

/* dw += sum over rows, in order, of dy * x * rstd; cut by columns. */
static void dw_body(const void *arg, int64_t first, int64_t end)
{
    const struct norm *p = arg;
    for (int64_t c0 = first * COLUMNS; c0 < BSI_MIN(end * COLUMNS, p->C); c0 += COLUMNS) {
        int n = (int)BSI_MIN(COLUMNS, p->C - c0);
        double acc[COLUMNS] = {0};
        for (int64_t t = 0; t < p->T; t++) {
            const float *x = p->x + t * p->C + c0, *dy = p->dy + t * p->C + c0;
            for (int c = 0; c < n; c++)
                acc[c] += (double)(dy[c] * (x[c] * p->rstd_in[t]));
        }
        for (int c = 0; c < n; c++)
            p->dw[c0 + c] = (float)((double)p->dw[c0 + c] + acc[c]);
    }
}

void bsk_rmsnorm_bwd_f32(bsk_par *par, const float *x, const float *w, const float *rstd,
                         const float *dy, float *dx, float *dw, int64_t T, int64_t C, bool one_plus,
                         bool add)
{
    struct norm p = {.x = x,
                     .w = w,
                     .dy = dy,
                     .rstd_in = rstd,
                     .y = dx,
                     .dw = dw,
                     .T = T,
                     .C = C,
                     .one = one_plus ? 1.0f : 0.0f,
                     .add = add};
    if (dw && T > 0) /* before dx, which may be written over dy */
        bsk_chunks(par, (C + COLUMNS - 1) / COLUMNS, 2 * T * COLUMNS, dw_body, &p);
    bsk_chunks(par, T, 3 * C, dx_body, &p);
}
