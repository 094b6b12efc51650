/* SPDX-License-Identifier: Apache-2.0 */
/*
** policy.c: which slot a block goes to. bsi_policy_decide is the only place that says it; the placement
** calls it to predict and the streamer calls it when a segment is pushed, so what is predicted is what
** moves. It looks at the order of visits and at nothing that depends on time.
**
** The victim is the block whose next use is farthest (Belady 1966), never the one of the visit
** just before, so that a load overlaps it. Left alone, farthest-next-use on a cycle may settle into a
** period of several segments. Therefore a cyclic segment has a set of blocks that must be in the slots
** when it ends: what a run from empty slots ends with. They are no victims after their last use in the
** segment. Each segment then ends as the one before did, and every warm segment moves the same bytes.
*/
#include "stream/stream.h"

#include <limits.h>

#define NEVER INT64_MAX

bs_status bsi_policy_open(const bs_placement *placement, bsi_policy *out)
{
    size_t blocks = (size_t)placement->n_blocks, slots = (size_t)placement->dev_slots;
    *out = (bsi_policy){.placement = placement};
    out->in_slot = bsi_alloc(BS_TAG_HEADER, slots * sizeof *out->in_slot);
    out->last_use = bsi_alloc(BS_TAG_HEADER, slots * sizeof *out->last_use);
    out->slot_of = bsi_alloc(BS_TAG_HEADER, blocks * sizeof *out->slot_of);
    out->arrived = bsi_alloc(BS_TAG_HEADER, blocks * sizeof *out->arrived);
    if (!out->in_slot || !out->last_use || !out->slot_of || !out->arrived) {
        bsi_policy_close(out);
        return BS_NOMEM;
    }
    bsi_policy_reset(out, 0);
    return BS_OK;
}

void bsi_policy_close(bsi_policy *p)
{
    bsi_free(p->in_slot);
    bsi_free(p->last_use);
    bsi_free(p->slot_of);
    bsi_free(p->arrived);
    *p = (bsi_policy){0};
}

void bsi_policy_reset(bsi_policy *p, int64_t serial)
{
    for (int i = 0; i < p->placement->dev_slots; i++) {
        p->in_slot[i] = -1;
        p->last_use[i] = -1;
    }
    for (int b = 0; b < p->placement->n_blocks; b++)
        p->slot_of[b] = -1;
    p->last_slot = -1;
    p->next_host = 0;
    p->serial = serial;
}

typedef struct walk { /* one pass over a segment; positions count from its start */
    const bs_visit_spec *v;
    int n;
    int64_t *after;  /* [n] next use of visit i's block after i */
    int64_t *next;   /* [blocks] next use of each block, as the pass goes */
    const bool *end; /* [blocks] must be in a slot at the end; NULL: nothing must */
} walk;

static bool ends_here(const walk *w, int block) /* no more use in this segment, and wanted at its end */
{
    return w->end && w->end[block] && w->next[block] >= w->n;
}

/* There is always a victim. In the run from empty slots that chose `end`, this visit's block, the block
   of the visit before and every block that ends here (which stayed from its last use on) were in slots
   at once. So the last two kinds are fewer than the slots, whatever the slots held before. */
static int choose_slot(const bsi_policy *p, const walk *w)
{
    int best = -1;
    for (int i = 0; i < p->placement->dev_slots; i++) {
        int b = p->in_slot[i];
        if (b < 0)
            return i;
        if ((i == p->last_slot && p->placement->dev_slots > 1) || ends_here(w, b))
            continue;
        /* Equal distances (never again): by block, so that slot numbers do not matter. */
        if (best < 0 || w->next[b] > w->next[p->in_slot[best]] ||
            (w->next[b] == w->next[p->in_slot[best]] && b > p->in_slot[best]))
            best = i;
    }
    return best;
}

static void decide_one(bsi_policy *p, walk *w, int i, int64_t first_serial, bs_transfer *t)
{
    const bs_placement *placement = p->placement;
    int b = w->v[i].block;
    bool home = placement->home[b] != BS_HOME_DISK;
    *t = (bs_transfer){.block = b, .dev_slot = -1, .host_slot = -1, .slot_free_after = INT_MIN};
    if (placement->home[b] == BS_HOME_GPU) {
        t->load = !p->arrived[b];
    } else if (p->slot_of[b] >= 0) {
        t->dev_slot = p->slot_of[b];
    } else {
        int s = choose_slot(p, w);
        t->dev_slot = s;
        t->load = true;
        if (p->last_use[s] >= 0)
            t->slot_free_after = (int)(p->last_use[s] - first_serial);
        if (p->in_slot[s] >= 0)
            p->slot_of[p->in_slot[s]] = -1;
        p->in_slot[s] = b;
        p->slot_of[b] = s;
    }
    t->read = t->load && !(home && p->arrived[b]);
    /* A ram home is read into directly. Host slots take turns, read or not in time: which one a visit
       gets must not depend on when a slot happens to be free. */
    if (t->read && placement->home[b] != BS_HOME_RAM) {
        t->host_slot = p->next_host;
        p->next_host = (p->next_host + 1) % placement->read_slots;
    }
    if (home)
        p->arrived[b] = true;
    if (t->dev_slot >= 0)
        p->last_use[t->dev_slot] = p->serial;
    p->last_slot = t->dev_slot; /* -1 after a visit of a gpu home: every slot may be filled beside it */
    p->serial++;
    w->next[b] = w->after[i];
}

/* Positions beyond n are of the segment that follows: the same one, where it is cyclic. */
static void start_walk(walk *w, int blocks, bool cyclic)
{
    int64_t *first = w->next;
    for (int b = 0; b < blocks; b++)
        first[b] = NEVER;
    for (int i = w->n - 1; i >= 0; i--) {
        w->after[i] = first[w->v[i].block];
        first[w->v[i].block] = i;
    }
    for (int i = 0; i < w->n; i++) /* the last use of a block */
        if (w->after[i] == NEVER && cyclic)
            w->after[i] = w->n + first[w->v[i].block];
}

static void run_walk(bsi_policy *p, walk *w, bool cyclic, bs_transfer *out)
{
    int64_t serial = p->serial;
    start_walk(w, p->placement->n_blocks, cyclic);
    for (int i = 0; i < w->n; i++)
        decide_one(p, w, i, serial, &out[i]);
}

bs_status bsi_policy_decide(bsi_policy *p, const bs_visit_spec *v, int n, bool cyclic, bs_transfer *out)
{
    const bs_placement *placement = p->placement;
    bsi_policy empty = {0};
    walk w = {.v = v, .n = n};
    bool *end = bsi_alloc(BS_TAG_HEADER, (size_t)placement->n_blocks * sizeof *end);
    w.after = bsi_alloc(BS_TAG_HEADER, (size_t)n * sizeof *w.after);
    w.next = bsi_alloc(BS_TAG_HEADER, (size_t)placement->n_blocks * sizeof *w.next);
    bs_status st = end && w.after && w.next ? BS_OK : BS_NOMEM;
    /* A first run from empty slots finds what must be in them at the end; its transfers are
       overwritten. */
    if (st == BS_OK && cyclic && (st = bsi_policy_open(placement, &empty)) == BS_OK) {
        run_walk(&empty, &w, true, out);
        for (int i = 0; i < placement->dev_slots; i++)
            if (empty.in_slot[i] >= 0)
                end[empty.in_slot[i]] = true;
        w.end = end;
    }
    if (st == BS_OK)
        run_walk(p, &w, cyclic, out);
    bsi_policy_close(&empty);
    bsi_free(end);
    bsi_free(w.after);
    bsi_free(w.next);
    return st;
}
