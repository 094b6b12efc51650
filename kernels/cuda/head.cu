/* SPDX-License-Identifier: Apache-2.0 */
/*
** head.cu: cross-entropy over vocabulary tiles, a block per token. Per token m, s describe the logits
** seen so far without the label's: max and sum of e^(l - m), kept as tiles come and go (online softmax,
** Milakov & Gimelshein 2018); ly is the label's logit. With d = log(s) + m - ly, loss = log(1 + e^d) and
** 1 - p = sigmoid(d), exact for a well-learned label: with the label in the sum, p would round to 1 and
** its gradient to 0. What there is once per token is f64 and computed by one thread.
*/
#include "row_groups.cuh"

/* log of the odds against the label; -inf when nothing else has weight. */
static __device__ inline double against(float m, float s, float ly)
{
    return s == 0.0f ? -(double)INFINITY : log((double)s) + (double)m - (double)ly;
}

/* The exponent is never positive: nothing overflows, and neither tail is lost to a subtraction from 1. */
static __device__ inline double sigmoid64(double d)
{
    return d < 0 ? exp(d) / (1.0 + exp(d)) : 1.0 / (1.0 + exp(-d));
}

static __device__ inline float capped(float l, float cap)
{
    return cap > 0.0f ? cap * tanhf(l / cap) : l;
}

/* Slope of cap * tanh(x / cap) where the result is y: 1 - (y / cap)^2 in factors. */
static __device__ inline float slope(float y, float cap)
{
    return cap > 0.0f ? (1.0f - y / cap) * (1.0f + y / cap) : 1.0f;
}

static dim3 token_block(void)
{
    return dim3(ROW_THREADS, 1, 1);
}

struct tile_args {
    const int32_t *label;       /* [T] */
    float *m, *s, *ly, *factor; /* [T] */
    int64_t V, first;
    float cap;
};

/* P may have the logits' address when both are f32: in both passes a thread reads its 8 elements before it writes
   them, and nobody else reads them.

   m, s and ly are written in place. Every thread reads m before the barriers of the first reduction, thread 0 writes
   it after them; ly is written by the one thread that has the label and read in later kernels only. */
template <class T>
static __global__ void __launch_bounds__(ROW_THREADS)
    tile_kernel(const float *logits, T *P, tile_args a, bool wide, bool wide_P)
{
    int64_t t = blockIdx.x, at = a.label[t] - a.first;
    const float *l = logits + t * a.V;
    float old = a.m[t], max = old, sum = 0.0f;
    FOR_COLUMNS(c, a.V)
    {
        float v[VEC];
        load_some(v, l + c, a.V - c, wide);
#pragma unroll
        for (int i = 0; i < VEC; i++) {
            float y = capped(v[i], a.cap);
            if (c + i >= a.V)
                break; /* past the end: a 0 that is no logit, or the place of a label of the next tile */
            if (c + i == at)
                a.ly[t] = y;
            else
                max = fmaxf(max, y);
        }
    }
    max = group_reduce(max, op_max());
    float base = max == -INFINITY ? 0.0f : max; /* nothing but the label has weight so far */
    FOR_COLUMNS(c, a.V)
    {
        float v[VEC];
        load_some(v, l + c, a.V - c, wide);
#pragma unroll
        for (int i = 0; i < VEC; i++) {
            float y = capped(v[i], a.cap), e = c + i == at || c + i >= a.V ? 0.0f : expf(y - base);
            sum += e;
            v[i] = e == 0.0f ? e : e * slope(y, a.cap);
        }
        store_some(P + t * a.V + c, v, a.V - c, wide_P);
    }
    sum = group_reduce(sum, op_add());
    if (threadIdx.x == 0) {
        /* sums of earlier tiles are relative to the old maximum; of no tiles there is nothing to scale */
        float factor = old == -INFINITY ? 0.0f : expf(old - max);
        a.s[t] = (float)((double)a.s[t] * (double)factor + (double)sum);
        a.m[t] = max;
        a.factor[t] = factor;
    }
}

