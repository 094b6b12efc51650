/* SPDX-License-Identifier: Apache-2.0 */
/*
** profile.c: times of kernel launches, summed up by (kernel, label). Rows are few (a kernel has a
** handful of labels), so they are found by looking through all.
*/
#include "dev/profile.h"

#include <stdlib.h>
#include <string.h>

void bsi_profile_add(bsi_profile *p, const char *op, const char *label, double seconds)
{
    int i = 0;
    while (i < p->n && (strcmp(p->row[i].label, label) != 0 || strcmp(p->row[i].op, op) != 0))
        i++;
    if (i == p->n) {
        if (p->n == p->cap) {
            int cap = p->cap ? 2 * p->cap : 64;
            bs_profile_row *row = bsi_realloc(BS_TAG_MISC, p->row, (size_t)cap * sizeof *row);
            if (!row)
                return;
            p->row = row;
            p->cap = cap;
        }
        char *own = bsi_strdup(BS_TAG_MISC, label);
        if (!own)
            return;
        p->row[p->n++] = (bs_profile_row){.op = op, .label = own};
    }
    p->row[i].calls++;
    p->row[i].seconds += seconds;
}

void bsi_profile_clear(bsi_profile *p)
{
    for (int i = 0; i < p->n; i++)
        bsi_free((char *)(uintptr_t)p->row[i].label);
    bsi_free(p->row);
    *p = (bsi_profile){0};
}

static int longer(const void *x, const void *y)
{
    const bs_profile_row *a = x, *b = y;
    return (a->seconds < b->seconds) - (a->seconds > b->seconds);
}

void bsi_profile_sort(bsi_profile *p)
{
    if (p->n > 1)
        qsort(p->row, (size_t)p->n, sizeof *p->row, longer);
}
