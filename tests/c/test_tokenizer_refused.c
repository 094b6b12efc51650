/* SPDX-License-Identifier: Apache-2.0 */
/* Tokenizer files and calls that are refused: each with what is wrong, and nothing stays allocated. */
#include "base/base.h"

#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

#include "tokenizer_file.h"

static void refused(const char *json, bs_status want, const char *message)
{
    bs_tok *t = NULL;
    size_t before = bs_host_bytes(BS_TAG_MISC);
    bs_status st = bs_tok_open(tmpdir_put("tokenizer.json", json, strlen(json)), &t);
    if (st != want)
        fail_msg("%s: %s instead of %s: %s", message, bs_status_name(st), bs_status_name(want),
                 bs_error()->msg);
    ASSERT_ERROR(message);
    ASSERT_ERROR("tokenizer.json");
    assert_null(t);
    assert_int_equal(bs_host_bytes(BS_TAG_MISC), before);
}

static void refused_bpe(const char *model, bs_status want, const char *message)
{
    refused(file_with(NULL, NULL, NULL, model), want, message);
}

static void refused_token(const char *token, const char *message)
{
    refused(file_with(token, NULL, NULL, NULL), BS_FORMAT, message);
}

static void test_refused_files(void **state)
{
    (void)state;
    refused("", BS_FORMAT, "the text ends");
    refused("{", BS_FORMAT, "the text ends");
    refused("[]", BS_FORMAT, "an object");
    refused("<html>", BS_FORMAT, "web page");
    refused("version https://git-lfs.github.com/spec/v1\n", BS_FORMAT, "LFS pointer");
    refused("{\"model\":{\"vocab\":{\"\xFF\":1}}}", BS_FORMAT, "not UTF-8");
    refused("{\"surprise\":1}", BS_UNSUPPORTED, "'surprise'");
    refused("{\"model\":{\"type\":\"Unigram\",\"vocab\":[[\"a\",0.5]]}}", BS_UNSUPPORTED, "'Unigram'");
    refused("{\"model\":null}", BS_FORMAT, "model: expected an object, found null");
    refused_bpe("{\"type\":\"BPE\",\"dropout\":0.1,\"vocab\":{},\"merges\":[]}", BS_UNSUPPORTED,
                "dropout");
    refused_bpe("{\"type\":\"BPE\",\"end_of_word_suffix\":\"</w>\",\"vocab\":{},\"merges\":[]}",
                BS_UNSUPPORTED, "end_of_word_suffix");
}

static void test_refused_vocabulary(void **state)
{
    (void)state;
    refused_bpe(MODEL("\"a\":0,\"b\":0", ""), BS_FORMAT, "id 0 is given to 'a' and to 'b'");
    refused_bpe(MODEL("\"a\":0,\"a\":1", ""), BS_FORMAT, "piece 'a' has the ids 0 and 1");
    refused_bpe(MODEL("\"a\":-1", ""), BS_FORMAT, "whole number");
    refused_bpe(MODEL("\"a\":1.5", ""), BS_FORMAT, "whole number");
    refused_bpe(MODEL("\"a\":99999999999", ""), BS_FORMAT, "a number above");
    refused_bpe(MODEL("\"\\uD800\":1", ""), BS_FORMAT, "surrogate");
    refused_bpe("{\"type\":\"BPE\",\"unk_token\":\"?\",\"vocab\":{},\"merges\":[]}", BS_FORMAT,
                "unk_token '?'");
    refused_bpe("{\"type\":\"BPE\",\"vocab\":{},\"vocab\":{},\"merges\":[]}", BS_FORMAT,
                "model.vocab is there twice");
}

static void test_refused_merges(void **state)
{
    (void)state;
    refused_bpe("{\"type\":\"BPE\",\"vocab\":{}}", BS_FORMAT, "model.merges is missing");
    refused_bpe(MODEL("\"a\":0,\"b\":1", "\"a b\""), BS_FORMAT, "the result is not a piece");
    refused_bpe(MODEL("\"a\":0,\"ab\":1", "[\"a\",\"b\"]"), BS_FORMAT,
                "merge 0 ('a' + 'b'): the second");
    refused_bpe(MODEL("\"b\":0,\"ab\":1", "[\"a\",\"b\"]"), BS_FORMAT, "the first");
    refused_bpe(MODEL("\"a\":0", "\"aa\""), BS_FORMAT, "two pieces with a space");
    refused_bpe(MODEL("\"a\":0", "\"a a a\""), BS_FORMAT, "two pieces with a space");
    refused_bpe(MODEL("\"a\":0", "[\"a\"]"), BS_FORMAT, "between the two pieces");
}

