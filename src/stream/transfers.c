/* SPDX-License-Identifier: Apache-2.0 */
/*
** transfers.c: moves blocks from their files to device slots, as the policy decided for each pushed
** visit. Reads go into host slots, copies from there into device slots. Both are issued strictly in
** visit order: the policy gave each visit its slots by order alone, so a transfer that overtook another
** one could take the slot that the other still needs, and what moves would depend on time.
**
** A piece (one finished read) is copied tensor by tensor to its canonical offset as soon as it is
** there, so the copies of a block begin before its last read has ended. What orders a transfer:
**
** read into a host slot     the host has seen `copied` done. Reads are no commands of a queue, so no
**                           event can hold them back: the slot stays taken until then
** copy into a device slot   the end of the last visit that read the slot has been issued, and copy-in
**                           waits for it (`used`)
** compute on a device slot  compute waits for the copies (`filled`; streamer.c)
**
** Owner thread only. Nothing here blocks but bsi_transfers_drain and a reap that is asked to.
*/
#include "stream/stream.h"

enum {
    HOMES_READING = 4, /* ram homes in flight: bounds how much memory is page-locked ahead of its use */
    REAP_US = 1000
};

bs_status bsi_stream_fail(bs_stream *s, bs_status st)
{
    if (st != BS_OK && !s->failed) {
        s->failed = true;
        s->error = *bs_error();
        s->error.status = st;
    }
    return st;
}

/* ---- reads ---- */

static int count_pieces(const bs_stream *s, int block)
{
    uint64_t n = 0;
    for (int x = 0; x < bs_manifest_block(s->m, block)->n_extents; x++)
        n += (bsi_manifest_extent(s->m, block, x)->length + s->request_bytes - 1) / s->request_bytes;
    return (int)n;
}

/* Memory of a ram home, or of the one host slot of a placement that has none of its own, is taken
   when it is needed: page-locking all of it first would delay the first block by seconds. */
static bs_status take_memory(bs_stream *s, bsi_host_slot *h, int block)
{
    if (h->at.mem)
        return BS_OK;
    double t0 = bsi_now();
    h->bytes = h->home ? bs_manifest_block(s->m, block)->raw_bytes : s->placement->host_slot_bytes;
    bs_tag tag = h->home ? BS_TAG_HOME : BS_TAG_SLOT;
    bs_status st = bsi_mem_alloc(s->e->dev, BSI_MEM_PINNED, tag, h->bytes, &h->own);
    s->stats.stall_pinned_s += bsi_now() - t0;
    if (st != BS_OK)
        return bsi_wrap(st, "pinned memory for block '%s'", bsi_block_name(s, block));
    h->at = (bsi_addr){h->own, 0};
    return BS_OK;
}

/* A host slot with memory of its own gives it back when no pushed visit will read into it. The slot
   is free: copies out of it have run, or the drain has been. */
static void give_memory(bs_stream *s, bsi_host_slot *h)
{
    if (!h->own || h->home)
        return;
    for (int64_t i = s->next_read; i < s->pushed; i++)
        if (bsi_pushed_at(s, i)->transfer.host_slot >= 0)
            return;
    bsi_mem_free(h->own);
    h->own = NULL;
    h->at = (bsi_addr){NULL, 0};
}

static bs_status submit_extent(bs_stream *s, bsi_host_slot *h, int extent, int *next)
{
    const bsi_extent *x = bsi_manifest_extent(s->m, h->block, extent);
    for (uint64_t off = 0; off < x->length; off += s->request_bytes, (*next)++) {
        bsi_piece *piece = &h->piece[*next];
        *piece = (bsi_piece){.slot = h, .extent = extent};
        piece->io.file = bsi_tiers_file(s, x->file);
        piece->io.offset = x->offset + off;
        piece->io.length = BSI_MIN(s->request_bytes, x->length - off);
        piece->io.buffer = (char *)h->at.mem->host + h->at.off + x->raw_offset + off;
        piece->io.user = piece;
        BSI_TRY(bsi_aio_submit(s->aio, &piece->io));
        bsi_stats_submit(s);
    }
    return BS_OK;
}

/* All its pieces have been reaped. A slot of which one failed stays in reading: it holds no whole
   block, and the failure has stopped the stream; abort empties it. */
