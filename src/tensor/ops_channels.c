/* SPDX-License-Identifier: Apache-2.0 */
/*
** ops_channels.c: ops that change what the channels of a row are: softmax over them, some of them, all of them
** times a column; and views. Sizes: T rows, C channels. Owner thread only.
*/
#include "tensor/op.h"

static bs_status softmax_backward(bsi_space *s, const bsi_node *node, bsi_value *dy)
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

static const bsi_op softmax_op = {.name = "softmax", .id = 11, .backward = softmax_backward};

bs_status bs_op_softmax(bs_tensor *x, bs_tensor **out)
{
    bsi_space *s;
    bs_tensor *y;
    bsi_node *node;
    BSI_TRY(bsi_op_begin(&softmax_op, 1, &x, &s));
    BSI_TRY(bsi_op_need_channels("softmax", x));
    BSI_TRY(bsi_op_like(s, x, x, &y));
    int64_t N = x->value->count, C = x->dim[x->ndim - 1];
    bsi_kcall c = {.op = BSK_SOFTMAX, .n_args = 2, .n = {N / C, C}, .label = "softmax"};
    c.arg[0] = bsi_act_read(s->e, x->value->at, N);
    c.arg[1] = bsi_act_write(s->e, y->value->at, N);
    bs_status st = bsi_op_launch(s->e, &c);
    if (st == BS_OK && bsi_tape_wants(s, 1, &x, false) &&
        (st = bsi_node_new(s, &softmax_op, 1, &x, y->value, &node)) == BS_OK) {
        node->n[0] = N / C;
        node->n[1] = C;
        bsi_node_save(node, y->value);
    }
    return bsi_op_finish(st, &softmax_op, y, out);
}

static bs_status glu_clamped_backward(bsi_space *s, const bsi_node *node, bsi_value *dy)
{
    const int64_t T = node->n[0], H = node->n[1];
    bsi_value *dx;
    BSI_TRY(bsi_grad_open(s, node->in[0], &dx));
    bsi_kcall c = {.op = BSK_GLU_CLAMPED_BWD,
                   .n_args = 3,
                   .n = {T, H},
                   .f = {node->f[0], node->f[1]},
                   .label = "glu_clamped backward"};
    c.arg[0] = bsi_act_read(s->e, node->saved[0]->at, 2 * T * H);
    c.arg[1] = bsi_act_read(s->e, dy->at, T * H);
    c.arg[2] = bsi_act_write(s->e, dx->at, 2 * T * H);
    BSI_TRY(bsi_op_launch(s->e, &c));
    return bsi_grad_close(s, node->in[0], dx);
}

static const bsi_op glu_clamped_op = {
    .name = "glu_clamped", .id = 19, .backward = glu_clamped_backward};

bs_status bs_op_glu_clamped(bs_tensor *x, double alpha, double limit, bs_tensor **out)
{
    bsi_space *s;
    bs_tensor *y;
    bsi_node *node;
    char text[BSI_SHAPE_TEXT];
    BSI_TRY(bsi_op_begin(&glu_clamped_op, 1, &x, &s));
    BSI_TRY(bsi_op_need_channels("glu_clamped", x));
    int64_t T = x->dim[0], C = bsi_tensor_row(x);
    if (C % 2)
        return bsi_fail(BS_SHAPE,
                        "glu_clamped: x %s; gate and up in turn are an even number of channels",
                        bsi_shape_text(x, text));
    bsi_hash_number(s, alpha);
    bsi_hash_number(s, limit);
    BSI_TRY(bsi_tensor_new(s, 2, (int64_t[]){T, C / 2}, x->capacity, &y));
    bsi_kcall c = {.op = BSK_GLU_CLAMPED,
                   .n_args = 2,
                   .n = {T, C / 2},
                   .f = {alpha, limit},
                   .label = "glu_clamped"};
    c.arg[0] = bsi_act_read(s->e, x->value->at, T * C);
    c.arg[1] = bsi_act_write(s->e, y->value->at, T * C / 2);
    bs_status st = bsi_op_launch(s->e, &c);
    if (st == BS_OK && bsi_tape_wants(s, 1, &x, false) &&
        (st = bsi_node_new(s, &glu_clamped_op, 1, &x, y->value, &node)) == BS_OK) {
        node->n[0] = T;
        node->n[1] = C / 2;
        node->f[0] = alpha;
        node->f[1] = limit;
        bsi_node_save(node, x->value);
    }
    return bsi_op_finish(st, &glu_clamped_op, y, out);
}

