/* SPDX-License-Identifier: Apache-2.0 */
/* The streamer: right bytes and predicted bytes under every placement and timing; failures; abort. */
#include "stream_fixture.h"

#include <errno.h>
#include <stdatomic.h>
#include <time.h>

static fixture fx;

static int setup(void **state)
{
    if (tmpdir_open(state) != 0)
        return -1;
    fx_open(&fx);
    return 0;
}

static int teardown(void **state)
{
    fx_close(&fx);
    return tmpdir_close(state);
}

static const bs_home all_disk[FX_BLOCKS],
    all_ram[FX_BLOCKS] = {1, 1, 1, 1, 1}, all_gpu[FX_BLOCKS] = {2, 2, 2, 2, 2},
    mixed[FX_BLOCKS] = {0, 2, 1, 0, 1}, other[FX_BLOCKS] = {2, 0, 0, 1, 2},
    no_disk[FX_BLOCKS] = {1, 2, 1, 2, 1};
static const bs_home *const mixes[] = {all_disk, all_ram, all_gpu, mixed, other, no_disk};

static void assert_clean(const run_cfg *c)
{
    const char *text;
    int n = fx_run(&fx, c, &text);
    if (n)
        print_error("%s seed %llu, %d device and %d host slots: %s\n", c->spec,
                    (unsigned long long)c->seed, c->dev_slots, c->host_slots, text);
    assert_int_equal(n, 0);
}

static void assert_no_violations(const bs_dev *dev)
{
    const char *text = "";
    int n = bs_dev_violations(dev, &text);
    if (n)
        fail_msg("%d violations: %s", n, text);
}

static void test_placements(void **state)
{
    (void)state;
    for (size_t m = 0; m < BSI_COUNT(mixes); m++)
        for (int dev = 1; dev <= 4; dev++)
            for (int host = 1; host <= 3; host++)
                for (int io = 0; io < 2; io++)
                    assert_clean(&(run_cfg){.spec = (dev + host) % 2 ? "cpu" : "check:cpu",
                                            .home = mixes[m],
                                            .dev_slots = dev,
                                            .host_slots = host,
                                            .io = io ? "auto" : "pool",
                                            .request = 4096u * (unsigned)host});
}

static void test_no_host_slots(void **state)
{
    (void)state;
    const bs_home *const need_none[] = {all_ram, all_gpu, no_disk};
    for (size_t m = 0; m < BSI_COUNT(need_none); m++)
        for (int dev = 1; dev <= 2; dev++)
            assert_clean(&(run_cfg){.spec = "check:cpu", .home = need_none[m], .dev_slots = dev});
    assert_clean(&(run_cfg){.spec = "cpu", .home = all_gpu}); /* no slots at all */
}

static void test_jitter(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 50; seed++)
        assert_clean(&(run_cfg){.spec = seed % 2 ? "check:cpu" : "cpu",
                                .seed = seed,
                                .jitter_us = 40,
                                .home = mixes[seed % BSI_COUNT(mixes)],
                                .dev_slots = 1 + (int)(seed % 4),
                                .host_slots = 1 + (int)(seed / 2 % 3),
                                .io = seed % 3 ? "pool" : "auto",
                                .request = 8192});
}

static int64_t half(void *ud, const bsi_read *r, int64_t real)
{
    atomic_int *calls = ud;
    (void)r;
    if (atomic_fetch_add(calls, 1) % 3 == 0)
        return -EINTR;
    return real > 8192 ? real / 2 / 4096 * 4096 : real;
}

static void test_odd_reads(void **state)
{
    (void)state;
    atomic_int calls = 0;
    const bsi_aio_fault faults[] = {{.reverse = true, .delay_us = 200},
                                    {.result = half, .ud = &calls},
                                    {.result = half, .ud = &calls, .reverse = true, .delay_us = 100},
                                    {.refuse_uring = true}};
    for (size_t i = 0; i < BSI_COUNT(faults); i++)
        for (int k = 0; k < 4; k++)
            assert_clean(&(run_cfg){.spec = k % 2 ? "check:cpu" : "cpu",
                                    .seed = (uint64_t)k,
                                    .home = k < 2 ? mixed : all_disk,
                                    .dev_slots = 2,
                                    .host_slots = 1 + k % 3,
                                    .io = k % 2 ? "auto" : "pool",
                                    .request = 8192,
                                    .fault = &faults[i],
                                    .no_direct = k == 3});
    assert_true(calls > 0);
}

