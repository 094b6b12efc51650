/* SPDX-License-Identifier: Apache-2.0 */
/*
** ops_linear.c: y = x W^T + b + scale * (drop(x) A^T) B^T + r, forward and backward; b, the adapter
** and the residual r where they are given. Sizes: T rows, C inputs, O outputs, R rank. The tape keeps x
** (only where a weight or A is trainable) and t = drop(x) A^T (only where B is); dropout is a function of
** (step, row, position, channel), so backward draws the same mask again. Owner thread only.
*/
#include "tensor/op.h"
#include "tensor/routing.h"

/* node->n of a linear */
enum { N_ROWS, N_CAPACITY, N_STEP, N_DROP };

typedef struct scratch { /* op-internal bytes: given back once the launch that reads them is issued */
    bsi_addr at;
    size_t bytes;
} scratch;

static bs_status take(bs_engine *e, int64_t capacity, int64_t row, scratch *out)
{
    size_t n;
    if (!bsi_mul_size((size_t)capacity, (size_t)row, &n) ||
        !bsi_mul_size(n, bs_dtype_size(e->dtype), &n))
        return bsi_fail(BS_SHAPE, "linear: scratch of %lld rows of %lld elements is too large",
                        (long long)capacity, (long long)row);
    BSI_TRY(bsi_arena_take(e->pool, n, &out->at));
    out->bytes = n;
    return BS_OK;
}

static void give(bs_engine *e, scratch *s)
{
    if (s->at.mem)
        bsi_arena_give(e->pool, s->at, s->bytes);
    s->at.mem = NULL;
}

/* y = x with the scope's mask: also the backward of itself. */
static bs_status dropout(bsi_space *s, const bs_linear *l, const int64_t *n, bsi_addr x, bsi_addr y)
{
    const bsi_micro *m = bsi_op_micro(s);
    int64_t T = n[N_ROWS], count = T * l->in;
    bsi_kcall c = {.op = BSK_DROPOUT,
                   .n_args = 4,
                   .n = {T, l->in, l->key[0], l->key[1], n[N_STEP]},
                   .f = {l->dropout},
                   .label = "dropout"};
    c.arg[0] = bsi_act_read(s->e, x, count);
    c.arg[1] = (bsi_arg){m->row_id, (size_t)T * sizeof(int32_t), BSI_READ};
    c.arg[2] = (bsi_arg){m->pos, (size_t)T * sizeof(int32_t), BSI_READ};
    c.arg[3] = bsi_act_write(s->e, y, count);
    return bsi_op_launch(s->e, &c);
}

/* The input of the adapter: x itself, or x with dropout in scratch that the caller gives back. */
static bs_status adapter_input(bsi_space *s, const bs_linear *l, const int64_t *n, bsi_addr x,
                               scratch *tmp, bsi_addr *out)
{
    *out = x;
    if (!n[N_DROP])
        return BS_OK;
    BSI_TRY(take(s->e, n[N_CAPACITY], l->in, tmp));
    *out = tmp->at;
    return dropout(s, l, n, x, tmp->at);
}

/* ---- forward --------------------------------------------------------------------------------- */

/* C = A op(W_e) + beta C, each row with the matrix of its expert. Those of the rows that the scope has. */
static bs_status grouped_product(bsi_space *s, const bs_linear *l, bool tb, int64_t T, bsi_addr a,
                                 bsi_addr c, double beta, const char *label)
{
    int64_t stride, E = l->n_next + 1, K = tb != l->transposed ? l->in : l->out, N = l->in + l->out - K;
    bsi_addr w;
    BSI_TRY(bsi_wref_group(s->e, &l->weight, l->n_next, l->next, &w, &stride));
    bsi_kcall k = {.op = BSK_GEMM_GROUPED,
                   .n_args = 4,
                   .n = {E, tb, T, N, K, stride, bsi_routing_begin(s)},
                   .f = {beta},
                   .out = s->e->dtype,
                   .label = label};
    k.arg[0] = bsi_act_read(s->e, a, T * K);
    k.arg[1] = bsi_act_read(s->e, w, (E - 1) * stride + N * K);
    k.arg[2] = bsi_act_update(s->e, c, T * N);
    k.arg[3] = bsi_routing_starts(s, l->first_expert, E);
    return bsi_op_launch(s->e, &k);
}

