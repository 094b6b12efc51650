/* SPDX-License-Identifier: Apache-2.0 */
/*
** route.cu: routing of a mixture of experts: which experts a row goes to and with what weights, the order that
** brings each expert's rows together, rows to and from that order. A warp owns a row of logits; its lane l has
** the experts l, l + 32, ... in registers.
*/
#include "row_groups.cuh"
#include "warp.cuh"

#define ROW_KERNEL(T) template <class T> static __global__ void __launch_bounds__(ROW_THREADS)

enum { ROUTE_WARPS = 4, ROUTE_THREADS = 32 * ROUTE_WARPS };
#define ALL_LANES 0xFFFFFFFFu

struct routing {
    int64_t T;
    int E, k, kind, groups, kept;
    bool renorm;
    float scale;
};

static routing routing_of(const bsk_call *c)
{
    return routing{c->n[0],      (int)c->n[1], (int)c->n[2], (int)c->n[3],
                   (int)c->n[4], (int)c->n[5], c->n[6] != 0, (float)c->f[0]};
}

/* ---- the choice ---- */

/* Unsigned numbers in the order of floats: one for both zeros, the largest for NaN, 0 for none. */
static __device__ inline uint32_t sort_key(float v)
{
    uint32_t bits = v == 0.0f ? 0u : __float_as_uint(v);
    return isnan(v) ? 0xFFFFFFFFu : bits >> 31 ? ~bits : bits | 0x80000000u;
}

/* What a softmax over a row is made of. */
struct softmax_row {
    float most, sum;
};

static __device__ inline float score(int kind, float z, softmax_row of)
{
    if (kind == BSK_ROUTE_SIGMOID)
        return 1.0f / (1.0f + expf(-z));
    return kind == BSK_ROUTE_SOFTMAX ? expf(z - of.most) / of.sum : z;
}

/* z [E] of a row to the lanes' logits; -infinity where there is no expert. */
template <int EACH, class T>
static __device__ inline void load_logits(float (&v)[EACH], const T *z, int E)
{
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        int e = threadIdx.x % 32 + 32 * j;
        v[j] = e < E ? to_f32(z[e]) : -INFINITY;
    }
}

template <int EACH> static __device__ inline softmax_row softmax_of(const float (&v)[EACH], int E)
{
    softmax_row of = {-INFINITY, 0.0f};
#pragma unroll
    for (int j = 0; j < EACH; j++)
        of.most = fmaxf(of.most, v[j]);
    of.most = warp_max(of.most);
#pragma unroll
    for (int j = 0; j < EACH; j++)
        of.sum += (int)threadIdx.x % 32 + 32 * j < E ? expf(v[j] - of.most) : 0.0f;
    of.sum = warp_sum(of.sum);
    return of;
}

/* c [E] of the warp: what experts are compared by. c[g] becomes whether group g is kept. c has room for E and
   for the groups' scores. */
static __device__ void keep_groups(float *c, const routing &r)
{
    int lane = threadIdx.x % 32, size = r.E / r.groups;
    float *sum = c + r.E;
    __syncwarp();
    for (int g = lane; g < r.groups; g += 32) {
        float first = 0.0f, second = 0.0f;
        uint32_t first_key = 0, second_key = 0;
        for (int e = g * size; e < (g + 1) * size; e++) {
            uint32_t key = sort_key(c[e]);
            if (key > first_key) {
                second = first, second_key = first_key;
                first = c[e], first_key = key;
            } else if (key > second_key) {
                second = c[e], second_key = key;
            }
        }
        sum[g] = first + second;
    }
    __syncwarp();
    for (int g = lane; g < r.groups; g += 32) {
        uint32_t key = sort_key(sum[g]);
        int before = 0;
        for (int h = 0; h < r.groups; h++) {
            uint32_t other = sort_key(sum[h]);
            before += other > key || (other == key && h < g);
        }
        c[g] = before < r.kept;
    }
    __syncwarp();
}

