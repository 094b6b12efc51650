/* SPDX-License-Identifier: Apache-2.0 */
/*
** check.c: a device that hands everything to another one and proves, while the program runs, that the
** program orders what it must. It finds a missing queue_wait in one run, whatever the timing: it
** compares vector clocks, not moments. Only event_record and queue_wait order queues.
**
** Owner thread only. Objects are wrapped: what callers hold is the outer object, the inner device sees
** its own. cfg.drop_wait names one wait that is left out here and in the inner device, which is how
** tests prove that each wait is needed. Use of closed objects is refused in dev.c, which keeps them
** for that.
*/
#include "backend/check/check.h"

#include <string.h>

#define POISON_MAX (64u << 20) /* larger memories are left alone: a run may never use most of them */

static check_dev *dev_of(const bs_dev *dev)
{
    return dev->impl;
}

static bs_status check_open(const bs_dev_cfg *cfg, const bsi_dev_ops *inner, bs_dev *dev)
{
    bs_dev_props props = {.executes = false};
    check_dev *d = bsi_alloc(BS_TAG_MISC, sizeof *d);
    if (!d)
        return BS_NOMEM;
    bs_status st = BS_NOMEM;
    if (cfg->drop_wait) {
        d->drop_wait = bsi_strdup(BS_TAG_MISC, cfg->drop_wait);
        if (!d->drop_wait)
            goto fail;
    }
    d->inner.ops = inner;
    snprintf(d->inner.spec, sizeof d->inner.spec, "%s", inner->name);
    st = inner->open(cfg, NULL, &d->inner);
    if (st != BS_OK)
        goto fail;
    d->inner.ops->props(&d->inner, &props);
    d->poisons = props.executes && cfg->fail_call == 0; /* a fill would count as a call */
    dev->impl = d;
    return BS_OK;
fail:
    bsi_free(d->drop_wait);
    bsi_free(d);
    return st;
}

static void check_close(bs_dev *dev)
{
    check_dev *d = dev_of(dev);
    d->inner.ops->close(&d->inner);
    for (int i = 0; i < CHECK_BUCKETS; i++) {
        for (check_label *l = d->labels[i]; l;) {
            check_label *next = l->next;
            bsi_free(l);
            l = next;
        }
    }
    for (check_slab *s = d->slabs; s;) {
        check_slab *next = s->next;
        bsi_free(s);
        s = next;
    }
    bsi_free(d->drop_wait);
    bsi_free(d->keys);
    bsi_free(d->text);
    bsi_free(d);
}

static void check_props(const bs_dev *dev, bs_dev_props *out)
{
    const check_dev *d = dev_of(dev);
    d->inner.ops->props(&d->inner, out);
}

static int check_violations(const bs_dev *dev, const char **text)
{
    const check_dev *d = dev_of(dev);
    if (text)
        *text = d->text ? d->text : "";
    return d->violations;
}

static void check_misuse(bs_dev *dev, const char *text)
{
    bsi_check_report(dev_of(dev), bs_hash64(text, strlen(text), 0), "%s", text);
}

/* ---- memory ---------------------------------------------------------------------------------- */

/* Whoever reads device memory that nobody wrote shall read NaN, as may happen on a real device. */
static bs_status poison(check_dev *d, bsi_mem *inner)
{
    if (!d->poisons || inner->kind != BSI_MEM_DEVICE || inner->bytes == 0 || inner->bytes > POISON_MAX)
        return BS_OK;
    /* A queue of the inner device, which no clock knows: its close drains, so the fill is over
       before the caller has the memory. */
    bsi_queue q = {.dev = &d->inner, .name = "poison"};
    BSI_TRY(d->inner.ops->queue_open(&d->inner, q.name, &q));
    bs_status st = d->inner.ops->fill(&q, (bsi_addr){inner, 0}, 0xFF, inner->bytes);
    d->inner.ops->queue_close(&q); /* drains */
    return st;
}

static bs_status check_mem_alloc(bs_dev *dev, bsi_memkind kind, bs_tag tag, size_t bytes, bsi_mem *out)
{
    check_dev *d = dev_of(dev);
    check_mem *m = bsi_alloc(BS_TAG_MISC, sizeof *m);
    if (!m)
        return BS_NOMEM;
    bs_status st = bsi_check_history_open(d, m, bytes);
    if (st != BS_OK)
        goto fail;
    m->inner = (bsi_mem){.dev = &d->inner, .kind = kind, .tag = tag, .bytes = bytes};
    st = d->inner.ops->mem_alloc(&d->inner, kind, tag, bytes, &m->inner);
    if (st != BS_OK)
        goto fail;
    st = poison(d, &m->inner);
    if (st != BS_OK) {
        d->inner.ops->mem_free(&m->inner);
        goto fail;
    }
    m->number = ++d->mems;
    /* What the inner device gave, which may be pageable where pinned was asked. */
    out->kind = m->inner.kind;
    out->tag = m->inner.tag;
    out->host = m->inner.host;
    out->impl = m;
    return BS_OK;
fail:
    bsi_check_history_close(d, m);
    bsi_free(m);
    return st;
}

