/* SPDX-License-Identifier: Apache-2.0 */
/*
** table.c: the CPU device's kernel table. Each entry unpacks a bsk_call in the order that bsk.h
** gives and calls the typed kernel. Called from the thread of a CPU queue; no checks here: the op
** layer has checked shapes, and a wrong launch is our own bug.
*/
#include "cpu.h"
#include "kernels.h"

#define P(i) (c->p[i])
#define N(i) (c->n[i])
#define F(i) ((float)c->f[i])

static void gemm(const bsk_call *c)
{
    const float *D = P(3);
    float *C = P(2);
    for (int64_t i = 0; D && i < N(2); i++)
        memcpy(C + i * N(7), D + i * N(7), (size_t)N(3) * sizeof *C);
    bsk_gemm_f32(c->par, N(0) != 0, N(1) != 0, N(2), N(3), N(4), F(0), P(0), N(5), P(1), N(6), F(1),
                 P(2), N(7));
}

static void gemm_grouped(const bsk_call *c)
{
    const bsk_grouped g = {
        N(1) != 0, N(0), N(2), N(3), N(4), N(5), N(6), F(0), P(3),
    };
    bsk_gemm_grouped_f32(c->par, &g, P(0), P(1), P(2));
}

static void bias_grouped(const bsk_call *c)
{
    const bsk_grouped g = {
        .E = N(0), .M = N(1), .N = N(2), .stride = N(3), .begin = N(4), .offset = P(2)};
    bsk_bias_grouped_f32(c->par, &g, P(0), P(1));
}

static void expand_to(const bsk_call *c, int dtype, const void *src, void *dst, int64_t n, float scale)
{
    if (c->out == BS_DTYPE_BF16)
        bsk_expand_bf16(c->par, dtype, src, dst, n, scale);
    else
        bsk_expand_f32(c->par, dtype, src, dst, n, scale);
}

static void expand(const bsk_call *c)
{
    expand_to(c, (int)N(0), P(0), P(1), N(1), F(0));
}

static void expand_mxfp4(const bsk_call *c)
{
    bsk_expand_mxfp4(c->par, c->out, P(0), P(1), P(2), N(0));
}

static void bias(const bsk_call *c)
{
    bsk_bias_f32(c->par, P(0), P(1), N(0), N(1));
}

static void colsum(const bsk_call *c)
{
    bsk_colsum_f32(c->par, P(0), P(1), N(0), N(1));
}

static void rmsnorm(const bsk_call *c)
{
    bsk_rmsnorm_f32(c->par, P(0), P(1), P(2), P(3), N(0), N(1), N(2) != 0, F(0));
}

static void rmsnorm_bwd(const bsk_call *c)
{
    bsk_rmsnorm_bwd_f32(c->par, P(0), P(1), P(2), P(3), P(4), P(5), N(0), N(1), N(2) != 0, N(3) != 0);
}

static void layernorm(const bsk_call *c)
{
    bsk_layernorm_f32(c->par, P(0), P(1), P(2), P(3), P(4), N(0), N(1), F(0));
}

static void layernorm_bwd(const bsk_call *c)
{
    bsk_layernorm_bwd_f32(c->par, P(0), P(1), P(2), P(3), P(4), P(5), P(6), N(0), N(1), N(2) != 0);
}

static void rope(const bsk_call *c)
{
    bsk_rope_f32(c->par, P(0), P(1), P(2), P(3), N(0), N(1), N(2), N(3), (int)N(4), N(5) != 0, F(0));
}

static bsk_norm_rope norm_rope_args(const bsk_call *c, float eps, float scaling)
{
    return (bsk_norm_rope){.T = N(0),
                           .H = N(1),
                           .D = N(2),
                           .n_freq = N(3),
                           .style = (int)N(4),
                           .one_plus = N(5) != 0,
                           .eps = eps,
                           .scaling = scaling,
                           .pos = P(2),
                           .freq = P(3)};
}

