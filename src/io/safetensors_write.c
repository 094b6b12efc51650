/* SPDX-License-Identifier: Apache-2.0 */
/*
** safetensors_write.c: writes a safetensors file the way the format's own writer does: tensors by
** alignment, largest first, then by name; header padded with spaces to a multiple of 8. So every tensor
** is aligned in the file and the same tensors always give the same bytes. The header is known before
** the data, which may come in any order, each tensor once. Owner thread.
*/
#include "base/json.h"
#include "io/file.h"
#include "io/name_table.h"
#include "io/safetensors.h"

#include <stdlib.h>
#include <string.h>

enum { COPY_BYTES = 1 << 22 };

typedef struct item {
    bs_safetensors_tensor t; /* name in the writer's text; offset and bytes in the file */
    const bsi_format *format;
    bool given;
} item;

struct bs_safetensors_writer {
    bsi_out out;
    char *path, *text; /* text: the names */
    int64_t n, given;
    item *item; /* [n], in file order */
    bsi_names names;
};

/* ---- what is written ------------------------------------------------------------------------- */

static int by_rank(const void *x, const void *y)
{
    const item *a = x, *b = y;
    if (a->format != b->format)
        return a->format > b->format ? -1 : 1;
    return strcmp(a->t.name, b->t.name);
}

static bs_status check_word(const char *path, const char *what, const char *s)
{
    if (!s || bs_utf8_valid(s, strlen(s)) < strlen(s))
        return bsi_fail(BS_ARG, "'%s' cannot be written: a %s is %s", path, what,
                        s ? "not valid UTF-8" : "missing");
    return BS_OK;
}

/* Bytes of a tensor; BS_ARG when they overflow or are not whole. */
static bs_status measure(const char *path, item *it)
{
    size_t bits = it->format->bits;
    bool fits = it->t.ndim >= 0 && it->t.ndim <= BS_MAX_DIMS;
    for (int i = 0; fits && i < it->t.ndim; i++)
        fits = it->t.dim[i] >= 0 && bsi_mul_size(bits, (size_t)it->t.dim[i], &bits);
    if (!fits || bits % 8)
        return bsi_fail(BS_ARG, "'%s' cannot be written: the dims of tensor '%s' make no size", path,
                        it->t.name);
    it->t.bytes = bits / 8;
    return BS_OK;
}

static bs_status take_items(bs_safetensors_writer *w, const bs_safetensors_tensor *tensors)
{
    size_t room = 0;
    for (int64_t i = 0; i < w->n; i++) {
        BSI_TRY(check_word(w->path, "tensor name", tensors[i].name));
        if (strcmp(tensors[i].name, "__metadata__") == 0)
            return bsi_fail(BS_ARG, "'%s' cannot be written: no tensor may be called __metadata__",
                            w->path);
        room += strlen(tensors[i].name) + 1;
    }
    char *to = w->text = bsi_alloc(BS_TAG_HEADER, room);
    if (!to)
        return BS_NOMEM;
    for (int64_t i = 0; i < w->n; i++) {
        item *it = &w->item[i];
        size_t bytes = strlen(tensors[i].name) + 1;
        it->t = tensors[i];
        it->t.name = memcpy(to, tensors[i].name, bytes);
        to += bytes;
        it->format = tensors[i].dtype_name ? bsi_format_named(tensors[i].dtype_name) : NULL;
        if (!it->format)
            return bsi_fail(BS_ARG, "'%s' cannot be written: tensor '%s' is of no dtype of the format",
                            w->path, it->t.name);
        BSI_TRY(measure(w->path, it));
    }
    qsort(w->item, (size_t)w->n, sizeof *w->item, by_rank);
    BSI_TRY(bsi_names_init(&w->names, (size_t)w->n));
    for (int64_t i = 0; i < w->n; i++)
        if (!bsi_names_add(&w->names, w->item[i].t.name, i))
            return bsi_fail(BS_ARG, "'%s' cannot be written: tensor '%s' is given twice", w->path,
                            w->item[i].t.name);
    return BS_OK;
}

static bs_status check_metadata(const char *path, int n, const char *const *keys,
                                const char *const *values)
{
    bsi_names seen;
    bs_status ret = BS_OK;
    for (int i = 0; i < n; i++) {
        BSI_TRY(check_word(path, "metadata key", keys[i]));
        BSI_TRY(check_word(path, "metadata value", values[i]));
    }
    BSI_TRY(bsi_names_init(&seen, (size_t)n));
    for (int i = 0; i < n && ret == BS_OK; i++)
        if (!bsi_names_add(&seen, keys[i], i))
            ret = bsi_fail(BS_ARG, "'%s' cannot be written: metadata key '%s' is given twice", path,
                           keys[i]);
    bsi_names_free(&seen);
    return ret;
}

