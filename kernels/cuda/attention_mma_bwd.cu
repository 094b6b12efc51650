/* SPDX-License-Identifier: Apache-2.0 */
/*
** attention_mma_bwd.cu: the gradient of attention on tensor cores (Dao et al. 2022, 2023): one pass over key
** tiles gives dk and dv, one over query tiles dq. Both compute P = e^(s - lse) and dS = P (dP - delta)
** again, with dP = dO v^T and delta = rowsum(dO O), which equals rowsum(P dP). One pass for all three
** would take five products a tile in place of seven, but would have to add dq into memory from many
** blocks: with atomics, whose order differs from run to run.
**
** A pass is the same kernel with the roles changed. Its block owns ROWS rows of a score tile, 16 a
** warp: keys (operands k, v) or queries (q, dO). It streams tiles of columns (q, dO or k, v), computes
** scores and dP in registers, rounds them to operands in place and adds dS times the first streamed
** operand (dk or dq) and, for keys, P times the second (dv). The query heads of a key head and the
** columns come in order.
*/
#include "attention.cuh"
#include "launch.cuh"
#include "mma.cuh"

/* SUMS of a pass: what it accumulates, dS times the first operand or P times the second. */
enum { SUM_FIRST = 1, SUM_SECOND = 2 };

/* The first operand is in use from the scores at a step's beginning to the sum at its end, so its successor needs a
   second tile to come to in the meantime. The second is done with earlier, and one tile serves. With D = 256 memory
   has no room for that. Memory: tiles, then three arrays of what a streamed query's scores need. */
template <int D> struct shape {
    enum {
        ROWS = 64,
        COLUMNS = D <= 128 ? 64 : 16,
        STAGES = D <= 128 ? 2 : 1, /* of the first streamed operand */
        STRIDE = D + PAD,
        TILES = (2 * ROWS + (STAGES + 1) * COLUMNS) * STRIDE,
        BYTES = TILES * (int)sizeof(bf16) + STAGES * 3 * COLUMNS * (int)sizeof(float)
    };
};

/* ---- products ---- */

/* s = rows times columns^T, both with D elements a row: a score tile or dP */
template <int D, int COLUMNS>
static __device__ inline void product(float (&s)[COLUMNS / 8][4], const bf16 *rows, const bf16 *columns)
{
    enum { STRIDE = D + PAD };
    int lane = threadIdx.x % 32;
    const bf16 *ra = rows + at_rows(lane, STRIDE), *cb = columns + at_columns(lane, STRIDE);
#pragma unroll
    for (int n = 0; n < COLUMNS / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            s[n][i] = 0.0f;
#pragma unroll
    for (int d = 0; d < D; d += 16) {
        uint32_t a[4];
        ldmatrix(a, ra + d);
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; n += 2) {
            uint32_t b[4];
            ldmatrix(b, cb + n * 8 * STRIDE + d);
            mma(s[n], a, b[0], b[1]);
            mma(s[n + 1], a, b[2], b[3]);
        }
    }
}

/* sum += p columns, p rounded to operands: dk and dv of the block's keys, or dq of its queries */
template <int D, int COLUMNS>
static __device__ inline void accumulate(float (&sum)[D / 8][4], const uint32_t (&p)[COLUMNS / 16][4],
                                         const bf16 *columns)
{
    enum { STRIDE = D + PAD };
    const bf16 *cb = columns + at_rows(threadIdx.x % 32, STRIDE);
#pragma unroll
    for (int k = 0; k < COLUMNS / 16; k++)
#pragma unroll
        for (int n = 0; n < D / 8; n += 2) {
            uint32_t b[4];
            ldmatrix_trans(b, cb + k * 16 * STRIDE + n * 8);
            mma(sum[n], p[k], b[0], b[1]);
            mma(sum[n + 1], p[k], b[2], b[3]);
        }
}

/* ---- a block's part ---- */

/* Rows [row0, end), of the key head kv or the query head h0, and columns [from, to), of the key head kv or the
   query heads from h0 on. Each head has per_head tiles of columns; the pass takes one a step. k and v point at
   the head, q and grad_o at the first of all heads. */
struct block_part {
    int row0, end, from, to, h0, kv, per_head, steps;
    int64_t ld_row, ld_column;
    const bf16 *k, *v, *q, *grad_o;
};

