/* SPDX-License-Identifier: Apache-2.0 */
/*
** tokenizer_file.h: small tokenizer files for tests, and a tokenizer opened from one. Include after cmocka.h, in
** programs whose group is set up by tmpdir_open. One thread.
*/
#ifndef TOKENIZER_FILE_H
#define TOKENIZER_FILE_H

#include "bs.h"
#include "tmpdir.h"

typedef struct opened {
    bs_tok *t;
    bs_tok_work *w;
} opened;

/* t NULL: the build lacks a library that the file needs. */
static inline opened open_path(const char *path)
{
    opened o = {0};
    bs_status st = bs_tok_open(path, &o.t);
    if (st == BS_UNSUPPORTED && !(BS_HAVE_PCRE2 && BS_HAVE_UTF8PROC)) {
        ASSERT_ERROR("this build lacks");
        return o;
    }
    if (st != BS_OK || bs_tok_work_new(o.t, &o.w) != BS_OK)
        fail_msg("%s", bs_error()->msg);
    return o;
}

static inline opened open_text(const char *json)
{
    return open_path(tmpdir_put("tokenizer.json", json, strlen(json)));
}

static inline void shut(opened *o)
{
    bs_tok_work_free(o->w);
    bs_tok_close(o->t);
}

#define VOCAB                                                                                          \
    "\"<unk>\":0,\"a\":1,\"b\":2,\"ab\":3,\"aba\":4,\"\\u0000\":5,\" \":6,\"<0xC3>\":7,\"<0xA9>\":8"
#define MERGES "[\"a\",\"b\"],\"ab a\""

/* A file with some of its parts replaced; NULL: the usual. */
static inline const char *file_with(const char *tokens, const char *norm, const char *pre,
                                    const char *model)
{
    static char json[16384];
    snprintf(json, sizeof json,
             "{\"version\":\"1.0\",\"truncation\":null,\"padding\":null,\"added_tokens\":[%s],"
             "\"normalizer\":%s,\"pre_tokenizer\":%s,\"post_processor\":null,\"decoder\":{\"type\":"
             "\"Fuse\"},"
             "\"model\":%s}",
             tokens ? tokens : "", norm ? norm : "null", pre ? pre : "null",
             model
                 ? model
                 : "{\"type\":\"BPE\",\"unk_token\":\"<unk>\",\"byte_fallback\":true,\"vocab\":{" VOCAB
                   "},\"merges\":[" MERGES "]}");
    return json;
}

#define MODEL(vocab, merges) "{\"type\":\"BPE\",\"vocab\":{" vocab "},\"merges\":[" merges "]}"
#define SPLIT(regex)                                                                                   \
    "{\"type\":\"Split\",\"pattern\":{\"Regex\":\"" regex                                              \
    "\"},\"behavior\":\"Isolated\",\"invert\":false}"
#define TOKEN(id, text) "{\"id\":" id ",\"content\":\"" text "\",\"special\":true}"

#endif
