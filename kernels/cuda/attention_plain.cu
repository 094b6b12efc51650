/* SPDX-License-Identifier: Apache-2.0 */
/*
** attention_plain.cu: attention in f32 arithmetic without tensor cores, for f32 operands and for head
** dims that the tensor core kernels lack. A block owns TILE_ROWS rows of the scores (queries; in the
** pass for dk and dv keys) and walks the columns 32 at a time: a lane computes one score, then holds
** every 32nd channel of the sums. dk and dv of a key add the query heads and queries in order.
*/
#include "attention.cuh"
#include "launch.cuh"
#include "warp.cuh"

enum {
    WARPS = 4,
    ROWS = 4, /* of a warp */
    TILE_ROWS = WARPS * ROWS,
    TILE_COLUMNS = 32,
    CHANNELS = BSK_CUDA_MAX_HEAD_DIM / 32 /* of a lane */
};

/* s[r][0..D) = x[row0 + r][0..D) for n rows of leading dimension ld; zeros past `end`. */
template <class T>
static __device__ inline void load_rows(float *s, int stride, const T *x, int64_t ld, int row0, int n,
                                        int end, int D)
{
    for (int i = threadIdx.x; i < n * D; i += WARPS * 32) {
        int r = i / D, c = i % D;
        s[r * stride + c] = row0 + r < end ? to_f32(x[(row0 + r) * ld + c]) : 0.0f;
    }
}

static __device__ inline float dot(const float *a, const float *b, int D)
{
    float sum = 0.0f;
    for (int c = 0; c < D; c++)
        sum += a[c] * b[c];
    return sum;
}

/* acc[c] += sum over columns j of p (of lane j) * b[j][lane + 32c] */
static __device__ inline void add_columns(float (&acc)[CHANNELS], float p, const float *b, int stride,
                                          int D)
{
    int lane = threadIdx.x % 32;
    for (int j = 0; j < TILE_COLUMNS; j++) {
        float pj = __shfl_sync(0xFFFFFFFFu, p, j);
#pragma unroll
        for (int c = 0; c < CHANNELS; c++)
            if (lane + 32 * c < D)
                acc[c] += pj * b[j * stride + lane + 32 * c];
    }
}

template <class T>
static __device__ inline void store_row(T *y, const float (&acc)[CHANNELS], float factor, int D)
{
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int c = 0; c < CHANNELS; c++)
        if (lane + 32 * c < D)
            from_f32(&y[lane + 32 * c], factor * acc[c]);
}

template <class T> static __global__ void __launch_bounds__(WARPS * 32) forward_kernel(attention_args a)
{
    DYNAMIC_SHARED(float, memory);
    int D = a.D, stride = D + 1, h = blockIdx.x, kv = h / (a.H / a.K), lane = threadIdx.x % 32;
    int row0 = blockIdx.y * TILE_ROWS, end = min(row0 + TILE_ROWS, a.T),
        warp_row = threadIdx.x / 32 * ROWS;
    int64_t ldq = (int64_t)a.H * D, ldk = (int64_t)a.K * D;
    const T *k = (const T *)a.k + (int64_t)kv * D, *v = (const T *)a.v + (int64_t)kv * D;
    float *sq = memory, *sk = sq + TILE_ROWS * D, *sv = sk + TILE_COLUMNS * stride;
    float acc[ROWS][CHANNELS] = {{0}}, m[ROWS], sum[ROWS] = {0}, sink = sink_of<T>(a, h);
    int first[ROWS];
    for (int r = 0; r < ROWS; r++) {
        int i = row0 + warp_row + r;
        first[r] = i < end ? first_key(a, i) : INT32_MAX;
        m[r] = sink;
    }
    load_rows(sq, D, (const T *)a.q + (int64_t)h * D, ldq, row0, TILE_ROWS, end, D);
    for (int k0 = first_key(a, row0); k0 < end; k0 += TILE_COLUMNS) {
        __syncthreads(); /* the last tile is used up */
        load_rows(sk, stride, k, ldk, k0, TILE_COLUMNS, end, D);
        load_rows(sv, stride, v, ldk, k0, TILE_COLUMNS, end, D);
        __syncthreads();
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            int i = row0 + warp_row + r, j = k0 + lane;
            float s = a.scale * dot(sq + (warp_row + r) * D, sk + lane * stride, D);
            s = a.cap > 0.0f ? a.cap * tanhf(s / a.cap) : s;
            s = j >= first[r] && j <= i ? s : -INFINITY;
            float max = fmaxf(m[r], warp_max(s)), base = max == -INFINITY ? 0.0f : max;
            float p = expf(s - base), shrink = expf(m[r] - base);
            m[r] = max;
            sum[r] = sum[r] * shrink + warp_sum(p);
#pragma unroll
            for (int c = 0; c < CHANNELS; c++)
                acc[r][c] *= shrink;
            add_columns(acc[r], p, sv, stride, D);
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        int i = row0 + warp_row + r;
        if (i >= end)
            continue;
        sum[r] += expf(sink - m[r]);
        store_row((T *)a.o + i * ldq + (int64_t)h * D, acc[r], 1.0f / sum[r], D);
        if (lane == 0)
            a.lse[(int64_t)i * a.H + h] = m[r] + logf(sum[r]);
    }
}

