/* SPDX-License-Identifier: Apache-2.0 */
/*
** open.c: takes what a stream needs for its life and gives it back: slots and gpu homes from the pool
** (exactly bs_placement_device_bytes), the staging region in pinned memory, events, the reader. Ram homes
** are allocated by the streamer as their blocks first arrive. One stream per engine: it is what the
** engine pumps.
*/
#include "stream/stream.h"

#include <string.h>

enum { REQUEST_BYTES = 2 << 20 };

const bsi_file *bsi_stream_file(const bs_stream *s, int file)
{
    return s->buffered ? &s->buffered[file] : bsi_manifest_file(s->m, file);
}

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

static bs_status open_files(bs_stream *s, bool no_direct)
{
    for (int b = 0; b < s->placement->n_blocks; b++)
        for (int x = 0; x < bs_manifest_block(s->m, b)->n_extents; x++)
            s->n_files = BSI_MAX(s->n_files, bsi_manifest_extent(s->m, b, x)->file + 1);
    s->file_used = bsi_alloc(BS_TAG_HEADER, (size_t)s->n_files * sizeof *s->file_used);
    if (!s->file_used)
        return BS_NOMEM;
    for (int b = 0; b < s->placement->n_blocks; b++)
        for (int x = 0; x < bs_manifest_block(s->m, b)->n_extents; x++)
            s->file_used[bsi_manifest_extent(s->m, b, x)->file] = true;
    if (!no_direct)
        return BS_OK;
    s->buffered = bsi_alloc(BS_TAG_HEADER, (size_t)s->n_files * sizeof *s->buffered);
    if (!s->buffered)
        return BS_NOMEM;
    for (int i = 0; i < s->n_files; i++)
        s->buffered[i].fd = -1;
    for (int i = 0; i < s->n_files; i++) {
        const bsi_file *old = bsi_manifest_file(s->m, i);
        if (!s->file_used[i])
            continue;
        BSI_TRY(bsi_file_check(old)); /* the same file as the manifest's */
        BSI_TRY(bsi_file_open(old->path, true, &s->buffered[i]));
    }
    return BS_OK;
}

static void name_io(bs_stream *s, const bs_io_cfg *io)
{
    int direct = 0, buffered = 0;
    for (int i = 0; i < s->n_files; i++) {
        direct += s->file_used[i] && bsi_stream_file(s, i)->direct;
        buffered += s->file_used[i] && !bsi_stream_file(s, i)->direct;
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

static bs_status open_device_slots(bs_stream *s)
{
    const bs_placement *p = s->placement;
    bsi_pool *pool = s->e->pool;
    bsi_addr slots = {NULL, 0};
    uint64_t all = p->slot_bytes * (uint64_t)p->dev_slots;
    if (all)
        BSI_TRY(bsi_pool_region(pool, "slots", all, &slots));
    for (int i = 0; i < s->n_dev; i++) {
        bsi_dev_slot *d = &s->dev[i];
        d->block = -1;
        BSI_TRY(bsi_event_open(s->e->dev, &d->filled));
        BSI_TRY(bsi_event_open(s->e->dev, &d->used));
        if (i < p->dev_slots) {
            d->bytes = p->slot_bytes;
            d->at = bsi_addr_add(slots, (size_t)i * p->slot_bytes);
        }
    }
    for (int b = 0; b < p->n_blocks; b++) {
        if (p->home[b] != BS_HOME_GPU)
            continue;
        bsi_dev_slot *d = &s->dev[s->home_slot[b]];
        d->home = true;
        d->bytes = bsi_round_up(bs_manifest_block(s->m, b)->slot_bytes, 256);
        if (d->bytes)
            BSI_TRY(bsi_pool_region(pool, bs_manifest_block(s->m, b)->name, d->bytes, &d->at));
    }
    return BS_OK;
}

static bs_status open_host_slots(bs_stream *s)
{
    const bs_placement *p = s->placement;
    size_t bytes = p->host_slot_bytes * (size_t)p->host_slots;
    if (bytes) {
        BSI_TRY(bsi_mem_alloc(s->e->dev, BSI_MEM_PINNED, BS_TAG_SLOT, bytes, &s->staging));
        if (s->staging->host)
            bsi_aio_register(s->aio, s->staging->host, bytes);
    }
    for (int i = 0; i < s->n_host; i++) {
        bsi_host_slot *h = &s->host[i];
        h->block = -1;
        h->home = i >= p->staging;
        if (h->home)
            continue;
        BSI_TRY(bsi_event_open(s->e->dev, &h->started));
        BSI_TRY(bsi_event_open(s->e->dev, &h->copied));
        if (s->staging) {
            h->bytes = p->host_slot_bytes;
            h->at = (bsi_addr){s->staging, (size_t)i * h->bytes};
        }
    }
    return BS_OK;
}

static bs_status open_tiers(bs_stream *s)
{
    const bs_placement *p = s->placement;
    int n_host = p->staging, n_dev = p->dev_slots;
    s->home_slot = bsi_alloc(BS_TAG_HEADER, (size_t)p->n_blocks * sizeof *s->home_slot);
    if (!s->home_slot)
        return BS_NOMEM;
    for (int b = 0; b < p->n_blocks; b++)
        s->home_slot[b] = p->home[b] == BS_HOME_RAM   ? n_host++
                          : p->home[b] == BS_HOME_GPU ? n_dev++
                                                      : -1;
    s->host = bsi_alloc(BS_TAG_HEADER, (size_t)n_host * sizeof *s->host);
    s->dev = bsi_alloc(BS_TAG_HEADER, (size_t)n_dev * sizeof *s->dev);
    if (!s->host || !s->dev)
        return BS_NOMEM;
    s->n_host = n_host; /* not before: close walks what is counted */
    s->n_dev = n_dev;
    BSI_TRY(open_device_slots(s));
    return open_host_slots(s);
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
    bs_status st = open_files(s, cfg->io.no_direct);
    if (st == BS_OK)
        st = bsi_aio_open(&cfg->io, fault, &s->aio);
    if (st == BS_OK)
        st = bsi_policy_open(s->placement, &s->policy);
    if (st == BS_OK)
        st = open_tiers(s);
    if (st != BS_OK) {
        bs_stream_close(s);
        return bsi_wrap(st, "stream");
    }
    name_io(s, &cfg->io);
    s->e->pump = bsi_stream_pump_quiet;
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
    if (s->e->pump_ud == s) {
        bs_status drained = bs_stream_abort(s);
        (void)drained; /* a lost device: nothing is in flight any more, and nobody to tell */
        s->e->pump = NULL;
        s->e->pump_ud = NULL;
    }
    bsi_aio_close(s->aio);
    for (int i = 0; i < s->n_host; i++) {
        bsi_event_close(s->host[i].started);
        bsi_event_close(s->host[i].copied);
        bsi_mem_free(s->host[i].own);
        bsi_free(s->host[i].req);
    }
    for (int i = 0; i < s->n_dev; i++) {
        bsi_event_close(s->dev[i].filled);
        bsi_event_close(s->dev[i].used);
    }
    bsi_mem_free(s->staging);
    for (int i = 0; s->buffered && i < s->n_files; i++)
        if (s->buffered[i].fd >= 0)
            bsi_file_close(&s->buffered[i]);
    bsi_policy_close(&s->policy);
    bsi_free(s->buffered);
    bsi_free(s->file_used);
    bsi_free(s->home_slot);
    bsi_free(s->host);
    bsi_free(s->dev);
    bsi_free(s->queue);
    bsi_free(s);
}