/* The k largest keys of the warp's experts, of equal ones the first: bit j of a lane for its j-th. */
template <int EACH> static __device__ inline uint32_t largest(const uint32_t (&key)[EACH], int k)
{
    uint32_t chosen = 0, lane = threadIdx.x % 32;
    for (int i = 0; i < k; i++) {
        uint32_t most = 0, at = 0;
#pragma unroll
        for (int j = 0; j < EACH; j++)
            if (!(chosen >> j & 1) && key[j] > most) {
                most = key[j];
                at = j;
            }
        uint32_t top = __reduce_max_sync(ALL_LANES, most), e = lane + 32 * at;
        if (__reduce_min_sync(ALL_LANES, most == top ? e : ~0u) == e)
            chosen |= 1u << at;
    }
    return chosen;
}

template <int EACH, class T>
static __global__ void __launch_bounds__(ROUTE_THREADS)
    route_kernel(const T *z, const float *bias, T *w, int32_t *id, routing r)
{
    DYNAMIC_SHARED(float, group_scores);
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int64_t t = (int64_t)blockIdx.x * ROUTE_WARPS + warp;
    float v[EACH], s[EACH];
    uint32_t key[EACH];
    if (t >= r.T)
        return;
    load_logits(v, z + t * r.E, r.E);
    softmax_row of = r.kind == BSK_ROUTE_SOFTMAX ? softmax_of(v, r.E) : softmax_row();
    float *c = group_scores + warp * (r.E + r.groups);
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        int e = lane + 32 * j;
        bool any = e < r.E;
        s[j] = any ? score(r.kind, v[j], of) : 0.0f;
        float compared = s[j] + (bias && any ? bias[e] : 0.0f);
        key[j] = any ? sort_key(bias ? compared : v[j]) : 0;
        if (r.groups > 1 && any)
            c[e] = compared;
    }
    if (r.groups > 1) {
        keep_groups(c, r);
#pragma unroll
        for (int j = 0; j < EACH; j++)
            if (lane + 32 * j < r.E && c[(lane + 32 * j) / (r.E / r.groups)] == 0.0f)
                key[j] = 0;
    }
    uint32_t chosen = largest(key, r.k);

    float most = -INFINITY, sum = 0.0f;
    if (r.kind == BSK_ROUTE_CHOSEN) {
#pragma unroll
        for (int j = 0; j < EACH; j++)
            most = chosen >> j & 1 ? fmaxf(most, v[j]) : most;
        most = warp_max(most);
    }
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        s[j] = r.kind == BSK_ROUTE_CHOSEN ? expf(v[j] - most) : s[j];
        sum += chosen >> j & 1 ? s[j] : 0.0f;
    }
    sum = warp_sum(sum) + 1e-20f;
    if (!r.renorm && r.kind != BSK_ROUTE_CHOSEN)
        sum = 1.0f;
    int before = 0;
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        uint32_t who = __ballot_sync(ALL_LANES, chosen >> j & 1);
        int64_t at = t * r.k + before + __popc(who & ((1u << lane) - 1));
        if (chosen >> j & 1) {
            id[at] = lane + 32 * j;
            from_f32(&w[at], s[j] / sum * r.scale);
        }
        before += __popc(who);
    }
}

/* w_i = scale p_i / S: of p_i the gradient is scale (dw_i - sum_j dw_j p_j / S) / S where S is their sum. A
   lane has the choices l, l + 32, ... of its row; dz may be z. */
