/* SPDX-License-Identifier: Apache-2.0 */
/*
** rates.c: how fast a machine copies, reads and multiplies, each alone and through the same device
** layer and reader as a step, so that the time of a step can be set against them. Owner thread only, on
** a device without work of its own; everything that is taken is given back before the call ends.
*/
#include "stream/stream.h"

#include <string.h>

enum { NOISE_BYTES = 1 << 20, REQUEST_BYTES = 2 << 20, DEPTH = 32, REAP_US = 1000 };

typedef struct bench { /* one queue and the memory that it works on */
    bsi_queue *q;
    bsi_event *done;
    bsi_mem *pinned, *device;
} bench;

static bs_status open_bench(bench *b, bs_dev *dev, size_t pinned, size_t device)
{
    bs_dev_props props;
    bs_dev_props_get(dev, &props);
    if (!props.executes)
        return bsi_fail(BS_UNSUPPORTED, "rates: device '%s' executes nothing", props.name);
    BSI_TRY(bsi_queue_open(dev, "rates", &b->q));
    BSI_TRY(bsi_event_open(dev, &b->done));
    BSI_TRY(bsi_mem_alloc(dev, BSI_MEM_PINNED, BS_TAG_STAGING, pinned, &b->pinned));
    return device ? bsi_mem_alloc(dev, BSI_MEM_DEVICE, BS_TAG_DEVICE, device, &b->device) : BS_OK;
}

static void close_bench(bench *b)
{
    bsi_queue_close(b->q);
    bsi_event_close(b->done);
    bsi_mem_free(b->pinned);
    bsi_mem_free(b->device);
}

static bs_status finish(bench *b)
{
    BSI_TRY(bsi_event_record(b->done, b->q));
    bs_status st = bsi_host_spin(b->done);
    return st == BS_CANCELLED ? bsi_fail(st, "rates: cancelled") : st;
}

/* ---- copies ---- */

static bs_status time_copies(bench *b, bool out, size_t bytes, int n, double *seconds)
{
    bsi_addr host = {b->pinned, 0}, dev = {b->device, 0};
    BSI_TRY(bsi_copy(b->q, dev, host, bytes)); /* both sides have been written once */
    BSI_TRY(bsi_copy(b->q, host, dev, bytes));
    BSI_TRY(finish(b));
    double t0 = bsi_now();
    for (int i = 0; i < n; i++)
        BSI_TRY(out ? bsi_copy(b->q, host, dev, bytes) : bsi_copy(b->q, dev, host, bytes));
    BSI_TRY(finish(b));
    *seconds = (bsi_now() - t0) / n;
    return BS_OK;
}

bs_status bs_rate_copy(bs_dev *dev, bool out, size_t bytes, int n, double *seconds)
{
    bench b = {0};
    if (bytes == 0 || n < 1)
        return bsi_fail(BS_ARG, "rates: %d copies of %zu bytes; at least one of each is expected", n,
                        bytes);
    bs_status st = open_bench(&b, dev, bytes, bytes);
    if (st == BS_OK)
        st = time_copies(&b, out, bytes, n, seconds);
    close_bench(&b);
    return st;
}

/* ---- matrix products ---- */

/* Random numbers of +-1 in the first NOISE_BYTES of the pinned memory, repeated all over the device's:
   equal operands would draw less power than real ones. */
static bs_status fill_noise(bench *b, bs_dtype t)
{
    uint32_t key[2], word[4] = {0};
    size_t size = bs_dtype_size(t);
    bsi_philox_key(1, "rates", key);
    for (uint32_t i = 0; i < NOISE_BYTES / size; i++) {
        if (i % 4 == 0)
            bsi_philox((uint32_t[4]){i, 0, 0, 0}, key, word);
        float v = 2 * bsi_uniform(word[i % 4]) - 1;
        uint16_t half = bsi_f32_to_bf16(v);
        memcpy((char *)b->pinned->host + i * size, size == 2 ? (void *)&half : (void *)&v, size);
    }
    for (size_t at = 0; at < b->device->bytes; at += NOISE_BYTES)
        BSI_TRY(bsi_copy(b->q, (bsi_addr){b->device, at}, (bsi_addr){b->pinned, 0},
                         BSI_MIN(b->device->bytes - at, (size_t)NOISE_BYTES)));
    return finish(b);
}

static bs_status time_gemms(bench *b, bsi_kcall *c, int n, double *seconds)
{
    BSI_TRY(fill_noise(b, c->dtype));
    BSI_TRY(bsi_launch(b->q, c)); /* the library chooses its kernel */
    BSI_TRY(finish(b));
    double t0 = bsi_now();
    for (int i = 0; i < n; i++)
        BSI_TRY(bsi_launch(b->q, c));
    BSI_TRY(finish(b));
    *seconds = (bsi_now() - t0) / n;
    return BS_OK;
}

/* Bytes of a matrix from an aligned place on; 0: too large. */
static size_t matrix_bytes(int64_t rows, int64_t cols, bs_dtype t)
{
    size_t n;
    if (rows < 1 || cols < 1 || !bsi_mul_size((size_t)rows, (size_t)cols, &n) ||
        !bsi_mul_size(n, bs_dtype_size(t), &n) || n > SIZE_MAX / 8)
        return 0;
    return bsi_round_up(n, 256);
}

