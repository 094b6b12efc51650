/* SPDX-License-Identifier: Apache-2.0 */
/*
** pretok.c: the pre-tokenizer of a tokenizer file, a flat list of steps that cut a text into words or
** change its spaces. All the kinds that only cut (Split, Digits, Punctuation, Whitespace, ByteLevel's
** own expression) are one step: a pattern and what to do with its matches. Reading is done at open;
** running touches only the caller's work.
*/
#include "text/text.h"

#include <string.h>

/* The expression of the first byte-level tokenizer (Radford et al. 2019), ByteLevel's own. */
#define BYTE_LEVEL_REGEX                                                                               \
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"

/* Word characters as Whitespace means them: unlike Oniguruma's \w with the joiners. */
#define WORD "\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}\\x{200C}\\x{200D}"

/* ---- cutting --------------------------------------------------------------------------------- */

static bs_status put(bsi_ranges *r, size_t first, size_t end)
{
    if (r->n == r->cap) {
        void *p = r->p;
        bs_status st = bsi_grow(&p, &r->cap, r->n + 1, sizeof *r->p);
        r->p = p;
        BSI_TRY(st);
    }
    r->p[r->n++] = (bsi_range){(uint32_t)first, (uint32_t)end};
    return BS_OK;
}

typedef struct cutter { /* of one word; what it puts out begins at `from` */
    bsi_behavior behavior;
    bsi_ranges *out;
    size_t from;
    bool last; /* the part before this one was a match */
    bsi_range waiting;
    bool has_waiting; /* merged_next: a match that waits for what follows */
} cutter;

static bs_status part(cutter *c, size_t first, size_t end, bool match)
{
    bsi_ranges *out = c->out;
    bool last = c->last, have = out->n > c->from;
    c->last = match;
    switch (c->behavior) {
    case BSI_REMOVED:
        return match ? BS_OK : put(out, first, end);
    case BSI_ISOLATED:
        return put(out, first, end);
    case BSI_CONTIGUOUS:
        if (have && last == match) {
            out->p[out->n - 1].end = (uint32_t)end;
            return BS_OK;
        }
        return put(out, first, end);
    case BSI_MERGED_PREVIOUS: /* of two matches in a row the second stands alone, as in the reference */
        if (match && !last && have) {
            out->p[out->n - 1].end = (uint32_t)end;
            return BS_OK;
        }
        return put(out, first, end);
    case BSI_MERGED_NEXT:
        if (c->has_waiting && match)
            BSI_TRY(put(out, c->waiting.first, c->waiting.end));
        else if (c->has_waiting)
            first = c->waiting.first;
        c->has_waiting = match;
        c->waiting = (bsi_range){(uint32_t)first, (uint32_t)end};
        return match ? BS_OK : put(out, first, end);
    }
    return bsi_fail(BS_INTERNAL, "split behavior %d", (int)c->behavior);
}

static bs_status cut_word(const bsi_pretok *op, bs_tok_work *w, const bsi_view *v, bsi_range r,
                          bsi_ranges *out)
{
    cutter c = {.behavior = op->behavior, .out = out, .from = out->n};
    size_t done = 0, n = r.end - r.first, first, end;
    bool found;
    bsi_scan scan = bsi_scan_begin(&op->pattern, &w->matcher, v->p + r.first, n);
    for (;;) {
        BSI_TRY(bsi_scan_next(&scan, &found, &first, &end));
        if (!found)
            break;
        if (first > done)
            BSI_TRY(part(&c, r.first + done, r.first + first, op->invert));
        BSI_TRY(part(&c, r.first + first, r.first + end, !op->invert));
        done = end;
    }
    if (done < n)
        BSI_TRY(part(&c, r.first + done, r.end, op->invert));
    if (c.has_waiting)
        BSI_TRY(put(out, c.waiting.first, c.waiting.end));
    /* A pattern may match nothing, and an empty word has no ids. Compacted in place, from c.from
       on: what lies before belongs to earlier words. */
    size_t kept = c.from;
    for (size_t i = c.from; i < out->n; i++)
        if (out->p[i].end > out->p[i].first)
            out->p[kept++] = out->p[i];
    out->n = kept;
    return BS_OK;
}

/* ---- spaces ---------------------------------------------------------------------------------- */

