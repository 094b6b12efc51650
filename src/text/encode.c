/* SPDX-License-Identifier: Apache-2.0 */
/*
** encode.c: from text to ids. Bytes that are not UTF-8 become U+FFFD; added tokens cut the text; what
** lies between goes through normalizer, a second cut for the tokens that are looked for in normalized
** text, pre-tokenizer and byte-pair encoding. A work holds every buffer of it and is used by one
** thread; the tokenizer is only read.
*/
#include "text/text.h"

#include <string.h>

bs_status bs_tok_work_new(const bs_tok *t, bs_tok_work **out)
{
    bs_tok_work *w = bsi_alloc(BS_TAG_MISC, sizeof *w);
    if (!w)
        return BS_NOMEM;
    w->tok = t;
    *out = w;
    return BS_OK;
}

void bs_tok_work_free(bs_tok_work *w)
{
    if (!w)
        return;
    bsi_matcher_free(&w->matcher);
    bsi_text_free(&w->clean);
    for (int i = 0; i < 2; i++) {
        bsi_text_free(&w->norm[i]);
        bsi_text_free(&w->pretok[i]);
    }
    bsi_free(w->runes.p);
    bsi_free(w->runes.sorted);
    bsi_free(w->words.p);
    bsi_free(w->spare.p);
    bsi_bpe_work_free(&w->bpe);
    bsi_free(w->id);
    bsi_free(w->span);
    bs_tok_stream_free(w->stream);
    bsi_free(w);
}

/* Bytes [first, end) of a view as a view. */
static bsi_view slice(const bsi_view *v, size_t first, size_t end)
{
    return (bsi_view){v->p + first, end - first, v->at ? v->at + first : NULL, v->base + first};
}

typedef bs_status (*gap_fn)(bs_tok_work *w, bsi_view v, bool literal);

/* Ids of the added tokens in v, and what lies between them to `gap`. */
static bs_status cut_added(bs_tok_work *w, const bsi_finder *f, bsi_view v, bool literal, gap_fn gap)
{
    size_t at = 0, covered = 0;
    for (;;) {
        bsi_found found = bsi_finder_next(f, v.p, v.n, at, covered, literal);
        size_t end = found.token ? found.first : v.n;
        if (covered < end)
            BSI_TRY(gap(w, slice(&v, covered, end), literal));
        if (!found.token)
            return BS_OK;
        BSI_TRY(bsi_work_put(w, found.token->id, &v, found.first, found.end));
        covered = found.end;
        at = found.next;
    }
}

static bs_status encode_words(bs_tok_work *w, bsi_view v, bool literal)
{
    (void)literal;
    BSI_TRY(bsi_pretoks_run(&w->tok->pretoks, w, &v));
    for (size_t i = 0; i < w->words.n; i++)
        BSI_TRY(bsi_bpe_word(w->tok, w, &v, w->words.p[i]));
    return BS_OK;
}

static bs_status encode_part(bs_tok_work *w, bsi_view v, bool literal)
{
    BSI_TRY(bsi_norms_run(&w->tok->norms, w, &v));
    return cut_added(w, &w->tok->normalized, v, literal, encode_words);
}

/* A copy of the text with U+FFFD for what is not UTF-8. */
static bs_status clean(bs_tok_work *w, bsi_view *v, size_t good)
{
    bsi_text *out = &w->clean;
    size_t at = 0;
    bool cut;
    out->n = 0;
    out->spans = w->spans;
    for (;;) {
        BSI_TRY(bsi_text_copy(out, v, at, at + good));
        at += good;
        if (at == v->n)
            break;
        size_t bad = bsi_utf8_bad(v->p + at, v->n - at, &cut);
        bs_tok_span span = {(uint32_t)at, (uint32_t)(at + bad)};
        BSI_TRY(bsi_text_put(out, "\xEF\xBF\xBD", 3, span));
        at += bad;
        good = bs_utf8_valid(v->p + at, v->n - at);
    }
    *v = bsi_view_of(out);
    return BS_OK;
}

bs_status bs_tok_encode(bs_tok_work *w, const char *text, size_t n, unsigned flags, bs_tok_ids *out)
{
    const unsigned known =
        BS_TOK_SPECIAL | BS_TOK_LITERAL | BS_TOK_SPANS | BS_TOK_CONTINUED | BS_TOK_INSIDE;
    const bs_tok *t = w->tok;
    if (flags & ~known)
        return bsi_fail(BS_ARG, "tokenizer: flags 0x%X do not belong to encoding", flags);
    if (flags & BS_TOK_SPECIAL && flags & (BS_TOK_CONTINUED | BS_TOK_INSIDE))
        return bsi_fail(BS_ARG,
                        "tokenizer: a text that goes on from another begins with nothing special");
    if (n > INT32_MAX)
        return bsi_fail(BS_ARG, "a text of %zu bytes is longer than 2 GiB; encode it in parts", n);
    bsi_view v = {.p = text, .n = n};
    w->n = 0;
    w->continued = flags & BS_TOK_CONTINUED;
    w->inside = flags & BS_TOK_INSIDE;
    w->spans = flags & BS_TOK_SPANS || t->pretoks.needs_spans || w->continued;
    size_t good = bs_utf8_valid(text, n);
    if (good < n)
        BSI_TRY(clean(w, &v, good));
    for (size_t i = 0; flags & BS_TOK_SPECIAL && i < t->n_before; i++)
        BSI_TRY(bsi_work_put_span(w, (uint32_t)t->before[i], (bs_tok_span){0}));
    BSI_TRY(cut_added(w, &t->raw, v, flags & BS_TOK_LITERAL, encode_part));
    for (size_t i = 0; flags & BS_TOK_SPECIAL && i < t->n_after; i++)
        BSI_TRY(bsi_work_put_span(w, (uint32_t)t->after[i], (bs_tok_span){(uint32_t)n, (uint32_t)n}));
    *out = (bs_tok_ids){w->id, flags & BS_TOK_SPANS ? w->span : NULL, (int64_t)w->n};
    return BS_OK;
}
