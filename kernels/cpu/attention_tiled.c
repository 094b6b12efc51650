/* SPDX-License-Identifier: Apache-2.0 */
/*
** attention_tiled.c: attention by blocks of GEMMs, equal to attention.c up to rounding, inside the rows of a
** batch or of new tokens against the keys and values of a cache. Forward: a
** unit of work is a head and a tile of QUERIES queries; it walks its visible keys in blocks of KEYS
** with a running maximum and sum (Milakov & Gimelshein 2018; Dao et al. 2022), o itself holding the
** unfinished sums. Backward: a unit is a row of the batch and a key/value head, so dq, dk and dv of
** a unit belong to it alone and are added in one order. Units are dealt to SLOTS tasks; task i owns
** slice i of the scratch. Neither the number of threads nor the dealing of units changes bits. lse
** is [T,H].
*/
#include "cpu.h"

enum { QUERIES = 64, KEYS = 256, SLOTS = 16 };

struct attention {
    const bsk_attention_dims *d;
    const float *q, *k, *v, *o_in, *lse_in, *grad_o;
    const int32_t *cu;
    float *o, *lse, *dq, *dk, *dv;
    float *scratch; /* SLOTS slices of `slice` floats */
    int64_t slice;
};

/* Floats of one score tile. */
static int64_t tile_floats(int64_t capacity)
{
    return BSI_MIN(capacity, QUERIES) * BSI_MIN(capacity, KEYS);
}

size_t bsk_attention_scratch(int64_t capacity, int64_t H, int64_t K, int64_t D)
{
    (void)H, (void)K, (void)D;
    return (size_t)SLOTS * (size_t)tile_floats(capacity) * sizeof(float);
}

/* The larger of what this file needs, two score tiles a slot, and the cuda kernels: per token a value a
   head and an integer. */
size_t bsk_attention_bwd_scratch(int64_t capacity, int64_t H, int64_t K, int64_t D)
{
    size_t tiles = 2 * bsk_attention_scratch(capacity, H, K, D);
    size_t tokens = (size_t)capacity * ((size_t)H * sizeof(float) + sizeof(int32_t));
    return BSI_MAX(tiles, tokens);
}

/* Keys [*from, *to) of key block [kb, ke) that query i sees. */
static void visible(const bsk_attention_dims *d, int64_t i, int64_t kb, int64_t ke, int64_t *from,
                    int64_t *to)
{
    int64_t low = d->window > 0 ? i - d->window + 1 : 0;
    *from = BSI_MIN(BSI_MAX(kb, low), ke);
    *to = BSI_MAX(BSI_MIN(ke, i + 1), *from);
}

/* Scores to e^(score - m) over one block of keys; what a query does not see becomes 0, since the product with the
   values runs over the whole rectangle. A query without a sink that has seen no key yet has m = -inf; its shrink
   is 0, where e^(m - max) would be NaN if it sees no key of this block either. m, sum: running values per query;
   shrink: the factor that the sums so far take. */
BSK_WIDE static void softmax_block(const bsk_attention_dims *d, float *s, int64_t ld, int64_t q0,
                                   int64_t qn, int64_t kb, int64_t ke, float *m, double *sum,
                                   float *shrink)
{
    for (int64_t r = 0; r < qn; r++) {
        float *row = s + r * ld, cap = d->softcap;
        int64_t from, to;
        visible(d, q0 + r, kb, ke, &from, &to);
        from -= kb, to -= kb;
        if (cap > 0.0f)
            for (int64_t j = from; j < to; j++)
                row[j] = cap * bsk_tanh(row[j] / cap);
        float max = bsk_max(row + from, to - from, m[r]);
        shrink[r] = m[r] == -INFINITY ? 0.0f : bsk_exp_neg(m[r] - max);
        sum[r] *= (double)shrink[r];
        if (from < to)
            sum[r] += bsk_exp_sum(row + from, to - from, max);
        m[r] = max;
        memset(row, 0, (size_t)from * sizeof *row);
        memset(row + to, 0, (size_t)(ke - kb - to) * sizeof *row);
    }
}

