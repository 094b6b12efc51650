/* SPDX-License-Identifier: Apache-2.0 */
/*
** cuda_dev.h: types that the files of the cuda backend share. Everything is called by the owner thread;
** threads of CUDA's own run host functions and free nothing of ours.
*/
#ifndef BS_CUDA_DEV_H
#define BS_CUDA_DEV_H

#include "backend/cuda/cuda.h"
#include "cuda/kernels.h"
#include "dev/inject.h"
#include "dev/profile.h"

#include <stdatomic.h>

/* A fill of pageable memory, which the device cannot reach: done by a host function. */
typedef struct cuda_host_fill {
    struct cuda_host_fill *next;
    void *to;
    int byte;
    size_t bytes;
    atomic_bool done; /* released by CUDA's thread; the owner frees */
} cuda_host_fill;

/* Launches between two events each, until their times are known (cuda_profile.c). */
typedef struct cuda_timer {
    cudaEvent_t begin, end;
    const char *op;
    char label[32]; /* cut off when it is longer */
} cuda_timer;

typedef struct cuda_dev {
    int ordinal;
    bsk_cublas blas;
    bsk_cuda x;         /* what launchers get */
    cudaStream_t bound; /* the stream and the workspace that the handle has, or NULL */
    void *bound_workspace;
    char last[64];         /* label of the last operation, for errors that appear later */
    cuda_host_fill *fills; /* not yet freed */
    size_t refused;        /* the smallest page-lock that was; SIZE_MAX: none. Not asked for again */
    /* injected */
    uint64_t calls, fail_call, pins, fail_pin;
    unsigned jitter_us;
    uint64_t jitter;  /* state of the random delays */
    bs_errinfo error; /* status BS_OK: none */

    bsi_profile *profile; /* NULL: launches are not timed */
    cuda_timer *timer;    /* [BSI_CUDA_TIMERS] once it has been asked for; events are kept for reuse */
    int timers, timers_open; /* pending; with events */
} cuda_dev;

enum { BSI_CUDA_TIMERS = 4096 };

typedef struct cuda_mem { /* what bsi_mem.impl is */
    void *at;
    size_t mapped; /* host kinds: bytes of the mapping */
    bool registered;
} cuda_mem;

/* cuda_open.c */
bs_status bsi_cuda_open(const bs_dev_cfg *cfg, const bsi_dev_ops *inner, bs_dev *dev);
void bsi_cuda_close(bs_dev *dev);
/* A symbol of cuBLAS, which is loaded for it; NULL: the library is not there. */
const void *bsi_cuda_find_blas(void);

/* cuda_gpu.c: note what of the GPU is in use before the first context of the process, and after it; the
   file of the cuBLAS that has been loaded. */
void bsi_cuda_note_before(const cuda_dev *d);
void bsi_cuda_note_after(const cuda_dev *d);
void bsi_cuda_note_blas(const void *function);

/* cuda_mem.c */
bs_status bsi_cuda_mem_alloc(bs_dev *dev, bsi_memkind kind, bs_tag tag, size_t bytes, bsi_mem *out);
void bsi_cuda_mem_free(bsi_mem *mem);

/* cuda_profile.c. Around a launch while d->profile is set; begin makes room first, which may wait. */
cudaError_t bsi_cuda_timer_begin(cuda_dev *d, cudaStream_t s, const char *op, const char *label);
cudaError_t bsi_cuda_timer_end(cuda_dev *d, cudaStream_t s);
bs_status bsi_cuda_profile(bs_dev *dev, bsi_profile *into);
void bsi_cuda_profile_close(cuda_dev *d);

/* "what: CUDA's name and text"; also takes the error out of CUDA's per-thread state. */
bs_status bsi_cuda_fail(bs_status st, cudaError_t e, const char *fmt, ...) BSI_PRINTF(3, 4);

#endif