template <int D, bool KEYS> static __device__ inline block_part my_part(const attention_args &a)
{
    using S = shape<D>;
    block_part part;
    int group = a.H / a.K;
    int tile = KEYS ? blockIdx.y : gridDim.y - 1 - blockIdx.y; /* the longest first */
    part.row0 = tile * S::ROWS;
    part.end = min(part.row0 + S::ROWS, a.T);
    part.kv = KEYS ? blockIdx.x : blockIdx.x / group;
    part.h0 = KEYS ? part.kv * group : blockIdx.x;
    int64_t ldq = (int64_t)a.H * D, ldk = (int64_t)a.K * D;
    part.ld_row = KEYS ? ldk : ldq;
    part.ld_column = KEYS ? ldq : ldk;
    part.k = (const bf16 *)a.k + (int64_t)part.kv * D;
    part.v = (const bf16 *)a.v + (int64_t)part.kv * D;
    part.q = (const bf16 *)a.q;
    part.grad_o = (const bf16 *)a.grad_o;
    part.from = KEYS ? part.row0 : a.first[part.row0];
    part.to = KEYS ? last_query(a, part.end - 1) : part.end;
    part.per_head = (part.to - part.from + S::COLUMNS - 1) / S::COLUMNS;
    part.steps = part.per_head * (KEYS ? group : 1);
    return part;
}

/* The first column of a step, and its query head. */
template <int D> static __device__ inline int column_of(const block_part &part, int step)
{
    return part.from + step % part.per_head * shape<D>::COLUMNS;
}

static __device__ inline int head_of(const block_part &part, int step)
{
    return part.h0 + step / part.per_head;
}

/* ---- tiles in shared memory ---- */

/* The tiles of rows; the streamed ones, STAGES of the first operand; what a score needs of a streamed query. */
template <int D> struct shared_memory {
    using S = shape<D>;
    bf16 *row1, *row2, *column2, *column1;
    float *lse, *delta;
    int *first;

    __device__ explicit shared_memory(bf16 *memory)
    {
        row1 = memory;
        row2 = row1 + S::ROWS * S::STRIDE;
        column2 = row2 + S::ROWS * S::STRIDE;
        column1 = column2 + S::COLUMNS * S::STRIDE;
        lse = (float *)(memory + S::TILES);
        delta = lse + S::STAGES * S::COLUMNS;
        first = (int *)(delta + S::STAGES * S::COLUMNS);
    }
};

template <int D, bool KEYS>
static __device__ inline void load_rows(const shared_memory<D> &shared, const block_part &part)
{
    constexpr int ROWS = shape<D>::ROWS;
    load_tile<ROWS, D>(shared.row1, KEYS ? part.k : part.q + (int64_t)part.h0 * D, part.ld_row,
                       part.row0, part.end);
    load_tile<ROWS, D>(shared.row2, KEYS ? part.v : part.grad_o + (int64_t)part.h0 * D, part.ld_row,
                       part.row0, part.end);
}

template <int D, bool KEYS>
static __device__ inline void load_first(const shared_memory<D> &shared, const attention_args &a,
                                         const block_part &part, int step)
{
    constexpr int COLUMNS = shape<D>::COLUMNS, STAGES = shape<D>::STAGES, STRIDE = shape<D>::STRIDE;
    int h = head_of(part, step), c0 = column_of<D>(part, step), stage = step % STAGES;
    load_tile<COLUMNS, D>(shared.column1 + stage * COLUMNS * STRIDE,
                          KEYS ? part.q + (int64_t)h * D : part.k, part.ld_column, c0, part.to);
    if (KEYS)
        for (int i = threadIdx.x; i < COLUMNS; i += MMA_THREADS) {
            /* past the end the values of any query: hide_unseen leaves nothing of it */
            int64_t c = c0 + i < part.to ? c0 + i : c0;
            cp_async(&shared.lse[stage * COLUMNS + i], &a.lse_in[c * a.H + h], 4, true);
            cp_async(&shared.delta[stage * COLUMNS + i], &a.delta[c * a.H + h], 4, true);
            cp_async(&shared.first[stage * COLUMNS + i], &a.first[c], 4, true);
        }
}

template <int D, bool KEYS>
static __device__ inline void load_second(const shared_memory<D> &shared, const block_part &part,
                                          int step)
{
    load_tile<shape<D>::COLUMNS, D>(shared.column2,
                                    KEYS ? part.grad_o + (int64_t)head_of(part, step) * D : part.v,
                                    part.ld_column, column_of<D>(part, step), part.to);
}

/* ---- scores and their gradient ---- */

/* Of a query: what a score needs. In registers where rows are queries, else in shared memory as three arrays. */
struct query {
    float lse2, delta; /* lse in powers of two */
    int first;
};

/* The two queries of a thread's rows. A row past the end sees no key. */
static __device__ inline void load_queries(query (&row_queries)[2], const attention_args &a,
                                           const block_part &part, int warp_row, int lane)
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int i = part.row0 + warp_row + 8 * half + lane / 4;
        bool there = i < part.end;
        row_queries[half].lse2 = there ? LOG2E * a.lse_in[(int64_t)i * a.H + part.h0] : 0.0f;
        row_queries[half].delta = there ? a.delta[(int64_t)i * a.H + part.h0] : 0.0f;
        row_queries[half].first = there ? a.first[i] : INT32_MAX;
    }
}

