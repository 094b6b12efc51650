/* SPDX-License-Identifier: Apache-2.0 */
/* Host arrays: shapes from outside, conversions, relative error, hash. */
#include "base/base.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

static bs_array *vector(bs_dtype t, int64_t n, const double *v)
{
    bs_array *a;
    assert_int_equal(bs_array_new(t, 1, &n, &a), BS_OK);
    for (int64_t i = 0; i < n; i++)
        bs_array_set(a, i, v[i]);
    return a;
}

static void test_new(void **state)
{
    (void)state;
    size_t before = bs_host_bytes(BS_TAG_ARRAY);
    bs_array *a;
    int64_t dim[9] = {3, 4, 2, 1, 1, 1, 1, 1, 1};
    assert_int_equal(bs_array_new(BS_DTYPE_BF16, 3, dim, &a), BS_OK);
    assert_int_equal(a->bytes, 48);
    assert_int_equal(bs_array_count(a), 24);
    assert_int_equal((uintptr_t)a->data % 64, 0);
    assert_true(bs_array_get(a, 23) == 0);
    bs_array_free(a);
    assert_int_equal(bs_array_new(BS_DTYPE_F64, 0, NULL, &a), BS_OK);
    assert_int_equal(bs_array_count(a), 1);
    bs_array_free(a);
    bs_array_free(NULL);

    assert_int_equal(bs_array_new(BS_DTYPE_F32, 9, dim, &a), BS_SHAPE);
    assert_null(a);
    assert_int_equal(bs_array_new(BS_DTYPE_F32, -1, dim, &a), BS_SHAPE);
    assert_int_equal(bs_array_new(BS_DTYPE_COUNT, 1, dim, &a), BS_DTYPE);
    dim[1] = -4;
    assert_int_equal(bs_array_new(BS_DTYPE_F32, 2, dim, &a), BS_SHAPE);
    int64_t huge[3] = {INT64_C(1) << 31, INT64_C(1) << 31, 4};
    assert_int_equal(bs_array_new(BS_DTYPE_F32, 3, huge, &a), BS_SHAPE);
    assert_int_equal(bs_array_new(BS_DTYPE_F32, 2, huge, &a), BS_SHAPE); /* 2^64 bytes */
    huge[2] = 0;
    assert_int_equal(bs_array_new(BS_DTYPE_U8, 3, huge, &a), BS_OK);
    assert_int_equal(bs_array_count(a), 0);
    bs_array_free(a);
    for (uint64_t n = 1; n <= 2; n++) {
        int64_t one = 1;
        bsi_alloc_fail_nth(n);
        assert_int_equal(bs_array_new(BS_DTYPE_U8, 1, &one, &a), BS_NOMEM);
    }
    bsi_alloc_fail_nth(0);
    assert_int_equal(bs_host_bytes(BS_TAG_ARRAY), before);
}

static void test_set_get(void **state)
{
    (void)state;
    const double v[] = {0.5, -1.5, 2.5, 300, -1, 1e300, (double)NAN};
    int64_t n = (int64_t)BSI_COUNT(v);
    bs_array *u8 = vector(BS_DTYPE_U8, n, v), *i32 = vector(BS_DTYPE_I32, n, v);
    bs_array *i64 = vector(BS_DTYPE_I64, n, v), *f16 = vector(BS_DTYPE_F16, n, v);
    const double want_u8[] = {0, 0, 2, 255, 0, 255, 0};
    const double want_i32[] = {0, -2, 2, 300, -1, 2147483647, 0};
    for (int64_t i = 0; i < n; i++) {
        assert_true(bs_array_get(u8, i) == want_u8[i]);
        assert_true(bs_array_get(i32, i) == want_i32[i]);
    }
    assert_true(((int64_t *)i64->data)[5] == INT64_MAX);
    assert_true(bs_array_get(f16, 2) == 2.5 && isinf(bs_array_get(f16, 5)) &&
                isnan(bs_array_get(f16, 6)));
    bs_array_free(u8);
    bs_array_free(i32);
    bs_array_free(i64);
    bs_array_free(f16);
}

/* A value just above the midpoint of two halves, closer to it than f32 can tell: rounding by way of f32
   would land on the tie and go down. */
