/* SPDX-License-Identifier: Apache-2.0 */
/*
** attention_sm90_fwd.cu: attention on Hopper's tensor cores (Shah et al. 2024), bf16 operands, f32
** sums, the softmax as in attention_mma_fwd.cu. A block stays on a multiprocessor and works through items,
** an item being ROWS queries of one head; which items are its own follows from its index. One warp copies
** tiles of q, k and v into rings, two warpgroups of 64 queries each compute. Tiles of keys start at
** multiples of COLUMNS and are walked downwards, so that the tile on the diagonal comes first: as ROWS is
** COLUMNS, it alone holds keys later than a query and is the only one that always needs the mask.
**
** A warpgroup issues the scores of a tile, then the sum over the values of the tile before, and while
** those run does the softmax of the scores. With head dim 64, where the softmax takes as long as the
** products, the two take turns at issuing, so that one's softmax falls into the time of the other's
** products. With 128 products alone fill the time, and turns would cost some of it.
*/
#include "attention.cuh"
#include "wgmma.cuh"

enum {
    GROUPS = 2,                         /* warpgroups that compute */
    THREADS = (1 + GROUPS) * WARPGROUP, /* the first copies */
    ROWS = 64 * GROUPS,
    COLUMNS = 128,
    NT = COLUMNS / 8,
    STAGES = 2,
    TURN = 1 /* named barriers TURN, TURN + 1: the turn of a warpgroup */
};

/* The memory of a block. o has a part of its own, since that of q belongs to the next item when o is stored. Every
   member before o is a multiple of SWIZZLE_BYTES, as panels must be aligned so. */
template <int D> struct shared_memory {
    bf16 q[ROWS * D];
    bf16 k[STAGES][COLUMNS * D];
    bf16 v[STAGES][COLUMNS * D];
    bf16 o[ROWS * (D + PAD)];
    uint64_t q_full, q_empty, k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
};

struct forward_args {
    CUtensorMap q, k, v;
    attention_args a;
};

/* Queries [row0, end) of head h, which see keys from `first` on: `count` tiles from tile `top` down. */
struct work_item {
    int h, row0, end, first, top, count;
};

/* The n-th item of this block. Items are dealt out by length, the longest first, back and forth over the blocks,
   so that the blocks' sums of lengths are close without a counter that all of them would have to share. */
static __device__ inline bool nth_item(work_item &item, const attention_args &a, int n)
{
    int blocks = gridDim.x, at = n * blocks + (n % 2 ? blocks - 1 - blockIdx.x : blockIdx.x);
    int row_tiles = (a.T + ROWS - 1) / ROWS;
    if (at >= row_tiles * a.H)
        return false;
    item.h = at % a.H;
    item.row0 = (row_tiles - 1 - at / a.H) * ROWS;
    item.end = min(item.row0 + ROWS, a.T);
    item.first = first_key(a, item.row0);
    item.top = item.row0 / COLUMNS;
    item.count = item.top - item.first / COLUMNS + 1;
    return true;
}

/* ---- the copies ---- */

/* By one thread: it walks the items and tiles exactly as the warpgroups do, so that both sides of a ring stand at
   the same tile. k before v of a tile, as the scores are wanted first. */
template <int D>
static __device__ inline void copy_items(shared_memory<D> &shared, const forward_args &args)
{
    const attention_args &a = args.a;
    ring_place<STAGES> at = {0, 0};
    work_item item;
    for (int n = 0; nth_item(item, a, n); n++) {
        int kv = item.h / (a.H / a.K);
        barrier_wait(&shared.q_empty, (n & 1) ^ 1); /* q is a ring of one: its round is the item */
        barrier_expect(&shared.q_full, sizeof shared.q);
        copy_tile<ROWS, D>(shared.q, &args.q, &shared.q_full, item.h * D, item.row0);
        for (int i = 0; i < item.count; i++, at.next()) {
            int j = (item.top - i) * COLUMNS;
            barrier_wait(&shared.k_empty[at.stage], at.phase ^ 1);
            barrier_expect(&shared.k_full[at.stage], sizeof shared.k[0]);
            copy_tile<COLUMNS, D>(shared.k[at.stage], &args.k, &shared.k_full[at.stage], kv * D, j);
            barrier_wait(&shared.v_empty[at.stage], at.phase ^ 1);
            barrier_expect(&shared.v_full[at.stage], sizeof shared.v[0]);
            copy_tile<COLUMNS, D>(shared.v[at.stage], &args.v, &shared.v_full[at.stage], kv * D, j);
        }
    }
}

/* ---- the computation ---- */

/* The state of the two rows of queries of a thread. */
struct query_rows {
    int first[2];
    float max[2], sum[2], shrink[2];
};

/* Scores to powers relative to the rows' new maxima; shrink: what earlier sums are to be scaled by. The sum of
   values is scaled by the caller, because a product may still be adding to it. */
