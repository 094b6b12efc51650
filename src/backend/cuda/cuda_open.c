/* SPDX-License-Identifier: Apache-2.0 */
/*
** cuda_open.c: opening and closing the cuda device: the driver, the context, cuBLAS (loaded here, so
** that the program starts on machines without it). Device 0 is used;
** CUDA_VISIBLE_DEVICES chooses another. Signals are blocked meanwhile: threads that CUDA creates
** inherit that and leave them to the owner. Owner thread only.
*/
#include "backend/cuda/cuda_dev.h"

#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>

#define TEXT_(x) #x
#define TEXT(x)  TEXT_(x)
#define BLAS     "libcublas.so." TEXT(CUBLAS_VER_MAJOR)

bs_status bsi_cuda_fail(bs_status st, cudaError_t e, const char *fmt, ...)
{
    char what[256];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(what, sizeof what, fmt, ap);
    va_end(ap);
    cudaGetLastError();
    return bsi_fail(st, "%s: %s (%s)", what, cudaGetErrorString(e), cudaGetErrorName(e));
}

/* ---- cuBLAS ---- */

static void *load_library(void)
{
    static const char *const at[] = {BLAS, "/usr/local/cuda/lib64/" BLAS,
                                     "/usr/local/cuda/targets/x86_64-linux/lib/" BLAS};
    void *lib = NULL;
    for (size_t i = 0; !lib && i < BSI_COUNT(at); i++)
        lib = dlopen(at[i], RTLD_NOW | RTLD_LOCAL);
    return lib;
}

const void *bsi_cuda_find_blas(void)
{
    void *lib = load_library();
    return lib ? dlsym(lib, "cublasCreate_v2") : NULL;
}

static bs_status load_blas(bsk_cublas *b)
{
    const struct {
        const char *name;
        void *slot; /* a function pointer */
    } symbols[] = {
        {"cublasCreate_v2", &b->create},
        {"cublasDestroy_v2", &b->destroy},
        {"cublasSetStream_v2", &b->set_stream},
        {"cublasSetWorkspace_v2", &b->set_workspace},
        {"cublasSetMathMode", &b->set_math_mode},
        {"cublasGemmEx_64", &b->gemm},
        {"cublasGetStatusString", &b->status_text},
        /* of cuBLASLt, which cuBLAS brings along */
        {"cublasLtMatmulDescCreate", &b->op_create},
        {"cublasLtMatmulDescSetAttribute", &b->op_set},
        {"cublasLtMatmulDescDestroy", &b->op_destroy},
        {"cublasLtMatrixLayoutCreate", &b->layout_create},
        {"cublasLtMatrixLayoutDestroy", &b->layout_destroy},
        {"cublasLtMatmulPreferenceCreate", &b->wish_create},
        {"cublasLtMatmulPreferenceSetAttribute", &b->wish_set},
        {"cublasLtMatmulPreferenceDestroy", &b->wish_destroy},
        {"cublasLtMatmulAlgoGetHeuristic", &b->search},
        {"cublasLtMatmul", &b->matmul},
    };
    void *lib = load_library(); /* stays loaded: its threads and exit handlers do */
    if (!lib) {
        const char *reason = dlerror();
        return bsi_fail(BS_UNSUPPORTED,
                        BLAS
                        " was not found (%s); install cuBLAS %d or name its folder in LD_LIBRARY_PATH",
                        reason ? reason : "no reason given", CUBLAS_VER_MAJOR);
    }
    for (size_t i = 0; i < BSI_COUNT(symbols); i++) {
        void *f = dlsym(lib, symbols[i].name);
        if (!f)
            return bsi_fail(BS_UNSUPPORTED, BLAS " has no %s; cuBLAS 12.3 or newer is needed",
                            symbols[i].name);
        memcpy(symbols[i].slot, &f, sizeof f);
        bsi_cuda_note_blas(f);
    }
    return BS_OK;
}

static bs_status blas_ok(const cuda_dev *d, cublasStatus_t st, const char *what)
{
    if (st == CUBLAS_STATUS_SUCCESS)
        return BS_OK;
    cudaGetLastError();
    return bsi_fail(st == CUBLAS_STATUS_ALLOC_FAILED ? BS_DEVMEM : BS_DEVICE, "cuBLAS: %s: %s", what,
                    d->blas.status_text(st));
}

static bs_status open_blas(cuda_dev *d)
{
    BSI_TRY(load_blas(&d->blas));
    d->x.blas = &d->blas;
    d->x.products = bsi_alloc(BS_TAG_MISC, BSK_CUDA_PRODUCTS * sizeof *d->x.products);
    if (!d->x.products)
        return BS_NOMEM;
    BSI_TRY(blas_ok(d, d->blas.create(&d->x.handle), "create"));
    /* f32 is never computed in fewer bits, and parts of a sum are never rounded to bf16 */
    return blas_ok(d,
                   d->blas.set_math_mode(
                       d->x.handle, (cublasMath_t)(CUBLAS_DEFAULT_MATH |
                                                   CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION)),
                   "math mode");
}

/* ---- the device ---- */

