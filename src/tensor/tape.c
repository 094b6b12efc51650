/* SPDX-License-Identifier: Apache-2.0 */
/*
** tape.c: what is recorded and the backward walk. Owner thread only. A node is recorded only where
** a gradient is wanted, and saves only what its backward function reads. The walk goes from the
** newest node to the oldest. When it starts, every owned value that no node will read is freed;
** each node then frees what it was the last to read. Gradients of a value with several consumers
** add up in the order of the walk. The ops issued fix that order, so the bits depend neither on
** placement nor on how many scopes are set aside.
**
** A late value has no bytes between the call of its op and its first reader. Everything that hands
** bytes to a launch or to a caller therefore goes through bsi_value_ready; what only names a value
** (a view, another late op, a node's `in`) does not.
*/
#include "tensor/tape.h"
#include "tensor/launch.h"

/* ---- recording ------------------------------------------------------------------------------- */

bs_status bsi_op_begin(const bsi_op *op, int n, bs_tensor *const *in, bsi_space **out)
{
    bsi_space *s = in[0]->space;
    const char *name = op->name;
    for (int i = 0; i < n; i++) {
        BSI_TRY(bsi_tensor_check(in[i], name));
        if (in[i]->space != s)
            return bsi_fail(BS_ARG, "%s: inputs are tensors of two engines", name);
        if (in[i]->dtype != s->e->dtype)
            return bsi_fail(BS_DTYPE, "%s: input %d is %s, activations are %s", name, i + 1,
                            bs_dtype_name(in[i]->dtype), bs_dtype_name(s->e->dtype));
    }
    if (s->scope.walked)
        return bsi_fail(BS_STATE, "%s: scope '%s' has run its backward pass; no op can follow", name,
                        s->scope.label->text);
    bsi_hash_ints(s, 1, &op->id);
    for (int i = 0; i < n; i++) {
        bsi_hash_ints(s, in[i]->ndim, in[i]->dim);
        /* want_grad is refused from here on: nodes recorded before it would not carry the gradient. */
        in[i]->value->consumed = true;
        /* Ops that are not late need the bytes of their inputs. A late op whose node is not
           recorded is launched at once as well, but none of its inputs can be late then: a late
           value is wanted, and what reads a wanted value is recorded. */
        if (!op->forward && !op->shares)
            BSI_TRY(bsi_wrap(bsi_value_ready(s, in[i]->value), "%s", name));
    }
    *out = s;
    return BS_OK;
}

bool bsi_tape_wants(const bsi_space *s, int n, bs_tensor *const *in, bool trainable)
{
    bool wants = trainable;
    for (int i = 0; i < n; i++)
        wants = wants || in[i]->value->wanted;
    return s->scope.tape && wants;
}

bs_status bsi_node_new(bsi_space *s, const bsi_op *op, int n, bs_tensor *const *in, bsi_value *result,
                       bsi_node **out)
{
    bsi_node *node = bsi_record_take(s, BSI_NODE);
    if (!node)
        return BS_NOMEM;
    node->op = op;
    for (int i = 0; i < n; i++)
        node->in[i] = in[i]->value;
    node->out = result;
    result->wanted = true;
    if (op->forward)
        result->late = node;
    node->link.next = s->scope.nodes;
    s->scope.nodes = &node->link;
    *out = node;
    return BS_OK;
}

void bsi_node_save(bsi_node *node, bsi_value *v)
{
    int i = 0;
    while (node->saved[i])
        i++;
    node->saved[i] = v;
    v->uses++;
}

bs_status bsi_value_ready(bsi_space *s, bsi_value *v)
{
    const bsi_node *node = v->late;
    if (!node)
        return BS_OK;
    /* Recursion is as deep as late ops follow each other without another op between them: a few in
       a layer. */
    for (int i = 0; i < BSI_MAX_IN && node->in[i]; i++)
        BSI_TRY(bsi_value_ready(s, node->in[i]));
    if (!v->at.mem) /* not taken by a run that failed */
        BSI_TRY(bsi_value_take(s, v));
    bs_status st = node->op->forward(s, node);
    if (st == BS_OK) /* else the next reader tries again, into the same bytes */
        v->late = NULL;
    return st;
}

