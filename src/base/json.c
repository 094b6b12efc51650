/* SPDX-License-Identifier: Apache-2.0 */
/*
** json.c: the one reader of JSON trees: headers, manifests, settings of tokenizers, rows and configurations. A scan
** makes the text safe to give to cJSON, whose parser is lax and counts on strings without zero bytes; it also counts
** values and strings, which bounds the memory of the tree before any of it is allocated. Grammar is cJSON's to check.
*/
#include "base/json.h"
#include "base/utf8.h"

#include <stdlib.h>
#include <string.h>
#include <strings.h>

const bs_json_rules bsi_json_header = {.depth = BSI_JSON_HEADER_DEPTH, .counts = true};

/* ---- the scan -------------------------------------------------------------------------------- */

typedef struct scan {
    const unsigned char *s;
    size_t n, at;
    size_t values, strings; /* upper bounds on the nodes and string copies of the tree */
    int depth, most;
    bool counts, lax;
    const char *problem; /* set when the text is refused, at `at` */
} scan;

static bool refuse(scan *s, const char *problem)
{
    s->problem = problem;
    return false;
}

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
        if (c == 0)
            return refuse(s, "zero byte in a string");
        if (c < 0x20 && !s->lax)
            return refuse(s, "control character in a string");
        if (c == '\\') {
            if (s->n - s->at >= 6 && memcmp(s->s + s->at, "\\u0000", 6) == 0)
                return refuse(s, "zero character (\\u0000) in a string");
            if (++s->at == s->n)
                break;
            /* The escaped character cannot begin another escape, nor end the string. What is none of ASCII is
               looked at as any other, and refused by cJSON. */
            if (s->s[s->at] < 0x80 && s->s[s->at])
                s->at++;
            continue;
        }
        size_t k = s->lax ? 1 : bsi_utf8_step(s->s + s->at, s->n - s->at);
        if (!k)
            return refuse(s, "not valid UTF-8");
        s->at += k;
    }
    return refuse(s, "string without an end");
}

static bool digit(const scan *s, size_t at)
{
    return at < s->n && s->s[at] >= '0' && s->s[at] <= '9';
}