static void test_refused_added_tokens(void **state)
{
    (void)state;
    refused_token(TOKEN("1", "x"), "id 1 is given to 'a' and to 'x'");
    refused_token(TOKEN("2", "a"), "the vocabulary gives it 1");
    refused_token(TOKEN("9", "x") "," TOKEN("9", "x"), "is there twice");
    refused_token(TOKEN("9", ""), "no content");
    refused_token(TOKEN("9.5", "x"), "its id is not a number");
    refused_token(TOKEN("1e300", "x"), "its id is not a number");
    refused_token(TOKEN("9", "x\\u0000"), "zero character");
}

static void test_refused_parts(void **state)
{
    (void)state;
    refused(file_with(NULL, "{\"type\":\"BertNormalizer\"}", NULL, NULL), BS_UNSUPPORTED,
            "'BertNormalizer'");
    refused(file_with(NULL, "{\"type\":\"Prepend\"}", NULL, NULL), BS_FORMAT, "'prepend' is missing");
    refused(file_with(NULL, "{\"type\":\"Prepend\",\"prepend\":\"x\",\"more\":1}", NULL, NULL),
            BS_UNSUPPORTED, "'more'");
    refused(file_with(NULL, NULL, "{\"type\":\"BertPreTokenizer\"}", NULL), BS_UNSUPPORTED,
            "'BertPreTokenizer'");
    refused(file_with(NULL, NULL,
                      "{\"type\":\"Split\",\"pattern\":{\"String\":\" \"},\"behavior\":\"Odd\"}", NULL),
            BS_UNSUPPORTED, "behavior 'Odd'");
    refused(file_with(NULL, NULL,
                      "{\"type\":\"Metaspace\",\"replacement\":\"_\",\"prepend_scheme\":\"last\"}",
                      NULL),
            BS_UNSUPPORTED, "prepend_scheme 'last'");
    refused(file_with(NULL, NULL, "{\"type\":\"Metaspace\",\"replacement\":\"__\"}", NULL), BS_FORMAT,
            "not one character");
    refused("{\"decoder\":{\"type\":\"WordPiece\"}}", BS_UNSUPPORTED, "decoder 'WordPiece'");
    refused("{\"decoder\":{\"type\":\"Sequence\",\"decoders\":[null]}}", BS_FORMAT,
            "a decoder is null");
    refused("{\"decoder\":{\"type\":\"Strip\",\"content\":\" \",\"start\":-1,\"stop\":0}}", BS_FORMAT,
            "'start'");
}

static void test_refused_patterns(void **state)
{
    (void)state;
#if !BS_HAVE_PCRE2
    refused(file_with(NULL, NULL, SPLIT("a"), NULL), BS_UNSUPPORTED, "needs PCRE2");
#else
    static const char *const unknown[] = {"\\\\h",  "\\\\1",   "[a[b]]",   "[a&&b]", "(?<n>a)",
                                          "(?m:a)", "(*ANY)",  "a{,3}",    "a{2}+",  "\\\\xFF",
                                          "\\\\pL", "[\\\\W]", "\\\\k<a>", "\\\\"};
    for (size_t i = 0; i < BSI_COUNT(unknown); i++) {
        char pre[256];
        snprintf(pre, sizeof pre, SPLIT("%s"), unknown[i]);
        refused(file_with(NULL, NULL, pre, NULL), BS_UNSUPPORTED, "is not supported");
    }
    refused(file_with(NULL, NULL, SPLIT("(a"), NULL), BS_FORMAT, "cannot be compiled");
    refused(file_with(NULL, NULL, SPLIT("\\\\p{Nonsense}"), NULL), BS_FORMAT, "cannot be compiled");
#endif
}

static void test_refused_calls(void **state)
{
    (void)state;
    opened o = open_text(file_with(NULL, NULL, NULL, NULL));
    bs_tok_ids out;
    const char *text;
    size_t n;
    bs_tok_stream *s;
    bs_tok *none;
    assert_int_equal(bs_tok_encode(o.w, "a", 1, BS_TOK_SKIP_SPECIAL, &out), BS_ARG);
    assert_int_equal(bs_tok_decode(o.w, (int32_t[]){1, -5}, 2, 0, &text, &n), BS_ARG);
    ASSERT_ERROR("id -5 at position 1");
    assert_int_equal(bs_tok_decode(o.w, (int32_t[]){1, INT32_MAX, 99, 2}, 4, 0, &text, &n), BS_OK);
    assert_string_equal(text, "ab"); /* ids without a piece give nothing */
    assert_int_equal(bs_tok_stream_new(o.t, BS_TOK_SPECIAL, &s), BS_ARG);
    assert_int_equal(bs_tok_open(tmpdir_file("absent"), &none), BS_IO);
    shut(&o);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_refused_files),  cmocka_unit_test(test_refused_vocabulary),
        cmocka_unit_test(test_refused_merges), cmocka_unit_test(test_refused_added_tokens),
        cmocka_unit_test(test_refused_parts),  cmocka_unit_test(test_refused_patterns),
        cmocka_unit_test(test_refused_calls),
    };
    return cmocka_run_group_tests(tests, tmpdir_open, tmpdir_close);
}
