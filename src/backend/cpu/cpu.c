/* SPDX-License-Identifier: Apache-2.0 */
/*
** cpu.c: the reference device. Asynchronous like a real accelerator: each queue is a thread, memory of
** device kind is reached by copies and launches only. This file has the device, its memory and the
** issue of operations; cpu_queue.c runs them. Owner thread only.
*/
#include "backend/cpu/cpu.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define ALIGNMENT 256
#define PAGE      4096
#define MAP_FROM  (1u << 20) /* from this size on memory is mapped: zero pages until it is used */

typedef struct cpu_mem { /* what bsi_mem.impl is */
    char *bytes;
    bool mapped;
} cpu_mem;

static bs_status cpu_open(const bs_dev_cfg *cfg, const bsi_dev_ops *inner, bs_dev *dev)
{
    (void)inner;
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    int threads = cfg->threads ? cfg->threads : (int)BSI_MAX(cores, 1L);
    if (!bsk_cpu_init(threads))
        return BS_NOMEM;
    cpu_dev *d = bsi_alloc(BS_TAG_MISC, sizeof *d);
    if (!d)
        return BS_NOMEM;
    d->threads = threads;
    d->jitter_us = cfg->jitter_us;
    d->jitter_seed = cfg->jitter_seed;
    d->fail_call = cfg->fail_call;
    d->fail_pin = cfg->fail_pin;
    pthread_mutex_init(&d->profile_lock, NULL);
    dev->impl = d;
    return BS_OK;
}

static void cpu_close(bs_dev *dev) /* its queues are closed */
{
    cpu_dev *d = dev->impl;
    for (cpu_slab *s = d->slabs; s;) {
        cpu_slab *next = s->next;
        bsi_free(s);
        s = next;
    }
    pthread_mutex_destroy(&d->profile_lock);
    bsi_free(d);
}

static void cpu_props(const bs_dev *dev, bs_dev_props *out)
{
    (void)dev;
    long pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
    out->executes = true;
    out->bf16 = false;
    out->alignment = ALIGNMENT;
    out->total_bytes = pages > 0 && page > 0 ? (size_t)pages * (size_t)page : 0;
}

/* ---- memory ---------------------------------------------------------------------------------- */

static bs_status cpu_mem_alloc(bs_dev *dev, bsi_memkind kind, bs_tag tag, size_t bytes, bsi_mem *out)
{
    cpu_dev *d = dev->impl;
    bs_status st = kind == BSI_MEM_DEVICE ? BS_DEVMEM : BS_NOMEM;
    if (kind == BSI_MEM_DEVICE)
        tag = BS_TAG_DEVICE;
    out->tag = tag;
    cpu_mem *b = bsi_alloc(BS_TAG_MISC, sizeof *b);
    if (!b)
        return BS_NOMEM;
    b->mapped = bytes >= MAP_FROM;
    /* A mapping has no pages before they are touched: a pool that is reserved for the worst case
       costs what it uses. */
    if (b->mapped) {
        void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        b->bytes = p == MAP_FAILED ? NULL : p;
        if (b->bytes)
            bsi_account(tag, (ptrdiff_t)bytes);
        else
            bsi_fail_sys(st, errno, "%zu bytes of %s memory are not available", bytes,
                         bs_tag_name(tag));
    } else {
        b->bytes = bsi_alloc_aligned(tag, bytes, kind == BSI_MEM_DEVICE ? ALIGNMENT : PAGE);
    }
    if (!b->bytes) {
        bsi_free(b);
        return st;
    }
    out->impl = b;
    out->host = kind == BSI_MEM_DEVICE ? NULL : b->bytes;
    /* Copies are as fast from any host memory here, so an injected refusal changes the answer and
       no address. */
    if (kind == BSI_MEM_PINNED && bsi_dev_refuses(d->fail_pin, &d->pins)) {
        out->kind = BSI_MEM_HOST;
        bsi_fail(BS_NOMEM, "injected");
    }
    return BS_OK;
}

static void cpu_mem_free(bsi_mem *mem)
{
    cpu_mem *b = mem->impl;
    /* Before the bytes go (C7): a worker may be in the middle of a copy that touches them, and
       issued operations hold bare addresses. */
    bsi_cpu_drain(mem->dev->impl);
    if (b->mapped) {
        munmap(b->bytes, mem->bytes);
        bsi_account(mem->tag, -(ptrdiff_t)mem->bytes);
    } else {
        bsi_free(b->bytes);
    }
    bsi_free(b);
}

static char *resolve(bsi_addr a)
{
    return ((const cpu_mem *)a.mem->impl)->bytes + a.off;
}

/* ---- operations ------------------------------------------------------------------------------ */

static bs_status cpu_event_open(bs_dev *dev, bsi_event *out)
{
    (void)dev;
    out->impl = NULL; /* no record yet */
    return BS_OK;
}

