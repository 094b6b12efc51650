/* SPDX-License-Identifier: Apache-2.0 */
/*
** route.c: which experts the rows of a layer go to, the order that brings each expert's rows together, and rows
** to and from that order. A row is f64 inside, so that which expert is chosen does not hang on the order of a
** sum. What is chosen has distinct numbers whatever the logits are.
*/
#include "cpu.h"
#include "kernels.h"

#include <math.h>
#include <stdlib.h>

enum { MOST = BSK_ROUTE_EXPERTS };

struct args {
    const bsk_routing *r;
    const float *z, *bias, *dw;
    float *w, *dz;
    const int32_t *from;
    int32_t *id;
};

/* s [E] of a row by kind; kept as they are where only chosen ones are normalised. */
static void scores(const bsk_routing *r, const float *z, double *s)
{
    double most = -INFINITY, sum = 0;
    for (int64_t e = 0; e < r->E; e++)
        most = fmax(most, (double)z[e]);
    for (int64_t e = 0; e < r->E; e++) {
        s[e] = r->kind == BSK_ROUTE_SIGMOID   ? 1.0 / (1.0 + exp(-(double)z[e]))
               : r->kind == BSK_ROUTE_SOFTMAX ? exp((double)z[e] - most)
                                              : (double)z[e];
        sum += s[e];
    }
    for (int64_t e = 0; e < r->E && r->kind == BSK_ROUTE_SOFTMAX; e++)
        s[e] /= sum;
}

/* The largest of c that is not taken, of equal ones the first; NaN is larger than all. */
static int64_t best(const double *c, const bool *taken, int64_t first, int64_t end)
{
    int64_t at = -1;
    for (int64_t e = first; e < end; e++)
        if (!taken[e] && (at < 0 || c[e] > c[at] || (isnan(c[e]) && !isnan(c[at]))))
            at = e;
    return at;
}

/* Takes the experts of all groups but the `kept` best ones. */
static void leave_groups(const bsk_routing *r, const double *c, bool *taken)
{
    int64_t size = r->E / r->groups;
    double score[MOST];
    bool kept[MOST] = {false}, first[MOST] = {false};
    for (int64_t g = 0; g < r->groups; g++) {
        int64_t a = best(c, first, g * size, (g + 1) * size);
        first[a] = true;
        int64_t b = best(c, first, g * size, (g + 1) * size);
        score[g] = c[a] + (b < 0 ? 0.0 : c[b]);
    }
    for (int64_t i = 0; i < r->kept; i++)
        kept[best(score, kept, 0, r->groups)] = true;
    for (int64_t e = 0; e < r->E; e++)
        taken[e] = !kept[e / size];
}

static void choose(const bsk_routing *r, const float *z, const double *s, const float *bias,
                   int32_t *id)
{
    double c[MOST];
    bool taken[MOST] = {false}, chosen[MOST] = {false};
    for (int64_t e = 0; e < r->E; e++)
        c[e] = s[e] + (bias ? (double)bias[e] : 0.0);
    if (r->groups > 1)
        leave_groups(r, c, taken);
    for (int64_t e = 0; e < r->E && !bias; e++)
        c[e] = (double)z[e]; /* in the same order, where s has no two values for what differs */
    for (int64_t i = 0; i < r->k; i++) {
        int64_t e = best(c, taken, 0, r->E);
        taken[e] = chosen[e] = true;
    }
    for (int64_t e = 0; e < r->E; e++)
        if (chosen[e])
            *id++ = (int32_t)e;
}

/* From s of the chosen ones to what their weights are, before scale: the values p and the sum that they are
   divided by. */
static double shares(const bsk_routing *r, const double *s, const int32_t *id, double *p)
{
    double most = -INFINITY, sum = 0;
    for (int64_t i = 0; i < r->k; i++)
        most = fmax(most, s[id[i]]);
    for (int64_t i = 0; i < r->k; i++) {
        p[i] = r->kind == BSK_ROUTE_CHOSEN ? exp(s[id[i]] - most) : s[id[i]];
        sum += p[i];
    }
    return r->renorm || r->kind == BSK_ROUTE_CHOSEN ? sum + 1e-20 : 1.0;
}

static void route_body(const void *arg, int64_t first, int64_t end)
{
    const struct args *a = arg;
    const bsk_routing *r = a->r;
    double s[MOST], p[MOST];
    for (int64_t t = first; t < end; t++) {
        const float *z = a->z + t * r->E;
        int32_t *id = a->id + t * r->k;
        scores(r, z, s);
        choose(r, z, s, a->bias, id);
        double sum = shares(r, s, id, p);
        for (int64_t i = 0; i < r->k; i++)
            a->w[t * r->k + i] = (float)(p[i] / sum * (double)r->scale);
    }
}

void bsk_route_f32(bsk_par *par, const bsk_routing *r, const float *z, const float *bias, float *w,
                   int32_t *id, int64_t T)
{
    const struct args a = {.r = r, .z = z, .bias = bias, .w = w, .id = id};
    bsk_chunks(par, T, r->E * (r->k + 8), route_body, &a);
}

