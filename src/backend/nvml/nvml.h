/* SPDX-License-Identifier: Apache-2.0 */
/*
** nvml.h: what NVML, the driver's management library, knows about one GPU. It is loaded when it is
** asked, in builds with and without CUDA, and nothing depends on its being there.
*/
#ifndef BS_NVML_H
#define BS_NVML_H

#include "bs/dev.h"

typedef struct bsi_nvml {
    void *library, *gpu;
} bsi_nvml;

/* library: NULL for the driver's own. bus: the GPU's PCI address, "" for the first one. False: no
   library, no driver, no such GPU; then there is nothing to close. */
bool bsi_nvml_open(const char *library, const char *bus, bsi_nvml *out);
void bsi_nvml_close(bsi_nvml *n);
/* Bytes of the GPU's memory that are in use, by anybody. */
bool bsi_nvml_used(const bsi_nvml *n, uint64_t *out);
/* Fills the fields of out that bs.h says are NVML's; what it does not tell stays 0. */
void bsi_nvml_read(const bsi_nvml *n, bs_gpu *out);

#endif
