/* SPDX-License-Identifier: Apache-2.0 */
/*
** folder.c: folders that are put in place as a whole. What is to be there is written into a temporary
** folder, tested by whoever wants to, and committed; until then nothing that exists is touched, and
** afterwards nothing of the old is mixed with it. What is somebody else's in the folder stays there.
**
** The temporary folder is beside its place, and a commit links what is somebody else's over and
** exchanges the two: one call that has happened or not. Where that cannot be (another file system is
** mounted there, the working folder is inside, there are no links or no exchange, owner or access list
** cannot be given), the temporary folder is inside its place and files are moved, so that at any time
** one of these holds:
**   .bslua.tmp.PID has `old/` with some of the old files: the first of the own names went first, so
**     that nobody reads a mixture; they are moved back
**   .bslua.put.PID has `old/` with all of the old files: what is still in it is moved on, the first of
**     the own names last
** Whoever opens the folder next does so. A temporary folder is locked by its process, a folder while it
** is changed by whoever changes it. Owner thread.
*/
#include "io/folder_files.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/xattr.h>
#include <time.h>
#include <unistd.h>

#define OLD "old"
enum { LOCK_TRIES = 1000 }; /* of 10 ms each */

struct bs_folder {
    char *path;        /* as the caller names it */
    char *place;       /* where that is: absolute, no link */
    char *temp;        /* the temporary folder: absolute */
    int temp_fd;       /* open and locked */
    bool there;        /* the place exists */
    bool inside, done; /* done: committed */
    size_t parents;    /* bytes of `path` before the first parent that was made */
    bsi_own own;
};

/* ---- names ------------------------------------------------------------------------------------ */

static bs_status fail(const char *path, int err, const char *what)
{
    return bsi_fail_sys(BS_IO, err, "'%s' %s", path, what);
}

static char *join(const char *a, const char *between, const char *b)
{
    size_t n = strlen(a) + strlen(between) + strlen(b) + 1;
    char *s = bsi_alloc(BS_TAG_MISC, n);
    if (s)
        snprintf(s, n, "%s%s%s", a, between, b);
    return s;
}

static char *with_pid(const char *a, const char *between)
{
    char pid[16];
    snprintf(pid, sizeof pid, "%ld", (long)getpid());
    return join(a, between, pid);
}

static void free_own(bsi_own *own)
{
    for (int i = 0; own->pattern && i < own->n; i++)
        bsi_free(own->pattern[i]);
    bsi_free(own->pattern);
    own->pattern = NULL;
}

static bs_status copy_own(int n, const char *const *own, bsi_own *out)
{
    if (n < 1)
        return bsi_fail(BS_ARG, "a folder needs the name of a file of its own");
    out->n = n;
    if (!(out->pattern = bsi_alloc(BS_TAG_MISC, (size_t)n * sizeof *out->pattern)))
        return BS_NOMEM;
    for (int i = 0; i < n; i++)
        if (!(out->pattern[i] = bsi_strdup(BS_TAG_MISC, own[i])))
            return BS_NOMEM;
    return BS_OK;
}

static int open_folder(const char *path)
{
    return open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
}

static const char *last_name(const char *place)
{
    return strrchr(place, '/') + 1;
}

/* The folder that `place` is in, opened. */
static int open_parent(const char *place, int *err)
{
    size_t n = (size_t)(last_name(place) - place);
    char *parent = bsi_alloc(BS_TAG_MISC, n + 1);
    if (!parent) {
        *err = ENOMEM;
        return -1;
    }
    memcpy(parent, place, n);
    int fd = open_folder(parent);
    *err = fd < 0 ? errno : 0;
    bsi_free(parent);
    return fd;
}

/* Some file systems cannot flush a folder (EINVAL): nothing more to do. */
static int flush(int fd)
{
    return fsync(fd) == 0 || errno == EINVAL ? 0 : errno;
}

static int flush_parent(const char *place)
{
    int err, fd = open_parent(place, &err);
    if (fd < 0)
        return err;
    err = flush(fd);
    close(fd);
    return err;
}

/* ---- locks ------------------------------------------------------------------------------------ */

