/* SPDX-License-Identifier: Apache-2.0 */
/* Files opened for reading: direct or buffered, what is refused, changes that are noticed. */
#include "base/base.h"
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>
#include <sys/time.h>
#include <unistd.h>

#include <cmocka.h>

#include "io/io.h"
#include "tmpdir.h"

static void test_open(void **state)
{
    (void)state;
    bsi_file f;
    char data[10000] = "x";
    const char *path = tmpdir_put("f", data, sizeof data);
    assert_int_equal(bsi_file_open(path, false, &f), BS_OK);
    assert_int_equal(f.bytes, 10000);
    assert_string_equal(f.path, path);
    assert_int_equal(f.align & (f.align - 1), 0);
    assert_true(f.direct ? f.align >= 512 : f.align == 1);
    assert_int_equal((fcntl(f.fd, F_GETFL) & O_DIRECT) != 0, f.direct);
    assert_true(fcntl(f.fd, F_GETFD) & FD_CLOEXEC);
    assert_int_equal(bsi_file_check(&f), BS_OK);
    bsi_file_close(&f);
    bsi_file_close(&f); /* twice is fine */

    assert_int_equal(bsi_file_open(path, true, &f), BS_OK);
    assert_false(f.direct);
    assert_int_equal(f.align, 1);
    assert_int_equal(fcntl(f.fd, F_GETFL) & O_DIRECT, 0);
    bsi_file_close(&f);

    assert_int_equal(bsi_file_open(tmpdir_put("empty", "", 0), false, &f), BS_OK);
    assert_int_equal(f.bytes, 0);
    bsi_file_close(&f);
}

/* Refused O_DIRECT: buffered, and one line for all files of the file system. */
static void test_refuse_direct(void **state)
{
    (void)state;
    bsi_file a, b;
    const char *path = tmpdir_put("f", "x", 1);
    tmpdir_log[0] = '\0';
    bsi_file_refuse_direct(true);
    bs_status ra = bsi_file_open(path, false, &a), rb = bsi_file_open(path, false, &b);
    bsi_file_refuse_direct(false);
    assert_int_equal(ra, BS_OK);
    assert_int_equal(rb, BS_OK);
    assert_false(a.direct);
    assert_int_equal(a.align, 1);
    assert_non_null(strstr(tmpdir_log, "through the page cache"));
    assert_ptr_equal(strchr(tmpdir_log, '\n'), tmpdir_log + strlen(tmpdir_log) - 1);
    bsi_file_close(&a);
    bsi_file_close(&b);
}

static void test_refused(void **state)
{
    (void)state;
    bsi_file f;
    int fds = tmpdir_fds();
    assert_int_equal(bsi_file_open(tmpdir_file("absent"), false, &f), BS_IO);
    assert_int_equal(bs_error()->sys, ENOENT);
    ASSERT_ERROR("absent");
    assert_int_equal(bsi_file_open(tmpdir_path, false, &f), BS_IO);
    ASSERT_ERROR("a folder");
    assert_int_equal(bsi_file_open("/dev/null", false, &f), BS_IO);
    ASSERT_ERROR("regular file");
    const char *fifo = tmpdir_file("fifo");
    assert_int_equal(mkfifo(fifo, 0600), 0);
    assert_int_equal(bsi_file_open(fifo, false, &f), BS_IO);
    ASSERT_ERROR("regular file");

    const char *path = tmpdir_put("secret", "x", 1);
    bool root = geteuid() == 0;
    assert_int_equal(chmod(path, 0), 0);
    assert_int_equal(chmod(tmpdir_path, 0755), 0);
    if (root) /* whom no mode stops */
        assert_int_equal(seteuid(65534), 0);
    bs_status ret = bsi_file_open(path, false, &f);
    if (root)
        assert_int_equal(seteuid(0), 0);
    assert_int_equal(ret, BS_IO);
    assert_int_equal(bs_error()->sys, EACCES);
    assert_int_equal(tmpdir_fds(), fds);
}

static void test_check(void **state)
{
    (void)state;
    bsi_file f;
    const char *path = tmpdir_put("c", "abc", 3), *other = tmpdir_put("d", "xyz", 3);
    assert_int_equal(bsi_file_open(path, false, &f), BS_OK);
    assert_int_equal(bsi_file_check(&f), BS_OK);
    struct timeval past[2] = {{1, 0}, {1, 0}};
    assert_int_equal(utimes(path, past), 0);
    assert_int_equal(bsi_file_check(&f), BS_IO);
    ASSERT_ERROR("was written to");
    assert_int_equal(truncate(path, 2), 0);
    assert_int_equal(bsi_file_check(&f), BS_IO);
    ASSERT_ERROR("had 3 bytes when it was opened and has 2 now");
    assert_int_equal(rename(other, path), 0);
    assert_int_equal(bsi_file_check(&f), BS_IO);
    ASSERT_ERROR("replaced");
    assert_int_equal(unlink(path), 0);
    assert_int_equal(bsi_file_check(&f), BS_IO);
    ASSERT_ERROR("removed");
    bsi_file_close(&f);
}

static void test_no_memory(void **state)
{
    (void)state;
    bsi_file f;
    const char *path = tmpdir_put("f", "x", 1);
    int fds = tmpdir_fds();
    uint64_t n = 1;
    for (;; n++) {
        bsi_alloc_fail_nth(n);
        bs_status ret = bsi_file_open(path, false, &f);
        bsi_alloc_fail_nth(0);
        if (ret == BS_OK)
            break;
        assert_int_equal(ret, BS_NOMEM);
        assert_int_equal(tmpdir_fds(), fds);
    }
    assert_true(n >= 2);
    bsi_file_close(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_open), cmocka_unit_test(test_refuse_direct),
        cmocka_unit_test(test_refused), cmocka_unit_test(test_check), cmocka_unit_test(test_no_memory)};
    return cmocka_run_group_tests(tests, tmpdir_open, tmpdir_close);
}
