/* SPDX-License-Identifier: Apache-2.0 */
/*
** weight.h: weights, resolved through the visit's binding at each launch. The tensor layer's and train's; owner
** thread only.
*/
#ifndef BS_WEIGHT_H
#define BS_WEIGHT_H

#include "bs/tensor.h"
#include "engine/engine.h"

typedef struct bsi_wref { /* one tensor of a block */
    int block;
    bs_tensor_info info; /* name owned */
    int64_t count;
    bsi_addr grad; /* f32 accumulator; mem NULL: frozen */
} bsi_wref;

struct bs_weight {
    bs_engine *e;
    bsi_wref ref;
};

struct bs_linear {
    bs_engine *e;
    char *name;
    int64_t in, out, rank; /* rank 0: no adapter */
    bool grouped;          /* of an expert and n_next more: rows take that of their own */
    bool transposed;       /* the weight lies as [in,out] */
    int first_expert, n_next;
    bsi_wref weight, bias;   /* bias.count 0: none */
    bsi_wref *next;          /* [n_next] weights, then as many biases where there are some */
    bsi_addr a, b;           /* A [rank,in], B [out,rank] */
    bsi_addr grad_a, grad_b; /* mem NULL: frozen */
    double scale, dropout;
    uint32_t key[2];
};

/* The tensor in the current visit, in the engine's dtype: expanded first when it is stored otherwise.
   Valid until the visit's next weight of another block is asked for. */
bs_status bsi_wref_addr(bs_engine *e, const bsi_wref *w, bsi_addr *out);
/* The tensor as it lies, in the dtype that it is stored in. */
bs_status bsi_wref_stored(const bs_engine *e, const bsi_wref *w, bsi_addr *out);
/* Those of a group: where the first is, and how many elements each begins after the one before. */
bs_status bsi_wref_group(bs_engine *e, const bsi_wref *first, int n_next, const bsi_wref *next,
                         bsi_addr *out, int64_t *stride);
static inline bs_status bsi_weight_addr(const bs_weight *w, bsi_addr *out)
{
    return bsi_wref_addr(w->e, &w->ref, out);
}

#endif
