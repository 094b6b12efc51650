/* SPDX-License-Identifier: Apache-2.0 */
/*
** op.h: what the files of ops share. Private to the layer; owner thread only. An op checks shapes, hashes what
** defines it, allocates its output by capacity, launches and records. Its backward function stands beside it, and the
** two agree on what node->ref, n, f and saved hold.
*/
#ifndef BS_OP_H
#define BS_OP_H

#include "tensor/launch.h"
#include "tensor/tape.h"
#include "tensor/weight.h"

/* ---- op.c ------------------------------------------------------------------------------------ */

/* Ends an op: hands y out, or drops it when st is a failure, which it returns under the op's name. */
bs_status bsi_op_finish(bs_status st, const bsi_op *op, bs_tensor *y, bs_tensor **out);
/* Output shaped like a; capacity the larger of the two, equal in a scope of one batch. */
bs_status bsi_op_like(bsi_space *s, const bs_tensor *a, const bs_tensor *b, bs_tensor **out);
bs_status bsi_op_same_shape(const char *op, const bs_tensor *a, const bs_tensor *b);
bs_status bsi_op_need_channels(const char *op, const bs_tensor *x);
static inline const bsi_micro *bsi_op_micro(const bsi_space *s)
{
    return bsi_scope_rows(s);
}

/* ---- ops_attention.c ------------------------------------------------------------------------- */

/* Heads, window, scale of an attention and the shapes of its q, k, v. */
bs_status bsi_attention_check(const bs_attention_cfg *a, bs_tensor *const in[3]);
/* The operand of kernels; absent when sinks is NULL. */
bs_status bsi_attention_sinks(bsi_space *s, const bs_weight *sinks, bsi_arg *out);

#endif
