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
        size_t bytes; /* 0: free */
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
    if (!sqe) { /* broken: the queue has room for `depth` requests, and no more are ever inside */
        r->result = u->broken ? -u->broken : -EAGAIN;
        append(&u->dead, r);
        return;
    }
    /* One read of Linux ends there; the rest is asked for when the short result is back. */
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
        int n = io_uring_submit(&u->ring);
        if (n == -EINTR)
            continue;
        if (n == -EAGAIN || n == -EBUSY || n == 0)
            return; /* room comes back when results are taken */
        for (; n > 0 && u->unsent.head; n--)
            pop(&u->unsent);
        if (n < 0) {
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
    if (u->unsent.head)
        wait_us = BSI_MIN(wait_us, RETRY_US);
    struct __kernel_timespec t = {wait_us / 1000000, (long long)(wait_us % 1000000) * 1000};
    if (!u->dead.head)
        io_uring_wait_cqe_timeout(&u->ring, &cqe, &t); /* a result, a signal or the time: all end it */
}

static bool set_region(uring *u, int i, char *base, size_t bytes)
{
    struct iovec v = {base, bytes};
    __u64 tag = 0;
    u->region[i].bytes = 0;
    if (io_uring_register_buffers_update_tag(&u->ring, (unsigned)i, &v, &tag, 1) != 1)
        return false;
    u->region[i] = (struct region){base, bytes};
    return true;
}

/* Entries of the table that share a byte with the range are emptied: they describe memory that is no
   more, and a read into them would go to its old pages. */
static void forget(uring *u, const char *base, size_t bytes)
{
    for (int i = 0; i < u->regions; i++) {
        struct region *g = &u->region[i];
        if (g->bytes && base < g->base + g->bytes && g->base < base + BSI_MAX(bytes, 1u))
            set_region(u, i, NULL, 0);
    }
}

static void uring_add_memory(void *e, void *base, size_t bytes)
{
    uring *u = e;
    char *p = base;
    forget(u, base, bytes);
    if (!u->table && !u->no_table && bytes) {
        u->table = io_uring_register_buffers_sparse(&u->ring, REGIONS) == 0;
        u->no_table = !u->table;
    }
    for (int i = 0; u->table && bytes && i < REGIONS; i++) {
        if (u->region[i].bytes)
            continue;
        size_t n = BSI_MIN(bytes, REGION_BYTES);
        if (!set_region(u, i, p, n)) /* RLIMIT_MEMLOCK, most often */
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
    /* One thread submits and reaps, so results need not interrupt it; older kernels know less. */
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
