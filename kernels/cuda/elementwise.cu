/* SPDX-License-Identifier: Apache-2.0 */
/*
** elementwise.cu: kernels over N independent elements: stored to computed dtypes, activations, gated
** activations, sums and products, dropout. In place is fine except where element types differ.
*/
#include "map.cuh"
#include "row_groups.cuh"

static __device__ inline float sigmoid(float x)
{
    return 1.0f / (1.0f + expf(-x));
}

template <int ACT> static __device__ inline float act_value(float x)
{
    if (ACT == BSK_SILU)
        return x * sigmoid(x);
    if (ACT == BSK_GELU_TANH)
        return 0.5f * x * (1.0f + tanhf(0.797884561f * (x + 0.044715f * x * x * x)));
    if (ACT == BSK_GELU_ERF)
        return 0.5f * x * (1.0f + erff(x * 0.707106781f));
    return x < 0.0f ? 0.0f : x; /* NaN stays NaN */
}

template <int ACT> static __device__ inline float act_slope(float x)
{
    if (ACT == BSK_SILU) {
        float s = sigmoid(x);
        return s * (1.0f + x * (1.0f - s));
    }
    if (ACT == BSK_GELU_TANH) {
        float t = tanhf(0.797884561f * (x + 0.044715f * x * x * x));
        return 0.5f * (1.0f + t) +
               0.5f * x * (1.0f - t * t) * 0.797884561f * (1.0f + 0.134145f * x * x);
    }
    if (ACT == BSK_GELU_ERF) /* Phi(x) + x phi(x) */
        return 0.5f * (1.0f + erff(x * 0.707106781f)) + x * 0.398942280f * expf(-0.5f * x * x);
    return x > 0.0f ? 1.0f : 0.0f;
}

template <int ACT> struct f_act {
    enum { in = 1, out = 1 };
    __device__ void operator()(const float *x, float *y) const { y[0] = act_value<ACT>(x[0]); }
};

template <int ACT> struct f_act_bwd { /* x, dy */
    enum { in = 2, out = 1 };
    __device__ void operator()(const float *x, float *y) const { y[0] = x[1] * act_slope<ACT>(x[0]); }
};

template <int ACT> struct f_glu { /* g, u */
    enum { in = 2, out = 1 };
    __device__ void operator()(const float *x, float *y) const { y[0] = act_value<ACT>(x[0]) * x[1]; }
};

template <int ACT> struct f_glu_bwd { /* g, u, dy */
    enum { in = 3, out = 2 };
    __device__ void operator()(const float *x, float *y) const
    {
        y[0] = x[2] * x[1] * act_slope<ACT>(x[0]);
        y[1] = x[2] * act_value<ACT>(x[0]);
    }
};

struct f_add {
    enum { in = 2, out = 1 };
    __device__ void operator()(const float *x, float *y) const { y[0] = x[0] + x[1]; }
};

struct f_mul {
    enum { in = 2, out = 1 };
    __device__ void operator()(const float *x, float *y) const { y[0] = x[0] * x[1]; }
};

struct f_axpy { /* x, y */
    enum { in = 2, out = 1 };
    float s;
    __device__ void operator()(const float *x, float *y) const { y[0] = x[1] + s * x[0]; }
};

struct f_scale {
    enum { in = 1, out = 1 };
    float s;
    __device__ void operator()(const float *x, float *y) const { y[0] = s * x[0]; }
};

struct f_softcap {
    enum { in = 1, out = 1 };
    float cap;
    __device__ void operator()(const float *x, float *y) const { y[0] = cap * tanhf(x[0] / cap); }
};

/* map with one kernel per element type and activation; the operands are p[] in order. */
template <template <int> class F> static cudaError_t map_act(bsk_cuda *cuda, const bsk_call *c)
{
    return by_type(cuda, c->dtype, [&](auto t) {
        using T = decltype(t);
        switch (c->n[1]) {
        case BSK_SILU:
            return map<T, T>(cuda, c->n[0], c->p, F<BSK_SILU>());
        case BSK_GELU_TANH:
            return map<T, T>(cuda, c->n[0], c->p, F<BSK_GELU_TANH>());
        case BSK_GELU_ERF:
            return map<T, T>(cuda, c->n[0], c->p, F<BSK_GELU_ERF>());
        default:
            return map<T, T>(cuda, c->n[0], c->p, F<BSK_RELU>());
        }
    });
}

template <class F> static cudaError_t map_typed(bsk_cuda *cuda, const bsk_call *c, void *const *p, F f)
{
    return by_type(cuda, c->dtype,
                   [&](auto t) { return map<decltype(t), decltype(t)>(cuda, c->n[0], p, f); });
}

cudaError_t bsk_cuda_act(bsk_cuda *cuda, const bsk_call *c)
{
    return map_act<f_act>(cuda, c);
}

