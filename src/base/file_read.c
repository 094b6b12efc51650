/* SPDX-License-Identifier: Apache-2.0 */
/*
** file_read.c: regular files opened by name, and read. Nothing here waits for the other end of a pipe or touches
** a device: a name that comes from outside may lead to either.
*/
#include "base/base.h"

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

bs_status bsi_open_regular(const char *path, int flags, struct stat *st, int *fd, int *sys)
{
    int err = 0;
    if (sys)
        *sys = 0;
    /* O_NONBLOCK: opening a FIFO must not wait for a writer; it means nothing to a regular file. */
    *fd = open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK | flags);
    if (*fd < 0) {
        err = errno;
        if (sys)
            *sys = err;
        return bsi_fail_sys(BS_IO, err, "file '%s' cannot be opened for reading", path);
    }
    if (fstat(*fd, st) != 0)
        err = errno;
    if (err == 0 && S_ISREG(st->st_mode))
        return BS_OK;
    close(*fd);
    *fd = -1;
    if (err)
        return bsi_fail_sys(BS_IO, err, "file '%s' cannot be examined", path);
    return bsi_fail(BS_IO, "'%s' is %s, a regular file is needed", path,
                    S_ISDIR(st->st_mode) ? "a folder" : "a device, pipe or socket");
}

bs_status bsi_read_all(int fd, const char *path, void *buf, size_t n, uint64_t offset)
{
    size_t got = 0;
    while (got < n) {
        ssize_t k = pread(fd, (char *)buf + got, n - got, (off_t)(offset + got));
        if (k < 0 && errno == EINTR)
            continue;
        if (k < 0)
            return bsi_fail_sys(BS_IO, errno, "file '%s': reading %zu bytes at %llu", path, n - got,
                                (unsigned long long)(offset + got));
        if (k == 0)
            return bsi_fail(
                BS_IO, "file '%s' at %llu: expected %zu bytes, got %zu: it became shorter while in use",
                path, (unsigned long long)offset, n, got);
        got += (size_t)k;
    }
    return BS_OK;
}

/* fstat's size is the first room: files of /proc say 0, others may grow meanwhile. */
static bs_status read_to_end(int fd, const char *path, size_t size, size_t limit, char **text,
                             size_t *n)
{
    size_t room = 0, wanted = size + 1;
    for (ssize_t k = 1; k != 0;) {
        if (*n == room) {
            char *p = bsi_realloc(BS_TAG_MISC, *text, wanted + 1);
            if (!p)
                return BS_NOMEM;
            *text = p;
            room = wanted;
            wanted = 2 * room;
        }
        k = pread(fd, *text + *n, room - *n, (off_t)*n);
        if (k < 0 && errno != EINTR)
            return bsi_fail_sys(BS_IO, errno, "file '%s' cannot be read", path);
        *n += k > 0 ? (size_t)k : 0;
        if (*n > limit)
            return bsi_fail(BS_FORMAT,
                            "file '%s' is larger than %zu bytes, the limit for a file of its kind",
                            path, limit);
    }
    return BS_OK;
}

bs_status bs_file_open(const char *path, int *fd)
{
    struct stat st;
    return bsi_open_regular(path, 0, &st, fd, NULL);
}

bs_status bs_file_read(const char *path, size_t limit, char **text, size_t *n)
{
    struct stat st;
    int fd;
    bs_status ret;
    *text = NULL;
    *n = 0;
    BSI_TRY(bsi_open_regular(path, 0, &st, &fd, NULL));
    if (limit == 0 || limit > SIZE_MAX / 4)
        limit = SIZE_MAX / 4;
    if ((uint64_t)st.st_size > limit)
        ret = bsi_fail(BS_FORMAT, "file '%s' has %llu bytes; %zu is the limit for a file of its kind",
                       path, (unsigned long long)st.st_size, limit);
    else
        ret = read_to_end(fd, path, (size_t)st.st_size, limit, text, n);
    close(fd); /* read only: nothing to lose */
    if (ret == BS_OK) {
        (*text)[*n] = '\0';
        return BS_OK;
    }
    bsi_free(*text);
    *text = NULL;
    *n = 0;
    return ret;
}
