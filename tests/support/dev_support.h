/* SPDX-License-Identifier: Apache-2.0 */
/*
** dev_support.h: helpers of the device tests: assertions with the failure's text, a gate that holds a
** queue until the test opens it (so that "not done yet" is a fact and not a matter of timing).
*/
#ifndef DEV_SUPPORT_H
#define DEV_SUPPORT_H

#include "dev/dev.h"

#include <semaphore.h>
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

#define OK(e)              support_ok((e), #e, __FILE__, __LINE__)
#define FAILS(e, st, part) support_fails((e), (st), (part), #e, __FILE__, __LINE__)

static inline void support_ok(bs_status st, const char *what, const char *file, int line)
{
    if (st != BS_OK)
        print_error("%s: %s: %s\n", what, bs_status_name(st), bs_error()->msg);
    _assert_int_equal((uint64_t)st, BS_OK, file, line);
}

/* The status, and a part of the message. */
static inline void support_fails(bs_status st, bs_status want, const char *part, const char *what,
                                 const char *file, int line)
{
    if (st != want || !strstr(bs_error()->msg, part))
        print_error("%s: %s: '%s', expected %s with '%s'\n", what, bs_status_name(st), bs_error()->msg,
                    bs_status_name(want), part);
    _assert_int_equal((uint64_t)st, (uint64_t)want, file, line);
    _assert_true(strstr(bs_error()->msg, part) != NULL, part, file, line);
}

static inline bsi_addr at(bsi_mem *m, size_t off)
{
    return (bsi_addr){m, off};
}

static inline bsi_mem *mem_new(bs_dev *d, bsi_memkind kind, size_t bytes)
{
    bsi_mem *m;
    OK(bsi_mem_alloc(d, kind, BS_TAG_STAGING, bytes, &m));
    return m;
}

static inline bsi_queue *queue_new(bs_dev *d, const char *name)
{
    bsi_queue *q;
    OK(bsi_queue_open(d, name, &q));
    return q;
}

static inline bsi_event *event_new(bs_dev *d)
{
    bsi_event *e;
    OK(bsi_event_open(d, &e));
    return e;
}

static inline void gate_hold(void *ud)
{
    while (sem_wait((sem_t *)ud) != 0)
        ;
}

/* Whether "cuda" is a device of this build and machine. */
static inline bool gpu_there(void)
{
    bs_dev *d;
    bool there = bs_dev_open("cuda", NULL, &d) == BS_OK;
    bs_dev_close(d);
    return there;
}

/* The queue stops here until sem_post(gate). */
static inline void gate_close(bsi_queue *q, sem_t *gate)
{
    sem_init(gate, 0, 0);
    OK(bsi_host_fn(q, gate_hold, gate));
}

static inline void post(void *ud)
{
    sem_post((sem_t *)ud);
}

#endif
