/* SPDX-License-Identifier: Apache-2.0 */
/*
** manifest_json.c: a manifest as JSON text and back. Reading goes through the same builder calls as
** any caller's, so nothing in the text is believed that they would refuse; the digest is computed
** again and must be the one written. Layouts and alignments are not stored: they belong to the machine
** that reads.
*/
#include "base/json.h"
#include "io/io.h"

#include <limits.h>
#include <string.h>

#define VERSION 1

static void put_shape(bsi_writer *t, int ndim, const int64_t *dim)
{
    bsi_writer_put(t, "[", 1);
    for (int i = 0; i < ndim; i++)
        bsi_writer_printf(t, "%s%lld", i ? "," : "", (long long)dim[i]);
    bsi_writer_put(t, "]", 1);
}

/* {"name":..,"dtype":..,"shape":[..],"file":..,"offset":..} of a tensor or row table; of a packed tensor the
   name of the packing stands for the dtype, and its scales follow. */
static void put_entry(bsi_writer *t, int i, const char *name, const char *dtype, int ndim,
                      const int64_t *dim, int file, uint64_t offset)
{
    bsi_writer_printf(t, "%s\n{\"name\":", i ? "," : "");
    bsi_writer_quote(t, name);
    bsi_writer_printf(t, ",\"dtype\":\"%s\",\"shape\":", dtype);
    put_shape(t, ndim, dim);
    bsi_writer_printf(t, ",\"file\":%d,\"offset\":%llu}", file, (unsigned long long)offset);
}

bs_status bs_manifest_to_json(const bs_manifest *m, char **out)
{
    bsi_writer t = {0};
    *out = NULL;
    if (bs_manifest_digest(m) == 0)
        return bsi_fail(BS_STATE, "manifest: only a finished one can be written");
    bsi_writer_printf(&t, "{\"bslua_manifest\":%d,\"digest\":\"%016llx\",\n\"files\":[", VERSION,
                      (unsigned long long)bs_manifest_digest(m));
    const bsi_file *f;
    for (int i = 0; (f = bsi_manifest_file(m, i)); i++) {
        if (bs_utf8_valid(f->path, strlen(f->path)) < strlen(f->path)) {
            bsi_free(t.p);
            return bsi_fail(BS_UNSUPPORTED, "manifest: the path '%s' is not UTF-8, which JSON is",
                            f->path);
        }
        bsi_writer_printf(&t, "%s\n{\"path\":", i ? "," : "");
        bsi_writer_quote(&t, f->path);
        bsi_writer_printf(&t, ",\"bytes\":%llu}", (unsigned long long)f->bytes);
    }
    bsi_writer_printf(&t, "],\n\"blocks\":[");
    for (int i = 0; i < bs_manifest_blocks(m); i++) {
        const bs_block_info *b = bs_manifest_block(m, i);
        bsi_writer_printf(&t, "%s\n{\"name\":", i ? "," : "");
        bsi_writer_quote(&t, b->name);
        bsi_writer_printf(&t, ",\"kind\":");
        bsi_writer_quote(&t, b->kind);
        bsi_writer_printf(&t, ",\"tensors\":[");
        for (int k = 0; k < b->n_tensors; k++) {
            const bs_tensor_info *x = bs_manifest_tensor(m, i, k);
            const bs_packing_info *p = bs_packing_get(x->packing);
            put_entry(&t, k, x->name, p ? p->name : bs_dtype_name(x->dtype), x->ndim, x->dim, x->file,
                      x->file_offset);
        }
        bsi_writer_printf(&t, "]}");
    }
    bsi_writer_printf(&t, "],\n\"rows\":[");
    const bsi_row_table *r;
    for (int i = 0; (r = bsi_manifest_rows(m, i)); i++)
        put_entry(&t, i, r->name, bs_dtype_name(r->dtype), 2, (const int64_t[2]){r->rows, r->cols},
                  r->file, r->file_offset);
    bsi_writer_printf(&t, "]}\n");
    if (t.failed) {
        bsi_free(t.p);
        return bs_error()->status == BS_NOMEM ? BS_NOMEM
                                              : bsi_fail(BS_NOMEM, "manifest: no memory for its text");
    }
    *out = t.p;
    return BS_OK;
}

/* ---- reading --------------------------------------------------------------------------------- */

