/* SPDX-License-Identifier: Apache-2.0 */
/*
** cpu_queue.c: queues and events of the cpu device. A queue is an append-only list that its worker
** follows; the owner recycles what lies behind a record that is known to be done. An event points at
** the mark of its current record; a wait keeps the mark that was current when it was issued.
**
** The worker executes and releases; it never allocates, frees, logs or takes a lock.
*/
#include "backend/cpu/cpu.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define SLAB_NODES    64
#define SLAB_MARKS    256
#define RECLAIM_EVERY 256 /* issues between two looks at a queue that nobody queries */
#define MAX_AHEAD                                                                                      \
    1024 /* commands of a queue that have not run; more, and issuing waits for the worker */

/* ---- nodes and marks (owner) ----------------------------------------------------------------- */

static void *new_slab(cpu_dev *d, size_t bytes)
{
    cpu_slab *s = bsi_alloc(BS_TAG_MISC, sizeof *s + bytes);
    if (!s)
        return NULL;
    s->next = d->slabs;
    d->slabs = s;
    return s->bytes;
}

static void put_node(cpu_dev *d, cpu_node *n)
{
    atomic_store_explicit(&n->next, d->free_nodes, memory_order_relaxed);
    d->free_nodes = n;
}

static bool more_nodes(cpu_dev *d)
{
    cpu_node *n = new_slab(d, SLAB_NODES * sizeof *n);
    for (int i = 0; n && i < SLAB_NODES; i++)
        put_node(d, n + i);
    return n != NULL;
}

static cpu_node *take_node(cpu_dev *d)
{
    if (!d->free_nodes && !more_nodes(d))
        return NULL;
    cpu_node *n = d->free_nodes;
    d->free_nodes = atomic_load_explicit(&n->next, memory_order_relaxed);
    atomic_store_explicit(&n->next, NULL, memory_order_relaxed);
    return n;
}

static bool more_marks(cpu_dev *d)
{
    cpu_mark *m = new_slab(d, SLAB_MARKS * sizeof *m);
    for (int i = 0; m && i < SLAB_MARKS; i++) {
        m[i].next = d->free_marks;
        d->free_marks = m + i;
    }
    return m != NULL;
}

static cpu_mark *take_mark(cpu_dev *d)
{
    if (!d->free_marks && !more_marks(d))
        return NULL;
    cpu_mark *m = d->free_marks;
    d->free_marks = m->next;
    atomic_store_explicit(&m->done, MARK_PENDING, memory_order_relaxed);
    m->refs = 1;
    return m;
}

/* Room for all that a queue can have in flight, so that how far the host runs ahead changes no byte of
   memory. TSan builds are unbounded (see bsi_cpu_issue) and allocate as they go. */
static bool reserve(cpu_dev *d)
{
    int n = BS_TSAN ? 0 : MAX_AHEAD + RECLAIM_EVERY;
    for (int i = 0; i < n; i += SLAB_NODES)
        if (!more_nodes(d))
            return false;
    for (int i = 0; i < n; i += SLAB_MARKS)
        if (!more_marks(d))
            return false;
    return true;
}

static void drop_mark(cpu_dev *d, cpu_mark *m)
{
    if (m && --m->refs == 0) {
        m->next = d->free_marks;
        d->free_marks = m;
    }
}

/* Recycle the nodes before sequence number seq, which the caller has acquired as run. The worker
   still reads `next` of the node that it took last, so that node stays. A mark loses its queue
   together with the node of its record: a later query of the event has nothing left to recycle, and
   the queue may be closed by then. */
static void recycle(cpu_queue *q, uint64_t seq)
{
    while (q->oldest->seq < seq) {
        cpu_node *n = q->oldest;
        q->oldest = atomic_load_explicit(&n->next, memory_order_relaxed);
        if (n->kind == CPU_RECORD || n->kind == CPU_WAIT) {
            if (n->kind == CPU_RECORD)
                n->u.mark->queue = NULL;
            drop_mark(q->dev, n->u.mark);
        }
        put_node(q->dev, n);
    }
}

