/* SPDX-License-Identifier: Apache-2.0 */
/*
** name_table.c: a hash table from names to numbers, filled once and then only read. Linear probing in a
** table of at least twice as many places as names, so an empty place always ends a search.
*/
#include "io/name_table.h"

#include <string.h>

bs_status bsi_names_init(bsi_names *t, size_t n)
{
    size_t bytes;
    *t = (bsi_names){NULL, 4};
    while (t->cap / 2 < n)
        t->cap *= 2;
    if (!bsi_mul_size(t->cap, sizeof *t->at, &bytes))
        return bsi_fail(BS_NOMEM, "a table of %zu names is too large", n);
    t->at = bsi_alloc(BS_TAG_HEADER, bytes);
    return t->at ? BS_OK : BS_NOMEM;
}

void bsi_names_free(bsi_names *t)
{
    bsi_free(t->at);
    *t = (bsi_names){0};
}

static struct bsi_name *place(const bsi_names *t, const char *key, uint64_t hash)
{
    size_t i = hash & (t->cap - 1);
    while (t->at[i].key && (t->at[i].hash != hash || strcmp(t->at[i].key, key) != 0))
        i = (i + 1) & (t->cap - 1);
    return &t->at[i];
}

bool bsi_names_add(bsi_names *t, const char *key, int64_t value)
{
    uint64_t hash = bs_hash64(key, strlen(key), 0);
    struct bsi_name *p = place(t, key, hash);
    if (p->key)
        return false;
    *p = (struct bsi_name){key, hash, value};
    return true;
}

int64_t bsi_names_find(const bsi_names *t, const char *key)
{
    const struct bsi_name *p = place(t, key, bs_hash64(key, strlen(key), 0));
    return p->key ? p->value : -1;
}
