/* SPDX-License-Identifier: Apache-2.0 */
/*
** dev.c: the checked front of every device. It owns the objects that callers hold (memories, queues,
** events) and refuses what no backend should see: ranges outside their memory, objects of another
** device, a device that is lost or closed. All blocking waits for a device are here.
**
** Called by the owner thread of the device. A device that is closed while objects of it are open stays
** until the last of them is closed. Where the backend counts misuse, closed objects are kept (without
** their resources) until the end, so that their use is an error and not a read of freed memory.
*/
#include "dev/dev.h"
#include "dev/profile.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>

#define MAX_SITES    256
#define SPINS        64      /* queries before the first sleep */
#define SLEEP_MIN_NS 20000   /* 20 us */
#define SLEEP_MAX_NS 1000000 /* 1 ms */

/* What callers hold as bs_dev, bsi_mem, bsi_queue and bsi_event are the first members of a device or an
   object, so that a backend sees only the part that is its business. */
typedef struct device {
    bs_dev pub;         /* first: its address is the device's */
    bs_errinfo lost_by; /* the failure that lost it */
    pthread_t owner;
    bool closed, pumping;
    bool ran_short;     /* cfg.device_left was met: from then on props say what is left */
    size_t device_left; /* of cfg; 0: not injected */
    size_t workspace;   /* of cfg */
    size_t device_used, unpinned;
    bool warned; /* that a page-lock was refused */
    size_t live;
    struct object *graves;
    bsi_profile profile;
    bool profiling;
} device;

typedef struct object {
    union {
        bsi_mem mem;
        bsi_queue queue;
        bsi_event event;
    } pub; /* first: its address is the object's */
    bool closed;
    bool unpinned;       /* memory: was to be page-locked */
    bsi_event *end;      /* queue: recorded by those who wait for all of it */
    char *name;          /* queue */
    struct object *next; /* in graves */
} object;

static inline device *device_of(const bs_dev *dev)
{
    return (device *)(uintptr_t)dev;
}

static inline object *object_of(const void *pub)
{
    return (object *)(uintptr_t)pub;
}

/* ---- open and close -------------------------------------------------------------------------- */

bs_status bsi_dev_open(const char *spec, const bsi_dev_ops *ops, const bsi_dev_ops *inner,
                       const bs_dev_cfg *cfg, bs_dev **out)
{
    *out = NULL;
    /* A table of another size is of another version, and its slots would be called with arguments
       that they do not expect. */
    if (ops->size != sizeof *ops)
        return bsi_fail(BS_INTERNAL, "device '%s' was built against another version of its interface",
                        spec);
    device *d = bsi_alloc(BS_TAG_MISC, sizeof *d);
    if (!d)
        return BS_NOMEM;
    d->pub.ops = ops;
    d->owner = pthread_self();
    d->device_left = cfg->device_left;
    d->workspace = cfg->workspace_bytes;
    snprintf(d->pub.spec, sizeof d->pub.spec, "%s", spec);
    bs_status st = ops->open(cfg, inner, &d->pub);
    if (st != BS_OK) {
        bsi_free(d);
        return bsi_wrap(st, "device '%s'", spec);
    }
    *out = &d->pub;
    return BS_OK;
}

static void destroy(device *d)
{
    d->pub.ops->close(&d->pub);
    bsi_profile_clear(&d->profile);
    for (object *o = d->graves; o;) {
        object *next = o->next;
        bsi_free(o->name);
        bsi_free(o);
        o = next;
    }
    bsi_free(d);
}

void bs_dev_close(bs_dev *dev)
{
    if (!dev)
        return;
    device *d = device_of(dev);
    /* Objects may outlive the device, because callers close in any order (C7): the last object
       destroys it. The pump goes at once: what it advances may be freed before those objects are. */
    d->closed = true;
    dev->pump = NULL;
    if (d->live == 0)
        destroy(d);
}

void bs_dev_props_get(const bs_dev *dev, bs_dev_props *out)
{
    memset(out, 0, sizeof *out);
    const device *d = device_of(dev);
    dev->ops->props(dev, out);
    out->unpinned_bytes = d->unpinned;
    out->workspace_bytes += d->workspace;
    /* A caller whose allocation was refused asks again how much there is. Without this it would
       plan the same size once more. */
    if (d->ran_short)
        out->total_bytes = BSI_MIN(out->total_bytes, d->device_left - d->device_used);
    snprintf(out->name, sizeof out->name, "%s", dev->spec);
}

