/* SPDX-License-Identifier: Apache-2.0 */
/*
** regex.c: patterns of a tokenizer. The files are written for Oniguruma; PCRE2 runs them after a
** rewrite of the text: \s, \d, \w and \b become the Unicode properties that Oniguruma means by them,
** and what the two understand differently, or what we have not compared, is refused by name. A
** compiled pattern is read-only and shared; a bsi_matcher holds what one thread needs to run any of
** them. Backtracking is bounded by PCRE2's match limit, so a hostile pattern ends with an error.
*/
#include "text/text.h"

#include <string.h>

#if BS_HAVE_PCRE2
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

/* Oniguruma's word characters; outside brackets it also counts the raised digits and fractions of
   Latin-1. */
#define WORD         "\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}"
#define WORD_OUTSIDE WORD "\\x{B2}\\x{B3}\\x{B9}\\x{BC}-\\x{BE}"
#define MAX_PATTERN  65536
#define JIT_STACK    (8u << 20)

typedef struct rewriter {
    const char *s, *where;
    size_t i; /* next byte of s */
    bool in_class;
    bsi_buf out;
} rewriter;

static bs_status refuse(const rewriter *r, const char *what)
{
    return bsi_fail(BS_UNSUPPORTED, "%s: %s at byte %zu of the expression '%.200s' is not supported",
                    r->where, what, r->i, r->s);
}

static bs_status put(rewriter *r, const char *s)
{
    return bsi_buf_put(&r->out, s, strlen(s));
}

static bs_status copy(rewriter *r, size_t n)
{
    BSI_TRY(bsi_buf_put(&r->out, r->s + r->i, n));
    r->i += n;
    return BS_OK;
}

static size_t hex_digits(const char *s)
{
    return strspn(s, "0123456789abcdefABCDEF");
}

/* \p{NAME} or \P{NAME}: a general category stays; the bare name of a script means its extensions, too,
   to PCRE2, but not to Oniguruma. */
static bs_status rewrite_property(rewriter *r)
{
    const char *name = r->s + r->i + 3;
    bool negated = name[-1] == '{' && *name == '^';
    name += negated;
    size_t n = strspn(name, "_ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz");
    if (name[-1 - negated] != '{' || !n || name[n] != '}')
        return refuse(r, "a property without a plain name in braces");
    bool category = n <= 2 || !strncmp(name, "Alphabetic}", 11) || !strncmp(name, "White_Space}", 12);
    BSI_TRY(copy(r, (size_t)3 + negated));
    if (!category)
        BSI_TRY(put(r, "sc:"));
    return copy(r, n + 1);
}

/* \x.., \uHHHH; r->i is at the backslash. */
static bs_status rewrite_number(rewriter *r)
{
    const char *s = r->s + r->i;
    size_t n = 0;
    if (s[1] == 'u') {
        if (hex_digits(s + 2) < 4)
            return refuse(r, "\\u without four digits");
        BSI_TRY(put(r, "\\x{"));
        BSI_TRY(bsi_buf_put(&r->out, s + 2, 4));
        r->i += 6;
        return put(r, "}");
    }
    if (s[2] == '{') {
        n = hex_digits(s + 3);
        return n && s[3 + n] == '}' ? copy(r, n + 4) : refuse(r, "\\x{ without digits");
    }
    if (hex_digits(s + 2) < 2 || s[2] > '7')
        return refuse(r, "a byte that is not a character");
    return copy(r, 4);
}

static bs_status rewrite_escape(rewriter *r)
{
    static const struct {
        char letter;
        const char *outside, *inside; /* NULL: not supported there */
    } table[] = {
        {'s', "\\p{White_Space}", "\\p{White_Space}"},
        {'S', "\\P{White_Space}", "\\P{White_Space}"},
        {'d', "\\p{Nd}", "\\p{Nd}"},
        {'D', "\\P{Nd}", "\\P{Nd}"},
        {'w', "[" WORD_OUTSIDE "]", WORD},
        {'W', "[^" WORD_OUTSIDE "]", NULL},
        {'b', "(?:(?<=[" WORD "])(?![" WORD "])|(?<![" WORD "])(?=[" WORD "]))", NULL},
        {'B', "(?:(?<=[" WORD "])(?=[" WORD "])|(?<![" WORD "])(?![" WORD "]))", NULL},
        {'r', "\\r", "\\r"},
        {'n', "\\n", "\\n"},
        {'t', "\\t", "\\t"},
        {'f', "\\f", "\\f"},
        {'v', "\\x0B", "\\x0B"},
        {'A', "\\A", NULL},
        {'z', "\\z", NULL},
        {'Z', "\\Z", NULL},
    };
    char c = r->s[r->i + 1], what[] = "\\?";
    if (c == 'p' || c == 'P')
        return r->s[r->i + 2] ? rewrite_property(r) : refuse(r, "a property without braces");
    if (c == 'x' || c == 'u')
        return rewrite_number(r);
    for (size_t i = 0; i < BSI_COUNT(table); i++) {
        const char *to = r->in_class ? table[i].inside : table[i].outside;
        if (c == table[i].letter && to) {
            r->i += 2;
            return put(r, to);
        }
    }
    if (c && (unsigned char)c < 0x80 && !strchr("0123456789_", c) && ((c | 32) < 'a' || (c | 32) > 'z'))
        return copy(r, 2); /* punctuation stands for itself */
    what[1] = c;
    return refuse(r, c ? what : "a backslash at the end");
}

