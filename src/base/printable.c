/* SPDX-License-Identifier: Apache-2.0 */
/*
** printable.c: text of unknown origin for people to read. What would move a terminal's cursor, colour it, turn the
** direction of writing, hide between letters or end a line is shown as an escape, so that the name of a file cannot
** pretend to be a message.
*/
#include "base/base.h"
#include "base/utf8.h"

#include <string.h>

static uint32_t code_point(const unsigned char *s, unsigned len)
{
    uint32_t c = len == 1 ? s[0] : s[0] & (0x7Fu >> len);
    for (unsigned i = 1; i < len; i++)
        c = c << 6 | (s[i] & 0x3F);
    return c;
}

/* Code points without a glyph of their own that change what is around them. */
static bool hidden(uint32_t c)
{
    static const struct {
        uint32_t first, last;
    } range[] = {
        {0x7F, 0x9F},       /* DEL and C1: another way to write escape sequences */
        {0x061C, 0x061C},   /* Arabic letter mark */
        {0x180E, 0x180E},   /* Mongolian vowel separator */
        {0x200B, 0x200F},   /* without width; marks of direction */
        {0x2028, 0x202E},   /* separators of lines and paragraphs; embeddings, overrides */
        {0x2060, 0x206F},   /* joiners, isolates, deprecated formats */
        {0xFEFF, 0xFEFF},   /* byte order mark */
        {0xFFF9, 0xFFFB},   /* annotations */
        {0xE0000, 0xE007F}, /* tags */
    };
    if (c < 0x20)
        return true;
    for (size_t i = 0; i < BSI_COUNT(range); i++)
        if (c >= range[i].first && c <= range[i].last)
            return true;
    return false;
}

/* In running text white space is itself, and scripts need the two joiners. */
static bool kept(uint32_t c)
{
    return c == '\n' || c == '\t' || c == 0x200C || c == 0x200D;
}

/* The escape of a code point. */
static size_t escape(uint32_t c, char out[16])
{
    const char *short_form = c == '\n' ? "\\n" : c == '\r' ? "\\r" : c == '\t' ? "\\t" : NULL;
    return (size_t)(short_form  ? snprintf(out, 16, "%s", short_form)
                    : c < 0x80u ? snprintf(out, 16, "\\x%02X", (unsigned)c)
                                : snprintf(out, 16, "\\u{%04X}", (unsigned)c));
}

size_t bs_printable(const char *s, size_t n, bool running, char *out, size_t room)
{
    size_t made = 0;
    for (size_t i = 0; i < n;) {
        const unsigned char *at = (const unsigned char *)s + i;
        unsigned len = (unsigned)bsi_utf8_step(at, n - i);
        uint32_t c = len ? code_point(at, len) : 0;
        char text[16];
        const char *piece = s + i;
        size_t k = len;
        if (!len) { /* no character begins here */
            k = (size_t)snprintf(text, sizeof text, "\\x%02X", at[0]);
            piece = text;
        } else if (hidden(c) && !(running && kept(c))) {
            k = escape(c, text);
            piece = text;
        }
        if (made < room)
            memcpy(out + made, piece, BSI_MIN(k, room - made));
        made += k;
        i += len ? len : 1;
    }
    return made;
}

/* A buffer of the stack at a time: there may be no memory left when this is called. */
void bs_tell(const char *text, size_t n, bool running)
{
    char out[512];
    size_t used = 0;
    flockfile(stderr);
    fputs("bslua: ", stderr);
    for (size_t i = 0; i < n;) {
        size_t len = bsi_utf8_step((const unsigned char *)text + i, n - i);
        if (len == 0)
            len = 1;
        used += bs_printable(text + i, len, running, out + used, sizeof out - used);
        if (used > sizeof out - 16) {
            fwrite(out, 1, used, stderr);
            used = 0;
        }
        i += len;
    }
    out[used++] = '\n';
    fwrite(out, 1, used, stderr);
    funlockfile(stderr);
}
