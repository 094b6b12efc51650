/* SPDX-License-Identifier: Apache-2.0 */
/*
** The check device: what it must find in one run, what it must not report, and that following a long
** program stays cheap. Most of it runs on check:meta: clocks need no execution.
**
** A race detector is the second net. To try it by hand in a tsan build: on device "cpu" copy into a
** memory on one queue, record an event, let some milliseconds pass, issue anything more on that queue,
** then read the memory on another queue. Without a queue_wait every run of 20 was reported, with it
** none; and none without it when the host had polled the event in between, as a streamer does. Hence
** this device.
*/
#include "backend/check/check.h"
#include "dev_support.h"

typedef struct rig {
    bs_dev *d;
    bsi_queue *a, *b, *c;
    bsi_event *e, *f;
    bsi_mem *m; /* 1 KiB */
} rig;

static rig rig_new(const char *spec, const char *drop_wait)
{
    rig r;
    bs_dev_cfg cfg = {.drop_wait = drop_wait};
    OK(bs_dev_open(spec, &cfg, &r.d));
    r.a = queue_new(r.d, "qa");
    r.b = queue_new(r.d, "qb");
    r.c = queue_new(r.d, "qc");
    r.e = event_new(r.d);
    r.f = event_new(r.d);
    r.m = mem_new(r.d, BSI_MEM_DEVICE, 1024);
    return r;
}

static void rig_close(rig *r)
{
    bsi_queue_close(r->a);
    bsi_queue_close(r->b);
    bsi_queue_close(r->c);
    bsi_event_close(r->e);
    bsi_event_close(r->f);
    bsi_mem_free(r->m);
    bs_dev_close(r->d);
}

static void expect(const rig *r, int n, const char *part)
{
    const char *text;
    int found = bs_dev_violations(r->d, &text);
    if (found != n || !strstr(text, part))
        print_error("%d violations, expected %d with '%s':\n%s", found, n, part, text);
    assert_int_equal(found, n);
    assert_non_null(strstr(text, part));
}

static void scale(bsi_queue *q, bsi_addr from, bsi_addr to, size_t bytes, const char *label)
{
    bsi_kcall k = {.op = BSK_SCALE,
                   .n_args = 2,
                   .arg = {{from, bytes, BSI_READ}, {to, bytes, BSI_WRITE}},
                   .n = {(int64_t)bytes / 4},
                   .f = {1},
                   .label = label};
    OK(bsi_launch(q, &k));
}

/* ---- what it finds --------------------------------------------------------------------------- */

static void test_unordered(void **state)
{
    (void)state;
    rig r = rig_new("check:meta", NULL);
    OK(bsi_fill(r.a, at(r.m, 0), 0, 256));
    expect(&r, 0, "");
    scale(r.b, at(r.m, 252), at(r.m, 512), 64, "layer 3 q_proj"); /* four bytes are enough */
    expect(&r, 1,
           "'fill' (writes, queue 'qa') and then 'layer 3 q_proj' (reads, queue 'qb') are not ordered");
    expect(&r, 1, "bytes 252 to 256 of device memory #1");
    expect(&r, 1, "queue 'qb' needs a queue_wait on an event of 'qa'");
    OK(bsi_fill(r.c, at(r.m, 512), 0, 4)); /* writes what qb writes */
    expect(&r, 2, "'layer 3 q_proj' (writes, queue 'qb') and then 'fill' (writes, queue 'qc')");
    OK(bsi_fill(r.c, at(r.m, 300), 0, 4)); /* writes what qb reads */
    expect(&r, 3, "'layer 3 q_proj' (reads, queue 'qb') and then 'fill' (writes, queue 'qc')");
    for (int i = 0; i < 5; i++)
        OK(bsi_fill(r.c, at(r.m, 304), 0, 4)); /* the same mistake is told once */
    expect(&r, 3, "");
    rig_close(&r);
}

static void test_ordered(void **state)
{
    (void)state;
    rig r = rig_new("check:meta", NULL);
    OK(bsi_fill(r.a, at(r.m, 0), 0, 1024));
    OK(bsi_event_record(r.e, r.a));
    OK(bsi_queue_wait(r.b, r.e, "check: b after a"));
    scale(r.b, at(r.m, 0), at(r.m, 512), 256, "one");
    OK(bsi_event_record(r.f, r.b));
    OK(bsi_queue_wait(r.c, r.f, "check: c after b"));
    scale(r.c, at(r.m, 512), at(r.m, 0), 256, "two"); /* after a, through b */
    OK(bsi_fill(r.a, at(r.m, 768), 0, 256));          /* nobody else was here */
    expect(&r, 0, "");
    rig_close(&r);
}

