/* SPDX-License-Identifier: Apache-2.0 */
/*
** packed.cu: values out of packed formats. A thread makes VEC neighbouring values, which are whole bytes of one
** group. Exact in f32 and bf16.
*/
#include "elements.cuh"
#include "launch.cuh"

enum { UNPACK_THREADS = 256, MX_GROUP = 32 };

/* e2m1: no exponent means 0 or 0.5 */
static __device__ inline float from_e2m1(uint32_t code)
{
    uint32_t size = code & 7;
    float v =
        size < 2 ? 0.5f * (float)size : __uint_as_float((126 + size / 2) << 23 | (size & 1) << 22);
    return code & 8 ? -v : v;
}

/* e8m0: 2^(e - 127), which for 0 is no normal number; 255 is NaN */
static __device__ inline float from_e8m0(uint32_t e)
{
    return __uint_as_float(e == 255 ? 0x7FC00000u : e == 0 ? 0x00400000u : e << 23);
}

template <class T>
static __global__ void __launch_bounds__(UNPACK_THREADS)
    mxfp4_kernel(const uint32_t *blocks, const uint8_t *scales, T *dst, int64_t n, bool wide)
{
    int64_t i = (int64_t)blockIdx.x * UNPACK_THREADS + threadIdx.x;
    if (i >= n / VEC)
        return;
    uint32_t codes = blocks[i];
    float scale = from_e8m0(scales[i / (MX_GROUP / VEC)]), v[VEC];
#pragma unroll
    for (int k = 0; k < VEC; k++)
        v[k] = from_e2m1(codes >> 4 * k & 15) * scale;
    store_some(dst + i * VEC, v, VEC, wide);
}

cudaError_t bsk_cuda_expand_mxfp4(bsk_cuda *cuda, const bsk_call *c)
{
    int64_t n = c->n[0], blocks = (n / VEC + UNPACK_THREADS - 1) / UNPACK_THREADS;
    if (n <= 0)
        return cudaSuccess;
    if (blocks > INT32_MAX || (uintptr_t)c->p[0] % 4)
        return cudaErrorInvalidConfiguration;
    return by_type(cuda, c->out, [&](auto t) {
        using T = decltype(t);
        return issue(cuda, mxfp4_kernel<T>, (unsigned)blocks, UNPACK_THREADS, 0,
                     (const uint32_t *)c->p[0], (const uint8_t *)c->p[1], (T *)c->p[2], n,
                     aligned16(c->p[2]));
    });
}
