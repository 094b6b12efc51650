/* SPDX-License-Identifier: Apache-2.0 */
/*
** launch.cuh: how a kernel is launched, and how it names the shared memory whose size the launch gives. The
** tests define BSK_ON_CPU and both for the CPU.
*/
#ifndef BSK_CUDA_LAUNCH_CUH
#define BSK_CUDA_LAUNCH_CUH

#include "kernels.h"

#ifndef BSK_ON_CPU
#define DYNAMIC_SHARED(T, name) extern __shared__ T name[]

/* bytes: of shared memory that the kernel names by DYNAMIC_SHARED */
template <class... P, class... A>
static cudaError_t issue(bsk_cuda *cuda, void (*kernel)(P...), dim3 grid, dim3 block, size_t bytes,
                         A... a)
{
    if (bytes > 48 << 10) { /* more than every kernel may have */
        cudaError_t e = cudaFuncSetAttribute((const void *)kernel,
                                             cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
        if (e != cudaSuccess)
            return e;
    }
    kernel<<<grid, block, bytes, cuda->stream>>>(a...);
    return cudaGetLastError();
}
#endif

#endif
