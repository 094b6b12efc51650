/* SPDX-License-Identifier: Apache-2.0 */
/*
** head.c: cross-entropy over vocabulary tiles. Per row m, s describe the logits seen so far without
** the label's: max and sum of e^(l - m); ly is the label's logit. Leaving the label out keeps 1 - p
** exact for a well-learned label: with d = log(s) + m - ly, loss = log(1 + e^d) and 1 - p =
** sigmoid(d), where a full softmax would subtract two numbers near 1. Initial values: m = -inf, s =
** 0.
*/
#include "cpu.h"
#include "kernels.h"

struct tile {
    const float *logits;  /* [T,V]: columns [first, first+V) of the vocabulary */
    const int32_t *label; /* [T]: ids of the whole vocabulary */
    float *m, *s, *ly;    /* [T] */
    float *factor;        /* [T] */
    float *P;             /* [T,V]; may be logits */
    int64_t V, first;
    float cap;
};

/* log of the odds against the label; -inf when nothing else has weight. */
static double against(float m, float s, float ly)
{
    return s == 0.0f ? (double)-INFINITY : log((double)s) + (double)m - (double)ly;
}

static double sigmoid(double d)
{
    return d < 0 ? exp(d) / (1.0 + exp(d)) : 1.0 / (1.0 + exp(-d));
}

BSK_INLINE void cap_row(float *l, int64_t n, float cap)
{
    for (int64_t j = 0; j < n; j++)
        l[j] = cap * bsk_tanh(l[j] / cap);
}

/* Slope of cap * tanh(x / cap) where the result is y. */
BSK_INLINE float cap_slope(float y, float cap)
{
    return (1.0f - y / cap) * (1.0f + y / cap);
}

/* Row t of the logits where it may be overwritten: in P. */
BSK_INLINE float *take_row(const float *logits, float *P, int64_t t, int64_t V)
{
    float *l = P + t * V;
    if (P != logits)
        memcpy(l, logits + t * V, (size_t)V * sizeof *l);
    return l;
}

/* l = e^(l - m), times the cap's slope when cap > 0; returns the sum of e^(l - m). */
BSK_INLINE double weights(float *l, int64_t n, float m, float cap)
{
    if (!(cap > 0.0f))
        return bsk_exp_sum(l, n, m);
    double sum = 0;
    float slope[256];
    for (int64_t at = 0; at < n; at += 256) {
        int len = (int)BSI_MIN(256, n - at);
        for (int j = 0; j < len; j++)
            slope[j] = cap_slope(l[at + j], cap);
        sum += bsk_exp_sum(l + at, len, m);
        for (int j = 0; j < len; j++)
            l[at + j] *= slope[j];
    }
    return sum;
}

BSK_WIDE static void tile_body(const void *arg, int64_t first, int64_t end)
{
    const struct tile *p = arg;
    for (int64_t t = first; t < end; t++) {
        float *l = take_row(p->logits, p->P, t, p->V);
        int64_t at = p->label[t] - p->first;
        bool here = at >= 0 && at < p->V;
        if (p->cap > 0.0f)
            cap_row(l, p->V, p->cap);
        if (here) {
            p->ly[t] = l[at];
            l[at] = -INFINITY; /* neither in the maximum nor in the sum */
        }
        float old = p->m[t], m = bsk_max(l, p->V, old);
        float factor = old == -INFINITY ? 0.0f : expf(old - m);
        /* m is -inf as long as nothing but the label has weight: any finite base gives P = 0 then. */
        double sum = weights(l, p->V, m == -INFINITY ? 0.0f : m, p->cap);
        if (here)
            l[at] = 0.0f;
        p->s[t] = (float)((double)p->s[t] * (double)factor + sum);
        p->m[t] = m;
        p->factor[t] = factor;
    }
}

void bsk_head_tile_f32(bsk_par *par, const float *logits, const int32_t *label, float *m, float *s,
                       float *ly, float *factor, float *P, int64_t T, int64_t V, int64_t first,
                       float cap)
{
    struct tile p = {logits, label, m, s, ly, factor, P, V, first, cap};
    bsk_chunks(par, T, 4 * V, tile_body, &p);
}

struct pick {
    const float *w;       /* [V,C]: rows [first, first+V) of the head */
    const int32_t *label; /* [T] */
    const float *ly;      /* [T] */
    float *wy;            /* [T,C] */
    int64_t C, first, V;
    float cap;
};