static void norm_rope(const bsk_call *c)
{
    bsk_norm_rope a = norm_rope_args(c, F(0), F(1));
    bsk_norm_rope_f32(c->par, &a, P(0), P(1), P(4), P(5));
}

static void norm_rope_bwd(const bsk_call *c)
{
    bsk_norm_rope a = norm_rope_args(c, 0.0f, F(0));
    bsk_norm_rope_bwd_f32(c->par, &a, P(0), P(1), P(4), P(5), P(6), P(7), N(6) != 0);
}

static bsk_attention_dims attention_dims(const bsk_call *c)
{
    return (bsk_attention_dims){.T = N(0),
                                .H = N(1),
                                .K = N(2),
                                .D = N(3),
                                .n_rows = N(4),
                                .window = N(5),
                                .capacity = N(6),
                                .scale = F(0),
                                .softcap = F(1)};
}

static bsk_attention_dims attention_with_sinks(const bsk_call *c)
{
    bsk_attention_dims d = attention_dims(c);
    d.sinks = P(7);
    return d;
}

static void attention(const bsk_call *c)
{
    bsk_attention_dims d = attention_with_sinks(c);
    bsk_attention_f32(c->par, &d, P(0), P(1), P(2), P(3), P(4), P(5), P(6));
}

static void attention_bwd(const bsk_call *c)
{
    bsk_attention_dims d = attention_dims(c);
    bsk_attention_bwd_f32(c->par, &d, P(0), P(1), P(2), P(3), P(4), P(5), P(6), P(7), P(8), P(9),
                          P(10));
}

static void sinks_bwd(const bsk_call *c)
{
    bsk_sinks_bwd_f32(P(0), P(1), P(2), P(3), P(4), N(0), N(1), N(2));
}

static void cache_put(const bsk_call *c)
{
    bsk_cache_put_f32(c->par, P(0), P(1), P(2), P(3), N(0), N(1), N(3));
}

static void attention_cache(const bsk_call *c)
{
    bsk_attention_dims d = attention_with_sinks(c);
    bsk_attention_cache_f32(c->par, &d, P(0), P(1), P(2), P(3), P(4), P(5), P(6));
}

static void glu(const bsk_call *c)
{
    bsk_glu_f32(c->par, P(0), P(1), P(2), N(0), (int)N(1));
}

static void glu_bwd(const bsk_call *c)
{
    bsk_glu_bwd_f32(c->par, P(0), P(1), P(2), P(3), P(4), N(0), (int)N(1));
}

static void glu_clamped(const bsk_call *c)
{
    bsk_glu_clamped_f32(c->par, P(0), P(1), N(0) * N(1), F(0), F(1));
}

static void glu_clamped_bwd(const bsk_call *c)
{
    bsk_glu_clamped_bwd_f32(c->par, P(0), P(1), P(2), N(0) * N(1), F(0), F(1));
}

static void act(const bsk_call *c)
{
    bsk_activation_f32(c->par, P(0), P(1), N(0), (int)N(1));
}

static void act_bwd(const bsk_call *c)
{
    bsk_activation_bwd_f32(c->par, P(0), P(1), P(2), N(0), (int)N(1));
}

static void add(const bsk_call *c)
{
    bsk_add_f32(c->par, P(0), P(1), P(2), N(0));
}

static void mul(const bsk_call *c)
{
    bsk_mul_f32(c->par, P(0), P(1), P(2), N(0));
}

static void axpy(const bsk_call *c)
{
    bsk_axpy_f32(c->par, P(0), P(1), N(0), F(0));
}

static void scale(const bsk_call *c)
{
    bsk_scale_f32(c->par, P(0), P(1), N(0), F(0));
}

static void softmax(const bsk_call *c)
{
    bsk_softmax_f32(c->par, P(0), P(1), N(0), N(1));
}

static void softmax_bwd(const bsk_call *c)
{
    bsk_softmax_bwd_f32(c->par, P(0), P(1), P(2), N(0), N(1));
}

static void columns(const bsk_call *c)
{
    bsk_columns_f32(c->par, P(0), P(1), N(0), N(1), N(2), N(3));
}