static void test_dry(void **state)
{
    (void)state;
    for (size_t m = 0; m < BSI_COUNT(mixes); m++) {
        run r;
        run_open(&r, &fx,
                 &(run_cfg){.spec = "meta", .home = mixes[m], .dev_slots = 2, .host_slots = 2});
        for (int k = 0; k < FX_SEGMENTS; k++) {
            bs_stream_stats before, after;
            bs_edge_bytes want;
            bs_stream_stats_get(r.s, &before);
            OK(run_segment(&r, &fx));
            bs_stream_stats_get(r.s, &after);
            bs_placement_bytes(r.placement, k > 0, &want);
            assert_moved(&before, &after, &want);
            assert_int_equal(after.requests, 0);
        }
        run_close(&r);
    }
}

/* Every named wait of the streamer is needed: without it the check device finds a violation and names
 * it. */
static void test_waits_are_needed(void **state)
{
    (void)state;
    const char *const *site;
    char streamer[16][64];
    int n = bsi_wait_sites(&site), mine = 0;
    for (int i = 0; i < n; i++)
        if (strncmp(site[i], "streamer:", 9) == 0)
            snprintf(streamer[mine++], sizeof streamer[0], "%s", site[i]);
    assert_int_equal(mine, 2);
    for (int i = 0; i < 2 * mine; i++) {
        const char *text, *drop = streamer[i / 2];
        /* A dropped wait is a real race on a device that executes: nothing that ThreadSanitizer should
         * see. */
        const char *spec = i % 2 && !BS_TSAN ? "check:cpu" : "check:meta";
        run_cfg c = {.spec = spec, .drop = drop, .home = mixed, .dev_slots = 2, .host_slots = 2};
        assert_true(fx_run(&fx, &c, &text) > 0);
        if (!strstr(text, drop))
            fail_msg("'%s' is not named in: %s", drop, text);
    }
}

/* ---- failures and abort ---- */

static void test_abort(void **state)
{
    (void)state;
    for (size_t m = 0; m < BSI_COUNT(mixes); m++) {
        run r;
        bs_visit v;
        bs_edge_bytes want;
        bs_stream_stats before, after;
        bsi_aio_fault late = {.delay_us = 300};
        run_open(&r, &fx,
                 &(run_cfg){.spec = "check:cpu",
                            .home = mixes[m],
                            .dev_slots = 2,
                            .host_slots = 2,
                            .fault = &late});
        OK(bs_stream_push(r.s, fx.program, fx.n_visits, true));
        for (int i = 0; i < 4; i++)
            OK(run_visit(&r, &fx, &v));
        bs_cancel(true); /* the drain does not stop at it */
        OK(bs_stream_abort(r.s));
        bs_cancel(false);
        assert_int_equal(bs_stream_next(r.s, &v), BS_STATE);
        assert_null(r.e->binding.base[v.spec.block].mem);
        r.next = 0;
        /* The same step again, then a warm one. */
        OK(run_segment(&r, &fx));
        bs_stream_stats_get(r.s, &before);
        OK(run_segment(&r, &fx));
        bs_stream_stats_get(r.s, &after);
        bs_placement_bytes(r.placement, true, &want);
        assert_moved(&before, &after, &want);
        assert_int_equal(run_wrong(&r, &fx), 0);
        assert_no_violations(r.dev);
        run_close(&r);
    }
}

typedef struct broken {
    atomic_int left; /* reads that still succeed */
    uint64_t offset;
} broken;

static int64_t fail_one(void *ud, const bsi_read *r, int64_t real)
{
    broken *b = ud;
    if (atomic_fetch_sub(&b->left, 1) != 0)
        return real;
    b->offset = r->offset;
    return -EIO;
}

static void test_failing_read(void **state)
{
    (void)state;
    const char *const io[] = {"pool", "auto"};
    for (int k = 0; k < 24; k++) {
        run r;
        broken bad = {.left = 3 * k};
        bsi_aio_fault fault = {.result = fail_one, .ud = &bad};
        run_open(&r, &fx,
                 &(run_cfg){.spec = "check:cpu",
                            .home = mixes[k % 6],
                            .dev_slots = 2,
                            .host_slots = 2,
                            .io = io[k % 2],
                            .request = 4096,
                            .fault = &fault});
        bs_status st = run_segment(&r, &fx);
        if (st == BS_OK) { /* fewer reads than that */
            run_close(&r);
            continue;
        }
        char offset[32];
        snprintf(offset, sizeof offset, "%llu", (unsigned long long)bad.offset);
        assert_int_equal(st, BS_IO);
        ASSERT_ERROR("block 'layer.");
        ASSERT_ERROR(".bin'");
        ASSERT_ERROR(offset);
        bs_visit v;
        assert_int_equal(bs_stream_next(r.s, &v), BS_IO); /* until abort */
        OK(bs_stream_abort(r.s));
        r.next = 0;
        OK(run_segment(&r, &fx));
        assert_int_equal(run_wrong(&r, &fx), 0);
        assert_no_violations(r.dev);
        run_close(&r);
    }
}