/* false: a process holds it. A file system without locks leaves the names' process ids. */
static bool lock_now(int fd)
{
    return flock(fd, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK;
}

/* The folder at path, opened and locked, while it is the one at that path. */
static int lock_folder(const char *path, int *err)
{
    const struct timespec pause = {.tv_nsec = 10000000};
    for (int i = 0; i < LOCK_TRIES; i++) {
        struct stat a, b;
        int fd = open_folder(path);
        *err = fd < 0 ? errno : 0;
        if (fd < 0)
            return -1;
        bool ours = lock_now(fd);
        if (ours && fstat(fd, &a) == 0 && stat(path, &b) == 0 && a.st_ino == b.st_ino &&
            a.st_dev == b.st_dev)
            return fd;
        close(fd);
        if (!ours)
            nanosleep(&pause, NULL);
    }
    *err = EWOULDBLOCK;
    return -1;
}

/* Is it a folder of ours, or of whom the place belongs to? In /tmp anybody may give it such a name. */
static bool is_trusted(int fd, int place)
{
    struct stat st, of_place;
    return fstat(fd, &st) == 0 &&
           (st.st_uid == geteuid() ||
            (place >= 0 && fstat(place, &of_place) == 0 && st.st_uid == of_place.st_uid));
}

/* The temporary folder of a process that is gone, opened; -1: it is none, or in use. */
static int open_left_over(int dir, const char *name, const char *stem, int place)
{
    long pid = bsi_temp_pid(name, stem);
    if (!pid || !bsi_pid_gone(pid))
        return -1;
    int fd = openat(dir, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0 || (is_trusted(fd, place) && lock_now(fd)))
        return fd;
    close(fd);
    return -1;
}

/* ---- moving inside the place ------------------------------------------------------------------ */

static int open_old(int temp)
{
    return openat(temp, OLD, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
}

/* From any moment of `move_in` before all old files are in the temporary folder. */
static int move_back(int place, int temp, const bsi_own *own)
{
    int old = open_old(temp);
    if (old < 0)
        return errno == ENOENT ? 0 : errno;
    int err = bsi_folder_move(old, place, own, true);
    close(old);
    return err ? err : flush(place);
}

/* All old files out, all new ones in; when it fails, what was there is there again. `temp` is the name of the
   temporary folder in the place. */
static int move_in(int place, int temp_fd, const char *temp, const bsi_own *own)
{
    char *put = with_pid("", BSI_PUT);
    if (!put)
        return ENOMEM;
    int old = -1, err = mkdirat(temp_fd, OLD, 0700) == 0 ? 0 : errno;
    if (!err && (old = open_old(temp_fd)) < 0)
        err = errno;
    if (!err)
        err = bsi_folder_move(place, old, own, false);
    if (!err)
        err = flush(old);
    if (!err)
        err = flush(place);
    if (!err && renameat(place, temp, place, put) != 0)
        err = errno;
    if (!err) {
        if (!(err = flush(place)))
            err = bsi_folder_move(temp_fd, place, own, true);
        /* Back: the lead never got here, or it was the last to come. */
        if (err && bsi_folder_move(place, temp_fd, own, false) == 0 &&
            renameat(place, put, place, temp) == 0)
            (void)move_back(place, temp_fd, own);
        else if (!err)
            err = flush(place);
    } else {
        (void)move_back(place, temp_fd, own);
    }
    if (old >= 0)
        close(old);
    bsi_free(put);
    return err;
}

typedef struct recovery {
    const bsi_own *own;
    bool all; /* also temporary folders that hold nothing of the old */
} recovery;

static int recover_entry(void *ud, int place, const char *name)
{
    const recovery *r = ud;
    int temp = open_left_over(place, name, BSI_INSIDE, place), err = 0;
    if (temp >= 0) {
        err = move_back(place, temp, r->own);
    } else if ((temp = open_left_over(place, name, BSI_PUT, place)) >= 0) {
        err = bsi_folder_move(temp, place, r->own, true);
    } else {
        if (r->all && bsi_own_left_over(r->own, name))
            (void)bsi_remove_tree(place, name);
        return 0;
    }
    if (!err)
        err = flush(place);
    if (!err)
        err = bsi_remove_tree(place, name);
    close(temp);
    return err;
}

static int recover(const char *place, const bsi_own *own, bool all)
{
    recovery r = {.own = own, .all = all};
    int err, fd = lock_folder(place, &err);
    if (fd < 0)
        return err;
    err = bsi_folder_each(fd, recover_entry, &r);
    close(fd);
    return err;
}

bs_status bs_folder_recover(const char *path, int n, const char *const *own)
{
    bsi_own mine = {0};
    struct stat st;
    if (stat(path, &st) != 0 || !S_ISDIR(st.st_mode))
        return BS_OK; /* whoever opens it says so */
    bs_status ret = copy_own(n, own, &mine);
    if (ret == BS_OK) {
        int err = recover(path, &mine, false);
        if (err)
            ret =
                fail(path, err, "was being replaced when a process ended, and cannot be put in order");
    }
    free_own(&mine);
    return ret;
}

/* ---- what ended processes have left beside ----------------------------------------------------- */

typedef struct sweep {
    const char *stem; /* of temporary folders of this place */
    int place;        /* -1: it is not there */
    const bsi_own *own;
} sweep;

static int not_own(void *ud, int dir, const char *name)
{
    (void)dir;
    return bsi_own_has(ud, name) || bsi_own_left_over(ud, name) ? 0 : EEXIST;
}

/* Never an error: what cannot be removed does no harm. */
static int sweep_entry(void *ud, int parent, const char *name)
{
    sweep *s = ud;
    int fd = open_left_over(parent, name, s->stem, s->place);
    if (fd < 0)
        return 0;
    if (s->place >= 0)
        (void)bsi_folder_retire(fd, s->place, s->own, false);
    else if (bsi_folder_each(fd, not_own, (void *)(uintptr_t)s->own) == 0)
        (void)bsi_folder_unlink(fd, NULL);
    (void)unlinkat(parent, name, AT_REMOVEDIR);
    close(fd);
    return 0;
}

static void sweep_beside(const char *place, const bsi_own *own)
{
    sweep s = {.place = open_folder(place), .own = own};
    int err, parent = open_parent(place, &err);
    char *stem = join(last_name(place), BSI_BESIDE, "");
    s.stem = stem;
    if (parent >= 0 && stem)
        (void)bsi_folder_each(parent, sweep_entry, &s);
    bsi_free(stem);
    if (parent >= 0)
        close(parent);
    if (s.place >= 0)
        close(s.place);
}

/* ---- beginning ---------------------------------------------------------------------------------- */

/* Makes the parents of a path that are not there; *made: bytes before the name of the first that was made. */
static int make_parents(char *path, size_t *made)
{
    bool first = true;
    for (char *p = strchr(path + 1, '/'); p; p = strchr(p + 1, '/')) {
        *p = '\0';
        int err = mkdir(path, 0777) == 0 ? 0 : errno;
        const char *slash = strrchr(path, '/');
        if (!err && first) {
            *made = slash ? (size_t)(slash - path) + 1 : 0;
            first = false;
        }
        *p = '/';
        if (err && err != EEXIST && err != EISDIR)
            return err;
    }
    if (first)
        *made = strlen(path);
    return 0;
}

static void remove_parents(const bs_folder *f)
{
    char *path = f->path ? bsi_strdup(BS_TAG_MISC, f->path) : NULL;
    for (char *p = path; p && (p = strrchr(path, '/')) && (size_t)(p - path) > f->parents;) {
        *p = '\0';
        if (rmdir(path) != 0 && errno != ENOENT) /* somebody else uses it */
            break;
    }
    bsi_free(path);
}

/* place of a path that is not there, whose parents are made. */
static bs_status resolve_new(bs_folder *f, char *path)
{
    char real[PATH_MAX];
    size_t n = strlen(path);
    while (n > 1 && path[n - 1] == '/')
        path[--n] = '\0';
    int err = make_parents(path, &f->parents);
    if (err)
        return fail(f->path, err, "cannot be written: its parent cannot be made");
    char *slash = strrchr(path, '/');
    if (slash)
        *slash = '\0';
    const char *name = slash ? slash + 1 : path;
    if (!realpath(!slash ? "." : slash == path ? "/" : path, real))
        return fail(f->path, errno, "cannot be written");
    f->place = join(strcmp(real, "/") == 0 ? "" : real, "/", name);
    return f->place ? BS_OK : BS_NOMEM;
}

static bs_status resolve(bs_folder *f)
{
    struct stat st;
    char real[PATH_MAX];
    f->parents = SIZE_MAX; /* none were made */
    if (stat(f->path, &st) == 0) {
        f->there = true;
        if (!S_ISDIR(st.st_mode))
            return fail(f->path, ENOTDIR, "cannot be written");
        if (!realpath(f->path, real))
            return fail(f->path, errno, "cannot be found");
        return (f->place = bsi_strdup(BS_TAG_MISC, real)) ? BS_OK : BS_NOMEM;
    }
    int err = errno;
    if (err == ENOENT && f->path[0] && lstat(f->path, &st) == 0)
        return bsi_fail(BS_IO, "'%s' cannot be written: it is a link to nothing", f->path);
    if (err != ENOENT || !f->path[0])
        return fail(f->path, err, "cannot be written");
    char *path = bsi_strdup(BS_TAG_MISC, f->path);
    bs_status ret = path ? resolve_new(f, path) : BS_NOMEM;
    bsi_free(path);
    return ret;
}

/* Can a folder be exchanged at this place? Where the answer is wrong the commit finds out. */
static bool exchangeable(const char *place, const struct stat *st)
{
    struct statx sx;
    struct stat parent;
    char cwd[PATH_MAX], *up = join(place, "/..", "");
    size_t n = strlen(place);
    bool can = up && stat(up, &parent) == 0 && parent.st_dev == st->st_dev;
    bsi_free(up);
    if (can && statx(AT_FDCWD, place, 0, STATX_BASIC_STATS, &sx) == 0 &&
        (sx.stx_attributes_mask & STATX_ATTR_MOUNT_ROOT) && (sx.stx_attributes & STATX_ATTR_MOUNT_ROOT))
        return false;
    if (can && getxattr(place, "system.posix_acl_access", NULL, 0) > 0)
        return false;
    if (can && getxattr(place, "system.posix_acl_default", NULL, 0) > 0)
        return false;
    /* Whoever works in it would be left in a folder that is gone; of this process we know. */
    return can &&
           (!getcwd(cwd, sizeof cwd) || strncmp(cwd, place, n) != 0 || (cwd[n] && cwd[n] != '/'));
}

static int make_temp(bs_folder *f, bool inside)
{
    f->inside = inside;
    f->temp = inside ? with_pid(f->place, "/" BSI_INSIDE) : with_pid(f->place, BSI_BESIDE);
    if (!f->temp)
        return ENOMEM;
    int err = mkdir(f->temp, 0777) == 0 ? 0 : errno;
    if (!err && (f->temp_fd = open_folder(f->temp)) < 0) {
        err = errno;
        rmdir(f->temp);
    }
    if (!err) {
        (void)lock_now(f->temp_fd); /* nobody else uses a name with our process id */
        return 0;
    }
    bsi_free(f->temp);
    f->temp = NULL;
    return err;
}

/* Own files are replaced where files or links are, and by nothing else. */
static int check_own(void *ud, int dir, const char *name)
{
    struct stat st;
    bs_folder *f = ud;
    if (!bsi_own_has(&f->own, name) || fstatat(dir, name, &st, AT_SYMLINK_NOFOLLOW) != 0 ||
        S_ISREG(st.st_mode) || S_ISLNK(st.st_mode))
        return 0;
    (void)bsi_fail(BS_IO, "'%s/%s' cannot be written: it is %s", f->path, name,
                   S_ISDIR(st.st_mode) ? "a folder" : "not a regular file");
    return -1;
}

/* Of a place that is there. */
static bs_status check_place(bs_folder *f, struct stat *st)
{
    if (faccessat(AT_FDCWD, f->place, W_OK | X_OK, AT_EACCESS) != 0 || stat(f->place, st) != 0)
        return fail(f->path, errno, "cannot be written");
    int err = recover(f->place, &f->own, true);
    if (err)
        return fail(f->path, err, "cannot be put in order after a process that ended");
    int fd = open_folder(f->place);
    err = fd < 0 ? errno : bsi_folder_each(fd, check_own, f);
    if (fd >= 0)
        close(fd);
    return err < 0 ? BS_IO : err ? fail(f->path, err, "cannot be read") : BS_OK;
}

static bs_status begin(bs_folder *f)
{
    struct stat st = {0}, own;
    BSI_TRY(resolve(f));
    if (f->there)
        BSI_TRY(check_place(f, &st));
    sweep_beside(f->place, &f->own);
    int err = ENOTSUP;
    if (!f->there || exchangeable(f->place, &st))
        err = make_temp(f, false);
    /* An exchange keeps the owner, or is none. */
    if (!err && f->there && fstat(f->temp_fd, &own) == 0 &&
        (own.st_uid != st.st_uid || own.st_gid != st.st_gid) &&
        fchown(f->temp_fd, st.st_uid, st.st_gid) != 0) {
        rmdir(f->temp);
        close(f->temp_fd);
        bsi_free(f->temp);
        f->temp_fd = -1;
        f->temp = NULL;
        err = ENOTSUP;
    }
    if (f->there &&
        (err == ENOTSUP || err == EACCES || err == EPERM || err == EROFS || err == ENAMETOOLONG))
        err = make_temp(f, true);
    return err == EEXIST
               ? bsi_fail(BS_STATE, "'%s' is being written already: its temporary folder is there",
                          f->path)
           : err ? fail(f->path, err, "cannot be written: no folder can be made beside it")
                 : BS_OK;
}

bs_status bs_folder_begin(const char *path, int n, const char *const *own, bs_folder **out)
{
    *out = NULL;
    bs_folder *f = bsi_alloc(BS_TAG_MISC, sizeof *f);
    if (!f)
        return BS_NOMEM;
    f->temp_fd = -1;
    bs_status ret = (f->path = bsi_strdup(BS_TAG_MISC, path)) ? copy_own(n, own, &f->own) : BS_NOMEM;
    if (ret == BS_OK)
        ret = begin(f);
    if (ret == BS_OK)
        *out = f;
    else
        bs_folder_close(f);
    return ret;
}

const char *bs_folder_temp(const bs_folder *f)
{
    return f->temp;
}

/* Where moving back failed, too, it holds files that were there before: whoever comes next tries again. */
static void discard(bs_folder *f)
{
    if (unlinkat(f->temp_fd, OLD, AT_REMOVEDIR) != 0 && errno != ENOENT) {
        bsi_log("'%s': what was there before is in '%s'; the next use of the folder puts it back",
                f->path, f->temp);
        return;
    }
    (void)bsi_folder_unlink(f->temp_fd, NULL);
    rmdir(f->temp);
}

void bs_folder_close(bs_folder *f)
{
    if (!f)
        return;
    if (f->temp_fd >= 0) {
        if (!f->done)
            discard(f);
        close(f->temp_fd);
    }
    if (!f->done && f->place)
        remove_parents(f);
    bsi_free(f->temp);
    bsi_free(f->place);
    bsi_free(f->path);
    free_own(&f->own);
    bsi_free(f);
}

/* ---- committing ---------------------------------------------------------------------------------- */

/* Answers of the system after which files are moved instead. */
static bool cannot_exchange(int err)
{
    return err == EPERM || err == EACCES || err == EMLINK || err == EXDEV || err == ENOTSUP ||
           err == ENOSYS || err == EINVAL || err == EBUSY;
}

static int put_new(bs_folder *f)
{
    if (rename(f->temp, f->place) != 0)
        return errno;
    f->done = true;
    return flush_parent(f->place);
}

/* One call makes the new folder the folder. */
static int exchange(bs_folder *f, int place)
{
    struct stat st;
    int err = bsi_folder_link(place, f->temp_fd, &f->own);
    if (!err && (fstat(place, &st) != 0 || fchmod(f->temp_fd, st.st_mode & 07777) != 0))
        err = errno;
    if (!err)
        err = flush(f->temp_fd);
    if (!err && renameat2(AT_FDCWD, f->temp, AT_FDCWD, f->place, RENAME_EXCHANGE) != 0)
        err = errno;
    if (err)
        return err;
    f->done = true;
    err = flush_parent(f->place);
    /* The new folder is the folder: what is left of the old one is no failure of the commit. */
    if (bsi_folder_retire(place, f->temp_fd, &f->own, true) != 0 || rmdir(f->temp) != 0)
        bsi_log("'%s' is replaced; what was there before is left in '%s'", f->path, f->temp);
    return err;
}

static int move_inside(bs_folder *f, int place)
{
    if (!f->inside) {
        char *inside = with_pid(f->place, "/" BSI_INSIDE);
        int err = inside ? bsi_folder_unlink(f->temp_fd, &f->own) : ENOMEM;
        if (!err && rename(f->temp, inside) != 0)
            err = errno;
        if (err) {
            bsi_free(inside);
            return err;
        }
        bsi_free(f->temp);
        f->temp = inside;
        f->inside = true;
    }
    int err = move_in(place, f->temp_fd, last_name(f->temp), &f->own);
    if (err)
        return err;
    f->done = true;
    char *put = with_pid("", BSI_PUT);
    if (!put || bsi_remove_tree(place, put) != 0)
        bsi_log("'%s' is replaced; what was there before is left inside", f->path);
    bsi_free(put);
    return 0;
}

static int replace(bs_folder *f)
{
    int err, place = lock_folder(f->place, &err);
    if (place < 0)
        return err;
    err = bsi_folder_modes(place, f->temp_fd);
    if (!err) {
        err = f->inside ? ENOTSUP : exchange(f, place);
        if (!f->done && cannot_exchange(err))
            err = move_inside(f, place);
    }
    close(place);
    return err;
}

bs_status bs_folder_commit(bs_folder *f)
{
    if (f->done)
        return bsi_fail(BS_STATE, "'%s' is in its place already", f->path);
    int err = flush(f->temp_fd);
    if (!err && !f->there) {
        err = put_new(f);
        if (!f->done && (err == EEXIST || err == ENOTEMPTY)) { /* somebody was faster */
            f->there = true;
            err = 0;
        }
    }
    if (!err && !f->done)
        err = replace(f);
    return !err      ? BS_OK
           : f->done ? fail(f->path, err, "is written, but its folder cannot be flushed")
                     : fail(f->path, err, "cannot be put in its place; what was there is unchanged");
}
