/* SPDX-License-Identifier: Apache-2.0 */
/*
** dev.h: the device contract. A device has memory of three kinds, in-order queues and events, copies
** and kernel launches. Each backend (src/backend) implements bsi_dev_ops; callers use the checked
** front.
**
** Contract (tests/c/test_dev_contract.c holds each line against every backend and its check wrapper):
** C1 operations of one queue run in issue order; two queues have no order except through events. C2
** bsi_event_record marks the queue position at the call; recording again moves the mark. C3
** bsi_queue_wait binds to the record that is current at the call; a never-recorded event is done. C4 an
** operand range in flight may not be freed, reused or touched by the host until its event is done. C5
** issuing never waits for the operation; a backend may bound how many a queue holds and wait for room.
** C6 argument errors are returned by the call; execution errors appear in event_query and queue_status,
** and from then on the device is lost: every call returns BS_DEVICE until it is closed. C7 close of
** anything drains it first; closing in any order is fine. C8 all calls are made by the owner thread;
** the backend may use threads of its own, which never free.
*/
#ifndef BS_DEV_H
#define BS_DEV_H

#include "base/base.h"
#include "bs/dev.h"
#include "bsk.h"

typedef enum bsi_memkind {
    BSI_MEM_HOST,   /* pageable */
    BSI_MEM_PINNED, /* host memory that copies may use asynchronously; pageable where that is refused */
    BSI_MEM_DEVICE  /* reached by copies and launches only */
} bsi_memkind;

typedef struct bsi_mem {
    bs_dev *dev;
    bsi_memkind kind;
    bs_tag tag;
    size_t bytes;
    void *host; /* address for the host; NULL for device kind and on meta */
    void *impl; /* of the backend */
} bsi_mem;

/* A place in device-visible memory. Never a bare pointer, so that host code cannot dereference it. */
typedef struct bsi_addr {
    bsi_mem *mem;
    size_t off;
} bsi_addr;

static inline bsi_addr bsi_addr_add(bsi_addr a, size_t off)
{
    return (bsi_addr){a.mem, a.off + off};
}

typedef struct bsi_queue { /* in-order commands; compute, copy-in or copy-out by use */
    bs_dev *dev;
    const char *name;
    void *impl;
} bsi_queue;

typedef struct bsi_event {
    bs_dev *dev;
    void *impl;
} bsi_event;

enum { BSI_READ = 1, BSI_WRITE = 2, BSI_READWRITE = 3 };

typedef struct bsi_arg { /* operand: a byte range and what the kernel does with it */
    bsi_addr at;
    size_t bytes; /* 0: absent (the kernel gets NULL) */
    uint8_t mode;
} bsi_arg;

typedef struct bsi_kcall { /* one kernel launch; layouts of arg, n and f are per op, in bsk.h */
    bsk_op op;
    int n_args;
    bsi_arg arg[BSK_MAX_ARGS];
    int64_t n[BSK_MAX_DIMS];
    double f[BSK_MAX_SCALARS];
    bs_dtype dtype, out; /* of the operands that bsk.h marks `a` and `o` */
    bsi_arg workspace;   /* props.workspace_bytes for kernels that need room; holds nothing between
                          launches. bytes 0: none, for devices that ask for none */
    const char *label;   /* static or living until the launch has run; for messages */
} bsi_kcall;

typedef struct bsi_profile { /* times of launches, summed up by (kernel, label) */
    bs_profile_row *row;
    int n, cap;
} bsi_profile;

typedef struct bsi_dev_ops { /* what a backend implements */
    const char *name;        /* "cpu" */
    size_t size; /* of this struct: guards against a backend built against another version */
    /* inner: the backend that this one is to wrap, NULL for those that wrap none. */
    bs_status (*open)(const bs_dev_cfg *cfg, const struct bsi_dev_ops *inner, bs_dev *dev);
    void (*close)(bs_dev *dev);
    void (*props)(const bs_dev *dev, bs_dev_props *out);
    /* Pinned memory that cannot be page-locked is given all the same: out->kind is BSI_MEM_HOST then,
       and the last recorded failure says why. */
    bs_status (*mem_alloc)(bs_dev *dev, bsi_memkind kind, bs_tag tag, size_t bytes, bsi_mem *out);
    void (*mem_free)(bsi_mem *mem);
    bs_status (*queue_open)(bs_dev *dev, const char *name, bsi_queue *out);
    void (*queue_close)(bsi_queue *q);
    bs_status (*event_open)(bs_dev *dev, bsi_event *out);
    void (*event_close)(bsi_event *ev);
    bs_status (*event_record)(bsi_event *ev, bsi_queue *q);
    bs_status (*queue_wait)(bsi_queue *q, const bsi_event *ev, const char *site);
    bs_status (*event_query)(const bsi_event *ev); /* BS_OK, BS_AGAIN, BS_DEVICE */
    bs_status (*copy)(bsi_queue *q, bsi_addr dst, bsi_addr src, size_t bytes);
    bs_status (*fill)(bsi_queue *q, bsi_addr dst, int byte, size_t bytes);
    bs_status (*launch)(bsi_queue *q, const bsi_kcall *call);
    /* For tests: fn holds the queue until it returns. No Lua and no device calls in it. */
    bs_status (*host_fn)(bsi_queue *q, void (*fn)(void *), void *ud);
    bs_status (*queue_status)(bsi_queue *q);
    int (*violations)(const bs_dev *dev, const char **text);
    /* Count a misuse that a call without a status cannot return. NULL slot: misuse is not looked for;
       else the front keeps closed objects until the end, so that their use is found, and compares
       threads. */
    void (*misuse)(bs_dev *dev, const char *text);
    void (*range)(bs_dev *dev, const char *label); /* NULL slot: nobody can watch this device */
    /* Launches are timed into `into` from here on (NULL: no longer). Returns when all that were timed
       before are in the profile that they were timed into. */
    bs_status (*profile)(bs_dev *dev, bsi_profile *into);
} bsi_dev_ops;

