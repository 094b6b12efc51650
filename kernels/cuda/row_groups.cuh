/* SPDX-License-Identifier: Apache-2.0 */
/*
** row_groups.cuh: kernels over the rows of a matrix: groups of threads that own a row, sums and maxima of a group in a
** fixed order.
**
** A row of C elements belongs to blockDim.x threads (a power of two); a block has ROW_THREADS threads
** and so one or more rows. Thread x handles elements [8x, 8x+8), then those 8 * blockDim.x further on.
*/
#ifndef BSK_CUDA_ROW_GROUPS_CUH
#define BSK_CUDA_ROW_GROUPS_CUH

#include "elements.cuh"
#include "launch.cuh"

enum { ROW_THREADS = 256 };

struct row_shape {
    dim3 block;
    unsigned grid;
    cudaError_t status; /* of a grid that is too large; grid 0: nothing to do */
};

/* vectors: of 8 elements, that a thread has of a row; only rows that are too long for a block have more. */
static inline row_shape rows_of(int64_t T, int64_t C, int vectors)
{
    row_shape s = {dim3(VEC, 1, 1), 0, cudaSuccess};
    while (s.block.x < ROW_THREADS && s.block.x * (int64_t)VEC * vectors < C)
        s.block.x *= 2;
    s.block.y = ROW_THREADS / s.block.x;
    int64_t blocks = T > 0 && C > 0 ? (T + s.block.y - 1) / s.block.y : 0;
    s.grid = blocks <= INT32_MAX ? (unsigned)blocks : 0;
    s.status = blocks <= INT32_MAX ? cudaSuccess : cudaErrorInvalidConfiguration;
    return s;
}

/* A kernel in which T rows of C elements have a group of threads each; nothing when there are none. */
template <int VECTORS = 1, class... P, class... A>
static cudaError_t issue_rows(bsk_cuda *cuda, void (*kernel)(P...), int64_t T, int64_t C, A... a)
{
    row_shape s = rows_of(T, C, VECTORS);
    return s.grid ? issue(cuda, kernel, s.grid, s.block, 0, a...) : s.status;
}

/* The row of this thread. Threads without one take part in every group_reduce. */
static __device__ inline int64_t my_row()
{
    return (int64_t)blockIdx.x * blockDim.y + threadIdx.y;
}

struct op_add {
    template <class V> __device__ V operator()(V a, V b) const { return a + b; }
};

struct op_max {
    __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

/* op over the values of a row's threads, the same bits in all of them. Every thread of the block calls.
 */
template <class V, class Op> static __device__ inline V group_reduce(V v, Op op)
{
    __shared__ V part[ROW_THREADS / 32];
    int lanes = blockDim.x;
    for (int d = min(lanes, 32) / 2; d > 0; d /= 2)
        v = op(v, __shfl_xor_sync(0xFFFFFFFFu, v, d));
    if (lanes <= 32)
        return v;
    int thread = threadIdx.y * lanes + threadIdx.x, first = threadIdx.y * (lanes / 32);
    __syncthreads(); /* the last use of part is over */
    if (thread % 32 == 0)
        part[thread / 32] = v;
    __syncthreads();
    v = part[first];
    for (int i = 1; i < lanes / 32; i++)
        v = op(v, part[first + i]);
    return v;
}

/* Runs body for each vector of 8 columns [c, c+8) of a thread. */
#define FOR_COLUMNS(c, C)                                                                              \
    for (int64_t c = (int64_t)threadIdx.x * VEC; c < (C); c += (int64_t)blockDim.x * VEC)

/* The sum of a * b over a row, in every thread of it. */
template <class T>
static __device__ inline float row_dot(const T *a, const T *b, int64_t limit, bool wide)
{
    float sum = 0.0f;
    FOR_COLUMNS(c, limit)
    {
        float u[VEC], v[VEC];
        load_some(u, a + c, limit - c, wide);
        load_some(v, b + c, limit - c, wide);
#pragma unroll
        for (int i = 0; i < VEC; i++)
            sum += u[i] * v[i];
    }
    return group_reduce(sum, op_add());
}

/* y = factor * x, the thread's columns of a row of C below `limit`: C, or 0 where the group has no row. */
template <class Y, class X>
static __device__ inline void scale_row(Y *y, const X *x, float factor, int64_t limit, int64_t C,
                                        bool wide)
{
    FOR_COLUMNS(c, limit)
    {
        float v[VEC];
        load_some(v, x + c, C - c, wide);
#pragma unroll
        for (int i = 0; i < VEC; i++)
            v[i] *= factor;
        store_some(y + c, v, C - c, wide);
    }
}

#endif
