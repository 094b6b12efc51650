/* SPDX-License-Identifier: Apache-2.0 */
/*
** tiers.c: what a stream holds for its life, by tier: the files; the host slots, in one pinned region;
** the device slots and gpu homes, in regions of the pool (exactly bs_placement_device_bytes). Memory of
** a ram home is not taken here but when its block first arrives (transfers.c), so that page-locking it
** delays no other block. Owner thread only.
*/
#include "stream/stream.h"

const bsi_file *bsi_tiers_file(const bs_stream *s, int file)
{
    return s->buffered ? &s->buffered[file] : bsi_manifest_file(s->m, file);
}

bs_status bsi_tiers_open_files(bs_stream *s, bool no_direct)
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
    /* All of them before the first open: close takes what an open that failed has left, and 0 is a
       descriptor. */
    for (int i = 0; i < s->n_files; i++)
        s->buffered[i].fd = -1;
    for (int i = 0; i < s->n_files; i++) {
        const bsi_file *old = bsi_manifest_file(s->m, i);
        if (!s->file_used[i])
            continue;
        BSI_TRY(bsi_file_check(old)); /* the same file as the manifest's, whose offsets are used */
        BSI_TRY(bsi_file_open(old->path, true, &s->buffered[i]));
    }
    return BS_OK;
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
        BSI_TRY(bsi_mem_alloc(s->e->dev, BSI_MEM_PINNED, BS_TAG_SLOT, bytes, &s->host_region));
        /* Slots only: they are read into again and again, while a home is filled once and would pay
           for its registration without using it. NULL on meta, which has no bytes. */
        if (s->host_region->host)
            bsi_aio_register(s->aio, s->host_region->host, bytes);
    }
    for (int i = 0; i < s->n_host; i++) {
        bsi_host_slot *h = &s->host[i];
        h->block = -1;
        h->home = i >= p->read_slots;
        if (h->home)
            continue;
        BSI_TRY(bsi_event_open(s->e->dev, &h->started));
        BSI_TRY(bsi_event_open(s->e->dev, &h->copied));
        if (s->host_region) {
            h->bytes = p->host_slot_bytes;
            h->at = (bsi_addr){s->host_region, (size_t)i * h->bytes};
        }
    }
    return BS_OK;
}

bs_status bsi_tiers_open_slots(bs_stream *s)
{
    const bs_placement *p = s->placement;
    int n_host = p->read_slots, n_dev = p->dev_slots;
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
    s->n_host = n_host; /* not before there is an array: close walks what is counted */
    s->n_dev = n_dev;
    BSI_TRY(open_device_slots(s));
    return open_host_slots(s);
}

void bsi_tiers_close(bs_stream *s)
{
    /* Nothing is in flight any more: the stream has drained its queues and closed the read engine.
       Regions of the pool stay the engine's. */
    for (int i = 0; i < s->n_host; i++) {
        bsi_event_close(s->host[i].started);
        bsi_event_close(s->host[i].copied);
        bsi_mem_free(s->host[i].own);
        bsi_free(s->host[i].piece);
    }
    for (int i = 0; i < s->n_dev; i++) {
        bsi_event_close(s->dev[i].filled);
        bsi_event_close(s->dev[i].used);
    }
    bsi_mem_free(s->host_region);
    for (int i = 0; s->buffered && i < s->n_files; i++)
        if (s->buffered[i].fd >= 0)
            bsi_file_close(&s->buffered[i]);
    bsi_free(s->buffered);
    bsi_free(s->file_used);
    bsi_free(s->home_slot);
    bsi_free(s->host);
    bsi_free(s->dev);
}