/* o rows times factor; the first block writes o, so that nothing is read before. */
BSK_WIDE static void scale_rows(float *o, int64_t ld, int64_t n, int64_t D, const float *factor)
{
    for (int64_t r = 0; r < n; r++)
        for (int64_t c = 0; c < D; c++)
            o[r * ld + c] *= factor[r];
}

/* Consecutive queries of one row and head. Keys and queries are counted alike: query r is token q0 + r and
   sees keys start..q0 + r. */
struct queries {
    const float *q, *k, *v; /* query 0, key 0 and value 0 of the heads */
    float *o, *lse;         /* of query 0; lse NULL: not wanted */
    int64_t h, start, q0, qn;
};

static void forward_unit(const bsk_attention_dims *d, float *s, const struct queries *u)
{
    int64_t D = d->D, ldq = d->H * D, ldk = d->K * D, q0 = u->q0, qn = u->qn;
    float m[QUERIES], factor[QUERIES];
    double sum[QUERIES] = {0};
    float sink = d->sinks ? d->sinks[u->h] : -INFINITY;
    for (int r = 0; r < QUERIES; r++)
        m[r] = sink; /* so that no exponential overflows; its own share is added at the end */
    int64_t first = d->window > 0 ? BSI_MAX(u->start, q0 - d->window + 1) : u->start;
    for (int64_t kb = first; kb < q0 + qn; kb += KEYS) {
        int64_t ke = BSI_MIN(kb + KEYS, q0 + qn), n = ke - kb;
        bsk_gemm_one(false, true, qn, n, D, d->scale, u->q, ldq, u->k + kb * ldk, ldk, 0.0f, s, n);
        softmax_block(d, s, n, q0, qn, kb, ke, m, sum, factor);
        if (kb > first)
            scale_rows(u->o, ldq, qn, D, factor);
        bsk_gemm_one(false, false, qn, D, n, 1.0f, s, n, u->v + kb * ldk, ldk, kb > first ? 1.0f : 0.0f,
                     u->o, ldq);
    }
    /* o holds sum_j e^(s_j - m) v_j: one division at the end. The sink has no value and only joins the sum. */
    for (int64_t r = 0; r < qn; r++) {
        sum[r] += exp((double)sink - (double)m[r]);
        factor[r] = (float)(1.0 / sum[r]);
        if (u->lse)
            u->lse[r * d->H] = (float)((double)m[r] + log(sum[r]));
    }
    scale_rows(u->o, ldq, qn, D, factor);
}

static void forward_task(void *arg, int64_t slot)
{
    const struct attention *a = arg;
    float *s = a->scratch + slot * a->slice;
    int64_t unit = 0;
    for (int64_t r = 0; r < a->d->n_rows; r++)
        for (int64_t q0 = a->cu[r]; q0 < a->cu[r + 1]; q0 += QUERIES)
            for (int64_t h = 0; h < a->d->H; h++)
                if (unit++ % SLOTS == slot) {
                    int64_t q = (q0 * a->d->H + h) * a->d->D, kv = h / (a->d->H / a->d->K) * a->d->D;
                    forward_unit(a->d, s,
                                 &(struct queries){a->q + q, a->k + kv, a->v + kv, a->o + q,
                                                   a->lse + q0 * a->d->H + h, h, a->cu[r], q0,
                                                   BSI_MIN(QUERIES, a->cu[r + 1] - q0)});
                }
}

void bsk_attention_f32(bsk_par *par, const bsk_attention_dims *d, const float *q, const float *k,
                       const float *v, const int32_t *cu, float *o, float *lse, void *scratch)
{
    struct attention a = {.d = d,
                          .q = q,
                          .k = k,
                          .v = v,
                          .cu = cu,
                          .o = o,
                          .lse = lse,
                          .scratch = scratch,
                          .slice = tile_floats(d->capacity)};
    if (d->T > 0)
        par->run(par, SLOTS, forward_task, &a);
}

struct cached {
    const bsk_attention_dims *d;
    const float *q, *k, *v;
    const int32_t *row, *pos;
    float *o, *scratch;
    int64_t slice;
};

