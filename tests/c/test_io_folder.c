/* SPDX-License-Identifier: Apache-2.0 */
/* Folders that are put in place as a whole: killed at every call and refused every call, in every way that there is. */
#include "base/base.h"
#include "bs.h"
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <string.h>
#include <sys/file.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "fake_calls.h"
#include "tmpdir.h"

static const char *const own[] = {"config", "tensors*"};

static void put(const char *folder, const char *name, const char *text)
{
    char path[2048];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    if (bs_file_write(path, text, strlen(text)) != BS_OK)
        fail_msg("%s", bs_error()->msg);
}

/* The text of a file; "" where there is none. */
static const char *get(const char *folder, const char *name)
{
    static char text[4][64];
    static int at;
    char path[2048], *to = text[at = (at + 1) % 4];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? 0 : read(fd, to, sizeof text[0] - 1);
    if (fd >= 0)
        close(fd);
    to[n < 0 ? 0 : n] = '\0';
    return to;
}

/* A save of two files; the second of `files` names is another one each time. */
static bs_status save(const char *place, const char *text, const char *tensors)
{
    bs_folder *f;
    BSI_TRY(bs_folder_begin(place, 2, own, &f));
    char path[512];
    snprintf(path, sizeof path, "%s/%s", bs_folder_temp(f), tensors);
    bs_status st = bs_file_write(path, text, strlen(text));
    snprintf(path, sizeof path, "%s/config", bs_folder_temp(f));
    if (st == BS_OK)
        st = bs_file_write(path, text, strlen(text));
    if (st == BS_OK)
        st = bs_folder_commit(f);
    bs_folder_close(f);
    return st;
}

static void remove_all(const char *path)
{
    char command[4096];
    snprintf(command, sizeof command, "rm -rf '%s' '%s'.tmp.*", path, path);
    if (system(command) != 0)
        fail_msg("%s", command);
}

/* What is somebody else's, as it was. */
static void check_strangers(const char *place)
{
    char path[512];
    assert_string_equal(get(place, "note"), "mine");
    assert_string_equal(get(place, "sub/deep"), "deep");
    struct stat st;
    snprintf(path, sizeof path, "%s/link", place);
    assert_int_equal(lstat(path, &st), 0);
    assert_true(S_ISLNK(st.st_mode));
}

static void make_old(const char *place)
{
    char path[512];
    assert_int_equal(save(place, "old", "tensors.1"), BS_OK);
    put(place, "note", "mine");
    snprintf(path, sizeof path, "%s/sub", place);
    assert_int_equal(mkdir(path, 0750), 0);
    put(path, "deep", "deep");
    snprintf(path, sizeof path, "%s/link", place);
    assert_int_equal(symlink("/nowhere", path), 0);
    snprintf(path, sizeof path, "%s/config", place);
    assert_int_equal(chmod(path, 0640), 0);
    assert_int_equal(chmod(place, 0711), 0);
}

/* All old or all new, as a reader sees it. Returns whether it is the new. */
static bool check_whole(const char *place, bool first)
{
    if (!*get(place, "config"))
        assert_int_equal(bs_folder_recover(place, 2, own), BS_OK);
    const char *config = get(place, "config");
    bool is_new = strcmp(config, "new") == 0;
    if (is_new) {
        assert_string_equal(get(place, "tensors.2"), "new");
        assert_string_equal(get(place, "tensors.1"), "");
    } else if (first) {
        assert_string_equal(config, "");
    } else {
        assert_string_equal(config, "old");
        assert_string_equal(get(place, "tensors.1"), "old");
        assert_string_equal(get(place, "tensors.2"), "");
    }
    if (!first)
        check_strangers(place);
    return is_new;
}

/* One more save leaves its own files, those of others, and nothing else. */
static void check_next(const char *place, bool first)
{
    struct stat st;
    char path[512];
    if (save(place, "next", "tensors.3") != BS_OK)
        fail_msg("%s", bs_error()->msg);
    assert_string_equal(get(place, "config"), "next");
    assert_string_equal(get(place, "tensors.3"), "next");
    assert_int_equal(tmpdir_entries(place), first ? 2 : 5);
    if (!first) {
        check_strangers(place);
        snprintf(path, sizeof path, "%s/config", place);
        assert_int_equal(stat(path, &st), 0);
        assert_int_equal(st.st_mode & 07777, 0640);
        assert_int_equal(stat(place, &st), 0);
        assert_int_equal(st.st_mode & 07777, 0711);
    }
    assert_int_equal(tmpdir_entries(tmpdir_path), 1);
}

