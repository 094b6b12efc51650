/* SPDX-License-Identifier: Apache-2.0 */
/* Failure detail, accounting, random numbers and conversions. */
#include "base/base.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

static void test_status(void **state)
{
    (void)state;
    assert_int_equal(bsi_fail(BS_IO, "file '%s' is %d bytes", "a", 3), BS_IO);
    assert_string_equal(bs_error()->msg, "file 'a' is 3 bytes");
    assert_int_equal(bsi_wrap(BS_IO, "block '%s'", "x"), BS_IO);
    assert_string_equal(bs_error()->msg, "block 'x': file 'a' is 3 bytes");
    for (int i = 0; i <= BS_INTERNAL; i++)
        assert_string_not_equal(bs_status_name((bs_status)i), "unknown");
}

static void test_memory(void **state)
{
    (void)state;
    size_t before = bs_host_bytes(BS_TAG_MISC);
    char *p = bsi_alloc(BS_TAG_MISC, 1000);
    assert_non_null(p);
    assert_int_equal((uintptr_t)p % 64, 0);
    assert_int_equal(bs_host_bytes(BS_TAG_MISC), before + 1000);
    p[999] = 7;
    p = bsi_realloc(BS_TAG_MISC, p, 5000);
    assert_int_equal(p[999], 7);
    assert_int_equal(bs_host_bytes(BS_TAG_MISC), before + 5000);
    bsi_free(p);
    assert_int_equal(bs_host_bytes(BS_TAG_MISC), before);
    bsi_alloc_fail_nth(2);
    p = bsi_alloc(BS_TAG_MISC, 8);
    assert_non_null(p);
    assert_null(bsi_alloc(BS_TAG_MISC, 8));
    assert_int_equal(bs_error()->status, BS_NOMEM);
    bsi_free(p);
    assert_null(bsi_alloc(BS_TAG_MISC, SIZE_MAX - 8));
}

static void test_philox(void **state)
{
    (void)state;
    /* Known answers of the generator's authors (kat_vectors, philox4x32 10 rounds). */
    uint32_t out[4], zero4[4] = {0}, zero2[2] = {0};
    bsi_philox(zero4, zero2, out);
    const uint32_t want0[4] = {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8};
    assert_memory_equal(out, want0, sizeof out);
    uint32_t c[4] = {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, k[2] = {0xa4093822, 0x299f31d0};
    bsi_philox(c, k, out);
    const uint32_t want1[4] = {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1};
    assert_memory_equal(out, want1, sizeof out);
}

static void test_halves(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < 65536; i++) {
        float f = bsi_f16_to_f32((uint16_t)i), b = bsi_bf16_to_f32((uint16_t)i);
        if (isnan(f))
            assert_true(isnan(bsi_f16_to_f32(bsi_f32_to_f16(f))));
        else
            assert_int_equal(bsi_f32_to_f16(f), i);
        if (isnan(b))
            assert_true(isnan(bsi_bf16_to_f32(bsi_f32_to_bf16(b))));
        else
            assert_int_equal(bsi_f32_to_bf16(b), i);
    }
    assert_int_equal(bsi_f32_to_f16(65519.0f), 0x7BFF);
    assert_int_equal(bsi_f32_to_f16(65520.0f), 0x7C00);
    assert_int_equal(bsi_f32_to_f16(0x1p-25f), 0);          /* tie to even */
    assert_int_equal(bsi_f32_to_bf16(1.00390625f), 0x3F80); /* tie to even */
}

static void test_process(void **state)
{
    (void)state;
    uint64_t now = 0, peak = 0, free = 0, read = 0;
    assert_int_equal(bs_process_memory(&now, &peak), BS_OK);
    assert_true(now >= 4096 && peak >= now);
    assert_int_equal(bs_memory_available(&free), BS_OK);
    assert_true(free >= 4096);
    (void)bs_process_read_bytes(&read); /* not every kernel counts them */
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_status), cmocka_unit_test(test_memory),
                                       cmocka_unit_test(test_philox), cmocka_unit_test(test_halves),
                                       cmocka_unit_test(test_process)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
