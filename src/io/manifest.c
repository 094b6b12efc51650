/* SPDX-License-Identifier: Apache-2.0 */
/*
** manifest.c: where each block's bytes are. Built call by call, then frozen by bs_manifest_finish,
** which opens the files and computes the three layouts of a block: aligned extents (disk and host
** slot), the canonical device layout, and the expansion to the compute dtype. Owner thread. After
** finish nothing but the expansion changes and every pointer handed out stays; before it, pointers
** last until the next add.
*/
#include "base/json.h"
#include "io/file.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define PLACE        256  /* alignment of tensors in device layouts */
#define EXTENT_ALIGN 4096 /* of extents of files that are read through the page cache */

typedef struct block {
    bs_block_info info;
    bs_tensor_info *tensor; /* [info.n_tensors] */
    int cap;
    bsi_extent *extent; /* [info.n_extents] */
    int *extent_of;     /* [info.n_tensors] */
} block;

struct bs_manifest {
    bsi_file *file;
    block *block;
    bsi_row_table *rows;
    int n_files, n_blocks, n_rows, cap_files, cap_blocks, cap_rows;
    bool finished;
    bs_dtype compute;
    uint64_t digest;
    size_t align;
};

/* Room for one more element of `size` bytes. */
static bs_status grow(void *array, int n, int *cap, size_t size)
{
    void **p = array;
    size_t bytes;
    if (n < *cap)
        return BS_OK;
    if (*cap > INT_MAX / 2 || !bsi_mul_size((size_t)*cap * 2 + 8, size, &bytes))
        return bsi_fail(BS_NOMEM, "manifest: more than %d entries of one kind", *cap);
    void *q = bsi_realloc(BS_TAG_HEADER, *p, bytes);
    if (!q)
        return BS_NOMEM;
    *p = q;
    *cap = *cap * 2 + 8;
    return BS_OK;
}

bs_status bs_manifest_new(bs_manifest **out)
{
    *out = bsi_alloc(BS_TAG_HEADER, sizeof **out);
    return *out ? BS_OK : BS_NOMEM;
}

static void free_name(const char *name)
{
    union {
        const char *in;
        void *out;
    } p = {.in = name}; /* ours, const only for the reader */
    bsi_free(p.out);
}

void bs_manifest_free(bs_manifest *m)
{
    if (!m)
        return;
    for (int i = 0; i < m->n_files; i++)
        bsi_file_close(&m->file[i]);
    for (int i = 0; i < m->n_rows; i++)
        free_name(m->rows[i].name);
    for (int i = 0; i < m->n_blocks; i++) {
        block *b = &m->block[i];
        for (int k = 0; k < b->info.n_tensors; k++)
            free_name(b->tensor[k].name);
        free_name(b->info.name);
        free_name(b->info.kind);
        bsi_free(b->tensor);
        bsi_free(b->extent);
        bsi_free(b->extent_of);
    }
    bsi_free(m->file);
    bsi_free(m->rows);
    bsi_free(m->block);
    bsi_free(m);
}

/* ---- building ---------------------------------------------------------------------------------- */

static bs_status check_open(const bs_manifest *m, const char *what, const char *name)
{
    if (m->finished)
        return bsi_fail(BS_STATE, "manifest: %s cannot be added, it is finished", what);
    if (!name || !*name)
        return bsi_fail(BS_ARG, "manifest: a %s needs a name", what);
    return BS_OK;
}

/* Names of blocks and tensors are text; those of files are whatever the system has. */
static bs_status check_text(const bs_manifest *m, const char *what, const char *name)
{
    BSI_TRY(check_open(m, what, name));
    if (bs_utf8_valid(name, strlen(name)) < strlen(name))
        return bsi_fail(BS_ARG, "manifest: the name of a %s is not UTF-8: '%s'", what, name);
    return BS_OK;
}

bs_status bs_manifest_add_file(bs_manifest *m, const char *path, int *out)
{
    struct stat st;
    int fd;
    BSI_TRY(check_open(m, "file", path));
    for (int i = 0; i < m->n_files; i++)
        if (strcmp(m->file[i].path, path) == 0) {
            *out = i;
            return BS_OK;
        }
    BSI_TRY(bsi_open_regular(path, 0, &st, &fd, NULL));
    close(fd); /* finish opens it for good */
    BSI_TRY(grow(&m->file, m->n_files, &m->cap_files, sizeof *m->file));
    bsi_file *f = &m->file[m->n_files];
    *f = (bsi_file){.fd = -1};
    bsi_file_identify(f, &st);
    if (!(f->path = bsi_strdup(BS_TAG_HEADER, path)))
        return BS_NOMEM;
    *out = m->n_files++;
    return BS_OK;
}