cudaError_t bsk_cuda_act_bwd(bsk_cuda *cuda, const bsk_call *c)
{
    return map_act<f_act_bwd>(cuda, c);
}

cudaError_t bsk_cuda_glu(bsk_cuda *cuda, const bsk_call *c)
{
    return map_act<f_glu>(cuda, c);
}

cudaError_t bsk_cuda_glu_bwd(bsk_cuda *cuda, const bsk_call *c)
{
    return map_act<f_glu_bwd>(cuda, c);
}

cudaError_t bsk_cuda_add(bsk_cuda *cuda, const bsk_call *c)
{
    return map_typed(cuda, c, c->p, f_add());
}

cudaError_t bsk_cuda_mul(bsk_cuda *cuda, const bsk_call *c)
{
    return map_typed(cuda, c, c->p, f_mul());
}

cudaError_t bsk_cuda_axpy(bsk_cuda *cuda, const bsk_call *c)
{
    void *const p[] = {c->p[0], c->p[1], c->p[1]};
    return map_typed(cuda, c, p, f_axpy{(float)c->f[0]});
}

cudaError_t bsk_cuda_scale(bsk_cuda *cuda, const bsk_call *c)
{
    return map_typed(cuda, c, c->p, f_scale{(float)c->f[0]});
}

cudaError_t bsk_cuda_softcap(bsk_cuda *cuda, const bsk_call *c)
{
    void *const p[] = {c->p[0], c->p[0]};
    return map<float, float>(cuda, c->n[0], p, f_softcap{(float)c->f[0]});
}

cudaError_t bsk_cuda_expand(bsk_cuda *cuda, const bsk_call *c)
{
    f_scale f = {(float)c->f[0]};
    return by_type(cuda, c->out, [&](auto t) {
        using O = decltype(t);
        switch (c->n[0]) {
        case BS_DTYPE_F32:
            return map<float, O>(cuda, c->n[1], c->p, f);
        case BS_DTYPE_BF16:
            return map<bf16, O>(cuda, c->n[1], c->p, f);
        case BS_DTYPE_F16:
            return map<__half, O>(cuda, c->n[1], c->p, f);
        default:
            cuda->note = "weights are expanded from f32, bf16 and f16 only";
            return cudaErrorNotSupported;
        }
    });
}

/* ---- gates and ups in turn, clamped ---- */

struct clamped_gate {
    float alpha, limit;

    /* the clamped gate, and 1 + the clamped up; NaN stays NaN */
    __device__ float gate(float g) const { return g > limit ? limit : g; }
    __device__ float up(float u) const { return 1.0f + (u > limit ? limit : u < -limit ? -limit : u); }
};

template <class T>
static __global__ void __launch_bounds__(MAP_THREADS)
    glu_clamped_kernel(const T *x, T *y, int64_t n, clamped_gate f, bool wide)
{
    int64_t at = ((int64_t)blockIdx.x * MAP_THREADS + threadIdx.x) * VEC;
    float v[2][VEC], out[VEC];
#pragma unroll
    for (int h = 0; h < 2; h++)
        load_some(v[h], x + 2 * at + h * VEC, 2 * (n - at) - h * VEC, wide);
#pragma unroll
    for (int i = 0; i < VEC; i++) {
        const float *pair = &v[2 * i / VEC][2 * i % VEC];
        float g = f.gate(pair[0]);
        out[i] = f.up(pair[1]) * g * sigmoid(f.alpha * g);
    }
    store_some(y + at, out, n - at, wide);
}

/* dx may be x: a thread reads all its elements before it writes. */
template <class T>
static __global__ void __launch_bounds__(MAP_THREADS)
    glu_clamped_bwd_kernel(const T *x, const T *dy, T *dx, int64_t n, clamped_gate f, bool wide)
{
    int64_t at = ((int64_t)blockIdx.x * MAP_THREADS + threadIdx.x) * VEC;
    float v[2][VEC], d[VEC];
#pragma unroll
    for (int h = 0; h < 2; h++)
        load_some(v[h], x + 2 * at + h * VEC, 2 * (n - at) - h * VEC, wide);
    load_some(d, dy + at, n - at, wide);
#pragma unroll
    for (int i = 0; i < VEC; i++) {
        float *pair = &v[2 * i / VEC][2 * i % VEC];
        float g = f.gate(pair[0]), s = sigmoid(f.alpha * g);
        float dg = d[i] * f.up(pair[1]) * s * (1.0f + f.alpha * g * (1.0f - s)), du = d[i] * g * s;
        pair[0] = pair[0] > f.limit ? 0.0f : dg;
        pair[1] = pair[1] > f.limit || pair[1] < -f.limit ? 0.0f : du;
    }
#pragma unroll
    for (int h = 0; h < 2; h++)
        store_some(dx + 2 * at + h * VEC, v[h], 2 * (n - at) - h * VEC, wide);
}