static void test_changed_file(void **state)
{
    (void)state;
    run r;
    run_open(&r, &fx, &(run_cfg){.spec = "cpu", .home = mixed, .dev_slots = 2, .host_slots = 2});
    OK(run_segment(&r, &fx));
    assert_int_equal(truncate(fx_path(1), FX_FILE / 2), 0);
    assert_int_equal(run_segment(&r, &fx), BS_IO);
    ASSERT_ERROR(fx_path(1));
    run_close(&r);
    fx_close(&fx); /* for the tests that follow */
    fx_open(&fx);
}

/* A device call that fails, wherever it is: an error, no hang, nothing left. */
static void test_lost_device(void **state)
{
    (void)state;
    size_t slots = bs_host_bytes(BS_TAG_SLOT), homes = bs_host_bytes(BS_TAG_HOME);
    bool done = false;
    for (uint64_t n = 1; !done; n += n < 40 ? 1 : 9) {
        bs_dev_cfg dc = {.threads = 1, .fail_call = n};
        bs_placement_cfg pc = {fx.m, mixed, 2, 2, fx.program, fx.n_visits, true};
        run r = {.slot = fx_slot(&fx)};
        bs_status st;
        OK(bs_placement_new(&pc, &r.placement));
        OK(bs_dev_open("check:cpu", &dc, &r.dev));
        size_t results = r.slot * (size_t)fx.n_visits;
        bs_engine_cfg ec = {.dev = r.dev,
                            .pool_bytes = results + bs_placement_device_bytes(r.placement),
                            .n_blocks = FX_BLOCKS};
        if ((st = bs_engine_open(&ec, &r.e)) == BS_OK) {
            OK(bsi_pool_region(r.e->pool, "results", results, &r.seen));
            st = bs_stream_open(&(bs_stream_cfg){.engine = r.e, .placement = r.placement}, &r.s);
            if (st == BS_OK)
                st = run_segment(&r, &fx);
            if (st == BS_OK)
                st = bs_engine_wait_all(r.e);
            if (st != BS_OK && r.s) {
                bs_status drained = bs_stream_abort(r.s);
                assert_true(drained == BS_OK || drained == st);
            }
        }
        done = st == BS_OK;
        assert_true(done || bs_error()->msg[0]);
        run_close(&r);
        assert_int_equal(bs_host_bytes(BS_TAG_SLOT), slots);
        assert_int_equal(bs_host_bytes(BS_TAG_HOME), homes);
        assert_true(n < 2000);
    }
}

/* Host memory that runs out while a stream is opened or a segment is pushed. */
static void test_no_memory(void **state)
{
    (void)state;
    bs_placement *placement;
    bs_placement_cfg pc = {fx.m, mixed, 2, 2, fx.program, fx.n_visits, true};
    OK(bs_placement_new(&pc, &placement));
    for (uint64_t n = 1;; n++) {
        bs_placement *p;
        bsi_alloc_fail_nth(n);
        bs_status st = bs_placement_new(&pc, &p);
        bsi_alloc_fail_nth(0);
        if (st == BS_OK) {
            bs_placement_free(p);
            break;
        }
        assert_int_equal(st, BS_NOMEM);
    }
    bs_dev *dev;
    OK(bs_dev_open("cpu", NULL, &dev));
    bs_engine_cfg ec = {
        .dev = dev, .pool_bytes = bs_placement_device_bytes(placement), .n_blocks = FX_BLOCKS};
    for (uint64_t n = 1;; n++) {
        bs_engine *e = NULL;
        bs_stream *s = NULL;
        bs_visit v;
        bsi_alloc_fail_nth(n);
        bs_status st = bs_engine_open(&ec, &e);
        bs_stream_cfg sc = {.engine = e, .placement = placement, .io = {.engine = "pool"}};
        if (st == BS_OK)
            st = bs_stream_open(&sc, &s);
        if (st == BS_OK)
            st = bs_stream_push(s, fx.program, fx.n_visits, true);
        for (int i = 0; st == BS_OK && i < fx.n_visits; i++)
            st = bs_stream_next(s, &v);
        bsi_alloc_fail_nth(0);
        bs_stream_close(s);
        bs_engine_close(e);
        if (st == BS_OK)
            break;
        assert_true(st == BS_NOMEM || st == BS_DEVMEM);
        assert_true(n < 5000);
    }
    bs_dev_close(dev);
    bs_placement_free(placement);
}

