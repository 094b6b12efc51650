/* SPDX-License-Identifier: Apache-2.0 */
/*
** grad.c: one table, op -> backward rule. A rule reads dy and what its node saved, and adds to the
** gradients of the inputs that want one. Kernels that write several gradients write the unwanted ones
** into buffers that are given back at once. Owner thread only. Each rule is held against finite
** differences in tests/c/test_ops.c.
*/
#include "tensor/tensor.h"

/* Where a value that is no input of the kernel's caller goes: opened before the launch, closed after
 * it. */
static bs_status close_grads(bs_status st, bsi_space *s, int n, bsi_value *const *v,
                             bsi_value *const *g)
{
    for (int i = 0; i < n && st == BS_OK; i++)
        st = bsi_grad_close(s, v[i], g[i]);
    return st;
}

static bs_status rmsnorm_rule(bsi_space *s, const bsi_node *node, bsi_value *dy)
{
    const bs_weight *w = node->ref;
    const int64_t T = node->n[0], C = node->n[1];
    bsi_value *dx;
    bsi_addr wa;
    bool add;
    BSI_TRY(bsi_wref_addr(s->e, &w->ref, &wa));
    BSI_TRY(bsi_grad_open_add(s, node->in[0], &dx, &add));
    bsi_kcall c = {
        .op = BSK_RMSNORM_BWD, .n_args = 6, .n = {T, C, node->n[2], add}, .label = "rmsnorm backward"};
    c.arg[0] = bsi_act_read(s->e, node->saved[0]->at, T * C);
    c.arg[1] = bsi_act_read(s->e, wa, C);
    c.arg[2] = bsi_read_f32(node->saved[1]->at, T);
    c.arg[3] = bsi_act_read(s->e, dy->at, T * C);
    c.arg[4] = add ? bsi_act_update(s->e, dx->at, T * C) : bsi_act_write(s->e, dx->at, T * C);
    if (w->ref.grad.mem)
        c.arg[5] = bsi_update_f32(w->ref.grad, C);
    BSI_TRY(bsi_op_launch(s->e, &c));
    return bsi_grad_close(s, node->in[0], dx);
}

static bs_status layernorm_rule(bsi_space *s, const bsi_node *node, bsi_value *dy)
{
    const bs_weight *w = node->ref, *b = node->bias;
    const int64_t T = node->n[0], C = node->n[1];
    bsi_value *dx;
    bsi_addr wa;
    bool add;
    BSI_TRY(bsi_wref_addr(s->e, &w->ref, &wa));
    BSI_TRY(bsi_grad_open_add(s, node->in[0], &dx, &add));
    bsi_kcall c = {
        .op = BSK_LAYERNORM_BWD, .n_args = 7, .n = {T, C, add}, .label = "layernorm backward"};
    c.arg[0] = bsi_act_read(s->e, node->saved[0]->at, T * C);
    c.arg[1] = bsi_act_read(s->e, wa, C);
    c.arg[2] = bsi_read_f32(node->saved[1]->at, 2 * T);
    c.arg[3] = bsi_act_read(s->e, dy->at, T * C);
    c.arg[4] = add ? bsi_act_update(s->e, dx->at, T * C) : bsi_act_write(s->e, dx->at, T * C);
    if (w->ref.grad.mem)
        c.arg[5] = bsi_update_f32(w->ref.grad, C);
    if (b->ref.grad.mem)
        c.arg[6] = bsi_update_f32(b->ref.grad, C);
    BSI_TRY(bsi_op_launch(s->e, &c));
    return bsi_grad_close(s, node->in[0], dx);
}

static bs_status rope_rule(bsi_space *s, const bsi_node *node, bsi_value *dy)
{
    bsi_value *dx;
    BSI_TRY(bsi_grad_open(s, node->in[0], &dx));
    BSI_TRY(bsi_rope_launch(s, node->rope, node->n, true, dy->at, dx->at));
    return bsi_grad_close(s, node->in[0], dx);
}

