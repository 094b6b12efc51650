/* SPDX-License-Identifier: Apache-2.0 */
/*
** attention_sm90_bwd.cu: the gradient of attention on Hopper's tensor cores, in the two passes of
** attention_mma_bwd.cu, without atomics: a block owns ROWS rows of a score tile, keys (operands k, v; dk
** and dv come out) or queries (q, dO; dq comes out), 64 a warpgroup, and streams tiles of columns
** (q, dO or k, v) that one warp copies into a ring. Scores and dP turn into operands in registers.
**
** A warpgroup keeps products queued: while it computes P, dP is under way, while it computes dS, the
** sum over P is, and the products of the next tile are issued before it waits for the sum over dS.
** Products end in the order of their issue, so a wait for all but the last says which are done.
*/
#include "attention.cuh"
#include "wgmma.cuh"

enum {
    GROUPS = 2,                         /* warpgroups that compute */
    THREADS = (1 + GROUPS) * WARPGROUP, /* the first copies */
    ROWS = 64 * GROUPS,
    ALL = 1 /* named barrier of those that compute */
};

/* The memory of a block. Two sums leave registers for a score tile of 64 columns, one for 128. Panels come first, as
   they must start at multiples of SWIZZLE_BYTES. */
template <int D, bool KEYS> struct tiles {
    enum { COLUMNS = KEYS ? 64 : 128, NT = COLUMNS / 8, STAGES = COLUMNS == 64 ? 3 : 2 };
    bf16 row[2][ROWS * D];
    bf16 first[STAGES][COLUMNS * D], second[STAGES][COLUMNS * D];
    float lse2[STAGES][COLUMNS], delta[STAGES][COLUMNS]; /* where columns are queries */
    int first_key[STAGES][COLUMNS];
    uint64_t rows_full, first_full[STAGES], second_full[STAGES], empty[STAGES];
};

struct backward_args {
    CUtensorMap row[2], column[2]; /* k, v and q, dO, or the other way round */
    attention_args a;
};

/* A block's part: rows [row0, end), columns [from, to) of `heads` query heads from h0 on. */
struct part {
    int row0, end, from, to, h0, heads, kv;
};

/* Columns start at multiples of `columns`, so that the fewest tiles lie across the diagonal and need the mask. */
template <bool KEYS> static __device__ inline part my_part(const attention_args &a, int columns)
{
    part w;
    int group = a.H / a.K,
        tile = KEYS ? blockIdx.y : gridDim.y - 1 - blockIdx.y; /* the longest first */
    w.row0 = tile * ROWS;
    w.end = min(w.row0 + ROWS, a.T);
    w.kv = KEYS ? blockIdx.x : blockIdx.x / group;
    w.h0 = KEYS ? w.kv * group : blockIdx.x;
    w.heads = KEYS ? group : 1;
    w.from = KEYS ? w.row0 : a.first[w.row0] / columns * columns;
    w.to = KEYS ? last_query(a, w.end - 1) : w.end;
    return w;
}

/* ---- the copies ---- */

/* By a warp. The loop stays one: few registers are left to those that copy. */
template <int D, bool KEYS>
static __device__ inline void copy_queries(tiles<D, KEYS> &t, const attention_args &a, int h, int c0,
                                           int stage)
{
#pragma unroll 1
    for (int i = threadIdx.x; i < tiles<D, KEYS>::COLUMNS; i += 32) {
        int64_t c = min(c0 + i, a.T - 1);
        t.lse2[stage][i] = LOG2E * a.lse_in[c * a.H + h];
        t.delta[stage][i] = a.delta[c * a.H + h];
        t.first_key[stage][i] = a.first[c];
    }
}

/* By a warp: the rows once, then tiles of columns in the order in which the warpgroups take them. First and second
   operand have barriers of their own, so that scores need not wait for the second. */
template <int D, bool KEYS>
static __device__ inline void copy_part(tiles<D, KEYS> &t, const backward_args &f, const part &w)
{
    constexpr int COLUMNS = tiles<D, KEYS>::COLUMNS;
    int lane = threadIdx.x;
    if (lane == 0) {
        int column = (KEYS ? w.kv : w.h0) * D;
        barrier_expect(&t.rows_full, sizeof t.row);
        copy_tile<ROWS, D>(t.row[0], &f.row[0], &t.rows_full, column, w.row0);
        copy_tile<ROWS, D>(t.row[1], &f.row[1], &t.rows_full, column, w.row0);
    }
    ring<tiles<D, KEYS>::STAGES> at = {0, 0};
    for (int h = w.h0; h < w.h0 + w.heads; h++)
        for (int c0 = w.from; c0 < w.to; c0 += COLUMNS, at.next()) {
            int column = (KEYS ? h : w.kv) * D, stage = at.stage;
            barrier_wait(&t.empty[stage], at.phase ^ 1); /* every lane waits, as each writes below */
            if (lane == 0) {
                barrier_expect(&t.first_full[stage], sizeof t.first[0]);
                copy_tile<COLUMNS, D>(t.first[stage], &f.column[0], &t.first_full[stage], column, c0);
                barrier_expect(&t.second_full[stage], sizeof t.second[0]);
                copy_tile<COLUMNS, D>(t.second[stage], &f.column[1], &t.second_full[stage], column, c0);
            }
            if (KEYS) {
                copy_queries(t, f.a, h, c0, stage);
                barrier_arrive(&t.first_full[stage]); /* every lane, of its own writes */
            }
        }
}