bs_status bs_manifest_add_block(bs_manifest *m, const char *name, const char *kind, int *out)
{
    BSI_TRY(check_text(m, "block", name));
    BSI_TRY(check_text(m, "kind of block", kind));
    BSI_TRY(grow(&m->block, m->n_blocks, &m->cap_blocks, sizeof *m->block));
    block *b = &m->block[m->n_blocks];
    *b = (block){0};
    b->info.name = bsi_strdup(BS_TAG_HEADER, name);
    b->info.kind = bsi_strdup(BS_TAG_HEADER, kind);
    if (!b->info.name || !b->info.kind) {
        free_name(b->info.name);
        free_name(b->info.kind);
        return BS_NOMEM;
    }
    *out = m->n_blocks++;
    return BS_OK;
}

/* The bytes of a tensor of these dimensions, and whether they are in its file. */
static bs_status check_bytes(const bs_manifest *m, const char *name, bs_dtype t, int ndim,
                             const int64_t *dim, int file, uint64_t offset, uint64_t *bytes)
{
    size_t n = bs_dtype_size(t);
    if (ndim < 0 || ndim > BS_MAX_DIMS)
        return bsi_fail(BS_SHAPE, "manifest: '%s' has %d dimensions, 0 to %d are possible", name, ndim,
                        BS_MAX_DIMS);
    for (int i = 0; i < ndim; i++) {
        if (dim[i] < 1)
            return bsi_fail(BS_SHAPE, "manifest: dimension %d of '%s' is %lld, at least 1 is needed",
                            i + 1, name, (long long)dim[i]);
        if (!bsi_mul_size(n, (size_t)dim[i], &n))
            return bsi_fail(BS_SHAPE, "manifest: the product of the dimensions of '%s' overflows",
                            name);
    }
    if (file < 0 || file >= m->n_files)
        return bsi_fail(BS_ARG, "manifest: '%s' is in file %d, there are %d files", name, file,
                        m->n_files);
    const bsi_file *f = &m->file[file];
    if (offset > f->bytes || n > f->bytes - offset) /* no sum that could wrap */
        return bsi_fail(BS_ARG, "manifest: '%s' has %zu bytes at %llu; file '%s' has %llu", name, n,
                        (unsigned long long)offset, f->path, (unsigned long long)f->bytes);
    *bytes = n;
    return BS_OK;
}

static bs_status check_range(const bs_manifest *m, const char *name, bs_dtype t, int ndim,
                             const int64_t *dim, int file, uint64_t offset, uint64_t *bytes)
{
    if (t != BS_DTYPE_F32 && t != BS_DTYPE_BF16 && t != BS_DTYPE_F16)
        return bsi_fail(BS_DTYPE, "manifest: '%s' is stored as %s; weights can be f32, bf16 or f16",
                        name, bs_dtype_name(t));
    return check_bytes(m, name, t, ndim, dim, file, offset, bytes);
}

/* Room for one more tensor of a block that has no other of this name. */
static bs_status open_tensor(bs_manifest *m, int at, const char *name, block **out)
{
    BSI_TRY(check_text(m, "tensor", name));
    if (at < 0 || at >= m->n_blocks)
        return bsi_fail(BS_ARG, "manifest: tensor '%s' is for block %d, there are %d", name, at,
                        m->n_blocks);
    block *b = &m->block[at];
    if (bs_manifest_find_tensor(m, at, name) >= 0)
        return bsi_fail(BS_ARG, "manifest: block '%s' has a tensor '%s' already", b->info.name, name);
    *out = b;
    return grow(&b->tensor, b->info.n_tensors, &b->cap, sizeof *b->tensor);
}

/* x but for its name. */
static bs_status put_tensor(block *b, const char *name, const bs_tensor_info *x, int *out)
{
    bs_tensor_info *to = &b->tensor[b->info.n_tensors];
    *to = *x;
    to->expand_offset = UINT64_MAX;
    /* Counted only when it is complete: the free walks what is counted. */
    if (!(to->name = bsi_strdup(BS_TAG_HEADER, name)))
        return BS_NOMEM;
    *out = b->info.n_tensors++;
    return BS_OK;
}

