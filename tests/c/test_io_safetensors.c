/* SPDX-License-Identifier: Apache-2.0 */
/* safetensors reader: every rule of the format with a file that breaks it, and mutated valid files. */
#include "base/base.h"
#include "bs.h"
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

#include "tmpdir.h"

/* File: length, header, data bytes 0 1 2 ... */
static const char *st_file(const char *header, size_t data)
{
    static unsigned char buf[1 << 20];
    size_t n = strlen(header);
    assert_true(8 + n + data <= sizeof buf);
    for (int i = 0; i < 8; i++)
        buf[i] = (unsigned char)(n >> (8 * i));
    memcpy(buf + 8, header, n);
    for (size_t i = 0; i < data; i++)
        buf[8 + n + i] = (unsigned char)i;
    return tmpdir_put("t.safetensors", buf, 8 + n + data);
}

static void refused(const char *header, size_t data, const char *why)
{
    bs_safetensors *st = (bs_safetensors *)&st;
    bs_status ret = bs_safetensors_open(st_file(header, data), &st);
    if (ret != BS_FORMAT)
        fail_msg("status %s for %s", bs_status_name(ret), header);
    assert_null(st);
    ASSERT_ERROR("t.safetensors");
    ASSERT_ERROR(why);
}

static void accepted(const char *header, size_t data, int64_t count)
{
    bs_safetensors *st;
    if (bs_safetensors_open(st_file(header, data), &st) != BS_OK)
        fail_msg("refused: %s", bs_error()->msg);
    assert_int_equal(bs_safetensors_count(st), count);
    bs_safetensors_close(st);
}

static void test_read(void **state)
{
    (void)state;
    /* Header order differs from file order, F32 lies behind an odd byte, padding behind the header. */
    const char *h = "{\"w\":{\"dtype\":\"F32\",\"shape\":[1,2],\"data_offsets\":[3,11]},"
                    "\"__metadata__\":{\"format\":\"pt\"},"
                    "\"a\\u00e9\\n\":{\"shape\":[3],\"dtype\":\"U8\",\"data_offsets\":[0,3]},"
                    "\"z\":{\"dtype\":\"BF16\",\"shape\":[0,7],\"data_offsets\":[3,3]},"
                    "\"q\":{\"dtype\":\"F8_E4M3\",\"shape\":[],\"data_offsets\":[11,12]}}   ";
    bs_safetensors *st;
    const char *path = st_file(h, 12);
    assert_int_equal(bs_safetensors_open(path, &st), BS_OK);
    assert_int_equal(bs_safetensors_count(st), 4);
    assert_string_equal(bs_safetensors_path(st), path);
    assert_int_equal(bs_safetensors_file_bytes(st), 8 + strlen(h) + 12);
    const char *order[] = {"a\xC3\xA9\n", "z", "w", "q"};
    for (int i = 0; i < 4; i++) {
        assert_string_equal(bs_safetensors_at(st, i)->name, order[i]);
        assert_ptr_equal(bs_safetensors_find(st, order[i]), bs_safetensors_at(st, i));
    }
    assert_null(bs_safetensors_at(st, 4));
    assert_null(bs_safetensors_at(st, -1));
    assert_null(bs_safetensors_find(st, "W"));
    const bs_safetensors_tensor *q = bs_safetensors_find(st, "q"), *w = bs_safetensors_find(st, "w");
    assert_string_equal(q->dtype_name, "F8_E4M3");
    assert_int_equal(q->dtype, BS_DTYPE_COUNT);
    assert_int_equal(q->ndim, 0);
    assert_int_equal(w->ndim, 2);
    assert_int_equal(w->dim[1], 2);
    assert_int_equal(w->offset, 8 + strlen(h) + 3);
    bs_array *a;
    assert_int_equal(bs_safetensors_read(st, "w", &a), BS_OK);
    const unsigned char want[8] = {3, 4, 5, 6, 7, 8, 9, 10};
    assert_memory_equal(a->data, want, 8);
    bs_array_free(a);
    assert_int_equal(bs_safetensors_read(st, "z", &a), BS_OK);
    assert_int_equal(bs_array_count(a), 0);
    bs_array_free(a);
    assert_int_equal(bs_safetensors_read(st, "q", &a), BS_DTYPE);
    ASSERT_ERROR("F8_E4M3");
    assert_int_equal(bs_safetensors_read(st, "nope", &a), BS_ARG);
    assert_null(a);

    /* The file gets shorter behind our back. */
    assert_int_equal(truncate(path, (off_t)(8 + strlen(h) + 6)), 0);
    assert_int_equal(bs_safetensors_read(st, "w", &a), BS_IO);
    assert_null(a);
    ASSERT_ERROR("expected 8 bytes, got 3");
    bs_safetensors_close(st);
    bs_safetensors_close(NULL);
}