static bs_status grouped_bias(bsi_space *s, const bs_linear *l, int64_t T, bsi_addr y)
{
    int64_t stride, E = l->n_next + 1;
    bsi_addr b;
    BSI_TRY(bsi_wref_group(s->e, &l->bias, l->n_next, l->next + l->n_next, &b, &stride));
    bsi_kcall k = {.op = BSK_BIAS_GROUPED,
                   .n_args = 3,
                   .n = {E, T, l->out, stride, bsi_routing_begin(s)},
                   .label = "bias"};
    k.arg[0] = bsi_act_update(s->e, y, T * l->out);
    k.arg[1] = bsi_act_read(s->e, b, (E - 1) * stride + l->out);
    k.arg[2] = bsi_routing_starts(s, l->first_expert, E);
    return bsi_op_launch(s->e, &k);
}

static bs_status grouped_forward(bsi_space *s, const bs_linear *l, int64_t T, bsi_addr x, bsi_addr r,
                                 bsi_addr y)
{
    if (r.mem)
        return bsi_fail(BS_UNSUPPORTED, "a group of experts takes no residual");
    BSI_TRY(grouped_product(s, l, !l->transposed, T, x, y, 0.0, "experts"));
    return l->bias.count ? grouped_bias(s, l, T, y) : BS_OK;
}

/* y = x W^T + b + r. With an adapter y has its part and r already, so that the sum of all is rounded
   twice and no more. */
static bs_status base_forward(bsi_space *s, const bs_linear *l, int64_t T, bsi_addr x, bsi_addr r,
                              bsi_addr y)
{
    bsi_addr w, b;
    if (l->grouped)
        return grouped_forward(s, l, T, x, r, y);
    BSI_TRY(bsi_wref_addr(s->e, &l->weight, &w));
    BSI_TRY(bsi_gemm_launch(s->e,
                            &(bsi_gemm){.tb = !l->transposed,
                                        .M = T,
                                        .N = l->out,
                                        .K = l->in,
                                        .alpha = 1.0,
                                        .beta = l->rank || r.mem ? 1.0 : 0.0,
                                        .a = x,
                                        .b = w,
                                        .c = y,
                                        .d = l->rank ? (bsi_addr){0} : r},
                            "linear"));
    if (!l->bias.count)
        return BS_OK;
    BSI_TRY(bsi_wref_addr(s->e, &l->bias, &b));
    bsi_kcall c = {.op = BSK_BIAS, .n_args = 2, .n = {T, l->out}, .label = "bias"};
    c.arg[0] = bsi_act_update(s->e, y, T * l->out);
    c.arg[1] = bsi_act_read(s->e, b, l->out);
    return bsi_op_launch(s->e, &c);
}

/* t = drop(x) A^T */
static bs_status adapter_a(bsi_space *s, const bs_linear *l, const int64_t *n, bsi_addr x, bsi_addr t)
{
    scratch tmp = {0};
    bsi_addr xd;
    bs_status st = adapter_input(s, l, n, x, &tmp, &xd);
    if (st == BS_OK)
        st = bsi_gemm_launch(s->e,
                             &(bsi_gemm){.tb = true,
                                         .M = n[N_ROWS],
                                         .N = l->rank,
                                         .K = l->in,
                                         .alpha = 1.0,
                                         .a = xd,
                                         .b = l->a,
                                         .c = t},
                             "lora A");
    give(s->e, &tmp);
    return st;
}

/* y = scale * t B^T + r */
static bs_status adapter_b(bsi_space *s, const bs_linear *l, int64_t T, bsi_addr t, bsi_addr r,
                           bsi_addr y)
{
    return bsi_gemm_launch(s->e,
                           &(bsi_gemm){.tb = true,
                                       .M = T,
                                       .N = l->out,
                                       .K = l->rank,
                                       .alpha = l->scale,
                                       .beta = r.mem ? 1.0 : 0.0,
                                       .a = t,
                                       .b = l->b,
                                       .c = y,
                                       .d = r},
                           "lora B");
}