int bs_dev_violations(const bs_dev *dev, const char **text)
{
    return dev->ops->violations(dev, text);
}

bool bsi_dev_checks(const bs_dev *dev)
{
    return dev->ops->misuse != NULL;
}

void bsi_dev_pump_set(bs_dev *dev, void (*pump)(void *ud), void *ud)
{
    dev->pump = pump;
    dev->pump_ud = ud;
}

void bsi_dev_pump_end(bs_dev *dev, const void *ud)
{
    if (dev->pump_ud == ud)
        bsi_dev_pump_set(dev, NULL, NULL);
}

void bsi_range_begin(bs_dev *dev, const char *label)
{
    if (dev->ops->range)
        dev->ops->range(dev, label);
}

void bsi_range_end(bs_dev *dev)
{
    if (dev->ops->range)
        dev->ops->range(dev, NULL);
}

/* ---- checks that every call makes ------------------------------------------------------------ */

/* Nothing can be issued on a device that is closed or lost. A lost device is refused here and not in
   the backend, so that every backend loses devices alike, and whoever comes late hears of the failure
   that did it. */
static bs_status usable(const bs_dev *dev, const char *what)
{
    if (!dev)
        return bsi_fail(BS_ARG, "%s: no device", what);
    const device *d = device_of(dev);
    if (d->closed)
        return bsi_fail(BS_STATE, "%s: device '%s' is closed", what, dev->spec);
    if (bsi_dev_checks(dev) && !pthread_equal(d->owner, pthread_self()))
        return bsi_fail(BS_STATE, "%s: device '%s' was called by a thread that does not own it", what,
                        dev->spec);
    if (dev->lost) {
        bsi_fail_from(&d->lost_by);
        return bsi_wrap(BS_DEVICE, "%s: device '%s' is lost until it is closed", what, dev->spec);
    }
    return BS_OK;
}

bs_status bs_dev_profile(bs_dev *dev, bool on)
{
    BSI_TRY(usable(dev, "profile"));
    device *d = device_of(dev);
    /* Off first: it returns when nothing is added to the old profile any more, which is then
       cleared. */
    BSI_TRY(dev->ops->profile(dev, NULL));
    d->profiling = false;
    if (!on)
        return BS_OK;
    bsi_profile_clear(&d->profile);
    BSI_TRY(dev->ops->profile(dev, &d->profile));
    d->profiling = true;
    return BS_OK;
}

bs_status bs_dev_profile_read(bs_dev *dev, const bs_profile_row **rows, int *n)
{
    BSI_TRY(usable(dev, "profile"));
    device *d = device_of(dev);
    /* Set to what it is already: that waits for the launches that are still being timed (dev.h). */
    BSI_TRY(dev->ops->profile(dev, d->profiling ? &d->profile : NULL));
    bsi_profile_sort(&d->profile);
    *rows = d->profile.row;
    *n = d->profile.n;
    return BS_OK;
}

/* Execution errors are sticky: the first one is what every later call repeats, so its detail is
   copied before another failure replaces it. Other statuses belong to the call alone: an allocation
   that is refused leaves the device as it was. */
static bs_status settle(bs_dev *dev, bs_status st)
{
    if (st == BS_DEVICE && !dev->lost) {
        dev->lost = true;
        device_of(dev)->lost_by = *bs_error();
    }
    return st;
}

static bs_status object_ok(const bs_dev *dev, const bs_dev *home, const object *o, const char *what,
                           const char *noun)
{
    if (o->closed)
        return bsi_fail(BS_STATE, "%s: the %s was closed before", what, noun);
    if (home != dev)
        return bsi_fail(BS_ARG, "%s: the %s belongs to device '%s', the call to '%s'", what, noun,
                        home->spec, dev->spec);
    return BS_OK;
}

static bs_status queue_ok(const bsi_queue *q, const char *what)
{
    if (!q)
        return bsi_fail(BS_ARG, "%s: no queue", what);
    BSI_TRY(object_ok(q->dev, q->dev, object_of(q), what, "queue"));
    return usable(q->dev, what);
}

