/* SPDX-License-Identifier: Apache-2.0 */
/* Asynchronous reads: the same tests over both engines, with short, failing, late and reordered
 * results. */
#include "base/base.h"
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "io/io.h"
#include "tmpdir.h"

enum { PAGE = 4096, BYTES = 40 * PAGE + 123, READS = 41, LONG_US = 10000000 };

static unsigned char content[BYTES];
static bsi_file file;
static unsigned char *buffer; /* [READS * PAGE] */
static bsi_read reads[READS];
static bool have_uring;

static bsi_aio *open_with(const char *engine, int depth, int threads, const bsi_aio_fault *fault)
{
    bsi_aio *a;
    if (strcmp(engine, "uring") == 0 && !have_uring)
        skip();
    bs_io_cfg cfg = {.engine = engine, .depth = depth, .threads = threads};
    if (bsi_aio_open(&cfg, fault, &a) != BS_OK)
        fail_msg("%s", bs_error()->msg);
    assert_string_equal(bsi_aio_name(a), engine);
    return a;
}

static bsi_read *page(int i)
{
    bsi_read *r = &reads[i];
    *r = (bsi_read){.file = &file,
                    .offset = (uint64_t)i * PAGE,
                    .length = PAGE,
                    .buffer = buffer + (size_t)i * PAGE};
    memset(r->buffer, 0xCC, PAGE);
    return r;
}

static void submit(bsi_aio *a, int from, int to)
{
    for (int i = from; i < to; i++)
        if (bsi_aio_submit(a, page(i)) != BS_OK)
            fail_msg("%s", bs_error()->msg);
}

static bsi_read *reap(bsi_aio *a)
{
    bsi_read *r = bsi_aio_reap(a, LONG_US);
    assert_non_null(r);
    return r;
}

static void check(const bsi_read *r)
{
    size_t n = BSI_MIN(r->length, (size_t)(BYTES - r->offset));
    if (r->status != BS_OK)
        fail_msg("%s", r->error.msg);
    assert_memory_equal(r->buffer, content + r->offset, n);
}

static uint64_t reap_all(bsi_aio *a)
{
    uint64_t reread = 0;
    while (bsi_aio_in_flight(a)) {
        bsi_read *r = reap(a);
        check(r);
        reread += r->reread;
    }
    assert_null(bsi_aio_reap(a, LONG_US)); /* nothing in flight: returns at once */
    return reread;
}

static void test_content(void **state)
{
    for (int depth = 1; depth <= 64; depth *= 4) {
        bsi_aio *a = open_with(*state, depth, 3, NULL);
        submit(a, 0, READS);
        assert_int_equal(bsi_aio_in_flight(a), READS);
        assert_int_equal(reap_all(a), 0);
        const unsigned char *tail = buffer + BYTES; /* behind the end of the file: untouched or zero */
        for (size_t i = 0; i < READS * PAGE - BYTES; i++)
            assert_true(tail[i] == 0xCC || tail[i] == 0);
        bsi_aio_close(a);
    }
    bsi_aio_close(NULL);
}

/* Depth 1: one at a time, so the order of submission is the order of completion. */
static void test_order(void **state)
{
    bsi_aio *a = open_with(*state, 1, 4, NULL);
    submit(a, 0, READS);
    for (int i = 0; i < READS; i++)
        assert_ptr_equal(reap(a), &reads[i]);
    bsi_aio_close(a);
}

static void test_one_large(void **state)
{
    bsi_aio *a = open_with(*state, 2, 2, NULL);
    bsi_read r = {.file = &file, .length = READS * PAGE, .buffer = buffer};
    assert_int_equal(bsi_aio_submit(a, &r), BS_OK);
    assert_ptr_equal(reap(a), &r);
    check(&r);
    bsi_aio_close(a);
}

typedef struct plan { /* what the fault does */
    int64_t result;   /* of every read while times > 0 */
    int times, calls;
    uint32_t draw;
    uint64_t at; /* only this offset, unless UINT64_MAX */
} plan;

static int64_t scripted(void *ud, const bsi_read *r, int64_t real)
{
    plan *p = ud;
    p->calls++;
    if (p->times <= 0 || (p->at != UINT64_MAX && p->at != r->offset))
        return real;
    p->times--;
    return p->result;
}

static int64_t noisy(void *ud, const bsi_read *r, int64_t real)
{
    plan *p = ud;
    (void)r;
    p->calls++;
    p->draw = p->draw * 1664525u + 1013904223u;
    uint32_t k = p->draw >> 24;
    if (k < 60)
        return -EINTR;
    if (k < 100)
        return -EAGAIN;
    return k < 200 && real > 1 ? 1 + (int64_t)(p->draw >> 8) % (real - 1) : real;
}

