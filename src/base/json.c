/* SPDX-License-Identifier: Apache-2.0 */
/*
** json.c: a scan that makes text from outside safe to give to cJSON, the parse itself, and a growing
** text buffer for writing. The scan also counts values and strings, which bounds the memory of the
** tree before any of it is allocated.
*/
#include "base/json.h"

#include <stdlib.h>
#include <string.h>

size_t bsi_utf8_step(const unsigned char *s, size_t n)
{
    unsigned c = s[0];
    if (c < 0x80)
        return 1;
    size_t len = c >= 0xF0 ? 4 : c >= 0xE0 ? 3 : 2;
    if (c < 0xC2 || c > 0xF4 || n < len)
        return 0;
    /* The second byte excludes overlong forms, surrogates and values beyond 0x10FFFF. */
    unsigned lo = c == 0xE0 ? 0xA0 : c == 0xF0 ? 0x90 : 0x80;
    unsigned hi = c == 0xED ? 0x9F : c == 0xF4 ? 0x8F : 0xBF;
    if (s[1] < lo || s[1] > hi)
        return 0;
    for (size_t i = 2; i < len; i++)
        if ((s[i] & 0xC0) != 0x80)
            return 0;
    return len;
}

bool bsi_json_utf8_valid(const char *s, size_t n)
{
    const unsigned char *p = (const unsigned char *)s;
    for (size_t i = 0, k; i < n; i += k)
        if (!(k = bsi_utf8_step(p + i, n - i)))
            return false;
    return true;
}

typedef struct scan {
    const unsigned char *s;
    size_t n, at;
    size_t values, strings; /* upper bounds on the nodes and string copies of the tree */
    int depth;
    bool uints;
    const char *fault; /* set when refused */
} scan;

/* s->at is behind the opening quote; leaves it behind the closing one. */
static bool scan_string(scan *s)
{
    s->strings++;
    while (s->at < s->n) {
        unsigned char c = s->s[s->at];
        if (c == '"') {
            s->at++;
            return true;
        }
        if (c < 0x20) {
            s->fault = "control character in a string";
            return false;
        }
        if (c == '\\') {
            if (s->n - s->at >= 6 && memcmp(s->s + s->at, "\\u0000", 6) == 0) {
                s->fault = "\\u0000 in a string";
                return false;
            }
            if (++s->at == s->n)
                break;
            if (s->s[s->at] < 0x80)
                s->at++;
            continue;
        }
        size_t k = bsi_utf8_step(s->s + s->at, s->n - s->at);
        if (!k) {
            s->fault = "not valid UTF-8";
            return false;
        }
        s->at += k;
    }
    s->fault = "string without an end";
    return false;
}

static bool digit(const scan *s, size_t at)
{
    return at < s->n && s->s[at] >= '0' && s->s[at] <= '9';
}

static bool scan_plain(scan *s)
{
    unsigned char c = s->s[s->at];
    switch (c) {
    case '[':
    case '{':
        s->values++;
        if (++s->depth > BSI_JSON_DEPTH)
            s->fault = "nested too deeply";
        break;
    case ']':
    case '}':
        s->depth--;
        break;
    case ',':
        s->values++;
        break;
    case ' ':
    case '\t':
    case '\n':
    case '\r':
    case ':':
        break;
    default:
        if (c < 0x20 || c > 0x7E)
            s->fault = "character that does not belong to JSON";
        else if (s->uints && !digit(s, s->at))
            s->fault = "only strings, arrays, objects and non-negative integers belong here";
        else if (c == '0' && digit(s, s->at + 1) && (s->at == 0 || !digit(s, s->at - 1)) && s->uints)
            s->fault = "number with a leading zero";
    }
    s->at += !s->fault;
    return !s->fault;
}

static bool scan_text(scan *s)
{
    s->values = 1;
    while (s->at < s->n) {
        if (s->s[s->at] == '"') {
            s->at++;
            if (!scan_string(s))
                return false;
        } else if (!scan_plain(s)) {
            return false;
        }
    }
    return true;
}

bs_status bsi_json_parse(const char *text, size_t n, bool uints, const char *what, bsi_json *out)
{
    scan s = {.s = (const unsigned char *)text, .n = n, .uints = uints};
    *out = (bsi_json){0};
    if (!scan_text(&s))
        return bsi_fail(BS_FORMAT, "%s: byte %zu of the JSON text: %s", what, s.at, s.fault);

    /* n bounds values and strings, so none of this overflows for text that fits in memory. 16 and 32:
       what malloc adds to a node and to a short string. */
    size_t need = s.values * (sizeof(cJSON) + 16) + s.strings * 32 + n;
    void *probe = malloc(need);
    if (!probe)
        return bsi_fail(BS_NOMEM,
                        "%s: parsing its %zu bytes of JSON takes about %zu bytes of host memory", what,
                        n, need);
    free(probe);
    bsi_account(BS_TAG_HEADER, (ptrdiff_t)need);
    out->reserved = need;

    const char *end = NULL;
    out->root = cJSON_ParseWithLengthOpts(text, n, &end, 0);
    if (!out->root) {
        bsi_json_end(out);
        return bsi_fail(BS_FORMAT, "%s: not valid JSON at byte %zu", what,
                        end ? (size_t)(end - text) : 0);
    }
    for (size_t at = (size_t)(end - text); at < n; at++)
        if (!strchr(" \t\r\n", text[at])) {
            bsi_json_end(out);
            return bsi_fail(BS_FORMAT, "%s: byte %zu: text behind the end of the JSON value", what, at);
        }
    return BS_OK;
}

void bsi_json_end(bsi_json *j)
{
    cJSON_Delete(j->root);
    bsi_account(BS_TAG_HEADER, -(ptrdiff_t)j->reserved);
    *j = (bsi_json){0};
}

bool bsi_json_uint(const cJSON *v, uint64_t *out)
{
    if (!cJSON_IsNumber(v) || !(v->valuedouble >= 0 && v->valuedouble < 0x1p53))
        return false;
    *out = (uint64_t)v->valuedouble;
    return (double)*out == v->valuedouble;
}

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
