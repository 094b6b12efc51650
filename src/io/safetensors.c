/* SPDX-License-Identifier: Apache-2.0 */
/*
** safetensors.c: opens a safetensors file and checks all of its header before anything is believed: 8
** bytes little-endian length N, N bytes of JSON, then the data, which the tensors must cover exactly.
** Nothing is allocated from a number that has not been checked against the size of the file. Files are
** read with pread, never mapped: a mapping of a file that gets shorter kills the process. Owner thread.
*/
#include "io/safetensors.h"
#include "base/json.h"
#include "io/file.h"
#include "io/name_table.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#define NAME_SHOWN 160 /* characters of a tensor's name in a message */

struct bs_safetensors {
    char *path;
    int fd;
    uint64_t bytes, data; /* size of the file, where the data begins */
    int64_t n;
    bs_safetensors_tensor *tensor; /* [n], by offset */
    char *text;                    /* their names */
    bsi_names names;
    int n_meta;
    const char **meta; /* [2 * n_meta]: keys and values of __metadata__, which lie in meta_text */
    char *meta_text;
};

/* Narrowest first, as the format's own writer orders them. */
static const bsi_format formats[] = {{"BOOL", 8, BS_DTYPE_COUNT},
                                     {"F4", 4, BS_DTYPE_COUNT},
                                     {"F6_E2M3", 6, BS_DTYPE_COUNT},
                                     {"F6_E3M2", 6, BS_DTYPE_COUNT},
                                     {"U8", 8, BS_DTYPE_U8},
                                     {"I8", 8, BS_DTYPE_COUNT},
                                     {"F8_E5M2", 8, BS_DTYPE_COUNT},
                                     {"F8_E4M3", 8, BS_DTYPE_COUNT},
                                     {"F8_E8M0", 8, BS_DTYPE_COUNT},
                                     {"F8_E4M3FNUZ", 8, BS_DTYPE_COUNT},
                                     {"F8_E5M2FNUZ", 8, BS_DTYPE_COUNT},
                                     {"I16", 16, BS_DTYPE_COUNT},
                                     {"U16", 16, BS_DTYPE_COUNT},
                                     {"F16", 16, BS_DTYPE_F16},
                                     {"BF16", 16, BS_DTYPE_BF16},
                                     {"I32", 32, BS_DTYPE_I32},
                                     {"U32", 32, BS_DTYPE_COUNT},
                                     {"F32", 32, BS_DTYPE_F32},
                                     {"C64", 64, BS_DTYPE_COUNT},
                                     {"F64", 64, BS_DTYPE_F64},
                                     {"I64", 64, BS_DTYPE_I64},
                                     {"U64", 64, BS_DTYPE_COUNT}};

const bsi_format *bsi_format_named(const char *name)
{
    for (size_t i = 0; i < BSI_COUNT(formats); i++)
        if (strcmp(formats[i].name, name) == 0)
            return &formats[i];
    return NULL;
}

const bsi_format *bsi_format_of(bs_dtype t)
{
    for (size_t i = 0; i < BSI_COUNT(formats); i++)
        if (formats[i].dtype == t)
            return &formats[i];
    return NULL;
}

/* ---- what else the file may be ---------------------------------------------------------------- */

static bool begins(const char *head, size_t n, const char *with)
{
    size_t k = strlen(with);
    return n >= k && strncasecmp(head, with, k) == 0;
}

/* The file failed the first checks: tell the user what it looks like and what to do. rule: the
   check. */
