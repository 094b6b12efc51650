/* SPDX-License-Identifier: Apache-2.0 */
/*
** norm_rope.cu: RMSNorm over each head, then rotary position embedding (Su et al. 2021), and the backward of
** both, in one pass over q or k. A lane holds pairs of entries that turn together, so neither step leaves its
** registers.
**
** Where all of a head turns, in halves (the kernels halves_*, for the head dims that models have), D/16 lanes
** own a head and a block takes 4096 entries of neighbouring heads: every access is of 16 bytes. In the others,
** for any head, a block owns a token and a warp takes whole heads. A block computes the cosines and sines of
** its tokens once, into shared memory, for all of its heads.
**
** A turn is orthogonal up to `scaling`, so its backward is the turn by the opposite angle times the same.
*/
#include "column_sums.cuh"
#include "row_groups.cuh"
#include "warp.cuh"

enum {
    WARPS = ROW_THREADS / 32,
    MAX_FREQS = BSK_NORM_ROPE_HEAD / 2,
    PAIRS = MAX_FREQS / 32,         /* of a lane at most, */
    REST = BSK_NORM_ROPE_HEAD / 32, /* and its entries that do not turn */
    ENTRIES = 2 * PAIRS + REST
};

template <class T> struct norm_rope_args {
    const T *x, *w, *dy;
    const int32_t *pos; /* [T] */
    const float *freq;  /* [n_freq] */
    const float *rstd_in;
    T *y; /* dx in the backward */
    float *rstd;
    int64_t rows; /* heads of all tokens */
    int H, D, n_freq;
    bool interleaved, add;
    float weight_offset, eps, scaling;
};

/* The frequency of the lane's pair k; its pairs come two neighbours at a time. */
static __device__ inline int pair_of(int k)
{
    return 2 * (threadIdx.x % 32) + 64 * (k / 2) + k % 2;
}

/* Cosine and sine of the block's token at each frequency, for all its threads. */
template <class T> static __device__ inline void angles_of(const norm_rope_args<T> &a, float2 *angle)
{
    float where = (float)a.pos[blockIdx.x];
    for (int j = threadIdx.x; j < a.n_freq; j += ROW_THREADS) {
        float s, c;
        sincosf(where * a.freq[j], &s, &c);
        angle[j] = make_float2(c * a.scaling, s * a.scaling);
    }
    __syncthreads();
}

/* Runs body for entry `at` of the head with its slot in registers e[..]: first and second entries of the
   lane's pairs, then the entries past them, which do not turn. */
#define FOR_ENTRIES(body)                                                                              \
    _Pragma("unroll") for (int k = 0; k < PAIRS; k++)                                                  \
    {                                                                                                  \
        int j = pair_of(k), at = j * step;                                                             \
        if (j < a.n_freq) {                                                                            \
            body(2 * k, at);                                                                           \
            body(2 * k + 1, at + apart);                                                               \
        }                                                                                              \
    }                                                                                                  \
    _Pragma("unroll") for (int k = 0; k < REST; k++)                                                   \
    {                                                                                                  \
        int at = 2 * a.n_freq + lane + 32 * k;                                                         \
        if (at < a.D)                                                                                  \
            body(2 * PAIRS + k, at);                                                                   \
    }

/* e[2k], e[2k+1] turned by the angle of pair k, or back. What does not turn lies behind the pairs. */
template <class T>
static __device__ inline void turn(const norm_rope_args<T> &a, const float2 *angle, bool back,
                                   float (&e)[ENTRIES])
{
#pragma unroll
    for (int k = 0; k < PAIRS; k++) {
        int j = pair_of(k);
        if (j < a.n_freq) {
            float c = angle[j].x, s = back ? -angle[j].y : angle[j].y, u = e[2 * k], v = e[2 * k + 1];
            e[2 * k] = u * c - v * s;
            e[2 * k + 1] = v * c + u * s;
        }
    }
}

/* Any head: a warp goes through the heads of the block's token. Weights and angles are read once for all of them;
   registers that a head has no entry for hold 0 and add nothing to sums. */