static void read_done(bs_stream *s, bsi_host_slot *h)
{
    s->homes_reading -= h->home;
    if (h->failed)
        return;
    s->stats.reads++;
    bsi_host_full(h);
}

static bs_status start_read(bs_stream *s, bsi_host_slot *h, bsi_pushed *p, int64_t serial)
{
    int block = p->spec.block, n = count_pieces(s, block), next = 0;
    const bs_block_info *b = bs_manifest_block(s->m, block);
    BSI_TRY(take_memory(s, h, block));
    s->homes_reading += h->home;
    if (s->dry) { /* bytes are counted as if they had been read: they are held against the placement */
        bsi_host_read(h, block, serial);
        s->stats.disk_payload += b->payload_bytes;
        s->stats.disk_read += bsi_manifest_read_bytes(s->m, block);
        read_done(s, h);
        return BS_OK;
    }
    bsi_free(h->piece); /* of the block before: all were reaped, or the slot would not be free */
    h->piece = bsi_alloc(BS_TAG_HEADER, (size_t)n * sizeof *h->piece);
    if (!h->piece)
        return BS_NOMEM;
    h->n_pieces =
        n; /* before the first submit: a failure in between leaves a slot that can never be full */
    bsi_host_read(h, block, serial);
    for (int x = 0; x < b->n_extents; x++)
        BSI_TRY(submit_extent(s, h, x, &next));
    if (n == 0)
        read_done(s, h);
    return BS_OK;
}

static bs_status issue_reads(bs_stream *s)
{
    for (; s->next_read < s->pushed; s->next_read++) {
        bsi_pushed *p = bsi_pushed_at(s, s->next_read);
        if (!p->transfer.read)
            continue;
        bsi_host_slot *h = bsi_host_slot_of(s, &p->transfer);
        if (h->state != BSI_HOST_FREE || (h->home && s->homes_reading >= HOMES_READING))
            break; /* and no later visit either: reads keep the order */
        BSI_TRY(start_read(s, h, p, s->next_read));
    }
    return BS_OK;
}

static bs_status take_piece(bs_stream *s, bsi_piece *piece)
{
    bsi_host_slot *h = piece->slot;
    bs_status st = piece->io.status;
    piece->done = true;
    h->n_done++;
    bsi_stats_reap(s, piece);
    /* h->serial is in the window: next_copy cannot pass a visit whose read has not ended. */
    bsi_pushed_at(s, h->serial)->fetched += piece->io.length;
    /* Counted as done all the same: the buffer is ours again only when every piece has been reaped. */
    if (st != BS_OK) {
        h->failed = true;
        st = bsi_wrap(bsi_fail_from(&piece->io.error), "block '%s'", bsi_block_name(s, h->block));
    }
    if (h->n_done == h->n_pieces)
        read_done(s, h);
    return st;
}

bs_status bsi_transfers_reap(bs_stream *s, unsigned wait_us)
{
    if (bsi_aio_in_flight(s->aio) == 0)
        return BS_OK;
    /* The first failure is kept; the reads behind it are still taken and counted. */
    for (bsi_read *io; (io = bsi_aio_reap(s->aio, wait_us)); wait_us = 0)
        (void)bsi_stream_fail(s, take_piece(s, io->user));
    return s->failed ? bsi_fail_from(&s->error) : BS_OK;
}

/* ---- copies ---- */

typedef struct span { /* raw bytes [from, to) of a block, and where they go in its canonical layout */
    uint64_t from, to, slot_offset;
} span;

static bs_status copy_span(bs_stream *s, bsi_host_slot *h, bsi_dev_slot *d, span x)
{
    if (x.to == x.from)
        return BS_OK;
    s->stats.link_bytes += x.to - x.from;
    return bsi_copy(s->e->copy_in, bsi_addr_add(d->at, x.slot_offset), bsi_addr_add(h->at, x.from),
                    x.to - x.from);
}

/* Raw bytes [lo, hi) of an extent (-1: of all), each tensor's to its place in the slot. What lies
   between tensors is left out. Tensors that follow each other in the slot as they do in the file go in
   one copy. */
