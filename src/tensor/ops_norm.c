/* SPDX-License-Identifier: Apache-2.0 */
/*
** ops_norm.c: RMS norm and layer norm, of a row or of each head of a row. Sizes: T normalised pieces, C entries of
** each. A tape keeps x and the statistics of each piece. Owner thread only.
*/
#include "tensor/op.h"

/* With add, the kernel adds to the gradient that x has already, in one rounding. The weight's gradient goes into
   its f32 accumulator, so that a frozen weight is an absent operand and no work. */
static bs_status rmsnorm_backward(bsi_space *s, const bsi_node *node, bsi_value *dy)
{
    const bs_weight *w = node->ref[0];
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

static const bsi_op rmsnorm_op = {.name = "rmsnorm", .id = 1, .backward = rmsnorm_backward};

static bs_status layernorm_backward(bsi_space *s, const bsi_node *node, bsi_value *dy)
{
    const bs_weight *w = node->ref[0], *b = node->ref[1];
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

static const bsi_op layernorm_op = {.name = "layernorm", .id = 2, .backward = layernorm_backward};

/* The weight is as long as the last dim or divides it: the heads of a row are normalised one by one. */
static bs_status norm_begin(const bsi_op *op, bs_tensor *x, const bs_weight *w, double eps,
                            bsi_space **out)
{
    char text[BSI_SHAPE_TEXT];
    const char *name = op->name;
    BSI_TRY(bsi_op_begin(op, 1, &x, out));
    if (x->ndim < 2 || x->dim[x->ndim - 1] % w->ref.count != 0 || bsi_tensor_row(x) < 1)
        return bsi_fail(BS_SHAPE,
                        "%s: x %s with weight '%s' [%lld]; the last dim must be a multiple of it", name,
                        bsi_shape_text(x, text), w->ref.info.name, (long long)w->ref.count);
    if (!(eps >= 0.0) || w->e != (*out)->e)
        return bsi_fail(BS_ARG, "%s: eps %g, weight '%s' %s", name, eps, w->ref.info.name,
                        w->e == (*out)->e ? "of this engine" : "of another engine");
    bsi_hash_text(*out, w->ref.info.name);
    bsi_hash_number(*out, eps);
    return BS_OK;
}

/* One launch of a norm: arg[2] or arg[3] is y, the last operand its statistics, `each` numbers a head.
   They are kept where a gradient is wanted. */
static bs_status norm_run(bsi_space *s, const bsi_op *op, bs_tensor *x, const bs_weight *w,
                          const bs_weight *b, bsi_kcall *c, int64_t each, bs_tensor **out)
{
    bs_tensor *y;
    bsi_value *stats;
    bsi_node *node;
    int n = c->n_args;
    int64_t T = c->n[0], C = c->n[1];
    BSI_TRY(bsi_op_like(s, x, x, &y));
    bool trainable = w->ref.grad.mem || (b && b->ref.grad.mem);
    bs_status st =
        bsi_value_new(s, BS_DTYPE_F32, x->dim[0], x->capacity, bsi_tensor_row(x) / C * each, &stats);
    if (st != BS_OK)
        return bsi_op_finish(st, op, y, out);
    c->arg[0] = bsi_act_read(s->e, x->value->at, T * C);
    c->arg[n - 2] = bsi_act_write(s->e, y->value->at, T * C);
    c->arg[n - 1] = bsi_write_f32(stats->at, T * each);
    c->label = op->name;
    st = bsi_op_launch(s->e, c);
    if (!bsi_tape_wants(s, 1, &x, trainable)) {
        bsi_value_free(s, stats);
    } else if (st == BS_OK && (st = bsi_node_new(s, op, 1, &x, y->value, &node)) == BS_OK) {
        node->ref[0] = w;
        node->ref[1] = b;
        for (int i = 0; i < 3; i++)
            node->n[i] = c->n[i];
        bsi_node_save(node, x->value);
        bsi_node_save(node, stats);
    }
    return bsi_op_finish(st, op, y, out);
}

bs_status bs_op_rmsnorm(bs_tensor *x, bs_weight *w, double eps, bool one_plus, bs_tensor **out)
{
    bsi_space *s;
    bsi_addr wa;
    int64_t C = w->ref.count;
    BSI_TRY(norm_begin(&rmsnorm_op, x, w, eps, &s));
    bsi_hash_ints(s, 3, (int64_t[]){w->ref.block, C, one_plus});
    BSI_TRY(bsi_wref_addr(s->e, &w->ref, &wa));
    bsi_kcall c = {.op = BSK_RMSNORM, .n_args = 4, .n = {x->value->count / C, C, one_plus}, .f = {eps}};
    c.arg[1] = bsi_act_read(s->e, wa, C);
    return norm_run(s, &rmsnorm_op, x, w, NULL, &c, 1, out);
}

bs_status bs_op_layernorm(bs_tensor *x, bs_weight *w, bs_weight *b, double eps, bs_tensor **out)
{
    bsi_space *s;
    bsi_addr wa, ba;
    int64_t C = w->ref.count;
    BSI_TRY(norm_begin(&layernorm_op, x, w, eps, &s));
    if (b->e != s->e || b->ref.block != w->ref.block || b->ref.count != C)
        return bsi_fail(
            BS_SHAPE,
            "layernorm: bias '%s' [%lld] of block %d with weight '%s' [%lld] of block %d; as "
            "many elements of the same block are expected",
            b->ref.info.name, (long long)b->ref.count, b->ref.block, w->ref.info.name, (long long)C,
            w->ref.block);
    bsi_hash_text(s, b->ref.info.name);
    bsi_hash_ints(s, 2, (int64_t[]){w->ref.block, C});
    BSI_TRY(bsi_wref_addr(s->e, &w->ref, &wa));
    BSI_TRY(bsi_wref_addr(s->e, &b->ref, &ba));
    bsi_kcall c = {.op = BSK_LAYERNORM, .n_args = 5, .n = {x->value->count / C, C}, .f = {eps}};
    c.arg[1] = bsi_act_read(s->e, wa, C);
    c.arg[2] = bsi_act_read(s->e, ba, C);
    return norm_run(s, &layernorm_op, x, w, b, &c, 2, out);
}
