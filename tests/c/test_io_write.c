/* SPDX-License-Identifier: Apache-2.0 */
/* Writers: bytes of a safetensors file, round trip, and failures that leave the old file whole. */
#include "base/base.h"
#include "bs.h"
#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cmocka.h>

#include "tmpdir.h"

static bs_array *array(bs_dtype t, int ndim, const int64_t *dim)
{
    bs_array *a;
    assert_int_equal(bs_array_new(t, ndim, dim, &a), BS_OK);
    for (size_t i = 0; i < a->bytes; i++)
        ((unsigned char *)a->data)[i] = (unsigned char)(i * 7 + a->dtype);
    return a;
}

static size_t slurp(const char *path, char *buf, size_t room)
{
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    size_t n = fread(buf, 1, room, f);
    fclose(f);
    return n;
}

static void test_bytes(void **state)
{
    (void)state;
    const int64_t d3[] = {3}, d12[] = {1, 2};
    bs_array *a[] = {array(BS_DTYPE_U8, 1, d3), array(BS_DTYPE_F32, 2, d12),
                     array(BS_DTYPE_BF16, 0, NULL)};
    const char *names[] = {"u\n\"\x01", "f", "b"}, *k[] = {"format"}, *v[] = {"pt"};
    const char *path = tmpdir_file("w.safetensors");
    const bs_array *const *arrays = (const bs_array *const *)a;
    if (bs_safetensors_write(path, 3, names, arrays, 1, k, v) != BS_OK)
        fail_msg("%s", bs_error()->msg);
    char buf[1024];
    size_t n = slurp(path, buf, sizeof buf);
    static const char want[] =
        "{\"__metadata__\":{\"format\":\"pt\"},"
        "\"f\":{\"dtype\":\"F32\",\"shape\":[1,2],\"data_offsets\":[0,8]},"
        "\"b\":{\"dtype\":\"BF16\",\"shape\":[],\"data_offsets\":[8,10]},"
        "\"u\\n\\\"\\u0001\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[10,13]}}";
    size_t header = bsi_round_up(sizeof want - 1, 8);
    assert_int_equal(n, 8 + header + 13);
    assert_int_equal((unsigned char)buf[0], header & 255);
    assert_int_equal(buf[1], header >> 8);
    assert_memory_equal(buf + 8, want, sizeof want - 1);
    for (size_t i = 8 + sizeof want - 1; i < 8 + header; i++)
        assert_int_equal(buf[i], ' ');
    assert_memory_equal(buf + 8 + header, a[1]->data, 8);
    assert_memory_equal(buf + 8 + header + 8, a[2]->data, 2);
    assert_memory_equal(buf + 8 + header + 10, a[0]->data, 3);
    for (int i = 0; i < 3; i++)
        bs_array_free(a[i]);
}

static void test_round_trip(void **state)
{
    (void)state;
    bs_array *a[2 * BS_DTYPE_COUNT];
    const char *names[2 * BS_DTYPE_COUNT];
    char text[2 * BS_DTYPE_COUNT][16];
    for (int i = 0; i < 2 * BS_DTYPE_COUNT; i++) {
        const int64_t dim[] = {i, 3, 1, 2};
        a[i] = array((bs_dtype)(i % BS_DTYPE_COUNT), i % 5, dim);
        snprintf(text[i], sizeof text[i], "t%d", i * 5 % 14);
        names[i] = text[i];
    }
    const char *path = tmpdir_file("r.safetensors");
    assert_int_equal(
        bs_safetensors_write(path, BSI_COUNT(a), names, (const bs_array *const *)a, 0, NULL, NULL),
        BS_OK);
    bs_safetensors *st;
    if (bs_safetensors_open(path, &st) != BS_OK)
        fail_msg("%s", bs_error()->msg);
    assert_int_equal(bs_safetensors_count(st), BSI_COUNT(a));
    for (size_t i = 0; i < BSI_COUNT(a); i++) {
        bs_array *b;
        const bs_safetensors_tensor *t = bs_safetensors_find(st, names[i]);
        assert_int_equal(t->offset % bs_dtype_size(t->dtype), 0);
        assert_int_equal(bs_safetensors_read(st, names[i], &b), BS_OK);
        assert_true(bs_array_hash(a[i]) == bs_array_hash(b));
        bs_array_free(b);
        bs_array_free(a[i]);
    }
    bs_safetensors_close(st);
    assert_int_equal(bs_safetensors_write(path, 0, NULL, NULL, 0, NULL, NULL),
                     BS_OK); /* replaces it; empty is legal */
    assert_int_equal(bs_safetensors_open(path, &st), BS_OK);
    assert_int_equal(bs_safetensors_count(st), 0);
    bs_safetensors_close(st);
}

