/* SPDX-License-Identifier: Apache-2.0 */
/*
** attention_mma_fwd.cu: attention on tensor cores (Dao et al. 2022, 2023), bf16 operands, f32 sums. A
** block of 4 warps owns ROWS queries of one head and walks the keys in tiles of COLUMNS with a running
** maximum and sum (Milakov & Gimelshein 2018). A warp owns 16 * STACK queries: its scores turn into the
** operand of the second product in registers. While scores are computed the tile of v is on its way,
** while values are added up the next tile of k.
*/
#include "attention.cuh"
#include "launch.cuh"
#include "mma.cuh"

/* STACK: an operand of k or v, once read from shared memory, serves so many products; two are what the registers
   hold beside the output up to D = 128. With D = 256 the output alone takes 128 registers, and the
   narrower tile of keys keeps a block's memory where it is with D = 128, at 68 KiB. */
template <int D> struct shape {
    enum {
        STACK = D <= 128 ? 2 : 1,
        ROWS = 64 * STACK,
        COLUMNS = D <= 128 ? 64 : 32,
        STRIDE = D + PAD,
        BYTES = (ROWS + 2 * COLUMNS) * STRIDE * (int)sizeof(bf16)
    };
};

/* s = q k^T for the warp's queries. Rows of sk are keys, the columns of B: at_columns. */
template <int D, int STACK, int COLUMNS>
static __device__ inline void scores(float (&s)[STACK][COLUMNS / 8][4], const bf16 *sq, const bf16 *sk)
{
    enum { STRIDE = D + PAD };
    int lane = threadIdx.x % 32;
    const bf16 *qa = sq + at_rows(lane, STRIDE), *kb = sk + at_columns(lane, STRIDE);
#pragma unroll
    for (int m = 0; m < STACK; m++)
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                s[m][n][i] = 0.0f;
#pragma unroll
    for (int d = 0; d < D; d += 16) {
        uint32_t a[STACK][4];
#pragma unroll
        for (int m = 0; m < STACK; m++)
            ldmatrix(a[m], qa + m * 16 * STRIDE + d);
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; n += 2) {
            uint32_t b[4];
            ldmatrix(b, kb + n * 8 * STRIDE + d);
#pragma unroll
            for (int m = 0; m < STACK; m++) {
                mma(s[m][n], a[m], b[0], b[1]);
                mma(s[m][n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

/* o += p v, p being scores after softmax, rounded to bf16 here. Rows of sv are those of B: at_rows, transposed. */
template <int D, int STACK, int COLUMNS>
static __device__ inline void add_values(float (&o)[STACK][D / 8][4],
                                         const float (&p)[STACK][COLUMNS / 8][4], const bf16 *sv)
{
    enum { STRIDE = D + PAD };
    const bf16 *vb = sv + at_rows(threadIdx.x % 32, STRIDE);
#pragma unroll
    for (int k = 0; k < COLUMNS / 16; k++) {
        uint32_t a[STACK][4];
#pragma unroll
        for (int m = 0; m < STACK; m++) {
            a[m][0] = pack(p[m][2 * k][0], p[m][2 * k][1]);
            a[m][1] = pack(p[m][2 * k][2], p[m][2 * k][3]);
            a[m][2] = pack(p[m][2 * k + 1][0], p[m][2 * k + 1][1]);
            a[m][3] = pack(p[m][2 * k + 1][2], p[m][2 * k + 1][3]);
        }
#pragma unroll
        for (int n = 0; n < D / 8; n += 2) {
            uint32_t b[4];
            ldmatrix_trans(b, vb + k * 16 * STRIDE + n * 8);
#pragma unroll
            for (int m = 0; m < STACK; m++) {
                mma(o[m][n], a[m], b[0], b[1]);
                mma(o[m][n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

/* The running softmax of one row of a warp: halves `half` of the tiles s[..], o[..]. `power` scales a
   score to an exponent of two. max, sum: of the row; sum is of this lane's columns only, since sums
   of lanes are wanted once at the end, whereas every tile needs the maximum of all four. */
template <int NT, int OT>
static __device__ inline void softmax_row(float (&s)[NT][4], float (&o)[OT][4], int half, float power,
                                          float &max, float &sum)
{
    float old = max, now = old;
#pragma unroll
    for (int n = 0; n < NT; n++)
        now = fmaxf(now, fmaxf(s[n][half], s[n][half + 1]));
    now = fmaxf(now, __shfl_xor_sync(0xFFFFFFFFu, now, 1));
    now = fmaxf(now, __shfl_xor_sync(0xFFFFFFFFu, now, 2));
    /* while a row has seen no key, -inf - -inf would be NaN; from base 0 its powers are 0 */
    float base = now == -INFINITY ? 0.0f : now * power, shrink = exp2_fast(old * power - base);
    max = now;
    sum *= shrink;
#pragma unroll
    for (int n = 0; n < NT; n++) {
        s[n][half] = exp2_fast(s[n][half] * power - base);
        s[n][half + 1] = exp2_fast(s[n][half + 1] * power - base);
        sum += s[n][half] + s[n][half + 1];
    }
    /* after the first tiles maxima rarely grow: the whole warp then skips a pass over its output */
    if (__any_sync(0xFFFFFFFFu, shrink != 1.0f)) {
#pragma unroll
        for (int n = 0; n < OT; n++) {
            o[n][half] *= shrink;
            o[n][half + 1] *= shrink;
        }
    }
}

/* A block is a head and a tile of queries. Heads are the grid's fast dimension: those that share k and v run at the
   same time and find them in the L2 cache. Of every tile of keys, with the barriers 1 and 2 of the loop:

       1 | v starts | scores of k | 2 | next k starts | softmax | o += p v |

   Each copy has about a product's time to land before its barrier. */
template <int D, int SCORE>
static __global__ void __launch_bounds__(MMA_THREADS) forward_kernel(attention_args a)
{
    using S = shape<D>;
    constexpr int STACK = S::STACK, ROWS = S::ROWS, COLUMNS = S::COLUMNS, STRIDE = S::STRIDE,
                  NT = COLUMNS / 8;
    extern __shared__ __align__(16) bf16 memory[];
    bf16 *sq = memory, *sk = sq + ROWS * STRIDE, *sv = sk + COLUMNS * STRIDE;
    int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16 * STACK;
    int h = blockIdx.x, kv = h / (a.H / a.K),
        row0 = (gridDim.y - 1 - blockIdx.y) * ROWS; /* the longest first */
    int end = min(row0 + ROWS, a.T);
    int64_t ldq = (int64_t)a.H * D, ldk = (int64_t)a.K * D;
    const bf16 *k = (const bf16 *)a.k + (int64_t)kv * D, *v = (const bf16 *)a.v + (int64_t)kv * D;
    /* no query of the block sees a key below k0; every query's keys begin at last_first at the latest */
    int k0 = first_key(a, row0), last_first = first_key(a, end - 1);

    load_tile<ROWS, D>(sq, (const bf16 *)a.q + (int64_t)h * D, ldq, row0, end);
    load_tile<COLUMNS, D>(sk, k, ldk, k0, end);
    cp_commit();

    const float power = SCORE == SCORE_PLAIN ? a.scale * LOG2E : 1.0f,
                sink = LOG2E * sink_of<bf16>(a, h);
    /* [2]: of the rows lane/4 and lane/4+8 of 16 */
    float o[STACK][D / 8][4] = {}, max[STACK][2], sum[STACK][2] = {};
    int first[STACK][2];
#pragma unroll
    for (int m = 0; m < STACK; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int i = row0 + warp_row + 16 * m + 8 * half + lane / 4;
            first[m][half] = i < end ? first_key(a, i) : INT32_MAX;
            max[m][half] = sink / power; /* of products, as all maxima are */
        }
    for (; k0 < end; k0 += COLUMNS) {
        float s[STACK][NT][4];
        cp_wait<0>();
        __syncthreads(); /* k is there, and everyone is done with the v before, which is overwritten next */
        load_tile<COLUMNS, D>(sv, v, ldk, k0, end);
        cp_commit();
        scores<D, STACK, COLUMNS>(s, sq + warp_row * STRIDE, sk);
        cp_wait<0>();
        __syncthreads(); /* v is there, and everyone is done with k, which is overwritten next */
        if (k0 + COLUMNS < end)
            load_tile<COLUMNS, D>(sk, k, ldk, k0 + COLUMNS, end);
        cp_commit();
        bool whole = k0 >= last_first && k0 + COLUMNS - 1 <= row0; /* every query sees every key */
#pragma unroll
        for (int m = 0; m < STACK; m++) {
            if (SCORE == SCORE_GENERAL)
                general_scores(a, s[m]);
            if (!whole)
                hide_keys(s[m], first[m], row0 + warp_row + 16 * m, k0);
            softmax_row(s[m], o[m], 0, power, max[m][0], sum[m][0]);
            softmax_row(s[m], o[m], 2, power, max[m][1], sum[m][1]);
        }
        add_values<D, STACK, COLUMNS>(o, s, sv);
    }
#pragma unroll
    for (int m = 0; m < STACK; m++) {
        int i = row0 + warp_row + 16 * m;
        float inv[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float total = total_of_row(sum[m][half], max[m][half] * power, sink);
            inv[half] = 1.0f / total;
            int row = i + 8 * half + lane / 4;
            if (lane % 4 == 0 && row < end)
                a.lse[(int64_t)row * a.H + h] = LN2 * (max[m][half] * power + log2f(total));
        }
        /* the warp alone reads its rows of sq, and it is done with them */
        store_rows<D>((bf16 *)a.o + (int64_t)h * D, ldq, i, end, sq + (warp_row + 16 * m) * STRIDE,
                      o[m], inv[0], inv[1]);
    }
}

template <int D> static cudaError_t launch(bsk_cuda *cuda, const attention_args &a)
{
    using S = shape<D>;
    auto kernel =
        has_general_scores(a) ? forward_kernel<D, SCORE_GENERAL> : forward_kernel<D, SCORE_PLAIN>;
    int tiles = (a.T + S::ROWS - 1) / S::ROWS;
    if (tiles > 65535) /* the y of a grid */
        return cudaErrorInvalidConfiguration;
    return issue(cuda, kernel, dim3((unsigned)a.H, (unsigned)tiles), MMA_THREADS, S::BYTES, a);
}

bool bsk_cuda_attention_tiled(int64_t D)
{
    return D == 64 || D == 80 || D == 96 || D == 128 || D == 256;
}

cudaError_t bsk_cuda_attention_mma(bsk_cuda *cuda, const bsk_call *c)
{
    return with_forward_args(c, [&](const attention_args &a) {
        return by_head_dim(a.D, [&](auto D) { return launch<decltype(D)::value>(cuda, a); });
    });
}