static void test_short(void **state)
{
    /* Once, of each length: continued from an aligned place. */
    const int64_t lengths[] = {1, 511, 512, 513, 4095};
    for (size_t i = 0; i < BSI_COUNT(lengths); i++) {
        plan p = {.result = lengths[i], .times = 1, .at = 5 * PAGE};
        bsi_aio_fault f = {.result = scripted, .ud = &p};
        bsi_aio *a = open_with(*state, 4, 2, &f);
        submit(a, 5, 6);
        size_t left = PAGE - bsi_round_down((uint64_t)lengths[i], file.align);
        assert_int_equal(reap_all(a), left);
        assert_int_equal(p.calls, 2);
        bsi_aio_close(a);
    }
}

static void test_interrupted(void **state)
{
    const int64_t codes[] = {-EINTR, -EAGAIN};
    for (size_t i = 0; i < BSI_COUNT(codes); i++) {
        plan p = {.result = codes[i], .times = 30, .at = UINT64_MAX};
        bsi_aio_fault f = {.result = scripted, .ud = &p};
        bsi_aio *a = open_with(*state, 4, 2, &f);
        submit(a, 0, 8);
        assert_int_equal(reap_all(a), 0);
        assert_int_equal(p.calls, 38);
        p.times = 1000000; /* for ever: given up, and the engine goes on */
        submit(a, 0, 1);
        bsi_read *r = reap(a);
        assert_int_equal(r->status, BS_IO);
        assert_int_equal(r->error.sys, (int)-codes[i]);
        p.times = 0;
        submit(a, 0, 8);
        reap_all(a);
        bsi_aio_close(a);
    }
}

static void test_noise(void **state)
{
    plan p = {.draw = 7};
    bsi_aio_fault f = {.result = noisy, .reverse = true, .ud = &p};
    bsi_aio *a = open_with(*state, 6, 3, &f);
    for (int round = 0; round < 5; round++) {
        submit(a, 0, READS);
        assert_true(reap_all(a) > 0);
    }
    bsi_aio_close(a);
}

static void test_failing(void **state)
{
    plan p = {.result = -EIO, .times = 1, .at = 3 * PAGE};
    bsi_aio_fault f = {.result = scripted, .ud = &p};
    bsi_aio *a = open_with(*state, 4, 2, &f);
    submit(a, 0, 8);
    for (int i = 0; i < 8; i++) {
        bsi_read *r = reap(a);
        if (r->offset != 3 * PAGE) {
            check(r);
            continue;
        }
        assert_int_equal(r->status, BS_IO);
        assert_int_equal(r->error.sys, EIO);
        assert_non_null(strstr(r->error.msg, "/data' at 12288: expected 4096 bytes, got 0"));
    }
    submit(a, 3, 4);
    check(reap(a));
    bsi_aio_close(a);
}

/* Real ends of real files: cut under us, and a result of 0 where there should be bytes. */
static void test_shrunk(void **state)
{
    bsi_file f;
    const char *path = tmpdir_put("cut", content, BYTES);
    assert_int_equal(bsi_file_open(path, false, &f), BS_OK);
    bsi_aio *a = open_with(*state, 4, 2, NULL);
    const uint64_t at[] = {0, 2 * PAGE, 3 * PAGE};
    const char *got[] = {NULL, "expected 4096 bytes, got 100", "expected 4096 bytes, got 0"};
    assert_int_equal(truncate(path, 2 * PAGE + 100), 0);
    for (int i = 0; i < 3; i++) {
        bsi_read r = {.file = &f, .offset = at[i], .length = PAGE, .buffer = buffer};
        assert_int_equal(bsi_aio_submit(a, &r), BS_OK);
        reap(a);
        if (!got[i]) {
            check(&r);
            continue;
        }
        assert_int_equal(r.status, BS_IO);
        if (!strstr(r.error.msg, got[i]) || !strstr(r.error.msg, "/cut' at ") ||
            !strstr(r.error.msg, "has 8292 now"))
            fail_msg("%s", r.error.msg);
    }
    bsi_aio_close(a);
    bsi_file_close(&f);
}

static void test_reverse(void **state)
{
    bsi_aio_fault f = {.reverse = true};
    bsi_aio *a = open_with(*state, 8, 1, &f);
    submit(a, 0, 8);
    bsi_read *last = reap(a);
    check(last);
    for (int i = 6; i >= 0; i--) { /* all the others are there already */
        bsi_read *r = bsi_aio_reap(a, 0);
        assert_non_null(r);
        check(r);
        if (strcmp(*state, "pool") == 0) /* one thread: they ended in the order of submission */
            assert_ptr_equal(r, &reads[i]);
    }
    submit(a, 0, READS); /* more than the depth: batches, none is forgotten */
    reap_all(a);
    bsi_aio_close(a);
}