static bs_status norm_rope_rule(bsi_space *s, const bsi_node *node, bsi_value *dy)
{
    const bs_weight *w = node->ref;
    const int64_t *n = node->n, N = n[0] * n[1] * n[2];
    bsi_value *dx;
    bool add;
    bsi_kcall c = {.op = BSK_NORM_ROPE_BWD,
                   .n_args = 8,
                   .f = {node->rope->scaling},
                   .label = "norm and rope backward"};
    BSI_TRY(bsi_norm_rope_call(s, w, node->rope, n, node->saved[0]->at, &c));
    BSI_TRY(bsi_grad_open_add(s, node->in[0], &dx, &add));
    c.n[6] = add;
    c.arg[4] = bsi_read_f32(node->saved[1]->at, n[0] * n[1]);
    c.arg[5] = bsi_act_read(s->e, dy->at, N);
    c.arg[6] = add ? bsi_act_update(s->e, dx->at, N) : bsi_act_write(s->e, dx->at, N);
    if (w->ref.grad.mem)
        c.arg[7] = bsi_update_f32(w->ref.grad, n[2]);
    BSI_TRY(bsi_op_launch(s->e, &c));
    return bsi_grad_close(s, node->in[0], dx);
}

/* The gradient of sinks whose weight has one. n: T, H, K, D */
static bs_status sinks_grad(bsi_space *s, const bsi_node *node, const bsi_value *dy)
{
    const bs_weight *w = node->ref;
    const int64_t *n = node->n, q = n[0] * n[1] * n[3];
    if (!w || !w->ref.grad.mem)
        return BS_OK;
    bsi_kcall c = {
        .op = BSK_SINKS_BWD, .n_args = 5, .n = {n[0], n[1], n[3]}, .label = "gradient of sinks"};
    c.arg[0] = bsi_act_read(s->e, node->saved[3]->at, q);
    c.arg[1] = bsi_act_read(s->e, dy->at, q);
    c.arg[2] = bsi_read_f32(node->saved[4]->at, n[0] * n[1]);
    BSI_TRY(bsi_attention_sinks(s, w, &c.arg[3]));
    c.arg[4] = bsi_update_f32(w->ref.grad, n[1]);
    return bsi_op_launch(s->e, &c);
}

static bs_status attention_rule(bsi_space *s, const bsi_node *node, bsi_value *dy)
{
    const int64_t *n = node->n, q = n[0] * n[1] * n[3], kv = n[0] * n[2] * n[3];
    const bsi_micro *m = &s->scope.batch->micro[s->scope.micro];
    bsi_value *g[3];
    bsi_addr scratch;
    BSI_TRY(sinks_grad(s, node, dy));
    for (int i = 0; i < 3; i++)
        BSI_TRY(bsi_grad_open(s, node->in[i], &g[i]));
    size_t bytes = bsk_attention_bwd_scratch(n[6], n[1], n[2], n[3]);
    BSI_TRY(bsi_arena_take(s->e->pool, bytes, &scratch));
    bsi_kcall c = {.op = BSK_ATTENTION_BWD,
                   .n_args = 11,
                   .f = {node->f[0], node->f[1]},
                   .label = "attention backward"};
    for (int i = 0; i < 7; i++)
        c.n[i] = n[i];
    for (int i = 0; i < 3; i++)
        c.arg[i] = bsi_act_read(s->e, node->saved[i]->at, i == 0 ? q : kv);
    c.arg[3] = (bsi_arg){m->cu, (size_t)(n[4] + 1) * sizeof(int32_t), BSI_READ};
    c.arg[4] = bsi_act_read(s->e, node->saved[3]->at, q);
    c.arg[5] = bsi_read_f32(node->saved[4]->at, n[0] * n[1]);
    c.arg[6] = bsi_act_read(s->e, dy->at, q);
    for (int i = 0; i < 3; i++)
        c.arg[7 + i] = bsi_act_write(s->e, g[i]->at, i == 0 ? q : kv);
    c.arg[10] = (bsi_arg){scratch, bytes, BSI_WRITE};
    bs_status st = bsi_op_launch(s->e, &c);
    bsi_arena_give(s->e->pool, scratch, bytes);
    return close_grads(st, s, 3, node->in, g);
}