cpu_node *bsi_cpu_node(cpu_queue *q, cpu_kind kind, const char *label)
{
    cpu_node *n = take_node(q->dev);
    if (!n)
        return NULL;
    n->kind = kind;
    n->label = label;
    /* Counted by the owner at issue: the n-th call fails in every run, whatever the workers do. */
    n->fail = kind <= CPU_HOST_FN && bsi_dev_fails(q->dev->fail_call, &q->dev->calls);
    return n;
}

void bsi_cpu_issue(cpu_queue *q, cpu_node *n)
{
    cpu_node *last = q->tail;
    n->seq = ++q->issued;
    q->tail = n;
    atomic_store_explicit(&last->next, n, memory_order_release); /* pairs with the load in work() */
    sem_post(&q->ready); /* last: whoever it wakes must find the node */
    /* A long run of launches without a query would keep all its nodes. The acquire below orders
       this thread behind the worker, and with it whatever it issues next on any queue. A race
       detector would take that for the wait that a program forgot, so builds for one never look. */
    if (BS_TSAN || q->issued % RECLAIM_EVERY)
        return;
    uint64_t done = atomic_load_explicit(&q->done, memory_order_acquire);
    while (q->issued - done >= MAX_AHEAD) { /* what it waits for has been issued: it will run */
        nanosleep(&(struct timespec){.tv_nsec = 20000}, NULL);
        done = atomic_load_explicit(&q->done, memory_order_acquire);
    }
    recycle(q, done);
}

/* ---- worker ---------------------------------------------------------------------------------- */

static void futex(_Atomic uint32_t *word, int op, uint32_t value)
{
    syscall(SYS_futex, word, op, value, NULL, NULL, 0);
}

/* Sleeps until the mark is published. It is made AWAITED first, so that the publisher knows whether
   there is anybody to wake. If the publisher comes between the two steps, the word is no longer
   AWAITED, and FUTEX_WAIT returns at once (EAGAIN, futex(2)). It also returns on signals, so the
   word is looked at again after each return. Acquire: what ran before the mark is visible to the
   operations behind this wait. */
static void mark_wait(cpu_mark *m)
{
    for (;;) {
        uint32_t seen = MARK_PENDING;
        if (atomic_compare_exchange_strong_explicit(&m->done, &seen, MARK_AWAITED, memory_order_acquire,
                                                    memory_order_acquire))
            seen = MARK_AWAITED;
        if (seen == MARK_DONE)
            return;
        futex(&m->done, FUTEX_WAIT_PRIVATE, MARK_AWAITED);
    }
}

/* An exchange, because a plain store could not tell whether a worker had gone to sleep just before. */
static void mark_publish(cpu_mark *m)
{
    if (atomic_exchange_explicit(&m->done, MARK_DONE, memory_order_release) == MARK_AWAITED)
        futex(&m->done, FUTEX_WAKE_PRIVATE, INT_MAX);
}

static void jitter(cpu_queue *q)
{
    if (!q->dev->jitter_us)
        return;
    uint64_t us = bsi_jitter(&q->jitter, q->dev->jitter_us);
    double until = bsi_now() + 1e-6 * (double)us;
    if (us > 60) /* below that a sleep is too long: timer slack is 50 us (prctl(2)) */
        nanosleep(&(struct timespec){.tv_sec = (time_t)(us / 1000000),
                                     .tv_nsec = (long)(us % 1000000) * 1000},
                  NULL);
    while (bsi_now() < until)
        ;
}

static void fail(cpu_queue *q, const cpu_node *n)
{
    cpu_dev *d = q->dev;
    /* FAIL_WRITING keeps other workers, and readers, away from the text until it is complete. */
    uint32_t none = FAIL_NONE;
    if (!atomic_compare_exchange_strong_explicit(&d->failed, &none, FAIL_WRITING, memory_order_relaxed,
                                                 memory_order_relaxed))
        return; /* the first failure is the one that is told */
    d->error.status = BS_DEVICE;
    snprintf(d->error.msg, sizeof d->error.msg, "'%s' on queue '%s' failed (injected)", n->label,
             q->name);
    atomic_store_explicit(&d->failed, FAIL_SET, memory_order_release);
}