static double cpu_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void test_delay(void **state)
{
    bsi_aio_fault f = {.delay_us = 50000};
    bsi_aio *a = open_with(*state, 4, 2, &f);
    double t = bsi_now(), cpu = cpu_now();
    submit(a, 0, 4);
    /* On a loaded machine the time may pass before we ask: whoever comes must not come early. */
    const bsi_read *early = bsi_aio_reap(a, 0);
    if (!early)
        early = bsi_aio_reap(a, 1000);
    assert_true(!early || bsi_now() - t >= 0.05);
    check(early ? early : reap(a));
    double first = bsi_now() - t;
    assert_true(first >= 0.05);
    assert_int_equal(bsi_aio_in_flight(a), 3);
    reap_all(a);
    assert_true(cpu_now() - cpu < 0.5 * first); /* waited, did not spin */
    submit(a, 0, READS);
    bsi_aio_close(a); /* most were not started, some are in the engine */
}

static void test_close_in_flight(void **state)
{
    for (int depth = 1; depth <= 32; depth *= 2) {
        bsi_aio *a = open_with(*state, depth, 3, NULL);
        submit(a, 0, READS);
        bsi_aio_close(a);
        memset(buffer, 1, READS * PAGE); /* ours again */
    }
}

static void test_registered(void **state)
{
    bsi_aio *a = open_with(*state, 8, 2, NULL);
    bsi_aio_register(a, buffer, READS / 2 * PAGE); /* reads inside, outside */
    submit(a, 0, READS);
    reap_all(a);
    bsi_aio_register(a, buffer, READS * PAGE); /* overlaps the first: replaces it */
    submit(a, 0, READS);
    reap_all(a);
    bsi_aio_register(a, buffer, 0);
    submit(a, 0, READS);
    reap_all(a);
    bsi_aio_close(a);
}

/* A file that took O_DIRECT at open and refuses the reads. */
static void test_refuse_direct(void **state)
{
    bsi_file f;
    assert_int_equal(bsi_file_open(file.path, false, &f), BS_OK);
    if (!f.direct) {
        bsi_file_close(&f);
        skip();
    }
    bsi_aio_fault fault = {.refuse_direct = true};
    bsi_aio *a = open_with(*state, 4, 2, &fault);
    tmpdir_log[0] = '\0';
    for (int i = 0; i < 8; i++) {
        page(i)->file = &f;
        assert_int_equal(bsi_aio_submit(a, &reads[i]), BS_OK);
    }
    reap_all(a);
    assert_int_equal(fcntl(f.fd, F_GETFL) & O_DIRECT, 0);
    const char *line = strstr(tmpdir_log, "direct reads are refused");
    assert_non_null(line);
    assert_null(strstr(line + 1, "direct reads are refused"));
    bsi_aio_close(a);
    bsi_file_close(&f);
}

static void test_buffered(void **state)
{
    bsi_file f;
    assert_int_equal(bsi_file_open(file.path, true, &f), BS_OK);
    plan p = {.draw = 3};
    bsi_aio_fault fault = {.result = noisy, .ud = &p};
    bsi_aio *a = open_with(*state, 4, 2, &fault);
    for (int i = 0; i < 50; i++) { /* any offset, length and memory */
        size_t at = (size_t)i * 3001, n = BSI_MIN((size_t)5000, BYTES - at);
        bsi_read r = {.file = &f, .offset = at, .length = n, .buffer = buffer + 1 + i};
        assert_int_equal(bsi_aio_submit(a, &r), BS_OK);
        assert_ptr_equal(reap(a), &r);
        check(&r);
    }
    bsi_aio_close(a);
    bsi_file_close(&f);
}

static void test_bad_reads(void **state)
{
    bsi_aio *a = open_with(*state, 4, 2, NULL);
    bsi_read r = {.file = &file, .offset = 41 * PAGE, .length = PAGE, .buffer = buffer};
    assert_int_equal(bsi_aio_submit(a, &r), BS_ARG);
    ASSERT_ERROR("/data'");
    r.offset = 0;
    r.length = 0;
    assert_int_equal(bsi_aio_submit(a, &r), BS_ARG);
    if (file.direct) {
        r.length = PAGE;
        r.offset = file.align / 2;
        assert_int_equal(bsi_aio_submit(a, &r), BS_ARG);
        r.offset = 0;
        r.buffer = buffer + file.align / 2;
        assert_int_equal(bsi_aio_submit(a, &r), BS_ARG);
        ASSERT_ERROR("is not aligned");
    }
    assert_int_equal(bsi_aio_in_flight(a), 0);
    bsi_aio_close(a);
}

