/* SPDX-License-Identifier: Apache-2.0 */
/* The policy: what it moves on known walks, that it settles at once, and what it refuses. */
#include "stream_fixture.h"

#include <limits.h>

enum { MANY = 34 };

static bs_manifest *many; /* MANY one-tensor blocks of unequal size */

static int setup(void **state)
{
    int file, at;
    if (tmpdir_open(state) != 0)
        return -1;
    fx_write(0, FX_FILE);
    OK(bs_manifest_new(&many));
    OK(bs_manifest_add_file(many, fx_path(0), &file));
    for (int b = 0; b < MANY; b++) {
        char name[16];
        int64_t n = 64 + b;
        snprintf(name, sizeof name, "b%d", b);
        OK(bs_manifest_add_block(many, name, "layer", &at));
        OK(bs_manifest_add_tensor(many, b, "w", BS_DTYPE_F32, 1, &n, file, (uint64_t)b * 600, &at));
    }
    OK(bs_manifest_finish(many));
    return 0;
}

static int teardown(void **state)
{
    bs_manifest_free(many);
    return tmpdir_close(state);
}

static bs_home homes[MANY];

static bs_placement *plan_of(const bs_visit_spec *v, int n, int slots, bool cyclic)
{
    bs_placement *p = NULL;
    bs_placement_cfg cfg = {many, homes, slots, 2, v, n, cyclic};
    OK(bs_placement_new(&cfg, &p));
    return p;
}

static uint64_t loads(const bs_placement *p, bool warm)
{
    bs_edge_bytes b;
    bs_placement_bytes(p, warm, &b);
    return b.loads;
}

static void test_zigzag(void **state)
{
    (void)state;
    memset(homes, 0, sizeof homes);
    bs_visit_spec v[64] = {0};
    for (int i = 0; i < 32; i++) {
        v[i].block = i;
        v[63 - i].block = i;
    }
    /* One slot: both turn-arounds stay. C slots: 2(L - C). */
    const int slots[] = {1, 2, 8, 16, 24};
    for (size_t i = 0; i < BSI_COUNT(slots); i++) {
        bs_placement *p = plan_of(v, 64, slots[i], true);
        assert_int_equal(loads(p, true), 2 * (32 - slots[i]));
        assert_int_equal(loads(p, false), 32 + 32 - slots[i]);
        bs_placement_free(p);
    }
    bs_placement *p = plan_of(v, 64, 40, true);
    assert_int_equal(loads(p, false), 32);
    assert_int_equal(loads(p, true), 0);
    bs_placement_free(p);
}

static void test_one_direction(void **state)
{
    (void)state;
    memset(homes, 0, sizeof homes);
    bs_visit_spec v[32] = {0};
    for (int i = 0; i < 32; i++)
        v[i].block = i;
    const int slots[] = {2, 8, 16};
    for (size_t i = 0; i < BSI_COUNT(slots); i++) {
        bs_placement *p = plan_of(v, 32, slots[i], true);
        /* An optimal cache needs 2(L - C) + 2 over two passes, a recency one 2L. */
        assert_true(loads(p, true) <= (uint64_t)(32 - slots[i] + 2));
        bs_placement_free(p);
    }
}

static uint32_t rnd(uint32_t *s)
{
    *s = *s * 1664525u + 1013904223u;
    return *s >> 8;
}

/* Whatever was in the slots before, all warm segments are alike and equal the placement's. */
static void test_settles(void **state)
{
    (void)state;
    uint32_t seed = 7;
    for (int round = 0; round < 3000; round++) {
        bs_visit_spec v[24] = {0}, other[6] = {0};
        int n = 1 + (int)(rnd(&seed) % 24), blocks = 1 + (int)(rnd(&seed) % 9),
            slots = 1 + (int)(rnd(&seed) % 5);
        bs_transfer t[24];
        bsi_policy policy;
        for (int b = 0; b < MANY; b++)
            homes[b] = rnd(&seed) % 4 == 0 ? (bs_home)(rnd(&seed) % 3) : BS_HOME_DISK;
        for (int i = 0; i < n; i++)
            v[i].block = (int)(rnd(&seed) % (unsigned)blocks);
        for (int i = 0; i < 6; i++)
            other[i].block = 9 + (int)(rnd(&seed) % 9);
        bs_placement *p = plan_of(v, n, slots, true);
        OK(bsi_policy_open(p, &policy));
        if (round % 2)
            OK(bsi_policy_decide(&policy, other, 6, false, t)); /* an evaluation walk before it */
        for (int k = 0; k < 6; k++) {
            OK(bsi_policy_decide(&policy, v, n, true, t));
            int last = -1;
            for (int i = 0; i < n; i++) {
                const bs_transfer *w = bs_placement_transfer(p, k > 0, i);
                assert_int_equal(t[i].block, v[i].block);
                if (k > 0 || round % 2 == 0) {
                    assert_int_equal(t[i].load, w->load);
                    assert_int_equal(t[i].read, w->read);
                }
                if (k > 0 && slots > 1 && t[i].load && t[i].dev_slot >= 0)
                    assert_int_not_equal(t[i].dev_slot, last);
                if (t[i].load && t[i].slot_free_after != INT_MIN)
                    assert_true(t[i].slot_free_after < i);
                last = t[i].dev_slot;
            }
        }
        bsi_policy_close(&policy);
        bs_placement_free(p);
    }
}

