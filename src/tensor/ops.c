/* SPDX-License-Identifier: Apache-2.0 */
/*
** ops.c: the ops on activations. Each checks shapes, allocates its output by capacity, launches,
** records. What a node holds in n[] and saved[] is read by the rule of the same op in grad.c. Sizes: T
** rows, C channels, N elements. Owner thread only.
*/
#include "tensor/tensor.h"

_Static_assert((int)BS_ACT_SILU == BSK_SILU && (int)BS_ACT_GELU_TANH == BSK_GELU_TANH &&
                   (int)BS_ACT_GELU_ERF == BSK_GELU_ERF && (int)BS_ACT_RELU == BSK_RELU,
               "activations are handed to kernels by number");

static bs_status same_shape(const char *op, const bs_tensor *a, const bs_tensor *b)
{
    char ta[BSI_SHAPE_TEXT], tb[BSI_SHAPE_TEXT];
    bool same = a->ndim == b->ndim;
    for (int i = 0; same && i < a->ndim; i++)
        same = a->dim[i] == b->dim[i];
    if (!same)
        return bsi_fail(BS_SHAPE, "%s: %s with %s; the shapes must be equal", op, bsi_shape_text(a, ta),
                        bsi_shape_text(b, tb));
    return BS_OK;
}

static bs_status need_channels(const char *op, const bs_tensor *x)
{
    char text[BSI_SHAPE_TEXT];
    if (x->ndim < 2 || bsi_tensor_row(x) < 1)
        return bsi_fail(BS_SHAPE, "%s: x %s; rows of channels are expected", op,
                        bsi_shape_text(x, text));
    return BS_OK;
}

/* Output shaped like a; capacity the larger of the two, equal in a scope of one batch. */
static bs_status like(bsi_space *s, const bs_tensor *a, const bs_tensor *b, bs_tensor **out)
{
    return bsi_tensor_new(s, a->ndim, a->dim, BSI_MAX(a->capacity, b->capacity), out);
}

/* Ends every op: hand out y, or drop it when something failed. */
static bs_status finish(bs_status st, bsi_op op, bs_tensor *y, bs_tensor **out)
{
    if (st != BS_OK) {
        bs_tensor_release(y);
        return bsi_wrap(st, "%s", bsi_op_name(op));
    }
    *out = y;
    return BS_OK;
}

/* ---- norms ----------------------------------------------------------------------------------- */

