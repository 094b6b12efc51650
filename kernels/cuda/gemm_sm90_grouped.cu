/* SPDX-License-Identifier: Apache-2.0 */
/*
** gemm_sm90_grouped.cu: products of groups of rows with a matrix each on Hopper's tensor cores: bf16 in and
** out, f32 sums. The places of the groups are read on the device, so that nobody waits for their sizes and
** one launch serves any number of groups.
**
** A block stays on a multiprocessor and computes every gridDim.x-th tile of ROWS x COLUMNS. Tiles are counted
** group by group, and of a group down its rows first: blocks that run at the same time then share columns of
** its matrix, which is read from memory once. One thread copies, a ring of STAGES ahead and into the next
** tile; two warpgroups of 64 rows each compute. A tile may reach over the end of its group: its last rows are
** those of the next group, computed and not stored.
*/
#include "wgmma.cuh"

enum {
    GROUPS = 2,
    THREADS = (1 + GROUPS) * WARPGROUP, /* the first copies */
    ROWS = 64 * GROUPS,
    COLUMNS = 256,
    STAGES = 4,
    PART = 64,  /* columns that are rounded and stored at a time */
    MOST = 1024 /* groups */
};

/* Every member before c is a multiple of SWIZZLE_BYTES. */
struct shared_memory {
    bf16 a[STAGES][ROWS * PANEL];
    bf16 b[STAGES][COLUMNS * PANEL];
    bf16 c[GROUPS * 4][16 * (PART + PAD)];
    uint64_t full[STAGES], empty[STAGES];
    int tiles[MOST + 1]; /* row tiles of all groups before one */
};

struct grouped_args {
    CUtensorMap a, b;
    const int32_t *offset;
    bf16 *c;
    int E, M, N, begin, steps; /* steps: of PANEL along the sum */
    float beta;

    __device__ int start(int e) const { return min(max(offset[e] - begin, 0), M); }
};

/* ---- which tile ---- */

/* Rows [row, end) of C, from `column` on, with the matrix of group e. */
struct tile_place {
    int e, row, end, column;
};

/* By one warp. */
static __device__ inline void count_tiles(shared_memory &shared, const grouped_args &args)
{
    int lane = threadIdx.x % 32, before = 0;
    for (int e0 = 0; e0 < args.E; e0 += 32) {
        int e = e0 + lane, rows = e < args.E ? args.start(e + 1) - args.start(e) : 0;
        int sum = (rows + ROWS - 1) / ROWS; /* becomes inclusive over the lanes */
        for (int d = 1; d < 32; d *= 2) {
            int below = __shfl_up_sync(0xFFFFFFFFu, sum, d);
            sum += lane >= d ? below : 0;
        }
        if (e < args.E)
            shared.tiles[e + 1] = before + sum;
        before += __shfl_sync(0xFFFFFFFFu, sum, 31);
    }
    if (lane == 0)
        shared.tiles[0] = 0;
}

/* Tile `at` of all; t.e is where the search begins, which only goes up. False: there are fewer. */
static __device__ inline bool find_tile(tile_place &t, const shared_memory &shared,
                                        const grouped_args &args, int at)
{
    int across = (args.N + COLUMNS - 1) / COLUMNS;
    while (t.e < args.E && at >= shared.tiles[t.e + 1] * across)
        t.e++;
    if (t.e == args.E)
        return false;
    int first = shared.tiles[t.e], down = shared.tiles[t.e + 1] - first;
    at -= first * across;
    t.row = args.start(t.e) + at % down * ROWS;
    t.end = args.start(t.e + 1);
    t.column = at / down * COLUMNS;
    return true;
}

/* ---- the copies ---- */

/* TB: the matrix is [N,K], and a stage has COLUMNS rows of it; else it is [K,N], and a stage has COLUMNS / PANEL
   panels of its PANEL rows. */
