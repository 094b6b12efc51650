/* SPDX-License-Identifier: Apache-2.0 */
/*
** The lines C1 to C8 of the device contract, on each backend and its check wrapper. What needs a queue
** that stands still uses a gate; what depends on timing runs under jitter with many seeds. --lose: only
** the test that loses the GPU for real, which no process gets back (exit 77: no GPU).
*/
#include "dev_support.h"

#include <pthread.h>
#include <stdlib.h>

/* cuda and check:cuda are added where there is a GPU. */
static const char *executing[4] = {"cpu", "check:cpu"},
                  *all[6] = {"cpu", "check:cpu", "meta", "check:meta"};
static size_t n_executing = 2, n_all = 4;

static bs_dev *dev_new(const char *spec, uint64_t seed)
{
    bs_dev *d;
    bs_dev_cfg cfg = {.threads = 2, .jitter_us = seed ? 20 : 0, .jitter_seed = seed};
    OK(bs_dev_open(spec, &cfg, &d));
    return d;
}

static void no_violations(const bs_dev *d)
{
    const char *text;
    if (bs_dev_violations(d, &text) != 0)
        fail_msg("%s", text);
    assert_string_equal(text, "");
}

/* C1: one queue, in order: each byte of `log` is copied from a cell that the next fill overwrites. */
static void in_order(const char *spec, uint64_t seed)
{
    enum { N = 40 };
    bs_dev *d = dev_new(spec, seed);
    bsi_queue *q = queue_new(d, "q");
    bsi_mem *cell = mem_new(d, BSI_MEM_DEVICE, 1), *log = mem_new(d, BSI_MEM_PINNED, N);
    for (int i = 0; i < N; i++) {
        OK(bsi_fill(q, at(cell, 0), i + 1, 1));
        OK(bsi_copy(q, at(log, (size_t)i), at(cell, 0), 1));
    }
    OK(bsi_host_wait_queue(q));
    for (int i = 0; i < N; i++)
        assert_int_equal(((unsigned char *)log->host)[i], i + 1);
    no_violations(d);
    bsi_mem_free(cell);
    bsi_mem_free(log);
    bsi_queue_close(q);
    bs_dev_close(d);
}

static void test_c1_in_order(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < 25; seed++)
        in_order(executing[seed % n_executing], seed);
}

/* C1: a queue that stands still does not hold another one. */
static void test_c1_no_order_between_queues(void **state)
{
    (void)state;
    for (size_t i = 0; i < n_executing; i++) {
        bs_dev *d = dev_new(executing[i], 0);
        bsi_queue *held = queue_new(d, "held"), *running = queue_new(d, "free");
        bsi_event *e = event_new(d);
        sem_t gate;
        gate_close(held, &gate);
        OK(bsi_event_record(e, held));
        OK(bsi_host_wait_queue(running));
        assert_int_equal(bsi_event_query(e), BS_AGAIN);
        sem_post(&gate);
        OK(bsi_host_wait(e));
        bsi_queue_close(held);
        bsi_queue_close(running);
        bsi_event_close(e);
        bs_dev_close(d);
    }
}

/* C2: the mark is where the queue was at the call; recording again moves it. */
static void test_c2_record(void **state)
{
    (void)state;
    for (size_t i = 0; i < n_executing; i++) {
        bs_dev *d = dev_new(executing[i], 0);
        bsi_queue *q = queue_new(d, "q");
        bsi_event *e = event_new(d);
        bsi_mem *m = mem_new(d, BSI_MEM_PINNED, 1);
        sem_t gate;
        OK(bsi_fill(q, at(m, 0), 1, 1));
        OK(bsi_event_record(e, q));
        gate_close(q, &gate);
        OK(bsi_fill(q, at(m, 0), 2, 1));
        OK(bsi_host_wait(e)); /* before the gate */
        assert_int_equal(*(unsigned char *)m->host, 1);
        OK(bsi_event_record(e, q));
        assert_int_equal(bsi_event_query(e), BS_AGAIN);
        sem_post(&gate);
        OK(bsi_host_wait(e));
        assert_int_equal(*(unsigned char *)m->host, 2);
        bsi_mem_free(m);
        bsi_event_close(e);
        bsi_queue_close(q);
        bs_dev_close(d);
    }
}

