/* SPDX-License-Identifier: Apache-2.0 */
/*
** history.c: what the check device remembers of each memory, and what it reports.
**
** A memory is cut into segments, each with its last write and the last read of every queue since
** then. Nothing older is needed: what is ordered after the last write is also ordered after
** everything that this write was ordered after, and where the write itself was not ordered, that
** has been reported. Neighbours with equal histories are merged. Operations that can no longer
** conflict are forgotten, which makes more histories equal, so the number of segments follows the
** number of ranges in use. Owner thread only.
*/
#include "backend/check/check.h"

#include <string.h>

#define MAX_LINES   200 /* violations beyond are counted and not told */
#define COMPACT_MIN 64  /* segments below which no compaction is tried */

/* ---- names and reports ----------------------------------------------------------------------- */

const char *bsi_check_intern(check_dev *d, const char *text)
{
    size_t n = strlen(text) + 1;
    check_label **at = &d->labels[bs_hash64(text, n, 0) % CHECK_BUCKETS];
    for (check_label *l = *at; l; l = l->next) {
        if (strcmp(l->text, text) == 0)
            return l->text;
    }
    check_label *l = bsi_alloc(BS_TAG_MISC, sizeof *l + n);
    if (!l)
        return NULL;
    memcpy(l->text, text, n);
    l->next = *at;
    *at = l;
    return l->text;
}

/* One missing wait conflicts in every step. The key is made of texts and queues and not of clocks,
   so it is reported once. Where the list of keys could not grow, violations exceeds cap_keys and
   stays ahead of it. */
static bool reported_before(check_dev *d, uint64_t key)
{
    int kept = BSI_MIN(d->violations, d->cap_keys);
    for (int i = 0; i < kept; i++) {
        if (d->keys[i] == key)
            return true;
    }
    if (d->violations == d->cap_keys) {
        int cap = d->cap_keys ? 2 * d->cap_keys : 32;
        uint64_t *keys = bsi_realloc(BS_TAG_MISC, d->keys, (size_t)cap * sizeof *keys);
        if (!keys)
            return false; /* counted once more rather than lost */
        d->keys = keys;
        d->cap_keys = cap;
    }
    if (d->violations < d->cap_keys)
        d->keys[d->violations] = key;
    return false;
}

void bsi_check_report(check_dev *d, uint64_t key, const char *fmt, ...)
{
    char line[768];
    va_list ap;
    if (reported_before(d, key))
        return;
    if (d->violations++ >= MAX_LINES)
        return;
    va_start(ap, fmt);
    vsnprintf(line, sizeof line, fmt, ap);
    va_end(ap);
    size_t n = strlen(line);
    if (d->n_text + n + 2 > d->cap_text) {
        size_t cap = 2 * d->cap_text + sizeof line;
        char *text = bsi_realloc(BS_TAG_MISC, d->text, cap);
        if (!text)
            return;
        d->text = text;
        d->cap_text = cap;
    }
    memcpy(d->text + d->n_text, line, n);
    memcpy(d->text + d->n_text + n, "\n", 2);
    d->n_text += n + 1;
}

static const char *kind_name(bsi_memkind kind)
{
    return kind == BSI_MEM_DEVICE ? "device" : kind == BSI_MEM_PINNED ? "pinned" : "host";
}

/* One of the two operations of a conflict. */
typedef struct party {
    int queue;
    const char *verb, *label;
} party;

static void report_conflict(check_dev *d, const check_mem *m, size_t lo, size_t hi, party old,
                            party new)
{
    /* Labels are interned and verbs literals: equal texts are equal pointers. */
    const void *key[] = {old.label, new.label,           old.verb,
                         new.verb,  d->queue[old.queue], d->queue[new.queue]};
    char hint[256];
    if (d->dropped)
        snprintf(hint, sizeof hint, "queue_wait '%s' was left out", d->drop_wait);
    else
        snprintf(hint, sizeof hint, "queue '%s' needs a queue_wait on an event of '%s'",
                 d->queue_name[new.queue], d->queue_name[old.queue]);
    bsi_check_report(
        d, bs_hash64(key, sizeof key, 1),
        "'%s' (%s, queue '%s') and then '%s' (%s, queue '%s') are not ordered: both touch bytes "
        "%zu to %zu of %s memory #%u; %s",
        old.label, old.verb, d->queue_name[old.queue], new.label, new.verb, d->queue_name[new.queue],
        lo, hi, kind_name(m->inner.kind), m->number, hint);
}