static __device__ inline void softmax(float (&s)[NT][4], query_rows &rows, float power)
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float now = rows.max[half], sum = 0.0f;
#pragma unroll
        for (int n = 0; n < NT; n++)
            now = fmaxf(now, fmaxf(s[n][2 * half], s[n][2 * half + 1]));
        now = fmaxf(now, __shfl_xor_sync(0xFFFFFFFFu, now, 1));
        now = fmaxf(now, __shfl_xor_sync(0xFFFFFFFFu, now, 2));
        float base = now == -INFINITY ? 0.0f : now * power; /* -inf - -inf would be NaN */
        rows.shrink[half] = exp2_fast(rows.max[half] * power - base);
        rows.max[half] = now;
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int e = 2 * half; e < 2 * half + 2; e++) {
                s[n][e] = exp2_fast(s[n][e] * power - base);
                sum += s[n][e];
            }
        rows.sum[half] = rows.sum[half] * rows.shrink[half] + sum;
    }
}

/* From products of queries and keys to softmax's weights. */
template <int SCORE>
static __device__ inline void weights_of_scores(float (&s)[NT][4], query_rows &rows,
                                                const attention_args &a, int i0, int j0, bool whole,
                                                float power)
{
    if (SCORE == SCORE_GENERAL)
        general_scores(a, s);
    if (!whole)
        hide_keys(s, rows.first, i0, j0);
    softmax(s, rows, power);
}

/* Every query sees itself, so no total is 0 but those of rows past the end, which are not stored. */
template <int D>
static __device__ inline void store_item(shared_memory<D> &shared, const attention_args &a,
                                         const work_item &item, const query_rows &rows,
                                         const float (&o)[D / 8][4], int warp_row, float power)
{
    int lane = threadIdx.x % 32;
    float inv[2], sink = LOG2E * sink_of<bf16>(a, item.h);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float total = total_of_row(rows.sum[half], rows.max[half] * power, sink);
        inv[half] = 1.0f / total;
        int row = item.row0 + warp_row + 8 * half + lane / 4;
        if (lane % 4 == 0 && row < item.end)
            a.lse[(int64_t)row * a.H + item.h] = LN2 * (rows.max[half] * power + log2f(total));
    }
    store_rows<D>((bf16 *)a.o + (int64_t)item.h * D, (int64_t)a.H * D, item.row0 + warp_row, item.end,
                  shared.o + warp_row * (D + PAD), o, inv[0], inv[1]);
}

/* The turn to issue products: a warpgroup waits for its own, then it is the other's. A turn is a named barrier at
   which one warpgroup waits and the other has only arrived; both take and pass equally often, as they have the same
   tiles. The first warpgroup begins: an arrival of the second stands for the pass that was not. */
template <int D> struct turns {
    int group;

    enum { TAKEN = D < 128, ALL = GROUPS * WARPGROUP };

    __device__ void begin()
    {
        if (TAKEN && group == 1)
            named_arrive(TURN, ALL);
    }

    __device__ void take()
    {
        if (TAKEN)
            named_sync(TURN + group, ALL);
    }

    __device__ void pass()
    {
        if (TAKEN)
            named_arrive(TURN + (group ^ 1), ALL);
    }

    /* takes the last turn passed, which nobody uses: a block must not end with a barrier half arrived at */
    __device__ void end()
    {
        if (group == 0)
            take();
    }
};

/* o and r of an item, from the place `at` of the rings on; q, row: of this warpgroup, this warp. The sum over the
   values of a tile is issued behind the scores of the next, whose softmax then runs in its time. */
template <int D, int SCORE>
static __device__ inline void compute_item(float (&o)[D / 8][4], query_rows &rows,
                                           shared_memory<D> &shared, ring_place<STAGES> &at,
                                           turns<D> turn, const attention_args &a,
                                           const work_item &item, const bf16 *q, int row, float power)
{
    int last_first = first_key(a, item.end - 1);
    float s[NT][4] = {};
    uint32_t p[NT / 2][4];
    barrier_wait(&shared.k_full[at.stage], at.phase); /* ahead of the turn: its holder issues at once */
    turn.take();
    issue_product<D, ROWS>(s, q, shared.k[at.stage]);
    turn.pass();
    wgmma_wait<0>(s);
    barrier_release(&shared.k_empty[at.stage]);
    weights_of_scores<SCORE>(s, rows, a, row, item.top * COLUMNS, false, power);
    round_operand(p, s);
    ring_place<STAGES> before = at;
    at.next();
    for (int j0 = (item.top - 1) * COLUMNS; j0 > item.first - COLUMNS; j0 -= COLUMNS) {
        barrier_wait(&shared.k_full[at.stage], at.phase);
        turn.take();
        issue_product<D, ROWS>(s, q, shared.k[at.stage]);
        barrier_wait(&shared.v_full[before.stage], before.phase);
        issue_sum<D>(o, p, shared.v[before.stage]);
        turn.pass();
        wgmma_wait<1>(s); /* the scores, not the sum behind them */
        barrier_release(&shared.k_empty[at.stage]);
        weights_of_scores<SCORE>(s, rows, a, row, j0, j0 >= last_first, power);
        wgmma_wait<0>(o); /* o may be scaled, p overwritten and v filled again only after the sum */
        barrier_release(&shared.v_empty[before.stage]);
#pragma unroll
        for (int c = 0; c < D / 8; c++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                o[c][e] *= rows.shrink[e / 2];
        round_operand(p, s);
        before = at;
        at.next();
    }
    barrier_release(&shared.q_empty); /* the last scores are computed: the next item's q may come */
    barrier_wait(&shared.v_full[before.stage], before.phase);
    issue_sum<D>(o, p, shared.v[before.stage]);
    wgmma_wait<0>(o);
    barrier_release(&shared.v_empty[before.stage]);
}

/* By a warpgroup: its 64 queries of each item. */
template <int D, int SCORE>
static __device__ inline void compute_items(shared_memory<D> &shared, const attention_args &a,
                                            int group)
{
    int lane = threadIdx.x % 32, warp_row = group * 64 + threadIdx.x % WARPGROUP / 32 * 16;
    const float power = SCORE == SCORE_PLAIN ? a.scale * LOG2E : 1.0f;
    turns<D> turn = {group};
    ring_place<STAGES> at = {0, 0};
    work_item item;
    turn.begin();
    for (int n = 0; nth_item(item, a, n); n++) {
        query_rows rows;
        const float start = LOG2E * sink_of<bf16>(a, item.h) / power;
        float o[D / 8][4] = {};
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int i = item.row0 + warp_row + 8 * half + lane / 4;
            rows.first[half] = i < item.end ? first_key(a, i) : INT32_MAX;
            rows.max[half] = start;
            rows.sum[half] = 0.0f;
        }
        barrier_wait(&shared.q_full, n & 1);
        compute_item<D, SCORE>(o, rows, shared, at, turn, a, item, shared.q + group * 64 * PANEL,
                               item.row0 + warp_row, power);
        store_item(shared, a, item, rows, o, warp_row, power);
    }
    turn.end();
}