template <int EACH, class T>
static __global__ void __launch_bounds__(ROUTE_THREADS)
    route_bwd_kernel(const T *z, const int32_t *id, const T *dw, T *dz, routing r)
{
    int lane = threadIdx.x % 32;
    int64_t t = (int64_t)blockIdx.x * ROUTE_WARPS + threadIdx.x / 32;
    bool softmax = r.kind == BSK_ROUTE_SOFTMAX, of_chosen = r.kind == BSK_ROUTE_CHOSEN;
    float v[EACH], p[EACH], d[EACH];
    int at[EACH];
    if (t >= r.T)
        return;
    z += t * r.E, dz += t * r.E, id += t * r.k, dw += t * r.k;
    load_logits(v, z, r.E);
    softmax_row of = softmax ? softmax_of(v, r.E) : softmax_row();
    float most = -INFINITY, sum = 0.0f, mean = 0.0f, all = 0.0f;
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        bool any = lane + 32 * j < r.k;
        at[j] = any ? id[lane + 32 * j] : -1;
        p[j] = any ? score(r.kind, to_f32(z[at[j]]), of) : 0.0f;
        d[j] = any ? to_f32(dw[lane + 32 * j]) : 0.0f;
        most = any ? fmaxf(most, p[j]) : most;
    }
    most = warp_max(most);
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        p[j] = of_chosen && at[j] >= 0 ? expf(p[j] - most) : p[j];
        sum += p[j];
        mean += d[j] * p[j];
    }
    sum = warp_sum(sum) + 1e-20f;
    mean = warp_sum(mean) / sum;
    if (!r.renorm && !of_chosen)
        sum = 1.0f, mean = 0.0f;
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        d[j] = at[j] >= 0 ? r.scale * (d[j] - mean) / sum * p[j] : 0.0f;
        all += d[j];
    }
    all = warp_sum(all);
#pragma unroll
    for (int j = 0; j < EACH; j++)
        if (lane + 32 * j < r.E)
            from_f32(&dz[lane + 32 * j], softmax ? -all * score(r.kind, v[j], of) : 0.0f);
    __syncwarp(); /* the chosen ones are written again, each by a lane that is not its own */
#pragma unroll
    for (int j = 0; j < EACH; j++)
        if (at[j] >= 0)
            from_f32(&dz[at[j]], softmax ? d[j] - all * p[j] : of_chosen ? d[j] : d[j] * (1.0f - p[j]));
}

template <int N> struct each {
    enum { experts = N };
};

/* fn(each<N>()) with the experts that a lane has. */
template <class F> static cudaError_t by_experts(bsk_cuda *cuda, const routing &r, F fn)
{
    if ((r.T + ROUTE_WARPS - 1) / ROUTE_WARPS > INT32_MAX)
        return cudaErrorInvalidConfiguration;
    if (r.E > BSK_ROUTE_EXPERTS) {
        cuda->note = "a layer has 1024 experts at most";
        return cudaErrorNotSupported;
    }
    if (r.T <= 0)
        return cudaSuccess;
    return r.E <= 32    ? fn(each<1>())
           : r.E <= 128 ? fn(each<4>())
           : r.E <= 256 ? fn(each<8>())
           : r.E <= 512 ? fn(each<16>())
                        : fn(each<32>());
}

static unsigned route_grid(const routing &r)
{
    return (unsigned)((r.T + ROUTE_WARPS - 1) / ROUTE_WARPS);
}

cudaError_t bsk_cuda_route(bsk_cuda *cuda, const bsk_call *c)
{
    routing r = routing_of(c);
    size_t bytes = r.groups > 1 ? ROUTE_WARPS * sizeof(float) * (size_t)(r.E + r.groups) : 0;
    return by_type(cuda, c->dtype, [&](auto type) {
        using T = decltype(type);
        return by_experts(cuda, r, [&](auto n) {
            return issue(cuda, route_kernel<decltype(n)::experts, T>, route_grid(r), ROUTE_THREADS,
                         bytes, (const T *)c->p[0], (const float *)c->p[1], (T *)c->p[2],
                         (int32_t *)c->p[3], r);
        });
    });
}

