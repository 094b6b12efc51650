/* SPDX-License-Identifier: Apache-2.0 */
/*
** rmsnorm.cu: RMSNorm (Zhang & Sennrich 2019), y = x * rstd * w with rstd = 1/sqrt(mean(x^2) + eps), w the
** weight or 1 + weight. A row belongs to a group of threads; its sums are f32 in one order: a thread's own
** columns first, then the threads of the group.
**
** These kernels do little but move memory, so each row is to be read once: a thread keeps what it has of
** the row in registers, as stored, while the group's sum is made.
*/
#include "column_sums.cuh"
#include "row_groups.cuh"

#include <type_traits>

/* A thread holds N vectors of its row from the sum to the result; of a longer row, parts of that many are
   read again. */
template <int N> static __device__ inline int64_t part_of_row()
{
    return (int64_t)N * blockDim.x * VEC;
}

static __device__ inline int64_t column(int64_t from, int k)
{
    return from + ((int64_t)k * blockDim.x + threadIdx.x) * VEC;
}

/* Runs body for vector k, columns [c, c+8), of a thread in the part of the row that begins at `from`. Unrolled, as
   an array that is indexed by a variable would lie in memory. */
#define FOR_HELD(k, c, from, limit)                                                                    \
    _Pragma("unroll") for (int k = 0; k < N; k++) if (int64_t c = column(from, k); c < (limit))

/* A group without a row has limit 0 and still takes part in the reduction, whose barriers are the block's.
   weight_offset is 1 where the weight is counted from 1, else 0. */
template <class T, int N, bool wide>
static __global__ void __launch_bounds__(ROW_THREADS)
    rmsnorm_kernel(const T *x, const T *w, T *y, float *rstd, int64_t rows, int64_t C,
                   float weight_offset, float eps)
{
    int64_t t = my_row(), limit = t < rows ? C : 0;
    float sum = 0.0f;
    stored8<T> v[N];
    x += t * C;
    y += t * C;
    for (int64_t from = 0; from < limit; from += part_of_row<N>()) {
        FOR_HELD(k, c, from, limit) /* all loads of a part ahead of the first use of one */
        {
            load_some(v[k], x + c, C - c, wide);
        }
        FOR_HELD(k, c, from, limit)
        {
#pragma unroll
            for (int i = 0; i < VEC; i++)
                sum += to_f32(v[k].v[i]) * to_f32(v[k].v[i]);
        }
    }
    float r = 1.0f / sqrtf(group_reduce(sum, op_add()) / (float)C + eps);
    if (limit && threadIdx.x == 0)
        rstd[t] = r;
    for (int64_t from = 0; from < limit; from += part_of_row<N>()) {
        FOR_HELD(k, c, from, limit)
        {
            float g[VEC];
            if (limit > part_of_row<N>()) /* v holds the last part only */
                load_some(v[k], x + c, C - c, wide);
            load_some(g, w + c, C - c, wide);
#pragma unroll
            for (int i = 0; i < VEC; i++)
                g[i] = to_f32(v[k].v[i]) * r * (weight_offset + g[i]);
            store_some(y + c, g, C - c, wide);
        }
    }
}

/* fn(n) with the number of vectors that a thread holds, as a constant: two are the fastest while a block holds
   its row with them. */
template <class F> static cudaError_t by_length(int64_t C, F fn)
{
    if (C <= 2 * ROW_THREADS * VEC)
        return fn(std::integral_constant<int, 2>());
    return fn(std::integral_constant<int, 4>());
}

cudaError_t bsk_cuda_rmsnorm(bsk_cuda *cuda, const bsk_call *c)
{
    int64_t C = c->n[1];
    return by_type(cuda, c->dtype, [&](auto t) {
        using T = decltype(t);
        return by_length(C, [&](auto n) {
            constexpr int N = decltype(n)::value;
            auto kernel = rows_wide(C, c->p[0], c->p[1], c->p[2]) ? rmsnorm_kernel<T, N, true>
                                                                  : rmsnorm_kernel<T, N, false>;
            return issue_rows<N>(cuda, kernel, c->n[0], C, (const T *)c->p[0], (const T *)c->p[1],
                                 (T *)c->p[2], (float *)c->p[3], c->n[0], C, c->n[2] ? 1.0f : 0.0f,
                                 (float)c->f[0]);
        });
    });
}

