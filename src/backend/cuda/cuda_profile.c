/* SPDX-License-Identifier: Apache-2.0 */
/*
** cuda_profile.c: times of launches by pairs of events on their stream. Pairs wait in a table until it
** is full or somebody asks; then their end is waited for and their times are added to the profile.
** Owner thread only.
*/
#include "backend/cuda/cuda_dev.h"

#include <string.h>

static cudaError_t collect(cuda_dev *d)
{
    int n = d->timers;
    d->timers = 0;
    for (int i = 0; i < n; i++) {
        float ms;
        const cuda_timer *t = &d->timer[i];
        cudaError_t e = cudaEventSynchronize(t->end);
        if (e == cudaSuccess)
            e = cudaEventElapsedTime(&ms, t->begin, t->end);
        if (e != cudaSuccess)
            return e;
        bsi_profile_add(d->profile, t->op, t->label, 1e-3 * (double)ms);
    }
    return cudaSuccess;
}

static cudaError_t open_pair(cuda_timer *t)
{
    cudaError_t e = cudaEventCreate(&t->begin);
    if (e != cudaSuccess)
        return e;
    e = cudaEventCreate(&t->end);
    if (e != cudaSuccess)
        cudaEventDestroy(t->begin);
    return e;
}

cudaError_t bsi_cuda_timer_begin(cuda_dev *d, cudaStream_t s, const char *op, const char *label)
{
    cudaError_t e = d->timers == BSI_CUDA_TIMERS ? collect(d) : cudaSuccess;
    cuda_timer *t = &d->timer[d->timers];
    if (e == cudaSuccess && d->timers == d->timers_open) {
        e = open_pair(t);
        d->timers_open += e == cudaSuccess;
    }
    if (e != cudaSuccess)
        return e;
    t->op = op;
    memccpy(t->label, label, 0, sizeof t->label - 1);
    return cudaEventRecord(t->begin, s);
}

cudaError_t bsi_cuda_timer_end(cuda_dev *d, cudaStream_t s)
{
    return cudaEventRecord(d->timer[d->timers++].end, s);
}

bs_status bsi_cuda_profile(bs_dev *dev, bsi_profile *into)
{
    cuda_dev *d = dev->impl;
    cudaError_t e = collect(d);
    d->profile = NULL;
    if (e != cudaSuccess)
        return bsi_cuda_fail(BS_DEVICE, e, "launches cannot be timed");
    if (into && !d->timer) {
        d->timer = bsi_alloc(BS_TAG_MISC, BSI_CUDA_TIMERS * sizeof *d->timer);
        if (!d->timer)
            return BS_NOMEM;
    }
    d->profile = into;
    return BS_OK;
}

void bsi_cuda_profile_close(cuda_dev *d)
{
    for (int i = 0; i < d->timers_open; i++) {
        cudaEventDestroy(d->timer[i].begin);
        cudaEventDestroy(d->timer[i].end);
    }
    cudaGetLastError(); /* of a lost device */
    bsi_free(d->timer);
}
