/* SPDX-License-Identifier: Apache-2.0 */
/*
** decode.c: from ids back to text. The decoder of the file is a flat list of stages; each takes
** tokens, or after a stage that joins them (Fuse, ByteLevel) parts of one long token, and feeds the
** next. A stage holds back what later input may change: bytes of an incomplete character, a run of
** <0xHH>, characters that Strip may remove at the end, and the whole text for a stage that works on a
** joined token. Decoding at once is the same stream, fed and finished. A stream is used by one thread.
*/
#include "text/text.h"

#include <string.h>

typedef struct stage {
    bsi_buf held, made;
    uint64_t seen;     /* tokens */
    uint32_t stripped; /* characters taken from the front */
    bool started;      /* strip: something stays in front */
} stage;

struct bs_tok_stream {
    const bs_tok *tok;
    unsigned flags;
    bsi_matcher matcher;
    bsi_buf out;
    size_t stages;
    stage stage[];
};

static const char bad_char[] = "\xEF\xBF\xBD"; /* U+FFFD */

static bs_status feed(bs_tok_stream *s, size_t i, const char *text, size_t n);

/* ---- stages ---------------------------------------------------------------------------------- */

/* The held bytes as characters; what may be the beginning of one stays unless `all`. */
static bs_status flush_bytes(bs_tok_stream *s, size_t i, bool all)
{
    stage *g = &s->stage[i];
    size_t at = 0;
    bool cut;
    while (at < g->held.n) {
        size_t good = bs_utf8_valid(g->held.p + at, g->held.n - at);
        if (good)
            BSI_TRY(feed(s, i + 1, g->held.p + at, good));
        at += good;
        if (at == g->held.n)
            break;
        size_t bad = bsi_utf8_bad(g->held.p + at, g->held.n - at, &cut);
        if (cut && !all)
            break;
        BSI_TRY(feed(s, i + 1, bad_char, 3));
        at += bad;
    }
    if (at)
        memmove(g->held.p, g->held.p + at, g->held.n - at);
    g->held.n -= at;
    return BS_OK;
}

/* A token of byte symbols is its bytes; one with any other character is its own UTF-8. */
static bs_status byte_level(bs_tok_stream *s, size_t i, const char *text, size_t n)
{
    stage *g = &s->stage[i];
    size_t from = g->held.n;
    unsigned len;
    BSI_TRY(bsi_buf_reserve(&g->held, n));
    for (size_t k = 0; k < n; k += len) {
        int byte = bsi_symbol_byte(bsi_utf8_get(text + k, &len));
        if (byte < 0) {
            memcpy(g->held.p + from, text, n);
            g->held.n = from + n;
            break;
        }
        g->held.p[g->held.n++] = (char)byte;
    }
    return flush_bytes(s, i, false);
}

static int hex(char c)
{
    return c >= '0' && c <= '9'                 ? c - '0'
           : (c | 32) >= 'a' && (c | 32) <= 'f' ? (c | 32) - 'a' + 10
                                                : -1;
}

/* A run of <0xHH>: a token when it is UTF-8 as a whole, else one U+FFFD for each byte. */
static bs_status flush_run(bs_tok_stream *s, size_t i)
{
    bsi_buf *run = &s->stage[i].held;
    size_t n = run->n;
    run->n = 0;
    if (bs_utf8_valid(run->p, n) == n)
        return n ? feed(s, i + 1, run->p, n) : BS_OK;
    for (size_t k = 0; k < n; k++)
        BSI_TRY(feed(s, i + 1, bad_char, 3));
    return BS_OK;
}

static bs_status byte_fallback(bs_tok_stream *s, size_t i, const char *text, size_t n)
{
    int high = -1, low = -1;
    if (n == 6 && !memcmp(text, "<0x", 3) && text[5] == '>') {
        high = hex(text[3]);
        low = hex(text[4]);
    }
    if (high >= 0 && low >= 0) {
        char byte = (char)(high << 4 | low);
        return bsi_buf_put(&s->stage[i].held, &byte, 1);
    }
    BSI_TRY(flush_run(s, i));
    return feed(s, i + 1, text, n);
}

