/* SPDX-License-Identifier: Apache-2.0 */
/* JSON from outside: the scan before the parse, integers, UTF-8, and text that is written. */
#include "base/json.h"
#include "base/utf8.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static bool parses(const char *s, bool uints)
{
    bs_json j;
    size_t before = bs_host_bytes(BS_TAG_HEADER);
    bs_status ret = bs_json_parse(
        s, strlen(s), &(bs_json_rules){.depth = BSI_JSON_HEADER_DEPTH, .counts = uints}, "text", &j);
    assert_true(ret == BS_OK || ret == BS_FORMAT);
    if (ret == BS_OK)
        bs_json_end(&j);
    else
        assert_null(j.root);
    assert_int_equal(bs_host_bytes(BS_TAG_HEADER), before);
    return ret == BS_OK;
}

static void test_parse(void **state)
{
    (void)state;
    static const char *const good[] = {
        "{}", "[]", "1", " {\"a\" : [1, 2,\t3]}\r\n", "\"\\u00e9\\\\\\\"\"", "null", "{\"a\":null}"};
    static const char *const general[] = {"true", "-1.5e3", "{\"a\":[false]}"};
    static const char *const bad[] = {"",
                                      " ",
                                      "{",
                                      "[1,]",
                                      "{\"a\"}",
                                      "{\"a\":}",
                                      "{a:1}",
                                      "[1] 2",
                                      "\"a",
                                      "\"\\",
                                      "'a'",
                                      "[1,2",
                                      "]",
                                      "\"\\x\"",
                                      "\"\x01\"",
                                      "\"\\u0000\"",
                                      "\xEF\xBB\xBF{}",
                                      "\"\xF8\"",
                                      "{\"a\":1,}"};
    for (size_t i = 0; i < BSI_COUNT(good); i++)
        assert_true(parses(good[i], true) && parses(good[i], false));
    for (size_t i = 0; i < BSI_COUNT(general); i++)
        assert_true(parses(general[i], false) && !parses(general[i], true));
    for (size_t i = 0; i < BSI_COUNT(bad); i++)
        if (parses(bad[i], false) || parses(bad[i], true))
            fail_msg("accepted: %s", bad[i]);
    char deep[2 * BSI_JSON_HEADER_DEPTH + 3];
    memset(deep, '[', BSI_JSON_HEADER_DEPTH);
    memset(deep + BSI_JSON_HEADER_DEPTH, ']', BSI_JSON_HEADER_DEPTH);
    deep[2 * BSI_JSON_HEADER_DEPTH] = '\0';
    assert_true(parses(deep, true));
    memset(deep, '[', BSI_JSON_HEADER_DEPTH + 1);
    memset(deep + BSI_JSON_HEADER_DEPTH + 1, ']', BSI_JSON_HEADER_DEPTH + 1);
    deep[2 * BSI_JSON_HEADER_DEPTH + 2] = '\0';
    assert_false(parses(deep, true));
}

static void test_uint(void **state)
{
    (void)state;
    bs_json j;
    const char *s = "[0, 9007199254740991, 9007199254740992, -1, 1.5, 1e3, \"7\", 1e400]";
    const bool want[] = {true, true, false, false, false, true, false, false};
    uint64_t v = 0;
    assert_int_equal(bs_json_parse(s, strlen(s), &(bs_json_rules){0}, "text", &j), BS_OK);
    for (int i = 0; i < 8; i++)
        assert_int_equal(bsi_json_uint(cJSON_GetArrayItem(j.root, i), &v), want[i]);
    assert_false(bsi_json_uint(NULL, &v));
    assert_true(bsi_json_uint(cJSON_GetArrayItem(j.root, 1), &v));
    assert_int_equal(v, 9007199254740991);
    bs_json_end(&j);
}