/* P and dS of one query and key; 0 where the key is not seen. */
static __device__ inline void gradient(const attention_args &a, int h, int i, int j, float qk,
                                       float dov, float *p, float *ds)
{
    bool seen = i < a.T && j < a.T && j <= i && j >= a.first[i];
    float s = a.scale * qk, t = a.cap > 0.0f ? tanhf(s / a.cap) : 0.0f;
    s = a.cap > 0.0f ? a.cap * t : s;
    *p = seen ? expf(s - a.lse_in[(int64_t)i * a.H + h]) : 0.0f;
    *ds = seen ? *p * (dov - a.delta[(int64_t)i * a.H + h]) * (1.0f - t * t) : 0.0f;
}

/* KEYS: rows are keys and columns queries, dk and dv come out; else rows are queries, dq comes out. */
template <class T, bool KEYS>
static __global__ void __launch_bounds__(WARPS * 32) backward_kernel(attention_args a)
{
    DYNAMIC_SHARED(float, memory);
    int D = a.D, stride = D + 1, group = a.H / a.K, lane = threadIdx.x % 32;
    int row0 = blockIdx.y * TILE_ROWS, end = min(row0 + TILE_ROWS, a.T),
        warp_row = threadIdx.x / 32 * ROWS;
    int64_t ldq = (int64_t)a.H * D, ldk = (int64_t)a.K * D;
    int kv = KEYS ? blockIdx.x : blockIdx.x / group, h0 = KEYS ? kv * group : blockIdx.x;
    const T *k = (const T *)a.k + (int64_t)kv * D, *v = (const T *)a.v + (int64_t)kv * D;
    float *row1 = memory, *row2 = row1 + TILE_ROWS * D; /* k, v or q, dO */
    float *column1 = row2 + TILE_ROWS * D,
          *column2 = column1 + TILE_COLUMNS * stride; /* q, dO or k, v */
    float acc1[ROWS][CHANNELS] = {{0}}, acc2[ROWS][CHANNELS] = {{0}};
    int from = KEYS ? row0 : a.first[row0], to = KEYS ? last_query(a, end - 1) : end;
    for (int h = h0; h < h0 + (KEYS ? group : 1); h++) {
        const T *q = (const T *)a.q + (int64_t)h * D, *grad_o = (const T *)a.grad_o + (int64_t)h * D;
        __syncthreads();
        load_rows(row1, D, KEYS ? k : q, KEYS ? ldk : ldq, row0, TILE_ROWS, end, D);
        load_rows(row2, D, KEYS ? v : grad_o, KEYS ? ldk : ldq, row0, TILE_ROWS, end, D);
        for (int c0 = from; c0 < to; c0 += TILE_COLUMNS) {
            __syncthreads();
            load_rows(column1, stride, KEYS ? q : k, KEYS ? ldq : ldk, c0, TILE_COLUMNS, to, D);
            load_rows(column2, stride, KEYS ? grad_o : v, KEYS ? ldq : ldk, c0, TILE_COLUMNS, to, D);
            __syncthreads();
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                int row = row0 + warp_row + r, column = c0 + lane;
                float p, ds;
                float qk = dot(row1 + (warp_row + r) * D, column1 + lane * stride, D);
                float dov = dot(row2 + (warp_row + r) * D, column2 + lane * stride, D);
                gradient(a, h, KEYS ? column : row, KEYS ? row : column, qk, dov, &p, &ds);
                add_columns(acc1[r], ds, column1, stride, D);
                if (KEYS)
                    add_columns(acc2[r], p, column2, stride, D);
            }
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        int64_t i = row0 + warp_row + r;
        if (i >= end)
            continue;
        if (KEYS) {
            store_row((T *)a.dk + i * ldk + (int64_t)kv * D, acc1[r], a.scale, D);
            store_row((T *)a.dv + i * ldk + (int64_t)kv * D, acc2[r], 1.0f, D);
        } else {
            store_row((T *)a.dq + i * ldq + (int64_t)h0 * D, acc1[r], a.scale, D);
        }
    }
}