/* The query of element e of score tile n. */
template <int D, bool KEYS>
static __device__ inline query query_of(const shared_memory<D> &shared, const query (&row_queries)[2],
                                        int stage, int lane, int n, int e)
{
    if (!KEYS)
        return row_queries[e / 2];
    int i = stage * shape<D>::COLUMNS + n * 8 + lane % 4 * 2 + e % 2;
    return query{LOG2E * shared.lse[i], shared.delta[i], shared.first[i]};
}

/* Keys that a query does not see, in the columns from c0 on, to -inf. */
template <int D, bool KEYS, int NT>
static __device__ inline void hide_unseen(float (&s)[NT][4], const shared_memory<D> &shared,
                                          const block_part &part, const query (&row_queries)[2],
                                          int stage, int warp_row, int lane, int c0)
{
    int end = part.end;
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            int row = part.row0 + warp_row + 8 * (e / 2) + lane / 4;
            int column = c0 + n * 8 + lane % 4 * 2 + e % 2;
            int key = KEYS ? row : column, i = KEYS ? column : row;
            if (key > i || key < query_of<D, KEYS>(shared, row_queries, stage, lane, n, e).first ||
                i >= (KEYS ? part.to : end))
                s[n][e] = -INFINITY;
        }
}

/* A score (times power: an exponent of two) to P, and dP to dS without the scale, which the sum is multiplied by
   once. lse makes P exact: no running maximum is needed here, and a hidden key's -inf gives 0. */
template <int SCORE>
static __device__ inline void gradient(const attention_args &a, float power, const query &q, float &s,
                                       float &dp)
{
    float p = exp2_fast(s * power - q.lse2);
    dp = p * (dp - q.delta);
    if (SCORE == SCORE_GENERAL && a.cap > 0.0f) {
        /* s is LOG2E cap tanh(x / cap), whose slope is 1 - tanh^2; of a hidden key, -inf, it is not a number */
        float tanh = s / (a.cap * LOG2E);
        dp = p == 0.0f ? 0.0f : dp * (1.0f - tanh * tanh);
    }
    s = p;
}

/* Scores to P and dP to dS, tiles of both. */
template <int D, bool KEYS, int SCORE, int NT>
static __device__ inline void gradients(float (&s)[NT][4], float (&dp)[NT][4],
                                        const shared_memory<D> &shared, const attention_args &a,
                                        const query (&row_queries)[2], int stage, int lane, float power)
{
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            gradient<SCORE>(a, power, query_of<D, KEYS>(shared, row_queries, stage, lane, n, e),
                            s[n][e], dp[n][e]);
}

/* ---- the pass ---- */

template <int D, bool KEYS, int SUMS>
static __device__ inline void store_sums(const shared_memory<D> &shared, const attention_args &a,
                                         const block_part &part, int warp_row,
                                         const float (&sum1)[D / 8][4], const float (&sum2)[D / 8][4])
{
    constexpr int STRIDE = shape<D>::STRIDE;
    bf16 *to1 = KEYS ? (bf16 *)a.dk + (int64_t)part.kv * D : (bf16 *)a.dq + (int64_t)part.h0 * D;
    /* the warp alone reads its rows of both row tiles, and it is done with them */
    if (SUMS & SUM_FIRST)
        store_rows<D>(to1, part.ld_row, part.row0 + warp_row, part.end, shared.row1 + warp_row * STRIDE,
                      sum1, a.scale, a.scale);
    if (SUMS & SUM_SECOND)
        store_rows<D>((bf16 *)a.dv + (int64_t)part.kv * D, part.ld_row, part.row0 + warp_row, part.end,
                      shared.row2 + warp_row * STRIDE, sum2, 1.0f, 1.0f);
}

/* Of every tile of columns, where the first operand has two tiles (1, 2, 3: barriers):

       1 | scores | 2 | next first starts | dP, P, dS, sum2 | 3 | next second starts | sum1 |

   and where it has one, both start behind a barrier at the end. */
