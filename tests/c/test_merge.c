/* SPDX-License-Identifier: Apache-2.0 */
/* Merging an adapter into a weight: against f64, every dtype, threads, what does not fit. */
#include "base/base.h"
#include "bs.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

static bs_array *array(bs_dtype t, int64_t rows, int64_t cols, double step)
{
    bs_array *a;
    assert_int_equal(bs_array_new(t, 2, (int64_t[]){rows, cols}, &a), BS_OK);
    for (int64_t i = 0; i < rows * cols; i++)
        bs_array_set(a, i, sin(step * (double)(i + 1)));
    return a;
}

/* Three pieces of rows and a rest: 700 columns make pieces of 374. */
enum { OUT = 1000, IN = 700, R = 5 };

static void merged(bs_dtype t, int threads, bs_array **out)
{
    bs_array *w = array(t, OUT, IN, 0.37), *a = array(BS_DTYPE_F32, R, IN, 0.11),
             *b = array(BS_DTYPE_F32, OUT, R, 0.73);
    assert_int_equal(bs_lora_merge(w, a, b, 0.25, threads), BS_OK);
    bs_array_free(a);
    bs_array_free(b);
    *out = w;
}

static void test_numbers(void **state)
{
    (void)state;
    static const struct {
        bs_dtype t;
        double half_ulp;
    } kinds[] = {{BS_DTYPE_F32, 0x1p-24}, {BS_DTYPE_BF16, 0x1p-8}, {BS_DTYPE_F16, 0x1p-11}};
    bs_array *a = array(BS_DTYPE_F32, R, IN, 0.11), *b = array(BS_DTYPE_F32, OUT, R, 0.73);
    for (size_t k = 0; k < BSI_COUNT(kinds); k++) {
        bs_array *before = array(kinds[k].t, OUT, IN, 0.37), *after;
        merged(kinds[k].t, 1, &after);
        for (int64_t i = 0; i < OUT; i++)
            for (int64_t j = 0; j < IN; j++) {
                double want = bs_array_get(before, i * IN + j);
                for (int64_t r = 0; r < R; r++)
                    want += 0.25 * bs_array_get(b, i * R + r) * bs_array_get(a, r * IN + j);
                double slack = kinds[k].half_ulp * fabs(want) + 1e-6;
                if (!(fabs(bs_array_get(after, i * IN + j) - want) <= slack))
                    fail_msg("%s [%d, %d]: %g, expected %g", bs_dtype_name(kinds[k].t), (int)i, (int)j,
                             bs_array_get(after, i * IN + j), want);
            }
        bs_array_free(before);
        bs_array_free(after);
    }
    bs_array_free(a);
    bs_array_free(b);
}

static void test_threads(void **state)
{
    (void)state;
    bs_array *one, *many;
    size_t staging = bs_host_bytes(BS_TAG_STAGING);
    merged(BS_DTYPE_BF16, 1, &one);
    for (int threads = 0; threads < 5; threads++) {
        merged(BS_DTYPE_BF16, threads, &many);
        assert_memory_equal(one->data, many->data, one->bytes);
        bs_array_free(many);
    }
    assert_int_equal(bs_host_bytes(BS_TAG_STAGING), staging);
    bs_array_free(one);
}

static void test_refused(void **state)
{
    (void)state;
    bs_array *w = array(BS_DTYPE_F32, 4, 6, 1), *a = array(BS_DTYPE_F32, 2, 6, 1),
             *b = array(BS_DTYPE_F32, 4, 2, 1), *half = array(BS_DTYPE_BF16, 2, 6, 1),
             *whole = array(BS_DTYPE_I32, 4, 6, 1);
    uint64_t hash = bs_array_hash(w);
    assert_int_equal(bs_lora_merge(w, b, a, 1, 1), BS_SHAPE);
    assert_int_equal(bs_lora_merge(a, w, b, 1, 1), BS_SHAPE);
    assert_int_equal(bs_lora_merge(w, half, b, 1, 1), BS_DTYPE);
    assert_int_equal(bs_lora_merge(whole, a, b, 1, 1), BS_DTYPE);
    bsi_alloc_fail_nth(1);
    assert_int_equal(bs_lora_merge(w, a, b, 1, 1), BS_NOMEM);
    assert_true(bs_array_hash(w) == hash);
    bs_array *all[] = {w, a, b, half, whole};
    for (size_t i = 0; i < BSI_COUNT(all); i++)
        bs_array_free(all[i]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_numbers), cmocka_unit_test(test_threads),
                                       cmocka_unit_test(test_refused)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
