/* SPDX-License-Identifier: Apache-2.0 */
/*
** launch.h: launches on activations, of the tensor layer and of train. Owner thread only; all on the compute queue.
*/
#ifndef BS_LAUNCH_H
#define BS_LAUNCH_H

#include "engine/engine.h"

/* The operands that bsk.h marks `a` have the engine's dtype. What it marks `o` is f32 unless call->out says
   otherwise. */
static inline bs_status bsi_op_launch(bs_engine *e, bsi_kcall *call)
{
    call->dtype = e->dtype;
    return bsi_engine_launch(e, call);
}

typedef struct bsi_gemm { /* C[M,N] = alpha op(A)[M,K] op(B)[K,N] + beta D, all dense */
    bool ta, tb;
    bool sums; /* C is an f32 accumulator, else an activation */
    int64_t M, N, K;
    double alpha, beta;
    bsi_addr a, b, c, d; /* d.mem NULL: C */
} bsi_gemm;
bs_status bsi_gemm_launch(bs_engine *e, const bsi_gemm *g, const char *label);
/* y += s*x over n elements of activations. */
bs_status bsi_axpy_launch(bs_engine *e, bsi_addr x, bsi_addr y, int64_t n, double s);

#endif