cudaError_t bsk_cuda_glu_clamped(bsk_cuda *cuda, const bsk_call *c)
{
    clamped_gate f = {(float)c->f[0], (float)c->f[1]};
    int64_t n = c->n[0] * c->n[1];
    bool wide = aligned16(c->p[0]) && aligned16(c->p[1]);
    return by_type(cuda, c->dtype, [&](auto t) {
        using T = decltype(t);
        return issue_flat(cuda, glu_clamped_kernel<T>, n, (const T *)c->p[0], (T *)c->p[1], n, f, wide);
    });
}

cudaError_t bsk_cuda_glu_clamped_bwd(bsk_cuda *cuda, const bsk_call *c)
{
    clamped_gate f = {(float)c->f[0], (float)c->f[1]};
    int64_t n = c->n[0] * c->n[1];
    bool wide = aligned16(c->p[0]) && aligned16(c->p[1]) && aligned16(c->p[2]);
    return by_type(cuda, c->dtype, [&](auto t) {
        using T = decltype(t);
        return issue_flat(cuda, glu_clamped_bwd_kernel<T>, n, (const T *)c->p[0], (const T *)c->p[1],
                          (T *)c->p[2], n, f, wide);
    });
}

/* ---- dropout ---- */

struct dropout_args {
    const int32_t *row, *pos; /* [T] */
    int64_t T, C;
    uint32_t key0, key1, step;
    float probability, keep;
};

/* Philox4x32-10: the bits of bsi_philox. */
static __device__ inline void philox(uint32_t (&w)[4], uint32_t k0, uint32_t k1)
{
#pragma unroll
    for (int round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
        uint32_t a_hi = __umulhi(0xD2511F53u, w[0]), a_lo = 0xD2511F53u * w[0];
        uint32_t b_hi = __umulhi(0xCD9E8D57u, w[2]), b_lo = 0xCD9E8D57u * w[2];
        w[0] = b_hi ^ w[1] ^ k0;
        w[2] = a_hi ^ w[3] ^ k1;
        w[1] = b_lo;
        w[3] = a_lo;
    }
}

template <class T>
static __global__ void __launch_bounds__(ROW_THREADS)
    dropout_kernel(const T *x, T *y, dropout_args a, bool wide)
{
    int64_t t = my_row();
    if (t >= a.T)
        return;
    FOR_COLUMNS(c, a.C)
    {
        float v[VEC];
        load_some(v, x + t * a.C + c, a.C - c, wide);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint32_t w[4] = {a.step, (uint32_t)a.row[t], (uint32_t)a.pos[t], (uint32_t)(c / 4) + half};
            philox(w, a.key0, a.key1);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float u = (float)(w[i] >> 8) * 0x1p-24f, &e = v[4 * half + i];
                e = u < a.probability ? 0.0f : e / a.keep;
            }
        }
        store_some(y + t * a.C + c, v, a.C - c, wide);
    }
}

cudaError_t bsk_cuda_dropout(bsk_cuda *cuda, const bsk_call *c)
{
    float probability = (float)c->f[0];
    dropout_args a = {
        (const int32_t *)c->p[1], (const int32_t *)c->p[2], c->n[0],           c->n[1],
        (uint32_t)c->n[2],        (uint32_t)c->n[3],        (uint32_t)c->n[4], probability,
        1.0f - probability};
    return by_type(cuda, c->dtype, [&](auto t) {
        using T = decltype(t);
        return issue_rows(cuda, dropout_kernel<T>, a.T, a.C, (const T *)c->p[0], (T *)c->p[3], a,
                          rows_wide(a.C, c->p[0], c->p[3]));
    });
}

/* ---- a product over nothing ---- */

template <class T> static __global__ void scale_matrix_kernel(T *C, int64_t N, int64_t ldc, float beta)
{
    T *row = C + (int64_t)blockIdx.x * ldc;
    for (int64_t j = threadIdx.x; j < N; j += blockDim.x)
        from_f32(&row[j], beta == 0.0f ? 0.0f : beta * to_f32(row[j]));
}

cudaError_t bsk_cuda_scale_matrix(bsk_cuda *cuda, void *C, int dtype, int64_t M, int64_t N, int64_t ldc,
                                  float beta)
{
    if (M > INT32_MAX)
        return cudaErrorInvalidConfiguration;
    return by_type(cuda, dtype, [&](auto t) {
        using T = decltype(t);
        return issue(cuda, scale_matrix_kernel<T>, (unsigned)M, ROW_THREADS, 0, (T *)C, N, ldc, beta);
    });
}