static void test_reads_do_not_conflict(void **state)
{
    (void)state;
    rig r = rig_new("check:meta", NULL);
    scale(r.a, at(r.m, 0), at(r.m, 256), 256, "left");
    scale(r.b, at(r.m, 0), at(r.m, 512), 256, "right");
    expect(&r, 0, "");
    /* A write needs both of them. */
    OK(bsi_event_record(r.e, r.a));
    OK(bsi_queue_wait(r.c, r.e, "check: c after one reader"));
    OK(bsi_fill(r.c, at(r.m, 0), 0, 256));
    expect(&r, 1, "'right' (reads, queue 'qb') and then 'fill' (writes, queue 'qc')");
    rig_close(&r);
}

/* Two launches at once need a workspace each. */
static void test_workspace(void **state)
{
    (void)state;
    rig r = rig_new("check:meta", NULL);
    bsi_kcall k = {.op = BSK_SCALE,
                   .n_args = 1,
                   .arg = {{at(r.m, 0), 64, BSI_READWRITE}},
                   .workspace = {at(r.m, 512), 256, BSI_READWRITE},
                   .label = "one"};
    OK(bsi_launch(r.a, &k));
    OK(bsi_launch(r.a, &k));
    k.arg[0].at = at(r.m, 64);
    k.workspace.at = at(r.m, 256);
    k.label = "two";
    OK(bsi_launch(r.b, &k));
    expect(&r, 0, "");
    k.workspace.at = at(r.m, 512);
    OK(bsi_launch(r.b, &k));
    expect(&r, 1, "'one' (writes, queue 'qa') and then 'two' (writes, queue 'qb')");
    rig_close(&r);
}

/* A record is the position at its call: what comes behind it is not ordered by it. */
static void test_stale_record(void **state)
{
    (void)state;
    rig r = rig_new("check:meta", NULL);
    OK(bsi_event_record(r.e, r.a));
    OK(bsi_fill(r.a, at(r.m, 0), 0, 64));
    OK(bsi_queue_wait(r.b, r.e, "check: too early"));
    OK(bsi_fill(r.b, at(r.m, 0), 0, 64));
    expect(&r, 1, "'fill' (writes, queue 'qa') and then 'fill' (writes, queue 'qb')");
    rig_close(&r);
}

/* The host saw that everything had run; the program is wrong all the same. */
static void test_polls_do_not_order(void **state)
{
    (void)state;
    rig r = rig_new(BS_TSAN ? "check:meta" : "check:cpu", NULL); /* it is a race, if a slow one */
    OK(bsi_fill(r.a, at(r.m, 0), 0, 64));
    OK(bsi_event_record(r.e, r.a));
    OK(bsi_host_wait(r.e));
    OK(bsi_host_wait_queue(r.a));
    OK(bsi_fill(r.b, at(r.m, 0), 0, 64));
    expect(&r, 1, "are not ordered");
    OK(bsi_host_wait_queue(r.b));
    rig_close(&r);
}

/* ---- mutation: each wait left out in turn ---------------------------------------------------- */

static const char *const waits[] = {"check: load after last use", "check: use after load",
                                    "check: copy out after use", "check: write after copy out"};

/* Blocks through two slots, results copied out by a third queue and overwritten two blocks later. */
static void pipeline(bs_dev *d)
{
    bsi_queue *in = queue_new(d, "copy-in"), *compute = queue_new(d, "compute"),
              *out = queue_new(d, "copy-out");
    bsi_mem *slots = mem_new(d, BSI_MEM_DEVICE, 512), *result = mem_new(d, BSI_MEM_DEVICE, 512);
    bsi_mem *host = mem_new(d, BSI_MEM_PINNED, 8 * 256), *back = mem_new(d, BSI_MEM_PINNED, 8 * 256);
    bsi_event *loaded[2], *used[2], *sent[2];
    for (int i = 0; i < 2; i++)
        loaded[i] = event_new(d), used[i] = event_new(d), sent[i] = event_new(d);
    for (size_t b = 0; b < 8; b++) {
        size_t s = b % 2;
        OK(bsi_queue_wait(in, used[s], waits[0]));
        OK(bsi_copy(in, at(slots, s * 256), at(host, b * 256), 256));
        OK(bsi_event_record(loaded[s], in));
        OK(bsi_queue_wait(compute, loaded[s], waits[1]));
        OK(bsi_queue_wait(compute, sent[s], waits[3]));
        scale(compute, at(slots, s * 256), at(result, s * 256), 256, "block");
        OK(bsi_event_record(used[s], compute));
        OK(bsi_queue_wait(out, used[s], waits[2]));
        OK(bsi_copy(out, at(back, b * 256), at(result, s * 256), 256));
        OK(bsi_event_record(sent[s], out));
    }
    OK(bsi_host_wait_queue(in));
    OK(bsi_host_wait_queue(compute));
    OK(bsi_host_wait_queue(out));
    for (int i = 0; i < 2; i++)
        bsi_event_close(loaded[i]), bsi_event_close(used[i]), bsi_event_close(sent[i]);
    bsi_mem_free(slots);
    bsi_mem_free(result);
    bsi_mem_free(host);
    bsi_mem_free(back);
    bsi_queue_close(in);
    bsi_queue_close(compute);
    bsi_queue_close(out);
}

