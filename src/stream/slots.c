/* SPDX-License-Identifier: Apache-2.0 */
/*
** slots.c: the state machines of the two tiers, one function per edge. A wrong edge is a bug of the
** streamer and is asserted.
**
** host slot    free -> reading    its turn has come (issue_reads in transfers.c)
**              reading -> full    the last piece was reaped and none has failed
**              full -> copying    all copies out of it are issued; a ram home stays full
**              copying -> free    the event behind those copies has been seen done
** device slot  free -> filling    a copy into it is next, behind the wait for its last use
**              filling -> ready   the last copy into it is issued and `filled` is recorded
**              ready -> in use    its visit begins
**              in use -> ready    its visit ends and `used` is recorded
**              ready -> free      another block takes it; never a gpu home
**
** States say what has been issued, events say what has run. Only copying -> free needs what has run.
** Memory is poisoned where it becomes free, so that a reader that comes too late finds NaN instead of
** plausible weights; for a device slot the streamer does it on the copy queue.
*/
#include "stream/stream.h"

#include <assert.h>
#include <string.h>

void bsi_host_read(bsi_host_slot *h, int block, int64_t serial)
{
    assert(h->state == BSI_HOST_FREE);
    h->state = BSI_HOST_READING;
    h->block = block;
    h->serial = serial;
    h->failed = false;
    h->n_done = h->n_copied = 0;
}

void bsi_host_full(bsi_host_slot *h)
{
    assert(h->state == BSI_HOST_READING && h->n_done == h->n_pieces);
    h->state = BSI_HOST_FULL;
}

void bsi_host_copy(bsi_host_slot *h)
{
    assert(h->state == BSI_HOST_FULL && !h->home);
    h->state = BSI_HOST_COPYING;
}

void bsi_host_forget_pieces(bsi_host_slot *h)
{
    assert(h->state == BSI_HOST_FULL && h->home);
    bsi_free(h->piece);
    h->piece = NULL;
    h->n_pieces = h->n_done = h->n_copied = 0;
}

/* Pieces are counted off; their memory goes with the next read. */
static void to_free(bsi_host_slot *h, bool poison)
{
    if (poison && h->at.mem && h->at.mem->host)
        memset((char *)h->at.mem->host + h->at.off, 0xFF, h->bytes);
    h->state = BSI_HOST_FREE;
    h->block = -1;
    h->n_pieces = h->n_done = h->n_copied = 0;
}

void bsi_host_release(bsi_host_slot *h, bool poison)
{
    assert(h->state == BSI_HOST_COPYING);
    to_free(h, poison);
}

void bsi_host_drop(bsi_host_slot *h, bool poison)
{
    to_free(h, poison);
}

void bsi_dev_fill(bsi_dev_slot *d, int block)
{
    assert(d->state == BSI_DEV_FREE);
    d->state = BSI_DEV_FILLING;
    d->block = block;
}

void bsi_dev_ready(bsi_dev_slot *d)
{
    assert(d->state == BSI_DEV_FILLING);
    d->state = BSI_DEV_READY;
}

void bsi_dev_use(bsi_dev_slot *d)
{
    assert(d->state == BSI_DEV_READY);
    d->state = BSI_DEV_IN_USE;
}

void bsi_dev_leave(bsi_dev_slot *d)
{
    assert(d->state == BSI_DEV_IN_USE);
    d->state = BSI_DEV_READY;
}

void bsi_dev_evict(bsi_dev_slot *d)
{
    assert(d->state == BSI_DEV_READY && !d->home);
    d->state = BSI_DEV_FREE;
    d->block = -1;
}

/* was_used stays: the record of the last use is still what the next fill has to wait for. */
void bsi_dev_drop(bsi_dev_slot *d)
{
    d->state = BSI_DEV_FREE;
    d->block = -1;
}
