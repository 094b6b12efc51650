/* SPDX-License-Identifier: Apache-2.0 */
/*
** table.c: the launchers of the cuda device, indexed by bsk_op, and the choice among the versions of attention
** and of grouped products: tensor cores for bf16 and the sizes that models have, by Hopper's own instructions
** where there are some, plain loops else. The choice depends on the device and the call alone.
*/
#include "kernels.h"

enum { HEAD_DIM = 3 }; /* n[] of both attention ops */

/* operands: the first of p[], cu and lse among them, that must be aligned to what is copied at a time
 */
static bool tiled(const bsk_call *c, int operands)
{
    uintptr_t bits = 0;
    for (int i = 0; i < operands; i++)
        bits |= (uintptr_t)c->p[i];
    return c->dtype == BS_DTYPE_BF16 && bits % 16 == 0 && bsk_cuda_attention_tiled(c->n[HEAD_DIM]);
}

cudaError_t bsk_cuda_attention(bsk_cuda *cuda, const bsk_call *c)
{
    if (!tiled(c, 6))
        return bsk_cuda_attention_plain(cuda, c);
#ifdef BSK_CUDA_SM90
    if (bsk_cuda_attention_on_sm90(cuda, c->n[HEAD_DIM]))
        return bsk_cuda_attention_sm90(cuda, c);
#endif
    return bsk_cuda_attention_mma(cuda, c);
}

cudaError_t bsk_cuda_attention_bwd(bsk_cuda *cuda, const bsk_call *c)
{
    if (!tiled(c, 11))
        return bsk_cuda_attention_bwd_plain(cuda, c);
#ifdef BSK_CUDA_SM90
    if (bsk_cuda_attention_on_sm90(cuda, c->n[HEAD_DIM]))
        return bsk_cuda_attention_bwd_sm90(cuda, c);
#endif
    return bsk_cuda_attention_bwd_mma(cuda, c);
}

cudaError_t bsk_cuda_gemm_grouped(bsk_cuda *cuda, const bsk_call *c)
{
#ifdef BSK_CUDA_SM90
    if (bsk_cuda_gemm_grouped_on_sm90(cuda, c))
        return bsk_cuda_gemm_grouped_sm90(cuda, c);
#endif
    return bsk_cuda_gemm_grouped_plain(cuda, c);
}

const bsk_cuda_entry bsk_cuda_table[BSK_OP_COUNT] = {
    [BSK_GEMM] = {"gemm", bsk_cuda_gemm, true},
    [BSK_GEMM_GROUPED] = {"gemm_grouped", bsk_cuda_gemm_grouped, false},
    [BSK_EXPAND] = {"expand", bsk_cuda_expand, false},
    [BSK_EXPAND_MXFP4] = {"expand_mxfp4", bsk_cuda_expand_mxfp4, false},
    [BSK_BIAS] = {"bias", bsk_cuda_bias, false},
    [BSK_BIAS_GROUPED] = {"bias_grouped", bsk_cuda_bias_grouped, false},
    [BSK_COLSUM] = {"colsum", bsk_cuda_colsum, false},
    [BSK_RMSNORM] = {"rmsnorm", bsk_cuda_rmsnorm, false},
    [BSK_RMSNORM_BWD] = {"rmsnorm_bwd", bsk_cuda_rmsnorm_bwd, false},
    [BSK_LAYERNORM] = {"layernorm", bsk_cuda_layernorm, false},
    [BSK_LAYERNORM_BWD] = {"layernorm_bwd", bsk_cuda_layernorm_bwd, false},
    [BSK_ROPE] = {"rope", bsk_cuda_rope, false},
    [BSK_NORM_ROPE] = {"norm_rope", bsk_cuda_norm_rope, false},
    [BSK_NORM_ROPE_BWD] = {"norm_rope_bwd", bsk_cuda_norm_rope_bwd, false},
    [BSK_ATTENTION] = {"attention", bsk_cuda_attention, false},
    [BSK_ATTENTION_BWD] = {"attention_bwd", bsk_cuda_attention_bwd, false},
    [BSK_SINKS_BWD] = {"sinks_bwd", bsk_cuda_sinks_bwd, false},
    [BSK_CACHE_PUT] = {"cache_put", bsk_cuda_cache_put, false},
    [BSK_ATTENTION_CACHE] = {"attention_cache", bsk_cuda_attention_cache, false},
    [BSK_GLU] = {"glu", bsk_cuda_glu, false},
    [BSK_GLU_BWD] = {"glu_bwd", bsk_cuda_glu_bwd, false},
    [BSK_GLU_CLAMPED] = {"glu_clamped", bsk_cuda_glu_clamped, false},
    [BSK_GLU_CLAMPED_BWD] = {"glu_clamped_bwd", bsk_cuda_glu_clamped_bwd, false},
    [BSK_ACT] = {"act", bsk_cuda_act, false},
    [BSK_ACT_BWD] = {"act_bwd", bsk_cuda_act_bwd, false},
    [BSK_ADD] = {"add", bsk_cuda_add, false},
    [BSK_MUL] = {"mul", bsk_cuda_mul, false},
    [BSK_AXPY] = {"axpy", bsk_cuda_axpy, false},
    [BSK_SCALE] = {"scale", bsk_cuda_scale, false},
    [BSK_SOFTMAX] = {"softmax", bsk_cuda_softmax, false},
    [BSK_SOFTMAX_BWD] = {"softmax_bwd", bsk_cuda_softmax_bwd, false},
    [BSK_COLUMNS] = {"columns", bsk_cuda_columns, false},
    [BSK_COLUMNS_BWD] = {"columns_bwd", bsk_cuda_columns_bwd, false},
    [BSK_ROW_SCALE] = {"row_scale", bsk_cuda_row_scale, false},
    [BSK_ROW_SCALE_BWD] = {"row_scale_bwd", bsk_cuda_row_scale_bwd, false},
    [BSK_GATHER_ROWS] = {"gather_rows", bsk_cuda_gather_rows, false},
    [BSK_SCATTER_ROWS] = {"scatter_rows", bsk_cuda_scatter_rows, false},
    [BSK_ROUTE] = {"route", bsk_cuda_route, false},
    [BSK_ROUTE_BWD] = {"route_bwd", bsk_cuda_route_bwd, false},
    [BSK_SORT_ROWS] = {"sort_rows", bsk_cuda_sort_rows, false},
    [BSK_TAKE_ROWS] = {"take_rows", bsk_cuda_take_rows, false},
    [BSK_SUM_ROWS] = {"sum_rows", bsk_cuda_sum_rows, false},
    [BSK_DROPOUT] = {"dropout", bsk_cuda_dropout, false},
    [BSK_HEAD_TILE] = {"head_tile", bsk_cuda_head_tile, false},
    [BSK_HEAD_PICK] = {"head_pick", bsk_cuda_head_pick, false},
    [BSK_ROW_MUL] = {"row_mul", bsk_cuda_row_mul, false},
    [BSK_HEAD_FINISH] = {"head_finish", bsk_cuda_head_finish, false},
    [BSK_HEAD_DLOGITS] = {"head_dlogits", bsk_cuda_head_dlogits, false},
    [BSK_SOFTCAP] = {"softcap", bsk_cuda_softcap, false},
    [BSK_SUM] = {"sum", bsk_cuda_sum, true},
    [BSK_SUMSQ] = {"sumsq", bsk_cuda_sumsq, true},
    [BSK_ADAMW] = {"adamw", bsk_cuda_adamw, false},
};