/* The first warpgroup copies, by one of its threads, and the others compute. They meet at barriers in shared memory
   only: after the roles are taken no __syncthreads may follow, as the threads that do neither have ended. */
template <int D, int SCORE>
static __global__ void __launch_bounds__(THREADS, 1)
    forward_kernel(const __grid_constant__ forward_args args)
{
    extern __shared__ __align__(SWIZZLE_BYTES) unsigned char memory[];
    shared_memory<D> &shared = *reinterpret_cast<shared_memory<D> *>(memory);
    if (threadIdx.x == 0) {
        const int readers = GROUPS * WARPGROUP / 32; /* a warp arrives once */
        barrier_init(&shared.q_full, 1);
        barrier_init(&shared.q_empty, readers);
        for (int i = 0; i < STAGES; i++) {
            barrier_init(&shared.k_full[i], 1);
            barrier_init(&shared.v_full[i], 1);
            barrier_init(&shared.k_empty[i], readers);
            barrier_init(&shared.v_empty[i], readers);
        }
        barrier_init_done();
    }
    __syncthreads();
    if (threadIdx.x < WARPGROUP) {
        /* the kernel has 168 registers a thread: 384 * 168 = 128 * 24 + 256 * 240 */
        registers_less<24>();
        if (threadIdx.x == 0)
            copy_items<D>(shared, args);
    } else {
        registers_more<240>();
        compute_items<D, SCORE>(shared, args.a, threadIdx.x / WARPGROUP - 1);
    }
}

template <int D> static cudaError_t launch(bsk_cuda *cuda, const attention_args &a)
{
    auto kernel =
        has_general_scores(a) ? forward_kernel<D, SCORE_GENERAL> : forward_kernel<D, SCORE_PLAIN>;
    const int bytes = (int)sizeof(shared_memory<D>);
    int64_t items = (int64_t)((a.T + ROWS - 1) / ROWS) * a.H;
    forward_args args = {};
    args.a = a;
    cudaError_t e = items > INT32_MAX / 2 ? cudaErrorInvalidConfiguration : cudaSuccess;
    if (e == cudaSuccess)
        e = tensor_map(cuda, &args.q, a.q, a.T, (int64_t)a.H * D, ROWS);
    if (e == cudaSuccess)
        e = tensor_map(cuda, &args.k, a.k, a.T, (int64_t)a.K * D, COLUMNS);
    if (e == cudaSuccess)
        e = tensor_map(cuda, &args.v, a.v, a.T, (int64_t)a.K * D, COLUMNS);
    if (e == cudaSuccess)
        e = cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 bytes);
    if (e != cudaSuccess)
        return e;
    /* a block fills a multiprocessor: as many as there are stay and share out the items */
    unsigned blocks = (unsigned)(items < cuda->processors ? items : cuda->processors);
    kernel<<<blocks, THREADS, bytes, cuda->stream>>>(args);
    return cudaGetLastError();
}

bool bsk_cuda_attention_on_sm90(const bsk_cuda *cuda, int64_t D)
{
    return cuda->capability == 90 && cuda->encode_tensor_map && (D == 64 || D == 128);
}

cudaError_t bsk_cuda_attention_sm90(bsk_cuda *cuda, const bsk_call *c)
{
    return with_forward_args(c, [&](const attention_args &a) {
        return a.D == 64 ? launch<64>(cuda, a) : launch<128>(cuda, a);
    });
}
