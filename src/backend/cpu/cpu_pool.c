/* SPDX-License-Identifier: Apache-2.0 */
/*
** cpu_pool.c: threads that help the worker of a compute queue with the tasks of one kernel. The grid of
** tasks is fixed by the kernel, threads take the next one from a counter, so results do not depend on
** who takes which. A helper that wakes too late finds the job closed; nobody waits for it.
**
** run() is called by the worker of the queue; tasks that call run() again get their tasks in place.
*/
#include "backend/cpu/cpu.h"

struct cpu_pool {
    bsk_par par; /* first: run() gets its address */
    pthread_mutex_t lock;
    pthread_cond_t work; /* a job was opened, or stop */
    pthread_cond_t idle; /* the last helper left the job */
    bool stop, open;     /* the rest is read under the lock, and by those who joined the job */
    int joined;          /* helpers inside the job */
    int64_t n;
    void (*fn)(void *arg, int64_t i);
    void *arg;
    _Atomic int64_t next; /* task: only counts; what a task reads was published by the lock */
    int helpers;
    pthread_t thread[];
};

static _Thread_local bool inside;

static void tasks(cpu_pool *p)
{
    int64_t i;
    while ((i = atomic_fetch_add_explicit(&p->next, 1, memory_order_relaxed)) < p->n)
        p->fn(p->arg, i);
}

static void *help(void *arg)
{
    cpu_pool *p = arg;
    inside = true;
    pthread_mutex_lock(&p->lock);
    while (!p->stop) {
        /* A job whose tasks are all taken is not joined: its owner would have to wait for a helper
           that does nothing. */
        if (!p->open || atomic_load_explicit(&p->next, memory_order_relaxed) >= p->n) {
            pthread_cond_wait(&p->work, &p->lock);
            continue;
        }
        p->joined++;
        pthread_mutex_unlock(&p->lock);
        tasks(p);
        pthread_mutex_lock(&p->lock);
        if (--p->joined == 0)
            pthread_cond_signal(&p->idle);
    }
    pthread_mutex_unlock(&p->lock);
    return NULL;
}

static void run(bsk_par *self, int64_t n, void (*fn)(void *arg, int64_t i), void *arg)
{
    cpu_pool *p = (cpu_pool *)self->impl;
    /* There is one job at a time. A task that asks for another one is inside it already, and
       waiting for the pool from there would wait for itself. */
    if (n <= 1 || inside) {
        for (int64_t i = 0; i < n; i++)
            fn(arg, i);
        return;
    }
    pthread_mutex_lock(&p->lock);
    p->n = n;
    p->fn = fn;
    p->arg = arg;
    /* Nobody counts on `next` now: the job before ended with joined == 0. Helpers see 0, and the
       rest of the job, through the lock. */
    atomic_store_explicit(&p->next, 0, memory_order_relaxed);
    p->open = true;
    pthread_mutex_unlock(&p->lock);
    /* One task is for this thread; a helper that finds no task would be woken for nothing. */
    if (n - 1 < p->helpers) {
        for (int64_t i = 0; i < n - 1; i++)
            pthread_cond_signal(&p->work);
    } else {
        pthread_cond_broadcast(&p->work);
    }
    inside = true;
    tasks(p);
    inside = false;
    pthread_mutex_lock(&p->lock);
    /* Closed first, so that joined can only fall. A helper takes the lock to leave, which makes
       what its tasks wrote visible here. Only then may fn and arg, on the stack of the caller, go. */
    p->open = false;
    while (p->joined > 0)
        pthread_cond_wait(&p->idle, &p->lock);
    pthread_mutex_unlock(&p->lock);
}

bs_status bsi_cpu_pool_open(int helpers, cpu_pool **out)
{
    cpu_pool *p = bsi_alloc(BS_TAG_MISC, sizeof *p + (size_t)helpers * sizeof p->thread[0]);
    if (!p)
        return BS_NOMEM;
    p->par = (bsk_par){run, p};
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->work, NULL);
    pthread_cond_init(&p->idle, NULL);
    for (; p->helpers < helpers; p->helpers++) {
        bs_status st = bsi_cpu_thread(&p->thread[p->helpers], help, p, "bs-k", (unsigned)p->helpers);
        if (st != BS_OK) {
            bsi_cpu_pool_close(p);
            return st;
        }
    }
    *out = p;
    return BS_OK;
}

void bsi_cpu_pool_close(cpu_pool *p)
{
    if (!p)
        return;
    pthread_mutex_lock(&p->lock);
    p->stop = true;
    pthread_cond_broadcast(&p->work);
    pthread_mutex_unlock(&p->lock);
    for (int i = 0; i < p->helpers; i++)
        pthread_join(p->thread[i], NULL);
    pthread_mutex_destroy(&p->lock);
    pthread_cond_destroy(&p->work);
    pthread_cond_destroy(&p->idle);
    bsi_free(p);
}

bsk_par *bsi_cpu_pool_par(cpu_pool *p)
{
    return &p->par;
}
