/* SPDX-License-Identifier: Apache-2.0 */
/*
** file_write.c: files that are there whole or not at all: written beside their place, flushed to the
** disk, renamed, and the folder flushed too. Until the rename the old file is untouched, and it gives its
** mode to the new one; on any failure before it the temporary file is removed. Owner thread.
*/
#include "io/folder_files.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define WRITE_MOST 0x7ffff000u /* one write of Linux ends there */
enum { COPY_BYTES = 1 << 20 };

/* Renaming over a folder fails by itself, over a device (/dev/full) it would not. */
static bs_status check_target(const char *path)
{
    struct stat st;
    if (stat(path, &st) == 0 && !S_ISREG(st.st_mode))
        return bsi_fail(BS_IO, "'%s' cannot be written: it is %s", path,
                        S_ISDIR(st.st_mode) ? "a folder" : "not a regular file");
    return BS_OK;
}

static int remove_left_over(void *ud, int dir, const char *name)
{
    long pid = bsi_temp_pid(name, ud);
    if (pid && pid != getpid() && bsi_pid_gone(pid))
        (void)unlinkat(dir, name, 0);
    return 0;
}

/* What processes that ended have left of the same file. Never an error. */
static void sweep(const char *path)
{
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
    size_t n = (size_t)(name - path), room = strlen(name) + sizeof BSI_BESIDE;
    char *folder = bsi_alloc(BS_TAG_MISC, n + 2), *stem = bsi_alloc(BS_TAG_MISC, room);
    if (folder && stem) {
        memcpy(folder, n ? path : ".", n ? n : 1);
        snprintf(stem, room, "%s" BSI_BESIDE, name);
        int dir = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        if (dir >= 0) {
            (void)bsi_folder_each(dir, remove_left_over, stem);
            close(dir);
        }
    }
    bsi_free(folder);
    bsi_free(stem);
}

bs_status bsi_out_open(bsi_out *o, const char *path)
{
    *o = (bsi_out){.path = path, .fd = -1};
    BSI_TRY(check_target(path));
    sweep(path);
    size_t room = strlen(path) + 32;
    if (!(o->temp = bsi_alloc(BS_TAG_MISC, room)))
        return BS_NOMEM;
    snprintf(o->temp, room, "%s" BSI_BESIDE "%ld", path, (long)getpid());
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
    struct stat old;
    int err = 0;
    if (stat(o->path, &old) == 0 && fchmod(o->fd, old.st_mode & 0777) != 0)
        err = errno;
    if (!err && fsync(o->fd) != 0)
        err = errno;
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

bs_status bs_file_copy(const char *from, const char *to)
{
    struct stat st;
    bsi_out o;
    int fd = -1;
    char *piece = bsi_alloc(BS_TAG_STAGING, COPY_BYTES);
    if (!piece)
        return BS_NOMEM;
    bs_status ret = bsi_open_regular(from, 0, &st, &fd, NULL);
    if (ret != BS_OK)
        goto done;
    ret = bsi_out_open(&o, to);
    if (ret != BS_OK)
        goto done;
    uint64_t bytes = (uint64_t)st.st_size;
    for (uint64_t at = 0; ret == BS_OK && at < bytes; at += COPY_BYTES) {
        size_t n = (size_t)BSI_MIN(bytes - at, (uint64_t)COPY_BYTES);
        ret = bsi_read_all(fd, from, piece, n, at);
        if (ret == BS_OK)
            ret = bsi_out_write(&o, piece, n, at);
    }
    if (ret == BS_OK)
        ret = bsi_out_commit(&o);
    else
        bsi_out_abort(&o);
done:
    if (fd >= 0)
        close(fd);
    bsi_free(piece);
    return ret;
}
