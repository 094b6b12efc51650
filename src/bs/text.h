/* SPDX-License-Identifier: Apache-2.0 */
/* bs/text.h: tokenizers. Conventions: bs.h. */
#ifndef BS_PUBLIC_TEXT_H
#define BS_PUBLIC_TEXT_H

#include "bs/base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- tokenizer: the tokenizer.json of Hugging Face ------------------------------------------- */

typedef struct bs_tok bs_tok;           /* never changes after open: any number of threads may use it */
typedef struct bs_tok_work bs_tok_work; /* the buffers of one thread */
typedef struct bs_tok_stream bs_tok_stream; /* decodes one id after the other */
typedef struct bs_tok_lines bs_tok_lines;   /* the ids of every line of a file */

/* Flags; 0 is none. */
enum {
    BS_TOK_SPECIAL = 1,      /* encode: what the post-processor puts around the text (BOS) */
    BS_TOK_LITERAL = 2,      /* encode: tokens marked special are plain text when the text holds them */
    BS_TOK_SPANS = 4,        /* encode: also say which bytes of the text each id stands for */
    BS_TOK_SKIP_SPECIAL = 8, /* decode: leave out tokens marked special */
    BS_TOK_CONTINUED = 16, /* encode: the text goes on from another: no space or BOS is put in front */
    BS_TOK_INSIDE = 32 /* encode: it follows a token: what is put before a first text only is not put */
};
typedef struct bs_tok_span {
    uint32_t first, end; /* bytes [first, end), whole characters; empty for ids around the text */
} bs_tok_span;
typedef struct bs_tok_ids {
    const int32_t *id;
    const bs_tok_span *span; /* NULL without BS_TOK_SPANS */
    int64_t n;
} bs_tok_ids;

/* path: a folder with tokenizer.json, or the file. Files beside it are read when they are there: tokenizer_config.json,
   special_tokens_map.json and added_tokens.json for tokens and special ids, generation_config.json and config.json
   for special ids (src/text/beside.c has which one decides). A part of the file that is not known is refused by
   name. */
BS_API BS_NODISCARD bs_status bs_tok_open(const char *path, bs_tok **out);
BS_API void bs_tok_close(bs_tok *t); /* after its works, streams and lines */
/* One more than the highest id. */
BS_API int64_t bs_tok_vocab_size(const bs_tok *t);
/* The id of a piece as the file writes it; -1: absent. */
BS_API int32_t bs_tok_id(const bs_tok *t, const char *piece, size_t n);
/* The piece of an id; NULL: the id has none. */
BS_API const char *bs_tok_piece(const bs_tok *t, int32_t id, size_t *n);
/* Special ids by the name that the files give them without "_token": "bos", "eos", "pad", ... -1: not named, or
   named with a text that is no token. */
BS_API int32_t bs_tok_special(const bs_tok *t, const char *name);
BS_API int bs_tok_special_count(const bs_tok *t);
BS_API const char *bs_tok_special_at(const bs_tok *t, int i, int32_t *id);
/* The ids that end generation: every eos_token_id of generation_config.json and config.json, and "eos"; their
   number. */
BS_API int bs_tok_stops(const bs_tok *t, const int32_t **ids);
/* What BS_TOK_SPECIAL puts before and after a text; borrowed from t. */
BS_API void bs_tok_around(const bs_tok *t, const int32_t **before, int *n_before, const int32_t **after,
                          int *n_after);
/* Where files contradict each other and ids or ends depend on it: one line each, for the user. NULL: no such note. */
BS_API int bs_tok_note_count(const bs_tok *t);
BS_API const char *bs_tok_note_at(const bs_tok *t, int i);

BS_API BS_NODISCARD bs_status bs_tok_work_new(const bs_tok *t, bs_tok_work **out);
BS_API void bs_tok_work_free(bs_tok_work *w);
/* Ids of the text, valid until the next call with the same work. Bytes that are not UTF-8 are encoded
   as U+FFFD. */
BS_API BS_NODISCARD bs_status bs_tok_encode(bs_tok_work *w, const char *text, size_t n, unsigned flags,
                                            bs_tok_ids *out);
/* Text of the ids (with a zero behind it), valid until the next call with the same work. An id without
   a piece gives nothing; a negative one is an error. */
BS_API BS_NODISCARD bs_status bs_tok_decode(bs_tok_work *w, const int32_t *ids, int64_t n,
                                            unsigned flags, const char **text, size_t *text_n);

/* What an id adds to the text: the pieces put together are what bs_tok_decode gives. Bytes of a
   character that is not complete are held back. finish gives the rest and starts anew. */
BS_API BS_NODISCARD bs_status bs_tok_stream_new(const bs_tok *t, unsigned flags, bs_tok_stream **out);
BS_API void bs_tok_stream_free(bs_tok_stream *s);
BS_API BS_NODISCARD bs_status bs_tok_stream_push(bs_tok_stream *s, int32_t id, const char **text,
                                                 size_t *text_n);
BS_API BS_NODISCARD bs_status bs_tok_stream_finish(bs_tok_stream *s, const char **text, size_t *text_n);

/* Encode every line of a file (without its newline) in `threads` threads (0: the online cores). */
BS_API BS_NODISCARD bs_status bs_tok_encode_file(const bs_tok *t, const char *path, int threads,
                                                 unsigned flags, bs_tok_lines **out);
BS_API void bs_tok_lines_free(bs_tok_lines *l);
BS_API int64_t bs_tok_lines_count(const bs_tok_lines *l);
BS_API int64_t bs_tok_lines_ids(const bs_tok_lines *l); /* of all lines together */
/* Line i, 0-based; borrowed from l. */
BS_API BS_NODISCARD bs_status bs_tok_lines_get(const bs_tok_lines *l, int64_t i, const int32_t **ids,
                                               int64_t *n);

#ifdef __cplusplus
}
#endif

#endif