static bs_status copy_tensors(bs_stream *s, bsi_host_slot *h, bsi_dev_slot *d, int extent, uint64_t lo,
                              uint64_t hi)
{
    span open = {0}; /* grows until a tensor does not continue it */
    for (int i = 0; i < bs_manifest_block(s->m, d->block)->n_tensors; i++) {
        const bs_tensor_info *t = bs_manifest_tensor(s->m, d->block, i);
        uint64_t raw = bsi_manifest_raw_offset(s->m, d->block, i);
        uint64_t from = BSI_MAX(lo, raw), to = BSI_MIN(hi, raw + t->bytes);
        if ((extent >= 0 && bsi_manifest_tensor_extent(s->m, d->block, i) != extent) || to <= from)
            continue;
        uint64_t slot_offset = t->slot_offset + (from - raw);
        if (from == open.to && slot_offset == open.slot_offset + (open.to - open.from)) {
            open.to = to;
            continue;
        }
        BSI_TRY(copy_span(s, h, d, open));
        open = (span){from, to, slot_offset};
    }
    return copy_span(s, h, d, open);
}

static bs_status copy_piece(bs_stream *s, bsi_host_slot *h, bsi_dev_slot *d, bsi_piece *piece)
{
    const bsi_extent *x = bsi_manifest_extent(s->m, h->block, piece->extent);
    uint64_t lo = x->raw_offset + (piece->io.offset - x->offset);
    piece->copied = true;
    h->n_copied++;
    return copy_tensors(s, h, d, piece->extent, lo, lo + piece->io.length);
}

/* What is there and has not been copied yet; *all: the whole block has been issued. A slot that was
   full before its first copy goes at once: fewer copies, and a filled home has no pieces any more. */
static bs_status copy_ready(bs_stream *s, bsi_host_slot *h, bsi_dev_slot *d, bool *all)
{
    bool full = h->state == BSI_HOST_FULL;
    if (full && h->n_copied == 0) {
        BSI_TRY(copy_tensors(s, h, d, -1, 0, UINT64_MAX));
        h->n_copied = h->n_pieces;
    }
    for (int i = 0; h->n_copied < h->n_done && i < h->n_pieces; i++)
        if (h->piece[i].done && !h->piece[i].copied)
            BSI_TRY(copy_piece(s, h, d, &h->piece[i]));
    *all = full;
    return BS_OK;
}

/* The device slot changes hands. Its last visit has been ended (issue_copies), so `used` marks that
   end, and copy-in waits for it. Without the wait the copies would overwrite weights that compute
   still reads. */
static bs_status begin_fill(bs_stream *s, bsi_host_slot *h, bsi_dev_slot *d, int block)
{
    if (d->state == BSI_DEV_READY)
        bsi_dev_evict(d);
    bsi_dev_fill(d, block);
    if (d->was_used)
        BSI_TRY(bsi_queue_wait(s->e->copy_in, d->used, "streamer: copy after last use"));
    if (!h->home) /* done when the wait is over: a stall is of compute until then, of copies after it */
        BSI_TRY(bsi_event_record(h->started, s->e->copy_in));
    if (s->poison) /* what no copy writes must not pass for weights of the block before */
        BSI_TRY(bsi_fill(s->e->copy_in, d->at, 0xFF, d->bytes));
    return BS_OK;
}

/* All copies of the block have been issued. The device slot is ready at once, though the copies may
   still run: who uses it waits for `filled` on its queue (fresh). The host slot is not free before they
   have run. */
static bs_status end_fill(bs_stream *s, bsi_host_slot *h, bsi_dev_slot *d)
{
    BSI_TRY(bsi_event_record(d->filled, s->e->copy_in));
    bsi_dev_ready(d);
    d->fresh = true;
    s->stats.loads++;
    h->n_copied = 0;
    if (h->home) {
        bsi_host_forget_pieces(h);
        return BS_OK;
    }
    bsi_host_copy(h);
    return bsi_event_record(h->copied, s->e->copy_in);
}