static bool ends_with(const char *s, size_t n, const bsi_decoder *op)
{
    return n >= op->n && !memcmp(s + n - op->n, op->text, op->n);
}

/* Joined tokens: the front is known at once, the back only at the end. */
static bs_status strip_joined(bs_tok_stream *s, size_t i, const char *text, size_t n)
{
    const bsi_decoder *op = &s->tok->decoders.op[i];
    stage *g = &s->stage[i];
    while (!g->started && n && g->stripped < op->start && n >= op->n &&
           !memcmp(text, op->text, op->n)) {
        text += op->n;
        n -= op->n;
        g->stripped++;
    }
    g->started |= n > 0;
    if (!op->stop)
        return n ? feed(s, i + 1, text, n) : BS_OK;
    BSI_TRY(bsi_buf_put(&g->held, text, n));
    size_t keep = g->held.n;
    for (uint32_t k = 0; k < op->stop && ends_with(g->held.p, keep, op); k++)
        keep -= op->n;
    if (!keep)
        return BS_OK;
    BSI_TRY(feed(s, i + 1, g->held.p, keep));
    memmove(g->held.p, g->held.p + keep, g->held.n - keep);
    g->held.n -= keep;
    return BS_OK;
}

static bs_status strip(bs_tok_stream *s, size_t i, const char *text, size_t n)
{
    const bsi_decoder *op = &s->tok->decoders.op[i];
    for (uint32_t k = 0; k < op->start && n >= op->n && !memcmp(text, op->text, op->n); k++) {
        text += op->n;
        n -= op->n;
    }
    for (uint32_t k = 0; k < op->stop && ends_with(text, n, op); k++)
        n -= op->n;
    return feed(s, i + 1, text, n);
}

static bs_status replace(bs_tok_stream *s, size_t i, const char *text, size_t n)
{
    const bsi_decoder *op = &s->tok->decoders.op[i];
    bsi_buf *made = &s->stage[i].made;
    size_t done = 0, first, end;
    bool found;
    bsi_scan scan = bsi_scan_begin(&op->pattern, &s->matcher, text, n);
    made->n = 0;
    for (;;) {
        BSI_TRY(bsi_scan_next(&scan, &found, &first, &end));
        if (!found)
            break;
        BSI_TRY(bsi_buf_put(made, text + done, first - done));
        BSI_TRY(bsi_buf_put(made, op->text, op->n));
        done = end;
    }
    if (!done && !made->n)
        return feed(s, i + 1, text, n);
    BSI_TRY(bsi_buf_put(made, text + done, n - done));
    return feed(s, i + 1, made->p, made->n);
}

/* The replacement becomes a space; in the first token it disappears when the encoder puts one in
   front. */
static bs_status metaspace(bs_tok_stream *s, size_t i, const char *text, size_t n)
{
    const bsi_decoder *op = &s->tok->decoders.op[i];
    stage *g = &s->stage[i];
    bool drop = g->seen == 0 && op->prepend != BSI_PREPEND_NEVER;
    g->made.n = 0;
    for (size_t done = 0; done < n;) {
        const char *hit = memmem(text + done, n - done, op->text, op->n);
        size_t plain = hit ? (size_t)(hit - text) - done : n - done;
        BSI_TRY(bsi_buf_put(&g->made, text + done, plain));
        if (hit && !drop)
            BSI_TRY(bsi_buf_put(&g->made, " ", 1));
        done += plain + (hit ? op->n : 0);
    }
    return feed(s, i + 1, g->made.p, g->made.n);
}

