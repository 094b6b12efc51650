/* SPDX-License-Identifier: Apache-2.0 */
/*
** launch.c: the launches that several ops and the tape need.
*/
#include "tensor/launch.h"

bs_status bsi_gemm_launch(bs_engine *e, const bsi_gemm *g, const char *label)
{
    bsi_kcall c = {
        .op = BSK_GEMM,
        .n_args = g->d.mem ? 4 : 3,
        .n = {g->ta, g->tb, g->M, g->N, g->K, g->ta ? g->M : g->K, g->tb ? g->K : g->N, g->N},
        .f = {g->alpha, g->beta},
        .out = g->sums ? BS_DTYPE_F32 : e->dtype,
        .label = label};
    c.arg[0] = bsi_act_read(e, g->a, g->M * g->K);
    c.arg[1] = bsi_act_read(e, g->b, g->K * g->N);
    c.arg[2] =
        bsi_operand(g->c, c.out, g->M * g->N, g->beta == 0.0 || g->d.mem ? BSI_WRITE : BSI_READWRITE);
    if (g->d.mem)
        c.arg[3] = bsi_operand(g->d, c.out, g->M * g->N, BSI_READ);
    return bsi_op_launch(e, &c);
}

bs_status bsi_axpy_launch(bs_engine *e, bsi_addr x, bsi_addr y, int64_t n, double f)
{
    bsi_kcall c = {.op = BSK_AXPY, .n_args = 2, .n = {n}, .f = {f}, .out = e->dtype, .label = "axpy"};
    c.arg[0] = bsi_act_read(e, x, n);
    c.arg[1] = bsi_act_update(e, y, n);
    return bsi_op_launch(e, &c);
}