static void test_no_memory(void **state)
{
    bsi_aio *a = NULL;
    bs_io_cfg cfg = {.engine = *state};
    if (strcmp(*state, "uring") == 0 && !have_uring)
        skip();
    size_t before = bs_host_bytes(BS_TAG_MISC);
    int fds = tmpdir_fds();
    uint64_t n = 1;
    for (; !a; n++) {
        bsi_alloc_fail_nth(n);
        bs_status ret = bsi_aio_open(&cfg, NULL, &a);
        bsi_alloc_fail_nth(0);
        if (ret == BS_OK)
            break;
        assert_int_equal(ret, BS_NOMEM);
        assert_int_equal(bs_host_bytes(BS_TAG_MISC), before);
    }
    assert_int_equal(n, 4);
    bsi_aio_close(a);
    assert_int_equal(bs_host_bytes(BS_TAG_MISC), before);
    assert_int_equal(tmpdir_fds(), fds);
}

static void test_choice(void **state)
{
    (void)state;
    bsi_aio *a;
    bsi_aio_fault f = {.refuse_uring = true};
    bs_io_cfg cfg = {.engine = "auto"};
    tmpdir_log[0] = '\0';
    assert_int_equal(bsi_aio_open(&cfg, &f, &a), BS_OK);
    assert_string_equal(bsi_aio_name(a), "pool");
    assert_non_null(strstr(tmpdir_log, "io_uring is "));
    assert_ptr_equal(strchr(tmpdir_log, '\n'), tmpdir_log + strlen(tmpdir_log) - 1); /* one line */
    bsi_aio_close(a);
    cfg.engine = "uring";
    assert_int_equal(bsi_aio_open(&cfg, &f, &a), BS_UNSUPPORTED);
    assert_null(a);
    cfg.engine = "turing";
    assert_int_equal(bsi_aio_open(&cfg, NULL, &a), BS_ARG);
    ASSERT_ERROR("'turing' is unknown");
    cfg = (bs_io_cfg){.depth = -1};
    assert_int_equal(bsi_aio_open(&cfg, NULL, &a), BS_ARG);
    cfg = (bs_io_cfg){.threads = 100000};
    assert_int_equal(bsi_aio_open(&cfg, NULL, &a), BS_ARG);
    assert_int_equal(bsi_aio_open(NULL, NULL, &a), BS_OK);
    assert_string_equal(bsi_aio_name(a), have_uring ? "uring" : "pool");
    bsi_aio_close(a);
}

static int setup(void **state)
{
    bsi_aio *a;
    bs_io_cfg cfg = {.engine = "uring"};
    if (tmpdir_open(state) != 0)
        return -1;
    for (uint32_t i = 0, x = 1; i < BYTES; i++, x = x * 1664525u + 1013904223u)
        content[i] = (unsigned char)(x >> 24);
    buffer = bsi_alloc_aligned(BS_TAG_MISC, READS * PAGE, PAGE);
    have_uring = bsi_aio_open(&cfg, NULL, &a) == BS_OK;
    if (have_uring)
        bsi_aio_close(a);
    return bsi_file_open(tmpdir_put("data", content, BYTES), false, &file) == BS_OK ? 0 : -1;
}

static int teardown(void **state)
{
    bsi_file_close(&file);
    bsi_free(buffer);
    return tmpdir_close(state);
}

#define BOTH(f)                                                                                        \
    {#f " uring", f, NULL, NULL, uring_name},                                                          \
    {                                                                                                  \
#f " pool", f, NULL, NULL, pool_name                                                           \
    }

int main(void)
{
    static char uring_name[] = "uring", pool_name[] = "pool";
    const struct CMUnitTest tests[] = {BOTH(test_content),           BOTH(test_order),
                                       BOTH(test_one_large),         BOTH(test_short),
                                       BOTH(test_interrupted),       BOTH(test_noise),
                                       BOTH(test_failing),           BOTH(test_shrunk),
                                       BOTH(test_reverse),           BOTH(test_delay),
                                       BOTH(test_close_in_flight),   BOTH(test_registered),
                                       BOTH(test_refuse_direct),     BOTH(test_buffered),
                                       BOTH(test_bad_reads),         BOTH(test_no_memory),
                                       cmocka_unit_test(test_choice)};
    return cmocka_run_group_tests(tests, setup, teardown);
}