/* ---- segments -------------------------------------------------------------------------------- */

static void put_segment(check_dev *d, check_segment *s)
{
    s->next = d->free_segments;
    d->free_segments = s;
}

/* The free list is not empty: bsi_check_history_open and make_room reserve before anything is cut. */
static check_segment *take_segment(check_dev *d)
{
    check_segment *s = d->free_segments;
    d->free_segments = s->next;
    return s;
}

static bs_status reserve_segments(check_dev *d, int n)
{
    for (const check_segment *s = d->free_segments; s && n > 0; s = s->next)
        n--;
    if (n <= 0)
        return BS_OK;
    check_slab *slab = bsi_alloc(BS_TAG_MISC, sizeof *slab);
    if (!slab)
        return BS_NOMEM;
    slab->next = d->slabs;
    d->slabs = slab;
    for (int i = 0; i < CHECK_SLAB; i++)
        put_segment(d, &slab->seg[i]);
    return BS_OK;
}

bs_status bsi_check_history_open(check_dev *d, check_mem *m, size_t bytes)
{
    BSI_TRY(reserve_segments(d, 1));
    m->cap = 4;
    m->seg = bsi_alloc(BS_TAG_MISC, m->cap * sizeof *m->seg);
    if (!m->seg)
        return BS_NOMEM;
    m->seg[0] = take_segment(d);
    *m->seg[0] = (check_segment){.hi = bytes};
    m->n = 1;
    m->compact_at = COMPACT_MIN;
    return BS_OK;
}

void bsi_check_history_close(check_dev *d, check_mem *m)
{
    for (size_t i = 0; i < m->n; i++)
        put_segment(d, m->seg[i]);
    bsi_free(m->seg);
    m->seg = NULL;
}

static bool same_history(const check_segment *a, const check_segment *b)
{
    return a->writer == b->writer && a->write.clock == b->write.clock &&
           a->write.label == b->write.label && memcmp(a->read, b->read, sizeof a->read) == 0;
}

/* Merge equal neighbours among the segments from first to last (inclusive). */
static void merge(check_dev *d, check_mem *m, size_t first, size_t last)
{
    size_t to = first;
    for (size_t i = first + 1; i <= last; i++) {
        check_segment *s = m->seg[i];
        if (same_history(m->seg[to], s)) {
            m->seg[to]->hi = s->hi;
            put_segment(d, s);
        } else {
            m->seg[++to] = s;
        }
    }
    if (to == last)
        return;
    memmove(&m->seg[to + 1], &m->seg[last + 1], (m->n - last - 1) * sizeof(check_segment *));
    m->n -= last - to;
}

/* Index of the segment that holds byte at: the first that ends behind it. There is one, because
   segments cover the memory and the front refuses ranges that leave it. */