enum way { FIRST, EXCHANGED, NO_EXCHANGE, WORKING_FOLDER, WAYS };

/* The save in a process of its own whose call of this number is its last, or fails. Returns its exit status, -1 when it
   was killed; *calls: how many there were. */
static int try_save(const char *place, enum way way, int kill_at, int fail_at, int error)
{
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        bs_log_to(NULL, NULL);
        if (way == WORKING_FOLDER && chdir(place) != 0)
            _exit(3);
        snprintf(fake_calls_state.under, sizeof fake_calls_state.under, "%s", place);
        fake_calls_state.kill_at = kill_at;
        fake_calls_state.fail_at = fail_at;
        fake_calls_state.error = error;
        fake_calls_state.plain = way == NO_EXCHANGE;
        bs_status st = save(place, "new", "tensors.2");
        int reached = fake_calls_state.count >= (kill_at ? kill_at : fail_at);
        _exit((st == BS_OK ? 0 : 1) + (reached ? 0 : 4));
    }
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    return WIFSIGNALED(status) ? -1 : WEXITSTATUS(status);
}

static void every_call(bool kills, int error)
{
    char place[300];
    snprintf(place, sizeof place, "%s/place", tmpdir_path);
    for (int way = FIRST; way < WAYS; way++) {
        int n = 0, olds = 0, news = 0;
        for (bool more = true; more;) {
            if (way != FIRST)
                make_old(place);
            n++;
            int status = try_save(place, (enum way)way, kills ? n : 0, kills ? 0 : n, error);
            more = status < 4;
            bool is_new = check_whole(place, way == FIRST);
            if (!more) {
                assert_int_equal(status, 4); /* untouched, and done */
                assert_true(is_new);
            } else if (kills) {
                assert_int_equal(status, -1);
            } else if (status == 0) {
                assert_true(is_new);
            }
            *(is_new ? &news : &olds) += 1;
            check_next(place, way == FIRST);
            remove_all(place);
        }
        assert_true(n > 15 && olds > 5 && news >= 1);
    }
}

static void test_killed(void **state)
{
    (void)state;
    every_call(true, 0);
}

static void test_refused(void **state)
{
    (void)state;
    every_call(false, EIO);
    every_call(false, ENOSPC);
    every_call(false, EPERM);
}

static void test_place(void **state)
{
    (void)state;
    bs_folder *f;
    char real[300], link[300], path[512];
    snprintf(real, sizeof real, "%s/a/b/real", tmpdir_path);
    snprintf(link, sizeof link, "%s/link", tmpdir_path);
    /* Parents are made, and removed again when nothing comes of it. */
    assert_int_equal(bs_folder_begin(real, 2, own, &f), BS_OK);
    bs_folder_close(f);
    assert_int_equal(tmpdir_entries(tmpdir_path), 0);
    assert_int_equal(save(real, "1", "tensors"), BS_OK);
    /* A link to a folder stays one. */
    assert_int_equal(symlink(real, link), 0);
    assert_int_equal(save(link, "2", "tensors"), BS_OK);
    struct stat st;
    assert_int_equal(lstat(link, &st), 0);
    assert_true(S_ISLNK(st.st_mode));
    assert_string_equal(get(real, "config"), "2");
    /* An own name that is taken by a folder. */
    snprintf(path, sizeof path, "%s/tensors.d", real);
    assert_int_equal(mkdir(path, 0777), 0);
    assert_int_equal(bs_folder_begin(real, 2, own, &f), BS_IO);
    ASSERT_ERROR("tensors.d");
    ASSERT_ERROR("a folder");
    assert_string_equal(get(real, "config"), "2");
    /* No folder at all. */
    snprintf(path, sizeof path, "%s/config", real);
    assert_int_equal(bs_folder_begin(path, 2, own, &f), BS_IO);
    assert_int_equal(bs_folder_begin("", 2, own, &f), BS_IO);
    assert_int_equal(unlink(link), 0);
    assert_int_equal(symlink("nowhere", link), 0);
    assert_int_equal(bs_folder_begin(link, 2, own, &f), BS_IO);
    ASSERT_ERROR("a link to nothing");
    assert_int_equal(bs_folder_begin(real, 0, own, &f), BS_ARG);
    remove_all(link);
    snprintf(path, sizeof path, "%s/a", tmpdir_path);
    remove_all(path);
}

