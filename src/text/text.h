/* SPDX-License-Identifier: Apache-2.0 */
/*
** text.h: the parts of the tokenizer. A bs_tok is filled by bs_tok_open (tokenizer_json.c, vocab.c, bpe.c,
** regex.c, added.c, beside.c, tokenizer.c) and never changes afterwards, so that any number of threads may read
** it; everything that encoding or decoding writes lies in a bs_tok_work or bs_tok_stream, which one thread
** uses at a time. Text under work is valid UTF-8; a byte of it remembers the bytes of the caller's
** text that it stands for.
*/
#ifndef BS_TEXT_H
#define BS_TEXT_H

#include "base/base.h"
#include "base/utf8.h"
#include "bs/text.h"

#include <cjson/cJSON.h>

/* ---- bytes and code points (text.c) ---------------------------------------------------------- */

typedef struct bsi_buf { /* growing bytes */
    char *p;
    size_t n, cap;
} bsi_buf;

bs_status bsi_buf_reserve(bsi_buf *b, size_t more);
bs_status bsi_buf_put(bsi_buf *b, const char *s, size_t n);
void bsi_buf_free(bsi_buf *b);
/* Room for `need` elements of `size` bytes in *p, growing by doubling. */
bs_status bsi_grow(void **p, size_t *cap, size_t need, size_t size);

/* The character at s (valid text) and its bytes. */
uint32_t bsi_utf8_get(const char *s, unsigned *len);
unsigned bsi_utf8_put(uint32_t c, char out[4]);
static inline bool bsi_utf8_is_tail(char c)
{
    return ((unsigned char)c & 0xC0) == 0x80;
}
/* Unicode's White_Space; a word character (letters, marks, digits, connectors, joiners). */
bool bsi_is_space(uint32_t c);
bool bsi_is_word(uint32_t c);

/* ---- JSON (json.c) --------------------------------------------------------------------------- */

typedef struct bsi_tokjson { /* a reader over one value that is in no tree: vocab or merges */
    const char *start, *p, *end;
} bsi_tokjson;

/* The document without the bulk of model.vocab and model.merges (left empty in it) as a tree, and
   readers for the two (start NULL: absent). The tree ends with bs_json_end. */
bs_status bsi_tokjson_open(const char *text, size_t n, bs_json *tree, bsi_tokjson *vocab,
                           bsi_tokjson *merges);
bs_status bsi_tokjson_parse(const char *text, size_t n, bs_json *tree);
/* BS_FORMAT where the text of a file is none that JSON can be in: not UTF-8, a web page, an LFS pointer. */
bs_status bsi_tokjson_check(const char *text, size_t n);
bool bsi_tokjson_take(bsi_tokjson *j, char c); /* after white space; false: another character */
bs_status bsi_tokjson_string(bsi_tokjson *j, bsi_buf *out); /* appended */
bs_status bsi_tokjson_uint(bsi_tokjson *j, uint32_t max, uint32_t *out);
bs_status bsi_tokjson_fail(const bsi_tokjson *j, const char *expected);

/* Members of the small tree. An absent or null member leaves *out. */
bs_status bsi_tokjson_only(const cJSON *o, const char *where, const char *const *keys);
bs_status bsi_tokjson_bool(const cJSON *o, const char *where, const char *key, bool *out);
bs_status bsi_tokjson_text(const cJSON *o, const char *where, const char *key, const char **out);
const char *bsi_tokjson_type(const cJSON *o);      /* its "type", or what it is instead */
bool bsi_tokjson_id(const cJSON *o, uint32_t *id); /* a number from 0 to BSI_MAX_ID */

/* ---- pieces (vocab.c) ------------------------------------------------------------------------ */

#define BSI_NO_ID  UINT32_MAX
#define BSI_MAX_ID 0xFFFFFFu

typedef struct bsi_piece {
    uint32_t at, len; /* in the arena; at = UINT32_MAX: no piece has this id */
} bsi_piece;
typedef struct bsi_slot {
    uint32_t tag, id; /* upper bits of the hash; BSI_NO_ID: free */
    bsi_piece piece;  /* again: one memory access less for each look-up */
} bsi_slot;
typedef struct bsi_vocab {
    bsi_buf arena;
    bsi_piece *piece;  /* by id */
    size_t n_ids, cap; /* highest id + 1 */
    bsi_slot *slot;
    size_t slots, used; /* a power of two */
    size_t model_end;   /* bytes of the arena that the model's own pieces take; added tokens follow */
} bsi_vocab;