bs_status bs_rate_gemm(bs_dev *dev, bs_dtype t, int64_t M, int64_t N, int64_t K, int n, double *seconds)
{
    bench b = {0};
    size_t x = matrix_bytes(M, K, t), w = matrix_bytes(N, K, t), y = matrix_bytes(M, N, t);
    bs_dev_props props;
    bs_dev_props_get(dev, &props);
    if ((t != BS_DTYPE_F32 && t != BS_DTYPE_BF16) || !x || !w || !y || n < 1)
        return bsi_fail(BS_ARG,
                        "rates: %d products of %lld x %lld x %lld in %s; f32 or bf16 and sizes of "
                        "at least 1 are expected",
                        n, (long long)M, (long long)N, (long long)K, bs_dtype_name(t));
    bsi_kcall c = {.op = BSK_GEMM,
                   .n_args = 3,
                   .n = {0, 1, M, N, K, K, K, N},
                   .f = {1, 0},
                   .dtype = t,
                   .out = t,
                   .label = "rates: product"};
    bs_status st = open_bench(&b, dev, NOISE_BYTES, x + w + y + props.workspace_bytes);
    if (st == BS_OK) {
        c.arg[0] = bsi_operand((bsi_addr){b.device, 0}, t, M * K, BSI_READ);
        c.arg[1] = bsi_operand((bsi_addr){b.device, x}, t, N * K, BSI_READ);
        c.arg[2] = bsi_operand((bsi_addr){b.device, x + w}, t, M * N, BSI_WRITE);
        c.workspace = (bsi_arg){{b.device, x + w + y}, props.workspace_bytes, BSI_READWRITE};
        st = time_gemms(&b, &c, n, seconds);
    }
    close_bench(&b);
    return st;
}

/* ---- reads ---- */

typedef struct reader { /* a cursor over the extents of some blocks, and requests in flight */
    const bs_manifest *m;
    const int *block;
    int n_blocks, at, extent;
    uint64_t off, bytes;
    size_t request;
    bool direct;
    bsi_aio *aio;
    bsi_read *read;
} reader;

/* The next request into r; false: all have been asked. */
static bool next_request(reader *d, bsi_read *r)
{
    while (d->at < d->n_blocks && d->extent == bs_manifest_block(d->m, d->block[d->at])->n_extents) {
        d->extent = 0;
        d->at++;
    }
    if (d->at == d->n_blocks)
        return false;
    const bsi_extent *x = bsi_manifest_extent(d->m, d->block[d->at], d->extent);
    void *buffer = r->buffer;
    *r = (bsi_read){.file = bsi_manifest_file(d->m, x->file),
                    .offset = x->offset + d->off,
                    .length = BSI_MIN(d->request, x->length - d->off),
                    .buffer = buffer};
    d->direct = d->direct && r->file->direct;
    d->bytes += r->length;
    d->off += r->length;
    if (d->off == x->length) {
        d->off = 0;
        d->extent++;
    }
    return true;
}

/* Keeps every buffer busy until all has been read. After a failure it only drains. */
static bs_status read_all(reader *d, int depth)
{
    bs_status st = BS_OK;
    for (int i = 0; st == BS_OK && i < depth && next_request(d, &d->read[i]); i++)
        st = bsi_aio_submit(d->aio, &d->read[i]);
    while (bsi_aio_in_flight(d->aio)) {
        bsi_read *r = bsi_aio_reap(d->aio, REAP_US);
        if (!r)
            continue;
        if (st == BS_OK && r->status != BS_OK)
            st = bsi_fail_from(&r->error);
        if (st == BS_OK && bs_cancelled())
            st = bsi_fail(BS_CANCELLED, "rates: cancelled");
        if (st == BS_OK && next_request(d, r))
            st = bsi_aio_submit(d->aio, r);
    }
    return st;
}

bs_status bs_rate_read(bs_dev *dev, const bs_manifest *m, int n_blocks, const int *block,
                       const bs_io_cfg *io, bs_read_rate *out)
{
    bench b = {0};
    bs_io_cfg cfg = io ? *io : (bs_io_cfg){0};
    int depth = cfg.depth > 0 ? cfg.depth : DEPTH;
    reader d = {.m = m, .block = block, .n_blocks = n_blocks, .direct = true};
    d.request = bsi_round_up(cfg.request_bytes ? cfg.request_bytes : REQUEST_BYTES, 4096);
    for (int i = 0; i < n_blocks; i++)
        if (block[i] < 0 || block[i] >= bs_manifest_blocks(m))
            return bsi_fail(BS_ARG, "rates: no block %d in the manifest", block[i]);
    bs_status st = bsi_aio_open(&cfg, NULL, &d.aio);
    if (st != BS_OK)
        return st;
    st = open_bench(&b, dev, d.request * (size_t)depth, 0);
    d.read = st == BS_OK ? bsi_alloc(BS_TAG_HEADER, (size_t)depth * sizeof *d.read) : NULL;
    if (d.read) {
        bsi_aio_register(d.aio, b.pinned->host, b.pinned->bytes);
        for (int i = 0; i < depth; i++)
            d.read[i].buffer = (char *)b.pinned->host + (size_t)i * d.request;
        double t0 = bsi_now();
        st = read_all(&d, depth);
        *out = (bs_read_rate){.bytes = d.bytes, .seconds = bsi_now() - t0};
        snprintf(out->io, sizeof out->io, "%s+%s", bsi_aio_name(d.aio),
                 d.direct ? "direct" : "buffered");
    } else if (st == BS_OK) {
        st = BS_NOMEM;
    }
    bsi_aio_close(d.aio);
    bsi_free(d.read);
    close_bench(&b);
    return st;
}