static bool begins(const char *s, size_t n, const char *with, size_t m)
{
    return n >= m && !memcmp(s, with, m);
}

/* One word, with its spaces replaced, at the end of out. */
static bs_status space_word(const bsi_pretok *op, const bs_tok_work *w, const bsi_view *v, bsi_range r,
                            bsi_text *out)
{
    bool meta = op->kind == BSI_PRETOK_METASPACE;
    unsigned len;
    const char *s = v->p + r.first;
    size_t n = r.end - r.first;
    bool has = begins(s, n, op->text, op->n) || (meta && *s == ' ') || bsi_work_goes_on(w, v, r.first);
    /* What is put in front has no bytes of its own in the text: it is given the span of the first
       character. */
    bsi_utf8_get(s, &len);
    bs_tok_span at = bsi_view_span(v, r.first, r.first + len);
    if (!has && (op->prepend == BSI_PREPEND_ALWAYS ||
                 (op->prepend == BSI_PREPEND_FIRST && !at.first && !w->inside)))
        BSI_TRY(bsi_text_put(out, op->text, op->n, at));
    for (size_t i = 0, next; i < n; i = next) {
        const char *space = meta ? memchr(s + i, ' ', n - i) : NULL;
        next = space ? (size_t)(space - s) : n;
        BSI_TRY(bsi_text_copy(out, v, r.first + i, r.first + next));
        if (space) {
            at = bsi_view_span(v, r.first + next, r.first + next + 1);
            BSI_TRY(bsi_text_put(out, op->text, op->n, at));
            next++;
        }
    }
    return BS_OK;
}

static bs_status change_spaces(const bsi_pretok *op, bs_tok_work *w, bsi_view *v)
{
    bsi_text *out = bsi_work_other(w, w->pretok, v);
    for (size_t i = 0; i < w->words.n; i++) {
        /* Spaces change word by word, so that a word gets its own prefix and no word runs into the
           next; its range moves to the new text. */
        bsi_range r = w->words.p[i];
        size_t first = out->n;
        BSI_TRY(space_word(op, w, v, r, out));
        w->words.p[i] = (bsi_range){(uint32_t)first, (uint32_t)out->n};
    }
    *v = bsi_view_of(out);
    return BS_OK;
}

bs_status bsi_pretoks_run(const bsi_pretoks *p, bs_tok_work *w, bsi_view *v)
{
    w->words.n = 0;
    if (v->n)
        BSI_TRY(put(&w->words, 0, v->n));
    for (size_t i = 0; i < p->n; i++) {
        const bsi_pretok *op = &p->op[i];
        if (op->kind != BSI_PRETOK_SPLIT) {
            BSI_TRY(change_spaces(op, w, v));
            continue;
        }
        w->spare.n = 0;
        for (size_t k = 0; k < w->words.n; k++)
            BSI_TRY(cut_word(op, w, v, w->words.p[k], &w->spare));
        /* A step reads all words and puts out any number of them, so it cannot work in place; the
           two lists change roles and keep their memory. */
        bsi_ranges swap = w->words;
        w->words = w->spare;
        w->spare = swap;
    }
    return BS_OK;
}

/* ---- reading --------------------------------------------------------------------------------- */

static bs_status add(bsi_pretoks *out, bsi_pretok_kind kind, bsi_pretok **op)
{
    void *p = out->op;
    /* A later step would see the characters that stand for bytes in the reference, and the bytes
       themselves here. */
    if (out->byte_level)
        return bsi_fail(BS_UNSUPPORTED, "pre_tokenizer ByteLevel is not the last step");
    bs_status st = bsi_grow(&p, &out->cap, out->n + 1, sizeof **op);
    out->op = p;
    BSI_TRY(st);
    *op = &out->op[out->n++];
    **op = (bsi_pretok){.kind = kind};
    return BS_OK;
}

static bs_status add_spaces(bsi_pretoks *out, bsi_pretok_kind kind, const char *text,
                            bsi_prepend prepend)
{
    bsi_pretok *op = NULL;
    BSI_TRY(add(out, kind, &op));
    op->prepend = prepend;
    op->n = strlen(text);
    op->text = bsi_strdup(BS_TAG_MISC, text);
    return op->text ? BS_OK : BS_NOMEM;
}