/* ---- header ---------------------------------------------------------------------------------- */

/* Offsets count from the end of the header. */
static bs_status put_header(bs_safetensors_writer *w, bsi_writer *t, int n_meta,
                            const char *const *keys, const char *const *values)
{
    const char *comma = "";
    size_t at = 0;
    bsi_writer_put(t, "{", 1);
    for (int i = 0; i < n_meta; i++) {
        bsi_writer_printf(t, "%s", i ? "," : "\"__metadata__\":{");
        bsi_writer_quote(t, keys[i]);
        bsi_writer_put(t, ":", 1);
        bsi_writer_quote(t, values[i]);
    }
    if (n_meta > 0) {
        bsi_writer_put(t, "}", 1);
        comma = ",";
    }
    for (int64_t i = 0; i < w->n; i++) {
        item *it = &w->item[i];
        size_t end;
        if (!bsi_add_size(at, (size_t)it->t.bytes, &end) || end > INT64_MAX)
            return bsi_fail(BS_ARG, "'%s' cannot be written: its tensors overflow", w->path);
        bsi_writer_printf(t, "%s", comma);
        bsi_writer_quote(t, it->t.name);
        bsi_writer_printf(t, ":{\"dtype\":\"%s\",\"shape\":[", it->format->name);
        for (int k = 0; k < it->t.ndim; k++)
            bsi_writer_printf(t, "%s%lld", k ? "," : "", (long long)it->t.dim[k]);
        bsi_writer_printf(t, "],\"data_offsets\":[%zu,%zu]}", at, end);
        it->t.offset = at;
        at = end;
        comma = ",";
    }
    bsi_writer_put(t, "}", 1);
    bsi_writer_put(t, "       ", (8 - t->n % 8) % 8); /* 8 + N, then, is a multiple of 8 as well */
    if (t->failed)
        return bsi_fail(BS_NOMEM, "'%s' cannot be written: no memory for its header", w->path);
    if (t->n > BSI_HEADER_LIMIT)
        return bsi_fail(BS_ARG,
                        "'%s' cannot be written: its header has %zu bytes, at most %d can be read",
                        w->path, t->n, BSI_HEADER_LIMIT);
    return BS_OK;
}

static bs_status write_header(bs_safetensors_writer *w, int n_meta, const char *const *keys,
                              const char *const *values)
{
    bsi_writer header = {0};
    unsigned char size[8];
    bs_status ret = put_header(w, &header, n_meta, keys, values);
    if (ret == BS_OK)
        ret = bsi_out_open(&w->out, w->path);
    if (ret != BS_OK)
        goto done;
    for (int i = 0; i < 8; i++)
        size[i] = (unsigned char)((uint64_t)header.n >> (8 * i));
    for (int64_t i = 0; i < w->n; i++)
        w->item[i].t.offset += sizeof size + header.n;
    ret = bsi_out_write(&w->out, size, sizeof size, 0);
    if (ret == BS_OK)
        ret = bsi_out_write(&w->out, header.p, header.n, sizeof size);
done:
    bsi_free(header.p);
    return ret;
}

/* ---- public ---------------------------------------------------------------------------------- */

bs_status bs_safetensors_writer_open(const char *path, int64_t n, const bs_safetensors_tensor *tensors,
                                     int n_meta, const char *const *keys, const char *const *values,
                                     bs_safetensors_writer **out)
{
    size_t bytes;
    *out = NULL;
    if (n < 0 || n_meta < 0 || !bsi_mul_size((size_t)n, sizeof(item), &bytes))
        return bsi_fail(BS_ARG, "'%s' cannot be written: %lld arrays, %d metadata", path, (long long)n,
                        n_meta);
    BSI_TRY(check_metadata(path, n_meta, keys, values));
    bs_safetensors_writer *w = bsi_alloc(BS_TAG_MISC, sizeof *w);
    if (!w)
        return BS_NOMEM;
    w->out.fd = -1;
    w->n = n;
    w->path = bsi_strdup(BS_TAG_MISC, path);
    w->item = bsi_alloc(BS_TAG_MISC, bytes);
    bs_status ret = w->path && w->item ? take_items(w, tensors) : BS_NOMEM;
    if (ret == BS_OK)
        ret = write_header(w, n_meta, keys, values);
    if (ret == BS_OK)
        *out = w;
    else
        bs_safetensors_writer_close(w);
    return ret;
}

void bs_safetensors_writer_close(bs_safetensors_writer *w)
{
    if (!w)
        return;
    bsi_out_abort(&w->out);
    bsi_names_free(&w->names);
    bsi_free(w->item);
    bsi_free(w->text);
    bsi_free(w->path);
    bsi_free(w);
}

