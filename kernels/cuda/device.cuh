/* SPDX-License-Identifier: Apache-2.0 */
/*
** device.cuh: what the kernels share: element types, moving 8 elements at a time, maps over flat
** arrays, groups of threads that own a row, sums and maxima of a group in a fixed order.
**
** A row of C elements belongs to blockDim.x threads (a power of two); a block has ROW_THREADS threads
** and so one or more rows. Thread x handles elements [8x, 8x+8), then those 8 * blockDim.x further on.
*/
#ifndef BSK_CUDA_DEVICE_CUH
#define BSK_CUDA_DEVICE_CUH

#include "kernels.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

typedef __nv_bfloat16 bf16;

/* ---- launches ---- */

/* bytes: of shared memory that the kernel names by DYNAMIC_SHARED. The tests have another version of both,
   which runs kernels on the CPU. */
#ifndef BSK_ON_CPU
#define DYNAMIC_SHARED(T, name) extern __shared__ T name[]

template <class... P, class... A>
static cudaError_t issue(bsk_cuda *x, void (*kernel)(P...), dim3 grid, dim3 block, size_t bytes, A... a)
{
    if (bytes > 48 << 10) { /* more than every kernel may have */
        cudaError_t e = cudaFuncSetAttribute((const void *)kernel,
                                             cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
        if (e != cudaSuccess)
            return e;
    }
    kernel<<<grid, block, bytes, x->stream>>>(a...);
    return cudaGetLastError();
}
#endif

enum { VEC = 8, MAP_THREADS = 256, ROW_THREADS = 256 };

/* ---- element types ---- */

static __device__ inline float to_f32(float v)
{
    return v;
}

static __device__ inline float to_f32(bf16 v)
{
    return __bfloat162float(v);
}

static __device__ inline float to_f32(__half v)
{
    return __half2float(v);
}

static __device__ inline void from_f32(float *to, float v)
{
    *to = v;
}

static __device__ inline void from_f32(bf16 *to, float v)
{
    *to = __float2bfloat16_rn(v);
}

/* fn(T()) with the type of a dtype; what has no kernel is refused. */
template <class F> static cudaError_t by_type(bsk_cuda *x, int dtype, F fn)
{
    if (dtype == BS_DTYPE_F32)
        return fn(float());
    if (dtype == BS_DTYPE_BF16)
        return fn(bf16());
    x->note = "kernels compute with f32 and bf16 operands only";
    return cudaErrorNotSupported;
}

/* ---- 8 elements ---- */

template <class T> static __device__ inline void load8(float (&v)[VEC], const T *p)
{
    alignas(16) T t[VEC];
#pragma unroll
    for (int i = 0; i < (int)sizeof t / 16; i++)
        reinterpret_cast<uint4 *>(t)[i] = reinterpret_cast<const uint4 *>(p)[i];
#pragma unroll
    for (int i = 0; i < VEC; i++)
        v[i] = to_f32(t[i]);
}

template <class T> static __device__ inline void store8(T *p, const float (&v)[VEC])
{
    alignas(16) T t[VEC];
#pragma unroll
    for (int i = 0; i < VEC; i++)
        from_f32(&t[i], v[i]);
#pragma unroll
    for (int i = 0; i < (int)sizeof t / 16; i++)
        reinterpret_cast<uint4 *>(p)[i] = reinterpret_cast<const uint4 *>(t)[i];
}

/* The first min(8, left) elements, the others 0; wide: p and all its neighbours are 16-byte aligned. */
template <class T>
static __device__ inline void load_some(float (&v)[VEC], const T *p, int64_t left, bool wide)
{
    if (wide && left >= VEC) {
        load8(v, p);
        return;
    }
#pragma unroll
    for (int i = 0; i < VEC; i++)
        v[i] = i < left ? to_f32(p[i]) : 0.0f;
}

/* The same as they are stored, which takes fewer registers to hold. */
template <class T> struct alignas(16) stored8 {
    T v[VEC];
};

template <class T>
static __device__ inline void load_some(stored8<T> &s, const T *p, int64_t left, bool wide)
{
    if (wide && left >= VEC) {
#pragma unroll
        for (int i = 0; i < (int)sizeof s / 16; i++)
            reinterpret_cast<uint4 *>(s.v)[i] = reinterpret_cast<const uint4 *>(p)[i];
        return;
    }
#pragma unroll
    for (int i = 0; i < VEC; i++) {
        if (i < left)
            s.v[i] = p[i];
        else
            from_f32(&s.v[i], 0.0f);
    }
}

template <class T>
static __device__ inline void store_some(T *p, const float (&v)[VEC], int64_t left, bool wide)
{
    if (wide && left >= VEC) {
        store8(p, v);
        return;
    }
#pragma unroll
    for (int i = 0; i < VEC; i++)
        if (i < left)
            from_f32(&p[i], v[i]);
}

static inline bool aligned16(const void *p)
{
    return ((uintptr_t)p & 15) == 0; /* NULL is: it is not read */
}

/* Rows of C elements in each of these arrays may be moved 8 elements at a time. */
template <class... P> static bool rows_wide(int64_t C, P... p)
{
    bool ok = C % VEC == 0;
    for (const void *q : {(const void *)p...})
        ok = ok && aligned16(q);
    return ok;
}

/* ---- maps: y[k][i] = f(x[0][i], x[1][i], ...) ---- */

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

/* p: the inputs, then the outputs. */
template <class A, class O, class F> static cudaError_t map(bsk_cuda *x, int64_t n, void *const *p, F f)
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
    if (n <= 0)
        return cudaSuccess;
    int64_t blocks = (n + MAP_THREADS * VEC - 1) / (MAP_THREADS * VEC);
    if (blocks > INT32_MAX)
        return cudaErrorInvalidConfiguration;
    return issue(x, map_kernel<F, A, O>, (unsigned)blocks, MAP_THREADS, 0, a, f);
}

/* ---- rows ---- */

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
static cudaError_t issue_rows(bsk_cuda *x, void (*kernel)(P...), int64_t T, int64_t C, A... a)
{
    row_shape s = rows_of(T, C, VECTORS);
    return s.grid ? issue(x, kernel, s.grid, s.block, 0, a...) : s.status;
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

#endif