static bs_status not_safetensors(const bs_safetensors *st, const char *rule)
{
    char buf[256] = "";
    size_t n = (size_t)BSI_MIN(st->bytes, sizeof buf - 1);
    const char *p = buf, *is = NULL, *todo = NULL;
    BSI_TRY(bsi_read_all(st->fd, st->path, buf, n, 0));
    const char *text = begins(buf, n, "\xEF\xBB\xBF") ? buf + 3 : buf;
    while (text < buf + n && isspace((unsigned char)*text))
        text++;
    size_t left = n - (size_t)(text - buf);

    if (n == 0) {
        is = "empty";
        todo = "download it again";
    } else if (begins(p, n, "version https://git-lfs")) {
        is = "a Git LFS pointer, not the data";
        todo = "run 'git lfs pull' in its repository";
    } else if (begins(text, left, "<!DOCTYPE") || begins(text, left, "<html")) {
        is = "an HTML page, perhaps a login or error page";
        todo = "download it again";
    } else if (n >= 4 && memcmp(p, "GGUF", 4) == 0) {
        is = "a GGUF file";
        todo = "use the original checkpoint in safetensors";
    } else if (n >= 4 && (memcmp(p, "PK\3\4", 4) == 0 || (p[0] == '\x80' && p[1] >= 2 && p[1] <= 5))) {
        is = "a pickled PyTorch checkpoint (.bin, .pt)";
        todo = "convert it to safetensors";
    } else if (left && (*text == '{' || *text == '[')) {
        is = "JSON text";
        todo = "name the shards, not the index or the configuration";
    }
    if (is)
        return bsi_fail(BS_FORMAT, "file '%s' is %s: %s", st->path, is, todo);
    return bsi_fail(BS_FORMAT, "file '%s' is not a safetensors file: %s", st->path, rule);
}

/* ---- header ------------------------------------------------------------------------------------ */

/* Every message about one tensor: "file 'x': tensor 'y': rule". */
static bs_status bad(const bs_safetensors *st, const char *name, const char *fmt, ...) BSI_PRINTF(3, 4);
static bs_status bad(const bs_safetensors *st, const char *name, const char *fmt, ...)
{
    char rule[320];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(rule, sizeof rule, fmt, ap);
    va_end(ap);
    return bsi_fail(BS_FORMAT, "file '%s': tensor '%.*s': %s", st->path, NAME_SHOWN, name, rule);
}

static bs_status unknown_dtype(const bs_safetensors *st, const char *name, const char *dtype)
{
    char known[256] = "";
    for (size_t i = 0; i < BSI_COUNT(formats); i++) {
        size_t n = strlen(known);
        snprintf(known + n, sizeof known - n, "%s%s", i ? " " : "", formats[i].name);
    }
    return bad(st, name, "unknown dtype '%.40s'; known are %s", dtype, known);
}

static bs_status parse_shape(const bs_safetensors *st, const cJSON *v, bs_safetensors_tensor *t)
{
    if (!cJSON_IsArray(v))
        return bad(st, t->name, "'shape' is not an array");
    for (const cJSON *d = v->child; d; d = d->next) {
        uint64_t n;
        /* JSON numbers are doubles for the parser: above 2^53 - 1 the value might not be the one in
           the text. */
        if (!bsi_json_uint(d, &n))
            return bad(st, t->name, "dimension %d is not an integer from 0 to 2^53 - 1", t->ndim + 1);
        if (t->ndim == BS_MAX_DIMS)
            return bad(st, t->name, "more than %d dimensions", BS_MAX_DIMS);
        t->dim[t->ndim++] = (int64_t)n;
    }
    return BS_OK;
}

static bs_status parse_offsets(const bs_safetensors *st, const cJSON *v, bs_safetensors_tensor *t)
{
    uint64_t begin, end, size = st->bytes - st->data;
    if (!cJSON_IsArray(v) || cJSON_GetArraySize(v) != 2 || !bsi_json_uint(v->child, &begin) ||
        !bsi_json_uint(v->child->next, &end))
        return bad(st, t->name, "'data_offsets' is not a pair of integers from 0 to 2^53 - 1");
    if (begin > end)
        return bad(st, t->name, "data_offsets [%llu, %llu) end before they begin",
                   (unsigned long long)begin, (unsigned long long)end);
    if (end > size)
        return bad(
            st, t->name,
            "data ends at byte %llu of %llu data bytes: the file is truncated or damaged, download "
            "it again",
            (unsigned long long)end, (unsigned long long)size);
    t->offset = st->data + begin; /* no wrap: begin is inside the file */
    t->bytes = end - begin;
    return BS_OK;
}

static bs_status check_size(const bs_safetensors *st, const bs_safetensors_tensor *t, unsigned bits)
{
    size_t want = bits; /* and not bytes: two F4 share one */
    for (int i = 0; i < t->ndim; i++)
        if (!bsi_mul_size(want, (size_t)t->dim[i], &want))
            return bad(st, t->name, "the product of its dimensions overflows");
    if (want % 8)
        return bad(st, t->name, "%zu bits of %s are not whole bytes", want, t->dtype_name);
    if (want / 8 != t->bytes)
        return bad(st, t->name, "shape and dtype %s make %zu bytes, data_offsets give %llu",
                   t->dtype_name, want / 8, (unsigned long long)t->bytes);
    return BS_OK;
}