/* v must be an object with exactly these n keys, each once; *at gets their values. */
static bs_status fields(const cJSON *v, const char *what, int n, const char *const *key,
                        const cJSON **at)
{
    if (!cJSON_IsObject(v))
        return bsi_fail(BS_FORMAT, "manifest: %s is not an object", what);
    for (int i = 0; i < n; i++)
        at[i] = NULL;
    for (const cJSON *c = v->child; c; c = c->next) {
        int i = 0;
        while (i < n && strcmp(key[i], c->string) != 0)
            i++;
        if (i == n || at[i])
            return bsi_fail(BS_FORMAT, "manifest: %s: key '%.80s' is %s", what, c->string,
                            i == n ? "unknown" : "given twice");
        at[i] = c;
    }
    for (int i = 0; i < n; i++)
        if (!at[i])
            return bsi_fail(BS_FORMAT, "manifest: %s: key '%s' is missing", what, key[i]);
    return BS_OK;
}

static bs_status text_of(const cJSON *v, const char *what, const char **out)
{
    if (!cJSON_IsString(v))
        return bsi_fail(BS_FORMAT, "manifest: %s: '%s' is not a string", what, v->string);
    *out = v->valuestring;
    return BS_OK;
}

static bs_status number_of(const cJSON *v, const char *what, uint64_t limit, uint64_t *out)
{
    if (!bsi_json_uint(v, out) || *out > limit)
        return bsi_fail(BS_FORMAT, "manifest: %s: '%s' is not an integer from 0 to %llu", what,
                        v->string ? v->string : "shape", (unsigned long long)limit);
    return BS_OK;
}

static bs_status list_of(const cJSON *v, const char *what)
{
    return cJSON_IsArray(v)
               ? BS_OK
               : bsi_fail(BS_FORMAT, "manifest: %s: '%s' is not an array", what, v->string);
}

typedef struct entry {
    const char *name;
    bs_dtype dtype;
    bs_packing packing;
    int ndim;
    int64_t dim[BS_MAX_DIMS];
    int file;
    uint64_t offset;
} entry;

static bool packing_of(const char *name, bs_packing *out)
{
    for (int p = BS_PLAIN + 1; p < BS_PACKING_COUNT; p++)
        if (strcmp(bs_packing_get((bs_packing)p)->name, name) == 0) {
            *out = (bs_packing)p;
            return true;
        }
    return false;
}

static bs_status entry_of(const cJSON *v, const char *what, entry *e)
{
    static const char *const key[] = {"name", "dtype", "shape", "file", "offset"};
    const cJSON *at[BSI_COUNT(key)];
    const char *dtype = NULL;
    uint64_t n = 0;
    *e = (entry){0};
    BSI_TRY(fields(v, what, (int)BSI_COUNT(key), key, at));
    BSI_TRY(text_of(at[0], what, &e->name));
    BSI_TRY(text_of(at[1], what, &dtype));
    BSI_TRY(list_of(at[2], what));
    if (!packing_of(dtype, &e->packing) && !bs_dtype_parse(dtype, &e->dtype))
        return bsi_fail(BS_FORMAT, "manifest: %s '%.80s': unknown dtype '%.40s'", what, e->name, dtype);
    for (const cJSON *d = at[2]->child; d; d = d->next) {
        if (e->ndim == BS_MAX_DIMS)
            return bsi_fail(BS_FORMAT, "manifest: %s '%.80s': more than %d dimensions", what, e->name,
                            BS_MAX_DIMS);
        BSI_TRY(number_of(d, what, UINT64_MAX, &n));
        e->dim[e->ndim++] = (int64_t)n;
    }
    BSI_TRY(number_of(at[3], what, INT_MAX, &n));
    e->file = (int)n;
    return number_of(at[4], what, UINT64_MAX, &e->offset);
}

static bs_status read_files(const cJSON *list, bs_manifest *m)
{
    static const char *const key[] = {"path", "bytes"};
    int want = 0, got;
    BSI_TRY(list_of(list, "text"));
    for (const cJSON *v = list->child; v; v = v->next, want++) {
        const cJSON *at[BSI_COUNT(key)];
        const char *path = NULL;
        uint64_t bytes = 0;
        BSI_TRY(fields(v, "file", (int)BSI_COUNT(key), key, at));
        BSI_TRY(text_of(at[0], "file", &path));
        BSI_TRY(number_of(at[1], "file", UINT64_MAX, &bytes));
        BSI_TRY(bs_manifest_add_file(m, path, &got));
        if (got != want)
            return bsi_fail(BS_FORMAT, "manifest: file '%s' is given twice", path);
        uint64_t now = bsi_manifest_file(m, got)->bytes;
        if (now != bytes)
            return bsi_fail(BS_FORMAT, "manifest: file '%s' had %llu bytes and has %llu now", path,
                            (unsigned long long)bytes, (unsigned long long)now);
    }
    return BS_OK;
}

