/* SPDX-License-Identifier: Apache-2.0 */
/*
** beside.c: what the files beside tokenizer.json say of its tokens. Which file decides:
**   added tokens   tokenizer.json's ids; the flags of tokenizer_config.json (added_tokens_decoder), as in
**                  transformers; what only that or added_tokens.json lists has the id that it states
**   special tokens tokenizer_config.json, then special_tokens_map.json; the other way round where the former
**                  has no added_tokens_decoder (as in transformers). What neither names has the id of
**                  generation_config.json, then config.json
**   the end        every eos_token_id of generation_config.json and config.json, and the token named eos
**   BOS            tokenizer.json's post-processor alone; add_bos_token is compared with it
** Where two of them differ and ids or ends depend on it, a note says so. Read while a tokenizer is opened, asked by
** any thread.
*/
#include "text/text.h"

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define MAX_FILE ((size_t)64 << 20)

static const char CONFIG[] = "tokenizer_config.json", MAP[] = "special_tokens_map.json";
static const char ADDED[] = "added_tokens.json", GENERATION[] = "generation_config.json",
                  MODEL[] = "config.json";

static const cJSON *get(const cJSON *o, const char *key)
{
    const cJSON *m = cJSON_GetObjectItemCaseSensitive(o, key);
    return m && !cJSON_IsNull(m) ? m : NULL;
}

/* ---- questions ------------------------------------------------------------------------------- */

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

int bs_tok_note_count(const bs_tok *t)
{
    return (int)t->n_note;
}

const char *bs_tok_note_at(const bs_tok *t, int i)
{
    return i < 0 || (size_t)i >= t->n_note ? NULL : t->note[i];
}

/* ---- files ----------------------------------------------------------------------------------- */

/* A link that leads nowhere is a file that cannot be read, not one that is absent. */
static bs_status open_one(const char *folder, const char *name, bs_json *out)
{
    struct stat info;
    bsi_buf path = {0};
    char *text = NULL;
    size_t n;
    bs_status st = bsi_buf_put(&path, folder, strlen(folder));
    if (st == BS_OK)
        st = bsi_buf_put(&path, name, strlen(name) + 1);
    if (st != BS_OK || lstat(path.p, &info))
        goto done;
    st = bs_file_read(path.p, MAX_FILE, &text, &n);
    if (st != BS_OK)
        goto done;
    st = bsi_tokjson_check(text, n);
    if (st == BS_OK)
        st = bsi_tokjson_parse(text, n, out);
    if (st == BS_OK && !cJSON_IsObject(out->root))
        st = bsi_fail(BS_FORMAT, "expected an object, found %s", bsi_tokjson_type(out->root));
    bsi_wrap(st, "%s", path.p);
done:
    bsi_free(text);
    bsi_buf_free(&path);
    return st;
}

bs_status bsi_beside_open(bsi_beside *b, const char *folder)
{
    BSI_TRY(open_one(folder, CONFIG, &b->config));
    BSI_TRY(open_one(folder, MAP, &b->map));
    BSI_TRY(open_one(folder, ADDED, &b->added));
    BSI_TRY(open_one(folder, GENERATION, &b->generation));
    return open_one(folder, MODEL, &b->model);
}

void bsi_beside_close(bsi_beside *b)
{
    bs_json_end(&b->config);
    bs_json_end(&b->map);
    bs_json_end(&b->added);
    bs_json_end(&b->generation);
    bs_json_end(&b->model);
}

/* ---- notes ----------------------------------------------------------------------------------- */

BSI_PRINTF(2, 3) static bs_status note(bs_tok *t, const char *fmt, ...)
{
    char line[480];
    void *p = t->note;
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(line, sizeof line, fmt, ap);
    va_end(ap);
    bs_status st = bsi_grow(&p, &t->note_cap, t->n_note + 1, sizeof *t->note);
    t->note = p;
    BSI_TRY(st);
    t->note[t->n_note] = bsi_strdup(BS_TAG_MISC, line);
    if (!t->note[t->n_note])
        return BS_NOMEM;
    t->n_note++;
    return BS_OK;
}

