/* SPDX-License-Identifier: Apache-2.0 */
/*
** fake_nvml.c: a library with NVML's interface, for test_nvml.c: one GPU at 00000000:01:00.0, on
** which this process and another one compute. FAKE_NVML in the environment: "none", no driver;
** "old", without the functions of newer drivers and without what a container does not tell.
*/
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))

enum { OK = 0, NOT_FOUND = 6, NOT_SUPPORTED = 3, UNKNOWN = 999 };

typedef struct memory_info {
    unsigned long long total, free, used;
} memory_info;
typedef struct process_info {
    unsigned pid;
    unsigned long long bytes;
    unsigned gpu_instance, compute_instance;
} process_info;

API int nvmlInit_v2(void);
API int nvmlShutdown(void);
API int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **out);
API int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **out);
API int nvmlDeviceGetName(void *gpu, char *out, unsigned n);
API int nvmlSystemGetDriverVersion(char *out, unsigned n);
API int nvmlDeviceGetMemoryInfo(void *gpu, memory_info *out);
API int nvmlDeviceGetPowerUsage(void *gpu, unsigned *out);
API int nvmlDeviceGetClockInfo(void *gpu, unsigned type, unsigned *out);
API int nvmlDeviceGetComputeRunningProcesses_v2(void *gpu, unsigned *n, process_info *out);

static int gpu_object, started;

static int mode(const char *name)
{
    const char *s = getenv("FAKE_NVML");
    return s && strcmp(s, name) == 0;
}

int nvmlInit_v2(void)
{
    if (mode("none"))
        return 9; /* driver not loaded */
    started++;
    return OK;
}

int nvmlShutdown(void)
{
    return --started >= 0 ? OK : UNKNOWN;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **out)
{
    *out = &gpu_object;
    return strcmp(bus, "00000000:01:00.0") == 0 ? OK : NOT_FOUND;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **out)
{
    *out = &gpu_object;
    return index == 0 ? OK : NOT_FOUND;
}

int nvmlDeviceGetName(void *gpu, char *out, unsigned n)
{
    strncpy(out, "Fake GPU", n - 1);
    return gpu == &gpu_object && started > 0 ? OK : UNKNOWN;
}

int nvmlSystemGetDriverVersion(char *out, unsigned n)
{
    strncpy(out, "580.0", n - 1);
    return OK;
}

int nvmlDeviceGetMemoryInfo(void *gpu, memory_info *out)
{
    *out = (memory_info){.total = 1000, .free = 600, .used = 400};
    return gpu == &gpu_object ? OK : UNKNOWN;
}

int nvmlDeviceGetPowerUsage(void *gpu, unsigned *out)
{
    *out = 123500;
    return gpu == &gpu_object && !mode("old") ? OK : NOT_SUPPORTED;
}

int nvmlDeviceGetClockInfo(void *gpu, unsigned type, unsigned *out)
{
    *out = 1000 + type;
    return gpu == &gpu_object ? OK : UNKNOWN;
}

int nvmlDeviceGetComputeRunningProcesses_v2(void *gpu, unsigned *n, process_info *out)
{
    if (gpu != &gpu_object || *n < 2)
        return UNKNOWN;
    *n = 2;
    out[0] = (process_info){.pid = 1, .bytes = 100};
    out[1] = (process_info){.pid = (unsigned)getpid(), .bytes = mode("old") ? ~0ULL : 250};
    return OK;
}