cudaError_t bsk_cuda_route_bwd(bsk_cuda *cuda, const bsk_call *c)
{
    routing r = routing_of(c);
    return by_type(cuda, c->dtype, [&](auto type) {
        using T = decltype(type);
        return by_experts(cuda, r, [&](auto n) {
            return issue(cuda, route_bwd_kernel<decltype(n)::experts, T>, route_grid(r), ROUTE_THREADS,
                         0, (const T *)c->p[0], (const int32_t *)c->p[1], (const T *)c->p[2],
                         (T *)c->p[3], r);
        });
    });
}

/* ---- the sort: places within chunks, where chunks begin within experts, places ---- */

enum {
    SORT_WARPS = 8,
    SORT_THREADS = 32 * SORT_WARPS,
    SORT_EACH = BSK_SORT_CHUNK / SORT_THREADS, /* entries of a thread */
    SCAN_THREADS = BSK_ROUTE_EXPERTS,
    SCAN_STEP = 8 /* counts that a thread reads at a time */
};

/* A block per chunk, of which each warp has a run of entries. place: of an entry among those of its expert in the
   chunk, or -1; count [chunks, E]: how many those are. */
static __global__ void __launch_bounds__(SORT_THREADS)
    sort_chunk_kernel(const int32_t *id, int32_t *place, int32_t *count, int64_t n, int E)
{
    DYNAMIC_SHARED(int32_t, seen); /* [SORT_WARPS][E] */
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int32_t *mine = seen + warp * E, expert[SORT_EACH], rank[SORT_EACH];
    int64_t first = (int64_t)blockIdx.x * BSK_SORT_CHUNK + warp * 32 * SORT_EACH + lane;
    for (int i = threadIdx.x; i < SORT_WARPS * E; i += SORT_THREADS)
        seen[i] = 0;
#pragma unroll
    for (int i = 0; i < SORT_EACH; i++) {
        int32_t e = first + 32 * i < n ? id[first + 32 * i] : -1;
        expert[i] = e >= 0 && e < E ? e : -1;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < SORT_EACH; i++) {
        uint32_t same = __match_any_sync(ALL_LANES, expert[i]);
        int earlier = __popc(same & ((1u << lane) - 1)), before = expert[i] < 0 ? 0 : mine[expert[i]];
        rank[i] = before + earlier;
        __syncwarp();
        if (expert[i] >= 0 && earlier == 0)
            mine[expert[i]] = before + __popc(same);
        __syncwarp();
    }
    __syncthreads();
    for (int e = threadIdx.x; e < E; e += SORT_THREADS) {
        int32_t sum = 0;
        for (int w = 0; w < SORT_WARPS; w++) {
            int32_t more = seen[w * E + e];
            seen[w * E + e] = sum;
            sum += more;
        }
        count[(int64_t)blockIdx.x * E + e] = sum;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < SORT_EACH; i++)
        if (first + 32 * i < n)
            place[first + 32 * i] = expert[i] < 0 ? -1 : mine[expert[i]] + rank[i];
}