/* Shared memory of r row tiles and c column tiles. */
static size_t tile_bytes(int D, int r, int c)
{
    return (size_t)(r * TILE_ROWS * D + c * TILE_COLUMNS * (D + 1)) * sizeof(float);
}

static cudaError_t launch(bsk_cuda *cuda, void (*kernel)(attention_args), const attention_args &a,
                          int heads, size_t bytes)
{
    int tiles = (a.T + TILE_ROWS - 1) / TILE_ROWS;
    return issue(cuda, kernel, dim3((unsigned)heads, (unsigned)tiles), WARPS * 32, bytes, a);
}

static cudaError_t check(bsk_cuda *cuda, const bsk_call *c, attention_args *a)
{
    if (c->n[3] <= BSK_CUDA_MAX_HEAD_DIM && c->n[0] <= 65535 * (int64_t)TILE_ROWS &&
        attention_args_of(c, a))
        return cudaSuccess;
    cuda->note = "attention without tensor cores has head dims up to 256 and up to a million tokens";
    return cudaErrorNotSupported;
}

cudaError_t bsk_cuda_attention_plain(bsk_cuda *cuda, const bsk_call *c)
{
    attention_args a;
    cudaError_t e = check(cuda, c, &a);
    if (e != cudaSuccess || a.T <= 0)
        return e;
    attention_forward_args(c, &a);
    return by_type(cuda, c->dtype, [&](auto t) {
        return launch(cuda, forward_kernel<decltype(t)>, a, a.H, tile_bytes(a.D, 1, 2));
    });
}

cudaError_t bsk_cuda_attention_bwd_plain(bsk_cuda *cuda, const bsk_call *c)
{
    attention_args a;
    cudaError_t e = check(cuda, c, &a);
    if (e != cudaSuccess || a.T <= 0)
        return e;
    attention_backward_args(c, &a);
    e = bsk_cuda_attention_prepare(cuda, &a, c->dtype);
    if (e != cudaSuccess)
        return e;
    return by_type(cuda, c->dtype, [&](auto t) {
        using T = decltype(t);
        cudaError_t st = launch(cuda, backward_kernel<T, true>, a, a.K, tile_bytes(a.D, 2, 2));
        return st != cudaSuccess
                   ? st
                   : launch(cuda, backward_kernel<T, false>, a, a.H, tile_bytes(a.D, 2, 2));
    });
}

/* A block sums up one head: threads in f64 over every THREADS-th token, then in the order of the threads. */
template <class T>
static __global__ void __launch_bounds__(WARPS * 32)
    sinks_kernel(const T *o, const T *grad_o, const float *lse, const T *sinks, float *dsinks,
                 int64_t n, int H, int D)
{
    __shared__ double part[WARPS * 32];
    int h = blockIdx.x;
    double sum = 0.0;
    for (int64_t t = threadIdx.x; t < n; t += WARPS * 32) {
        int64_t at = t * H + h;
        float delta = 0.0f;
        for (int c = 0; c < D; c++)
            delta += to_f32(o[at * D + c]) * to_f32(grad_o[at * D + c]);
        sum += (double)(expf(to_f32(sinks[h]) - lse[at]) * delta);
    }
    part[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x > 0)
        return;
    for (int i = 1; i < WARPS * 32; i++)
        sum += part[i];
    dsinks[h] -= (float)sum;
}

cudaError_t bsk_cuda_sinks_bwd(bsk_cuda *cuda, const bsk_call *c)
{
    if (c->n[0] <= 0)
        return cudaSuccess;
    return by_type(cuda, c->dtype, [&](auto t) {
        using T = decltype(t);
        return issue(cuda, sinks_kernel<T>, (unsigned)c->n[1], WARPS * 32, 0, (const T *)c->p[0],
                     (const T *)c->p[1], (const float *)c->p[2], (const T *)c->p[3], (float *)c->p[4],
                     c->n[0], (int)c->n[1], (int)c->n[2]);
    });
}
