/* SPDX-License-Identifier: Apache-2.0 */
/*
** json.h: JSON text that came from outside, checked before cJSON sees it, and a buffer that text is
** written into. Any thread; a tree or buffer belongs to the thread that made it.
*/
#ifndef BS_JSON_H
#define BS_JSON_H

#include "base/base.h"

#include <cjson/cJSON.h>

#define BSI_JSON_DEPTH 64 /* deepest nesting of arrays and objects */

typedef struct bsi_json {
    cJSON *root;
    size_t reserved; /* bytes accounted for the tree */
} bsi_json;

/* Parse n bytes (no NUL needed). Demands valid UTF-8, no control characters or \u0000 in strings (the
   parser would cut the string there), depth <= BSI_JSON_DEPTH and nothing but white space behind the
   value. uints: outside strings only non-negative integers, arrays and objects. The tree's memory is
   reserved (BS_TAG_HEADER) before the parse. Duplicate keys are the caller's to refuse: cJSON keeps
   all. what: names the text in messages. */
bs_status bsi_json_parse(const char *text, size_t n, bool uints, const char *what, bsi_json *out);
void bsi_json_end(bsi_json *j);
/* True when v is a number, integral and in [0, 2^53): exact in the double that cJSON keeps. */
bool bsi_json_uint(const cJSON *v, uint64_t *out);

/* Text that grows. After a failed allocation `failed` is set and every put is ignored. */
typedef struct bsi_writer {
    char *p; /* NUL-terminated once something was put; from bsi_alloc(BS_TAG_HEADER) */
    size_t n, cap;
    bool failed;
} bsi_writer;

void bsi_writer_put(bsi_writer *t, const char *s, size_t n);
void bsi_writer_printf(bsi_writer *t, const char *fmt, ...) BSI_PRINTF(2, 3);
/* s in quotes with the escapes of JSON. */
void bsi_writer_quote(bsi_writer *t, const char *s);
/* Length of the valid UTF-8 sequence at s (at most n bytes), 0 when it is not one. */
size_t bsi_utf8_step(const unsigned char *s, size_t n);
bool bsi_json_utf8_valid(const char *s, size_t n);

#endif
