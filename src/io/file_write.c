/* SPDX-License-Identifier: Apache-2.0 */
/*
** file_write.c: files that are there whole or not at all: written beside their place, flushed to the
** disk, renamed, and the folder flushed too. Until the rename the old file is untouched; on any failure
** before it the temporary file is removed. Owner thread.
*/
#include "io/file.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define WRITE_MOST 0x7ffff000u /* one write of Linux ends there */

/* Renaming over a folder fails by itself, over a device (/dev/full) it would not. */
static bs_status check_target(const char *path)
{
    struct stat st;
    if (stat(path, &st) == 0 && !S_ISREG(st.st_mode))
        return bsi_fail(BS_IO, "'%s' cannot be written: it is %s", path,
                        S_ISDIR(st.st_mode) ? "a folder" : "not a regular file");
    return BS_OK;
}

bs_status bsi_out_open(bsi_out *o, const char *path)
{
    *o = (bsi_out){.path = path, .fd = -1};
    BSI_TRY(check_target(path));
    size_t room = strlen(path) + 32;
    if (!(o->temp = bsi_alloc(BS_TAG_MISC, room)))
        return BS_NOMEM;
    snprintf(o->temp, room, "%s.tmp.%ld", path, (long)getpid());
    for (int tries = 0; tries < 2 && o->fd < 0; tries++) {
        o->fd = open(o->temp, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        if (o->fd < 0 && errno == EEXIST) /* left by a process that had our number and is gone */
            unlink(o->temp);
    }
    if (o->fd >= 0)
        return BS_OK;
    int err = errno;
    bsi_free(o->temp);
    *o = (bsi_out){.fd = -1};
    return bsi_fail_sys(BS_IO, err, "'%s' cannot be written: no file can be made beside it", path);
}

/* A write beyond RLIMIT_FSIZE sends SIGXFSZ, which kills. The signal is held back and taken here, so
   that the call fails with EFBIG as it does on a full disk; the process's handlers stay what they
   are. */
static ssize_t write_some(int fd, const void *p, size_t n, uint64_t offset)
{
    const struct timespec now = {0};
    sigset_t limit, before, pending;
    sigemptyset(&limit);
    sigaddset(&limit, SIGXFSZ);
    sigpending(&pending);
    pthread_sigmask(SIG_BLOCK, &limit, &before); /* fails only for a wrong first argument */
    ssize_t k = pwrite(fd, p, n, (off_t)offset);
    int err = errno;
    if (k < 0 && err == EFBIG && !sigismember(&pending, SIGXFSZ))
        while (sigtimedwait(&limit, NULL, &now) < 0 && errno == EINTR)
            ;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    errno = err;
    return k;
}

bs_status bsi_out_write(bsi_out *o, const void *data, size_t n, uint64_t offset)
{
    const char *p = data;
    while (n) {
        ssize_t k = write_some(o->fd, p, BSI_MIN(n, (size_t)WRITE_MOST), offset);
        if (k < 0 && errno == EINTR)
            continue;
        if (k < 0)
            return bsi_fail_sys(BS_IO, errno, "'%s' cannot be written, %zu bytes are left", o->path, n);
        p += k;
        n -= (size_t)k;
        offset += (uint64_t)k;
    }
    return BS_OK;
}

/* Makes the rename itself last. Some file systems cannot flush a folder (EINVAL): nothing more to
   do. */
static bs_status flush_folder(const char *path)
{
    const char *slash = strrchr(path, '/');
    size_t n = !slash ? 1 : slash == path ? 1 : (size_t)(slash - path);
    char *folder = bsi_alloc(BS_TAG_MISC, n + 1);
    if (!folder)
        return BS_NOMEM;
    memcpy(folder, slash ? path : ".", n);
    int fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC), err = 0;
    if (fd < 0 || (fsync(fd) != 0 && errno != EINVAL))
        err = errno;
    if (fd >= 0)
        close(fd); /* read only: nothing to lose */
    bsi_free(folder);
    return err ? bsi_fail_sys(BS_IO, err, "'%s' is written, but its folder cannot be flushed", path)
               : BS_OK;
}

bs_status bsi_out_commit(bsi_out *o)
{
    int err = fsync(o->fd) != 0 ? errno : 0;
    if (close(o->fd) != 0 && !err) /* network file systems report late */
        err = errno;
    o->fd = -1;
    if (!err && rename(o->temp, o->path) != 0)
        err = errno;
    if (err) {
        bsi_out_abort(o);
        return bsi_fail_sys(BS_IO, err, "'%s' cannot be written", o->path);
    }
    bsi_free(o->temp);
    o->temp = NULL;
    return flush_folder(o->path);
}

void bsi_out_abort(bsi_out *o)
{
    if (o->fd >= 0)
        close(o->fd); /* its bytes are thrown away */
    if (o->temp)
        unlink(o->temp);
    bsi_free(o->temp);
    o->temp = NULL;
    o->fd = -1;
}

bs_status bs_file_write(const char *path, const void *data, size_t n)
{
    bsi_out o;
    BSI_TRY(bsi_out_open(&o, path));
    bs_status ret = bsi_out_write(&o, data, n, 0);
    if (ret == BS_OK)
        return bsi_out_commit(&o);
    bsi_out_abort(&o);
    return ret;
}

bs_status bs_file_replace(int n, const char *const *from, const char *const *to)
{
    struct stat st;
    for (int i = 0; i < n; i++) {
        BSI_TRY(check_target(to[i]));
        if (stat(from[i], &st) != 0)
            return bsi_fail_sys(BS_IO, errno, "'%s' cannot take the place of '%s'", from[i], to[i]);
    }
    for (int i = 0; i < n; i++)
        if (rename(from[i], to[i]) != 0)
            return bsi_fail_sys(BS_IO, errno, "'%s' cannot take the place of '%s'", from[i], to[i]);
    return n > 0 ? flush_folder(to[0]) : BS_OK;
}