static bs_status event_ok(const bs_dev *dev, const bsi_event *ev, const char *what)
{
    if (!ev)
        return bsi_fail(BS_ARG, "%s: no event", what);
    return object_ok(dev ? dev : ev->dev, ev->dev, object_of(ev), what, "event");
}

static bs_status range_ok(const bs_dev *dev, bsi_addr at, size_t bytes, const char *what,
                          const char *noun)
{
    size_t end;
    if (!at.mem)
        return bsi_fail(BS_ARG, "%s: %s has no memory", what, noun);
    if (object_of(at.mem)->closed)
        return bsi_fail(BS_STATE, "%s: %s is memory that was freed before", what, noun);
    if (at.mem->dev != dev)
        return bsi_fail(BS_ARG, "%s: %s is memory of device '%s', the call of '%s'", what, noun,
                        at.mem->dev->spec, dev->spec);
    /* off + bytes may wrap, and a wrapped end would lie inside the memory. */
    if (!bsi_add_size(at.off, bytes, &end) || end > at.mem->bytes)
        return bsi_fail(BS_ARG, "%s: %s is %zu bytes at offset %zu of a memory of %zu bytes", what,
                        noun, bytes, at.off, at.mem->bytes);
    return BS_OK;
}

/* ---- objects --------------------------------------------------------------------------------- */

static object *new_object(void)
{
    return bsi_alloc(BS_TAG_MISC, sizeof(object));
}

static void object_opened(bs_dev *dev)
{
    device_of(dev)->live++;
}

/* False: it was closed before (known where closed objects are kept). */
static bool object_closing(bs_dev *dev, const object *o, const char *noun)
{
    if (!o->closed)
        return true;
    bsi_fail(BS_STATE, "the %s was closed before", noun);
    char text[64];
    snprintf(text, sizeof text, "%s closed twice", noun);
    dev->ops->misuse(dev, text);
    return false;
}

/* The last object of a closed device takes the device along: neither may be touched after this. */
static void object_closed(bs_dev *dev, object *o)
{
    device *d = device_of(dev);
    o->closed = true;
    if (bsi_dev_checks(dev)) {
        /* Not freed: the allocator could give the same address to the next object, and a stale
           pointer would then pass for that one. */
        o->next = d->graves;
        d->graves = o;
    } else {
        bsi_free(o->name);
        bsi_free(o);
    }
    if (--d->live == 0 && d->closed)
        destroy(d);
}

/* Injected: another process took memory after this one had looked. The difference cannot wrap:
   while device_left is set, all device memory in use has passed this test. */
static bs_status memory_left(device *d, bsi_memkind kind, size_t bytes)
{
    if (kind != BSI_MEM_DEVICE || d->device_left == 0 || bytes <= d->device_left - d->device_used)
        return BS_OK;
    d->ran_short = true;
    return bsi_fail(BS_DEVMEM, "%zu bytes of device memory are not available: %zu are free (injected)",
                    bytes, d->device_left - d->device_used);
}

/* Logged once, because what follows is likely to be refused, too. Which memory was refused is kept
   on the object, so that its free subtracts what was added here. */
static void account(device *d, object *o, bsi_memkind wanted)
{
    const bsi_mem *m = &o->pub.mem;
    o->unpinned = wanted == BSI_MEM_PINNED && m->kind == BSI_MEM_HOST;
    if (o->unpinned && !d->warned)
        bsi_log(
            "device '%s': %zu bytes of %s memory cannot be page-locked: %s; results stay the same, but "
            "copies of what is refused keep the host waiting and are several times slower; see 'ulimit "
            "-l' and the memory limit of the container, or lower ram=",
            d->pub.spec, m->bytes, bs_tag_name(m->tag), bs_error()->msg);
    d->warned = d->warned || o->unpinned;
    d->unpinned += o->unpinned ? m->bytes : 0;
    if (m->kind == BSI_MEM_DEVICE)
        d->device_used += m->bytes;
}