static size_t find(const check_mem *m, size_t at)
{
    size_t lo = 0, hi = m->n - 1;
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        if (m->seg[mid]->hi <= at)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

/* Cut segment i at byte at (inside it); room for one more was made. */
static void cut(check_dev *d, check_mem *m, size_t i, size_t at)
{
    check_segment *upper = take_segment(d);
    *upper = *m->seg[i];
    m->seg[i]->hi = upper->lo = at;
    memmove(&m->seg[i + 2], &m->seg[i + 1], (m->n - i - 1) * sizeof(check_segment *));
    m->seg[i + 1] = upper;
    m->n++;
}

/* An operation that every open queue is ordered after cannot conflict, and one that the host has
   seen complete is not in flight. Both must hold: a queue that lacks a wait has to find the
   operation here, and so has a free. A queue that is opened later begins with what the host has
   seen, so it is behind the operation too. */
static void forget(const uint64_t *before_all, int q, check_access *a)
{
    if (a->clock <= before_all[q])
        *a = (check_access){0, NULL};
}

static void compact(check_dev *d, check_mem *m)
{
    uint64_t before_all[CHECK_QUEUES];
    for (int q = 0; q < CHECK_QUEUES; q++) {
        before_all[q] = d->seen[q];
        for (int r = 0; r < CHECK_QUEUES; r++) {
            if (d->queue[r])
                before_all[q] = BSI_MIN(before_all[q], d->clock[r][q]);
        }
    }
    for (size_t i = 0; i < m->n; i++) {
        check_segment *s = m->seg[i];
        forget(before_all, s->writer, &s->write);
        if (s->write.clock == 0)
            s->writer = 0;
        for (int q = 0; q < CHECK_QUEUES; q++)
            forget(before_all, q, &s->read[q]);
    }
    merge(d, m, 0, m->n - 1);
    /* Not before the number has doubled: so compaction costs each touch a constant on average. */
    m->compact_at = BSI_MAX(2 * m->n, (size_t)COMPACT_MIN);
}

static bs_status make_room(check_dev *d, check_mem *m)
{
    if (m->n >= m->compact_at)
        compact(d, m);
    /* A range has two ends, and each of them cuts one segment at most. */
    BSI_TRY(reserve_segments(d, 2));
    if (m->n + 2 <= m->cap)
        return BS_OK;
    check_segment **seg = bsi_realloc(BS_TAG_MISC, m->seg, 2 * m->cap * sizeof(check_segment *));
    if (!seg)
        return BS_NOMEM;
    m->seg = seg;
    m->cap *= 2;
    return BS_OK;
}

/* A write conflicts with the last write and with every read since, a read with the last write only.
   An access is ordered before the operation when its clock is not larger than the row of the
   operation's queue (check.h). That holds for all accesses of the same queue, whose clock only
   grows. */
static void compare(check_dev *d, const check_mem *m, const check_segment *s, party new, bool writes)
{
    const uint64_t *before = d->clock[new.queue];
    if (s->write.clock > before[s->writer])
        report_conflict(d, m, s->lo, s->hi, (party){s->writer, "writes", s->write.label}, new);
    if (!writes)
        return;
    for (int q = 0; q < CHECK_QUEUES; q++) {
        if (s->read[q].clock > before[q])
            report_conflict(d, m, s->lo, s->hi, (party){q, "reads", s->read[q].label}, new);
    }
}

bs_status bsi_check_touch(check_dev *d, check_mem *m, size_t lo, size_t hi, int q, uint8_t mode,
                          const char *label)
{
    bool writes = mode & BSI_WRITE;
    party now = {q, writes ? "writes" : "reads", label};
    check_access access = {d->clock[q][q], label};
    BSI_TRY(make_room(d, m));
    size_t first = find(m, lo);
    if (m->seg[first]->lo < lo)
        cut(d, m, first++, lo);
    size_t last = find(m, hi - 1);
    if (m->seg[last]->hi > hi)
        cut(d, m, last, hi);
    for (size_t i = first; i <= last; i++) {
        check_segment *s = m->seg[i];
        compare(d, m, s, now, writes);
        if (writes) /* what it replaces is before it now, or has been reported */
            *s = (check_segment){.lo = s->lo, .hi = s->hi, .writer = q, .write = access};
        else /* the read of this queue that it replaces is before it, in queue order */
            s->read[q] = access;
    }
    merge(d, m, first > 0 ? first - 1 : 0, BSI_MIN(last + 1, m->n - 1));
    return BS_OK;
}

static void in_flight(check_dev *d, const check_mem *m, int q, const check_access *a, const char *verb)
{
    /* By what the host has seen and not by any row: a free is safe only after the operation, and no
       order between queues says that it is over. */
    if (a->clock <= d->seen[q])
        return;
    const void *key[] = {a->label, verb, d->queue[q], m};
    bsi_check_report(
        d, bs_hash64(key, sizeof key, 2),
        "%s memory #%u (%zu bytes) is freed while '%s' (%s it, queue '%s') may still run; wait for "
        "an event behind it first",
        kind_name(m->inner.kind), m->number, m->inner.bytes, a->label, verb, d->queue_name[q]);
}

void bsi_check_freed(check_dev *d, const check_mem *m)
{
    for (size_t i = 0; i < m->n; i++) {
        const check_segment *s = m->seg[i];
        in_flight(d, m, s->writer, &s->write, "writes");
        for (int q = 0; q < CHECK_QUEUES; q++)
            in_flight(d, m, q, &s->read[q], "reads");
    }
}
