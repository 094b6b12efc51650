/* SPDX-License-Identifier: Apache-2.0 */
/*
** tokenizer.c: opening a tokenizer folder: tokenizer.json, with what the files beside it say (beside.c). What the
** file asks for and we do not do is refused by name, since ids that are nearly right train a model on other text.
** One thread opens; the result never changes.
*/
#include "text/text.h"

#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define MAX_FILE ((size_t)1 << 30)

static const cJSON *member(const cJSON *o, const char *key)
{
    const cJSON *m = cJSON_GetObjectItemCaseSensitive(o, key);
    return m && !cJSON_IsNull(m) ? m : NULL;
}

/* ---- model ----------------------------------------------------------------------------------- */

static bs_status read_model(bs_tok *t, const cJSON *o, bsi_tokjson *vocab, bsi_tokjson *merges)
{
    static const char *const keys[] = {"type",
                                       "dropout",
                                       "unk_token",
                                       "fuse_unk",
                                       "byte_fallback",
                                       "continuing_subword_prefix",
                                       "ignore_merges",
                                       "vocab",
                                       "merges",
                                       "end_of_word_suffix",
                                       NULL};
    const char *type = "BPE", *prefix = "", *suffix = "", *unk = NULL;
    bsi_bpe *b = &t->bpe;
    const cJSON *dropout;
    if (!cJSON_IsObject(o))
        return bsi_fail(BS_FORMAT, "model: expected an object, found %s", bsi_tokjson_type(o));
    BSI_TRY(bsi_tokjson_text(o, "model", "type", &type)); /* files older than the member hold BPE */
    if (strcmp(type, "BPE"))
        return bsi_fail(BS_UNSUPPORTED, "model '%.60s' is not supported (only BPE is)", type);
    BSI_TRY(bsi_tokjson_only(o, "model", keys));
    BSI_TRY(bsi_tokjson_text(o, "model", "continuing_subword_prefix", &prefix));
    BSI_TRY(bsi_tokjson_text(o, "model", "end_of_word_suffix", &suffix));
    if (*prefix || *suffix)
        return bsi_fail(BS_UNSUPPORTED, "model.%s '%.60s' is not supported",
                        *prefix ? "continuing_subword_prefix" : "end_of_word_suffix",
                        *prefix ? prefix : suffix);
    dropout = member(o, "dropout");
    if (dropout && (!cJSON_IsNumber(dropout) || dropout->valuedouble > 0))
        return bsi_fail(BS_UNSUPPORTED, "model.dropout is not supported: ids must not be random");
    BSI_TRY(bsi_tokjson_bool(o, "model", "fuse_unk", &b->fuse_unk));
    BSI_TRY(bsi_tokjson_bool(o, "model", "byte_fallback", &b->byte_fallback));
    BSI_TRY(bsi_tokjson_bool(o, "model", "ignore_merges", &b->ignore_merges));
    BSI_TRY(bsi_tokjson_text(o, "model", "unk_token", &unk));
    if (!vocab->start || !merges->start)
        return bsi_fail(BS_FORMAT, "model.%s is missing", vocab->start ? "merges" : "vocab");
    BSI_TRY(bsi_wrap(bsi_vocab_read(&t->vocab, vocab), "model.vocab"));
    BSI_TRY(bsi_wrap(bsi_bpe_read(b, &t->vocab, merges), "model.merges"));
    if (unk) {
        b->unk = bsi_vocab_id(&t->vocab, unk, strlen(unk));
        b->has_unk = true;
        if (b->unk == BSI_NO_ID)
            return bsi_fail(BS_FORMAT, "model.unk_token '%.80s' is not a piece of the vocabulary", unk);
    }
    b->bytes = t->pretoks.byte_level;
    return bsi_bpe_finish(b, &t->vocab);
}

/* ---- post-processor -------------------------------------------------------------------------- */

/* The ids of one special token of a template, added to a list: behind it, or in front of it. */
static bs_status put_ids(const bs_tok *t, const cJSON *o, const char *name, bool front, int32_t **list,
                         size_t *n)
{
    const cJSON *token =
        cJSON_GetObjectItemCaseSensitive(cJSON_GetObjectItemCaseSensitive(o, "special_tokens"), name);
    const cJSON *ids = cJSON_GetObjectItemCaseSensitive(token, "ids"), *id;
    size_t more = cJSON_IsArray(ids) ? (size_t)cJSON_GetArraySize(ids) : 0, at = front ? 0 : *n;
    if (!more)
        return bsi_fail(BS_FORMAT,
                        "post_processor TemplateProcessing: special token '%.80s' has no ids", name);
    int32_t *p = bsi_realloc(BS_TAG_MISC, *list, (*n + more) * sizeof *p);
    if (!p)
        return BS_NOMEM;
    *list = p;
    if (front)
        memmove(p + more, p, *n * sizeof *p);
    *n += more;
    cJSON_ArrayForEach(id, ids)
    {
        double v = cJSON_IsNumber(id) ? id->valuedouble : -1;
        if (!(v >= 0 && v < (double)t->vocab.n_ids) || v != (double)(int32_t)v)
            return bsi_fail(BS_FORMAT,
                            "post_processor TemplateProcessing: special token '%.80s' has an id "
                            "that is not in the vocabulary",
                            name);
        p[at++] = (int32_t)v;
    }
    return BS_OK;
}

