/* SPDX-License-Identifier: Apache-2.0 */
/*
** ops_elementwise.c: activations, sums, products and factors, element by element; and the two ops outside the tape
** that lead from and to sums of a store. Sizes: N elements. glu and add are late (tape.h), mul is not: its backward
** pass reads its inputs. Owner thread only.
*/
#include "tensor/op.h"

_Static_assert((int)BS_ACT_SILU == BSK_SILU && (int)BS_ACT_GELU_TANH == BSK_GELU_TANH &&
                   (int)BS_ACT_GELU_ERF == BSK_GELU_ERF && (int)BS_ACT_RELU == BSK_RELU,
               "activations are handed to kernels by number");

/* ---- one input -------------------------------------------------------------------------------- */

static bs_status act_backward(bsi_space *s, const bsi_node *node, bsi_value *dy)
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

static const bsi_op act_op = {.name = "act", .id = 7, .backward = act_backward};

static bs_status scale_backward(bsi_space *s, const bsi_node *node, bsi_value *dy)
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

static const bsi_op scale_op = {.name = "scale", .id = 10, .backward = scale_backward};

static bs_status unary(const bsi_op *op, bsk_op kernel, bs_tensor *x, bool act, int64_t n1, double f,
                       bs_tensor **out)
{
    bsi_space *s;
    bs_tensor *y;
    bsi_node *node;
    BSI_TRY(bsi_op_begin(op, 1, &x, &s));
    bsi_hash_ints(s, 1, &n1);
    bsi_hash_number(s, f);
    BSI_TRY(bsi_op_like(s, x, x, &y));
    int64_t N = x->value->count;
    bsi_kcall c = {.op = kernel, .n_args = 2, .n = {N, n1}, .f = {f}, .label = op->name};
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
    return bsi_op_finish(st, op, y, out);
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
    return unary(&act_op, BSK_ACT, x, true, act, 0.0, out);
}

bs_status bs_op_scale(bs_tensor *a, double f, bs_tensor **out)
{
    return unary(&scale_op, BSK_SCALE, a, false, 0, f, out);
}

/* ---- two inputs ------------------------------------------------------------------------------- */

static bs_status launch_binary(bsi_space *s, const bsi_op *op, bsk_op kernel, const bsi_value *a,
                               const bsi_value *b, int64_t n1, const bsi_value *y)
{
    bsi_kcall c = {.op = kernel, .n_args = 3, .n = {a->count, n1}, .label = op->name};
    c.arg[0] = bsi_act_read(s->e, a->at, a->count);
    c.arg[1] = bsi_act_read(s->e, b->at, a->count);
    c.arg[2] = bsi_act_write(s->e, y->at, a->count);
    return bsi_op_launch(s->e, &c);
}

static bs_status glu_backward(bsi_space *s, const bsi_node *node, bsi_value *dy)
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
    return bsi_grad_close_all(bsi_op_launch(s->e, &c), s, 2, node->in, g);
}

static bs_status glu_forward(bsi_space *s, const bsi_node *node)
{
    return launch_binary(s, node->op, BSK_GLU, node->in[0], node->in[1], node->n[1], node->out);
}

static const bsi_op glu_op = {.name = "glu", .id = 6, .forward = glu_forward, .backward = glu_backward};

/* Both inputs have dy itself as their gradient: no launch and no copy (deposit in tape.c keeps them apart). */
static bs_status add_backward(bsi_space *s, const bsi_node *node, bsi_value *dy)
{
    BSI_TRY(bsi_grad_share(s, node->in[0], dy));
    return bsi_grad_share(s, node->in[1], dy);
}

static bs_status add_forward(bsi_space *s, const bsi_node *node)
{
    return launch_binary(s, node->op, BSK_ADD, node->in[0], node->in[1], node->n[1], node->out);
}

static const bsi_op add_op = {.name = "add", .id = 8, .forward = add_forward, .backward = add_backward};

/* The gradient of one factor reads the other, from node->in: which of the two was saved depends on which gradient is
   wanted, and the one that is read here always was. */
static bs_status mul_backward(bsi_space *s, const bsi_node *node, bsi_value *dy)
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

static const bsi_op mul_op = {.name = "mul", .id = 9, .backward = mul_backward};

static bs_status record_binary(bsi_space *s, const bsi_op *op, bs_tensor *const in[2], int64_t n1,
                               bsi_value *y)
{
    bsi_node *node;
    bsi_value *a = in[0]->value, *b = in[1]->value;
    BSI_TRY(bsi_node_new(s, op, 2, in, y, &node));
    node->n[0] = a->count;
    node->n[1] = n1;
    /* The gradient of one factor reads the other; a glu's reads both. */
    if (op == &glu_op || (op == &mul_op && b->wanted))
        bsi_node_save(node, a);
    if (op == &glu_op || (op == &mul_op && a->wanted))
        bsi_node_save(node, b);
    return BS_OK;
}

static bs_status binary(const bsi_op *op, bsk_op kernel, bs_tensor *a, bs_tensor *b, int64_t n1,
                        bs_tensor **out)
{
    bsi_space *s;
    bs_tensor *y, *in[] = {a, b};
    BSI_TRY(bsi_op_begin(op, 2, in, &s));
    BSI_TRY(bsi_op_same_shape(op->name, a, b));
    bsi_hash_ints(s, 1, &n1);
    BSI_TRY(bsi_tensor_late(s, a->ndim, a->dim, BSI_MAX(a->capacity, b->capacity), &y));
    bool recorded = bsi_tape_wants(s, 2, in, false);
    bs_status st = recorded ? record_binary(s, op, in, n1, y->value) : BS_OK;
    if (st == BS_OK && !y->value->late) {
        st = bsi_value_take(s, y->value);
        if (st == BS_OK)
            st = launch_binary(s, op, kernel, a->value, b->value, n1, y->value);
    }
    return bsi_op_finish(st, op, y, out);
}

bs_status bs_op_glu(bs_tensor *gate, bs_tensor *up, bs_act act, bs_tensor **out)
{
    BSI_TRY(check_act("glu", act));
    return binary(&glu_op, BSK_GLU, gate, up, act, out);
}

bs_status bs_op_add(bs_tensor *a, bs_tensor *b, bs_tensor **out)
{
    return binary(&add_op, BSK_ADD, a, b, 0, out);
}

bs_status bs_op_mul(bs_tensor *a, bs_tensor *b, bs_tensor **out)
{
    return binary(&mul_op, BSK_MUL, a, b, 0, out);
}

/* ---- sums of a store -------------------------------------------------------------------------- */

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
    BSI_TRY(bsi_op_same_shape("accumulate", acc, x));
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
    BSI_TRY(bsi_op_like(s, x, x, &y));
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
