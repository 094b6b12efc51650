/* SPDX-License-Identifier: Apache-2.0 */
/*
** inject.h: the faults and delays of bs_dev_cfg that are for tests, the same in every backend.
*/
#ifndef BS_DEV_INJECT_H
#define BS_DEV_INJECT_H

#include "base/base.h"

/* True for the cfg.fail_call-th operation. */
static inline bool bsi_dev_fails(uint64_t fail_call, uint64_t *calls)
{
    return ++*calls == fail_call;
}

/* True for the page-locks from cfg.fail_pin on: a limit that is reached stays. */
static inline bool bsi_dev_refuses(uint64_t fail_pin, uint64_t *pins)
{
    return ++*pins >= fail_pin && fail_pin != 0;
}

/* The state of the random delays of the index-th queue. */
static inline uint64_t bsi_jitter_state(uint64_t seed, unsigned index)
{
    char name[24];
    uint32_t key[2];
    snprintf(name, sizeof name, "jitter %u", index);
    bsi_philox_key(seed, name, key);
    return ((uint64_t)key[1] << 32 | key[0]) | 1; /* xorshift needs a bit */
}

/* The next delay, in microseconds. */
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
