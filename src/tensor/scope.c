/* SPDX-License-Identifier: Apache-2.0 */
/*
** scope.c: the open scope of an engine, its label and op hash, and the free lists behind it. Owner
** thread only. Closing a scope kills every handle made in it and gives every arena range back; handles
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

static void close_scope(bsi_space *s)
{
    s->open = false;
    bsi_range_end(s->e->dev);
    for (bsi_link *r = s->values; r; r = r->next)
        bsi_value_free(s, (bsi_value *)r);
    for (bsi_link *r = s->tensors, *next; r; r = next) {
        bs_tensor *t = (bs_tensor *)r;
        next = r->next;
        t->value = NULL;
        bs_tensor_release(t);
    }
    s->tensors = NULL;
    give_all(s, BSI_VALUE, &s->values);
    give_all(s, BSI_NODE, &s->nodes);
    drop_label(s, s->label);
    s->label = NULL;
    s->batch = NULL;
}

static void free_space(void *state)
{
    bsi_space *s = state;
    if (s->open)
        close_scope(s);
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
                        label, s->label->text);
    if (cfg->batch && (cfg->batch->e != e || cfg->micro < 0 || cfg->micro >= cfg->batch->cfg.micros))
        return bsi_fail(BS_ARG,
                        "scope '%s': micro-batch %d; a batch of this engine with 0..%d is expected",
                        label, cfg->micro, cfg->batch->cfg.micros - 1);
    s->label = bsi_record_take(s, BSI_LABEL);
    if (!s->label)
        return BS_NOMEM;
    s->label->refs = 1;
    snprintf(s->label->text, sizeof s->label->text, "%s", label);
    s->batch = cfg->batch;
    s->micro = cfg->micro;
    s->step = cfg->step;
    s->tape = cfg->tape;
    s->train = cfg->train;
    s->walked = false;
    s->hash = 0;
    s->open = true;
    bsi_range_begin(e->dev, s->label->text);
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
    return s ? s->hash : 0;
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
    if (!s->batch)
        return bsi_fail(BS_STATE, "%s: scope '%s' has no micro-batch, which gives rows and positions",
                        op, s->label->text);
    const bsi_micro *m = &s->batch->micro[s->micro];
    if (x->dim[0] != m->tokens)
        return bsi_fail(
            BS_SHAPE, "%s: x %s has %lld rows, the micro-batch of scope '%s' has %lld tokens", op,
            bsi_shape_text(x, shape), (long long)x->dim[0], s->label->text, (long long)m->tokens);
    *out = m;
    return BS_OK;
}

void bsi_hash_ints(bsi_space *s, int n, const int64_t *v)
{
    s->hash = bs_hash64(v, (size_t)n * sizeof *v, s->hash);
}

void bsi_hash_number(bsi_space *s, double v)
{
    s->hash = bs_hash64(&v, sizeof v, s->hash);
}

void bsi_hash_text(bsi_space *s, const char *text)
{
    s->hash = bs_hash64(text, strlen(text), s->hash);
}