bs_status bsi_vocab_read(bsi_vocab *v, bsi_tokjson *j);
/* Adds a piece; an id or a text that is there already fails and names both. */
bs_status bsi_vocab_add(bsi_vocab *v, const char *s, size_t n, uint32_t id);
uint32_t bsi_vocab_id(const bsi_vocab *v, const char *s, size_t n); /* BSI_NO_ID: absent */
/* The same among the model's own pieces: text outside added tokens never becomes an added token. */
uint32_t bsi_vocab_model_id(const bsi_vocab *v, const char *s, size_t n);
static inline const char *bsi_vocab_piece(const bsi_vocab *v, uint32_t id, size_t *n)
{
    if (id >= v->n_ids || v->piece[id].at == UINT32_MAX)
        return NULL;
    *n = v->piece[id].len;
    return v->arena.p + v->piece[id].at;
}
void bsi_vocab_free(bsi_vocab *v);

/* ---- patterns (regex.c) ---------------------------------------------------------------------- */

typedef struct bsi_pattern { /* a literal, or an expression */
    char *literal;
    size_t n;
    void *code; /* pcre2_code; NULL: a literal */
} bsi_pattern;
typedef struct bsi_matcher { /* of one thread, for any pattern */
    void *data, *context, *stack;
} bsi_matcher;

/* {"String": ...} or {"Regex": ...}. */
bs_status bsi_pattern_read(const cJSON *o, const char *where, bsi_pattern *out);
bs_status bsi_pattern_literal(const char *s, bsi_pattern *out);
bs_status bsi_pattern_regex(const char *regex, const char *where, bsi_pattern *out);
void bsi_pattern_free(bsi_pattern *p);
void bsi_matcher_free(bsi_matcher *m);

typedef struct bsi_scan { /* the matches of a pattern in s, left to right, not overlapping */
    const bsi_pattern *pattern;
    bsi_matcher *matcher;
    const char *s;
    size_t n, at, last; /* next search; end of the last match, SIZE_MAX: none */
} bsi_scan;
bsi_scan bsi_scan_begin(const bsi_pattern *p, bsi_matcher *m, const char *s, size_t n);
/* *found false: no further match. */
bs_status bsi_scan_next(bsi_scan *s, bool *found, size_t *first, size_t *end);

/* ---- text under work ------------------------------------------------------------------------- */

typedef struct bsi_text {
    char *p;
    bs_tok_span *at; /* per byte: the caller's bytes; only when spans are kept */
    size_t n, cap, at_cap;
    bool spans;
} bsi_text;
typedef struct bsi_view { /* some text: the caller's own or a bsi_text's */
    const char *p;
    size_t n;
    const bs_tok_span *at; /* NULL: byte i stands for byte base + i (or spans are not kept) */
    size_t base;
} bsi_view;

bs_status bsi_text_put(bsi_text *t, const char *s, size_t n,
                       bs_tok_span at); /* all bytes stand for `at` */
bs_status bsi_text_copy(bsi_text *t, const bsi_view *v, size_t first, size_t end);
void bsi_text_free(bsi_text *t);
bs_tok_span bsi_view_span(const bsi_view *v, size_t first, size_t end); /* whole characters */
bsi_view bsi_view_of(const bsi_text *t);

/* ---- normalizers (normalize.c) --------------------------------------------------------------- */

typedef enum bsi_norm_kind {
    BSI_NORM_NFC,
    BSI_NORM_NFKC,
    BSI_NORM_PREPEND,
    BSI_NORM_REPLACE,
    BSI_NORM_LOWERCASE
} bsi_norm_kind;
typedef struct bsi_norm {
    bsi_norm_kind kind;
    bsi_pattern pattern; /* replace */
    char *text;          /* prepend, replace */
    size_t n;
} bsi_norm;
typedef struct bsi_norms {
    bsi_norm *op;
    size_t n, cap;
} bsi_norms;
typedef struct bsi_runes { /* code points of a segment */
    int32_t *p;
    size_t n, cap;
    int32_t *sorted;
    size_t sorted_cap;
} bsi_runes;

bs_status bsi_norms_read(bsi_norms *out, const cJSON *o);
/* Runs the chain over *v, which may come back as one of w->norm. */
bs_status bsi_norms_run(const bsi_norms *n, bs_tok_work *w, bsi_view *v);
void bsi_norms_free(bsi_norms *n);

/* ---- pre-tokenizers (pretok.c) --------------------------------------------------------------- */