/* Every code point there is, by the definition of UTF-8. */
static void test_utf8(void **state)
{
    (void)state;
    for (uint32_t c = 0; c < 0x120000; c++) {
        unsigned char s[4];
        size_t n = c < 0x80 ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
        for (size_t i = n - 1; i > 0; i--)
            s[i] = (unsigned char)(0x80 | (c >> (6 * (n - 1 - i)) & 0x3F));
        static const unsigned char lead[] = {0, 0, 0xC0, 0xE0, 0xF0};
        s[0] = (unsigned char)(lead[n] | c >> (6 * (n - 1)));
        bool valid = c < 0xD800 || (c > 0xDFFF && c < 0x110000);
        if (bsi_utf8_step(s, n) != (valid ? n : 0))
            fail_msg("code point %x", c);
        if (n > 1 && bsi_utf8_step(s, n - 1) != 0)
            fail_msg("cut code point %x", c);
    }
    assert_int_equal(bs_utf8_valid("\xF4\x8F\xBF\xBF", 4), 4);
    static const char *const bad[] = {"\xC0\xAF",         "\xC1\xBF", "\xE0\x9F\xBF",
                                      "\xF0\x8F\xBF\xBF", "\x80",     "\xFF"};
    for (size_t i = 0; i < BSI_COUNT(bad); i++)
        assert_false(bs_utf8_valid(bad[i], strlen(bad[i])) == strlen(bad[i]));
}

static void test_text(void **state)
{
    (void)state;
    bsi_writer t = {0};
    char all[256];
    for (int i = 0; i < 127; i++)
        all[i] = (char)(i + 1);
    all[127] = '\0';
    bsi_writer_printf(&t, "{\"n\":%d,\"s\":", 7);
    bsi_writer_quote(&t, all);
    bsi_writer_put(&t, "}", 1);
    assert_false(t.failed);
    bs_json j;
    assert_int_equal(bs_json_parse(t.p, t.n, &(bs_json_rules){0}, "text", &j), BS_OK);
    assert_string_equal(cJSON_GetObjectItemCaseSensitive(j.root, "s")->valuestring, all);
    bs_json_end(&j);
    bsi_free(t.p);

    t = (bsi_writer){0};
    bsi_alloc_fail_nth(2);
    for (int i = 0; i < 1000; i++)
        bsi_writer_put(&t, "x", 1);
    bsi_alloc_fail_nth(0);
    assert_true(t.failed);
    assert_int_equal(t.n, 255); /* what fitted before, still terminated */
    assert_int_equal(t.p[255], 0);
    bsi_free(t.p);
}

/* What cJSON takes beyond JSON, and what no text may have. */
static void test_lax(void **state)
{
    (void)state;
    static const bs_json_rules lax = {.lax = true, .depth = 3};
    static const char *const good[] = {"\"\xFF\"",         "\"\n\x01\"", "[1,\x01 2]\x02",
                                       "\xEF\xBB\xBF[12]", "[[[1]]]",    "{\"a\":1,\"a\":2}"};
    static const char *const bad[] = {"[[[[1]]]]", "[1] x", "\"\\u0000\"", "", "[", "nul", "{'a':1}"};
    bs_json j;
    for (size_t i = 0; i < BSI_COUNT(good); i++) {
        if (bs_json_parse(good[i], strlen(good[i]), &lax, NULL, &j) != BS_OK)
            fail_msg("refused: %s: %s", good[i], bs_error()->msg);
        bs_json_end(&j);
    }
    for (size_t i = 0; i < BSI_COUNT(bad); i++)
        if (bs_json_parse(bad[i], strlen(bad[i]), &lax, NULL, &j) != BS_FORMAT)
            fail_msg("accepted: %s", bad[i]);
    static const char zero[] = "[1]\0", inside[] = "\"a\0b\"", escaped[] = "\"\\\0\"";
    assert_int_equal(bs_json_parse(zero, sizeof zero - 1, &lax, NULL, &j), BS_FORMAT);
    assert_int_equal(bs_json_parse(inside, sizeof inside - 1, &lax, NULL, &j), BS_FORMAT);
    assert_int_equal(bs_json_parse(escaped, sizeof escaped - 1, &lax, NULL, &j), BS_FORMAT);
    assert_null(j.root);
    bs_json_end(&j);
    assert_int_equal(bs_host_bytes(BS_TAG_HEADER), 0);
}

