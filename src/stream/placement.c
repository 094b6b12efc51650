/* SPDX-License-Identifier: Apache-2.0 */
/*
** placement.c: homes, slots and the policy. bsi_policy_decide is the only place that says which slot a block
** goes to; the placement calls it to predict and the streamer calls it when a segment is pushed, so what is
** predicted is what moves. It looks at the order of visits and at nothing that depends on time.
**
** Policy. The victim is the block whose next use is farthest (Belady 1966), never the one of the visit
** just before, so that a load overlaps it. Left alone, farthest-next-use on a cycle may settle into a
** period of several segments. Therefore a cyclic segment has a set of blocks that must be in the slots
** when it ends: what a run from empty slots ends with. They are no victims after their last use in the
** segment. Each segment then ends as the one before did, and every warm segment moves the same bytes.
*/
#include "stream/stream.h"

#include <limits.h>
#include <string.h>

#define NEVER INT64_MAX

/* ---- policy ---- */

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

static bool needs_staging(const bs_placement *placement, int block)
{
    return placement->home[block] != BS_HOME_RAM;
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
    if (t->read && needs_staging(placement, b)) {
        t->host_slot = p->next_host;
        p->next_host = (p->next_host + 1) % placement->staging;
    }
    if (home)
        p->arrived[b] = true;
    if (t->dev_slot >= 0)
        p->last_use[t->dev_slot] = p->serial;
    p->last_slot = t->dev_slot;
    p->serial++;
    w->next[b] = w->after[i];
}