static bs_status read_template(bs_tok *t, const cJSON *o)
{
    static const char *const keys[] = {"type", "single", "pair", "special_tokens", NULL};
    static const char where[] = "post_processor TemplateProcessing";
    const cJSON *single = cJSON_GetObjectItemCaseSensitive(o, "single"), *item;
    int32_t *before = NULL;
    size_t n_before = 0;
    int texts = 0;
    bs_status st = bsi_tokjson_only(o, where, keys);
    if (st == BS_OK && !cJSON_IsArray(single))
        st = bsi_fail(BS_FORMAT, "%s: 'single' is not an array", where);
    for (item = single ? single->child : NULL; st == BS_OK && item; item = item->next) {
        const cJSON *special = cJSON_GetObjectItemCaseSensitive(item, "SpecialToken");
        const cJSON *sequence = cJSON_GetObjectItemCaseSensitive(item, "Sequence");
        const char *id =
            cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(special ? special : sequence, "id"));
        if (!id || (sequence && strcmp(id, "A")))
            st = bsi_fail(BS_FORMAT, "%s: 'single' is not a list of special tokens and the sequence A",
                          where);
        else if (sequence)
            texts++;
        else if (texts)
            st = put_ids(t, o, id, false, &t->after, &t->n_after);
        else
            st = put_ids(t, o, id, false, &before, &n_before);
    }
    if (st == BS_OK && texts != 1)
        st = bsi_fail(BS_UNSUPPORTED, "%s: 'single' holds the text %d times", where, texts);
    if (st == BS_OK && n_before) { /* a later template wraps what an earlier one made */
        int32_t *p = bsi_realloc(BS_TAG_MISC, before, (n_before + t->n_before) * sizeof *p);
        if (p) {
            if (t->n_before)
                memcpy(p + n_before, t->before, t->n_before * sizeof *p);
            bsi_free(t->before);
            t->before = p;
            t->n_before += n_before;
            before = NULL;
        } else {
            st = BS_NOMEM;
        }
    }
    bsi_free(before);
    return st;
}

static bs_status read_post(bs_tok *t, const cJSON *o)
{
    static const char *const sequence[] = {"type", "processors", NULL};
    static const char *const byte_level[] = {"type", "add_prefix_space", "trim_offsets", "use_regex",
                                             NULL};
    if (!o || cJSON_IsNull(o))
        return BS_OK;
    const char *type = bsi_tokjson_type(o);
    if (!strcmp(type, "ByteLevel")) /* changes what spans cover, not ids */
        return bsi_tokjson_only(o, "post_processor ByteLevel", byte_level);
    if (!strcmp(type, "TemplateProcessing"))
        return read_template(t, o);
    if (strcmp(type, "Sequence"))
        return bsi_fail(BS_UNSUPPORTED, "post_processor '%.60s' is not supported", type);
    const cJSON *list = cJSON_GetObjectItemCaseSensitive(o, "processors"), *item;
    BSI_TRY(bsi_tokjson_only(o, "post_processor Sequence", sequence));
    if (!cJSON_IsArray(list))
        return bsi_fail(BS_FORMAT, "post_processor Sequence: 'processors' is not an array");
    cJSON_ArrayForEach(item, list) BSI_TRY(read_post(t, item));
    return BS_OK;
}

/* ---- open ------------------------------------------------------------------------------------ */

