/* SPDX-License-Identifier: Apache-2.0 */
/*
** train.h: what params.c and optim.c share: one set of trainable parameters. Pool regions hold
** everything, each parameter at a 256-byte multiple with zero padding behind it, own parameters first:
**
**   value  [own]                  f32 masters
**   copy   [own]                  the masters rounded to the engine's dtype, where that is not f32
**   grad   [own | base]           f32 accumulators
**   m, v   [own | updated base]   AdamW moments, f32
**
** so that an own parameter has one element offset in all of them, and zeroing, norm and AdamW take one
** launch for all own parameters together. Padding stays zero: its gradient is zero, so AdamW leaves it.
** A master and its copy are written together: by AdamW, and by everything that sets a value.
*/
#ifndef BS_TRAIN_H
#define BS_TRAIN_H

#include "bs/train.h"
#include "engine/engine.h"

typedef struct bsi_param {
    char *name;
    int64_t rows, cols;
    size_t bytes; /* rows * cols * 4, without padding */
    bool base;    /* value is the block's own tensor */
    bool update;  /* base with moments: AdamW runs on home */
    bs_place home;
    size_t off;    /* own: in every region; base: in the base part of grad */
    size_t moment; /* updated base: in the base part of m and v */
} bsi_param;

struct bs_params {
    bs_engine *e;
    bs_dtype dtype;      /* the engine's */
    bool sealed, frozen; /* frozen: values and copies only */
    int n, cap;
    bsi_param *param;
    size_t own, base, moments;        /* bytes: own parameters, base accumulators, base moments */
    bsi_addr value, copy, grad, m, v; /* copy.mem NULL: ops read the masters */
    bsi_addr sum;                     /* f64: read back by the norm */
};

static inline size_t bsi_params_grad_bytes(const bs_params *p)
{
    return p->frozen ? 0 : p->own + p->base;
}
static inline size_t bsi_params_moment_bytes(const bs_params *p)
{
    return p->frozen ? 0 : p->own + p->moments;
}
/* Bytes of own parameters in the engine's dtype; 0: there are no copies. */
static inline size_t bsi_params_copy_bytes(const bs_params *p)
{
    return p->dtype == BS_DTYPE_F32 ? 0 : p->own / sizeof(float) * bs_dtype_size(p->dtype);
}
static inline bsi_addr bsi_param_grad(const bs_params *p, const bsi_param *q)
{
    return bsi_addr_add(p->grad, q->base ? p->own + q->off : q->off);
}
static inline size_t bsi_param_moment_off(const bs_params *p, const bsi_param *q)
{
    return q->base ? p->own + q->moment : q->off;
}

#endif
