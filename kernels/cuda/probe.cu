/* SPDX-License-Identifier: Apache-2.0 */
/*
** probe.cu: a kernel that does nothing for a while: whether kernels run here at all, and the random
** delays of tests. Called by the owner thread.
*/
#include "kernels.h"

static __global__ void delay_kernel(uint64_t nanoseconds)
{
    uint64_t start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    while (now - start < nanoseconds);
}

cudaError_t bsk_cuda_probe(void)
{
    cudaFuncAttributes a;
    return cudaFuncGetAttributes(&a, delay_kernel);
}

void bsk_cuda_delay(cudaStream_t s, uint64_t nanoseconds)
{
    delay_kernel<<<1, 1, 0, s>>>(nanoseconds); /* a failure is found by the operation that follows */
}
