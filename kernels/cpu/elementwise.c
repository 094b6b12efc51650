/* SPDX-License-Identifier: Apache-2.0 */
/*
** elementwise.c: kernels over N independent elements: stored to computed dtypes, activations, gated
** activations, sums and products. In place is fine everywhere: an element is read before it is
** written.
*/
#include "cpu.h"
#include "kernels.h"

#define SQRT_2_OVER_PI 0.797884561f
#define GELU_CUBIC     0.044715f

BSK_INLINE float act_value(float x, int act)
{
    switch (act) {
    case BSK_SILU:
        return x * bsk_sigmoid(x);
    case BSK_GELU_TANH:
        return 0.5f * x * (1.0f + bsk_tanh(SQRT_2_OVER_PI * (x + GELU_CUBIC * x * x * x)));
    case BSK_GELU_ERF:
        return 0.5f * x * (1.0f + erff(x * 0.707106781f));
    default: /* BSK_RELU; NaN stays NaN */
        return x < 0.0f ? 0.0f : x;
    }
}

BSK_INLINE float act_slope(float x, int act)
{
    switch (act) {
    case BSK_SILU: {
        float s = bsk_sigmoid(x);
        return s * (1.0f + x * (1.0f - s));
    }
    case BSK_GELU_TANH: {
        float t = bsk_tanh(SQRT_2_OVER_PI * (x + GELU_CUBIC * x * x * x));
        float inner = SQRT_2_OVER_PI * (1.0f + 3.0f * GELU_CUBIC * x * x);
        return 0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * inner;
    }
    case BSK_GELU_ERF: /* Phi(x) + x phi(x), 1/sqrt(2 pi) = 0.3989... */
        return 0.5f * (1.0f + erff(x * 0.707106781f)) + x * 0.398942280f * bsk_exp_neg(-0.5f * x * x);
    default:
        return x > 0.0f ? 1.0f : 0.0f;
    }
}

float bsk_act_f32(float x, int act)
{
    return act_value(x, act);
}

float bsk_act_grad_f32(float x, int act)
{
    return act_slope(x, act);
}

/* One loop per activation, so that the choice is outside of the loop. */
#define FOR_ACT(act, LOOP)                                                                             \
    switch (act) {                                                                                     \
    case BSK_SILU:                                                                                     \
        LOOP(BSK_SILU) break;                                                                          \
    case BSK_GELU_TANH:                                                                                \
        LOOP(BSK_GELU_TANH) break;                                                                     \
    case BSK_GELU_ERF:                                                                                 \
        LOOP(BSK_GELU_ERF) break;                                                                      \
    default:                                                                                           \
        LOOP(BSK_RELU) break;                                                                          \
    }

/* Operands of every kernel here, each [N]; unused ones are NULL. */
struct args {
    const float *a, *b, *c;
    float *y, *z;
    float s;
    int act;
};

BSK_WIDE static void glu_body(const void *arg, int64_t first, int64_t end)
{
    const struct args *p = arg;
    const float *g = p->a, *u = p->b;
    float *y = p->y;
#define LOOP(ACT)                                                                                      \
    for (int64_t i = first; i < end; i++)                                                              \
        y[i] = act_value(g[i], ACT) * u[i];
    FOR_ACT(p->act, LOOP)
#undef LOOP
}

void bsk_glu_f32(bsk_par *par, const float *g, const float *u, float *y, int64_t N, int act)
{
    struct args p = {.a = g, .b = u, .y = y, .act = act};
    bsk_chunks(par, N, 2, glu_body, &p);
}

BSK_WIDE static void glu_bwd_body(const void *arg, int64_t first, int64_t end)
{
    const struct args *p = arg;
    const float *g = p->a, *u = p->b, *dy = p->c;
    float *dg = p->y, *du = p->z;
#define LOOP(ACT)                                                                                      \
    for (int64_t i = first; i < end; i++) {                                                            \
        float d = dy[i], gi = g[i], ui = u[i];                                                         \
        dg[i] = d * ui * act_slope(gi, ACT);                                                           \
        du[i] = d * act_value(gi, ACT);                                                                \
    }
    FOR_ACT(p->act, LOOP)
#undef LOOP
}

void bsk_glu_bwd_f32(bsk_par *par, const float *g, const float *u, const float *dy, float *dg,
                     float *du, int64_t N, int act)
{
    struct args p = {.a = g, .b = u, .c = dy, .y = dg, .z = du, .act = act};
    bsk_chunks(par, N, 3, glu_bwd_body, &p);
}

