/* SPDX-License-Identifier: Apache-2.0 */
/*
** aio.c: asynchronous reads over one of two engines: order of submission, depth, what a result means,
** faults for tests. Only the owner thread is here. A read is in exactly one place: waiting (fifo), in
** the engine, withheld (tests), or finished. Its buffer is untouched by us once it is finished.
*/
#include "io/aio.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <string.h>
#include <sys/stat.h>

#define DEPTH        32
#define THREADS      4
#define MOST_DEPTH   4096
#define MOST_THREADS 256
#define IDLE_LIMIT   1000 /* results in a row without progress before a read is given up */
#define DRAIN_US     100000

typedef struct fifo {
    bsi_read *head, **tail;
} fifo;

struct bsi_aio {
    const bsi_aio_engine *engine;
    void *e;
    bsi_aio_fault fault;
    fifo waiting, finished;
    bsi_request *request;  /* [depth] */
    bsi_request *idle;     /* free list of them */
    bsi_request *withheld; /* finished, but delayed or kept for reversal */
    int in_engine, in_flight;
    bool draining, logged;
};

static void push(fifo *q, bsi_read *r)
{
    r->next = NULL;
    *q->tail = r;
    q->tail = &r->next;
}

static bsi_read *pop(fifo *q)
{
    bsi_read *r = q->head;
    if (r && !(q->head = r->next))
        q->tail = &q->head;
    return r;
}

/* ---- opening ------------------------------------------------------------------------------------ */

static bs_status choose(bsi_aio *a, const bs_io_cfg *cfg, int depth)
{
    const char *want = cfg->engine && *cfg->engine ? cfg->engine : "auto";
    bool automatic = strcmp(want, "auto") == 0;
    if (!automatic && strcmp(want, "uring") != 0 && strcmp(want, "pool") != 0)
        return bsi_fail(BS_ARG, "io engine '%s' is unknown; there are auto, uring, pool", want);
    /* io_uring may be missing in the kernel or the build, and containers often forbid its system
       calls. "auto" goes on without it and says so; an engine that was asked for by name is not
       replaced. */
    if (strcmp(want, "pool") != 0) {
        bs_status ret = bsi_uring_open(depth, a->fault.refuse_uring, &a->engine, &a->e);
        if (ret == BS_OK || !automatic)
            return ret;
        bsi_log("%s; files are read by a pool of threads", bs_error()->msg);
    }
    int threads = cfg->threads ? cfg->threads : THREADS;
    return bsi_preads_open(depth, BSI_MIN(threads, depth), &a->engine, &a->e);
}

bs_status bsi_aio_open(const bs_io_cfg *cfg, const bsi_aio_fault *fault, bsi_aio **out)
{
    static const bs_io_cfg defaults;
    cfg = cfg ? cfg : &defaults;
    int depth = cfg->depth ? cfg->depth : DEPTH;
    *out = NULL;
    if (depth < 1 || depth > MOST_DEPTH)
        return bsi_fail(BS_ARG, "io depth %d is not in 1 to %d", depth, MOST_DEPTH);
    if (cfg->threads < 0 || cfg->threads > MOST_THREADS)
        return bsi_fail(BS_ARG, "%d io threads are not in 1 to %d", cfg->threads, MOST_THREADS);

    bsi_aio *a = bsi_alloc(BS_TAG_MISC, sizeof *a);
    if (!a)
        return BS_NOMEM;
    bs_status ret = BS_NOMEM;
    if (fault)
        a->fault = *fault;
    a->waiting.tail = &a->waiting.head;
    a->finished.tail = &a->finished.head;
    /* One request for each place in the engine: reads in progress never allocate, and more than
       `depth` cannot be inside. */
    if ((a->request = bsi_alloc(BS_TAG_MISC, (size_t)depth * sizeof *a->request)))
        ret = choose(a, cfg, depth);
    if (ret != BS_OK) {
        bsi_free(a->request);
        bsi_free(a);
        return ret;
    }
    for (int i = depth - 1; i >= 0; i--) {
        a->request[i].next = a->idle;
        a->idle = &a->request[i];
    }
    *out = a;
    return BS_OK;
}

const char *bsi_aio_name(const bsi_aio *a)
{
    return a->engine->name;
}

int bsi_aio_in_flight(const bsi_aio *a)
{
    return a->in_flight;
}

void bsi_aio_register(bsi_aio *a, void *base, size_t bytes)
{
    if (a->engine->add_memory)
        a->engine->add_memory(a->e, base, bytes);
}

/* ---- what a result means --------------------------------------------------------------------- */

