/* SPDX-License-Identifier: Apache-2.0 */
/* Failure detail, accounting, random numbers, conversions, files read whole. */
#include "base/base.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

#include "tmpdir.h"

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

static void test_file_read(void **state)
{
    (void)state;
    char *text;
    size_t n;
    const char *path = tmpdir_put("f", "a\0b", 3);
    assert_int_equal(bs_file_read(path, 0, &text, &n), BS_OK);
    assert_int_equal(n, 3);
    assert_memory_equal(text, "a\0b", 4);
    bs_str_free(text);
    assert_int_equal(bs_file_read(path, 3, &text, &n), BS_OK);
    bs_str_free(text);
    assert_int_equal(bs_file_read(path, 2, &text, &n), BS_FORMAT);
    ASSERT_ERROR("has 3 bytes; 2 is the limit");
    assert_int_equal(bs_file_read(tmpdir_put("empty", "", 0), 0, &text, &n), BS_OK);
    assert_int_equal(n, 0);
    assert_string_equal(text, "");
    bs_str_free(text);
    /* Its size is 0 for fstat. */
    assert_int_equal(bs_file_read("/proc/self/status", 0, &text, &n), BS_OK);
    assert_true(n > 100 && strlen(text) == n);
    bs_str_free(text);
    assert_int_equal(bs_file_read("/proc/self/status", 100, &text, &n), BS_FORMAT);
    ASSERT_ERROR("larger than 100 bytes");
}

/* Each would wait for ever, or read without an end, when opened as a file. */
static void test_file_read_refused(void **state)
{
    (void)state;
    char *text;
    size_t n, before = bs_host_bytes(BS_TAG_MISC);
    const char *fifo = tmpdir_file("fifo");
    assert_int_equal(mkfifo(fifo, 0600), 0);
    assert_int_equal(bs_file_read(fifo, 0, &text, &n), BS_IO);
    ASSERT_ERROR("a device, pipe or socket, a regular file is needed");
    assert_int_equal(bs_file_read("/dev/zero", 0, &text, &n), BS_IO);
    ASSERT_ERROR("a regular file is needed");
    assert_int_equal(bs_file_read(tmpdir_path, 0, &text, &n), BS_IO);
    ASSERT_ERROR("is a folder");
    assert_int_equal(bs_file_read(tmpdir_file("none"), 0, &text, &n), BS_IO);
    ASSERT_ERROR("none");
    bsi_alloc_fail_nth(1);
    assert_int_equal(bs_file_read(tmpdir_put("f", "x", 1), 0, &text, &n), BS_NOMEM);
    assert_null(text);
    assert_int_equal(bs_host_bytes(BS_TAG_MISC), before);
}

/* How text is shown; room: of the buffer, which must not be passed. */
static void shown(const char *text, size_t n, bool running, const char *expected)
{
    char out[256];
    size_t made = bs_printable(text, n, running, out, sizeof out);
    assert_true(made < sizeof out);
    out[made] = '\0';
    assert_string_equal(out, expected);
    for (size_t room = 0; room < made; room++) {
        memset(out, '#', sizeof out);
        assert_int_equal(bs_printable(text, n, running, out, room), made);
        assert_memory_equal(out, expected, room);
        assert_int_equal(out[room], '#');
    }
}

static void test_printable(void **state)
{
    (void)state;
    shown("caf\xC3\xA9 \xF0\x9F\x98\x80 'x'\\", 15, false, "caf\xC3\xA9 \xF0\x9F\x98\x80 'x'\\");
    shown("\0\x1B[2J\x07\x7F", 7, false, "\\x00\\x1B[2J\\x07\\x7F");
    shown("a\nb\tc\r", 6, false, "a\\nb\\tc\\r");
    shown("a\nb\tc\r", 6, true, "a\nb\tc\\r");
    shown("\xC2\x9B"
          "31m",
          5, true, "\\u{009B}31m"); /* C1: the one-character form of ESC [ */
    shown("\xE2\x80\xAE\xE2\x81\xA6\xD8\x9C\xE2\x80\xA8", 11, true,
          "\\u{202E}\\u{2066}\\u{061C}\\u{2028}");
    shown("\xE2\x80\x8B\xE2\x80\x8D\xEF\xBB\xBF", 9, false, "\\u{200B}\\u{200D}\\u{FEFF}");
    shown("\xE2\x80\x8D", 3, true, "\xE2\x80\x8D"); /* emoji are joined by it */
    shown("\xF3\xA0\x81\x81", 4, false, "\\u{E0041}");
    /* no UTF-8: alone, cut short, overlong, a surrogate */
    shown("\x9B\xFF", 2, false, "\\x9B\\xFF");
    shown("\xE2\x80", 2, true, "\\xE2\\x80");
    shown("\xC0\x9B", 2, false, "\\xC0\\x9B");
    shown("\xED\xA0\x80", 3, false, "\\xED\\xA0\\x80");
    shown("", 0, false, "");
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_status),
                                       cmocka_unit_test(test_memory),
                                       cmocka_unit_test(test_philox),
                                       cmocka_unit_test(test_halves),
                                       cmocka_unit_test(test_process),
                                       cmocka_unit_test(test_file_read),
                                       cmocka_unit_test(test_file_read_refused),
                                       cmocka_unit_test(test_printable)};
    return cmocka_run_group_tests(tests, tmpdir_open, tmpdir_close);
}
