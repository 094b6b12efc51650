/* SPDX-License-Identifier: Apache-2.0 */
/*
** ops_rows.c: the ops that read the scope's micro-batch: rope (positions), attention (row starts), labelled
** (trained positions), last (row ends). x has one row per token of the micro-batch. Owner thread only.
*/
#include "tensor/tensor.h"

#include <math.h>

_Static_assert((int)BS_ROPE_HALF == BSK_ROPE_HALF && (int)BS_ROPE_INTERLEAVED == BSK_ROPE_INTERLEAVED,
               "the words of the API are those of the kernels");

/* ---- rope ------------------------------------------------------------------------------------ */

bs_status bs_rope_new(bs_engine *e, const bs_array *inv_freq, double scaling, bs_rope_style style,
                      bs_rope **out)
{
    if (inv_freq->dtype != BS_DTYPE_F32 || inv_freq->ndim != 1 || inv_freq->dim[0] < 1)
        return bsi_fail(BS_SHAPE, "rope: inv_freq is %s of %d dims; f32 [n_freq] is expected",
                        bs_dtype_name(inv_freq->dtype), inv_freq->ndim);
    if ((unsigned)style > BS_ROPE_INTERLEAVED || !isfinite(scaling))
        return bsi_fail(BS_ARG, "rope: style %d, scaling %g", (int)style, scaling);
    bs_rope *r = bsi_alloc(BS_TAG_HEADER, sizeof *r);
    if (!r)
        return BS_NOMEM;
    *r = (bs_rope){.e = e, .n_freq = inv_freq->dim[0], .scaling = scaling, .style = style};
    r->id = bs_array_hash(inv_freq);
    bs_status st = bsi_pool_region(e->pool, "rope frequencies", inv_freq->bytes, &r->freq);
    if (st == BS_OK)
        st = bsi_engine_write(e, r->freq, inv_freq->data, inv_freq->bytes);
    if (st != BS_OK) {
        bsi_free(r);
        return bsi_wrap(st, "rope");
    }
    *out = r;
    return BS_OK;
}

void bs_rope_free(bs_rope *r)
{
    bsi_free(r);
}

bs_status bsi_rope_launch(bsi_space *s, const bs_rope *r, const int64_t thd[3], bool inverse,
                          bsi_addr x, bsi_addr y)
{
    const bsi_micro *m = &s->scope.batch->micro[s->scope.micro];
    int64_t N = thd[0] * thd[1] * thd[2];
    bsi_kcall c = {.op = BSK_ROPE,
                   .n_args = 4,
                   .n = {thd[0], thd[1], thd[2], r->n_freq, r->style, inverse},
                   .f = {r->scaling},
                   .label = "rope"};
    c.arg[0] = bsi_act_read(s->e, x, N);
    c.arg[1] = (bsi_arg){m->pos, (size_t)thd[0] * sizeof(int32_t), BSI_READ};
    c.arg[2] = bsi_read_f32(r->freq, r->n_freq);
    c.arg[3] = bsi_act_write(s->e, y, N);
    return bsi_op_launch(s->e, &c);
}

bs_status bs_op_rope(bs_tensor *x, bs_rope *r, int heads, bs_tensor **out)
{
    bsi_space *s;
    bs_tensor *y;
    bsi_node *node;
    const bsi_micro *m;
    char text[BSI_SHAPE_TEXT];
    BSI_TRY(bsi_op_begin(BSI_OP_ROPE, 1, &x, &s));
    int64_t row = bsi_tensor_row(x);
    if (x->ndim < 2 || heads < 1 || row % heads != 0 || row / heads < 2 * r->n_freq)
        return bsi_fail(BS_SHAPE, "rope: x %s as %d heads; heads of at least %lld entries are expected",
                        bsi_shape_text(x, text), heads, (long long)(2 * r->n_freq));
    if (r->e != s->e)
        return bsi_fail(BS_ARG, "rope: made on another engine");
    BSI_TRY(bsi_scope_micro(s, "rope", x, &m));
    bsi_hash_ints(s, 3, (int64_t[]){heads, r->style, (int64_t)r->id});
    bsi_hash_number(s, r->scaling);
    BSI_TRY(bsi_tensor_new(s, x->ndim, x->dim, x->capacity, &y));
    int64_t thd[] = {x->dim[0], heads, row / heads};
    bs_status st = bsi_rope_launch(s, r, thd, false, x->value->at, y->value->at);
    if (st == BS_OK && bsi_tape_wants(s, 1, &x, false) &&
        (st = bsi_node_new(s, BSI_OP_ROPE, 1, &x, y->value, &node)) == BS_OK) {
        node->rope = r;
        for (int i = 0; i < 3; i++)
            node->n[i] = thd[i];
    }
    if (st != BS_OK) {
        bs_tensor_release(y);
        return bsi_wrap(st, "rope");
    }
    *out = y;
    return BS_OK;
}

