/* SPDX-License-Identifier: Apache-2.0 */
/* bs/train.h: trainable parameters, the head, merging. Conventions: bs.h. */
#ifndef BS_PUBLIC_TRAIN_H
#define BS_PUBLIC_TRAIN_H

#include "bs/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- trainable parameters -------------------------------------------------------------------- */

typedef struct bs_params bs_params;
BS_API BS_NODISCARD bs_status bs_params_open(bs_engine *e, bs_params **out);
BS_API void bs_params_close(bs_params *p);
/* Values only, no accumulators and no moments: an adapter that is used and not trained. Before seal. */
BS_API BS_NODISCARD bs_status bs_params_freeze(bs_params *p);
/* A parameter with f32 master, gradient accumulator and moments (an adapter matrix); on an engine that
   does not compute in f32 also with a copy in its dtype, which ops read. */
BS_API BS_NODISCARD bs_status bs_params_add(bs_params *p, const char *name, int64_t rows, int64_t cols,
                                            int *out);
/* A base weight: gradient accumulator only; its value is the block's tensor. */
BS_API BS_NODISCARD bs_status bs_params_add_base(bs_params *p, const char *name, int64_t rows,
                                                 int64_t cols, int *out);
/* Makes a base parameter updatable: home is its f32 bytes in a gpu home. Before seal, because of the
   moments; a home that is not known by then has mem NULL and is named by a second call after seal. */
BS_API BS_NODISCARD bs_status bs_params_update_base(bs_params *p, int id, const bs_place *home);
/* Fixed device bytes that these parameters take; also before seal, which takes them. */
BS_API uint64_t bs_params_device_bytes(const bs_params *p);
/* Allocates the regions; nothing can be added after it. */
BS_API BS_NODISCARD bs_status bs_params_seal(bs_params *p);
BS_API int bs_params_count(const bs_params *p);
BS_API const char *bs_params_name(const bs_params *p, int id);
BS_API BS_NODISCARD bs_status bs_params_set(bs_params *p, int id,
                                            const bs_array *value); /* f32 master */
BS_API BS_NODISCARD bs_status bs_params_get(bs_params *p, int id, bs_array **out);
BS_API BS_NODISCARD bs_status bs_params_grad(bs_params *p, int id, bs_array **out);
/* AdamW moments for checkpoints; which: 1 = first, 2 = second. BS_STATE for a parameter without them. */
BS_API BS_NODISCARD bs_status bs_params_moment(bs_params *p, int id, int which, bs_array **out);
BS_API BS_NODISCARD bs_status bs_params_set_moment(bs_params *p, int id, int which,
                                                   const bs_array *value);
/* Kaiming-uniform with a = sqrt 5 (uniform in +-1/sqrt cols) by Philox(seed, name). */
BS_API BS_NODISCARD bs_status bs_params_init_kaiming(bs_params *p, int id, uint64_t seed);
BS_API BS_NODISCARD bs_status bs_params_zero_grad(bs_params *p);
/* For bs_linear_cfg, bs_weight_new and bs_embedding_grad; valid until bs_params_close. After seal only. */
BS_API BS_NODISCARD bs_status bs_params_ref(const bs_params *p, int id, bs_param_ref *out);
typedef struct bs_adamw {
    double lr, beta1, beta2, eps, weight_decay; /* decay is decoupled: p *= 1 - lr*weight_decay first */
    double clip;                                /* global norm; 0 = off */
    int64_t step;                               /* 1, 2, ... */
} bs_adamw;
/* Global L2 norm of the accumulators (waits). */
BS_API BS_NODISCARD bs_status bs_params_norm(bs_params *p, double *out);
/* One AdamW step over all parameters; norm is the value of bs_params_norm of this step. */
BS_API BS_NODISCARD bs_status bs_params_apply(bs_params *p, const bs_adamw *cfg, double norm);

/* W [out, in] += scale B A on the host, computed in f32 and rounded once to W's dtype (f32, bf16, f16); A
   [r, in] and B [out, r] are f32. threads: 0 = the online cores; they change no bits. */
BS_API BS_NODISCARD bs_status bs_lora_merge(bs_array *w, const bs_array *a, const bs_array *b,
                                            double scale, int threads);

/* ---- head: loss over vocabulary tiles -------------------------------------------------------- */

typedef struct bs_head bs_head;
/* LOGITS: of every token; LAST: of the last token of each row. */
typedef enum bs_head_mode { BS_HEAD_TRAIN, BS_HEAD_LOSS, BS_HEAD_LOGITS, BS_HEAD_LAST } bs_head_mode;
typedef struct bs_head_cfg {
    bs_batch *batch;
    int64_t channels, vocab;
    double softcap;    /* 0: none */
    bool logits;       /* LOGITS may be asked: each pass takes [tokens, vocab] f32 of host memory */
    int64_t tile_rows; /* largest tile */
} bs_head_cfg;
BS_API BS_NODISCARD bs_status bs_head_open(bs_engine *e, const bs_head_cfg *cfg, bs_head **out);
BS_API void bs_head_close(bs_head *h);
BS_API BS_NODISCARD bs_status bs_head_bytes(const bs_batch_cfg *b, const bs_head_cfg *cfg,
                                            bs_dtype compute, size_t *device);
/* Start a pass. count: labelled tokens of the whole step (the divisor of loss and gradient). */
BS_API BS_NODISCARD bs_status bs_head_begin(bs_head *h, bs_head_mode mode, int64_t count);
/* Hand in the normed rows of a micro-batch: labelled (TRAIN, LOSS), all (LOGITS) or last ones (LAST). */
BS_API BS_NODISCARD bs_status bs_head_put(bs_head *h, int micro, bs_tensor *x);
/* Consume one tile [rows, channels], vocabulary entries first.. (its block's visit is current). bias:
   [rows], added to the logits, of the same block; or NULL. */
BS_API BS_NODISCARD bs_status bs_head_tile(bs_head *h, int micro, bs_weight *tile, bs_weight *bias,
                                           int64_t first);
/* After the last tile: sum of losses (waits for nothing; bs_head_loss reads it) and, in TRAIN, dX as a
   tensor of the current scope, already divided by count. */
BS_API BS_NODISCARD bs_status bs_head_finish(bs_head *h, int micro, bs_tensor **dx);
/* Mean loss of the pass (waits). */
BS_API BS_NODISCARD bs_status bs_head_loss(bs_head *h, double *out);
/* Second visit of a tile when the head is trainable: dW of the tile and db of the bias that it was
   consumed with into their accumulators; the bias may be frozen. */
BS_API BS_NODISCARD bs_status bs_head_tile_grad(bs_head *h, int micro, bs_weight *tile, bs_weight *bias,
                                                int64_t first);
/* LOGITS, LAST: [rows handed in, vocab] of a micro-batch on the host (waits). */
BS_API BS_NODISCARD bs_status bs_head_logits(bs_head *h, int micro, bs_array **out);

#ifdef __cplusplus
}
#endif

#endif