static void test_each_wait_is_needed(void **state)
{
    (void)state;
    static const char *const spec[] = {"check:meta", "check:cpu", "check:cuda"};
    int n_specs = BS_TSAN ? 1 : gpu_there() ? 3 : 2; /* on cpu a wait that is left out is a race */
    for (int i = 0; i < n_specs; i++) {
        for (size_t w = 0; w <= BSI_COUNT(waits); w++) {
            char named[128];
            const char *text;
            const char *drop = w < BSI_COUNT(waits) ? waits[w] : NULL;
            bs_dev_cfg cfg = {.drop_wait = drop};
            bs_dev *d;
            OK(bs_dev_open(spec[i], &cfg, &d));
            pipeline(d);
            int n = bs_dev_violations(d, &text);
            if (drop) {
                snprintf(named, sizeof named, "queue_wait '%s' was left out", drop);
                int lines = 0, names = 0;
                for (const char *p = text; (p = strchr(p, '\n')); p++)
                    lines++;
                for (const char *p = text; (p = strstr(p, named)); p++)
                    names++;
                assert_true(n >= 1);
                assert_int_equal(lines, n);
                assert_int_equal(names, n); /* every line names it */
            } else if (n) {
                fail_msg("%s", text);
            }
            bs_dev_close(d);
        }
    }
}

/* A site that never runs blames nobody. */
static void test_drop_unused(void **state)
{
    (void)state;
    rig r = rig_new("check:meta", "check: no such place");
    OK(bsi_fill(r.a, at(r.m, 0), 0, 64));
    OK(bsi_fill(r.b, at(r.m, 0), 0, 64));
    expect(&r, 1, "needs a queue_wait");
    rig_close(&r);
}

/* ---- lifetimes ------------------------------------------------------------------------------- */

static void test_closed_objects(void **state)
{
    (void)state;
    rig r = rig_new("check:cpu", NULL);
    bsi_queue *q = queue_new(r.d, "gone");
    bsi_event *e = event_new(r.d);
    bsi_mem *m = mem_new(r.d, BSI_MEM_DEVICE, 64);
    OK(bsi_event_record(e, q));
    bsi_event_close(e);
    bsi_queue_close(q);
    bsi_mem_free(m);
    FAILS(bsi_queue_wait(r.a, e, "check: closed event"), BS_STATE,
          "check: closed event: the event was closed");
    FAILS(bsi_event_record(e, r.a), BS_STATE, "the event was closed");
    FAILS(bsi_host_wait(e), BS_STATE, "the event was closed");
    FAILS(bsi_fill(q, at(r.m, 0), 0, 1), BS_STATE, "the queue was closed");
    FAILS(bsi_fill(r.a, at(m, 0), 0, 1), BS_STATE, "destination is memory that was freed");
    expect(&r, 0, "");
    bsi_event_close(e);
    expect(&r, 1, "event closed twice");
    assert_int_equal(bs_error()->status, BS_STATE);
    bsi_queue_close(q);
    bsi_mem_free(m);
    expect(&r, 3, "memory closed twice");
    rig_close(&r);
}