/* The sum of v over the threads before this one of a block of SCAN_THREADS. */
static __device__ inline int32_t sum_before(int32_t v)
{
    __shared__ int32_t warps[SCAN_THREADS / 32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int32_t sum = v; /* inclusive over the threads of a warp */
    for (int d = 1; d < 32; d *= 2) {
        int32_t below = __shfl_up_sync(ALL_LANES, sum, d);
        sum += lane >= d ? below : 0;
    }
    if (lane == 31)
        warps[warp] = sum;
    __syncthreads();
    sum -= v;
    for (int w = 0; w < warp; w++)
        sum += warps[w];
    return sum;
}

/* One block. Threads p * E + e have a part of the chunks of expert e each. count becomes where in the order the
   chunk's entries of an expert begin. */
static __global__ void __launch_bounds__(SCAN_THREADS)
    sort_scan_kernel(int32_t *count, int32_t *offset, int chunks, int E)
{
    __shared__ int32_t begin[SCAN_THREADS]; /* of a thread's chunks among those of its expert */
    __shared__ int32_t start[SCAN_THREADS]; /* of an expert */
    int thread = threadIdx.x, parts = SCAN_THREADS / E, e = thread % E, part = thread / E;
    int per = (chunks + parts - 1) / parts, first = part * per;
    int end = part < parts ? min(first + per, chunks) : first;
    int32_t sum = 0, total = 0, more[SCAN_STEP];
    for (int c = first; c < end; c += SCAN_STEP) {
#pragma unroll
        for (int i = 0; i < SCAN_STEP; i++)
            sum += c + i < end ? count[(int64_t)(c + i) * E + e] : 0;
    }
    begin[thread] = sum;
    __syncthreads();
    for (int p = 0; p < parts && thread < E; p++) {
        int32_t part_sum = begin[p * E + thread];
        begin[p * E + thread] = total;
        total += part_sum;
    }
    int32_t before = sum_before(total);
    start[thread] = before;
    if (thread < E)
        offset[thread] = before;
    if (thread == E - 1)
        offset[E] = before + total;
    __syncthreads();
    sum = start[e] + begin[thread];
    for (int c = first; c < end; c += SCAN_STEP) {
#pragma unroll
        for (int i = 0; i < SCAN_STEP; i++)
            more[i] = c + i < end ? count[(int64_t)(c + i) * E + e] : 0;
#pragma unroll
        for (int i = 0; i < SCAN_STEP; i++) {
            if (c + i < end)
                count[(int64_t)(c + i) * E + e] = sum;
            sum += more[i];
        }
    }
}

static __global__ void __launch_bounds__(SORT_THREADS)
    sort_place_kernel(const int32_t *id, const int32_t *begin, const int32_t *offset, int32_t *place,
                      int32_t *order, int64_t n, int E)
{
    int64_t i = (int64_t)blockIdx.x * SORT_THREADS + threadIdx.x;
    if (i >= n)
        return;
    int32_t at = place[i];
    if (at >= 0) {
        at += begin[i / BSK_SORT_CHUNK * E + id[i]];
        place[i] = at;
        order[at] = (int32_t)i;
    }
    if (i >= offset[E])
        order[i] = -1;
}

cudaError_t bsk_cuda_sort_rows(bsk_cuda *cuda, const bsk_call *c)
{
    const int32_t *id = (const int32_t *)c->p[0];
    int32_t *order = (int32_t *)c->p[1], *place = (int32_t *)c->p[2], *offset = (int32_t *)c->p[3],
            *count = (int32_t *)c->p[4];
    int64_t n = c->n[0], chunks = (n + BSK_SORT_CHUNK - 1) / BSK_SORT_CHUNK;
    int E = (int)c->n[1];
    if (n > INT32_MAX)
        return cudaErrorInvalidConfiguration;
    if (E < 1 || E > BSK_ROUTE_EXPERTS) {
        cuda->note = "a layer has 1024 experts at most";
        return cudaErrorNotSupported;
    }
    cudaError_t e = cudaSuccess;
    if (n > 0)
        e = issue(cuda, sort_chunk_kernel, (unsigned)chunks, SORT_THREADS,
                  SORT_WARPS * sizeof(int32_t) * (size_t)E, id, place, count, n, E);
    if (e == cudaSuccess)
        e = issue(cuda, sort_scan_kernel, 1, SCAN_THREADS, 0, count, offset, (int)chunks, E);
    if (e == cudaSuccess && n > 0)
        e = issue(cuda, sort_place_kernel, (unsigned)((n + SORT_THREADS - 1) / SORT_THREADS),
                  SORT_THREADS, 0, id, (const int32_t *)count, (const int32_t *)offset, place, order, n,
                  E);
    return e;
}

/* ---- rows to and from the order ---- */

/* How the rows of x lie, and how many there are to move. */
struct pieces {
    int64_t n, C, stride;
    int k, rows;
};

static pieces pieces_of(int64_t n, int64_t C, int64_t k, int64_t rows, int64_t stride)
{
    return pieces{n, C, stride, (int)k, (int)(rows < INT32_MAX ? rows : INT32_MAX)};
}

static __device__ inline int64_t row_start(const pieces &a, int row)
{
    return row / a.rows * a.stride + row % a.rows * a.C;
}

enum { HELD = 4 }; /* vectors that a thread moves at a time */

ROW_KERNEL(T) take_kernel(const T *x, const int32_t *order, T *y, pieces a, bool wide)
{
    int64_t i = my_row(), step = (int64_t)blockDim.x * VEC;
    if (i >= a.n)
        return;
    int32_t at = order[i];
    const T *from = x + (at < 0 ? 0 : row_start(a, at / a.k));
    for (int64_t c = (int64_t)threadIdx.x * VEC; c < a.C; c += HELD * step) {
        stored8<T> v[HELD];
#pragma unroll
        for (int h = 0; h < HELD; h++)
            load_some(v[h], from + c + h * step, at < 0 ? 0 : a.C - c - h * step, wide);
#pragma unroll
        for (int h = 0; h < HELD; h++)
            store_some(y + i * a.C + c + h * step, v[h], a.C - c - h * step, wide);
    }
}

cudaError_t bsk_cuda_take_rows(bsk_cuda *cuda, const bsk_call *c)
{
    pieces a = pieces_of(c->n[0], c->n[1], c->n[2], c->n[3], c->n[4]);
    bool wide = a.stride % VEC == 0 && rows_wide(a.C, c->p[0], c->p[2]);
    return by_type(cuda, c->dtype, [&](auto t) {
        using T = decltype(t);
        return issue_rows<HELD>(cuda, take_kernel<T>, a.n, a.C, (const T *)c->p[0],
                                (const int32_t *)c->p[1], (T *)c->p[2], a, wide);
    });
}

/* A window of the order: rows of y. */
struct window {
    int64_t begin, n;
    __device__ bool holds(int32_t place) const { return place >= begin && place < begin + n; }
};

/* place: of -1 none is in a window */
ROW_KERNEL(T) sum_kernel(const T *y, const int32_t *place, float *sum, pieces a, window in, bool wide)
{
    int64_t r = my_row();
    bool any = false;
    if (r >= a.n)
        return;
    place += r * a.k;
    for (int i = 0; i < a.k; i++)
        any = any || in.holds(place[i]);
    if (!any)
        return;
    sum += row_start(a, (int)r);
    FOR_COLUMNS(c, a.C)
    {
        float v[VEC];
        load_some(v, sum + c, a.C - c, wide);
        for (int first = 0; first < a.k; first += HELD) {
            stored8<T> s[HELD];
            bool add[HELD];
#pragma unroll
            for (int h = 0; h < HELD; h++) {
                int32_t p = first + h < a.k ? place[first + h] : -1;
                add[h] = in.holds(p);
                load_some(s[h], y + (add[h] ? (p - in.begin) * a.C + c : 0), add[h] ? a.C - c : 0,
                          wide);
            }
#pragma unroll
            for (int h = 0; h < HELD; h++)
#pragma unroll
                for (int i = 0; i < VEC; i++)
                    v[i] = add[h] ? v[i] + to_f32(s[h].v[i]) : v[i];
        }
        store_some(sum + c, v, a.C - c, wide);
    }
}

cudaError_t bsk_cuda_sum_rows(bsk_cuda *cuda, const bsk_call *c)
{
    pieces a = pieces_of(c->n[0], c->n[1], c->n[2], c->n[5], c->n[6]);
    window in = {c->n[3], c->n[4]};
    bool wide = a.stride % VEC == 0 && rows_wide(a.C, c->p[0], c->p[2]);
    if (a.n > INT32_MAX)
        return cudaErrorInvalidConfiguration;
    return by_type(cuda, c->dtype, [&](auto t) {
        using T = decltype(t);
        return issue_rows(cuda, sum_kernel<T>, a.n, a.C, (const T *)c->p[0], (const int32_t *)c->p[1],
                          (float *)c->p[2], a, in, wide);
    });
}
