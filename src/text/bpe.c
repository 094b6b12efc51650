/* SPDX-License-Identifier: Apache-2.0 */
/*
** bpe.c: byte-pair encoding of one word (Sennrich et al. 2016): from single characters or bytes,
** always the adjacent pair of lowest rank, leftmost first. Short words are scanned. Long ones take
** a heap of (rank, position) whose stale entries are skipped, which is O(n log n) for n symbols. A
** place where no merge joins the characters on both sides splits a word into parts that cannot
** touch each other. Words are cut there first: the ids are the same, and models that never split
** text get short words as well. Tables are read-only after open; a bsi_bpe_work belongs to one
** thread.
*/
#include "text/text.h"

#include <string.h>

#define SHORT_WORD 24 /* symbols; above it the heap wins */
#define MEMO_WORD  22 /* bytes */
#define MEMO_IDS   8
#define MEMOS      8192 /* a power of two */
#define JOINT_BITS 20

struct bsi_memo { /* one cache line; len 0: empty */
    uint8_t len, n;
    char word[MEMO_WORD];
    uint32_t id[MEMO_IDS];
    uint8_t end[MEMO_IDS];
};

/* ---- tables ---------------------------------------------------------------------------------- */

/* bytes_to_unicode of GPT-2 (Radford et al. 2019): bytes that print are their own character; the
   others, in order, are the characters from 256 on (0-32, then 127-160, then 173), so that no piece
   holds a space or a control character. */