/* One whole token into stage i. */
static bs_status feed_token(bs_tok_stream *s, size_t i, const char *text, size_t n)
{
    bs_status st = BS_OK;
    switch (s->tok->decoders.op[i].kind) {
    case BSI_DECODE_BYTE_LEVEL:
        st = byte_level(s, i, text, n);
        break;
    case BSI_DECODE_BYTE_FALLBACK:
        st = byte_fallback(s, i, text, n);
        break;
    case BSI_DECODE_FUSE:
        st = feed(s, i + 1, text, n);
        break;
    case BSI_DECODE_STRIP:
        st = strip(s, i, text, n);
        break;
    case BSI_DECODE_REPLACE:
        st = replace(s, i, text, n);
        break;
    case BSI_DECODE_METASPACE:
        st = metaspace(s, i, text, n);
        break;
    case BSI_DECODE_SPACED:
        if (s->stage[i].seen)
            st = feed(s, i + 1, " ", 1);
        if (st == BS_OK)
            st = feed(s, i + 1, text, n);
        break;
    }
    s->stage[i].seen++;
    return st;
}

static bs_status feed(bs_tok_stream *s, size_t i, const char *text, size_t n)
{
    if (i == s->stages)
        return bsi_buf_put(&s->out, text, n);
    const bsi_decoder *op = &s->tok->decoders.op[i];
    if (!op->fused)
        return feed_token(s, i, text, n);
    if (op->kind == BSI_DECODE_FUSE)
        return feed(s, i + 1, text, n);
    if (op->kind == BSI_DECODE_STRIP)
        return strip_joined(s, i, text, n);
    return bsi_buf_put(&s->stage[i].held, text, n); /* the token is whole at the end */
}

static bs_status finish_stage(bs_tok_stream *s, size_t i)
{
    const bsi_decoder *op = &s->tok->decoders.op[i];
    stage *g = &s->stage[i];
    if (op->fused && op->kind != BSI_DECODE_FUSE && op->kind != BSI_DECODE_STRIP) {
        bsi_buf whole = g->held;
        g->held = (bsi_buf){0};
        bs_status st = whole.n ? feed_token(s, i, whole.p, whole.n) : BS_OK;
        bsi_buf_free(&whole);
        BSI_TRY(st);
    }
    if (op->kind == BSI_DECODE_BYTE_LEVEL)
        return flush_bytes(s, i, true);
    if (op->kind == BSI_DECODE_BYTE_FALLBACK)
        return flush_run(s, i);
    return BS_OK; /* what Strip still holds is what it strips */
}

/* ---- streams --------------------------------------------------------------------------------- */

static void reset(bs_tok_stream *s)
{
    for (size_t i = 0; i < s->stages; i++) {
        stage *g = &s->stage[i];
        g->held.n = g->made.n = 0;
        g->seen = 0;
        g->stripped = 0;
        g->started = false;
    }
}

static bs_status push(bs_tok_stream *s, int32_t id, int64_t at)
{
    const bs_tok *t = s->tok;
    size_t n = 0;
    if (id < 0)
        return bsi_fail(BS_ARG, "id %d at position %lld is negative", id, (long long)at);
    const char *piece = bsi_vocab_piece(&t->vocab, (uint32_t)id, &n);
    if (!piece || (s->flags & BS_TOK_SKIP_SPECIAL && bsi_marks(t, (uint32_t)id) & BSI_MARK_SPECIAL))
        return BS_OK;
    return feed(s, 0, piece, n);
}

static bs_status finish(bs_tok_stream *s, const char **text, size_t *text_n)
{
    for (size_t i = 0; i < s->stages; i++)
        BSI_TRY(finish_stage(s, i));
    reset(s);
    BSI_TRY(bsi_buf_put(&s->out, "", 1));
    *text = s->out.p;
    *text_n = s->out.n - 1;
    return BS_OK;
}

