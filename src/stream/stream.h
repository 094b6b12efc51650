/* SPDX-License-Identifier: Apache-2.0 */
/*
** stream.h: what the files of src/stream share and their tests use: the policy, the slots' state
** machines and the streamer's record. Owner thread only.
*/
#ifndef BS_STREAM_H
#define BS_STREAM_H

#include "bs/stream.h"
#include "engine/engine.h"
#include "io/io.h"

/* ---- placement and policy ---- */

struct bs_placement {
    const bs_manifest *manifest;
    int n_blocks, n_visits;
    int dev_slots, host_slots;
    int staging;   /* host_slots, or 1 when only gpu homes are read: a buffer that is freed when idle */
    bs_home *home; /* [n_blocks] */
    uint64_t slot_bytes, host_slot_bytes, device_bytes, host_bytes;
    bs_transfer *transfer[2]; /* [n_visits] cold, warm */
    bs_edge_bytes bytes[2];
};

/* Which block is in which slot after the visits decided so far. A function of the visit order only. */
typedef struct bsi_policy {
    const bs_placement *placement;
    int *in_slot;      /* [dev_slots] block, or -1 */
    int64_t *last_use; /* [dev_slots] serial of the slot's last visit, or -1 */
    int *slot_of;      /* [n_blocks] slot, or -1 */
    bool *arrived;     /* [n_blocks] its ram or gpu home is filled */
    int last_slot;     /* of the visit before, or -1 */
    int next_host;     /* staging slots go round */
    int64_t serial;    /* of the next visit */
} bsi_policy;

enum { BSI_READ_ALIGN = 4096 }; /* staging slots and requests, at least */

/* What one read of the block asks of the disk: its extents (raw_bytes may have gaps between them). */
uint64_t bsi_read_bytes(const bs_manifest *m, int block);
bs_status bsi_policy_open(const bs_placement *placement, bsi_policy *out);
void bsi_policy_close(bsi_policy *p);
/* Every slot empty; homes as they are; the next visit gets this serial. */
void bsi_policy_reset(bsi_policy *p, int64_t serial);
/* Decide how n visits get their blocks. slot_free_after is INT_MIN for a slot that was never used. */
bs_status bsi_policy_decide(bsi_policy *p, const bs_visit_spec *v, int n, bool cyclic,
                            bs_transfer *out);

/* ---- slots: one state machine per tier ---- */

typedef enum bsi_host_state {
    BSI_HOST_FREE,
    BSI_HOST_READING,
    BSI_HOST_FULL,
    BSI_HOST_COPYING
} bsi_host_state;

typedef struct bsi_piece { /* one read of at most request_bytes, inside one extent */
    bsi_read io;
    struct bsi_host_slot *slot;
    int extent;
    bool done, copied;
} bsi_piece;

typedef struct bsi_host_slot { /* raw aligned extents of one block: staging, or a ram home */
    bsi_host_state state;
    int block;
    bool home;      /* a lease that does not end: stays full */
    bool bad;       /* a request failed: never full */
    int64_t serial; /* of the visit that the read is for */
    bsi_addr at;
    size_t bytes;
    bsi_mem *own; /* memory of this slot alone, or NULL: part of the staging region */
    bsi_piece *req;
    int n_req, n_done, n_copied;
    bsi_event *started; /* the copies out of it have begun (the device slot was free) */
    bsi_event *copied;  /* they have ended */
} bsi_host_slot;

typedef enum bsi_dev_state {
    BSI_DEV_FREE,
    BSI_DEV_FILLING,
    BSI_DEV_READY,
    BSI_DEV_IN_USE
} bsi_dev_state;

typedef struct bsi_dev_slot { /* canonical layout of one block: a slot, or a gpu home */
    bsi_dev_state state;
    int block;
    bool home;
    bool was_used; /* `used` has been recorded */
    bool fresh;    /* compute has not been ordered after `filled` yet */
    bsi_addr at;
    size_t bytes;
    bsi_event *filled; /* copies into it */
    bsi_event *used;   /* last visit that read it */
} bsi_dev_slot;

