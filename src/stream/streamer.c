/* SPDX-License-Identifier: Apache-2.0 */
/*
** streamer.c: executes the placement. The owner thread pumps: it reaps reads, issues reads into free
** staging slots and copies into free device slots, both strictly in visit order and only for pushed
** visits. Nothing here waits per block except for reads and for a staging slot to become free; queues
** are ordered by events:
**
** copy-in waits for compute   before a device slot is refilled (the visit that used it has been ended)
**   compute waits for copy-in   before the first visit of a freshly loaded block
**
** A piece (one finished request) is copied tensor by tensor to its canonical offset as soon as it is
** there. Staging is free when the event behind its last copy has been seen done. A failure is kept
** until bs_stream_abort, which drains everything and empties the slots; filled homes stay.
*/
#include "stream/stream.h"

#include <limits.h>
#include <string.h>

enum {
    HOMES_READING = 4, /* ram homes in flight: bounds how much memory is page-locked ahead of its use */
    REAP_US = 1000
};

static bsi_pushed *at(bs_stream *s, int64_t serial)
{
    return &s->queue[serial - s->base];
}

static bsi_dev_slot *dev_slot(bs_stream *s, const bs_transfer *t)
{
    return &s->dev[t->dev_slot >= 0 ? t->dev_slot : s->home_slot[t->block]];
}

static bsi_host_slot *host_slot(bs_stream *s, const bs_transfer *t)
{
    bool ram = s->placement->home[t->block] == BS_HOME_RAM;
    return &s->host[ram ? s->home_slot[t->block] : t->host_slot];
}

static const char *name_of(const bs_stream *s, int block)
{
    return bs_manifest_block(s->m, block)->name;
}

static bs_status fail(bs_stream *s, bs_status st) /* keep the detail of the first failure */
{
    if (st != BS_OK && !s->failed) {
        s->failed = true;
        s->error = *bs_error();
        s->error.status = st;
    }
    return st;
}

/* ---- reads ---- */

static int count_requests(const bs_stream *s, int block)
{
    uint64_t n = 0;
    for (int x = 0; x < bs_manifest_block(s->m, block)->n_extents; x++)
        n += (bsi_manifest_extent(s->m, block, x)->length + s->request_bytes - 1) / s->request_bytes;
    return (int)n;
}

/* Memory of a ram home, or of the one staging buffer of a placement without staging slots: as it is needed.
 */
static bs_status get_memory(bs_stream *s, bsi_host_slot *h, int block)
{
    if (h->at.mem)
        return BS_OK;
    double t0 = bsi_now();
    h->bytes = h->home ? bs_manifest_block(s->m, block)->raw_bytes : s->placement->host_slot_bytes;
    bs_tag tag = h->home ? BS_TAG_HOME : BS_TAG_SLOT;
    bs_status st = bsi_mem_alloc(s->e->dev, BSI_MEM_PINNED, tag, h->bytes, &h->own);
    s->stats.stall_pinned_s += bsi_now() - t0;
    if (st != BS_OK)
        return bsi_wrap(st, "pinned memory for block '%s'", name_of(s, block));
    h->at = (bsi_addr){h->own, 0};
    return BS_OK;
}

static bs_status submit_extent(bs_stream *s, bsi_host_slot *h, int extent, int *next)
{
    const bsi_extent *x = bsi_manifest_extent(s->m, h->block, extent);
    for (uint64_t off = 0; off < x->length; off += s->request_bytes, (*next)++) {
        bsi_piece *r = &h->req[*next];
        *r = (bsi_piece){.slot = h, .extent = extent};
        r->io.file = bsi_stream_file(s, x->file);
        r->io.offset = x->offset + off;
        r->io.length = BSI_MIN(s->request_bytes, x->length - off);
        r->io.buffer = (char *)h->at.mem->host + h->at.off + x->raw_offset + off;
        r->io.user = r;
        BSI_TRY(bsi_aio_submit(s->aio, &r->io));
        bsi_stats_submit(s);
    }
    return BS_OK;
}

static void read_done(bs_stream *s, bsi_host_slot *h) /* all its requests have been reaped */
{
    s->homes_reading -= h->home;
    if (h->bad)
        return;
    s->stats.reads++;
    bsi_host_full(h);
}