/* With g = dy * w: dx = rstd * (g - x * rstd^2 * mean(g * x)), which is the gradient of y = x * rstd * w as rstd
   depends on every x of the row. dx may be dy: a thread writes only what it alone has read. */
template <class T, int N, bool wide>
static __global__ void __launch_bounds__(ROW_THREADS)
    rmsnorm_dx_kernel(const T *x, const T *w, const float *rstd, const T *dy, T *dx, int64_t rows,
                      int64_t C, float weight_offset, bool add)
{
    int64_t t = my_row(), limit = t < rows ? C : 0;
    float sum = 0.0f;
    stored8<T> v[N], d[N];
    x += t * C;
    dy += t * C;
    dx += t * C;
    for (int64_t from = 0; from < limit; from += part_of_row<N>()) {
        FOR_HELD(k, c, from, limit)
        {
            load_some(v[k], x + c, C - c, wide);
            load_some(d[k], dy + c, C - c, wide);
        }
        FOR_HELD(k, c, from, limit)
        {
            float g[VEC];
            load_some(g, w + c, C - c, wide);
#pragma unroll
            for (int i = 0; i < VEC; i++)
                sum += to_f32(d[k].v[i]) * (weight_offset + g[i]) * to_f32(v[k].v[i]);
        }
    }
    float mean = group_reduce(sum, op_add()) / (float)C, r = limit ? rstd[t] : 0.0f,
          factor = mean * r * r;
    for (int64_t from = 0; from < limit; from += part_of_row<N>()) {
        FOR_HELD(k, c, from, limit)
        {
            float old[VEC] = {0}, g[VEC];
            if (limit > part_of_row<N>()) {
                load_some(v[k], x + c, C - c, wide);
                load_some(d[k], dy + c, C - c, wide);
            }
            load_some(g, w + c, C - c, wide);
            if (add)
                load_some(old, dx + c, C - c, wide);
#pragma unroll
            for (int i = 0; i < VEC; i++)
                old[i] += r * (to_f32(d[k].v[i]) * (weight_offset + g[i]) - to_f32(v[k].v[i]) * factor);
            store_some(dx + c, old, C - c, wide);
        }
    }
}

/* The term of a row in the gradient of w. */
template <class T> struct dw_term { /* dy * x * rstd */
    const T *x, *dy;
    const float *rstd;
    int64_t C;
    __device__ double operator()(int64_t t, int64_t c) const
    {
        return (double)(to_f32(dy[t * C + c]) * (to_f32(x[t * C + c]) * rstd[t]));
    }
};

cudaError_t bsk_cuda_rmsnorm_bwd(bsk_cuda *cuda, const bsk_call *c)
{
    int64_t rows = c->n[0], C = c->n[1];
    return by_type(cuda, c->dtype, [&](auto tag) {
        using T = decltype(tag);
        const T *in = (const T *)c->p[0], *dy = (const T *)c->p[3];
        const float *rstd = (const float *)c->p[2];
        /* the weight's gradient reads dy, and dx may be written over it */
        cudaError_t e = column_sums(cuda, dw_term<T>{in, dy, rstd, C}, c->p[5], rows, C);
        if (e != cudaSuccess)
            return e;
        return by_length(C, [&](auto n) {
            constexpr int N = decltype(n)::value;
            auto kernel = rows_wide(C, c->p[0], c->p[1], c->p[3], c->p[4])
                              ? rmsnorm_dx_kernel<T, N, true>
                              : rmsnorm_dx_kernel<T, N, false>;
            return issue_rows<N>(cuda, kernel, rows, C, in, (const T *)c->p[1], rstd, dy, (T *)c->p[4],
                                 rows, C, c->n[2] ? 1.0f : 0.0f, c->n[3] != 0);
        });
    });
}
