/* SPDX-License-Identifier: Apache-2.0 */
/*
** cuda_on_cpu.h: what the sources of kernels/cuda need to be compiled for the CPU, so that tests run them where
** there is no GPU: the words of CUDA C++ that the plain kernels use, and launches whose threads take turns. It
** is included before everything else of such a file. Tensor core instructions have no version here.
**
** A block's threads run one after the other, each until it waits: for its block (__syncthreads) or for its warp
** (shuffles and votes, which all 32 lanes must reach). A warp runs as far as it can before the next one, first or
** last one first at random: what a missing barrier leaves to chance comes out differently, or wrong. Blocks run
** one after the other, so memory of a block is static. Threads that wait for each other for ever end the program.
*/
#ifndef CUDA_ON_CPU_H
#define CUDA_ON_CPU_H

#define BSK_ON_CPU 1

#include <cuda_runtime_api.h>
#include <vector_functions.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>

#undef __global__
#undef __device__
#undef __shared__
#undef __launch_bounds__
#define __global__
#define __device__
#define __shared__ static
#define __launch_bounds__(...)
#define DYNAMIC_SHARED(T, name) T *name = static_cast<T *>(cpu_dynamic_shared)

using std::max;
using std::min;

extern dim3 threadIdx, blockIdx, blockDim, gridDim;
extern void *cpu_dynamic_shared;

void cpu_wait_for_block();
void cpu_wait_for_warp();
/* The lane's 8 bytes for its warp to read between two waits. */
double *cpu_lanes();
void cpu_run(dim3 grid, dim3 block, size_t bytes, const std::function<void()> &thread);

static inline void __syncthreads()
{
    cpu_wait_for_block();
}

static inline int __syncthreads_or(int v)
{
    static int any;
    any |= v;
    cpu_wait_for_block();
    int answer = any;
    cpu_wait_for_block();
    any = 0;
    cpu_wait_for_block();
    return answer;
}

static inline void __syncwarp()
{
    cpu_wait_for_warp();
}

static inline int cpu_lane()
{
    return (int)((threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) % 32);
}

/* v of another lane of the warp; a lane that is not there gives the caller's own. */
template <class V> static inline V cpu_exchange(V v, int from)
{
    static_assert(sizeof(V) <= sizeof(double), "a lane hands over 8 bytes");
    double *lanes = cpu_lanes();
    memcpy(&lanes[cpu_lane()], &v, sizeof v);
    cpu_wait_for_warp();
    if (from >= 0 && from < 32)
        memcpy(&v, &lanes[from], sizeof v);
    cpu_wait_for_warp();
    return v;
}

template <class V> static inline V __shfl_sync(unsigned, V v, int lane)
{
    return cpu_exchange(v, lane);
}

template <class V> static inline V __shfl_xor_sync(unsigned, V v, int mask)
{
    return cpu_exchange(v, cpu_lane() ^ mask);
}

template <class V> static inline V __shfl_up_sync(unsigned, V v, int by)
{
    return cpu_exchange(v, cpu_lane() - by);
}

/* fn(lane, value) of every lane of the warp, in their order */
template <class V, class F> static inline void cpu_each_lane(V v, F fn)
{
    double *lanes = cpu_lanes();
    memcpy(&lanes[cpu_lane()], &v, sizeof v);
    cpu_wait_for_warp();
    for (int lane = 0; lane < 32; lane++) {
        memcpy(&v, &lanes[lane], sizeof v);
        fn(lane, v);
    }
    cpu_wait_for_warp();
}

static inline unsigned __ballot_sync(unsigned, int v)
{
    unsigned all = 0;
    cpu_each_lane(v, [&](int lane, int other) { all |= (other ? 1u : 0u) << lane; });
    return all;
}

static inline unsigned __match_any_sync(unsigned, int v)
{
    unsigned same = 0;
    cpu_each_lane(v, [&](int lane, int other) { same |= (other == v ? 1u : 0u) << lane; });
    return same;
}

static inline unsigned __reduce_max_sync(unsigned, unsigned v)
{
    unsigned most = 0;
    cpu_each_lane(v, [&](int, unsigned other) { most = max(most, other); });
    return most;
}

static inline unsigned __reduce_min_sync(unsigned, unsigned v)
{
    unsigned least = ~0u;
    cpu_each_lane(v, [&](int, unsigned other) { least = min(least, other); });
    return least;
}

static inline int __popc(unsigned v)
{
    return __builtin_popcount(v);
}

static inline float __uint_as_float(unsigned bits)
{
    float v;
    memcpy(&v, &bits, sizeof v);
    return v;
}

static inline unsigned __float_as_uint(float v)
{
    unsigned bits;
    memcpy(&bits, &v, sizeof bits);
    return bits;
}

static inline int __any_sync(unsigned, int v)
{
    for (int by = 1; by < 32; by *= 2)
        v |= cpu_exchange(v, cpu_lane() ^ by);
    return v;
}

static inline unsigned __umulhi(unsigned a, unsigned b)
{
    return (unsigned)((unsigned long long)a * b >> 32);
}

static inline float __fdividef(float a, float b)
{
    return a / b;
}

struct bsk_cuda;

template <class... P, class... A>
static cudaError_t issue(bsk_cuda *, void (*kernel)(P...), dim3 grid, dim3 block, size_t bytes, A... a)
{
    cpu_run(grid, block, bytes, [=] { kernel(a...); });
    return cudaSuccess;
}

#endif