typedef enum bsi_behavior {
    BSI_REMOVED,
    BSI_ISOLATED,
    BSI_MERGED_PREVIOUS,
    BSI_MERGED_NEXT,
    BSI_CONTIGUOUS
} bsi_behavior;
typedef enum bsi_pretok_kind {
    BSI_PRETOK_SPLIT,
    BSI_PRETOK_SPACE_FIRST, /* ByteLevel's add_prefix_space */
    BSI_PRETOK_METASPACE    /* space -> text; then maybe put in front */
} bsi_pretok_kind;
typedef enum bsi_prepend { BSI_PREPEND_NEVER, BSI_PREPEND_FIRST, BSI_PREPEND_ALWAYS } bsi_prepend;
typedef struct bsi_pretok {
    bsi_pretok_kind kind;
    bsi_pattern pattern; /* split */
    bsi_behavior behavior;
    bool invert;
    char *text; /* metaspace */
    size_t n;
    bsi_prepend prepend;
} bsi_pretok;
typedef struct bsi_pretoks {
    bsi_pretok *op;
    size_t n, cap;
    bool byte_level; /* words are bytes, named by the 256 printable symbols */
    bool needs_spans;
} bsi_pretoks;
typedef struct bsi_range { /* bytes of a view */
    uint32_t first, end;
} bsi_range;
typedef struct bsi_ranges {
    bsi_range *p;
    size_t n, cap;
} bsi_ranges;

bs_status bsi_pretoks_read(bsi_pretoks *out, const cJSON *o);
/* Cuts *v into w->words; *v may come back as one of w->pretok. */
bs_status bsi_pretoks_run(const bsi_pretoks *p, bs_tok_work *w, bsi_view *v);
void bsi_pretoks_free(bsi_pretoks *p);
/* "replacement", "prepend_scheme" (or the older "add_prefix_space") and "split" of a Metaspace. */
bs_status bsi_metaspace_read(const cJSON *o, const char *where, const char **text, bsi_prepend *prepend,
                             bool *split);

/* ---- byte-pair encoding (bpe.c) -------------------------------------------------------------- */

typedef struct bsi_merge {
    uint32_t left, right, made; /* ids */
} bsi_merge;
typedef struct bsi_pair {
    uint32_t left, right, rank; /* rank BSI_NO_ID: free */
} bsi_pair;
typedef struct bsi_bpe {
    bsi_merge *merge; /* by rank */
    size_t n_merges, cap;
    bsi_pair *pair;
    size_t pairs; /* a power of two */
    bool bytes;   /* words are bytes */
    bool ignore_merges, byte_fallback, fuse_unk, has_unk;
    uint32_t unk;
    uint32_t byte_id[256];  /* bytes: the symbol's id; else the id of <0xHH> */
    uint32_t ascii_id[128]; /* characters: ids of one-byte pieces */
    uint64_t *joint;        /* characters: pairs that some merge puts side by side (hashed bits) */
} bsi_bpe;
typedef struct bsi_symbol {
    uint32_t id, first, len;
    int32_t prev, next;
} bsi_symbol;
typedef struct bsi_memo bsi_memo;
typedef struct bsi_bpe_work {
    bsi_symbol *symbol;
    size_t symbols, symbol_cap;
    uint64_t *heap; /* rank << 32 | position */
    size_t heaped, heap_cap;
    bsi_memo *memo; /* short words met before */
    bsi_buf mapped;
} bsi_bpe_work;

bs_status bsi_bpe_read(bsi_bpe *b, const bsi_vocab *v, bsi_tokjson *merges);
bs_status bsi_bpe_finish(bsi_bpe *b, const bsi_vocab *v);
void bsi_bpe_free(bsi_bpe *b);
/* Encodes bytes [r.first, r.end) of the view into w's ids. */
bs_status bsi_bpe_word(const bs_tok *t, bs_tok_work *w, const bsi_view *v, bsi_range r);
void bsi_bpe_work_free(bsi_bpe_work *w);
/* The byte that a code point stands for among byte-level symbols; -1: none. */
int bsi_symbol_byte(uint32_t c);

/* ---- added tokens (finder.c, added.c) --------------------------------------------------------- */

typedef struct bsi_added {
    uint32_t id;
    bool special, normalized, lstrip, rstrip, single_word;
    char *text; /* as it is looked for */
    size_t n;
} bsi_added;
typedef struct bsi_finder { /* leftmost-longest search, tokens sorted by text */
    bsi_added *token;
    size_t n, cap;
    uint32_t first[257]; /* by first byte */
} bsi_finder;
typedef struct bsi_found {
    const bsi_added *token; /* NULL: none */
    size_t first, end;      /* with the white space that it swallows */
    size_t next;            /* where the search goes on */
} bsi_found;

enum { /* of an id, in bs_tok.mark */
       BSI_MARK_ADDED = 1,
       BSI_MARK_SPECIAL = 2,
       BSI_MARK_NORMALIZED = 4,
       BSI_MARK_LSTRIP = 8,
       BSI_MARK_RSTRIP = 16,
       BSI_MARK_SINGLE = 32
};

bs_status bsi_added_read(bs_tok *t, const cJSON *list); /* of tokenizer.json */
/* Flags and content of one token (*text stays where there is none). */
bs_status bsi_added_flags(const cJSON *o, const char *where, bsi_added *a, const char **text);
/* Recognise the text, which has the id a->id in the vocabulary, as the flags say; an earlier one of this id goes. */
bs_status bsi_added_put(bs_tok *t, const bsi_added *a, const char *text);
unsigned bsi_added_marks(const bsi_added *a);
bs_status bsi_added_finish(bs_tok *t); /* after the last, before the first text */
/* The next token of s at or after `at`; `covered`: where the token before ends, with the white
   space that it swallowed. */