bs_status bsi_mem_alloc(bs_dev *dev, bsi_memkind kind, bs_tag tag, size_t bytes, bsi_mem **out)
{
    *out = NULL;
    BSI_TRY(usable(dev, "mem_alloc"));
    if ((unsigned)kind > BSI_MEM_DEVICE || (unsigned)tag >= BS_TAG_COUNT)
        return bsi_fail(BS_ARG, "mem_alloc: memory kind %d or tag %d does not exist", (int)kind,
                        (int)tag);
    BSI_TRY(memory_left(device_of(dev), kind, bytes));
    object *o = new_object();
    if (!o)
        return BS_NOMEM;
    o->pub.mem = (bsi_mem){.dev = dev, .kind = kind, .tag = tag, .bytes = bytes};
    bs_status st = settle(dev, dev->ops->mem_alloc(dev, kind, tag, bytes, &o->pub.mem));
    if (st != BS_OK) {
        bsi_free(o);
        return st;
    }
    account(device_of(dev), o, kind);
    object_opened(dev);
    *out = &o->pub.mem;
    return BS_OK;
}

void bsi_mem_free(bsi_mem *mem)
{
    if (!mem || !object_closing(mem->dev, object_of(mem), "memory"))
        return;
    device *d = device_of(mem->dev);
    object *o = object_of(mem);
    if (o->unpinned)
        d->unpinned -= mem->bytes;
    if (mem->kind == BSI_MEM_DEVICE)
        d->device_used -= mem->bytes;
    mem->dev->ops->mem_free(mem);
    object_closed(mem->dev, o);
}

bs_status bsi_queue_open(bs_dev *dev, const char *name, bsi_queue **out)
{
    *out = NULL;
    BSI_TRY(usable(dev, "queue_open"));
    object *o = new_object();
    if (!o)
        return BS_NOMEM;
    bs_status st = BS_NOMEM;
    o->name = bsi_strdup(BS_TAG_MISC, name ? name : "queue");
    if (!o->name)
        goto done;
    o->pub.queue = (bsi_queue){.dev = dev, .name = o->name};
    st = bsi_event_open(dev, &o->end); /* here, so that a wait opens nothing that can be refused */
    if (st != BS_OK)
        goto done;
    st = settle(dev, dev->ops->queue_open(dev, o->name, &o->pub.queue));
    if (st != BS_OK)
        goto done;
    object_opened(dev);
    *out = &o->pub.queue;
    return BS_OK;
done:
    bsi_event_close(o->end);
    bsi_free(o->name);
    bsi_free(o);
    return st;
}

void bsi_queue_close(bsi_queue *q)
{
    if (!q || !object_closing(q->dev, object_of(q), "queue"))
        return;
    object *o = object_of(q);
    q->dev->ops->queue_close(q);
    bsi_event_close(o->end); /* the queue itself keeps the device open until the next line */
    object_closed(q->dev, o);
}

bs_status bsi_event_open(bs_dev *dev, bsi_event **out)
{
    *out = NULL;
    BSI_TRY(usable(dev, "event_open"));
    object *o = new_object();
    if (!o)
        return BS_NOMEM;
    o->pub.event = (bsi_event){.dev = dev};
    bs_status st = settle(dev, dev->ops->event_open(dev, &o->pub.event));
    if (st != BS_OK) {
        bsi_free(o);
        return st;
    }
    object_opened(dev);
    *out = &o->pub.event;
    return BS_OK;
}

void bsi_event_close(bsi_event *ev)
{
    if (!ev || !object_closing(ev->dev, object_of(ev), "event"))
        return;
    ev->dev->ops->event_close(ev);
    object_closed(ev->dev, object_of(ev));
}

/* ---- order ----------------------------------------------------------------------------------- */

/* Appended under the lock, read without it: an entry is written before the release store of the
   count that covers it, and entries never change. */
static pthread_mutex_t sites_lock = PTHREAD_MUTEX_INITIALIZER;
static const char *sites[MAX_SITES];
static atomic_int n_sites;

static bool site_known(const char *site, int n)
{
    for (int i = 0; i < n; i++) {
        if (sites[i] == site || strcmp(sites[i], site) == 0)
            return true;
    }
    return false;
}

