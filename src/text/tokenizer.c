/* SPDX-License-Identifier: Apache-2.0 */
/*
** tokenizer.c: opening a tokenizer folder: tokenizer.json, and the special ids that
** tokenizer_config.json and generation_config.json name. What the file asks for and we do not do is
** refused by name, since ids that are nearly right train a model on other text. One thread opens; the
** result never changes.
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

/* ---- special ids ----------------------------------------------------------------------------- */

static bs_status add_special(bs_tok *t, const char *name, size_t n, const char *text)
{
    uint32_t id = bsi_vocab_id(&t->vocab, text, strlen(text));
    void *p = t->special;
    if (id == BSI_NO_ID) /* published files name tokens that they do not have */
        return BS_OK;
    bs_status st = bsi_grow(&p, &t->special_cap, t->n_special + 1, sizeof *t->special);
    t->special = p;
    BSI_TRY(st);
    bsi_special *s = &t->special[t->n_special];
    s->id = id;
    s->name = bsi_alloc(BS_TAG_MISC, n + 1);
    if (!s->name)
        return BS_NOMEM;
    memcpy(s->name, name, n);
    t->n_special++;
    return BS_OK;
}

/* Every "NAME_token" whose value is a text or an AddedToken. */
static bs_status read_config(bs_tok *t, const cJSON *o)
{
    static const char end[] = "_token";
    if (!cJSON_IsObject(o))
        return bsi_fail(BS_FORMAT, "expected an object, found %s", bsi_tokjson_type(o));
    for (const cJSON *m = o->child; m; m = m->next) {
        size_t n = strlen(m->string);
        const cJSON *text = cJSON_IsObject(m) ? cJSON_GetObjectItemCaseSensitive(m, "content") : m;
        if (n < sizeof end || strcmp(m->string + n - (sizeof end - 1), end) || !cJSON_IsString(text))
            continue;
        char name[64];
        n = BSI_MIN(n - (sizeof end - 1), sizeof name - 1);
        memcpy(name, m->string, n);
        name[n] = 0;
        if (bs_tok_special(t, name) < 0)
            BSI_TRY(add_special(t, name, n, text->valuestring));
    }
    return BS_OK;
}

static bs_status read_generation(bs_tok *t, const cJSON *o)
{
    const cJSON *eos = cJSON_GetObjectItemCaseSensitive(o, "eos_token_id"), *id = eos;
    if (!cJSON_IsNumber(eos) && !cJSON_IsArray(eos))
        return BS_OK;
    size_t n = cJSON_IsArray(eos) ? (size_t)cJSON_GetArraySize(eos) : 1;
    t->stop = bsi_alloc(BS_TAG_MISC, n * sizeof *t->stop);
    if (!t->stop)
        return BS_NOMEM;
    if (cJSON_IsArray(eos))
        id = eos->child;
    for (size_t i = 0; i < n; i++, id = id->next) {
        if (!cJSON_IsNumber(id) || !(id->valuedouble >= 0 && id->valuedouble <= BSI_MAX_ID) ||
            id->valuedouble != (double)(int32_t)id->valuedouble)
            return bsi_fail(BS_FORMAT, "eos_token_id is not an id or a list of ids");
        t->stop[t->n_stop++] = (int32_t)id->valuedouble;
    }
    return BS_OK;
}

/* Without a list of its own, generation ends at "eos". */
static bs_status default_stop(bs_tok *t)
{
    int32_t eos = bs_tok_special(t, "eos");
    if (t->n_stop || eos < 0)
        return BS_OK;
    bsi_free(t->stop);
    t->stop = bsi_alloc(BS_TAG_MISC, sizeof *t->stop);
    if (!t->stop)
        return BS_NOMEM;
    t->stop[t->n_stop++] = eos;
    return BS_OK;
}

/* A file beside tokenizer.json; absent: nothing. */
static bs_status read_beside(bs_tok *t, const char *folder, const char *name,
                             bs_status (*read)(bs_tok *, const cJSON *))
{
    bsi_buf path = {0};
    char *text = NULL;
    size_t n;
    bs_json tree = {0};
    bs_status st = bsi_buf_put(&path, folder, strlen(folder));
    if (st == BS_OK)
        st = bsi_buf_put(&path, name, strlen(name) + 1);
    if (st != BS_OK || access(path.p, F_OK))
        goto done;
    st = bs_file_read(path.p, MAX_FILE, &text, &n);
    if (st != BS_OK)
        goto done;
    st = bsi_tokjson_parse(text, n, &tree);
    if (st == BS_OK)
        st = read(t, tree.root);
    bsi_wrap(st, "%s", path.p);
done:
    bs_json_end(&tree);
    bsi_free(text);
    bsi_buf_free(&path);
    return st;
}

/* ---- open ------------------------------------------------------------------------------------ */

static bs_status read_tree(bs_tok *t, const cJSON *o, bsi_tokjson *vocab, bsi_tokjson *merges)
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
    return read_post(t, cJSON_GetObjectItemCaseSensitive(o, "post_processor"));
}

static bs_status read_tokenizer(bs_tok *t, const char *path)
{
    char *text = NULL;
    size_t n;
    bs_json tree = {0};
    bsi_tokjson vocab, merges;
    BSI_TRY(bs_file_read(path, MAX_FILE, &text, &n));
    bs_status st = bsi_tokjson_open(text, n, &tree, &vocab, &merges);
    if (st == BS_OK)
        st = read_tree(t, tree.root, &vocab, &merges);
    bs_json_end(&tree);
    bsi_free(text);
    return bsi_wrap(st, "%s", path);
}

bs_status bs_tok_open(const char *path, bs_tok **out)
{
    struct stat info;
    bsi_buf file = {0}, folder = {0};
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
        st = read_tokenizer(t, file.p);
    if (st == BS_OK)
        st = read_beside(t, folder.p, "tokenizer_config.json", read_config);
    if (st == BS_OK)
        st = read_beside(t, folder.p, "generation_config.json", read_generation);
    if (st == BS_OK)
        st = default_stop(t);
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
    bsi_free(t->is_special);
    bsi_free(t->before);
    bsi_free(t->after);
    for (size_t i = 0; i < t->n_special; i++)
        bsi_free(t->special[i].name);
    bsi_free(t->special);
    bsi_free(t->stop);
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

int32_t bs_tok_special(const bs_tok *t, const char *name)
{
    for (size_t i = 0; i < t->n_special; i++)
        if (!strcmp(t->special[i].name, name))
            return (int32_t)t->special[i].id;
    return -1;
}

int bs_tok_special_count(const bs_tok *t)
{
    return (int)t->n_special;
}

const char *bs_tok_special_at(const bs_tok *t, int i, int32_t *id)
{
    if (i < 0 || (size_t)i >= t->n_special)
        return NULL;
    *id = (int32_t)t->special[i].id;
    return t->special[i].name;
}

int bs_tok_stops(const bs_tok *t, const int32_t **ids)
{
    *ids = t->stop;
    return (int)t->n_stop;
}
