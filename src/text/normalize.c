/* SPDX-License-Identifier: Apache-2.0 */
/*
** normalize.c: the normalizer of a tokenizer file, a flat list of steps from one text to another. The
** Unicode forms work on segments: most characters neither change nor combine, and are copied; a
** character that may is normalized with its neighbours, between two that cannot touch it. Reading is
** done at open; running touches only the caller's work.
*/
#include "text/text.h"

#include <pthread.h>
#include <string.h>

#if BS_HAVE_UTF8PROC
#include <utf8proc.h>

/* Characters below this may be unstable under a normal form; all above are stable. */
#define FORM_END             0x30000
#define FORM_OPTIONS(compat) (UTF8PROC_DECOMPOSE | UTF8PROC_STABLE | ((compat) ? UTF8PROC_COMPAT : 0))

static uint64_t unstable[2][FORM_END / 64]; /* NFC, NFKC */
static pthread_once_t made[2] = {PTHREAD_ONCE_INIT, PTHREAD_ONCE_INIT};

static void mark(uint64_t *bits, int32_t c)
{
    if (c >= 0 && c < FORM_END)
        bits[c / 64] |= UINT64_C(1) << c % 64;
}

/* A character is stable when the form keeps it and nothing before it can absorb it or move past it:
   its combining class is 0 and it is no later part of any decomposition (UAX #15, stable code
   points). A segment may end before a stable character: then it has the normal form that it would
   have in the whole text. The ranges that are left out (surrogates, CJK ideographs) have no
   decompositions. */
static void make_table(int compat)
{
    utf8proc_int32_t part[32];
    uint64_t *bits = unstable[compat];
    for (int32_t c = 0; c < FORM_END; c++) {
        int bound = 0;
        if ((c >= 0xD800 && c < 0xE000) || (c >= 0x3400 && c < 0xA000) || (c >= 0x20000 && c < 0x2F800))
            continue;
        const utf8proc_property_t *p = utf8proc_get_property(c);
        if (p->combining_class)
            mark(bits, c);
        utf8proc_ssize_t n = utf8proc_decompose_char(c, part, 32, FORM_OPTIONS(compat), &bound);
        if (n < 1 || n > 32 || (n == 1 && part[0] == c))
            continue;
        /* A later part may be composed with what stands before it. */
        for (utf8proc_ssize_t i = 1; i < n; i++)
            mark(bits, part[i]);
        n = utf8proc_normalize_utf32(part, n, UTF8PROC_COMPOSE | UTF8PROC_STABLE);
        if (n != 1 || part[0] != c)
            mark(bits, c);
    }
}

static void make_nfc(void)
{
    make_table(0);
}

static void make_nfkc(void)
{
    make_table(1);
}

static bool is_stable(int compat, uint32_t c)
{
    return c >= FORM_END || !(unstable[compat][c / 64] >> c % 64 & 1);
}

/* The canonical ordering of Unicode (D109): marks between two characters of class 0 in the order of
   their combining classes, equal ones as they came. utf8proc swaps neighbours, which takes n * n
   steps for n marks, so a hostile text would stall; counting the classes takes n. */
static bs_status sort_marks(bsi_runes *r)
{
    void *p = r->sorted;
    bs_status st = bsi_grow(&p, &r->sorted_cap, r->n, sizeof *r->sorted);
    r->sorted = p;
    BSI_TRY(st);
    for (size_t i = 0, end; i < r->n; i = end) {
        size_t at[257] = {0};
        bool ordered = true;
        int last = 0;
        for (end = i; end < r->n; end++) {
            int class = (int)utf8proc_get_property(r->p[end])->combining_class & 255;
            if (!class)
                break;
            ordered &= class >= last;
            last = class;
            at[class + 1]++;
        }
        if (end == i)
            end++;
        if (ordered)
            continue;
        for (int class = 1; class <= 256; class ++)
            at[class] += at[class - 1];
        for (size_t k = i; k < end; k++)
            r->sorted[at[utf8proc_get_property(r->p[k])->combining_class & 255]++] = r->p[k];
        memcpy(r->p + i, r->sorted, (end - i) * sizeof *r->p);
    }
    return BS_OK;
}

static bs_status put_runes(bsi_text *out, const int32_t *rune, size_t n, bs_tok_span at)
{
    char utf8[4];
    for (size_t i = 0; i < n; i++)
        BSI_TRY(bsi_text_put(out, utf8, bsi_utf8_put((uint32_t)rune[i], utf8), at));
    return BS_OK;
}