template <class T>
static __global__ void __launch_bounds__(ROW_THREADS) forward_kernel(norm_rope_args<T> a)
{
    __shared__ float2 angle[MAX_FREQS];
    int lane = threadIdx.x % 32, step = a.interleaved ? 2 : 1, apart = a.interleaved ? 1 : a.n_freq;
    float weight[ENTRIES] = {0};
    angles_of(a, angle);
#define GET_W(i, at) weight[i] = a.weight_offset + to_f32(a.w[at])
    FOR_ENTRIES(GET_W)
    for (int h = threadIdx.x / 32; h < a.H; h += WARPS) {
        int64_t row = (int64_t)blockIdx.x * a.H + h;
        const T *x = a.x + row * a.D;
        T *y = a.y + row * a.D;
        float e[ENTRIES] = {0}, sum = 0.0f;
#define GET_X(i, at) e[i] = to_f32(x[at])
        FOR_ENTRIES(GET_X)
#pragma unroll
        for (int i = 0; i < ENTRIES; i++)
            sum += e[i] * e[i];
        float r = 1.0f / sqrtf(warp_sum(sum) / (float)a.D + a.eps);
        if (lane == 0)
            a.rstd[row] = r;
#pragma unroll
        for (int i = 0; i < ENTRIES; i++)
            e[i] = e[i] * r * weight[i];
        turn(a, angle, false, e);
#define PUT_Y(i, at) from_f32(&y[at], e[i])
        FOR_ENTRIES(PUT_Y)
    }
}

/* g = dy turned back, times w: dx = rstd * (g - x * rstd^2 * mean(g * x)), as in rmsnorm.cu. dx may be dy: a lane
   writes only what it alone has read. */
template <class T>
static __global__ void __launch_bounds__(ROW_THREADS) backward_kernel(norm_rope_args<T> a)
{
    __shared__ float2 angle[MAX_FREQS];
    int lane = threadIdx.x % 32, step = a.interleaved ? 2 : 1, apart = a.interleaved ? 1 : a.n_freq;
    float weight[ENTRIES] = {0};
    angles_of(a, angle);
    FOR_ENTRIES(GET_W)
    for (int h = threadIdx.x / 32; h < a.H; h += WARPS) {
        int64_t row = (int64_t)blockIdx.x * a.H + h;
        const T *x = a.x + row * a.D, *dy = a.dy + row * a.D;
        T *y = a.y + row * a.D;
        float e[ENTRIES] = {0}, g[ENTRIES] = {0}, sum = 0.0f, r = a.rstd_in[row];
        FOR_ENTRIES(GET_X)
#define GET_DY(i, at) g[i] = to_f32(dy[at])
        FOR_ENTRIES(GET_DY)
        turn(a, angle, true, g);
#pragma unroll
        for (int i = 0; i < ENTRIES; i++) {
            g[i] *= weight[i];
            sum += g[i] * e[i];
        }
        float k = warp_sum(sum) / (float)a.D * r * r;
#pragma unroll
        for (int i = 0; i < ENTRIES; i++)
            e[i] = r * (g[i] - e[i] * k);
#define ADD_Y(i, at) e[i] += to_f32(y[at])
        if (a.add) {
            FOR_ENTRIES(ADD_Y)
        }
        FOR_ENTRIES(PUT_Y)
    }
}

/* ---- heads that turn as a whole, in halves ---- */

/* A lane has the entries [8g, 8g+8) of both halves of its head, g its place among the head's LANES. */
template <int D> struct halves {
    enum { LANES = D / (2 * VEC), HEADS = ROW_THREADS / LANES, FREQS = D / 2 };
};

template <int D, class T>
static __device__ inline void load_head(stored8<T> (&e)[2], const T *head, int64_t row)
{
    const T *p = head + row * D + threadIdx.x % halves<D>::LANES * VEC;
    load_some(e[0], p, VEC, true);
    load_some(e[1], p + D / 2, VEC, true);
}

/* Entry i of a lane: eight of the first half, then eight of the second. */
#define FOR_HEAD(i) _Pragma("unroll") for (int i = 0; i < 2 * VEC; i++)

template <class T> static __device__ inline float entry(const stored8<T> (&e)[2], int i)
{
    return to_f32(e[i / VEC].v[i % VEC]);
}

template <int D, class T>
static __device__ inline void store_head(T *head, int64_t row, const float (&e)[2][VEC])
{
    T *p = head + row * D + threadIdx.x % halves<D>::LANES * VEC;
    store8(p, e[0]);
    store8(p + D / 2, e[1]);
}

/* Cosines and sines of the tokens [token, end), FREQS each, for all threads of the block: its HEADS heads belong to
   at most as many tokens. */
template <int D, class T>
static __device__ inline void angles_of_tokens(const norm_rope_args<T> &a, int64_t token, int64_t end,
                                               float2 *angle)
{
    enum { FREQS = halves<D>::FREQS };
    for (int at = threadIdx.x; at < (end - token) * FREQS; at += ROW_THREADS) {
        float s, c;
        sincosf((float)a.pos[token + at / FREQS] * a.freq[at % FREQS], &s, &c);
        angle[at] = make_float2(c * a.scaling, s * a.scaling);
    }
    __syncthreads();
}