/* ---- gradients ------------------------------------------------------------------------------- */

static bs_status add_launch(bs_engine *e, bsi_addr a, bsi_addr b, bsi_addr y, int64_t n)
{
    bsi_kcall c = {.op = BSK_ADD, .n_args = 3, .n = {n}, .label = "add of gradients"};
    c.arg[0] = bsi_act_read(e, a, n);
    c.arg[1] = bsi_act_read(e, b, n);
    c.arg[2] = bsi_act_write(e, y, n);
    return bsi_op_launch(e, &c);
}

/* Nobody but `uses` holders will read g again, and its bytes are ours to write. A gradient that a
   caller handed in may lie in a store, and that of a leaf is read after the walk: neither may be
   written. */
static bool exclusive(const bsi_value *g, int uses)
{
    return g->owned && !g->leaf && g->uses == uses;
}

/* Add g to the gradient of v. A buffer may be the gradient of several values at once
   (bsi_grad_share: both inputs of an add have dy itself), so only its single holder may write it:
   g->uses counts the values whose gradient it is, and the node that is running holds dy. For x + x
   the second share comes here with g == old, which is not exclusive. Addition of two floats is
   commutative to the bit, so whichever buffer is free to be written is the accumulator, and a third
   one is taken only where both are shared. */
static bs_status deposit(bsi_space *s, bsi_value *v, bsi_value *g)
{
    bsi_value *old = v->grad, *sum;
    if (!old) {
        sum = g;
    } else if (exclusive(old, 1)) {
        BSI_TRY(bsi_axpy_launch(s->e, g->at, old->at, v->count, 1.0));
        sum = old;
        if (g->uses == 0)
            bsi_value_free(s, g);
    } else if (exclusive(g, 0)) {
        BSI_TRY(bsi_axpy_launch(s->e, old->at, g->at, v->count, 1.0));
        sum = g;
    } else {
        BSI_TRY(bsi_value_like(s, v, &sum));
        BSI_TRY(add_launch(s->e, old->at, g->at, sum->at, v->count));
    }
    if (sum != old) {
        sum->uses++;
        v->grad = sum;
        if (old)
            bsi_value_drop(s, old);
    }
    return BS_OK;
}

bs_status bsi_grad_open(bsi_space *s, const bsi_value *v, bsi_value **out)
{
    return bsi_value_like(s, v, out);
}

bs_status bsi_grad_open_add(bsi_space *s, const bsi_value *v, bsi_value **out, bool *add)
{
    /* A kernel that adds in place rounds once where write-then-add rounds twice, so the choice must
       be the same in every run. It is: it looks at counts, which follow from the ops issued. */
    *add = v->wanted && v->grad && exclusive(v->grad, 1);
    if (!*add)
        return bsi_value_like(s, v, out);
    *out = v->grad;
    return BS_OK;
}

bs_status bsi_grad_close(bsi_space *s, bsi_value *v, bsi_value *grad)
{
    if (grad == v->grad)
        return BS_OK; /* added in place */
    if (v->wanted)
        return deposit(s, v, grad);
    bsi_value_free(s, grad);
    return BS_OK;
}

bs_status bsi_grad_close_all(bs_status st, bsi_space *s, int n, bsi_value *const *v,
                             bsi_value *const *grad)
{
    for (int i = 0; i < n && st == BS_OK; i++)
        st = bsi_grad_close(s, v[i], grad[i]);
    return st;
}

bs_status bsi_grad_share(bsi_space *s, bsi_value *v, bsi_value *dy)
{
    return v->wanted ? deposit(s, v, dy) : BS_OK;
}

/* ---- the walk -------------------------------------------------------------------------------- */