bs_status bs_manifest_add_tensor(bs_manifest *m, int at, const char *name, bs_dtype t, int ndim,
                                 const int64_t *dim, int file, uint64_t file_offset, int *out)
{
    block *b = NULL;
    bs_tensor_info x = {
        .dtype = t, .ndim = ndim, .file = file, .file_offset = file_offset, .scales = -1};
    BSI_TRY(open_tensor(m, at, name, &b));
    BSI_TRY(check_range(m, name, t, ndim, dim, file, file_offset, &x.bytes));
    if (ndim)
        memcpy(x.dim, dim, (size_t)ndim * sizeof *dim);
    return put_tensor(b, name, &x, out);
}

/* ---- packed tensors ---- */

static const bs_packing_info packings[BS_PACKING_COUNT] = {
    [BS_MXFP4] = {"mxfp4", 32, 16, 1}, /* OCP Microscaling Formats 1.0: e2m1, e8m0 */
};

const bs_packing_info *bs_packing_get(bs_packing p)
{
    return p > BS_PLAIN && p < BS_PACKING_COUNT ? &packings[p] : NULL;
}

enum { PACKED_NAME = 512 }; /* with its .scales */

/* u8 [dim.., groups, bytes of a group] in place of values [dim.., columns] */
static bs_status add_groups(bs_manifest *m, int at, const bs_packed *p, bool scales, int *out)
{
    const bs_packing_info *f = bs_packing_get(p->packing);
    char name[PACKED_NAME];
    int64_t dim[BS_MAX_DIMS + 1];
    int file = scales ? p->scales_file : p->file;
    uint64_t offset = scales ? p->scales_offset : p->file_offset;
    bs_tensor_info x = {.dtype = BS_DTYPE_U8,
                        .ndim = p->ndim,
                        .file = file,
                        .file_offset = offset,
                        .packing = scales ? BS_PLAIN : p->packing,
                        .scales = -1};
    block *b = NULL;
    snprintf(name, sizeof name, "%s%s", p->name, scales ? ".scales" : "");
    memcpy(dim, p->dim, (size_t)p->ndim * sizeof *dim);
    dim[p->ndim - 1] = p->dim[p->ndim - 1] / f->group * (scales ? f->scale_bytes : f->bytes);
    BSI_TRY(open_tensor(m, at, name, &b));
    BSI_TRY(check_bytes(m, name, BS_DTYPE_U8, p->ndim, dim, file, offset, &x.bytes));
    memcpy(x.dim, scales ? dim : p->dim, (size_t)p->ndim * sizeof *dim);
    return put_tensor(b, name, &x, out);
}

bs_status bs_manifest_add_packed(bs_manifest *m, int at, const bs_packed *p, int *out)
{
    const bs_packing_info *f = bs_packing_get(p->packing);
    int scales;
    BSI_TRY(check_open(m, "tensor", p->name));
    if (strlen(p->name) > PACKED_NAME - sizeof ".scales")
        return bsi_fail(BS_ARG, "manifest: the name '%.80s...' has %zu bytes, at most %zu are possible",
                        p->name, strlen(p->name), PACKED_NAME - sizeof ".scales");
    if (!f || p->ndim < 1 || p->ndim > BS_MAX_DIMS || p->dim[p->ndim - 1] < 1 ||
        p->dim[p->ndim - 1] % f->group)
        return bsi_fail(BS_SHAPE,
                        "manifest: '%s' is packed in groups of %lld; rows of whole groups are expected",
                        p->name, f ? (long long)f->group : 0LL);
    BSI_TRY(add_groups(m, at, p, false, out));
    block *b = &m->block[at];
    bs_status st = add_groups(m, at, p, true, &scales);
    if (st == BS_OK)
        b->tensor[*out].scales = scales;
    else /* neither of the two */
        free_name(b->tensor[--b->info.n_tensors].name);
    return st;
}

/* Values of a tensor. */
static uint64_t values_of(const bs_tensor_info *t)
{
    const bs_packing_info *f = bs_packing_get(t->packing);
    return f ? t->bytes / (uint64_t)f->bytes * (uint64_t)f->group : t->bytes / bs_dtype_size(t->dtype);
}

