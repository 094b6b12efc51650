/* SPDX-License-Identifier: Apache-2.0 */
/*
** stream.h: what the files of src/stream share and their tests use: the policy, the slots' state
** machines and the record of a stream. Owner thread only.
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
    int read_slots; /* host slots that reads take turns in: host_slots; where that is 0, one for filling
                       gpu homes, whose memory is given back when nothing needs it */
    bs_home *home;  /* [n_blocks] */
    uint64_t slot_bytes, host_slot_bytes, device_bytes, host_bytes;
    bs_transfer *transfer[2]; /* [n_visits] cold, warm */
    bs_edge_bytes bytes[2];
};

/* policy.c: which block is in which slot after the visits decided so far. A function of their order
   only. */
typedef struct bsi_policy {
    const bs_placement *placement;
    int *in_slot;      /* [dev_slots] block, or -1 */
    int64_t *last_use; /* [dev_slots] serial of the slot's last visit, or -1 */
    int *slot_of;      /* [n_blocks] slot, or -1 */
    bool *arrived;     /* [n_blocks] its ram or gpu home is filled */
    int last_slot;     /* of the visit before, or -1 */
    int next_host;     /* reads take turns in the host slots */
    int64_t serial;    /* of the next visit */
} bsi_policy;

enum { BSI_READ_ALIGN = 4096 }; /* of host slots and requests, at least */

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
    bool done;   /* reaped, with whatever status */
    bool copied; /* its copies have been issued */
} bsi_piece;

typedef struct
    bsi_host_slot { /* raw aligned extents of one block: a slot that reads share, or a ram home */
    bsi_host_state state;
    int block;
    bool home;      /* a lease that does not end: stays full */
    bool failed;    /* a piece failed: never full */
    int64_t serial; /* of the visit that the read is for */
    bsi_addr at;
    size_t bytes;
    bsi_mem *own; /* memory of this slot alone, or NULL: part of the host region */
    bsi_piece *piece;
    int n_pieces, n_done, n_copied;
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
void bsi_host_forget_pieces(
    bsi_host_slot *h); /* of a full home: from here on it is copied as a whole */
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

/* ---- the stream ---- */

typedef struct bsi_pushed { /* a visit that was pushed */
    bs_visit_spec spec;
    bs_transfer transfer;
    int64_t free_after; /* serial of the visit whose end frees the device slot, or -1 */
    uint64_t fetched;   /* bytes moved for it so far */
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

    bsi_mem *host_region; /* host_slots x host_slot_bytes */
    bsi_host_slot *host;  /* [placement->read_slots] then one per ram home */
    bsi_dev_slot *dev;    /* [placement->dev_slots] then one per gpu home */
    int n_host, n_dev;
    int *home_slot; /* [n_blocks] index of its home in host or dev; -1: disk */
    int homes_reading;

    bsi_pushed *window;                 /* visits serial base.. pushed - 1 */
    int64_t base, begun, ended, pushed; /* serials: begun - ended is 0 or 1 */
    int64_t next_read, next_copy;       /* first visit whose reads, copies are not all issued */
    int window_cap;

    bool failed; /* until abort */
    bs_errinfo error;
    bs_stream_stats stats;
    double busy_since;
};

static inline bsi_pushed *bsi_pushed_at(const bs_stream *s, int64_t serial)
{
    return &s->window[serial - s->base];
}
static inline bsi_dev_slot *bsi_dev_slot_of(const bs_stream *s, const bs_transfer *t)
{
    return &s->dev[t->dev_slot >= 0 ? t->dev_slot : s->home_slot[t->block]];
}
/* Of a transfer that loads: what the block is copied from. */
static inline bsi_host_slot *bsi_host_slot_of(const bs_stream *s, const bs_transfer *t)
{
    bool ram = s->placement->home[t->block] == BS_HOME_RAM;
    return &s->host[ram ? s->home_slot[t->block] : t->host_slot];
}
static inline const char *bsi_block_name(const bs_stream *s, int block)
{
    return bs_manifest_block(s->m, block)->name;
}

/* Tests: a stream whose reads fail, come late or out of order. fault: NULL or living until close. */
bs_status bsi_stream_open_fault(const bs_stream_cfg *cfg, const bsi_aio_fault *fault, bs_stream **out);
/* The engine's pump: advances reads and copies without blocking. A failure is kept for the owner's next
   call. */
void bsi_stream_pump(void *stream);
/* Keeps the first failure with its detail, until abort; returns st. */
bs_status bsi_stream_fail(bs_stream *s, bs_status st);

/* tiers.c: what a stream holds for its life. Close takes whatever an open that failed has left. */
bs_status bsi_tiers_open_files(bs_stream *s, bool no_direct);
bs_status bsi_tiers_open_slots(bs_stream *s);
void bsi_tiers_close(bs_stream *s);
const bsi_file *bsi_tiers_file(const bs_stream *s, int file);

/* transfers.c: one step of everything that can go on without waiting. */
bs_status bsi_transfers_advance(bs_stream *s);
/* Take finished reads; wait up to wait_us for the first one. */
bs_status bsi_transfers_reap(bs_stream *s, unsigned wait_us);
/* Returns when no read, copy or visit is in flight, also while bs_cancel is set. BS_DEVICE: the device
   is lost. */
bs_status bsi_transfers_drain(bs_stream *s);
/* After a drain: every slot is empty, filled homes stay, and the policy knows it. */
void bsi_transfers_reset(bs_stream *s);

/* stats.c: reads and copies as they happen. */
void bsi_stats_submit(bs_stream *s);
void bsi_stats_reap(bs_stream *s, const bsi_piece *piece);

/* ---- boundaries ---- */

/* Where key may be written for a micro-batch, in order on the compute queue; then, when it has been
   written, its rows in use (which starts the copy out of a HOST key). */
bs_status bsi_store_claim(bs_store *s, int key, int micro, bsi_addr *out);
bs_status bsi_store_written(bs_store *s, int key, int micro, int64_t rows);
const bs_store_key *bsi_store_key(const bs_store *s, int key); /* NULL: no such key */

#endif
