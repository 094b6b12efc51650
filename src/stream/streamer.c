/* SPDX-License-Identifier: Apache-2.0 */
/*
** streamer.c: the stream that a caller sees: visits are pushed, begin and end in order, and while one
** is current its block is bound. Runs ahead of the caller, into pushed visits only: every call, every
** launch and every wait of the engine advances the transfers. Owner thread only.
**
** Four serials say how far things are: ended <= begun <= next_copy <= next_read <= pushed. A visit
** begins when its copies have been issued, not when they have run: compute is ordered after them by an
** event. The host blocks only where nothing more can be issued for the visit that is asked: for a read,
** or for the copies out of a host slot that the next read needs.
**
** A failure is kept, and every call reports it, until bs_stream_abort drains what is in flight and
** empties the slots; filled homes stay. One stream per engine: it is what the engine pumps.
*/
#include "stream/stream.h"

#include <limits.h>
#include <string.h>

enum { REQUEST_BYTES = 2 << 20, REAP_US = 1000 };

/* ---- open and close ---- */

static bs_status check_cfg(const bs_stream_cfg *cfg)
{
    if (!cfg->engine || !cfg->placement)
        return bsi_fail(BS_ARG, "stream: an engine and a placement are required");
    if (cfg->engine->pump)
        return bsi_fail(BS_STATE, "stream: the engine has a stream already; close it first");
    if (cfg->engine->binding.n_blocks < cfg->placement->n_blocks)
        return bsi_fail(BS_ARG, "stream: the engine was opened for %d blocks, the placement has %d",
                        cfg->engine->binding.n_blocks, cfg->placement->n_blocks);
    return BS_OK;
}

static void name_io(bs_stream *s, const bs_io_cfg *io)
{
    int direct = 0, buffered = 0;
    for (int i = 0; i < s->n_files; i++) {
        direct += s->file_used[i] && bsi_tiers_file(s, i)->direct;
        buffered += s->file_used[i] && !bsi_tiers_file(s, i)->direct;
    }
    const char *engine = bsi_aio_name(s->aio);
    bool asked_pool = io->engine && strcmp(io->engine, "pool") == 0;
    snprintf(s->stats.io, sizeof s->stats.io, "%s+%s", engine,
             !buffered ? "direct"
             : direct  ? "mixed"
                       : "buffered");
    s->stats.fallbacks =
        (uint64_t)((io->no_direct ? 0 : buffered) + (!asked_pool && strcmp(engine, "pool") == 0));
}

bs_status bsi_stream_open_fault(const bs_stream_cfg *cfg, const bsi_aio_fault *fault, bs_stream **out)
{
    BSI_TRY(check_cfg(cfg));
    bs_stream *s = bsi_alloc(BS_TAG_HEADER, sizeof *s);
    if (!s)
        return BS_NOMEM;
    s->e = cfg->engine;
    s->placement = cfg->placement;
    s->m = cfg->placement->manifest;
    s->dry = !s->e->props.executes;
    s->poison = bsi_dev_checks(s->e->dev);
    size_t align = BSI_MAX(bs_manifest_alignment(s->m), (size_t)BSI_READ_ALIGN);
    s->request_bytes =
        bsi_round_up(cfg->io.request_bytes ? cfg->io.request_bytes : REQUEST_BYTES, align);
    bs_status st = bsi_tiers_open_files(s, cfg->io.no_direct);
    if (st == BS_OK)
        st = bsi_aio_open(&cfg->io, fault, &s->aio);
    if (st == BS_OK)
        st = bsi_policy_open(s->placement, &s->policy);
    if (st == BS_OK)
        st = bsi_tiers_open_slots(s);
    if (st != BS_OK) {
        bs_stream_close(s);
        return bsi_wrap(st, "stream");
    }
    name_io(s, &cfg->io);
    s->e->pump = bsi_stream_pump;
    s->e->pump_ud = s;
    *out = s;
    return BS_OK;
}

bs_status bs_stream_open(const bs_stream_cfg *cfg, bs_stream **out)
{
    return bsi_stream_open_fault(cfg, NULL, out);
}

