/* SPDX-License-Identifier: Apache-2.0 */
/*
** ops_attention.c: causal attention inside each row of the scope's micro-batch, with a window, a softcap and sinks
** where they are asked for. Sizes: T tokens, H heads, K heads of keys and values, D entries of a head. Owner thread
** only.
*/
#include "tensor/op.h"

#include <math.h>

static bs_status check_sinks(const bs_attention_cfg *a, const bs_engine *e)
{
    const bs_weight *w = a->sinks;
    if (w && (w->e != e || w->ref.count != a->heads))
        return bsi_fail(
            BS_SHAPE, "attention: sinks '%s' [%lld]%s with %d heads; one for each is expected",
            w->ref.info.name, (long long)w->ref.count, w->e == e ? "" : " of another engine", a->heads);
    return BS_OK;
}

bs_status bsi_attention_check(const bs_attention_cfg *a, bs_tensor *const in[3])
{
    char t[3][BSI_SHAPE_TEXT];
    BSI_TRY(check_sinks(a, in[0]->space->e));
    if (a->heads < 1 || a->kv_heads < 1 || a->head_dim < 1 || a->heads % a->kv_heads != 0 ||
        a->window < 0 || !(a->softcap >= 0.0) || !isfinite(a->scale))
        return bsi_fail(
            BS_ARG,
            "attention: heads %d, kv_heads %d, head_dim %d, window %lld, softcap %g, scale "
            "%g; positive sizes, heads a multiple of kv_heads, window and softcap >= 0 are expected",
            a->heads, a->kv_heads, a->head_dim, (long long)a->window, a->softcap, a->scale);
    const int64_t want[] = {a->heads, a->kv_heads, a->kv_heads};
    for (int i = 0; i < 3; i++)
        if (in[i]->ndim < 2 || in[i]->dim[0] != in[0]->dim[0] ||
            bsi_tensor_row(in[i]) != want[i] * a->head_dim)
            return bsi_fail(BS_SHAPE, "attention: q %s, k %s, v %s with %d heads, %d kv_heads of %d",
                            bsi_shape_text(in[0], t[0]), bsi_shape_text(in[1], t[1]),
                            bsi_shape_text(in[2], t[2]), a->heads, a->kv_heads, a->head_dim);
    return BS_OK;
}

bs_status bsi_attention_sinks(bsi_space *s, const bs_weight *sinks, bsi_arg *out)
{
    bsi_addr at;
    if (!sinks)
        return BS_OK;
    BSI_TRY(bsi_weight_addr(sinks, &at));
    *out = bsi_act_read(s->e, at, sinks->ref.count);
    return BS_OK;
}

/* ---- backward -------------------------------------------------------------------------------- */