static void test_one_rounding(void **state)
{
    (void)state;
    const double v[] = {1 + 0x1p-8 + 0x1p-40, -(1 + 0x1p-8 + 0x1p-40), 1 + 0x1p-8, -0x1p-160};
    bs_array *a = vector(BS_DTYPE_F64, 4, v), *b;
    assert_int_equal(bs_array_cast(a, BS_DTYPE_BF16, &b), BS_OK);
    assert_true(bs_array_get(b, 0) == 1 + 0x1p-7);
    assert_true(bs_array_get(b, 1) == -(1 + 0x1p-7));
    assert_true(bs_array_get(b, 2) == 1);
    assert_true(bs_array_get(b, 3) == 0 && signbit(bs_array_get(b, 3)));
    bs_array_free(b);
    const double w[] = {1 + 0x1p-11 + 0x1p-40, 65520 - 0x1p-30, 0x1p-25 + 0x1p-60, 1e39};
    bs_array_free(a);
    a = vector(BS_DTYPE_F64, 4, w);
    assert_int_equal(bs_array_cast(a, BS_DTYPE_F16, &b), BS_OK);
    assert_true(bs_array_get(b, 0) == 1 + 0x1p-10);
    assert_true(bs_array_get(b, 1) == 65504);
    assert_true(bs_array_get(b, 2) == 0x1p-24);
    assert_true(isinf(bs_array_get(b, 3)));
    bs_array_free(b);
    bs_array_free(a);
}

static void test_cast(void **state)
{
    (void)state;
    /* Every bf16 and f16 pattern survives f64 and back. */
    int64_t n = 65536;
    for (int half = 0; half < 2; half++) {
        bs_dtype t = half ? BS_DTYPE_F16 : BS_DTYPE_BF16;
        bs_array *a, *wide, *back;
        assert_int_equal(bs_array_new(t, 1, &n, &a), BS_OK);
        for (int64_t i = 0; i < n; i++)
            ((uint16_t *)a->data)[i] = (uint16_t)i;
        assert_int_equal(bs_array_cast(a, BS_DTYPE_F64, &wide), BS_OK);
        assert_int_equal(bs_array_cast(wide, t, &back), BS_OK);
        for (int64_t i = 0; i < n; i++)
            if (!isnan(bs_array_get(a, i)))
                assert_int_equal(((uint16_t *)back->data)[i], i);
            else
                assert_true(isnan(bs_array_get(back, i)));
        bs_array_free(back);
        bs_array_free(wide);
        bs_array_free(a);
    }
    bs_array *big, *same;
    int64_t one = 1;
    assert_int_equal(bs_array_new(BS_DTYPE_I64, 1, &one, &big), BS_OK);
    ((int64_t *)big->data)[0] = INT64_MAX - 1;
    assert_int_equal(bs_array_cast(big, BS_DTYPE_I64, &same), BS_OK);
    assert_true(((int64_t *)same->data)[0] == INT64_MAX - 1);
    bs_array_free(same);
    bs_array_free(big);
}

static void test_is_finite(void **state)
{
    (void)state;
    static const bs_dtype types[] = {BS_DTYPE_F32, BS_DTYPE_BF16, BS_DTYPE_F16, BS_DTYPE_F64};
    const int64_t dims[] = {3, 5};
    for (size_t t = 0; t < BSI_COUNT(types); t++) {
        const double bad[] = {NAN, INFINITY, -INFINITY}, good[] = {0, -1.5, 65504, -0.0};
        for (size_t i = 0; i < BSI_COUNT(bad) + BSI_COUNT(good); i++) {
            bool finite = i >= BSI_COUNT(bad);
            bs_array *a;
            assert_int_equal(bs_array_new(types[t], 2, dims, &a), BS_OK);
            assert_true(bs_array_is_finite(a));
            bs_array_set(a, (int64_t)i * 2, finite ? good[i - BSI_COUNT(bad)] : bad[i]);
            assert_int_equal(bs_array_is_finite(a), finite);
            bs_array_free(a);
        }
    }
    bs_array *a;
    assert_int_equal(bs_array_new(BS_DTYPE_I64, 1, dims, &a), BS_OK);
    bs_array_set(a, 0, -1);
    assert_true(bs_array_is_finite(a));
    bs_array_free(a);
}