bs_status bs_tok_stream_new(const bs_tok *t, unsigned flags, bs_tok_stream **out)
{
    size_t n = t->decoders.n;
    if (flags & ~(unsigned)BS_TOK_SKIP_SPECIAL)
        return bsi_fail(BS_ARG, "tokenizer: flags 0x%X do not belong to decoding", flags);
    bs_tok_stream *s = bsi_alloc(BS_TAG_MISC, sizeof *s + n * sizeof *s->stage);
    if (!s)
        return BS_NOMEM;
    s->tok = t;
    s->flags = flags;
    s->stages = n;
    *out = s;
    return BS_OK;
}

void bs_tok_stream_free(bs_tok_stream *s)
{
    if (!s)
        return;
    for (size_t i = 0; i < s->stages; i++) {
        bsi_buf_free(&s->stage[i].held);
        bsi_buf_free(&s->stage[i].made);
    }
    bsi_buf_free(&s->out);
    bsi_matcher_free(&s->matcher);
    bsi_free(s);
}

bs_status bs_tok_stream_push(bs_tok_stream *s, int32_t id, const char **text, size_t *text_n)
{
    s->out.n = 0;
    BSI_TRY(push(s, id, 0));
    BSI_TRY(bsi_buf_put(&s->out, "", 1));
    *text = s->out.p;
    *text_n = s->out.n - 1;
    return BS_OK;
}

bs_status bs_tok_stream_finish(bs_tok_stream *s, const char **text, size_t *text_n)
{
    s->out.n = 0;
    return finish(s, text, text_n);
}

bs_status bs_tok_decode(bs_tok_work *w, const int32_t *ids, int64_t n, unsigned flags,
                        const char **text, size_t *text_n)
{
    if (!w->stream || w->stream->flags != flags) {
        bs_tok_stream_free(w->stream);
        w->stream = NULL;
        BSI_TRY(bs_tok_stream_new(w->tok, flags, &w->stream));
    }
    bs_tok_stream *s = w->stream;
    s->out.n = 0;
    reset(s); /* an earlier call may have failed half-way */
    for (int64_t i = 0; i < n; i++)
        BSI_TRY(push(s, ids[i], i));
    return finish(s, text, text_n);
}

/* ---- reading --------------------------------------------------------------------------------- */

static bs_status add(bsi_decoders *out, bsi_decoder_kind kind, const char *text, bsi_decoder **op)
{
    void *p = out->op;
    bs_status st = bsi_grow(&p, &out->cap, out->n + 1, sizeof **op);
    out->op = p;
    BSI_TRY(st);
    bool fused = out->n && (out->op[out->n - 1].fused || out->op[out->n - 1].kind == BSI_DECODE_FUSE ||
                            out->op[out->n - 1].kind == BSI_DECODE_BYTE_LEVEL);
    *op = &out->op[out->n];
    **op = (bsi_decoder){
        .kind = kind, .fused = fused, .text = bsi_strdup(BS_TAG_MISC, text), .n = strlen(text)};
    if (!(*op)->text)
        return BS_NOMEM;
    out->n++;
    return BS_OK;
}

static bs_status read_count(const cJSON *o, const char *key, uint32_t *out)
{
    const cJSON *m = cJSON_GetObjectItemCaseSensitive(o, key);
    if (!cJSON_IsNumber(m) || !(m->valuedouble >= 0 && m->valuedouble <= 1e6) ||
        m->valuedouble != (double)(uint32_t)m->valuedouble)
        return bsi_fail(BS_FORMAT, "decoder Strip: '%s' is not a small whole number", key);
    *out = (uint32_t)m->valuedouble;
    return BS_OK;
}

static bs_status read_strip(bsi_decoders *out, const cJSON *o)
{
    static const char *const keys[] = {"type", "content", "start", "stop", NULL};
    const char *text = "";
    unsigned len;
    bsi_decoder *op = NULL;
    BSI_TRY(bsi_tokjson_only(o, "decoder Strip", keys));
    BSI_TRY(bsi_tokjson_text(o, "decoder Strip", "content", &text));
    if (!*text || (bsi_utf8_get(text, &len), strlen(text) != len))
        return bsi_fail(BS_FORMAT, "decoder Strip: content '%.20s' is not one character", text);
    BSI_TRY(add(out, BSI_DECODE_STRIP, text, &op));
    BSI_TRY(read_count(o, "start", &op->start));
    return read_count(o, "stop", &op->stop);
}

