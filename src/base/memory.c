/* SPDX-License-Identifier: Apache-2.0 */
/*
** memory.c: accounted host memory. Every block carries a small header with its size, tag and the start
** of the underlying allocation, so free and realloc need no size. Counters are atomic: kernels' workers
** never allocate, but the pread pool and tests may.
**
** Blocks of 16 KiB and more are pages of their own and go back to the system when they are freed. In the heap a
** matrix that is freed leaves a hole that small objects split before the next one comes, and a save, which holds
** one matrix at a time, would grow the process by the whole adapter.
*/
#include "base/base.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

typedef struct header { /* directly below the pointer handed out */
    void *start;
    size_t bytes, mapped; /* mapped: of the pages at start; 0: it is in the heap */
    uint32_t tag, magic;
} header;

#define MAGIC 0x62736d65u
#ifdef __SANITIZE_ADDRESS__ /* finds nothing in pages that are not the heap's */
#define OWN_PAGES SIZE_MAX
#else
#define OWN_PAGES ((size_t)1 << 14)
#endif

static atomic_size_t live[BS_TAG_COUNT], peak[BS_TAG_COUNT];
static atomic_uint_fast64_t fail_in;

static void count(bs_tag tag, ptrdiff_t bytes)
{
    size_t now = atomic_fetch_add(&live[tag], (size_t)bytes) + (size_t)bytes;
    size_t seen = atomic_load(&peak[tag]);
    while (bytes > 0 && now > seen && !atomic_compare_exchange_weak(&peak[tag], &seen, now))
        ;
}

bool bsi_alloc_injected(void)
{
    uint_fast64_t n = atomic_load(&fail_in);
    while (n && !atomic_compare_exchange_weak(&fail_in, &n, n - 1))
        ;
    return n == 1;
}

/* total bytes aligned to align, from the heap or as pages; *mapped as in a header. */
static void *take(size_t total, size_t align, size_t *mapped)
{
    *mapped = 0;
    if (total < OWN_PAGES || align > 4096)
        return aligned_alloc(align, bsi_round_up(total, align));
    void *start = mmap(NULL, total, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start == MAP_FAILED)
        return NULL;
    *mapped = total;
    return start;
}

void *bsi_alloc_aligned(bs_tag tag, size_t bytes, size_t align)
{
    size_t total, mapped;
    if (align < 64)
        align = 64;
    size_t room = bsi_round_up(sizeof(header), align);
    if (!bsi_add_size(bytes, room + align, &total) || bsi_alloc_injected()) {
        bsi_fail(BS_NOMEM, "%zu bytes of host memory for '%s' are not available", bytes,
                 bs_tag_name(tag));
        return NULL;
    }
    char *start = take(total, align, &mapped);
    if (!start) {
        bsi_fail_sys(BS_NOMEM, errno, "%zu bytes of host memory for '%s' are not available", bytes,
                     bs_tag_name(tag));
        return NULL;
    }
    char *p = start + room;
    header *h = (header *)(void *)p - 1;
    *h = (header){start, bytes, mapped, (uint32_t)tag, MAGIC};
    memset(p, 0, bytes);
    count(tag, (ptrdiff_t)bytes);
    return p;
}

void *bsi_alloc(bs_tag tag, size_t bytes)
{
    return bsi_alloc_aligned(tag, bytes, 0);
}

void bsi_free(void *p)
{
    if (!p)
        return;
    header *h = (header *)p - 1;
    if (h->magic != MAGIC)
        abort(); /* not ours or freed twice: memory is already damaged */
    h->magic = 0;
    count((bs_tag)h->tag, -(ptrdiff_t)h->bytes);
    if (h->mapped)
        munmap(h->start, h->mapped);
    else
        free(h->start);
}

void *bsi_realloc(bs_tag tag, void *p, size_t bytes)
{
    void *q = bsi_alloc(tag, bytes);
    if (q && p) {
        const header *h = (const header *)p - 1;
        memcpy(q, p, BSI_MIN(bytes, h->bytes));
        bsi_free(p);
    }
    return q;
}

char *bsi_strdup(bs_tag tag, const char *s)
{
    size_t n = strlen(s) + 1;
    char *p = bsi_alloc(tag, n);
    if (p)
        memcpy(p, s, n);
    return p;
}

void bs_str_free(char *s)
{
    bsi_free(s);
}

void bsi_account(bs_tag tag, ptrdiff_t bytes)
{
    count(tag, bytes);
}

void bsi_alloc_fail_nth(uint64_t n)
{
    atomic_store(&fail_in, n);
}

size_t bs_host_bytes(bs_tag tag)
{
    return atomic_load(&live[tag]);
}

size_t bs_host_peak(bs_tag tag)
{
    return atomic_load(&peak[tag]);
}

const char *bs_tag_name(bs_tag tag)
{
    static const char *const name[BS_TAG_COUNT] = {
        "misc", "header", "slots", "ram homes", "boundaries", "rows", "staging", "device", "arrays"};
    return (unsigned)tag < BS_TAG_COUNT ? name[tag] : "unknown";
}
