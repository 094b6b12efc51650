/* SPDX-License-Identifier: Apache-2.0 */
/*
** rope.cu: rotary position embedding (Su et al. 2021). A block owns a token: the cosines and sines of
** its angles are computed once into shared memory and serve all heads. Entries past 2 * n_freq pass
** through. A thread turns whole pairs, so y may be x.
*/
#include "row_groups.cuh"

enum { FREQS = 256 }; /* pairs of a head at most: head dims up to 512 */

struct rope_args {
    const int32_t *pos; /* [T] */
    const float *freq;  /* [n_freq] */
    int H, D, n_freq;
    bool interleaved, inverse;
    float scaling;
};

/* 8 pairs at a time: of halves that lie apart, or of 16 neighbours. */
template <class T>
static __device__ inline void turn8(const T *x, T *y, const rope_args &a, const float2 *angle, int j)
{
    float u[VEC], v[VEC], p[VEC], q[VEC];
    int at = a.interleaved ? 2 * j : j, apart = a.interleaved ? VEC : a.n_freq;
    load8(u, x + at);
    load8(v, x + at + apart);
#pragma unroll
    for (int i = 0; i < VEC; i++) {
        float2 cs = angle[j + i];
        float first, second;
        if (a.interleaved) {
            first = i < VEC / 2 ? u[(2 * i) % VEC] : v[(2 * i) % VEC];
            second = i < VEC / 2 ? u[(2 * i + 1) % VEC] : v[(2 * i + 1) % VEC];
        } else {
            first = u[i];
            second = v[i];
        }
        p[i] = first * cs.x - second * cs.y;
        q[i] = second * cs.x + first * cs.y;
    }
    if (a.interleaved) {
#pragma unroll
        for (int i = 0; i < VEC; i++) {
            u[i] = i % 2 ? q[i / 2] : p[i / 2];
            v[i] = i % 2 ? q[VEC / 2 + i / 2] : p[VEC / 2 + i / 2];
        }
        store8(y + at, u);
        store8(y + at + apart, v);
    } else {
        store8(y + at, p);
        store8(y + at + apart, q);
    }
}

template <class T>
static __global__ void __launch_bounds__(ROW_THREADS)
    rope_kernel(const T *x, T *y, rope_args a, bool wide)
{
    __shared__ float2 angle[FREQS]; /* cos, sin */
    int64_t t = blockIdx.x;
    float where = (float)a.pos[t];
    x += t * a.H * a.D;
    y += t * a.H * a.D;
    for (int j = threadIdx.x; j < a.n_freq; j += ROW_THREADS) {
        float s, c;
        sincosf(where * a.freq[j], &s, &c);
        angle[j] = make_float2(c * a.scaling, (a.inverse ? -s : s) * a.scaling);
    }
    __syncthreads();
    if (wide) {
        int units = a.n_freq / VEC;
        for (int i = threadIdx.x; i < a.H * units; i += ROW_THREADS)
            turn8(x + i / units * a.D, y + i / units * a.D, a, angle, i % units * VEC);
    } else {
        int step = a.interleaved ? 2 : 1, apart = a.interleaved ? 1 : a.n_freq;
        for (int i = threadIdx.x; i < a.H * a.n_freq; i += ROW_THREADS) {
            int j = i % a.n_freq, at = i / a.n_freq * a.D + j * step;
            float u = to_f32(x[at]), v = to_f32(x[at + apart]);
            from_f32(&y[at], u * angle[j].x - v * angle[j].y);
            from_f32(&y[at + apart], v * angle[j].x + u * angle[j].y);
        }
    }
    int rest = x == y ? 0 : a.D - 2 * a.n_freq;
    for (int i = threadIdx.x; i < a.H * rest; i += ROW_THREADS) {
        int at = i / rest * a.D + 2 * a.n_freq + i % rest;
        y[at] = x[at];
    }
}

cudaError_t bsk_cuda_rope(bsk_cuda *cuda, const bsk_call *c)
{
    const int64_t *n = c->n;
    if (n[0] <= 0 || n[1] * n[2] <= 0)
        return cudaSuccess;
    if (n[3] > FREQS) {
        cuda->note = "rotary embedding of more than 256 frequencies";
        return cudaErrorNotSupported;
    }
    if (n[0] > INT32_MAX || n[1] * n[2] > INT32_MAX)
        return cudaErrorInvalidConfiguration;
    rope_args a = {(const int32_t *)c->p[1],
                   (const float *)c->p[2],
                   (int)n[1],
                   (int)n[2],
                   (int)n[3],
                   n[4] == BSK_ROPE_INTERLEAVED,
                   n[5] != 0,
                   (float)c->f[0]};
    bool wide = n[3] % VEC == 0 && rows_wide(n[2], c->p[0], c->p[3]);
    return by_type(cuda, c->dtype, [&](auto t) {
        using T = decltype(t);
        return issue(cuda, rope_kernel<T>, (unsigned)n[0], ROW_THREADS, 0, (const T *)c->p[0],
                     (T *)c->p[3], a, wide);
    });
}
