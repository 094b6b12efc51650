/* SPDX-License-Identifier: Apache-2.0 */
/*
** cuda.c: the cuda device's queues, events and operations. A queue is a non-blocking stream, an event
** an event without time, both with CUDA's own order, which is that of the contract. Nothing here waits
** for the device but closes; a stream takes about a thousand operations ahead of the device, and
** issuing more waits for it (never for the host). Owner thread only.
**
** Kernels that need room have it in the workspace of the call: memory of BSK_CUDA_BLAS_BYTES, then the
** partial sums. The device itself holds none.
*/
#include "backend/cuda/cuda_dev.h"

#include <string.h>

/* NVTX is all in its header: a call is one test of a pointer until a profiler sets it. */
#if defined(__has_include)
#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#define HAVE_NVTX 1
#endif
#endif

static cuda_dev *dev_of(const bs_dev *dev)
{
    return dev->impl;
}

static cudaStream_t stream_of(const bsi_queue *q)
{
    return (cudaStream_t)q->impl;
}

static void *resolve(bsi_addr a)
{
    return (char *)((const cuda_mem *)a.mem->impl)->at + a.off;
}

static void cuda_props(const bs_dev *dev, bs_dev_props *out)
{
    (void)dev;
    out->executes = true;
    out->bf16 = true;
    out->alignment = 256;
    out->workspace_bytes = BSK_CUDA_WORKSPACE_BYTES;
    size_t left = 0, all = 0;
    if (cudaMemGetInfo(&left, &all) != cudaSuccess)
        cudaGetLastError(); /* a lost device: nothing is left */
    out->total_bytes = left;
}

/* ---- queues and events ---- */

static bs_status cuda_queue_open(bs_dev *dev, const char *name, bsi_queue *out)
{
    (void)dev;
    cudaStream_t s;
    cudaError_t e = cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking);
    if (e != cudaSuccess)
        return bsi_cuda_fail(BS_DEVICE, e, "queue '%s' cannot be opened", name);
    out->impl = s;
    return BS_OK;
}

static void cuda_queue_close(bsi_queue *q)
{
    cuda_dev *d = dev_of(q->dev);
    cudaStreamSynchronize(stream_of(q));
    cudaStreamDestroy(stream_of(q));
    cudaGetLastError(); /* of a lost device */
    if (d->bound == stream_of(q))
        d->bound = NULL;
}

static bs_status cuda_event_open(bs_dev *dev, bsi_event *out)
{
    (void)dev;
    cudaEvent_t ev;
    cudaError_t e = cudaEventCreateWithFlags(&ev, cudaEventDisableTiming);
    if (e != cudaSuccess)
        return bsi_cuda_fail(BS_DEVICE, e, "an event cannot be opened");
    out->impl = ev;
    return BS_OK;
}

static void cuda_event_close(bsi_event *ev)
{
    cudaEventDestroy((cudaEvent_t)ev->impl);
    cudaGetLastError(); /* of a lost device */
}

/* An error that an earlier operation left is found by any later call. */
static bs_status failed(const cuda_dev *d, cudaError_t e, const char *what, const char *queue)
{
    return bsi_cuda_fail(
        BS_DEVICE, e,
        "'%s' on queue '%s' failed (last issued: '%s'; CUDA_LAUNCH_BLOCKING=1 finds the one "
        "that did it)",
        what, queue, d->last);
}

static bs_status cuda_event_record(bsi_event *ev, bsi_queue *q)
{
    cudaError_t e = cudaEventRecord((cudaEvent_t)ev->impl, stream_of(q));
    return e == cudaSuccess ? BS_OK : failed(dev_of(q->dev), e, "event_record", q->name);
}

static bs_status cuda_queue_wait(bsi_queue *q, const bsi_event *ev, const char *site)
{
    cudaError_t e = cudaStreamWaitEvent(stream_of(q), (cudaEvent_t)ev->impl, 0);
    return e == cudaSuccess ? BS_OK : failed(dev_of(q->dev), e, site, q->name);
}

static bs_status query(const cuda_dev *d, cudaError_t e, const char *what, const char *queue)
{
    if (d->error.status != BS_OK)
        return bsi_fail_from(&d->error);
    if (e == cudaErrorNotReady) {
        cudaGetLastError(); /* no failure, but launches would find it there */
        return BS_AGAIN;
    }
    return e == cudaSuccess ? BS_OK : failed(d, e, what, queue);
}

