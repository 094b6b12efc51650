/* SPDX-License-Identifier: Apache-2.0 */
/*
** vocab.c: the pieces of a tokenizer, by id and by text. Texts lie one after the other in an arena; an
** open-addressing table finds them. Filled while a file is opened, read-only afterwards.
*/
#include "text/text.h"

#include <string.h>

static uint64_t hash(const char *s, size_t n)
{
    uint64_t h = n * UINT64_C(0x9E3779B97F4A7C15), word;
    for (; n >= sizeof word; s += sizeof word, n -= sizeof word) {
        memcpy(&word, s, sizeof word);
        h = (h ^ word) * UINT64_C(0xFF51AFD7ED558CCD);
        h ^= h >> 32;
    }
    if (n) {
        word = 0;
        memcpy(&word, s, n);
        h = (h ^ word) * UINT64_C(0xFF51AFD7ED558CCD);
    }
    h ^= h >> 29;
    h *= UINT64_C(0x9E3779B97F4A7C15);
    return h ^ h >> 32;
}

/* The slot that holds the text, or the free one where it belongs. */
static bsi_slot *find(const bsi_vocab *v, const char *s, size_t n, uint64_t h)
{
    uint32_t tag = (uint32_t)(h >> 32);
    for (size_t i = h & (v->slots - 1);; i = (i + 1) & (v->slots - 1)) {
        bsi_slot *slot = &v->slot[i];
        if (slot->id == BSI_NO_ID)
            return slot;
        if (slot->tag == tag && slot->piece.len == n && !memcmp(v->arena.p + slot->piece.at, s, n))
            return slot;
    }
}

static bs_status rehash(bsi_vocab *v, size_t slots)
{
    bsi_slot *old = v->slot;
    size_t n = v->slots, bytes;
    if (!bsi_mul_size(slots, sizeof *old, &bytes))
        return bsi_fail(BS_NOMEM, "%zu pieces do not fit into memory", slots);
    v->slot = bsi_alloc(BS_TAG_MISC, bytes);
    if (!v->slot) {
        v->slot = old;
        return BS_NOMEM;
    }
    memset(v->slot, 0xFF, bytes);
    v->slots = slots;
    for (size_t i = 0; i < n; i++)
        if (old[i].id != BSI_NO_ID) {
            const char *s = v->arena.p + old[i].piece.at;
            size_t len = old[i].piece.len;
            *find(v, s, len, hash(s, len)) = old[i];
        }
    bsi_free(old);
    return BS_OK;
}

/* Adds the last n bytes of the arena. */
static bs_status add(bsi_vocab *v, size_t n, uint32_t id)
{
    if (v->arena.n >= UINT32_MAX)
        return bsi_fail(BS_FORMAT, "the pieces take more than 4 GiB");
    if (id > BSI_MAX_ID)
        return bsi_fail(BS_FORMAT, "id %u is above %u", id, BSI_MAX_ID);
    uint32_t at = (uint32_t)(v->arena.n - n);
    const char *s = v->arena.p + at;
    if (v->used * 2 >= v->slots)
        BSI_TRY(rehash(v, v->slots ? v->slots * 2 : 1024));
    if (id >= v->n_ids) {
        void *p = v->piece;
        bs_status st = bsi_grow(&p, &v->cap, (size_t)id + 1, sizeof *v->piece);
        v->piece = p;
        BSI_TRY(st);
        memset(v->piece + v->n_ids, 0xFF, ((size_t)id + 1 - v->n_ids) * sizeof *v->piece);
        v->n_ids = (size_t)id + 1;
    }
    bsi_piece *p = &v->piece[id];
    if (p->at != UINT32_MAX)
        return bsi_fail(BS_FORMAT, "id %u is given to '%.*s' and to '%.*s'", id,
                        (int)BSI_MIN(p->len, 80u), v->arena.p + p->at, (int)BSI_MIN(n, 80u), s);
    uint64_t h = hash(s, n);
    bsi_slot *slot = find(v, s, n, h);
    if (slot->id != BSI_NO_ID)
        return bsi_fail(BS_FORMAT, "piece '%.*s' has the ids %u and %u", (int)BSI_MIN(n, 80u), s,
                        slot->id, id);
    *p = (bsi_piece){at, (uint32_t)n};
    *slot = (bsi_slot){(uint32_t)(h >> 32), id, *p};
    v->used++;
    return BS_OK;
}

bs_status bsi_vocab_add(bsi_vocab *v, const char *s, size_t n, uint32_t id)
{
    BSI_TRY(bsi_buf_put(&v->arena, s, n));
    return add(v, n, id);
}

bs_status bsi_vocab_read(bsi_vocab *v, bsi_tokjson *j)
{
    if (!bsi_tokjson_take(j, '{'))
        return bsi_tokjson_fail(j, "an object of pieces and ids");
    if (bsi_tokjson_take(j, '}'))
        return BS_OK;
    do {
        uint32_t id;
        size_t from = v->arena.n;
        BSI_TRY(bsi_tokjson_string(j, &v->arena));
        if (!bsi_tokjson_take(j, ':'))
            return bsi_tokjson_fail(j, "':'");
        BSI_TRY(bsi_tokjson_uint(j, BSI_MAX_ID, &id));
        BSI_TRY(add(v, v->arena.n - from, id));
    } while (bsi_tokjson_take(j, ','));
    v->model_end = v->arena.n;
    return bsi_tokjson_take(j, '}') ? BS_OK : bsi_tokjson_fail(j, "',' or '}'");
}

uint32_t bsi_vocab_id(const bsi_vocab *v, const char *s, size_t n)
{
    return v->slots ? find(v, s, n, hash(s, n))->id : BSI_NO_ID;
}

uint32_t bsi_vocab_model_id(const bsi_vocab *v, const char *s, size_t n)
{
    if (!v->slots)
        return BSI_NO_ID;
    const bsi_slot *slot = find(v, s, n, hash(s, n));
    return slot->piece.at < v->model_end ? slot->id : BSI_NO_ID; /* a free slot: at is UINT32_MAX */
}

void bsi_vocab_free(bsi_vocab *v)
{
    bsi_buf_free(&v->arena);
    bsi_free(v->piece);
    bsi_free(v->slot);
    *v = (bsi_vocab){0};
}