static void test_misuse(void **state)
{
    (void)state;
    run r;
    bs_visit v;
    bs_stream *second;
    run_open(&r, &fx, &(run_cfg){.spec = "cpu", .home = mixed, .dev_slots = 2, .host_slots = 2});
    assert_int_equal(bs_stream_next(r.s, &v), BS_STATE);
    assert_int_equal(bs_stream_end_visit(r.s), BS_STATE);
    assert_int_equal(bs_stream_push(r.s, &(bs_visit_spec){.block = FX_BLOCKS}, 1, true), BS_ARG);
    ASSERT_ERROR("block 5");
    bs_stream_cfg sc = {.engine = r.e, .placement = r.placement};
    assert_int_equal(bs_stream_open(&sc, &second), BS_STATE);
    OK(bs_stream_push(r.s, NULL, 0, true));
    run_close(&r);
}

static void test_cancel(void **state)
{
    (void)state;
    run r;
    bs_visit v;
    bsi_aio_fault late = {.delay_us = 200000}; /* the first visit has to wait */
    run_open(
        &r, &fx,
        &(run_cfg){.spec = "cpu", .home = all_disk, .dev_slots = 2, .host_slots = 2, .fault = &late});
    OK(bs_stream_push(r.s, fx.program, fx.n_visits, true));
    bs_cancel(true);
    bs_status st = bs_stream_next(r.s, &v);
    bs_cancel(false);
    assert_int_equal(st, BS_CANCELLED);
    ASSERT_ERROR("'layer.0'");
    OK(bs_stream_next(r.s, &v)); /* only the wait had ended */
    assert_int_equal(v.serial, 0);
    OK(bs_stream_abort(r.s));
    run_close(&r);
}

/* ---- overlap and residency ---- */

static void test_prefetch_across_segments(void **state)
{
    (void)state;
    run r;
    bs_visit v;
    bsi_aio_fault late = {.delay_us = 20000};
    run_open(
        &r, &fx,
        &(run_cfg){.spec = "cpu", .home = all_disk, .dev_slots = 2, .host_slots = 2, .fault = &late});
    OK(bs_stream_push(r.s, fx.program, fx.n_visits, true));
    for (int i = 0; i < fx.n_visits; i++)
        OK(run_visit(&r, &fx, &v));
    assert_int_equal(bsi_aio_in_flight(r.s->aio), 0); /* never further than what was pushed */
    OK(bs_stream_push(r.s, fx.program, fx.n_visits, true));
    OK(bs_engine_wait_all(
        r.e)); /* the host slots are free: the next segment's reads begin while its last visit is current */
    bsi_stream_pump(r.s);
    assert_int_equal(r.s->begun, fx.n_visits);
    assert_int_equal(r.s->ended, fx.n_visits - 1);
    assert_true(bsi_aio_in_flight(r.s->aio) > 0);
    assert_true(r.s->next_read > fx.n_visits);
    for (int i = 0; i < fx.n_visits; i++)
        OK(run_visit(&r, &fx, &v));
    OK(bs_stream_end_visit(r.s));
    assert_int_equal(run_wrong(&r, &fx), 0);
    bs_stream_stats s;
    bs_stream_stats_get(r.s, &s);
    assert_true(s.disk_busy_s >= 0.02 && s.stall_disk_s > 0);
    run_close(&r);
}

