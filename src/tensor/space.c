/* SPDX-License-Identifier: Apache-2.0 */
/*
** space.c: the space of an engine, and how scopes end: the open one, and those that were set aside.
** Owner thread only. When a scope ends, all its handles die and all its arena ranges go back. The
** engine frees the space when it closes; a handle that a caller still holds then keeps the space
** itself, and nothing of the engine, until it is released.
*/
#include "tensor/space.h"

#include <string.h>

/* Handles that a caller still holds keep the label, for the message that a late use gets, and
   nothing else. `next` is read first: a release may give the record to the free list. */
static void kill_handles(bsi_space *s)
{
    for (bsi_link *r = s->tensors, *next; r; r = next) {
        bs_tensor *t = (bs_tensor *)r;
        next = r->next;
        t->value = NULL;
        bs_tensor_release(t);
    }
    s->tensors = NULL;
}

static void free_records(bsi_space *s, bsi_scope *of)
{
    for (bsi_link *r = of->values; r; r = r->next)
        bsi_value_free(s, (bsi_value *)r);
    bsi_record_give_all(s, BSI_VALUE, &of->values);
    bsi_record_give_all(s, BSI_NODE, &of->nodes);
}

/* The hash outlives the scope, for a caller that compares a recompute with its forward. */
void bsi_scope_leave(bsi_space *s)
{
    kill_handles(s);
    s->scope = (bsi_scope){.hash = s->scope.hash};
}

/* Marked as closed before its values are freed: bsi_value_free poisons only in an open scope, and
   of this one nothing can be read any more. Ranges go back though launches may still use them:
   their next user is issued later on the same queue. */
void bsi_scope_end(bsi_space *s)
{
    bsi_scope ended = s->scope;
    s->open = false;
    bsi_range_end(s->e->dev);
    bsi_scope_leave(s);
    free_records(s, &ended);
    bsi_label_drop(s, ended.label);
}

void bsi_kept_unlink(bs_kept *k)
{
    *k->link = k->next;
    if (k->next)
        k->next->link = k->link;
    bsi_free(k);
}

/* The bytes go back, perhaps while another scope is open. Where poison is on, the fill is then
   issued behind all work that reads them. */
void bs_kept_free(bs_kept *k)
{
    if (!k)
        return;
    free_records(k->space, &k->scope);
    bsi_label_drop(k->space, k->scope.label);
    bsi_kept_unlink(k);
}

/* Called by the engine as it closes, before its queues and its pool end: ranges are given back to
   the pool. s->e is cleared last: from then on the last handle that is released frees the space. */
static void free_space(void *state)
{
    bsi_space *s = state;
    if (s->open)
        bsi_scope_end(s);
    while (s->kept)
        bs_kept_free(s->kept);
    s->e = NULL;
    bsi_space_reap(s);
}

bs_status bsi_space_get(bs_engine *e, bsi_space **out)
{
    if (!e->tensors) {
        bsi_space *s = bsi_alloc(BS_TAG_MISC, sizeof *s);
        if (!s)
            return BS_NOMEM;
        s->e = e;
        s->expand_block = -1;
        s->poison = strncmp(e->dev->spec, "check:", 6) == 0;
        e->tensors = s;
        e->tensors_free = free_space;
    }
    *out = e->tensors;
    return BS_OK;
}

bs_status bsi_scope_get(bs_engine *e, const char *what, bsi_space **out)
{
    bsi_space *s = e->tensors;
    if (!s || !s->open)
        return bsi_fail(BS_STATE, "%s: no scope is open on this engine", what);
    *out = s;
    return BS_OK;
}

bs_status bsi_scope_micro(bsi_space *s, const char *op, const bs_tensor *x, const bsi_micro **out)
{
    char shape[BSI_SHAPE_TEXT];
    if (!s->scope.batch)
        return bsi_fail(BS_STATE, "%s: scope '%s' has no micro-batch, which gives rows and positions",
                        op, s->scope.label->text);
    const bsi_micro *m = bsi_scope_rows(s);
    if (x->dim[0] != m->tokens)
        return bsi_fail(
            BS_SHAPE, "%s: x %s has %lld rows, the micro-batch of scope '%s' has %lld tokens", op,
            bsi_shape_text(x, shape), (long long)x->dim[0], s->scope.label->text, (long long)m->tokens);
    *out = m;
    return BS_OK;
}

bs_status bsi_scope_whole(const bsi_space *s, const char *op)
{
    if (s->scope.routing)
        return bsi_fail(BS_STATE, "%s: scope '%s' is of routed rows; it is for a whole micro-batch", op,
                        s->scope.label->text);
    return BS_OK;
}
