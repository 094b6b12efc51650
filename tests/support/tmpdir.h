/* SPDX-License-Identifier: Apache-2.0 */
/*
** tmpdir.h: a temporary folder of a test program, files with given content in it, and the log lines
** that were written. Include after cmocka.h. One thread.
*/
#ifndef TMPDIR_H
#define TMPDIR_H

#include "base/base.h"

#include <dirent.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static char tmpdir_path[256];
static char tmpdir_log[8192];

static inline void tmpdir_on_log(void *ud, const char *line)
{
    (void)ud;
    size_t n = strlen(tmpdir_log);
    snprintf(tmpdir_log + n, sizeof tmpdir_log - n, "%s\n", line);
}

static inline int tmpdir_open(void **state)
{
    (void)state;
    const char *base = getenv("TMPDIR");
    snprintf(tmpdir_path, sizeof tmpdir_path, "%s/bs-test-XXXXXX", base ? base : "/tmp");
    bs_log_to(tmpdir_on_log, NULL);
    return mkdtemp(tmpdir_path) ? 0 : -1;
}

/* Path of a file in the folder; a ring of buffers, so that a few can be in use at once. */
static inline const char *tmpdir_file(const char *name)
{
    static char ring[8][512];
    static int at;
    at = (at + 1) % 8;
    snprintf(ring[at], sizeof ring[at], "%s/%s", tmpdir_path, name);
    return ring[at];
}

static inline const char *tmpdir_put(const char *name, const void *data, size_t n)
{
    const char *path = tmpdir_file(name);
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(data, 1, n, f), n);
    assert_int_equal(fclose(f), 0);
    return path;
}

/* Entries of the folder, "." and ".." not counted. */
static inline int tmpdir_entries(const char *path)
{
    int n = 0;
    DIR *d = opendir(path);
    assert_non_null(d);
    while (readdir(d))
        n++;
    closedir(d);
    return n - 2;
}

static inline int tmpdir_close(void **state)
{
    (void)state;
    DIR *d = opendir(tmpdir_path);
    if (!d)
        return -1;
    for (const struct dirent *e; (e = readdir(d));)
        if (strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0)
            remove(tmpdir_file(e->d_name));
    closedir(d);
    bs_log_to(NULL, NULL);
    return rmdir(tmpdir_path);
}

static inline int tmpdir_fds(void)
{
    return tmpdir_entries("/proc/self/fd") - 1;
}

/* The last failure's text has this in it. */
#define ASSERT_ERROR(text)                                                                             \
    do {                                                                                               \
        if (!strstr(bs_error()->msg, text))                                                            \
            fail_msg("'%s' is not in '%s'", text, bs_error()->msg);                                    \
    } while (0)

#endif
