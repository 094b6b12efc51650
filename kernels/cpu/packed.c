/* SPDX-License-Identifier: Apache-2.0 */
/*
** packed.c: values out of packed formats. Exact in f32 and bf16: what a format holds has at most eight significant
** bits.
*/
#include "cpu.h"

#include <math.h>

struct packed {
    int out; /* bs_dtype */
    const uint8_t *blocks, *scales;
    void *dst;
};

/* A scale of 255 is NaN in the format; 2^128, which is no f32, would follow from the formula. */
static float mxfp4_scale(uint8_t scale)
{
    return scale == 255 ? NAN : ldexpf(1.0f, (int)scale - 127);
}

static void mxfp4_body(const void *arg, int64_t first, int64_t end)
{
    static const float value[16] = {0,     0.5f,  1,  1.5f,  2,  3,  4,  6,
                                    -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
    const struct packed *p = arg;
    for (int64_t g = first; g < end; g++) {
        float scale = mxfp4_scale(p->scales[g]);
        for (int64_t i = 0; i < 32; i++) {
            uint8_t byte = p->blocks[g * 16 + i / 2];
            float v = value[i % 2 ? byte >> 4 : byte & 15] * scale;
            if (p->out == BS_DTYPE_BF16)
                ((uint16_t *)p->dst)[g * 32 + i] = bsi_f32_to_bf16(v);
            else
                ((float *)p->dst)[g * 32 + i] = v;
        }
    }
}

void bsk_expand_mxfp4(bsk_par *par, int out, const uint8_t *blocks, const uint8_t *scales, void *dst,
                      int64_t N)
{
    const struct packed p = {out, blocks, scales, dst};
    bsk_chunks(par, N / 32, 64, mxfp4_body, &p);
}
