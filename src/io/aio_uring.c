/* SPDX-License-Identifier: Apache-2.0 */
/*
** aio_uring.c: reads through io_uring. One thread, the owner, makes the ring, submits and reaps; no
** thread of ours exists. Memory that was registered is read into without pinning its pages per request.
** A request is either unsent (in the submission queue, also on our list), in the kernel, or dead: after
** an error of io_uring_enter that cannot be repeated, nothing more is sent and what was unsent fails.
*/
#include "io/aio.h"

#if BS_HAVE_URING

#include <errno.h>
#include <liburing.h>
#include <string.h>

#define REGIONS      1024        /* entries of the table of registered memory */
#define REGION_BYTES (1UL << 30) /* largest that the kernel takes as one */
#define RETRY_US     1000        /* how long to wait when the kernel had no room for what is unsent */

typedef struct list {
    bsi_request *head, **tail;
} list;

typedef struct uring {
    struct io_uring ring;
    list unsent, dead;
    int broken;           /* errno after which nothing is sent, or 0 */
    bool table, no_table; /* the kernel has it, or refused it */
    struct region {
        char *base;
        size_t bytes;     /* 0: free */
        const char *from; /* where the memory begins that was registered in one call */
    } region[REGIONS];
    int regions; /* entries ever used */
} uring;

static void append(list *l, bsi_request *r)
{
    r->next = NULL;
    *l->tail = r;
    l->tail = &r->next;
}

static bsi_request *pop(list *l)
{
    bsi_request *r = l->head;
    if (!(l->head = r->next))
        l->tail = &l->head;
    return r;
}

static int region_of(const uring *u, const char *p, size_t n)
{
    for (int i = 0; i < u->regions; i++) {
        const struct region *g = &u->region[i];
        if (p >= g->base && (size_t)(p - g->base) < g->bytes && n <= g->bytes - (size_t)(p - g->base))
            return i;
    }
    return -1;
}

static void uring_start(void *e, bsi_request *r)
{
    uring *u = e;
    struct io_uring_sqe *sqe = u->broken ? NULL : io_uring_get_sqe(&u->ring);
    if (!sqe) { /* only when broken: the ring has `depth` entries, and no more are ever inside */
        r->result = u->broken ? -u->broken : -EAGAIN;
        append(&u->dead, r);
        return;
    }
    /* Linux transfers at most 0x7ffff000 bytes in one read (read(2)). The result is short then, and
       aio.c asks for the rest. */
    unsigned n = (unsigned)BSI_MIN(r->length, (size_t)0x7ffff000);
    int region = region_of(u, r->buffer, n);
    if (region >= 0)
        io_uring_prep_read_fixed(sqe, r->fd, r->buffer, n, r->offset, region);
    else
        io_uring_prep_read(sqe, r->fd, r->buffer, n, r->offset);
    io_uring_sqe_set_data(sqe, r);
    append(&u->unsent, r);
}

static void uring_flush(void *e)
{
    uring *u = e;
    while (u->unsent.head && !u->broken) {
        /* The kernel takes entries in the order in which they were put into the queue and says how
           many; `unsent` has the same order, so that many leave its front. */
        int n = io_uring_submit(&u->ring);
        if (n == -EINTR)
            continue;
        if (n == -EAGAIN || n == -EBUSY || n == 0)
            return; /* no memory, or results to be taken first (io_uring_enter(2)): tried again */
        for (; n > 0 && u->unsent.head; n--)
            pop(&u->unsent);
        if (n < 0) {
            /* What is unsent stays in the ring and is never submitted again, so its buffers are not
               written to. What the kernel has taken ends as usual. */
            u->broken = -n;
            while (u->unsent.head) {
                bsi_request *r = pop(&u->unsent);
                r->result = n;
                append(&u->dead, r);
            }
        }
    }
}

static bsi_request *uring_poll(void *e)
{
    uring *u = e;
    struct io_uring_cqe *cqe;
    list out = {NULL, &out.head};
    while (u->dead.head)
        append(&out, pop(&u->dead));
    /* Enters the kernel when it has set IORING_SQ_TASKRUN. Without IORING_SETUP_TASKRUN_FLAG it
       would not, and deferred results would show up only in a wait. An entry is read before it is
       marked as seen: from then on the kernel may overwrite it. */
    while (io_uring_peek_cqe(&u->ring, &cqe) == 0 && cqe) {
        bsi_request *r = io_uring_cqe_get_data(cqe);
        r->result = cqe->res;
        io_uring_cqe_seen(&u->ring, cqe);
        append(&out, r);
    }
    return out.head;
}

static void uring_wait(void *e, unsigned wait_us)
{
    uring *u = e;
    struct io_uring_cqe *cqe;
    /* No result need come while requests are unsent: only another flush brings them to the kernel. */
    if (u->unsent.head)
        wait_us = BSI_MIN(wait_us, RETRY_US);
    struct __kernel_timespec t = {wait_us / 1000000, (long long)(wait_us % 1000000) * 1000};
    if (!u->dead.head)
        io_uring_wait_cqe_timeout(&u->ring, &cqe, &t); /* a result, a signal or the time: all end it */
}