static bs_status columns_backward(bsi_space *s, const bsi_node *node, bsi_value *dy)
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

static const bsi_op columns_op = {.name = "columns", .id = 12, .backward = columns_backward};

bs_status bs_op_columns(bs_tensor *x, int64_t first, int64_t n, bs_tensor **out)
{
    bsi_space *s;
    bs_tensor *y;
    bsi_node *node;
    char text[BSI_SHAPE_TEXT];
    BSI_TRY(bsi_op_begin(&columns_op, 1, &x, &s));
    BSI_TRY(bsi_op_need_channels("columns", x));
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
        (st = bsi_node_new(s, &columns_op, 1, &x, y->value, &node)) == BS_OK) {
        for (int i = 0; i < 4; i++)
            node->n[i] = c.n[i];
    }
    return bsi_op_finish(st, &columns_op, y, out);
}

static bs_status row_scale_backward(bsi_space *s, const bsi_node *node, bsi_value *dy)
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
    return bsi_grad_close_all(bsi_op_launch(s->e, &c), s, 2, node->in, g);
}

static const bsi_op row_scale_op = {.name = "row_scale", .id = 13, .backward = row_scale_backward};

bs_status bs_op_row_scale(bs_tensor *x, bs_tensor *g, int64_t column, bs_tensor **out)
{
    bsi_space *s;
    bs_tensor *y, *in[] = {x, g};
    bsi_node *node;
    char tx[BSI_SHAPE_TEXT], tg[BSI_SHAPE_TEXT];
    BSI_TRY(bsi_op_begin(&row_scale_op, 2, in, &s));
    BSI_TRY(bsi_op_need_channels("row_scale", x));
    int64_t T = x->dim[0], C = bsi_tensor_row(x), G = bsi_tensor_row(g);
    if (g->dim[0] != T || column < 0 || column >= G)
        return bsi_fail(BS_SHAPE,
                        "row_scale: x %s with column %lld of g %s; as many rows and a column of g are "
                        "expected",
                        bsi_shape_text(x, tx), (long long)column, bsi_shape_text(g, tg));
    bsi_hash_ints(s, 1, &column);
    BSI_TRY(bsi_op_like(s, x, x, &y));
    bsi_kcall c = {.op = BSK_ROW_SCALE, .n_args = 3, .n = {T, C, G, column}, .label = "row_scale"};
    c.arg[0] = bsi_act_read(s->e, x->value->at, T * C);
    c.arg[1] = bsi_act_read(s->e, g->value->at, T * G);
    c.arg[2] = bsi_act_write(s->e, y->value->at, T * C);
    bs_status st = bsi_op_launch(s->e, &c);
    if (st == BS_OK && bsi_tape_wants(s, 2, in, false) &&
        (st = bsi_node_new(s, &row_scale_op, 2, in, y->value, &node)) == BS_OK) {
        for (int i = 0; i < 4; i++)
            node->n[i] = c.n[i];
        bsi_node_save(node, x->value);
        bsi_node_save(node, g->value);
    }
    return bsi_op_finish(st, &row_scale_op, y, out);
}

/* Shares value and gradient with x, so that it is no node of the tape. */
static const bsi_op view_op = {.name = "view", .id = 17, .shares = true};

/* Rows and capacity change by the ratio of the row sizes, so that an empty tensor has views too. */
bs_status bs_op_view(bs_tensor *x, int ndim, const int64_t *dim, bs_tensor **out)
{
    bsi_space *s;
    char text[BSI_SHAPE_TEXT];
    bs_tensor *y, want = {.ndim = ndim};
    BSI_TRY(bsi_op_begin(&view_op, 1, &x, &s));
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