template <bool TB>
static __device__ inline void copy_tiles(shared_memory &shared, const grouped_args &args)
{
    ring_place<STAGES> at = {0, 0};
    tile_place t = {};
    for (int i = blockIdx.x; find_tile(t, shared, args, i); i += gridDim.x)
        for (int k = 0; k < args.steps; k++, at.next()) {
            uint64_t *full = &shared.full[at.stage];
            bf16 *b = shared.b[at.stage];
            barrier_wait(&shared.empty[at.stage], at.phase ^ 1);
            barrier_expect(full, sizeof shared.a[0] + sizeof shared.b[0]);
            copy_tile<ROWS, PANEL>(shared.a[at.stage], &args.a, full, k * PANEL, t.row);
            if (TB)
                copy_slice(b, &args.b, full, k * PANEL, t.column, t.e);
            else
#pragma unroll
                for (int p = 0; p < COLUMNS / PANEL; p++)
                    copy_slice(b + p * PANEL * PANEL, &args.b, full, t.column + p * PANEL, k * PANEL,
                               t.e);
        }
}

/* ---- the computation ---- */

/* The products of one stage; with `first` they overwrite the sums. */
template <bool TB>
static __device__ inline void issue_stage(float (&sum)[COLUMNS / 8][4], const bf16 *a, const bf16 *b,
                                          bool first)
{
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < PANEL; k += 16)
        wgmma<!TB>(sum, operand(a + k, 16),
                   TB ? operand(b + k, 16) : operand(b + k * PANEL, PANEL * PANEL_ROW_BYTES),
                   !first || k > 0);
    wgmma_commit();
}

/* Adds beta C to the sums of a warp, before they are rounded. */
static __device__ inline void add_present(float (&sum)[COLUMNS / 8][4], const grouped_args &args,
                                          const tile_place &t, int row)
{
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < COLUMNS / 8; n++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int r = row + 8 * half + lane / 4, column = t.column + n * 8 + lane % 4 * 2;
            if (r >= t.end || column >= args.N)
                continue;
            const bf16 *c = args.c + (int64_t)r * args.N + column;
            sum[n][2 * half] += args.beta * to_f32(c[0]);
            sum[n][2 * half + 1] += args.beta * to_f32(c[1]);
        }
}

/* PART columns of 16 rows of C, from registers by way of shared memory, so that a store fills whole sectors. */
static __device__ inline void store_part(const grouped_args &args, const tile_place &t, bf16 *buffer,
                                         const float (*c)[4], int row, int column)
{
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < PART / 8; n++) {
        bf16 *to = buffer + lane / 4 * (PART + PAD) + n * 8 + lane % 4 * 2;
        *reinterpret_cast<uint32_t *>(to) = pack(c[n][0], c[n][1]);
        *reinterpret_cast<uint32_t *>(to + 8 * (PART + PAD)) = pack(c[n][2], c[n][3]);
    }
    __syncwarp();
#pragma unroll
    for (int i = lane; i < 16 * (PART / VEC); i += 32) {
        int r = i / (PART / VEC), n = i % (PART / VEC) * VEC;
        if (row + r < t.end && column + n < args.N)
            *reinterpret_cast<uint4 *>(args.c + (int64_t)(row + r) * args.N + column + n) =
                *reinterpret_cast<const uint4 *>(buffer + r * (PART + PAD) + n);
    }
    __syncwarp();
}

/* By a warpgroup: its 64 rows of each tile. */
template <bool TB>
static __device__ inline void compute_tiles(shared_memory &shared, const grouped_args &args, int group)
{
    int warp = group * 4 + threadIdx.x % WARPGROUP / 32;
    ring_place<STAGES> at = {0, 0};
    tile_place t = {};
    for (int i = blockIdx.x; find_tile(t, shared, args, i); i += gridDim.x) {
        float sum[COLUMNS / 8][4];
        bool rows = t.row + group * 64 < t.end; /* else nothing of this half is stored */
        int before = 0;
        for (int k = 0; k < args.steps; k++, at.next()) {
            barrier_wait(&shared.full[at.stage], at.phase);
            if (rows) {
                issue_stage<TB>(sum, shared.a[at.stage] + group * 64 * PANEL, shared.b[at.stage],
                                k == 0);
                wgmma_wait<1>(sum); /* the stage before is read */
            }
            if (k > 0)
                barrier_release(&shared.empty[before]);
            before = at.stage;
        }
        wgmma_wait<0>(sum);
        barrier_release(&shared.empty[before]);
        if (rows && args.beta != 0.0f)
            add_present(sum, args, t, t.row + warp * 16);
        if (rows)
#pragma unroll
            for (int p = 0; p < COLUMNS / PART; p++)
                store_part(args, t, shared.c[warp], &sum[p * PART / 8], t.row + warp * 16,
                           t.column + p * PART);
    }
}