static bool set_region(uring *u, int i, const char *from, char *base, size_t bytes)
{
    struct iovec v = {base, bytes};
    __u64 tag = 0;
    /* Free on our side before the kernel is asked: when it refuses, no read may name the entry. An
       update with an empty iovec makes an entry sparse again; reads in progress keep its pages
       until they end (io_uring_register(2)). */
    u->region[i].bytes = 0;
    if (io_uring_register_buffers_update_tag(&u->ring, (unsigned)i, &v, &tag, 1) != 1)
        return false;
    u->region[i] = (struct region){base, bytes, from};
    return true;
}

/* Entries of the table that share a byte with the range are emptied; of 0 bytes, those of the memory that begins there,
   which may have several. The kernel holds the pages
   that were there when the entry was made: a read that names it would fill those, and not what is
   mapped there since. */
static void forget(uring *u, const char *base, size_t bytes)
{
    for (int i = 0; i < u->regions; i++) {
        struct region *g = &u->region[i];
        if (g->bytes && (bytes ? base < g->base + g->bytes && g->base < base + bytes : g->from == base))
            set_region(u, i, NULL, NULL, 0);
    }
}

static void uring_add_memory(void *e, void *base, size_t bytes)
{
    uring *u = e;
    char *p = base;
    forget(u, base, bytes);
    if (!u->table && !u->no_table && bytes) {
        /* Sparse, because memory comes later and in parts (Linux 5.19). Without a table every read
           pins its pages itself, which is slower and nothing else. */
        u->table = io_uring_register_buffers_sparse(&u->ring, REGIONS) == 0;
        u->no_table = !u->table;
    }
    for (int i = 0; u->table && bytes && i < REGIONS; i++) {
        if (u->region[i].bytes)
            continue;
        /* Pinned pages count against RLIMIT_MEMLOCK, one entry against 1 GiB
           (io_uring_register(2)). What is refused is read into like memory that was never
           registered. */
        size_t n = BSI_MIN(bytes, REGION_BYTES);
        if (!set_region(u, i, base, p, n))
            return;
        u->regions = BSI_MAX(u->regions, i + 1);
        p += n;
        bytes -= n;
    }
}

static void uring_close(void *e)
{
    uring *u = e;
    io_uring_queue_exit(&u->ring);
    bsi_free(u);
}

static int make_ring(unsigned depth, struct io_uring *ring)
{
    /* One thread submits and reaps, so results need not interrupt it: they wait until it enters the
       kernel, and TASKRUN_FLAG tells it that it should. A kernel refuses flags that it does not
       know with EINVAL: DEFER_TASKRUN is of Linux 6.1, COOP_TASKRUN of 5.19 (io_uring_setup(2)). */
    static const unsigned flags[] = {IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN |
                                         IORING_SETUP_TASKRUN_FLAG,
                                     IORING_SETUP_COOP_TASKRUN | IORING_SETUP_TASKRUN_FLAG, 0};
    int err = -EINVAL;
    for (size_t i = 0; err == -EINVAL && i < BSI_COUNT(flags); i++)
        err = io_uring_queue_init(depth, ring, flags[i]);
    return err;
}

bs_status bsi_uring_open(int depth, bool refuse, const bsi_aio_engine **engine, void **e)
{
    static const bsi_aio_engine uring_engine = {"uring",    uring_close, uring_start,     uring_flush,
                                                uring_poll, uring_wait,  uring_add_memory};
    uring *u = bsi_alloc(BS_TAG_MISC, sizeof *u);
    if (!u)
        return BS_NOMEM;
    int err = refuse ? -EPERM : make_ring((unsigned)depth, &u->ring);
    /* Without it liburing makes a request of every time limit, in the submission queue: it would
       take room that `depth` promises to reads, and submit what we hold back. */
    if (err == 0 &&
        !(u->ring.features & IORING_FEAT_EXT_ARG)) { /* waits with a time limit: Linux 5.11 */
        io_uring_queue_exit(&u->ring);
        err = -ENOSYS;
    }
    if (err) {
        bsi_free(u);
        return bsi_fail_sys(BS_UNSUPPORTED, -err, "io_uring is not available");
    }
    u->unsent.tail = &u->unsent.head;
    u->dead.tail = &u->dead.head;
    *engine = &uring_engine;
    *e = u;
    return BS_OK;
}

#else

bs_status bsi_uring_open(int depth, bool refuse, const bsi_aio_engine **engine, void **e)
{
    (void)depth, (void)refuse, (void)engine, (void)e;
    return bsi_fail(BS_UNSUPPORTED, "io_uring is not part of this build");
}

#endif
