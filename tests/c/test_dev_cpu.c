/* SPDX-License-Identifier: Apache-2.0 */
/* The cpu device beyond the contract: its threads, its memory, its compute pool, its launches. */
#include "backend/cpu/cpu.h"
#include "dev_support.h"

#include <dirent.h>
#include <stdlib.h>
#include <unistd.h>

static bs_dev *dev_new(int threads, unsigned jitter_us)
{
    bs_dev *d;
    bs_dev_cfg cfg = {.threads = threads, .jitter_us = jitter_us, .jitter_seed = 5};
    OK(bs_dev_open("cpu", &cfg, &d));
    return d;
}

/* ---- threads --------------------------------------------------------------------------------- */

static bool read_line(const char *tid, const char *file, const char *key, char *out, int n)
{
    char path[300];
    bool found = false;
    snprintf(path, sizeof path, "/proc/self/task/%s/%s", tid, file);
    FILE *f = fopen(path, "r");
    while (f && !found && fgets(out, n, f))
        found = strncmp(out, key, strlen(key)) == 0;
    if (f)
        fclose(f);
    return found;
}

/* Threads whose name starts with prefix; each must have SIGINT and SIGTERM blocked. */
static int count_threads(const char *prefix)
{
    int n = 0;
    char line[256];
    DIR *dir = opendir("/proc/self/task");
    assert_non_null(dir);
    for (struct dirent *e; (e = readdir(dir));) {
        if (e->d_name[0] == '.' || !read_line(e->d_name, "comm", prefix, line, sizeof line))
            continue;
        n++;
        if (read_line(e->d_name, "status", "SigBlk:", line, sizeof line)) {
            unsigned long long mask = strtoull(line + 7, NULL, 16);
            assert_true(mask >> 1 & 1 && mask >> 14 & 1);
        }
    }
    closedir(dir);
    return n;
}

static void test_threads(void **state)
{
    (void)state;
    for (int round = 0; round < 3; round++) {
        bs_dev *d = dev_new(4, 0);
        bsi_queue *compute = queue_new(d, "compute"), *in = queue_new(d, "copy-in");
        assert_int_equal(count_threads("bs-q"), 2);
        assert_int_equal(count_threads("bs-k"), BS_TSAN ? 0 : 3); /* of the compute queue only */
        bsi_queue_close(compute);
        bsi_queue_close(in);
        bs_dev_close(d);
        /* Joined threads may be listed for a moment more. */
        int left = 1;
        for (int i = 0; i < 1000000 && left; i++)
            left = count_threads("bs-");
        assert_int_equal(left, 0);
    }
}

/* ---- memory ---------------------------------------------------------------------------------- */

static size_t resident(void)
{
    size_t total = 0, pages = 0;
    FILE *f = fopen("/proc/self/statm", "r");
    assert_non_null(f);
    assert_int_equal(fscanf(f, "%zu %zu", &total, &pages), 2);
    fclose(f);
    return pages * (size_t)sysconf(_SC_PAGESIZE);
}

static void test_memory(void **state)
{
    (void)state;
    bs_dev *d = dev_new(1, 0);
    bsi_queue *q = queue_new(d, "q");
    const size_t big = (size_t)512 << 20;
    size_t device = bs_host_bytes(BS_TAG_DEVICE), staging = bs_host_bytes(BS_TAG_STAGING),
           rss = resident();
    bsi_mem *m = mem_new(d, BSI_MEM_DEVICE, big), *small = mem_new(d, BSI_MEM_DEVICE, 1000);
    bsi_mem *pinned = mem_new(d, BSI_MEM_PINNED, 5000), *slot = mem_new(d, BSI_MEM_PINNED, 3 << 20);
    assert_null(m->host);
    assert_null(small->host);
    assert_int_equal((uintptr_t)pinned->host % 4096, 0);
    assert_int_equal((uintptr_t)slot->host % 4096, 0);
    assert_int_equal(bs_host_bytes(BS_TAG_DEVICE), device + big + 1000);
    assert_int_equal(bs_host_bytes(BS_TAG_STAGING), staging + 5000 + (3 << 20));
    OK(bsi_copy(q, at(slot, 0), at(m, big - 100), 100)); /* memory that nobody wrote reads as zero */
    OK(bsi_fill(q, at(m, big - 1), 7, 1));
    OK(bsi_copy(q, at(slot, 1), at(m, big - 1), 1));
    OK(bsi_host_wait_queue(q));
    assert_int_equal(((char *)slot->host)[0], 0);
    assert_int_equal(((char *)slot->host)[1], 7);
    assert_true(resident() < rss + big / 8); /* what is not used costs nothing */
    bsi_mem_free(m);
    bsi_mem_free(small);
    bsi_mem_free(pinned);
    bsi_mem_free(slot);
    assert_int_equal(bs_host_bytes(BS_TAG_DEVICE), device);
    assert_int_equal(bs_host_bytes(BS_TAG_STAGING), staging);
    bsi_mem *none;
    FAILS(bsi_mem_alloc(d, BSI_MEM_DEVICE, BS_TAG_DEVICE, SIZE_MAX / 4, &none), BS_DEVMEM,
          "device memory");
    FAILS(bsi_mem_alloc(d, BSI_MEM_PINNED, BS_TAG_HOME, SIZE_MAX / 4, &none), BS_NOMEM,
          "ram homes memory");
    assert_null(none);
    bsi_queue_close(q);
    bs_dev_close(d);
}

