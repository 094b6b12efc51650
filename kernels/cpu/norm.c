/* SPDX-License-Identifier: Apache-2.0 */
/*
** norm.c: RMSNorm (Zhang & Sennrich 2019), y = x * rstd * w with rstd = 1/sqrt(mean(x^2) + eps),
** where w is the weight or 1 + weight, and layer norm (Ba et al. 2016), y = (x - mean) * rstd * w + b
** with rstd = 1/sqrt(mean((x - mean)^2) + eps). Sums over a row are f64, rounded once to f32.
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

/* ---- layer norm ------------------------------------------------------------------------------ */

struct layer {
    const float *x, *w, *b, *dy; /* [T,C], [C], [C], [T,C] */
    const float *stats_in;       /* [T,2]: mean, rstd */
    float *y, *stats;            /* [T,C] (dx in the backward), [T,2] */
    float *dw, *db;              /* [C] or NULL */
    int64_t T, C;
    float eps;
    bool add;
};

static double row_sum(const float *x, int64_t n)
{
    double lane[4] = {0};
    int64_t c = 0;
    for (; c + 4 <= n; c += 4)
        for (int l = 0; l < 4; l++)
            lane[l] += (double)x[c + l];
    for (; c < n; c++)
        lane[0] += (double)x[c];
    return (lane[0] + lane[1]) + (lane[2] + lane[3]);
}

static double row_spread(const float *x, int64_t n, double mean)
{
    double lane[4] = {0};
    int64_t c = 0;
    for (; c + 4 <= n; c += 4)
        for (int l = 0; l < 4; l++) {
            double d = (double)x[c + l] - mean;
            lane[l] += d * d;
        }
    for (; c < n; c++)
        lane[0] += ((double)x[c] - mean) * ((double)x[c] - mean);
    return (lane[0] + lane[1]) + (lane[2] + lane[3]);
}

static void layer_body(const void *arg, int64_t first, int64_t end)
{
    const struct layer *p = arg;
    for (int64_t t = first; t < end; t++) {
        const float *x = p->x + t * p->C;
        float *y = p->y + t * p->C;
        double mean = row_sum(x, p->C) / (double)p->C;
        double variance = row_spread(x, p->C, mean) / (double)p->C;
        float m = (float)mean, r = (float)(1.0 / sqrt(variance + (double)p->eps));
        p->stats[2 * t] = m;
        p->stats[2 * t + 1] = r;
        for (int64_t c = 0; c < p->C; c++)
            y[c] = (x[c] - m) * r * p->w[c] + p->b[c];
    }
}

void bsk_layernorm_f32(bsk_par *par, const float *x, const float *w, const float *b, float *y,
                       float *stats, int64_t T, int64_t C, float eps)
{
    struct layer p = {.x = x, .w = w, .b = b, .y = y, .stats = stats, .C = C, .eps = eps};
    bsk_chunks(par, T, 3 * C, layer_body, &p);
}

/* With g = dy * w and n = (x - mean) * rstd: dx = rstd * (g - mean(g) - n * mean(g * n)). */
static void layer_dx_body(const void *arg, int64_t first, int64_t end)
{
    const struct layer *p = arg;
    for (int64_t t = first; t < end; t++) {
        const float *x = p->x + t * p->C, *dy = p->dy + t * p->C, *w = p->w;
        float *dx = p->y + t * p->C, m = p->stats_in[2 * t], r = p->stats_in[2 * t + 1];
        double g_lane[4] = {0}, n_lane[4] = {0};
        int64_t c = 0;
        for (; c + 4 <= p->C; c += 4)
            for (int l = 0; l < 4; l++) {
                double g = (double)(dy[c + l] * w[c + l]);
                g_lane[l] += g;
                n_lane[l] += g * (double)((x[c + l] - m) * r);
            }
        for (; c < p->C; c++) {
            double g = (double)(dy[c] * w[c]);
            g_lane[0] += g;
            n_lane[0] += g * (double)((x[c] - m) * r);
        }
        float a = (float)(((g_lane[0] + g_lane[1]) + (g_lane[2] + g_lane[3])) / (double)p->C);
        float k = (float)(((n_lane[0] + n_lane[1]) + (n_lane[2] + n_lane[3])) / (double)p->C);
        if (p->add)
            for (c = 0; c < p->C; c++)
                dx[c] += r * (dy[c] * w[c] - a - (x[c] - m) * r * k);
        else
            for (c = 0; c < p->C; c++)
                dx[c] = r * (dy[c] * w[c] - a - (x[c] - m) * r * k);
    }
}

/* dw += sum over rows, in order, of dy * n; db += the same of dy; cut by columns. */
static void layer_dw_body(const void *arg, int64_t first, int64_t end)
{
    const struct layer *p = arg;
    for (int64_t c0 = first * COLUMNS; c0 < BSI_MIN(end * COLUMNS, p->C); c0 += COLUMNS) {
        int n = (int)BSI_MIN(COLUMNS, p->C - c0);
        double dw[COLUMNS] = {0}, db[COLUMNS] = {0};
        for (int64_t t = 0; t < p->T; t++) {
            const float *x = p->x + t * p->C + c0, *dy = p->dy + t * p->C + c0;
            float m = p->stats_in[2 * t], r = p->stats_in[2 * t + 1];
            for (int c = 0; c < n; c++) {
                dw[c] += (double)(dy[c] * ((x[c] - m) * r));
                db[c] += (double)dy[c];
            }
        }
        for (int c = 0; c < n && p->dw; c++)
            p->dw[c0 + c] = (float)((double)p->dw[c0 + c] + dw[c]);
        for (int c = 0; c < n && p->db; c++)
            p->db[c0 + c] = (float)((double)p->db[c0 + c] + db[c]);
    }
}

void bsk_layernorm_bwd_f32(bsk_par *par, const float *x, const float *w, const float *stats,
                           const float *dy, float *dx, float *dw, float *db, int64_t T, int64_t C,
                           bool add)
{
    struct layer p = {.x = x,
                      .w = w,
                      .dy = dy,
                      .stats_in = stats,
                      .y = dx,
                      .dw = dw,
                      .db = db,
                      .T = T,
                      .C = C,
                      .add = add};
    if ((dw || db) && T > 0) /* before dx, which may be written over dy */
        bsk_chunks(par, (C + COLUMNS - 1) / COLUMNS, 3 * T * COLUMNS, layer_dw_body, &p);
    bsk_chunks(par, T, 4 * C, layer_dx_body, &p);
}