static void check_mem_free(bsi_mem *mem)
{
    check_dev *d = dev_of(mem->dev);
    check_mem *m = mem->impl;
    /* After a failure or a cancel the program cannot wait any more, and its frees are right all the
       same, because the inner device drains. Reports of them would be false. */
    if (!mem->dev->lost && !bs_cancelled())
        bsi_check_freed(d, m);
    d->inner.ops->mem_free(&m->inner);
    bsi_check_history_close(d, m);
    bsi_free(m);
    mem->impl = NULL;
    mem->host = NULL;
}

static bsi_addr inner_addr(bsi_addr a)
{
    return (bsi_addr){&((check_mem *)a.mem->impl)->inner, a.off};
}

/* ---- queues and events ----------------------------------------------------------------------- */

static bs_status check_queue_open(bs_dev *dev, const char *name, bsi_queue *out)
{
    check_dev *d = dev_of(dev);
    int i = 0;
    while (i < CHECK_QUEUES && d->queue[i])
        i++;
    if (i == CHECK_QUEUES)
        return bsi_fail(BS_UNSUPPORTED, "queue '%s': a check device follows %d open queues at most",
                        name, CHECK_QUEUES);
    /* Reports name queues that are closed already. */
    const char *kept = bsi_check_intern(d, name);
    check_queue *q = kept ? bsi_alloc(BS_TAG_MISC, sizeof *q) : NULL;
    if (!q)
        return BS_NOMEM;
    q->inner = (bsi_queue){.dev = &d->inner, .name = kept};
    q->index = i;
    bs_status st = d->inner.ops->queue_open(&d->inner, kept, &q->inner);
    if (st != BS_OK) {
        bsi_free(q);
        return st;
    }
    /* An index is used again, and its clock goes on: histories still hold accesses of the queue
       that had it before, and from 0 on they would seem to lie in the future. What the host had
       seen complete when it opened the queue is before everything in it. */
    uint64_t own = d->clock[i][i];
    memcpy(d->clock[i], d->seen, sizeof d->clock[i]);
    d->clock[i][i] = own;
    d->queue[i] = q;
    d->queue_name[i] = kept;
    out->impl = q;
    return BS_OK;
}

static void check_queue_close(bsi_queue *queue)
{
    check_dev *d = dev_of(queue->dev);
    check_queue *q = queue->impl;
    int i = q->index;
    /* Closing drains: all that the queue did is over, for every other queue and for the host,
       without any wait. */
    d->inner.ops->queue_close(&q->inner);
    for (int r = 0; r < CHECK_QUEUES; r++)
        d->clock[r][i] = d->clock[i][i];
    d->seen[i] = d->clock[i][i];
    d->queue[i] = NULL;
    bsi_free(q);
    queue->impl = NULL;
}

static bs_status check_event_open(bs_dev *dev, bsi_event *out)
{
    check_dev *d = dev_of(dev);
    check_event *e = bsi_alloc(BS_TAG_MISC, sizeof *e);
    if (!e)
        return BS_NOMEM;
    e->inner.dev = &d->inner;
    bs_status st = d->inner.ops->event_open(&d->inner, &e->inner);
    if (st != BS_OK) {
        bsi_free(e);
        return st;
    }
    out->impl = e;
    return BS_OK;
}

static void check_event_close(bsi_event *ev)
{
    check_dev *d = dev_of(ev->dev);
    check_event *e = ev->impl;
    d->inner.ops->event_close(&e->inner);
    bsi_free(e);
    ev->impl = NULL;
}

static void join(uint64_t *into, const uint64_t *from)
{
    for (int i = 0; i < CHECK_QUEUES; i++)
        into[i] = BSI_MAX(into[i], from[i]);
}

static bs_status check_event_record(bsi_event *ev, bsi_queue *queue)
{
    check_dev *d = dev_of(ev->dev);
    check_queue *q = queue->impl;
    check_event *e = ev->impl;
    BSI_TRY(d->inner.ops->event_record(&e->inner, &q->inner));
    /* What is before the mark. The row of the former mark is overwritten: whoever waited for it has
       joined it already, and nobody can wait for it from here on (C2). */
    memcpy(e->clock, d->clock[q->index], sizeof e->clock);
    return BS_OK;
}

static bs_status check_queue_wait(bsi_queue *queue, const bsi_event *ev, const char *site)
{
    check_dev *d = dev_of(queue->dev);
    check_queue *q = queue->impl;
    const check_event *e = ev->impl;
    if (d->drop_wait && strcmp(site, d->drop_wait) == 0) { /* left out in the clocks and in fact */
        d->dropped = true;
        return BS_OK;
    }
    BSI_TRY(d->inner.ops->queue_wait(&q->inner, &e->inner, site));
    /* The record that is current (C3); without one all clocks are 0, which orders nothing. A wait
       that the inner device refused orders nothing either, so the join comes last. */
    join(d->clock[q->index], e->clock);
    return BS_OK;
}

