/* SPDX-License-Identifier: Apache-2.0 */
/*
** finder.c: finds added tokens in text, leftmost first and longest at a place. They are few and short, so a finder
** is a sorted list: at a byte that begins some token, the range of tokens that agree with the text narrows byte by
** byte. Filled at open (added.c), searched by any thread.
*/
#include "text/text.h"

#include <stdlib.h>
#include <string.h>

static int compare(const void *a, const void *b)
{
    const bsi_added *x = a, *y = b;
    int c = memcmp(x->text, y->text, BSI_MIN(x->n, y->n));
    return c ? c : (x->n > y->n) - (x->n < y->n);
}

/* The longest token that begins at s. */
static const bsi_added *longest(const bsi_finder *f, const char *s, size_t n)
{
    unsigned char c = (unsigned char)s[0];
    size_t low = f->first[c], high = f->first[c + 1];
    const bsi_added *best = NULL;
    for (size_t depth = 1; low < high; depth++) {
        if (f->token[low].n == depth)
            best = &f->token[low++]; /* the shortest of a range is its first */
        if (depth >= n)
            break;
        c = (unsigned char)s[depth];
        size_t a = low, b = high; /* first token with a byte >= c there, first with a byte > c */
        while (a < b) {
            size_t mid = a + (b - a) / 2;
            if ((unsigned char)f->token[mid].text[depth] < c)
                a = mid + 1;
            else
                b = mid;
        }
        low = a;
        for (b = high; a < b;) {
            size_t mid = a + (b - a) / 2;
            if ((unsigned char)f->token[mid].text[depth] <= c)
                a = mid + 1;
            else
                b = mid;
        }
        high = a;
    }
    return best;
}

static size_t char_before(const char *s, size_t at)
{
    do
        at--;
    while (at > 0 && bsi_utf8_is_tail(s[at]));
    return at;
}

static bool stands_alone(const char *s, size_t n, size_t first, size_t end)
{
    unsigned len;
    return (first == 0 || !bsi_is_word(bsi_utf8_get(s + char_before(s, first), &len))) &&
           (end == n || !bsi_is_word(bsi_utf8_get(s + end, &len)));
}

bsi_found bsi_finder_next(const bsi_finder *f, const char *s, size_t n, size_t at, size_t covered,
                          bool literal)
{
    unsigned len;
    for (size_t i = at; f->n && i < n; i++) {
        unsigned char c = (unsigned char)s[i];
        if (f->first[c] == f->first[c + 1])
            continue;
        const bsi_added *token = longest(f, s + i, n - i);
        if (!token)
            continue;
        bsi_found found = {token, i, i + token->n, i + token->n};
        if ((literal && token->special) || (token->single_word && !stands_alone(s, n, i, found.end))) {
            i = found.next - 1; /* plain text, and no shorter token is looked for in it */
            continue;
        }
        while (token->lstrip && found.first > covered) {
            size_t before = char_before(s, found.first);
            if (before < covered || !bsi_is_space(bsi_utf8_get(s + before, &len)))
                break;
            found.first = before;
        }
        if (token->lstrip && found.first < covered)
            found.first = covered; /* white space that the token before has swallowed */
        while (token->rstrip && found.end < n && bsi_is_space(bsi_utf8_get(s + found.end, &len)))
            found.end += len;
        if (found.first < found.end)
            return found;
        i = found.next - 1;
    }
    return (bsi_found){NULL, n, n, n};
}

bs_status bsi_finder_finish(bsi_finder *f)
{
    if (f->n)
        qsort(f->token, f->n, sizeof *f->token, compare);
    for (size_t i = 1; i < f->n; i++)
        if (!compare(&f->token[i - 1], &f->token[i]))
            return bsi_fail(BS_FORMAT, "added token '%.*s' is there twice (ids %u and %u)",
                            (int)BSI_MIN(f->token[i].n, (size_t)80), f->token[i].text,
                            f->token[i - 1].id, f->token[i].id);
    size_t at = 0;
    for (unsigned c = 0; c <= 256; c++) {
        while (at < f->n && (unsigned char)f->token[at].text[0] < c)
            at++;
        f->first[c] = (uint32_t)at;
    }
    return BS_OK;
}

void bsi_finder_free(bsi_finder *f)
{
    for (size_t i = 0; i < f->n; i++)
        bsi_free(f->token[i].text);
    bsi_free(f->token);
    *f = (bsi_finder){0};
}