/* free -> reading -> full -> copying -> free; a ram home stays full. */
void bsi_host_read(bsi_host_slot *h, int block, int64_t serial);
void bsi_host_full(bsi_host_slot *h);
void bsi_host_slot_filled(bsi_host_slot *h); /* a filled home: its requests are done with */
void bsi_host_copy(bsi_host_slot *h);
void bsi_host_release(bsi_host_slot *h, bool poison);
/* Any state -> free, nothing in flight (after a drain). */
void bsi_host_drop(bsi_host_slot *h, bool poison);
/* free -> filling -> ready -> in use -> ready -> free. */
void bsi_dev_fill(bsi_dev_slot *d, int block);
void bsi_dev_ready(bsi_dev_slot *d);
void bsi_dev_use(bsi_dev_slot *d);
void bsi_dev_leave(bsi_dev_slot *d);
void bsi_dev_evict(bsi_dev_slot *d);
void bsi_dev_drop(bsi_dev_slot *d);

/* ---- streamer ---- */

typedef struct bsi_pushed { /* a visit that was pushed */
    bs_visit_spec spec;
    bs_transfer t;
    int64_t frees;    /* serial of the visit whose end frees the device slot, or -1 */
    uint64_t fetched; /* bytes moved for it so far */
} bsi_pushed;

struct bs_stream {
    bs_engine *e;
    const bs_placement *placement;
    const bs_manifest *m;
    bsi_aio *aio;
    size_t request_bytes;
    bool dry;    /* the device does not execute: no reads */
    bool poison; /* check devices: freed slots are filled with 0xFF */
    bool in_pump;
    bsi_policy policy;
    bsi_file *buffered; /* [n_files] own descriptors when direct reads are off, else NULL */
    bool *file_used;    /* [n_files] */
    int n_files;

    bsi_mem *staging;    /* host_slots x host_slot_bytes */
    bsi_host_slot *host; /* [placement->staging] then one per ram home */
    bsi_dev_slot *dev;   /* [placement->dev_slots] then one per gpu home */
    int n_host, n_dev;
    int *home_slot; /* [n_blocks] index of its home in host or dev; -1: disk */
    int homes_reading;

    bsi_pushed *queue;                  /* visits serial base.. base + n */
    int64_t base, begun, ended, pushed; /* serials: begun - ended is 0 or 1 */
    int64_t next_read, next_copy;       /* first visit whose reads, copies are not all issued */
    int cap;

    bool failed; /* until abort */
    bs_errinfo error;
    bs_stream_stats stats;
    double busy_since;
};

/* Tests: a stream whose reads fail, come late or out of order. fault: NULL or living until close. */
bs_status bsi_stream_open_fault(const bs_stream_cfg *cfg, const bsi_aio_fault *fault, bs_stream **out);
/* The engine's pump: a failure is kept for the owner's next call. */
void bsi_stream_pump_quiet(void *stream);
const bsi_file *bsi_stream_file(const bs_stream *s, int file);
/* stats.c: reads and copies as they happen. */
void bsi_stats_submit(bs_stream *s);
void bsi_stats_reap(bs_stream *s, const bsi_piece *r);
/* Bytes of the block's tensors inside a raw range of its host slot. */
uint64_t bsi_payload_in(const bs_manifest *m, int block, int extent, uint64_t lo, uint64_t hi);
/* Offset of a tensor's first byte in its block's host slot. */
uint64_t bsi_raw_offset(const bs_manifest *m, int block, int tensor);

/* ---- boundaries ---- */

/* Where key may be written for a micro-batch, in order on the compute queue; then, when it has been
   written, its rows in use (which starts the copy out of a HOST key). */
bs_status bsi_store_claim(bs_store *s, int key, int micro, bsi_addr *out);
bs_status bsi_store_written(bs_store *s, int key, int micro, int64_t rows);
const bs_store_key *bsi_store_key(const bs_store *s, int key); /* NULL: no such key */

#endif