/* A character outside strings. */
static bool scan_plain(scan *s)
{
    unsigned char c = s->s[s->at];
    switch (c) {
    case '[':
    case '{':
        s->values++;
        if (++s->depth > s->most)
            return refuse(s, "nested too deeply");
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
        if (c == 0)
            return refuse(s, "zero byte");
        if ((c < 0x20 || c > 0x7E) && !s->lax)
            return refuse(s, "character that does not belong to JSON");
        if (s->counts && s->n - s->at >= 4 && memcmp(s->s + s->at, "null", 4) == 0) {
            s->at += 4;
            return true;
        }
        if (s->counts && !digit(s, s->at))
            return refuse(s,
                          "only strings, arrays, objects, null and non-negative integers belong here");
        /* cJSON takes any digits: 007 would be another way to write a number that is known. */
        if (s->counts && c == '0' && digit(s, s->at + 1) && (s->at == 0 || !digit(s, s->at - 1)))
            return refuse(s, "number with a leading zero");
    }
    s->at++;
    return true;
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

/* ---- memory ---------------------------------------------------------------------------------- */

/* Asked before cJSON is: it says nothing of why it gave up, so that memory that is gone would be told as a text that is
   wrong. Its hooks would tell, but they are the process's, and so not a library's to set. The pointer is volatile
   because a compiler may leave out an allocation that is freed unused. */
static bool have_memory(size_t bytes)
{
    if (bsi_alloc_injected())
        return false;
    void *volatile probe = malloc(bytes);
    bool there = probe != NULL;
    free(probe);
    return there;
}

/* ---- the parse ------------------------------------------------------------------------------- */

static bs_status wrong(const char *what, const char *text, size_t at, const char *problem)
{
    size_t line = 1, start = 0;
    for (size_t i = 0; i < at; i++)
        if (text[i] == '\n') {
            line++;
            start = i + 1;
        }
    return bsi_fail(BS_FORMAT, "%s%s%s at byte %zu (line %zu, column %zu)", what ? what : "",
                    what ? ": " : "", problem, at, line, at - start + 1);
}

/* Behind the value there is white space and nothing else. */
static size_t skip_space(const char *text, size_t n, size_t at, bool lax)
{
    while (at < n && (lax ? (unsigned char)text[at] <= ' ' : memchr(" \t\r\n", text[at], 4) != NULL))
        at++;
    return at;
}

/* What is often found in the place of a file of JSON. */
static const char *not_json(const char *text, size_t n)
{
    static const char lfs[] = "version https://git-lfs", page[] = "<!DOCTYPE", html[] = "<html";
    size_t at = skip_space(text, n, 0, true);
    if (n >= sizeof lfs - 1 && memcmp(text, lfs, sizeof lfs - 1) == 0)
        return "a Git LFS pointer, not the data: run 'git lfs pull' in its repository";
    if ((n - at >= sizeof page - 1 && strncasecmp(text + at, page, sizeof page - 1) == 0) ||
        (n - at >= sizeof html - 1 && strncasecmp(text + at, html, sizeof html - 1) == 0))
        return "an HTML page, perhaps a login or error page: download it again";
    return NULL;
}

bs_status bs_json_parse(const char *text, size_t n, const bs_json_rules *rules, const char *what,
                        bs_json *out)
{
    *out = (bs_json){0};
    if (rules->limit && n > rules->limit)
        return bsi_fail(BS_FORMAT, "%s%s%zu bytes of JSON text, at most %zu are read", what ? what : "",
                        what ? ": " : "", n, rules->limit);
    scan s = {.s = (const unsigned char *)text,
              .n = n,
              .most = rules->depth ? BSI_MIN(rules->depth, BS_JSON_DEPTH) : BS_JSON_DEPTH,
              .counts = rules->counts,
              .lax = rules->lax};
    const char *other = not_json(text, n);
    if (other)
        return bsi_fail(BS_FORMAT, "%s%s%s", what ? what : "", what ? ": " : "", other);
    if (!scan_text(&s))
        return wrong(what, text, s.at, s.problem);

    /* n bounds values and strings, so none of this overflows for text that fits in memory. 16 and 32:
       what malloc adds to a node and to a short string. */
    size_t need = s.values * (sizeof(cJSON) + 16) + s.strings * 32 + n;
    if (!have_memory(need))
        return bsi_fail(BS_NOMEM,
                        "%s%sabout %zu bytes of host memory for %zu bytes of JSON are not available",
                        what ? what : "", what ? ": " : "", need, n);
    bsi_account(BS_TAG_HEADER, (ptrdiff_t)need);
    out->reserved = need;

    /* cJSON steps over a byte order mark only in front of two bytes or more. */
    size_t mark = n > 3 && memcmp(text, "\xEF\xBB\xBF", 3) == 0 ? 3 : 0;
    const char *end = NULL;
    out->root = cJSON_ParseWithLengthOpts(text + mark, n - mark, &end, 0);
    size_t at = end ? (size_t)(end - text) : 0;
    if (!out->root) {
        bs_json_end(out);
        return wrong(what, text, at, "not valid JSON");
    }
    at = skip_space(text, n, at, rules->lax);
    if (at < n) {
        bs_json_end(out);
        return wrong(what, text, at, "text behind the end of the JSON value");
    }
    return BS_OK;
}

void bs_json_end(bs_json *j)
{
    cJSON_Delete(j->root);
    bsi_account(BS_TAG_HEADER, -(ptrdiff_t)j->reserved);
    *j = (bs_json){0};
}

bool bsi_json_uint(const cJSON *v, uint64_t *out)
{
    if (!cJSON_IsNumber(v) || !(v->valuedouble >= 0 && v->valuedouble < 0x1p53))
        return false;
    *out = (uint64_t)v->valuedouble;
    return (double)*out == v->valuedouble;
}
