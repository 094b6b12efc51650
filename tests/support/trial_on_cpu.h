/* SPDX-License-Identifier: Apache-2.0 */
/*
** trial_on_cpu.h: kernel trials with the source of the cuda kernels compiled for the CPU (cuda_on_cpu.h), by the
** table of the cuda device.
*/
#ifndef TRIAL_ON_CPU_H
#define TRIAL_ON_CPU_H

#include "trial.h"

#include "cuda/kernels.h"

enum { SHORT = 1 }; /* every thread takes turns: trials must be small */

static bs_status open_device(const char *spec)
{
    (void)spec;
    return BS_OK;
}

static void close_device(void) {}

static bool run_device(const trial *t, const layout *l, unsigned char *image)
{
    static double partials[BSK_CUDA_PARTIALS];
    bsk_cuda cuda = {.partials = partials};
    bsk_call call = {.dtype = (int)t->dtype, .out = (int)t->out};
    unsigned char *memory = aligned_alloc(256, bsi_round_up(l->bytes, 256));
    if (!memory) {
        printf("FATAL no memory\n");
        exit(1);
    }
    memcpy(memory, image, l->bytes);
    for (int i = 0; i < t->count; i++)
        call.p[i] = t->p[i].n ? memory + l->at[i] : NULL;
    memcpy(call.n, t->n, sizeof call.n);
    memcpy(call.f, t->f, sizeof call.f);
    cudaError_t e = bsk_cuda_table[t->op].fn(&cuda, &call);
    if (e != cudaSuccess && e != cudaErrorNotSupported) {
        printf("FATAL %s: error %d\n", t->name, (int)e);
        exit(1);
    }
    memcpy(image, memory, l->bytes);
    free(memory);
    return e == cudaSuccess;
}

#endif
