/* SPDX-License-Identifier: Apache-2.0 */
/*
** added.c: reads the added tokens of a tokenizer.json, which are recognised in text before anything else, into the
** two finders: of the text as it comes, and of normalized text.
*/
#include "text/text.h"

#include <string.h>

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
    BSI_TRY(bsi_finder_finish(&t->raw));
    BSI_TRY(bsi_finder_finish(&t->normalized));
    t->is_special = bsi_alloc(BS_TAG_MISC, t->vocab.n_ids / 8 + 1);
    if (!t->is_special)
        return BS_NOMEM;
    mark_special(t, &t->raw);
    mark_special(t, &t->normalized);
    return BS_OK;
}
