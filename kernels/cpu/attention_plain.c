/* SPDX-License-Identifier: Apache-2.0 */
/*
** attention_plain.c: the loops that define attention. q [T,H*D], k and v [T,K*D], o [T,H*D], lse [T,H];
** query head h reads key/value head h / (H/K); row r of the batch is tokens [cu[r], cu[r+1]). Key j
** is seen by query i of the same row iff 0 <= i - j, and i - j < window when there is one. A head may
** have a sink: a score beside those of its keys, without a value. lse has it in, so that the gradients
** of q, k and v are the same formulas. Scores and sums are f64; serial.
*/
#include "cpu.h"

static double dot(const float *a, const float *b, int64_t n)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++)
        sum += (double)a[i] * (double)b[i];
    return sum;
}

/* The first key that query i sees, in a row that starts at `start`. */
static int64_t first_key(const bsk_attention_dims *d, int64_t start, int64_t i)
{
    return d->window > 0 && i - d->window + 1 > start ? i - d->window + 1 : start;
}

/* The score of a query and a key; *slope is its derivative by their dot product. */
static double score(const bsk_attention_dims *d, const float *q, const float *k, double *slope)
{
    double s = dot(q, k, d->D) * (double)d->scale, cap = (double)d->softcap;
    *slope = (double)d->scale;
    if (!(cap > 0))
        return s;
    double t = tanh(s / cap);
    *slope *= 1 - t * t;
    return cap * t;
}

void bsk_attention_plain_f32(const bsk_attention_dims *d, const float *q, const float *k,
                             const float *v, const int32_t *cu, float *o, float *lse)
{
    int64_t D = d->D, H = d->H, K = d->K;
    double slope;
    for (int64_t r = 0; r < d->n_rows; r++)
        for (int64_t i = cu[r]; i < cu[r + 1]; i++)
            for (int64_t h = 0; h < H; h++) {
                int64_t kv = h / (H / K), j0 = first_key(d, cu[r], i);
                const float *qi = q + (i * H + h) * D;
                double sink = d->sinks ? (double)d->sinks[h] : (double)-INFINITY, m = sink, sum = 0;
                for (int64_t j = j0; j <= i; j++)
                    m = fmax(m, score(d, qi, k + (j * K + kv) * D, &slope));
                for (int64_t j = j0; j <= i; j++)
                    sum += exp(score(d, qi, k + (j * K + kv) * D, &slope) - m);
                sum += exp(sink - m);
                float *oi = o + (i * H + h) * D;
                memset(oi, 0, (size_t)D * sizeof *oi);
                for (int64_t j = j0; j <= i; j++) {
                    double p = exp(score(d, qi, k + (j * K + kv) * D, &slope) - m) / sum;
                    for (int64_t c = 0; c < D; c++)
                        oi[c] += (float)(p * (double)v[(j * K + kv) * D + c]);
                }
                lse[i * H + h] = (float)(m + log(sum));
            }
}

/* dP = dO v^T, dS = P (dP - rowsum(dO o)) slope, dq = dS k, dk = dS^T q, dv = P^T dO */
void bsk_attention_bwd_plain_f32(const bsk_attention_dims *d, const float *q, const float *k,
                                 const float *v, const int32_t *cu, const float *o, const float *lse,
                                 const float *grad_o, float *dq, float *dk, float *dv)
{
    int64_t D = d->D, H = d->H, K = d->K;
    memset(dq, 0, (size_t)(d->T * H * D) * sizeof *dq);
    memset(dk, 0, (size_t)(d->T * K * D) * sizeof *dk);
    memset(dv, 0, (size_t)(d->T * K * D) * sizeof *dv);
    for (int64_t r = 0; r < d->n_rows; r++)
        for (int64_t i = cu[r]; i < cu[r + 1]; i++)
            for (int64_t h = 0; h < H; h++) {
                int64_t at = (i * H + h) * D, kv = h / (H / K);
                double delta = dot(grad_o + at, o + at, D);
                for (int64_t j = first_key(d, cu[r], i); j <= i; j++) {
                    int64_t to = (j * K + kv) * D;
                    double slope, s = score(d, q + at, k + to, &slope);
                    double p = exp(s - (double)lse[i * H + h]);
                    double ds = p * (dot(grad_o + at, v + to, D) - delta) * slope;
                    for (int64_t c = 0; c < D; c++) {
                        dq[at + c] += (float)(ds * (double)k[to + c]);
                        dk[to + c] += (float)(ds * (double)q[at + c]);
                        dv[to + c] += (float)(p * (double)grad_o[at + c]);
                    }
                }
            }
}

void bsk_sinks_bwd_f32(const float *o, const float *grad_o, const float *lse, const float *sinks,
                       float *dsinks, int64_t T, int64_t H, int64_t D)
{
    for (int64_t h = 0; h < H; h++) {
        double sum = 0;
        for (int64_t t = 0; t < T; t++) {
            int64_t at = t * H + h;
            sum += exp((double)sinks[h] - (double)lse[at]) * dot(grad_o + at * D, o + at * D, D);
        }
        dsinks[h] -= (float)sum;
    }
}