static void test_accepted(void **state)
{
    (void)state;
    accepted("{}", 0, 0);
    accepted("{ }\n", 0, 0);
    accepted("{\"__metadata__\":{}}", 0, 0);
    accepted("{\"__metadata__\":null}", 0, 0);
    accepted("{\"__metadata__\":null,\"s\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1,
             1);
    accepted("{\"s\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,4]}}", 4, 1);
    accepted("{\"s\":{\"dtype\":\"F4\",\"shape\":[3,2],\"data_offsets\":[0,3]}}", 3, 1);
    accepted("{\"s\":{\"dtype\":\"F6_E2M3\",\"shape\":[4],\"data_offsets\":[0,3],\"x\":[1]}}", 3, 1);
    accepted("{\"s\":{\"dtype\":\"U8\",\"shape\":[1,1,1,1,1,1,1,1],\"data_offsets\":[0,1]}}", 1, 1);
    /* Every length of header: nothing may depend on where the data begins. */
    char h[128] = "{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},"
                  "\"b\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[1,5]}}";
    for (int pad = 0; pad < 16; pad++) {
        accepted(h, 5, 2);
        strcat(h, " ");
    }
}

#define T(body) "{\"x\":{" body "}}"
#define OFF01   "\"data_offsets\":[0,1]"