typedef struct tally { /* tokens of one kind, told in one note */
    unsigned n;
    char first[96];
} tally;

static void count(tally *c, const char *text)
{
    if (!c->n++)
        snprintf(c->first, sizeof c->first, "%.80s", text);
}

/* ---- added tokens ---------------------------------------------------------------------------- */

typedef struct found { /* what one file has that tokenizer.json has otherwise */
    const char *file;
    tally moved, changed, unknown;
} found;

/* A token with the id that the file states. */
static bs_status put(bs_tok *t, found *f, const bsi_added *a, const char *text)
{
    size_t n = 0, len = strlen(text);
    uint32_t known = bsi_vocab_id(&t->vocab, text, len);
    const char *piece = bsi_vocab_piece(&t->vocab, a->id, &n);
    if (known == BSI_NO_ID && piece)
        return bsi_fail(BS_FORMAT,
                        "%s: added token '%.80s' has the id %u, which tokenizer.json gives to '%.*s'; "
                        "one of the two files belongs to another model",
                        f->file, text, a->id, (int)BSI_MIN(n, 80u), piece);
    if (known != BSI_NO_ID && known != a->id) {
        count(&f->moved, text);
        return BS_OK;
    }
    if (known == BSI_NO_ID)
        BSI_TRY(bsi_vocab_add(&t->vocab, text, len, a->id));
    unsigned was = bsi_marks(t, a->id), now = bsi_added_marks(a);
    if (was == now)
        return BS_OK;
    if (was && (was ^ now) & ~(unsigned)BSI_MARK_SPECIAL) /* `special` changes no id */
        count(&f->changed, text);
    return bsi_added_put(t, a, text);
}

/* added_tokens_decoder: {"32000": {"content": ..., flags}}. */
static bs_status read_decoder(bs_tok *t, found *f, const cJSON *decoder)
{
    static const char where[] = "added_tokens_decoder";
    if (!cJSON_IsObject(decoder))
        return bsi_fail(BS_FORMAT, "%s: %s is %s, not an object", f->file, where,
                        bsi_tokjson_type(decoder));
    for (const cJSON *m = decoder->child; m; m = m->next) {
        bsi_added a = {0};
        const char *text = NULL;
        char *end;
        double id = strtod(m->string, &end);
        if (!*m->string || *end || !(id >= 0 && id <= BSI_MAX_ID) || id != (double)(uint32_t)id)
            return bsi_fail(BS_FORMAT, "%s: %s: '%.40s' is not an id from 0 to %u", f->file, where,
                            m->string, BSI_MAX_ID);
        a.id = (uint32_t)id;
        bs_status st = bsi_added_flags(m, where, &a, &text);
        bsi_wrap(st, "%s", f->file);
        BSI_TRY(st);
        if (!text)
            return bsi_fail(BS_FORMAT, "%s: %s: the token of id %u has no content", f->file, where,
                            a.id);
        if (*text)
            BSI_TRY(put(t, f, &a, text));
    }
    return BS_OK;
}

static const char *text_of(const cJSON *m)
{
    return cJSON_GetStringValue(cJSON_IsObject(m) ? cJSON_GetObjectItemCaseSensitive(m, "content") : m);
}

static bool ends_with(const char *s, const char *end, size_t *n)
{
    size_t all = strlen(s), k = strlen(end);
    *n = all > k ? all - k : 0;
    return all > k && !strcmp(s + all - k, end);
}

static bool is_named_special(const bsi_beside *b, const char *text)
{
    const cJSON *const files[] = {b->config.root, b->map.root};
    size_t n;
    for (int i = 0; i < 2; i++)
        for (const cJSON *m = files[i] ? files[i]->child : NULL; m; m = m->next) {
            const char *own = ends_with(m->string, "_token", &n) ? text_of(m) : NULL;
            if (own && !strcmp(own, text))
                return true;
        }
    return false;
}