/* C3: a wait keeps the record that was current when it was issued, whichever way the event moves. */
static void test_c3_wait_binds(void **state)
{
    (void)state;
    for (size_t i = 0; i < n_executing; i++) {
        bs_dev *d = dev_new(executing[i], 0);
        bsi_queue *a = queue_new(d, "a"), *b = queue_new(d, "b"), *c = queue_new(d, "c");
        bsi_event *e = event_new(d), *end = event_new(d);
        sem_t gate;

        OK(bsi_event_record(e, a)); /* open ... */
        OK(bsi_queue_wait(b, e, "contract: bound to an open record"));
        gate_close(a, &gate);
        OK(bsi_event_record(e, a)); /* ... and then held: the wait above must not see it */
        OK(bsi_event_record(end, b));
        OK(bsi_host_wait(end));

        OK(bsi_queue_wait(b, e, "contract: bound to a held record"));
        OK(bsi_event_record(end, b));
        OK(bsi_event_record(e, c)); /* done at once: must not let the wait above through */
        OK(bsi_host_wait(e));
        assert_int_equal(bsi_event_query(end), BS_AGAIN);
        sem_post(&gate);
        OK(bsi_host_wait(end));

        bsi_event_close(e);
        bsi_event_close(end);
        bsi_queue_close(a);
        bsi_queue_close(b);
        bsi_queue_close(c);
        bs_dev_close(d);
    }
}

static void test_c3_never_recorded(void **state)
{
    (void)state;
    for (size_t i = 0; i < n_all; i++) {
        bs_dev *d = dev_new(all[i], 0);
        bsi_queue *q = queue_new(d, "q");
        bsi_event *e = event_new(d);
        OK(bsi_event_query(e));
        OK(bsi_queue_wait(q, e, "contract: never recorded"));
        OK(bsi_host_wait_queue(q));
        bsi_event_close(e);
        bsi_queue_close(q);
        bs_dev_close(d);
    }
}

/* The pattern of a streamer: blocks go through two device slots, one host slot and a compute queue.
 */
enum { BLOCKS = 12, SLOT = 512, LOADED = 0, USED = 2 };

static void stream(bs_dev *d, bool check_bytes)
{
    bsi_queue *in = queue_new(d, "copy-in"), *compute = queue_new(d, "compute");
    bsi_mem *host = mem_new(d, BSI_MEM_PINNED, BLOCKS * SLOT),
            *slots = mem_new(d, BSI_MEM_DEVICE, 2 * SLOT);
    bsi_mem *sum = mem_new(d, BSI_MEM_DEVICE, BLOCKS * SLOT),
            *back = mem_new(d, BSI_MEM_PINNED, BLOCKS * SLOT);
    bsi_event *ev[4];
    for (int i = 0; i < 4; i++)
        ev[i] = event_new(d);
    for (size_t i = 0; check_bytes && i < BLOCKS * SLOT; i++)
        ((unsigned char *)host->host)[i] = (unsigned char)(i * 31 + i / SLOT);
    for (size_t b = 0; b < BLOCKS; b++) {
        size_t s = b % 2;
        OK(bsi_queue_wait(in, ev[USED + s], "contract: load after last use"));
        OK(bsi_copy(in, at(slots, s * SLOT), at(host, b * SLOT), SLOT));
        OK(bsi_event_record(ev[LOADED + s], in));
        OK(bsi_queue_wait(compute, ev[LOADED + s], "contract: use after load"));
        OK(bsi_copy(compute, at(sum, b * SLOT), at(slots, s * SLOT), SLOT));
        OK(bsi_event_record(ev[USED + s], compute));
    }
    OK(bsi_copy(compute, at(back, 0), at(sum, 0), BLOCKS * SLOT));
    OK(bsi_host_wait_queue(compute));
    OK(bsi_host_wait_queue(in));
    if (check_bytes)
        assert_memory_equal(back->host, host->host, BLOCKS * SLOT);
    for (int i = 0; i < 4; i++)
        bsi_event_close(ev[i]);
    bsi_mem_free(host);
    bsi_mem_free(slots);
    bsi_mem_free(sum);
    bsi_mem_free(back);
    bsi_queue_close(in);
    bsi_queue_close(compute);
}

