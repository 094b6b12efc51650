/* SPDX-License-Identifier: Apache-2.0 */
/*
** dev_private.h: what dev.c shares with the backends beside it and nobody else.
*/
#ifndef BS_DEV_PRIVATE_H
#define BS_DEV_PRIVATE_H

#include "dev/dev.h"

/* The backend of a plain name ("cpu", "meta"), or a failure that lists the names. */
bs_status bsi_dev_backend(const char *name, const bsi_dev_ops **out);
/* check devices: count a misuse that a function without a status cannot return. */
void bsi_check_note(const bs_dev *dev, const char *fmt, ...) BSI_PRINTF(2, 3);

/* cuda: the fields of bs_gpu that are the runtime's, and the GPU's PCI address ("": none). */
void bsi_cuda_gpu(bs_gpu *out, char bus[32]);

/* Add a timed launch of the kernel `op`, a static name. Nothing is added when there is
   no memory. */
void bsi_profile_add(bsi_profile *p, const char *op, const char *label, double seconds);
void bsi_profile_clear(bsi_profile *p);
void bsi_profile_sort(bsi_profile *p); /* longest first */

/* Fault injection, the same in every backend: true for the cfg.fail_call-th operation. */
static inline bool bsi_dev_fails(uint64_t fail_call, uint64_t *calls)
{
    return ++*calls == fail_call;
}

/* And for the page-locks from cfg.fail_pin on: a limit that is reached stays. */
static inline bool bsi_dev_refuses(uint64_t fail_pin, uint64_t *pins)
{
    return ++*pins >= fail_pin && fail_pin != 0;
}

/* Jitter: the state for the index-th queue, and the next delay in microseconds. */
static inline uint64_t bsi_jitter_state(uint64_t seed, unsigned index)
{
    char name[24];
    uint32_t key[2];
    snprintf(name, sizeof name, "jitter %u", index);
    bsi_philox_key(seed, name, key);
    return ((uint64_t)key[1] << 32 | key[0]) | 1; /* xorshift needs a bit */
}

static inline uint64_t bsi_jitter(uint64_t *state, unsigned most)
{
    uint64_t x = *state; /* xorshift64 */
    x ^= x << 13;
    x ^= x >> 7;
    x ^= x << 17;
    *state = x;
    return x % (most + 1ull);
}

#endif