/* A unit is a head and a run of tokens that follow each other in one row. */
static void cached_task(void *arg, int64_t slot)
{
    const struct cached *a = arg;
    const bsk_attention_dims *d = a->d;
    int64_t unit = 0, row_floats = d->capacity * d->K * d->D, n;
    for (int64_t t = 0; t < d->T; t += n) {
        for (n = 1; n < QUERIES && t + n < d->T && a->row[t + n] == a->row[t] &&
                    a->pos[t + n] == a->pos[t] + (int32_t)n;)
            n++;
        for (int64_t h = 0; h < d->H; h++)
            if (unit++ % SLOTS == slot) {
                int64_t q = (t * d->H + h) * d->D,
                        k = a->row[t] * row_floats + h / (d->H / d->K) * d->D;
                forward_unit(d, a->scratch + slot * a->slice,
                             &(struct queries){a->q + q, a->k + k, a->v + k, a->o + q, NULL, h, 0,
                                               a->pos[t], n});
            }
    }
}

void bsk_attention_cache_f32(bsk_par *par, const bsk_attention_dims *d, const float *q, const float *k,
                             const float *v, const int32_t *row, const int32_t *pos, float *o,
                             void *scratch)
{
    struct cached a = {d, q, k, v, row, pos, o, scratch, tile_floats(d->capacity)};
    if (d->T > 0)
        par->run(par, SLOTS, cached_task, &a);
}

struct put {
    const float *x;
    const int32_t *row, *pos;
    float *cache;
    int64_t C, capacity;
};

static void put_body(const void *arg, int64_t first, int64_t end)
{
    const struct put *p = arg;
    for (int64_t t = first; t < end; t++)
        memcpy(p->cache + (p->row[t] * p->capacity + p->pos[t]) * p->C, p->x + t * p->C,
               (size_t)p->C * sizeof *p->x);
}

void bsk_cache_put_f32(bsk_par *par, const float *x, const int32_t *row, const int32_t *pos,
                       float *cache, int64_t T, int64_t C, int64_t capacity)
{
    struct put p = {x, row, pos, cache, C, capacity};
    bsk_chunks(par, T, C, put_body, &p);
}

/* From scores s and dp = dO v^T: s becomes P, dp becomes dS / scale (zero where a key is not seen).
   P is e^(s - lse), so that nothing of the forward pass but lse is kept. dS is P (dP - delta), where delta = dO . o
   is the sum over the keys of P dP, one number a query (Dao et al. 2022, appendix B). With a softcap s is the score
   before it, and dS takes its slope 1 - tanh^2. */
BSK_WIDE static void grad_block(const bsk_attention_dims *d, float *s, float *dp, int64_t q0,
                                int64_t qn, int64_t kb, int64_t ke, const float *lse,
                                const float *delta)
{
    int64_t n = ke - kb;
    float cap = d->softcap;
    for (int64_t r = 0; r < qn; r++) {
        float *p = s + r * n, *ds = dp + r * n;
        int64_t from, to;
        visible(d, q0 + r, kb, ke, &from, &to);
        from -= kb, to -= kb;
        float l = lse[r], dr = delta[r];
        if (cap > 0.0f)
            for (int64_t j = from; j < to; j++) {
                float t = bsk_tanh(p[j] / cap);
                p[j] = bsk_exp_neg(cap * t - l);
                ds[j] = p[j] * (ds[j] - dr) * (1.0f - t * t);
            }
        else
            for (int64_t j = from; j < to; j++) {
                p[j] = bsk_exp_neg(p[j] - l);
                ds[j] = p[j] * (ds[j] - dr);
            }
        memset(p, 0, (size_t)from * sizeof *p);
        memset(ds, 0, (size_t)from * sizeof *ds);
        memset(p + to, 0, (size_t)(n - to) * sizeof *p);
        memset(ds + to, 0, (size_t)(n - to) * sizeof *ds);
    }
}

