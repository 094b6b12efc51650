/* SPDX-License-Identifier: Apache-2.0 */
/*
** tokenizer_json.c: JSON as tokenizer.json has it: some hundred thousand pieces and merges, and a
** small tree of settings. The tree is read by bs_json_parse, as every other JSON text. The two big members,
** model.vocab and model.merges, are cut out before and read in place by a scanner of their own, for two
** reasons. cJSON's strings end at a zero character, which a piece may hold. And of Gemma 3's file of 33 MB a
** tree takes 192 MB and 0.2 s, where opening that tokenizer takes 0.36 s and 120 MB in all. The text is
** checked to be UTF-8 first; the scanner trusts it in nothing else.
*/
#include "text/text.h"

#include <errno.h>
#include <string.h>

bs_status bsi_tokjson_fail(const bsi_tokjson *j, const char *expected)
{
    if (j->p >= j->end)
        return bsi_fail(BS_FORMAT, "the text ends where %s is expected", expected);
    unsigned char c = (unsigned char)*j->p;
    return bsi_fail(BS_FORMAT, "byte %zu: expected %s, found %s0x%02X", (size_t)(j->p - j->start),
                    expected, c > 32 && c < 127 ? (char[]){'\'', (char)c, '\'', ' ', 0} : "", c);
}

static void skip_space(bsi_tokjson *j)
{
    while (j->p < j->end && (*j->p == ' ' || *j->p == '\n' || *j->p == '\r' || *j->p == '\t'))
        j->p++;
}

bool bsi_tokjson_take(bsi_tokjson *j, char c)
{
    skip_space(j);
    if (j->p >= j->end || *j->p != c)
        return false;
    j->p++;
    return true;
}

static bs_status hex4(bsi_tokjson *j, uint32_t *out)
{
    uint32_t v = 0;
    for (int i = 0; i < 4; i++, j->p++) {
        char c = j->p < j->end ? *j->p : 0;
        int d = c >= '0' && c <= '9'                 ? c - '0'
                : (c | 32) >= 'a' && (c | 32) <= 'f' ? (c | 32) - 'a' + 10
                                                     : -1;
        if (d < 0)
            return bsi_tokjson_fail(j, "a hexadecimal digit");
        v = v << 4 | (uint32_t)d;
    }
    *out = v;
    return BS_OK;
}

static bs_status escape(bsi_tokjson *j, bsi_buf *out)
{
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    char utf8[4];
    const char *at = j->p < j->end && *j->p ? strchr(from, *j->p) : NULL;
    if (at) {
        j->p++;
        return bsi_buf_put(out, &to[at - from], 1);
    }
    if (j->p >= j->end || *j->p != 'u')
        return bsi_tokjson_fail(j, "an escape of JSON");
    uint32_t c = 0, low = 0;
    j->p++;
    BSI_TRY(hex4(j, &c));
    if (c >= 0xD800 && c < 0xDC00 && j->end - j->p > 2 && j->p[0] == '\\' && j->p[1] == 'u') {
        j->p += 2;
        BSI_TRY(hex4(j, &low));
        if (low < 0xDC00 || low > 0xDFFF)
            return bsi_tokjson_fail(j, "the second half of a surrogate pair before this");
        c = 0x10000 + ((c - 0xD800) << 10 | (low - 0xDC00));
    } else if (c >= 0xD800 && c < 0xE000) {
        return bsi_tokjson_fail(j, "a surrogate pair before this");
    }
    return bsi_buf_put(out, utf8, bsi_utf8_put(c, utf8));
}

bs_status bsi_tokjson_string(bsi_tokjson *j, bsi_buf *out)
{
    if (!bsi_tokjson_take(j, '"'))
        return bsi_tokjson_fail(j, "a string");
    for (;;) {
        const char *run = j->p;
        while (j->p < j->end && *j->p != '"' && *j->p != '\\' && (unsigned char)*j->p >= 0x20)
            j->p++;
        BSI_TRY(bsi_buf_put(out, run, (size_t)(j->p - run)));
        if (j->p >= j->end || (unsigned char)*j->p < 0x20)
            return bsi_tokjson_fail(j, "the end of a string");
        if (*j->p++ == '"')
            return BS_OK;
        BSI_TRY(escape(j, out));
    }
}

