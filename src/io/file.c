/* SPDX-License-Identifier: Apache-2.0 */
/*
** file.c: files opened for reading, past the page cache (O_DIRECT) where the file system allows it. The
** owner opens and closes; pool threads only use the descriptor. A bsi_file remembers what the file was
** when it was opened, so that a change under a run is noticed.
*/
#include "io/file.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

#define ALIGN_UNKNOWN 4096 /* direct reads when the kernel does not say */
#define ALIGN_LEAST   512

static atomic_bool refuse_direct;

void bsi_file_refuse_direct(bool on)
{
    atomic_store(&refuse_direct, on);
}

/* Alignment that direct reads of fd need; 0: the kernel says that there are none. */
static size_t direct_alignment(int fd)
{
#ifdef STATX_DIOALIGN
    struct statx sx;
    memset(&sx, 0, sizeof sx);
    if (statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &sx) == 0 && (sx.stx_mask & STATX_DIOALIGN)) {
        size_t a = BSI_MAX(sx.stx_dio_mem_align, sx.stx_dio_offset_align);
        bool power = a && (a & (a - 1)) == 0;
        return a == 0 ? 0 : power ? BSI_MAX(a, (size_t)ALIGN_LEAST) : ALIGN_UNKNOWN;
    }
#else
    (void)fd;
#endif
    return ALIGN_UNKNOWN;
}

/* One line per file system for the life of the process. */
static void log_buffered(const char *path, uint64_t dev, const char *reason)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static uint64_t seen[32];
    static size_t n;
    bool fresh = true;
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < n; i++)
        fresh = fresh && seen[i] != dev;
    if (fresh && n < BSI_COUNT(seen))
        seen[n++] = dev;
    pthread_mutex_unlock(&lock);
    if (fresh)
        bsi_log("file '%s': %s; files of this file system are read through the page cache", path,
                reason);
}

/* Some file systems take O_DIRECT at open and refuse the first read: try one. */
static bs_status try_direct(const char *path, bsi_file *f, bool *works)
{
    *works = false;
    f->align = direct_alignment(f->fd);
    if (f->align == 0)
        return BS_OK;
    void *p = bsi_alloc_aligned(BS_TAG_MISC, f->align, f->align);
    if (!p)
        return BS_NOMEM;
    ssize_t k;
    do {
        k = pread(f->fd, p, f->align, 0);
    } while (k < 0 && errno == EINTR);
    int err = errno;
    bsi_free(p);
    if (k < 0 && err != EINVAL)
        return bsi_fail_sys(BS_IO, err, "file '%s': reading at 0", path);
    *works = k >= 0;
    return BS_OK;
}

void bsi_file_identify(bsi_file *f, const struct stat *st)
{
    f->bytes = (uint64_t)st->st_size;
    f->ino = st->st_ino;
    f->dev = st->st_dev;
    f->mtime_ns = (int64_t)st->st_mtim.tv_sec * 1000000000 + st->st_mtim.tv_nsec;
}

bs_status bsi_file_open(const char *path, bool no_direct, bsi_file *out)
{
    struct stat st;
    int sys = 0;
    bs_status ret;
    bsi_file f = {.fd = -1};

    *out = f;
    if (!no_direct) {
        if (atomic_load(&refuse_direct))
            sys = EINVAL;
        else if ((ret = bsi_open_regular(path, O_DIRECT, &st, &f.fd, &sys)) != BS_OK && sys != EINVAL)
            return ret;
        if (f.fd >= 0) {
            if ((ret = try_direct(path, &f, &f.direct)) != BS_OK)
                goto fail;
            if (!f.direct) {
                close(f.fd);
                f.fd = -1;
            }
        }
    }
    if (f.fd < 0) {
        if ((ret = bsi_open_regular(path, 0, &st, &f.fd, NULL)) != BS_OK)
            return ret;
        f.align = 1;
        if (!no_direct)
            log_buffered(path, st.st_dev, sys ? "O_DIRECT is refused" : "direct reads are refused");
    }
    bsi_file_identify(&f, &st);
    if (!(f.path = bsi_strdup(BS_TAG_HEADER, path))) {
        ret = BS_NOMEM;
        goto fail;
    }
    *out = f;
    return BS_OK;
fail:
    close(f.fd);
    return ret;
}

void bsi_file_close(bsi_file *f)
{
    if (f->path && f->fd >= 0)
        close(f->fd); /* read only: nothing to lose */
    bsi_free(f->path);
    *f = (bsi_file){.fd = -1};
}

bs_status bsi_file_check(const bsi_file *f)
{
    struct stat st;
    bsi_file now = {0};
    if (stat(f->path, &st) != 0)
        return bsi_fail_sys(BS_IO, errno, "file '%s' was removed or cannot be reached any more",
                            f->path);
    bsi_file_identify(&now, &st);
    if (now.bytes != f->bytes)
        return bsi_fail(BS_IO, "file '%s' had %llu bytes when it was opened and has %llu now", f->path,
                        (unsigned long long)f->bytes, (unsigned long long)now.bytes);
    if (now.ino != f->ino || now.dev != f->dev)
        return bsi_fail(BS_IO, "file '%s' was replaced by another one since it was opened", f->path);
    if (now.mtime_ns != f->mtime_ns)
        return bsi_fail(BS_IO, "file '%s' was written to since it was opened", f->path);
    return BS_OK;
}
