/* SPDX-License-Identifier: Apache-2.0 */
/*
** added.c: tokens that are recognised in text before anything else, leftmost first and longest at a
** place. They are few and short, so a finder is a sorted list: at a byte that begins some token, the
** range of tokens that agree with the text narrows byte by byte. Read at open, searched by any thread.
*/
#include "text/text.h"

#include <stdlib.h>
#include <string.h>

static int compare(const void *a, const void *b)
{
    const bsi_added *x = a, *y = b;
    int c = memcmp(x->text, y->text, BSI_MIN(x->n, y->n));
    return c ? c : (x->n > y->n) - (x->n < y->n);
}

/* The longest token that begins at s. */
static const bsi_added *longest(const bsi_finder *f, const char *s, size_t n)
{
    unsigned char c = (unsigned char)s[0];
    size_t low = f->first[c], high = f->first[c + 1];
    const bsi_added *best = NULL;
    for (size_t depth = 1; low < high; depth++) {
        if (f->token[low].n == depth)
            best = &f->token[low++]; /* the shortest of a range is its first */
        if (depth >= n)
            break;
        c = (unsigned char)s[depth];
        size_t a = low, b = high; /* first token with a byte >= c there, first with a byte > c */
        while (a < b) {
            size_t mid = a + (b - a) / 2;
            if ((unsigned char)f->token[mid].text[depth] < c)
                a = mid + 1;
            else
                b = mid;
        }
        low = a;
        for (b = high; a < b;) {
            size_t mid = a + (b - a) / 2;
            if ((unsigned char)f->token[mid].text[depth] <= c)
                a = mid + 1;
            else
                b = mid;
        }
        high = a;
    }
    return best;
}

static size_t char_before(const char *s, size_t at)
{
    do
        at--;
    while (at > 0 && bsi_utf8_is_tail(s[at]));
    return at;
}

static bool stands_alone(const char *s, size_t n, size_t first, size_t end)
{
    unsigned len;
    return (first == 0 || !bsi_is_word(bsi_utf8_get(s + char_before(s, first), &len))) &&
           (end == n || !bsi_is_word(bsi_utf8_get(s + end, &len)));
}

bsi_found bsi_finder_next(const bsi_finder *f, const char *s, size_t n, size_t at, size_t taken,
                          bool literal)
{
    unsigned len;
    for (size_t i = at; f->n && i < n; i++) {
        unsigned char c = (unsigned char)s[i];
        if (f->first[c] == f->first[c + 1])
            continue;
        const bsi_added *token = longest(f, s + i, n - i);
        if (!token)
            continue;
        bsi_found found = {token, i, i + token->n, i + token->n};
        if ((literal && token->special) || (token->single_word && !stands_alone(s, n, i, found.end))) {
            i = found.next - 1; /* plain text, and no shorter token is looked for in it */
            continue;
        }
        while (token->lstrip && found.first > taken) {
            size_t before = char_before(s, found.first);
            if (before < taken || !bsi_is_space(bsi_utf8_get(s + before, &len)))
                break;
            found.first = before;
        }
        if (token->lstrip && found.first < taken)
            found.first = taken; /* white space that the token before has swallowed */
        while (token->rstrip && found.end < n && bsi_is_space(bsi_utf8_get(s + found.end, &len)))
            found.end += len;
        if (found.first < found.end)
            return found;
        i = found.next - 1;
    }
    return (bsi_found){NULL, n, n, n};
}

void bsi_finder_free(bsi_finder *f)
{
    for (size_t i = 0; i < f->n; i++)
        bsi_free(f->token[i].text);
    bsi_free(f->token);
    *f = (bsi_finder){0};
}

/* ---- reading --------------------------------------------------------------------------------- */

static bs_status add(bs_tok *t, const bsi_added *a, const char *text, size_t n)
{
    bsi_finder *f = a->normalized ? &t->normalized : &t->raw;
    void *p = f->token;
    bs_status st = bsi_grow(&p, &f->cap, f->n + 1, sizeof *a);
    f->token = p;
    BSI_TRY(st);
    bsi_added *to = &f->token[f->n];
    *to = *a;
    to->n = n;
    to->text = bsi_alloc(BS_TAG_MISC, n);
    if (!to->text)
        return BS_NOMEM;
    memcpy(to->text, text, n);
    f->n++;
    return BS_OK;
}

