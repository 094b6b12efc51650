/* SPDX-License-Identifier: Apache-2.0 */
/*
** cuda_gpu.c: what the CUDA runtime tells about the GPU without opening it, and what the first
** context of the process took of its memory: by NVML, since CUDA counts nothing before there is a
** context. Any thread; the figures of the process are under a lock.
*/
#include "backend/cuda/cuda_dev.h"
#include "backend/nvml/nvml.h"

#include <dlfcn.h>
#include <pthread.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
    bool before_known, context_known;
    uint64_t before, context;
    char blas[256];
} noted;

static bool used_now(int ordinal, uint64_t *out)
{
    char bus[32];
    bsi_nvml n;
    if (cudaDeviceGetPCIBusId(bus, sizeof bus, ordinal) != cudaSuccess) {
        cudaGetLastError();
        return false;
    }
    if (!bsi_nvml_open(NULL, bus, &n))
        return false;
    bool known = bsi_nvml_used(&n, out);
    bsi_nvml_close(&n);
    return known;
}

void bsi_cuda_note_before(const cuda_dev *d)
{
    pthread_mutex_lock(&lock);
    if (!noted.before_known)
        noted.before_known = used_now(d->ordinal, &noted.before);
    pthread_mutex_unlock(&lock);
}

void bsi_cuda_note_after(const cuda_dev *d)
{
    uint64_t now;
    pthread_mutex_lock(&lock);
    if (noted.before_known && !noted.context_known && used_now(d->ordinal, &now) &&
        now > noted.before) {
        noted.context = now - noted.before;
        noted.context_known = true;
    }
    pthread_mutex_unlock(&lock);
}

void bsi_cuda_note_blas(const void *function)
{
    Dl_info file;
    if (!function || !dladdr(function, &file) || !file.dli_fname)
        return;
    pthread_mutex_lock(&lock);
    snprintf(noted.blas, sizeof noted.blas, "%s", file.dli_fname);
    pthread_mutex_unlock(&lock);
}

void bsi_cuda_gpu(bs_gpu *out, char bus[32])
{
    struct cudaDeviceProp prop;
    int n = 0;
    out->built = true;
    snprintf(out->compiled, sizeof out->compiled, "%s", BS_CUDA_ARCHS);
    cudaRuntimeGetVersion(&out->cuda_runtime);
    cudaDriverGetVersion(&out->cuda_driver);
    if (cudaGetDeviceCount(&n) == cudaSuccess && n > 0 &&
        cudaGetDeviceProperties(&prop, 0) == cudaSuccess) {
        snprintf(out->name, sizeof out->name, "%.95s", prop.name); /* the rest is cut off */
        out->major = prop.major;
        out->minor = prop.minor;
        out->total_bytes = prop.totalGlobalMem;
        if (cudaDeviceGetPCIBusId(bus, 32, 0) != cudaSuccess)
            bus[0] = '\0';
    }
    cudaGetLastError(); /* of a machine without a GPU */
    bsi_cuda_note_blas(bsi_cuda_find_blas());
    pthread_mutex_lock(&lock);
    out->before_bytes = noted.before;
    out->context_bytes = noted.context;
    snprintf(out->blas, sizeof out->blas, "%s", noted.blas);
    pthread_mutex_unlock(&lock);
}
