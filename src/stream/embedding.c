/* SPDX-License-Identifier: Apache-2.0 */
/*
** embedding.c: row tables (embeddings). A table is never a block: single rows are gathered on the host.
** Home ram reads the whole table once; home disk reads, per micro-batch, the aligned supersets of the
** rows that its ids name, merged where they touch. Rows are packed in token order, as stored, into one
** of two pinned staging buffers, copied to the device and expanded (times scale) to the dtype of the
** store's key, all on the compute queue. A staging buffer is used again when its copy has been seen
** done. Owner thread only.
*/
#include "stream/stream.h"

#include <stdlib.h>
#include <string.h>

enum { REQUEST_BYTES = 2 << 20, REAP_US = 1000 };

typedef struct range { /* aligned piece of the file that holds wanted rows */
    uint64_t offset, length;
    uint64_t at; /* in the scratch */
} range;

typedef struct sizes {
    uint64_t row_bytes, table_bytes;
    uint64_t align;          /* of offsets and lengths of reads: the file's own when it is direct */
    uint64_t first, span;    /* aligned superset of the whole table in its file */
    size_t staging, scratch; /* one staging buffer; what reads go to */
} sizes;

struct bs_embedding {
    bs_engine *e;
    const bs_batch *batch;
    const bsi_row_table *info;
    const char *name;
    bs_home home;
    bool dry;
    sizes z;
    bsi_aio *aio; /* home disk, and while a ram table is read */
    size_t request_bytes;
    bsi_file own; /* descriptor for buffered reads when direct ones are off */
    const bsi_file *file;
    bsi_mem *scratch;    /* the table (ram), or the supersets of one micro-batch (disk) */
    bsi_mem *staging[2]; /* [tokens, row_bytes] */
    bsi_event *sent[2];
    int next;
    bsi_addr device; /* [tokens, row_bytes] */
    int64_t *ids;    /* [tokens] sorted */
    range *ranges;   /* [tokens] */
    bsi_read *reads;
    int n_reads, cap_reads;
    bs_embedding_stats stats;
};

/* ---- sizes ---- */

static bs_status measure(const bs_manifest *m, int rows, bs_home home, const bs_batch_cfg *b,
                         sizes *out)
{
    const bsi_row_table *t = bsi_manifest_rows(m, rows);
    if (!t)
        return bsi_fail(BS_ARG, "rows: the manifest has no row table %d", rows);
    if (home != BS_HOME_RAM && home != BS_HOME_DISK)
        return bsi_fail(BS_ARG, "rows: table '%s' has home %d; a row table lives in ram or on disk",
                        t->name, (int)home);
    const bsi_file *f = bsi_manifest_file(m, t->file);
    sizes z = {.row_bytes = (uint64_t)t->cols * bs_dtype_size(t->dtype),
               .align = f->direct ? f->align : BSI_READ_ALIGN};
    size_t row_span = bsi_round_up(z.row_bytes, z.align) + z.align, most;
    z.table_bytes = z.row_bytes * (uint64_t)t->rows; /* inside the file: the manifest has checked it */
    z.first = bsi_round_down(t->file_offset, z.align);
    z.span = bsi_round_up(t->file_offset + z.table_bytes, z.align) - z.first;
    if (!bsi_mul_size(z.row_bytes, (size_t)b->tokens, &z.staging) ||
        !bsi_mul_size(row_span, (size_t)b->tokens, &most))
        return bsi_fail(BS_ARG, "rows: %lld tokens of table '%s' are too large to address",
                        (long long)b->tokens, t->name);
    z.scratch = home == BS_HOME_RAM ? z.span : BSI_MIN(most, z.span);
    *out = z;
    return BS_OK;
}

bs_status bs_embedding_bytes(const bs_manifest *m, int rows, bs_home home, const bs_batch_cfg *b,
                             size_t *device, size_t *host)
{
    sizes z = {0};
    BSI_TRY(measure(m, rows, home, b, &z));
    *device = bsi_round_up(z.staging, 256);
    *host = 2 * z.staging + z.scratch;
    return BS_OK;
}

/* ---- reading ---- */

static bs_status add_read(bs_embedding *r, uint64_t offset, uint64_t length, uint64_t at)
{
    for (uint64_t off = 0; off < length; off += r->request_bytes) {
        if (r->n_reads == r->cap_reads) {
            int cap = BSI_MAX(2 * r->cap_reads, 64);
            bsi_read *grown = bsi_realloc(BS_TAG_HEADER, r->reads, (size_t)cap * sizeof *grown);
            if (!grown)
                return BS_NOMEM;
            r->reads = grown;
            r->cap_reads = cap;
        }
        r->reads[r->n_reads++] = (bsi_read){.file = r->file,
                                            .offset = offset + off,
                                            .length = BSI_MIN(r->request_bytes, length - off),
                                            .buffer = (char *)r->scratch->host + at + off};
    }
    return BS_OK;
}