cudaError_t bsk_cuda_head_tile(bsk_cuda *cuda, const bsk_call *c)
{
    int64_t T = c->n[0];
    tile_args a = {
        (const int32_t *)c->p[1], (float *)c->p[2], (float *)c->p[3], (float *)c->p[4],
        (float *)c->p[5],         c->n[1],          c->n[2],          c->n[3] ? (float)c->f[0] : 0.0f};
    if (T <= 0)
        return cudaSuccess;
    if (T > INT32_MAX)
        return cudaErrorInvalidConfiguration;
    if (c->p[6] == c->p[0] && c->dtype != BS_DTYPE_F32) {
        cuda->note = "the weights of a vocabulary tile take the logits' place in f32 only";
        return cudaErrorNotSupported;
    }
    return by_type(cuda, c->dtype, [&](auto t) {
        using P = decltype(t);
        return issue(cuda, tile_kernel<P>, (unsigned)T, token_block(), 0, (const float *)c->p[0],
                     (P *)c->p[6], a, rows_wide(a.V, c->p[0]), rows_wide(a.V, c->p[6]));
    });
}

/* The label's row of the weight, where this tile has it: the other half of dx beside the weighted sum of rows. Of
   the tiles of a step exactly one writes a token's row. */
template <class T>
static __global__ void __launch_bounds__(ROW_THREADS)
    pick_kernel(const T *w, const int32_t *label, const float *ly, float *wy, int64_t C, int64_t first,
                int64_t V, float cap, bool wide)
{
    int64_t t = blockIdx.x, at = label[t] - first;
    if (at < 0 || at >= V)
        return;
    scale_row(wy + t * C, w + at * C, slope(ly[t], cap), C, C, wide);
}

cudaError_t bsk_cuda_head_pick(bsk_cuda *cuda, const bsk_call *c)
{
    int64_t T = c->n[0], C = c->n[1];
    if (T <= 0 || C <= 0)
        return cudaSuccess;
    if (T > INT32_MAX)
        return cudaErrorInvalidConfiguration;
    return by_type(cuda, c->dtype, [&](auto t) {
        using W = decltype(t);
        return issue(cuda, pick_kernel<W>, (unsigned)T, token_block(), 0, (const W *)c->p[0],
                     (const int32_t *)c->p[1], (const float *)c->p[2], (float *)c->p[3], C, c->n[2],
                     c->n[3], c->n[4] ? (float)c->f[0] : 0.0f, rows_wide(C, c->p[0], c->p[3]));
    });
}

struct finish_args {
    const float *m, *s, *ly, *acc, *wy; /* [T], acc and wy [T,C] */
    float *loss;                        /* [T] */
    int64_t C;
    float inv_count;
};

/* dx = q (acc / s - wy) / count with q = 1 - p: the mean of the other rows, by their weights, less the label's own.
   Where nothing but the label has weight, s and acc are 0 and so is q. */
template <class T>
static __global__ void __launch_bounds__(ROW_THREADS) finish_kernel(finish_args a, T *dx, bool wide)
{
    __shared__ float q_of_block, inv_of_block;
    int64_t t = blockIdx.x;
    if (threadIdx.x == 0) {
        double d = against(a.m[t], a.s[t], a.ly[t]);
        /* log(1 + e^d) by the power that does not overflow */
        a.loss[t] = (float)(d > 0 ? d + log1p(exp(-d)) : log1p(exp(d)));
        q_of_block = (float)(sigmoid64(d) * (double)a.inv_count);
        inv_of_block = a.s[t] == 0.0f ? 0.0f : 1.0f / a.s[t];
    }
    if (!dx)
        return;
    __syncthreads(); /* what thread 0 computed is there */
    float q = q_of_block, inv = inv_of_block;
    FOR_COLUMNS(c, a.C)
    {
        float acc[VEC], wy[VEC];
        load_some(acc, a.acc + t * a.C + c, a.C - c, wide);
        load_some(wy, a.wy + t * a.C + c, a.C - c, wide);
#pragma unroll
        for (int i = 0; i < VEC; i++)
            acc[i] = q * (acc[i] * inv - wy[i]);
        store_some(dx + t * a.C + c, acc, a.C - c, wide);
    }
}