/* What the host has seen: joins seen and no row, see check.h. */
static bs_status check_event_query(const bsi_event *ev)
{
    check_dev *d = dev_of(ev->dev);
    const check_event *e = ev->impl;
    BSI_TRY(d->inner.ops->event_query(&e->inner));
    join(d->seen, e->clock);
    return BS_OK;
}

static bs_status check_queue_status(bsi_queue *queue)
{
    check_dev *d = dev_of(queue->dev);
    return d->inner.ops->queue_status(&((check_queue *)queue->impl)->inner);
}

/* ---- operations ------------------------------------------------------------------------------ */

/* Once an operation, before its ranges are touched: an operation does not conflict with itself, whose
   accesses all carry this clock. */
static void tick(check_dev *d, const check_queue *q)
{
    d->clock[q->index][q->index]++;
}

static bs_status touch(check_dev *d, const check_queue *q, bsi_addr at, size_t bytes, uint8_t mode,
                       const char *label)
{
    return bsi_check_touch(d, at.mem->impl, at.off, at.off + bytes, q->index, mode, label);
}

static bs_status check_copy(bsi_queue *queue, bsi_addr dst, bsi_addr src, size_t bytes)
{
    check_dev *d = dev_of(queue->dev);
    check_queue *q = queue->impl;
    bool from = src.mem->kind == BSI_MEM_DEVICE, to = dst.mem->kind == BSI_MEM_DEVICE;
    const char *label = from == to ? "copy" : to ? "copy in" : "copy out";
    tick(d, q);
    /* Noted before it is issued: when there is no memory to note it, it must not run unseen. */
    BSI_TRY(touch(d, q, src, bytes, BSI_READ, label));
    BSI_TRY(touch(d, q, dst, bytes, BSI_WRITE, label));
    return d->inner.ops->copy(&q->inner, inner_addr(dst), inner_addr(src), bytes);
}

static bs_status check_fill(bsi_queue *queue, bsi_addr dst, int byte, size_t bytes)
{
    check_dev *d = dev_of(queue->dev);
    check_queue *q = queue->impl;
    tick(d, q);
    BSI_TRY(touch(d, q, dst, bytes, BSI_WRITE, "fill"));
    return d->inner.ops->fill(&q->inner, inner_addr(dst), byte, bytes);
}

static bs_status check_launch(bsi_queue *queue, const bsi_kcall *call)
{
    check_dev *d = dev_of(queue->dev);
    check_queue *q = queue->impl;
    bsi_kcall inner = *call;
    char number[32];
    snprintf(number, sizeof number, "kernel %d", (int)call->op);
    /* The history keeps the label for as long as the device lives, the caller only until the launch
       has run. */
    const char *label = bsi_check_intern(d, call->label ? call->label : number);
    if (!label)
        return BS_NOMEM;
    tick(d, q);
    for (int i = 0; i <= call->n_args; i++) {
        bsi_arg *a = i < call->n_args ? &inner.arg[i] : &inner.workspace;
        if (a->bytes == 0)
            continue;
        BSI_TRY(touch(d, q, a->at, a->bytes, a->mode, label));
        a->at = inner_addr(a->at);
    }
    inner.label = label;
    return d->inner.ops->launch(&q->inner, &inner);
}

static bs_status check_host_fn(bsi_queue *queue, void (*fn)(void *), void *ud)
{
    check_dev *d = dev_of(queue->dev);
    check_queue *q = queue->impl;
    tick(d, q);
    return d->inner.ops->host_fn(&q->inner, fn, ud);
}

static void check_range(bs_dev *dev, const char *label)
{
    check_dev *d = dev_of(dev);
    if (!label && d->ranges == 0) {
        check_misuse(dev, "a range ended that was not begun");
        return;
    }
    d->ranges += label ? 1 : -1;
    if (d->inner.ops->range)
        d->inner.ops->range(&d->inner, label);
}

static bs_status check_profile(bs_dev *dev, bsi_profile *into)
{
    check_dev *d = dev_of(dev);
    return d->inner.ops->profile(&d->inner, into);
}

const bsi_dev_ops bsi_dev_check = {
    .name = "check",
    .size = sizeof(bsi_dev_ops),
    .open = check_open,
    .close = check_close,
    .props = check_props,
    .mem_alloc = check_mem_alloc,
    .mem_free = check_mem_free,
    .queue_open = check_queue_open,
    .queue_close = check_queue_close,
    .event_open = check_event_open,
    .event_close = check_event_close,
    .event_record = check_event_record,
    .queue_wait = check_queue_wait,
    .event_query = check_event_query,
    .copy = check_copy,
    .fill = check_fill,
    .launch = check_launch,
    .host_fn = check_host_fn,
    .queue_status = check_queue_status,
    .violations = check_violations,
    .misuse = check_misuse,
    .range = check_range,
    .profile = check_profile,
};