static bs_status rewrite_class_char(rewriter *r)
{
    const char *s = r->s + r->i;
    if (*s == '[')
        return refuse(r, "a class inside a class");
    if (s[0] == '&' && s[1] == '&')
        return refuse(r, "&& inside a class");
    r->in_class = *s != ']';
    return copy(r, 1);
}

static bs_status rewrite_char(rewriter *r)
{
    static const char *const groups[] = {"(?:", "(?i:", "(?i)", "(?=", "(?!", "(?<=", "(?<!", "(?>"};
    const char *s = r->s + r->i;
    if (*s == '[') {
        r->in_class = true;
        size_t n = s[1] == '^' ? 2 : 1;
        return copy(r, n + (s[n] == ']')); /* a bracket that comes first is a character */
    }
    if (s[0] == '(' && (s[1] == '?' || s[1] == '*')) {
        for (size_t i = 0; i < BSI_COUNT(groups); i++)
            if (!strncmp(s, groups[i], strlen(groups[i])))
                return copy(r, strlen(groups[i]));
        return refuse(r, "this kind of group");
    }
    if (s[0] == '{' && s[1] == ',')
        return refuse(r, "{,n}");
    if (s[0] == '}' && s[1] == '+')
        return refuse(r, "}+");
    return copy(r, 1);
}

static bs_status rewrite(rewriter *r)
{
    while (r->s[r->i])
        BSI_TRY(r->s[r->i] == '\\' ? rewrite_escape(r)
                : r->in_class      ? rewrite_class_char(r)
                                   : rewrite_char(r));
    return BS_OK;
}

static bs_status compile(const rewriter *r, pcre2_code **out)
{
    int code;
    PCRE2_SIZE at;
    PCRE2_UCHAR text[128];
    pcre2_compile_context *context = pcre2_compile_context_create(NULL);
    if (!context)
        return bsi_fail(BS_NOMEM, "%s: no memory for the expression", r->where);
    pcre2_set_newline(context, PCRE2_NEWLINE_LF); /* '.' stops at a line feed only */
    *out = pcre2_compile((PCRE2_SPTR)r->out.p, r->out.n,
                         PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C, &code, &at,
                         context);
    pcre2_compile_context_free(context);
    if (!*out) {
        pcre2_get_error_message(code, text, sizeof text);
        return bsi_fail(BS_FORMAT, "%s: the expression '%.200s' cannot be compiled: %s", r->where, r->s,
                        (const char *)text);
    }
    pcre2_jit_compile(*out, PCRE2_JIT_COMPLETE); /* where it cannot, pcre2_match interprets */
    return BS_OK;
}

bs_status bsi_pattern_regex(const char *regex, const char *where, bsi_pattern *out)
{
    rewriter r = {.s = regex, .where = where};
    pcre2_code *code = NULL;
    if (strlen(regex) > MAX_PATTERN)
        return bsi_fail(BS_FORMAT, "%s: the expression has more than %d bytes", where, MAX_PATTERN);
    bs_status st = bsi_buf_reserve(&r.out, 1);
    if (st == BS_OK)
        st = rewrite(&r);
    if (st == BS_OK)
        st = compile(&r, &code);
    bsi_buf_free(&r.out);
    out->code = code;
    return st;
}

static bs_status prepare(bsi_matcher *m)
{
    if (m->data)
        return BS_OK;
    m->data = pcre2_match_data_create(1, NULL);
    m->context = pcre2_match_context_create(NULL);
    m->stack = pcre2_jit_stack_create(32 << 10, JIT_STACK, NULL); /* NULL: a small one */
    if (!m->data || !m->context) {
        bsi_matcher_free(m);
        return bsi_fail(BS_NOMEM, "no memory to match expressions");
    }
    pcre2_jit_stack_assign(m->context, NULL, m->stack);
    return BS_OK;
}

