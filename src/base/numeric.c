/* SPDX-License-Identifier: Apache-2.0 */
/*
** numeric.c: counter-based random numbers, half-precision conversions, hashing, the clock. Pure
** functions of their arguments (but the clock), the same bits on every machine.
*/
#include "base/base.h"

#include <string.h>
#include <time.h>

/* Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3 (SC 2011), 10 rounds. */
void bsi_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4])
{
    uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
    uint32_t k0 = key[0], k1 = key[1];
    for (int round = 0; round < 10; round++) {
        uint64_t a = (uint64_t)0xD2511F53u * c0, b = (uint64_t)0xCD9E8D57u * c2;
        uint32_t n0 = (uint32_t)(b >> 32) ^ c1 ^ k0, n2 = (uint32_t)(a >> 32) ^ c3 ^ k1;
        c1 = (uint32_t)b;
        c3 = (uint32_t)a;
        c0 = n0;
        c2 = n2;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

void bsi_philox_key(uint64_t seed, const char *name, uint32_t key[2])
{
    uint64_t h = bs_hash64(name, strlen(name), seed);
    key[0] = (uint32_t)h;
    key[1] = (uint32_t)(h >> 32);
}

void bsi_fill_uniform(float *to, int64_t first, int64_t n, float bound, const uint32_t key[2])
{
    uint32_t word[4] = {0};
    for (int64_t i = 0; i < n; i++) {
        uint64_t at = (uint64_t)(first + i), block = at / 4;
        if (at % 4 == 0)
            bsi_philox((const uint32_t[4]){(uint32_t)block, (uint32_t)(block >> 32), 0, 0}, key, word);
        to[i] = (2.0f * bsi_uniform(word[at % 4]) - 1.0f) * bound;
    }
}

/* One round of a 64-bit mix (the finaliser of splitmix64) over 8-byte words: not cryptographic; used to
   tell results apart. */
static uint64_t mix(uint64_t h)
{
    h ^= h >> 30;
    h *= 0xBF58476D1CE4E5B9u;
    h ^= h >> 27;
    h *= 0x94D049BB133111EBu;
    return h ^ (h >> 31);
}

uint64_t bs_hash64(const void *p, size_t n, uint64_t seed)
{
    const unsigned char *s = p;
    uint64_t h = mix(seed + 0x9E3779B97F4A7C15u) ^ n;
    for (; n >= 8; n -= 8, s += 8) {
        uint64_t w;
        memcpy(&w, s, 8);
        h = mix(h ^ w) + 0x9E3779B97F4A7C15u;
    }
    if (n) {
        uint64_t w = 0;
        memcpy(&w, s, n);
        h = mix(h ^ w) + 0x9E3779B97F4A7C15u;
    }
    return mix(h);
}

double bsi_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static uint32_t bits(float v)
{
    uint32_t u;
    memcpy(&u, &v, 4);
    return u;
}

static float from_bits(uint32_t u)
{
    float v;
    memcpy(&v, &u, 4);
    return v;
}

float bsi_bf16_to_f32(uint16_t v)
{
    return from_bits((uint32_t)v << 16);
}

uint16_t bsi_f32_to_bf16(float v)
{
    uint32_t u = bits(v);
    if ((u & 0x7FFFFFFFu) > 0x7F800000u)
        return (uint16_t)((u >> 16) | 0x40u); /* keep NaN a NaN */
    return (uint16_t)((u + 0x7FFFu + ((u >> 16) & 1u)) >> 16);
}

float bsi_f16_to_f32(uint16_t v)
{
    uint32_t sign = (uint32_t)(v & 0x8000u) << 16, e = (v >> 10) & 31u, m = v & 0x3FFu;
    if (e == 31)
        return from_bits(sign | 0x7F800000u | (m << 13));
    if (e)
        return from_bits(sign | ((e + 112u) << 23) | (m << 13));
    float f = (float)m * 0x1p-24f; /* subnormal: exact in f32 */
    return sign ? -f : f;
}

uint16_t bsi_f32_to_f16(float v)
{
    uint32_t u = bits(v), sign = (u >> 16) & 0x8000u, a = u & 0x7FFFFFFFu;
    if (a > 0x7F800000u)
        return (uint16_t)(sign | 0x7E00u);
    if (a >= 0x477FF000u) /* rounds to 65536 or more */
        return (uint16_t)(sign | 0x7C00u);
    if (a < 0x38800000u) { /* below 2^-14: adding 0.5 rounds at bit 2^-24 in hardware */
        uint32_t r = bits(from_bits(a) + 0.5f) - 0x3F000000u;
        return (uint16_t)(sign | r);
    }
    uint32_t r = a - 0x38000000u;
    return (uint16_t)(sign | ((r + 0xFFFu + ((r >> 13) & 1u)) >> 13));
}

static const struct {
    const char *name;
    size_t size;
} dtypes[BS_DTYPE_COUNT] = {{"f32", 4}, {"bf16", 2}, {"f16", 2}, {"i64", 8},
                            {"i32", 4}, {"u8", 1},   {"f64", 8}};

const char *bs_dtype_name(bs_dtype t)
{
    return (unsigned)t < BS_DTYPE_COUNT ? dtypes[t].name : "unknown";
}

size_t bs_dtype_size(bs_dtype t)
{
    return (unsigned)t < BS_DTYPE_COUNT ? dtypes[t].size : 0;
}

bool bs_dtype_parse(const char *s, bs_dtype *out)
{
    for (int i = 0; i < BS_DTYPE_COUNT; i++) {
        const char *a = dtypes[i].name, *b = s;
        while (*a && (*b | 32) == (*a | 32))
            a++, b++;
        if (!*a && !*b) {
            *out = (bs_dtype)i;
            return true;
        }
    }
    return false;
}