static bs_status start_read(bs_stream *s, bsi_host_slot *h, bsi_pushed *p, int64_t serial)
{
    const bs_block_info *b = bs_manifest_block(s->m, p->spec.block);
    int n = count_requests(s, p->spec.block), next = 0;
    BSI_TRY(get_memory(s, h, p->spec.block));
    s->homes_reading += h->home;
    if (s->dry) {
        bsi_host_read(h, p->spec.block, serial);
        s->stats.disk_payload += b->payload_bytes;
        s->stats.disk_read += bsi_read_bytes(s->m, p->spec.block);
        read_done(s, h);
        return BS_OK;
    }
    bsi_free(h->req);
    h->req = bsi_alloc(BS_TAG_HEADER, (size_t)n * sizeof *h->req);
    if (!h->req)
        return BS_NOMEM;
    h->n_req = n;
    bsi_host_read(h, p->spec.block, serial);
    for (int x = 0; x < b->n_extents; x++)
        BSI_TRY(submit_extent(s, h, x, &next));
    if (n == 0)
        read_done(s, h);
    return BS_OK;
}

static bs_status issue_reads(bs_stream *s)
{
    for (; s->next_read < s->pushed; s->next_read++) {
        bsi_pushed *p = at(s, s->next_read);
        if (!p->t.read)
            continue;
        bsi_host_slot *h = host_slot(s, &p->t);
        if (h->state != BSI_HOST_FREE || (h->home && s->homes_reading >= HOMES_READING))
            break;
        BSI_TRY(start_read(s, h, p, s->next_read));
    }
    return BS_OK;
}

static bs_status take_read(bs_stream *s, bsi_read *io)
{
    bsi_piece *r = io->user;
    bsi_host_slot *h = r->slot;
    r->done = true;
    h->n_done++;
    bsi_stats_reap(s, r);
    at(s, h->serial)->fetched += io->length;
    bs_status st = io->status;
    if (st != BS_OK) {
        h->bad = true;
        st = bsi_wrap(bsi_fail_from(&io->error), "block '%s'", name_of(s, h->block));
    }
    if (h->n_done == h->n_req)
        read_done(s, h);
    return st;
}

static bs_status reap(bs_stream *s, unsigned wait_us)
{
    if (bsi_aio_in_flight(s->aio) == 0)
        return BS_OK;
    for (bsi_read *io; (io = bsi_aio_reap(s->aio, wait_us)); wait_us = 0)
        (void)fail(s, take_read(s, io)); /* the first one is kept, the others are still counted */
    return s->failed ? bsi_fail_from(&s->error) : BS_OK;
}

/* ---- copies ---- */

typedef struct run { /* raw bytes [from, to) of a block, to the slot's byte `at` */
    uint64_t from, to, at;
} run;

static bs_status copy_run(bs_stream *s, bsi_host_slot *h, bsi_dev_slot *d, run r)
{
    if (r.to == r.from)
        return BS_OK;
    s->stats.link_bytes += r.to - r.from;
    return bsi_copy(s->e->copy_in, bsi_addr_add(d->at, r.at), bsi_addr_add(h->at, r.from),
                    r.to - r.from);
}

/* Raw bytes [lo, hi) of an extent (-1: of all), each tensor's to its place in the slot. Tensors that lie in
   the slot as they do in the file go in one copy. */
static bs_status copy_range(bs_stream *s, bsi_host_slot *h, bsi_dev_slot *d, int extent, uint64_t lo,
                            uint64_t hi)
{
    run r = {0};
    for (int i = 0; i < bs_manifest_block(s->m, d->block)->n_tensors; i++) {
        const bs_tensor_info *t = bs_manifest_tensor(s->m, d->block, i);
        uint64_t raw = bsi_raw_offset(s->m, d->block, i);
        uint64_t from = BSI_MAX(lo, raw), to = BSI_MIN(hi, raw + t->bytes);
        if ((extent >= 0 && bsi_manifest_tensor_extent(s->m, d->block, i) != extent) || to <= from)
            continue;
        uint64_t at = t->slot_offset + (from - raw);
        if (from == r.to && at == r.at + (r.to - r.from)) {
            r.to = to;
            continue;
        }
        BSI_TRY(copy_run(s, h, d, r));
        r = (run){from, to, at};
    }
    return copy_run(s, h, d, r);
}

