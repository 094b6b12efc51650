/* SPDX-License-Identifier: Apache-2.0 */
/*
** gpu.c: what there is to say about the machine's GPU, in every build: from the CUDA runtime where
** it is built in, and from NVML where the driver has it. Opens no device. Any thread.
*/
#include "backend/cuda/cuda.h"
#include "backend/nvml/nvml.h"

#include <string.h>

void bs_gpu_get(bs_gpu *out)
{
    char bus[32] = "";
    bsi_nvml n;
    memset(out, 0, sizeof *out);
#if BS_HAVE_CUDA
    bsi_cuda_gpu(out, bus);
#endif
    if (!bsi_nvml_open(NULL, bus, &n))
        return;
    bsi_nvml_read(&n, out);
    bsi_nvml_close(&n);
    if (out->own_bytes)
        out->held_bytes = out->own_bytes;
    else if (out->context_bytes && out->used_bytes > out->before_bytes)
        out->held_bytes = out->used_bytes - out->before_bytes;
}