static void test_events_order_queues(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < 25; seed++) {
        bs_dev *d = dev_new(executing[seed % n_executing], seed);
        stream(d, true);
        no_violations(d);
        bs_dev_close(d);
    }
    bs_dev *d = dev_new("check:meta", 0);
    stream(d, false);
    no_violations(d);
    bs_dev_close(d);
}

/* C4: freeing what may be in use is told by the check device, and harmless on every device. */
static void test_c4_free_in_flight(void **state)
{
    (void)state;
    for (size_t i = 0; i < n_all; i++) {
        bs_dev *d = dev_new(all[i], 0);
        bsi_queue *q = queue_new(d, "q");
        bsi_mem *m = mem_new(d, BSI_MEM_DEVICE, 1 << 16);
        const char *text;
        OK(bsi_fill(q, at(m, 0), 1, 1 << 16));
        bsi_mem_free(m);
        bool checked = strncmp(all[i], "check:", 6) == 0;
        assert_int_equal(bs_dev_violations(d, &text), checked ? 1 : 0);
        if (checked)
            assert_non_null(strstr(text, "freed while 'fill'"));
        bsi_queue_close(q);
        bs_dev_close(d);
    }
}

/* C5: hundreds of operations are accepted by a queue that stands still (cuda's hardware queues hold about a
   thousand). */
static void test_c5_issue_never_blocks(void **state)
{
    (void)state;
    for (size_t i = 0; i < n_executing; i++) {
        bs_dev *d = dev_new(executing[i], 0);
        bsi_queue *q = queue_new(d, "q");
        bsi_mem *m = mem_new(d, BSI_MEM_PINNED, 1);
        sem_t gate;
        const int count = 400;
        gate_close(q, &gate);
        for (int n = 0; n < count; n++)
            OK(bsi_fill(q, at(m, 0), n & 255, 1));
        sem_post(&gate);
        OK(bsi_host_wait_queue(q));
        assert_int_equal(*(unsigned char *)m->host, (count - 1) & 255);
        bsi_mem_free(m);
        bsi_queue_close(q);
        bs_dev_close(d);
    }
}

/* C6: a wrong argument is the call's error and costs nothing else. */
static void test_c6_arguments(void **state)
{
    (void)state;
    for (size_t i = 0; i < n_all; i++) {
        bs_dev *d = dev_new(all[i], 0);
        bsi_queue *q = queue_new(d, "q");
        bsi_mem *m = mem_new(d, BSI_MEM_DEVICE, 100);
        FAILS(bsi_copy(q, at(m, 60), at(m, 0), 41), BS_ARG, "41 bytes at offset 60 of a memory of 100");
        FAILS(bsi_fill(q, at(m, SIZE_MAX), 0, 2), BS_ARG, "of a memory of 100 bytes");
        OK(bsi_fill(q, at(m, 0), 0, 100));
        OK(bsi_host_wait_queue(q));
        bsi_mem_free(m);
        bsi_queue_close(q);
        bs_dev_close(d);
    }
}

/* ---- memory that is refused ---- */

static int told;

static void count_line(void *ud, const char *line)
{
    (void)ud;
    assert_non_null(strstr(line, "cannot be page-locked"));
    told++;
}

/* Pinned memory that cannot be page-locked is ordinary memory: copies work, one line says so, and the
   failure is not found by the next operation. */
