/* SPDX-License-Identifier: Apache-2.0 */
/*
** attention.cuh: what the attention kernels share. q, o [T,H*D], k, v [T,K*D], lse [T,H]; query head
** h reads key/value head h / (H/K). The rows of the batch are packed: query i sees key j iff
** first_key(i) <= j <= i, and first_key never decreases. So tiles are cut from the T tokens as a
** whole: a tile's keys are those from the first key of its first query to its last query.
**
** Scores are kept times log2(e), so that a power of two is all that softmax needs: the hardware has 2^x
** and no e^x. lse is natural again, since the backward pass of every version and the sinks read it.
*/
#ifndef BSK_CUDA_ATTENTION_CUH
#define BSK_CUDA_ATTENTION_CUH

#include "elements.cuh"

#include <type_traits>

#define LOG2E 1.4426950408889634f
#define LN2   0.6931471805599453f

struct attention_args {
    const void *q, *k, *v, *o_in, *grad_o;
    const void *sinks; /* [H], or NULL; forward only */
    const int32_t *cu; /* [n_rows+1] */
    const float *lse_in;
    void *o, *dq, *dk, *dv;
    float *lse;
    const float *delta;   /* [T,H]: sum of dO * O */
    const int32_t *first; /* [T]: first_key; backward only */
    int T, H, K, D, n_rows, window;
    float scale, cap;
};

/* The usual case folds the scale into the power: a running maximum of products is then, times the scale, that
   of scores, and each score costs one multiply-add and one power. That holds for a positive scale and no cap;
   everything else goes through general_scores first. */
enum { SCORE_PLAIN, SCORE_GENERAL };

static inline bool attention_args_of(const bsk_call *c, attention_args *a)
{
    const int64_t *n = c->n;
    if (n[0] > INT32_MAX / 2 || n[1] * n[3] > INT32_MAX)
        return false;
    *a = attention_args();
    a->q = c->p[0];
    a->k = c->p[1];
    a->v = c->p[2];
    a->cu = (const int32_t *)c->p[3];
    a->T = (int)n[0];
    a->H = (int)n[1];
    a->K = (int)n[2];
    a->D = (int)n[3];
    a->n_rows = (int)n[4];
    a->window = n[5] > 0 && n[5] < n[0] ? (int)n[5] : 0;
    a->scale = (float)c->f[0];
    a->cap = (float)c->f[1];
    return true;
}

static inline void attention_forward_args(const bsk_call *c, attention_args *a)
{
    a->o = c->p[4];
    a->lse = (float *)c->p[5];
    a->sinks = c->p[7];
}

/* The scratch holds delta [T,H], then first [T]. */
static inline void attention_backward_args(const bsk_call *c, attention_args *a)
{
    a->o_in = c->p[4];
    a->lse_in = (const float *)c->p[5];
    a->grad_o = c->p[6];
    a->dq = c->p[7];
    a->dk = c->p[8];
    a->dv = c->p[9];
    a->delta = (const float *)c->p[10];
    a->first = (const int32_t *)c->p[10] + (int64_t)a->T * a->H;
}

/* A search: rows of a batch may be many, and their lengths are known on the device only. */
static __device__ inline int first_key(const attention_args &a, int i)
{
    int low = 0, high = a.n_rows; /* cu[low] <= i < cu[high] */
    while (high - low > 1) {
        int mid = (low + high) / 2;
        if (a.cu[mid] <= i)
            low = mid;
        else
            high = mid;
    }
    return a.window > 0 ? max(a.cu[low], i - a.window + 1) : a.cu[low];
}

/* The end of the queries that see key j or an earlier one, for first [T]; it never decreases, so bisection finds
   it. Tiles of keys end there: later queries cannot see them. */
static __device__ inline int last_query(const attention_args &a, int j)
{
    int low = j, high = a.T; /* first[low] <= j, first[high] > j */
    while (high - low > 1) {
        int mid = (low + high) / 2;
        if (a.first[mid] <= j)
            low = mid;
        else
            high = mid;
    }
    return high;
}