/* y from x, r (mem NULL: none) and, where it has been computed, t */
static bs_status run_forward(bsi_space *s, const bs_linear *l, const int64_t *n, bsi_addr x, bsi_addr r,
                             const bsi_value *t, bsi_addr y)
{
    scratch tmp = {0};
    bs_status st = BS_OK;
    if (l->rank && !t) {
        st = take(s->e, n[N_CAPACITY], l->rank, &tmp);
        if (st == BS_OK)
            st = adapter_a(s, l, n, x, tmp.at);
    }
    if (st == BS_OK && l->rank)
        st = adapter_b(s, l, n[N_ROWS], t ? t->at : tmp.at, r, y);
    give(s->e, &tmp);
    return st == BS_OK ? base_forward(s, l, n[N_ROWS], x, r, y) : st;
}

/* A late linear whose B trains has computed t when it was called: backward reads it whether or not y is ever
   computed. Else t is scratch of this launch. */
static bs_status forward(bsi_space *s, const bsi_node *node)
{
    const bs_linear *l = node->ref[0];
    const bsi_value *t = l->rank && l->grad_b.mem ? node->saved[0] : NULL;
    bsi_addr r = node->in[1] ? node->in[1]->at : (bsi_addr){0};
    return bsi_wrap(run_forward(s, l, node->n, node->in[0]->at, r, t, node->out->at), "linear '%s'",
                    l->name);
}

/* ---- backward -------------------------------------------------------------------------------- */

/* dW += dy^T x, db += column sums of dy */
static bs_status base_grads(bsi_space *s, const bs_linear *l, int64_t T, bsi_addr x, bsi_addr dy)
{
    if (l->weight.grad.mem)
        BSI_TRY(bsi_gemm_launch(s->e,
                                &(bsi_gemm){.ta = true,
                                            .sums = true,
                                            .M = l->transposed ? l->in : l->out,
                                            .N = l->transposed ? l->out : l->in,
                                            .K = T,
                                            .alpha = 1.0,
                                            .beta = 1.0,
                                            .a = l->transposed ? x : dy,
                                            .b = l->transposed ? dy : x,
                                            .c = l->weight.grad},
                                "gradient of weight"));
    if (!l->bias.grad.mem)
        return BS_OK;
    bsi_kcall c = {.op = BSK_COLSUM, .n_args = 2, .n = {T, l->out}, .label = "gradient of bias"};
    c.arg[0] = bsi_act_read(s->e, dy, T * l->out);
    c.arg[1] = bsi_update_f32(l->bias.grad, l->out);
    return bsi_op_launch(s->e, &c);
}

/* dA += u^T drop(x), u = scale * dy B [T,R] */
static bs_status grad_a(bsi_space *s, const bs_linear *l, const int64_t *n, bsi_addr x, bsi_addr u)
{
    scratch tmp = {0};
    bsi_addr xd;
    bs_status st = adapter_input(s, l, n, x, &tmp, &xd);
    if (st == BS_OK)
        st = bsi_gemm_launch(s->e,
                             &(bsi_gemm){.ta = true,
                                         .sums = true,
                                         .M = l->rank,
                                         .N = l->in,
                                         .K = n[N_ROWS],
                                         .alpha = 1.0,
                                         .beta = 1.0,
                                         .a = u,
                                         .b = xd,
                                         .c = l->grad_a},
                             "gradient of lora A");
    give(s->e, &tmp);
    return st;
}

/* dx (+)= drop_backward(u A). Without dropout one GEMM; with it the product goes through scratch, and
   the masked one straight into dx unless dx holds something already. */
