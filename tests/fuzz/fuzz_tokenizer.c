/* SPDX-License-Identifier: Apache-2.0 */
/*
** fuzz_tokenizer.c: any bytes as a tokenizer file, behind a zero byte the text to encode, and behind another one what
** each of the files beside it holds. The file is refused, or every id of the text is in the vocabulary, spans lie in
** the text and in order, decoding at once and step by step agree, and nothing stays allocated. Build and run with
** libFuzzer:
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

static char folder[] = "/tmp/fuzz_tokenizer.XXXXXX";

static void lay_file(const char *name, const uint8_t *data, size_t n)
{
    char path[96];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *f = n == SIZE_MAX ? NULL : fopen(path, "wb");
    if (n == SIZE_MAX)
        remove(path);
    else
        must(f && fwrite(data, 1, n, f) == n && !fclose(f));
}

static const char *const beside[] = {"tokenizer_config.json", "special_tokens_map.json",
                                     "added_tokens.json", "generation_config.json", "config.json"};

static void remove_folder(void)
{
    for (size_t i = 0; i < sizeof beside / sizeof *beside; i++)
        lay_file(beside[i], NULL, SIZE_MAX);
    lay_file("tokenizer.json", NULL, SIZE_MAX);
    rmdir(folder);
}

/* The file in a folder, with others beside it: by the first of their bytes, one of them or all. */
static void put_folder(const uint8_t *json, size_t json_n, const uint8_t *other, size_t other_n)
{
    static bool made;
    size_t only = other_n ? other[0] % 8 : 7;
    if (!made) {
        must(mkdtemp(folder) != NULL);
        made = !atexit(remove_folder);
    }
    lay_file("tokenizer.json", json, json_n);
    for (size_t i = 0; i < sizeof beside / sizeof *beside; i++)
        lay_file(beside[i], other + (other_n > 0),
                 only > 4 || only == i ? other_n - (other_n > 0) : SIZE_MAX);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    static const char standard[] = "Hello <s>world  12\xFF\xE4\xB8\x96 e\xCC\x81\n";
    static int fd = -1;
    char path[64];
    size_t before = bs_host_bytes(BS_TAG_MISC);
    const uint8_t *zero = n ? memchr(data, 0, n) : NULL;
    size_t json = zero ? (size_t)(zero - data) : n;
    const uint8_t *other = zero ? memchr(zero + 1, 0, n - json - 1) : NULL;
    bs_tok *t = NULL;
    bs_tok_work *w = NULL;
    if (fd < 0)
        fd = memfd_create("fuzz", MFD_CLOEXEC);
    must(fd >= 0 && ftruncate(fd, 0) == 0 && pwrite(fd, data, json, 0) == (ssize_t)json);
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    if (other) {
        put_folder(data, json, other + 1, (size_t)(data + n - other - 1));
        snprintf(path, sizeof path, "%s", folder);
    }
    bs_status st = bs_tok_open(path, &t);
    must(st == BS_OK || st == BS_FORMAT || st == BS_UNSUPPORTED);
    if (st == BS_OK) {
        const char *text = zero ? (const char *)zero + 1 : standard;
        size_t text_n = other ? (size_t)(other - zero - 1) : zero ? n - json - 1 : sizeof standard - 1;
        must(bs_tok_work_new(t, &w) == BS_OK);
        check_encode(t, w, text, text_n, BS_TOK_SPANS);
        check_encode(t, w, text, text_n, BS_TOK_SPANS | BS_TOK_SPECIAL | BS_TOK_LITERAL);
        check_encode(t, w, text, text_n, BS_TOK_SPANS | BS_TOK_CONTINUED);
        check_encode(t, w, text, text_n, BS_TOK_SPANS | BS_TOK_INSIDE | BS_TOK_LITERAL);
    }
    bs_tok_work_free(w);
    bs_tok_close(t);
    must(bs_host_bytes(BS_TAG_MISC) == before);
    return 0;
}