static bs_status add_regex(bsi_pretoks *out, const char *where, const char *regex,
                           bsi_behavior behavior, bool invert)
{
    bsi_pretok *op = NULL;
    BSI_TRY(add(out, BSI_PRETOK_SPLIT, &op));
    op->behavior = behavior;
    op->invert = invert;
    return bsi_pattern_regex(regex, where, &op->pattern);
}

static bs_status read_behavior(const cJSON *o, const char *where, bsi_behavior *out)
{
    static const char *const names[] = {"Removed", "Isolated", "MergedWithPrevious", "MergedWithNext",
                                        "Contiguous"};
    const char *name = NULL;
    BSI_TRY(bsi_tokjson_text(o, where, "behavior", &name));
    for (size_t i = 0; name && i < BSI_COUNT(names); i++)
        if (!strcmp(name, names[i])) {
            *out = (bsi_behavior)i;
            return BS_OK;
        }
    return bsi_fail(BS_UNSUPPORTED, "%s: behavior '%.60s' is not known", where,
                    name ? name : "(missing)");
}

static bs_status read_split(bsi_pretoks *out, const cJSON *o)
{
    static const char *const keys[] = {"type", "pattern", "behavior", "invert", NULL};
    static const char where[] = "pre_tokenizer Split";
    bsi_behavior behavior = BSI_ISOLATED;
    bsi_pretok *op = NULL;
    bool invert = false;
    BSI_TRY(bsi_tokjson_only(o, where, keys));
    BSI_TRY(read_behavior(o, where, &behavior));
    BSI_TRY(bsi_tokjson_bool(o, where, "invert", &invert));
    BSI_TRY(add(out, BSI_PRETOK_SPLIT, &op));
    op->behavior = behavior;
    op->invert = invert;
    return bsi_pattern_read(cJSON_GetObjectItemCaseSensitive(o, "pattern"), where, &op->pattern);
}

static bs_status read_byte_level(bsi_pretoks *out, const cJSON *o)
{
    static const char *const keys[] = {"type", "add_prefix_space", "trim_offsets", "use_regex", NULL};
    static const char where[] = "pre_tokenizer ByteLevel";
    bool space = false, regex = true;
    BSI_TRY(bsi_tokjson_only(o, where, keys));
    BSI_TRY(bsi_tokjson_bool(o, where, "add_prefix_space", &space));
    BSI_TRY(bsi_tokjson_bool(o, where, "use_regex", &regex));
    if (space)
        BSI_TRY(add_spaces(out, BSI_PRETOK_SPACE_FIRST, " ", BSI_PREPEND_ALWAYS));
    if (regex)
        BSI_TRY(add_regex(out, where, BYTE_LEVEL_REGEX, BSI_ISOLATED, false));
    if (out->byte_level)
        return bsi_fail(BS_UNSUPPORTED, "%s is there twice", where);
    out->byte_level = true;
    return BS_OK;
}

static bs_status read_cutter(bsi_pretoks *out, const cJSON *o, const char *type)
{
    static const char *const digits[] = {"type", "individual_digits", NULL};
    static const char *const punctuation[] = {"type", "behavior", NULL};
    static const char *const plain[] = {"type", NULL};
    bool each = false;
    bsi_behavior behavior = BSI_ISOLATED;
    switch (type[0]) {
    case 'D':
        BSI_TRY(bsi_tokjson_only(o, "pre_tokenizer Digits", digits));
        BSI_TRY(bsi_tokjson_bool(o, "pre_tokenizer Digits", "individual_digits", &each));
        return add_regex(out, "pre_tokenizer Digits", each ? "\\p{N}" : "\\p{N}+", BSI_ISOLATED, false);
    case 'P':
        BSI_TRY(bsi_tokjson_only(o, "pre_tokenizer Punctuation", punctuation));
        if (cJSON_HasObjectItem(o, "behavior"))
            BSI_TRY(read_behavior(o, "pre_tokenizer Punctuation", &behavior));
        return add_regex(out, "pre_tokenizer Punctuation", "[!-/:-@\\[-`{-~\\p{P}]", behavior, false);
    default:
        BSI_TRY(bsi_tokjson_only(o, "pre_tokenizer Whitespace", plain));
        /* WhitespaceSplit removes spaces. Whitespace, the shorter name, keeps its matches (invert). */
        return add_regex(out, "pre_tokenizer Whitespace",
                         strlen(type) > 10 ? "\\s" : "[" WORD "]+|[^" WORD "\\s]+", BSI_REMOVED,
                         strlen(type) <= 10);
    }
}

