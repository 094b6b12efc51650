/* SPDX-License-Identifier: Apache-2.0 */
/*
** aio_pool.c: reads by a few threads that call pread. The owner hands requests over through a queue
** under a mutex, with a semaphore that wakes a thread: a condition variable of glibc may lose a wake-up
** where several threads wait (its bug 25847), and the last request would stay unread. Finished ones come
** back on a list that only grows (owner takes all of it at once), with a semaphore that wakes the owner.
** The way back has no lock, so that nothing but the list orders a thread's writes before the owner's
** reads. Threads touch a request between the two, nothing else.
*/
#include "io/aio.h"

#include <errno.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <time.h>
#include <unistd.h>

typedef struct pool {
    pthread_mutex_t lock; /* guards head, tail */
    sem_t work;           /* one post per request, and one for the end of each thread */
    bsi_request *head, **tail;
    _Atomic(bsi_request *)
        done;       /* newest first; threads push (release), the owner takes all (acquire) */
    sem_t finished; /* one post per push */
    int n;
    pthread_t thread[]; /* [n] */
} pool;

/* NULL: the pool closes. */
static bsi_request *take(pool *p)
{
    while (sem_wait(&p->work) != 0) /* a signal */
        ;
    pthread_mutex_lock(&p->lock);
    bsi_request *r = p->head;
    if (r && !(p->head = r->next))
        p->tail = &p->head;
    pthread_mutex_unlock(&p->lock);
    return r;
}

static void *run(void *arg)
{
    pool *p = arg;
    for (bsi_request *r; (r = take(p));) {
        ssize_t n = pread(r->fd, r->buffer, r->length, (off_t)r->offset);
        r->result = n < 0 ? -errno : n;
        /* Threads only push, and the owner takes the whole list, so no thread ever unlinks one
           element: an address that comes back (ABA) does no harm. Release: result and buffer are
           written before the owner can find the request. */
        r->next = atomic_load_explicit(&p->done, memory_order_relaxed);
        while (!atomic_compare_exchange_weak_explicit(&p->done, &r->next, r, memory_order_release,
                                                      memory_order_relaxed))
            ;
        sem_post(&p->finished);
    }
    return NULL;
}

static void pool_start(void *e, bsi_request *r)
{
    pool *p = e;
    r->next = NULL;
    pthread_mutex_lock(&p->lock);
    *p->tail = r;
    p->tail = &r->next;
    pthread_mutex_unlock(&p->lock);
    sem_post(&p->work);
}

static void pool_flush(void *e)
{
    (void)e; /* start hands over at once */
}

static bsi_request *pool_poll(void *e)
{
    pool *p = e;
    bsi_request *all = atomic_exchange_explicit(&p->done, NULL, memory_order_acquire), *list = NULL;
    /* Pushed newest first; handed out in order of completion. */
    while (all) {
        bsi_request *next = all->next;
        all->next = list;
        list = all;
        all = next;
        sem_trywait(
            &p->finished); /* its post, unless that is still to come: then one wait ends early */
    }
    return list;
}

static void pool_wait(void *e, unsigned wait_us)
{
    pool *p = e;
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    t.tv_sec += wait_us / 1000000;
    t.tv_nsec += (long)(wait_us % 1000000) * 1000;
    if (t.tv_nsec >= 1000000000) {
        t.tv_nsec -= 1000000000;
        t.tv_sec++;
    }
    /* Not by the real-time clock, which can be set while this sleeps. */
    sem_clockwait(&p->finished, CLOCK_MONOTONIC,
                  &t); /* a finish, a signal or the time: all end the wait */
}

static void pool_close(void *e)
{
    pool *p = e;
    for (int i = 0; i < p->n; i++)
        sem_post(&p->work);
    for (int i = 0; i < p->n; i++)
        pthread_join(p->thread[i], NULL);
    sem_destroy(&p->finished);
    sem_destroy(&p->work);
    pthread_mutex_destroy(&p->lock);
    bsi_free(p);
}

bs_status bsi_preads_open(int depth, int threads, const bsi_aio_engine **engine, void **e)
{
    static const bsi_aio_engine pool_engine = {"pool",    pool_close, pool_start, pool_flush,
                                               pool_poll, pool_wait,  NULL};
    (void)depth; /* requests are the caller's: the queue has room for any number */
    pool *p = bsi_alloc(BS_TAG_MISC, sizeof *p + (size_t)threads * sizeof p->thread[0]);
    if (!p)
        return BS_NOMEM;
    p->tail = &p->head;
    pthread_mutex_init(&p->lock, NULL);
    sem_init(&p->work, 0, 0);
    sem_init(&p->finished, 0, 0);

    int err = 0;
    while (p->n < threads && (err = bsi_thread_start(&p->thread[p->n], run, p, "bs-io")) == 0)
        p->n++;
    /* Fewer threads would read with another depth than the configuration says, in silence. */
    if (err) {
        int n = p->n;
        pool_close(p);
        return bsi_fail_sys(BS_NOMEM, err, "only %d of %d reading threads could be started", n,
                            threads);
    }
    *engine = &pool_engine;
    *e = p;
    return BS_OK;
}