static bs_status find_device(cuda_dev *d)
{
    int driver = 0, n = 0;
    cudaError_t e = cudaGetDeviceCount(&n);
    cudaDriverGetVersion(&driver);
    cudaGetLastError();
    if (driver == 0)
        return bsi_fail(BS_UNSUPPORTED,
                        "no NVIDIA driver (libcuda.so.1) was found; install one, or start a container "
                        "with access to the GPU");
    if (e == cudaErrorInsufficientDriver)
        return bsi_fail(
            BS_UNSUPPORTED,
            "the NVIDIA driver supports CUDA %d.%d, this program needs %d.0; install a newer "
            "driver",
            driver / 1000, driver % 1000 / 10, CUDART_VERSION / 1000);
    if (e != cudaSuccess || n == 0)
        return bsi_cuda_fail(BS_UNSUPPORTED, e == cudaSuccess ? cudaErrorNoDevice : e,
                             "no GPU can be used; see nvidia-smi and CUDA_VISIBLE_DEVICES");
    d->ordinal = 0;
    return BS_OK;
}

/* Of drivers for CUDA 12 and newer. */
static void *find_encoder(void)
{
    void *found = NULL;
    enum cudaDriverEntryPointQueryResult answer;
#if CUDART_VERSION >= 12050
    cudaError_t e = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000,
                                                     cudaEnableDefault, &answer);
#else
    cudaError_t e =
        cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &answer);
#endif
    if (e == cudaSuccess && answer == cudaDriverEntryPointSuccess)
        return found;
    cudaGetLastError();
    return NULL;
}

static bs_status make_context(cuda_dev *d)
{
    struct cudaDeviceProp prop;
    cudaError_t e = cudaSetDevice(d->ordinal);
    if (e == cudaSuccess)
        e = cudaFree(NULL);
    if (e == cudaSuccess)
        e = cudaGetDeviceProperties(&prop, d->ordinal);
    if (e != cudaSuccess)
        return bsi_cuda_fail(
            e == cudaErrorMemoryAllocation ? BS_DEVMEM : BS_DEVICE, e,
            "GPU %d cannot be used; see nvidia-smi for what else runs on it, and start a "
            "new process if this one lost it",
            d->ordinal);
    d->x.capability = prop.major * 10 + prop.minor;
    d->x.processors = prop.multiProcessorCount;
    d->x.encode_tensor_map = find_encoder();
    e = bsk_cuda_probe();
    if (e == cudaErrorNoKernelImageForDevice || e == cudaErrorInvalidDeviceFunction ||
        e == cudaErrorUnsupportedPtxVersion)
        return bsi_cuda_fail(
            BS_UNSUPPORTED, e,
            "GPU %d, %s, has compute capability %d.%d and this program was compiled for "
            "%s; configure it with -DBS_CUDA_ARCHS=%d%d",
            d->ordinal, prop.name, prop.major, prop.minor, BS_CUDA_ARCHS, prop.major, prop.minor);
    return e == cudaSuccess ? BS_OK : bsi_cuda_fail(BS_DEVICE, e, "kernels cannot be loaded");
}

static void nothing(void *ud)
{
    (void)ud;
}

/* CUDA makes the thread of host functions at the first one. */
static cudaError_t start_host_thread(void)
{
    cudaStream_t s;
    cudaError_t e = cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking);
    if (e != cudaSuccess)
        return e;
    e = cudaLaunchHostFunc(s, nothing, NULL);
    cudaError_t end = cudaStreamSynchronize(s);
    cudaStreamDestroy(s);
    return e == cudaSuccess ? end : e;
}

static void close_blas(cuda_dev *d)
{
    bsk_cuda_forget_products(&d->x);
    bsi_free(d->x.products);
    if (d->x.handle)
        d->blas.destroy(d->x.handle);
    cudaGetLastError(); /* of a lost device */
}

bs_status bsi_cuda_open(const bs_dev_cfg *cfg, const bsi_dev_ops *inner, bs_dev *dev)
{
    (void)inner;
    sigset_t all, before;
    cuda_dev *d = bsi_alloc(BS_TAG_MISC, sizeof *d);
    if (!d)
        return BS_NOMEM;
    d->refused = SIZE_MAX;
    d->fail_call = cfg->fail_call;
    d->fail_pin = cfg->fail_pin;
    d->jitter_us = cfg->jitter_us;
    d->jitter = bsi_jitter_state(cfg->jitter_seed, 0);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    bs_status st = find_device(d);
    if (st == BS_OK) {
        bsi_cuda_note_before(d);
        st = make_context(d);
    }
    if (st == BS_OK)
        st = open_blas(d);
    if (st == BS_OK) {
        cudaError_t e = start_host_thread();
        if (e != cudaSuccess)
            st = bsi_cuda_fail(BS_DEVICE, e, "the context cannot be set up");
    }
    if (st == BS_OK)
        bsi_cuda_note_after(d);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (st != BS_OK) {
        close_blas(d);
        bsi_free(d);
        return st;
    }
    dev->impl = d;
    return BS_OK;
}

void bsi_cuda_close(bs_dev *dev) /* its queues are closed; the context is the process's and stays */
{
    cuda_dev *d = dev->impl;
    close_blas(d);
    bsi_cuda_profile_close(d);
    for (cuda_host_fill *f = d->fills; f;) {
        cuda_host_fill *next = f->next;
        bsi_free(f);
        f = next;
    }
    bsi_free(d);
}