static bs_status read_replace(bsi_decoders *out, const cJSON *o)
{
    static const char *const keys[] = {"type", "pattern", "content", NULL};
    const char *text = NULL;
    bsi_decoder *op = NULL;
    BSI_TRY(bsi_tokjson_only(o, "decoder Replace", keys));
    BSI_TRY(bsi_tokjson_text(o, "decoder Replace", "content", &text));
    if (!text)
        return bsi_fail(BS_FORMAT, "decoder Replace: 'content' is missing");
    BSI_TRY(add(out, BSI_DECODE_REPLACE, text, &op));
    return bsi_pattern_read(cJSON_GetObjectItemCaseSensitive(o, "pattern"), "decoder Replace",
                            &op->pattern);
}

static bs_status read_metaspace(bsi_decoders *out, const cJSON *o)
{
    const char *text;
    bsi_prepend prepend;
    bool split;
    bsi_decoder *op = NULL;
    BSI_TRY(bsi_metaspace_read(o, "decoder Metaspace", &text, &prepend, &split));
    BSI_TRY(add(out, BSI_DECODE_METASPACE, text, &op));
    op->prepend = prepend;
    return BS_OK;
}

static bs_status read_sequence(bsi_decoders *out, const cJSON *o)
{
    static const char *const keys[] = {"type", "decoders", NULL};
    const cJSON *list = cJSON_GetObjectItemCaseSensitive(o, "decoders"), *item;
    BSI_TRY(bsi_tokjson_only(o, "decoder Sequence", keys));
    if (!cJSON_IsArray(list))
        return bsi_fail(BS_FORMAT, "decoder Sequence: 'decoders' is not an array");
    cJSON_ArrayForEach(item, list)
    {
        if (cJSON_IsNull(item))
            return bsi_fail(BS_FORMAT, "decoder Sequence: a decoder is null");
        BSI_TRY(bsi_decoders_read(out, item));
    }
    return BS_OK;
}

bs_status bsi_decoders_read(bsi_decoders *out, const cJSON *o)
{
    static const char *const byte_level_keys[] = {"type", "add_prefix_space", "trim_offsets",
                                                  "use_regex", NULL};
    static const char *const plain_keys[] = {"type", NULL};
    bsi_decoder *op = NULL;
    if (!o || cJSON_IsNull(o))
        return add(out, BSI_DECODE_SPACED, "", &op);
    const char *type = bsi_tokjson_type(o);
    if (!strcmp(type, "Sequence"))
        return read_sequence(out, o);
    if (!strcmp(type, "Strip"))
        return read_strip(out, o);
    if (!strcmp(type, "Replace"))
        return read_replace(out, o);
    if (!strcmp(type, "Metaspace"))
        return read_metaspace(out, o);
    if (!strcmp(type, "ByteLevel")) {
        BSI_TRY(bsi_tokjson_only(o, "decoder ByteLevel", byte_level_keys));
        return add(out, BSI_DECODE_BYTE_LEVEL, "", &op);
    }
    if (!strcmp(type, "ByteFallback") || !strcmp(type, "Fuse")) {
        BSI_TRY(bsi_tokjson_only(o, "decoder", plain_keys));
        return add(out, type[0] == 'B' ? BSI_DECODE_BYTE_FALLBACK : BSI_DECODE_FUSE, "", &op);
    }
    return bsi_fail(BS_UNSUPPORTED, "decoder '%.60s' is not supported", type);
}

void bsi_decoders_free(bsi_decoders *d)
{
    for (size_t i = 0; i < d->n; i++) {
        bsi_pattern_free(&d->op[i].pattern);
        bsi_free(d->op[i].text);
    }
    bsi_free(d->op);
    *d = (bsi_decoders){0};
}