/* ---- norm of each head, then rope ------------------------------------------------------------ */

/* The operands and sizes that forward and backward share. n: T, H, D, one_plus */
bs_status bsi_norm_rope_call(bsi_space *s, const bs_weight *w, const bs_rope *r, const int64_t n[4],
                             bsi_addr x, bsi_kcall *c)
{
    const bsi_micro *m = &s->scope.batch->micro[s->scope.micro];
    bsi_addr wa;
    BSI_TRY(bsi_weight_addr(w, &wa));
    c->arg[0] = bsi_act_read(s->e, x, n[0] * n[1] * n[2]);
    c->arg[1] = bsi_act_read(s->e, wa, n[2]);
    c->arg[2] = (bsi_arg){m->pos, (size_t)n[0] * sizeof(int32_t), BSI_READ};
    c->arg[3] = bsi_read_f32(r->freq, r->n_freq);
    const int64_t sizes[] = {n[0], n[1], n[2], r->n_freq, r->style, n[3]};
    for (int i = 0; i < 6; i++)
        c->n[i] = sizes[i];
    return BS_OK;
}

static bs_status check_norm_rope(bsi_space *s, bs_tensor *x, const bs_weight *w, double eps,
                                 const bs_rope *r, int heads)
{
    char text[BSI_SHAPE_TEXT];
    const bsi_micro *m;
    int64_t row = bsi_tensor_row(x), D = w->ref.count;
    if (x->ndim < 2 || heads < 1 || row != heads * D || D < 2 * r->n_freq || D > BSK_NORM_ROPE_HEAD)
        return bsi_fail(
            BS_SHAPE,
            "norm_rope: x %s as %d heads with weight '%s' [%lld]; heads as long as the weight, of "
            "%lld to %d entries are expected",
            bsi_shape_text(x, text), heads, w->ref.info.name, (long long)D, (long long)(2 * r->n_freq),
            BSK_NORM_ROPE_HEAD);
    if (!(eps >= 0.0) || w->e != s->e || r->e != s->e)
        return bsi_fail(BS_ARG, "norm_rope: eps %g, weight '%s' and rope of %s", eps, w->ref.info.name,
                        w->e == s->e && r->e == s->e ? "this engine" : "another engine");
    return bsi_scope_micro(s, "norm_rope", x, &m);
}