bsi_found bsi_finder_next(const bsi_finder *f, const char *s, size_t n, size_t at, size_t covered,
                          bool literal);
/* Sorts what was added; BS_FORMAT when a text is there twice. Before the first search. */
bs_status bsi_finder_finish(bsi_finder *f);
void bsi_finder_free(bsi_finder *f);

/* ---- decoders (decode.c) --------------------------------------------------------------------- */

typedef enum bsi_decoder_kind {
    BSI_DECODE_BYTE_LEVEL,
    BSI_DECODE_BYTE_FALLBACK,
    BSI_DECODE_FUSE,
    BSI_DECODE_STRIP,
    BSI_DECODE_REPLACE,
    BSI_DECODE_METASPACE,
    BSI_DECODE_SPACED /* no decoder in the file: tokens with a space between them */
} bsi_decoder_kind;
typedef struct bsi_decoder {
    bsi_decoder_kind kind;
    bsi_pattern pattern; /* replace */
    char *text;          /* replace: by; strip, metaspace: the character */
    size_t n;
    uint32_t start, stop; /* strip: characters */
    bsi_prepend prepend;
    bool fused; /* sees one long token */
} bsi_decoder;
typedef struct bsi_decoders {
    bsi_decoder *op;
    size_t n, cap;
} bsi_decoders;

bs_status bsi_decoders_read(bsi_decoders *out, const cJSON *o);
void bsi_decoders_free(bsi_decoders *d);

/* ---- the objects ----------------------------------------------------------------------------- */

typedef struct bsi_special {
    char *name;
    uint32_t id;
} bsi_special;

struct bs_tok {
    bsi_vocab vocab;
    bsi_bpe bpe;
    bsi_norms norms;
    bsi_pretoks pretoks;
    bsi_decoders decoders;
    bsi_finder raw, normalized; /* added tokens looked for before and after the normalizer */
    uint8_t *mark;              /* by id, of ids below marked: BSI_MARK_* */
    size_t marked, mark_cap;
    int32_t *before, *after; /* ids that the post-processor puts around the text */
    size_t n_before, n_after;
    bsi_special *special; /* by the names of the files beside tokenizer.json */
    size_t n_special, special_cap;
    int32_t *stop;
    size_t n_stop, stop_cap;
    char **note; /* what the user should know of these files */
    size_t n_note, note_cap;
};

/* Flags of an added token; 0: none. */
static inline unsigned bsi_marks(const bs_tok *t, uint32_t id)
{
    return id < t->marked ? t->mark[id] : 0;
}

struct bs_tok_work {
    const bs_tok *tok;
    bsi_matcher matcher;
    bsi_text clean;              /* the caller's text as UTF-8 */
    bsi_text norm[2], pretok[2]; /* text of the normalizer and of the pre-tokenizer, to and fro */
    bsi_runes runes;
    bsi_ranges words, spare;
    bsi_bpe_work bpe;
    int32_t *id;
    bs_tok_span *span;
    size_t n, id_cap, span_cap;
    bool spans, continued, inside;
    bs_tok_stream *stream; /* of bs_tok_decode */
};

/* ---- the files beside tokenizer.json (beside.c) ---------------------------------------------- */

typedef struct bsi_beside { /* a root that is NULL: there is no such file */
    bs_json config, map, added, generation, model;
} bsi_beside;

bs_status bsi_beside_open(bsi_beside *b, const char *folder);
void bsi_beside_close(bsi_beside *b);
/* Added tokens of theirs; after those of tokenizer.json. */
bs_status bsi_beside_tokens(bs_tok *t, const bsi_beside *b);
/* Special ids by name, ids that end generation, notes; when all else is read. */
bs_status bsi_beside_specials(bs_tok *t, const bsi_beside *b);

/* ---- what several steps write (work.c) ------------------------------------------------------- */

/* Is this byte of the view the first of a text that goes on from another, so that nothing is put in front? */
bool bsi_work_goes_on(const bs_tok_work *w, const bsi_view *v, size_t at);
/* The one of the pair that *v is not, emptied. */
bsi_text *bsi_work_other(const bs_tok_work *w, bsi_text pair[2], const bsi_view *v);
/* Appends an id that stands for bytes of the caller's text, or for bytes [first, end) of the view. */
bs_status bsi_work_put_span(bs_tok_work *w, uint32_t id, bs_tok_span span);
bs_status bsi_work_put(bs_tok_work *w, uint32_t id, const bsi_view *v, size_t first, size_t end);

#endif
