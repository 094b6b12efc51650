/* SPDX-License-Identifier: Apache-2.0 */
/*
** elements.cuh: element types, their conversion to f32, and moving 8 elements at a time: 16 bytes of bf16
** in one access, two of f32.
*/
#ifndef BSK_CUDA_ELEMENTS_CUH
#define BSK_CUDA_ELEMENTS_CUH

#include "kernels.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

typedef __nv_bfloat16 bf16;

enum { VEC = 8 }; /* elements that a thread moves at a time */

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
template <class F> static cudaError_t by_type(bsk_cuda *cuda, int dtype, F fn)
{
    if (dtype == BS_DTYPE_F32)
        return fn(float());
    if (dtype == BS_DTYPE_BF16)
        return fn(bf16());
    cuda->note = "kernels compute with f32 and bf16 operands only";
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

template <class T>
static __device__ inline void store_some(T *p, const stored8<T> &s, int64_t left, bool wide)
{
    if (wide && left >= VEC) {
#pragma unroll
        for (int i = 0; i < (int)sizeof s / 16; i++)
            reinterpret_cast<uint4 *>(p)[i] = reinterpret_cast<const uint4 *>(s.v)[i];
        return;
    }
#pragma unroll
    for (int i = 0; i < VEC; i++)
        if (i < left)
            p[i] = s.v[i];
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

#endif