/* ---- the computation ---- */

/* Runs what follows for each element [n][e] that a thread has of a score tile. */
#define FOR_TILE(n, e)                                                                                 \
    _Pragma("unroll") for (int n = 0; n < NT; n++) _Pragma("unroll") for (int e = 0; e < 4; e++)

/* Of a query: what a score needs. In registers where rows are queries, else in shared memory. */
struct query {
    float lse2, delta; /* lse in powers of two */
    int first;
};

template <int D, bool KEYS>
static __device__ inline query query_of(const tiles<D, KEYS> &t, const query (&mine)[2], int stage,
                                        int n, int e)
{
    if (!KEYS)
        return mine[e / 2];
    int i = n * 8 + threadIdx.x % 4 * 2 + e % 2;
    return query{t.lse2[stage][i], t.delta[stage][i], t.first_key[stage][i]};
}

/* Keys that a query does not see, in the columns from c0 on, to -inf; row: of this thread's first element. Queries
   past the end are hidden from all: their operands are zeros but their lse is another's, and a P that overflows
   would make NaN of the zeros. */
template <int D, bool KEYS, int NT>
static __device__ inline void hide(float (&s)[NT][4], const tiles<D, KEYS> &t, const attention_args &a,
                                   const part &w, const query (&mine)[2], int stage, int row, int c0)
{
    constexpr int COLUMNS = NT * 8;
    bool whole = KEYS
                     ? c0 >= w.row0 + ROWS - 1 && c0 + COLUMNS <= a.T &&
                           t.first_key[stage][COLUMNS - 1] <= w.row0
                     : c0 + COLUMNS - 1 <= w.row0 && w.end == w.row0 + ROWS && a.first[w.end - 1] <= c0;
    if (whole)
        return;
    FOR_TILE(n, e)
    {
        int r = row + 8 * (e / 2), c = c0 + n * 8 + threadIdx.x % 4 * 2 + e % 2;
        int key = KEYS ? r : c, i = KEYS ? c : r;
        if (key > i || i >= a.T || key < query_of<D, KEYS>(t, mine, stage, n, e).first)
            s[n][e] = -INFINITY;
    }
}

template <int D, bool KEYS>
static __device__ inline void store_part(tiles<D, KEYS> &t, const attention_args &a, const part &w,
                                         int warp_row, const float (&sum1)[D / 8][4],
                                         const float (&sum2)[D / 8][4])
{
    bf16 *tile = t.row[0] + warp_row * (D + PAD); /* padded, so the last reach into row[1] */
    int64_t ld = (int64_t)(KEYS ? a.K : a.H) * D;
    /* the other warpgroup's products may still read its rows, which lie where this one writes */
    named_sync(ALL, GROUPS * WARPGROUP);
    store_rows<D>(KEYS ? (bf16 *)a.dk + (int64_t)w.kv * D : (bf16 *)a.dq + (int64_t)w.h0 * D, ld,
                  w.row0 + warp_row, w.end, tile, sum1, a.scale, a.scale);
    if (KEYS)
        store_rows<D>((bf16 *)a.dv + (int64_t)w.kv * D, ld, w.row0 + warp_row, w.end, tile, sum2, 1.0f,
                      1.0f);
}

/* The registers of a warpgroup: scores, then P; dP, then dS; what accumulates dk and dv, or dq. */
template <int D, bool KEYS> struct state {
    enum { NT = tiles<D, KEYS>::NT };
    float s[NT][4], dp[NT][4], sum1[D / 8][4], sum2[D / 8][4];
    uint32_t p[NT / 2][4], ds[NT / 2][4];
    query mine[2];
    int row; /* of this thread's first element */
};