bs_status bsi_metaspace_read(const cJSON *o, const char *where, const char **text, bsi_prepend *prepend,
                             bool *split)
{
    static const char *const keys[] = {
        "type", "replacement", "prepend_scheme", "add_prefix_space", "str_rep", "split", NULL};
    const char *scheme = NULL;
    bool space = true;
    unsigned len;
    BSI_TRY(bsi_tokjson_only(o, where, keys));
    *text = "\xE2\x96\x81";
    *split = true;
    BSI_TRY(bsi_tokjson_text(o, where, "replacement", text));
    BSI_TRY(bsi_tokjson_bool(o, where, "split", split));
    BSI_TRY(bsi_tokjson_bool(o, where, "add_prefix_space", &space));
    BSI_TRY(bsi_tokjson_text(o, where, "prepend_scheme", &scheme));
    if (!**text || (bsi_utf8_get(*text, &len), strlen(*text) != len))
        return bsi_fail(BS_FORMAT, "%s: replacement '%.20s' is not one character", where, *text);
    if (!scheme)
        scheme = space ? "always" : "never";
    *prepend = !strcmp(scheme, "always")  ? BSI_PREPEND_ALWAYS
               : !strcmp(scheme, "first") ? BSI_PREPEND_FIRST
                                          : BSI_PREPEND_NEVER;
    if (*prepend == BSI_PREPEND_NEVER && strcmp(scheme, "never"))
        return bsi_fail(BS_UNSUPPORTED, "%s: prepend_scheme '%.60s' is not known", where, scheme);
    return BS_OK;
}

static bs_status read_metaspace(bsi_pretoks *out, const cJSON *o)
{
    const char *text;
    bsi_prepend prepend;
    bool split;
    bsi_pretok *op = NULL;
    BSI_TRY(bsi_metaspace_read(o, "pre_tokenizer Metaspace", &text, &prepend, &split));
    BSI_TRY(add_spaces(out, BSI_PRETOK_METASPACE, text, prepend));
    out->needs_spans |= prepend == BSI_PREPEND_FIRST;
    if (!split)
        return BS_OK;
    BSI_TRY(add(out, BSI_PRETOK_SPLIT, &op));
    op->behavior = BSI_MERGED_NEXT;
    return bsi_pattern_literal(text, &op->pattern);
}

bs_status bsi_pretoks_read(bsi_pretoks *out, const cJSON *o)
{
    static const char *const keys[] = {"type", "pretokenizers", NULL};
    static const char *const cutters[] = {"Digits", "Punctuation", "Whitespace", "WhitespaceSplit"};
    if (!o || cJSON_IsNull(o))
        return BS_OK;
    const char *type = bsi_tokjson_type(o);
    if (!strcmp(type, "Sequence")) {
        const cJSON *list = cJSON_GetObjectItemCaseSensitive(o, "pretokenizers"), *item;
        BSI_TRY(bsi_tokjson_only(o, "pre_tokenizer Sequence", keys));
        if (!cJSON_IsArray(list))
            return bsi_fail(BS_FORMAT, "pre_tokenizer Sequence: 'pretokenizers' is not an array");
        cJSON_ArrayForEach(item, list) BSI_TRY(bsi_pretoks_read(out, item));
        return BS_OK;
    }
    if (!strcmp(type, "Split"))
        return read_split(out, o);
    if (!strcmp(type, "ByteLevel"))
        return read_byte_level(out, o);
    if (!strcmp(type, "Metaspace"))
        return read_metaspace(out, o);
    for (size_t i = 0; i < BSI_COUNT(cutters); i++)
        if (!strcmp(type, cutters[i]))
            return read_cutter(out, o, type);
    return bsi_fail(BS_UNSUPPORTED, "pre_tokenizer '%.60s' is not supported", type);
}

void bsi_pretoks_free(bsi_pretoks *p)
{
    for (size_t i = 0; i < p->n; i++) {
        bsi_pattern_free(&p->op[i].pattern);
        bsi_free(p->op[i].text);
    }
    bsi_free(p->op);
    *p = (bsi_pretoks){0};
}
