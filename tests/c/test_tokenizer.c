/* SPDX-License-Identifier: Apache-2.0 */
/*
** test_tokenizer.c: ids and texts against what the Python package makes of the same files (tests/data,
** and the published tokenizers under BS_SHARED when it is there); merging against its definition; hostile
** files and texts; streams, threads, lost memory. What is refused: test_tokenizer_refused.c.
*/
#include "base/base.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>
#include <sys/stat.h>

#include <cmocka.h>

#include "../fuzz/fuzz_tokenizer.c"
#include "tokenizer_file.h"

#include <cjson/cJSON.h>
#include <pthread.h>

static char *read_all(FILE *f)
{
    size_t n = 0, cap = 1 << 16;
    char *p = malloc(cap);
    for (size_t got; p && (got = fread(p + n, 1, cap - n - 1, f)) > 0;) {
        n += got;
        if (cap - n < 2)
            p = realloc(p, cap *= 2);
    }
    assert_non_null(p);
    p[n] = 0;
    return p;
}

#define ZERO                                                                                           \
    "\xEF\xA3\xBF" /* U+F8FF, which no row holds, instead of a zero, where cJSON's texts end           \
                    */

/* A file as a JSON tree; xz files through the xz program. NULL: absent. */
static cJSON *load(const char *path)
{
    char command[700];
    size_t n = strlen(path);
    bool xz = n > 3 && !strcmp(path + n - 3, ".xz");
    if (access(path, R_OK) != 0)
        return NULL;
    snprintf(command, sizeof command, "xz -dc '%s'", path);
    FILE *f = xz ? popen(command, "r") : fopen(path, "rb");
    assert_non_null(f);
    char *text = read_all(f);
    int rc = xz ? pclose(f) : fclose(f);
    for (char *zero = text; (zero = strstr(zero, "\\u0000"));)
        memcpy(zero, "\\uF8FF", 6);
    cJSON *tree = cJSON_Parse(text);
    free(text);
    if (rc != 0 || !tree)
        fail_msg("%s cannot be read (is xz installed?)", path);
    return tree;
}

static const cJSON *get(const cJSON *o, const char *key)
{
    return cJSON_GetObjectItemCaseSensitive(o, key);
}

/* The text of a string with its zeros; valid until the next call. */
static const char *text_of(const cJSON *o, size_t *n)
{
    static char buf[4096];
    *n = 0;
    for (const char *s = o->valuestring; *s; s++) {
        bool zero = !strncmp(s, ZERO, 3);
        assert_true(*n + 1 < sizeof buf);
        buf[(*n)++] = zero ? 0 : *s;
        s += zero ? 2 : 0;
    }
    buf[*n] = 0;
    return buf;
}

/* ---- ids and texts of a row ------------------------------------------------------------------ */

static void check_ids(opened *o, const cJSON *row, unsigned flags, const cJSON *want, const char *where)
{
    bs_tok_ids out;
    int64_t i = 0;
    size_t size;
    const cJSON *id;
    const char *text = text_of(row, &size);
    if (bs_tok_encode(o->w, text, size, flags, &out) != BS_OK)
        fail_msg("%s: '%s': %s", where, text, bs_error()->msg);
    cJSON_ArrayForEach(id, want)
    {
        if (i >= out.n || out.id[i] != (int)id->valuedouble)
            fail_msg("%s: '%s': id %d is %d, should be %d", where, text, (int)i,
                     i < out.n ? (int)out.id[i] : -1, (int)id->valuedouble);
        i++;
    }
    if (i != out.n)
        fail_msg("%s: '%s': %d ids, should be %d", where, text, (int)out.n, (int)i);
}

static void check_text(opened *o, const cJSON *ids, unsigned flags, const cJSON *want,
                       const char *where)
{
    int32_t id[4096];
    int64_t n = 0;
    const cJSON *item;
    const char *text, *expected;
    size_t len, expected_len;
    cJSON_ArrayForEach(item, ids) id[n++] = (int32_t)item->valuedouble;
    assert_int_equal(bs_tok_decode(o->w, id, n, flags, &text, &len), BS_OK);
    expected = text_of(want, &expected_len);
    if (len != expected_len || memcmp(text, expected, len) != 0)
        fail_msg("%s: decodes to '%s', should be '%s'", where, text, expected);
    check_decode(o->t, o->w, id, n, flags);
}