struct bs_dev {
    const bsi_dev_ops *ops;
    void *impl;
    char spec[64];
    bool lost;
    /* Called in every blocking wait and after every launch: the streamer advances here. */
    void (*pump)(void *ud);
    void *pump_ud;
};

/* Opens a backend behind the front. spec: what messages call the device; inner: see open. */
bs_status bsi_dev_open(const char *spec, const bsi_dev_ops *ops, const bsi_dev_ops *inner,
                       const bs_dev_cfg *cfg, bs_dev **out);
/* Thin wrappers in dev.c: check arguments, refuse a lost device, call the slot. */
bs_status bsi_mem_alloc(bs_dev *dev, bsi_memkind kind, bs_tag tag, size_t bytes, bsi_mem **out);
void bsi_mem_free(bsi_mem *mem);
bs_status bsi_queue_open(bs_dev *dev, const char *name, bsi_queue **out);
void bsi_queue_close(bsi_queue *q);
bs_status bsi_event_open(bs_dev *dev, bsi_event **out);
void bsi_event_close(bsi_event *ev);
bs_status bsi_event_record(bsi_event *ev, bsi_queue *q);
/* site: a static string that names this wait in the source ("streamer: copy after last use"); the check
   device reports it and can leave it out. */
bs_status bsi_queue_wait(bsi_queue *q, const bsi_event *ev, const char *site);
bs_status bsi_event_query(const bsi_event *ev);
bs_status bsi_copy(bsi_queue *q, bsi_addr dst, bsi_addr src, size_t bytes);
bs_status bsi_fill(bsi_queue *q, bsi_addr dst, int byte, size_t bytes);
bs_status bsi_launch(bsi_queue *q, const bsi_kcall *call);
bs_status bsi_host_fn(bsi_queue *q, void (*fn)(void *), void *ud);
bs_status bsi_queue_status(bsi_queue *q);

/* ---- where the host blocks: nowhere else does it wait for a device --------------------------- */

/* Wait for an event, or for all that a queue was given so far: query, pump, back off (spin, then 20 us
   .. 1 ms). BS_CANCELLED when bs_cancel is set meanwhile: then what was waited for still runs. */
bs_status bsi_host_wait(const bsi_event *ev);
bs_status bsi_host_wait_queue(bsi_queue *q);
/* bsi_host_wait for measurements: without naps, which would be a part of the time, and without the
   pump. */
bs_status bsi_host_spin(const bsi_event *ev);
/* Drain: return when all that the queue was given has ended, also while bs_cancel is set; memory is
   about to be reused or given back. The pump stays out: nothing new is to be issued. BS_DEVICE: the
   device is lost. */
bs_status bsi_host_drain_queue(bsi_queue *q);

/* Whether the backend looks for misuse and unordered operations ("check:..."). */
bool bsi_dev_checks(const bs_dev *dev);
/* Attach or clear (NULL) the pump. */
void bsi_dev_pump_set(bs_dev *dev, void (*pump)(void *ud), void *ud);
/* Clear the pump if it is the one of ud: another's stays. */
void bsi_dev_pump_end(bs_dev *dev, const void *ud);
/* For profilers: the calls from here on belong to `label`, until bsi_range_end. Ranges nest. */
void bsi_range_begin(bs_dev *dev, const char *label);
void bsi_range_end(bs_dev *dev);
/* All queue_wait sites this process has used so far (for mutation tests). */
int bsi_wait_sites(const char *const **out);

/* ---- pool: one device reservation, fixed regions first, then the arena ----------------------- */

typedef struct bsi_pool bsi_pool;
/* bytes 0 (devices that do not execute): grows without bound and only counts. */
bs_status bsi_pool_open(bs_dev *dev, size_t bytes, bsi_pool **out);
void bsi_pool_close(bsi_pool *p);
/* A region of its own until close, 256-byte aligned; BS_DEVMEM names region, bytes asked, bytes
   left. */
bs_status bsi_pool_region(bsi_pool *p, const char *name, size_t bytes, bsi_addr *out);
/* The rest becomes the arena (at most arena_bytes when that is not 0). */
bs_status bsi_pool_seal(bsi_pool *p, size_t arena_bytes);
/* First fit in issue order, sizes rounded up to 256. Offsets are a function of the call sequence. */
bs_status bsi_arena_take(bsi_pool *p, size_t bytes, bsi_addr *out);
void bsi_arena_give(bsi_pool *p, bsi_addr at, size_t bytes);
typedef struct bsi_pool_stats {
    size_t pool_bytes, fixed_bytes, arena_now, arena_peak;
} bsi_pool_stats;
void bsi_pool_stats_get(const bsi_pool *p, bsi_pool_stats *out);

#endif