static void launch(const cpu_queue *q, const cpu_node *n)
{
    cpu_dev *d = q->dev;
    const bsk_entry *kernel = &bsk_cpu[n->u.launch.op];
    /* `profile` changes only while all queues are drained (cpu_profile), so it is read without the
       lock that the sums need. */
    double t0 = d->profile ? bsi_now() : 0.0;
    kernel->fn(&n->u.launch.call);
    if (!d->profile)
        return;
    double seconds = bsi_now() - t0;
    pthread_mutex_lock(&d->profile_lock);
    bsi_profile_add(d->profile, kernel->name, n->label, seconds);
    pthread_mutex_unlock(&d->profile_lock);
}

/* The load is relaxed: an operation that still runs after another queue has failed is as good as one
   that ran just before. */
static void operate(cpu_queue *q, const cpu_node *n)
{
    if (atomic_load_explicit(&q->dev->failed, memory_order_relaxed) != FAIL_NONE)
        return; /* nothing runs on a lost device; marks are still published, so nothing hangs */
    if (n->fail) {
        fail(q, n);
        return;
    }
    switch (n->kind) {
    case CPU_COPY:
        memcpy(n->u.copy.dst, n->u.copy.src, n->u.copy.bytes);
        break;
    case CPU_FILL:
        memset(n->u.fill.dst, n->u.fill.byte, n->u.fill.bytes);
        break;
    case CPU_LAUNCH:
        launch(q, n);
        break;
    default:
        n->u.host_fn.fn(n->u.host_fn.ud);
    }
}

static void *work(void *arg)
{
    cpu_queue *q = arg;
    for (;;) {
        while (sem_wait(&q->ready) != 0) /* EINTR */
            ;
        cpu_node *n = atomic_load_explicit(&q->head->next, memory_order_acquire);
        q->head = n;
        jitter(q);
        if (n->kind == CPU_STOP)
            return NULL;
        if (n->kind == CPU_RECORD)
            mark_publish(n->u.mark);
        else if (n->kind == CPU_WAIT)
            mark_wait(n->u.mark);
        else
            operate(q, n);
        /* Publishes the operation to whoever acquires done: recycling, drains. Not to waits, which go
           by marks. */
        atomic_store_explicit(&q->done, n->seq, memory_order_release);
    }
}

/* ---- queues (owner) -------------------------------------------------------------------------- */

bs_status bsi_cpu_queue_open(bs_dev *dev, const char *name, bsi_queue *out)
{
    cpu_dev *d = dev->impl;
    bs_status st = BS_NOMEM;
    cpu_queue *q = bsi_alloc(BS_TAG_MISC, sizeof *q);
    if (!q)
        return st;
    q->dev = d;
    q->name = name;
    q->par = &bsk_par_serial;
    q->jitter = bsi_jitter_state(d->jitter_seed, d->queues_opened);
    sem_init(&q->ready, 0, 0);
    q->head = q->tail = q->oldest = take_node(d);
    q->stop = take_node(d);
    if (!q->head || !q->stop || !reserve(d))
        goto fail;
    *q->head = (cpu_node){.kind = CPU_STOP}; /* before the first: never run */
    if (!BS_TSAN && strcmp(name, "compute") == 0 && d->threads > 1) {
        /* a pool that several queues shared would order them in the eyes of a race detector */
        st = bsi_cpu_pool_open(d->threads - 1, &q->pool);
        if (st != BS_OK)
            goto fail;
        q->par = bsi_cpu_pool_par(q->pool);
    }
    st = bsi_cpu_thread(&q->thread, work, q, "bs-q", d->queues_opened);
    if (st != BS_OK)
        goto fail;
    d->queues_opened++;
    q->next = d->queues;
    d->queues = q;
    out->impl = q;
    return BS_OK;
fail:
    bsi_cpu_pool_close(q->pool);
    if (q->head)
        put_node(d, q->head);
    if (q->stop)
        put_node(d, q->stop);
    sem_destroy(&q->ready);
    bsi_free(q);
    return st;
}

