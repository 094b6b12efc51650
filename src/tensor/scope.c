/* SPDX-License-Identifier: Apache-2.0 */
/*
** scope.c: opening and closing the scope of an engine, and setting one aside between its forward
** and its backward pass, so that others can be opened meanwhile. Owner thread only.
*/
#include "tensor/routing.h"
#include "tensor/tape.h"

#include <stdio.h>

/* ---- scopes set aside ------------------------------------------------------------------------ */

bs_status bs_scope_keep(bs_engine *e, int n, bs_tensor *const *t, bs_kept **out)
{
    bsi_space *s = NULL;
    *out = NULL;
    BSI_TRY(bsi_scope_get(e, "keep", &s));
    if (!s->scope.tape || s->scope.walked)
        return bsi_fail(BS_STATE, "keep: scope '%s' %s", s->scope.label->text,
                        s->scope.tape ? "has run its backward pass; close it"
                                      : "records no tape; open it with one");
    for (int i = 0; i < n; i++) {
        BSI_TRY(bsi_tensor_here(t[i], "keep"));
        if (t[i]->space != s)
            return bsi_fail(BS_ARG, "keep: tensor %d belongs to another engine", i + 1);
    }
    /* Settled twice is settled once: when a later line fails, the scope is still open and may be
       kept or walked. What backward does not read is freed here, since the rest stays on the device
       for as long as the scope is set aside. */
    BSI_TRY(bsi_tape_settle(s));
    bs_kept *k = bsi_alloc(BS_TAG_MISC, sizeof *k + (size_t)n * sizeof *k->shape);
    if (!k)
        return BS_NOMEM;
    for (int i = 0; i < n;
         i++) /* dims and value; the records stay with the scope, the handles die below */
        k->shape[i] = *t[i];
    k->n = n;
    k->space = s;
    k->scope = s->scope;
    k->next = s->kept;
    /* A link back, so that scopes can be resumed or freed in any order without a search. */
    k->link = &s->kept;
    if (s->kept)
        s->kept->link = &k->next;
    s->kept = k;
    /* Only the handles die. The bytes stay taken: the arena does not know whose they are, and
       scopes that are opened meanwhile get ranges beside them. */
    s->open = false;
    bsi_range_end(s->e->dev);
    bsi_scope_leave(s);
    *out = k;
    return BS_OK;
}

bs_status bs_scope_resume(bs_kept *k, bs_tensor **t)
{
    bsi_space *s = k->space;
    if (s->open)
        return bsi_fail(BS_STATE,
                        "scope '%s' cannot be resumed while scope '%s' is open; close that first",
                        k->scope.label->text, s->scope.label->text);
    /* The lists of values and nodes stay k's until nothing can fail. Handles are the only records
       made here, so taking those back leaves k as it was. */
    s->scope = k->scope;
    for (int i = 0; i < k->n; i++) {
        const bs_tensor *m = &k->shape[i];
        bs_status st = bsi_tensor_over(s, m->value, m->ndim, m->dim, m->capacity, &t[i]);
        if (st != BS_OK) {
            while (i > 0)
                bs_tensor_release(t[--i]);
            bsi_scope_leave(s);
            return st;
        }
    }
    s->open = true;
    bsi_kept_unlink(k);
    bsi_range_begin(s->e->dev, s->scope.label->text);
    return BS_OK;
}

int bs_kept_count(const bs_kept *k)
{
    return k->n;
}

const char *bs_kept_label(const bs_kept *k)
{
    return k->scope.label->text;
}

bs_status bs_scope_open(bs_engine *e, const bs_scope_cfg *cfg)
{
    bsi_space *s;
    const char *label = cfg->label ? cfg->label : "unnamed";
    BSI_TRY(bsi_space_get(e, &s));
    if (s->open)
        return bsi_fail(BS_STATE, "scope '%s' cannot open while scope '%s' is open; close that first",
                        label, s->scope.label->text);
    if (cfg->batch && (cfg->batch->e != e || cfg->micro < 0 || cfg->micro >= cfg->batch->cfg.micros))
        return bsi_fail(BS_ARG,
                        "scope '%s': micro-batch %d; a batch of this engine with 0..%d is expected",
                        label, cfg->micro, cfg->batch->cfg.micros - 1);
    if (cfg->routing)
        BSI_TRY(bsi_routing_check(cfg->routing, e, cfg->begin, cfg->rows));
    bsi_label *l = bsi_record_take(s, BSI_LABEL);
    if (!l)
        return BS_NOMEM;
    l->refs = 1;
    snprintf(l->text, sizeof l->text, "%s", label);
    s->scope = (bsi_scope){.batch = cfg->routing ? bsi_routing_batch(cfg->routing) : cfg->batch,
                           .micro = cfg->micro,
                           .step = cfg->step,
                           .tape = cfg->tape,
                           .train = cfg->train,
                           .label = l};
    if (cfg->routing)
        bsi_routing_piece(cfg->routing, cfg->begin, cfg->rows, &s->scope.piece);
    s->scope.routing = cfg->routing;
    s->open = true;
    bsi_range_begin(e->dev, s->scope.label->text);
    return BS_OK;
}

void bs_scope_close(bs_engine *e)
{
    bsi_space *s = e->tensors;
    if (s && s->open)
        bsi_scope_end(s);
}

uint64_t bs_scope_hash(const bs_engine *e)
{
    const bsi_space *s = e->tensors;
    return s ? s->scope.hash : 0;
}