template <int D, bool KEYS, int SUMS, int SCORE>
static __global__ void __launch_bounds__(MMA_THREADS) backward_kernel(attention_args a)
{
    using S = shape<D>;
    constexpr int ROWS = S::ROWS, COLUMNS = S::COLUMNS, STAGES = S::STAGES, STRIDE = S::STRIDE,
                  NT = COLUMNS / 8;
    extern __shared__ __align__(16) bf16 memory[];
    const shared_memory<D> shared(memory);
    int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16;
    const block_part part = my_part<D, KEYS>(a);
    int row0 = part.row0, end = part.end;

    /* two groups of copies in every step, the first operand's and then the second's */
    load_rows<D, KEYS>(shared, part);
    load_first<D, KEYS>(shared, a, part, 0);
    cp_commit();
    load_second<D, KEYS>(shared, part, 0);
    cp_commit();

    query row_queries[2] = {};
    if (!KEYS)
        load_queries(row_queries, a, part, warp_row, lane);
    const float power = SCORE == SCORE_PLAIN ? a.scale * LOG2E : 1.0f;
    float sum1[D / 8][4] = {}, sum2[D / 8][4] = {};
    for (int step = 0; step < part.steps; step++) {
        int c0 = column_of<D>(part, step), stage = step % STAGES;
        int last_first = a.first[KEYS ? min(c0 + COLUMNS, part.to) - 1 : part.end - 1];
        const bf16 *first_tile = shared.column1 + stage * COLUMNS * STRIDE;
        float s[NT][4], dp[NT][4];
        uint32_t operand[COLUMNS / 16][4];
        cp_wait<1>();
        /* the first operand is there, and everyone is done with the step before, whose tile of it is filled next */
        __syncthreads();
        product<D, COLUMNS>(s, shared.row1 + warp_row * STRIDE, first_tile);
        cp_wait<0>();
        __syncthreads(); /* the second operand is there */
        if (STAGES == 2) {
            if (step + 1 < part.steps)
                load_first<D, KEYS>(shared, a, part, step + 1);
            cp_commit();
        }
        product<D, COLUMNS>(dp, shared.row2 + warp_row * STRIDE, shared.column2);
        /* every query of the rows and columns sees every key of them */
        bool whole = KEYS ? c0 >= row0 + ROWS - 1 && c0 + COLUMNS <= part.to && row0 + ROWS <= end &&
                                last_first <= row0
                          : c0 + COLUMNS - 1 <= row0 && last_first <= c0 && row0 + ROWS <= end;

        if (SCORE == SCORE_GENERAL)
            general_scores(a, s);
        if (!whole)
            hide_unseen<D, KEYS>(s, shared, part, row_queries, stage, warp_row, lane, c0);
        gradients<D, KEYS, SCORE>(s, dp, shared, a, row_queries, stage, lane, power);
        if (SUMS & SUM_SECOND) {
            round_operand(operand, s);
            accumulate<D, COLUMNS>(sum2, operand, shared.column2);
        }
        if (STAGES == 2) {
            __syncthreads(); /* everyone is done with the second operand, which is overwritten */
            if (step + 1 < part.steps)
                load_second<D, KEYS>(shared, part, step + 1);
            cp_commit();
        }
        if (SUMS & SUM_FIRST) {
            round_operand(operand, dp);
            accumulate<D, COLUMNS>(sum1, operand, first_tile);
        }
        if (STAGES == 1) {
            __syncthreads(); /* everyone is done with both */
            if (step + 1 < part.steps)
                load_first<D, KEYS>(shared, a, part, step + 1);
            cp_commit();
            if (step + 1 < part.steps)
                load_second<D, KEYS>(shared, part, step + 1);
            cp_commit();
        }
    }
    store_sums<D, KEYS, SUMS>(shared, a, part, warp_row, sum1, sum2);
}

template <int D, bool KEYS, int SUMS> static cudaError_t pass(bsk_cuda *cuda, const attention_args &a)
{
    using S = shape<D>;
    auto kernel = has_general_scores(a) ? backward_kernel<D, KEYS, SUMS, SCORE_GENERAL>
                                        : backward_kernel<D, KEYS, SUMS, SCORE_PLAIN>;
    int tiles = (a.T + S::ROWS - 1) / S::ROWS;
    if (tiles > 65535) /* the y of a grid */
        return cudaErrorInvalidConfiguration;
    return issue(cuda, kernel, dim3((unsigned)(KEYS ? a.K : a.H), (unsigned)tiles), MMA_THREADS,
                 S::BYTES, a);
}

/* Two sums of a head dim above 128 are more than the registers hold: dk and dv take a pass each. */
template <int D> static cudaError_t backward(bsk_cuda *cuda, const attention_args &a)
{
    cudaError_t e;
    if constexpr (D <= 128) {
        e = pass<D, true, SUM_FIRST | SUM_SECOND>(cuda, a);
    } else {
        e = pass<D, true, SUM_FIRST>(cuda, a);
        if (e == cudaSuccess)
            e = pass<D, true, SUM_SECOND>(cuda, a);
    }
    return e == cudaSuccess ? pass<D, false, SUM_FIRST>(cuda, a) : e;
}

cudaError_t bsk_cuda_attention_bwd_mma(bsk_cuda *cuda, const bsk_call *c)
{
    return with_backward_args(cuda, c, [&](const attention_args &a) {
        return by_head_dim(a.D, [&](auto D) { return backward<decltype(D)::value>(cuda, a); });
    });
}
