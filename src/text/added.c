/* SPDX-License-Identifier: Apache-2.0 */
/*
** added.c: the added tokens of a tokenizer, which are recognised in text before anything else, in two finders: of
** the text as it comes, and of normalized text. tokenizer.json lists them; the files beside it (beside.c) may add
** some, and change how one is recognised. t->mark remembers each id's flags.
*/
#include "text/text.h"

#include <string.h>

unsigned bsi_added_marks(const bsi_added *a)
{
    return BSI_MARK_ADDED | (a->special ? BSI_MARK_SPECIAL : 0) |
           (a->normalized ? BSI_MARK_NORMALIZED : 0) | (a->lstrip ? BSI_MARK_LSTRIP : 0) |
           (a->rstrip ? BSI_MARK_RSTRIP : 0) | (a->single_word ? BSI_MARK_SINGLE : 0);
}

static bs_status set_mark(bs_tok *t, const bsi_added *a)
{
    size_t marked = t->marked;
    void *p = t->mark;
    bs_status st = bsi_grow(&p, &t->mark_cap, (size_t)a->id + 1, 1);
    t->mark = p;
    BSI_TRY(st);
    if (a->id >= marked) {
        memset(t->mark + marked, 0, a->id + 1 - marked);
        t->marked = (size_t)a->id + 1;
    }
    t->mark[a->id] = (uint8_t)bsi_added_marks(a);
    return BS_OK;
}

static void forget(bsi_finder *f, uint32_t id)
{
    size_t kept = 0;
    for (size_t i = 0; i < f->n; i++) {
        if (f->token[i].id == id)
            bsi_free(f->token[i].text);
        else
            f->token[kept++] = f->token[i];
    }
    f->n = kept;
}

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

bs_status bsi_added_put(bs_tok *t, const bsi_added *a, const char *text)
{
    if (bsi_marks(t, a->id)) {
        forget(&t->raw, a->id);
        forget(&t->normalized, a->id);
    }
    BSI_TRY(set_mark(t, a));
    return a->normalized && t->norms.n ? add_normalized(t, a, text) : add(t, a, text, strlen(text));
}

bs_status bsi_added_flags(const cJSON *o, const char *where, bsi_added *a, const char **text)
{
    static const char *const keys[] = {"id",         "content", "single_word", "lstrip", "rstrip",
                                       "normalized", "special", "__type",      NULL};
    BSI_TRY(bsi_tokjson_only(o, where, keys));
    BSI_TRY(bsi_tokjson_text(o, where, "content", text));
    BSI_TRY(bsi_tokjson_bool(o, where, "special", &a->special));
    a->normalized = !a->special;
    BSI_TRY(bsi_tokjson_bool(o, where, "normalized", &a->normalized));
    BSI_TRY(bsi_tokjson_bool(o, where, "lstrip", &a->lstrip));
    BSI_TRY(bsi_tokjson_bool(o, where, "rstrip", &a->rstrip));
    BSI_TRY(bsi_tokjson_bool(o, where, "single_word", &a->single_word));
    if (a->single_word && !BS_HAVE_UTF8PROC)
        return bsi_fail(BS_UNSUPPORTED,
                        "added token '%.80s': single_word needs utf8proc, which this build "
                        "lacks (install libutf8proc-dev and build again)",
                        *text ? *text : "");
    return BS_OK;
}

static bs_status read_one(bs_tok *t, const cJSON *o)
{
    bsi_added a = {0};
    const char *text = NULL;
    BSI_TRY(bsi_added_flags(o, "added token", &a, &text));
    const cJSON *id = cJSON_GetObjectItemCaseSensitive(o, "id");
    if (!text || !*text)
        return bsi_fail(BS_FORMAT, "an added token has no content");
    if (!bsi_tokjson_id(id, &a.id))
        return bsi_fail(BS_FORMAT, "added token '%.80s': its id is not a number from 0 to %u", text,
                        BSI_MAX_ID);
    uint32_t known = bsi_vocab_id(&t->vocab, text, strlen(text));
    if (known == BSI_NO_ID)
        BSI_TRY(bsi_vocab_add(&t->vocab, text, strlen(text), a.id));
    else if (known != a.id)
        return bsi_fail(BS_FORMAT, "added token '%.80s' has the id %u, but the vocabulary gives it %u",
                        text, a.id, known);
    if (bsi_marks(t, a.id))
        return bsi_fail(BS_FORMAT, "added token '%.80s' is there twice (id %u)", text, a.id);
    return bsi_added_put(t, &a, text);
}

bs_status bsi_added_read(bs_tok *t, const cJSON *list)
{
    const cJSON *o;
    if (list && !cJSON_IsNull(list) && !cJSON_IsArray(list))
        return bsi_fail(BS_FORMAT, "added_tokens: expected an array, found %s", bsi_tokjson_type(list));
    cJSON_ArrayForEach(o, list) BSI_TRY(read_one(t, o));
    return BS_OK;
}

bs_status bsi_added_finish(bs_tok *t)
{
    BSI_TRY(bsi_finder_finish(&t->raw));
    return bsi_finder_finish(&t->normalized);
}
