/* SPDX-License-Identifier: Apache-2.0 */
/*
** train.h: what params.c and optim.c share: one set of trainable parameters. Four pool regions hold
** everything, each parameter at a 256-byte multiple with zero padding behind it, own parameters first:
**
**   value  [own]                  f32 masters
**   grad   [own | base]           accumulators
**   m, v   [own | updated base]   AdamW moments
**
** so that an own parameter has one offset in all four, and zeroing, norm and AdamW take one launch for
*all
** own parameters together. Padding stays zero: its gradient is zero, so AdamW leaves it.
*/
#ifndef BS_TRAIN_H
#define BS_TRAIN_H

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
    bs_engine *e; /* NULL: a set that is only measured */
    bool sealed;
    int n, cap;
    bsi_param *param;
    size_t own, base, moments; /* bytes: own parameters, base accumulators, base moments */
    bsi_addr value, grad, m, v;
    bsi_addr sum; /* f64: read back by the norm */
};

static inline size_t bsi_params_grad_bytes(const bs_params *p)
{
    return p->own + p->base;
}
static inline size_t bsi_params_moment_bytes(const bs_params *p)
{
    return p->own + p->moments;
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
