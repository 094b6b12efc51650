/* SPDX-License-Identifier: Apache-2.0 */
/*
** placement.c: homes and slots for a program, checked, sized and counted. What moves is what the policy
** decides for the program (policy.c), once from empty slots and once as it goes on from there; the
** streamer asks the same policy when visits are pushed, so what is predicted here is what moves.
** Immutable once made.
*/
#include "stream/stream.h"

#include <string.h>

static void count_bytes(const bs_placement *p, const bs_transfer *t, bs_edge_bytes *out)
{
    *out = (bs_edge_bytes){0};
    for (int i = 0; i < p->n_visits; i++) {
        const bs_block_info *b = bs_manifest_block(p->manifest, t[i].block);
        if (t[i].read) {
            out->disk_payload += b->payload_bytes;
            out->disk_read += bsi_manifest_read_bytes(p->manifest, t[i].block);
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

/* One size of slot a tier, that of the largest block that may come there: any block goes to any slot,
   so the policy need not look at sizes. gpu homes are read through a host slot, so they count for its
   size. */
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
    p->read_slots = p->host_slots ? p->host_slots : any_gpu;
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
                "placement: block '%s' has its home on disk and needs a host slot, host_slots is 0; give "
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

/* The first segment begins with empty slots and homes (cold). The second one goes on from there, and
   every later one moves what it moves (warm): see policy.c. */
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