template <int D>
static __device__ inline void turn_head(float (&e)[2][VEC], const float2 *angle, bool back)
{
#pragma unroll
    for (int i = 0; i < VEC; i++) {
        float2 at = angle[threadIdx.x % halves<D>::LANES * VEC + i];
        float c = at.x, s = back ? -at.y : at.y, u = e[0][i], v = e[1][i];
        e[0][i] = u * c - v * s;
        e[1][i] = v * c + u * s;
    }
}

/* The sum of a head's lanes, in all of them. They are neighbours in one warp, so no barrier is needed. */
template <int D> static __device__ inline float head_sum(float sum)
{
#pragma unroll
    for (int d = halves<D>::LANES / 2; d > 0; d /= 2)
        sum += __shfl_xor_sync(0xFFFFFFFFu, sum, d);
    return sum;
}

/* The heads [first, end) of a block, counted through all tokens, and of those the lane's own, or for a lane past
   them the last: it takes part in barriers and sums and writes nothing. */
template <int D> struct place_of_lane {
    int64_t first, end, own, row;

    __device__ explicit place_of_lane(int64_t rows)
    {
        enum { HEADS = halves<D>::HEADS };
        first = (int64_t)blockIdx.x * HEADS;
        end = first + HEADS < rows ? first + HEADS : rows;
        own = first + threadIdx.x / halves<D>::LANES;
        row = own < end ? own : end - 1;
    }
};

/* All loads are issued before the barrier behind the angles, which hides their time. */
template <class T, int D>
static __global__ void __launch_bounds__(ROW_THREADS) halves_forward_kernel(norm_rope_args<T> a)
{
    __shared__ float2 angle[halves<D>::HEADS * halves<D>::FREQS];
    const place_of_lane<D> at(a.rows);
    float y[2][VEC], sum = 0.0f;
    stored8<T> e[2], w[2];
    load_head<D>(e, a.x, at.row);
    load_head<D>(w, a.w, 0);
    angles_of_tokens<D>(a, at.first / a.H, (at.end - 1) / a.H + 1, angle);
    FOR_HEAD(i)
    {
        sum += entry(e, i) * entry(e, i);
    }
    float r = 1.0f / sqrtf(head_sum<D>(sum) / (float)D + a.eps);
    FOR_HEAD(i)
    {
        y[i / VEC][i % VEC] = entry(e, i) * r * (a.weight_offset + entry(w, i));
    }
    turn_head<D>(y, angle + (at.row / a.H - at.first / a.H) * halves<D>::FREQS, false);
    if (at.own >= at.end) /* only here: the lane was needed in barriers and sums */
        return;
    store_head<D>(a.y, at.row, y);
    if (threadIdx.x % halves<D>::LANES == 0)
        a.rstd[at.row] = r;
}

/* As backward_kernel; dx may be dy here too. */
template <class T, int D>
static __global__ void __launch_bounds__(ROW_THREADS) halves_backward_kernel(norm_rope_args<T> a)
{
    __shared__ float2 angle[halves<D>::HEADS * halves<D>::FREQS];
    const place_of_lane<D> at(a.rows);
    float g[2][VEC], sum = 0.0f, r = a.rstd_in[at.row];
    stored8<T> e[2], d[2], w[2], old[2];
    load_head<D>(e, a.x, at.row);
    load_head<D>(d, a.dy, at.row);
    load_head<D>(w, a.w, 0);
    if (a.add)
        load_head<D>(old, a.y, at.row);
    angles_of_tokens<D>(a, at.first / a.H, (at.end - 1) / a.H + 1, angle);
    FOR_HEAD(i)
    {
        g[i / VEC][i % VEC] = entry(d, i);
    }
    turn_head<D>(g, angle + (at.row / a.H - at.first / a.H) * halves<D>::FREQS, true);
    FOR_HEAD(i)
    {
        g[i / VEC][i % VEC] *= a.weight_offset + entry(w, i);
        sum += g[i / VEC][i % VEC] * entry(e, i);
    }
    float k = head_sum<D>(sum) / (float)D * r * r;
    FOR_HEAD(i)
    {
        g[i / VEC][i % VEC] =
            (a.add ? entry(old, i) : 0.0f) + r * (g[i / VEC][i % VEC] - entry(e, i) * k);
    }
    if (at.own < at.end)
        store_head<D>(a.y, at.row, g);
}

template <class T, int D>
static cudaError_t issue_halves(bsk_cuda *cuda, const norm_rope_args<T> &a, bool backward)
{
    int64_t blocks = (a.rows + halves<D>::HEADS - 1) / halves<D>::HEADS;
    if (blocks > INT32_MAX)
        return cudaErrorInvalidConfiguration;
    auto kernel = backward ? halves_backward_kernel<T, D> : halves_forward_kernel<T, D>;
    return issue(cuda, kernel, (unsigned)blocks, ROW_THREADS, 0, a);
}

