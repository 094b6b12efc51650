/* SPDX-License-Identifier: Apache-2.0 */
/*
** record.c: the free lists of records, labels, and the hash of the op sequence. Owner thread only. A handle that a
** caller holds when its scope ends keeps the label, so that a late use can say where the tensor came from.
*/
#include "tensor/tape.h"

#include <string.h>

static const size_t record_bytes[BSI_RECORD_COUNT] = {
    [BSI_TENSOR] = sizeof(bs_tensor),
    [BSI_VALUE] = sizeof(bsi_value),
    [BSI_NODE] = sizeof(bsi_node),
    [BSI_LABEL] = sizeof(bsi_label),
};

void *bsi_record_take(bsi_space *s, bsi_record kind)
{
    bsi_link *r = s->idle[kind];
    if (!r)
        return bsi_alloc(BS_TAG_MISC, record_bytes[kind]);
    s->idle[kind] = r->next;
    memset(r, 0, record_bytes[kind]);
    return r;
}

void bsi_record_give(bsi_space *s, bsi_record kind, void *record)
{
    bsi_link *r = record;
    r->next = s->idle[kind];
    s->idle[kind] = r;
}

void bsi_record_give_all(bsi_space *s, bsi_record kind, bsi_link **list)
{
    while (*list) {
        bsi_link *r = *list;
        *list = r->next;
        bsi_record_give(s, kind, r);
    }
}

void bsi_label_drop(bsi_space *s, bsi_label *l)
{
    if (--l->refs == 0)
        bsi_record_give(s, BSI_LABEL, l);
}

void bsi_space_reap(bsi_space *s)
{
    if (s->e || s->handles)
        return;
    for (int k = 0; k < BSI_RECORD_COUNT; k++)
        for (bsi_link *r = s->idle[k], *next; r; r = next) {
            next = r->next;
            bsi_free(r);
        }
    bsi_free(s->expanded);
    bsi_free(s);
}

void bsi_hash_ints(bsi_space *s, int n, const int64_t *v)
{
    s->scope.hash = bs_hash64(v, (size_t)n * sizeof *v, s->scope.hash);
}

void bsi_hash_number(bsi_space *s, double v)
{
    s->scope.hash = bs_hash64(&v, sizeof v, s->scope.hash);
}

void bsi_hash_text(bsi_space *s, const char *text)
{
    s->scope.hash = bs_hash64(text, strlen(text), s->scope.hash);
}
