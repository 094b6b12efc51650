/* SPDX-License-Identifier: Apache-2.0 */
/*
** process.c: what Linux says of memory and of this process, in text files of /proc with a line for each number.
*/
#include "base/base.h"

#include <errno.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/sysinfo.h>

/* The number behind `key` at the beginning of a line, in the file's own unit. */
static bs_status proc_number(const char *path, const char *key, uint64_t *out)
{
    char line[256];
    unsigned long long v = 0;
    bool found = false;
    FILE *f = fopen(path, "re");
    if (!f)
        return bsi_fail_sys(BS_IO, errno, "%s cannot be read", path);
    while (!found && fgets(line, sizeof line, f))
        found = strncmp(line, key, strlen(key)) == 0 && sscanf(line + strlen(key), "%llu", &v) == 1;
    fclose(f);
    if (!found)
        return bsi_fail(BS_IO, "%s has no number '%s'", path, key);
    *out = v;
    return BS_OK;
}

static bs_status proc_kib(const char *path, const char *key, uint64_t *out)
{
    BSI_TRY(proc_number(path, key, out));
    *out *= 1024;
    return BS_OK;
}

/* Containers and chroots may hide /proc: no reason to end a run. */
bs_status bs_memory_available(uint64_t *out)
{
    struct sysinfo s;
    bs_status st = proc_kib("/proc/meminfo", "MemAvailable:", out);
    if (st == BS_OK || sysinfo(&s) != 0)
        return st;
    *out = ((uint64_t)s.freeram + s.bufferram) * s.mem_unit;
    return BS_OK;
}

bs_status bs_process_memory(uint64_t *now, uint64_t *peak)
{
    struct rusage used;
    bs_status st = proc_kib("/proc/self/status", "VmRSS:", now);
    if (st == BS_OK)
        st = proc_kib("/proc/self/status", "VmHWM:", peak);
    if (st == BS_OK || getrusage(RUSAGE_SELF, &used) != 0)
        return st;
    *now = *peak = (uint64_t)used.ru_maxrss * 1024;
    return BS_OK;
}

/* Kernels without task accounting have no such file: an answer, and no failure. */
bool bs_process_read_bytes(uint64_t *out)
{
    return proc_number("/proc/self/io", "read_bytes:", out) == BS_OK;
}