static bs_status copy_piece(bs_stream *s, bsi_host_slot *h, bsi_dev_slot *d, bsi_piece *r)
{
    const bsi_extent *x = bsi_manifest_extent(s->m, h->block, r->extent);
    uint64_t lo = x->raw_offset + (r->io.offset - x->offset);
    r->copied = true;
    h->n_copied++;
    return copy_range(s, h, d, r->extent, lo, lo + r->io.length);
}

/* What is there and has not been copied yet; *all: the whole block has been issued. */
static bs_status copy_ready(bs_stream *s, bsi_host_slot *h, bsi_dev_slot *d, bool *all)
{
    bool full = h->state == BSI_HOST_FULL;
    if (full && h->n_copied == 0) {
        BSI_TRY(copy_range(s, h, d, -1, 0, UINT64_MAX));
        h->n_copied = h->n_req;
    }
    for (int i = 0; h->n_copied < h->n_done && i < h->n_req; i++)
        if (h->req[i].done && !h->req[i].copied)
            BSI_TRY(copy_piece(s, h, d, &h->req[i]));
    *all = full;
    return BS_OK;
}

static bs_status begin_fill(bs_stream *s, bsi_host_slot *h, bsi_dev_slot *d, int block)
{
    if (d->state == BSI_DEV_READY)
        bsi_dev_evict(d);
    bsi_dev_fill(d, block);
    if (d->was_used)
        BSI_TRY(bsi_queue_wait(s->e->copy_in, d->used, "streamer: copy after last use"));
    if (!h->home)
        BSI_TRY(bsi_event_record(h->started, s->e->copy_in));
    if (s->poison)
        BSI_TRY(bsi_fill(s->e->copy_in, d->at, 0xFF, d->bytes));
    return BS_OK;
}

static bs_status end_fill(bs_stream *s, bsi_host_slot *h, bsi_dev_slot *d)
{
    BSI_TRY(bsi_event_record(d->filled, s->e->copy_in));
    bsi_dev_ready(d);
    d->fresh = true;
    s->stats.loads++;
    h->n_copied = 0;
    if (h->home) {
        bsi_host_slot_filled(h);
        return BS_OK;
    }
    bsi_host_copy(h);
    return bsi_event_record(h->copied, s->e->copy_in);
}