/* A token that is looked for in normalized text is normalized itself. */
static bs_status add_normalized(bs_tok *t, const bsi_added *a, const char *text)
{
    bsi_view v = {.p = text, .n = strlen(text)};
    bs_tok_work *w = NULL;
    BSI_TRY(bs_tok_work_new(t, &w));
    bs_status st = bsi_norms_run(&t->norms, w, &v);
    if (st == BS_OK && v.n)
        st = add(t, a, v.p, v.n);
    bs_tok_work_free(w);
    return st;
}

static bs_status read_one(bs_tok *t, const cJSON *o)
{
    static const char *const keys[] = {"id",     "content",    "single_word", "lstrip",
                                       "rstrip", "normalized", "special",     NULL};
    static const char where[] = "added token";
    bsi_added a = {0};
    const char *text = NULL;
    BSI_TRY(bsi_tokjson_only(o, where, keys));
    BSI_TRY(bsi_tokjson_text(o, where, "content", &text));
    BSI_TRY(bsi_tokjson_bool(o, where, "special", &a.special));
    a.normalized = !a.special;
    BSI_TRY(bsi_tokjson_bool(o, where, "normalized", &a.normalized));
    BSI_TRY(bsi_tokjson_bool(o, where, "lstrip", &a.lstrip));
    BSI_TRY(bsi_tokjson_bool(o, where, "rstrip", &a.rstrip));
    BSI_TRY(bsi_tokjson_bool(o, where, "single_word", &a.single_word));
    const cJSON *id = cJSON_GetObjectItemCaseSensitive(o, "id");
    if (!text || !*text)
        return bsi_fail(BS_FORMAT, "an added token has no content");
    if (!cJSON_IsNumber(id) || !(id->valuedouble >= 0 && id->valuedouble <= BSI_MAX_ID) ||
        id->valuedouble != (double)(uint32_t)id->valuedouble)
        return bsi_fail(BS_FORMAT, "added token '%.80s': its id is not a number from 0 to %u", text,
                        BSI_MAX_ID);
    if (a.single_word && !BS_HAVE_UTF8PROC)
        return bsi_fail(BS_UNSUPPORTED,
                        "added token '%.80s': single_word needs utf8proc, which this build "
                        "lacks (install libutf8proc-dev and build again)",
                        text);
    a.id = (uint32_t)id->valuedouble;
    uint32_t known = bsi_vocab_id(&t->vocab, text, strlen(text));
    if (known == BSI_NO_ID)
        BSI_TRY(bsi_vocab_add(&t->vocab, text, strlen(text), a.id));
    else if (known != a.id)
        return bsi_fail(BS_FORMAT, "added token '%.80s' has the id %u, but the vocabulary gives it %u",
                        text, a.id, known);
    return a.normalized && t->norms.n ? add_normalized(t, &a, text) : add(t, &a, text, strlen(text));
}

static bs_status finish(bsi_finder *f)
{
    if (f->n)
        qsort(f->token, f->n, sizeof *f->token, compare);
    for (size_t i = 1; i < f->n; i++)
        if (!compare(&f->token[i - 1], &f->token[i]))
            return bsi_fail(BS_FORMAT, "added token '%.*s' is there twice (ids %u and %u)",
                            (int)BSI_MIN(f->token[i].n, (size_t)80), f->token[i].text,
                            f->token[i - 1].id, f->token[i].id);
    size_t at = 0;
    for (unsigned c = 0; c <= 256; c++) {
        while (at < f->n && (unsigned char)f->token[at].text[0] < c)
            at++;
        f->first[c] = (uint32_t)at;
    }
    return BS_OK;
}

static void mark_special(bs_tok *t, const bsi_finder *f)
{
    for (size_t i = 0; i < f->n; i++)
        if (f->token[i].special)
            t->is_special[f->token[i].id / 8] |= (uint8_t)(1u << f->token[i].id % 8);
}

bs_status bsi_added_read(bs_tok *t, const cJSON *list)
{
    const cJSON *o;
    if (list && !cJSON_IsNull(list) && !cJSON_IsArray(list))
        return bsi_fail(BS_FORMAT, "added_tokens: expected an array, found %s", bsi_tokjson_type(list));
    cJSON_ArrayForEach(o, list) BSI_TRY(read_one(t, o));
    BSI_TRY(finish(&t->raw));
    BSI_TRY(finish(&t->normalized));
    t->is_special = bsi_alloc(BS_TAG_MISC, t->vocab.n_ids / 8 + 1);
    if (!t->is_special)
        return BS_NOMEM;
    mark_special(t, &t->raw);
    mark_special(t, &t->normalized);
    return BS_OK;
}