static void test_free_in_flight(void **state)
{
    (void)state;
    rig r = rig_new("check:cpu", NULL);
    bsi_mem *m = mem_new(r.d, BSI_MEM_DEVICE, 256), *n = mem_new(r.d, BSI_MEM_DEVICE, 256);
    OK(bsi_fill(r.a, at(m, 0), 0, 256));
    OK(bsi_event_record(r.e, r.a));
    OK(bsi_queue_wait(r.b, r.e, "check: b after a"));
    OK(bsi_copy(r.b, at(n, 0), at(m, 0), 64));
    OK(bsi_host_wait_queue(r.b)); /* the end of b is behind what a did */
    bsi_mem_free(m);
    expect(&r, 0, "");
    OK(bsi_copy(r.b, at(n, 64), at(n, 0), 64));
    bsi_mem_free(n);
    expect(&r, 2, "(256 bytes) is freed while 'copy' (reads it, queue 'qb') may still run");
    /* Closing a queue waits for it: what it used may go. */
    m = mem_new(r.d, BSI_MEM_DEVICE, 256);
    OK(bsi_fill(r.c, at(m, 0), 0, 256));
    bsi_queue_close(r.c);
    bsi_mem_free(m);
    expect(&r, 2, "");
    r.c = NULL;
    rig_close(&r);
}

static void test_new_memory_is_nan(void **state)
{
    (void)state;
    rig r = rig_new("check:cpu", NULL);
    bsi_mem *host = mem_new(r.d, BSI_MEM_PINNED, 1024);
    OK(bsi_copy(r.a, at(host, 0), at(r.m, 0), 1024));
    OK(bsi_host_wait_queue(r.a));
    for (int i = 0; i < 1024; i++)
        assert_int_equal(((unsigned char *)host->host)[i], 0xFF);
    expect(&r, 0, "");
    bsi_mem_free(host);
    rig_close(&r);
}

static void test_queues(void **state)
{
    (void)state;
    rig r = rig_new("check:meta", NULL);
    bsi_queue *q[CHECK_QUEUES], *none;
    int n = 0;
    while (n < CHECK_QUEUES - 3)
        q[n++] = queue_new(r.d, "more");
    FAILS(bsi_queue_open(r.d, "too many", &none), BS_UNSUPPORTED, "'too many'");
    /* A new queue takes the place of a closed one, not its history: that was drained. */
    OK(bsi_fill(q[0], at(r.m, 0), 0, 64));
    bsi_queue_close(q[0]);
    q[0] = queue_new(r.d, "next");
    OK(bsi_fill(q[0], at(r.m, 0), 0, 64));
    OK(bsi_fill(r.a, at(r.m, 128), 0, 64));
    expect(&r, 0, "");
    OK(bsi_fill(q[0], at(r.m, 128), 0, 64));
    expect(&r, 1, "(writes, queue 'next')");
    while (n > 0)
        bsi_queue_close(q[--n]);
    rig_close(&r);
}

/* ---- cost ------------------------------------------------------------------------------------ */

/* Many steps of a program with ever-changing ranges: the history follows what is in use, not time. */
static void test_history_is_bounded(void **state)
{
    (void)state;
    enum { SPAN = 1 << 20, STEPS = 30, OPS = 1000 };
    rig r = rig_new("check:meta", NULL);
    bsi_mem *m = mem_new(r.d, BSI_MEM_DEVICE, SPAN);
    uint32_t random = 1;
    size_t most = 0;
    for (int step = 0; step < STEPS; step++) {
        for (int i = 0; i < OPS; i++) {
            random = random * 1664525u + 1013904223u;
            size_t from = (random >> 8) % (SPAN / 2), n = 4 + (random >> 4) % 4096;
            scale(r.a, at(m, from), at(m, from + SPAN / 2 - n), n, "work");
        }
        OK(bsi_event_record(r.e, r.a));
        OK(bsi_queue_wait(r.b, r.e, "check: b after a"));
        OK(bsi_queue_wait(r.c, r.e, "check: c after a"));
        OK(bsi_host_wait(r.e));
        most = BSI_MAX(most, ((check_mem *)m->impl)->n);
    }
    expect(&r, 0, "");
    assert_true(most < 4 * OPS); /* cuts of one step, not of all of them */
    OK(bsi_fill(r.a, at(m, 0), 0, SPAN));
    assert_int_equal(((check_mem *)m->impl)->n, 1);
    bsi_queue_close(r.a);
    r.a = NULL;
    bsi_mem_free(m);
    rig_close(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_unordered),
        cmocka_unit_test(test_ordered),
        cmocka_unit_test(test_reads_do_not_conflict),
        cmocka_unit_test(test_workspace),
        cmocka_unit_test(test_stale_record),
        cmocka_unit_test(test_polls_do_not_order),
        cmocka_unit_test(test_each_wait_is_needed),
        cmocka_unit_test(test_drop_unused),
        cmocka_unit_test(test_closed_objects),
        cmocka_unit_test(test_free_in_flight),
        cmocka_unit_test(test_new_memory_is_nan),
        cmocka_unit_test(test_queues),
        cmocka_unit_test(test_history_is_bounded),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