/* Bytes that there are for this read: the file may end inside it. */
static size_t expected(const bsi_read *r)
{
    return (size_t)BSI_MIN((uint64_t)r->length, r->file->bytes - r->offset);
}

static void start(bsi_aio *a, bsi_request *q)
{
    const bsi_read *r = q->read;
    q->fd = r->file->fd;
    q->buffer = (char *)r->buffer + r->done;
    q->length = r->length - r->done;
    q->offset = r->offset + r->done;
    a->in_engine++;
    a->engine->start(a->e, q);
}

static void start_waiting(bsi_aio *a)
{
    while (a->idle && a->waiting.head && !a->draining) {
        bsi_request *q = a->idle;
        a->idle = q->next;
        q->read = pop(&a->waiting);
        q->idle = 0;
        q->buffered = false;
        q->started = a->fault.delay_us ? bsi_now() : 0;
        start(a, q);
    }
    a->engine->flush(a->e);
}

/* The detail is recorded on this thread by `failed`; a read carries its own copy to whoever reaps
   it. */
static void give_up(bsi_read *r, bs_status st)
{
    r->status = st;
    r->error = *bs_error();
}

static uint64_t size_now(const bsi_file *f)
{
    struct stat st;
    return fstat(f->fd, &st) == 0 ? (uint64_t)st.st_size : 0;
}

static void shrunk(bsi_read *r)
{
    give_up(
        r,
        bsi_fail(BS_IO,
                 "file '%s' at %llu: expected %zu bytes, got %zu; the file had %llu bytes when it was "
                 "opened and has %llu now",
                 r->file->path, (unsigned long long)r->offset, expected(r), r->done,
                 (unsigned long long)r->file->bytes, (unsigned long long)size_now(r->file)));
}

static void failed(bsi_read *r, int err)
{
    give_up(r, bsi_fail_sys(BS_IO, err, "file '%s' at %llu: expected %zu bytes, got %zu", r->file->path,
                            (unsigned long long)r->offset, expected(r), r->done));
}

/* EINVAL on a read of a file that was opened with O_DIRECT: some file systems refuse only then
   (open(2)). F_SETFL changes the open file description (fcntl(2)), so every reader of the
   descriptor goes on through the page cache. file->direct stays set: reads that are aligned for it
   suit the cache as well. `buffered` allows one repetition, so that a device which means EINVAL is
   reported. */
static bool without_direct(bsi_aio *a, bsi_request *q)
{
    const bsi_file *f = q->read->file;
    if (!f->direct || q->buffered)
        return false;
    int flags = fcntl(f->fd, F_GETFL);
    if (flags < 0 || ((flags & O_DIRECT) && fcntl(f->fd, F_SETFL, flags & ~O_DIRECT) != 0))
        return false;
    if (!a->logged)
        bsi_log("file '%s': direct reads are refused; it is read through the page cache", f->path);
    a->logged = true;
    q->buffered = true;
    return true;
}

static int64_t inject(bsi_aio *a, bsi_request *q)
{
    bsi_read *r = q->read;
    int64_t real = q->result, res = real;
    if (a->fault.refuse_direct && r->file->direct && !q->buffered)
        res = -EINVAL;
    else if (a->fault.result)
        res = a->fault.result(a->fault.ud, r, real);
    /* What is said not to have arrived must not be found by luck. */
    if (real > 0 && res < real && a->fault.result)
        memset((char *)q->buffer + BSI_MAX(res, 0), 0xEE, (size_t)(real - BSI_MAX(res, 0)));
    return res;
}

/* True when the read is finished, one way or the other; else it has to go on from r->done. */
static bool settle(bsi_aio *a, bsi_request *q)
{
    bsi_read *r = q->read;
    int64_t res = inject(a, q);
    size_t want = expected(r), before = r->done;
    /* Both say that nothing was read and that the same request may succeed. The limit ends a loop
       that a broken driver would keep up for ever. */
    if (res == -EINTR || res == -EAGAIN) {
        if (++q->idle < IDLE_LIMIT)
            return false;
        failed(r, (int)-res);
        return true;
    }
    if (res == -EINVAL && without_direct(a, q))
        return false;
    if (res < 0) {
        failed(r, (int)-res);
        return true;
    }
    r->done += (size_t)res;
    if (r->done >= want) {
        r->status = BS_OK;
        return true;
    }
    if (res == 0 || a->draining) { /* the end of a file that should go on */
        shrunk(r);
        return true;
    }
    /* Short. With O_DIRECT the rest must begin at an aligned place (open(2)), so a few bytes may be
       read twice. A result that does not reach the next aligned place is no progress: then the file
       has become shorter, or the request is repeated up to the limit. */
    size_t got = r->done;
    r->done = bsi_round_down(r->done, r->file->align);
    q->idle = r->done > before ? 0 : q->idle + 1;
    if (q->idle && (size_now(r->file) < r->offset + want || q->idle >= IDLE_LIMIT)) {
        r->done = got;
        shrunk(r);
        return true;
    }
    r->reread += r->length - r->done;
    return false;
}