static void refused_page_lock(const char *spec, const bs_dev_cfg *cfg)
{
    enum { BYTES = 3 << 20 };
    bs_dev *d;
    bs_dev_props p;
    told = 0;
    OK(bs_dev_open(spec, cfg, &d));
    bsi_queue *q = queue_new(d, "q");
    bsi_mem *locked = mem_new(d, BSI_MEM_PINNED, BYTES), *device = mem_new(d, BSI_MEM_DEVICE, BYTES);
    bsi_mem *from = mem_new(d, BSI_MEM_PINNED, BYTES), *to = mem_new(d, BSI_MEM_PINNED, BYTES);
    assert_int_equal(locked->kind, BSI_MEM_PINNED);
    assert_int_equal(from->kind, BSI_MEM_HOST);
    assert_int_equal(to->kind, BSI_MEM_HOST);
    assert_int_equal(told, 1);
    bs_dev_props_get(d, &p);
    assert_int_equal(p.unpinned_bytes, 2 * BYTES);
    for (int i = 0; i < BYTES; i++)
        ((unsigned char *)from->host)[i] = (unsigned char)(i * 7 >> 3);
    OK(bsi_fill(q, at(to, 0), 1, BYTES));
    OK(bsi_copy(q, at(device, 0), at(from, 0), BYTES));
    OK(bsi_copy(q, at(to, 0), at(device, 0), BYTES));
    OK(bsi_host_wait_queue(q));
    assert_memory_equal(from->host, to->host, BYTES);
    no_violations(d);
    bsi_mem_free(from);
    bsi_mem_free(to);
    bs_dev_props_get(d, &p);
    assert_int_equal(p.unpinned_bytes, 0);
    bsi_mem_free(locked);
    bsi_mem_free(device);
    bsi_queue_close(q);
    bs_dev_close(d);
}

static void test_refused_page_lock(void **state)
{
    (void)state;
    size_t before = bs_host_bytes(BS_TAG_STAGING);
    bs_log_to(count_line, NULL);
    for (size_t i = 0; i < n_executing; i++)
        refused_page_lock(executing[i], &(bs_dev_cfg){.fail_pin = 2});
    bs_log_to(NULL, NULL);
    assert_int_equal(bs_host_bytes(BS_TAG_STAGING), before);
}

/* Memory that another process took, and memory that no machine has: refused, and the device goes on. */
static void test_refused_memory(void **state)
{
    (void)state;
    for (size_t i = 0; i < n_executing; i++) {
        bs_dev *d;
        bsi_mem *none;
        bs_dev_props before, after;
        OK(bs_dev_open(executing[i], &(bs_dev_cfg){.device_left = 1 << 20}, &d));
        bs_dev_props_get(d, &before);
        bsi_mem *half = mem_new(d, BSI_MEM_DEVICE, 1 << 19);
        FAILS(bsi_mem_alloc(d, BSI_MEM_DEVICE, BS_TAG_DEVICE, 1 << 20, &none), BS_DEVMEM,
              "524288 are free");
        assert_null(none);
        bs_dev_props_get(d, &after);
        assert_true(before.total_bytes > 1 << 20 && after.total_bytes == 1 << 19);
        bsi_mem_free(half);
        bsi_mem_free(mem_new(d, BSI_MEM_DEVICE, 1 << 20));
        bs_dev_close(d);

        d = dev_new(executing[i], 0);
        FAILS(bsi_mem_alloc(d, BSI_MEM_DEVICE, BS_TAG_DEVICE, (size_t)1 << 50, &none), BS_DEVMEM,
              "are not available");
        stream(d, false);
        bs_dev_close(d);
    }
}

/* C6: an operation that fails while it runs loses the device; the text names it; closing still works.
 */
