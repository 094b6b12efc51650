/* SPDX-License-Identifier: Apache-2.0 */
/* Boundaries: every key comes back as it was put, whatever the timing; every wait is needed. */
#include "stream_fixture.h"

enum { C = 96, CAP = 40, MICROS = 2, LAYERS = 5 };

typedef struct box {
    bs_dev *dev;
    bs_engine *e;
    bs_batch *b;
    bs_store *s;
    bsi_addr scratch; /* what is put comes from here: [CAP, C] per value */
    int value;        /* of the next put; 0: the scratch is still empty */
} box;

enum { VALUES = 24 };

static void box_open(box *x, const char *spec, const char *drop, unsigned jitter, int n,
                     const bs_store_key *keys)
{
    size_t device, host, place = CAP * C * sizeof(float);
    memset(x, 0, sizeof *x);
    bs_batch_cfg bc = {MICROS, CAP, 4};
    bs_dev_cfg dc = {.threads = 1, .drop_wait = drop, .jitter_us = jitter, .jitter_seed = 5};
    OK(bs_dev_open(spec, &dc, &x->dev));
    OK(bs_store_bytes(&bc, n, keys, &device, &host));
    bool meta = strcmp(spec, "meta") == 0;
    bs_engine_cfg ec = {.dev = x->dev, .pool_bytes = meta ? 0 : device + VALUES * place + (1 << 16)};
    OK(bs_engine_open(&ec, &x->e));
    OK(bs_batch_open(x->e, &bc, &x->b));
    for (int j = 0; j < MICROS; j++) {
        int64_t len = 30 + j, ids[CAP] = {0};
        OK(bs_batch_set(x->b, j, &(bs_micro){.n_rows = 1, .row_len = &len, .ids = ids}));
    }
    OK(bs_batch_begin(x->b, MICROS));
    OK(bsi_pool_region(x->e->pool, "scratch", VALUES * place, &x->scratch));
    bs_engine_stats before, after;
    size_t pinned = bs_host_bytes(BS_TAG_BOUNDARY);
    bs_store_stats st;
    bs_engine_stats_get(x->e, &before);
    OK(bs_store_open(x->e, x->b, n, keys, &x->s));
    bs_engine_stats_get(x->e, &after);
    assert_int_equal(after.fixed_bytes - before.fixed_bytes, device);
    if (x->e->props.executes)
        assert_int_equal(bs_host_bytes(BS_TAG_BOUNDARY) - pinned, host);
    bs_store_stats_get(x->s, &st);
    assert_int_equal(st.device_bytes, device);
    assert_int_equal(st.host_bytes, host);
}

static void box_close(box *x)
{
    bs_store_close(x->s);
    bs_batch_close(x->b);
    bs_engine_close(x->e);
    bs_dev_close(x->dev);
}

static float value_at(int value, int64_t i)
{
    return (float)(value * 100000 + i % 5000);
}

/* Put a fresh value, known by its number, of `rows` rows. */
static int put(box *x, int key, int micro, int64_t rows)
{
    static float data[CAP * C];
    int value = ++x->value;
    assert_true(value <= VALUES);
    for (int64_t i = 0; i < CAP * C; i++)
        data[i] = value_at(value, i);
    bsi_addr at = bsi_addr_add(x->scratch, (size_t)(value - 1) * sizeof data);
    OK(bsi_engine_write(x->e, at, data, sizeof data));
    bs_place from = bsi_place(at, BS_DTYPE_F32, rows, CAP, C);
    OK(bs_store_put(x->s, key, micro, &from));
    return value;
}

static void assert_holds(box *x, int key, int micro, int value, int64_t rows)
{
    bs_array *a;
    OK(bs_store_read(x->s, key, micro, &a));
    assert_int_equal(a->dim[0], rows);
    assert_int_equal(a->dim[1], C);
    for (int64_t i = 0; i < rows * C; i++)
        if (bs_array_get(a, i) != (double)value_at(value, i))
            fail_msg("key %d micro %d element %lld: %g, put as %g", key, micro, (long long)i,
                     bs_array_get(a, i), (double)value_at(value, i));
    bs_array_free(a);
}

#define KEY(n, k)                                                                                      \
    {                                                                                                  \
        .name = n, .channels = C, .dtype = BS_DTYPE_F32, .stay = k                                     \
    }
static const bs_store_key walk_keys[] = {KEY("h.0", BS_STAY_HOST), KEY("h.1", BS_STAY_HOST),
                                         KEY("h.2", BS_STAY_HOST), KEY("h.3", BS_STAY_HOST),
                                         KEY("h.4", BS_STAY_PASS), KEY("g", BS_STAY_DEVICE)};