/* x: gates and ups in turn; y: what is written. */
struct clamped {
    const float *x, *dy;
    float *y, alpha, limit;
};

/* NaN stays NaN. */
BSK_INLINE float at_most(float x, float limit)
{
    return x > limit ? limit : x;
}

BSK_INLINE float at_least(float x, float limit)
{
    return x < limit ? limit : x;
}

BSK_WIDE static void glu_clamped_body(const void *arg, int64_t first, int64_t end)
{
    const struct clamped *p = arg;
    const float *x = p->x;
    float *y = p->y, alpha = p->alpha, limit = p->limit;
    for (int64_t i = first; i < end; i++) {
        float g = at_most(x[2 * i], limit), u = at_least(at_most(x[2 * i + 1], limit), -limit);
        y[i] = (u + 1.0f) * g * bsk_sigmoid(alpha * g);
    }
}

void bsk_glu_clamped_f32(bsk_par *par, const float *x, float *y, int64_t N, float alpha, float limit)
{
    const struct clamped p = {.x = x, .y = y, .alpha = alpha, .limit = limit};
    bsk_chunks(par, N, 3, glu_clamped_body, &p);
}

BSK_WIDE static void glu_clamped_bwd_body(const void *arg, int64_t first, int64_t end)
{
    const struct clamped *p = arg;
    const float *x = p->x, *dy = p->dy;
    float *dx = p->y, alpha = p->alpha, limit = p->limit;
    for (int64_t i = first; i < end; i++) {
        float gate = x[2 * i], up = x[2 * i + 1], d = dy[i];
        float g = at_most(gate, limit), u = at_least(at_most(up, limit), -limit);
        float s = bsk_sigmoid(alpha * g);
        float dg = d * (u + 1.0f) * s * (1.0f + alpha * g * (1.0f - s)), du = d * g * s;
        dx[2 * i] = gate > limit ? 0.0f : dg;
        dx[2 * i + 1] = up > limit || up < -limit ? 0.0f : du;
    }
}

void bsk_glu_clamped_bwd_f32(bsk_par *par, const float *x, const float *dy, float *dx, int64_t N,
                             float alpha, float limit)
{
    const struct clamped p = {.x = x, .dy = dy, .y = dx, .alpha = alpha, .limit = limit};
    bsk_chunks(par, N, 5, glu_clamped_bwd_body, &p);
}

BSK_WIDE static void act_body(const void *arg, int64_t first, int64_t end)
{
    const struct args *p = arg;
    const float *x = p->a;
    float *y = p->y;
#define LOOP(ACT)                                                                                      \
    for (int64_t i = first; i < end; i++)                                                              \
        y[i] = act_value(x[i], ACT);
    FOR_ACT(p->act, LOOP)
#undef LOOP
}

void bsk_activation_f32(bsk_par *par, const float *x, float *y, int64_t N, int act)
{
    struct args p = {.a = x, .y = y, .act = act};
    bsk_chunks(par, N, 2, act_body, &p);
}

BSK_WIDE static void act_bwd_body(const void *arg, int64_t first, int64_t end)
{
    const struct args *p = arg;
    const float *x = p->a, *dy = p->b;
    float *dx = p->y;
#define LOOP(ACT)                                                                                      \
    for (int64_t i = first; i < end; i++)                                                              \
        dx[i] = dy[i] * act_slope(x[i], ACT);
    FOR_ACT(p->act, LOOP)
#undef LOOP
}

void bsk_activation_bwd_f32(bsk_par *par, const float *x, const float *dy, float *dx, int64_t N,
                            int act)
{
    struct args p = {.a = x, .b = dy, .y = dx, .act = act};
    bsk_chunks(par, N, 2, act_bwd_body, &p);
}

static void add_body(const void *arg, int64_t first, int64_t end)
{
    const struct args *p = arg;
    const float *a = p->a, *b = p->b;
    float *y = p->y;
    for (int64_t i = first; i < end; i++)
        y[i] = a[i] + b[i];
}

void bsk_add_f32(bsk_par *par, const float *a, const float *b, float *y, int64_t N)
{
    struct args p = {.a = a, .b = b, .y = y};
    bsk_chunks(par, N, 1, add_body, &p);
}

static void mul_body(const void *arg, int64_t first, int64_t end)
{
    const struct args *p = arg;
    const float *a = p->a, *b = p->b;
    float *y = p->y;
    for (int64_t i = first; i < end; i++)
        y[i] = a[i] * b[i];
}

void bsk_mul_f32(bsk_par *par, const float *a, const float *b, float *y, int64_t N)
{
    struct args p = {.a = a, .b = b, .y = y};
    bsk_chunks(par, N, 1, mul_body, &p);
}

