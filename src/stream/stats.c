/* SPDX-License-Identifier: Apache-2.0 */
/*
** stats.c: what the streamer has moved and where blocks are. Counters grow where bytes really move: a
** read when it is reaped, a copy when it is issued (transfers.c). They are never taken from the
** placement, so that comparing them with it means something. Stalls are the owner's waits: disk (a read
** in flight), compute (a host slot is held by copies that wait for compute to leave a device slot),
** copy (by copies that run), pinned (page-locking memory for a ram home).
*/
#include "stream/stream.h"

#include <string.h>

void bsi_stats_submit(bs_stream *s)
{
    s->stats.requests++;
    if (bsi_aio_in_flight(s->aio) == 1)
        s->busy_since = bsi_now();
}

/* Bytes of the block's tensors inside a raw range of its host slot. */
static uint64_t payload_in(const bs_manifest *m, int block, int extent, uint64_t lo, uint64_t hi)
{
    uint64_t sum = 0;
    for (int i = 0; i < bs_manifest_block(m, block)->n_tensors; i++) {
        if (bsi_manifest_tensor_extent(m, block, i) != extent)
            continue;
        uint64_t raw = bsi_manifest_raw_offset(m, block, i),
                 bytes = bs_manifest_tensor(m, block, i)->bytes;
        uint64_t from = BSI_MAX(lo, raw), to = BSI_MIN(hi, raw + bytes);
        sum += to > from ? to - from : 0;
    }
    return sum;
}

void bsi_stats_reap(bs_stream *s, const bsi_piece *piece)
{
    const bsi_extent *x = bsi_manifest_extent(s->m, piece->slot->block, piece->extent);
    uint64_t lo = x->raw_offset + (piece->io.offset - x->offset);
    if (bsi_aio_in_flight(s->aio) == 0)
        s->stats.disk_busy_s += bsi_now() - s->busy_since;
    s->stats.disk_read += piece->io.length + piece->io.reread;
    s->stats.disk_reread += piece->io.reread;
    if (piece->io.status == BS_OK)
        s->stats.disk_payload +=
            payload_in(s->m, piece->slot->block, piece->extent, lo, lo + piece->io.length);
}

void bs_stream_stats_get(const bs_stream *s, bs_stream_stats *out)
{
    *out = s->stats;
    if (bsi_aio_in_flight(s->aio))
        out->disk_busy_s += bsi_now() - s->busy_since;
    out->resident_device = out->resident_host = 0;
    out->host_bytes = s->host_region ? s->host_region->bytes : 0;
    for (int i = 0; i < s->n_dev; i++)
        out->resident_device += s->dev[i].state == BSI_DEV_READY || s->dev[i].state == BSI_DEV_IN_USE;
    for (int i = 0; i < s->n_host; i++) {
        out->resident_host += s->host[i].home && s->host[i].state == BSI_HOST_FULL;
        out->host_bytes += s->host[i].own ? s->host[i].own->bytes : 0;
    }
}

const char *bs_stream_where(const bs_stream *s, int block)
{
    const char *where = "disk";
    for (int i = 0; i < s->n_host; i++) {
        const bsi_host_slot *h = &s->host[i];
        if (h->block == block && h->state != BSI_HOST_FREE)
            where = h->home && h->state == BSI_HOST_FULL ? "ram" : "loading";
    }
    for (int i = 0; i < s->n_dev; i++) {
        const bsi_dev_slot *d = &s->dev[i];
        if (d->block == block && d->state == BSI_DEV_FILLING)
            return "loading";
        if (d->block == block && d->state != BSI_DEV_FREE)
            return d->home ? "gpu" : "slot";
    }
    return where;
}

bs_status bs_stream_home(const bs_stream *s, int block, int tensor, bs_place *out)
{
    const bs_tensor_info *t = bs_manifest_tensor(s->m, block, tensor);
    if (!t)
        return bsi_fail(BS_ARG, "stream: the manifest has no tensor %d in a block %d", tensor, block);
    const char *name = bs_manifest_block(s->m, block)->name;
    if (s->placement->home[block] != BS_HOME_GPU)
        return bsi_fail(BS_STATE, "stream: block '%s' has no gpu home; only there can it be changed",
                        name);
    const bsi_dev_slot *d = &s->dev[s->home_slot[block]];
    if ((d->state != BSI_DEV_READY && d->state != BSI_DEV_IN_USE) || d->fresh)
        return bsi_fail(BS_STATE,
                        "stream: block '%s' has not been visited, so its home is not filled yet", name);
    int64_t rows = 1;
    for (int i = 0; i + 1 < t->ndim; i++)
        rows *= t->dim[i];
    int64_t cols = t->ndim > 0 ? t->dim[t->ndim - 1] : 1;
    *out = bsi_place(bsi_addr_add(d->at, t->slot_offset), t->dtype, rows, rows, cols);
    return BS_OK;
}