static void fail_nth(const char *spec, uint64_t n)
{
    static const char *const name[] = {"copy", "fill", "host_fn"};
    char want[64];
    bs_dev *d;
    bsi_event *none;
    bs_dev_cfg cfg = {.fail_call = n};
    OK(bs_dev_open(spec, &cfg, &d));
    bsi_queue *q = queue_new(d, "work"), *idle = queue_new(d, "idle");
    bsi_mem *m = mem_new(d, BSI_MEM_DEVICE, 64);
    bsi_event *e = event_new(d);
    sem_t done;
    sem_init(&done, 0, 0);
    for (int i = 0; i < 2; i++) {
        OK(bsi_copy(q, at(m, 0), at(m, 32), 32));
        OK(bsi_fill(q, at(m, 0), 1, 64));
        OK(bsi_host_fn(q, post, &done));
    }
    OK(bsi_event_record(e, q));
    OK(bsi_queue_wait(idle, e, "contract: behind a failure"));
    snprintf(want, sizeof want, "'%s' on queue 'work' failed", name[(n - 1) % 3]);
    FAILS(bsi_host_wait(e), BS_DEVICE, want);
    FAILS(bsi_queue_status(q), BS_DEVICE, want);
    FAILS(bsi_fill(q, at(m, 0), 1, 64), BS_DEVICE, want);
    FAILS(bsi_host_wait_queue(idle), BS_DEVICE, want);
    FAILS(bsi_event_open(d, &none), BS_DEVICE, "lost");
    bsi_event_close(e);
    bsi_mem_free(m);
    bsi_queue_close(q);
    bsi_queue_close(idle);
    bs_dev_close(d);
    sem_destroy(&done);
}

static void test_c6_execution(void **state)
{
    (void)state;
    size_t before = bs_host_bytes(BS_TAG_MISC);
    for (size_t i = 0; i < n_all; i++) {
        for (uint64_t n = 1; n <= 6; n++)
            fail_nth(all[i], n);
        bs_dev *d = dev_new(all[i], 0); /* a new device is as good as ever */
        stream(d, false);
        bs_dev_close(d);
    }
    assert_int_equal(bs_host_bytes(BS_TAG_MISC), before);
}

/* C7: five objects with work in flight, closed in each of the 120 orders. */
static void close_in_order(const char *spec, const int *order)
{
    bs_dev *d = dev_new(spec, 0);
    bsi_queue *q = queue_new(d, "q"), *r = queue_new(d, "r");
    bsi_event *e = event_new(d);
    bsi_mem *m = mem_new(d, BSI_MEM_DEVICE, 4096);
    OK(bsi_fill(q, at(m, 0), 1, 4096));
    OK(bsi_event_record(e, q));
    OK(bsi_queue_wait(r, e, "contract: close in any order"));
    OK(bsi_fill(r, at(m, 0), 2, 4096));
    for (int i = 0; i < 5; i++) {
        switch (order[i]) {
        case 0:
            bs_dev_close(d);
            break;
        case 1:
            bsi_queue_close(q);
            break;
        case 2:
            bsi_queue_close(r);
            break;
        case 3:
            bsi_event_close(e);
            break;
        default:
            bsi_mem_free(m);
        }
    }
}

static void permute(const char *spec, int *order, int n)
{
    if (n == 5) {
        close_in_order(spec, order);
        return;
    }
    for (int i = n; i < 5; i++) {
        int t = order[n];
        order[n] = order[i], order[i] = t;
        permute(spec, order, n + 1);
        order[i] = order[n], order[n] = t;
    }
}

static void test_c7_close_in_any_order(void **state)
{
    (void)state;
    for (size_t i = 0; i < n_all; i++) {
        int order[] = {0, 1, 2, 3, 4};
        size_t misc = bs_host_bytes(BS_TAG_MISC), device = bs_host_bytes(BS_TAG_DEVICE);
        permute(all[i], order, 0);
        assert_int_equal(bs_host_bytes(BS_TAG_MISC), misc);
        assert_int_equal(bs_host_bytes(BS_TAG_DEVICE), device);
    }
}