static void test_refused(void **state)
{
    (void)state;
    bs_array *a = array(BS_DTYPE_F32, 0, NULL);
    const bs_array *const two[] = {a, a};
    const char *path = tmpdir_file("no");
    int entries = tmpdir_entries(tmpdir_path);
    const char *same[] = {"x", "x"}, *meta[] = {"x", "__metadata__"}, *bad[] = {"x", "\xC3("},
               *ok[] = {"x", "y"};
    assert_int_equal(bs_safetensors_write(path, 2, same, two, 0, NULL, NULL), BS_ARG);
    ASSERT_ERROR("tensor 'x' is given twice");
    assert_int_equal(bs_safetensors_write(path, 2, meta, two, 0, NULL, NULL), BS_ARG);
    assert_int_equal(bs_safetensors_write(path, 2, bad, two, 0, NULL, NULL), BS_ARG);
    assert_int_equal(bs_safetensors_write(path, 2, ok, two, 2, same, ok), BS_ARG);
    ASSERT_ERROR("metadata key 'x' is given twice");
    assert_int_equal(bs_safetensors_write(path, 2, ok, two, 2, ok, bad), BS_ARG);
    assert_int_equal(bs_safetensors_write(path, -1, ok, two, 0, NULL, NULL), BS_ARG);
    for (uint64_t n = 1;; n++) {
        bsi_alloc_fail_nth(n);
        bs_status ret = bs_safetensors_write(path, 2, ok, two, 2, ok, same);
        bsi_alloc_fail_nth(0);
        if (ret == BS_OK)
            break;
        assert_int_equal(ret, BS_NOMEM);
        if (access(path, F_OK) == 0) /* only the flush of the folder was left */
            break;
        assert_int_equal(tmpdir_entries(tmpdir_path), entries);
    }
    bs_array_free(a);
}

static bs_safetensors_tensor described(const char *name, const char *dtype, int64_t n)
{
    return (bs_safetensors_tensor){.name = name, .dtype_name = dtype, .ndim = 1, .dim = {n}};
}

/* Tensor by tensor, in any order, from arrays and from another file: the bytes of one write. */
static void test_tensor_by_tensor(void **state)
{
    (void)state;
    const int64_t big[] = {3 << 20}, small[] = {5};
    bs_array *a[] = {array(BS_DTYPE_U8, 1, big), array(BS_DTYPE_F32, 1, small),
                     array(BS_DTYPE_BF16, 1, small)};
    const char *names[] = {"u", "f", "b"}, *k[] = {"format", "x"}, *v[] = {"pt", "y"}, *value;
    const char *whole = tmpdir_file("whole"), *parts = tmpdir_file("parts");
    assert_int_equal(bs_safetensors_write(whole, 3, names, (const bs_array *const *)a, 2, k, v), BS_OK);
    bs_safetensors *st;
    bs_safetensors_writer *w;
    assert_int_equal(bs_safetensors_open(whole, &st), BS_OK);
    assert_string_equal(bs_safetensors_meta(st, 1, &value), "x");
    assert_string_equal(value, "y");
    assert_null(bs_safetensors_meta(st, 2, &value));
    const bs_safetensors_tensor t[] = {*bs_safetensors_find(st, "u"), *bs_safetensors_find(st, "b"),
                                       *bs_safetensors_find(st, "f")};
    assert_int_equal(bs_safetensors_writer_open(parts, 3, t, 2, k, v, &w), BS_OK);
    assert_int_equal(bs_safetensors_writer_add(w, "b", a[2]), BS_OK);
    assert_int_equal(bs_safetensors_writer_copy(w, "u", st), BS_OK);
    assert_int_not_equal(access(parts, F_OK), 0); /* not before it is finished */
    assert_int_equal(bs_safetensors_writer_finish(w), BS_STATE);
    ASSERT_ERROR("tensor 'f' was not given (2 of 3)");
    assert_int_equal(bs_safetensors_writer_add(w, "f", a[1]), BS_OK);
    assert_int_equal(bs_safetensors_writer_finish(w), BS_OK);
    assert_int_equal(bs_safetensors_writer_add(w, "f", a[1]), BS_STATE);
    bs_safetensors_writer_close(w);
    bs_safetensors_close(st);
    char *one = malloc(4 << 20), *two = malloc(4 << 20);
    size_t n = slurp(whole, one, 4 << 20);
    assert_int_equal(slurp(parts, two, 4 << 20), n);
    assert_true(n > 3 << 20);
    assert_memory_equal(one, two, n);
    free(one);
    free(two);
    for (int i = 0; i < 3; i++)
        bs_array_free(a[i]);
}

