/* SPDX-License-Identifier: Apache-2.0 */
/* bs/dev.h: devices, reports on the GPU, times of launches. Conventions: bs.h. */
#ifndef BS_PUBLIC_DEV_H
#define BS_PUBLIC_DEV_H

#include "bs/base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- device ---------------------------------------------------------------------------------- */

typedef struct bs_dev bs_dev;

typedef struct bs_dev_cfg {
    int threads; /* cpu: compute threads; 0 = online cores */
    /* For tests: */
    unsigned jitter_us; /* a random delay of up to this before each operation */
    uint64_t jitter_seed;
    const char *drop_wait;  /* check: the queue_wait site that is left out */
    uint64_t fail_call;     /* the n-th operation fails while it runs (1-based; 0: none) */
    uint64_t fail_pin;      /* page-locks are refused from the n-th on (1-based; 0: none) */
    size_t device_left;     /* device memory beyond so many bytes turns out to be taken (0: none) */
    size_t workspace_bytes; /* props.workspace_bytes are so many more */
} bs_dev_cfg;

typedef struct bs_dev_props {
    char name[64];          /* "cpu", "meta", "cuda", "check:cpu", ... */
    bool executes;          /* false: meta */
    bool bf16;              /* engines can compute in bf16 */
    size_t alignment;       /* of every device address handed out */
    size_t total_bytes;     /* of memory; cuda: what is free now */
    size_t workspace_bytes; /* of an engine's pool that its kernels need for themselves; 0: none */
    size_t unpinned_bytes;  /* of pinned memory in use, what could not be page-locked */
} bs_dev_props;

/* spec: "cpu", "meta", "cuda" (of builds that have it: the first GPU of CUDA_VISIBLE_DEVICES), or one
   of them behind "check:". */
BS_API BS_NODISCARD bs_status bs_dev_open(const char *spec, const bs_dev_cfg *cfg, bs_dev **out);
BS_API void bs_dev_close(bs_dev *dev);
BS_API void bs_dev_props_get(const bs_dev *dev, bs_dev_props *out);
/* check devices: number of violations found so far and their text, one per line, each naming the
   queue_wait site that would have ordered the two operations where it is known. 0 elsewhere. */
BS_API int bs_dev_violations(const bs_dev *dev, const char **text);

/* The GPU that "cuda" opens, for reports. 0 or "": not known. */
typedef struct bs_gpu {
    bool built;                    /* this build has the device "cuda"; then also: */
    char compiled[64];             /* architectures of its kernels, "sm_80 sm_90" */
    int cuda_runtime, cuda_driver; /* 13000 is 13.0; what the driver supports, 0: no driver */
    char name[96];                 /* of the GPU, with or without NVML */
    int major, minor;              /* compute capability */
    char blas[256];                /* file of the cuBLAS that is found */
    uint64_t before_bytes;         /* of its memory, in use before this process opened it first */
    uint64_t context_bytes;        /* taken by that: context, kernels, cuBLAS */

    bool nvml; /* NVML was found; then also: */
    char driver[32];
    uint64_t total_bytes, used_bytes, free_bytes; /* the first one also without NVML */
    int processes;                                /* that compute on it */
    uint64_t own_bytes;                           /* used by this one, where NVML knows it by its id */
    uint64_t held_bytes; /* own_bytes, else what use has grown by since before_bytes */
    double power_w, power_limit_w;
    int sm_mhz, sm_most_mhz, memory_mhz;
    int pcie_generation, pcie_width; /* of the link, now: an idle GPU may lower the first */
} bs_gpu;

BS_API void bs_gpu_get(bs_gpu *out);

typedef struct bs_profile_row { /* launches of one kernel under one label */
    const char *op, *label;     /* the kernel, and what it was launched for */
    uint64_t calls;
    double seconds; /* that it ran for on the device */
} bs_profile_row;

/* Time every launch from here on (on: forgets earlier times) or no longer. Timing costs a little: it is
   for finding where a step's time goes, not for the time of a step. A device that does not execute has
   no rows. */
BS_API BS_NODISCARD bs_status bs_dev_profile(bs_dev *dev, bool on);
/* What was timed so far, longest first. Waits for the launches that are timed. *rows is the device's,
   until its next call. */
BS_API BS_NODISCARD bs_status bs_dev_profile_read(bs_dev *dev, const bs_profile_row **rows, int *n);

/* ---- what there is --------------------------------------------------------------------------- */

/* Optional parts: what this build has, and of OpenBLAS whether this process has found it. */
typedef struct bs_features {
    bool io_uring, openblas, cuda, pcre2, utf8proc;
} bs_features;

BS_API void bs_features_get(bs_features *out);
/* The same as text, a line each: "io_uring: yes (liburing)". Static storage. */
BS_API const char *bs_build_info(void);

#ifdef __cplusplus
}
#endif

#endif
