/* SPDX-License-Identifier: Apache-2.0 */
#include "fake_calls.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

fake_calls fake_calls_state;

static int number(const char *name)
{
    const char *text = getenv(name);
    return text ? atoi(text) : 0;
}

__attribute__((constructor)) static void from_environment(void)
{
    const char *under = getenv("FAKE_CALLS_UNDER");
    if (!under)
        return;
    snprintf(fake_calls_state.under, sizeof fake_calls_state.under, "%s", under);
    fake_calls_state.kill_at = number("FAKE_CALLS_KILL");
    fake_calls_state.fail_at = number("FAKE_CALLS_FAIL");
    fake_calls_state.error = number("FAKE_CALLS_ERRNO");
    fake_calls_state.plain = number("FAKE_CALLS_PLAIN");
}

__attribute__((destructor)) static void tell_count(void)
{
    const char *path = getenv("FAKE_CALLS_COUNT");
    FILE *f = path ? fopen(path, "w") : NULL;
    if (!f)
        return;
    fprintf(f, "%d\n", fake_calls_state.count);
    fclose(f);
}

static const char *path_of(int fd, const char *name, char *buf)
{
    char link[64];
    if (name && (*name == '/' || fd == AT_FDCWD))
        return name;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, buf, PATH_MAX - 300);
    if (n < 0)
        return "";
    snprintf(buf + n, 300, "/%s", name ? name : "");
    return buf;
}

/* true: the call fails, errno is set. */
static int fails(int fd, const char *name)
{
    fake_calls *s = &fake_calls_state;
    char buf[PATH_MAX];
    if (!s->under[0] || !strstr(path_of(fd, name, buf), s->under))
        return 0;
    s->count++;
    if (s->count == s->kill_at)
        kill(getpid(), SIGKILL);
    if (s->count != s->fail_at)
        return 0;
    errno = s->error;
    return 1;
}

#define REAL(name, type) ((type)(uintptr_t)dlsym(RTLD_NEXT, name))
typedef int (*two_paths)(const char *, const char *);
typedef int (*one_path)(const char *);
typedef int (*path_mode)(const char *, mode_t);
typedef int (*at_mode)(int, const char *, mode_t);
typedef int (*opener)(const char *, int, ...);
typedef int (*at_opener)(int, const char *, int, ...);

int rename(const char *a, const char *b)
{
    return fails(AT_FDCWD, b) ? -1 : REAL("rename", two_paths)(a, b);
}

int renameat(int x, const char *a, int y, const char *b)
{
    typedef int (*call)(int, const char *, int, const char *);
    return fails(y, b) ? -1 : REAL("renameat", call)(x, a, y, b);
}

int renameat2(int x, const char *a, int y, const char *b, unsigned flags)
{
    typedef int (*call)(int, const char *, int, const char *, unsigned);
    if (fails(y, b))
        return -1;
    if (fake_calls_state.plain) {
        errno = EINVAL;
        return -1;
    }
    return REAL("renameat2", call)(x, a, y, b, flags);
}

int linkat(int x, const char *a, int y, const char *b, int flags)
{
    typedef int (*call)(int, const char *, int, const char *, int);
    return fails(y, b) ? -1 : REAL("linkat", call)(x, a, y, b, flags);
}

int unlink(const char *a)
{
    return fails(AT_FDCWD, a) ? -1 : REAL("unlink", one_path)(a);
}

int unlinkat(int x, const char *a, int flags)
{
    typedef int (*call)(int, const char *, int);
    return fails(x, a) ? -1 : REAL("unlinkat", call)(x, a, flags);
}

int rmdir(const char *a)
{
    return fails(AT_FDCWD, a) ? -1 : REAL("rmdir", one_path)(a);
}

int mkdir(const char *a, mode_t mode)
{
    return fails(AT_FDCWD, a) ? -1 : REAL("mkdir", path_mode)(a, mode);
}

int mkdirat(int x, const char *a, mode_t mode)
{
    return fails(x, a) ? -1 : REAL("mkdirat", at_mode)(x, a, mode);
}

int fchmod(int fd, mode_t mode)
{
    typedef int (*call)(int, mode_t);
    return fails(fd, NULL) ? -1 : REAL("fchmod", call)(fd, mode);
}

int fchmodat(int x, const char *a, mode_t mode, int flags)
{
    typedef int (*call)(int, const char *, mode_t, int);
    return fails(x, a) ? -1 : REAL("fchmodat", call)(x, a, mode, flags);
}

int fsync(int fd)
{
    typedef int (*call)(int);
    return fails(fd, NULL) ? -1 : REAL("fsync", call)(fd);
}

ssize_t pwrite(int fd, const void *p, size_t n, off_t at)
{
    typedef ssize_t (*call)(int, const void *, size_t, off_t);
    return fails(fd, NULL) ? -1 : REAL("pwrite", call)(fd, p, n, at);
}

ssize_t pwrite64(int fd, const void *p, size_t n, off_t at)
{
    typedef ssize_t (*call)(int, const void *, size_t, off_t);
    return fails(fd, NULL) ? -1 : REAL("pwrite64", call)(fd, p, n, at);
}

static mode_t mode_of(int flags, va_list args)
{
    return flags & O_CREAT ? va_arg(args, mode_t) : 0;
}

/* Folders are counted when they are opened, too: without a descriptor nothing in them can be done. */
static int counts(int flags)
{
    return (flags & O_ACCMODE) != O_RDONLY || flags & O_DIRECTORY;
}

int open(const char *a, int flags, ...)
{
    va_list args;
    va_start(args, flags);
    mode_t mode = mode_of(flags, args);
    va_end(args);
    return counts(flags) && fails(AT_FDCWD, a) ? -1 : REAL("open", opener)(a, flags, mode);
}

int open64(const char *a, int flags, ...)
{
    va_list args;
    va_start(args, flags);
    mode_t mode = mode_of(flags, args);
    va_end(args);
    return counts(flags) && fails(AT_FDCWD, a) ? -1 : REAL("open64", opener)(a, flags, mode);
}

int openat(int x, const char *a, int flags, ...)
{
    va_list args;
    va_start(args, flags);
    mode_t mode = mode_of(flags, args);
    va_end(args);
    return counts(flags) && fails(x, a) ? -1 : REAL("openat", at_opener)(x, a, flags, mode);
}

int openat64(int x, const char *a, int flags, ...)
{
    va_list args;
    va_start(args, flags);
    mode_t mode = mode_of(flags, args);
    va_end(args);
    return counts(flags) && fails(x, a) ? -1 : REAL("openat64", at_opener)(x, a, flags, mode);
}