/* Bytes [first, end) of the view in normal form. */
static bs_status form_segment(int compat, bsi_runes *r, const bsi_view *v, size_t first, size_t end,
                              bsi_text *out)
{
    unsigned len;
    r->n = 0;
    for (size_t i = first; i < end; i += len) {
        int bound = 0;
        void *p = r->p;
        /* 32: the longest decomposition of one character has 18 (U+FDFA under NFKC). */
        bs_status st = bsi_grow(&p, &r->cap, r->n + 32, sizeof *r->p);
        r->p = p;
        BSI_TRY(st);
        int32_t c = (int32_t)bsi_utf8_get(v->p + i, &len);
        utf8proc_ssize_t n = utf8proc_decompose_char(c, r->p + r->n, 32, FORM_OPTIONS(compat), &bound);
        if (n < 0 || n > 32)
            return bsi_fail(BS_INTERNAL, "character U+%04X has no decomposition", (unsigned)c);
        r->n += (size_t)n;
    }
    BSI_TRY(sort_marks(r));
    utf8proc_ssize_t n =
        utf8proc_normalize_utf32(r->p, (utf8proc_ssize_t)r->n, UTF8PROC_COMPOSE | UTF8PROC_STABLE);
    if (n < 0)
        return bsi_fail(BS_INTERNAL, "text cannot be composed: %s", utf8proc_errmsg(n));
    size_t same = 0; /* characters in front that did not change keep their own bytes, and their spans */
    while (first < end && same < (size_t)n && (int32_t)bsi_utf8_get(v->p + first, &len) == r->p[same]) {
        BSI_TRY(bsi_text_put(out, v->p + first, len, bsi_view_span(v, first, first + len)));
        first += len;
        same++;
    }
    return put_runes(out, r->p + same, (size_t)n - same, bsi_view_span(v, first, end));
}

static bs_status form(int compat, bs_tok_work *w, bsi_view *v)
{
    size_t i = 0, copied = 0, starter = 0; /* copied: bytes done; starter: the last stable character */
    unsigned len;
    bsi_text *out = bsi_work_other(w, w->norm, v);
    bool changed = false;
    pthread_once(&made[compat], compat ? make_nfkc : make_nfc);
    while (i < v->n) {
        if ((unsigned char)v->p[i] < 0x80 || is_stable(compat, bsi_utf8_get(v->p + i, &len))) {
            starter = i++;
            while (i < v->n && bsi_utf8_is_tail(v->p[i]))
                i++;
            continue;
        }
        /* From the last stable character: what follows may compose with it. */
        size_t first = BSI_MAX(starter, copied);
        while (i < v->n && !is_stable(compat, bsi_utf8_get(v->p + i, &len)))
            i += len;
        BSI_TRY(bsi_text_copy(out, v, copied, first));
        BSI_TRY(form_segment(compat, &w->runes, v, first, i, out));
        copied = i;
        changed = true;
    }
    if (!changed)
        return BS_OK;
    BSI_TRY(bsi_text_copy(out, v, copied, v->n));
    *v = bsi_view_of(out);
    return BS_OK;
}

static bs_status lowercase(bs_tok_work *w, bsi_view *v)
{
    bsi_text *out = bsi_work_other(w, w->norm, v);
    unsigned len;
    for (size_t i = 0; i < v->n; i += len) {
        int32_t c = (int32_t)bsi_utf8_get(v->p + i, &len), to[2] = {utf8proc_tolower(c), 0x307};
        bool dotted = c == 0x130; /* the one character whose small form is two */
        if (dotted)
            to[0] = 'i';
        BSI_TRY(put_runes(out, to, dotted ? 2 : 1, bsi_view_span(v, i, i + len)));
    }
    *v = bsi_view_of(out);
    return BS_OK;
}

#else

static bs_status form(int compat, bs_tok_work *w, bsi_view *v)
{
    (void)compat, (void)w, (void)v;
    return BS_OK; /* not reached: refused when the file was read */
}

static bs_status lowercase(bs_tok_work *w, bsi_view *v)
{
    return form(0, w, v);
}

#endif

static bs_status replace(const bsi_norm *n, bs_tok_work *w, bsi_view *v)
{
    size_t done = 0, first, end;
    bool found;
    bsi_text *out = bsi_work_other(w, w->norm, v);
    bsi_scan scan = bsi_scan_begin(&n->pattern, &w->matcher, v->p, v->n);
    BSI_TRY(bsi_scan_next(&scan, &found, &first, &end));
    if (!found)
        return BS_OK;
    while (found) {
        BSI_TRY(bsi_text_copy(out, v, done, first));
        BSI_TRY(bsi_text_put(out, n->text, n->n, bsi_view_span(v, first, end)));
        done = end;
        BSI_TRY(bsi_scan_next(&scan, &found, &first, &end));
    }
    BSI_TRY(bsi_text_copy(out, v, done, v->n));
    *v = bsi_view_of(out);
    return BS_OK;
}

