/* SPDX-License-Identifier: Apache-2.0 */
/*
** map.cuh: maps over flat arrays, y[k][i] = f(x[0][i], x[1][i], ...). F has the numbers of inputs and outputs
** as constants `in` and `out`, and a call of (const float *x, float *y) on one element of each.
*/
#ifndef BSK_CUDA_MAP_CUH
#define BSK_CUDA_MAP_CUH

#include "elements.cuh"
#include "launch.cuh"

enum { MAP_THREADS = 256 };

template <class A, class O, int IN, int OUT> struct map_args {
    const A *in[IN];
    O *out[OUT];
    int64_t n;
    bool wide;
};

/* An output may be one of the inputs: a thread reads all its elements before it writes. */
template <class F, class A, class O>
static __global__ void __launch_bounds__(MAP_THREADS) map_kernel(map_args<A, O, F::in, F::out> a, F f)
{
    int64_t at = ((int64_t)blockIdx.x * MAP_THREADS + threadIdx.x) * VEC, left = a.n - at;
    float x[F::in][VEC], y[F::out][VEC];
    if (left <= 0)
        return;
#pragma unroll
    for (int k = 0; k < F::in; k++)
        load_some(x[k], a.in[k] + at, left, a.wide);
#pragma unroll
    for (int i = 0; i < VEC; i++) {
        float xi[F::in], yi[F::out];
#pragma unroll
        for (int k = 0; k < F::in; k++)
            xi[k] = x[k][i];
        f(xi, yi);
#pragma unroll
        for (int k = 0; k < F::out; k++)
            y[k][i] = yi[k];
    }
#pragma unroll
    for (int k = 0; k < F::out; k++)
        store_some(a.out[k] + at, y[k], left, a.wide);
}

/* A kernel with MAP_THREADS * VEC of n elements a block. */
template <class... P, class... A>
static cudaError_t issue_flat(bsk_cuda *cuda, void (*kernel)(P...), int64_t n, A... a)
{
    int64_t blocks = (n + MAP_THREADS * VEC - 1) / (MAP_THREADS * VEC);
    if (blocks > INT32_MAX)
        return cudaErrorInvalidConfiguration;
    return n > 0 ? issue(cuda, kernel, (unsigned)blocks, MAP_THREADS, 0, a...) : cudaSuccess;
}

/* p: the inputs, then the outputs. */
template <class A, class O, class F>
static cudaError_t map(bsk_cuda *cuda, int64_t n, void *const *p, F f)
{
    map_args<A, O, F::in, F::out> a;
    a.n = n;
    a.wide = true;
    for (int k = 0; k < F::in + F::out; k++)
        a.wide = a.wide && aligned16(p[k]);
    for (int k = 0; k < F::in; k++)
        a.in[k] = (const A *)p[k];
    for (int k = 0; k < F::out; k++)
        a.out[k] = (O *)p[F::in + k];
    return issue_flat(cuda, map_kernel<F, A, O>, n, a, f);
}

#endif
