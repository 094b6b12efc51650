/* SPDX-License-Identifier: Apache-2.0 */
/*
** json_write.c: a growing buffer, and strings as JSON writes them.
*/
#include "base/json.h"

#include <string.h>

void bsi_writer_put(bsi_writer *t, const char *s, size_t n)
{
    size_t need;
    if (t->failed)
        return;
    if (!bsi_add_size(t->n, n, &need) || !bsi_add_size(need, 1, &need)) {
        t->failed = true;
        return;
    }
    if (need > t->cap) {
        size_t cap = BSI_MAX(need, t->cap * 2);
        char *p = bsi_realloc(BS_TAG_HEADER, t->p, BSI_MAX(cap, 256));
        if (!p) {
            t->failed = true;
            return;
        }
        t->p = p;
        t->cap = BSI_MAX(cap, 256);
    }
    memcpy(t->p + t->n, s, n);
    t->n += n;
    t->p[t->n] = '\0';
}

void bsi_writer_printf(bsi_writer *t, const char *fmt, ...)
{
    char small[256];
    va_list ap;
    va_start(ap, fmt);
    int n = vsnprintf(small, sizeof small, fmt, ap);
    va_end(ap);
    if (n < 0 || (size_t)n >= sizeof small) /* callers print numbers and short words only */
        t->failed = true;
    else
        bsi_writer_put(t, small, (size_t)n);
}

void bsi_writer_quote(bsi_writer *t, const char *s)
{
    bsi_writer_put(t, "\"", 1);
    for (const char *run = s;; s++) {
        unsigned char c = (unsigned char)*s;
        if (c >= 0x20 && c != '"' && c != '\\')
            continue;
        bsi_writer_put(t, run, (size_t)(s - run));
        if (!c)
            break;
        const char *from = "\"\\\b\f\n\r\t", *hit = strchr(from, c);
        if (hit)
            bsi_writer_printf(t, "\\%c", "\"\\bfnrt"[hit - from]);
        else
            bsi_writer_printf(t, "\\u%04x", c);
        run = s + 1;
    }
    bsi_writer_put(t, "\"", 1);
}