static void check_spans(opened *o, const cJSON *row)
{
    bs_tok_ids out;
    size_t n;
    const char *text = text_of(row, &n);
    assert_int_equal(bs_tok_encode(o->w, text, n, BS_TOK_SPANS, &out), BS_OK);
    for (int64_t i = 0; i < out.n; i++) {
        assert_true(out.span[i].first <= out.span[i].end && out.span[i].end <= n);
        if (i)
            assert_true(out.span[i - 1].first <= out.span[i].first);
    }
}

static void test_cases(void **state)
{
    (void)state;
    cJSON *tree = load("tests/data/tokenizer/cases.json");
    assert_non_null(tree);
    const cJSON *c;
    cJSON_ArrayForEach(c, get(tree, "cases"))
    {
        char *json = cJSON_PrintUnformatted(get(c, "tokenizer"));
        opened o = open_text(json);
        const char *name = get(c, "name")->valuestring;
        const cJSON *text = get(tree, "texts")->child, *row;
        for (row = o.t ? get(c, "rows")->child : NULL; row; row = row->next) {
            check_ids(&o, text, BS_TOK_SPECIAL, get(row, "ids"), name);
            check_text(&o, get(row, "ids"), 0, get(row, "text"), name);
            check_text(&o, get(row, "ids"), BS_TOK_SKIP_SPECIAL, get(row, "plain"), name);
            check_spans(&o, text);
            text = text->next;
        }
        assert_true(!o.t || !text);
        shut(&o);
        cJSON_free(json);
    }
    cJSON_Delete(tree);
}

static void unpack(const char *from, const char *name)
{
    char command[1200];
    snprintf(command, sizeof command, "xz -dc '%s/%s.xz' > '%s'", from, name, tmpdir_file(name));
    if (system(command) != 0)
        fail_msg("'%s' failed", command);
}

static void test_published(void **state)
{
    (void)state;
    const char *shared = getenv("BS_SHARED");
    char path[600];
    snprintf(path, sizeof path, "%s/tokenizers/encodings.json.xz", shared ? shared : "../shared");
    cJSON *tree = load(path);
    if (!tree)
        skip();
    const cJSON *c;
    cJSON *hello = cJSON_CreateString("Hello world");
    int tokenizers = 0;
    cJSON_ArrayForEach(c, get(tree, "tokenizers"))
    {
        snprintf(path, sizeof path, "%s/tokenizers/%s", shared ? shared : "../shared", c->string);
        unpack(path, "tokenizer.json");
        unpack(path, "tokenizer_config.json");
        opened o = open_path(tmpdir_path);
        const cJSON *text = get(tree, "strings")->child, *row;
        tokenizers++;
        if (!o.t)
            continue;
        cJSON_ArrayForEach(row, get(c, "rows"))
        {
            check_ids(&o, text, 0, get(row, "ids"), c->string);
            check_text(&o, get(row, "ids"), 0, get(row, "text"), c->string);
            text = text->next;
        }
        assert_null(text);
        check_ids(&o, hello, BS_TOK_SPECIAL, get(c, "bos_row"), c->string);
        assert_true(bs_tok_special(o.t, "eos") >= 0);
        shut(&o);
    }
    assert_int_equal(tokenizers, 6);
    cJSON_Delete(hello);
    cJSON_Delete(tree);
    remove(tmpdir_file("tokenizer_config.json"));
}

/* ---- small files ----------------------------------------------------------------------------- */