template <bool TB>
static __global__ void __launch_bounds__(THREADS, 1)
    grouped_kernel(const __grid_constant__ grouped_args args)
{
    extern __shared__ __align__(SWIZZLE_BYTES) unsigned char memory[];
    shared_memory &shared = *reinterpret_cast<shared_memory *>(memory);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(&shared.full[i], 1);
            barrier_init(&shared.empty[i], GROUPS * WARPGROUP / 32);
        }
        barrier_init_done();
    }
    if (threadIdx.x / 32 == 1)
        count_tiles(shared, args);
    __syncthreads();
    if (threadIdx.x < WARPGROUP) {
        /* the kernel has 168 registers a thread: 384 * 168 = 128 * 24 + 256 * 240 */
        registers_less<24>();
        if (threadIdx.x == 0)
            copy_tiles<TB>(shared, args);
    } else {
        registers_more<240>();
        compute_tiles<TB>(shared, args, threadIdx.x / WARPGROUP - 1);
    }
}

/* ---- the launcher ---- */

bool bsk_cuda_gemm_grouped_on_sm90(const bsk_cuda *cuda, const bsk_call *c)
{
    const int64_t *n = c->n, N = n[3], K = n[4];
    uintptr_t bits = (uintptr_t)c->p[0] | (uintptr_t)c->p[1] | (uintptr_t)c->p[2];
    return cuda->capability == 90 && cuda->encode_tensor_map && c->dtype == BS_DTYPE_BF16 &&
           c->out == BS_DTYPE_BF16 && bits % 16 == 0 && N % VEC == 0 && K % VEC == 0 &&
           n[5] % VEC == 0 && K > 0 && n[0] <= MOST && n[2] <= INT32_MAX / 2 && N <= INT32_MAX / 2;
}

cudaError_t bsk_cuda_gemm_grouped_sm90(bsk_cuda *cuda, const bsk_call *c)
{
    const int64_t *n = c->n, E = n[0], M = n[2], N = n[3], K = n[4], stride = n[5];
    const bool tb = n[1] != 0;
    if (M <= 0 || N <= 0 || E <= 0)
        return cudaSuccess;
    auto kernel = tb ? grouped_kernel<true> : grouped_kernel<false>;
    const int bytes = (int)sizeof(shared_memory);
    int64_t tiles = (M / ROWS + E) * ((N + COLUMNS - 1) / COLUMNS); /* at most */
    grouped_args args = {};
    args.offset = (const int32_t *)c->p[3];
    args.c = (bf16 *)c->p[2];
    args.E = (int)E;
    args.M = (int)M;
    args.N = (int)N;
    args.begin = (int)n[6];
    args.steps = (int)((K + PANEL - 1) / PANEL);
    args.beta = (float)c->f[0];
    cudaError_t e = tiles > INT32_MAX / 2 ? cudaErrorInvalidConfiguration : cudaSuccess;
    if (e == cudaSuccess)
        e = tensor_map(cuda, &args.a, c->p[0], M, K, ROWS);
    if (e == cudaSuccess)
        e = slices_map(cuda, &args.b, c->p[1], E, tb ? N : K, tb ? K : N, stride,
                       tb ? (int)COLUMNS : (int)PANEL);
    if (e == cudaSuccess)
        e = cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 bytes);
    if (e != cudaSuccess)
        return e;
    unsigned blocks = (unsigned)(tiles < cuda->processors ? tiles : cuda->processors);
    kernel<<<blocks, THREADS, bytes, cuda->stream>>>(args);
    return cudaGetLastError();
}
