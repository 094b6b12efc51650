/* SPDX-License-Identifier: Apache-2.0 */
/*
** utf8.c: the one place that decides what UTF-8 is: for JSON, names of tensors and the texts of tokenizers.
*/
#include "base/utf8.h"

#include <string.h>

/* Bytes of the well-formed character at s; 0: there is none. *seen: bytes that begin one. */
static unsigned step(const unsigned char *s, size_t n, unsigned *seen)
{
    unsigned char c = s[0], low = 0x80, high = 0xBF;
    unsigned len = c < 0x80 ? 1 : c < 0xC2 ? 0 : c < 0xE0 ? 2 : c < 0xF0 ? 3 : c < 0xF5 ? 4 : 0;
    *seen = 1;
    if (len < 2)
        return len;
    if (c == 0xE0)
        low = 0xA0; /* no overlong forms */
    else if (c == 0xED)
        high = 0x9F; /* no surrogates */
    else if (c == 0xF0)
        low = 0x90;
    else if (c == 0xF4)
        high = 0x8F; /* nothing above U+10FFFF */
    for (; *seen < len; ++*seen) {
        if (*seen >= n || s[*seen] < low || s[*seen] > high)
            return 0;
        low = 0x80;
        high = 0xBF;
    }
    return len;
}

size_t bsi_utf8_step(const unsigned char *s, size_t n)
{
    unsigned seen;
    return step(s, n, &seen);
}

size_t bs_utf8_valid(const char *s, size_t n)
{
    size_t i = 0;
    while (i < n) {
        uint64_t word; /* most text is ASCII: eight bytes at a time */
        if (n - i >= sizeof word) {
            memcpy(&word, s + i, sizeof word);
            if (!(word & UINT64_C(0x8080808080808080))) {
                i += sizeof word;
                continue;
            }
        }
        unsigned seen, len = step((const unsigned char *)s + i, n - i, &seen);
        if (!len)
            break;
        i += len;
    }
    return i;
}

size_t bsi_utf8_bad(const char *s, size_t n, bool *cut)
{
    unsigned char c = (unsigned char)s[0];
    unsigned seen;
    step((const unsigned char *)s, n, &seen);
    *cut = seen >= n && c >= 0xC2 && c < 0xF5;
    return seen;
}
