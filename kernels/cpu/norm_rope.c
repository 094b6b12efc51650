/* SPDX-License-Identifier: Apache-2.0 */
/*
** norm_rope.c: RMSNorm over each head, then rotary position embedding, in one pass over q or k: what
** rmsnorm and rope give one after the other (norm.c, rope.c), with nothing stored between them.
*/
#include "cpu.h"

enum { HEAD = BSK_NORM_ROPE_HEAD };

struct pass {
    const bsk_norm_rope *a;
    const float *x, *w, *rstd_in, *dy; /* [T,H*D], [D], [T,H], [T,H*D] */
    float *y, *rstd, *dw;              /* [T,H*D] (dx in the backward), [T,H], [D] */
    bool add;
};

struct angles {
    float cosine[HEAD / 2], sine[HEAD / 2];
};

static void angles_of(const bsk_norm_rope *a, int64_t t, bool inverse, struct angles *out)
{
    for (int64_t j = 0; j < a->n_freq; j++) {
        float angle = (float)a->pos[t] * a->freq[j];
        out->cosine[j] = cosf(angle) * a->scaling;
        out->sine[j] = (inverse ? -sinf(angle) : sinf(angle)) * a->scaling;
    }
}

/* One head of D entries in place. */
static void turn(const bsk_norm_rope *a, const struct angles *by, float *x)
{
    bool interleaved = a->style == BSK_ROPE_INTERLEAVED;
    int64_t step = interleaved ? 2 : 1, apart = interleaved ? 1 : a->n_freq;
    for (int64_t j = 0; j < a->n_freq; j++) {
        float u = x[j * step], v = x[j * step + apart];
        x[j * step] = u * by->cosine[j] - v * by->sine[j];
        x[j * step + apart] = v * by->cosine[j] + u * by->sine[j];
    }
}

static void forward_body(const void *arg, int64_t first, int64_t end)
{
    const struct pass *p = arg;
    const bsk_norm_rope *a = p->a;
    float one = a->one_plus ? 1.0f : 0.0f;
    struct angles by;
    for (int64_t t = first; t < end; t++) {
        angles_of(a, t, false, &by);
        for (int64_t h = t * a->H; h < (t + 1) * a->H; h++) {
            const float *x = p->x + h * a->D;
            float *y = p->y + h * a->D;
            float r = (float)(1.0 / sqrt(bsk_dot(x, x, a->D) / (double)a->D + (double)a->eps));
            p->rstd[h] = r;
            for (int64_t c = 0; c < a->D; c++)
                y[c] = x[c] * r * (one + p->w[c]);
            turn(a, &by, y);
        }
    }
}

void bsk_norm_rope_f32(bsk_par *par, const bsk_norm_rope *a, const float *x, const float *w, float *y,
                       float *rstd)
{
    struct pass p = {.a = a, .x = x, .w = w, .y = y, .rstd = rstd};
    bsk_chunks(par, a->T, 2 * a->H * a->D + 8 * a->n_freq, forward_body, &p);
}

static void dx_body(const void *arg, int64_t first, int64_t end)
{
    const struct pass *p = arg;
    const bsk_norm_rope *a = p->a;
    float one = a->one_plus ? 1.0f : 0.0f, g[HEAD];
    struct angles by;
    for (int64_t t = first; t < end; t++) {
        angles_of(a, t, true, &by);
        for (int64_t h = t * a->H; h < (t + 1) * a->H; h++) {
            const float *x = p->x + h * a->D;
            float *dx = p->y + h * a->D, r = p->rstd_in[h];
            memcpy(g, p->dy + h * a->D, (size_t)a->D * sizeof *g);
            turn(a, &by, g);
            for (int64_t c = 0; c < a->D; c++)
                g[c] *= one + p->w[c];
            float k = (float)(bsk_dot(g, x, a->D) / (double)a->D * (double)r * (double)r);
            for (int64_t c = 0; c < a->D; c++)
                dx[c] = (p->add ? dx[c] : 0.0f) + r * (g[c] - x[c] * k);
        }
    }
}

/* dw += sum over tokens and heads, in order, of the turned back dy * x * rstd; one task. */
static void dw_body(const void *arg, int64_t first, int64_t end)
{
    const struct pass *p = arg;
    const bsk_norm_rope *a = p->a;
    double sum[HEAD] = {0};
    float g[HEAD];
    struct angles by;
    for (int64_t t = first; t < end * a->T; t++) {
        angles_of(a, t, true, &by);
        for (int64_t h = t * a->H; h < (t + 1) * a->H; h++) {
            memcpy(g, p->dy + h * a->D, (size_t)a->D * sizeof *g);
            turn(a, &by, g);
            for (int64_t c = 0; c < a->D; c++)
                sum[c] += (double)(g[c] * (p->x[h * a->D + c] * p->rstd_in[h]));
        }
    }
    for (int64_t c = 0; c < a->D; c++)
        p->dw[c] = (float)((double)p->dw[c] + sum[c]);
}

void bsk_norm_rope_bwd_f32(bsk_par *par, const bsk_norm_rope *a, const float *x, const float *w,
                           const float *rstd, const float *dy, float *dx, float *dw, bool add)
{
    struct pass p = {.a = a, .x = x, .w = w, .rstd_in = rstd, .dy = dy, .y = dx, .dw = dw, .add = add};
    if (dw && a->T > 0) /* before dx, which may be written over dy */
        dw_body(&p, 0, 1);
    bsk_chunks(par, a->T, 4 * a->H * a->D + 8 * a->n_freq, dx_body, &p);
}