static bs_status glu_rule(bsi_space *s, const bsi_node *node, bsi_value *dy)
{
    const int64_t N = node->n[0];
    bsi_value *g[2];
    for (int i = 0; i < 2; i++)
        BSI_TRY(bsi_grad_open(s, node->in[i], &g[i]));
    bsi_kcall c = {.op = BSK_GLU_BWD, .n_args = 5, .n = {N, node->n[1]}, .label = "glu backward"};
    c.arg[0] = bsi_act_read(s->e, node->saved[0]->at, N);
    c.arg[1] = bsi_act_read(s->e, node->saved[1]->at, N);
    c.arg[2] = bsi_act_read(s->e, dy->at, N);
    c.arg[3] = bsi_act_write(s->e, g[0]->at, N);
    c.arg[4] = bsi_act_write(s->e, g[1]->at, N);
    return close_grads(bsi_op_launch(s->e, &c), s, 2, node->in, g);
}

static bs_status act_rule(bsi_space *s, const bsi_node *node, bsi_value *dy)
{
    const int64_t N = node->n[0];
    bsi_value *dx;
    BSI_TRY(bsi_grad_open(s, node->in[0], &dx));
    bsi_kcall c = {.op = BSK_ACT_BWD, .n_args = 3, .n = {N, node->n[1]}, .label = "act backward"};
    c.arg[0] = bsi_act_read(s->e, node->saved[0]->at, N);
    c.arg[1] = bsi_act_read(s->e, dy->at, N);
    c.arg[2] = bsi_act_write(s->e, dx->at, N);
    BSI_TRY(bsi_op_launch(s->e, &c));
    return bsi_grad_close(s, node->in[0], dx);
}

static bs_status add_rule(bsi_space *s, const bsi_node *node, bsi_value *dy)
{
    BSI_TRY(bsi_grad_share(s, node->in[0], dy));
    return bsi_grad_share(s, node->in[1], dy);
}

static bs_status mul_rule(bsi_space *s, const bsi_node *node, bsi_value *dy)
{
    const int64_t N = node->n[0];
    for (int i = 0; i < 2; i++) {
        bsi_value *g, *v = node->in[i];
        if (!v->wanted)
            continue;
        BSI_TRY(bsi_grad_open(s, v, &g));
        bsi_kcall c = {.op = BSK_MUL, .n_args = 3, .n = {N}, .label = "mul backward"};
        c.arg[0] = bsi_act_read(s->e, dy->at, N);
        c.arg[1] = bsi_act_read(s->e, node->in[1 - i]->at, N);
        c.arg[2] = bsi_act_write(s->e, g->at, N);
        BSI_TRY(bsi_op_launch(s->e, &c));
        BSI_TRY(bsi_grad_close(s, v, g));
    }
    return BS_OK;
}

static bs_status scale_rule(bsi_space *s, const bsi_node *node, bsi_value *dy)
{
    const int64_t N = node->n[0];
    bsi_value *dx;
    BSI_TRY(bsi_grad_open(s, node->in[0], &dx));
    bsi_kcall c = {
        .op = BSK_SCALE, .n_args = 2, .n = {N}, .f = {node->f[0]}, .label = "scale backward"};
    c.arg[0] = bsi_act_read(s->e, dy->at, N);
    c.arg[1] = bsi_act_write(s->e, dx->at, N);
    BSI_TRY(bsi_op_launch(s->e, &c));
    return bsi_grad_close(s, node->in[0], dx);
}

static bs_status softmax_rule(bsi_space *s, const bsi_node *node, bsi_value *dy)
{
    const int64_t T = node->n[0], C = node->n[1];
    bsi_value *dx;
    BSI_TRY(bsi_grad_open(s, node->in[0], &dx));
    bsi_kcall c = {.op = BSK_SOFTMAX_BWD, .n_args = 3, .n = {T, C}, .label = "softmax backward"};
    c.arg[0] = bsi_act_read(s->e, node->saved[0]->at, T * C);
    c.arg[1] = bsi_act_read(s->e, dy->at, T * C);
    c.arg[2] = bsi_act_write(s->e, dx->at, T * C);
    BSI_TRY(bsi_op_launch(s->e, &c));
    return bsi_grad_close(s, node->in[0], dx);
}