/* Types that no array holds are copied. */
static void test_foreign_dtype(void **state)
{
    (void)state;
    static const char header[] =
        "{\"q\":{\"dtype\":\"F8_E4M3\",\"shape\":[4],\"data_offsets\":[0,4]}}  ";
    char file[8 + sizeof header - 1 + 4] = {(char)(sizeof header - 1)}, buf[256];
    memcpy(file + 8, header, sizeof header - 1);
    memcpy(file + 8 + sizeof header - 1, "\1\2\3\4", 4);
    bs_safetensors *st;
    bs_safetensors_writer *w;
    assert_int_equal(bs_safetensors_open(tmpdir_put("f8", file, sizeof file), &st), BS_OK);
    const char *path = tmpdir_file("f8.copy");
    assert_int_equal(bs_safetensors_writer_open(path, 1, bs_safetensors_at(st, 0), 0, NULL, NULL, &w),
                     BS_OK);
    assert_int_equal(bs_safetensors_writer_copy(w, "q", st), BS_OK);
    assert_int_equal(bs_safetensors_writer_finish(w), BS_OK);
    bs_safetensors_writer_close(w);
    bs_safetensors_close(st);
    assert_int_equal(bs_safetensors_open(path, &st), BS_OK);
    assert_string_equal(bs_safetensors_find(st, "q")->dtype_name, "F8_E4M3");
    size_t n = slurp(path, buf, sizeof buf);
    assert_memory_equal(buf + n - 4, "\1\2\3\4", 4);
    bs_safetensors_close(st);
}

static void test_writer_refuses(void **state)
{
    (void)state;
    const int64_t dim[] = {2, 3};
    bs_array *a = array(BS_DTYPE_F32, 2, dim), *flat = array(BS_DTYPE_F32, 1, dim);
    bs_safetensors_writer *w;
    const char *path = tmpdir_put("refuse", "old", 3);
    int entries = tmpdir_entries(tmpdir_path), fds = tmpdir_fds();
    bs_safetensors_tensor bad[] = {described("x", "F99", 2), described("x", NULL, 2),
                                   described("x", "F32", -1), described("x", "F4", 1),
                                   described("x", "F64", INT64_MAX)};
    for (size_t i = 0; i < BSI_COUNT(bad); i++)
        assert_int_equal(bs_safetensors_writer_open(path, 1, &bad[i], 0, NULL, NULL, &w), BS_ARG);
    bs_safetensors_tensor huge[9];
    for (int i = 0; i < 9; i++)
        huge[i] = described(&"123456789"[i], "U8", INT64_MAX / 8);
    assert_int_equal(bs_safetensors_writer_open(path, 9, huge, 0, NULL, NULL, &w), BS_ARG);
    ASSERT_ERROR("overflow");

    bs_safetensors_tensor good = {.name = "x", .dtype_name = "F32", .ndim = 2, .dim = {2, 3}};
    assert_int_equal(bs_safetensors_writer_open(path, 1, &good, 0, NULL, NULL, &w), BS_OK);
    assert_int_equal(bs_safetensors_writer_add(w, "y", a), BS_ARG);
    assert_int_equal(bs_safetensors_writer_add(w, "x", flat), BS_SHAPE);
    assert_int_equal(bs_safetensors_writer_add(w, "x", a), BS_OK);
    assert_int_equal(bs_safetensors_writer_add(w, "x", a), BS_STATE);
    bs_safetensors_writer_close(w); /* not finished: the old file stays */
    assert_int_equal(tmpdir_entries(tmpdir_path), entries);
    assert_int_equal(tmpdir_fds(), fds);
    char buf[8];
    assert_int_equal(slurp(path, buf, sizeof buf), 3);
    bs_array_free(a);
    bs_array_free(flat);
}

