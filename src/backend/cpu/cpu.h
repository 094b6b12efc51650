/* SPDX-License-Identifier: Apache-2.0 */
/*
** cpu.h: types that the files of the cpu backend share.
**
** Order. Everything that the owner hands to a worker goes through node.next (release by the owner,
** acquire by the worker). What a worker hands back goes through mark.done, cpu_queue.done and
** cpu_dev.failed (release by the worker), and the owner acquires those in queries, drains and closes
** only. So the issuing thread carries no order from one queue to another, and a race detector sees two
** operations as ordered only when a queue_wait orders them. Only the owner allocates and frees.
*/
#ifndef BS_CPU_H
#define BS_CPU_H

#include "dev/dev.h"
#include "dev/inject.h"
#include "dev/profile.h"

#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>

/* One record of one event. Whoever may still look at it holds a reference: the event while it is the
   current record, the record's own node, and every wait that was bound to it. */
typedef struct cpu_mark {
    _Atomic uint32_t done; /* MARK_*: the worker of the record releases, waiters and queries acquire */
    int refs;              /* owner */
    struct cpu_queue *queue; /* owner: of the record, NULL when its node was recycled */
    uint64_t seq;            /* owner: of its node */
    struct cpu_mark *next;   /* owner: in the free list */
} cpu_mark;

enum { MARK_PENDING, MARK_DONE, MARK_AWAITED }; /* awaited: pending, and a worker sleeps on it */

typedef enum cpu_kind {
    CPU_COPY,
    CPU_FILL,
    CPU_LAUNCH,
    CPU_HOST_FN,
    CPU_RECORD,
    CPU_WAIT,
    CPU_STOP
} cpu_kind;

typedef struct cpu_node {
    _Atomic(struct cpu_node *) next; /* of the queue, or of the free list (owner) */
    uint64_t seq;
    cpu_kind kind;
    bool fail;         /* injected */
    const char *label; /* of an operation */
    union {
        struct {
            char *dst;
            const char *src;
            size_t bytes;
        } copy;
        struct {
            char *dst;
            int byte;
            size_t bytes;
        } fill;
        struct {
            bsk_op op;
            bsk_call call;
        } launch;
        struct {
            void (*fn)(void *);
            void *ud;
        } host_fn;
        cpu_mark *mark; /* record, wait */
    } u;
} cpu_node;

typedef struct cpu_pool cpu_pool;

typedef struct cpu_queue {
    struct cpu_dev *dev;
    const char *name;
    cpu_pool *pool; /* NULL: launches run on the worker alone */
    bsk_par *par;
    pthread_t thread;
    struct cpu_queue *next;  /* owner: of the device */
    cpu_node *tail, *oldest; /* owner: last issued, first not recycled */
    cpu_node *stop;          /* owner: kept for the close, which cannot fail */
    uint64_t issued;         /* owner: sequence number of tail */
    sem_t ready;             /* posted once per node */
    cpu_node *head;          /* worker: last taken */
    uint64_t jitter;         /* worker: state of its random numbers */
    _Atomic uint64_t done;   /* sequence number of the last node that has run */
} cpu_queue;

typedef struct cpu_slab { /* nodes and marks come from slabs that live as long as the device */
    struct cpu_slab *next;
    max_align_t bytes[];
} cpu_slab;

typedef struct cpu_dev {
    int threads;
    unsigned jitter_us;
    uint64_t jitter_seed;
    uint64_t calls, fail_call;
    uint64_t pins, fail_pin;
    unsigned queues_opened;
    cpu_queue *queues;
    cpu_slab *slabs;
    cpu_node *free_nodes;
    cpu_mark *free_marks;
    _Atomic uint32_t failed; /* FAIL_*: the failing worker releases, everyone acquires */
    bs_errinfo error;        /* written once, before failed becomes FAIL_SET */
    bsi_profile *profile;    /* owner, while nothing is issued; workers add to it behind the lock */
    pthread_mutex_t profile_lock;
} cpu_dev;

enum { FAIL_NONE, FAIL_WRITING, FAIL_SET };

extern const bsi_dev_ops bsi_dev_cpu;

/* cpu_queue.c. A node or a mark, or NULL with the failure recorded. */
cpu_node *bsi_cpu_node(cpu_queue *q, cpu_kind kind, const char *label);
void bsi_cpu_issue(cpu_queue *q, cpu_node *n);
bs_status bsi_cpu_queue_open(bs_dev *dev, const char *name, bsi_queue *out);
void bsi_cpu_queue_close(bsi_queue *q);
bs_status bsi_cpu_event_record(bsi_event *ev, bsi_queue *q);
bs_status bsi_cpu_queue_wait(bsi_queue *q, const bsi_event *ev, const char *site);
bs_status bsi_cpu_event_query(const bsi_event *ev);
void bsi_cpu_event_close(bsi_event *ev);
/* BS_OK, or the failure that lost the device. */
bs_status bsi_cpu_status(cpu_dev *d);
/* Returns when everything issued on the device has run. */
void bsi_cpu_drain(cpu_dev *d);
/* cpu_thread.c: a thread that is called prefix and index. */
bs_status bsi_cpu_thread(pthread_t *out, void *(*fn)(void *), void *arg, const char *prefix,
                         unsigned index);

/* cpu_pool.c: helper threads beside the calling one. */
bs_status bsi_cpu_pool_open(int helpers, cpu_pool **out);
void bsi_cpu_pool_close(cpu_pool *p);
bsk_par *bsi_cpu_pool_par(cpu_pool *p);

#endif