/* C7: what was issued before a close has happened after it. */
static void test_c7_close_drains(void **state)
{
    (void)state;
    for (size_t i = 0; i < n_executing; i++) {
        bs_dev *d = dev_new(executing[i], 3);
        bsi_queue *q = queue_new(d, "q");
        bsi_mem *m = mem_new(d, BSI_MEM_PINNED, 1);
        for (int n = 0; n < 50; n++)
            OK(bsi_fill(q, at(m, 0), n, 1));
        bs_dev_close(d);
        FAILS(bsi_fill(q, at(m, 0), 99, 1), BS_STATE, "is closed");
        bsi_queue_close(q);
        assert_int_equal(*(unsigned char *)m->host, 49);
        bsi_mem_free(m);
    }
}

/* C8: the check device knows its owner. */
static void *stranger(void *q)
{
    bs_status st = bsi_host_wait_queue(q);
    return (void *)(uintptr_t)(st == BS_STATE && strstr(bs_error()->msg, "does not own") != NULL);
}

static void test_c8_owner(void **state)
{
    (void)state;
    pthread_t t;
    void *refused;
    bs_dev *d = dev_new("check:meta", 0);
    bsi_queue *q = queue_new(d, "q");
    assert_int_equal(pthread_create(&t, NULL, stranger, q), 0);
    pthread_join(t, &refused);
    assert_non_null(refused);
    OK(bsi_host_wait_queue(q));
    bsi_queue_close(q);
    bs_dev_close(d);
}

/* Ranges nest on every device; check devices count one that ends too often. */
static void test_ranges(void **state)
{
    (void)state;
    for (size_t i = 0; i < n_all; i++) {
        const char *text;
        bs_dev *d = dev_new(all[i], 0);
        bsi_range_begin(d, "visit");
        bsi_range_begin(d, "scope");
        bsi_range_end(d);
        bsi_range_end(d);
        no_violations(d);
        if (strncmp(all[i], "check:", 6) == 0) {
            bsi_range_end(d);
            assert_int_equal(bs_dev_violations(d, &text), 1);
            assert_non_null(strstr(text, "a range ended that was not begun"));
        }
        bs_dev_close(d);
    }
}

static uint64_t calls_of(const bs_profile_row *row, int n, const char *label)
{
    for (int i = 0; i < n; i++)
        if (strcmp(row[i].label, label) == 0) {
            assert_string_equal(row[i].op, "scale");
            assert_true(row[i].seconds > 0.0 && row[i].seconds < 60.0);
            assert_true(i == 0 || row[i].seconds <= row[i - 1].seconds);
            return row[i].calls;
        }
    return 0;
}

/* Launches are timed while that is asked for, by kernel and label; asking again forgets. */
static void test_profile(void **state)
{
    (void)state;
    for (size_t i = 0; i < n_all; i++) {
        const bs_profile_row *row;
        int n = 0;
        bs_dev *d = dev_new(all[i], 0);
        bool executes = strstr(all[i], "meta") == NULL;
        bsi_queue *q = queue_new(d, "compute");
        bsi_mem *x = mem_new(d, BSI_MEM_DEVICE, 4096);
        OK(bsi_fill(q, at(x, 0), 0, 4096));
        bsi_kcall call = {.op = BSK_SCALE, .n_args = 2, .n = {1024}, .f = {2.0}, .label = "untimed"};
        call.arg[0] = (bsi_arg){at(x, 0), 4096, BSI_READ};
        call.arg[1] = (bsi_arg){at(x, 0), 4096, BSI_WRITE};
        OK(bsi_launch(q, &call));
        for (int round = 0; round < 2; round++) {
            OK(bs_dev_profile(d, true));
            for (int k = 0; k < 5; k++) {
                call.label = k < 3 ? "one" : "two";
                OK(bsi_launch(q, &call));
            }
            OK(bs_dev_profile_read(d, &row, &n));
            assert_int_equal(n, executes ? 2 : 0);
            assert_int_equal(calls_of(row, n, "one"), executes ? 3 : 0);
            assert_int_equal(calls_of(row, n, "two"), executes ? 2 : 0);
        }
        OK(bs_dev_profile(d, false));
        OK(bsi_launch(q, &call));
        OK(bs_dev_profile_read(d, &row, &n));
        assert_int_equal(calls_of(row, n, "two"), executes ? 2 : 0);
        no_violations(d);
        bsi_mem_free(x);
        bsi_queue_close(q);
        bs_dev_close(d);
    }
}

