/* SPDX-License-Identifier: Apache-2.0 */
/* cuda.h: what the rest of libbs sees of the cuda device: nothing of CUDA. Defined where
   BS_HAVE_CUDA. */
#ifndef BS_CUDA_H
#define BS_CUDA_H

#include "dev/dev.h"

extern const bsi_dev_ops bsi_dev_cuda;

/* The fields of bs_gpu that are the CUDA runtime's, and the GPU's PCI address ("": none). Opens no
   device. */
void bsi_cuda_gpu(bs_gpu *out, char bus[32]);

#endif