/* t->name is set. Keys that the format does not know are ignored, as its own reader does. */
static bs_status parse_tensor(const bs_safetensors *st, const cJSON *v, bs_safetensors_tensor *t)
{
    const cJSON *dtype = NULL, *shape = NULL, *offsets = NULL;
    if (!cJSON_IsObject(v))
        return bad(st, t->name, "its description is not an object");
    for (const cJSON *c = v->child; c; c = c->next) {
        const cJSON **to = strcmp(c->string, "dtype") == 0          ? &dtype
                           : strcmp(c->string, "shape") == 0        ? &shape
                           : strcmp(c->string, "data_offsets") == 0 ? &offsets
                                                                    : NULL;
        if (to && *to)
            return bad(st, t->name, "'%s' is given twice", c->string);
        if (to)
            *to = c;
    }
    if (!dtype || !shape || !offsets)
        return bad(st, t->name, "'%s' is missing",
                   !dtype   ? "dtype"
                   : !shape ? "shape"
                            : "data_offsets");
    if (!cJSON_IsString(dtype))
        return bad(st, t->name, "'dtype' is not a string");
    const bsi_format *f = bsi_format_named(dtype->valuestring);
    if (!f)
        return unknown_dtype(st, t->name, dtype->valuestring);
    t->dtype_name = f->name;
    t->dtype = f->dtype;
    BSI_TRY(parse_shape(st, shape, t));
    BSI_TRY(parse_offsets(st, offsets, t));
    return check_size(st, t, f->bits);
}

/* Copies one string of the metadata to *to. */
static const char *keep(char **to, const char *s)
{
    size_t n = strlen(s) + 1;
    const char *at = memcpy(*to, s, n);
    *to += n;
    return at;
}

static bs_status take_metadata(bs_safetensors *st, const cJSON *v)
{
    size_t room = 0;
    for (const cJSON *c = v->child; c; c = c->next, st->n_meta++)
        room += strlen(c->string) + strlen(c->valuestring) + 2;
    if (!(st->meta = bsi_alloc(BS_TAG_HEADER, 2 * (size_t)st->n_meta * sizeof *st->meta)) ||
        !(st->meta_text = bsi_alloc(BS_TAG_HEADER, room)))
        return BS_NOMEM;
    char *to = st->meta_text;
    int i = 0;
    for (const cJSON *c = v->child; c; c = c->next) {
        st->meta[i++] = keep(&to, c->string);
        st->meta[i++] = keep(&to, c->valuestring);
    }
    return BS_OK;
}

static bs_status read_metadata(bs_safetensors *st, const cJSON *v)
{
    bsi_names seen;
    bs_status ret = BS_OK;
    if (!cJSON_IsObject(v))
        return bsi_fail(BS_FORMAT, "file '%s': __metadata__ is not an object", st->path);
    BSI_TRY(bsi_names_init(&seen, (size_t)cJSON_GetArraySize(v)));
    for (const cJSON *c = v->child; c && ret == BS_OK; c = c->next) {
        if (!cJSON_IsString(c))
            ret = bsi_fail(BS_FORMAT, "file '%s': __metadata__ '%.*s' is not a string", st->path,
                           NAME_SHOWN, c->string);
        else if (!bsi_names_add(&seen, c->string, 0))
            ret = bsi_fail(BS_FORMAT, "file '%s': __metadata__ '%.*s' is given twice", st->path,
                           NAME_SHOWN, c->string);
    }
    bsi_names_free(&seen);
    return ret == BS_OK ? take_metadata(st, v) : ret;
}

static int by_offset(const void *x, const void *y)
{
    const bs_safetensors_tensor *a = x, *b = y;
    if (a->offset != b->offset)
        return a->offset < b->offset ? -1 : 1;
    if (a->bytes != b->bytes)
        return a->bytes < b->bytes ? -1 : 1;
    return a->name < b->name ? -1 : a->name > b->name; /* names lie in header order */
}