void bs_stream_close(bs_stream *s)
{
    if (!s)
        return;
    if (s->e->pump_ud == s) { /* else open failed, and nothing was ever issued */
        bs_status drained = bs_stream_abort(s);
        (void)drained; /* a lost device: nothing is in flight any more, and nobody to tell */
        s->e->pump = NULL;
        s->e->pump_ud = NULL;
    }
    bsi_aio_close(s->aio); /* before the memory that it reads into and the files that it reads */
    bsi_tiers_close(s);
    bsi_policy_close(&s->policy);
    bsi_free(s->window);
    bsi_free(s);
}

/* ---- running ahead ---- */

static bs_status pump(bs_stream *s)
{
    if (s->in_pump) /* what an advance calls may wait, and waits pump: the outer one goes on */
        return BS_OK;
    if (s->failed)
        return bsi_fail_from(&s->error);
    s->in_pump = true;
    bs_status st = bsi_stream_fail(s, bsi_transfers_advance(s));
    s->in_pump = false;
    return st;
}

/* Called by the engine after launches and in waits, in the middle of what the owner does. A failure
   here is kept for the owner's next call; the detail of one that the owner is about to report is
   put back. */
void bsi_stream_pump(void *stream)
{
    bs_stream *s = stream;
    if (s->failed || s->in_pump)
        return;
    bs_errinfo before = *bs_error();
    if (pump(s) != BS_OK)
        bsi_fail_from(&before);
}

/* Nothing more can be issued for visit `serial`: wait for what holds it up. With reads in flight that
   is the disk: the visit's own read, or an earlier one behind which it waits its turn. Else a read
   could not be issued, and the first of those waits for the copies out of its host slot. */
static bs_status wait_for(bs_stream *s, int64_t serial)
{
    double t0 = bsi_now();
    const char *name = bsi_block_name(s, bsi_pushed_at(s, serial)->spec.block);
    if (bs_cancelled())
        return bsi_fail(BS_CANCELLED, "stream: cancelled while waiting for block '%s'", name);
    if (bsi_aio_in_flight(s->aio)) {
        bs_status st = bsi_transfers_reap(s, REAP_US);
        s->stats.stall_disk_s += bsi_now() - t0;
        return st;
    }
    const bsi_host_slot *h = s->next_read < s->pushed
                                 ? bsi_host_slot_of(s, &bsi_pushed_at(s, s->next_read)->transfer)
                                 : NULL;
    if (!h || h->state != BSI_HOST_COPYING)
        return bsi_fail(BS_INTERNAL, "stream: block '%s' cannot advance", name);
    BSI_TRY(bsi_host_wait(h->started));
    s->stats.stall_compute_s += bsi_now() - t0;
    t0 = bsi_now();
    if (h->state ==
        BSI_HOST_COPYING) /* the wait pumps: the slot may have been released, even read into again */
        BSI_TRY(bsi_host_wait(h->copied));
    s->stats.stall_copy_s += bsi_now() - t0;
    return BS_OK;
}

/* ---- visits ---- */

static bs_status check_files(const bs_stream *s)
{
    for (int i = 0; i < s->n_files; i++)
        if (s->file_used[i])
            BSI_TRY(bsi_file_check(bsi_tiers_file(s, i)));
    return BS_OK;
}

/* Room for n more visits. Those that are over leave the window at its front. Visits from next_copy
   on stay: reads and copies in progress look them up (bsi_pushed_at). */
