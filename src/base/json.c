/* SPDX-License-Identifier: Apache-2.0 */
/*
** json.c: the one reader of JSON trees: headers, manifests, settings of tokenizers, rows and configurations. A scan
** makes the text safe to give to cJSON, whose parser is lax and counts on strings without zero bytes; it also counts
** values and strings, which bounds the memory of the tree before any of it is allocated. Grammar is cJSON's to check;
** what it refuses is looked at again, to tell memory that was gone from a text that is wrong.
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

/* Asked before cJSON is: the whole tree at once, so that what cannot be had is known before any of it is made. The
   pointer is volatile because a compiler may leave out an allocation that is freed unused. */
static bool have_memory(size_t bytes)
{
    if (bsi_alloc_injected())
        return false;
    void *volatile probe = malloc(bytes);
    bool there = probe != NULL;
    free(probe);
    return there;
}

/* ---- the grammar ----------------------------------------------------------------------------- */

/* cJSON says nothing of why it gave up, and its hooks, which would tell, are the process's and so not a library's to
   set. A text that it should have taken was refused for want of memory. So this is asked only after a refusal, and goes
   by what cJSON takes where that is less than JSON. */
typedef struct grammar {
    const unsigned char *s;
    size_t n, at;
} grammar;

#define NUMBER_MOST 63 /* characters; cJSON cuts longer ones */

static bool take(grammar *g, const char *text)
{
    size_t k = strlen(text);
    if (g->n - g->at < k || memcmp(g->s + g->at, text, k) != 0)
        return false;
    g->at += k;
    return true;
}

static void space(grammar *g)
{
    while (g->at < g->n && g->s[g->at] <= ' ')
        g->at++;
}

static bool digits(grammar *g)
{
    size_t first = g->at;
    while (g->at < g->n && g->s[g->at] >= '0' && g->s[g->at] <= '9')
        g->at++;
    return g->at > first;
}

static bool number(grammar *g)
{
    size_t first = g->at;
    (void)take(g, "-");
    if (!digits(g) || (take(g, ".") && !digits(g)))
        return false;
    if (take(g, "e") || take(g, "E")) {
        (void)(take(g, "+") || take(g, "-"));
        if (!digits(g))
            return false;
    }
    return g->at - first <= NUMBER_MOST;
}

/* Behind "\u": the code unit, or -1. */
static long code_unit(grammar *g)
{
    char text[5] = {0}, *end;
    if (g->n - g->at < 4)
        return -1;
    memcpy(text, g->s + g->at, 4);
    if (strspn(text, "0123456789abcdefABCDEF") != 4)
        return -1;
    g->at += 4;
    return strtol(text, &end, 16);
}

static bool escape(grammar *g)
{
    if (!take(g, "u"))
        return g->at < g->n && g->s[g->at] && strchr("\"\\/bfnrt", g->s[g->at++]);
    long high = code_unit(g);
    if (high < 0xD800 || high > 0xDFFF)
        return high >= 0;
    if (high >= 0xDC00 || !take(g, "\\u"))
        return false;
    long low = code_unit(g);
    return low >= 0xDC00 && low <= 0xDFFF;
}

static bool string(grammar *g)
{
    if (!take(g, "\""))
        return false;
    while (g->at < g->n) {
        unsigned char c = g->s[g->at++];
        if (c == '"')
            return true;
        if (c == '\\' && !escape(g))
            return false;
    }
    return false;
}

static bool value(grammar *g);

/* An array, or an object with keys; g->at is behind the bracket that opens it. */
static bool members(grammar *g, const char *end, bool keys)
{
    space(g);
    if (take(g, end))
        return true;
    do {
        space(g);
        if (keys && !string(g))
            return false;
        space(g);
        if ((keys && !take(g, ":")) || !value(g))
            return false;
    } while (take(g, ","));
    return take(g, end);
}

/* With white space around it. The scan bounds how deep it goes. */
static bool value(grammar *g)
{
    bool ok;
    space(g);
    if (take(g, "["))
        ok = members(g, "]", false);
    else if (take(g, "{"))
        ok = members(g, "}", true);
    else if (g->at < g->n && g->s[g->at] == '"')
        ok = string(g);
    else
        ok = take(g, "true") || take(g, "false") || take(g, "null") || number(g);
    space(g);
    return ok;
}

static bool well_formed(const char *text, size_t n)
{
    grammar g = {.s = (const unsigned char *)text, .n = n};
    return value(&g);
}

/* ---- the parse ------------------------------------------------------------------------------- */

static bs_status no_memory(const char *what, size_t need, size_t n)
{
    return bsi_fail(BS_NOMEM,
                    "%s%sabout %zu bytes of host memory for %zu bytes of JSON are not available",
                    what ? what : "", what ? ": " : "", need, n);
}

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
    if (rules->tree && need > rules->tree)
        return bsi_fail(BS_UNSUPPORTED,
                        "%s%s%zu bytes of JSON may need %zu bytes of memory, %zu are allowed",
                        what ? what : "", what ? ": " : "", n, need, rules->tree);
    if (!have_memory(need))
        return no_memory(what, need, n);
    bsi_account(BS_TAG_HEADER, (ptrdiff_t)need);
    out->reserved = need;

    /* cJSON steps over a byte order mark only in front of two bytes or more. */
    size_t mark = n > 3 && memcmp(text, "\xEF\xBB\xBF", 3) == 0 ? 3 : 0;
    const char *end = NULL;
    out->root = cJSON_ParseWithLengthOpts(text + mark, n - mark, &end, 0);
    size_t at = end ? (size_t)(end - text) : 0;
    if (!out->root) {
        bs_json_end(out);
        return well_formed(text + mark, n - mark) ? no_memory(what, need, n)
                                                  : wrong(what, text, at, "not valid JSON");
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
