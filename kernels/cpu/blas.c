/* SPDX-License-Identifier: Apache-2.0 */
/*
** blas.c: OpenBLAS, loaded where the system has it, so that a program runs without it and need not bring its 36 MB
** along. A thread that computes a product holds a buffer, which OpenBLAS maps when it is first wanted and keeps; where
** that is refused it tries for ever. So all buffers are made here, before any thread computes, and only where there is
** room for them. It is used single-threaded, and loaded so that it starts no thread: one that the system refuses ends
** its host with a signal.
*/
#include "cpu.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#define BUFFER                                                                                         \
    ((size_t)128                                                                                       \
     << 20) /* of one thread, as most builds have it: address space, and memory where used */
#define LIBRARY ((size_t)64 << 20)
#define MOST    512 /* buffers that every build can hold */

typedef void *alloc_fn(int);
typedef void free_fn(void *);
typedef void set_threads_fn(int);

bsk_sgemm_fn *bsk_sgemm;

static struct {
    pthread_mutex_t lock;
    bool tried;
    int buffers;     /* made so far */
    alloc_fn *alloc; /* NULL: a build that does not show them makes buffers by itself */
    free_fn *free;
} blas = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* Can so much be mapped, by the limits of the process and those of the system? */
static bool have_room(size_t bytes)
{
    void *p =
        mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED)
        return false;
    munmap(p, bytes);
    return true;
}

/* Half of what can be mapped stays for everything else. */
static size_t wanted(int threads)
{
    return 2 * (LIBRARY + (size_t)threads * BUFFER);
}

/* Held all at once, or each would be the same one. */
static bool make_buffers(int threads)
{
    void *held[MOST];
    int n = 0;
    if (!blas.alloc) {
        blas.buffers = threads;
        return true;
    }
    while (n < threads && (n < blas.buffers || have_room(2 * BUFFER)))
        held[n++] = blas.alloc(0);
    for (int i = 0; i < n; i++)
        blas.free(held[i]);
    blas.buffers = BSI_MAX(blas.buffers, n);
    return n == threads;
}

static bool symbol(void *library, const char *name, void *fn)
{
    void *found = dlsym(library, name);
    memcpy(fn, &found,
           sizeof found); /* a function pointer, which C does not convert from an object's */
    return found != NULL;
}

/* The library stays loaded. It reads its number of threads when it is. */
static void *open_library(void)
{
    static const char name[] = "OPENBLAS_NUM_THREADS";
    const char *now = getenv(name);
    char *kept = now ? strdup(now) : NULL;
    setenv(name, "1", 1);
    void *library = dlopen("libopenblas.so.0", RTLD_NOW | RTLD_LOCAL);
    if (now && kept)
        setenv(name, kept, 1);
    else
        unsetenv(name);
    free(kept);
    return library;
}

/* Said where it is there to be left out; where there is no room even to look, anyway. */
static void leave_out(int threads)
{
    bool looked = have_room(LIBRARY + BUFFER);
    void *library = looked ? open_library() : NULL;
    if (library)
        dlclose(library);
    if (library || !looked)
        bsi_log(
            "OpenBLAS is left out: for %d threads it takes %zu MiB of address space, more than half "
            "of what is left (ulimit -v); products are computed by plain loops, about half as fast "
            "and with other last bits",
            threads, wanted(threads) >> 21);
}

static void load(int threads)
{
    set_threads_fn *set_threads;
    bsk_sgemm_fn *sgemm;
    if (threads > MOST || !have_room(wanted(threads))) {
        leave_out(threads);
        return;
    }
    void *library = open_library();
    if (!library || !symbol(library, "cblas_sgemm", &sgemm) ||
        !symbol(library, "openblas_set_num_threads", &set_threads))
        return;
    set_threads(1);
    if (!symbol(library, "blas_memory_alloc", &blas.alloc) ||
        !symbol(library, "blas_memory_free", &blas.free))
        blas.alloc = NULL;
    if (make_buffers(threads))
        bsk_sgemm = sgemm;
}

bool bsk_cpu_init(int threads)
{
    bool ok = true;
    pthread_mutex_lock(&blas.lock);
    if (!blas.tried) {
        blas.tried = true;
        if (BS_HAVE_BLAS)
            load(threads);
    } else if (bsk_sgemm && threads > blas.buffers) {
        /* Loops would give other bits than what has run, and threads may be computing. */
        ok = threads <= MOST && have_room(wanted(threads - blas.buffers)) && make_buffers(threads);
        if (!ok)
            bsi_fail(BS_NOMEM, "there is no address space for products on %d threads", threads);
    }
    pthread_mutex_unlock(&blas.lock);
    return ok;
}

/* Asked before there is a device, it chooses as for one with the threads that a device has by default. */
const char *bsk_cpu_gemm_name(void)
{
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    (void)bsk_cpu_init((int)BSI_MAX(cores, 1L)); /* refused or not: what was chosen stays */
    return bsk_sgemm ? "openblas" : "plain";
}