static void columns_bwd(const bsk_call *c)
{
    bsk_columns_bwd_f32(c->par, P(0), P(1), N(0), N(1), N(2), N(3));
}

static void row_scale(const bsk_call *c)
{
    bsk_row_scale_f32(c->par, P(0), P(1), P(2), N(0), N(1), N(2), N(3));
}

static void row_scale_bwd(const bsk_call *c)
{
    bsk_row_scale_bwd_f32(c->par, P(0), P(1), P(2), P(3), P(4), N(0), N(1), N(2), N(3));
}

static void gather_rows(const bsk_call *c)
{
    bsk_gather_rows_f32(c->par, P(0), P(1), P(2), N(0), N(1));
}

static void scatter_rows(const bsk_call *c)
{
    bsk_scatter_rows_f32(c->par, P(0), P(1), P(2), N(0), N(1), F(0));
}

static bsk_routing routing(const bsk_call *c)
{
    return (bsk_routing){N(1), N(2), (int)N(3), N(4), N(5), N(6) != 0, F(0)};
}

static void route(const bsk_call *c)
{
    const bsk_routing r = routing(c);
    bsk_route_f32(c->par, &r, P(0), P(1), P(2), P(3), N(0));
}

static void route_bwd(const bsk_call *c)
{
    const bsk_routing r = routing(c);
    bsk_route_bwd_f32(c->par, &r, P(0), P(1), P(2), P(3), N(0));
}

static void sort_rows(const bsk_call *c)
{
    bsk_sort_rows(P(0), P(1), P(2), P(3), N(0), N(1));
}

static void take_rows(const bsk_call *c)
{
    bsk_take_rows_f32(c->par, P(0), P(1), P(2), N(0), N(1), N(2), N(3), N(4));
}

static void sum_rows(const bsk_call *c)
{
    const bsk_pieces to = {N(2), N(3), N(4), N(5), N(6)};
    bsk_sum_rows_f32(c->par, P(0), P(1), P(2), N(0), N(1), &to);
}

static void dropout(const bsk_call *c)
{
    bsk_dropout_f32(c->par, P(0), P(1), P(2), P(3), N(0), N(1), (uint32_t)N(2), (uint32_t)N(3),
                    (uint32_t)N(4), F(0));
}

static void head_tile(const bsk_call *c)
{
    bsk_head_tile_f32(c->par, P(0), P(1), P(2), P(3), P(4), P(5), P(6), N(0), N(1), N(2),
                      N(3) ? F(0) : 0.0f);
}

static void head_pick(const bsk_call *c)
{
    bsk_head_pick_f32(c->par, P(0), P(1), P(2), P(3), N(0), N(1), N(2), N(3), N(4) ? F(0) : 0.0f);
}

static void row_mul(const bsk_call *c)
{
    bsk_row_mul_f32(c->par, P(0), P(1), N(0), N(1));
}

static void head_finish(const bsk_call *c)
{
    bsk_head_finish_f32(c->par, P(0), P(1), P(2), P(3), P(4), P(5), P(6), N(0), N(1), F(0));
}

static void head_dlogits(const bsk_call *c)
{
    bsk_head_dlogits_f32(c->par, P(0), P(1), P(2), P(3), P(4), P(5), N(0), N(1), N(2),
                         N(3) ? F(1) : 0.0f, F(0));
}

static void softcap(const bsk_call *c)
{
    bsk_softcap_f32(c->par, P(0), N(0), F(0));
}

static void sum(const bsk_call *c)
{
    bsk_sum_f32(c->par, P(0), P(1), N(0));
}

static void sumsq(const bsk_call *c)
{
    bsk_sumsq_f32(c->par, P(0), P(1), N(0));
}

static void adamw(const bsk_call *c)
{
    bsk_adamw_f32(c->par, P(0), P(1), P(2), P(3), N(0), c->f);
    if (P(4))
        expand_to(c, BS_DTYPE_F32, P(0), P(4), N(0), 1.0f);
}