static bs_status make_room(bs_stream *s, int n)
{
    int64_t keep = BSI_MIN(s->ended, s->next_copy), held = s->pushed - keep;
    if (held + n > INT32_MAX)
        return bsi_fail(BS_ARG, "stream: %d visits pushed on top of %lld are too many", n,
                        (long long)held);
    if (held)
        memmove(s->window, s->window + (keep - s->base), (size_t)held * sizeof *s->window);
    s->base = keep;
    if (held + n <= s->window_cap)
        return BS_OK;
    bsi_pushed *window = bsi_realloc(BS_TAG_HEADER, s->window, (size_t)(held + n) * sizeof *window);
    if (!window)
        return BS_NOMEM;
    s->window = window;
    s->window_cap = (int)(held + n);
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
    /* Offsets are those of the files that the manifest was made of. Once a push and not once a
       read, which would be a system call for each. */
    BSI_TRY(check_files(s));
    BSI_TRY(make_room(s, n));
    bs_transfer *t = bsi_alloc(BS_TAG_HEADER, (size_t)n * sizeof *t);
    if (!t)
        return BS_NOMEM;
    /* The policy counts visits from the start of this push; the window counts serials. -1 is before
       every visit, so a slot that was never used is free at once. */
    int64_t first = s->policy.serial;
    bs_status st = bsi_policy_decide(&s->policy, v, n, cyclic, t);
    for (int i = 0; st == BS_OK && i < n; i++) {
        int64_t free_after = t[i].slot_free_after == INT_MIN ? -1 : first + t[i].slot_free_after;
        *bsi_pushed_at(s, s->pushed++) =
            (bsi_pushed){.spec = v[i], .transfer = t[i], .free_after = free_after};
    }
    bsi_free(t);
    return st == BS_OK ? pump(s) : st;
}

/* The visit begins. Compute waits once for the copies of a load: later visits of the same load come
   behind that wait, in the same queue. A new generation makes expanded copies of this block's
   weights stale, since they may be of bytes that were in the slot before. */
static bs_status bind(bs_stream *s, bsi_pushed *p)
{
    bsi_dev_slot *d = bsi_dev_slot_of(s, &p->transfer);
    bs_binding *b = &s->e->binding;
    if (d->fresh)
        BSI_TRY(bsi_queue_wait(s->e->compute, d->filled, "streamer: compute after copy"));
    d->fresh = false;
    s->stats.hits += !p->transfer.load;
    bsi_dev_use(d);
    b->base[p->spec.block] = d->at;
    b->generation++;
    b->visit = bsi_block_name(s, p->spec.block);
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
    /* next_copy passes the visit when all its copies have been issued. Waiting for them to have run
       would idle the host; compute waits for them itself (bind). */
    for (;;) {
        BSI_TRY(pump(s));
        if (s->next_copy > s->begun)
            break;
        BSI_TRY(wait_for(s, s->begun));
    }
    bsi_pushed *p = bsi_pushed_at(s, s->begun);
    BSI_TRY(bsi_stream_fail(s, bind(s, p)));
    *out = (bs_visit){p->spec, s->begun};
    s->begun++;
    bsi_range_begin(s->e->dev, bsi_block_name(s, p->spec.block));
    return BS_OK;
}

/* The visit ends. Its ops have all been issued, so a record here is behind the last one that reads the
   slot: it is what the next fill of the slot waits for. */
static bs_status leave(bs_stream *s)
{
    bsi_pushed *p = bsi_pushed_at(s, s->ended);
    bsi_dev_slot *d = bsi_dev_slot_of(s, &p->transfer);
    bs_binding *b = &s->e->binding;
    b->base[p->spec.block] =
        (bsi_addr){NULL, 0}; /* an op that comes late finds nothing, not another block */
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
    BSI_TRY(bsi_stream_fail(s, leave(s)));
    return pump(s);
}

/* ---- abort ---- */

bs_status bs_stream_abort(bs_stream *s)
{
    s->failed = true; /* first: the engine's pump stays out, so nothing more is issued */
    if (s->begun > s->ended)
        (void)leave(s); /* a lost device is reported by the drain */
    bs_status st = bsi_transfers_drain(s);
    if (st != BS_OK) { /* a lost device: what was issued may still run, so no memory is touched */
        s->error = *bs_error();
        s->error.status = st;
        return st;
    }
    /* Visits that were never begun are dropped. Serials are not used twice: they go on from
       `begun`. */
    for (int64_t i = s->begun; i < s->pushed; i++)
        s->stats.wasted += bsi_pushed_at(s, i)->fetched;
    s->pushed = s->next_read = s->next_copy = s->begun;
    bsi_transfers_reset(s);
    s->failed = false;
    return BS_OK;
}
