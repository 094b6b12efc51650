/* SPDX-License-Identifier: Apache-2.0 */
/*
** safetensors_write.c: writes arrays as a safetensors file the way the format's own writer does:
** tensors by alignment, largest first, then by name; header padded with spaces to a multiple of 8. So
** every tensor is aligned in the file and the same arrays always give the same bytes. Owner thread.
*/
#include "base/json.h"
#include "io/private.h"

#include <stdlib.h>
#include <string.h>

typedef struct item {
    const char *name;
    const bs_array *a;
    int rank; /* of the dtype in the file: smaller is earlier */
} item;

/* The order of the format's own writer, widest first. */
static const struct {
    const char *name;
    int rank;
} stored[BS_DTYPE_COUNT] = {
    [BS_DTYPE_I64] = {"I64", 0}, [BS_DTYPE_F64] = {"F64", 1},   [BS_DTYPE_F32] = {"F32", 2},
    [BS_DTYPE_I32] = {"I32", 3}, [BS_DTYPE_BF16] = {"BF16", 4}, [BS_DTYPE_F16] = {"F16", 5},
    [BS_DTYPE_U8] = {"U8", 6}};

static int by_rank(const void *x, const void *y)
{
    const item *a = x, *b = y;
    return a->rank != b->rank ? a->rank - b->rank : strcmp(a->name, b->name);
}

static bs_status check_word(const char *path, const char *what, const char *s)
{
    if (!s || !bsi_json_utf8_valid(s, strlen(s)))
        return bsi_fail(BS_ARG, "'%s' cannot be written: a %s is %s", path, what,
                        s ? "not valid UTF-8" : "missing");
    return BS_OK;
}

static bs_status sort_items(const char *path, int64_t n, const char *const *names,
                            const bs_array *const *arrays, item *it)
{
    for (int64_t i = 0; i < n; i++) {
        BSI_TRY(check_word(path, "tensor name", names[i]));
        if (strcmp(names[i], "__metadata__") == 0)
            return bsi_fail(BS_ARG, "'%s' cannot be written: no tensor may be called __metadata__",
                            path);
        it[i] = (item){names[i], arrays[i], stored[arrays[i]->dtype].rank};
    }
    qsort(it, (size_t)n, sizeof *it, by_rank);
    return BS_OK;
}

static bs_status unique(const char *path, const char *what, int64_t n, const char *const *names)
{
    bsi_names seen;
    bs_status ret = BS_OK;
    BSI_TRY(bsi_names_init(&seen, (size_t)n));
    for (int64_t i = 0; i < n && ret == BS_OK; i++)
        if (!bsi_names_add(&seen, names[i], i))
            ret = bsi_fail(BS_ARG, "'%s' cannot be written: %s '%s' is given twice", path, what,
                           names[i]);
    bsi_names_free(&seen);
    return ret;
}

static void put_header(bsi_writer *t, int64_t n, const item *it, int n_meta, const char *const *keys,
                       const char *const *values)
{
    const char *comma = "";
    uint64_t at = 0;
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
    for (int64_t i = 0; i < n; i++) {
        const bs_array *a = it[i].a;
        bsi_writer_printf(t, "%s", comma);
        bsi_writer_quote(t, it[i].name);
        bsi_writer_printf(t, ":{\"dtype\":\"%s\",\"shape\":[", stored[a->dtype].name);
        for (int k = 0; k < a->ndim; k++)
            bsi_writer_printf(t, "%s%lld", k ? "," : "", (long long)a->dim[k]);
        bsi_writer_printf(t, "],\"data_offsets\":[%llu,%llu]}", (unsigned long long)at,
                        (unsigned long long)(at + a->bytes));
        at += a->bytes;
        comma = ",";
    }
    bsi_writer_put(t, "}", 1);
    bsi_writer_put(t, "       ", (8 - t->n % 8) % 8); /* 8 + N, then, is a multiple of 8 as well */
}

static bs_status write_all(const char *path, const bsi_writer *header, int64_t n, const item *it)
{
    bsi_out o;
    unsigned char size[8];
    for (int i = 0; i < 8; i++)
        size[i] = (unsigned char)((uint64_t)header->n >> (8 * i));
    BSI_TRY(bsi_out_open(&o, path));
    bs_status ret = bsi_out_write(&o, size, sizeof size);
    if (ret == BS_OK)
        ret = bsi_out_write(&o, header->p, header->n);
    for (int64_t i = 0; i < n && ret == BS_OK; i++)
        ret = bsi_out_write(&o, it[i].a->data, it[i].a->bytes);
    if (ret == BS_OK)
        return bsi_out_commit(&o);
    bsi_out_abort(&o);
    return ret;
}

bs_status bs_st_write(const char *path, int64_t n, const char *const *names,
                      const bs_array *const *arrays, int n_meta, const char *const *keys,
                      const char *const *values)
{
    bsi_writer header = {0};
    size_t bytes;
    if (n < 0 || n_meta < 0 || !bsi_mul_size((size_t)n, sizeof(item), &bytes))
        return bsi_fail(BS_ARG, "'%s' cannot be written: %lld arrays, %d metadata", path, (long long)n,
                        n_meta);
    for (int i = 0; i < n_meta; i++) {
        BSI_TRY(check_word(path, "metadata key", keys[i]));
        BSI_TRY(check_word(path, "metadata value", values[i]));
    }
    item *it = bsi_alloc(BS_TAG_MISC, bytes);
    if (!it)
        return BS_NOMEM;
    bs_status ret = sort_items(path, n, names, arrays, it);
    if (ret == BS_OK)
        ret = unique(path, "tensor", n, names);
    if (ret == BS_OK)
        ret = unique(path, "metadata key", n_meta, keys);
    if (ret != BS_OK)
        goto done;
    put_header(&header, n, it, n_meta, keys, values);
    if (header.failed)
        ret = bsi_fail(BS_NOMEM, "'%s' cannot be written: no memory for its header", path);
    else if (header.n > BSI_HEADER_LIMIT)
        ret =
            bsi_fail(BS_ARG, "'%s' cannot be written: its header has %zu bytes, at most %d can be read",
                     path, header.n, BSI_HEADER_LIMIT);
    else
        ret = write_all(path, &header, n, it);
done:
    bsi_free(header.p);
    bsi_free(it);
    return ret;
}
