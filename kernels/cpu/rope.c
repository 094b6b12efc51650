/* SPDX-License-Identifier: Apache-2.0 */
/*
** rope.c: rotary position embedding (Su et al. 2021). Entry pairs of each head are turned by
** position * freq[j], computed in f32 as the models' reference implementations do; entries past 2 *
** n_freq pass through. The backward is the inverse turn with the same scaling. y may be x.
*/
#include "cpu.h"

enum { FREQS = 64 }; /* frequencies whose cosines are kept at a time */

struct rope {
    const float *x;     /* [T,H*D] */
    const int32_t *pos; /* [T] */
    const float *freq;  /* [n_freq] */
    float *y;           /* [T,H*D] */
    int64_t H, D, n_freq;
    bool interleaved, inverse;
    float scaling;
};

/* Turns pairs j in [j0, j0+n) of every head of one token. */
static void turn(const struct rope *p, const float *x, float *y, int64_t j0, int n, const float *cosine,
                 const float *sine)
{
    int64_t step = p->interleaved ? 2 : 1, apart = p->interleaved ? 1 : p->n_freq;
    for (int64_t h = 0; h < p->H; h++) {
        const float *a = x + h * p->D + j0 * step;
        float *b = y + h * p->D + j0 * step;
        for (int j = 0; j < n; j++) {
            float u = a[j * step], v = a[j * step + apart];
            b[j * step] = u * cosine[j] - v * sine[j];
            b[j * step + apart] = v * cosine[j] + u * sine[j];
        }
    }
}

static void rope_body(const void *arg, int64_t first, int64_t end)
{
    const struct rope *p = arg;
    for (int64_t t = first; t < end; t++) {
        const float *x = p->x + t * p->H * p->D;
        float *y = p->y + t * p->H * p->D;
        for (int64_t j0 = 0; j0 < p->n_freq; j0 += FREQS) {
            int n = (int)BSI_MIN(FREQS, p->n_freq - j0);
            float cosine[FREQS], sine[FREQS];
            for (int j = 0; j < n; j++) {
                float angle = (float)p->pos[t] * p->freq[j0 + j];
                cosine[j] = cosf(angle) * p->scaling;
                sine[j] = (p->inverse ? -sinf(angle) : sinf(angle)) * p->scaling;
            }
            turn(p, x, y, j0, n, cosine, sine);
        }
        if (y != x)
            for (int64_t h = 0; h < p->H; h++)
                for (int64_t j = 2 * p->n_freq; j < p->D; j++)
                    y[h * p->D + j] = x[h * p->D + j];
    }
}

void bsk_rope_f32(bsk_par *par, const float *x, const int32_t *pos, const float *freq, float *y,
                  int64_t T, int64_t H, int64_t D, int64_t n_freq, int style, bool inverse,
                  float scaling)
{
    struct rope p = {x, pos, freq, y, H, D, n_freq, style == BSK_ROPE_INTERLEAVED, inverse, scaling};
    bsk_chunks(par, T, H * D + 8 * n_freq, rope_body, &p);
}