static void expect(opened *o, const char *text, size_t n, unsigned flags, const char *want)
{
    char got[1024] = "";
    bs_tok_ids out;
    if (bs_tok_encode(o->w, text, n, flags, &out) != BS_OK)
        fail_msg("%s", bs_error()->msg);
    for (int64_t i = 0; i < out.n; i++) {
        size_t at = strlen(got);
        snprintf(got + at, sizeof got - at, "%s%d", i ? " " : "", (int)out.id[i]);
        if (out.span)
            snprintf(got + strlen(got), sizeof got - strlen(got), ":%u-%u", out.span[i].first,
                     out.span[i].end);
    }
    assert_string_equal(got, want);
}

static void test_small(void **state)
{
    (void)state;
    opened o = open_text(file_with(NULL, NULL, NULL, NULL));
    size_t n;
    expect(&o, "aba\0ab", 6, BS_TOK_SPANS, "4:0-3 5:3-4 3:4-6"); /* a zero is a character */
    expect(&o, "a\xC3\xA9zz", 5, BS_TOK_SPANS, "1:0-1 7:1-3 8:1-3 0:3-4 0:4-5");
    expect(&o, "", 0, BS_TOK_SPECIAL, "");
    assert_int_equal(bs_tok_vocab_size(o.t), 9);
    assert_int_equal(bs_tok_id(o.t, "\0", 1), 5);
    assert_int_equal(bs_tok_id(o.t, "abab", 4), -1);
    assert_memory_equal(bs_tok_piece(o.t, 4, &n), "aba", 3);
    assert_int_equal(n, 3);
    assert_null(bs_tok_piece(o.t, 9, &n));
    assert_null(bs_tok_piece(o.t, -1, &n));
    shut(&o);
}

static void test_bad_utf8(void **state)
{
    (void)state;
    static const struct {
        const char *text, *same;
    } row[] = {/* maximal subparts: one U+FFFD for each */
               {"a\xFF"
                "b",
                "a\xEF\xBF\xBD"
                "b"},
               {"\xE4\xB8", "\xEF\xBF\xBD"},
               {"\xE4\xB8"
                "a",
                "\xEF\xBF\xBD"
                "a"},
               {"\xC0\x80", "\xEF\xBF\xBD\xEF\xBF\xBD"},
               {"\xED\xA0\x80", "\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD"},
               {"\xF0\x9F\x98", "\xEF\xBF\xBD"},
               {"\xF4\x90\x80\x80", "\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD"},
               {"\x80", "\xEF\xBF\xBD"}};
    opened o = open_text(file_with(NULL, NULL, NULL,
                                   "{\"type\":\"BPE\",\"vocab\":{\"a\":0,\"b\":1,\"\\uFFFD\":2},"
                                   "\"merges\":[]}"));
    for (size_t i = 0; i < BSI_COUNT(row); i++) {
        bs_tok_ids out;
        int32_t id[8];
        assert_int_equal(bs_tok_encode(o.w, row[i].same, strlen(row[i].same), 0, &out), BS_OK);
        int64_t n = out.n;
        memcpy(id, out.id, (size_t)n * sizeof *id);
        assert_int_equal(bs_tok_encode(o.w, row[i].text, strlen(row[i].text), 0, &out), BS_OK);
        assert_int_equal(out.n, n);
        assert_memory_equal(out.id, id, (size_t)n * sizeof *id);
    }
    expect(&o,
           "a\xE4\xB8"
           "b",
           4, BS_TOK_SPANS, "0:0-1 2:1-3 1:3-4");
    shut(&o);
}

/* Sanitizers see whether the bytes of nothing have an address. */
static void test_empty_piece(void **state)
{
    (void)state;
    static const char *const merges[] = {"", "\" \"", "[\"\",\"\"]", "[\"\",\"a\"],[\"a\",\"\"]"};
    for (size_t i = 0; i < BSI_COUNT(merges); i++) {
        char model[128];
        size_t n;
        snprintf(model, sizeof model, MODEL("\"\":0,\"a\":1", "%s"), merges[i]);
        opened o = open_text(file_with(NULL, NULL, NULL, model));
        expect(&o, "aba", 3, 0, "1 1");
        assert_int_equal(bs_tok_id(o.t, "", 0), 0);
        assert_non_null(bs_tok_piece(o.t, 0, &n));
        assert_int_equal(n, 0);
        shut(&o);
    }
    opened o = open_text(file_with(NULL, NULL, NULL, MODEL("\"\":0", "\" \"")));
    expect(&o, "a", 1, 0, "");
    shut(&o);
}