static bs_status cuda_event_query(const bsi_event *ev)
{
    return query(dev_of(ev->dev), cudaEventQuery((cudaEvent_t)ev->impl), "event_query", "any");
}

static bs_status cuda_queue_status(bsi_queue *q)
{
    bs_status st = query(dev_of(q->dev), cudaStreamQuery(stream_of(q)), "queue_status", q->name);
    return st == BS_AGAIN ? BS_OK : st;
}

/* ---- operations ---- */

/* Before an operation is issued. An injected failure shows in the next query, as that of a kernel
   would; an injected delay is a kernel of its own, ahead of the operation. */
static void issuing(cuda_dev *d, const bsi_queue *q, const char *label)
{
    memccpy(d->last, label, 0, sizeof d->last - 1); /* the rest of a long one is cut off */
    if (bsi_dev_fails(d->fail_call, &d->calls)) {
        d->error.status = BS_DEVICE;
        snprintf(d->error.msg, sizeof d->error.msg, "'%s' on queue '%s' failed (injected)", label,
                 q->name);
    }
    if (d->jitter_us)
        bsk_cuda_delay(stream_of(q), 1000 * bsi_jitter(&d->jitter, d->jitter_us));
}

static bs_status cuda_copy(bsi_queue *q, bsi_addr dst, bsi_addr src, size_t bytes)
{
    bool from = src.mem->kind == BSI_MEM_DEVICE, to = dst.mem->kind == BSI_MEM_DEVICE;
    enum cudaMemcpyKind kind = from ? to ? cudaMemcpyDeviceToDevice : cudaMemcpyDeviceToHost
                               : to ? cudaMemcpyHostToDevice
                                    : cudaMemcpyHostToHost;
    issuing(dev_of(q->dev), q, "copy");
    cudaError_t e = cudaMemcpyAsync(resolve(dst), resolve(src), bytes, kind, stream_of(q));
    return e == cudaSuccess ? BS_OK : failed(dev_of(q->dev), e, "copy", q->name);
}

static void run_host_fill(void *ud)
{
    cuda_host_fill *f = ud;
    memset(f->to, f->byte, f->bytes);
    atomic_store_explicit(&f->done, true, memory_order_release);
}

static bs_status host_fill(cuda_dev *d, const bsi_queue *q, void *to, int byte, size_t bytes)
{
    cuda_host_fill **at = &d->fills;
    while (*at) { /* free those that have run */
        cuda_host_fill *f = *at;
        if (atomic_load_explicit(&f->done, memory_order_acquire)) {
            *at = f->next;
            bsi_free(f);
        } else {
            at = &f->next;
        }
    }
    cuda_host_fill *f = bsi_alloc(BS_TAG_MISC, sizeof *f);
    if (!f)
        return BS_NOMEM;
    f->to = to;
    f->byte = byte;
    f->bytes = bytes;
    f->next = d->fills;
    d->fills = f;
    cudaError_t e = cudaLaunchHostFunc(stream_of(q), run_host_fill, f);
    return e == cudaSuccess ? BS_OK : failed(d, e, "fill", q->name);
}

static bs_status cuda_fill(bsi_queue *q, bsi_addr dst, int byte, size_t bytes)
{
    cuda_dev *d = dev_of(q->dev);
    const cuda_mem *b = dst.mem->impl;
    issuing(d, q, "fill");
    if (dst.mem->kind != BSI_MEM_DEVICE && !b->registered)
        return host_fill(d, q, resolve(dst), byte, bytes);
    cudaError_t e = cudaMemsetAsync(resolve(dst), byte, bytes, stream_of(q));
    return e == cudaSuccess ? BS_OK : failed(d, e, "fill", q->name);
}

/* The handle works on this stream and in this workspace from here on. */
static cudaError_t bind_blas(cuda_dev *d, cudaStream_t s, void *workspace)
{
    if (d->bound == s && d->bound_workspace == workspace)
        return cudaSuccess;
    cublasStatus_t st = d->blas.set_stream(d->x.handle, s); /* takes the old workspace away */
    if (st == CUBLAS_STATUS_SUCCESS)
        st = d->blas.set_workspace(d->x.handle, workspace, BSK_CUDA_BLAS_BYTES);
    d->bound = st == CUBLAS_STATUS_SUCCESS ? s : NULL;
    d->bound_workspace = workspace;
    if (st == CUBLAS_STATUS_SUCCESS)
        return cudaSuccess;
    d->x.note = d->blas.status_text(st);
    return cudaErrorUnknown;
}