static bs_status read_block(const cJSON *v, bs_manifest *m)
{
    static const char *const key[] = {"name", "kind", "tensors"};
    const cJSON *at[BSI_COUNT(key)];
    const char *name = NULL, *kind = NULL;
    int block = 0, tensor;
    entry e, scales;
    BSI_TRY(fields(v, "block", (int)BSI_COUNT(key), key, at));
    BSI_TRY(text_of(at[0], "block", &name));
    BSI_TRY(text_of(at[1], "block", &kind));
    BSI_TRY(list_of(at[2], "block"));
    BSI_TRY(bs_manifest_add_block(m, name, kind, &block));
    for (const cJSON *c = at[2]->child; c; c = c->next) {
        BSI_TRY(entry_of(c, "tensor", &e));
        if (!e.packing) {
            BSI_TRY(bs_manifest_add_tensor(m, block, e.name, e.dtype, e.ndim, e.dim, e.file, e.offset,
                                           &tensor));
            continue;
        }
        if (!(c = c->next))
            return bsi_fail(BS_FORMAT, "manifest: the scales of '%.80s' are missing", e.name);
        BSI_TRY(entry_of(c, "tensor", &scales));
        const bs_packed p = {.name = e.name,
                             .packing = e.packing,
                             .ndim = e.ndim,
                             .dim = e.dim,
                             .file = e.file,
                             .file_offset = e.offset,
                             .scales_file = scales.file,
                             .scales_offset = scales.offset};
        BSI_TRY(bs_manifest_add_packed(m, block, &p, &tensor));
        const bs_tensor_info *s = bs_manifest_tensor(m, block, tensor + 1);
        if (strcmp(s->name, scales.name) != 0 || scales.packing || scales.dtype != s->dtype ||
            scales.ndim != s->ndim || memcmp(scales.dim, s->dim, sizeof s->dim) != 0)
            return bsi_fail(BS_FORMAT, "manifest: '%.80s' does not hold the scales of '%.80s'",
                            scales.name, e.name);
    }
    return BS_OK;
}

static bs_status read_rows(const cJSON *v, bs_manifest *m)
{
    entry e;
    int rows;
    BSI_TRY(entry_of(v, "row table", &e));
    if (e.packing)
        return bsi_fail(BS_FORMAT, "manifest: row table '%.80s' is packed", e.name);
    if (e.ndim != 2)
        return bsi_fail(BS_FORMAT, "manifest: row table '%.80s' has %d dimensions, 2 are needed",
                        e.name, e.ndim);
    return bs_manifest_add_row_table(m, e.name, e.dtype, e.dim[0], e.dim[1], e.file, e.offset, &rows);
}

static bs_status read_root(const cJSON *root, bs_manifest *m)
{
    static const char *const key[] = {"bslua_manifest", "digest", "files", "blocks", "rows"};
    const cJSON *at[BSI_COUNT(key)];
    const char *digest = NULL;
    char again[17];
    uint64_t version = 0;
    BSI_TRY(fields(root, "text", (int)BSI_COUNT(key), key, at));
    BSI_TRY(number_of(at[0], "text", UINT64_MAX, &version));
    if (version != VERSION)
        return bsi_fail(BS_FORMAT, "manifest: version %llu, this program reads version %d",
                        (unsigned long long)version, VERSION);
    BSI_TRY(text_of(at[1], "text", &digest));
    BSI_TRY(read_files(at[2], m));
    BSI_TRY(list_of(at[3], "text"));
    BSI_TRY(list_of(at[4], "text"));
    for (const cJSON *c = at[3]->child; c; c = c->next)
        BSI_TRY(read_block(c, m));
    for (const cJSON *c = at[4]->child; c; c = c->next)
        BSI_TRY(read_rows(c, m));
    BSI_TRY(bs_manifest_finish(m));
    snprintf(again, sizeof again, "%016llx", (unsigned long long)bs_manifest_digest(m));
    if (strcmp(again, digest) != 0)
        return bsi_fail(BS_FORMAT,
                        "manifest: its digest is '%.40s', its content gives %s: it was edited", digest,
                        again);
    return BS_OK;
}

bs_status bs_manifest_from_json(const char *text, size_t n, bs_manifest **out)
{
    bs_json json;
    bs_manifest *m = NULL;
    *out = NULL;
    BSI_TRY(bs_json_parse(text, n, &bsi_json_header, "manifest", &json));
    bs_status ret = bs_manifest_new(&m);
    if (ret == BS_OK)
        ret = read_root(json.root, m);
    bs_json_end(&json);
    if (ret == BS_OK)
        *out = m;
    else
        bs_manifest_free(m);
    return ret;
}