#if BS_HAVE_PCRE2
static void test_endless_match(void **state)
{
    (void)state;
    char text[64];
    bs_tok_ids out;
    opened o = open_text(file_with(NULL, NULL, SPLIT("(?:a+)+(?=b)"), NULL));
    memset(text, 'a', sizeof text);
    assert_int_equal(bs_tok_encode(o.w, text, sizeof text, 0, &out), BS_FORMAT);
    ASSERT_ERROR("match limit");
    expect(&o, "ab", 2, 0, "1 2"); /* the work is as good as before */
    shut(&o);
}
#endif

/* ---- special ids ----------------------------------------------------------------------------- */

static void put_file(const char *name, const char *text)
{
    tmpdir_put(name, text, strlen(text));
}

static void test_special(void **state)
{
    (void)state;
    put_file("tokenizer.json", file_with(TOKEN("9", "<s>") "," TOKEN("10", "</s>"), NULL, NULL, NULL));
    put_file("tokenizer_config.json",
             "{\"bos_token\":\"<s>\",\"eos_token\":{\"__type\":\"AddedToken\","
             "\"content\":\"</s>\"},\"pad_token\":null,\"unk_token\":\"<gone>\","
             "\"image_token\":\"a\",\"add_bos_token\":true}");
    opened o = open_path(tmpdir_path);
    const int32_t *stop;
    int32_t id;
    assert_int_equal(bs_tok_special(o.t, "bos"), 9);
    assert_int_equal(bs_tok_special(o.t, "eos"), 10);
    assert_int_equal(bs_tok_special(o.t, "image"), 1);
    assert_int_equal(bs_tok_special(o.t, "pad"), -1);
    assert_int_equal(bs_tok_special(o.t, "unk"), -1);
    assert_int_equal(bs_tok_special_count(o.t), 3);
    assert_string_equal(bs_tok_special_at(o.t, 1, &id), "eos");
    assert_null(bs_tok_special_at(o.t, 3, &id));
    assert_int_equal(bs_tok_stops(o.t, &stop), 1);
    assert_int_equal(stop[0], 10);
    expect(&o, "a<s>b", 5, 0, "1 9 2");
    expect(&o, "a<s>b", 5, BS_TOK_LITERAL, "1 0 0 0 2");
    shut(&o);
    put_file("generation_config.json", "{\"eos_token_id\":[10,4]}");
    o = open_path(tmpdir_file("tokenizer.json")); /* the file: its neighbours are read, too */
    assert_int_equal(bs_tok_stops(o.t, &stop), 2);
    assert_int_equal(stop[1], 4);
    shut(&o);
    put_file("generation_config.json", "{\"eos_token_id\":[-1]}");
    bs_tok *t;
    assert_int_equal(bs_tok_open(tmpdir_path, &t), BS_FORMAT);
    ASSERT_ERROR("generation_config.json: eos_token_id");
    remove(tmpdir_file("generation_config.json"));
    put_file("tokenizer_config.json", "{");
    assert_int_equal(bs_tok_open(tmpdir_path, &t), BS_FORMAT);
    ASSERT_ERROR("tokenizer_config.json");
    remove(tmpdir_file("tokenizer_config.json"));
}

/* ---- merging against its definition ---------------------------------------------------------- */

#define LETTERS 4

/* Random merges over four letters, in one text for the file and as a list. */
typedef struct grammar {
    char piece[400][64];
    int n, left[400], right[400], made[400], merges;
    uint64_t seed;
} grammar;

static uint32_t draw(uint64_t *seed, uint32_t below)
{
    *seed = *seed * UINT64_C(6364136223846793005) + 1442695040888963407u;
    return (uint32_t)(*seed >> 33) % below;
}