static void test_sizes(void **state)
{
    (void)state;
    bs_visit_spec v[MANY] = {0};
    uint64_t gpu = 0, ram = 0, raw = 0, slot = 0;
    for (int b = 0; b < MANY; b++) {
        const bs_block_info *info = bs_manifest_block(many, b);
        homes[b] = (bs_home)(b % 3);
        v[b].block = b;
        if (homes[b] == BS_HOME_GPU)
            gpu += bsi_round_up(info->slot_bytes, 256);
        else
            slot = BSI_MAX(slot, bsi_round_up(info->slot_bytes, 256));
        if (homes[b] == BS_HOME_RAM)
            ram += info->raw_bytes;
        else
            raw = BSI_MAX(raw, bsi_round_up(info->raw_bytes, 4096));
    }
    bs_placement *p = plan_of(v, MANY, 3, true);
    assert_int_equal(bs_placement_device_bytes(p), 3 * slot + gpu);
    assert_int_equal(bs_placement_host_bytes(p), 2 * raw + ram);
    assert_int_equal(bs_placement_slot_bytes(p), slot);
    assert_int_equal(bs_placement_host_slot_bytes(p), raw);
    assert_int_equal(bs_placement_visits(p), MANY);
    bs_edge_bytes cold, warm;
    bs_placement_bytes(p, false, &cold);
    bs_placement_bytes(p, true, &warm);
    assert_int_equal(cold.reads, MANY);        /* everything arrives once */
    assert_true(warm.reads <= (MANY + 2) / 3); /* then only disk homes */
    assert_null(bs_placement_transfer(p, true, MANY));
    bs_placement_free(p);
}

static void refused(bs_placement_cfg cfg, bs_status st, const char *part)
{
    bs_placement *p = NULL;
    assert_int_equal(bs_placement_new(&cfg, &p), st);
    ASSERT_ERROR(part);
    assert_null(p);
}

static void test_refused(void **state)
{
    (void)state;
    memset(homes, 0, sizeof homes);
    bs_visit_spec v[2] = {{.block = 0}, {.block = MANY}};
    bs_placement_cfg good = {many, homes, 1, 1, v, 1, true}, cfg = good;
    cfg.n_visits = 2;
    refused(cfg, BS_ARG, "visit 1 is of block 34");
    cfg = good, cfg.dev_slots = 0;
    refused(cfg, BS_ARG, "block 'b0' has its home in disk and needs a device slot");
    cfg = good, cfg.host_slots = 0;
    refused(cfg, BS_ARG, "block 'b0' has its home on disk and needs a host slot");
    cfg = good, cfg.dev_slots = -1;
    refused(cfg, BS_ARG, "dev_slots -1");
    cfg = good, cfg.home = NULL;
    refused(cfg, BS_ARG, "home");
    homes[3] = (bs_home)7;
    refused(good, BS_ARG, "block 'b3' has home 7");
    for (int b = 0; b < MANY; b++)
        homes[b] = BS_HOME_GPU;
    bs_placement *p;
    cfg = good, cfg.dev_slots = 0, cfg.host_slots = 0;
    OK(bs_placement_new(&cfg, &p)); /* nothing needs a slot */
    bs_placement_free(p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_zigzag), cmocka_unit_test(test_one_direction),
        cmocka_unit_test(test_settles), cmocka_unit_test(test_sizes), cmocka_unit_test(test_refused)};
    return cmocka_run_group_tests(tests, setup, teardown);
}