cudaError_t bsk_cuda_head_finish(bsk_cuda *cuda, const bsk_call *c)
{
    int64_t T = c->n[0];
    finish_args a = {(const float *)c->p[0],
                     (const float *)c->p[1],
                     (const float *)c->p[2],
                     (const float *)c->p[3],
                     (const float *)c->p[4],
                     (float *)c->p[5],
                     c->n[1],
                     (float)c->f[0]};
    if (T <= 0)
        return cudaSuccess;
    if (T > INT32_MAX)
        return cudaErrorInvalidConfiguration;
    return by_type(cuda, c->dtype, [&](auto t) {
        using D = decltype(t);
        return issue(cuda, finish_kernel<D>, (unsigned)T, token_block(), 0, a, (D *)c->p[6],
                     rows_wide(a.C, c->p[3], c->p[4], c->p[6]));
    });
}

struct dlogits_args {
    const int32_t *label;    /* [T] */
    const float *m, *s, *ly; /* [T] */
    int64_t V, first;
    float cap, inv_count;
};

/* p = e^(l - base) / total, total = s e^(m - base) + e^(ly - base): base is the larger of m and ly, so that no
   power overflows. The label's p - 1 is -sigmoid(d), which does not cancel. */
template <class T>
static __global__ void __launch_bounds__(ROW_THREADS)
    dlogits_kernel(const float *logits, T *P, dlogits_args a, bool wide, bool wide_P)
{
    __shared__ float scale_of_block, label_of_block;
    int64_t t = blockIdx.x, at = a.label[t] - a.first;
    const float *l = logits + t * a.V;
    float m = a.m[t], ly = a.ly[t], base = m > ly ? m : ly;
    if (threadIdx.x == 0) {
        double total = (double)a.s[t] * exp((double)m - (double)base) + exp((double)ly - (double)base);
        scale_of_block = (float)((double)a.inv_count / total);
        label_of_block =
            (float)(-sigmoid64(against(m, a.s[t], ly)) * (double)a.inv_count) * slope(ly, a.cap);
    }
    __syncthreads();
    float scale = scale_of_block, at_label = label_of_block;
    FOR_COLUMNS(c, a.V)
    {
        float v[VEC];
        load_some(v, l + c, a.V - c, wide);
#pragma unroll
        for (int i = 0; i < VEC; i++) {
            float y = capped(v[i], a.cap);
            v[i] = c + i == at ? at_label : expf(y - base) * scale * slope(y, a.cap);
        }
        store_some(P + t * a.V + c, v, a.V - c, wide_P);
    }
}

cudaError_t bsk_cuda_head_dlogits(bsk_cuda *cuda, const bsk_call *c)
{
    int64_t T = c->n[0];
    dlogits_args a = {(const int32_t *)c->p[1],
                      (const float *)c->p[2],
                      (const float *)c->p[3],
                      (const float *)c->p[4],
                      c->n[1],
                      c->n[2],
                      c->n[3] ? (float)c->f[1] : 0.0f,
                      (float)c->f[0]};
    if (T <= 0)
        return cudaSuccess;
    if (T > INT32_MAX)
        return cudaErrorInvalidConfiguration;
    if (c->p[5] == c->p[0] && c->dtype != BS_DTYPE_F32) {
        cuda->note = "the gradient of logits takes their place in f32 only";
        return cudaErrorNotSupported;
    }
    return by_type(cuda, c->dtype, [&](auto t) {
        using P = decltype(t);
        return issue(cuda, dlogits_kernel<P>, (unsigned)T, token_block(), 0, (const float *)c->p[0],
                     (P *)c->p[5], a, rows_wide(a.V, c->p[0]), rows_wide(a.V, c->p[5]));
    });
}