static int find_piece(const grammar *g, const char *s)
{
    for (int i = 0; i < g->n; i++)
        if (!strcmp(g->piece[i], s))
            return i;
    return -1;
}

static void make_grammar(grammar *g, char *json, size_t size)
{
    for (g->n = 0; g->n < LETTERS; g->n++)
        snprintf(g->piece[g->n], 2, "%c", 'a' + g->n);
    while (g->merges < 60) {
        char made[128];
        int a = (int)draw(&g->seed, (uint32_t)g->n), b = (int)draw(&g->seed, (uint32_t)g->n), twin = 0;
        for (int i = 0; i < g->merges; i++)
            twin |= g->left[i] == a && g->right[i] == b;
        snprintf(made, sizeof made, "%s%s", g->piece[a], g->piece[b]);
        if (twin || strlen(made) > 12)
            continue;
        if (find_piece(g, made) < 0)
            memcpy(g->piece[g->n++], made, strlen(made) + 1);
        g->left[g->merges] = a;
        g->right[g->merges] = b;
        g->made[g->merges++] = find_piece(g, made);
    }
    size_t at = (size_t)snprintf(json, size, "{\"type\":\"BPE\",\"vocab\":{");
    for (int i = 0; i < g->n; i++)
        at += (size_t)snprintf(json + at, size - at, "%s\"%s\":%d", i ? "," : "", g->piece[i], i);
    at += (size_t)snprintf(json + at, size - at, "},\"merges\":[");
    for (int i = 0; i < g->merges; i++)
        at += (size_t)snprintf(json + at, size - at, "%s\"%s %s\"", i ? "," : "", g->piece[g->left[i]],
                               g->piece[g->right[i]]);
    snprintf(json + at, size - at, "]}");
}

/* The definition: the lowest rank anywhere, its leftmost place, until nothing merges. */
static int merge_plainly(const grammar *g, int *id, int n)
{
    for (;;) {
        int best = g->merges, at = 0;
        for (int i = 0; i + 1 < n; i++)
            for (int r = 0; r < best; r++)
                if (g->left[r] == id[i] && g->right[r] == id[i + 1]) {
                    best = r;
                    at = i;
                }
        if (best == g->merges)
            return n;
        id[at] = g->made[best];
        n--;
        memmove(id + at + 1, id + at + 2, (size_t)(n - at - 1) * sizeof *id);
    }
}

static void test_merging(void **state)
{
    (void)state;
    static char json[8192], word[400];
    int id[400];
    for (uint64_t seed = 1; seed <= 8; seed++) {
        grammar g = {.seed = seed};
        make_grammar(&g, json, sizeof json);
        opened o = open_text(file_with(NULL, NULL, NULL, json));
        for (int round = 0; round < 60; round++) {
            int n = 1 + (int)draw(&g.seed, round % 3 ? 40 : 400), letters = 1 + round % LETTERS;
            for (int i = 0; i < n; i++) {
                id[i] = (int)draw(&g.seed, (uint32_t)letters);
                word[i] = (char)('a' + id[i]);
            }
            bs_tok_ids out;
            assert_int_equal(bs_tok_encode(o.w, word, (size_t)n, 0, &out), BS_OK);
            n = merge_plainly(&g, id, n);
            assert_int_equal(out.n, n);
            assert_memory_equal(out.id, id, (size_t)n * sizeof *id);
        }
        shut(&o);
    }
}

/* A word of a million characters must not take a million times a million steps. */
static void test_long_word(void **state)
{
    (void)state;
    enum { N = 1000000 };
    char *text = malloc(N);
    bs_tok_ids out;
    opened o = open_text(file_with(NULL, NULL, NULL, NULL));
    assert_non_null(text);
    for (int i = 0; i < N; i++)
        text[i] = i % 3 == 1 ? 'b' : 'a';
    double start = bsi_now();
    assert_int_equal(bs_tok_encode(o.w, text, N, 0, &out), BS_OK);
    assert_true(bsi_now() - start < 20); /* the square would take minutes */
    assert_int_equal(out.n, N / 3 + 1);
    assert_int_equal(out.id[0], 4);
    free(text);
    shut(&o);
}