/* Two queues that wait for each other: nodes and marks come back with the queries. */
static void rounds(bs_dev *d, bsi_queue *a, bsi_queue *b, bsi_mem *m, int n)
{
    bsi_event *e = event_new(d), *f = event_new(d);
    for (int i = 0; i < n; i++) {
        OK(bsi_fill(a, at(m, 0), i & 255, 64));
        OK(bsi_event_record(e, a));
        OK(bsi_queue_wait(b, e, "cpu: b after a"));
        OK(bsi_fill(b, at(m, 0), i & 255, 64));
        OK(bsi_event_record(f, b));
        OK(bsi_queue_wait(a, f, "cpu: a after b"));
        if (i % 64 == 63) {
            OK(bsi_host_wait(e));
            OK(bsi_host_wait(f));
        }
    }
    bsi_event_close(e);
    bsi_event_close(f);
}

static void test_steady_state(void **state)
{
    (void)state;
    bs_dev *d = dev_new(1, 0);
    bsi_queue *a = queue_new(d, "a"), *b = queue_new(d, "b");
    bsi_mem *m = mem_new(d, BSI_MEM_DEVICE, 64);
    rounds(d, a, b, m, 256);
    size_t before = bs_host_bytes(BS_TAG_MISC);
    rounds(d, a, b, m, 4096);
    assert_int_equal(bs_host_bytes(BS_TAG_MISC), before);
    bsi_mem_free(m);
    bsi_queue_close(a);
    bsi_queue_close(b);
    bs_dev_close(d);
}

/* Without any query: the list is cut behind a worker that keeps up. (A race detector must not see the
   issuing thread look at a worker, so there the list grows until the next query.) */
static void test_steady_state_without_queries(void **state)
{
    (void)state;
    if (BS_TSAN)
        skip();
    bs_dev *d = dev_new(1, 0);
    bsi_queue *q = queue_new(d, "q");
    bsi_mem *m = mem_new(d, BSI_MEM_DEVICE, 64);
    size_t before = 0;
    sem_t gate, reached;
    sem_init(&reached, 0, 0);
    for (int round = 0; round < 40; round++) {
        gate_close(q, &gate); /* every round has all its nodes at once */
        for (int i = 0; i < 510; i++)
            OK(bsi_fill(q, at(m, 0), 1, 64));
        OK(bsi_host_fn(q, post, &reached));
        sem_post(&gate);
        gate_hold(&reached);
        if (round == 4)
            before = bs_host_bytes(BS_TAG_MISC);
    }
    /* The worker may be one node behind its last post. 35 rounds that were kept would be megabytes. */
    assert_true(bs_host_bytes(BS_TAG_MISC) <= before + 65536);
    bsi_mem_free(m);
    bsi_queue_close(q);
    bs_dev_close(d);
    sem_destroy(&reached);
}

/* ---- compute pool ---------------------------------------------------------------------------- */

enum { TASKS = 64 };

typedef struct job {
    bsk_par *par;
    _Atomic int runs[TASKS], nested;
} job;

static void count_nested(void *arg, int64_t i)
{
    (void)i;
    atomic_fetch_add(&((job *)arg)->nested, 1);
}

static void count_run(void *arg, int64_t i)
{
    job *j = arg;
    atomic_fetch_add(&j->runs[i], 1);
    if (i % 16 == 0)
        j->par->run(j->par, 3, count_nested, j);
}

static void test_pool(void **state)
{
    (void)state;
    cpu_pool *p;
    OK(bsi_cpu_pool_open(3, &p));
    job j = {.par = bsi_cpu_pool_par(p)};
    const int64_t sizes[] = {TASKS, 0, 1, 2, TASKS / 2};
    int want[TASKS] = {0}, nested = 0;
    for (int round = 0; round < 500; round++) {
        int64_t n = sizes[(size_t)round % BSI_COUNT(sizes)];
        j.par->run(j.par, n, count_run, &j);
        for (int64_t i = 0; i < n; i++) {
            want[i]++;
            nested += i % 16 == 0 ? 3 : 0;
        }
        assert_int_equal(atomic_load(&j.nested), nested); /* all done when run returns */
    }
    for (int i = 0; i < TASKS; i++)
        assert_int_equal(atomic_load(&j.runs[i]), want[i]);
    bsi_cpu_pool_close(p);
    bsi_cpu_pool_close(NULL);
}

