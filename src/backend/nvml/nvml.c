/* SPDX-License-Identifier: Apache-2.0 */
/*
** nvml.c: power, clocks, link and memory of a GPU as NVML tells them. The few functions that
** are used are declared here after NVML's documented interface, so that no header of it is needed.
** Any thread; a bsi_nvml is used by one at a time.
*/
#include "backend/nvml/nvml.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define LIBRARY "libnvidia-ml.so.1"

enum { NVML_OK = 0, CLOCK_SM = 1, CLOCK_MEMORY = 2, MOST_PROCESSES = 512 };
#define BYTES_UNKNOWN (~0ULL)

typedef void *gpu_handle;

typedef struct memory_info {
    unsigned long long total, free, used;
} memory_info;

typedef struct process_info { /* of the functions _v2 and _v3 */
    unsigned pid;
    unsigned long long bytes;
    unsigned gpu_instance, compute_instance;
} process_info;

/* The function of a name, or NULL; the cast goes through memory, as POSIX wants it. */
static void find(const bsi_nvml *n, const char *name, void *slot)
{
    void *f = dlsym(n->library, name);
    memcpy(slot, &f, sizeof f);
}

static bool number(const bsi_nvml *n, const char *name, unsigned *out)
{
    int (*f)(gpu_handle, unsigned *);
    find(n, name, &f);
    return f && f(n->gpu, out) == NVML_OK;
}

static int clock_mhz(const bsi_nvml *n, const char *name, unsigned type)
{
    int (*f)(gpu_handle, unsigned, unsigned *);
    unsigned mhz = 0;
    find(n, name, &f);
    return f && f(n->gpu, type, &mhz) == NVML_OK ? (int)mhz : 0;
}

static bool memory(const bsi_nvml *n, memory_info *out)
{
    int (*f)(gpu_handle, memory_info *);
    find(n, "nvmlDeviceGetMemoryInfo", &f);
    return f && f(n->gpu, out) == NVML_OK;
}

static bool start(const bsi_nvml *n)
{
    int (*f)(void);
    find(n, "nvmlInit_v2", &f);
    return f && f() == NVML_OK;
}

static bool find_gpu(bsi_nvml *n, const char *bus)
{
    int (*by_bus)(const char *, gpu_handle *), (*by_index)(unsigned, gpu_handle *);
    if (*bus) {
        find(n, "nvmlDeviceGetHandleByPciBusId_v2", &by_bus);
        return by_bus && by_bus(bus, &n->gpu) == NVML_OK;
    }
    find(n, "nvmlDeviceGetHandleByIndex_v2", &by_index);
    return by_index && by_index(0, &n->gpu) == NVML_OK;
}

static void stop(const bsi_nvml *n)
{
    int (*f)(void);
    find(n, "nvmlShutdown", &f);
    if (f)
        f();
}

bool bsi_nvml_open(const char *library, const char *bus, bsi_nvml *out)
{
    *out = (bsi_nvml){.library = dlopen(library ? library : LIBRARY, RTLD_NOW | RTLD_LOCAL)};
    if (!out->library)
        return false;
    if (start(out)) {
        if (find_gpu(out, bus))
            return true;
        stop(out);
    }
    dlclose(out->library);
    return false;
}

void bsi_nvml_close(bsi_nvml *n)
{
    stop(n);
    dlclose(n->library);
}

bool bsi_nvml_used(const bsi_nvml *n, uint64_t *out)
{
    memory_info m;
    bool known = memory(n, &m);
    if (known)
        *out = m.used;
    return known;
}

/* In a container the ids are often those of the machine outside, and this process is not among them. */
static void read_processes(const bsi_nvml *n, bs_gpu *out)
{
    process_info list[MOST_PROCESSES] = {{0}};
    unsigned count = MOST_PROCESSES;
    int (*f)(gpu_handle, unsigned *, process_info *);
    find(n, "nvmlDeviceGetComputeRunningProcesses_v3", &f);
    if (!f)
        find(n, "nvmlDeviceGetComputeRunningProcesses_v2", &f);
    if (!f || f(n->gpu, &count, list) != NVML_OK || count > MOST_PROCESSES)
        return;
    out->processes = (int)count;
    for (unsigned i = 0; i < count; i++)
        if (list[i].pid == (unsigned)getpid() && list[i].bytes != BYTES_UNKNOWN)
            out->own_bytes = list[i].bytes;
}

void bsi_nvml_read(const bsi_nvml *n, bs_gpu *out)
{
    memory_info m;
    unsigned v = 0;
    int (*text)(gpu_handle, char *, unsigned), (*driver)(char *, unsigned);
    out->nvml = true;
    find(n, "nvmlDeviceGetName", &text);
    if (text)
        text(n->gpu, out->name, sizeof out->name); /* when it fails, the name stays */
    find(n, "nvmlSystemGetDriverVersion", &driver);
    if (driver)
        driver(out->driver, sizeof out->driver);
    if (memory(n, &m)) {
        out->total_bytes = m.total;
        out->free_bytes = m.free;
        out->used_bytes = m.used;
    }
    if (number(n, "nvmlDeviceGetPowerUsage", &v))
        out->power_w = v / 1000.0;
    if (number(n, "nvmlDeviceGetEnforcedPowerLimit", &v))
        out->power_limit_w = v / 1000.0;
    if (number(n, "nvmlDeviceGetCurrPcieLinkGeneration", &v))
        out->pcie_generation = (int)v;
    if (number(n, "nvmlDeviceGetCurrPcieLinkWidth", &v))
        out->pcie_width = (int)v;
    out->sm_mhz = clock_mhz(n, "nvmlDeviceGetClockInfo", CLOCK_SM);
    out->sm_most_mhz = clock_mhz(n, "nvmlDeviceGetMaxClockInfo", CLOCK_SM);
    out->memory_mhz = clock_mhz(n, "nvmlDeviceGetClockInfo", CLOCK_MEMORY);
    read_processes(n, out);
}