static bs_status issue_copies(bs_stream *s)
{
    for (; s->next_copy < s->next_read; s->next_copy++) {
        bsi_pushed *p = at(s, s->next_copy);
        if (!p->t.load)
            continue;
        if (p->frees >= s->ended)
            break;
        bsi_dev_slot *d = dev_slot(s, &p->t);
        bsi_host_slot *h = host_slot(s, &p->t);
        if (h->state == BSI_HOST_READING && h->n_done == h->n_copied)
            break;
        if (d->state != BSI_DEV_FILLING)
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

/* The one buffer of a placement without staging slots goes when no pushed visit needs it. */
static void give_memory(bs_stream *s, bsi_host_slot *h)
{
    if (!h->own || h->home)
        return;
    for (int64_t i = s->next_read; i < s->pushed; i++)
        if (at(s, i)->t.host_slot >= 0)
            return;
    bsi_mem_free(h->own);
    h->own = NULL;
    h->at = (bsi_addr){NULL, 0};
}

static bs_status release_staging(bs_stream *s)
{
    for (int i = 0; i < s->placement->staging; i++) {
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

static bs_status advance(bs_stream *s)
{
    BSI_TRY(reap(s, 0));
    BSI_TRY(release_staging(s));
    BSI_TRY(issue_reads(s));
    return issue_copies(s);
}

static bs_status pump(bs_stream *s)
{
    if (s->in_pump)
        return BS_OK;
    if (s->failed)
        return bsi_fail_from(&s->error);
    s->in_pump = true;
    bs_status st = fail(s, advance(s));
    s->in_pump = false;
    return st;
}

/* Called by the engine after launches and in waits. The failure is kept for the next call of the owner;
   the detail of a failure that is being reported meanwhile is not disturbed. */
void bsi_stream_pump_quiet(void *ud)
{
    bs_stream *s = ud;
    if (s->failed || s->in_pump)
        return;
    bs_errinfo before = *bs_error();
    if (pump(s) != BS_OK)
        bsi_fail_from(&before);
}

bs_status bs_stream_pump(bs_stream *s)
{
    return pump(s);
}

/* ---- visits ---- */

static bs_status check_files(const bs_stream *s)
{
    for (int i = 0; i < s->n_files; i++)
        if (s->file_used[i])
            BSI_TRY(bsi_file_check(bsi_stream_file(s, i)));
    return BS_OK;
}

static bs_status make_room(bs_stream *s, int n)
{
    int64_t keep = BSI_MIN(s->ended, s->next_copy), held = s->pushed - keep;
    if (held + n > INT32_MAX)
        return bsi_fail(BS_ARG, "stream: %d visits pushed on top of %lld are too many", n,
                        (long long)held);
    if (held)
        memmove(s->queue, s->queue + (keep - s->base), (size_t)held * sizeof *s->queue);
    s->base = keep;
    if (held + n <= s->cap)
        return BS_OK;
    bsi_pushed *q = bsi_realloc(BS_TAG_HEADER, s->queue, (size_t)(held + n) * sizeof *q);
    if (!q)
        return BS_NOMEM;
    s->queue = q;
    s->cap = (int)(held + n);
    return BS_OK;
}

bs_status bs_stream_push(bs_stream *s, const bs_visit_spec *v, int n, bool cyclic)
{
    if (s->failed)
        return bsi_fail_from(&s->error);
    if (n < 0 || (n > 0 && !v))
        return bsi_fail(BS_ARG, "stream: a segment of %d visits is not one", n);
    for (int i = 0; i < n; i++)
        if (v[i].block < 0 || v[i].block >= s->placement->n_blocks)
            return bsi_fail(BS_ARG, "stream: visit %d is of block %d, the manifest has blocks 0..%d", i,
                            v[i].block, s->placement->n_blocks - 1);
    BSI_TRY(check_files(s));
    BSI_TRY(make_room(s, n));
    bs_transfer *t = bsi_alloc(BS_TAG_HEADER, (size_t)n * sizeof *t);
    if (!t)
        return BS_NOMEM;
    int64_t first = s->policy.serial;
    bs_status st = bsi_policy_decide(&s->policy, v, n, cyclic, t);
    for (int i = 0; st == BS_OK && i < n; i++) {
        int64_t frees = t[i].slot_free_after == INT_MIN ? -1 : first + t[i].slot_free_after;
        *at(s, s->pushed++) = (bsi_pushed){.spec = v[i], .t = t[i], .frees = frees};
    }
    bsi_free(t);
    return st == BS_OK ? pump(s) : st;
}

/* Nothing more can be issued for visit `serial` now: wait for what holds it up. */
static bs_status wait_for(bs_stream *s, int64_t serial)
{
    double t0 = bsi_now();
    if (bs_cancelled())
        return bsi_fail(BS_CANCELLED, "stream: cancelled while waiting for block '%s'",
                        name_of(s, at(s, serial)->spec.block));
    if (bsi_aio_in_flight(s->aio)) {
        bs_status st = reap(s, REAP_US);
        s->stats.stall_disk_s += bsi_now() - t0;
        return st;
    }
    /* The first read that could not be issued waits for its staging slot's copies. */
    const bsi_host_slot *h = s->next_read < s->pushed ? host_slot(s, &at(s, s->next_read)->t) : NULL;
    if (!h || h->state != BSI_HOST_COPYING)
        return bsi_fail(BS_INTERNAL, "stream: block '%s' cannot advance",
                        name_of(s, at(s, serial)->spec.block));
    BSI_TRY(bsi_host_wait(h->started));
    s->stats.stall_compute_s += bsi_now() - t0;
    t0 = bsi_now();
    if (h->state == BSI_HOST_COPYING) /* the wait pumps */
        BSI_TRY(bsi_host_wait(h->copied));
    s->stats.stall_copy_s += bsi_now() - t0;
    return BS_OK;
}

static bs_status bind(bs_stream *s, bsi_pushed *p)
{
    bsi_dev_slot *d = dev_slot(s, &p->t);
    bs_binding *b = &s->e->binding;
    if (d->fresh)
        BSI_TRY(bsi_queue_wait(s->e->compute, d->filled, "streamer: compute after copy"));
    d->fresh = false;
    s->stats.hits += !p->t.load;
    bsi_dev_use(d);
    b->base[p->spec.block] = d->at;
    b->generation++;
    b->visit = name_of(s, p->spec.block);
    return BS_OK;
}

bs_status bs_stream_next(bs_stream *s, bs_visit *out)
{
    if (s->begun > s->ended)
        BSI_TRY(bs_stream_end_visit(s));
    if (s->failed)
        return bsi_fail_from(&s->error);
    if (s->begun == s->pushed)
        return bsi_fail(BS_STATE,
                        "stream: no visit is left of what was pushed; push the next segment first");
    for (;;) {
        BSI_TRY(pump(s));
        if (s->next_copy > s->begun)
            break;
        BSI_TRY(wait_for(s, s->begun));
    }
    bsi_pushed *p = at(s, s->begun);
    BSI_TRY(fail(s, bind(s, p)));
    *out = (bs_visit){p->spec, s->begun};
    s->begun++;
    bsi_range_begin(s->e->dev, name_of(s, p->spec.block));
    return BS_OK;
}

static bs_status leave(bs_stream *s)
{
    bsi_pushed *p = at(s, s->ended);
    bsi_dev_slot *d = dev_slot(s, &p->t);
    bs_binding *b = &s->e->binding;
    b->base[p->spec.block] = (bsi_addr){NULL, 0};
    b->visit = "none";
    bsi_dev_leave(d);
    bsi_range_end(s->e->dev);
    s->ended++;
    d->was_used = true;
    return bsi_event_record(d->used, s->e->compute);
}

bs_status bs_stream_end_visit(bs_stream *s)
{
    if (s->begun == s->ended)
        return bsi_fail(BS_STATE, "stream: no visit is current");
    BSI_TRY(fail(s, leave(s)));
    return pump(s);
}

/* ---- abort ---- */

static bs_status drain(bs_stream *s)
{
    while (bsi_aio_in_flight(s->aio)) {
        bsi_read *io = bsi_aio_reap(s->aio, REAP_US);
        if (io)
            (void)take_read(s, io); /* counted; the visit it was for is dropped anyway */
    }
    double t0 = bsi_now();
    bs_status st = bsi_host_drain_queue(s->e->copy_in);
    s->stats.stall_copy_s += bsi_now() - t0;
    t0 = bsi_now();
    bs_status st2 = bsi_host_drain_queue(s->e->compute);
    s->stats.stall_compute_s += bsi_now() - t0;
    return st != BS_OK ? st : st2; /* a lost device fails both alike */
}

static void empty_slots(bs_stream *s)
{
    for (int i = 0; i < s->n_host; i++) {
        bsi_host_slot *h = &s->host[i];
        if (h->home && h->state == BSI_HOST_FULL) {
            bsi_host_slot_filled(h); /* what was copied out of it is forgotten */
            continue;
        }
        bsi_host_drop(h, s->poison);
        if (!h->home)
            give_memory(s, h);
    }
    for (int i = 0; i < s->n_dev; i++)
        if (!s->dev[i].home || s->dev[i].state != BSI_DEV_READY)
            bsi_dev_drop(&s->dev[i]);
    s->homes_reading = 0;
    bsi_policy_reset(&s->policy, s->begun);
    for (int b = 0; b < s->placement->n_blocks; b++) {
        if (s->placement->home[b] == BS_HOME_RAM)
            s->policy.arrived[b] = s->host[s->home_slot[b]].state == BSI_HOST_FULL;
        if (s->placement->home[b] == BS_HOME_GPU)
            s->policy.arrived[b] = s->dev[s->home_slot[b]].state == BSI_DEV_READY;
    }
}

bs_status bs_stream_abort(bs_stream *s)
{
    s->failed = true; /* the engine's pump stays out */
    if (s->begun > s->ended)
        (void)leave(s); /* a lost device is reported by the drain */
    bs_status st = drain(s);
    if (st != BS_OK) { /* a lost device: what was issued may still run, so no memory is touched */
        s->error = *bs_error();
        s->error.status = st;
        return st;
    }
    for (int64_t i = s->begun; i < s->pushed; i++)
        s->stats.wasted += at(s, i)->fetched;
    s->pushed = s->next_read = s->next_copy = s->begun;
    empty_slots(s);
    s->failed = false;
    return BS_OK;
}