/* The sink of head h. A row's running maximum starts there, so that no power overflows; what the sink adds
   to the row's sum is added when its maximum is known. */
template <class T> static __device__ inline float sink_of(const attention_args &a, int h)
{
    return a.sinks ? to_f32(((const T *)a.sinks)[h]) : -INFINITY;
}

/* 2^x in one instruction, to 22 bits; 0 below 2^-126 and for -inf. */
static __device__ inline float exp2_fast(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* tanh |x| = (1 - e^-2|x|) / (1 + e^-2|x|): the exponent is never positive, so nothing overflows. */
static __device__ inline float tanh_fast(float x)
{
    float e = exp2_fast(-2.0f * LOG2E * fabsf(x));
    return copysignf(__fdividef(1.0f - e, 1.0f + e), x);
}

/* Products of queries and keys to exponents of two, where the scale cannot wait or there is a cap. */
template <int NT>
static __device__ inline void general_scores(const attention_args &a, float (&s)[NT][4])
{
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            float x = s[n][e] * a.scale;
            s[n][e] = LOG2E * (a.cap > 0.0f ? a.cap * tanh_fast(x / a.cap) : x);
        }
}

/* Scores of keys that a query does not see to -inf, for 16 queries from i0 on and keys from j0 on, in the layout
   of mma.cuh. A query past the end has first INT32_MAX and sees none. */
template <int NT>
static __device__ inline void hide_keys(float (&s)[NT][4], const int (&first)[2], int i0, int j0)
{
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            int i = i0 + 8 * (e / 2) + lane / 4, j = j0 + n * 8 + lane % 4 * 2 + e % 2;
            if (j > i || j < first[e / 2])
                s[n][e] = -INFINITY;
        }
}

/* The denominator of a row's softmax from the sums of its four lanes and its maximum, an exponent of two as the sink
   is. */
static __device__ inline float total_of_row(float sum, float max, float sink)
{
    sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 1);
    sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 2);
    return sum + exp2f(sink - max);
}

/* attention_prepare.cu: fills the scratch that attention_backward_args points at. */
cudaError_t bsk_cuda_attention_prepare(bsk_cuda *cuda, const attention_args *a, int dtype);

/* fn(D) with a head dim that bsk_cuda_attention_tiled has, as a constant. */
template <class F> static cudaError_t by_head_dim(int D, F fn)
{
    switch (D) {
    case 64:
        return fn(std::integral_constant<int, 64>());
    case 80:
        return fn(std::integral_constant<int, 80>());
    case 96:
        return fn(std::integral_constant<int, 96>());
    case 128:
        return fn(std::integral_constant<int, 128>());
    default:
        return fn(std::integral_constant<int, 256>());
    }
}

/* Does a call's score need more than a product by a positive scale? */
static inline bool has_general_scores(const attention_args &a)
{
    return a.cap > 0.0f || a.scale <= 0.0f;
}

/* fn(a) with the operands of a forward call, where there are any tokens. */
template <class F> static cudaError_t with_forward_args(const bsk_call *c, F fn)
{
    attention_args a;
    if (!attention_args_of(c, &a))
        return cudaErrorInvalidConfiguration;
    if (a.T <= 0)
        return cudaSuccess;
    attention_forward_args(c, &a);
    return fn(a);
}

/* The same of a backward call, behind the kernel that fills the scratch. */
template <class F> static cudaError_t with_backward_args(bsk_cuda *cuda, const bsk_call *c, F fn)
{
    attention_args a;
    if (!attention_args_of(c, &a))
        return cudaErrorInvalidConfiguration;
    if (a.T <= 0)
        return cudaSuccess;
    attention_backward_args(c, &a);
    cudaError_t e = bsk_cuda_attention_prepare(cuda, &a, c->dtype);
    return e == cudaSuccess ? fn(a) : e;
}

#endif