/* ---- launches -------------------------------------------------------------------------------- */

enum { M = 70, N = 90, K = 50 };

/* C = A B + bias rows on a compute queue of so many threads. */
static void product(const char *spec, int threads, float *out)
{
    bs_dev *d;
    bs_dev_cfg cfg = {.threads = threads};
    OK(bs_dev_open(spec, &cfg, &d));
    bsi_queue *q = queue_new(d, "compute");
    const size_t a = 0, b = a + M * K * 4, c = b + K * N * 4, bias = c + M * N * 4, end = bias + N * 4;
    bsi_mem *host = mem_new(d, BSI_MEM_PINNED, end), *m = mem_new(d, BSI_MEM_DEVICE, end);
    float *h = host->host;
    for (size_t i = 0; i < end / 4; i++)
        h[i] = (float)((int)(i * 7 % 23) - 11) / 8;
    OK(bsi_copy(q, at(m, 0), at(host, 0), end));
    bsi_kcall gemm = {.op = BSK_GEMM,
                      .n_args = 3,
                      .arg = {{at(m, a), M * K * 4, BSI_READ},
                              {at(m, b), K * N * 4, BSI_READ},
                              {at(m, c), M * N * 4, BSI_READWRITE}},
                      .n = {0, 0, M, N, K, K, N, N},
                      .f = {1, 0},
                      .label = "test product"};
    bsi_kcall add = {.op = BSK_BIAS,
                     .n_args = 2,
                     .arg = {{at(m, c), M * N * 4, BSI_READWRITE}, {at(m, bias), N * 4, BSI_READ}},
                     .n = {M, N},
                     .label = "test bias"};
    OK(bsi_launch(q, &gemm));
    OK(bsi_launch(q, &add));
    OK(bsi_copy(q, at(host, c), at(m, c), M * N * 4));
    OK(bsi_host_wait_queue(q));
    for (int i = 0; i < M; i++) {
        for (int j = 0; j < N; j++) {
            double want = (double)h[bias / 4 + (size_t)j];
            for (int k = 0; k < K; k++)
                want += (double)h[i * K + k] * (double)h[b / 4 + (size_t)(k * N + j)];
            assert_true(want - (double)h[c / 4 + (size_t)(i * N + j)] == 0); /* all values are exact */
        }
    }
    memcpy(out, h + c / 4, M * N * 4);
    assert_int_equal(bs_dev_violations(d, NULL), 0);
    bsi_mem_free(host);
    bsi_mem_free(m);
    bsi_queue_close(q);
    bs_dev_close(d);
}

static void test_launch(void **state)
{
    (void)state;
    static float one[M * N], four[M * N], checked[M * N];
    product("cpu", 1, one);
    product("cpu", 4, four);
    product("check:cpu", 0, checked);
    assert_memory_equal(one, four, sizeof one);
    assert_memory_equal(one, checked, sizeof one);
}

static void test_launch_failure_names_label(void **state)
{
    (void)state;
    bs_dev *d;
    bs_dev_cfg cfg = {.fail_call = 2};
    OK(bs_dev_open("cpu", &cfg, &d));
    bsi_queue *q = queue_new(d, "compute");
    bsi_mem *m = mem_new(d, BSI_MEM_DEVICE, 256);
    bsi_kcall call = {.op = BSK_SCALE,
                      .n_args = 2,
                      .arg = {{at(m, 0), 64, BSI_READ}, {at(m, 64), 64, BSI_WRITE}},
                      .n = {16},
                      .f = {2},
                      .label = "layers.3.mlp"};
    OK(bsi_fill(q, at(m, 0), 0, 256));
    OK(bsi_launch(q, &call));
    FAILS(bsi_host_wait_queue(q), BS_DEVICE, "'layers.3.mlp' on queue 'compute'");
    bsi_mem_free(m);
    bsi_queue_close(q);
    bs_dev_close(d);
}

/* Jitter long enough to sleep changes nothing but time. */
static void test_jitter(void **state)
{
    (void)state;
    bs_dev *d = dev_new(1, 300);
    bsi_queue *a = queue_new(d, "a"), *b = queue_new(d, "b");
    bsi_mem *m = mem_new(d, BSI_MEM_PINNED, 64);
    rounds(d, a, b, m, 65);
    OK(bsi_host_wait_queue(b));
    assert_int_equal(((unsigned char *)m->host)[63], 64);
    bsi_mem_free(m);
    bsi_queue_close(a);
    bsi_queue_close(b);
    bs_dev_close(d);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_threads),
        cmocka_unit_test(test_memory),
        cmocka_unit_test(test_steady_state),
        cmocka_unit_test(test_steady_state_without_queries),
        cmocka_unit_test(test_pool),
        cmocka_unit_test(test_launch),
        cmocka_unit_test(test_launch_failure_names_label),
        cmocka_unit_test(test_jitter),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