static bs_status read_tree(bs_tok *t, const cJSON *o, bsi_tokjson *vocab, bsi_tokjson *merges,
                           const bsi_beside *beside)
{
    /* truncation and padding arrange batches; the ids of a text do not depend on them. */
    static const char *const keys[] = {
        "version",       "truncation",     "padding", "added_tokens", "normalizer",
        "pre_tokenizer", "post_processor", "decoder", "model",        NULL};
    BSI_TRY(bsi_tokjson_only(o, "the file", keys));
    BSI_TRY(bsi_norms_read(&t->norms, cJSON_GetObjectItemCaseSensitive(o, "normalizer")));
    BSI_TRY(bsi_pretoks_read(&t->pretoks, cJSON_GetObjectItemCaseSensitive(o, "pre_tokenizer")));
    BSI_TRY(bsi_decoders_read(&t->decoders, cJSON_GetObjectItemCaseSensitive(o, "decoder")));
    BSI_TRY(read_model(t, cJSON_GetObjectItemCaseSensitive(o, "model"), vocab, merges));
    BSI_TRY(bsi_added_read(t, cJSON_GetObjectItemCaseSensitive(o, "added_tokens")));
    BSI_TRY(bsi_beside_tokens(t, beside));
    BSI_TRY(bsi_added_finish(t));
    return read_post(t, cJSON_GetObjectItemCaseSensitive(o, "post_processor"));
}

static bs_status read_tokenizer(bs_tok *t, const char *path, const bsi_beside *beside)
{
    char *text = NULL;
    size_t n;
    bs_json tree = {0};
    bsi_tokjson vocab, merges;
    BSI_TRY(bs_file_read(path, MAX_FILE, &text, &n));
    bs_status st = bsi_tokjson_open(text, n, &tree, &vocab, &merges);
    if (st == BS_OK)
        st = read_tree(t, tree.root, &vocab, &merges, beside);
    bs_json_end(&tree);
    bsi_free(text);
    return bsi_wrap(st, "%s", path);
}

bs_status bs_tok_open(const char *path, bs_tok **out)
{
    struct stat info;
    bsi_buf file = {0}, folder = {0};
    bsi_beside beside = {0};
    bool is_folder = !stat(path, &info) && S_ISDIR(info.st_mode);
    const char *slash = strrchr(path, '/');
    bs_tok *t = bsi_alloc(BS_TAG_MISC, sizeof *t);
    bs_status st = t ? BS_OK : BS_NOMEM;
    if (st == BS_OK)
        st = bsi_buf_put(&folder, path,
                         is_folder ? strlen(path)
                         : slash   ? (size_t)(slash + 1 - path)
                                   : 0);
    if (st == BS_OK)
        st = bsi_buf_put(&folder, is_folder ? "/" : "", is_folder ? 2 : 1);
    if (st == BS_OK)
        st = bsi_buf_put(&file, path, strlen(path) + !is_folder);
    if (st == BS_OK && is_folder)
        st = bsi_buf_put(&file, "/tokenizer.json", sizeof "/tokenizer.json");
    if (st == BS_OK)
        st = bsi_beside_open(&beside, folder.p);
    if (st == BS_OK)
        st = read_tokenizer(t, file.p, &beside);
    if (st == BS_OK)
        st = bsi_beside_specials(t, &beside);
    bsi_beside_close(&beside);
    bsi_buf_free(&file);
    bsi_buf_free(&folder);
    if (st != BS_OK) {
        bs_tok_close(t);
        return st;
    }
    *out = t;
    return BS_OK;
}

void bs_tok_close(bs_tok *t)
{
    if (!t)
        return;
    bsi_vocab_free(&t->vocab);
    bsi_bpe_free(&t->bpe);
    bsi_norms_free(&t->norms);
    bsi_pretoks_free(&t->pretoks);
    bsi_decoders_free(&t->decoders);
    bsi_finder_free(&t->raw);
    bsi_finder_free(&t->normalized);
    bsi_free(t->mark);
    bsi_free(t->before);
    bsi_free(t->after);
    for (size_t i = 0; i < t->n_special; i++)
        bsi_free(t->special[i].name);
    bsi_free(t->special);
    bsi_free(t->stop);
    for (size_t i = 0; i < t->n_note; i++)
        bsi_free(t->note[i]);
    bsi_free(t->note);
    bsi_free(t);
}

/* ---- questions ------------------------------------------------------------------------------- */

int64_t bs_tok_vocab_size(const bs_tok *t)
{
    return (int64_t)t->vocab.n_ids;
}

int32_t bs_tok_id(const bs_tok *t, const char *piece, size_t n)
{
    uint32_t id = bsi_vocab_id(&t->vocab, piece, n);
    return id == BSI_NO_ID ? -1 : (int32_t)id;
}

const char *bs_tok_piece(const bs_tok *t, int32_t id, size_t *n)
{
    return id < 0 ? NULL : bsi_vocab_piece(&t->vocab, (uint32_t)id, n);
}

void bs_tok_around(const bs_tok *t, const int32_t **before, int *n_before, const int32_t **after,
                   int *n_after)
{
    *before = t->before;
    *n_before = (int)t->n_before;
    *after = t->after;
    *n_after = (int)t->n_after;
}