static bs_status cpu_copy(bsi_queue *q, bsi_addr dst, bsi_addr src, size_t bytes)
{
    cpu_node *n = bsi_cpu_node(q->impl, CPU_COPY, "copy");
    if (!n)
        return BS_NOMEM;
    n->u.copy.dst = resolve(dst);
    n->u.copy.src = resolve(src);
    n->u.copy.bytes = bytes;
    bsi_cpu_issue(q->impl, n);
    return BS_OK;
}

static bs_status cpu_fill(bsi_queue *q, bsi_addr dst, int byte, size_t bytes)
{
    cpu_node *n = bsi_cpu_node(q->impl, CPU_FILL, "fill");
    if (!n)
        return BS_NOMEM;
    n->u.fill.dst = resolve(dst);
    n->u.fill.byte = byte;
    n->u.fill.bytes = bytes;
    bsi_cpu_issue(q->impl, n);
    return BS_OK;
}

/* Kernels compute in f32; those that only round a result to `out` can write bf16. */
static bs_status check_types(const bsi_kcall *call, const char *label)
{
    bool rounds = call->op == BSK_EXPAND || call->op == BSK_EXPAND_MXFP4 || call->op == BSK_ADAMW;
    if (call->dtype != BS_DTYPE_F32)
        return bsi_fail(BS_UNSUPPORTED, "%s: the cpu kernel '%s' takes f32, not %s", label,
                        bsk_cpu[call->op].name, bs_dtype_name(call->dtype));
    if (call->out != BS_DTYPE_F32 && !(rounds && call->out == BS_DTYPE_BF16))
        return bsi_fail(BS_UNSUPPORTED, "%s: the cpu kernel '%s' gives f32%s, not %s", label,
                        bsk_cpu[call->op].name, rounds ? " or bf16" : "", bs_dtype_name(call->out));
    return BS_OK;
}

static bs_status cpu_launch(bsi_queue *q, const bsi_kcall *call)
{
    cpu_queue *cq = q->impl;
    const char *label = call->label ? call->label : bsk_cpu[call->op].name;
    if (!bsk_cpu[call->op].fn)
        return bsi_fail(BS_UNSUPPORTED, "%s: the cpu device has no kernel number %d",
                        label ? label : "launch", (int)call->op);
    BSI_TRY(check_types(call, label));
    cpu_node *n = bsi_cpu_node(cq, CPU_LAUNCH, label ? label : "launch");
    if (!n)
        return BS_NOMEM;
    /* The node has a copy of everything: the call may be on the caller's stack. Addresses are
       resolved now, by the owner, so that workers never look at a bsi_mem, which only the owner may
       change. */
    bsk_call *c = &n->u.launch.call;
    n->u.launch.op = call->op;
    for (int i = 0; i < BSK_MAX_ARGS; i++) {
        bool present = i < call->n_args && call->arg[i].bytes > 0;
        c->p[i] = present ? resolve(call->arg[i].at) : NULL;
    }
    memcpy(c->n, call->n, sizeof c->n);
    memcpy(c->f, call->f, sizeof c->f);
    c->dtype = (int)call->dtype;
    c->out = (int)call->out;
    c->par = cq->par;
    bsi_cpu_issue(cq, n);
    return BS_OK;
}

static bs_status cpu_host_fn(bsi_queue *q, void (*fn)(void *), void *ud)
{
    cpu_node *n = bsi_cpu_node(q->impl, CPU_HOST_FN, "host_fn");
    if (!n)
        return BS_NOMEM;
    n->u.host_fn.fn = fn;
    n->u.host_fn.ud = ud;
    bsi_cpu_issue(q->impl, n);
    return BS_OK;
}

static bs_status cpu_queue_status(bsi_queue *q)
{
    return bsi_cpu_status(q->dev->impl);
}

static int cpu_violations(const bs_dev *dev, const char **text)
{
    (void)dev;
    if (text)
        *text = "";
    return 0;
}

static bs_status cpu_profile(bs_dev *dev, bsi_profile *into)
{
    cpu_dev *d = dev->impl;
    /* Workers read `profile` without a lock. They are idle after the drain, and see the new value
       through the next node that is issued (release and acquire of node.next). */
    bsi_cpu_drain(d);
    d->profile = into;
    return bsi_cpu_status(d);
}

const bsi_dev_ops bsi_dev_cpu = {
    .name = "cpu",
    .size = sizeof(bsi_dev_ops),
    .open = cpu_open,
    .close = cpu_close,
    .props = cpu_props,
    .mem_alloc = cpu_mem_alloc,
    .mem_free = cpu_mem_free,
    .queue_open = bsi_cpu_queue_open,
    .queue_close = bsi_cpu_queue_close,
    .event_open = cpu_event_open,
    .event_close = bsi_cpu_event_close,
    .event_record = bsi_cpu_event_record,
    .queue_wait = bsi_cpu_queue_wait,
    .event_query = bsi_cpu_event_query,
    .copy = cpu_copy,
    .fill = cpu_fill,
    .launch = cpu_launch,
    .host_fn = cpu_host_fn,
    .queue_status = cpu_queue_status,
    .violations = cpu_violations,
    .profile = cpu_profile,
};