static void start_walk(walk *w, int blocks, bool cyclic)
{
    int64_t *first = w->next;
    for (int b = 0; b < blocks; b++)
        first[b] = NEVER;
    for (int i = w->n - 1; i >= 0; i--) {
        w->after[i] = first[w->v[i].block];
        first[w->v[i].block] = i;
    }
    for (int i = 0; i < w->n; i++) /* the last use of a block: the same segment follows */
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

/* ---- placement ---- */

uint64_t bsi_read_bytes(const bs_manifest *m, int block)
{
    uint64_t sum = 0;
    for (int x = 0; x < bs_manifest_block(m, block)->n_extents; x++)
        sum += bsi_manifest_extent(m, block, x)->length;
    return sum;
}

static void count_bytes(const bs_placement *p, const bs_transfer *t, bs_edge_bytes *out)
{
    *out = (bs_edge_bytes){0};
    for (int i = 0; i < p->n_visits; i++) {
        const bs_block_info *b = bs_manifest_block(p->manifest, t[i].block);
        if (t[i].read) {
            out->disk_payload += b->payload_bytes;
            out->disk_read += bsi_read_bytes(p->manifest, t[i].block);
            out->reads++;
        }
        if (t[i].load) {
            out->link += b->payload_bytes;
            out->loads++;
        }
    }
}

static bs_status add(uint64_t *sum, uint64_t n, const char *block)
{
    if (__builtin_add_overflow(*sum, n, sum))
        return bsi_fail(BS_ARG,
                        "placement: the sizes of the blocks up to '%s' add up to more than 2^64 bytes",
                        block);
    return BS_OK;
}

static bs_status size_tiers(bs_placement *p)
{
    uint64_t gpu = 0, ram = 0;
    bool any_gpu = false;
    size_t align = BSI_MAX(bs_manifest_alignment(p->manifest), (size_t)BSI_READ_ALIGN);
    for (int i = 0; i < p->n_blocks; i++) {
        const bs_block_info *b = bs_manifest_block(p->manifest, i);
        if (p->home[i] == BS_HOME_GPU) {
            any_gpu = true;
            BSI_TRY(add(&gpu, bsi_round_up(b->slot_bytes, 256), b->name));
        } else {
            p->slot_bytes = BSI_MAX(p->slot_bytes, bsi_round_up(b->slot_bytes, 256));
        }
        if (p->home[i] == BS_HOME_RAM)
            BSI_TRY(add(&ram, b->raw_bytes, b->name));
        else
            p->host_slot_bytes = BSI_MAX(p->host_slot_bytes, bsi_round_up(b->raw_bytes, align));
    }
    p->staging = p->host_slots ? p->host_slots : any_gpu;
    if (__builtin_mul_overflow(p->slot_bytes, (uint64_t)p->dev_slots, &p->device_bytes) ||
        __builtin_mul_overflow(p->host_slot_bytes, (uint64_t)p->host_slots, &p->host_bytes))
        return bsi_fail(
            BS_ARG,
            "placement: %d device slots of %llu bytes and %d host slots of %llu bytes are too many",
            p->dev_slots, (unsigned long long)p->slot_bytes, p->host_slots,
            (unsigned long long)p->host_slot_bytes);
    BSI_TRY(add(&p->device_bytes, gpu, "gpu homes"));
    return add(&p->host_bytes, ram, "ram homes");
}

static bs_status check_slots(const bs_placement_cfg *cfg)
{
    if (cfg->dev_slots < 0 || cfg->host_slots < 0)
        return bsi_fail(BS_ARG, "placement: dev_slots %d, host_slots %d; neither can be negative",
                        cfg->dev_slots, cfg->host_slots);
    for (int i = 0; i < bs_manifest_blocks(cfg->manifest); i++) {
        const char *name = bs_manifest_block(cfg->manifest, i)->name;
        if (bs_manifest_block(cfg->manifest, i)->n_extents < 1)
            return bsi_fail(BS_STATE, "placement: block '%s' has no extents; finish the manifest first",
                            name);
        if ((unsigned)cfg->home[i] > BS_HOME_GPU)
            return bsi_fail(BS_ARG, "placement: block '%s' has home %d; homes are disk 0, ram 1, gpu 2",
                            name, (int)cfg->home[i]);
        if (cfg->home[i] != BS_HOME_GPU && cfg->dev_slots < 1)
            return bsi_fail(
                BS_ARG,
                "placement: block '%s' has its home in %s and needs a device slot, dev_slots is 0; give at "
                "least 1 (2 to overlap loads and compute)",
                name, cfg->home[i] == BS_HOME_RAM ? "ram" : "disk");
        if (cfg->home[i] == BS_HOME_DISK && cfg->host_slots < 1)
            return bsi_fail(
                BS_ARG,
                "placement: block '%s' has its home on disk and needs a staging slot, host_slots is 0; give "
                "at least 1 (2 to overlap reads and copies)",
                name);
    }
    return BS_OK;
}

static bs_status check_cfg(const bs_placement_cfg *cfg)
{
    if (!cfg->manifest || !cfg->home)
        return bsi_fail(BS_ARG, "placement: a manifest and one home per block are required");
    if (cfg->n_visits < 0 || (cfg->n_visits > 0 && !cfg->program))
        return bsi_fail(BS_ARG, "placement: a program of %d visits is not one", cfg->n_visits);
    int blocks = bs_manifest_blocks(cfg->manifest);
    for (int i = 0; i < cfg->n_visits; i++)
        if (cfg->program[i].block < 0 || cfg->program[i].block >= blocks)
            return bsi_fail(BS_ARG, "placement: visit %d is of block %d, the manifest has blocks 0..%d",
                            i, cfg->program[i].block, blocks - 1);
    return check_slots(cfg);
}

static bs_status predict(bs_placement *p, const bs_placement_cfg *cfg)
{
    bsi_policy policy;
    BSI_TRY(bsi_policy_open(p, &policy));
    bs_status st = BS_OK;
    for (int warm = 0; st == BS_OK && warm < 2; warm++) {
        st = bsi_policy_decide(&policy, cfg->program, cfg->n_visits, cfg->cyclic, p->transfer[warm]);
        if (st == BS_OK)
            count_bytes(p, p->transfer[warm], &p->bytes[warm]);
    }
    bsi_policy_close(&policy);
    return st;
}

bs_status bs_placement_new(const bs_placement_cfg *cfg, bs_placement **out)
{
    BSI_TRY(check_cfg(cfg));
    bs_placement *p = bsi_alloc(BS_TAG_HEADER, sizeof *p);
    if (!p)
        return BS_NOMEM;
    p->manifest = cfg->manifest;
    p->n_blocks = bs_manifest_blocks(cfg->manifest);
    p->n_visits = cfg->n_visits;
    p->dev_slots = cfg->dev_slots;
    p->host_slots = cfg->host_slots;
    p->home = bsi_alloc(BS_TAG_HEADER, (size_t)p->n_blocks * sizeof *p->home);
    for (int i = 0; i < 2; i++)
        p->transfer[i] = bsi_alloc(BS_TAG_HEADER, (size_t)p->n_visits * sizeof *p->transfer[i]);
    bs_status st = p->home && p->transfer[0] && p->transfer[1] ? BS_OK : BS_NOMEM;
    if (st == BS_OK) {
        memcpy(p->home, cfg->home, (size_t)p->n_blocks * sizeof *p->home);
        st = size_tiers(p);
    }
    if (st == BS_OK)
        st = predict(p, cfg);
    if (st != BS_OK) {
        bs_placement_free(p);
        return st;
    }
    *out = p;
    return BS_OK;
}

void bs_placement_free(bs_placement *p)
{
    if (!p)
        return;
    bsi_free(p->home);
    bsi_free(p->transfer[0]);
    bsi_free(p->transfer[1]);
    bsi_free(p);
}

void bs_placement_bytes(const bs_placement *p, bool warm, bs_edge_bytes *out)
{
    *out = p->bytes[warm];
}

int bs_placement_visits(const bs_placement *p)
{
    return p->n_visits;
}

const bs_transfer *bs_placement_transfer(const bs_placement *p, bool warm, int visit)
{
    return visit >= 0 && visit < p->n_visits ? &p->transfer[warm][visit] : NULL;
}

uint64_t bs_placement_device_bytes(const bs_placement *p)
{
    return p->device_bytes;
}

uint64_t bs_placement_host_bytes(const bs_placement *p)
{
    return p->host_bytes;
}

uint64_t bs_placement_slot_bytes(const bs_placement *p)
{
    return p->slot_bytes;
}

uint64_t bs_placement_host_slot_bytes(const bs_placement *p)
{
    return p->host_slot_bytes;
}