static void test_rel_err(void **state)
{
    (void)state;
    const double x[] = {3, 4, 0}, y[] = {3, 4, 5}, zero[] = {0, 0, 0}, bad[] = {3, (double)NAN, 0};
    const double inf[] = {(double)INFINITY, 0, 0};
    bs_array *a = vector(BS_DTYPE_F32, 3, x), *b = vector(BS_DTYPE_F64, 3, y);
    bs_array *z = vector(BS_DTYPE_BF16, 3, zero), *nan = vector(BS_DTYPE_F32, 3, bad);
    bs_array *i = vector(BS_DTYPE_F32, 3, inf), *two = vector(BS_DTYPE_F32, 2, x);
    double e;
    assert_int_equal(bs_array_rel_err(b, a, &e), BS_OK);
    assert_true(e == 1.0);
    assert_int_equal(bs_array_rel_err(a, z, &e), BS_OK);
    assert_true(e == 5.0);
    assert_int_equal(bs_array_rel_err(z, z, &e), BS_OK);
    assert_true(e == 0.0);
    assert_int_equal(bs_array_rel_err(a, nan, &e), BS_OK);
    assert_true(isinf(e) && e > 0);
    assert_int_equal(bs_array_rel_err(i, i, &e), BS_OK);
    assert_true(isinf(e) && e > 0);
    assert_int_equal(bs_array_rel_err(a, two, &e), BS_SHAPE);
    bs_array *all[] = {a, b, z, nan, i, two};
    for (size_t k = 0; k < BSI_COUNT(all); k++)
        bs_array_free(all[k]);
}

static void test_hash(void **state)
{
    (void)state;
    const double v[] = {1, 2, 3, 4};
    bs_array *a = vector(BS_DTYPE_F32, 4, v), *b = vector(BS_DTYPE_F32, 4, v), *c;
    assert_true(bs_array_hash(a) == bs_array_hash(b));
    bs_array_set(b, 3, 5);
    assert_true(bs_array_hash(a) != bs_array_hash(b));
    int64_t dim[2] = {2, 2};
    assert_int_equal(bs_array_new(BS_DTYPE_F32, 2, dim, &c), BS_OK);
    memcpy(c->data, a->data, a->bytes);
    assert_true(bs_array_hash(a) != bs_array_hash(c));
    c->dtype = BS_DTYPE_I32;
    uint64_t h = bs_array_hash(c);
    c->dtype = BS_DTYPE_F32;
    assert_true(bs_array_hash(c) != h);
    bs_array_free(a);
    bs_array_free(b);
    bs_array_free(c);
}

static void test_uniform(void **state)
{
    (void)state;
    const double zero[] = {0, 0, 0, 0, 0, 0, 0}, first[] = {0, 0, 0, 0, 0};
    bs_array *a = vector(BS_DTYPE_F32, 7, zero), *b = vector(BS_DTYPE_F32, 5, first);
    assert_int_equal(bs_array_uniform(a, 0.5, 3, "w"), BS_OK);
    assert_int_equal(bs_array_uniform(b, 0.5, 3, "w"), BS_OK);
    assert_memory_equal(a->data, b->data, b->bytes); /* an element depends on its index only */
    uint64_t h = bs_array_hash(b);
    bool differ = false;
    for (int i = 0; i < 7; i++) {
        assert_true(fabs(bs_array_get(a, i)) <= 0.5);
        differ = differ || bs_array_get(a, i) != bs_array_get(a, 0);
    }
    assert_true(differ);
    assert_int_equal(bs_array_uniform(b, 0.5, 3, "v"), BS_OK);
    assert_true(bs_array_hash(b) != h);
    assert_int_equal(bs_array_uniform(b, 0.5, 4, "w"), BS_OK);
    assert_true(bs_array_hash(b) != h);
    bs_array_free(a);
    bs_array_free(b);
    a = vector(BS_DTYPE_BF16, 2, zero);
    assert_int_equal(bs_array_uniform(a, 1, 1, "w"), BS_DTYPE);
    bs_array_free(a);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_new),          cmocka_unit_test(test_set_get),
        cmocka_unit_test(test_one_rounding), cmocka_unit_test(test_cast),
        cmocka_unit_test(test_is_finite),    cmocka_unit_test(test_rel_err),
        cmocka_unit_test(test_hash),         cmocka_unit_test(test_uniform)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
