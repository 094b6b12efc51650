/* SPDX-License-Identifier: Apache-2.0 */
/*
** scope.c: the open scope of an engine, its label and op hash, and the free lists behind it. Owner
** thread only. A scope can be set aside between its forward and its backward pass, and others opened
** meanwhile. Closing a scope kills every handle made in it and gives every arena range back; handles
** that a caller still holds keep the label, so that a late use can say where the tensor came from.
*/
#include "tensor/tensor.h"

#include <string.h>

static const size_t record_bytes[BSI_RECORD_COUNT] = {
    [BSI_TENSOR] = sizeof(bs_tensor),
    [BSI_VALUE] = sizeof(bsi_value),
    [BSI_NODE] = sizeof(bsi_node),
    [BSI_LABEL] = sizeof(bsi_label),
};

void *bsi_record_take(bsi_space *s, bsi_record kind)
{
    bsi_link *r = s->idle[kind];
    if (!r)
        return bsi_alloc(BS_TAG_MISC, record_bytes[kind]);
    s->idle[kind] = r->next;
    memset(r, 0, record_bytes[kind]);
    return r;
}

void bsi_record_give(bsi_space *s, bsi_record kind, void *record)
{
    bsi_link *r = record;
    r->next = s->idle[kind];
    s->idle[kind] = r;
}

static void give_all(bsi_space *s, bsi_record kind, bsi_link **list)
{
    while (*list) {
        bsi_link *r = *list;
        *list = r->next;
        bsi_record_give(s, kind, r);
    }
}

static void drop_label(bsi_space *s, bsi_label *l)
{
    if (--l->refs == 0)
        bsi_record_give(s, BSI_LABEL, l);
}

struct bs_kept { /* a scope set aside */
    bsi_space *space;
    struct bs_kept *next, **link; /* of the space */
    bsi_scope scope;
    int n;
    bs_tensor shape[]; /* [n]: value and dims of what resume hands out; no handles */
};

static void destroy(bsi_space *s)
{
    for (int k = 0; k < BSI_RECORD_COUNT; k++)
        for (bsi_link *r = s->idle[k], *next; r; r = next) {
            next = r->next;
            bsi_free(r);
        }
    bsi_free(s->expanded);
    bsi_free(s);
}

void bs_tensor_retain(bs_tensor *t)
{
    if (t)
        t->refs++;
}

void bs_tensor_release(bs_tensor *t)
{
    if (!t || --t->refs > 0)
        return;
    bsi_space *s = t->space;
    drop_label(s, t->label);
    bsi_record_give(s, BSI_TENSOR, t);
    s->handles--;
    if (!s->e && s->handles == 0)
        destroy(s);
}

/* Handles that a caller still holds keep the label and nothing else. */
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
    give_all(s, BSI_VALUE, &of->values);
    give_all(s, BSI_NODE, &of->nodes);
}

/* The hash stays for who asks for it afterwards. */
static void leave(bsi_space *s)
{
    s->scope = (bsi_scope){.hash = s->scope.hash};
}

static void close_scope(bsi_space *s)
{
    s->open = false;
    bsi_range_end(s->e->dev);
    kill_handles(s);
    free_records(s, &s->scope);
    drop_label(s, s->scope.label);
    leave(s);
}

/* ---- scopes set aside ------------------------------------------------------------------------ */

static void unlink_kept(bs_kept *k)
{
    *k->link = k->next;
    if (k->next)
        k->next->link = k->link;
    bsi_free(k);
}

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
    BSI_TRY(bsi_tape_settle(s));
    bs_kept *k = bsi_alloc(BS_TAG_MISC, sizeof *k + (size_t)n * sizeof *k->shape);
    if (!k)
        return BS_NOMEM;
    for (int i = 0; i < n; i++)
        k->shape[i] = *t[i];
    k->n = n;
    k->space = s;
    k->scope = s->scope;
    k->next = s->kept;
    k->link = &s->kept;
    if (s->kept)
        s->kept->link = &k->next;
    s->kept = k;
    s->open = false;
    bsi_range_end(s->e->dev);
    kill_handles(s);
    leave(s);
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
    s->scope = k->scope;
    for (int i = 0; i < k->n; i++) {
        const bs_tensor *m = &k->shape[i];
        bs_status st = bsi_tensor_over(s, m->value, m->ndim, m->dim, m->capacity, &t[i]);
        if (st != BS_OK) {
            while (i > 0)
                bs_tensor_release(t[--i]);
            kill_handles(s);
            leave(s);
            return st;
        }
    }
    s->open = true;
    unlink_kept(k);
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

void bs_kept_free(bs_kept *k)
{
    if (!k)
        return;
    free_records(k->space, &k->scope);
    drop_label(k->space, k->scope.label);
    unlink_kept(k);
}

static void free_space(void *state)
{
    bsi_space *s = state;
    if (s->open)
        close_scope(s);
    while (s->kept)
        bs_kept_free(s->kept);
    s->e = NULL;
    if (s->handles == 0)
        destroy(s);
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
    bsi_label *l = bsi_record_take(s, BSI_LABEL);
    if (!l)
        return BS_NOMEM;
    l->refs = 1;
    snprintf(l->text, sizeof l->text, "%s", label);
    s->scope = (bsi_scope){.batch = cfg->batch,
                           .micro = cfg->micro,
                           .step = cfg->step,
                           .tape = cfg->tape,
                           .train = cfg->train,
                           .label = l};
    s->open = true;
    bsi_range_begin(e->dev, s->scope.label->text);
    return BS_OK;
}

void bs_scope_close(bs_engine *e)
{
    bsi_space *s = e->tensors;
    if (s && s->open)
        close_scope(s);
}

uint64_t bs_scope_hash(const bs_engine *e)
{
    const bsi_space *s = e->tensors;
    return s ? s->scope.hash : 0;
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
    const bsi_micro *m = &s->scope.batch->micro[s->scope.micro];
    if (x->dim[0] != m->tokens)
        return bsi_fail(
            BS_SHAPE, "%s: x %s has %lld rows, the micro-batch of scope '%s' has %lld tokens", op,
            bsi_shape_text(x, shape), (long long)x->dim[0], s->scope.label->text, (long long)m->tokens);
    *out = m;
    return BS_OK;
}

void bsi_hash_ints(bsi_space *s, int n, const int64_t *v)
{
    s->scope.hash = bs_hash64(v, (size_t)n * sizeof *v, s->scope.hash);
}

void bsi_hash_number(bsi_space *s, double v)
{
    s->scope.hash = bs_hash64(&v, sizeof v, s->scope.hash);
}

void bsi_hash_text(bsi_space *s, const char *text)
{
    s->scope.hash = bs_hash64(text, strlen(text), s->scope.hash);
}