bs_status bs_op_norm_rope(bs_tensor *x, bs_weight *w, double eps, bool one_plus, bs_rope *r, int heads,
                          bs_tensor **out)
{
    bsi_space *s;
    bs_tensor *y;
    bsi_value *rstd;
    bsi_node *node;
    BSI_TRY(bsi_op_begin(BSI_OP_NORM_ROPE, 1, &x, &s));
    BSI_TRY(check_norm_rope(s, x, w, eps, r, heads));
    const int64_t n[] = {x->dim[0], heads, w->ref.count, one_plus};
    bsi_hash_text(s, w->ref.info.name);
    bsi_hash_ints(s, 5, (int64_t[]){w->ref.block, heads, one_plus, r->style, (int64_t)r->id});
    bsi_hash_number(s, eps);
    bsi_hash_number(s, r->scaling);
    bsi_kcall c = {.op = BSK_NORM_ROPE, .n_args = 6, .f = {eps, r->scaling}, .label = "norm and rope"};
    BSI_TRY(bsi_norm_rope_call(s, w, r, n, x->value->at, &c));
    BSI_TRY(bsi_tensor_new(s, x->ndim, x->dim, x->capacity, &y));
    bs_status st = bsi_value_new(s, BS_DTYPE_F32, n[0], x->capacity, heads, &rstd);
    if (st == BS_OK) {
        c.arg[4] = bsi_act_write(s->e, y->value->at, n[0] * n[1] * n[2]);
        c.arg[5] = bsi_write_f32(rstd->at, n[0] * n[1]);
        st = bsi_op_launch(s->e, &c);
        if (!bsi_tape_wants(s, 1, &x, w->ref.grad.mem)) {
            bsi_value_free(s, rstd);
        } else if (st == BS_OK &&
                   (st = bsi_node_new(s, BSI_OP_NORM_ROPE, 1, &x, y->value, &node)) == BS_OK) {
            node->ref = w;
            node->rope = r;
            for (int i = 0; i < 4; i++)
                node->n[i] = n[i];
            bsi_node_save(node, x->value);
            bsi_node_save(node, rstd);
        }
    }
    if (st != BS_OK) {
        bs_tensor_release(y);
        return bsi_wrap(st, "norm_rope");
    }
    *out = y;
    return BS_OK;
}

/* ---- attention ------------------------------------------------------------------------------- */

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
    BSI_TRY(bsi_node_new(s, BSI_OP_ATTENTION, 3, in, o, &node));
    node->ref = sinks;
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
    BSI_TRY(bsi_op_begin(BSI_OP_ATTENTION, 3, in, &s));
    BSI_TRY(bsi_attention_check(a, in));
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
    if (st != BS_OK) {
        bs_tensor_release(y);
        return bsi_wrap(st, "attention");
    }
    *out = y;
    return BS_OK;
}

/* ---- embed ----------------------------------------------------------------------------------- */

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
    if (w->e != e || w->ref.info.ndim != 2)
        return bsi_fail(BS_SHAPE, "embed: '%s' is no table [vocab, channels] of this engine",
                        w->ref.info.name);
    const bsi_micro *m = &s->scope.batch->micro[s->scope.micro];
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

/* ---- labelled -------------------------------------------------------------------------------- */

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

bs_status bs_op_labelled(bs_tensor *x, bs_tensor **out)
{
    bsi_space *s;
    bs_tensor *y;
    bsi_node *node;
    const bsi_micro *m;
    BSI_TRY(bsi_op_begin(BSI_OP_LABELLED, 1, &x, &s));
    BSI_TRY(bsi_scope_micro(s, "labelled", x, &m));
    bs_status st = gather(s, x, m->label_at, m->labelled, &y);
    if (st != BS_OK)
        return bsi_wrap(st, "labelled");
    if (bsi_tape_wants(s, 1, &x, false)) {
        st = bsi_node_new(s, BSI_OP_LABELLED, 1, &x, y->value, &node);
        if (st != BS_OK) {
            bs_tensor_release(y);
            return bsi_wrap(st, "labelled");
        }
        node->n[0] = m->labelled;
        node->n[1] = bsi_tensor_row(x);
    }
    *out = y;
    return BS_OK;
}

bs_status bs_op_last(bs_tensor *x, bs_tensor **out)
{
    bsi_space *s;
    const bsi_micro *m;
    BSI_TRY(bsi_op_begin(BSI_OP_LAST, 1, &x, &s));
    if (bsi_tape_wants(s, 1, &x, false))
        return bsi_fail(BS_UNSUPPORTED, "last: it has no gradient; it is for walks without a tape");
    BSI_TRY(bsi_scope_micro(s, "last", x, &m));
    return bsi_wrap(gather(s, x, m->last_at, m->rows, out), "last");
}
