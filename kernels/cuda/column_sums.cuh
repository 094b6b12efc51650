/* SPDX-License-Identifier: Apache-2.0 */
/*
** column_sums.cuh: sums down the columns of a matrix, for gradients of vectors. A block owns 32 columns: 32
** walkers take every 32nd row each in f64, then the first adds theirs in order.
*/
#ifndef BSK_CUDA_COLUMN_SUMS_CUH
#define BSK_CUDA_COLUMN_SUMS_CUH

#include "elements.cuh"
#include "launch.cuh"

enum { COLUMNS = 32, WALKERS = 32 };

/* sum[c] += value(t, c) over all rows t */
template <class V>
static __global__ void __launch_bounds__(COLUMNS *WALKERS)
    column_sum_kernel(V value, float *sum, int64_t rows, int64_t C)
{
    __shared__ double part[WALKERS][COLUMNS];
    int64_t c = (int64_t)blockIdx.x * COLUMNS + threadIdx.x;
    double acc = 0.0;
    if (c < C)
        for (int64_t t = threadIdx.y; t < rows; t += WALKERS)
            acc += value(t, c);
    part[threadIdx.y][threadIdx.x] = acc;
    __syncthreads();
    if (threadIdx.y != 0 || c >= C)
        return;
    for (int i = 1; i < WALKERS; i++)
        acc += part[i][threadIdx.x];
    sum[c] = (float)((double)sum[c] + acc);
}

/* Nothing is done when sum is NULL. */
template <class V>
static cudaError_t column_sums(bsk_cuda *cuda, V value, void *sum, int64_t rows, int64_t C)
{
    int64_t blocks = (C + COLUMNS - 1) / COLUMNS;
    if (!sum || rows <= 0 || blocks <= 0)
        return cudaSuccess;
    if (blocks > INT32_MAX)
        return cudaErrorInvalidConfiguration;
    return issue(cuda, column_sum_kernel<V>, (unsigned)blocks, dim3(COLUMNS, WALKERS), 0, value,
                 (float *)sum, rows, C);
}

template <class T> struct element_term { /* of x [rows,C] */
    const T *x;
    int64_t C;
    __device__ double operator()(int64_t t, int64_t c) const { return (double)to_f32(x[t * C + c]); }
};

#endif
