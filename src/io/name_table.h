/* SPDX-License-Identifier: Apache-2.0 */
/* name_table.h: a table from names to numbers. */
#ifndef BS_IO_NAME_TABLE_H
#define BS_IO_NAME_TABLE_H

#include "base/base.h"

/* Names -> numbers: open addressing, at most half full. Keys are the caller's and must stay. */
typedef struct bsi_names {
    struct bsi_name {
        const char *key; /* NULL: empty */
        uint64_t hash;   /* compared first: most other keys are never touched */
        int64_t value;
    } * at;
    size_t cap; /* a power of two */
} bsi_names;

bs_status bsi_names_init(bsi_names *t, size_t n); /* room for n names */
void bsi_names_free(bsi_names *t);
/* False when the key is there already. */
bool bsi_names_add(bsi_names *t, const char *key, int64_t value);
int64_t bsi_names_find(const bsi_names *t, const char *key); /* -1: absent */

#endif
