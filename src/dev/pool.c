/* SPDX-License-Identifier: Apache-2.0 */
/*
** pool.c: the device pool. One reservation, made once: fixed regions from the bottom, and above them
** the arena, handed out first fit in issue order. Offsets are a function of the sequence of calls and
** of nothing else (no time, no collector, no polled event), so a dry run on `meta` gives the same
** high-water as the real run. Owner thread only. The arena serves one in-order queue: a range that is
** given back may be handed out again at once, because its next user is issued after its last one.
*/
#include "dev/dev.h"

#include <string.h>

enum { ALIGN = 256 };

typedef struct span { /* a free range of the arena */
    size_t off, bytes;
} span;

struct bsi_pool {
    bs_dev *dev;
    bsi_mem *mem;
    bool bounded;
    bool sealed;
    size_t bytes;     /* of the reservation; SIZE_MAX/4 when it only counts */
    size_t fixed;     /* taken by regions */
    size_t now, peak; /* of the arena; peak is an offset from its start */
    span *free;       /* sorted by offset, never adjacent */
    size_t n_free, cap_free;
};

bs_status bsi_pool_open(bs_dev *dev, size_t bytes, bsi_pool **out)
{
    bs_dev_props props;
    bs_dev_props_get(dev, &props);
    if (bytes == 0 && props.executes)
        return bsi_fail(BS_ARG,
                        "device pool: 0 bytes asked on '%s'; give the size that the plan computed",
                        props.name);
    bsi_pool *p = bsi_alloc(BS_TAG_MISC, sizeof *p);
    if (!p)
        return BS_NOMEM;
    p->dev = dev;
    p->bounded = bytes != 0;
    /* SIZE_MAX / 4 where it only counts: never reached, and a sum of a few such sizes does not
       wrap. */
    p->bytes = p->bounded ? bytes : SIZE_MAX / 4;
    bs_status st = bsi_mem_alloc(dev, BSI_MEM_DEVICE, BS_TAG_DEVICE, p->bytes, &p->mem);
    if (st != BS_OK) {
        bsi_free(p);
        return bsi_wrap(st, "device pool of %zu bytes", bytes);
    }
    *out = p;
    return BS_OK;
}

void bsi_pool_close(bsi_pool *p)
{
    if (!p)
        return;
    bsi_mem_free(p->mem);
    bsi_free(p->free);
    bsi_free(p);
}

bs_status bsi_pool_region(bsi_pool *p, const char *name, size_t bytes, bsi_addr *out)
{
    size_t need = bsi_round_up(BSI_MAX(bytes, (size_t)1), ALIGN);
    if (p->sealed)
        return bsi_fail(BS_STATE, "device region '%s' is asked after the pool was sealed", name);
    /* bytes is compared first: rounding up wraps close to SIZE_MAX, and need would be 0. */
    if (bytes > p->bytes || need > p->bytes - p->fixed)
        return bsi_fail(
            BS_DEVMEM,
            "device region '%s' needs %zu bytes, %zu of the pool's %zu are left; raise vram=", name,
            need, p->bytes - p->fixed, p->bytes);
    *out = (bsi_addr){p->mem, p->fixed};
    p->fixed += need;
    return BS_OK;
}

static bs_status reserve_spans(bsi_pool *p, size_t n)
{
    if (n <= p->cap_free)
        return BS_OK;
    size_t cap = BSI_MAX(2 * p->cap_free, (size_t)64);
    span *f = bsi_realloc(BS_TAG_MISC, p->free, cap * sizeof *f);
    if (!f)
        return BS_NOMEM;
    p->free = f;
    p->cap_free = cap;
    return BS_OK;
}

bs_status bsi_pool_seal(bsi_pool *p, size_t arena_bytes)
{
    if (p->sealed)
        return bsi_fail(BS_STATE, "the device pool is sealed already");
    BSI_TRY(reserve_spans(p, 1));
    size_t left = p->bytes - p->fixed;
    if (arena_bytes > left)
        return bsi_fail(BS_DEVMEM,
                        "the arena needs %zu bytes, %zu of the pool's %zu are left; raise vram=",
                        arena_bytes, left, p->bytes);
    p->free[0] = (span){p->fixed, arena_bytes ? arena_bytes : left};
    p->n_free = p->free[0].bytes ? 1 : 0;
    p->sealed = true;
    return BS_OK;
}

static void drop_span(bsi_pool *p, size_t i)
{
    memmove(p->free + i, p->free + i + 1, (p->n_free - i - 1) * sizeof *p->free);
    p->n_free--;
}

bs_status bsi_arena_take(bsi_pool *p, size_t bytes, bsi_addr *out)
{
    size_t need = bsi_round_up(BSI_MAX(bytes, (size_t)1), ALIGN), best = 0;
    if (!p->sealed)
        return bsi_fail(BS_STATE, "an activation is asked before the pool was sealed (engine:seal())");
    /* The lowest range that is large enough. Any other rule that depends on the calls alone would
       do; what must not change is that the dry run and the real run follow the same one. */
    for (size_t i = 0; i < p->n_free; i++) {
        span *s = &p->free[i];
        if (s->bytes < need || s->bytes < bytes) { /* rounding up wraps close to SIZE_MAX */
            best = BSI_MAX(best, s->bytes);
            continue;
        }
        *out = (bsi_addr){p->mem, s->off};
        s->off += need;
        s->bytes -= need;
        size_t end = s->off - p->fixed;
        if (s->bytes == 0)
            drop_span(p, i);
        p->now += need;
        /* The highest end, not the largest sum in use: holes count. An arena of exactly `peak`
           bytes can serve this sequence of calls, a smaller one cannot. */
        p->peak = BSI_MAX(p->peak, end);
        return BS_OK;
    }
    return bsi_fail(
        BS_DEVMEM,
        "an activation of %zu bytes does not fit: %zu bytes in use, largest free range %zu of "
        "%zu; raise vram= or lower micro_tokens=",
        BSI_MAX(need, bytes), p->now, best, p->bytes - p->fixed);
}

/* The range must be one that was taken: a second give of it would go unnoticed here, and two users
   would then get the same bytes. Neighbours are joined at once, so that a free range is as large as
   it can be when the next take looks at it. */
void bsi_arena_give(bsi_pool *p, bsi_addr at, size_t bytes)
{
    size_t n = bsi_round_up(BSI_MAX(bytes, (size_t)1), ALIGN), i = 0;
    while (i < p->n_free && p->free[i].off < at.off)
        i++;
    p->now -= n;
    bool below = i > 0 && p->free[i - 1].off + p->free[i - 1].bytes == at.off;
    bool above = i < p->n_free && at.off + n == p->free[i].off;
    if (below && above) {
        p->free[i - 1].bytes += n + p->free[i].bytes;
        drop_span(p, i);
    } else if (below) {
        p->free[i - 1].bytes += n;
    } else if (above) {
        p->free[i].off = at.off;
        p->free[i].bytes += n;
    } else if (reserve_spans(p, p->n_free + 1) == BS_OK) {
        memmove(p->free + i + 1, p->free + i, (p->n_free - i) * sizeof *p->free);
        p->free[i] = (span){at.off, n};
        p->n_free++;
    } /* no memory for the list entry: the range stays out of use until the pool closes */
}

void bsi_pool_stats_get(const bsi_pool *p, bsi_pool_stats *out)
{
    *out = (bsi_pool_stats){p->bounded ? p->bytes : 0, p->fixed, p->now, p->peak};
}