static void test_messages(void **state)
{
    (void)state;
    static const char text[] = "{\"a\": 1,\n \"b\": x}";
    bs_json j;
    assert_int_equal(bs_json_parse(text, sizeof text - 1, &(bs_json_rules){0}, "x.json", &j),
                     BS_FORMAT);
    assert_string_equal(bs_error()->msg, "x.json: not valid JSON at byte 15 (line 2, column 7)");
    assert_int_equal(bs_json_parse("[1,", 3, &(bs_json_rules){0}, NULL, &j), BS_FORMAT);
    assert_non_null(strstr(bs_error()->msg, "not valid JSON"));
    assert_int_equal(bs_json_parse(text, sizeof text - 1, &(bs_json_rules){.limit = 16}, "x.json", &j),
                     BS_FORMAT);
    assert_string_equal(bs_error()->msg, "x.json: 17 bytes of JSON text, at most 16 are read");
}

/* Memory that is gone is no wrong text: it is asked for as a whole before the tree is made. */
static void test_memory(void **state)
{
    (void)state;
    static const char text[] = "{\"a\": [1, \"b\", {\"c\": null}]}";
    bs_json j;
    bsi_alloc_fail_nth(1);
    bs_status st = bs_json_parse(text, sizeof text - 1, &(bs_json_rules){0}, "text", &j);
    bsi_alloc_fail_nth(0);
    assert_int_equal(st, BS_NOMEM);
    assert_non_null(strstr(bs_error()->msg, "text: about "));
    bs_json_end(&j);
    assert_int_equal(bs_host_bytes(BS_TAG_HEADER), 0);
    assert_int_equal(bs_json_parse(text, sizeof text - 1, &(bs_json_rules){0}, "text", &j), BS_OK);
    bs_json_end(&j);
    assert_int_equal(bs_host_bytes(BS_TAG_HEADER), 0);
}

static int allowed; /* allocations of cJSON before all others fail */

static void *few(size_t bytes)
{
    return allowed-- > 0 ? malloc(bytes) : NULL;
}

/* Memory that goes while cJSON makes the tree, at each of its allocations, is told as such; what is wrong with a text
   is still told where that is the reason. */
static void test_memory_of_cjson(void **state)
{
    (void)state;
    static const char text[] =
        " {\"a\": [1, -2.5e+3, \"b\\n\\u00e9\\ud83d\\ude00\", {}, [], {\"c\": null, \"d\": [true, "
        "false]}], \"\": {\"e\": 0}}\n";
    static const char *const bad[] = {
        "{\"a\": [1, 2,]}", "{\"a\" 1}", "[\"\\ud83d\"]", "[\"\\ude00 \"]", "[\"\\ud83d\\u0041\"]",
        "[\"\\u00g0\"]",    "[\"\\q\"]", "[1.]",          "[nul]",          "[[1]",
        "{\"a\": 1",        "[1 2]"};
    cJSON_Hooks hooks = {few, free};
    bs_json j;
    bs_status st = BS_NOMEM;
    int n = 0;
    cJSON_InitHooks(&hooks);
    for (; st == BS_NOMEM; n++) {
        allowed = n;
        st = bs_json_parse(text, sizeof text - 1, &(bs_json_rules){0}, "text", &j);
        assert_true(st == BS_OK || st == BS_NOMEM);
        if (st == BS_NOMEM)
            assert_non_null(strstr(bs_error()->msg, "text: about "));
        bs_json_end(&j);
        assert_int_equal(bs_host_bytes(BS_TAG_HEADER), 0);
    }
    assert_true(n > 15);
    allowed = 1;
    for (size_t i = 0; i < BSI_COUNT(bad); i++) {
        assert_int_equal(bs_json_parse(bad[i], strlen(bad[i]), &(bs_json_rules){0}, "text", &j),
                         BS_FORMAT);
        bs_json_end(&j);
    }
    cJSON_InitHooks(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_parse),  cmocka_unit_test(test_uint),
        cmocka_unit_test(test_utf8),   cmocka_unit_test(test_text),
        cmocka_unit_test(test_lax),    cmocka_unit_test(test_messages),
        cmocka_unit_test(test_memory), cmocka_unit_test(test_memory_of_cjson)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
