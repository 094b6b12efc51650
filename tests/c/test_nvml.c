/* SPDX-License-Identifier: Apache-2.0 */
/*
** What NVML tells, against a library that stands in for it (tests/support/fake_nvml.c), and without
** one.
*/
#include "backend/nvml/nvml.h"
#include "dev_support.h"

#include <stdlib.h>

static void test_reads(void **state)
{
    (void)state;
    bsi_nvml n;
    bs_gpu g = {.major = 9};
    uint64_t used = 0;
    unsetenv("FAKE_NVML");
    assert_true(bsi_nvml_open(FAKE_NVML_PATH, "00000000:01:00.0", &n));
    assert_true(bsi_nvml_used(&n, &used));
    assert_int_equal(used, 400);
    bsi_nvml_read(&n, &g);
    bsi_nvml_close(&n);
    assert_true(g.nvml);
    assert_string_equal(g.name, "Fake GPU");
    assert_string_equal(g.driver, "580.0");
    assert_int_equal(g.total_bytes, 1000);
    assert_int_equal(g.used_bytes, 400);
    assert_int_equal(g.free_bytes, 600);
    assert_int_equal(g.own_bytes, 250);
    assert_int_equal(g.processes, 2);
    assert_true(g.power_w > 123.4 && g.power_w < 123.6);
    assert_int_equal(g.sm_mhz, 1001);
    assert_int_equal(g.memory_mhz, 1002);
    assert_int_equal(g.sm_most_mhz, 0); /* the library has no such function */
    assert_int_equal(g.pcie_width, 0);
    assert_int_equal(g.major, 9); /* not NVML's */
}

static void test_what_is_not_told_is_absent(void **state)
{
    (void)state;
    bsi_nvml n;
    bs_gpu g = {0};
    setenv("FAKE_NVML", "old", 1);
    assert_true(bsi_nvml_open(FAKE_NVML_PATH, "", &n));
    bsi_nvml_read(&n, &g);
    bsi_nvml_close(&n);
    unsetenv("FAKE_NVML");
    assert_true(g.nvml);
    assert_true(g.power_w == 0);
    assert_int_equal(g.own_bytes, 0);
    assert_int_equal(g.processes, 2);
    assert_int_equal(g.used_bytes, 400);
}

static void test_absent(void **state)
{
    (void)state;
    bsi_nvml n;
    assert_false(bsi_nvml_open("/nowhere/libnvidia-ml.so.1", "", &n));
    assert_false(bsi_nvml_open(FAKE_NVML_PATH, "00000000:02:00.0", &n));
    setenv("FAKE_NVML", "none", 1);
    assert_false(bsi_nvml_open(FAKE_NVML_PATH, "", &n));
    unsetenv("FAKE_NVML");
}

static void test_gpu_in_any_build(void **state)
{
    (void)state;
    bs_gpu g;
    bs_gpu_get(&g);
    assert_int_equal(g.built, BS_HAVE_CUDA);
    if (!g.nvml && !g.cuda_driver)
        assert_string_equal(g.name, "");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_reads),
        cmocka_unit_test(test_what_is_not_told_is_absent),
        cmocka_unit_test(test_absent),
        cmocka_unit_test(test_gpu_in_any_build),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
