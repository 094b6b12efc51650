/* SPDX-License-Identifier: Apache-2.0 */
/*
** text.c: growing buffers, code points, character classes, and text whose bytes remember what they stand
** for. Pure functions of their arguments and of the buffers handed in; any thread.
*/
#include "text/text.h"

#include <string.h>

#if BS_HAVE_UTF8PROC
#include <utf8proc.h>
#endif

bs_status bsi_grow(void **p, size_t *cap, size_t need, size_t size)
{
    if (need <= *cap)
        return BS_OK;
    size_t want = BSI_MAX(need, *cap + *cap / 2), bytes;
    want = BSI_MAX(want, 16);
    if (!bsi_mul_size(want, size, &bytes))
        return bsi_fail(BS_NOMEM, "%zu elements of %zu bytes do not fit into memory", want, size);
    void *q = bsi_realloc(BS_TAG_MISC, *p, bytes);
    if (!q)
        return BS_NOMEM;
    *p = q;
    *cap = want;
    return BS_OK;
}

bs_status bsi_buf_reserve(bsi_buf *b, size_t more)
{
    size_t need;
    if (!bsi_add_size(b->n, more, &need))
        return bsi_fail(BS_NOMEM, "%zu more bytes do not fit into memory", more);
    void *p = b->p;
    bs_status st = bsi_grow(&p, &b->cap, need, 1);
    b->p = p;
    return st;
}

bs_status bsi_buf_put(bsi_buf *b, const char *s, size_t n)
{
    /* Nothing is put, too: the bytes of an empty piece have an address, which memcmp, memchr and sums with it
       must be given. */
    if (n > b->cap - b->n || !b->p)
        BSI_TRY(bsi_buf_reserve(b, BSI_MAX(n, 1)));
    if (n)
        memcpy(b->p + b->n, s, n);
    b->n += n;
    return BS_OK;
}

void bsi_buf_free(bsi_buf *b)
{
    bsi_free(b->p);
    *b = (bsi_buf){0};
}

uint32_t bsi_utf8_get(const char *s, unsigned *len)
{
    const unsigned char *u = (const unsigned char *)s;
    if (u[0] < 0x80) {
        *len = 1;
        return u[0];
    }
    if (u[0] < 0xE0) {
        *len = 2;
        return (u[0] & 0x1Fu) << 6 | (u[1] & 0x3Fu);
    }
    if (u[0] < 0xF0) {
        *len = 3;
        return (u[0] & 0x0Fu) << 12 | (u[1] & 0x3Fu) << 6 | (u[2] & 0x3Fu);
    }
    *len = 4;
    return (u[0] & 0x07u) << 18 | (u[1] & 0x3Fu) << 12 | (u[2] & 0x3Fu) << 6 | (u[3] & 0x3Fu);
}

unsigned bsi_utf8_put(uint32_t c, char out[4])
{
    unsigned char *u = (unsigned char *)out;
    if (c < 0x80) {
        u[0] = (unsigned char)c;
        return 1;
    }
    if (c < 0x800) {
        u[0] = (unsigned char)(0xC0 | c >> 6);
        u[1] = (unsigned char)(0x80 | (c & 0x3F));
        return 2;
    }
    if (c < 0x10000) {
        u[0] = (unsigned char)(0xE0 | c >> 12);
        u[1] = (unsigned char)(0x80 | (c >> 6 & 0x3F));
        u[2] = (unsigned char)(0x80 | (c & 0x3F));
        return 3;
    }
    u[0] = (unsigned char)(0xF0 | c >> 18);
    u[1] = (unsigned char)(0x80 | (c >> 12 & 0x3F));
    u[2] = (unsigned char)(0x80 | (c >> 6 & 0x3F));
    u[3] = (unsigned char)(0x80 | (c & 0x3F));
    return 4;
}

bool bsi_is_space(uint32_t c)
{
    return (c >= 9 && c <= 13) || c == ' ' || c == 0x85 || c == 0xA0 || c == 0x1680 ||
           (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
           c == 0x3000;
}

bool bsi_is_word(uint32_t c)
{
    if (c < 0x80)
        return (c >= '0' && c <= '9') || ((c | 32) >= 'a' && (c | 32) <= 'z') || c == '_';
#if BS_HAVE_UTF8PROC
    switch (utf8proc_category((utf8proc_int32_t)c)) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_PC:
        return true;
    default: /* joiners, and the circled and squared letters, which are Alphabetic though symbols */
        return c == 0x200C || c == 0x200D || (c >= 0x24B6 && c <= 0x24E9) ||
               (c >= 0x1F130 && c <= 0x1F149) || (c >= 0x1F150 && c <= 0x1F169) ||
               (c >= 0x1F170 && c <= 0x1F189);
    }
#else
    return true; /* not reached: single_word is refused without utf8proc */
#endif
}

bs_status bsi_text_put(bsi_text *t, const char *s, size_t n, bs_tok_span at)
{
    if (n > t->cap - t->n) {
        if (n > INT32_MAX - t->n)
            return bsi_fail(BS_ARG, "normalized text is longer than 2 GiB; encode it in parts");
        void *p = t->p;
        bs_status st = bsi_grow(&p, &t->cap, t->n + n, 1);
        t->p = p;
        BSI_TRY(st);
    }
    if (n)
        memcpy(t->p + t->n, s, n);
    if (t->spans) {
        void *p = t->at;
        bs_status st = bsi_grow(&p, &t->at_cap, t->n + n, sizeof *t->at);
        t->at = p;
        BSI_TRY(st);
        for (size_t i = 0; i < n; i++)
            t->at[t->n + i] = at;
    }
    t->n += n;
    return BS_OK;
}

bs_status bsi_text_copy(bsi_text *t, const bsi_view *v, size_t first, size_t end)
{
    if (!t->spans)
        return bsi_text_put(t, v->p + first, end - first, (bs_tok_span){0});
    for (size_t i = first, next; i < end; i = next) {
        for (next = i + 1; next < end && bsi_utf8_is_tail(v->p[next]); next++)
            ;
        BSI_TRY(bsi_text_put(t, v->p + i, next - i, bsi_view_span(v, i, next)));
    }
    return BS_OK;
}

void bsi_text_free(bsi_text *t)
{
    bsi_free(t->p);
    bsi_free(t->at);
    *t = (bsi_text){0};
}

bs_tok_span bsi_view_span(const bsi_view *v, size_t first, size_t end)
{
    if (v->at)
        return end > first ? (bs_tok_span){v->at[first].first, v->at[end - 1].end} : (bs_tok_span){0};
    while (first > 0 && first < v->n && bsi_utf8_is_tail(v->p[first]))
        first--;
    while (end < v->n && bsi_utf8_is_tail(v->p[end]))
        end++;
    return (bs_tok_span){(uint32_t)(v->base + first), (uint32_t)(v->base + end)};
}

bsi_view bsi_view_of(const bsi_text *t)
{
    return (bsi_view){t->p, t->n, t->spans ? t->at : NULL, 0};
}