bs_status bsi_tokjson_uint(bsi_tokjson *j, uint32_t max, uint32_t *out)
{
    uint64_t v = 0;
    skip_space(j);
    const char *from = j->p;
    while (j->p < j->end && *j->p >= '0' && *j->p <= '9' && v <= max)
        v = v * 10 + (uint64_t)(*j->p++ - '0');
    if (j->p == from || (j->p < j->end && strchr("+-.eE", *j->p) && *j->p))
        return bsi_tokjson_fail(j, "a whole number");
    if (v > max) {
        j->p = from;
        return bsi_fail(BS_FORMAT, "byte %zu: a number above %u", (size_t)(j->p - j->start), max);
    }
    *out = (uint32_t)v;
    return BS_OK;
}

static bool skip_string(bsi_tokjson *j)
{
    for (j->p++; j->p < j->end && *j->p != '"'; j->p++)
        if (*j->p == '\\' && j->p + 1 < j->end)
            j->p++;
    return j->p++ < j->end;
}

/* Past one value, looking only at brackets and strings: what is skipped is parsed elsewhere. */
static bs_status skip(bsi_tokjson *j)
{
    size_t depth = 0;
    skip_space(j);
    const char *from = j->p;
    while (j->p < j->end && (depth || strchr("\"[{", *j->p))) {
        char c = *j->p;
        if (c == '"' && !skip_string(j))
            break;
        j->p += c != '"';
        depth += c == '{' || c == '[';
        depth -= c == '}' || c == ']';
        if (!depth)
            return BS_OK;
    }
    while (!depth && j->p < j->end && !strchr(",}] \n\r\t", *j->p))
        j->p++;
    return j->p < j->end && j->p > from ? BS_OK : bsi_tokjson_fail(j, "a whole value");
}

/* The next key of the object that j is in, into key; *more false: the object has ended. */
static bs_status member(bsi_tokjson *j, bsi_buf *key, bool *first, bool *more)
{
    key->n = 0;
    *more = false;
    if (bsi_tokjson_take(j, '}'))
        return BS_OK;
    if (!*first && !bsi_tokjson_take(j, ','))
        return bsi_tokjson_fail(j, "',' or '}'");
    *first = false;
    BSI_TRY(bsi_tokjson_string(j, key));
    if (!bsi_tokjson_take(j, ':'))
        return bsi_tokjson_fail(j, "':'");
    skip_space(j);
    *more = true;
    return BS_OK;
}

static bool key_is(const bsi_buf *key, const char *name)
{
    return key->n == strlen(name) && !memcmp(key->p, name, key->n);
}

/* Looks for "vocab" and "merges" in the object that begins at j. */
static bs_status find_bulk(bsi_tokjson *j, bsi_buf *key, bsi_tokjson *vocab, bsi_tokjson *merges)
{
    bool first = true, more;
    if (!bsi_tokjson_take(j, '{'))
        return bsi_tokjson_fail(j, "an object");
    for (;;) {
        BSI_TRY(member(j, key, &first, &more));
        if (!more)
            return BS_OK;
        bsi_tokjson *bulk = key_is(key, "vocab") ? vocab : key_is(key, "merges") ? merges : NULL;
        const char *from = j->p;
        BSI_TRY(skip(j));
        if (bulk && (*from == '{' || *from == '[')) {
            if (bulk->start)
                return bsi_fail(BS_FORMAT, "model.%s is there twice",
                                bulk == vocab ? "vocab" : "merges");
            *bulk = (bsi_tokjson){j->start, from, j->p};
        }
    }
}

static bs_status find_model(const char *text, size_t n, bsi_tokjson *vocab, bsi_tokjson *merges)
{
    bsi_tokjson j = {text, text, text + n};
    bsi_buf key = {0};
    bool first = true, more = true;
    bs_status st = bsi_tokjson_take(&j, '{') ? BS_OK : bsi_tokjson_fail(&j, "an object");
    while (st == BS_OK && more) {
        st = member(&j, &key, &first, &more);
        if (st == BS_OK && more) {
            if (key_is(&key, "model") && j.p < j.end && *j.p == '{')
                st = find_bulk(&j, &key, vocab, merges);
            else
                st = skip(&j);
        }
    }
    bsi_buf_free(&key);
    return st;
}

/* What cJSON takes beyond JSON is taken here too: files are of many writers, and their texts are checked to be UTF-8
   where that counts. */
bs_status bsi_tokjson_parse(const char *text, size_t n, bs_json *tree)
{
    return bs_json_parse(text, n, &(bs_json_rules){.lax = true}, NULL, tree);
}