static bs_status columns_rule(bsi_space *s, const bsi_node *node, bsi_value *dy)
{
    const int64_t *n = node->n; /* T, C, first, n */
    bsi_value *dx;
    BSI_TRY(bsi_grad_open(s, node->in[0], &dx));
    bsi_kcall c = {
        .op = BSK_COLUMNS_BWD, .n_args = 2, .n = {n[0], n[1], n[2], n[3]}, .label = "columns backward"};
    c.arg[0] = bsi_act_read(s->e, dy->at, n[0] * n[3]);
    c.arg[1] = bsi_act_write(s->e, dx->at, n[0] * n[1]);
    BSI_TRY(bsi_op_launch(s->e, &c));
    return bsi_grad_close(s, node->in[0], dx);
}

static bs_status row_scale_rule(bsi_space *s, const bsi_node *node, bsi_value *dy)
{
    const int64_t *n = node->n; /* T, C, columns of g, column */
    bsi_value *g[2];
    for (int i = 0; i < 2; i++)
        BSI_TRY(bsi_grad_open(s, node->in[i], &g[i]));
    bsi_kcall c = {.op = BSK_ROW_SCALE_BWD,
                   .n_args = 5,
                   .n = {n[0], n[1], n[2], n[3]},
                   .label = "row_scale backward"};
    c.arg[0] = bsi_act_read(s->e, node->saved[0]->at, n[0] * n[1]);
    c.arg[1] = bsi_act_read(s->e, node->saved[1]->at, n[0] * n[2]);
    c.arg[2] = bsi_act_read(s->e, dy->at, n[0] * n[1]);
    c.arg[3] = bsi_act_write(s->e, g[0]->at, n[0] * n[1]);
    c.arg[4] = bsi_act_write(s->e, g[1]->at, n[0] * n[2]);
    return close_grads(bsi_op_launch(s->e, &c), s, 2, node->in, g);
}

/* dx = 0; dx[label_at[i]] += dy[i]. Zeroed also where a gradient is there already: one path, one order.
 */
static bs_status labelled_rule(bsi_space *s, const bsi_node *node, bsi_value *dy)
{
    const int64_t n = node->n[0], C = node->n[1];
    const bsi_micro *m = &s->scope.batch->micro[s->scope.micro];
    bsi_value *dx, *x = node->in[0];
    BSI_TRY(bsi_grad_open(s, x, &dx));
    if (x->count)
        BSI_TRY(bsi_fill(s->e->compute, dx->at, 0, (size_t)x->count * bs_dtype_size(x->dtype)));
    bsi_kcall c = {.op = BSK_SCATTER_ROWS,
                   .n_args = 3,
                   .n = {n, C},
                   .f = {1.0},
                   .out = dx->dtype,
                   .label = "labelled backward"};
    c.arg[0] = bsi_act_read(s->e, dy->at, n * C);
    c.arg[1] = (bsi_arg){m->label_at, (size_t)n * sizeof(int32_t), BSI_READ};
    c.arg[2] = bsi_act_update(s->e, dx->at, x->count);
    BSI_TRY(bsi_op_launch(s->e, &c));
    return bsi_grad_close(s, x, dx);
}

const bsi_rule bsi_rules[BSI_OP_COUNT] = {
    [BSI_OP_LINEAR] = bsi_linear_backward,
    [BSI_OP_RMSNORM] = rmsnorm_rule,
    [BSI_OP_LAYERNORM] = layernorm_rule,
    [BSI_OP_ROPE] = rope_rule,
    [BSI_OP_NORM_ROPE] = norm_rope_rule,
    [BSI_OP_ATTENTION] = attention_rule,
    [BSI_OP_GLU] = glu_rule,
    [BSI_OP_ACT] = act_rule,
    [BSI_OP_ADD] = add_rule,
    [BSI_OP_MUL] = mul_rule,
    [BSI_OP_SCALE] = scale_rule,
    [BSI_OP_SOFTMAX] = softmax_rule,
    [BSI_OP_COLUMNS] = columns_rule,
    [BSI_OP_ROW_SCALE] = row_scale_rule,
    [BSI_OP_LABELLED] = labelled_rule,
};
