/* SPDX-License-Identifier: Apache-2.0 */
/*
** norm.cu: RMSNorm, y = x * rstd * w with rstd = 1/sqrt(mean(x^2) + eps), w the weight or 1 + weight;
** and the column sums of a matrix. A row belongs to a group of threads, sums of it are f32 in one order.
*/
#include "columns.cuh"

template <class T>
static __global__ void __launch_bounds__(ROW_THREADS)
    rmsnorm_kernel(const T *x, const T *w, T *y, float *rstd, int64_t rows, int64_t C, float one,
                   float eps, bool wide)
{
    int64_t t = my_row(), limit = t < rows ? C : 0;
    float sum = 0.0f;
    x += t * C;
    FOR_COLUMNS(c, limit)
    {
        float v[VEC];
        load_some(v, x + c, C - c, wide);
#pragma unroll
        for (int i = 0; i < VEC; i++)
            sum += v[i] * v[i];
    }
    float r = 1.0f / sqrtf(group_reduce(sum, op_add()) / (float)C + eps);
    if (limit && threadIdx.x == 0)
        rstd[t] = r;
    FOR_COLUMNS(c, limit)
    {
        float v[VEC], g[VEC];
        load_some(v, x + c, C - c, wide);
        load_some(g, w + c, C - c, wide);
#pragma unroll
        for (int i = 0; i < VEC; i++)
            v[i] = v[i] * r * (one + g[i]);
        store_some(y + t * C + c, v, C - c, wide);
    }
}

cudaError_t bsk_cuda_rmsnorm(bsk_cuda *x, const bsk_call *c)
{
    int64_t C = c->n[1];
    return by_type(x, c->dtype, [&](auto t) {
        using T = decltype(t);
        return issue_rows(x, rmsnorm_kernel<T>, c->n[0], C, (const T *)c->p[0], (const T *)c->p[1],
                          (T *)c->p[2], (float *)c->p[3], c->n[0], C, c->n[2] ? 1.0f : 0.0f,
                          (float)c->f[0], rows_wide(C, c->p[0], c->p[1], c->p[2]));
    });
}

/* With g = dy * w: dx = rstd * (g - x * rstd^2 * mean(g * x)). dx may be dy. */
template <class T>
static __global__ void __launch_bounds__(ROW_THREADS)
    rmsnorm_dx_kernel(const T *x, const T *w, const float *rstd, const T *dy, T *dx, int64_t rows,
                      int64_t C, float one, bool add, bool wide)
{
    int64_t t = my_row(), limit = t < rows ? C : 0;
    float sum = 0.0f;
    x += t * C;
    dy += t * C;
    dx += t * C;
    FOR_COLUMNS(c, limit)
    {
        float v[VEC], d[VEC], g[VEC];
        load_some(v, x + c, C - c, wide);
        load_some(d, dy + c, C - c, wide);
        load_some(g, w + c, C - c, wide);
#pragma unroll
        for (int i = 0; i < VEC; i++)
            sum += d[i] * (one + g[i]) * v[i];
    }
    float mean = group_reduce(sum, op_add()) / (float)C, r = limit ? rstd[t] : 0.0f, k = mean * r * r;
    FOR_COLUMNS(c, limit)
    {
        float v[VEC], d[VEC], g[VEC], old[VEC] = {0};
        load_some(v, x + c, C - c, wide);
        load_some(d, dy + c, C - c, wide);
        load_some(g, w + c, C - c, wide);
        if (add)
            load_some(old, dx + c, C - c, wide);
#pragma unroll
        for (int i = 0; i < VEC; i++)
            v[i] = old[i] + r * (d[i] * (one + g[i]) - v[i] * k);
        store_some(dx + c, v, C - c, wide);
    }
}

template <class T> struct v_norm { /* dy * x * rstd */
    const T *x, *dy;
    const float *rstd;
    int64_t C;
    __device__ double operator()(int64_t t, int64_t c) const
    {
        return (double)(to_f32(dy[t * C + c]) * (to_f32(x[t * C + c]) * rstd[t]));
    }
};

cudaError_t bsk_cuda_colsum(bsk_cuda *x, const bsk_call *c)
{
    return by_type(x, c->dtype, [&](auto t) {
        using T = decltype(t);
        return columns(x, v_plain<T>{(const T *)c->p[0], c->n[1]}, c->p[1], c->n[0], c->n[1]);
    });
}

cudaError_t bsk_cuda_rmsnorm_bwd(bsk_cuda *x, const bsk_call *c)
{
    int64_t rows = c->n[0], C = c->n[1];
    return by_type(x, c->dtype, [&](auto tag) {
        using T = decltype(tag);
        const T *in = (const T *)c->p[0], *dy = (const T *)c->p[3];
        const float *rstd = (const float *)c->p[2];
        /* before dx, which may be written over dy */
        cudaError_t e = columns(x, v_norm<T>{in, dy, rstd, C}, c->p[5], rows, C);
        if (e != cudaSuccess)
            return e;
        return issue_rows(x, rmsnorm_dx_kernel<T>, rows, C, in, (const T *)c->p[1], rstd, dy,
                          (T *)c->p[4], rows, C, c->n[2] ? 1.0f : 0.0f, c->n[3] != 0,
                          rows_wide(C, c->p[0], c->p[1], c->p[3], c->p[4]));
    });
}