static bs_status issue_copies(bs_stream *s)
{
    for (; s->next_copy < s->next_read; s->next_copy++) {
        bsi_pushed *p = bsi_pushed_at(s, s->next_copy);
        if (!p->transfer.load)
            continue;
        /* The visit that frees the device slot has not been ended: `used` is not recorded for it yet,
           and a wait binds to the record that is current when it is issued (C3), so it would order this
           copy after an older visit. */
        if (p->free_after >= s->ended)
            break;
        bsi_dev_slot *d = bsi_dev_slot_of(s, &p->transfer);
        bsi_host_slot *h = bsi_host_slot_of(s, &p->transfer);
        if (h->state == BSI_HOST_READING && h->n_done == h->n_copied)
            break; /* nothing to copy yet: the slot keeps its old block until there is */
        if (d->state != BSI_DEV_FILLING) /* else begun by an earlier advance */
            BSI_TRY(begin_fill(s, h, d, p->spec.block));
        uint64_t before = s->stats.link_bytes;
        bool all;
        BSI_TRY(copy_ready(s, h, d, &all));
        p->fetched += s->stats.link_bytes - before;
        if (!all)
            break;
        BSI_TRY(end_fill(s, h, d));
    }
    return BS_OK;
}

/* The copies out of a host slot have run: its next read may begin. */
static bs_status release_host_slots(bs_stream *s)
{
    for (int i = 0; i < s->placement->read_slots; i++) {
        bsi_host_slot *h = &s->host[i];
        if (h->state != BSI_HOST_COPYING)
            continue;
        bs_status st = bsi_event_query(h->copied);
        if (st == BS_AGAIN)
            continue;
        BSI_TRY(st);
        bsi_host_release(h, s->poison);
        give_memory(s, h);
    }
    return BS_OK;
}

/* In this order each step finds what the one before has made possible: a released slot is read into,
   and a piece that was reaped is copied, in the same call. */
bs_status bsi_transfers_advance(bs_stream *s)
{
    BSI_TRY(bsi_transfers_reap(s, 0));
    BSI_TRY(release_host_slots(s));
    BSI_TRY(issue_reads(s));
    return issue_copies(s);
}

/* ---- giving up ---- */

/* Compute, too: after it nothing that was issued runs any more, so the caller may free or change what
   its ops use. */
bs_status bsi_transfers_drain(bs_stream *s)
{
    while (bsi_aio_in_flight(s->aio)) {
        bsi_read *io = bsi_aio_reap(s->aio, REAP_US);
        if (io)
            (void)take_piece(s, io->user); /* counted; the visit it was for is dropped anyway */
    }
    double t0 = bsi_now();
    bs_status copies = bsi_host_drain_queue(s->e->copy_in);
    s->stats.stall_copy_s += bsi_now() - t0;
    t0 = bsi_now();
    bs_status visits = bsi_host_drain_queue(s->e->compute);
    s->stats.stall_compute_s += bsi_now() - t0;
    return copies != BS_OK ? copies : visits; /* a lost device fails both alike */
}

void bsi_transfers_reset(bs_stream *s)
{
    for (int i = 0; i < s->n_host; i++) {
        bsi_host_slot *h = &s->host[i];
        if (h->home && h->state == BSI_HOST_FULL) {
            bsi_host_forget_pieces(
                h); /* some may be marked as copied into a device slot that is emptied below */
            continue;
        }
        bsi_host_drop(h, s->poison);
        if (!h->home)
            give_memory(s, h);
    }
    /* A gpu home that was being filled is emptied: part of its copies may be missing. One that is
       ready has had all its copies issued, and the drain has seen them run. */
    for (int i = 0; i < s->n_dev; i++)
        if (!s->dev[i].home || s->dev[i].state != BSI_DEV_READY)
            bsi_dev_drop(&s->dev[i]);
    s->homes_reading = 0;
    /* The policy counts a home as arrived when it decides its read. Of the reads that it decided,
       some were dropped; without a correction those homes would never be filled. */
    bsi_policy_reset(&s->policy, s->begun);
    for (int b = 0; b < s->placement->n_blocks; b++) {
        if (s->placement->home[b] == BS_HOME_RAM)
            s->policy.arrived[b] = s->host[s->home_slot[b]].state == BSI_HOST_FULL;
        if (s->placement->home[b] == BS_HOME_GPU)
            s->policy.arrived[b] = s->dev[s->home_slot[b]].state == BSI_DEV_READY;
    }
}