#if BS_HAVE_UTF8PROC
/* Any number of marks on a letter, in any order, is sorted without comparing all with all. */
static void test_many_marks(void **state)
{
    (void)state;
    enum { PAIRS = 100000 };
    char *text = malloc(1 + 4 * PAIRS);
    bs_tok_ids out;
    opened o =
        open_text(file_with(NULL, "{\"type\":\"NFC\"}", NULL,
                            "{\"type\":\"BPE\",\"vocab\":{\"a\\u0325\":9,\"\xE1\xB8\x81\":0,"
                            "\"\\u0316\":1,\"\\u0301\":2,\"a\":3,\"\xC3\xA1\":4},\"merges\":[]}"));
    assert_non_null(text);
    text[0] = 'a';
    for (int i = 0; i < PAIRS; i++)
        memcpy(text + 1 + 4 * i, "\xCC\x81\xCC\x96", 4);
    assert_int_equal(bs_tok_encode(o.w, text, 1 + 4 * PAIRS, 0, &out), BS_OK);
    assert_int_equal(out.n, 2 * PAIRS);
    assert_int_equal(out.id[0], 4); /* the acute joins the letter past the graves below */
    assert_int_equal(out.id[1], 1);
    assert_int_equal(out.id[PAIRS], 1);
    assert_int_equal(out.id[PAIRS + 1], 2);
    free(text);
    shut(&o);
}
#endif

/* ---- streams --------------------------------------------------------------------------------- */

static void test_stream(void **state)
{
    (void)state;
    const char *text;
    size_t n;
    bs_tok_stream *s;
    const char *json =
        "{\"decoder\":{\"type\":\"Sequence\",\"decoders\":[{\"type\":\"Replace\",\"pattern\":"
        "{\"String\":\"_\"},\"content\":\" \"},{\"type\":\"ByteFallback\"},{\"type\":\"Fuse\"},"
        "{\"type\":\"Strip\",\"content\":\" \",\"start\":1,\"stop\":1}]},\"model\":{\"type\":"
        "\"BPE\",\"vocab\":{\"_\":0,\"_a\":1,\"b_\":2,\"<0xC3>\":3,\"<0xA9>\":4},\"merges\":[]}}";
    opened o = open_text(json);
    static const struct {
        int32_t id;
        const char *gives;
    } step[] = {{1, "a"},
                {2, "b"},
                {0, " "},
                {3, ""},
                {4, ""},
                {1, " \xC3\xA9 a"},
                {3, ""},
                {3, ""},
                {2, "\xEF\xBF\xBD\xEF\xBF\xBD"
                    "b"}};
    assert_int_equal(bs_tok_stream_new(o.t, 0, &s), BS_OK);
    for (int round = 0; round < 2; round++) { /* finish begins anew */
        for (size_t i = 0; i < BSI_COUNT(step); i++) {
            assert_int_equal(bs_tok_stream_push(s, step[i].id, &text, &n), BS_OK);
            assert_string_equal(text, step[i].gives);
        }
        assert_int_equal(bs_tok_stream_finish(s, &text, &n), BS_OK);
        assert_string_equal(text, ""); /* the last space is stripped */
    }
    bs_tok_stream_free(s);
    shut(&o);
}

/* ---- threads and files ----------------------------------------------------------------------- */

static char *make_lines(size_t *size)
{
    static const char *const word[] = {"ab",       "aba", " ",    "b",    "z",
                                       "\xC3\xA9", "\n",  "abab", "\n\n", "a b a"};
    uint64_t seed = 3;
    size_t n = 0;
    char *p = malloc(3 << 20);
    assert_non_null(p);
    while (n < (5 << 19)) { /* some chunks, and lines of some length */
        const char *w = word[draw(&seed, BSI_COUNT(word))];
        memcpy(p + n, w, strlen(w));
        n += strlen(w);
    }
    memcpy(p + n, "\nab", 3); /* no newline at the end */
    *size = n + 3;
    return p;
}