static void test_file(void **state)
{
    (void)state;
    char buf[64];
    const char *path = tmpdir_file("f.json");
    assert_int_equal(bs_file_write(path, "old", 3), BS_OK);
    assert_int_equal(bs_file_write(path, "newer", 5), BS_OK);
    assert_int_equal(slurp(path, buf, sizeof buf), 5);
    assert_memory_equal(buf, "newer", 5);
    assert_int_equal(bs_file_write(path, NULL, 0), BS_OK);
    assert_int_equal(slurp(path, buf, sizeof buf), 0);
    /* A temporary file that a dead process of our number left. */
    snprintf(buf, sizeof buf, "f.json.tmp.%ld", (long)getpid());
    tmpdir_put(buf, "junk", 4);
    int entries = tmpdir_entries(tmpdir_path);
    assert_int_equal(bs_file_write(tmpdir_file("f.json"), "x", 1), BS_OK);
    assert_int_equal(tmpdir_entries(tmpdir_path), entries - 1);
    /* Without a slash: the working folder. */
    char here[512];
    assert_non_null(getcwd(here, sizeof here));
    assert_int_equal(chdir(tmpdir_path), 0);
    assert_int_equal(bs_file_write("plain", "x", 1), BS_OK);
    assert_int_equal(chdir(here), 0);
    assert_int_equal(slurp(tmpdir_file("plain"), buf, sizeof buf), 1);
}

/* The old content, and nothing else in the folder. */
static void unharmed(const char *path, int entries)
{
    char buf[16];
    assert_int_equal(slurp(path, buf, sizeof buf), 3);
    assert_memory_equal(buf, "old", 3);
    assert_int_equal(tmpdir_entries(tmpdir_path), entries);
}

static void test_bad_places(void **state)
{
    (void)state;
    int fds = tmpdir_fds();
    assert_int_equal(bs_file_write(tmpdir_file("absent/f"), "x", 1), BS_IO);
    assert_int_equal(bs_error()->sys, ENOENT);
    ASSERT_ERROR("absent/f");
    assert_int_equal(bs_file_write(tmpdir_path, "x", 1), BS_IO);
    ASSERT_ERROR("a folder");
    assert_int_equal(bs_file_write("/dev/full", "x", 1), BS_IO); /* would be renamed over, by root */
    struct stat st;
    assert_int_equal(stat("/dev/full", &st), 0);
    assert_true(S_ISCHR(st.st_mode));

    const char *path = tmpdir_put("keep", "old", 3);
    int entries = tmpdir_entries(tmpdir_path);
    bool root = geteuid() == 0;
    assert_int_equal(chmod(tmpdir_path, 0555), 0);
    if (root) /* whom no mode stops */
        assert_int_equal(seteuid(65534), 0);
    bs_status ret = bs_file_write(path, "new", 3);
    int err = bs_error()->sys;
    if (root)
        assert_int_equal(seteuid(0), 0);
    assert_int_equal(chmod(tmpdir_path, 0700), 0);
    assert_int_equal(ret, BS_IO);
    assert_int_equal(err, EACCES);
    unharmed(path, entries);
    assert_int_equal(tmpdir_fds(), fds);
}

/* The disk "fills" at every possible place of a file. */
static void test_disk_full(void **state)
{
    (void)state;
    const int64_t dim[] = {50};
    bs_array *a = array(BS_DTYPE_F32, 1, dim);
    const bs_array *const one[] = {a};
    const char *names[] = {"x"}, *path = tmpdir_put("full", "old", 3);
    int entries = tmpdir_entries(tmpdir_path), fds = tmpdir_fds();
    struct rlimit old, low;
    signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
    bs_status ret = BS_IO;
    rlim_t n = 0;
    for (; ret != BS_OK; n += 3) {
        low = (struct rlimit){n, old.rlim_max};
        assert_int_equal(setrlimit(RLIMIT_FSIZE, &low), 0);
        ret = bs_safetensors_write(path, 1, names, one, 0, NULL, NULL);
        int err = bs_error()->sys;
        assert_int_equal(setrlimit(RLIMIT_FSIZE, &old), 0);
        if (ret != BS_OK) {
            assert_int_equal(ret, BS_IO);
            assert_int_equal(err, EFBIG);
            unharmed(path, entries);
        }
    }
    assert_true(n > 250);
    assert_int_equal(tmpdir_fds(), fds);
    assert_int_equal(tmpdir_entries(tmpdir_path), entries);
    bs_safetensors *st;
    assert_int_equal(bs_safetensors_open(path, &st), BS_OK);
    bs_safetensors_close(st);
    bs_array_free(a);
    signal(SIGXFSZ, SIG_DFL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bytes),         cmocka_unit_test(test_round_trip),
        cmocka_unit_test(test_refused),       cmocka_unit_test(test_tensor_by_tensor),
        cmocka_unit_test(test_foreign_dtype), cmocka_unit_test(test_writer_refuses),
        cmocka_unit_test(test_file),          cmocka_unit_test(test_bad_places),
        cmocka_unit_test(test_disk_full)};
    return cmocka_run_group_tests(tests, tmpdir_open, tmpdir_close);
}