static bs_status match(bsi_scan *s, bool *found, size_t *first, size_t *end)
{
    PCRE2_UCHAR text[128];
    bsi_matcher *m = s->matcher;
    BSI_TRY(prepare(m));
    const pcre2_code *code = s->pattern->code;
    int rc = pcre2_match(code, (PCRE2_SPTR)s->s, s->n, s->at, PCRE2_NO_UTF_CHECK, m->data, m->context);
    if (rc == PCRE2_ERROR_JIT_STACKLIMIT)
        rc = pcre2_match(code, (PCRE2_SPTR)s->s, s->n, s->at, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT,
                         m->data, m->context);
    *found = rc >= 0;
    if (rc == PCRE2_ERROR_NOMATCH)
        return BS_OK;
    if (rc < 0) {
        pcre2_get_error_message(rc, text, sizeof text);
        return bsi_fail(
            BS_FORMAT,
            "an expression of the tokenizer gives up at byte %zu of %zu of a piece of text: %s", s->at,
            s->n, (const char *)text);
    }
    const PCRE2_SIZE *at = pcre2_get_ovector_pointer(m->data);
    *first = at[0];
    *end = at[1];
    return BS_OK;
}

void bsi_matcher_free(bsi_matcher *m)
{
    pcre2_match_data_free(m->data);
    pcre2_match_context_free(m->context);
    pcre2_jit_stack_free(m->stack);
    *m = (bsi_matcher){0};
}

void bsi_pattern_free(bsi_pattern *p)
{
    pcre2_code_free(p->code);
    bsi_free(p->literal);
    *p = (bsi_pattern){0};
}

#else

bs_status bsi_pattern_regex(const char *regex, const char *where, bsi_pattern *out)
{
    (void)out;
    return bsi_fail(BS_UNSUPPORTED,
                    "%s: the expression '%.200s' needs PCRE2, which this build lacks "
                    "(install libpcre2-dev and build again)",
                    where, regex);
}

static bs_status match(bsi_scan *s, bool *found, size_t *first, size_t *end)
{
    (void)s, (void)first, (void)end;
    *found = false;
    return BS_OK; /* not reached: no expression was compiled */
}

void bsi_matcher_free(bsi_matcher *m)
{
    (void)m;
}

void bsi_pattern_free(bsi_pattern *p)
{
    bsi_free(p->literal);
    *p = (bsi_pattern){0};
}

#endif

bs_status bsi_pattern_literal(const char *s, bsi_pattern *out)
{
    *out = (bsi_pattern){.literal = bsi_strdup(BS_TAG_MISC, s), .n = strlen(s)};
    return out->literal ? BS_OK : BS_NOMEM;
}

bs_status bsi_pattern_read(const cJSON *o, const char *where, bsi_pattern *out)
{
    static const char *const keys[] = {"String", "Regex", NULL};
    const char *text = NULL, *regex = NULL;
    BSI_TRY(bsi_tokjson_only(o, where, keys));
    BSI_TRY(bsi_tokjson_text(o, where, "String", &text));
    BSI_TRY(bsi_tokjson_text(o, where, "Regex", &regex));
    if (!text == !regex)
        return bsi_fail(BS_FORMAT, "%s: expected a String or a Regex", where);
    return text ? bsi_pattern_literal(text, out) : bsi_pattern_regex(regex, where, out);
}

bsi_scan bsi_scan_begin(const bsi_pattern *p, bsi_matcher *m, const char *s, size_t n)
{
    return (bsi_scan){p, m, s, n, 0, SIZE_MAX};
}

bs_status bsi_scan_next(bsi_scan *s, bool *found, size_t *first, size_t *end)
{
    *found = false;
    if (s->pattern->literal) {
        const char *hit = NULL;
        if (s->pattern->n && s->at < s->n)
            hit = memmem(s->s + s->at, s->n - s->at, s->pattern->literal, s->pattern->n);
        if (hit) {
            *found = true;
            *first = (size_t)(hit - s->s);
            *end = s->at = *first + s->pattern->n;
        }
        return BS_OK;
    }
    while (s->at <= s->n) {
        BSI_TRY(match(s, found, first, end));
        if (!*found)
            return BS_OK;
        s->at = *end;
        if (*first < *end || s->last != *end) {
            s->last = *end;
            return BS_OK;
        }
        s->at++; /* an empty match where the last one ended: look one character further */
        while (s->at < s->n && bsi_utf8_is_tail(s->s[s->at]))
            s->at++;
    }
    *found = false;
    return BS_OK;
}