/* ---- moving reads along ---------------------------------------------------------------------- */

static void finish(bsi_aio *a, bsi_request *q)
{
    push(&a->finished, q->read);
    q->next = a->idle;
    a->idle = q;
}

/* Withheld requests whose time has come; with `reverse` all at once when no other can come. */
static void release(bsi_aio *a)
{
    if (a->fault.reverse && (a->in_engine || (a->waiting.head && a->idle)))
        return;
    double now = a->withheld ? bsi_now() : 0;
    for (bsi_request **at = &a->withheld; *at;) {
        bsi_request *q = *at;
        if (q->started + 1e-6 * a->fault.delay_us > now) {
            at = &q->next;
            continue;
        }
        *at = q->next;
        finish(a, q);
    }
}

static void withhold(bsi_aio *a, bsi_request *q)
{
    bsi_request **at = &a->withheld;
    while (!a->fault.reverse && *at)
        at = &(*at)->next;
    q->next = *at;
    *at = q;
}

static void pump(bsi_aio *a)
{
    bsi_request *next;
    for (bsi_request *q = a->engine->poll(a->e); q; q = next) {
        /* Taken before the request is used again: start and finish link it into another list. */
        next = q->next;
        a->in_engine--;
        if (!settle(a, q))
            start(a, q);
        else if (a->fault.delay_us || a->fault.reverse)
            withhold(a, q);
        else
            finish(a, q);
    }
    /* Last: requests that came back above are free by here, so the engine is full again before the
       owner does anything else. */
    release(a);
    start_waiting(a);
}

/* Microseconds until the next withheld request may be released, at most `us`. */
static unsigned until_release(const bsi_aio *a, unsigned us)
{
    if (a->fault.reverse && a->in_engine)
        return us;
    double now = a->withheld ? bsi_now() : 0;
    for (const bsi_request *q = a->withheld; q; q = q->next) {
        double left = ceil((q->started - now) * 1e6 + a->fault.delay_us);
        us = left <= 0 ? 0 : (unsigned)BSI_MIN((double)us, left);
    }
    return us;
}

bs_status bsi_aio_submit(bsi_aio *a, bsi_read *r)
{
    const bsi_file *f = r->file;
    /* The difference in expected() must not wrap, and a result, which is signed, must be able to
       say `length`. */
    if (r->offset >= f->bytes || r->length == 0 || r->length > PTRDIFF_MAX)
        return bsi_fail(BS_ARG, "file '%s': a read of %zu bytes at %llu; the file has %llu", f->path,
                        r->length, (unsigned long long)r->offset, (unsigned long long)f->bytes);
    if (f->direct && ((r->offset | r->length | (uintptr_t)r->buffer) & (f->align - 1)))
        return bsi_fail(BS_ARG, "file '%s': a read of %zu bytes at %llu into %p is not aligned to %zu",
                        f->path, r->length, (unsigned long long)r->offset, r->buffer, f->align);
    r->status = BS_AGAIN;
    r->error = (bs_errinfo){0};
    r->reread = 0;
    r->done = 0;
    a->in_flight++;
    push(&a->waiting, r);
    start_waiting(a);
    return BS_OK;
}

bsi_read *bsi_aio_reap(bsi_aio *a, unsigned wait_us)
{
    double end = wait_us ? bsi_now() + 1e-6 * wait_us : 0;
    for (;;) {
        /* Reads that are finished already are handed out before anything new is looked for: in
           their order, and without a system call for each. */
        if (!a->finished.head)
            pump(a);
        bsi_read *r = pop(&a->finished);
        if (r || !a->in_flight) {
            a->in_flight -= r != NULL;
            return r;
        }
        double left = wait_us ? (end - bsi_now()) * 1e6 : 0;
        if (left <= 0)
            return NULL;
        a->engine->wait(a->e, until_release(a, (unsigned)ceil(left)));
    }
}

void bsi_aio_close(bsi_aio *a)
{
    if (!a)
        return;
    a->draining = true; /* what has not been started never will be */
    /* The engine writes into buffers until its last read has ended. The caller frees them after
       this. */
    while (a->in_engine) {
        pump(a);
        if (a->in_engine)
            a->engine->wait(a->e, DRAIN_US);
    }
    a->engine->close(a->e);
    bsi_free(a->request);
    bsi_free(a);
}