static void add_site(const char *site)
{
    /* Without the lock first: this runs at every wait, and after one step all sites are known. */
    if (site_known(site, atomic_load_explicit(&n_sites, memory_order_acquire)))
        return;
    pthread_mutex_lock(&sites_lock);
    int n = atomic_load_explicit(&n_sites, memory_order_relaxed);
    /* Looked up again, since another thread may have added it before the lock was ours. Sites that
       find the list full are not listed; waiting does not depend on it. */
    if (n < MAX_SITES && !site_known(site, n)) {
        sites[n] = site;
        atomic_store_explicit(&n_sites, n + 1, memory_order_release);
    }
    pthread_mutex_unlock(&sites_lock);
}

int bsi_wait_sites(const char *const **out)
{
    *out = sites;
    return atomic_load_explicit(&n_sites, memory_order_acquire);
}

bs_status bsi_event_record(bsi_event *ev, bsi_queue *q)
{
    BSI_TRY(queue_ok(q, "event_record"));
    BSI_TRY(event_ok(q->dev, ev, "event_record"));
    return settle(q->dev, q->dev->ops->event_record(ev, q));
}

bs_status bsi_queue_wait(bsi_queue *q, const bsi_event *ev, const char *site)
{
    if (!site || !*site)
        return bsi_fail(BS_ARG, "queue_wait: a wait needs the name of its place in the source");
    BSI_TRY(queue_ok(q, site));
    BSI_TRY(event_ok(q->dev, ev, site));
    add_site(site);
    return settle(q->dev, q->dev->ops->queue_wait(q, ev, site));
}

bs_status bsi_event_query(const bsi_event *ev)
{
    BSI_TRY(event_ok(NULL, ev, "event_query"));
    BSI_TRY(usable(ev->dev, "event_query"));
    return settle(ev->dev, ev->dev->ops->event_query(ev));
}

bs_status bsi_queue_status(bsi_queue *q)
{
    BSI_TRY(queue_ok(q, "queue_status"));
    return settle(q->dev, q->dev->ops->queue_status(q));
}

/* ---- operations ------------------------------------------------------------------------------ */

bs_status bsi_copy(bsi_queue *q, bsi_addr dst, bsi_addr src, size_t bytes)
{
    BSI_TRY(queue_ok(q, "copy"));
    BSI_TRY(range_ok(q->dev, dst, bytes, "copy", "destination"));
    BSI_TRY(range_ok(q->dev, src, bytes, "copy", "source"));
    if (bytes == 0)
        return BS_OK;
    /* No sum wraps: both ranges lie in their memory. Overlap is undefined for memcpy and for
       cudaMemcpyAsync alike ("the memory areas may not overlap"), so no backend sees it. */
    if (dst.mem == src.mem && dst.off < src.off + bytes && src.off < dst.off + bytes)
        return bsi_fail(BS_ARG, "copy: %zu bytes from offset %zu to %zu of one memory overlap", bytes,
                        src.off, dst.off);
    return settle(q->dev, q->dev->ops->copy(q, dst, src, bytes));
}

bs_status bsi_fill(bsi_queue *q, bsi_addr dst, int byte, size_t bytes)
{
    BSI_TRY(queue_ok(q, "fill"));
    BSI_TRY(range_ok(q->dev, dst, bytes, "fill", "destination"));
    if (byte < 0 || byte > 255)
        return bsi_fail(BS_ARG, "fill: %d is not a byte", byte);
    if (bytes == 0)
        return BS_OK;
    return settle(q->dev, q->dev->ops->fill(q, dst, byte, bytes));
}

static const char *const nouns[BSK_MAX_ARGS] = {"operand 1", "operand 2",  "operand 3",  "operand 4",
                                                "operand 5", "operand 6",  "operand 7",  "operand 8",
                                                "operand 9", "operand 10", "operand 11", "operand 12"};

static bs_status operand_ok(const bs_dev *dev, const bsi_arg *a, const char *label, const char *noun)
{
    if (a->bytes == 0)
        return BS_OK;
    BSI_TRY(range_ok(dev, a->at, a->bytes, label, noun));
    if (a->mode < BSI_READ || a->mode > BSI_READWRITE)
        return bsi_fail(BS_ARG, "%s: %s says neither read nor write", label, noun);
    if (a->at.mem->kind != BSI_MEM_DEVICE)
        return bsi_fail(BS_ARG, "%s: %s is host memory; a kernel reaches device memory only", label,
                        noun);
    return BS_OK;
}