bs_status bs_manifest_add_row_table(bs_manifest *m, const char *name, bs_dtype t, int64_t rows,
                                    int64_t cols, int file, uint64_t file_offset, int *out)
{
    int64_t dim[2] = {rows, cols};
    uint64_t bytes = 0;
    BSI_TRY(check_text(m, "row table", name));
    BSI_TRY(check_range(m, name, t, 2, dim, file, file_offset, &bytes));
    BSI_TRY(grow(&m->rows, m->n_rows, &m->cap_rows, sizeof *m->rows));
    bsi_row_table *r = &m->rows[m->n_rows];
    *r = (bsi_row_table){bsi_strdup(BS_TAG_HEADER, name), t, rows, cols, file, file_offset};
    if (!r->name)
        return BS_NOMEM;
    *out = m->n_rows++;
    return BS_OK;
}

/* ---- finishing ----------------------------------------------------------------------------------- */

static size_t extent_align(const bsi_file *f)
{
    return f->direct ? f->align : EXTENT_ALIGN;
}

static int by_place(const void *x, const void *y)
{
    const bs_tensor_info *a = *(const bs_tensor_info *const *)x, *b = *(const bs_tensor_info *const *)y;
    if (a->file != b->file)
        return a->file < b->file ? -1 : 1;
    if (a->file_offset != b->file_offset)
        return a->file_offset < b->file_offset ? -1 : 1;
    return a < b ? -1 : a > b; /* canonical order: qsort keeps no order among equals */
}

/* Aligned pieces of files that hold the tensors of b. Pieces that touch or overlap become one;
   apart, a page that two tensors share would be read twice. Each extent begins in the host slot at
   a multiple of its file's alignment, because a direct read wants memory, offset and length aligned
   (open(2)). */
static void make_extents(const bs_manifest *m, block *b, const bs_tensor_info **order)
{
    bsi_extent *e = NULL;
    uint64_t raw = 0, end = 0;
    b->info.n_extents = 0;
    for (int i = 0; i < b->info.n_tensors; i++) {
        const bs_tensor_info *t = order[i];
        uint64_t align = extent_align(&m->file[t->file]);
        /* `to` cannot wrap: check_range has found the tensor inside its file. */
        uint64_t from = bsi_round_down(t->file_offset, align);
        uint64_t to = bsi_round_up(t->file_offset + t->bytes, align);
        if (e && e->file == t->file && from <= e->offset + e->length) {
            e->length = BSI_MAX(e->length, to - e->offset);
        } else {
            raw = bsi_round_up(end, BSI_MAX(align, (uint64_t)EXTENT_ALIGN));
            e = &b->extent[b->info.n_extents++];
            *e = (bsi_extent){t->file, from, to - from, raw};
        }
        b->extent_of[t - b->tensor] = b->info.n_extents - 1;
        end = e->raw_offset + e->length;
    }
    b->info.raw_bytes = bsi_round_up(end, EXTENT_ALIGN);
}

/* Slot offsets depend on what is stored alone, so another compute type moves nothing in a slot;
   only the copies in the expand region get other places. A multiple of 256 bytes is what cudaMalloc
   gives at least (CUDA C++ Programming Guide): kernels choose their loads by alignment, and a
   tensor must look the same wherever its block lives. */
static void make_layout(block *b, bs_dtype compute)
{
    uint64_t slot = 0, expand = 0, payload = 0;
    for (int i = 0; i < b->info.n_tensors; i++) {
        bs_tensor_info *t = &b->tensor[i];
        payload += t->bytes;
        t->slot_offset = slot;
        slot = bsi_round_up(slot + t->bytes, PLACE);
        t->compute = compute;
        t->expand_offset = UINT64_MAX;
        if (t->dtype != compute &&
            (t->dtype != BS_DTYPE_U8 || t->packing)) { /* scales have no values */
            t->expand_offset = expand;
            expand = bsi_round_up(expand + values_of(t) * bs_dtype_size(compute), PLACE);
        }
    }
    for (int i = 0; i < b->info.n_tensors; i++)
        if (b->tensor[i].scales >= 0)
            b->tensor[i].scales_offset = b->tensor[b->tensor[i].scales].slot_offset;
    b->info.payload_bytes = payload;
    b->info.slot_bytes = slot;
    b->info.expand_bytes = expand;
}