static bs_status check_pair(const bsi_space *s, const bs_tensor *y, const bs_tensor *g)
{
    char a[BSI_SHAPE_TEXT], b[BSI_SHAPE_TEXT];
    BSI_TRY(bsi_tensor_here(y, "backward"));
    BSI_TRY(bsi_tensor_check(g, "backward"));
    if (y->space != s || g->space != s)
        return bsi_fail(BS_ARG, "backward: a tensor belongs to another engine");
    if (y->dtype != s->e->dtype || g->dtype != s->e->dtype)
        return bsi_fail(BS_DTYPE, "backward: output %s with gradient %s; both must be %s",
                        bs_dtype_name(y->dtype), bs_dtype_name(g->dtype), bs_dtype_name(s->e->dtype));
    bool same = y->ndim == g->ndim;
    for (int i = 0; same && i < y->ndim; i++)
        same = y->dim[i] == g->dim[i];
    if (!same)
        return bsi_fail(BS_SHAPE,
                        "backward in scope '%s': output %s with gradient %s; the shapes must be equal",
                        s->scope.label->text, bsi_shape_text(y, a), bsi_shape_text(g, b));
    return BS_OK;
}

/* What backward functions read must have its bytes before the walk; results that none of them reads
   stay without a launch. */
static bs_status ready_saved(bsi_space *s)
{
    for (bsi_link *r = s->scope.nodes; r; r = r->next) {
        bsi_node *node = (bsi_node *)r;
        for (int i = 0; i < BSI_MAX_SAVED && node->saved[i]; i++)
            BSI_TRY(bsi_value_ready(s, node->saved[i]));
    }
    return BS_OK;
}

static void free_unread(bsi_space *s)
{
    for (bsi_link *r = s->scope.values; r; r = r->next) {
        bsi_value *v = (bsi_value *)r;
        if (v->uses == 0 && !v->leaf)
            bsi_value_free(s, v);
    }
}

bs_status bsi_tape_settle(bsi_space *s)
{
    BSI_TRY(ready_saved(s));
    free_unread(s);
    return BS_OK;
}

static bs_status run_node(bsi_space *s, const bsi_node *node)
{
    bsi_value *dy = node->out->grad;
    if (dy) { /* else nothing that was walked has read this result */
        bs_status st = node->op->backward(s, node, dy);
        if (st != BS_OK)
            return bsi_wrap(st, "backward of %s in scope '%s'", node->op->name, s->scope.label->text);
    }
    /* Of a node that was passed over, too: its uses were counted, and the offsets of what follows
       depend on what is freed here. */
    for (int i = 0; i < BSI_MAX_SAVED && node->saved[i]; i++)
        bsi_value_drop(s, node->saved[i]);
    if (dy &&
        !node->out
             ->leaf) { /* every consumer of the result is newer: its gradient is complete and spent */
        node->out->grad = NULL;
        bsi_value_drop(s, dy);
    }
    return BS_OK;
}

bs_status bs_scope_backward(bs_engine *e, int n, bs_tensor *const *out, bs_tensor *const *grad)
{
    bsi_space *s;
    BSI_TRY(bsi_scope_get(e, "backward", &s));
    if (!s->scope.tape || s->scope.walked)
        return bsi_fail(BS_STATE, "backward: scope '%s' %s", s->scope.label->text,
                        s->scope.tape ? "has run it already" : "records no tape");
    for (int i = 0; i < n; i++)
        BSI_TRY(check_pair(s, out[i], grad[i]));
    /* The use keeps a gradient that is a tensor of this scope from being freed as unread, and from
       becoming the accumulator of another output before its own turn. */
    for (int i = 0; i < n; i++) {
        BSI_TRY(bsi_value_ready(s, grad[i]->value));
        grad[i]->value->uses++;
    }
    BSI_TRY(bsi_tape_settle(s));
    /* Set before the first deposit: drops free from here on, and no op can be recorded behind a
       walk. */
    s->scope.walked = true;
    for (int i = 0; i < n; i++) {
        if (out[i]->value->wanted)
            BSI_TRY(deposit(s, out[i]->value, grad[i]->value));
        bsi_value_drop(s, grad[i]->value);
    }
    for (bsi_link *r = s->scope.nodes; r; r = r->next)
        BSI_TRY(run_node(s, (const bsi_node *)r));
    return BS_OK;
}