static void axpy_body(const void *arg, int64_t first, int64_t end)
{
    const struct args *p = arg;
    const float *x = p->a;
    float *y = p->y, s = p->s;
    for (int64_t i = first; i < end; i++)
        y[i] += s * x[i];
}

void bsk_axpy_f32(bsk_par *par, const float *x, float *y, int64_t N, float s)
{
    struct args p = {.a = x, .y = y, .s = s};
    bsk_chunks(par, N, 1, axpy_body, &p);
}

static void scale_body(const void *arg, int64_t first, int64_t end)
{
    const struct args *p = arg;
    const float *x = p->a;
    float *y = p->y, s = p->s;
    for (int64_t i = first; i < end; i++)
        y[i] = s * x[i];
}

void bsk_scale_f32(bsk_par *par, const float *x, float *y, int64_t N, float s)
{
    struct args p = {.a = x, .y = y, .s = s};
    bsk_chunks(par, N, 1, scale_body, &p);
}

BSK_WIDE static void softcap_body(const void *arg, int64_t first, int64_t end)
{
    const struct args *p = arg;
    float *x = p->y, cap = p->s;
    for (int64_t i = first; i < end; i++)
        x[i] = cap * bsk_tanh(x[i] / cap);
}

void bsk_softcap_f32(bsk_par *par, float *x, int64_t N, float cap)
{
    struct args p = {.y = x, .s = cap};
    bsk_chunks(par, N, 2, softcap_body, &p);
}

struct expand {
    int dtype;
    const void *src;
    float *dst;
    float scale;
};

/* Exponent and fraction moved to their places in an f32 are the value / 2^112, subnormals included; the
   top exponent (infinity, NaN) is moved up to f32's. */
BSK_INLINE float widen_f16(uint16_t v)
{
    uint32_t low = (uint32_t)(v & 0x7FFFu) << 13, sign = (uint32_t)(v & 0x8000u) << 16;
    float f;
    memcpy(&f, &low, 4);
    f *= 0x1p112f;
    uint32_t bits;
    memcpy(&bits, &f, 4);
    bits = (low >= 0x0F800000u ? low | 0x7F800000u : bits) | sign;
    memcpy(&f, &bits, 4);
    return f;
}

BSK_WIDE static void expand_body(const void *arg, int64_t first, int64_t end)
{
    const struct expand *p = arg;
    const uint16_t *half = p->src;
    const float *single = p->src;
    float *y = p->dst, s = p->scale;
    switch (p->dtype) {
    case BS_DTYPE_F32:
        for (int64_t i = first; i < end; i++)
            y[i] = s * single[i];
        break;
    case BS_DTYPE_BF16: /* the upper half of an f32 */
        for (int64_t i = first; i < end; i++) {
            uint32_t bits = (uint32_t)half[i] << 16;
            float v;
            memcpy(&v, &bits, 4);
            y[i] = s * v;
        }
        break;
    case BS_DTYPE_F16:
        for (int64_t i = first; i < end; i++)
            y[i] = s * widen_f16(half[i]);
        break;
    default: /* no other dtype is computed with; a wrong launch must not look like a result */
        for (int64_t i = first; i < end; i++)
            y[i] = NAN;
    }
}

/* src [N] of dtype f32, bf16 or f16 -> dst [N] */
void bsk_expand_f32(bsk_par *par, int dtype, const void *src, float *dst, int64_t N, float scale)
{
    struct expand p = {dtype, src, dst, scale};
    bsk_chunks(par, N, 1, expand_body, &p);
}

struct round {
    struct expand from; /* dst: not used */
    uint16_t *dst;
    size_t size; /* of a source element */
};

BSK_WIDE static void round_body(const void *arg, int64_t first, int64_t end)
{
    const struct round *p = arg;
    float part[256];
    for (int64_t at = first; at < end; at += 256) {
        int64_t n = BSI_MIN(256, end - at);
        struct expand e = p->from;
        e.src = (const char *)p->from.src + (size_t)at * p->size;
        e.dst = part;
        expand_body(&e, 0, n);
        for (int64_t i = 0; i < n; i++)
            p->dst[at + i] = bsi_f32_to_bf16(part[i]);
    }
}

void bsk_expand_bf16(bsk_par *par, int dtype, const void *src, uint16_t *dst, int64_t N, float scale)
{
    struct round p = {{dtype, src, NULL, scale}, dst, bs_dtype_size((bs_dtype)dtype)};
    bsk_chunks(par, N, 1, round_body, &p);
}
