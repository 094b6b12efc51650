/* SPDX-License-Identifier: Apache-2.0 */
/* dev.c: what every device refuses, the blocking waits, the list of wait sites, memory that runs out.
 */
#include "dev_support.h"

static bs_dev *dev_new(const char *spec)
{
    bs_dev *d;
    OK(bs_dev_open(spec, NULL, &d));
    return d;
}

static void test_open(void **state)
{
    (void)state;
    bs_dev *d;
    bs_dev_cfg cfg = {.threads = -1};
    bs_dev_props p;
    char long_name[100];
    memset(long_name, 'x', sizeof long_name);
    long_name[99] = 0;
    FAILS(bs_dev_open("gpu", NULL, &d), BS_ARG, "'check:cpu'");
    assert_null(d);
    FAILS(bs_dev_open("check:", NULL, &d), BS_ARG, "''");
    FAILS(bs_dev_open("check:check:cpu", NULL, &d), BS_ARG, "'check:cpu'");
    FAILS(bs_dev_open("cuda", NULL, &d), BS_UNSUPPORTED, "cuda");
    FAILS(bs_dev_open(NULL, NULL, &d), BS_ARG, "name");
    FAILS(bs_dev_open(long_name, NULL, &d), BS_ARG, "characters");
    FAILS(bs_dev_open("cpu", &cfg, &d), BS_ARG, "-1 threads");
    for (int i = 0; i < 4; i++) {
        const char *spec = (const char *const[]){"cpu", "meta", "check:cpu", "check:meta"}[i];
        d = dev_new(spec);
        bs_dev_props_get(d, &p);
        assert_string_equal(p.name, spec);
        assert_int_equal(p.executes, i % 2 == 0);
        assert_int_equal(p.alignment, 256);
        assert_true(p.total_bytes > 0);
        bs_dev_close(d);
    }
    bs_dev_close(NULL);
}

static void test_objects(void **state)
{
    (void)state;
    bs_dev *d = dev_new("cpu"), *other = dev_new("meta");
    bsi_queue *q = queue_new(d, "q"), *foreign_q = queue_new(other, "q");
    bsi_event *e = event_new(d), *foreign_e = event_new(other);
    bsi_mem *m = mem_new(d, BSI_MEM_DEVICE, 64), *foreign = mem_new(other, BSI_MEM_DEVICE, 64), *none;
    FAILS(bsi_copy(q, at(m, 0), at(foreign, 0), 8), BS_ARG, "source is memory of device 'meta'");
    FAILS(bsi_copy(foreign_q, at(m, 0), at(foreign, 0), 8), BS_ARG,
          "destination is memory of device 'cpu'");
    FAILS(bsi_event_record(e, foreign_q), BS_ARG, "belongs to device 'cpu'");
    FAILS(bsi_queue_wait(q, foreign_e, "front: foreign"), BS_ARG, "front: foreign: the event");
    FAILS(bsi_queue_wait(q, e, NULL), BS_ARG, "name");
    FAILS(bsi_event_record(NULL, q), BS_ARG, "no event");
    FAILS(bsi_event_query(NULL), BS_ARG, "no event");
    FAILS(bsi_fill(NULL, at(m, 0), 0, 1), BS_ARG, "no queue");
    FAILS(bsi_fill(q, (bsi_addr){NULL, 0}, 0, 1), BS_ARG, "no memory");
    FAILS(bsi_host_fn(q, NULL, NULL), BS_ARG, "no function");
    FAILS(bsi_mem_alloc(NULL, BSI_MEM_HOST, BS_TAG_MISC, 1, &none), BS_ARG, "no device");
    FAILS(bsi_mem_alloc(d, (bsi_memkind)7, BS_TAG_MISC, 1, &none), BS_ARG, "kind 7");
    bsi_mem_free(NULL);
    bsi_queue_close(NULL);
    bsi_event_close(NULL);
    bsi_mem_free(m);
    bsi_mem_free(foreign);
    bsi_event_close(e);
    bsi_event_close(foreign_e);
    bsi_queue_close(q);
    bsi_queue_close(foreign_q);
    bs_dev_close(d);
    bs_dev_close(other);
}

