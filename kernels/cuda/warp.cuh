/* SPDX-License-Identifier: Apache-2.0 */
/*
** warp.cuh: sums and maxima over the lanes of a warp, the same bits in every lane: a butterfly adds the same
** pairs on both sides. All 32 lanes call.
*/
#ifndef BSK_CUDA_WARP_CUH
#define BSK_CUDA_WARP_CUH

template <class V> static __device__ inline V warp_sum(V v)
{
    for (int d = 16; d > 0; d /= 2)
        v += __shfl_xor_sync(0xFFFFFFFFu, v, d);
    return v;
}

static __device__ inline float warp_max(float v)
{
    for (int d = 16; d > 0; d /= 2)
        v = fmaxf(v, __shfl_xor_sync(0xFFFFFFFFu, v, d));
    return v;
}

#endif