/* The tensors, in file order, must cover the data without hole or overlap. The format demands it,
   so that no file can be something else besides ("polyglot files", README of safetensors). An empty
   tensor stands before the one that begins at the same byte (by_offset), else the next would seem
   to overlap. */
static bs_status check_cover(const bs_safetensors *st)
{
    uint64_t at = st->data;
    for (int64_t i = 0; i < st->n; i++) {
        const bs_safetensors_tensor *t = &st->tensor[i];
        if (t->offset != at)
            return bad(st, t->name, "begins at data byte %llu; %s %llu",
                       (unsigned long long)(t->offset - st->data),
                       t->offset < at ? "it overlaps the tensor that ends at"
                                      : "there is a hole behind the tensor that ends at",
                       (unsigned long long)(at - st->data));
        at += t->bytes;
    }
    if (at != st->bytes)
        return bsi_fail(BS_FORMAT,
                        "file '%s': its tensors end at byte %llu, the file at %llu: it is damaged, "
                        "download it again",
                        st->path, (unsigned long long)at, (unsigned long long)st->bytes);
    return BS_OK;
}

/* Copies the names out of the tree, so that it need not stay. */
static bs_status take_names(bs_safetensors *st, const cJSON *root)
{
    size_t room = 0;
    for (const cJSON *c = root->child; c; c = c->next, st->n++)
        room += strlen(c->string) + 1; /* no overflow: all of it lies in the header text */
    if (!(st->tensor = bsi_alloc(BS_TAG_HEADER, (size_t)st->n * sizeof *st->tensor)) ||
        !(st->text = bsi_alloc(BS_TAG_HEADER, room)))
        return BS_NOMEM;
    return BS_OK;
}

static bs_status walk(bs_safetensors *st, const cJSON *root)
{
    bool metadata = false, sorted = true;
    if (!cJSON_IsObject(root))
        return not_safetensors(st, "its header is not a JSON object");
    BSI_TRY(take_names(st, root));
    char *to = st->text;
    st->n = 0;
    for (const cJSON *c = root->child; c; c = c->next) {
        if (strcmp(c->string, "__metadata__") == 0) {
            if (metadata)
                return bsi_fail(BS_FORMAT, "file '%s': __metadata__ is given twice", st->path);
            metadata = true;
            if (cJSON_IsNull(c))
                continue; /* as the format's own reader takes it: there is none */
            BSI_TRY(read_metadata(st, c));
            continue;
        }
        size_t n = strlen(c->string) + 1;
        bs_safetensors_tensor *t = &st->tensor[st->n];
        t->name = memcpy(to, c->string, n);
        to += n;
        BSI_TRY(parse_tensor(st, c, t));
        sorted = sorted && (st->n == 0 || by_offset(t - 1, t) < 0);
        st->n++;
    }
    if (!sorted)
        qsort(st->tensor, (size_t)st->n, sizeof *st->tensor, by_offset);
    BSI_TRY(bsi_names_init(&st->names, (size_t)st->n));
    /* cJSON keeps both entries of a duplicate key; the format forbids them. */
    for (int64_t i = 0; i < st->n; i++)
        if (!bsi_names_add(&st->names, st->tensor[i].name, i))
            return bad(st, st->tensor[i].name, "is given twice");
    return check_cover(st);
}

static bs_status read_header(bs_safetensors *st)
{
    unsigned char head[9];
    uint64_t n = 0;
    bs_json json = {0};
    if (st->bytes < 8)
        return not_safetensors(st, "it is shorter than 8 bytes");
    BSI_TRY(bsi_read_all(st->fd, st->path, head, (size_t)BSI_MIN(st->bytes, sizeof head), 0));
    for (int i = 7; i >= 0; i--)
        n = n << 8 | head[i];
    /* The limit and the brace are rules of the format. They come before anything is allocated, so a
       file of another kind, whose first 8 bytes are any number, costs nothing. */
    if (n > BSI_HEADER_LIMIT)
        return not_safetensors(st, "its header would be larger than 100000000 bytes");
    if (n == 0 || (st->bytes > 8 && head[8] != '{'))
        return not_safetensors(st, "its header does not begin with '{'");
    if (n > st->bytes - 8)
        return bsi_fail(
            BS_FORMAT,
            "file '%s' has %llu bytes, its header alone %llu: it is truncated, download it again",
            st->path, (unsigned long long)st->bytes, (unsigned long long)n + 8);

    st->data = n + 8;
    char *text = bsi_alloc(BS_TAG_HEADER, (size_t)n);
    if (!text)
        return BS_NOMEM;
    bs_status ret = bsi_read_all(st->fd, st->path, text, (size_t)n, 8);
    if (ret == BS_OK) {
        char what[320];
        snprintf(what, sizeof what, "file '%.280s': header", st->path);
        ret = bs_json_parse(text, (size_t)n, &bsi_json_header, what, &json);
    }
    bsi_free(text);
    if (ret == BS_OK)
        ret = walk(st, json.root);
    bs_json_end(&json);
    return ret;
}