static cudaError_t use_workspace(cuda_dev *d, const bsi_kcall *call)
{
    d->x.workspace = resolve(call->workspace.at);
    d->x.partials = (double *)((char *)d->x.workspace + BSK_CUDA_BLAS_BYTES);
    return bind_blas(d, d->x.stream, d->x.workspace);
}

static bs_status cuda_launch(bsi_queue *q, const bsi_kcall *call)
{
    cuda_dev *d = dev_of(q->dev);
    const bsk_cuda_entry *k = &bsk_cuda_table[call->op];
    const char *label = call->label ? call->label : k->name ? k->name : "launch";
    bsk_call c = {.dtype = call->dtype, .out = call->out};
    if (!k->fn)
        return bsi_fail(BS_UNSUPPORTED, "%s: the cuda device has no kernel number %d", label,
                        (int)call->op);
    if (k->workspace && call->workspace.bytes < BSK_CUDA_WORKSPACE_BYTES)
        return bsi_fail(BS_ARG,
                        "%s: a workspace of %zu bytes; the %d that props.workspace_bytes says are "
                        "expected, as an engine has them",
                        label, call->workspace.bytes, (int)BSK_CUDA_WORKSPACE_BYTES);
    for (int i = 0; i < call->n_args; i++)
        c.p[i] = call->arg[i].bytes > 0 ? resolve(call->arg[i].at) : NULL;
    memcpy(c.n, call->n, sizeof c.n);
    memcpy(c.f, call->f, sizeof c.f);
    issuing(d, q, label);
    d->x.stream = stream_of(q);
    d->x.note = NULL;
    cudaError_t e = k->workspace ? use_workspace(d, call) : cudaSuccess;
    if (e == cudaSuccess && d->profile)
        e = bsi_cuda_timer_begin(d, d->x.stream, k->name, label);
    if (e == cudaSuccess)
        e = k->fn(&d->x, &c);
    if (e == cudaSuccess && d->profile)
        e = bsi_cuda_timer_end(d, d->x.stream);
    if (e == cudaSuccess)
        return BS_OK;
    if (e == cudaErrorNotSupported && d->x.note)
        return bsi_fail(BS_UNSUPPORTED, "%s: %s", label, d->x.note);
    bs_status st = failed(d, e, label, q->name);
    return d->x.note ? bsi_wrap(st, "%s", d->x.note) : st;
}

static bs_status cuda_host_fn(bsi_queue *q, void (*fn)(void *), void *ud)
{
    issuing(dev_of(q->dev), q, "host_fn");
    cudaError_t e = cudaLaunchHostFunc(stream_of(q), fn, ud);
    return e == cudaSuccess ? BS_OK : failed(dev_of(q->dev), e, "host_fn", q->name);
}

static int cuda_violations(const bs_dev *dev, const char **text)
{
    (void)dev;
    if (text)
        *text = "";
    return 0;
}

#ifdef HAVE_NVTX
static void cuda_range(bs_dev *dev, const char *label)
{
    (void)dev;
    if (label)
        nvtxRangePushA(label);
    else
        nvtxRangePop();
}
#endif

const bsi_dev_ops bsi_dev_cuda = {
    .name = "cuda",
    .size = sizeof(bsi_dev_ops),
    .open = bsi_cuda_open,
    .close = bsi_cuda_close,
    .props = cuda_props,
    .mem_alloc = bsi_cuda_mem_alloc,
    .mem_free = bsi_cuda_mem_free,
    .queue_open = cuda_queue_open,
    .queue_close = cuda_queue_close,
    .event_open = cuda_event_open,
    .event_close = cuda_event_close,
    .event_record = cuda_event_record,
    .queue_wait = cuda_queue_wait,
    .event_query = cuda_event_query,
    .copy = cuda_copy,
    .fill = cuda_fill,
    .launch = cuda_launch,
    .host_fn = cuda_host_fn,
    .queue_status = cuda_queue_status,
    .violations = cuda_violations,
#ifdef HAVE_NVTX
    .range = cuda_range,
#endif
    .profile = bsi_cuda_profile,
};