/* By the call's head: halves where there are kernels for it, else those for any. */
template <class T>
static cudaError_t issue_for_head(bsk_cuda *cuda, const norm_rope_args<T> &a, bool backward)
{
    bool halves = !a.interleaved && a.D == 2 * a.n_freq && aligned16(a.x) && aligned16(a.y) &&
                  aligned16(a.w) && aligned16(a.dy);
    if (halves && a.D == 64)
        return issue_halves<T, 64>(cuda, a, backward);
    if (halves && a.D == 128)
        return issue_halves<T, 128>(cuda, a, backward);
    if (halves && a.D == 256)
        return issue_halves<T, 256>(cuda, a, backward);
    auto kernel = backward ? backward_kernel<T> : forward_kernel<T>;
    return issue(cuda, kernel, (unsigned)(a.rows / a.H), ROW_THREADS, 0, a);
}

/* ---- the weight's gradient ---- */

/* dy turned back * x * rstd, of entry c of head t (heads of all tokens are counted through). The walk down a column
   meets every head with one entry, so each computes its own angle; weights of head norms are seldom trained. */
template <class T> struct dw_term {
    norm_rope_args<T> a;
    __device__ double operator()(int64_t t, int64_t c) const
    {
        const T *dy = a.dy + t * a.D;
        float g = to_f32(dy[c]);
        if (c < 2 * a.n_freq) {
            int64_t j = a.interleaved ? c / 2 : c % a.n_freq;
            bool second = a.interleaved ? c % 2 : c >= a.n_freq;
            int64_t other = a.interleaved ? c ^ 1 : second ? c - a.n_freq : c + a.n_freq;
            float sine, cosine, o = to_f32(dy[other]);
            sincosf((float)a.pos[t / a.H] * a.freq[j], &sine, &cosine);
            g = (g * cosine + (second ? -o : o) * sine) * a.scaling;
        }
        return (double)(g * (to_f32(a.x[t * a.D + c]) * a.rstd_in[t]));
    }
};

/* ---- the launchers ---- */

template <class T> static norm_rope_args<T> args_of(const bsk_call *c)
{
    norm_rope_args<T> a = norm_rope_args<T>();
    a.x = (const T *)c->p[0];
    a.w = (const T *)c->p[1];
    a.pos = (const int32_t *)c->p[2];
    a.freq = (const float *)c->p[3];
    a.rows = c->n[0] * c->n[1];
    a.H = (int)c->n[1];
    a.D = (int)c->n[2];
    a.n_freq = (int)c->n[3];
    a.interleaved = c->n[4] == BSK_ROPE_INTERLEAVED;
    a.weight_offset = c->n[5] ? 1.0f : 0.0f;
    return a;
}

static cudaError_t check(bsk_cuda *cuda, const bsk_call *c)
{
    if (c->n[2] > BSK_NORM_ROPE_HEAD) {
        cuda->note = "norm and rotation of heads of more than 512 entries";
        return cudaErrorNotSupported;
    }
    return c->n[0] > INT32_MAX || c->n[1] * c->n[2] > INT32_MAX ? cudaErrorInvalidConfiguration
                                                                : cudaSuccess;
}

cudaError_t bsk_cuda_norm_rope(bsk_cuda *cuda, const bsk_call *c)
{
    cudaError_t e = check(cuda, c);
    if (e != cudaSuccess || c->n[0] <= 0)
        return e;
    return by_type(cuda, c->dtype, [&](auto tag) {
        using T = decltype(tag);
        norm_rope_args<T> a = args_of<T>(c);
        a.y = (T *)c->p[4];
        a.rstd = (float *)c->p[5];
        a.eps = (float)c->f[0];
        a.scaling = (float)c->f[1];
        return issue_for_head(cuda, a, false);
    });
}

cudaError_t bsk_cuda_norm_rope_bwd(bsk_cuda *cuda, const bsk_call *c)
{
    cudaError_t e = check(cuda, c);
    if (e != cudaSuccess || c->n[0] <= 0)
        return e;
    return by_type(cuda, c->dtype, [&](auto tag) {
        using T = decltype(tag);
        norm_rope_args<T> a = args_of<T>(c);
        a.rstd_in = (const float *)c->p[4];
        a.dy = (const T *)c->p[5];
        a.y = (T *)c->p[6];
        a.add = c->n[6] != 0;
        a.scaling = (float)c->f[0];
        /* the weight's gradient reads dy, and dx may be written over it */
        cudaError_t st = column_sums(cuda, dw_term<T>{a}, c->p[7], c->n[0] * a.H, a.D);
        if (st != cudaSuccess)
            return st;
        return issue_for_head(cuda, a, true);
    });
}