static void test_tensor_rules(void **state)
{
    (void)state;
    static const struct {
        const char *header;
        size_t data;
        const char *why;
    } c[] = {
        {T("\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,3]"), 3, "make 4 bytes"},
        {T("\"dtype\":\"F33\",\"shape\":[1]," OFF01), 1, "known are BOOL F4"},
        {T("\"dtype\":\"f32\",\"shape\":[1]," OFF01), 1, "unknown dtype 'f32'"},
        {T("\"dtype\":8,\"shape\":[1]," OFF01), 1, "'dtype' is not a string"},
        {T("\"shape\":[1]," OFF01), 1, "'dtype' is missing"},
        {T("\"dtype\":\"U8\"," OFF01), 1, "'shape' is missing"},
        {T("\"dtype\":\"U8\",\"shape\":[1]"), 1, "'data_offsets' is missing"},
        {T("\"Dtype\":\"U8\",\"shape\":[1]," OFF01), 1, "'dtype' is missing"},
        {T("\"dtype\":\"U8\",\"shape\":1," OFF01), 1, "'shape' is not an array"},
        {T("\"dtype\":\"U8\",\"shape\":[\"1\"]," OFF01), 1, "dimension 1 is not an integer"},
        {T("\"dtype\":\"U8\",\"shape\":[-1]," OFF01), 1, "non-negative integers"},
        {T("\"dtype\":\"U8\",\"shape\":[1.0]," OFF01), 1, "non-negative integers"},
        {T("\"dtype\":\"U8\",\"shape\":[1e0]," OFF01), 1, "non-negative integers"},
        {T("\"dtype\":\"U8\",\"shape\":[01]," OFF01), 1, "leading zero"},
        {T("\"dtype\":\"U8\",\"shape\":[null]," OFF01), 1, "dimension 1 is not an integer"},
        {T("\"dtype\":\"U8\",\"shape\":null," OFF01), 1, "'shape' is not an array"},
        {T("\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[null,1]"), 1, "not a pair"},
        {"{\"x\":null}", 1, "not an object"},
        {T("\"dtype\":\"U8\",\"shape\":[9007199254740992,0]," OFF01), 1, "2^53 - 1"},
        {T("\"dtype\":\"U8\",\"shape\":[9007199254740993]," OFF01), 1, "2^53 - 1"},
        {T("\"dtype\":\"U8\",\"shape\":[99999999999999999999999999]," OFF01), 1, "2^53 - 1"},
        {T("\"dtype\":\"U8\",\"shape\":[4294967296,4294967296]," OFF01), 1, "overflows"},
        {T("\"dtype\":\"F64\",\"shape\":[4294967296,2147483648]," OFF01), 1, "overflows"},
        {T("\"dtype\":\"U8\",\"shape\":[1,1,1,1,1,1,1,1,1]," OFF01), 1, "more than 8 dimensions"},
        {T("\"dtype\":\"F4\",\"shape\":[3],\"data_offsets\":[0,1]"), 1, "not whole bytes"},
        {T("\"dtype\":\"F6_E3M2\",\"shape\":[3],\"data_offsets\":[0,2]"), 2, "not whole bytes"},
        {T("\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0]"), 1, "not a pair"},
        {T("\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[]"), 1, "not a pair"},
        {T("\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1,2]"), 1, "not a pair"},
        {T("\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":{\"a\":0,\"b\":1}"), 1, "not a pair"},
        {T("\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[1,0]"), 1, "end before they begin"},
        {T("\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]"), 1, "truncated"},
        {T("\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[9007199254740990,9007199254740991]"), 1,
         "truncated"},
        {T("\"dtype\":\"U8\",\"shape\":[1]," OFF01), 2, "tensors end at byte"},
        {T("\"dtype\":\"U8\",\"dtype\":\"U8\",\"shape\":[1]," OFF01), 1, "'dtype' is given twice"},
        {T("\"dtype\":\"U8\",\"shape\":[1]," OFF01 "," OFF01), 1, "'data_offsets' is given twice"},
        {"{\"x\":[1]}", 1, "not an object"},
        {"{\"x\":{\"dtype\":\"U8\",\"shape\":[1]," OFF01 "},"
         "\"x\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[1,1]}}",
         1, "tensor 'x': is given twice"},
        {"{\"x\":{\"dtype\":\"U8\",\"shape\":[1]," OFF01 "},"
         "\"y\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[2,3]}}",
         3, "tensor 'y': begins at data byte 2; there is a hole"},
        {"{\"x\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]},"
         "\"y\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[1,3]}}",
         3, "tensor 'y': begins at data byte 1; it overlaps"},
        {"{\"x\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[1,2]}}", 2, "there is a hole"},
    };
    for (size_t i = 0; i < BSI_COUNT(c); i++)
        refused(c[i].header, c[i].data, c[i].why);
}

static void test_json_rules(void **state)
{
    (void)state;
    refused("{\"x\":{\"dtype\":\"U8\",\"shape\":[1]," OFF01 "}", 1, "not valid JSON");
    refused("{} {}", 0, "behind the end");
    refused("{}x", 0, "non-negative integers");
    refused(" {}", 0, "does not begin with '{'");
    refused("{\"a\":\"\xFF\"}", 0, "UTF-8");
    refused("{\"a\":\"\xC0\x80\"}", 0, "UTF-8");
    refused("{\"a\":\"\xED\xA0\x80\"}", 0, "UTF-8");
    refused("{\"a\":\"\xE2\x82\"}", 0, "UTF-8");
    refused("{\"a\xE2", 0, "UTF-8");
    refused("{\"a\\u0000b\":{\"dtype\":\"U8\",\"shape\":[1]," OFF01 "}}", 1, "\\u0000");
    refused("{\"a\nb\":{\"dtype\":\"U8\",\"shape\":[1]," OFF01 "}}", 1, "control character");
    refused("{\"a\\ud800\":{\"dtype\":\"U8\",\"shape\":[1]," OFF01 "}}", 1, "not valid JSON");
    refused("{\"a\\", 0, "string without an end");
    refused("{\"__metadata__\":[]}", 0, "not an object");
    refused("{\"__metadata__\":{\"a\":1}}", 0, "__metadata__ 'a' is not a string");
    refused("{\"__metadata__\":{\"a\":\"1\",\"b\":\"\",\"a\":\"1\"}}", 0, "'a' is given twice");
    refused("{\"__metadata__\":{},\"__metadata__\":{}}", 0, "given twice");
    refused("{\"__metadata__\":null,\"__metadata__\":null}", 0, "given twice");
    refused("{\"__metadata__\":nul}", 0, "non-negative integers");
    refused("{\"__metadata__\":{\"a\":null}}", 0, "__metadata__ 'a' is not a string");
    char deep[200] = "{\"a\":";
    memset(deep + 5, '[', 100);
    refused(deep, 0, "nested too deeply");
}

static void raw(const void *data, size_t n, const char *why)
{
    bs_safetensors *st;
    assert_int_equal(bs_safetensors_open(tmpdir_put("raw.bin", data, n), &st), BS_FORMAT);
    assert_null(st);
    ASSERT_ERROR("raw.bin");
    ASSERT_ERROR(why);
}
#define RAW(text, why) raw(text, sizeof(text) - 1, why)

static void test_other_files(void **state)
{
    (void)state;
    RAW("", "is empty: download it again");
    RAW("\2\0\0\0\0\0\0", "shorter than 8 bytes");
    RAW("\0\0\0\0\0\0\0\0{}", "does not begin with '{'");
    RAW("\2\0\0\0\0\0\0\0{", "truncated, download it again");
    RAW("\2\0\0\0\0\0\0\0", "truncated, download it again");
    RAW("\1\xE1\xF5\5\0\0\0\0{}", "larger than 100000000"); /* 100,000,001 */
    RAW("\0\xE1\xF5\5\0\0\0\0{}", "truncated");             /* 100,000,000 */
    RAW("\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF{}", "larger than 100000000");
    RAW("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n", "git lfs pull");
    RAW("\n <!doctype HTML><title>Log in</title>", "an HTML page");
    RAW("<html><body>403</body></html>", "an HTML page");
    RAW("<html>", "an HTML page");
    RAW("GGUF\3\0\0\0\1\0\0\0", "GGUF");
    RAW("PK\3\4\0\0\10\10\0\0\0\0", "pickled PyTorch");
    RAW("\x80\2\x8a\nl\xfc\x9c\x46\xf9 j\xa8P\x19.", "pickled PyTorch");
    RAW("{\"metadata\":{},\"weight_map\":{}}", "JSON text");
}

static void test_not_files(void **state)
{
    (void)state;
    bs_safetensors *st;
    assert_int_equal(bs_safetensors_open(tmpdir_file("absent"), &st), BS_IO);
    assert_int_equal(bs_error()->sys, 2);
    ASSERT_ERROR("absent");
    assert_int_equal(bs_safetensors_open(tmpdir_path, &st), BS_IO);
    ASSERT_ERROR("a folder");
    const char *fifo = tmpdir_file("fifo");
    assert_int_equal(mkfifo(fifo, 0600), 0);
    assert_int_equal(bs_safetensors_open(fifo, &st), BS_IO); /* returns at all: nobody writes to it */
    ASSERT_ERROR("regular file");
    assert_int_equal(bs_safetensors_open("/dev/zero", &st), BS_IO);
}

/* Every allocation fails once: always BS_NOMEM, nothing left behind, and the next attempt works. */
static void test_no_memory(void **state)
{
    (void)state;
    const char *path = st_file("{\"__metadata__\":{\"a\":\"b\"},"
                               "\"x\":{\"dtype\":\"U8\",\"shape\":[1]," OFF01 "}}",
                               1);
    size_t before = bs_host_bytes(BS_TAG_HEADER);
    int fds = tmpdir_fds();
    bs_safetensors *st;
    uint64_t n = 1;
    for (;; n++) {
        bsi_alloc_fail_nth(n);
        bs_status ret = bs_safetensors_open(path, &st);
        bsi_alloc_fail_nth(0);
        if (ret == BS_OK)
            break;
        assert_int_equal(ret, BS_NOMEM);
        assert_null(st);
        assert_int_equal(bs_host_bytes(BS_TAG_HEADER), before);
    }
    assert_true(n > 5);
    bs_safetensors_close(st);
    assert_int_equal(bs_host_bytes(BS_TAG_HEADER), before);
    assert_int_equal(tmpdir_fds(), fds);
}

/* Deterministic damage: either opened with all rules kept, or refused; never a crash or a leak. */
static void test_mutations(void **state)
{
    (void)state;
    static const char h[] = "{\"__metadata__\":{\"format\":\"pt\"},"
                            "\"model.w\":{\"dtype\":\"BF16\",\"shape\":[2,3],\"data_offsets\":[0,12]},"
                            "\"model.b\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[12,20]},"
                            "\"s\":{\"dtype\":\"I64\",\"shape\":[],\"data_offsets\":[20,28]}}";
    static const char bits[] = "{}[]\",:0123456789\\u-.eE\0\xFF";
    unsigned char base[8 + sizeof h - 1 + 28] = {(unsigned char)(sizeof h - 1), (sizeof h - 1) >> 8};
    memcpy(base + 8, h, sizeof h - 1);
    uint32_t key[2], word[4];
    bsi_philox_key(1, "safetensors mutations", key);
    int opened = 0, runs = 4000, fd = memfd_create("mutation", MFD_CLOEXEC);
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    for (int run = 0; run < runs; run++) {
        unsigned char f[sizeof base];
        size_t n = sizeof f;
        memcpy(f, base, n);
        for (uint32_t k = 0; k <= (uint32_t)run % 3; k++) {
            bsi_philox((uint32_t[4]){(uint32_t)run, k, 0, 0}, key, word);
            size_t at = word[0] % n;
            if (word[1] % 8 == 0)
                n = BSI_MAX(at, 1u);
            else if (word[1] % 2)
                f[at] = (unsigned char)bits[word[2] % (sizeof bits - 1)];
            else
                f[at] ^= (unsigned char)(1u << word[2] % 8);
        }
        bs_safetensors *st;
        assert_int_equal(ftruncate(fd, 0), 0);
        assert_int_equal(pwrite(fd, f, n, 0), n);
        bs_status ret = bs_safetensors_open(path, &st);
        if (ret != BS_OK) {
            assert_int_equal(ret, BS_FORMAT);
            continue;
        }
        opened++;
        uint64_t end = 8 + (uint64_t)(f[0] | f[1] << 8);
        for (int64_t i = 0; i < bs_safetensors_count(st); i++) {
            const bs_safetensors_tensor *t = bs_safetensors_at(st, i);
            assert_int_equal(t->offset, end);
            assert_ptr_equal(bs_safetensors_find(st, t->name), t);
            end += t->bytes;
            bs_array *a;
            if (t->dtype != BS_DTYPE_COUNT) {
                assert_int_equal(bs_safetensors_read(st, t->name, &a), BS_OK);
                bs_array_free(a);
            }
        }
        assert_int_equal(end, n);
        bs_safetensors_close(st);
    }
    close(fd);
    assert_true(opened > 50 && opened < runs / 2); /* both outcomes are exercised */
}

static void test_large_header(void **state)
{
    (void)state;
    const char *path = tmpdir_file("many.safetensors");
    const long many = BS_TSAN ? 20000 : 200000;
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    fseek(f, 8, SEEK_SET);
    fputc('{', f);
    for (long i = 0; i < many; i++)
        fprintf(f,
                "%s\"model.language_model.layers.%ld.mlp.experts.%ld.gate_up_proj.weight\":{\"dtype\":"
                "\"U8\","
                "\"shape\":[1,2],\"data_offsets\":[%ld,%ld]}",
                i ? "," : "", i / 1000, i % 1000, 2 * i, 2 * i + 2);
    fputc('}', f);
    long n = ftell(f) - 8;
    for (long i = 0; i < many; i++)
        fputs("ab", f);
    rewind(f);
    for (int i = 0; i < 8; i++)
        fputc((int)(n >> (8 * i) & 255), f);
    assert_int_equal(fclose(f), 0);

    size_t before = bs_host_bytes(BS_TAG_HEADER);
    bs_safetensors *st;
    double t = bsi_now();
    assert_int_equal(bs_safetensors_open(path, &st), BS_OK);
    print_message("%ld tensors, header of %.1f MB: opened in %.3f s, peak %.0f MB accounted\n", many,
                  (double)n / 1e6, bsi_now() - t, (double)bs_host_peak(BS_TAG_HEADER) / 1e6);
    assert_int_equal(bs_safetensors_count(st), many);
    assert_int_equal(bs_safetensors_at(st, many - 1)->bytes, 2);
    assert_non_null(
        bs_safetensors_find(st, "model.language_model.layers.7.mlp.experts.77.gate_up_proj.weight"));
    assert_true(bs_host_bytes(BS_TAG_HEADER) < before + (size_t)n * 2); /* the tree is gone */
    bs_safetensors_close(st);
    assert_int_equal(bs_host_bytes(BS_TAG_HEADER), before);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_read),         cmocka_unit_test(test_accepted),
        cmocka_unit_test(test_tensor_rules), cmocka_unit_test(test_json_rules),
        cmocka_unit_test(test_other_files),  cmocka_unit_test(test_not_files),
        cmocka_unit_test(test_no_memory),    cmocka_unit_test(test_mutations),
        cmocka_unit_test(test_large_header)};
    return cmocka_run_group_tests(tests, tmpdir_open, tmpdir_close);
}