/* From the scores of the columns from c0 on, with dP under way, to the sums under way. */
template <int D, bool KEYS, int SCORE>
static __device__ inline void add_columns(state<D, KEYS> &x, tiles<D, KEYS> &t, const attention_args &a,
                                          const part &w, int stage, int c0, float power)
{
    constexpr int NT = tiles<D, KEYS>::NT;
    auto of = [&](int n, int e) { return query_of<D, KEYS>(t, x.mine, stage, n, e); };
    /* The factor of the cap's slope needs the score itself: before the mask, as of -inf it is not a number, and
       before P takes the score's place. */
    if (SCORE == SCORE_GENERAL) {
        general_scores(a, x.s);
        wgmma_wait<0>(x.dp);
        FOR_TILE(n, e)
        {
            float tanh =
                a.cap > 0.0f ? x.s[n][e] / (a.cap * LOG2E) : 0.0f; /* of the score over the cap */
            x.dp[n][e] = (x.dp[n][e] - of(n, e).delta) * (1.0f - tanh * tanh);
        }
    }
    hide(x.s, t, a, w, x.mine, stage, x.row, c0);
    FOR_TILE(n, e)
    {
        x.s[n][e] = exp2_fast(x.s[n][e] * power - of(n, e).lse2);
    }
    if (SCORE == SCORE_PLAIN)
        wgmma_wait<0>(x.dp);
    if (KEYS) {
        round_operand(x.p, x.s);
        issue_sum<D>(x.sum2, x.p, t.second[stage]);
    }
    FOR_TILE(n, e)
    {
        x.dp[n][e] = x.s[n][e] * (SCORE == SCORE_PLAIN ? x.dp[n][e] - of(n, e).delta : x.dp[n][e]);
    }
    round_operand(x.ds, x.dp);
    issue_sum<D>(x.sum1, x.ds, t.first[stage]);
}

/* Sums begin at 0; a row past the end sees no key. */
template <int D, bool KEYS>
static __device__ inline void start(state<D, KEYS> &x, const attention_args &a, const part &w, int row)
{
    x = state<D, KEYS>();
    x.row = row;
    if (!KEYS)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int i = row + 8 * half;
            bool there = i < w.end;
            x.mine[half].lse2 = there ? LOG2E * a.lse_in[(int64_t)i * a.H + w.h0] : 0.0f;
            x.mine[half].delta = there ? a.delta[(int64_t)i * a.H + w.h0] : 0.0f;
            x.mine[half].first = there ? a.first[i] : INT32_MAX;
        }
}

/* By a warpgroup: its 64 rows against all columns. What is under way at each point of a step:

       add_columns:          dP              -> sum2 (P), sum1 (dS)
       next scores issued:   sum2, sum1, S   -> S once both sums are done
       next dP issued:       S, dP           -> dP

   so the tensor cores have work while the thread computes powers. */
template <int D, bool KEYS, int SCORE>
static __device__ inline void compute_part(tiles<D, KEYS> &t, const attention_args &a, const part &w,
                                           int group)
{
    constexpr int COLUMNS = tiles<D, KEYS>::COLUMNS;
    int lane = threadIdx.x % 32, warp_row = group * 64 + threadIdx.x % WARPGROUP / 32 * 16;
    int steps = (w.to - w.from + COLUMNS - 1) / COLUMNS * w.heads, c0 = w.from;
    const float power = SCORE == SCORE_PLAIN ? a.scale * LOG2E : 1.0f;
    const bf16 *row1 = t.row[0] + group * 64 * PANEL, *row2 = t.row[1] + group * 64 * PANEL;
    ring<tiles<D, KEYS>::STAGES> at = {0, 0};
    state<D, KEYS> x;
    start(x, a, w, w.row0 + warp_row + lane / 4);

    barrier_wait(&t.rows_full, 0);
    barrier_wait(&t.first_full[0], 0);
    issue_product<D, ROWS>(x.s, row1, t.first[0]);
    barrier_wait(&t.second_full[0], 0);
    issue_product<D, ROWS>(x.dp, row2, t.second[0]);
    wgmma_wait<1>(x.s);
    for (int step = 1; step < steps; step++) {
        int before = at.stage;
        add_columns<D, KEYS, SCORE>(x, t, a, w, at.stage, c0, power);
        at.next();
        c0 = c0 + COLUMNS < w.to ? c0 + COLUMNS : w.from;
        barrier_wait(&t.first_full[at.stage], at.phase);
        issue_product<D, ROWS>(x.s, row1, t.first[at.stage]);
        /* all but the scores just issued: the operands P and dS may be overwritten, the tiles filled again */
        wgmma_wait<1>(x.sum1);
        touch(x.sum2);
        barrier_arrive(&t.empty[before]); /* every thread: each has read of its queries */
        barrier_wait(&t.second_full[at.stage], at.phase);
        issue_product<D, ROWS>(x.dp, row2, t.second[at.stage]);
        wgmma_wait<1>(x.s); /* dP stays under way */
    }
    add_columns<D, KEYS, SCORE>(x, t, a, w, at.stage, c0, power);
    wgmma_wait<0>(x.sum1);
    touch(x.sum2);
    store_part<D, KEYS>(t, a, w, warp_row, x.sum1, x.sum2);
}

