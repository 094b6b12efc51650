/* SPDX-License-Identifier: Apache-2.0 */
/* bs/engine.h: an engine, places in its memory, the micro-batches of a step. Conventions: bs.h. */
#ifndef BS_PUBLIC_ENGINE_H
#define BS_PUBLIC_ENGINE_H

#include "bs/dev.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- engine: a device with its queues, pool, expand region and binding ----------------------- */

typedef struct bs_engine bs_engine;

typedef struct bs_engine_cfg {
    bs_dev *dev;         /* borrowed; closed after the engine */
    size_t pool_bytes;   /* the whole device pool; 0 on a device that does not execute: unbounded */
    size_t expand_bytes; /* region for weights that are not stored in `compute`: the largest block's */
    size_t workspace_bytes; /* region for kernels: the real device's in a dry run; 0: this one's own */
    int n_blocks;           /* blocks of the manifest: size of the binding table */
    uint64_t seed;          /* of dropout */
    bs_dtype compute;       /* of activations and of weights in use: f32, or bf16 where props.bf16 */
} bs_engine_cfg;

typedef struct bs_engine_stats {
    size_t pool_bytes;  /* reserved */
    size_t fixed_bytes; /* regions taken so far */
    size_t arena_now;   /* live bytes of the arena */
    size_t arena_peak;  /* high-water offset of the arena */
    size_t peak_bytes;  /* fixed + arena_peak */
    uint64_t launches;
} bs_engine_stats;

BS_API BS_NODISCARD bs_status bs_engine_open(const bs_engine_cfg *cfg, bs_engine **out);
BS_API void bs_engine_close(bs_engine *e);
BS_API void bs_engine_stats_get(const bs_engine *e, bs_engine_stats *out);
/* Wait until everything issued has run; pumps attached streams; BS_CANCELLED or BS_DEVICE possible. */
BS_API BS_NODISCARD bs_status bs_engine_wait_all(bs_engine *e);
/* The same for the ops alone; blocks that are on their way stay so. */
BS_API BS_NODISCARD bs_status bs_engine_wait(bs_engine *e);
/* After this no region can be added and the arena, which is what the regions leave, starts. */
BS_API BS_NODISCARD bs_status bs_engine_seal(bs_engine *e);

/* ---- places: how stores, parameters and tensors hand bytes to each other --------------------- */

/* A place in device memory that holds rows of channels: how stores, parameters and tensors hand data to
   each other. Plain data; valid as long as its owner says. at == NULL: nothing. */
typedef struct bs_place {
    void *mem; /* opaque */
    size_t off;
    bs_dtype dtype;
    int64_t rows, capacity, channels;
} bs_place;
/* A trainable parameter as ops see it: its value and its gradient accumulator. */
typedef struct bs_param_ref {
    bs_place value; /* in the compute dtype; mem NULL: the value is the block's own tensor */
    bs_place grad;  /* f32; mem NULL: frozen */
    const char *name;
} bs_param_ref;

/* ---- micro-batches of a step ----------------------------------------------------------------- */

typedef struct bs_batch bs_batch;
typedef struct bs_batch_cfg {
    int micros;     /* micro-batches of a step at most */
    int64_t tokens; /* capacity of one micro-batch */
    int64_t rows;   /* rows (sequences) of one micro-batch at most */
} bs_batch_cfg;
typedef struct bs_micro {
    int64_t n_rows;
    const int64_t *row_len; /* [n_rows] tokens of each row */
    const int64_t *ids;     /* [sum row_len] token ids */
    const int64_t *labels;  /* [sum row_len] unshifted: the label of token t trains position t-1 of
                                 the same row; -100 = no loss; NULL: none */
    const int64_t *row_id;  /* [n_rows] identity of each row (dropout, cache); NULL: 0,1,.. */
    const int64_t *start;   /* [n_rows] position of each row's first token; NULL: 0 */
} bs_micro;

BS_API BS_NODISCARD bs_status bs_batch_open(bs_engine *e, const bs_batch_cfg *cfg, bs_batch **out);
BS_API void bs_batch_close(bs_batch *b);
BS_API BS_NODISCARD bs_status bs_batch_set(bs_batch *b, int micro, const bs_micro *data);
/* Number of micro-batches that the coming step uses (<= micros). */
BS_API BS_NODISCARD bs_status bs_batch_begin(bs_batch *b, int micros);
BS_API int64_t bs_batch_tokens(const bs_batch *b, int micro);
BS_API int64_t bs_batch_longest(const bs_batch *b, int micro);  /* highest position + 1 */
BS_API int64_t bs_batch_labelled(const bs_batch *b, int micro); /* trained positions */

#ifdef __cplusplus
}
#endif

#endif