/* A training step's pattern: layer inputs out in forward, back one visit ahead in backward, three
 * steps. */
static void walk(const char *spec, unsigned jitter)
{
    box x;
    box_open(&x, spec, NULL, jitter, 6, walk_keys);
    for (int step = 0; step < 3; step++) {
        int v[LAYERS][MICROS];
        x.value = step; /* other numbers in each step */
        for (int l = 0; l < LAYERS; l++)
            for (int j = 0; j < MICROS; j++) {
                v[l][j] = put(&x, l, j, 30 + j);
                if (l)
                    assert_holds(&x, l - 1, j, v[l - 1][j], 30 + j); /* the input of this layer */
            }
        for (int l = LAYERS - 1; l >= 0; l--) {
            if (l)
                OK(bs_store_fetch(x.s, l - 1));
            for (int j = 0; j < MICROS; j++) {
                assert_holds(&x, l, j, v[l][j], 30 + j);
                assert_holds(&x, 5, j, put(&x, 5, j, 30 + j), 30 + j);
            }
        }
        OK(bs_engine_wait_all(x.e));
    }
    bs_store_stats st;
    const char *text = "";
    size_t one = (30 + 31) * C * sizeof(float);
    bs_store_stats_get(x.s, &st);
    assert_int_equal(st.out_bytes, 3 * 4 * one);  /* rows in use only */
    assert_int_equal(st.back_bytes, 3 * 3 * one); /* h.3 was still there */
    if (bs_dev_violations(x.dev, &text))
        fail_msg("%s", text);
    box_close(&x);
}

static void test_walk(void **state)
{
    (void)state;
    walk("cpu", 0);
    walk("check:cpu", 0);
    walk("cpu", 30);
    walk("check:cpu", 30);
}

static void test_places(void **state)
{
    (void)state;
    const bs_store_key keys[] = {KEY("p0", BS_STAY_PASS), KEY("p1", BS_STAY_PASS),
                                 KEY("p2", BS_STAY_PASS), KEY("d", BS_STAY_DEVICE),
                                 KEY("h", BS_STAY_HOST)};
    box x;
    bs_place at, again;
    box_open(&x, "check:cpu", NULL, 0, 5, keys);
    assert_int_equal(bs_store_get(x.s, 3, 0, &at), BS_STATE);
    ASSERT_ERROR("'d' of micro-batch 0");
    int v0 = put(&x, 0, 1, 7), v1 = put(&x, 1, 1, 0);
    assert_holds(&x, 0, 1, v0, 7); /* one later key: alive */
    assert_holds(&x, 1, 1, v1, 0);
    put(&x, 2, 1, 3);
    assert_int_equal(bs_store_get(x.s, 0, 1, &at), BS_STATE); /* two later keys */
    ASSERT_ERROR("two later keys");
    int h = put(&x, 4, 1, 5);
    put(&x, 0, 1, 5);
    put(&x, 1, 1, 5);
    assert_int_equal(bs_store_get(x.s, 4, 1, &at), BS_STATE);
    ASSERT_ERROR("fetch it first");
    assert_int_equal(bs_store_fetch(x.s, 4), BS_STATE); /* micro-batch 0 was never put */
    ASSERT_ERROR("'h' of micro-batch 0");
    OK(bs_batch_begin(x.b, 1));
    assert_int_equal(bs_store_fetch(x.s, 4), BS_STATE);
    int h0 = put(&x, 4, 0, 9);
    OK(bs_store_fetch(x.s, 4)); /* there */
    assert_holds(&x, 4, 0, h0, 9);
    (void)h;
    /* Zero, accumulate in place, put the same place: nothing is copied and the place stays. */
    OK(bs_store_zero(x.s, 3, 0));
    OK(bs_store_get(x.s, 3, 0, &at));
    assert_int_equal(at.rows, 30);
    assert_int_equal(at.capacity, CAP);
    bs_array *a;
    OK(bs_store_read(x.s, 3, 0, &a));
    for (int64_t i = 0; i < 30 * C; i++)
        assert_true(bs_array_get(a, i) == 0);
    bs_array_free(a);
    OK(bs_store_put(x.s, 3, 0, &at));
    OK(bs_store_get(x.s, 3, 0, &again));
    assert_ptr_equal(at.mem, again.mem);
    assert_int_equal(at.off, again.off);
    assert_int_equal(bs_dev_violations(x.dev, NULL), 0);
    box_close(&x);
}

