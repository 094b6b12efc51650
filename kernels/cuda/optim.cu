/* SPDX-License-Identifier: Apache-2.0 */
/*
** optim.cu: the optimizer's kernels. Sums are f64 over a grid that depends on N only: every thread
** walks its elements in order, a block adds its threads, a second kernel adds the blocks in the
** same way. So the bits do not depend on how many multiprocessors there are, nor on which block ends
** first. AdamW (Loshchilov & Hutter 2019) keeps f32 state and computes an element in f64.
*/
#include "elements.cuh"
#include "launch.cuh"
#include "warp.cuh"

enum { THREADS = 256, SUM_BLOCKS = BSK_CUDA_PARTIALS };

/* The sum of v over the block, in thread 0. Once in a kernel: no barrier keeps a second call from `part`. */
static __device__ inline double block_sum(double v)
{
    __shared__ double part[THREADS / 32];
    v = warp_sum(v); /* lanes as a tree, then warps in order */
    if (threadIdx.x % 32 == 0)
        part[threadIdx.x / 32] = v;
    __syncthreads();
    if (threadIdx.x == 0)
        for (int i = 1; i < THREADS / 32; i++)
            v += part[i];
    return v;
}

/* The blocks' sums to part: a grid has no barrier, so the second kernel waits for them by its place in the queue. */
template <bool SQUARES>
static __global__ void __launch_bounds__(THREADS)
    sum_kernel(const float *x, double *part, int64_t n, bool wide)
{
    double sum = 0.0;
    for (int64_t at = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * VEC; at < n;
         at += (int64_t)gridDim.x * THREADS * VEC) {
        float v[VEC];
        load_some(v, x + at, n - at, wide);
#pragma unroll
        for (int i = 0; i < VEC; i++)
            sum += SQUARES ? (double)v[i] * (double)v[i] : (double)v[i];
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0)
        part[blockIdx.x] = sum;
}

static __global__ void __launch_bounds__(THREADS)
    sum_parts_kernel(const double *part, int n, double *out)
{
    double sum = 0.0;
    for (int i = threadIdx.x; i < n; i += THREADS)
        sum += part[i];
    sum = block_sum(sum);
    if (threadIdx.x == 0)
        *out = sum;
}

/* Of no elements the second kernel alone runs, and writes 0. */
template <bool SQUARES> static cudaError_t sum(bsk_cuda *cuda, const bsk_call *c)
{
    /* SUM_BLOCKS at most, as the partials have room for no more; longer arrays go round the grid again */
    int64_t n = c->n[0], span = (int64_t)THREADS * VEC, blocks = (n + span - 1) / span;
    blocks = blocks < (int64_t)SUM_BLOCKS ? blocks : (int64_t)SUM_BLOCKS;
    cudaError_t e = cudaSuccess;
    if (blocks > 0)
        e = issue(cuda, sum_kernel<SQUARES>, (unsigned)blocks, THREADS, 0, (const float *)c->p[0],
                  cuda->partials, n, aligned16(c->p[0]));
    if (e != cudaSuccess)
        return e;
    return issue(cuda, sum_parts_kernel, 1, THREADS, 0, cuda->partials, (int)blocks, (double *)c->p[1]);
}

cudaError_t bsk_cuda_sum(bsk_cuda *cuda, const bsk_call *c)
{
    return sum<false>(cuda, c);
}

cudaError_t bsk_cuda_sumsq(bsk_cuda *cuda, const bsk_call *c)
{
    return sum<true>(cuda, c);
}

/* keep: what weight decay leaves of a parameter, 1 - rate * decay; inv1, inv2: the bias corrections as factors. */
struct adamw_args {
    double rate, keep, beta1, beta2, eps, inv1, inv2, gscale;
};

/* An element is f64 from its load to the one rounding of each state, and its update goes by the moments as they were
   before that. The betas must be f64: of one near 1, f32 leaves few digits of 1 - beta. The copy is rounded from the
   stored f32, so that it is what expanding the parameter would give. A thread alone has its elements: in place. */
template <class O>
static __global__ void __launch_bounds__(THREADS)
    adamw_kernel(float *p, const float *g, float *m, float *v, O *copy, int64_t n, adamw_args a,
                 bool wide)
{
    int64_t at = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * VEC, left = n - at;
    float pi[VEC], gi[VEC], mi[VEC], vi[VEC];
    if (left <= 0)
        return;
    load_some(pi, p + at, left, wide);
    load_some(gi, g + at, left, wide);
    load_some(mi, m + at, left, wide);
    load_some(vi, v + at, left, wide);
#pragma unroll
    for (int i = 0; i < VEC; i++) {
        double grad = (double)gi[i] * a.gscale;
        double m1 = a.beta1 * (double)mi[i] + (1.0 - a.beta1) * grad;
        double v1 = a.beta2 * (double)vi[i] + (1.0 - a.beta2) * grad * grad;
        mi[i] = (float)m1;
        vi[i] = (float)v1;
        pi[i] = (float)((double)pi[i] * a.keep - a.rate * (m1 * a.inv1) / (sqrt(v1 * a.inv2) + a.eps));
    }
    store_some(p + at, pi, left, wide);
    store_some(m + at, mi, left, wide);
    store_some(v + at, vi, left, wide);
    if (copy)
        store_some(copy + at, pi, left, wide);
}

cudaError_t bsk_cuda_adamw(bsk_cuda *cuda, const bsk_call *c)
{
    const double *f = c->f;
    int64_t n = c->n[0], blocks = (n + THREADS * VEC - 1) / (THREADS * VEC);
    adamw_args a = {f[0], 1.0 - f[0] * f[4], f[1], f[2], f[3], 1.0 / f[5], 1.0 / f[6], f[7]};
    bool wide = rows_wide(0, c->p[0], c->p[1], c->p[2], c->p[3], c->p[4]);
    if (n <= 0)
        return cudaSuccess;
    if (blocks > INT32_MAX)
        return cudaErrorInvalidConfiguration;
    return by_type(cuda, c->out, [&](auto t) {
        using O = decltype(t);
        return issue(cuda, adamw_kernel<O>, (unsigned)blocks, THREADS, 0, (float *)c->p[0],
                     (const float *)c->p[1], (float *)c->p[2], (float *)c->p[3], (O *)c->p[4], n, a,
                     wide);
    });
}