/* {"<|x|>": 32000}. */
static bs_status read_added(bs_tok *t, const bsi_beside *b, found *f)
{
    for (const cJSON *m = b->added.root ? b->added.root->child : NULL; m; m = m->next) {
        bsi_added a = {.special = is_named_special(b, m->string)};
        a.normalized = !a.special;
        if (!bsi_tokjson_id(m, &a.id))
            return bsi_fail(BS_FORMAT, "%s: '%.80s' has no id from 0 to %u", f->file, m->string,
                            BSI_MAX_ID);
        uint32_t known = bsi_vocab_id(&t->vocab, m->string, strlen(m->string));
        if (known == a.id && bsi_marks(t, known)) /* flags are for other files to say */
            continue;
        if (*m->string)
            BSI_TRY(put(t, f, &a, m->string));
    }
    return BS_OK;
}

/* A token that is named special is one, also where it is only a piece of the vocabulary so far. */
static bs_status put_named(bs_tok *t, found *f, const cJSON *m)
{
    bsi_added a = {0};
    const char *text = text_of(m);
    if (!text || !*text)
        return BS_OK;
    if (cJSON_IsObject(m)) {
        bs_status st = bsi_added_flags(m, m->string ? m->string : "special token", &a, &text);
        bsi_wrap(st, "%s", f->file);
        BSI_TRY(st);
    }
    a.special = true;
    a.normalized &= cJSON_IsObject(m) && get(m, "normalized");
    a.id = bsi_vocab_id(&t->vocab, text, strlen(text));
    if (a.id == BSI_NO_ID)
        count(&f->unknown, text);
    else if (!bsi_marks(t, a.id))
        return bsi_added_put(t, &a, text);
    return BS_OK;
}

static bs_status read_named(bs_tok *t, found *f, const cJSON *o)
{
    static const char *const names[] = {"bos_token", "eos_token", "unk_token", "sep_token",
                                        "pad_token", "cls_token", "mask_token"};
    static const char *const lists[] = {"additional_special_tokens", "extra_special_tokens"};
    for (size_t i = 0; i < BSI_COUNT(names); i++)
        BSI_TRY(put_named(t, f, get(o, names[i])));
    for (size_t i = 0; i < BSI_COUNT(lists); i++) {
        const cJSON *list = get(o, lists[i]);
        for (const cJSON *m = list ? list->child : NULL; m; m = m->next)
            BSI_TRY(put_named(t, f, m));
    }
    return BS_OK;
}

static bs_status tell(bs_tok *t, const found *f)
{
    if (f->moved.n)
        BSI_TRY(note(t,
                     "%s gives %u added tokens other ids than tokenizer.json ('%s' is the first); "
                     "tokenizer.json's are used",
                     f->file, f->moved.n, f->moved.first));
    if (f->changed.n)
        BSI_TRY(note(
            t,
            "%s has %u added tokens of tokenizer.json with other flags (lstrip, rstrip, normalized or "
            "single_word; '%s' is the first); %s is followed",
            f->file, f->changed.n, f->changed.first, f->file));
    if (f->unknown.n)
        BSI_TRY(note(t,
                     "%s names %u special tokens that the tokenizer does not have ('%s' is the first)",
                     f->file, f->unknown.n, f->unknown.first));
    return BS_OK;
}

bs_status bsi_beside_tokens(bs_tok *t, const bsi_beside *b)
{
    found config = {.file = CONFIG}, added = {.file = ADDED}, map = {.file = MAP};
    const cJSON *decoder = get(b->config.root, "added_tokens_decoder");
    if (decoder)
        BSI_TRY(read_decoder(t, &config, decoder));
    BSI_TRY(read_added(t, b, &added));
    BSI_TRY(read_named(t, &config, b->config.root));
    BSI_TRY(read_named(t, &map, b->map.root));
    BSI_TRY(tell(t, &config));
    BSI_TRY(tell(t, &added));
    return tell(t, &map);
}

/* ---- special ids ----------------------------------------------------------------------------- */

