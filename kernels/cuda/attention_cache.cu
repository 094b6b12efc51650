/* SPDX-License-Identifier: Apache-2.0 */
/*
** attention_cache.cu: keys and values of earlier tokens. A block of attention is one query and head: its warps
** take every WARPS-th key, a lane holding every 32nd channel, each with a running maximum and sum;
** the first warp then joins them in their order.
*/
#include "elements.cuh"
#include "launch.cuh"
#include "warp.cuh"

enum { WARPS = 8, THREADS = WARPS * 32, CHANNELS = BSK_CUDA_MAX_HEAD_DIM / 32 };

template <class T> struct cache_args {
    const T *q, *k, *v; /* [T,H*D], [rows,capacity,K*D] */
    const int32_t *row, *pos;
    T *o;           /* [T,H*D] */
    const T *sinks; /* [H], or NULL */
    int64_t capacity, window;
    int H, K, D;
    float scale, cap;
};

/* acc, m, sum take the keys first, first + WARPS, .. up to `last` */
template <class T>
static __device__ inline void walk_keys(const cache_args<T> &a, const T *k, const T *v, int64_t first,
                                        int64_t last, const float (&q)[CHANNELS],
                                        float (&acc)[CHANNELS], float *m, float *sum)
{
    int lane = threadIdx.x % 32;
    int64_t ld = (int64_t)a.K * a.D;
    for (int64_t j = first; j <= last; j += WARPS) {
        float s = 0.0f;
#pragma unroll
        for (int c = 0; c < CHANNELS; c++)
            if (lane + 32 * c < a.D)
                s += q[c] * to_f32(k[j * ld + lane + 32 * c]);
        s = a.scale * warp_sum(s);
        s = a.cap > 0.0f ? a.cap * tanhf(s / a.cap) : s;
        float max = fmaxf(*m, s), p = expf(s - max), shrink = expf(*m - max);
        *m = max;
        *sum = *sum * shrink + p;
#pragma unroll
        for (int c = 0; c < CHANNELS; c++)
            if (lane + 32 * c < a.D)
                acc[c] = acc[c] * shrink + p * to_f32(v[j * ld + lane + 32 * c]);
    }
}

template <class T> static __global__ void __launch_bounds__(THREADS) attention_kernel(cache_args<T> a)
{
    __shared__ float parts[WARPS][BSK_CUDA_MAX_HEAD_DIM], ms[WARPS], sums[WARPS];
    int h = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int64_t t = blockIdx.y, at = (t * a.H + h) * a.D, last = a.pos[t];
    int64_t first = a.window > 0 && last >= a.window ? last - a.window + 1 : 0;
    int64_t base = (a.row[t] * a.capacity * a.K + h / (a.H / a.K)) * a.D;
    float q[CHANNELS], acc[CHANNELS] = {0}, m = -INFINITY, sum = 0.0f;
#pragma unroll
    for (int c = 0; c < CHANNELS; c++)
        q[c] = lane + 32 * c < a.D ? to_f32(a.q[at + lane + 32 * c]) : 0.0f;
    walk_keys(a, a.k + base, a.v + base, first + warp, last, q, acc, &m, &sum);
    ms[warp] = m;
    sums[warp] = sum;
#pragma unroll
    for (int c = 0; c < CHANNELS; c++)
        if (lane + 32 * c < a.D)
            parts[warp][lane + 32 * c] = acc[c];
    __syncthreads();
    if (warp > 0)
        return;
    float sink = a.sinks ? to_f32(a.sinks[h]) : -INFINITY, max = sink;
    for (int w = 0; w < WARPS; w++)
        max = fmaxf(max, ms[w]); /* of warp 0 at least it is finite: it has a key */
    float total = expf(sink - max);
    for (int w = 0; w < WARPS; w++)
        total += sums[w] * expf(ms[w] - max);
    for (int c = lane; c < a.D; c += 32) {
        float y = 0.0f;
        for (int w = 0; w < WARPS; w++)
            y += parts[w][c] * expf(ms[w] - max);
        from_f32(&a.o[at + c], y / total);
    }
}

cudaError_t bsk_cuda_attention_cache(bsk_cuda *cuda, const bsk_call *c)
{
    if (c->n[3] > BSK_CUDA_MAX_HEAD_DIM || c->n[0] > 65535) {
        cuda->note = "cached attention has head dims up to 256 and up to 65535 new tokens";
        return cudaErrorNotSupported;
    }
    if (c->n[0] <= 0)
        return cudaSuccess;
    return by_type(cuda, c->dtype, [&](auto t) {
        using T = decltype(t);
        cache_args<T> a = {(const T *)c->p[0],
                           (const T *)c->p[1],
                           (const T *)c->p[2],
                           (const int32_t *)c->p[3],
                           (const int32_t *)c->p[4],
                           (T *)c->p[5],
                           (const T *)c->p[7],
                           c->n[6],
                           c->n[5],
                           (int)c->n[1],
                           (int)c->n[2],
                           (int)c->n[3],
                           (float)c->f[0],
                           (float)c->f[1]};
        return issue(cuda, attention_kernel<T>, dim3((unsigned)a.H, (unsigned)c->n[0]), THREADS, 0, a);
    });
}

template <class T>
static __global__ void put_kernel(const T *x, const int32_t *row, const int32_t *pos, T *cache,
                                  int64_t n, int64_t C, int64_t capacity)
{
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, t = i / C;
    if (i < n)
        cache[(row[t] * capacity + pos[t]) * C + i % C] = x[i];
}

cudaError_t bsk_cuda_cache_put(bsk_cuda *cuda, const bsk_call *c)
{
    int64_t n = c->n[0] * c->n[1];
    if (n <= 0)
        return cudaSuccess;
    return by_type(cuda, c->dtype, [&](auto t) {
        using T = decltype(t);
        return issue(cuda, put_kernel<T>, (unsigned)((n + THREADS - 1) / THREADS), THREADS, 0,
                     (const T *)c->p[0], (const int32_t *)c->p[1], (const int32_t *)c->p[2],
                     (T *)c->p[3], n, c->n[1], c->n[3]);
    });
}