static bs_status adapter_dx(bsi_space *s, const bs_linear *l, const int64_t *n, bsi_addr u, bsi_addr dx,
                            bool add)
{
    scratch full = {0}, masked = {0};
    int64_t T = n[N_ROWS];
    bsi_gemm g = {.M = T,
                  .N = l->in,
                  .K = l->rank,
                  .alpha = 1.0,
                  .beta = add ? 1.0 : 0.0,
                  .a = u,
                  .b = l->a,
                  .c = dx};
    if (!n[N_DROP])
        return bsi_gemm_launch(s->e, &g, "dx of lora");
    bs_status st = take(s->e, n[N_CAPACITY], l->in, &full);
    if (st == BS_OK && add)
        st = take(s->e, n[N_CAPACITY], l->in, &masked);
    g.c = full.at;
    g.beta = 0.0;
    if (st == BS_OK)
        st = bsi_gemm_launch(s->e, &g, "dx of lora");
    if (st == BS_OK)
        st = dropout(s, l, n, full.at, add ? masked.at : dx);
    if (st == BS_OK && add)
        st = bsi_axpy_launch(s->e, masked.at, dx, T * l->in, 1.0);
    give(s->e, &masked);
    give(s->e, &full);
    return st;
}

/* dx = u A (masked) + dy W. u.mem NULL: no adapter. */
static bs_status input_grad(bsi_space *s, const bs_linear *l, const bsi_node *node, bsi_addr u,
                            bsi_addr dy)
{
    bsi_value *dx;
    bsi_addr w;
    bool add;
    BSI_TRY(bsi_grad_open_add(s, node->in[0], &dx, &add));
    if (u.mem) {
        BSI_TRY(adapter_dx(s, l, node->n, u, dx->at, add));
        add = true;
    }
    if (l->grouped) {
        BSI_TRY(grouped_product(s, l, l->transposed, node->n[N_ROWS], dy, dx->at, add ? 1.0 : 0.0,
                                "dx of experts"));
        return bsi_grad_close(s, node->in[0], dx);
    }
    BSI_TRY(bsi_wref_addr(s->e, &l->weight, &w));
    BSI_TRY(bsi_gemm_launch(s->e,
                            &(bsi_gemm){.tb = l->transposed,
                                        .M = node->n[N_ROWS],
                                        .N = l->in,
                                        .K = l->out,
                                        .alpha = 1.0,
                                        .beta = add ? 1.0 : 0.0,
                                        .a = dy,
                                        .b = w,
                                        .c = dx->at},
                            "dx of linear"));
    return bsi_grad_close(s, node->in[0], dx);
}

/* Order matters for memory, not for the result: u is the only scratch that lives across the calls, and dx is opened
   last, when the gradients that read x have been issued. */
static bs_status backward(bsi_space *s, const bsi_node *node, bsi_value *dy)
{
    const bs_linear *l = node->ref[0];
    int64_t T = node->n[N_ROWS];
    const bsi_value *t = l->grad_b.mem ? node->saved[0] : NULL;
    bsi_addr x = node->in[0]->at; /* read only where it was saved */
    scratch u = {0};
    BSI_TRY(base_grads(s, l, T, x, dy->at));
    if (t)
        BSI_TRY(bsi_gemm_launch(s->e,
                                &(bsi_gemm){.ta = true,
                                            .sums = true,
                                            .M = l->out,
                                            .N = l->rank,
                                            .K = T,
                                            .alpha = l->scale,
                                            .beta = 1.0,
                                            .a = dy->at,
                                            .b = t->at,
                                            .c = l->grad_b},
                                "gradient of lora B"));
    bs_status st = BS_OK;
    if (l->rank && (l->grad_a.mem || node->in[0]->wanted)) {
        st = take(s->e, node->n[N_CAPACITY], l->rank, &u);
        if (st == BS_OK)
            st = bsi_gemm_launch(s->e,
                                 &(bsi_gemm){.M = T,
                                             .N = l->rank,
                                             .K = l->out,
                                             .alpha = l->scale,
                                             .a = dy->at,
                                             .b = l->b,
                                             .c = u.at},
                                 "dy B of lora");
    }
    if (st == BS_OK && l->grad_a.mem)
        st = grad_a(s, l, node->n, x, u.at);
    if (st == BS_OK && node->in[0]->wanted)
        st = input_grad(s, l, node, u.at, dy->at);
    if (st == BS_OK && node->in[1])
        st = bsi_grad_share(s, node->in[1], dy);
    give(s->e, &u);
    return st;
}

static const bsi_op linear_op = {.name = "linear", .id = 0, .forward = forward, .backward = backward};

/* ---- the op ---------------------------------------------------------------------------------- */

