/* SPDX-License-Identifier: Apache-2.0 */
/* Values out of packed formats: every code with every scale, exact in f32 and bf16, on any threads. */
#include "kernel_test.h"

enum { SCALES = 256, GROUP = 32, N = SCALES * GROUP };

/* e2m1 by its definition: a sign, two bits of exponent with bias 1, one of fraction; exponent 0 is subnormal. */
static double e2m1(int code)
{
    int exponent = code >> 1 & 3, fraction = code & 1;
    double v = exponent ? (1 + 0.5 * fraction) * (1 << (exponent - 1)) : 0.5 * fraction;
    return code & 8 ? -v : v;
}

static void check(int out, const void *dst, int64_t i, int code, int scale)
{
    float want = scale == 255 ? NAN : (float)ldexp(e2m1(code), scale - 127), got;
    if (out == BS_DTYPE_BF16)
        got = bsi_bf16_to_f32(((const uint16_t *)dst)[i]);
    else
        got = ((const float *)dst)[i];
    if (isnan(want) ? !isnan(got) : memcmp(&want, &got, sizeof got) != 0)
        fail_msg("code %d, scale %d: %.9g, %.9g is expected", code, scale, (double)got, (double)want);
}

/* Group s has scale s; its i-th byte has code i below and 15 - i above. */
static void test_mxfp4(void **state)
{
    (void)state;
    static uint8_t blocks[N / 2], scales[SCALES];
    static float dst[N + 1];
    for (int s = 0; s < SCALES; s++) {
        scales[s] = (uint8_t)s;
        for (int i = 0; i < 16; i++)
            blocks[s * 16 + i] = (uint8_t)(i | (15 - i) << 4);
    }
    for (int k = 0; k < 6; k++) {
        int out = k / 3 ? BS_DTYPE_BF16 : BS_DTYPE_F32;
        memset(dst, 0x5A, sizeof dst);
        launch(BSK_EXPAND_MXFP4, (bsk_call){.p = {blocks, scales, dst}, .n = {N}, .out = out},
               pars[k % 3]);
        for (int i = 0; i < N; i++)
            check(out, dst, i, i % 2 ? 15 - i % GROUP / 2 : i % GROUP / 2, i / GROUP);
        const unsigned char *after = (const unsigned char *)dst + N * bs_dtype_size((bs_dtype)out);
        assert_int_equal(*after, 0x5A);
    }
    memset(dst, 0x5A, sizeof dst);
    launch(BSK_EXPAND_MXFP4, (bsk_call){.p = {blocks, scales, dst}, .n = {0}}, &team2);
    assert_int_equal(*(unsigned char *)dst, 0x5A);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_mxfp4)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