void bsi_cpu_queue_close(bsi_queue *queue)
{
    cpu_queue *q = queue->impl;
    cpu_dev *d = q->dev;
    q->stop->kind = CPU_STOP; /* behind everything that was issued: the join drains */
    bsi_cpu_issue(q, q->stop);
    pthread_join(q->thread, NULL);
    recycle(q, q->issued);
    /* The node taken last was left by recycle; its worker is gone. */
    put_node(d, q->oldest);
    cpu_queue **at = &d->queues;
    while (*at != q)
        at = &(*at)->next;
    *at = q->next;
    bsi_cpu_pool_close(q->pool);
    sem_destroy(&q->ready);
    bsi_free(q);
}

void bsi_cpu_drain(cpu_dev *d)
{
    for (cpu_queue *q = d->queues; q; q = q->next) {
        /* The acquire in the loop makes what the worker wrote visible to the owner, which is about
           to free or to read it. */
        long ns = 20000;
        while (atomic_load_explicit(&q->done, memory_order_acquire) < q->issued) {
            nanosleep(&(struct timespec){.tv_nsec = ns}, NULL);
            ns = BSI_MIN(2 * ns, 1000000L);
        }
    }
}

/* ---- events (owner) -------------------------------------------------------------------------- */

bs_status bsi_cpu_event_record(bsi_event *ev, bsi_queue *queue)
{
    cpu_queue *q = queue->impl;
    cpu_mark *m = take_mark(q->dev);
    cpu_node *n = m ? bsi_cpu_node(q, CPU_RECORD, NULL) : NULL;
    if (!n) {
        drop_mark(q->dev, m);
        return BS_NOMEM;
    }
    m->refs = 2; /* the event's and the node's. Waits that were bound to the former mark keep it (C3) */
    n->u.mark = m;
    m->queue = q;
    /* The number that bsi_cpu_issue is about to give to the node. */
    m->seq = q->issued + 1;
    bsi_cpu_issue(q, n);
    drop_mark(q->dev, ev->impl);
    ev->impl = m;
    return BS_OK;
}

bs_status bsi_cpu_queue_wait(bsi_queue *queue, const bsi_event *ev, const char *site)
{
    (void)site;
    cpu_queue *q = queue->impl;
    cpu_mark *m = ev->impl;
    if (!m)
        return BS_OK; /* never recorded: done */
    cpu_node *n = bsi_cpu_node(q, CPU_WAIT, NULL);
    if (!n)
        return BS_NOMEM;
    m->refs++;
    n->u.mark = m;
    bsi_cpu_issue(q, n);
    return BS_OK;
}

bs_status bsi_cpu_status(cpu_dev *d)
{
    if (atomic_load_explicit(&d->failed, memory_order_acquire) == FAIL_NONE)
        return BS_OK;
    while (atomic_load_explicit(&d->failed, memory_order_acquire) != FAIL_SET)
        sched_yield(); /* the worker is writing the text */
    return bsi_fail_from(&d->error);
}

bs_status bsi_cpu_event_query(const bsi_event *ev)
{
    cpu_dev *d = ev->dev->impl;
    cpu_mark *m = ev->impl;
    BSI_TRY(bsi_cpu_status(d));
    /* The acquire covers everything before the mark: results may be read, and nodes recycled. */
    if (m && atomic_load_explicit(&m->done, memory_order_acquire) != MARK_DONE)
        return BS_AGAIN;
    BSI_TRY(bsi_cpu_status(d)); /* what ran before the mark may have failed since the first look */
    if (m && m->queue)
        recycle(m->queue, m->seq);
    return BS_OK;
}

void bsi_cpu_event_close(bsi_event *ev)
{
    drop_mark(ev->dev->impl, ev->impl);
}