static void test_encode_file(void **state)
{
    (void)state;
    opened o = open_text(file_with(NULL, NULL, NULL, NULL));
    size_t n;
    char *text = make_lines(&n);
    const char *path = tmpdir_put("lines.txt", text, n), *end = text + n;
    for (int threads = 1; threads <= 4; threads += 3) {
        bs_tok_lines *l;
        int64_t line = 0, ids = 0, count;
        const int32_t *id;
        assert_int_equal(bs_tok_encode_file(o.t, path, threads, 0, &l), BS_OK);
        for (const char *s = text; s < end; line++) {
            bs_tok_ids out;
            const char *stop = memchr(s, '\n', (size_t)(end - s));
            size_t len = (size_t)((stop ? stop : end) - s);
            assert_int_equal(bs_tok_encode(o.w, s, len, 0, &out), BS_OK);
            assert_int_equal(bs_tok_lines_get(l, line, &id, &count), BS_OK);
            assert_int_equal(count, out.n);
            if (count)
                assert_memory_equal(id, out.id, (size_t)count * sizeof *id);
            ids += count;
            s += len + 1;
        }
        assert_int_equal(bs_tok_lines_count(l), line);
        assert_int_equal(bs_tok_lines_ids(l), ids);
        assert_int_equal(bs_tok_lines_get(l, line, &id, &count), BS_ARG);
        bs_tok_lines_free(l);
    }
    bs_tok_lines *l = NULL;
    assert_int_equal(mkfifo(tmpdir_file("fifo"), 0600),
                     0); /* nothing waits for who might write into it */
    assert_int_equal(bs_tok_encode_file(o.t, tmpdir_file("fifo"), 1, 0, &l), BS_IO);
    ASSERT_ERROR("a regular file is needed");
    remove(tmpdir_file("fifo"));
    assert_int_equal(bs_tok_encode_file(o.t, tmpdir_put("empty", "", 0), 2, 0, &l), BS_OK);
    assert_int_equal(bs_tok_lines_count(l), 0);
    bs_tok_lines_free(l);
    assert_int_equal(bs_tok_encode_file(o.t, tmpdir_file("absent"), 2, 0, &l), BS_IO);
    assert_int_equal(bs_tok_encode_file(o.t, path, -1, 0, &l), BS_ARG);
    assert_int_equal(bs_tok_encode_file(o.t, path, 1, BS_TOK_SPANS, &l), BS_ARG);
    bs_cancel(true);
    assert_int_equal(bs_tok_encode_file(o.t, path, 2, 0, &l), BS_CANCELLED);
    bs_cancel(false);
    free(text);
    shut(&o);
}

#if BS_HAVE_PCRE2
/* A thread's failure reaches the caller with the line. */
static void test_file_failure(void **state)
{
    (void)state;
    bs_tok_lines *l;
    opened o = open_text(file_with(NULL, NULL, SPLIT("(?:a+)+(?=b)"), NULL));
    const char *text = "ab\nb\naaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\nab\n";
    const char *path = tmpdir_put("lines.txt", text, strlen(text));
    assert_int_equal(bs_tok_encode_file(o.t, path, 2, 0, &l), BS_FORMAT);
    ASSERT_ERROR("line 3");
    ASSERT_ERROR("match limit");
    shut(&o);
}
#endif

/* ---- lost memory, changed files -------------------------------------------------------------- */