static bs_status add_special(bs_tok *t, const char *name, size_t n, uint32_t id)
{
    void *p = t->special;
    bs_status st = bsi_grow(&p, &t->special_cap, t->n_special + 1, sizeof *t->special);
    t->special = p;
    BSI_TRY(st);
    bsi_special *s = &t->special[t->n_special];
    s->id = id;
    s->name = bsi_alloc(BS_TAG_MISC, n + 1);
    if (!s->name)
        return BS_NOMEM;
    memcpy(s->name, name, n);
    s->name[n] = 0;
    t->n_special++;
    return BS_OK;
}

/* Every "NAME_token" whose value is a text or an AddedToken, where none of this name is there yet. */
static bs_status read_names(bs_tok *t, const cJSON *o, const char *file, const char *before)
{
    for (const cJSON *m = o ? o->child : NULL; m; m = m->next) {
        size_t n, len = 0;
        char name[64];
        const char *text = text_of(m), *own;
        if (!ends_with(m->string, "_token", &n) || !text)
            continue;
        uint32_t id = bsi_vocab_id(&t->vocab, text, strlen(text));
        if (id == BSI_NO_ID) /* published files name tokens that they do not have */
            continue;
        n = BSI_MIN(n, sizeof name - 1);
        memcpy(name, m->string, n);
        name[n] = 0;
        int32_t known = bs_tok_special(t, name);
        if (known < 0) {
            BSI_TRY(add_special(t, name, n, id));
        } else if ((uint32_t)known != id) {
            own = bsi_vocab_piece(&t->vocab, (uint32_t)known, &len);
            BSI_TRY(note(t, "%s_token is '%.*s' in %s and '%.80s' in %s; the first is used", name,
                         (int)BSI_MIN(len, 80u), own, before, text, file));
        }
    }
    return BS_OK;
}

/* The key at the top of a file of settings, or where a model of several parts has its text part. */
static const cJSON *setting(const bs_json *file, const char *key)
{
    const cJSON *m = get(file->root, key);
    return m ? m : get(get(file->root, "text_config"), key);
}

static bs_status add_stop(bs_tok *t, uint32_t id)
{
    void *p = t->stop;
    for (size_t i = 0; i < t->n_stop; i++)
        if (t->stop[i] == (int32_t)id)
            return BS_OK;
    bs_status st = bsi_grow(&p, &t->stop_cap, t->n_stop + 1, sizeof *t->stop);
    t->stop = p;
    BSI_TRY(st);
    t->stop[t->n_stop++] = (int32_t)id;
    return BS_OK;
}

/* A single id below 0 means none in published files. */
static bs_status read_stops(bs_tok *t, const bs_json *file, const char *name)
{
    const cJSON *eos = setting(file, "eos_token_id"), *one = cJSON_IsArray(eos) ? eos->child : eos;
    uint32_t id = 0;
    for (; one; one = cJSON_IsArray(eos) ? one->next : NULL) {
        if (one == eos && cJSON_IsNumber(one) && one->valuedouble < 0)
            break;
        if (!bsi_tokjson_id(one, &id))
            return bsi_fail(BS_FORMAT, "%s: eos_token_id is not an id or a list of ids", name);
        BSI_TRY(add_stop(t, id));
    }
    return BS_OK;
}

/* What no file of the tokenizer names, from the first file that has its id. */
static bs_status fill_in(bs_tok *t, const bsi_beside *b, const char *name)
{
    const bs_json *const files[] = {&b->generation, &b->model};
    char key[32];
    size_t len;
    if (bs_tok_special(t, name) >= 0)
        return BS_OK;
    snprintf(key, sizeof key, "%s_token_id", name);
    for (int i = 0; i < 2; i++) {
        const cJSON *m = setting(files[i], key);
        uint32_t id;
        if (bsi_tokjson_id(cJSON_IsArray(m) ? m->child : m, &id) &&
            bsi_vocab_piece(&t->vocab, id, &len))
            return add_special(t, name, strlen(name), id);
    }
    return BS_OK;
}

static bool holds(const int32_t *list, size_t n, int32_t id)
{
    for (size_t i = 0; i < n; i++)
        if (list[i] == id)
            return true;
    return false;
}

