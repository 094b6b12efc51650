/* SPDX-License-Identifier: Apache-2.0 */
/*
** cuda_mem.c: memory of the cuda device. Device memory is one cudaMalloc per call: the pool makes one.
** Host memory is an anonymous mapping in huge pages where there are some; the pinned kind is filled
** with pages and registered by one call as a whole, because a copy may not cross the border of two
** registrations. Memory that cannot be registered stays pageable: copies work, but not at full speed
** and not beside the host. Owner thread only.
*/
#include "backend/cuda/cuda_dev.h"

#include <errno.h>
#include <sys/mman.h>
#include <unistd.h>

#define HUGE_PAGE  ((size_t)2 << 20)
#define FILL_BYTES ((size_t)1 << 30) /* between two looks at bs_cancelled */
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14; older kernels refuse it and pages come one by one */
#endif

/* A mapping of `bytes`, at a border of huge pages when it is worth it. */
static void *map_pages(size_t bytes)
{
    size_t extra = bytes >= HUGE_PAGE ? HUGE_PAGE : 0;
    char *p = mmap(NULL, bytes + extra, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED)
        return NULL;
    if (extra) {
        char *at = (char *)bsi_round_up((uintptr_t)p, HUGE_PAGE);
        size_t head = (size_t)(at - p);
        if (head)
            munmap(p, head);
        if (extra - head)
            munmap(at + bytes, extra - head);
        p = at;
        madvise(p, bytes, MADV_HUGEPAGE); /* advice: small pages work too */
    }
    return p;
}

static bs_status fill_pages(char *at, size_t bytes)
{
    for (size_t off = 0; off < bytes; off += FILL_BYTES) {
        if (bs_cancelled())
            return bsi_fail(BS_CANCELLED, "cancelled while %zu bytes of pinned memory were being made",
                            bytes);
        if (madvise(at + off, BSI_MIN(FILL_BYTES, bytes - off), MADV_POPULATE_WRITE) == 0)
            continue;
        if (errno == ENOMEM || errno == EFAULT)
            return bsi_fail_sys(BS_NOMEM, errno, "%zu bytes of pinned memory are not available", bytes);
        break;
    }
    return BS_OK;
}

/* What is refused is an ordinary error of CUDA's, which must not stay for the next launch to find. */
static bool lock_pages(cuda_dev *d, cuda_mem *b)
{
    bool inject = bsi_dev_refuses(d->fail_pin, &d->pins);
    if (b->mapped >= d->refused) {
        bsi_fail(BS_NOMEM, "%zu bytes were refused before", d->refused);
        return false;
    }
    /* no bytes: refused for sure */
    cudaError_t e = cudaHostRegister(b->at, inject ? 0 : b->mapped, cudaHostRegisterPortable);
    if (e == cudaSuccess)
        return true;
    d->refused = b->mapped;
    bsi_cuda_fail(BS_NOMEM, e, inject ? "cudaHostRegister (injected)" : "cudaHostRegister");
    return false;
}

/* *pinned: asked for; what it is. */
static bs_status host_alloc(cuda_dev *d, bs_tag tag, bool *pinned, size_t bytes, cuda_mem *b)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE), whole;
    if (!bsi_add_size(BSI_MAX(bytes, (size_t)1), page - 1, &whole))
        return bsi_fail(BS_NOMEM, "%zu bytes of %s memory are not available", bytes, bs_tag_name(tag));
    whole = bsi_round_down(whole, page);
    b->at = map_pages(whole);
    if (!b->at)
        return bsi_fail_sys(BS_NOMEM, errno, "%zu bytes of %s memory are not available", bytes,
                            bs_tag_name(tag));
    b->mapped = whole;
    if (*pinned) {
        bs_status st = fill_pages(b->at, whole);
        if (st != BS_OK) {
            munmap(b->at, whole);
            return st;
        }
        b->registered = *pinned = lock_pages(d, b);
    }
    bsi_account(tag, (ptrdiff_t)whole);
    return BS_OK;
}

static bs_status device_alloc(const cuda_dev *d, size_t bytes, cuda_mem *b)
{
    size_t left = 0, total = 0;
    cudaError_t e = cudaMalloc(&b->at, BSI_MAX(bytes, (size_t)1));
    if (e == cudaSuccess) {
        bsi_account(BS_TAG_DEVICE, (ptrdiff_t)bytes);
        return BS_OK;
    }
    cudaGetLastError();
    if (e == cudaErrorMemoryAllocation && cudaMemGetInfo(&left, &total) == cudaSuccess)
        return bsi_fail(
            BS_DEVMEM,
            "%zu bytes of GPU memory are not available: %zu of %zu are free; lower vram=, or end "
            "what else uses GPU %d",
            bytes, left, total, d->ordinal);
    return bsi_cuda_fail(e == cudaErrorMemoryAllocation ? BS_DEVMEM : BS_DEVICE, e,
                         "%zu bytes of GPU memory", bytes);
}

bs_status bsi_cuda_mem_alloc(bs_dev *dev, bsi_memkind kind, bs_tag tag, size_t bytes, bsi_mem *out)
{
    cuda_mem *b = bsi_alloc(BS_TAG_MISC, sizeof *b);
    if (!b)
        return BS_NOMEM;
    bool pinned = kind == BSI_MEM_PINNED;
    bs_status st = kind == BSI_MEM_DEVICE ? device_alloc(dev->impl, bytes, b)
                                          : host_alloc(dev->impl, tag, &pinned, bytes, b);
    if (st != BS_OK) {
        bsi_free(b);
        return st;
    }
    out->kind = kind == BSI_MEM_PINNED && !pinned ? BSI_MEM_HOST : kind;
    out->tag = kind == BSI_MEM_DEVICE ? BS_TAG_DEVICE : tag;
    out->host = kind == BSI_MEM_DEVICE ? NULL : b->at;
    out->impl = b;
    return BS_OK;
}

void bsi_cuda_mem_free(bsi_mem *mem)
{
    cuda_mem *b = mem->impl;
    cudaDeviceSynchronize(); /* it may be in use; on a lost device nothing is */
    if (mem->kind == BSI_MEM_DEVICE) {
        cudaFree(b->at);
        bsi_account(BS_TAG_DEVICE, -(ptrdiff_t)mem->bytes);
    } else {
        if (b->registered)
            cudaHostUnregister(b->at);
        munmap(b->at, b->mapped);
        bsi_account(mem->tag, -(ptrdiff_t)b->mapped);
    }
    cudaGetLastError(); /* of a lost device */
    bsi_free(b);
}