/* Head h, queries [q0, q0+qn) against keys [kb, ke): adds to dq, dk, dv. */
static void backward_tile(const struct attention *a, float *s, float *dp, int64_t h, int64_t q0,
                          int64_t qn, int64_t kb, int64_t ke)
{
    const bsk_attention_dims *d = a->d;
    int64_t D = d->D, H = d->H, ldq = H * D, ldk = d->K * D, n = ke - kb;
    int64_t qat = q0 * ldq + h * D, kat = kb * ldk + h / (H / d->K) * D;
    float lse[QUERIES], delta[QUERIES];
    for (int64_t r = 0; r < qn; r++) {
        lse[r] = a->lse_in[(q0 + r) * H + h];
        delta[r] = (float)bsk_dot(a->grad_o + qat + r * ldq, a->o_in + qat + r * ldq, D);
    }
    bsk_gemm_one(false, true, qn, n, D, d->scale, a->q + qat, ldq, a->k + kat, ldk, 0.0f, s, n);
    bsk_gemm_one(false, true, qn, n, D, 1.0f, a->grad_o + qat, ldq, a->v + kat, ldk, 0.0f, dp, n);
    grad_block(d, s, dp, q0, qn, kb, ke, lse, delta);
    /* dv += P^T dO, dk += dS^T q, dq += dS k; the scale that dS lacks is the factor of the products. */
    bsk_gemm_one(true, false, n, D, qn, 1.0f, s, n, a->grad_o + qat, ldq, 1.0f, a->dv + kat, ldk);
    bsk_gemm_one(true, false, n, D, qn, d->scale, dp, n, a->q + qat, ldq, 1.0f, a->dk + kat, ldk);
    bsk_gemm_one(false, false, qn, D, n, d->scale, dp, n, a->k + kat, ldk, 1.0f, a->dq + qat, ldq);
}

static void zero_columns(float *x, int64_t ld, int64_t n, int64_t width)
{
    for (int64_t r = 0; r < n; r++)
        memset(x + r * ld, 0, (size_t)width * sizeof *x);
}

/* One row of the batch, tokens [start, end), and one key/value head with the query heads that read it.
 */
static void backward_unit(const struct attention *a, float *s, int64_t start, int64_t end, int64_t kv)
{
    const bsk_attention_dims *d = a->d;
    int64_t D = d->D, group = d->H / d->K, ldq = d->H * D, ldk = d->K * D;
    zero_columns(a->dq + start * ldq + kv * group * D, ldq, end - start, group * D);
    zero_columns(a->dk + start * ldk + kv * D, ldk, end - start, D);
    zero_columns(a->dv + start * ldk + kv * D, ldk, end - start, D);
    for (int64_t kb = start; kb < end; kb += KEYS) {
        int64_t ke = BSI_MIN(kb + KEYS, end);
        /* The last query that sees key ke-1 is ke-1 + window-1. */
        int64_t last = d->window > 0 ? BSI_MIN(end, ke + d->window - 1) : end;
        for (int64_t h = kv * group; h < (kv + 1) * group; h++)
            /* Causal: the first query that sees a key of this block is the block's first token. */
            for (int64_t q0 = kb; q0 < last; q0 += QUERIES) {
                int64_t qn = BSI_MIN(QUERIES, last - q0);
                int64_t k0 = d->window > 0 ? BSI_MAX(kb, q0 - d->window + 1) : kb;
                backward_tile(a, s, s + a->slice / 2, h, q0, qn, k0, BSI_MIN(ke, q0 + qn));
            }
    }
}

static void backward_task(void *arg, int64_t slot)
{
    const struct attention *a = arg;
    float *s = a->scratch + slot * a->slice;
    int64_t unit = 0;
    for (int64_t r = 0; r < a->d->n_rows; r++)
        for (int64_t kv = 0; kv < a->d->K; kv++)
            if (unit++ % SLOTS == slot)
                backward_unit(a, s, a->cu[r], a->cu[r + 1], kv);
}

void bsk_attention_bwd_f32(bsk_par *par, const bsk_attention_dims *d, const float *q, const float *k,
                           const float *v, const int32_t *cu, const float *o, const float *lse,
                           const float *grad_o, float *dq, float *dk, float *dv, void *scratch)
{
    struct attention a = {.d = d,
                          .q = q,
                          .k = k,
                          .v = v,
                          .cu = cu,
                          .o_in = o,
                          .lse_in = lse,
                          .grad_o = grad_o,
                          .dq = dq,
                          .dk = dk,
                          .dv = dv,
                          .scratch = scratch,
                          .slice = 2 * tile_floats(d->capacity)};
    if (d->T > 0)
        par->run(par, SLOTS, backward_task, &a);
}
