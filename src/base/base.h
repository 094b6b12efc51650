/* SPDX-License-Identifier: Apache-2.0 */
/*
** base.h: what every layer of libbs may use: failure detail, accounted host memory, checked
** arithmetic, counter-based random numbers, log lines, regular
** files, monotonic time. Any thread may call these;
** bsi_fail writes thread-local state. The layer knows nothing of devices, files or tensors.
*/
#ifndef BS_BASE_H
#define BS_BASE_H

#include "bs/base.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/stat.h>

#define BSI_PRINTF(a, b) __attribute__((format(printf, a, b)))
#define BSI_TRY(e)                                                                                     \
    do {                                                                                               \
        bs_status st_ = (e);                                                                           \
        if (st_ != BS_OK)                                                                              \
            return st_;                                                                                \
    } while (0)
#define BSI_MIN(a, b) ((a) < (b) ? (a) : (b))
#define BSI_MAX(a, b) ((a) > (b) ? (a) : (b))
#define BSI_COUNT(a)  (sizeof(a) / sizeof((a)[0]))

/* Record a failure (what, where, expected, what to do) and return its status. sys: errno or 0. */
bs_status bsi_fail(bs_status st, const char *fmt, ...) BSI_PRINTF(2, 3);
bs_status bsi_fail_sys(bs_status st, int sys, const char *fmt, ...) BSI_PRINTF(3, 4);
/* Put "context: " in front of the recorded message; returns st. */
bs_status bsi_wrap(bs_status st, const char *fmt, ...) BSI_PRINTF(2, 3);
/* Record a failure that another thread produced. */
bs_status bsi_fail_from(const bs_errinfo *e);

/* One log line (no newline at the end). */
void bsi_log(const char *fmt, ...) BSI_PRINTF(1, 2);

/* Accounted host memory. bsi_alloc zeroes; NULL only when the system or an injected fault says so
   (bsi_fail already called). align 0: 64. Sizes of 0 give a non-NULL pointer. */
void *bsi_alloc(bs_tag tag, size_t bytes);
void *bsi_alloc_aligned(bs_tag tag, size_t bytes, size_t align);
void *bsi_realloc(bs_tag tag, void *p, size_t bytes); /* p from bsi_alloc of the same tag, or NULL */
void bsi_free(void *p);                               /* NULL is fine */
char *bsi_strdup(bs_tag tag, const char *s);
/* Account bytes that were obtained otherwise (mmap). */
void bsi_account(bs_tag tag, ptrdiff_t bytes);
/* Tests: the n-th allocation from now fails (1-based), once; 0 = none. */
void bsi_alloc_fail_nth(uint64_t n);
/* An allocation that goes past bsi_alloc asks this first; true: it is the one that fails. */
bool bsi_alloc_injected(void);

/* Checked arithmetic for numbers that come from outside: false on overflow. */
static inline bool bsi_mul_size(size_t a, size_t b, size_t *out)
{
    return !__builtin_mul_overflow(a, b, out);
}
static inline bool bsi_add_size(size_t a, size_t b, size_t *out)
{
    return !__builtin_add_overflow(a, b, out);
}
static inline uint64_t bsi_round_up(uint64_t n, uint64_t align) /* align: a power of two */
{
    return (n + align - 1) & ~(align - 1);
}
static inline uint64_t bsi_round_down(uint64_t n, uint64_t align)
{
    return n & ~(align - 1);
}

/* Philox4x32-10 (Salmon et al. 2011): 4 words from a 128-bit counter and a 64-bit key. */
void bsi_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]);
/* The key of a named random stream: seed mixed with the name's hash. */
void bsi_philox_key(uint64_t seed, const char *name, uint32_t key[2]);
/* Uniform in [0,1) with 24 bits. */
static inline float bsi_uniform(uint32_t word)
{
    return (float)(word >> 8) * 0x1p-24f;
}

/* Elements [first, first + n) of a stream uniform in +-bound: element i takes word i%4 of counter i/4,
   so its value depends on key and index only. first is a multiple of 4. */
void bsi_fill_uniform(float *to, int64_t first, int64_t n, float bound, const uint32_t key[2]);

/* A thread that takes no signals. name: at most 15 characters, for debuggers. 0 or errno. */
int bsi_thread_start(pthread_t *out, void *(*fn)(void *arg), void *arg, const char *name);

/* open(2) for reading with `flags` added; refuses what is not a regular file. Never blocks on a FIFO.
   sys (may be NULL): errno when open itself failed, else 0. */
bs_status bsi_open_regular(const char *path, int flags, struct stat *st, int *fd, int *sys);
/* All n bytes at offset, or BS_IO with file, offset, expected and got. */
bs_status bsi_read_all(int fd, const char *path, void *buf, size_t n, uint64_t offset);

/* Seconds of the monotonic clock. */
double bsi_now(void);

/* Half-precision conversions, round to nearest even. */
float bsi_bf16_to_f32(uint16_t v);
uint16_t bsi_f32_to_bf16(float v);
float bsi_f16_to_f32(uint16_t v);
uint16_t bsi_f32_to_f16(float v);

#endif