/* The weight is as long as the last dim or divides it: the heads of a row are normalised one by one. */
static bs_status norm_begin(bsi_op op, bs_tensor *x, const bs_weight *w, double eps, bsi_space **out)
{
    char text[BSI_SHAPE_TEXT];
    const char *name = bsi_op_name(op);
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
static bs_status norm_run(bsi_space *s, bsi_op op, bs_tensor *x, const bs_weight *w, const bs_weight *b,
                          bsi_kcall *c, int64_t each, bs_tensor **out)
{
    bs_tensor *y;
    bsi_value *stats;
    bsi_node *node;
    int n = c->n_args;
    int64_t T = c->n[0], C = c->n[1];
    BSI_TRY(like(s, x, x, &y));
    bool trainable = w->ref.grad.mem || (b && b->ref.grad.mem);
    bs_status st =
        bsi_value_new(s, BS_DTYPE_F32, x->dim[0], x->capacity, bsi_tensor_row(x) / C * each, &stats);
    if (st != BS_OK)
        return finish(st, op, y, out);
    c->arg[0] = bsi_act_read(s->e, x->value->at, T * C);
    c->arg[n - 2] = bsi_act_write(s->e, y->value->at, T * C);
    c->arg[n - 1] = bsi_write_f32(stats->at, T * each);
    c->label = bsi_op_name(op);
    st = bsi_op_launch(s->e, c);
    if (!bsi_tape_wants(s, 1, &x, trainable)) {
        bsi_value_free(s, stats);
    } else if (st == BS_OK && (st = bsi_node_new(s, op, 1, &x, y->value, &node)) == BS_OK) {
        node->ref = w;
        node->bias = b;
        for (int i = 0; i < 3; i++)
            node->n[i] = c->n[i];
        bsi_node_save(node, x->value);
        bsi_node_save(node, stats);
    }
    return finish(st, op, y, out);
}

bs_status bs_op_rmsnorm(bs_tensor *x, bs_weight *w, double eps, bool one_plus, bs_tensor **out)
{
    bsi_space *s;
    bsi_addr wa;
    int64_t C = w->ref.count;
    BSI_TRY(norm_begin(BSI_OP_RMSNORM, x, w, eps, &s));
    bsi_hash_ints(s, 3, (int64_t[]){w->ref.block, C, one_plus});
    BSI_TRY(bsi_wref_addr(s->e, &w->ref, &wa));
    bsi_kcall c = {.op = BSK_RMSNORM, .n_args = 4, .n = {x->value->count / C, C, one_plus}, .f = {eps}};
    c.arg[1] = bsi_act_read(s->e, wa, C);
    return norm_run(s, BSI_OP_RMSNORM, x, w, NULL, &c, 1, out);
}

bs_status bs_op_layernorm(bs_tensor *x, bs_weight *w, bs_weight *b, double eps, bs_tensor **out)
{
    bsi_space *s;
    bsi_addr wa, ba;
    int64_t C = w->ref.count;
    BSI_TRY(norm_begin(BSI_OP_LAYERNORM, x, w, eps, &s));
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
    return norm_run(s, BSI_OP_LAYERNORM, x, w, b, &c, 2, out);
}

/* ---- elementwise ----------------------------------------------------------------------------- */

static bs_status unary(bsi_op op, bsk_op kernel, bs_tensor *x, bool act, int64_t n1, double f,
                       bs_tensor **out)
{
    bsi_space *s;
    bs_tensor *y;
    bsi_node *node;
    BSI_TRY(bsi_op_begin(op, 1, &x, &s));
    bsi_hash_ints(s, 1, &n1);
    bsi_hash_number(s, f);
    BSI_TRY(like(s, x, x, &y));
    int64_t N = x->value->count;
    bsi_kcall c = {.op = kernel, .n_args = 2, .n = {N, n1}, .f = {f}, .label = bsi_op_name(op)};
    c.arg[0] = bsi_act_read(s->e, x->value->at, N);
    c.arg[1] = bsi_act_write(s->e, y->value->at, N);
    bs_status st = bsi_op_launch(s->e, &c);
    if (st == BS_OK && bsi_tape_wants(s, 1, &x, false) &&
        (st = bsi_node_new(s, op, 1, &x, y->value, &node)) == BS_OK) {
        node->n[0] = N;
        node->n[1] = n1;
        node->f[0] = f;
        if (act)
            bsi_node_save(node, x->value);
    }
    return finish(st, op, y, out);
}

static bs_status check_act(const char *op, bs_act act)
{
    if ((unsigned)act > BS_ACT_RELU)
        return bsi_fail(BS_ARG, "%s: activation %d; 0..%d are known", op, (int)act, BS_ACT_RELU);
    return BS_OK;
}

bs_status bs_op_act(bs_tensor *x, bs_act act, bs_tensor **out)
{
    BSI_TRY(check_act("act", act));
    return unary(BSI_OP_ACT, BSK_ACT, x, true, act, 0.0, out);
}

bs_status bs_op_scale(bs_tensor *a, double f, bs_tensor **out)
{
    return unary(BSI_OP_SCALE, BSK_SCALE, a, false, 0, f, out);
}

static bs_status launch_binary(bsi_space *s, bsi_op op, const bsi_value *a, const bsi_value *b,
                               int64_t n1, const bsi_value *y)
{
    bsk_op kernel = op == BSI_OP_ADD ? BSK_ADD : op == BSI_OP_MUL ? BSK_MUL : BSK_GLU;
    bsi_kcall c = {.op = kernel, .n_args = 3, .n = {a->count, n1}, .label = bsi_op_name(op)};
    c.arg[0] = bsi_act_read(s->e, a->at, a->count);
    c.arg[1] = bsi_act_read(s->e, b->at, a->count);
    c.arg[2] = bsi_act_write(s->e, y->at, a->count);
    return bsi_op_launch(s->e, &c);
}

bs_status bsi_binary_forward(bsi_space *s, const bsi_node *node)
{
    return launch_binary(s, node->op, node->in[0], node->in[1], node->n[1], node->out);
}

static bs_status record_binary(bsi_space *s, bsi_op op, bs_tensor *const in[2], int64_t n1,
                               bsi_value *y)
{
    bsi_node *node;
    bsi_value *a = in[0]->value, *b = in[1]->value;
    BSI_TRY(bsi_node_new(s, op, 2, in, y, &node));
    node->n[0] = a->count;
    node->n[1] = n1;
    /* The gradient of one factor reads the other; a glu's reads both. */
    if (op == BSI_OP_GLU || (op == BSI_OP_MUL && b->wanted))
        bsi_node_save(node, a);
    if (op == BSI_OP_GLU || (op == BSI_OP_MUL && a->wanted))
        bsi_node_save(node, b);
    return BS_OK;
}

static bs_status binary(bsi_op op, bs_tensor *a, bs_tensor *b, int64_t n1, bs_tensor **out)
{
    bsi_space *s;
    bs_tensor *y, *in[] = {a, b};
    BSI_TRY(bsi_op_begin(op, 2, in, &s));
    BSI_TRY(same_shape(bsi_op_name(op), a, b));
    bsi_hash_ints(s, 1, &n1);
    BSI_TRY(bsi_tensor_late(s, a->ndim, a->dim, BSI_MAX(a->capacity, b->capacity), &y));
    bool recorded = bsi_tape_wants(s, 2, in, false);
    bs_status st = recorded ? record_binary(s, op, in, n1, y->value) : BS_OK;
    if (st == BS_OK && !y->value->late) {
        st = bsi_value_take(s, y->value);
        if (st == BS_OK)
            st = launch_binary(s, op, a->value, b->value, n1, y->value);
    }
    return finish(st, op, y, out);
}

bs_status bs_op_glu(bs_tensor *gate, bs_tensor *up, bs_act act, bs_tensor **out)
{
    BSI_TRY(check_act("glu", act));
    return binary(BSI_OP_GLU, gate, up, act, out);
}

bs_status bs_op_add(bs_tensor *a, bs_tensor *b, bs_tensor **out)
{
    return binary(BSI_OP_ADD, a, b, 0, out);
}

bs_status bs_op_mul(bs_tensor *a, bs_tensor *b, bs_tensor **out)
{
    return binary(BSI_OP_MUL, a, b, 0, out);
}

bs_status bs_op_accumulate(bs_tensor *acc, bs_tensor *x)
{
    BSI_TRY(bsi_tensor_check(acc, "accumulate"));
    BSI_TRY(bsi_tensor_check(x, "accumulate"));
    BSI_TRY(bsi_value_ready(x->space, x->value));
    if (acc->space != x->space)
        return bsi_fail(BS_ARG, "accumulate: tensors of two engines");
    bs_engine *e = x->space->e;
    if ((x->dtype != BS_DTYPE_F32 && x->dtype != e->dtype) ||
        (acc->dtype != BS_DTYPE_F32 && acc->dtype != x->dtype))
        return bsi_fail(BS_DTYPE, "accumulate: %s += %s; an activation goes into f32 or its own dtype",
                        bs_dtype_name(acc->dtype), bs_dtype_name(x->dtype));
    if (acc->value->owned || acc->value->wanted || acc->value->uses)
        return bsi_fail(BS_STATE,
                        "accumulate: the target must come from a store and not be on the tape");
    BSI_TRY(same_shape("accumulate", acc, x));
    int64_t N = x->value->count;
    bsi_kcall c = {.op = BSK_AXPY,
                   .n_args = 2,
                   .n = {N},
                   .f = {1.0},
                   .dtype = x->dtype,
                   .out = acc->dtype,
                   .label = "accumulate"};
    c.arg[0] = bsi_operand(x->value->at, x->dtype, N, BSI_READ);
    c.arg[1] = bsi_operand(acc->value->at, acc->dtype, N, BSI_READWRITE);
    return bsi_engine_launch(e, &c);
}

bs_status bs_op_activation(bs_tensor *x, bs_tensor **out)
{
    bs_tensor *y;
    BSI_TRY(bsi_tensor_check(x, "activation"));
    BSI_TRY(bsi_value_ready(x->space, x->value));
    bsi_space *s = x->space;
    bs_engine *e = s->e;
    if (x->dtype == e->dtype) {
        bs_tensor_retain(x);
        *out = x;
        return BS_OK;
    }
    if (x->dtype != BS_DTYPE_F32 && x->dtype != BS_DTYPE_BF16 && x->dtype != BS_DTYPE_F16)
        return bsi_fail(BS_DTYPE, "activation: %s cannot be made %s", bs_dtype_name(x->dtype),
                        bs_dtype_name(e->dtype));
    if (s->scope.walked)
        return bsi_fail(BS_STATE, "activation: scope '%s' has run its backward pass",
                        s->scope.label->text);
    BSI_TRY(like(s, x, x, &y));
    bsi_expand cast = {.from = x->value->at,
                       .to = y->value->at,
                       .stored = x->dtype,
                       .out = e->dtype,
                       .n = x->value->count,
                       .scale = 1.0};
    bs_status st = bsi_expand_launch(e, &cast, "activation");
    if (st != BS_OK) {
        bs_tensor_release(y);
        return st;
    }
    *out = y;
    return BS_OK;
}

/* ---- along rows ------------------------------------------------------------------------------ */

bs_status bs_op_softmax(bs_tensor *x, bs_tensor **out)
{
    bsi_space *s;
    bs_tensor *y;
    bsi_node *node;
    BSI_TRY(bsi_op_begin(BSI_OP_SOFTMAX, 1, &x, &s));
    BSI_TRY(need_channels("softmax", x));
    BSI_TRY(like(s, x, x, &y));
    int64_t N = x->value->count, C = x->dim[x->ndim - 1];
    bsi_kcall c = {.op = BSK_SOFTMAX, .n_args = 2, .n = {N / C, C}, .label = "softmax"};
    c.arg[0] = bsi_act_read(s->e, x->value->at, N);
    c.arg[1] = bsi_act_write(s->e, y->value->at, N);
    bs_status st = bsi_op_launch(s->e, &c);
    if (st == BS_OK && bsi_tape_wants(s, 1, &x, false) &&
        (st = bsi_node_new(s, BSI_OP_SOFTMAX, 1, &x, y->value, &node)) == BS_OK) {
        node->n[0] = N / C;
        node->n[1] = C;
        bsi_node_save(node, y->value);
    }
    return finish(st, BSI_OP_SOFTMAX, y, out);
}

bs_status bs_op_columns(bs_tensor *x, int64_t first, int64_t n, bs_tensor **out)
{
    bsi_space *s;
    bs_tensor *y;
    bsi_node *node;
    char text[BSI_SHAPE_TEXT];
    BSI_TRY(bsi_op_begin(BSI_OP_COLUMNS, 1, &x, &s));
    BSI_TRY(need_channels("columns", x));
    int64_t T = x->dim[0], C = bsi_tensor_row(x);
    if (first < 0 || n < 1 || first > C || n > C - first)
        return bsi_fail(BS_SHAPE, "columns: %lld columns from %lld on of x %s", (long long)n,
                        (long long)first, bsi_shape_text(x, text));
    bsi_hash_ints(s, 2, (int64_t[]){first, n});
    BSI_TRY(bsi_tensor_new(s, 2, (int64_t[]){T, n}, x->capacity, &y));
    bsi_kcall c = {.op = BSK_COLUMNS, .n_args = 2, .n = {T, C, first, n}, .label = "columns"};
    c.arg[0] = bsi_act_read(s->e, x->value->at, T * C);
    c.arg[1] = bsi_act_write(s->e, y->value->at, T * n);
    bs_status st = bsi_op_launch(s->e, &c);
    if (st == BS_OK && bsi_tape_wants(s, 1, &x, false) &&
        (st = bsi_node_new(s, BSI_OP_COLUMNS, 1, &x, y->value, &node)) == BS_OK) {
        for (int i = 0; i < 4; i++)
            node->n[i] = c.n[i];
    }
    return finish(st, BSI_OP_COLUMNS, y, out);
}

bs_status bs_op_row_scale(bs_tensor *x, bs_tensor *g, int64_t column, bs_tensor **out)
{
    bsi_space *s;
    bs_tensor *y, *in[] = {x, g};
    bsi_node *node;
    char tx[BSI_SHAPE_TEXT], tg[BSI_SHAPE_TEXT];
    BSI_TRY(bsi_op_begin(BSI_OP_ROW_SCALE, 2, in, &s));
    BSI_TRY(need_channels("row_scale", x));
    int64_t T = x->dim[0], C = bsi_tensor_row(x), G = bsi_tensor_row(g);
    if (g->dim[0] != T || column < 0 || column >= G)
        return bsi_fail(BS_SHAPE,
                        "row_scale: x %s with column %lld of g %s; as many rows and a column of g are "
                        "expected",
                        bsi_shape_text(x, tx), (long long)column, bsi_shape_text(g, tg));
    bsi_hash_ints(s, 1, &column);
    BSI_TRY(like(s, x, x, &y));
    bsi_kcall c = {.op = BSK_ROW_SCALE, .n_args = 3, .n = {T, C, G, column}, .label = "row_scale"};
    c.arg[0] = bsi_act_read(s->e, x->value->at, T * C);
    c.arg[1] = bsi_act_read(s->e, g->value->at, T * G);
    c.arg[2] = bsi_act_write(s->e, y->value->at, T * C);
    bs_status st = bsi_op_launch(s->e, &c);
    if (st == BS_OK && bsi_tape_wants(s, 2, in, false) &&
        (st = bsi_node_new(s, BSI_OP_ROW_SCALE, 2, in, y->value, &node)) == BS_OK) {
        for (int i = 0; i < 4; i++)
            node->n[i] = c.n[i];
        bsi_node_save(node, x->value);
        bsi_node_save(node, g->value);
    }
    return finish(st, BSI_OP_ROW_SCALE, y, out);
}

/* ---- shape ----------------------------------------------------------------------------------- */

/* Rows and capacity change by the ratio of the row sizes, so that an empty tensor has views too. */
bs_status bs_op_view(bs_tensor *x, int ndim, const int64_t *dim, bs_tensor **out)
{
    bsi_space *s;
    char text[BSI_SHAPE_TEXT];
    bs_tensor *y, want = {.ndim = ndim};
    BSI_TRY(bsi_op_begin(BSI_OP_VIEW, 1, &x, &s));
    if (ndim < 1 || ndim > BS_MAX_DIMS)
        return bsi_fail(BS_SHAPE, "view: %d dims; 1..%d are possible", ndim, BS_MAX_DIMS);
    int64_t row = 1, old = bsi_tensor_row(x);
    bool fits = dim[0] >= 0;
    for (int i = 0; i < ndim; i++) {
        want.dim[i] = dim[i];
        fits = fits && (i == 0 || (dim[i] >= 1 && !__builtin_mul_overflow(row, dim[i], &row)));
    }
    int64_t capacity = 0;
    if (fits && old % row == 0) {
        capacity = x->capacity * (old / row);
        fits = dim[0] == x->dim[0] * (old / row);
    } else if (fits && row % old == 0) {
        capacity = x->capacity / (row / old);
        fits = x->dim[0] % (row / old) == 0 && dim[0] == x->dim[0] / (row / old);
    } else {
        fits = false;
    }
    if (!fits) {
        char tw[BSI_SHAPE_TEXT];
        return bsi_fail(BS_SHAPE,
                        "view: %s as %s; the elements must be as many and dim 0 a multiple or divisor",
                        bsi_shape_text(x, text), bsi_shape_text(&want, tw));
    }
    bsi_hash_ints(s, ndim, dim);
    BSI_TRY(bsi_tensor_over(s, x->value, ndim, dim, capacity, &y));
    *out = y;
    return BS_OK;
}
