/* SPDX-License-Identifier: Apache-2.0 */
/*
** layernorm.cu: layer norm with weight and bias, y = (x - mean) * r * w + b with r = 1/sqrt(var + eps), the
** variance of the population (Ba et al. 2016). stats keeps (mean, r) of each row. A row belongs to a group of
** threads, sums of it are f32 in one order. Gradients of w and b are column sums (column_sums.cuh).
**
** The variance is the mean square of x - mean, which takes a second pass over the row: mean(x^2) - mean^2 would
** cancel where the mean is large. The passes after the first find the row in the caches.
*/
#include "column_sums.cuh"
#include "row_groups.cuh"

/* A group without a row has limit 0 and still takes part in the reductions, whose barriers are the block's. */
template <class T>
static __global__ void __launch_bounds__(ROW_THREADS)
    layernorm_kernel(const T *x, const T *w, const T *b, T *y, float *stats, int64_t rows, int64_t C,
                     float eps, bool wide)
{
    int64_t t = my_row(), limit = t < rows ? C : 0;
    float sum = 0.0f, square = 0.0f;
    x += t * C;
    FOR_COLUMNS(c, limit)
    {
        float v[VEC];
        load_some(v, x + c, C - c, wide);
#pragma unroll
        for (int i = 0; i < VEC; i++)
            sum += v[i];
    }
    float mean = group_reduce(sum, op_add()) / (float)C;
    FOR_COLUMNS(c, limit)
    {
        float v[VEC];
        load_some(v, x + c, C - c, wide);
#pragma unroll
        for (int i = 0; i < VEC; i++)
            if (c + i < C) /* past the end v is 0, not the mean, and would add mean^2 */
                square += (v[i] - mean) * (v[i] - mean);
    }
    float r = 1.0f / sqrtf(group_reduce(square, op_add()) / (float)C + eps);
    if (limit && threadIdx.x == 0) {
        stats[2 * t] = mean;
        stats[2 * t + 1] = r;
    }
    FOR_COLUMNS(c, limit)
    {
        float v[VEC], weight[VEC], bias[VEC];
        load_some(v, x + c, C - c, wide);
        load_some(weight, w + c, C - c, wide);
        load_some(bias, b + c, C - c, wide);
#pragma unroll
        for (int i = 0; i < VEC; i++)
            v[i] = (v[i] - mean) * r * weight[i] + bias[i];
        store_some(y + t * C + c, v, C - c, wide);
    }
}

cudaError_t bsk_cuda_layernorm(bsk_cuda *cuda, const bsk_call *c)
{
    int64_t C = c->n[1];
    return by_type(cuda, c->dtype, [&](auto t) {
        using T = decltype(t);
        return issue_rows(cuda, layernorm_kernel<T>, c->n[0], C, (const T *)c->p[0], (const T *)c->p[1],
                          (const T *)c->p[2], (T *)c->p[3], (float *)c->p[4], c->n[0], C,
                          (float)c->f[0], rows_wide(C, c->p[0], c->p[1], c->p[2], c->p[3]));
    });
}

/* With g = dy * w and n = (x - mean) * r: dx = r * (g - mean(g) - n * mean(g * n)); the two terms take
   out of g what a shift and a scaling of the whole row would change, because the norm undoes both. dx may be dy: a
   thread writes only what it alone has read. */
template <class T>
static __global__ void __launch_bounds__(ROW_THREADS)
    layernorm_dx_kernel(const T *x, const T *w, const float *stats, const T *dy, T *dx, int64_t rows,
                        int64_t C, bool add, bool wide)
{
    int64_t t = my_row(), limit = t < rows ? C : 0;
    float mean = limit ? stats[2 * t] : 0.0f, r = limit ? stats[2 * t + 1] : 0.0f;
    float sum_g = 0.0f, sum_gn = 0.0f;
    x += t * C;
    dy += t * C;
    dx += t * C;
    FOR_COLUMNS(c, limit)
    {
        float v[VEC], d[VEC], weight[VEC];
        load_some(v, x + c, C - c, wide);
        load_some(d, dy + c, C - c, wide);
        load_some(weight, w + c, C - c, wide);
#pragma unroll
        for (int i = 0; i < VEC; i++) { /* past the end d is 0, and so is what it adds */
            sum_g += d[i] * weight[i];
            sum_gn += d[i] * weight[i] * (v[i] - mean) * r;
        }
    }
    float mean_g = group_reduce(sum_g, op_add()) / (float)C,
          mean_gn = group_reduce(sum_gn, op_add()) / (float)C;
    FOR_COLUMNS(c, limit)
    {
        float v[VEC], d[VEC], weight[VEC], old[VEC] = {0};
        load_some(v, x + c, C - c, wide);
        load_some(d, dy + c, C - c, wide);
        load_some(weight, w + c, C - c, wide);
        if (add)
            load_some(old, dx + c, C - c, wide);
#pragma unroll
        for (int i = 0; i < VEC; i++)
            v[i] = old[i] + r * (d[i] * weight[i] - mean_g - (v[i] - mean) * r * mean_gn);
        store_some(dx + c, v, C - c, wide);
    }
}

/* The term of a row in the gradient of w. */
template <class T> struct dw_term { /* dy * n */
    const T *x, *dy;
    const float *stats;
    int64_t C;
    __device__ double operator()(int64_t t, int64_t c) const
    {
        return (double)(to_f32(dy[t * C + c]) *
                        ((to_f32(x[t * C + c]) - stats[2 * t]) * stats[2 * t + 1]));
    }
};

cudaError_t bsk_cuda_layernorm_bwd(bsk_cuda *cuda, const bsk_call *c)
{
    int64_t rows = c->n[0], C = c->n[1];
    return by_type(cuda, c->dtype, [&](auto tag) {
        using T = decltype(tag);
        const T *in = (const T *)c->p[0], *dy = (const T *)c->p[3];
        const float *stats = (const float *)c->p[2];
        /* gradients of w and b read dy, and dx may be written over it */
        cudaError_t e = column_sums(cuda, dw_term<T>{in, dy, stats, C}, c->p[5], rows, C);
        if (e == cudaSuccess)
            e = column_sums(cuda, element_term<T>{dy, C}, c->p[6], rows, C);
        if (e != cudaSuccess)
            return e;
        return issue_rows(cuda, layernorm_dx_kernel<T>, rows, C, in, (const T *)c->p[1], stats, dy,
                          (T *)c->p[4], rows, C, c->n[2] != 0,
                          rows_wide(C, c->p[0], c->p[1], c->p[3], c->p[4]));
    });
}