static void test_ranges(void **state)
{
    (void)state;
    bs_dev *d = dev_new("cpu");
    bsi_queue *q = queue_new(d, "q");
    bsi_mem *m = mem_new(d, BSI_MEM_DEVICE, 256), *h = mem_new(d, BSI_MEM_PINNED, 256);
    OK(bsi_copy(q, at(m, 256), at(h, 256), 0)); /* nothing, at the end */
    FAILS(bsi_copy(q, at(m, 257), at(h, 0), 0), BS_ARG, "offset 257");
    FAILS(bsi_copy(q, at(m, 0), at(h, 1), 256), BS_ARG, "source is 256 bytes at offset 1");
    FAILS(bsi_copy(q, at(m, 8), at(h, SIZE_MAX - 3), 8), BS_ARG, "source");
    FAILS(bsi_copy(q, at(m, 4), at(m, 0), 8), BS_ARG, "overlap");
    OK(bsi_copy(q, at(m, 8), at(m, 0), 8));
    FAILS(bsi_fill(q, at(m, 0), 256, 1), BS_ARG, "not a byte");
    bsi_kcall k = {.op = BSK_SCALE,
                   .n_args = 2,
                   .arg = {{at(m, 0), 64, BSI_READ}, {at(m, 224), 64, BSI_WRITE}},
                   .n = {16},
                   .label = "front: scale"};
    FAILS(bsi_launch(q, &k), BS_ARG, "front: scale: operand 2 is 64 bytes at offset 224");
    k.arg[1].at = at(h, 0);
    FAILS(bsi_launch(q, &k), BS_ARG, "operand 2 is host memory");
    k.arg[1] = (bsi_arg){at(m, 64), 64, BSI_WRITE};
    k.workspace = (bsi_arg){at(m, 128), 256, BSI_READWRITE};
    FAILS(bsi_launch(q, &k), BS_ARG, "the workspace is 256 bytes at offset 128");
    k.workspace.bytes = 0;
    k.arg[1] = (bsi_arg){at(m, 64), 64, 0};
    FAILS(bsi_launch(q, &k), BS_ARG, "neither read nor write");
    k.n_args = BSK_MAX_ARGS + 1;
    FAILS(bsi_launch(q, &k), BS_ARG, "operands given");
    k.op = BSK_OP_COUNT;
    FAILS(bsi_launch(q, &k), BS_ARG, "kernel number");
    FAILS(bsi_launch(q, NULL), BS_ARG, "kernel number");
    OK(bsi_host_wait_queue(q)); /* none of it hurt */
    bsi_mem_free(m);
    bsi_mem_free(h);
    bsi_queue_close(q);
    bs_dev_close(d);
}

static void test_sites(void **state)
{
    (void)state;
    static const char site[] = "front: site";
    char same[] = "front: site";
    const char *const *list;
    bs_dev *d = dev_new("meta");
    bsi_queue *q = queue_new(d, "q");
    bsi_event *e = event_new(d);
    int before = bsi_wait_sites(&list), found = 0;
    for (int i = 0; i < 3; i++)
        OK(bsi_queue_wait(q, e, site));
    OK(bsi_queue_wait(q, e, same)); /* equal text, one site */
    assert_int_equal(bsi_wait_sites(&list), before + 1);
    for (int i = 0; i < before + 1; i++)
        found += strcmp(list[i], site) == 0;
    assert_int_equal(found, 1);
    bsi_event_close(e);
    bsi_queue_close(q);
    bs_dev_close(d);
}

/* ---- blocking waits -------------------------------------------------------------------------- */

static void test_cancel(void **state)
{
    (void)state;
    for (int i = 0; i < 2; i++) {
        bs_dev *d = dev_new(i ? "check:cpu" : "cpu");
        bsi_queue *q = queue_new(d, "q");
        bsi_event *e = event_new(d);
        sem_t gate;
        gate_close(q, &gate);
        OK(bsi_event_record(e, q));
        bs_cancel(true);
        FAILS(bsi_host_wait(e), BS_CANCELLED, "cancelled while waiting");
        FAILS(bsi_host_wait_queue(q), BS_CANCELLED, "cancelled while waiting");
        bs_cancel(false);
        sem_post(&gate);
        OK(bsi_host_wait(e));
        bs_cancel(true);
        OK(bsi_host_wait(e)); /* done: nothing to wait for */
        bs_cancel(false);
        bsi_event_close(e);
        bsi_queue_close(q);
        bs_dev_close(d);
    }
}

