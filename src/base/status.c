/* SPDX-License-Identifier: Apache-2.0 */
/*
** status.c: failure detail, log lines, the cancel flag. The detail is thread-local, so a
** worker's failure reaches the owner only as a record that the owner passes to bsi_fail_from.
*/
#include "base/base.h"

#include <stdatomic.h>
#include <string.h>

static _Thread_local bs_errinfo last_error;
static atomic_bool cancelled;
static bs_log_fn log_fn;
static void *log_ud;

const char *bs_status_name(bs_status st)
{
    static const char *const name[] = {"ok",          "arg",       "shape", "dtype",     "state",
                                       "nomem",       "devmem",    "io",    "format",    "device",
                                       "unsupported", "cancelled", "again", "nonfinite", "internal"};
    return (unsigned)st < BSI_COUNT(name) ? name[st] : "unknown";
}

const bs_errinfo *bs_error(void)
{
    return &last_error;
}

const char *bs_version(void)
{
    return BS_VERSION;
}

static bs_status set(bs_status st, int sys, const char *fmt, va_list ap)
{
    last_error.status = st;
    last_error.sys = sys;
    vsnprintf(last_error.msg, sizeof last_error.msg, fmt, ap);
    return st;
}

bs_status bsi_fail(bs_status st, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    set(st, 0, fmt, ap);
    va_end(ap);
    return st;
}

bs_status bsi_fail_sys(bs_status st, int sys, const char *fmt, ...)
{
    va_list ap;
    char text[64];
    va_start(ap, fmt);
    set(st, sys, fmt, ap);
    va_end(ap);
    size_t n = strlen(last_error.msg);
    snprintf(last_error.msg + n, sizeof last_error.msg - n, ": %s", strerror_r(sys, text, sizeof text));
    return st;
}

bs_status bsi_wrap(bs_status st, const char *fmt, ...)
{
    bs_errinfo old = last_error;
    va_list ap;
    if (st == BS_OK)
        return st;
    va_start(ap, fmt);
    vsnprintf(last_error.msg, sizeof last_error.msg, fmt, ap);
    va_end(ap);
    size_t n = strlen(last_error.msg), room = sizeof last_error.msg - n;
    if (room > 3) {
        size_t k = BSI_MIN(strlen(old.msg), room - 3);
        memcpy(last_error.msg + n, ": ", 2);
        memcpy(last_error.msg + n + 2, old.msg, k);
        last_error.msg[n + 2 + k] = '\0';
    }
    return st;
}

bs_status bsi_fail_from(const bs_errinfo *e)
{
    last_error = *e;
    return e->status;
}

void bs_log_to(bs_log_fn fn, void *ud)
{
    log_fn = fn;
    log_ud = ud;
}

void bsi_log(const char *fmt, ...)
{
    char line[1024];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(line, sizeof line, fmt, ap);
    va_end(ap);
    if (log_fn)
        log_fn(log_ud, line);
    else
        bs_tell(line, strlen(line), false);
}

void bs_log(const char *line)
{
    bsi_log("%s", line);
}

void bs_cancel(bool on)
{
    atomic_store(&cancelled, on);
}

bool bs_cancelled(void)
{
    return atomic_load_explicit(&cancelled, memory_order_relaxed);
}