static bs_status finish_block(const bs_manifest *m, block *b)
{
    size_t n = (size_t)b->info.n_tensors;
    if (n == 0)
        return bsi_fail(BS_ARG, "manifest: block '%s' has no tensors", b->info.name);
    bsi_free(b->extent); /* of an attempt that failed */
    bsi_free(b->extent_of);
    b->extent = bsi_alloc(BS_TAG_HEADER, n * sizeof *b->extent);
    b->extent_of = bsi_alloc(BS_TAG_HEADER, n * sizeof *b->extent_of);
    const bs_tensor_info **order = bsi_alloc(BS_TAG_HEADER, n * sizeof *order);
    bool ok = b->extent && b->extent_of && order;
    if (ok) {
        for (size_t i = 0; i < n; i++)
            order[i] = &b->tensor[i];
        qsort(order, n, sizeof *order, by_place);
        make_extents(m, b, order);
        make_layout(b, m->compute);
    }
    bsi_free(order);
    return ok ? BS_OK : BS_NOMEM;
}

static bs_status finish_file(bsi_file *f)
{
    /* The path is opened once more, and another file may lie there since its sizes were checked.
       From here on the descriptor is the file. */
    bsi_file now;
    BSI_TRY(bsi_file_check(f));
    BSI_TRY(bsi_file_open(f->path, false, &now));
    bool same =
        now.bytes == f->bytes && now.ino == f->ino && now.dev == f->dev && now.mtime_ns == f->mtime_ns;
    if (!same) {
        bsi_file_close(&now);
        return bsi_fail(BS_IO, "file '%s' changed while the manifest was made", f->path);
    }
    bsi_file_close(f);
    *f = now;
    return BS_OK;
}

/* With the terminator, so that "ab", "c" and "a", "bc" differ. */
static uint64_t mix_text(uint64_t h, const char *s)
{
    return bs_hash64(s, strlen(s) + 1, h);
}

static uint64_t mix_number(uint64_t h, uint64_t n)
{
    return bs_hash64(&n, sizeof n, h);
}

/* A function of what the weights are called and where they lie, not of paths, times or alignments. */
static uint64_t digest(const bs_manifest *m)
{
    uint64_t h = mix_number(mix_number(mix_number(0, (uint64_t)m->n_files), (uint64_t)m->n_blocks),
                            (uint64_t)m->n_rows);
    for (int i = 0; i < m->n_files; i++)
        h = mix_number(h, m->file[i].bytes);
    for (int i = 0; i < m->n_blocks; i++) {
        const block *b = &m->block[i];
        h = mix_number(mix_text(mix_text(h, b->info.name), b->info.kind), (uint64_t)b->info.n_tensors);
        for (int k = 0; k < b->info.n_tensors; k++) {
            const bs_tensor_info *t = &b->tensor[k];
            h = mix_number(mix_text(mix_text(h, t->name), bs_dtype_name(t->dtype)), (uint64_t)t->ndim);
            h = bs_hash64(t->dim, sizeof t->dim, h); /* unused dims are zero */
            if (t->packing)
                h = mix_text(h, bs_packing_get(t->packing)->name);
            h = mix_number(mix_number(h, (uint64_t)t->file), t->file_offset);
        }
    }
    for (int i = 0; i < m->n_rows; i++) {
        const bsi_row_table *r = &m->rows[i];
        h = mix_text(mix_text(h, r->name), bs_dtype_name(r->dtype));
        h = mix_number(mix_number(h, (uint64_t)r->rows), (uint64_t)r->cols);
        h = mix_number(mix_number(h, (uint64_t)r->file), r->file_offset);
    }
    return h;
}

bs_status bs_manifest_compute(bs_manifest *m, bs_dtype compute)
{
    if (compute != BS_DTYPE_F32 && compute != BS_DTYPE_BF16)
        return bsi_fail(BS_DTYPE, "manifest: nothing computes in %s; f32 and bf16 are possible",
                        bs_dtype_name(compute));
    m->compute = compute;
    for (int i = 0; m->finished && i < m->n_blocks; i++)
        make_layout(&m->block[i], compute);
    return BS_OK;
}

