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
template <int D, bool KEYS> struct shared_memory {
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
struct block_part {
    int row0, end, from, to, h0, heads, kv;
};

/* Columns start at multiples of `columns`, so that the fewest tiles lie across the diagonal and need the mask. */
template <bool KEYS> static __device__ inline block_part my_part(const attention_args &a, int columns)
{
    block_part part;
    int group = a.H / a.K,
        tile = KEYS ? blockIdx.y : gridDim.y - 1 - blockIdx.y; /* the longest first */
    part.row0 = tile * ROWS;
    part.end = min(part.row0 + ROWS, a.T);
    part.kv = KEYS ? blockIdx.x : blockIdx.x / group;
    part.h0 = KEYS ? part.kv * group : blockIdx.x;
    part.heads = KEYS ? group : 1;
    part.from = KEYS ? part.row0 : a.first[part.row0] / columns * columns;
    part.to = KEYS ? last_query(a, part.end - 1) : part.end;
    return part;
}

/* ---- the copies ---- */

/* By a warp. The loop stays one: few registers are left to those that copy. */
template <int D, bool KEYS>
static __device__ inline void copy_queries(shared_memory<D, KEYS> &shared, const attention_args &a,
                                           int h, int c0, int stage)
{
#pragma unroll 1
    for (int i = threadIdx.x; i < shared_memory<D, KEYS>::COLUMNS; i += 32) {
        int64_t c = min(c0 + i, a.T - 1);
        shared.lse2[stage][i] = LOG2E * a.lse_in[c * a.H + h];
        shared.delta[stage][i] = a.delta[c * a.H + h];
        shared.first_key[stage][i] = a.first[c];
    }
}

/* By a warp: the rows once, then tiles of columns in the order in which the warpgroups take them. First and second
   operand have barriers of their own, so that scores need not wait for the second. */
template <int D, bool KEYS>
static __device__ inline void copy_part(shared_memory<D, KEYS> &shared, const backward_args &args,
                                        const block_part &part)
{
    constexpr int COLUMNS = shared_memory<D, KEYS>::COLUMNS;
    int lane = threadIdx.x;
    if (lane == 0) {
        int column = (KEYS ? part.kv : part.h0) * D;
        barrier_expect(&shared.rows_full, sizeof shared.row);
        copy_tile<ROWS, D>(shared.row[0], &args.row[0], &shared.rows_full, column, part.row0);
        copy_tile<ROWS, D>(shared.row[1], &args.row[1], &shared.rows_full, column, part.row0);
    }
    ring_place<shared_memory<D, KEYS>::STAGES> at = {0, 0};
    for (int h = part.h0; h < part.h0 + part.heads; h++)
        for (int c0 = part.from; c0 < part.to; c0 += COLUMNS, at.next()) {
            int column = (KEYS ? h : part.kv) * D, stage = at.stage;
            barrier_wait(&shared.empty[stage], at.phase ^ 1); /* by every lane: each writes below */
            if (lane == 0) {
                barrier_expect(&shared.first_full[stage], sizeof shared.first[0]);
                copy_tile<COLUMNS, D>(shared.first[stage], &args.column[0], &shared.first_full[stage],
                                      column, c0);
                barrier_expect(&shared.second_full[stage], sizeof shared.second[0]);
                copy_tile<COLUMNS, D>(shared.second[stage], &args.column[1], &shared.second_full[stage],
                                      column, c0);
            }
            if (KEYS) {
                copy_queries(shared, args.a, h, c0, stage);
                barrier_arrive(&shared.first_full[stage]); /* every lane, of its own writes */
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
static __device__ inline query query_of(const shared_memory<D, KEYS> &shared,
                                        const query (&row_queries)[2], int stage, int n, int e)
{
    if (!KEYS)
        return row_queries[e / 2];
    int i = n * 8 + threadIdx.x % 4 * 2 + e % 2;
    return query{shared.lse2[stage][i], shared.delta[stage][i], shared.first_key[stage][i]};
}

/* Keys that a query does not see, in the columns from c0 on, to -inf; row: of this thread's first element. Queries
   past the end are hidden from all: their operands are zeros but their lse is another's, and a P that overflows
   would make NaN of the zeros. */
template <int D, bool KEYS, int NT>
static __device__ inline void hide_unseen(float (&s)[NT][4], const shared_memory<D, KEYS> &shared,
                                          const attention_args &a, const block_part &part,
                                          const query (&row_queries)[2], int stage, int row, int c0)
{
    constexpr int COLUMNS = NT * 8;
    bool whole = KEYS ? c0 >= part.row0 + ROWS - 1 && c0 + COLUMNS <= a.T &&
                            shared.first_key[stage][COLUMNS - 1] <= part.row0
                      : c0 + COLUMNS - 1 <= part.row0 && part.end == part.row0 + ROWS &&
                            a.first[part.end - 1] <= c0;
    if (whole)
        return;
    FOR_TILE(n, e)
    {
        int r = row + 8 * (e / 2), c = c0 + n * 8 + threadIdx.x % 4 * 2 + e % 2;
        int key = KEYS ? r : c, i = KEYS ? c : r;
        if (key > i || i >= a.T || key < query_of<D, KEYS>(shared, row_queries, stage, n, e).first)
            s[n][e] = -INFINITY;
    }
}

template <int D, bool KEYS>
static __device__ inline void store_part(shared_memory<D, KEYS> &shared, const attention_args &a,
                                         const block_part &part, int warp_row,
                                         const float (&sum1)[D / 8][4], const float (&sum2)[D / 8][4])
{
    bf16 *tile = shared.row[0] + warp_row * (D + PAD); /* padded, so the last reach into row[1] */
    int64_t ld = (int64_t)(KEYS ? a.K : a.H) * D;
    /* the other warpgroup's products may still read its rows, which lie where this one writes */
    named_sync(ALL, GROUPS * WARPGROUP);
    store_rows<D>(KEYS ? (bf16 *)a.dk + (int64_t)part.kv * D : (bf16 *)a.dq + (int64_t)part.h0 * D, ld,
                  part.row0 + warp_row, part.end, tile, sum1, a.scale, a.scale);
    if (KEYS)
        store_rows<D>((bf16 *)a.dv + (int64_t)part.kv * D, ld, part.row0 + warp_row, part.end, tile,
                      sum2, 1.0f, 1.0f);
}

/* The registers of a warpgroup: scores, then P; dP, then dS; what accumulates dk and dv, or dq. */
template <int D, bool KEYS> struct warpgroup_registers {
    enum { NT = shared_memory<D, KEYS>::NT };
    float s[NT][4], dp[NT][4], sum1[D / 8][4], sum2[D / 8][4];
    uint32_t p[NT / 2][4], ds[NT / 2][4];
    query row_queries[2];
    int row; /* of this thread's first element */
};

/* From the scores of the columns from c0 on, with dP under way, to the sums under way. */
template <int D, bool KEYS, int SCORE>
static __device__ inline void add_columns(warpgroup_registers<D, KEYS> &regs,
                                          shared_memory<D, KEYS> &shared, const attention_args &a,
                                          const block_part &part, int stage, int c0, float power)
{
    constexpr int NT = shared_memory<D, KEYS>::NT;
    auto of = [&](int n, int e) { return query_of<D, KEYS>(shared, regs.row_queries, stage, n, e); };
    /* The factor of the cap's slope needs the score itself: before the mask, as of -inf it is not a number, and
       before P takes the score's place. */
    if (SCORE == SCORE_GENERAL) {
        general_scores(a, regs.s);
        wgmma_wait<0>(regs.dp);
        FOR_TILE(n, e)
        {
            float tanh =
                a.cap > 0.0f ? regs.s[n][e] / (a.cap * LOG2E) : 0.0f; /* of the score over the cap */
            regs.dp[n][e] = (regs.dp[n][e] - of(n, e).delta) * (1.0f - tanh * tanh);
        }
    }
    hide_unseen(regs.s, shared, a, part, regs.row_queries, stage, regs.row, c0);
    FOR_TILE(n, e)
    {
        regs.s[n][e] = exp2_fast(regs.s[n][e] * power - of(n, e).lse2);
    }
    if (SCORE == SCORE_PLAIN)
        wgmma_wait<0>(regs.dp);
    if (KEYS) {
        round_operand(regs.p, regs.s);
        issue_sum<D>(regs.sum2, regs.p, shared.second[stage]);
    }
    FOR_TILE(n, e)
    {
        regs.dp[n][e] =
            regs.s[n][e] * (SCORE == SCORE_PLAIN ? regs.dp[n][e] - of(n, e).delta : regs.dp[n][e]);
    }
    round_operand(regs.ds, regs.dp);
    issue_sum<D>(regs.sum1, regs.ds, shared.first[stage]);
}

/* Sums begin at 0; a row past the end sees no key. */
template <int D, bool KEYS>
static __device__ inline void begin_part(warpgroup_registers<D, KEYS> &regs, const attention_args &a,
                                         const block_part &part, int row)
{
    regs = warpgroup_registers<D, KEYS>();
    regs.row = row;
    if (!KEYS)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int i = row + 8 * half;
            bool there = i < part.end;
            regs.row_queries[half].lse2 = there ? LOG2E * a.lse_in[(int64_t)i * a.H + part.h0] : 0.0f;
            regs.row_queries[half].delta = there ? a.delta[(int64_t)i * a.H + part.h0] : 0.0f;
            regs.row_queries[half].first = there ? a.first[i] : INT32_MAX;
        }
}

/* By a warpgroup: its 64 rows against all columns. What is under way at each point of a step:

       add_columns:          dP              -> sum2 (P), sum1 (dS)
       next scores issued:   sum2, sum1, S   -> S once both sums are done
       next dP issued:       S, dP           -> dP

   so the tensor cores have work while the thread computes powers. */
template <int D, bool KEYS, int SCORE>
static __device__ inline void compute_part(shared_memory<D, KEYS> &shared, const attention_args &a,
                                           const block_part &part, int group)
{
    constexpr int COLUMNS = shared_memory<D, KEYS>::COLUMNS;
    int lane = threadIdx.x % 32, warp_row = group * 64 + threadIdx.x % WARPGROUP / 32 * 16;
    int steps = (part.to - part.from + COLUMNS - 1) / COLUMNS * part.heads, c0 = part.from;
    const float power = SCORE == SCORE_PLAIN ? a.scale * LOG2E : 1.0f;
    const bf16 *row1 = shared.row[0] + group * 64 * PANEL, *row2 = shared.row[1] + group * 64 * PANEL;
    ring_place<shared_memory<D, KEYS>::STAGES> at = {0, 0};
    warpgroup_registers<D, KEYS> regs;
    begin_part(regs, a, part, part.row0 + warp_row + lane / 4);

    barrier_wait(&shared.rows_full, 0);
    barrier_wait(&shared.first_full[0], 0);
    issue_product<D, ROWS>(regs.s, row1, shared.first[0]);
    barrier_wait(&shared.second_full[0], 0);
    issue_product<D, ROWS>(regs.dp, row2, shared.second[0]);
    wgmma_wait<1>(regs.s);
    for (int step = 1; step < steps; step++) {
        int before = at.stage;
        add_columns<D, KEYS, SCORE>(regs, shared, a, part, at.stage, c0, power);
        at.next();
        c0 = c0 + COLUMNS < part.to ? c0 + COLUMNS : part.from;
        barrier_wait(&shared.first_full[at.stage], at.phase);
        issue_product<D, ROWS>(regs.s, row1, shared.first[at.stage]);
        /* all but the scores just issued: the operands P and dS may be overwritten, the tiles filled again */
        wgmma_wait<1>(regs.sum1);
        touch(regs.sum2);
        barrier_arrive(&shared.empty[before]); /* every thread: each has read of its queries */
        barrier_wait(&shared.second_full[at.stage], at.phase);
        issue_product<D, ROWS>(regs.dp, row2, shared.second[at.stage]);
        wgmma_wait<1>(regs.s); /* dP stays under way */
    }
    add_columns<D, KEYS, SCORE>(regs, shared, a, part, at.stage, c0, power);
    wgmma_wait<0>(regs.sum1);
    touch(regs.sum2);
    store_part<D, KEYS>(shared, a, part, warp_row, regs.sum1, regs.sum2);
}

/* Roles as in attention_sm90_fwd.cu; a whole warp copies here, as it also brings what scores need of queries. */
template <int D, bool KEYS, int SCORE>
static __global__ void __launch_bounds__(THREADS, 1)
    backward_kernel(const __grid_constant__ backward_args args)
{
    extern __shared__ __align__(SWIZZLE_BYTES) unsigned char memory[];
    shared_memory<D, KEYS> &shared = *reinterpret_cast<shared_memory<D, KEYS> *>(memory);
    if (threadIdx.x == 0) {
        barrier_init(&shared.rows_full, 1);
        for (int i = 0; i < shared_memory<D, KEYS>::STAGES; i++) {
            barrier_init(&shared.first_full[i], KEYS ? 1 + 32 : 1); /* with lanes of copy_queries */
            barrier_init(&shared.second_full[i], 1);
            barrier_init(&shared.empty[i], GROUPS * WARPGROUP);
        }
        barrier_init_done();
    }
    __syncthreads();
    block_part part = my_part<KEYS>(args.a, shared_memory<D, KEYS>::COLUMNS);
    if (threadIdx.x < WARPGROUP) {
        registers_less<24>(); /* 384 * 168 = 128 * 24 + 256 * 240 */
        if (threadIdx.x < 32)
            copy_part<D, KEYS>(shared, args, part);
    } else {
        registers_more<240>();
        compute_part<D, KEYS, SCORE>(shared, args.a, part, threadIdx.x / WARPGROUP - 1);
    }
}

/* Each operand has a map, with a box of as many rows as its tiles have in this pass. */
template <int D, bool KEYS> static cudaError_t pass(bsk_cuda *cuda, const attention_args &a)
{
    constexpr int COLUMNS = shared_memory<D, KEYS>::COLUMNS;
    auto kernel = has_general_scores(a) ? backward_kernel<D, KEYS, SCORE_GENERAL>
                                        : backward_kernel<D, KEYS, SCORE_PLAIN>;
    const int bytes = (int)sizeof(shared_memory<D, KEYS>);
    int row_tiles = (a.T + ROWS - 1) / ROWS;
    int64_t q_columns = (int64_t)a.H * D, k_columns = (int64_t)a.K * D;
    backward_args args = {};
    args.a = a;
    CUtensorMap *q = KEYS ? args.column : args.row, *k = KEYS ? args.row : args.column;
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
        args);
    return cudaGetLastError();
}

template <int D> static cudaError_t backward(bsk_cuda *cuda, const attention_args &a)
{
    cudaError_t e = pass<D, true>(cuda, a);
    return e == cudaSuccess ? pass<D, false>(cuda, a) : e;
}

cudaError_t bsk_cuda_attention_bwd_sm90(bsk_cuda *cuda, const bsk_call *c)
{
    return with_backward_args(cuda, c, [&](const attention_args &a) {
        return a.D == 64 ? backward<64>(cuda, a) : backward<128>(cuda, a);
    });
}