static uint32_t byte_symbol(unsigned char byte)
{
    if ((byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174)
        return byte;
    return 256u + (byte <= 32 ? byte : byte <= 160 ? byte - 94u : 67u);
}

int bsi_symbol_byte(uint32_t c)
{
    if (c >= 256 && c < 324) {
        uint32_t k = c - 256;
        return (int)(k <= 32 ? k : k < 67 ? k + 94 : 173);
    }
    return c < 256 && byte_symbol((unsigned char)c) == c ? (int)c : -1;
}

static size_t pair_slot(const bsi_bpe *b, uint32_t left, uint32_t right)
{
    /* Multiplicative hashing (Knuth): the constant is 2^64 / phi, made odd. Its high bits are the
       good ones, hence the fold. */
    uint64_t h = ((uint64_t)left << 32 | right) * UINT64_C(0x9E3779B97F4A7C15);
    return (size_t)(h ^ h >> 32) & (b->pairs - 1);
}

static inline uint32_t pair_rank(const bsi_bpe *b, uint32_t left, uint32_t right)
{
    /* Ends: the table is at most half full, so a probe meets an empty entry, whose rank is
       BSI_NO_ID. */
    for (size_t i = pair_slot(b, left, right);; i = (i + 1) & (b->pairs - 1)) {
        const bsi_pair *p = &b->pair[i];
        if ((p->left == left && p->right == right) || p->rank == BSI_NO_ID)
            return p->rank;
    }
}

static size_t joint_bit(uint32_t x, uint32_t y)
{
    /* A set of bits without the pairs: two pairs may share a bit. Then a word is not cut where it
       could be, which costs time and changes no id. Characters have 21 bits. */
    uint64_t h = ((uint64_t)x << 21 | y) * UINT64_C(0x9E3779B97F4A7C15);
    return (size_t)(h >> (64 - JOINT_BITS));
}

/* "a b" or ["a", "b"]: both texts, without the space, into s; the bytes of the first. */
static bs_status read_merge(bsi_tokjson *j, bsi_buf *s, size_t *left)
{
    s->n = 0;
    if (bsi_tokjson_take(j, '[')) {
        BSI_TRY(bsi_tokjson_string(j, s));
        *left = s->n;
        if (!bsi_tokjson_take(j, ','))
            return bsi_tokjson_fail(j, "',' between the two pieces of a merge");
        BSI_TRY(bsi_tokjson_string(j, s));
        return bsi_tokjson_take(j, ']') ? BS_OK
                                        : bsi_tokjson_fail(j, "']' after the two pieces of a merge");
    }
    BSI_TRY(bsi_tokjson_string(j, s));
    char *space = memchr(s->p, ' ', s->n);
    size_t rest = space ? (size_t)(s->p + s->n - space - 1) : 0;
    if (!space || memchr(space + 1, ' ', rest))
        return bsi_fail(BS_FORMAT, "merge '%.*s' is not two pieces with a space between them",
                        (int)BSI_MIN(s->n, 80u), s->p);
    *left = (size_t)(space - s->p);
    memmove(space, space + 1, rest);
    s->n--;
    return BS_OK;
}

static bs_status read_merges(bsi_bpe *b, const bsi_vocab *v, bsi_tokjson *j, bsi_buf *s)
{
    if (!bsi_tokjson_take(j, '['))
        return bsi_tokjson_fail(j, "an array of merges");
    if (bsi_tokjson_take(j, ']'))
        return BS_OK;
    do {
        size_t left = 0;
        BSI_TRY(read_merge(j, s, &left));
        bsi_merge m = {bsi_vocab_id(v, s->p, left), bsi_vocab_id(v, s->p + left, s->n - left),
                       bsi_vocab_id(v, s->p, s->n)};
        if (m.left == BSI_NO_ID || m.right == BSI_NO_ID || m.made == BSI_NO_ID)
            return bsi_fail(
                BS_FORMAT, "merge %zu ('%.*s' + '%.*s'): %s is not a piece of the vocabulary",
                b->n_merges, (int)BSI_MIN(left, 80u), s->p, (int)BSI_MIN(s->n - left, 80u), s->p + left,
                m.left == BSI_NO_ID    ? "the first"
                : m.right == BSI_NO_ID ? "the second"
                                       : "the result");
        void *p = b->merge;
        bs_status st = bsi_grow(&p, &b->cap, b->n_merges + 1, sizeof m);
        b->merge = p;
        BSI_TRY(st);
        b->merge[b->n_merges++] = m;
    } while (bsi_tokjson_take(j, ','));
    return bsi_tokjson_take(j, ']') ? BS_OK : bsi_tokjson_fail(j, "',' or ']'");
}

bs_status bsi_bpe_read(bsi_bpe *b, const bsi_vocab *v, bsi_tokjson *merges)
{
    bsi_buf s = {0};
    bs_status st = read_merges(b, v, merges, &s);
    bsi_buf_free(&s);
    BSI_TRY(st);
    for (b->pairs = 16; b->pairs < b->n_merges * 2; b->pairs *= 2)
        ;
    b->pair = bsi_alloc(BS_TAG_MISC, b->pairs * sizeof *b->pair);
    if (!b->pair)
        return BS_NOMEM;
    memset(b->pair, 0xFF, b->pairs * sizeof *b->pair);
    for (size_t rank = 0; rank < b->n_merges; rank++) {
        const bsi_merge *m = &b->merge[rank];
        size_t i = pair_slot(b, m->left, m->right);
        while (b->pair[i].rank != BSI_NO_ID &&
               (b->pair[i].left != m->left || b->pair[i].right != m->right))
            i = (i + 1) & (b->pairs - 1);
        b->pair[i] =
            (bsi_pair){m->left, m->right, (uint32_t)rank}; /* named twice: the last one counts */
    }
    return BS_OK;
}

/* Characters that some merge puts side by side. */
static bs_status find_joints(bsi_bpe *b, const bsi_vocab *v)
{
    b->joint = bsi_alloc(BS_TAG_MISC, (size_t)1 << (JOINT_BITS - 3));
    if (!b->joint)
        return BS_NOMEM;
    for (size_t i = 0; i < b->n_merges; i++) {
        size_t n = 0, m = 0;
        unsigned len;
        const char *left = bsi_vocab_piece(v, b->merge[i].left, &n);
        const char *right = bsi_vocab_piece(v, b->merge[i].right, &m);
        if (!n || !m) /* an empty piece never becomes a symbol */
            continue;
        while (n > 1 && bsi_utf8_is_tail(left[n - 1]))
            n--;
        size_t bit = joint_bit(bsi_utf8_get(left + n - 1, &len), bsi_utf8_get(right, &len));
        b->joint[bit / 64] |= UINT64_C(1) << bit % 64;
    }
    return BS_OK;
}

bs_status bsi_bpe_finish(bsi_bpe *b, const bsi_vocab *v)
{
    for (unsigned c = 0; c < 256; c++) {
        char name[8];
        int n = b->bytes ? (int)bsi_utf8_put(byte_symbol((unsigned char)c), name)
                         : snprintf(name, sizeof name, "<0x%02X>", c);
        b->byte_id[c] = bsi_vocab_id(v, name, (size_t)n);
        if (b->bytes && b->byte_fallback && b->byte_id[c] == BSI_NO_ID)
            return bsi_fail(BS_UNSUPPORTED,
                            "byte_fallback with ByteLevel needs all 256 byte symbols; byte "
                            "0x%02X has none",
                            c);
    }
    /* 127 apart: where char is signed, a loop that includes it would overflow. */
    for (char c = 0; c >= 0 && c < 127; c++)
        b->ascii_id[(unsigned char)c] = bsi_vocab_id(v, &c, 1);
    b->ascii_id[127] = bsi_vocab_id(v, "\177", 1);
    return b->bytes ? BS_OK : find_joints(b, v);
}

void bsi_bpe_free(bsi_bpe *b)
{
    bsi_free(b->merge);
    bsi_free(b->pair);
    bsi_free(b->joint);
    *b = (bsi_bpe){0};
}

/* ---- symbols of a word ----------------------------------------------------------------------- */

static void add_symbol(bsi_bpe_work *w, uint32_t id, size_t first, size_t len)
{
    w->symbol[w->symbols] = (bsi_symbol){id, (uint32_t)first, (uint32_t)len, (int32_t)w->symbols - 1,
                                         (int32_t)w->symbols + 1};
    w->symbols++;
}

static uint32_t char_id(const bs_tok *t, const char *s, unsigned len)
{
    return len == 1 ? t->bpe.ascii_id[(unsigned char)*s] : bsi_vocab_model_id(&t->vocab, s, len);
}

/* One symbol per character or byte. What has no piece becomes its bytes <0xHH> when all of them exist,
   else the unknown token (neighbours as one when fuse_unk), else nothing. An unknown token waits for
   the next character that has a piece, or for the end: bytes that come between go in front of it. */
static void make_symbols(const bs_tok *t, bsi_bpe_work *w, const char *s, size_t first, size_t end)
{
    const bsi_bpe *b = &t->bpe;
    bsi_symbol unk = {0};
    w->symbols = 0;
    for (size_t i = first, next; i < end; i = next) {
        unsigned len = 1;
        if (!b->bytes)
            bsi_utf8_get(s + i, &len);
        next = i + len;
        uint32_t id = b->bytes ? b->byte_id[(unsigned char)s[i]] : char_id(t, s + i, len);
        if (id != BSI_NO_ID) {
            if (unk.len)
                add_symbol(w, b->unk, unk.first, unk.len);
            unk.len = 0;
            add_symbol(w, id, i, len);
            continue;
        }
        unsigned known = 0;
        while (b->byte_fallback && known < len && b->byte_id[(unsigned char)s[i + known]] != BSI_NO_ID)
            known++;
        if (known == len) {
            for (unsigned k = 0; k < len; k++)
                add_symbol(w, b->byte_id[(unsigned char)s[i + k]], i + k, 1);
        } else if (b->has_unk) {
            if (unk.len && !b->fuse_unk) {
                add_symbol(w, b->unk, unk.first, unk.len);
                unk.len = 0;
            }
            if (!unk.len)
                unk.first = (uint32_t)i;
            unk.len = (uint32_t)(next - unk.first);
        }
    }
    if (unk.len)
        add_symbol(w, b->unk, unk.first, unk.len);
}

/* ---- merging --------------------------------------------------------------------------------- */

/* Byte-pair encoding as it is defined (Sennrich et al. 2016): of all adjacent pairs the one with
   the lowest rank is merged, the leftmost of equals, until no pair has a rank. A merge changes only
   the ranks of the pair on its left and of the pair on its right, and both functions rest on that.
   merge_short looks through all ranks again, which is fast for the few symbols of most words;
   merge_long keeps them in a heap. */

static void merge_short(const bsi_bpe *b, bsi_bpe_work *w)
{
    uint32_t rank[SHORT_WORD];
    bsi_symbol *s = w->symbol;
    size_t n = w->symbols;
    for (size_t i = 0; i + 1 < n; i++)
        rank[i] = pair_rank(b, s[i].id, s[i + 1].id);
    while (n > 1) {
        size_t at = 0;
        for (size_t i = 1; i + 1 < n; i++)
            if (rank[i] < rank[at]) /* not <=: the leftmost */
                at = i;
        if (rank[at] == BSI_NO_ID)
            break;
        s[at].id = b->merge[rank[at]].made;
        s[at].len += s[at + 1].len;
        n--;
        memmove(&s[at + 1], &s[at + 2], (n - at - 1) * sizeof *s);
        if (at + 1 < n)
            memmove(&rank[at + 1], &rank[at + 2], (n - at - 2) * sizeof *rank);
        if (at + 1 < n)
            rank[at] = pair_rank(b, s[at].id, s[at + 1].id);
        if (at > 0)
            rank[at - 1] = pair_rank(b, s[at - 1].id, s[at].id);
    }
    w->symbols = n;
}

static void sink(uint64_t *heap, size_t n, size_t i)
{
    uint64_t key = heap[i];
    for (size_t child; (child = 2 * i + 1) < n; i = child) {
        if (child + 1 < n && heap[child + 1] < heap[child])
            child++;
        if (heap[child] >= key)
            break;
        heap[i] = heap[child];
    }
    heap[i] = key;
}

static uint64_t pop(bsi_bpe_work *w)
{
    uint64_t top = w->heap[0];
    w->heap[0] = w->heap[--w->heaped];
    sink(w->heap, w->heaped, 0);
    return top;
}

static void push(bsi_bpe_work *w, uint64_t key)
{
    size_t i = w->heaped++;
    for (; i && w->heap[(i - 1) / 2] > key; i = (i - 1) / 2)
        w->heap[i] = w->heap[(i - 1) / 2];
    w->heap[i] = key;
}

/* The heap entry of the pair that begins at position i, if it can merge. Rank above position in one
   number: the smallest is the lowest rank and, among equals, the leftmost. */
static bool entry(const bsi_bpe *b, const bsi_bpe_work *w, int32_t i, uint64_t *key)
{
    int32_t next = w->symbol[i].next;
    uint32_t rank = next < 0 ? BSI_NO_ID : pair_rank(b, w->symbol[i].id, w->symbol[next].id);
    *key = (uint64_t)rank << 32 | (uint32_t)i;
    return rank != BSI_NO_ID;
}

/* For long words, as in text that no pre-tokenizer cuts. Symbols keep their positions and are
   linked, so that positions in the heap keep their meaning; a symbol that has merged into its left
   neighbour has length 0. A merge does not look for the heap entries of the pairs that it ends.
   Instead an entry counts only if the two symbols at its position have the ids of its merge when it
   comes up, whatever stood there when it was pushed. */
static bs_status merge_long(const bsi_bpe *b, bsi_bpe_work *w)
{
    bsi_symbol *s = w->symbol;
    uint64_t key;
    void *p = w->heap;
    /* n symbols begin with fewer than n entries and merge fewer than n times. A merge takes one
       entry and adds two at most, so 2 n entries are enough, and push need not grow. */
    bs_status st = bsi_grow(&p, &w->heap_cap, 2 * w->symbols, sizeof *w->heap);
    w->heap = p;
    BSI_TRY(st);
    s[w->symbols - 1].next = -1;
    w->heaped = 0;
    for (size_t i = 0; i + 1 < w->symbols; i++)
        if (entry(b, w, (int32_t)i, &key))
            w->heap[w->heaped++] = key;
    for (size_t i = w->heaped / 2; i-- > 0;)
        sink(w->heap, w->heaped, i);
    while (w->heaped) {
        key = pop(w);
        int32_t at = (int32_t)(key & UINT32_MAX), right = s[at].next;
        const bsi_merge *m = &b->merge[key >> 32];
        if (!s[at].len || right < 0 || s[at].id != m->left || s[right].id != m->right)
            continue; /* stale: one of the two has merged since */
        s[at].id = m->made;
        s[at].len += s[right].len;
        s[at].next = s[right].next;
        s[right].len = 0;
        if (s[at].next >= 0)
            s[s[at].next].prev = at;
        if (s[at].prev >= 0 && entry(b, w, s[at].prev, &key))
            push(w, key);
        if (entry(b, w, at, &key))
            push(w, key);
    }
    size_t n = 0;
    for (int32_t i = 0; i >= 0; i = s[i].next)
        s[n++] = s[i]; /* n <= i: what is overwritten has been read */
    w->symbols = n;
    return BS_OK;
}

/* ---- words ----------------------------------------------------------------------------------- */

static bsi_memo *memo_of(bsi_bpe_work *w, const char *s, size_t n)
{
    uint64_t h = bs_hash64(s, n, 0);
    return &w->memo[(h ^ h >> 32) & (MEMOS - 1)];
}

static void remember(bsi_bpe_work *w, bsi_memo *m, const char *s, size_t first, size_t n)
{
    size_t end = first;
    /* Only words whose symbols cover them without a gap: a hit gives back ids and ends, and takes
       each begin from the end before. */
    if (w->symbols > MEMO_IDS)
        return;
    for (size_t i = 0; i < w->symbols; end += w->symbol[i++].len)
        if (w->symbol[i].first != end)
            return; /* something was dropped: the ids do not cover the word */
    if (end != first + n)
        return;
    m->len = (uint8_t)n;
    m->n = (uint8_t)w->symbols;
    memcpy(m->word, s + first, n);
    for (size_t i = 0; i < w->symbols; i++) {
        m->id[i] = w->symbol[i].id;
        m->end[i] = (uint8_t)(w->symbol[i].first + w->symbol[i].len - first);
    }
}

static bs_status whole_word(const bs_tok *t, bsi_bpe_work *w, const char *s, size_t n, uint32_t *id)
{
    if (t->bpe.bytes) {
        w->mapped.n = 0;
        BSI_TRY(bsi_buf_reserve(&w->mapped, 2 * n));
        for (size_t i = 0; i < n; i++)
            w->mapped.n += bsi_utf8_put(byte_symbol((unsigned char)s[i]), w->mapped.p + w->mapped.n);
        s = w->mapped.p;
        n = w->mapped.n;
    }
    *id = bsi_vocab_model_id(&t->vocab, s, n);
    return BS_OK;
}

static bs_status encode(const bs_tok *t, bs_tok_work *work, const bsi_view *v, size_t first, size_t end)
{
    bsi_bpe_work *w = &work->bpe;
    size_t n = end - first;
    uint32_t id = BSI_NO_ID;
    bsi_memo *m = NULL;
    if (n <= MEMO_WORD) {
        m = memo_of(w, v->p + first, n);
        if (m->len == n && !memcmp(m->word, v->p + first, n)) {
            for (size_t i = 0, at = first; i < m->n; at = first + m->end[i++])
                BSI_TRY(bsi_work_put(work, m->id[i], v, at, first + m->end[i]));
            return BS_OK;
        }
    }
    void *p = w->symbol;
    bs_status st = bsi_grow(&p, &w->symbol_cap, n, sizeof *w->symbol);
    w->symbol = p;
    BSI_TRY(st);
    if (t->bpe.ignore_merges)
        BSI_TRY(whole_word(t, w, v->p + first, n, &id));
    if (id != BSI_NO_ID) {
        w->symbols = 0;
        add_symbol(w, id, first, n);
    } else {
        make_symbols(t, w, v->p, first, end);
        if (w->symbols > SHORT_WORD)
            BSI_TRY(merge_long(&t->bpe, w));
        else
            merge_short(&t->bpe, w);
    }
    for (size_t i = 0; i < w->symbols; i++)
        BSI_TRY(bsi_work_put(work, w->symbol[i].id, v, w->symbol[i].first,
                             w->symbol[i].first + w->symbol[i].len));
    if (m)
        remember(w, m, v->p, first, n);
    return BS_OK;
}

bs_status bsi_bpe_word(const bs_tok *t, bs_tok_work *w, const bsi_view *v, bsi_range r)
{
    const bsi_bpe *b = &t->bpe;
    if (!w->bpe.memo) {
        w->bpe.memo = bsi_alloc(BS_TAG_MISC, MEMOS * sizeof *w->bpe.memo);
        if (!w->bpe.memo)
            return BS_NOMEM;
    }
    if (b->bytes || b->ignore_merges) /* a whole word may be a piece that merges do not reach */
        return encode(t, w, v, r.first, r.end);
    /* Without a pre-tokenizer a word is a whole text. It is cut between two characters that no
       merge ever brings together: each side gives the same ids alone, and short words are
       remembered. Characters without a piece stay with their neighbours, because make_symbols joins
       or moves them across a place. */
    size_t first = r.first, i = r.first;
    unsigned len, last = 0;
    for (uint32_t c, before = 0; i < r.end; i += len, before = c, last = len) {
        c = bsi_utf8_get(v->p + i, &len);
        size_t bit = joint_bit(before, c);
        if (i == r.first || b->joint[bit / 64] >> bit % 64 & 1 ||
            char_id(t, v->p + i, len) == BSI_NO_ID || char_id(t, v->p + i - last, last) == BSI_NO_ID)
            continue;
        BSI_TRY(encode(t, w, v, first, i));
        first = i;
    }
    return encode(t, w, v, first, r.end);
}

void bsi_bpe_work_free(bsi_bpe_work *w)
{
    bsi_free(w->symbol);
    bsi_free(w->heap);
    bsi_free(w->memo);
    bsi_buf_free(&w->mapped);
    *w = (bsi_bpe_work){0};
}
