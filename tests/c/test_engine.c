/* SPDX-License-Identifier: Apache-2.0 */
/* The engine: its pool close to the largest size, what a refusal leaves of a micro-batch, two engines of a device. */
#include "dev_support.h"
#include "engine/engine.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

static void fails(bs_status got, bs_status want, const char *text)
{
    assert_string_equal(bs_status_name(got), bs_status_name(want));
    if (!strstr(bs_error()->msg, text))
        fail_msg("'%s' is not in '%s'", text, bs_error()->msg);
}

/* Sizes that rounding up turns into 0. */
static void test_huge_sizes(void **state)
{
    (void)state;
    bs_dev *d;
    bs_engine *e;
    bsi_addr at;
    OK(bs_dev_open("cpu", NULL, &d));
    OK(bs_engine_open(&(bs_engine_cfg){.dev = d, .pool_bytes = 1 << 20}, &e));
    for (size_t less = 0; less < 300; less += 17)
        fails(bsi_pool_region(e->pool, "x", SIZE_MAX - less, &at), BS_DEVMEM, "raise vram=");
    OK(bs_engine_seal(e));
    for (size_t less = 0; less < 300; less += 17)
        fails(bsi_arena_take(e->pool, SIZE_MAX - less, &at), BS_DEVMEM, "does not fit");
    OK(bsi_arena_take(e->pool, 1000, &at));
    bsi_arena_give(e->pool, at, 1000);
    bs_engine_close(e);
    bs_dev_close(d);
}

/* A refused micro-batch is the one that it was: on the host, and what the device computes with. */
static void test_refused_batch(void **state)
{
    (void)state;
    bs_dev *d;
    bs_engine *e;
    bs_batch *b;
    OK(bs_dev_open("cpu", NULL, &d));
    OK(bs_engine_open(&(bs_engine_cfg){.dev = d, .pool_bytes = 1 << 20}, &e));
    OK(bs_batch_open(e, &(bs_batch_cfg){.micros = 1, .tokens = 8, .rows = 2}, &b));
    OK(bs_engine_seal(e));
    int64_t len[] = {3, 2}, ids[] = {1, 2, 3, 4, 5}, labels[] = {1, 2, 3, 4, 5}, row_id[] = {7, 9};
    OK(bs_batch_set(b, 0, &(bs_micro){2, len, ids, labels, row_id, NULL}));
    bsi_micro kept = b->micro[0];
    const int64_t wrong[] = {-1, (int64_t)INT32_MAX + 1};
    for (int i = 0; i < 2; i++) {
        int64_t bad_ids[] = {9, 9, 9, 9, wrong[i]}, bad_labels[] = {8, 8, 8, 8, -5}, bad_row[] = {7, 9};
        fails(bs_batch_set(b, 0, &(bs_micro){2, len, bad_ids, labels, row_id, NULL}), BS_ARG,
              "token 4");
        fails(bs_batch_set(b, 0, &(bs_micro){2, len, ids, bad_labels, row_id, NULL}), BS_ARG,
              "label of token 4");
        bad_row[1] = i ? INT64_MAX : (int64_t)INT32_MIN - 1;
        fails(bs_batch_set(b, 0, &(bs_micro){2, len, bad_labels, NULL, bad_row, NULL}), BS_ARG,
              "row 1");
        assert_memory_equal(&b->micro[0], &kept, sizeof kept);
        for (int t = 0; t < 5; t++)
            assert_int_equal(b->micro[0].ids[t], t + 1);
        for (int t = 0; t < 3; t++)
            assert_int_equal(b->micro[0].target[t], ((int[]){2, 3, 5})[t]);
    }
    bs_batch_close(b);
    bs_engine_close(e);
    bs_dev_close(d);
}

/* What advances the first engine's transfers goes on when a second one is refused. */
static void test_second_engine_refused(void **state)
{
    (void)state;
    bs_dev *d;
    bs_engine *e, *other;
    OK(bs_dev_open("cpu", NULL, &d));
    OK(bs_engine_open(&(bs_engine_cfg){.dev = d, .pool_bytes = 1 << 20}, &e));
    OK(bs_engine_seal(e));
    fails(
        bs_engine_open(&(bs_engine_cfg){.dev = d, .pool_bytes = 4096, .expand_bytes = 1 << 20}, &other),
        BS_DEVMEM, "expand");
    assert_ptr_equal(d->pump_ud, e);
    assert_non_null(d->pump);
    bs_engine_close(e);
    assert_null(d->pump);
    bs_dev_close(d);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_huge_sizes),
                                       cmocka_unit_test(test_refused_batch),
                                       cmocka_unit_test(test_second_engine_refused)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