const bsk_entry bsk_cpu[BSK_OP_COUNT] = {
    [BSK_GEMM] = {"gemm", gemm},
    [BSK_GEMM_GROUPED] = {"gemm_grouped", gemm_grouped},
    [BSK_EXPAND] = {"expand", expand},
    [BSK_EXPAND_MXFP4] = {"expand_mxfp4", expand_mxfp4},
    [BSK_BIAS] = {"bias", bias},
    [BSK_BIAS_GROUPED] = {"bias_grouped", bias_grouped},
    [BSK_COLSUM] = {"colsum", colsum},
    [BSK_RMSNORM] = {"rmsnorm", rmsnorm},
    [BSK_RMSNORM_BWD] = {"rmsnorm_bwd", rmsnorm_bwd},
    [BSK_LAYERNORM] = {"layernorm", layernorm},
    [BSK_LAYERNORM_BWD] = {"layernorm_bwd", layernorm_bwd},
    [BSK_ROPE] = {"rope", rope},
    [BSK_NORM_ROPE] = {"norm_rope", norm_rope},
    [BSK_NORM_ROPE_BWD] = {"norm_rope_bwd", norm_rope_bwd},
    [BSK_ATTENTION] = {"attention", attention},
    [BSK_ATTENTION_BWD] = {"attention_bwd", attention_bwd},
    [BSK_SINKS_BWD] = {"sinks_bwd", sinks_bwd},
    [BSK_CACHE_PUT] = {"cache_put", cache_put},
    [BSK_ATTENTION_CACHE] = {"attention_cache", attention_cache},
    [BSK_GLU] = {"glu", glu},
    [BSK_GLU_BWD] = {"glu_bwd", glu_bwd},
    [BSK_GLU_CLAMPED] = {"glu_clamped", glu_clamped},
    [BSK_GLU_CLAMPED_BWD] = {"glu_clamped_bwd", glu_clamped_bwd},
    [BSK_ACT] = {"act", act},
    [BSK_ACT_BWD] = {"act_bwd", act_bwd},
    [BSK_ADD] = {"add", add},
    [BSK_MUL] = {"mul", mul},
    [BSK_AXPY] = {"axpy", axpy},
    [BSK_SCALE] = {"scale", scale},
    [BSK_SOFTMAX] = {"softmax", softmax},
    [BSK_SOFTMAX_BWD] = {"softmax_bwd", softmax_bwd},
    [BSK_COLUMNS] = {"columns", columns},
    [BSK_COLUMNS_BWD] = {"columns_bwd", columns_bwd},
    [BSK_ROW_SCALE] = {"row_scale", row_scale},
    [BSK_ROW_SCALE_BWD] = {"row_scale_bwd", row_scale_bwd},
    [BSK_GATHER_ROWS] = {"gather_rows", gather_rows},
    [BSK_SCATTER_ROWS] = {"scatter_rows", scatter_rows},
    [BSK_ROUTE] = {"route", route},
    [BSK_ROUTE_BWD] = {"route_bwd", route_bwd},
    [BSK_SORT_ROWS] = {"sort_rows", sort_rows},
    [BSK_TAKE_ROWS] = {"take_rows", take_rows},
    [BSK_SUM_ROWS] = {"sum_rows", sum_rows},
    [BSK_DROPOUT] = {"dropout", dropout},
    [BSK_HEAD_TILE] = {"head_tile", head_tile},
    [BSK_HEAD_PICK] = {"head_pick", head_pick},
    [BSK_ROW_MUL] = {"row_mul", row_mul},
    [BSK_HEAD_FINISH] = {"head_finish", head_finish},
    [BSK_HEAD_DLOGITS] = {"head_dlogits", head_dlogits},
    [BSK_SOFTCAP] = {"softcap", softcap},
    [BSK_SUM] = {"sum", sum},
    [BSK_SUMSQ] = {"sumsq", sumsq},
    [BSK_ADAMW] = {"adamw", adamw},
};