/* Roles as in attention_sm90_fwd.cu; a whole warp copies here, as it also brings what scores need of queries. */
template <int D, bool KEYS, int SCORE>
static __global__ void __launch_bounds__(THREADS, 1)
    backward_kernel(const __grid_constant__ backward_args f)
{
    extern __shared__ __align__(SWIZZLE_BYTES) unsigned char memory[];
    tiles<D, KEYS> &t = *reinterpret_cast<tiles<D, KEYS> *>(memory);
    if (threadIdx.x == 0) {
        barrier_init(&t.rows_full, 1);
        for (int i = 0; i < tiles<D, KEYS>::STAGES; i++) {
            barrier_init(&t.first_full[i], KEYS ? 1 + 32 : 1); /* the copy, and lanes of copy_queries */
            barrier_init(&t.second_full[i], 1);
            barrier_init(&t.empty[i], GROUPS * WARPGROUP);
        }
        barrier_init_done();
    }
    __syncthreads();
    part w = my_part<KEYS>(f.a, tiles<D, KEYS>::COLUMNS);
    if (threadIdx.x < WARPGROUP) {
        registers_less<24>(); /* 384 * 168 = 128 * 24 + 256 * 240 */
        if (threadIdx.x < 32)
            copy_part<D, KEYS>(t, f, w);
    } else {
        registers_more<240>();
        compute_part<D, KEYS, SCORE>(t, f.a, w, threadIdx.x / WARPGROUP - 1);
    }
}

/* Each operand has a map, with a box of as many rows as its tiles have in this pass. */
template <int D, bool KEYS> static cudaError_t pass(bsk_cuda *cuda, const attention_args &a)
{
    constexpr int COLUMNS = tiles<D, KEYS>::COLUMNS;
    auto kernel = a.cap > 0.0f || a.scale <= 0.0f ? backward_kernel<D, KEYS, SCORE_GENERAL>
                                                  : backward_kernel<D, KEYS, SCORE_PLAIN>;
    const int bytes = (int)sizeof(tiles<D, KEYS>);
    int row_tiles = (a.T + ROWS - 1) / ROWS;
    int64_t q_columns = (int64_t)a.H * D, k_columns = (int64_t)a.K * D;
    backward_args f = {};
    f.a = a;
    CUtensorMap *q = KEYS ? f.column : f.row, *k = KEYS ? f.row : f.column;
    cudaError_t e = row_tiles > 65535 ? cudaErrorInvalidConfiguration : cudaSuccess;
    if (e == cudaSuccess)
        e = tensor_map(cuda, &q[0], a.q, a.T, q_columns, KEYS ? COLUMNS : ROWS);
    if (e == cudaSuccess)
        e = tensor_map(cuda, &q[1], a.grad_o, a.T, q_columns, KEYS ? COLUMNS : ROWS);
    if (e == cudaSuccess)
        e = tensor_map(cuda, &k[0], a.k, a.T, k_columns, KEYS ? ROWS : COLUMNS);
    if (e == cudaSuccess)
        e = tensor_map(cuda, &k[1], a.v, a.T, k_columns, KEYS ? ROWS : COLUMNS);
    if (e == cudaSuccess)
        e = cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 bytes);
    if (e != cudaSuccess)
        return e;
    kernel<<<dim3((unsigned)(KEYS ? a.K : a.H), (unsigned)row_tiles), THREADS, bytes, cuda->stream>>>(
        f);
    return cudaGetLastError();
}

template <int D> static cudaError_t backward(bsk_cuda *cuda, const attention_args &a)
{
    cudaError_t e = pass<D, true>(cuda, a);
    return e == cudaSuccess ? pass<D, false>(cuda, a) : e;
}

cudaError_t bsk_cuda_attention_bwd_sm90(bsk_cuda *cuda, const bsk_call *c)
{
    attention_args a;
    if (!attention_args_of(c, &a))
        return cudaErrorInvalidConfiguration;
    if (a.T <= 0)
        return cudaSuccess;
    attention_backward_args(c, &a);
    cudaError_t e = bsk_cuda_attention_prepare(cuda, &a, c->dtype);
    if (e != cudaSuccess)
        return e;
    return a.D == 64 ? backward<64>(cuda, a) : backward<128>(cuda, a);
}