/* Of two that are written at once the last one has all of it; what a live process writes stays. */
static void test_two(void **state)
{
    (void)state;
    char place[300], path[512];
    int go[2], done[2];
    char c = 0;
    snprintf(place, sizeof place, "%s/place", tmpdir_path);
    assert_int_equal(pipe(go), 0);
    assert_int_equal(pipe(done), 0);
    pid_t pid = fork();
    if (pid == 0) {
        bs_folder *f;
        bs_status st = bs_folder_begin(place, 2, own, &f);
        if (st == BS_OK) {
            put(bs_folder_temp(f), "tensors.b", "b");
            put(bs_folder_temp(f), "config", "b");
        }
        if (write(done[1], "x", 1) != 1 || read(go[0], &c, 1) != 1 || st != BS_OK)
            _exit(1);
        st = bs_folder_commit(f);
        bs_folder_close(f);
        _exit(st == BS_OK ? 0 : 1);
    }
    assert_int_equal(read(done[0], &c, 1), 1);
    assert_int_equal(save(place, "a", "tensors.a"), BS_OK);
    assert_int_equal(tmpdir_entries(tmpdir_path), 2);
    assert_int_equal(write(go[1], "x", 1), 1);
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(status, 0);
    assert_string_equal(get(place, "config"), "b");
    assert_string_equal(get(place, "tensors.b"), "b");
    assert_int_equal(tmpdir_entries(place), 2);
    /* Names that only look like those of an ended process, and files that one has left. */
    snprintf(path, sizeof path, "%s.tmp.%ld", place, (long)getppid());
    assert_int_equal(mkdir(path, 0777), 0);
    put(place, "tensors.x.tmp.999999999", "litter");
    put(place, "other.tmp.999999999", "mine");
    assert_int_equal(save(place, "c", "tensors"), BS_OK);
    assert_int_equal(tmpdir_entries(tmpdir_path), 2);
    assert_int_equal(tmpdir_entries(place), 3);
    assert_string_equal(get(place, "other.tmp.999999999"), "mine");
    assert_int_equal(rmdir(path), 0);
    if (geteuid() == 0) { /* a folder that somebody else has given such a name */
        snprintf(path, sizeof path, "%s.tmp.999999999", place);
        assert_int_equal(mkdir(path, 0777), 0);
        put(path, "planted", "x");
        assert_int_equal(chown(path, 65534, 65534), 0);
        assert_int_equal(save(place, "d", "tensors"), BS_OK);
        assert_string_equal(get(path, "planted"), "x");
        assert_string_equal(get(place, "planted"), "");
        assert_int_equal(chown(path, 0, 0), 0);
        assert_int_equal(save(place, "e", "tensors"), BS_OK);
        assert_int_equal(tmpdir_entries(tmpdir_path), 1);
    }
    for (int i = 0; i < 2; i++) {
        close(go[i]);
        close(done[i]);
    }
    remove_all(place);
}

/* Nobody sees a mixture while saves go on. */
static void test_reader(void **state)
{
    (void)state;
    char place[300];
    snprintf(place, sizeof place, "%s/place", tmpdir_path);
    int fds = tmpdir_fds();
    assert_int_equal(save(place, "0", "tensors"), BS_OK);
    pid_t pid = fork();
    if (pid == 0) {
        bs_status st = BS_OK;
        for (int i = 1; i <= 200 && st == BS_OK; i++)
            st = save(place, i % 2 ? "1" : "2", "tensors");
        _exit(st == BS_OK ? 0 : 1);
    }
    int status = 0;
    for (int dir; waitpid(pid, &status, WNOHANG) == 0; close(dir)) {
        dir = open(place, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        assert_true(dir >= 0);
        char a[2] = {0}, b[2] = {0};
        int x = openat(dir, "config", O_RDONLY | O_CLOEXEC),
            y = openat(dir, "tensors", O_RDONLY | O_CLOEXEC);
        if (x >= 0 && y >= 0) { /* else the folder has been replaced, and is being emptied */
            assert_int_equal(read(x, a, 1), 1);
            assert_int_equal(read(y, b, 1), 1);
            assert_string_equal(a, b);
        }
        if (x >= 0)
            close(x);
        if (y >= 0)
            close(y);
    }
    assert_int_equal(status, 0);
    assert_int_equal(tmpdir_fds(), fds);
    remove_all(place);
}

int main(void)
{
    if (access("/dev/shm", W_OK | X_OK) == 0) /* thousands of flushes that no disk has to do */
        setenv("TMPDIR", "/dev/shm", 0);
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_killed), cmocka_unit_test(test_refused),
                                       cmocka_unit_test(test_place), cmocka_unit_test(test_two),
                                       cmocka_unit_test(test_reader)};
    return cmocka_run_group_tests(tests, tmpdir_open, tmpdir_close);
}