/* All micro-batches of a key that stays: the first one's place, and how far each lies behind the one before. */
static void test_all(void **state)
{
    (void)state;
    const bs_store_key keys[] = {KEY("p", BS_STAY_PASS),
                                 KEY("h", BS_STAY_HOST),
                                 KEY("d", BS_STAY_DEVICE),
                                 {"odd", 7, BS_DTYPE_F32, BS_STAY_DEVICE},
                                 {"half", 5, BS_DTYPE_BF16, BS_STAY_DEVICE}};
    box x;
    bs_place first, at;
    int64_t stride = 0;
    box_open(&x, "check:cpu", NULL, 0, 5, keys);
    assert_int_equal(bs_store_get_all(x.s, 2, &first, &stride), BS_STATE);
    ASSERT_ERROR("'d' of micro-batch 0 is not there");
    put(&x, 2, 0, 9);
    assert_int_equal(bs_store_get_all(x.s, 2, &first, &stride), BS_STATE);
    ASSERT_ERROR("'d' of micro-batch 1 is not there");
    for (int k = 2; k < 5; k++) {
        for (int j = 0; j < MICROS; j++)
            OK(bs_store_zero(x.s, k, j));
        OK(bs_store_get_all(x.s, k, &first, &stride));
        assert_true(stride >= CAP * keys[k].channels && first.channels == keys[k].channels);
        for (int j = 0; j < MICROS; j++) {
            OK(bs_store_get(x.s, k, j, &at));
            assert_ptr_equal(at.mem, first.mem);
            assert_int_equal(at.off, first.off + (size_t)(j * stride) * bs_dtype_size(keys[k].dtype));
        }
    }
    for (int k = 0; k < 2; k++) {
        for (int j = 0; j < MICROS; j++)
            put(&x, k, j, 3);
        assert_int_equal(bs_store_get_all(x.s, k, &first, &stride), BS_STATE);
        ASSERT_ERROR("does not stay on the device");
    }
    assert_int_equal(bs_store_get_all(x.s, 5, &first, &stride), BS_ARG);
    assert_int_equal(bs_store_get_all(x.s, -1, &first, &stride), BS_ARG);
    box_close(&x);
}

static void test_halves(void **state)
{
    (void)state;
    const bs_store_key key = {.name = "b", .channels = C, .dtype = BS_DTYPE_BF16, .stay = BS_STAY_HOST};
    uint16_t data[4 * C];
    box x;
    bs_array *a;
    box_open(&x, "cpu", NULL, 0, 1, &key);
    for (int i = 0; i < 4 * C; i++)
        data[i] = bsi_f32_to_bf16((float)i / 8);
    OK(bsi_engine_write(x.e, x.scratch, data, sizeof data));
    bs_place from = bsi_place(x.scratch, BS_DTYPE_BF16, 4, CAP, C);
    OK(bs_store_put(x.s, 0, 0, &from));
    OK(bs_store_read(x.s, 0, 0, &a));
    assert_int_equal(a->dtype, BS_DTYPE_F32);
    for (int i = 0; i < 4 * C; i++)
        assert_true(bs_array_get(a, i) == (double)bsi_bf16_to_f32(data[i]));
    bs_array_free(a);
    box_close(&x);
}

static void test_refused(void **state)
{
    (void)state;
    const bs_store_key keys[] = {KEY("p", BS_STAY_PASS)};
    box x;
    bs_place at;
    box_open(&x, "cpu", NULL, 0, 1, keys);
    bs_place from = bsi_place(x.scratch, BS_DTYPE_F32, CAP + 1, CAP + 1, C);
    assert_int_equal(bs_store_put(x.s, 0, 0, &from), BS_SHAPE);
    ASSERT_ERROR("'p' holds up to 40 rows, given 41");
    from.rows = 1, from.channels = C + 1;
    assert_int_equal(bs_store_put(x.s, 0, 0, &from), BS_SHAPE);
    from.channels = C, from.dtype = BS_DTYPE_F16;
    assert_int_equal(bs_store_put(x.s, 0, 0, &from), BS_SHAPE);
    assert_int_equal(bs_store_get(x.s, 1, 0, &at), BS_ARG);
    assert_int_equal(bs_store_get(x.s, 0, MICROS, &at), BS_ARG);
    bs_store *none;
    bs_store_key bad = {.name = "big", .channels = INT64_MAX / 2, .dtype = BS_DTYPE_F32};
    assert_int_equal(bs_store_open(x.e, x.b, 1, &bad, &none), BS_ARG);
    ASSERT_ERROR("'big'");
    box_close(&x);
}

