/* SPDX-License-Identifier: Apache-2.0 */
/*
** meta.c: the device that does nothing. Memories have sizes and no bytes, operations are accepted and
** forgotten, events are always done. A dry run on it issues exactly what a real run would, so sizes and
** offsets come out the same. Owner thread only; nothing is allocated but the device itself.
*/
#include "backend/meta/meta.h"
#include "dev/inject.h"

#define ALIGNMENT 256

typedef struct meta {
    uint64_t calls, fail_call;
    bs_errinfo error; /* of the injected failure; status BS_OK: none */
} meta;

static bs_status meta_open(const bs_dev_cfg *cfg, const bsi_dev_ops *inner, bs_dev *dev)
{
    (void)inner;
    meta *m = bsi_alloc(BS_TAG_MISC, sizeof *m);
    if (!m)
        return BS_NOMEM;
    m->fail_call = cfg->fail_call;
    dev->impl = m;
    return BS_OK;
}

static void meta_close(bs_dev *dev)
{
    bsi_free(dev->impl);
}

static void meta_props(const bs_dev *dev, bs_dev_props *out)
{
    (void)dev;
    out->executes = false;
    out->bf16 = true;
    out->alignment = ALIGNMENT;
    out->total_bytes = INT64_MAX;
}

static bs_status meta_mem_alloc(bs_dev *dev, bsi_memkind kind, bs_tag tag, size_t bytes, bsi_mem *out)
{
    (void)dev, (void)kind, (void)tag, (void)bytes, (void)out;
    return BS_OK;
}

static void meta_mem_free(bsi_mem *mem)
{
    (void)mem;
}

static bs_status meta_queue_open(bs_dev *dev, const char *name, bsi_queue *out)
{
    (void)dev, (void)name, (void)out;
    return BS_OK;
}

static void meta_queue_close(bsi_queue *q)
{
    (void)q;
}

static bs_status meta_event_open(bs_dev *dev, bsi_event *out)
{
    (void)dev, (void)out;
    return BS_OK;
}

static void meta_event_close(bsi_event *ev)
{
    (void)ev;
}

static bs_status meta_event_record(bsi_event *ev, bsi_queue *q)
{
    (void)ev, (void)q;
    return BS_OK;
}

static bs_status meta_queue_wait(bsi_queue *q, const bsi_event *ev, const char *site)
{
    (void)q, (void)ev, (void)site;
    return BS_OK;
}

static bs_status status(const bs_dev *dev)
{
    const meta *m = dev->impl;
    return m->error.status == BS_OK ? BS_OK : bsi_fail_from(&m->error);
}

static bs_status meta_event_query(const bsi_event *ev)
{
    return status(ev->dev);
}

static bs_status meta_queue_status(bsi_queue *q)
{
    return status(q->dev);
}

/* Every operation is accepted; an injected failure shows in the next query, as on a real device. */
static bs_status accept(const bsi_queue *q, const char *label)
{
    meta *m = q->dev->impl;
    if (bsi_dev_fails(m->fail_call, &m->calls)) {
        m->error.status = BS_DEVICE;
        snprintf(m->error.msg, sizeof m->error.msg, "'%s' on queue '%s' failed (injected)", label,
                 q->name);
    }
    return BS_OK;
}

static bs_status meta_copy(bsi_queue *q, bsi_addr dst, bsi_addr src, size_t bytes)
{
    (void)dst, (void)src, (void)bytes;
    return accept(q, "copy");
}

static bs_status meta_fill(bsi_queue *q, bsi_addr dst, int byte, size_t bytes)
{
    (void)dst, (void)byte, (void)bytes;
    return accept(q, "fill");
}

static bs_status meta_launch(bsi_queue *q, const bsi_kcall *call)
{
    return accept(q, call->label ? call->label : "launch");
}

static bs_status meta_host_fn(bsi_queue *q, void (*fn)(void *), void *ud)
{
    (void)fn, (void)ud;
    return accept(q, "host_fn");
}

static int meta_violations(const bs_dev *dev, const char **text)
{
    (void)dev;
    if (text)
        *text = "";
    return 0;
}

static bs_status meta_profile(bs_dev *dev, bsi_profile *into)
{
    (void)dev, (void)into;
    return BS_OK;
}

const bsi_dev_ops bsi_dev_meta = {
    .name = "meta",
    .size = sizeof(bsi_dev_ops),
    .open = meta_open,
    .close = meta_close,
    .props = meta_props,
    .mem_alloc = meta_mem_alloc,
    .mem_free = meta_mem_free,
    .queue_open = meta_queue_open,
    .queue_close = meta_queue_close,
    .event_open = meta_event_open,
    .event_close = meta_event_close,
    .event_record = meta_event_record,
    .queue_wait = meta_queue_wait,
    .event_query = meta_event_query,
    .copy = meta_copy,
    .fill = meta_fill,
    .launch = meta_launch,
    .host_fn = meta_host_fn,
    .queue_status = meta_queue_status,
    .violations = meta_violations,
    .profile = meta_profile,
};