static bs_status prepend(const bsi_norm *n, bs_tok_work *w, bsi_view *v)
{
    unsigned len;
    if (!v->n || bsi_work_goes_on(w, v, 0))
        return BS_OK;
    bsi_text *out = bsi_work_other(w, w->norm, v);
    bsi_utf8_get(v->p, &len);
    BSI_TRY(bsi_text_put(out, n->text, n->n, bsi_view_span(v, 0, len)));
    BSI_TRY(bsi_text_copy(out, v, 0, v->n));
    *v = bsi_view_of(out);
    return BS_OK;
}

bs_status bsi_norms_run(const bsi_norms *n, bs_tok_work *w, bsi_view *v)
{
    for (size_t i = 0; i < n->n; i++) {
        const bsi_norm *op = &n->op[i];
        BSI_TRY(op->kind == BSI_NORM_PREPEND     ? prepend(op, w, v)
                : op->kind == BSI_NORM_REPLACE   ? replace(op, w, v)
                : op->kind == BSI_NORM_LOWERCASE ? lowercase(w, v)
                                                 : form(op->kind == BSI_NORM_NFKC, w, v));
    }
    return BS_OK;
}

/* ---- reading --------------------------------------------------------------------------------- */

static bs_status add(bsi_norms *out, bsi_norm_kind kind, const char *text, bsi_norm **op)
{
    void *p = out->op;
    bs_status st = bsi_grow(&p, &out->cap, out->n + 1, sizeof **op);
    out->op = p;
    BSI_TRY(st);
    *op = &out->op[out->n];
    **op = (bsi_norm){.kind = kind, .text = bsi_strdup(BS_TAG_MISC, text), .n = strlen(text)};
    if (!(*op)->text)
        return BS_NOMEM;
    out->n++;
    return BS_OK;
}

static bs_status read_unicode(bsi_norms *out, const cJSON *o, const char *type)
{
    static const char *const keys[] = {"type", NULL};
    bsi_norm *op = NULL;
    BSI_TRY(bsi_tokjson_only(o, "normalizer", keys));
    if (!BS_HAVE_UTF8PROC)
        return bsi_fail(BS_UNSUPPORTED,
                        "normalizer '%s' needs utf8proc, which this build lacks (install "
                        "libutf8proc-dev and build again)",
                        type);
    return add(out,
               !strcmp(type, "NFC")    ? BSI_NORM_NFC
               : !strcmp(type, "NFKC") ? BSI_NORM_NFKC
                                       : BSI_NORM_LOWERCASE,
               "", &op);
}

static bs_status read_text(bsi_norms *out, const cJSON *o, bool is_replace)
{
    static const char *const replace_keys[] = {"type", "pattern", "content", NULL};
    static const char *const prepend_keys[] = {"type", "prepend", NULL};
    const char *where = is_replace ? "normalizer Replace" : "normalizer Prepend";
    const char *key = is_replace ? "content" : "prepend", *text = NULL;
    bsi_norm *op = NULL;
    BSI_TRY(bsi_tokjson_only(o, where, is_replace ? replace_keys : prepend_keys));
    BSI_TRY(bsi_tokjson_text(o, where, key, &text));
    if (!text)
        return bsi_fail(BS_FORMAT, "%s: '%s' is missing", where, key);
    BSI_TRY(add(out, is_replace ? BSI_NORM_REPLACE : BSI_NORM_PREPEND, text, &op));
    return is_replace
               ? bsi_pattern_read(cJSON_GetObjectItemCaseSensitive(o, "pattern"), where, &op->pattern)
               : BS_OK;
}

bs_status bsi_norms_read(bsi_norms *out, const cJSON *o)
{
    static const char *const keys[] = {"type", "normalizers", NULL};
    if (!o || cJSON_IsNull(o))
        return BS_OK;
    const char *type = bsi_tokjson_type(o);
    if (!strcmp(type, "Sequence")) {
        const cJSON *list = cJSON_GetObjectItemCaseSensitive(o, "normalizers"), *item;
        BSI_TRY(bsi_tokjson_only(o, "normalizer Sequence", keys));
        if (!cJSON_IsArray(list))
            return bsi_fail(BS_FORMAT, "normalizer Sequence: 'normalizers' is not an array");
        cJSON_ArrayForEach(item, list) BSI_TRY(bsi_norms_read(out, item));
        return BS_OK;
    }
    if (!strcmp(type, "NFC") || !strcmp(type, "NFKC") || !strcmp(type, "Lowercase"))
        return read_unicode(out, o, type);
    if (!strcmp(type, "Replace") || !strcmp(type, "Prepend"))
        return read_text(out, o, type[0] == 'R');
    return bsi_fail(BS_UNSUPPORTED, "normalizer '%.60s' is not supported", type);
}

void bsi_norms_free(bsi_norms *n)
{
    for (size_t i = 0; i < n->n; i++) {
        bsi_pattern_free(&n->op[i].pattern);
        bsi_free(n->op[i].text);
    }
    bsi_free(n->op);
    *n = (bsi_norms){0};
}