static void keep_error(bs_errinfo *first, bs_status st, const bs_errinfo *e)
{
    if (st != BS_OK && first->status == BS_OK) {
        *first = *e;
        first->status = st;
    }
}

/* Submit what add_read collected and drain it, after a failure too: the scratch is in use until then.
   */
static bs_status run_reads(bs_embedding *r)
{
    bs_errinfo first = {0};
    for (int i = 0; i < r->n_reads && first.status == BS_OK; i++)
        keep_error(&first, bsi_aio_submit(r->aio, &r->reads[i]), bs_error());
    while (bsi_aio_in_flight(r->aio)) {
        bsi_read *io = bsi_aio_reap(r->aio, REAP_US);
        if (r->e->pump)
            r->e->pump(r->e->pump_ud);
        if (!io)
            continue;
        keep_error(&first, io->status, &io->error);
        r->stats.read += io->length + io->reread;
    }
    r->n_reads = 0;
    if (first.status != BS_OK)
        return bsi_wrap(bsi_fail_from(&first), "row table '%s'", r->name);
    return BS_OK;
}

static int compare_ids(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

static bs_status check_ids(const bs_embedding *r, int micro)
{
    const bsi_micro *b = &r->batch->micro[micro];
    for (int64_t t = 0; t < b->tokens; t++)
        if (b->ids[t] < 0 || b->ids[t] >= r->info->rows)
            return bsi_fail(
                BS_ARG,
                "rows: micro-batch %d, token %lld: id %lld is outside the table '%s' of %lld rows; "
                "the tokenizer does not belong to this model",
                micro, (long long)t, (long long)b->ids[t], r->name, (long long)r->info->rows);
    return BS_OK;
}

/* Home disk: distinct ids of the micro-batch and the ranges that hold their rows; both ascending. */
static bs_status find_ranges(bs_embedding *r, int micro, int64_t *n_ids, int *n_ranges)
{
    const bsi_micro *b = &r->batch->micro[micro];
    int64_t ids = 0;
    int n = 0;
    *n_ids = *n_ranges = 0;
    BSI_TRY(check_ids(r, micro));
    if (r->home == BS_HOME_RAM)
        return BS_OK;
    memcpy(r->ids, b->ids, (size_t)b->tokens * sizeof *r->ids);
    qsort(r->ids, (size_t)b->tokens, sizeof *r->ids, compare_ids);
    for (int64_t t = 0; t < b->tokens; t++) {
        if (t > 0 && r->ids[t] == r->ids[ids - 1])
            continue;
        r->ids[ids++] = r->ids[t];
        uint64_t row = r->info->file_offset + (uint64_t)r->ids[ids - 1] * r->z.row_bytes;
        uint64_t from = bsi_round_down(row, r->z.align),
                 to = bsi_round_up(row + r->z.row_bytes, r->z.align);
        range *last = n ? &r->ranges[n - 1] : NULL;
        if (last && from <= last->offset + last->length) {
            last->length = to - last->offset;
            continue;
        }
        r->ranges[n] = (range){from, to - from, last ? last->at + last->length : 0};
        n++;
    }
    *n_ids = ids;
    *n_ranges = n;
    return BS_OK;
}

static bs_status check_micro(const bs_embedding *r, int micro)
{
    if (micro < 0 || micro >= r->batch->cfg.micros)
        return bsi_fail(BS_ARG, "rows: table '%s': micro-batch %d of %d", r->name, micro,
                        r->batch->cfg.micros);
    return BS_OK;
}

bs_status bs_embedding_predict(bs_embedding *r, int micro, uint64_t *payload, uint64_t *read)
{
    int64_t n_ids;
    int n;
    BSI_TRY(check_micro(r, micro));
    BSI_TRY(find_ranges(r, micro, &n_ids, &n));
    *payload = *read = 0;
    if (r->home == BS_HOME_RAM)
        return BS_OK;
    *payload = (uint64_t)n_ids * r->z.row_bytes;
    for (int i = 0; i < n; i++)
        *read += r->ranges[i].length;
    return BS_OK;
}

/* Where a row's bytes are in the scratch. */
static const char *row_at(const bs_embedding *r, int64_t id, int n_ranges)
{
    uint64_t row = r->info->file_offset + (uint64_t)id * r->z.row_bytes;
    if (r->home == BS_HOME_RAM)
        return (const char *)r->scratch->host + (row - r->z.first);
    int lo = 0, hi = n_ranges - 1; /* the last range that starts at or before the row */
    while (lo < hi) {
        int mid = (lo + hi + 1) / 2;
        if (r->ranges[mid].offset <= row)
            lo = mid;
        else
            hi = mid - 1;
    }
    return (const char *)r->scratch->host + r->ranges[lo].at + (row - r->ranges[lo].offset);
}

static bs_status read_rows(bs_embedding *r, int64_t n_ids, int n)
{
    if (r->home == BS_HOME_RAM)
        return BS_OK;
    uint64_t payload = (uint64_t)n_ids * r->z.row_bytes;
    if (r->dry) {
        for (int i = 0; i < n; i++)
            r->stats.read += r->ranges[i].length;
        r->stats.payload += payload;
        return BS_OK;
    }
    BSI_TRY(bsi_file_check(r->file));
    r->n_reads = 0;
    for (int i = 0; i < n; i++)
        BSI_TRY(add_read(r, r->ranges[i].offset, r->ranges[i].length, r->ranges[i].at));
    BSI_TRY(run_reads(r));
    r->stats.payload += payload;
    return BS_OK;
}

/* ---- gather and gradient ---- */

static bs_status check_key(const bs_embedding *r, const bs_store *s, int key)
{
    const bs_store_key *k = bsi_store_key(s, key);
    if (!k)
        return bsi_fail(BS_ARG, "rows: table '%s': store key %d does not exist", r->name, key);
    if ((k->dtype != BS_DTYPE_F32 && k->dtype != BS_DTYPE_BF16) || k->channels != r->info->cols)
        return bsi_fail(
            BS_SHAPE,
            "rows: table '%s' has %lld columns and gives f32 or bf16, key '%s' holds %s of %lld",
            r->name, (long long)r->info->cols, k->name, bs_dtype_name(k->dtype),
            (long long)k->channels);
    return BS_OK;
}

bs_status bs_embedding_gather(bs_embedding *r, bs_store *s, int key, int micro, double scale)
{
    int64_t n_ids, tokens;
    int n;
    bsi_addr to;
    BSI_TRY(check_micro(r, micro));
    BSI_TRY(check_key(r, s, key));
    BSI_TRY(find_ranges(r, micro, &n_ids, &n));
    BSI_TRY(read_rows(r, n_ids, n));
    tokens = r->batch->micro[micro].tokens;
    size_t bytes = (size_t)tokens * r->z.row_bytes;
    bsi_mem *staging = r->staging[r->next];
    BSI_TRY(bsi_host_wait(r->sent[r->next]));
    for (int64_t t = 0; t < tokens && !r->dry; t++)
        memcpy((char *)staging->host + (uint64_t)t * r->z.row_bytes,
               row_at(r, r->batch->micro[micro].ids[t], n), r->z.row_bytes);
    BSI_TRY(bsi_store_claim(s, key, micro, &to));
    if (bytes) {
        BSI_TRY(bsi_copy(r->e->compute, r->device, (bsi_addr){staging, 0}, bytes));
        BSI_TRY(bsi_event_record(r->sent[r->next], r->e->compute));
        r->next ^= 1;
        bsi_expand x = {.from = r->device,
                        .to = to,
                        .stored = r->info->dtype,
                        .out = bsi_store_key(s, key)->dtype,
                        .n = tokens * r->info->cols,
                        .scale = scale};
        BSI_TRY(bsi_expand_launch(r->e, &x, "rows: expand"));
    }
    return bsi_store_written(s, key, micro, tokens);
}

bs_status bs_embedding_grad(bs_embedding *r, bs_store *s, int key, int micro, double scale,
                            const bs_place *acc)
{
    bs_place dy;
    BSI_TRY(check_micro(r, micro));
    BSI_TRY(check_key(r, s, key));
    const bsi_micro *b = &r->batch->micro[micro];
    int64_t n = b->tokens, cols = r->info->cols;
    if (!acc->mem || acc->dtype != BS_DTYPE_F32 || acc->channels != cols || acc->rows != r->info->rows)
        return bsi_fail(BS_SHAPE,
                        "rows: the gradient of table '%s' is f32 [%lld, %lld], given %s [%lld, %lld]",
                        r->name, (long long)r->info->rows, (long long)cols,
                        acc->mem ? bs_dtype_name(acc->dtype) : "nothing", (long long)acc->rows,
                        (long long)acc->channels);
    BSI_TRY(check_ids(r, micro));
    BSI_TRY(bs_store_get(s, key, micro, &dy));
    if (dy.rows != n)
        return bsi_fail(BS_SHAPE,
                        "rows: the gradient of micro-batch %d has %lld rows, it has %lld tokens", micro,
                        (long long)dy.rows, (long long)n);
    if (n == 0)
        return BS_OK;
    bsi_kcall call = {
        .op = BSK_SCATTER_ROWS, .n_args = 3, .dtype = dy.dtype, .label = "rows: gradient"};
    call.arg[0] = bsi_operand(bsi_place_addr(&dy), dy.dtype, n * cols, BSI_READ);
    call.arg[1] = (bsi_arg){b->dev_ids, (size_t)n * sizeof(int32_t), BSI_READ};
    call.arg[2] = bsi_update_f32(bsi_place_addr(acc), acc->rows * cols);
    call.n[0] = n;
    call.n[1] = cols;
    call.f[0] = scale;
    return bsi_engine_launch(r->e, &call);
}

/* ---- open and close ---- */

static bs_status open_file(bs_embedding *r, const bs_manifest *m, bool no_direct)
{
    r->own.fd = -1;
    r->file = bsi_manifest_file(m, r->info->file);
    BSI_TRY(bsi_file_check(r->file));
    if (!no_direct)
        return BS_OK;
    BSI_TRY(bsi_file_open(r->file->path, true, &r->own));
    r->file = &r->own;
    return BS_OK;
}

static bs_status load_table(bs_embedding *r)
{
    if (r->dry) {
        r->stats.read += r->z.span;
    } else {
        BSI_TRY(add_read(r, r->z.first, r->z.span, 0));
        BSI_TRY(run_reads(r));
    }
    r->stats.payload += r->z.table_bytes;
    bsi_aio_close(r->aio);
    r->aio = NULL;
    return BS_OK;
}

static bs_status open_parts(bs_embedding *r, const bs_manifest *m, const bs_io_cfg *io)
{
    bs_dev *dev = r->e->dev;
    size_t tokens = (size_t)r->batch->cfg.tokens;
    BSI_TRY(open_file(r, m, io->no_direct));
    BSI_TRY(bsi_aio_open(io, NULL, &r->aio));
    BSI_TRY(bsi_pool_region(r->e->pool, r->name, r->z.staging, &r->device));
    for (int i = 0; i < 2; i++) {
        BSI_TRY(bsi_mem_alloc(dev, BSI_MEM_PINNED, BS_TAG_ROWS, r->z.staging, &r->staging[i]));
        BSI_TRY(bsi_event_open(dev, &r->sent[i]));
    }
    /* Rows are packed by the host, so what is read need not be pinned. */
    BSI_TRY(bsi_mem_alloc(dev, BSI_MEM_HOST, BS_TAG_ROWS, r->z.scratch, &r->scratch));
    r->ids = bsi_alloc(BS_TAG_HEADER, tokens * sizeof *r->ids);
    r->ranges = bsi_alloc(BS_TAG_HEADER, tokens * sizeof *r->ranges);
    if (!r->ids || !r->ranges)
        return BS_NOMEM;
    return r->home == BS_HOME_RAM ? load_table(r) : BS_OK;
}

bs_status bs_embedding_open(bs_engine *e, const bs_manifest *m, int rows, bs_home home,
                            const bs_batch *b, const bs_io_cfg *io, bs_embedding **out)
{
    static const bs_io_cfg defaults;
    sizes z = {0};
    if (!e || !m || !b)
        return bsi_fail(BS_ARG, "rows: an engine, a manifest and a batch are required");
    BSI_TRY(measure(m, rows, home, &b->cfg, &z));
    bs_embedding *r = bsi_alloc(BS_TAG_HEADER, sizeof *r);
    if (!r)
        return BS_NOMEM;
    io = io ? io : &defaults;
    *r = (bs_embedding){
        .e = e, .batch = b, .info = bsi_manifest_rows(m, rows), .home = home, .z = z, .own.fd = -1};
    r->name = r->info->name;
    r->dry = !e->props.executes;
    r->request_bytes = bsi_round_up(io->request_bytes ? io->request_bytes : REQUEST_BYTES,
                                    BSI_MAX(z.align, (uint64_t)BSI_READ_ALIGN));
    r->stats.host_bytes = 2 * z.staging + z.scratch;
    bs_status st = open_parts(r, m, io);
    if (st != BS_OK) {
        bs_embedding_close(r);
        return bsi_wrap(st, "embedding");
    }
    *out = r;
    return BS_OK;
}

void bs_embedding_close(bs_embedding *r)
{
    if (!r)
        return;
    bsi_aio_close(r->aio);
    for (int i = 0; i < 2; i++) {
        bsi_mem_free(r->staging[i]); /* drains the copy out of it */
        bsi_event_close(r->sent[i]);
    }
    bsi_mem_free(r->scratch);
    if (r->own.fd >= 0)
        bsi_file_close(&r->own);
    bsi_free(r->ids);
    bsi_free(r->ranges);
    bsi_free(r->reads);
    bsi_free(r);
}

void bs_embedding_stats_get(const bs_embedding *r, bs_embedding_stats *out)
{
    *out = r->stats;
}