/* The tensor of that name, which must be of this dtype and these dims and not have been given. */
static bs_status claim(bs_safetensors_writer *w, const char *name, const bsi_format *format, int ndim,
                       const int64_t *dim, item **out)
{
    int64_t i = bsi_names_find(&w->names, name);
    if (w->out.fd < 0)
        return bsi_fail(BS_STATE, "'%s' is finished: tensor '%s' comes too late", w->path, name);
    if (i < 0)
        return bsi_fail(BS_ARG, "'%s' was to have no tensor '%s'", w->path, name);
    item *it = &w->item[i];
    if (it->given)
        return bsi_fail(BS_STATE, "'%s': tensor '%s' is given twice", w->path, name);
    if (it->format != format || it->t.ndim != ndim ||
        memcmp(it->t.dim, dim, (size_t)ndim * sizeof *dim) != 0)
        return bsi_fail(BS_SHAPE, "'%s': tensor '%s' is given as %s of %d dims, not as it was declared",
                        w->path, name, format ? format->name : "an unknown dtype", ndim);
    *out = it;
    return BS_OK;
}

static void count(bs_safetensors_writer *w, item *it)
{
    it->given = true;
    w->given++;
}

bs_status bs_safetensors_writer_add(bs_safetensors_writer *w, const char *name, const bs_array *a)
{
    item *it = NULL;
    BSI_TRY(claim(w, name, bsi_format_of(a->dtype), a->ndim, a->dim, &it));
    BSI_TRY(bsi_out_write(&w->out, a->data, a->bytes, it->t.offset));
    count(w, it);
    return BS_OK;
}

bs_status bs_safetensors_writer_copy(bs_safetensors_writer *w, const char *name,
                                     const bs_safetensors *from)
{
    item *it = NULL;
    const bs_safetensors_tensor *t = bs_safetensors_find(from, name);
    if (!t)
        return bsi_fail(BS_ARG, "file '%s' has no tensor '%s'", bs_safetensors_path(from), name);
    BSI_TRY(claim(w, name, bsi_format_named(t->dtype_name), t->ndim, t->dim, &it));
    char *buffer = bsi_alloc(BS_TAG_STAGING, BSI_MIN(t->bytes, (size_t)COPY_BYTES));
    bs_status ret = buffer ? BS_OK : BS_NOMEM;
    for (uint64_t at = 0; ret == BS_OK && at < t->bytes; at += COPY_BYTES) {
        size_t n = (size_t)BSI_MIN(t->bytes - at, (uint64_t)COPY_BYTES);
        ret = bsi_safetensors_bytes(from, t, at, buffer, n);
        if (ret == BS_OK)
            ret = bsi_out_write(&w->out, buffer, n, it->t.offset + at);
    }
    bsi_free(buffer);
    if (ret == BS_OK)
        count(w, it);
    return ret;
}

bs_status bs_safetensors_writer_finish(bs_safetensors_writer *w)
{
    if (w->out.fd < 0)
        return bsi_fail(BS_STATE, "'%s' is finished already", w->path);
    for (int64_t i = 0; w->given < w->n && i < w->n; i++)
        if (!w->item[i].given)
            return bsi_fail(BS_STATE,
                            "'%s' cannot be finished: tensor '%s' was not given (%lld of %lld)",
                            w->path, w->item[i].t.name, (long long)w->given, (long long)w->n);
    return bsi_out_commit(&w->out);
}

bs_status bs_safetensors_write(const char *path, int64_t n, const char *const *names,
                               const bs_array *const *arrays, int n_meta, const char *const *keys,
                               const char *const *values)
{
    size_t bytes;
    bs_safetensors_writer *w = NULL;
    if (n < 0 || !bsi_mul_size((size_t)n, sizeof(bs_safetensors_tensor), &bytes))
        return bsi_fail(BS_ARG, "'%s' cannot be written: %lld arrays", path, (long long)n);
    bs_safetensors_tensor *t = bsi_alloc(BS_TAG_MISC, bytes);
    if (!t)
        return BS_NOMEM;
    for (int64_t i = 0; i < n; i++) {
        t[i].name = names[i];
        t[i].dtype_name = bsi_format_of(arrays[i]->dtype)->name;
        t[i].ndim = arrays[i]->ndim;
        memcpy(t[i].dim, arrays[i]->dim, sizeof t[i].dim);
    }
    bs_status ret = bs_safetensors_writer_open(path, n, t, n_meta, keys, values, &w);
    bsi_free(t);
    for (int64_t i = 0; i < n && ret == BS_OK; i++)
        ret = bs_safetensors_writer_add(w, names[i], arrays[i]);
    if (ret == BS_OK)
        ret = bs_safetensors_writer_finish(w);
    bs_safetensors_writer_close(w);
    return ret;
}
