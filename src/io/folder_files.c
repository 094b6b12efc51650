/* SPDX-License-Identifier: Apache-2.0 */
/*
** folder_files.c: linking, moving and removing the entries of open folders. No link is followed, and nothing is removed
** that is neither an own file nor there a second time. Any thread.
*/
#include "io/folder_files.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { DEEPEST = 64 }; /* folders in folders: descriptors and stack are bounded */

bool bsi_own_has(const bsi_own *own, const char *name)
{
    for (int i = 0; i < own->n; i++)
        if (fnmatch(own->pattern[i], name, 0) == 0)
            return true;
    return false;
}

static int open_folder(int dir, const char *name)
{
    return openat(dir, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
}

/* The names, each ended by a zero byte, and an empty one at the end. */
static int read_names(int dir, char **out)
{
    int fd = open_folder(dir, "."), err = 0; /* a stream of its own: the position of `dir` stays */
    DIR *d = fd < 0 ? NULL : fdopendir(fd);
    size_t n = 0, room = 0;
    char *names = NULL;
    if (!d) {
        err = errno;
        if (fd >= 0)
            close(fd);
        return err;
    }
    for (;;) {
        errno = 0;
        const struct dirent *e = readdir(d);
        if (!e && errno)
            err = errno;
        if (!e || strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0) {
            if (e)
                continue;
            break;
        }
        size_t bytes = strlen(e->d_name) + 1;
        if (n + bytes + 1 > room) {
            room = 2 * (n + bytes) + 1024;
            char *more = bsi_realloc(BS_TAG_MISC, names, room);
            if (!more) {
                err = ENOMEM;
                break;
            }
            names = more;
        }
        memcpy(names + n, e->d_name, bytes);
        n += bytes;
    }
    closedir(d);
    if (!err && !names && !(names = bsi_alloc(BS_TAG_MISC, 1)))
        err = ENOMEM;
    if (err)
        bsi_free(names);
    else
        names[n] = '\0';
    *out = err ? NULL : names;
    return err;
}

int bsi_folder_each(int dir, bsi_entry_fn fn, void *ud)
{
    char *names = NULL;
    int err = read_names(dir, &names);
    for (const char *name = names; !err && *name; name += strlen(name) + 1)
        err = fn(ud, dir, name);
    bsi_free(names);
    return err;
}

/* ---- linking --------------------------------------------------------------------------------- */

typedef struct link_job {
    int to, depth;
    const bsi_own *own;
} link_job;

static int link_entry(void *ud, int from, const char *name);

static int link_folder(const link_job *job, int from, const char *name, const struct stat *st)
{
    link_job inner = {.depth = job->depth + 1};
    struct stat around;
    if (job->depth >= DEEPEST)
        return EMLINK;
    if (fstat(from, &around) != 0 || around.st_dev != st->st_dev)
        return EXDEV; /* something is mounted there, and would stay behind */
    if (mkdirat(job->to, name, 0700) != 0)
        return errno;
    int in = open_folder(from, name), err = in < 0 ? errno : 0;
    inner.to = open_folder(job->to, name);
    if (!err && inner.to < 0)
        err = errno;
    if (!err)
        err = bsi_folder_each(in, link_entry, &inner);
    if (!err && fchown(inner.to, st->st_uid, st->st_gid) != 0)
        err = errno;
    if (!err && fchmod(inner.to, st->st_mode & 07777) != 0)
        err = errno;
    if (in >= 0)
        close(in);
    if (inner.to >= 0)
        close(inner.to);
    return err;
}

/* A name that is in `to` already belongs to what was written there. */
static int link_entry(void *ud, int from, const char *name)
{
    const link_job *job = ud;
    struct stat st;
    if (job->own && (bsi_own_has(job->own, name) || bsi_temp_pid(name, BSI_INSIDE) ||
                     bsi_temp_pid(name, BSI_PUT) || bsi_own_left_over(job->own, name)))
        return 0;
    if (fstatat(from, name, &st, AT_SYMLINK_NOFOLLOW) != 0)
        return errno == ENOENT ? 0 : errno;
    if (S_ISDIR(st.st_mode))
        return link_folder(job, from, name, &st);
    return linkat(from, name, job->to, name, 0) == 0 || errno == EEXIST ? 0 : errno;
}

int bsi_folder_link(int from, int to, const bsi_own *own)
{
    link_job job = {.to = to, .own = own};
    return bsi_folder_each(from, link_entry, &job);
}

static int remove_entry(void *ud, int dir, const char *name)
{
    const bsi_own *own = ud;
    return own && bsi_own_has(own, name) ? 0 : bsi_remove_tree(dir, name);
}

int bsi_folder_unlink(int dir, const bsi_own *own)
{
    return bsi_folder_each(dir, remove_entry, (void *)(uintptr_t)own);
}

int bsi_remove_tree(int dir, const char *name)
{
    if (unlinkat(dir, name, 0) == 0 || errno == ENOENT)
        return 0;
    if (errno != EISDIR && errno != EPERM)
        return errno;
    int err = 0, in = open_folder(dir, name);
    if (in < 0)
        return errno;
    err = bsi_folder_each(in, remove_entry, NULL);
    close(in);
    if (!err && unlinkat(dir, name, AT_REMOVEDIR) != 0)
        err = errno;
    return err;
}

/* ---- modes ----------------------------------------------------------------------------------- */

static int copy_mode(void *ud, int to, const char *name)
{
    struct stat st, now;
    if (fstatat(*(const int *)ud, name, &st, 0) != 0 || !S_ISREG(st.st_mode))
        return 0; /* a new name, or a link to nothing */
    if (fstatat(to, name, &now, AT_SYMLINK_NOFOLLOW) != 0)
        return errno;
    if ((st.st_uid != now.st_uid || st.st_gid != now.st_gid) &&
        fchownat(to, name, st.st_uid, st.st_gid, AT_SYMLINK_NOFOLLOW) != 0 && errno != EPERM)
        return errno; /* only root may give a file away */
    return fchmodat(to, name, st.st_mode & 0777, 0) == 0 ? 0 : errno;
}

int bsi_folder_modes(int from, int to)
{
    return bsi_folder_each(to, copy_mode, &from);
}

/* ---- retiring -------------------------------------------------------------------------------- */

typedef struct retire_job {
    int next;
    bool over;
    const bsi_own *own;
} retire_job;

static int retire_entry(void *ud, int old, const char *name)
{
    const retire_job *job = ud;
    struct stat a, b;
    if (job->own && (bsi_own_has(job->own, name) || bsi_own_left_over(job->own, name)))
        return bsi_remove_tree(old, name);
    if (fstatat(old, name, &a, AT_SYMLINK_NOFOLLOW) != 0)
        return errno == ENOENT ? 0 : errno;
    if (fstatat(job->next, name, &b, AT_SYMLINK_NOFOLLOW) != 0)
        return errno == ENOENT && renameat(old, name, job->next, name) == 0 ? 0 : errno;
    if (S_ISDIR(a.st_mode) && S_ISDIR(b.st_mode)) {
        int in = open_folder(old, name), next = open_folder(job->next, name);
        int err = in < 0 || next < 0 ? errno : bsi_folder_retire(in, next, NULL, job->over);
        if (in >= 0)
            close(in);
        if (next >= 0)
            close(next);
        return err || unlinkat(old, name, AT_REMOVEDIR) == 0 || errno == ENOTEMPTY ? err : errno;
    }
    if (a.st_dev == b.st_dev && a.st_ino == b.st_ino)
        return unlinkat(old, name, 0) == 0 ? 0 : errno;
    return !job->over || renameat(old, name, job->next, name) == 0 ? 0 : errno;
}

int bsi_folder_retire(int old, int next, const bsi_own *own, bool over)
{
    retire_job job = {.next = next, .over = over, .own = own};
    return bsi_folder_each(old, retire_entry, &job);
}

/* ---- moving ---------------------------------------------------------------------------------- */

typedef struct move_job {
    int to;
    const bsi_own *own;
} move_job;

static int move_entry(void *ud, int from, const char *name)
{
    const move_job *job = ud;
    if (!bsi_own_has(job->own, name) || strcmp(name, job->own->pattern[0]) == 0)
        return 0;
    return renameat(from, name, job->to, name) == 0 ? 0 : errno;
}

static int move_lead(int from, int to, const bsi_own *own)
{
    return renameat(from, own->pattern[0], to, own->pattern[0]) == 0 || errno == ENOENT ? 0 : errno;
}

int bsi_folder_move(int from, int to, const bsi_own *own, bool lead_last)
{
    move_job job = {.to = to, .own = own};
    int err = lead_last ? 0 : move_lead(from, to, own);
    if (!err)
        err = bsi_folder_each(from, move_entry, &job);
    return err || !lead_last ? err : move_lead(from, to, own);
}

/* ---- names of temporary things --------------------------------------------------------------- */

long bsi_temp_pid(const char *name, const char *stem)
{
    size_t n = strlen(stem);
    if (strncmp(name, stem, n) != 0)
        return 0;
    size_t length = strspn(name + n, "0123456789");
    return length && length < 10 && !name[n + length] ? strtol(name + n, NULL, 10) : 0;
}

bool bsi_pid_gone(long pid)
{
    return pid == getpid() || (kill((pid_t)pid, 0) != 0 && errno == ESRCH);
}

bool bsi_own_left_over(const bsi_own *own, const char *name)
{
    char pattern[512];
    const char *at = NULL;
    for (const char *p = name; (p = strstr(p, BSI_BESIDE)); p++)
        at = p;
    long pid = at ? bsi_temp_pid(at, BSI_BESIDE) : 0;
    for (int i = 0; pid && pid != getpid() && i < own->n; i++) {
        int n = snprintf(pattern, sizeof pattern, "%s*%s*", own->pattern[i], BSI_BESIDE);
        if (n < (int)sizeof pattern && fnmatch(pattern, name, 0) == 0)
            return bsi_pid_gone(pid);
    }
    return false;
}