static void pick_body(const void *arg, int64_t first, int64_t end)
{
    const struct pick *p = arg;
    for (int64_t t = first; t < end; t++) {
        int64_t at = p->label[t] - p->first;
        if (at < 0 || at >= p->V)
            continue;
        float slope = p->cap > 0.0f ? cap_slope(p->ly[t], p->cap) : 1.0f;
        for (int64_t c = 0; c < p->C; c++)
            p->wy[t * p->C + c] = slope * p->w[at * p->C + c];
    }
}

void bsk_head_pick_f32(bsk_par *par, const float *w, const int32_t *label, const float *ly, float *wy,
                       int64_t T, int64_t C, int64_t first, int64_t V, float cap)
{
    struct pick p = {w, label, ly, wy, C, first, V, cap};
    bsk_chunks(par, T, C, pick_body, &p);
}

struct finish {
    const float *m, *s, *ly; /* [T] */
    const float *acc, *wy;   /* [T,C]; absent when dx is */
    float *loss, *dx;        /* [T], [T,C] or absent */
    int64_t C;
    float inv_count;
};

static void finish_body(const void *arg, int64_t first, int64_t end)
{
    const struct finish *p = arg;
    for (int64_t t = first; t < end; t++) {
        double d = against(p->m[t], p->s[t], p->ly[t]);
        p->loss[t] = (float)(d > 0 ? d + log1p(exp(-d)) : log1p(exp(d)));
        if (!p->dx)
            continue;
        float *dx = p->dx + t * p->C;
        const float *acc = p->acc + t * p->C, *wy = p->wy + t * p->C;
        float q = (float)(sigmoid(d) * (double)p->inv_count);
        float inv_s = p->s[t] == 0.0f ? 0.0f : 1.0f / p->s[t];
        for (int64_t c = 0; c < p->C; c++)
            dx[c] = q * (acc[c] * inv_s - wy[c]);
    }
}

void bsk_head_finish_f32(bsk_par *par, const float *m, const float *s, const float *ly,
                         const float *acc, const float *wy, float *loss, float *dx, int64_t T,
                         int64_t C, float inv_count)
{
    struct finish p = {m, s, ly, acc, wy, loss, dx, C, inv_count};
    bsk_chunks(par, T, dx ? C : 32, finish_body, &p);
}

struct dlogits {
    const float *logits;     /* [T,V]: columns [first, first+V) of the vocabulary */
    const int32_t *label;    /* [T] */
    const float *m, *s, *ly; /* [T] */
    float *P;                /* [T,V]; may be logits */
    int64_t V, first;
    float cap, inv_count;
};

/* p = e^(l - base) / total, total = s e^(m - base) + e^(ly - base); the label's p - 1 is -sigmoid(d).
 */
BSK_WIDE static void dlogits_body(const void *arg, int64_t first, int64_t end)
{
    const struct dlogits *p = arg;
    for (int64_t t = first; t < end; t++) {
        float *l = take_row(p->logits, p->P, t, p->V);
        float m = p->m[t], ly = p->ly[t], base = m > ly ? m : ly;
        double total = (double)p->s[t] * exp((double)m - (double)base) + exp((double)ly - (double)base);
        float scale = (float)((double)p->inv_count / total);
        float at_label = (float)(-sigmoid(against(m, p->s[t], ly)) * (double)p->inv_count);
        int64_t at = p->label[t] - p->first;
        if (p->cap > 0.0f) {
            float cap = p->cap;
            for (int64_t j = 0; j < p->V; j++) {
                float y = cap * bsk_tanh(l[j] / cap);
                l[j] = bsk_exp_neg(y - base) * scale * cap_slope(y, cap);
            }
            at_label *= cap_slope(ly, cap);
        } else {
            for (int64_t j = 0; j < p->V; j++)
                l[j] = bsk_exp_neg(l[j] - base) * scale;
        }
        if (at >= 0 && at < p->V)
            l[at] = at_label;
    }
}

void bsk_head_dlogits_f32(bsk_par *par, const float *logits, const int32_t *label, const float *m,
                          const float *s, const float *ly, float *P, int64_t T, int64_t V,
                          int64_t first, float cap, float inv_count)
{
    struct dlogits p = {logits, label, m, s, ly, P, V, first, cap, inv_count};
    bsk_chunks(par, T, 4 * V, dlogits_body, &p);
}
