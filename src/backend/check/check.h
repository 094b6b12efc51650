/* SPDX-License-Identifier: Apache-2.0 */
/*
** check.h: types that the files of the check device share.
**
** Every operation ticks the clock of its queue. clock[r][q] is the newest operation of queue q that is
** ordered before the next operation of queue r; records snapshot a row, waits join it. What the host
** has seen to be complete (`seen`) never orders two operations: a host that happens to poll in time
** must not hide a missing wait. It only tells whether memory may be freed.
**
** So an operation with clock c of queue q is before the next operation of r exactly when c <=
** clock[r][q]. The row of an open queue only grows, and clock[r][r] is r's own count.
*/
#ifndef BS_CHECK_H
#define BS_CHECK_H

#include "dev/dev.h"

#define CHECK_QUEUES  16 /* open at a time */
#define CHECK_BUCKETS 256
#define CHECK_SLAB    64

typedef struct check_access {
    uint64_t clock;    /* 0: none */
    const char *label; /* interned */
} check_access;

typedef struct check_segment { /* bytes with one history */
    size_t lo, hi;
    struct check_segment *next;      /* in the free list */
    int writer;                      /* queue of the last write */
    check_access write;              /* last write */
    check_access read[CHECK_QUEUES]; /* last read of each queue since then */
} check_segment;

typedef struct check_mem {
    bsi_mem inner;
    unsigned number;     /* for messages: n-th memory of the device */
    check_segment **seg; /* sorted, they cover the memory without gaps */
    size_t n, cap;
    size_t compact_at; /* number of segments at which the next compaction is due */
} check_mem;

typedef struct check_queue {
    bsi_queue inner;
    int index;
} check_queue;

typedef struct check_event {
    bsi_event inner;
    uint64_t clock[CHECK_QUEUES]; /* of the current record; all 0: none */
} check_event;

typedef struct check_label {
    struct check_label *next;
    char text[];
} check_label;

typedef struct check_slab { /* segments come from slabs that live as long as the device */
    struct check_slab *next;
    check_segment seg[CHECK_SLAB];
} check_slab;

typedef struct check_dev {
    bs_dev inner;
    bool poisons;                     /* new device memory is filled with NaN */
    char *drop_wait;                  /* site of the wait that is left out, or NULL */
    bool dropped;                     /* one was */
    unsigned mems;                    /* allocated so far */
    check_queue *queue[CHECK_QUEUES]; /* NULL: index not in use */
    const char *queue_name[CHECK_QUEUES];
    uint64_t clock[CHECK_QUEUES][CHECK_QUEUES];
    uint64_t seen[CHECK_QUEUES];
    check_label *labels[CHECK_BUCKETS];
    check_slab *slabs;
    check_segment *free_segments;
    int ranges; /* begun and not ended */
    int violations;
    uint64_t *keys; /* of the violations: each is told once */
    int cap_keys;
    char *text;
    size_t n_text, cap_text;
} check_dev;

extern const bsi_dev_ops bsi_dev_check;

/* history.c */
/* The same text at an address that lives as long as the device; NULL: no memory. */
const char *bsi_check_intern(check_dev *d, const char *text);
bs_status bsi_check_history_open(check_dev *d, check_mem *m, size_t bytes);
void bsi_check_history_close(check_dev *d, check_mem *m);
/* Queue q is about to read or write bytes [lo, hi): report conflicts that nothing orders, remember it.
   label: interned. */
bs_status bsi_check_touch(check_dev *d, check_mem *m, size_t lo, size_t hi, int q, uint8_t mode,
                          const char *label);
/* The memory is about to be freed: report operations on it that may still run. */
void bsi_check_freed(check_dev *d, const check_mem *m);
void bsi_check_report(check_dev *d, uint64_t key, const char *fmt, ...) BSI_PRINTF(3, 4);

#endif