/* A kernel that runs over the end of its memory. Every call then repeats the one error, everything
   closes, no byte is left accounted, and a device that is opened after it says that the process has lost
   the GPU. */
static void test_lost(void **state)
{
    (void)state;
    size_t before[BS_TAG_COUNT];
    bs_dev *d, *again;
    bsi_event *none;
    for (int t = 0; t < BS_TAG_COUNT; t++)
        before[t] = bs_host_bytes((bs_tag)t);
    OK(bs_dev_open("cuda", NULL, &d));
    bsi_queue *q = queue_new(d, "compute"), *idle = queue_new(d, "copy-in");
    bsi_mem *m = mem_new(d, BSI_MEM_DEVICE, 4096), *host = mem_new(d, BSI_MEM_PINNED, 4096);
    bsi_event *e = event_new(d);
    bsi_kcall call = {
        .op = BSK_SCALE, .n_args = 2, .n = {(int64_t)1 << 38}, .f = {1}, .label = "overrun"};
    call.arg[0] = call.arg[1] = (bsi_arg){at(m, 0), 4096, BSI_READWRITE};
    OK(bsi_launch(q, &call));
    OK(bsi_event_record(e, q));
    FAILS(bsi_host_wait(e), BS_DEVICE, "cudaErrorIllegalAddress");
    FAILS(bsi_host_wait_queue(idle), BS_DEVICE, "cudaErrorIllegalAddress");
    FAILS(bsi_copy(idle, at(host, 0), at(m, 0), 4096), BS_DEVICE, "is lost until it is closed");
    FAILS(bsi_event_open(d, &none), BS_DEVICE, "last issued: 'overrun'");
    bsi_event_close(e);
    bsi_mem_free(m);
    bsi_mem_free(host);
    bsi_queue_close(q);
    bsi_queue_close(idle);
    bs_dev_close(d);
    for (int t = 0; t < BS_TAG_COUNT; t++)
        assert_int_equal(bs_host_bytes((bs_tag)t), before[t]);
    FAILS(bs_dev_open("cuda", NULL, &again), BS_DEVICE, "start a new process");
}

static int lose(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_lost)};
    if (!gpu_there()) {
        printf("no cuda device: %s\n", bs_error()->msg);
        return 77;
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_c1_in_order),
        cmocka_unit_test(test_c1_no_order_between_queues),
        cmocka_unit_test(test_c2_record),
        cmocka_unit_test(test_c3_wait_binds),
        cmocka_unit_test(test_c3_never_recorded),
        cmocka_unit_test(test_events_order_queues),
        cmocka_unit_test(test_c4_free_in_flight),
        cmocka_unit_test(test_c5_issue_never_blocks),
        cmocka_unit_test(test_c6_arguments),
        cmocka_unit_test(test_refused_page_lock),
        cmocka_unit_test(test_refused_memory),
        cmocka_unit_test(test_c6_execution),
        cmocka_unit_test(test_c7_close_in_any_order),
        cmocka_unit_test(test_c7_close_drains),
        cmocka_unit_test(test_c8_owner),
        cmocka_unit_test(test_ranges),
        cmocka_unit_test(test_profile),
    };
    if (argc > 1 && strcmp(argv[1], "--lose") == 0)
        return lose();
    if (gpu_there()) {
        executing[n_executing++] = all[n_all++] = "cuda";
        executing[n_executing++] = all[n_all++] = "check:cuda";
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