static void test_where(void **state)
{
    (void)state;
    run r;
    bs_visit v;
    bs_stream_stats s;
    run_open(&r, &fx, &(run_cfg){.spec = "cpu", .home = mixed, .dev_slots = 2, .host_slots = 1});
    for (int b = 0; b < FX_BLOCKS; b++)
        assert_string_equal(bs_stream_where(r.s, b), "disk");
    OK(bs_stream_push(r.s, fx.program, fx.n_visits, true));
    OK(run_visit(&r, &fx, &v));
    assert_string_equal(bs_stream_where(r.s, 0), "slot");
    for (int i = 1; i < fx.n_visits; i++)
        OK(run_visit(&r, &fx, &v));
    OK(bs_stream_end_visit(r.s));
    assert_string_equal(bs_stream_where(r.s, 0), "slot");
    assert_string_equal(bs_stream_where(r.s, 1), "gpu");
    assert_string_equal(bs_stream_where(r.s, 3), "disk");
    assert_string_equal(bs_stream_where(r.s, 4), "ram");
    bs_stream_stats_get(r.s, &s);
    assert_int_equal(s.resident_host, 2);
    assert_int_equal(s.resident_device, 3);
    assert_int_equal(s.host_bytes, bs_placement_host_bytes(r.placement));
    assert_true(strncmp(s.io, "uring+", 6) == 0 || strncmp(s.io, "pool+", 5) == 0);
    run_close(&r);
}

/* The address of a gpu home is told once a visit has ordered its filling before the compute queue. */
static void test_home(void **state)
{
    (void)state;
    run r;
    bs_visit v;
    bs_place at;
    run_open(&r, &fx, &(run_cfg){.spec = "cpu", .home = mixed, .dev_slots = 2, .host_slots = 1});
    assert_int_equal(bs_stream_home(r.s, 0, 0, &at), BS_STATE); /* home disk */
    assert_int_equal(bs_stream_home(r.s, 1, 0, &at), BS_STATE); /* not visited */
    ASSERT_ERROR("has not been visited");
    assert_int_equal(bs_stream_home(r.s, 1, 99, &at), BS_ARG);
    assert_int_equal(bs_stream_home(r.s, FX_BLOCKS, 0, &at), BS_ARG);
    OK(bs_stream_push(r.s, fx.program, fx.n_visits, true));
    for (int i = 0; i < fx.n_visits; i++)
        OK(run_visit(&r, &fx, &v));
    OK(bs_stream_end_visit(r.s));
    const bs_tensor_info *t = bs_manifest_tensor(fx.m, 1, 1);
    char *got = malloc(t->bytes), *want = malloc(t->bytes);
    OK(bs_stream_home(r.s, 1, 1, &at));
    assert_int_equal(at.dtype, t->dtype);
    assert_int_equal(at.channels, t->dim[t->ndim - 1]);
    assert_int_equal((uint64_t)(at.rows * at.channels) * bs_dtype_size(at.dtype), t->bytes);
    OK(bsi_engine_read(r.e, bsi_place_addr(&at), t->bytes, got));
    FILE *f = fopen(fx_path(t->file), "rb");
    assert_non_null(f);
    assert_int_equal(fseek(f, (long)t->file_offset, SEEK_SET), 0);
    assert_int_equal(fread(want, 1, t->bytes, f), t->bytes);
    fclose(f);
    assert_memory_equal(got, want, t->bytes);
    OK(bs_stream_abort(r.s)); /* a filled home stays */
    OK(bs_stream_home(r.s, 1, 1, &at));
    free(got);
    free(want);
    run_close(&r);
}

static void test_nothing_is_kept(void **state)
{
    (void)state;
    size_t before[BS_TAG_COUNT];
    int fds = tmpdir_fds();
    for (int t = 0; t < BS_TAG_COUNT; t++)
        before[t] = bs_host_bytes((bs_tag)t);
    assert_clean(
        &(run_cfg){.spec = "cpu", .home = mixed, .dev_slots = 2, .host_slots = 2, .no_direct = true});
    for (int t = 0; t < BS_TAG_COUNT; t++)
        assert_int_equal(bs_host_bytes((bs_tag)t), before[t]);
    assert_int_equal(tmpdir_fds(), fds);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_placements),
        cmocka_unit_test(test_no_host_slots),
        cmocka_unit_test(test_jitter),
        cmocka_unit_test(test_odd_reads),
        cmocka_unit_test(test_dry),
        cmocka_unit_test(test_waits_are_needed),
        cmocka_unit_test(test_abort),
        cmocka_unit_test(test_failing_read),
        cmocka_unit_test(test_changed_file),
        cmocka_unit_test(test_lost_device),
        cmocka_unit_test(test_no_memory),
        cmocka_unit_test(test_misuse),
        cmocka_unit_test(test_cancel),
        cmocka_unit_test(test_prefetch_across_segments),
        cmocka_unit_test(test_where),
        cmocka_unit_test(test_home),
        cmocka_unit_test(test_nothing_is_kept),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
