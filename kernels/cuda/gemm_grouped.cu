/* SPDX-License-Identifier: Apache-2.0 */
/*
** gemm_grouped.cu: products of groups of rows with a matrix each, of any type, size and alignment; the
** places of the groups are on the device. A block computes a tile of TILE x TILE of one group: it finds
** its group by counting tiles from the first on. Blocks beyond the last tile, whose number is not known
** at the launch, end at once.
*/
#include "elements.cuh"
#include "launch.cuh"

enum { TILE = 64, DEPTH = 16, SIDE = 16, EACH = TILE / SIDE, TILE_THREADS = SIDE * SIDE };

struct grouped_args {
    const int32_t *offset;
    int64_t E, M, N, K, stride, begin;
    float beta;

    __device__ int64_t start(int64_t e) const
    {
        int64_t at = offset[e] - begin;
        return at < 0 ? 0 : at < M ? at : M;
    }
};

/* Rows of a block: those of a group from first on, end is the group's. */
struct group_rows {
    int64_t e, first, end;
};

static __device__ inline bool find_rows(group_rows &rows, const grouped_args &g, int64_t tile)
{
    for (rows.e = 0; rows.e < g.E; rows.e++) {
        int64_t from = g.start(rows.e), end = g.start(rows.e + 1),
                tiles = (end - from + TILE - 1) / TILE;
        rows.first = from + tile * TILE;
        rows.end = end;
        if (tile < tiles)
            return true;
        tile -= tiles;
    }
    return false;
}

template <class T, class O>
static __global__ void __launch_bounds__(TILE_THREADS)
    grouped_kernel(const T *A, const T *B, O *C, grouped_args g, bool tb)
{
    __shared__ float a[DEPTH][TILE + 1], b[DEPTH][TILE + 1];
    group_rows rows;
    if (!find_rows(rows, g, blockIdx.y))
        return;
    int64_t column = (int64_t)blockIdx.x * TILE;
    int x = threadIdx.x % SIDE, y = threadIdx.x / SIDE;
    float sum[EACH][EACH] = {};
    B += rows.e * g.stride;
    for (int64_t k0 = 0; k0 < g.K; k0 += DEPTH) {
        for (int i = threadIdx.x; i < TILE * DEPTH; i += TILE_THREADS) {
            /* neighbouring threads read along the rows of a matrix as it lies */
            int r = i / DEPTH, k = i % DEPTH, n = tb ? r : i % TILE, d = tb ? k : i / TILE;
            bool in = rows.first + r < rows.end && k0 + k < g.K;
            a[k][r] = in ? to_f32(A[(rows.first + r) * g.K + k0 + k]) : 0.0f;
            in = column + n < g.N && k0 + d < g.K;
            int64_t at = tb ? (column + n) * g.K + k0 + d : (k0 + d) * g.N + column + n;
            b[d][n] = in ? to_f32(B[at]) : 0.0f;
        }
        __syncthreads();
        for (int k = 0; k < DEPTH; k++)
            for (int i = 0; i < EACH; i++)
                for (int j = 0; j < EACH; j++)
                    sum[i][j] += a[k][y + i * SIDE] * b[k][x + j * SIDE];
        __syncthreads();
    }
    for (int i = 0; i < EACH; i++)
        for (int j = 0; j < EACH; j++) {
            int64_t r = rows.first + y + i * SIDE, n = column + x + j * SIDE;
            if (r >= rows.end || n >= g.N)
                continue;
            O *to = &C[r * g.N + n];
            from_f32(to, g.beta == 0.0f ? sum[i][j] : sum[i][j] + g.beta * to_f32(*to));
        }
}

cudaError_t bsk_cuda_gemm_grouped_plain(bsk_cuda *cuda, const bsk_call *c)
{
    const int64_t *n = c->n, M = n[2], N = n[3];
    const grouped_args g = {(const int32_t *)c->p[3], n[0], M, N, n[4], n[5], n[6], (float)c->f[0]};
    int64_t across = (N + TILE - 1) / TILE,
            down = M / TILE + g.E; /* a group ends a tile early, at most */
    if (M <= 0 || N <= 0 || g.E <= 0)
        return cudaSuccess;
    if (across > INT32_MAX || down > 65535)
        return cudaErrorInvalidConfiguration;
    dim3 grid((unsigned)across, (unsigned)down);
    return by_type(cuda, c->dtype, [&](auto t) {
        using T = decltype(t);
        return by_type(cuda, c->out, [&](auto o) {
            using O = decltype(o);
            return issue(cuda, grouped_kernel<T, O>, grid, TILE_THREADS, 0, (const T *)c->p[0],
                         (const T *)c->p[1], (O *)c->p[2], g, n[1] != 0);
        });
    });
}

/* A block a row: it finds its group by halves. */
template <class T>
static __global__ void __launch_bounds__(TILE_THREADS)
    grouped_bias_kernel(T *y, const T *b, grouped_args g, bool wide)
{
    int64_t row = blockIdx.x, low = 0, high = g.E; /* the group is in [low, high) */
    if (row < g.start(0) || row >= g.start(g.E))
        return;
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        if (row < g.start(middle))
            high = middle;
        else
            low = middle;
    }
    y += row * g.N;
    b += low * g.stride;
    for (int64_t c = (int64_t)threadIdx.x * VEC; c < g.N; c += TILE_THREADS * VEC) {
        float sum[VEC], v[VEC];
        load_some(sum, y + c, g.N - c, wide);
        load_some(v, b + c, g.N - c, wide);
#pragma unroll
        for (int i = 0; i < VEC; i++)
            sum[i] += v[i];
        store_some(y + c, sum, g.N - c, wide);
    }
}

cudaError_t bsk_cuda_bias_grouped(bsk_cuda *cuda, const bsk_call *c)
{
    const int64_t *n = c->n;
    const grouped_args g = {(const int32_t *)c->p[2], n[0], n[1], n[2], 0, n[3], n[4], 0.0f};
    if (g.M <= 0 || g.N <= 0 || g.E <= 0)
        return cudaSuccess;
    if (g.M > INT32_MAX)
        return cudaErrorInvalidConfiguration;
    return by_type(cuda, c->dtype, [&](auto t) {
        using T = decltype(t);
        return issue(cuda, grouped_bias_kernel<T>, (unsigned)g.M, TILE_THREADS, 0, (T *)c->p[0],
                     (const T *)c->p[1], g, g.stride % VEC == 0 && rows_wide(g.N, c->p[0], c->p[1]));
    });
}