bs_status bsi_launch(bsi_queue *q, const bsi_kcall *call)
{
    const char *label = call && call->label ? call->label : "launch";
    BSI_TRY(queue_ok(q, label));
    if (!call || (unsigned)call->op >= BSK_OP_COUNT)
        return bsi_fail(BS_ARG, "%s: kernel number %d does not exist", label,
                        call ? (int)call->op : -1);
    if (call->n_args < 0 || call->n_args > BSK_MAX_ARGS)
        return bsi_fail(BS_ARG, "%s: %d operands given, 0 to %d possible", label, call->n_args,
                        BSK_MAX_ARGS);
    for (int i = 0; i < call->n_args; i++)
        BSI_TRY(operand_ok(q->dev, &call->arg[i], label, nouns[i]));
    BSI_TRY(operand_ok(q->dev, &call->workspace, label, "the workspace"));
    return settle(q->dev, q->dev->ops->launch(q, call));
}

bs_status bsi_host_fn(bsi_queue *q, void (*fn)(void *), void *ud)
{
    BSI_TRY(queue_ok(q, "host_fn"));
    if (!fn)
        return bsi_fail(BS_ARG, "host_fn: no function");
    return settle(q->dev, q->dev->ops->host_fn(q, fn, ud));
}

/* ---- blocking waits -------------------------------------------------------------------------- */

/* A pump may wait, and waits pump. Entered again from there it would meet the half-changed state of
   its own outer call. */
static void pump(device *d)
{
    if (!d->pub.pump || d->pumping)
        return;
    d->pumping = true;
    d->pub.pump(d->pub.pump_ud);
    d->pumping = false;
}

/* Spin first, because most waits are for something that is nearly done. Then sleep, twice as long
   every 16 rounds, because the cores belong to the threads of the device. The longest sleep bounds
   how late a finished event is noticed. */
static void back_off(int *round)
{
    if (++*round <= SPINS)
        return;
    int doublings = BSI_MIN((*round - SPINS) / 16, 6);
    long ns = BSI_MIN((long)SLEEP_MIN_NS << doublings, (long)SLEEP_MAX_NS);
    nanosleep(&(struct timespec){.tv_nsec = ns}, NULL);
}

static bs_status cancelled(const bs_dev *dev)
{
    return bsi_fail(BS_CANCELLED, "cancelled while waiting for device '%s'", dev->spec);
}

/* The query comes first, so that what is done is not called cancelled. */
bs_status bsi_host_wait(const bsi_event *ev)
{
    int round = 0;
    for (;;) {
        bs_status st = bsi_event_query(ev);
        if (st != BS_AGAIN)
            return st;
        if (bs_cancelled())
            return cancelled(ev->dev);
        pump(device_of(ev->dev));
        back_off(&round);
    }
}

bs_status bsi_host_wait_queue(bsi_queue *q)
{
    BSI_TRY(queue_ok(q, "host_wait_queue"));
    bsi_event *end = object_of(q)->end;
    /* A pump that waits for the same queue records `end` again meanwhile. That moves the mark to a
       later place, so this wait can end late but not early. */
    BSI_TRY(bsi_event_record(end, q));
    BSI_TRY(bsi_host_wait(end));
    return bsi_queue_status(q); /* a failure that the event did not show */
}

bs_status bsi_host_spin(const bsi_event *ev)
{
    for (;;) {
        bs_status st = bsi_event_query(ev);
        if (st != BS_AGAIN)
            return st;
        if (bs_cancelled())
            return cancelled(ev->dev);
        /* A queue of the cpu device may need this core to reach the event. */
        sched_yield();
    }
}

bs_status bsi_host_drain_queue(bsi_queue *q)
{
    int round = 0;
    bs_status st;
    BSI_TRY(queue_ok(q, "host_drain_queue"));
    bsi_event *end = object_of(q)->end;
    BSI_TRY(bsi_event_record(end, q));
    /* Neither bs_cancel nor the pump is looked at: the caller is about to free what is in flight,
       so an early return would free it too soon, and a pump would issue more. */
    while ((st = bsi_event_query(end)) == BS_AGAIN)
        back_off(&round);
    return st;
}