typedef struct pump_state {
    sem_t *gate;
    bsi_queue *other;
    int calls, depth, deepest;
} pump_state;

/* Opens the gate at its third call; waits itself, for a queue that stands still now and then. */
static void pump(void *ud)
{
    pump_state *p = ud;
    p->depth++;
    p->deepest = BSI_MAX(p->deepest, p->depth);
    if (++p->calls == 3)
        sem_post(p->gate);
    OK(bsi_host_wait_queue(p->other));
    p->depth--;
}

static void test_pump_in_wait(void **state)
{
    (void)state;
    bs_dev_cfg cfg = {.jitter_us = 50, .jitter_seed = 9};
    bs_dev *d;
    OK(bs_dev_open("cpu", &cfg, &d));
    bsi_queue *q = queue_new(d, "q");
    sem_t gate;
    pump_state p = {.gate = &gate, .other = queue_new(d, "other")};
    gate_close(q, &gate);
    bsi_dev_pump_set(d, pump, &p);
    OK(bsi_host_wait_queue(q)); /* would never return without the pump */
    assert_true(p.calls >= 3);
    assert_int_equal(p.deepest, 1);
    int calls = p.calls;
    bsi_dev_pump_set(d, NULL, NULL);
    gate_close(q, &gate);
    sem_post(&gate);
    OK(bsi_host_wait_queue(q));
    assert_int_equal(p.calls, calls);
    bsi_queue_close(q);
    bsi_queue_close(p.other);
    bs_dev_close(d);
}

/* ---- memory that runs out -------------------------------------------------------------------- */

static bs_status scenario(const char *spec)
{
    bs_dev *d = NULL;
    bsi_queue *q = NULL, *r = NULL;
    bsi_event *e = NULL;
    bsi_mem *m = NULL;
    bs_dev_cfg cfg = {.threads = 2, .drop_wait = "none of them"};
    bs_status st = bs_dev_open(spec, &cfg, &d);
    if (st == BS_OK)
        st = bsi_queue_open(d, "compute", &q);
    if (st == BS_OK)
        st = bsi_queue_open(d, "copy", &r);
    if (st == BS_OK)
        st = bsi_mem_alloc(d, BSI_MEM_DEVICE, BS_TAG_DEVICE, 1 << 16, &m);
    if (st == BS_OK)
        st = bsi_event_open(d, &e);
    for (size_t i = 0; i < 200 && st == BS_OK; i++) {
        st = bsi_fill(q, at(m, i * 16), 1, 16);
        if (st == BS_OK)
            st = bsi_event_record(e, q);
        if (st == BS_OK)
            st = bsi_queue_wait(r, e, "front: out of memory");
        if (st == BS_OK)
            st = bsi_copy(r, at(m, 32768 + i * 16), at(m, i * 16), 8);
    }
    bsi_event_close(e);
    if (st == BS_OK)
        st = bsi_host_wait_queue(r);
    bsi_queue_close(q);
    bsi_queue_close(r);
    bsi_mem_free(m);
    bs_dev_close(d);
    return st;
}

static void test_out_of_memory(void **state)
{
    (void)state;
    for (int i = 0; i < 4; i++) {
        const char *spec = (const char *const[]){"cpu", "meta", "check:cpu", "check:meta"}[i];
        size_t misc = bs_host_bytes(BS_TAG_MISC), device = bs_host_bytes(BS_TAG_DEVICE);
        uint64_t n = 0;
        bs_status st;
        do {
            bsi_alloc_fail_nth(++n);
            st = scenario(spec);
            if (st != BS_OK && st != BS_NOMEM && st != BS_DEVMEM)
                fail_msg("%s, allocation %d: %s", spec, (int)n, bs_error()->msg);
            assert_int_equal(bs_host_bytes(BS_TAG_MISC), misc);
            assert_int_equal(bs_host_bytes(BS_TAG_DEVICE), device);
        } while (st != BS_OK && n < 1000);
        bsi_alloc_fail_nth(0);
        assert_int_equal(st, BS_OK);
        assert_true(n > 5);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_open),          cmocka_unit_test(test_objects),
        cmocka_unit_test(test_ranges),        cmocka_unit_test(test_sites),
        cmocka_unit_test(test_cancel),        cmocka_unit_test(test_pump_in_wait),
        cmocka_unit_test(test_out_of_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