/* Everything that needs one of the waits, and nothing that orders it otherwise. */
static int hazards(const char *spec, const char *drop, const char **text)
{
    static char kept[8192];
    const bs_store_key keys[] = {KEY("h.0", BS_STAY_HOST), KEY("h.1", BS_STAY_HOST),
                                 KEY("p", BS_STAY_PASS), KEY("q", BS_STAY_PASS)};
    box x;
    bs_place at;
    box_open(&x, spec, drop, 0, 4, keys);
    OK(bs_batch_begin(x.b, 1));
    put(&x, 0, 0, 9);           /* h.0 -> A, copied out after the put */
    put(&x, 1, 0, 9);           /* h.1 -> B */
    put(&x, 2, 0, 9);           /* p -> A: after h.0's copy out */
    OK(bs_store_fetch(x.s, 0)); /* h.0 -> B: after h.1's copy out */
    OK(bs_store_get(x.s, 0, 0, &at));
    put(&x, 3, 0, 9);                 /* q -> A */
    put(&x, 2, 0, 9);                 /* p -> B */
    put(&x, 3, 0, 9);                 /* q, still A */
    OK(bs_store_fetch(x.s, 0));       /* h.0 -> B: after the last use of p */
    put(&x, 3, 0, 9);                 /* q, still A */
    OK(bs_store_fetch(x.s, 1));       /* h.1 -> B; nobody asked for h.0 */
    put(&x, 0, 0, 9);                 /* h.0 -> A; its pinned memory may still be read by its fetch */
    OK(bs_store_get(x.s, 1, 0, &at)); /* after the fetch */
    bs_place to = bsi_place(bsi_addr_add(x.scratch, (VALUES - 1) * CAP * C * sizeof(float)),
                            BS_DTYPE_F32, 9, CAP, C);
    OK(bsi_copy(x.e->compute, bsi_place_addr(&to), bsi_place_addr(&at), 9 * C * sizeof(float)));
    put(&x, 2, 0, 9);           /* p -> B */
    put(&x, 3, 0, 9);           /* q -> A */
    OK(bs_store_fetch(x.s, 1)); /* h.1 -> B */
    put(&x, 1, 0, 9);           /* over a fetch that nobody waited for */
    OK(bs_engine_wait_all(x.e));
    const char *t = "";
    int n = bs_dev_violations(x.dev, &t);
    snprintf(kept, sizeof kept, "%s", t ? t : "");
    *text = kept;
    box_close(&x);
    return n;
}

static void test_waits_are_needed(void **state)
{
    (void)state;
    const char *text;
    if (hazards("check:cpu", NULL, &text))
        fail_msg("%s", text);
    const char *const *site;
    char mine[16][64];
    int all = bsi_wait_sites(&site), n = 0;
    for (int i = 0; i < all; i++)
        if (strncmp(site[i], "boundary:", 9) == 0)
            snprintf(mine[n++], sizeof mine[0], "%s", site[i]);
    assert_int_equal(n, 7);
    for (int i = 0; i < 2 * n; i++) {
        /* A dropped wait is a real race on a device that executes: not for ThreadSanitizer. */
        const char *spec = i % 2 && !BS_TSAN ? "check:cpu" : "check:meta";
        if (hazards(spec, mine[i / 2], &text) == 0)
            fail_msg("'%s' can be left out on %s", mine[i / 2], spec);
        if (!strstr(text, mine[i / 2]))
            fail_msg("'%s' is not named in: %s", mine[i / 2], text);
    }
}

static void test_no_memory(void **state)
{
    (void)state;
    box x;
    box_open(&x, "meta", NULL, 0, 6,
             walk_keys); /* its pool is unbounded: every attempt takes regions */
    bs_status st = BS_NOMEM;
    for (uint64_t n = 1; st != BS_OK; n++) {
        bs_store *s;
        bsi_alloc_fail_nth(n);
        st = bs_store_open(x.e, x.b, 6, walk_keys, &s);
        bsi_alloc_fail_nth(0);
        if (st == BS_OK)
            bs_store_close(s);
        else
            assert_int_equal(st, BS_NOMEM);
    }
    box_close(&x);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_walk),
                                       cmocka_unit_test(test_places),
                                       cmocka_unit_test(test_all),
                                       cmocka_unit_test(test_halves),
                                       cmocka_unit_test(test_no_memory),
                                       cmocka_unit_test(test_refused),
                                       cmocka_unit_test(test_waits_are_needed)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