/* ---- public ------------------------------------------------------------------------------------- */

bs_status bs_safetensors_open(const char *path, bs_safetensors **out)
{
    struct stat info;
    *out = NULL;
    bs_safetensors *st = bsi_alloc(BS_TAG_HEADER, sizeof *st);
    if (!st)
        return BS_NOMEM;
    st->fd = -1;
    bs_status ret = BS_NOMEM;
    if (!(st->path = bsi_strdup(BS_TAG_HEADER, path)))
        goto done;
    if ((ret = bsi_open_regular(path, 0, &info, &st->fd, NULL)) != BS_OK)
        goto done;
    st->bytes = (uint64_t)info.st_size;
    ret = read_header(st);
done:
    if (ret == BS_OK)
        *out = st;
    else
        bs_safetensors_close(st);
    return ret;
}

void bs_safetensors_close(bs_safetensors *st)
{
    if (!st)
        return;
    if (st->fd >= 0)
        close(st->fd); /* read only: nothing to lose */
    bsi_names_free(&st->names);
    bsi_free(st->tensor);
    bsi_free(st->text);
    bsi_free(st->meta);
    bsi_free(st->meta_text);
    bsi_free(st->path);
    bsi_free(st);
}

int64_t bs_safetensors_count(const bs_safetensors *st)
{
    return st->n;
}

const bs_safetensors_tensor *bs_safetensors_at(const bs_safetensors *st, int64_t i)
{
    return i >= 0 && i < st->n ? &st->tensor[i] : NULL;
}

const bs_safetensors_tensor *bs_safetensors_find(const bs_safetensors *st, const char *name)
{
    return bs_safetensors_at(st, bsi_names_find(&st->names, name));
}

const char *bs_safetensors_path(const bs_safetensors *st)
{
    return st->path;
}

uint64_t bs_safetensors_file_bytes(const bs_safetensors *st)
{
    return st->bytes;
}

const char *bs_safetensors_meta(const bs_safetensors *st, int i, const char **value)
{
    if (i < 0 || i >= st->n_meta)
        return NULL;
    *value = st->meta[2 * i + 1];
    return st->meta[2 * i];
}

bs_status bsi_safetensors_bytes(const bs_safetensors *st, const bs_safetensors_tensor *t, uint64_t at,
                                void *to, size_t n)
{
    return bsi_read_all(st->fd, st->path, to, n, t->offset + at);
}

bs_status bs_safetensors_read(bs_safetensors *st, const char *name, bs_array **out)
{
    *out = NULL;
    const bs_safetensors_tensor *t = bs_safetensors_find(st, name);
    if (!t)
        return bsi_fail(BS_ARG, "file '%s' has no tensor '%.*s'", st->path, NAME_SHOWN, name);
    if (t->dtype == BS_DTYPE_COUNT)
        return bsi_fail(BS_DTYPE, "file '%s': tensor '%.*s' is stored as %s, which arrays cannot hold",
                        st->path, NAME_SHOWN, name, t->dtype_name);
    bs_array *a;
    BSI_TRY(bs_array_new(t->dtype, t->ndim, t->dim, &a));
    bs_status ret = bsi_read_all(st->fd, st->path, a->data, a->bytes, t->offset);
    if (ret == BS_OK)
        *out = a;
    else
        bs_array_free(a);
    return bsi_wrap(ret, "tensor '%.*s'", NAME_SHOWN, name);
}
