/* SPDX-License-Identifier: Apache-2.0 */
/*
** fuzz_tokenizer.c: any bytes as a tokenizer file, and behind a zero byte the text to encode. The file
** is refused, or every id of the text is in the vocabulary, spans lie in the text and in order,
** decoding at once and step by step agree, and nothing stays allocated. Build and run with libFuzzer:
**   clang -g -O1 -fsanitize=fuzzer,address,undefined -D_GNU_SOURCE -DBS_HAVE_URING=0 -DBS_HAVE_BLAS=0 \
**     -DBS_HAVE_PCRE2=1 -DBS_HAVE_UTF8PROC=1 -Isrc $(pkg-config --cflags libcjson) \
** tests/fuzz/fuzz_tokenizer.c src/base/[a-z]*.c src/text/[a-z]*.c -lcjson -lpcre2-8 -lutf8proc -lm \
**     -lpthread -o fuzz_tokenizer
**   ./fuzz_tokenizer -max_total_time=60 corpus/
*/
#include "bs.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static void must(bool holds)
{
    if (!holds)
        abort();
}

static void check_decode(const bs_tok *t, bs_tok_work *w, const int32_t *id, int64_t n, unsigned flags)
{
    const char *whole, *part;
    size_t whole_n, part_n, at = 0;
    bs_tok_stream *s;
    bs_status st = bs_tok_decode(w, id, n, flags, &whole, &whole_n);
    must(st == BS_OK || st == BS_FORMAT); /* an expression may give up */
    if (st != BS_OK)
        return;
    must(bs_tok_stream_new(t, flags, &s) == BS_OK);
    for (int64_t i = 0; i <= n; i++) {
        st = i < n ? bs_tok_stream_push(s, id[i], &part, &part_n)
                   : bs_tok_stream_finish(s, &part, &part_n);
        must(st == BS_OK && part_n <= whole_n - at && !memcmp(whole + at, part, part_n));
        at += part_n;
    }
    must(at == whole_n);
    bs_tok_stream_free(s);
}

static void check_encode(const bs_tok *t, bs_tok_work *w, const char *text, size_t n, unsigned flags)
{
    bs_tok_ids out;
    bs_status st = bs_tok_encode(w, text, n, flags, &out);
    must(st == BS_OK || st == BS_FORMAT);
    if (st != BS_OK)
        return;
    int32_t *id = malloc(((size_t)out.n + 1) * sizeof *id);
    must(id != NULL);
    for (int64_t i = 0; i < out.n; i++) {
        id[i] = out.id[i];
        must(id[i] >= 0 && id[i] < bs_tok_vocab_size(t));
        must(!out.span || (out.span[i].first <= out.span[i].end && out.span[i].end <= n));
    }
    must(bs_tok_encode(w, text, n, flags & ~(unsigned)BS_TOK_SPANS, &out) == BS_OK);
    for (int64_t i = 0; i < out.n; i++)
        must(out.id[i] == id[i]);
    check_decode(t, w, id, out.n, 0);
    check_decode(t, w, id, out.n, BS_TOK_SKIP_SPECIAL);
    free(id);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    static const char standard[] = "Hello <s>world  12\xFF\xE4\xB8\x96 e\xCC\x81\n";
    static int fd = -1;
    char path[64];
    size_t before = bs_host_bytes(BS_TAG_MISC);
    const uint8_t *zero = n ? memchr(data, 0, n) : NULL;
    size_t json = zero ? (size_t)(zero - data) : n;
    bs_tok *t = NULL;
    bs_tok_work *w = NULL;
    if (fd < 0)
        fd = memfd_create("fuzz", MFD_CLOEXEC);
    must(fd >= 0 && ftruncate(fd, 0) == 0 && pwrite(fd, data, json, 0) == (ssize_t)json);
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    bs_status st = bs_tok_open(path, &t);
    must(st == BS_OK || st == BS_FORMAT || st == BS_UNSUPPORTED);
    if (st == BS_OK) {
        const char *text = zero ? (const char *)zero + 1 : standard;
        size_t text_n = zero ? n - json - 1 : sizeof standard - 1;
        must(bs_tok_work_new(t, &w) == BS_OK);
        check_encode(t, w, text, text_n, BS_TOK_SPANS);
        check_encode(t, w, text, text_n, BS_TOK_SPANS | BS_TOK_SPECIAL | BS_TOK_LITERAL);
    }
    bs_tok_work_free(w);
    bs_tok_close(t);
    must(bs_host_bytes(BS_TAG_MISC) == before);
    return 0;
}