static bool trains(const bs_linear *l)
{
    return l->weight.grad.mem || l->bias.grad.mem || l->grad_a.mem || l->grad_b.mem;
}

/* The node of a late y. t, which backward reads whether or not y is ever computed, is computed here. */
static bs_status record(bsi_space *s, int n_in, bs_tensor *const *in, const bs_linear *l,
                        const int64_t *n, bsi_value **t, bsi_value *y)
{
    bsi_value *x = in[0]->value;
    bsi_node *node;
    if (l->rank && l->grad_b.mem) {
        BSI_TRY(bsi_value_ready(s, x));
        BSI_TRY(bsi_value_new(s, s->e->dtype, n[N_ROWS], n[N_CAPACITY], l->rank, t));
        BSI_TRY(adapter_a(s, l, n, x->at, (*t)->at));
    }
    BSI_TRY(bsi_node_new(s, &linear_op, n_in, in, y, &node));
    node->ref[0] = l;
    for (int i = 0; i <= N_DROP; i++)
        node->n[i] = n[i];
    if (*t)
        bsi_node_save(node, *t);
    if (l->weight.grad.mem || l->grad_a.mem)
        bsi_node_save(node, x);
    return BS_OK;
}

static bs_status check_input(bsi_space *s, const bs_tensor *x, const bs_tensor *r, const bs_linear *l,
                             bool drop)
{
    char shape[BSI_SHAPE_TEXT];
    const bsi_micro *m;
    if (l->grouped && !s->scope.routing)
        return bsi_fail(BS_STATE,
                        "linear '%s' is of a group of experts; scope '%s' is not of routed rows",
                        l->name, s->scope.label->text);
    if (x->ndim < 2 || bsi_tensor_row(x) != l->in)
        return bsi_fail(BS_SHAPE,
                        "linear '%s': x %s does not meet weight [%lld %lld]; rows of %lld channels are "
                        "expected",
                        l->name, bsi_shape_text(x, shape), (long long)l->out, (long long)l->in,
                        (long long)l->in);
    if (r && (r->ndim != 2 || r->dim[0] != x->dim[0] || r->dim[1] != l->out))
        return bsi_fail(BS_SHAPE, "linear '%s': residual %s; [%lld %lld], like the result, is expected",
                        l->name, bsi_shape_text(r, shape), (long long)x->dim[0], (long long)l->out);
    if (s->e != l->e)
        return bsi_fail(BS_ARG, "linear '%s' was made on another engine", l->name);
    return drop ? bsi_scope_micro(s, "linear with dropout", x, &m) : BS_OK;
}

static void hash_linear(bsi_space *s, const bs_linear *l)
{
    bsi_hash_text(s, l->name);
    bsi_hash_text(s, l->weight.info.name);
    bsi_hash_ints(s, 4, (int64_t[]){l->weight.block, l->in, l->out, l->rank});
}

bs_status bs_op_linear(bs_tensor *x, bs_linear *l, bs_tensor *r, bs_tensor **out)
{
    bsi_space *s;
    bs_tensor *y, *in[] = {x, r};
    int n_in = r ? 2 : 1;
    BSI_TRY(bsi_op_begin(&linear_op, n_in, in, &s));
    bool drop = l->rank && s->scope.train && l->dropout > 0.0;
    BSI_TRY(check_input(s, x, r, l, drop));
    hash_linear(s, l);
    int64_t n[] = {x->dim[0], x->capacity, s->scope.step, drop};
    bsi_value *t = NULL;
    bool recorded = bsi_tape_wants(s, n_in, in, trains(l));
    BSI_TRY(bsi_tensor_late(s, 2, (int64_t[]){x->dim[0], l->out}, x->capacity, &y));
    bs_status st = recorded ? record(s, n_in, in, l, n, &t, y->value) : bsi_value_take(s, y->value);
    if (st == BS_OK && !recorded)
        st = run_forward(s, l, n, x->value->at, r ? r->value->at : (bsi_addr){0}, t, y->value->at);
    if (st != BS_OK) {
        bs_tensor_release(y);
        return bsi_wrap(st, "linear '%s'", l->name);
    }
    *out = y;
    return BS_OK;
}