static void test_no_memory(void **state)
{
    (void)state;
    size_t before = bs_host_bytes(BS_TAG_MISC);
    const char *norm =
        BS_HAVE_UTF8PROC ? "{\"type\":\"NFC\"}" : "{\"type\":\"Prepend\",\"prepend\":\" \"}";
    put_file("tokenizer.json", file_with(TOKEN("9", "<s>"), norm,
                                         "{\"type\":\"Metaspace\",\"replacement\":\"_\"}", NULL));
    put_file("tokenizer_config.json",
             "{\"bos_token\":\"<s>\",\"eos_token\":\"<gone>\",\"added_tokens_decoder\":{\"9\":"
             "{\"content\":\"<s>\",\"rstrip\":true},\"11\":{\"content\":\"<x>\"}}}");
    put_file("special_tokens_map.json", "{\"bos_token\":\"ab\"}");
    put_file("added_tokens.json", "{\"<y>\":12,\"<s>\":4}");
    put_file("generation_config.json", "{\"eos_token_id\":[11,12]}");
    put_file("config.json", "{\"eos_token_id\":9}");
    int failed = 0;
    for (uint64_t nth = 1;; nth++) {
        bs_tok *t = NULL;
        bs_tok_work *w = NULL;
        bs_tok_ids out;
        const char *text;
        size_t n;
        bsi_alloc_fail_nth(nth);
        bs_status st = bs_tok_open(tmpdir_path, &t);
        if (st == BS_OK)
            st = bs_tok_work_new(t, &w);
        if (st == BS_OK)
            st = bs_tok_encode(w,
                               "ab e\xCC\x81<s>\xFF"
                               "aba",
                               12, BS_TOK_SPANS, &out);
        if (st == BS_OK)
            st = bs_tok_decode(w, out.id, out.n, 0, &text, &n);
        bsi_alloc_fail_nth(0);
        bs_tok_work_free(w);
        bs_tok_close(t);
        assert_int_equal(bs_host_bytes(BS_TAG_MISC), before);
        if (st == BS_OK)
            break;
        assert_int_equal(st, BS_NOMEM);
        failed++;
    }
    assert_true(failed > 20);
    remove(tmpdir_file("tokenizer_config.json"));
    remove(tmpdir_file("special_tokens_map.json"));
    remove(tmpdir_file("added_tokens.json"));
    remove(tmpdir_file("generation_config.json"));
    remove(tmpdir_file("config.json"));
}

/* Cuts and changes of whole files, always the same ones. */
static void test_replay(void **state)
{
    (void)state;
    cJSON *tree = load("tests/data/tokenizer/cases.json");
    uint64_t seed = 11;
    const cJSON *c;
    cJSON_ArrayForEach(c, get(tree, "cases"))
    {
        char *json = cJSON_PrintUnformatted(get(c, "tokenizer"));
        size_t n = strlen(json);
        const char *model = strstr(json, "\"model\"");
        size_t head = model ? (size_t)(model - json) : n;
        uint8_t *data = malloc(n);
        assert_non_null(data);
        LLVMFuzzerTestOneInput((const uint8_t *)json, n);
        for (int round = 0; round < 60; round++) {
            size_t size = n;
            memcpy(data, json, n);
            if (round % 6 == 0)
                size = draw(&seed, (uint32_t)n);
            for (uint32_t k = 0; k <= draw(&seed, 3); k++) { /* mostly in front of the vocabulary */
                size_t at = draw(&seed, (uint32_t)(round % 3 ? head : n));
                data[at] = round % 2 ? (uint8_t)draw(&seed, 256) : data[draw(&seed, (uint32_t)n)];
            }
            LLVMFuzzerTestOneInput(data, size);
        }
        free(data);
        cJSON_free(json);
    }
    cJSON_Delete(tree);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_small),
        cmocka_unit_test(test_bad_utf8),
        cmocka_unit_test(test_empty_piece),
        cmocka_unit_test(test_special),
        cmocka_unit_test(test_merging),
        cmocka_unit_test(test_long_word),
        cmocka_unit_test(test_stream),
        cmocka_unit_test(test_encode_file),
        cmocka_unit_test(test_no_memory),
#if BS_HAVE_PCRE2
        cmocka_unit_test(test_endless_match),
        cmocka_unit_test(test_file_failure),
#endif
#if BS_HAVE_UTF8PROC
        cmocka_unit_test(test_many_marks),
#endif
        cmocka_unit_test(test_cases),
        cmocka_unit_test(test_replay),
        cmocka_unit_test(test_published),
    };
    return cmocka_run_group_tests(tests, tmpdir_open, tmpdir_close);
}
