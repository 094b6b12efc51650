/* SPDX-License-Identifier: Apache-2.0 */
/*
** ops_gather.c: ops that pick rows by what the scope's micro-batch says: embed (token ids), labelled (trained
** positions), last (row ends). Owner thread only.
*/
#include "tensor/op.h"

static bs_status check_ids(const bsi_micro *m, const bsi_wref *table)
{
    for (int64_t t = 0; t < m->tokens; t++)
        if (m->ids[t] < 0 || m->ids[t] >= table->info.dim[0])
            return bsi_fail(BS_ARG,
                            "embed: token %lld: id %lld is outside the table '%s' of %lld rows; the "
                            "tokenizer does not belong to this model",
                            (long long)t, (long long)m->ids[t], table->info.name,
                            (long long)table->info.dim[0]);
    return BS_OK;
}

bs_status bs_op_embed(bs_engine *e, bs_weight *w, bs_tensor **out)
{
    bsi_space *s;
    bs_tensor *y;
    bsi_addr table;
    BSI_TRY(bsi_scope_get(e, "embed", &s));
    if (s->scope.walked || !s->scope.batch)
        return bsi_fail(BS_STATE, "embed: scope '%s' %s", s->scope.label->text,
                        s->scope.batch ? "has run its backward pass; no op can follow"
                                       : "has no micro-batch");
    BSI_TRY(bsi_scope_whole(s, "embed"));
    if (w->e != e || w->ref.info.ndim != 2)
        return bsi_fail(BS_SHAPE, "embed: '%s' is no table [vocab, channels] of this engine",
                        w->ref.info.name);
    const bsi_micro *m = bsi_op_micro(s);
    int64_t n = m->tokens, C = w->ref.info.dim[1];
    BSI_TRY(check_ids(m, &w->ref));
    BSI_TRY(bsi_weight_addr(w, &table));
    BSI_TRY(bsi_tensor_new(s, 2, (int64_t[]){n, C}, s->scope.batch->cfg.tokens, &y));
    bsi_kcall c = {.op = BSK_GATHER_ROWS, .n_args = 3, .n = {n, C}, .label = "embed"};
    c.arg[0] = bsi_act_read(e, table, w->ref.count);
    c.arg[1] = (bsi_arg){m->dev_ids, (size_t)n * sizeof(int32_t), BSI_READ};
    c.arg[2] = bsi_act_write(e, y->value->at, n * C);
    bs_status st = bsi_op_launch(e, &c);
    if (st != BS_OK) {
        bs_tensor_release(y);
        return bsi_wrap(st, "embed");
    }
    *out = y;
    return BS_OK;
}

/* y[i] = x[at[i]] for i < n */
static bs_status gather(bsi_space *s, bs_tensor *x, bsi_addr at, int64_t n, bs_tensor **out)
{
    int64_t C = bsi_tensor_row(x);
    BSI_TRY(bsi_tensor_new(s, 2, (int64_t[]){n, C}, x->capacity, out));
    bsi_kcall c = {.op = BSK_GATHER_ROWS, .n_args = 3, .n = {n, C}, .label = "gather rows"};
    c.arg[0] = bsi_act_read(s->e, x->value->at, x->dim[0] * C);
    c.arg[1] = (bsi_arg){at, (size_t)n * sizeof(int32_t), BSI_READ};
    c.arg[2] = bsi_act_write(s->e, (*out)->value->at, n * C);
    bs_status st = bsi_op_launch(s->e, &c);
    if (st != BS_OK)
        bs_tensor_release(*out);
    return st;
}

/* dx = 0; dx[label_at[i]] += dy[i]. Zeroed also where a gradient is there already: one path, one order.
 */
static bs_status labelled_backward(bsi_space *s, const bsi_node *node, bsi_value *dy)
{
    const int64_t n = node->n[0], C = node->n[1];
    const bsi_micro *m = bsi_op_micro(s);
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

static const bsi_op labelled_op = {.name = "labelled", .id = 14, .backward = labelled_backward};

bs_status bs_op_labelled(bs_tensor *x, bs_tensor **out)
{
    bsi_space *s;
    bs_tensor *y;
    bsi_node *node;
    const bsi_micro *m;
    BSI_TRY(bsi_op_begin(&labelled_op, 1, &x, &s));
    BSI_TRY(bsi_scope_whole(s, "labelled"));
    BSI_TRY(bsi_scope_micro(s, "labelled", x, &m));
    bs_status st = gather(s, x, m->label_at, m->labelled, &y);
    if (st != BS_OK)
        return bsi_wrap(st, "labelled");
    if (bsi_tape_wants(s, 1, &x, false)) {
        st = bsi_node_new(s, &labelled_op, 1, &x, y->value, &node);
        if (st != BS_OK)
            return bsi_op_finish(st, &labelled_op, y, out);
        node->n[0] = m->labelled;
        node->n[1] = bsi_tensor_row(x);
    }
    *out = y;
    return BS_OK;
}

static const bsi_op last_op = {.name = "last", .id = 15};

bs_status bs_op_last(bs_tensor *x, bs_tensor **out)
{
    bsi_space *s;
    const bsi_micro *m;
    BSI_TRY(bsi_op_begin(&last_op, 1, &x, &s));
    if (bsi_tape_wants(s, 1, &x, false))
        return bsi_fail(BS_UNSUPPORTED, "last: it has no gradient; it is for walks without a tape");
    BSI_TRY(bsi_scope_whole(s, "last"));
    BSI_TRY(bsi_scope_micro(s, "last", x, &m));
    return bsi_wrap(gather(s, x, m->last_at, m->rows, out), "last");
}