bs_status bsi_tokjson_check(const char *text, size_t n)
{
    static const char lfs[] = "version https://git-lfs";
    if (n >= sizeof lfs - 1 && !memcmp(text, lfs, sizeof lfs - 1))
        return bsi_fail(BS_FORMAT,
                        "the file is a Git LFS pointer; fetch the file itself (git lfs pull)");
    if (n && text[0] == '<')
        return bsi_fail(BS_FORMAT, "the file is a web page, not JSON; download it again");
    size_t good = bs_utf8_valid(text, n);
    if (good < n)
        return bsi_fail(BS_FORMAT, "byte %zu is not UTF-8", good);
    return BS_OK;
}

bs_status bsi_tokjson_open(const char *text, size_t n, bs_json *tree, bsi_tokjson *vocab,
                           bsi_tokjson *merges)
{
    bsi_buf small = {0};
    *vocab = *merges = (bsi_tokjson){0};
    BSI_TRY(bsi_tokjson_check(text, n));
    bs_status st = find_model(text, n, vocab, merges);
    const bsi_tokjson *cut[2] = {vocab, merges};
    if (vocab->start && merges->start && vocab->p > merges->p) {
        cut[0] = merges;
        cut[1] = vocab;
    }
    const char *from = text;
    for (int i = 0; st == BS_OK && i < 2; i++) {
        if (!cut[i]->start)
            continue;
        st = bsi_buf_put(&small, from, (size_t)(cut[i]->p + 1 - from)); /* with the opening bracket */
        from = cut[i]->end - 1;
    }
    if (st == BS_OK)
        st = bsi_buf_put(&small, from, (size_t)(text + n - from));
    if (st == BS_OK)
        st = bsi_tokjson_parse(small.p, small.n, tree);
    bsi_buf_free(&small);
    return st;
}

bs_status bsi_tokjson_only(const cJSON *o, const char *where, const char *const *keys)
{
    if (!cJSON_IsObject(o))
        return bsi_fail(BS_FORMAT, "%s: expected an object, found %s", where, bsi_tokjson_type(o));
    for (const cJSON *m = o->child; m; m = m->next) {
        const char *const *k = keys;
        while (*k && strcmp(*k, m->string))
            k++;
        if (!*k)
            return bsi_fail(BS_UNSUPPORTED, "%s: member '%.60s' is not known to this version", where,
                            m->string);
        for (const cJSON *other = o->child; other != m; other = other->next)
            if (!strcmp(other->string, m->string))
                return bsi_fail(BS_FORMAT, "%s: member '%.60s' is there twice", where, m->string);
    }
    return BS_OK;
}

bs_status bsi_tokjson_bool(const cJSON *o, const char *where, const char *key, bool *out)
{
    const cJSON *m = cJSON_GetObjectItemCaseSensitive(o, key);
    if (!m || cJSON_IsNull(m))
        return BS_OK;
    if (!cJSON_IsBool(m))
        return bsi_fail(BS_FORMAT, "%s.%s: expected true or false, found %s", where, key,
                        bsi_tokjson_type(m));
    *out = cJSON_IsTrue(m);
    return BS_OK;
}

bs_status bsi_tokjson_text(const cJSON *o, const char *where, const char *key, const char **out)
{
    const cJSON *m = cJSON_GetObjectItemCaseSensitive(o, key);
    if (!m || cJSON_IsNull(m))
        return BS_OK;
    if (!cJSON_IsString(m))
        return bsi_fail(BS_FORMAT, "%s.%s: expected a string, found %s", where, key,
                        bsi_tokjson_type(m));
    *out = m->valuestring;
    return BS_OK;
}

const char *bsi_tokjson_type(const cJSON *o)
{
    const cJSON *type = cJSON_GetObjectItemCaseSensitive(o, "type");
    if (cJSON_IsString(type))
        return type->valuestring;
    return !o                  ? "nothing"
           : cJSON_IsNull(o)   ? "null"
           : cJSON_IsBool(o)   ? "a boolean"
           : cJSON_IsNumber(o) ? "a number"
           : cJSON_IsString(o) ? "a string"
           : cJSON_IsArray(o)  ? "an array"
                               : "an object without a type";
}

bool bsi_tokjson_id(const cJSON *o, uint32_t *id)
{
    if (!cJSON_IsNumber(o) || !(o->valuedouble >= 0 && o->valuedouble <= BSI_MAX_ID) ||
        o->valuedouble != (double)(uint32_t)o->valuedouble)
        return false;
    *id = (uint32_t)o->valuedouble;
    return true;
}