/* The gradient of sinks whose weight has one. n: T, H, K, D */
static bs_status sinks_grad(bsi_space *s, const bsi_node *node, const bsi_value *dy)
{
    const bs_weight *w = node->ref[0];
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

/* Takes node->saved: q, k, v, o, lse. The sinks' gradient needs o and lse and nothing of the scores, because lse
   already contains their share; for the same reason the kernel below does not know of them. */
static bs_status attention_backward(bsi_space *s, const bsi_node *node, bsi_value *dy)
{
    const int64_t *n = node->n, q = n[0] * n[1] * n[3], kv = n[0] * n[2] * n[3];
    const bsi_micro *m = bsi_op_micro(s);
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
    return bsi_grad_close_all(st, s, 3, node->in, g);
}

static const bsi_op attention_op = {.name = "attention", .id = 5, .backward = attention_backward};

/* ---- forward --------------------------------------------------------------------------------- */

/* n: T, H, K, D, n_rows, window, capacity; as in bsk.h */
static bs_status launch_attention(bsi_space *s, const bsi_micro *m, const bsi_kcall *shape,
                                  bs_tensor *const in[3], bsi_addr o, bsi_addr lse)
{
    bsi_kcall c = *shape;
    const int64_t *n = c.n;
    int64_t q = n[0] * n[1] * n[3], kv = n[0] * n[2] * n[3];
    bsi_addr scratch;
    size_t bytes = bsk_attention_scratch(n[6], n[1], n[2], n[3]);
    BSI_TRY(bsi_arena_take(s->e->pool, bytes, &scratch));
    c.arg[0] = bsi_act_read(s->e, in[0]->value->at, q);
    c.arg[1] = bsi_act_read(s->e, in[1]->value->at, kv);
    c.arg[2] = bsi_act_read(s->e, in[2]->value->at, kv);
    c.arg[3] = (bsi_arg){m->cu, (size_t)(n[4] + 1) * sizeof(int32_t), BSI_READ};
    c.arg[4] = bsi_act_write(s->e, o, q);
    c.arg[5] = bsi_write_f32(lse, n[0] * n[1]);
    c.arg[6] = (bsi_arg){scratch, bytes, BSI_WRITE};
    bs_status st = bsi_op_launch(s->e, &c);
    bsi_arena_give(s->e->pool, scratch, bytes);
    return st;
}

static bs_status record_attention(bsi_space *s, const bsi_kcall *c, bs_tensor *const in[3],
                                  const bs_weight *sinks, bsi_value *o, bsi_value *lse)
{
    bsi_node *node;
    BSI_TRY(bsi_node_new(s, &attention_op, 3, in, o, &node));
    node->ref[0] = sinks;
    for (int i = 0; i < 7; i++)
        node->n[i] = c->n[i];
    node->f[0] = c->f[0];
    node->f[1] = c->f[1];
    for (int i = 0; i < 3; i++)
        bsi_node_save(node, in[i]->value);
    bsi_node_save(node, o);
    bsi_node_save(node, lse);
    return BS_OK;
}

bs_status bs_op_attention(bs_tensor *q, bs_tensor *k, bs_tensor *v, const bs_attention_cfg *a,
                          bs_tensor **out)
{
    bsi_space *s;
    bs_tensor *y, *in[] = {q, k, v};
    bsi_value *lse;
    const bsi_micro *m;
    BSI_TRY(bsi_op_begin(&attention_op, 3, in, &s));
    BSI_TRY(bsi_attention_check(a, in));
    BSI_TRY(bsi_scope_whole(s, "attention"));
    BSI_TRY(bsi_scope_micro(s, "attention", q, &m));
    double scale = a->scale != 0.0 ? a->scale : 1.0 / sqrt(a->head_dim);
    int64_t capacity = BSI_MAX(q->capacity, BSI_MAX(k->capacity, v->capacity));
    bsi_kcall c = {.op = BSK_ATTENTION,
                   .n_args = 8,
                   .n = {m->tokens, a->heads, a->kv_heads, a->head_dim, m->rows, a->window, capacity},
                   .f = {scale, a->softcap},
                   .label = "attention"};
    bsi_hash_ints(s, 4, (int64_t[]){a->heads, a->kv_heads, a->head_dim, a->window});
    bsi_hash_number(s, scale);
    bsi_hash_number(s, a->softcap);
    if (a->sinks)
        bsi_hash_text(s, a->sinks->ref.info.name);
    BSI_TRY(bsi_attention_sinks(s, a->sinks, &c.arg[7]));
    BSI_TRY(
        bsi_tensor_new(s, 2, (int64_t[]){m->tokens, (int64_t)a->heads * a->head_dim}, capacity, &y));
    bool wants = bsi_tape_wants(s, 3, in, a->sinks && a->sinks->ref.grad.mem);
    bs_status st = bsi_value_new(s, BS_DTYPE_F32, m->tokens, capacity, a->heads, &lse);
    if (st == BS_OK) {
        st = launch_attention(s, m, &c, in, y->value->at, lse->at);
        if (!wants)
            bsi_value_free(s, lse);
        else if (st == BS_OK)
            st = record_attention(s, &c, in, a->sinks, y->value, lse);
    }
    return bsi_op_finish(st, &attention_op, y, out);
}