bs_status bs_manifest_finish(bs_manifest *m)
{
    if (m->finished)
        return bsi_fail(BS_STATE, "manifest: finished twice");
    m->align = 1;
    for (int i = 0; i < m->n_files; i++) {
        BSI_TRY(finish_file(&m->file[i]));
        m->align = BSI_MAX(m->align, extent_align(&m->file[i]));
    }
    for (int i = 0; i < m->n_blocks; i++)
        BSI_TRY(finish_block(m, &m->block[i]));
    m->digest = BSI_MAX(digest(m), UINT64_C(1)); /* 0: not finished */
    /* Last: an attempt that failed on the way can be repeated (finish_block drops what it left). */
    m->finished = true;
    return BS_OK;
}

/* ---- reading --------------------------------------------------------------------------------- */

int bs_manifest_blocks(const bs_manifest *m)
{
    return m->n_blocks;
}

const bs_block_info *bs_manifest_block(const bs_manifest *m, int at)
{
    return at >= 0 && at < m->n_blocks ? &m->block[at].info : NULL;
}

const bs_tensor_info *bs_manifest_tensor(const bs_manifest *m, int at, int tensor)
{
    const bs_block_info *b = bs_manifest_block(m, at);
    return b && tensor >= 0 && tensor < b->n_tensors ? &m->block[at].tensor[tensor] : NULL;
}

bs_status bs_tensor_info_rows(const bs_tensor_info *t, int64_t first, int64_t n, bs_tensor_info *out)
{
    int64_t rows = t->ndim > 0 ? t->dim[0] : 1;
    if (t->packing)
        return bsi_fail(BS_UNSUPPORTED, "tensor '%s' is packed; it is used whole", t->name);
    if (first < 0 || n < 1 || first > rows || n > rows - first)
        return bsi_fail(BS_SHAPE, "tensor '%s' has %lld rows; %lld from row %lld on are not in it",
                        t->name, (long long)rows, (long long)n, (long long)first);
    /* Rows are contiguous and of one size in the file and in both layouts, so each offset moves by
       whole rows. A slice need not begin at a multiple of 256. */
    uint64_t row = t->bytes / (uint64_t)rows;
    *out = *t;
    if (out->ndim > 0)
        out->dim[0] = n;
    out->bytes = row * (uint64_t)n;
    out->file_offset += row * (uint64_t)first;
    out->slot_offset += row * (uint64_t)first;
    if (out->expand_offset != UINT64_MAX)
        out->expand_offset +=
            row / bs_dtype_size(t->dtype) * bs_dtype_size(t->compute) * (uint64_t)first;
    return BS_OK;
}

int bs_manifest_find_tensor(const bs_manifest *m, int at, const char *name)
{
    const bs_tensor_info *t;
    for (int i = 0; (t = bs_manifest_tensor(m, at, i)); i++)
        if (strcmp(t->name, name) == 0)
            return i;
    return -1;
}

uint64_t bs_manifest_digest(const bs_manifest *m)
{
    return m->digest;
}

size_t bs_manifest_alignment(const bs_manifest *m)
{
    return m->align;
}

const bsi_file *bsi_manifest_file(const bs_manifest *m, int file)
{
    return file >= 0 && file < m->n_files ? &m->file[file] : NULL;
}

const bsi_extent *bsi_manifest_extent(const bs_manifest *m, int at, int extent)
{
    const bs_block_info *b = bs_manifest_block(m, at);
    return b && extent >= 0 && extent < b->n_extents ? &m->block[at].extent[extent] : NULL;
}

int bsi_manifest_tensor_extent(const bs_manifest *m, int at, int tensor)
{
    return m->finished && bs_manifest_tensor(m, at, tensor) ? m->block[at].extent_of[tensor] : -1;
}

uint64_t bsi_manifest_raw_offset(const bs_manifest *m, int at, int tensor)
{
    const bs_tensor_info *t = bs_manifest_tensor(m, at, tensor);
    const bsi_extent *x = bsi_manifest_extent(m, at, bsi_manifest_tensor_extent(m, at, tensor));
    return x->raw_offset + (t->file_offset - x->offset);
}

uint64_t bsi_manifest_read_bytes(const bs_manifest *m, int at)
{
    uint64_t sum = 0;
    for (int x = 0; x < bs_manifest_block(m, at)->n_extents; x++)
        sum += bsi_manifest_extent(m, at, x)->length;
    return sum;
}

const bsi_row_table *bsi_manifest_rows(const bs_manifest *m, int rows)
{
    return rows >= 0 && rows < m->n_rows ? &m->rows[rows] : NULL;
}