/* What tokenizer_config.json and config.json say of the tokens around a text, against what is put there. */
static bs_status compare_around(bs_tok *t, const bsi_beside *b)
{
    const cJSON *add = get(b->config.root, "add_bos_token");
    int32_t bos = bs_tok_special(t, "bos"), eos = bs_tok_special(t, "eos");
    bool puts = bos >= 0 && holds(t->before, t->n_before, bos);
    uint32_t id;
    if (bos >= 0 && cJSON_IsTrue(add) && !puts)
        BSI_TRY(
            note(t,
                 "%s says add_bos_token, but the post_processor of tokenizer.json puts no BOS before a "
                 "text; none is put",
                 CONFIG));
    if (cJSON_IsFalse(add) && puts)
        BSI_TRY(note(
            t,
            "%s says add_bos_token false, but the post_processor of tokenizer.json puts BOS before a "
            "text; it is put",
            CONFIG));
    if (puts && bsi_tokjson_id(setting(&b->model, "bos_token_id"), &id) && id != (uint32_t)bos)
        BSI_TRY(note(t, "texts begin with BOS %d, as the tokenizer says; %s has bos_token_id %u", bos,
                     MODEL, id));
    if (eos >= 0 && holds(t->after, t->n_after, eos))
        BSI_TRY(
            note(t, "tokenizer.json puts the end %d behind every text; prompts go without it", eos));
    return BS_OK;
}

/* Does tokenizer.json put a space, or what stands for one, before a text? */
static bool puts_space(const bs_tok *t)
{
    for (size_t i = 0; i < t->norms.n; i++)
        if (t->norms.op[i].kind == BSI_NORM_PREPEND)
            return true;
    for (size_t i = 0; i < t->pretoks.n; i++)
        if (t->pretoks.op[i].kind != BSI_PRETOK_SPLIT && t->pretoks.op[i].prepend != BSI_PREPEND_NEVER)
            return true;
    return false;
}

/* Settings of tokenizer_config.json that some classes of transformers apply over tokenizer.json. */
static bs_status compare_settings(bs_tok *t, const bsi_beside *b)
{
    const cJSON *space = get(b->config.root, "add_prefix_space");
    if (cJSON_IsBool(space) && cJSON_IsTrue(space) != puts_space(t))
        BSI_TRY(
            note(t, "%s says add_prefix_space %s, tokenizer.json puts %s before a text and is followed",
                 CONFIG, cJSON_IsTrue(space) ? "true" : "false", puts_space(t) ? "a space" : "none"));
    if (cJSON_IsTrue(get(b->config.root, "split_special_tokens")))
        BSI_TRY(note(
            t, "%s says split_special_tokens, which is not done: special tokens in a text are tokens",
            CONFIG));
    return BS_OK;
}

bs_status bsi_beside_specials(bs_tok *t, const bsi_beside *b)
{
    bool config_first = !b->map.root || get(b->config.root, "added_tokens_decoder");
    if (!config_first)
        BSI_TRY(read_names(t, b->map.root, MAP, MAP));
    BSI_TRY(read_names(t, b->config.root, CONFIG, config_first ? CONFIG : MAP));
    if (config_first)
        BSI_TRY(read_names(t, b->map.root, MAP, CONFIG));
    int32_t eos = bs_tok_special(t, "eos");
    BSI_TRY(read_stops(t, &b->generation, GENERATION));
    BSI_TRY(read_stops(t, &b->model, MODEL));
    if (eos >= 0 && t->n_stop && !holds(t->stop, t->n_stop, eos))
        BSI_TRY(note(
            t,
            "the tokenizer's eos_token is %d, but eos_token_id of %s is %d: texts that are trained "
            "end with %d, generation ends at each of them",
            eos, setting(&b->generation, "eos_token_id") ? GENERATION : MODEL, t->stop[0], eos));
    if (eos >= 0)
        BSI_TRY(add_stop(t, (uint32_t)eos));
    BSI_TRY(fill_in(t, b, "bos"));
    BSI_TRY(fill_in(t, b, "eos"));
    BSI_TRY(fill_in(t, b, "pad"));
    BSI_TRY(compare_around(t, b));
    return compare_settings(t, b);
}
