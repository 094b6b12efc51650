/* SPDX-License-Identifier: Apache-2.0 */
/*
** json.h: what readers of JSON trees share beside bs_json_parse, and a buffer that text is written into. Any thread; a
** tree or buffer belongs to the thread that made it.
*/
#ifndef BS_JSON_H
#define BS_JSON_H

#include "base/base.h"

#include <cjson/cJSON.h>

/* Of headers and manifests, whose memory is bounded before the parse: strict, counts only, flat. */
#define BSI_JSON_HEADER_DEPTH 64
extern const bs_json_rules bsi_json_header;

/* True when v is a number, integral and in [0, 2^53): exact in the double that cJSON keeps. */
bool bsi_json_uint(const cJSON *v, uint64_t *out);

/* Text that grows (json_write.c). After a failed allocation `failed` is set and every put is ignored. */
typedef struct bsi_writer {
    char *p; /* NUL-terminated once something was put; from bsi_alloc(BS_TAG_HEADER) */
    size_t n, cap;
    bool failed;
} bsi_writer;

void bsi_writer_put(bsi_writer *t, const char *s, size_t n);
void bsi_writer_printf(bsi_writer *t, const char *fmt, ...) BSI_PRINTF(2, 3);
/* s in quotes with the escapes of JSON. */
void bsi_writer_quote(bsi_writer *t, const char *s);

#endif