/* w_i = scale p_i / S: of p_i the gradient is scale (dw_i - sum_j dw_j p_j / S) / S where S is their sum. */
static void route_bwd_body(const void *arg, int64_t first, int64_t end)
{
    const struct args *a = arg;
    const bsk_routing *r = a->r;
    double s[MOST], p[MOST];
    for (int64_t t = first; t < end; t++) {
        const int32_t *id = a->from + t * r->k;
        const float *dw = a->dw + t * r->k;
        float *dz = a->dz + t * r->E;
        bool summed = r->renorm || r->kind == BSK_ROUTE_CHOSEN;
        scores(r, a->z + t * r->E, s);
        double sum = shares(r, s, id, p), mean = 0, all = 0;
        for (int64_t i = 0; i < r->k; i++)
            mean += summed ? (double)dw[i] * p[i] / sum : 0.0;
        for (int64_t i = 0; i < r->k; i++) {
            double dp = (double)r->scale * ((double)dw[i] - mean) / sum;
            all += dp * p[i];
            p[i] = r->kind == BSK_ROUTE_SIGMOID ? dp * p[i] * (1.0 - p[i]) : dp * p[i];
        }
        for (int64_t e = 0; e < r->E; e++)
            dz[e] = r->kind == BSK_ROUTE_SOFTMAX ? (float)(-all * s[e]) : 0.0f;
        for (int64_t i = 0; i < r->k; i++)
            dz[id[i]] = (float)((r->kind == BSK_ROUTE_SOFTMAX ? -all * s[id[i]] : 0.0) + p[i]);
    }
}

void bsk_route_bwd_f32(bsk_par *par, const bsk_routing *r, const float *z, const int32_t *id,
                       const float *dw, float *dz, int64_t T)
{
    const struct args a = {.r = r, .z = z, .from = id, .dw = dw, .dz = dz};
    bsk_chunks(par, T, r->E * 8, route_bwd_body, &a);
}

size_t bsk_sort_scratch(int64_t n, int64_t E)
{
    return (size_t)((n + BSK_SORT_CHUNK - 1) / BSK_SORT_CHUNK * E) * sizeof(int32_t);
}

void bsk_sort_rows(const int32_t *id, int32_t *order, int32_t *place, int32_t *offset, int64_t n,
                   int64_t E)
{
    int32_t next[MOST];
    memset(offset, 0, (size_t)(E + 1) * sizeof *offset);
    for (int64_t i = 0; i < n; i++)
        if (id[i] >= 0 && id[i] < E)
            offset[id[i] + 1]++;
    for (int64_t e = 0; e < E; e++) {
        next[e] = offset[e];
        offset[e + 1] += offset[e];
    }
    for (int64_t i = offset[E]; i < n; i++)
        order[i] = -1;
    for (int64_t i = 0; i < n; i++) {
        place[i] = id[i] >= 0 && id[i] < E ? next[id[i]]++ : -1;
        if (place[i] >= 0)
            order[place[i]] = (int32_t)i;
    }
}

struct moved {
    const float *from;
    const int32_t *index;
    float *to;
    int64_t C, k, rows, stride;
    const bsk_pieces *pieces;
};

static void take_body(const void *arg, int64_t first, int64_t end)
{
    const struct moved *m = arg;
    for (int64_t i = first; i < end; i++) {
        int64_t r = m->index[i] / m->k;
        float *to = m->to + i * m->C;
        if (m->index[i] < 0)
            memset(to, 0, (size_t)m->C * sizeof *to);
        else
            memcpy(to, m->from + r / m->rows * m->stride + r % m->rows * m->C,
                   (size_t)m->C * sizeof *to);
    }
}

void bsk_take_rows_f32(bsk_par *par, const float *x, const int32_t *order, float *y, int64_t n,
                       int64_t C, int64_t k, int64_t rows, int64_t stride)
{
    const struct moved m = {
        .from = x, .index = order, .to = y, .C = C, .k = k, .rows = rows, .stride = stride};
    bsk_chunks(par, n, C, take_body, &m);
}

static void sum_body(const void *arg, int64_t first, int64_t end)
{
    const struct moved *m = arg;
    const bsk_pieces *to = m->pieces;
    for (int64_t r = first; r < end; r++) {
        float *sum = m->to + r / to->rows * to->stride + r % to->rows * m->C;
        for (int64_t i = 0; i < to->k; i++) {
            int64_t p = m->index[r * to->k + i] - to->begin;
            if (p < 0 || p >= to->n)
                continue;
            for (int64_t c = 0; c < m->C; c++)
                sum[c] += m->from[p * m->C + c];
        }
    }
}

void bsk_sum_rows_f32(bsk_par *par, const float *y, const int32_t *place, float *sum, int64_t R,
                      int64_t C, const bsk_pieces *to)
{
    const struct moved m = {.from = y, .index = place, .to = sum, .C = C, .pieces = to};
    bsk_chunks(par, R, C * to->k, sum_body, &m);
}
