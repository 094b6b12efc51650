/* SPDX-License-Identifier: Apache-2.0 */
/*
** ops_rope.c: rotations of heads by their positions, alone and after an RMS norm of each head. x has one row per
** token of the scope's micro-batch, which has the positions. Owner thread only.
*/
#include "tensor/op.h"

#include <math.h>

_Static_assert((int)BS_ROPE_HALF == BSK_ROPE_HALF && (int)BS_ROPE_INTERLEAVED == BSK_ROPE_INTERLEAVED,
               "the words of the API are those of the kernels");

struct bs_rope {
    bs_engine *e;
    bsi_addr freq; /* f32 [n_freq], a region */
    int64_t n_freq;
    double scaling;
    bs_rope_style style;
    uint64_t id; /* hash of the frequencies, for the op hash */
};

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

/* ---- rope ------------------------------------------------------------------------------------ */

/* thd: tokens, heads, head dim. y = x rotated by the scope's positions; inverse: the other way. */
static bs_status rope_launch(bsi_space *s, const bs_rope *r, const int64_t thd[3], bool inverse,
                             bsi_addr x, bsi_addr y)
{
    const bsi_micro *m = bsi_op_micro(s);
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

static bs_status rope_backward(bsi_space *s, const bsi_node *node, bsi_value *dy)
{
    bsi_value *dx;
    BSI_TRY(bsi_grad_open(s, node->in[0], &dx));
    BSI_TRY(rope_launch(s, node->ref[0], node->n, true, dy->at, dx->at));
    return bsi_grad_close(s, node->in[0], dx);
}

static const bsi_op rope_op = {.name = "rope", .id = 3, .backward = rope_backward};

bs_status bs_op_rope(bs_tensor *x, bs_rope *r, int heads, bs_tensor **out)
{
    bsi_space *s;
    bs_tensor *y;
    bsi_node *node;
    const bsi_micro *m;
    char text[BSI_SHAPE_TEXT];
    BSI_TRY(bsi_op_begin(&rope_op, 1, &x, &s));
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
    bs_status st = rope_launch(s, r, thd, false, x->value->at, y->value->at);
    if (st == BS_OK && bsi_tape_wants(s, 1, &x, false) &&
        (st = bsi_node_new(s, &rope_op, 1, &x, y->value, &node)) == BS_OK) {
        node->ref[0] = r;
        for (int i = 0; i < 3; i++)
            node->n[i] = thd[i];
    }
    return bsi_op_finish(st, &rope_op, y, out);
}

/* ---- norm of each head, then rope ------------------------------------------------------------ */

/* The operands and sizes that forward and backward share. n: T, H, D, one_plus */
static bs_status norm_rope_call(bsi_space *s, const bs_weight *w, const bs_rope *r, const int64_t n[4],
                                bsi_addr x, bsi_kcall *c)
{
    const bsi_micro *m = bsi_op_micro(s);
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

static bs_status norm_rope_backward(bsi_space *s, const bsi_node *node, bsi_value *dy)
{
    const bs_weight *w = node->ref[0];
    const bs_rope *r = node->ref[1];
    const int64_t *n = node->n, N = n[0] * n[1] * n[2];
    bsi_value *dx;
    bool add;
    bsi_kcall c = {
        .op = BSK_NORM_ROPE_BWD, .n_args = 8, .f = {r->scaling}, .label = "norm and rope backward"};
    BSI_TRY(norm_rope_call(s, w, r, n, node->saved[0]->at, &c));
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

static const bsi_op norm_rope_op = {.name = "norm_rope", .id = 4, .backward = norm_rope_backward};

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
    BSI_TRY(bsi_op_begin(&norm_rope_op, 1, &x, &s));
    BSI_TRY(check_norm_rope(s, x, w, eps, r, heads));
    const int64_t n[] = {x->dim[0], heads, w->ref.count, one_plus};
    bsi_hash_text(s, w->ref.info.name);
    bsi_hash_ints(s, 5, (int64_t[]){w->ref.block, heads, one_plus, r->style, (int64_t)r->id});
    bsi_hash_number(s, eps);
    bsi_hash_number(s, r->scaling);
    bsi_kcall c = {.op = BSK_NORM_ROPE, .n_args = 6, .f = {eps, r->scaling}, .label = "norm and rope"};
    BSI_TRY(norm_rope_call(s, w, r, n, x->value->at, &c));
    BSI_TRY(bsi_tensor_new(s, x->ndim, x->dim, x->capacity, &y));
    bs_status st = bsi_value_new(s, BS_DTYPE_F32, n[0], x->capacity, heads, &rstd);
    if (st == BS_OK) {
        c.arg[4] = bsi_act_write(s->e, y->value->at, n[0] * n[1] * n[2]);
        c.arg[5] = bsi_write_f32(rstd->at, n[0] * n[1]);
        st = bsi_op_launch(s->e, &c);
        if (!bsi_tape_wants(s, 1, &x, w->ref.grad.mem)) {
            bsi_value_free(s, rstd);
        } else if (st == BS_OK &&
                   (st = bsi_node_new(s, &norm_rope_op, 1, &x, y->value, &node)) == BS_OK) {
            node->ref[0] = w;
            node->ref[1] = r;
            for (int i = 0; i < 4; i++)
                node->n[i] = n[i];
            bsi_node_save(node, x->value);
            bsi_node_save(node, rstd);
        }
    }
    return bsi_op_finish(st, &norm_rope_op, y, out);
}
