/* SPDX-License-Identifier: Apache-2.0 */
/*
** rows.cu: kernels over the rows of x [T,C]: bias and its gradient, softmax, column slices, row gates, gather and
** scatter of rows. Rows are independent; where several rows are added into one (scatter) one block
** owns the target row and adds them in the order of the index.
*/
#include "column_sums.cuh"
#include "row_groups.cuh"

#define ROW_KERNEL(T) template <class T> static __global__ void __launch_bounds__(ROW_THREADS)

ROW_KERNEL(T) bias_kernel(T *y, const T *b, int64_t rows, int64_t C, bool wide)
{
    int64_t t = my_row(), limit = t < rows ? C : 0;
    FOR_COLUMNS(c, limit)
    {
        float v[VEC], add[VEC];
        load_some(v, y + t * C + c, C - c, wide);
        load_some(add, b + c, C - c, wide);
#pragma unroll
        for (int i = 0; i < VEC; i++)
            v[i] += add[i];
        store_some(y + t * C + c, v, C - c, wide);
    }
}

cudaError_t bsk_cuda_bias(bsk_cuda *cuda, const bsk_call *c)
{
    int64_t C = c->n[1];
    return by_type(cuda, c->dtype, [&](auto t) {
        using T = decltype(t);
        return issue_rows(cuda, bias_kernel<T>, c->n[0], C, (T *)c->p[0], (const T *)c->p[1], c->n[0],
                          C, rows_wide(C, c->p[0], c->p[1]));
    });
}

/* The gradient of a bias. */
cudaError_t bsk_cuda_colsum(bsk_cuda *cuda, const bsk_call *c)
{
    return by_type(cuda, c->dtype, [&](auto t) {
        using T = decltype(t);
        return column_sums(cuda, element_term<T>{(const T *)c->p[0], c->n[1]}, c->p[1], c->n[0],
                           c->n[1]);
    });
}

ROW_KERNEL(T) softmax_kernel(const T *x, T *y, int64_t rows, int64_t C, bool wide)
{
    int64_t t = my_row(), limit = t < rows ? C : 0;
    float max = -INFINITY, sum = 0.0f;
    x += t * C;
    FOR_COLUMNS(c, limit)
    {
        float v[VEC];
        load_some(v, x + c, C - c, wide);
#pragma unroll
        for (int i = 0; i < VEC; i++)
            max = c + i < C ? fmaxf(max, v[i]) : max;
    }
    max = group_reduce(max, op_max());
    FOR_COLUMNS(c, limit)
    {
        float v[VEC];
        load_some(v, x + c, C - c, wide);
#pragma unroll
        for (int i = 0; i < VEC; i++)
            sum += c + i < C ? expf(v[i] - max) : 0.0f;
    }
    float inv = 1.0f / group_reduce(sum, op_add());
    FOR_COLUMNS(c, limit)
    {
        float v[VEC];
        load_some(v, x + c, C - c, wide);
#pragma unroll
        for (int i = 0; i < VEC; i++)
            v[i] = expf(v[i] - max) * inv;
        store_some(y + t * C + c, v, C - c, wide);
    }
}

cudaError_t bsk_cuda_softmax(bsk_cuda *cuda, const bsk_call *c)
{
    int64_t C = c->n[1];
    return by_type(cuda, c->dtype, [&](auto t) {
        using T = decltype(t);
        return issue_rows(cuda, softmax_kernel<T>, c->n[0], C, (const T *)c->p[0], (T *)c->p[1],
                          c->n[0], C, rows_wide(C, c->p[0], c->p[1]));
    });
}

/* dx = y * (dy - sum(y * dy)) */
ROW_KERNEL(T) softmax_bwd_kernel(const T *y, const T *dy, T *dx, int64_t rows, int64_t C, bool wide)
{
    int64_t t = my_row(), limit = t < rows ? C : 0;
    float dot = row_dot(y + t * C, dy + t * C, limit, wide);
    FOR_COLUMNS(c, limit)
    {
        float u[VEC], v[VEC];
        load_some(u, y + t * C + c, C - c, wide);
        load_some(v, dy + t * C + c, C - c, wide);
#pragma unroll
        for (int i = 0; i < VEC; i++)
            v[i] = u[i] * (v[i] - dot);
        store_some(dx + t * C + c, v, C - c, wide);
    }
}

cudaError_t bsk_cuda_softmax_bwd(bsk_cuda *cuda, const bsk_call *c)
{
    int64_t C = c->n[1];
    return by_type(cuda, c->dtype, [&](auto t) {
        using T = decltype(t);
        return issue_rows(cuda, softmax_bwd_kernel<T>, c->n[0], C, (const T *)c->p[0],
                          (const T *)c->p[1], (T *)c->p[2], c->n[0], C,
                          rows_wide(C, c->p[0], c->p[1], c->p[2]));
    });
}

/* y [T,n] = columns [first, first+n) of x [T,C]; first 0 and n = C copies */
ROW_KERNEL(T)
columns_kernel(const T *x, T *y, int64_t rows, int64_t C, int64_t first, int64_t n, bool wide)
{
    int64_t t = my_row(), limit = t < rows ? n : 0;
    FOR_COLUMNS(c, limit)
    {
        float v[VEC];
        load_some(v, x + t * C + first + c, n - c, wide);
        store_some(y + t * n + c, v, n - c, wide);
    }
}

cudaError_t bsk_cuda_columns(bsk_cuda *cuda, const bsk_call *c)
{
    int64_t C = c->n[1], first = c->n[2], n = c->n[3];
    return by_type(cuda, c->dtype, [&](auto t) {
        using T = decltype(t);
        bool wide = C % VEC == 0 && first % VEC == 0 && rows_wide(n, c->p[0], c->p[1]);
        return issue_rows(cuda, columns_kernel<T>, c->n[0], n, (const T *)c->p[0], (T *)c->p[1],
                          c->n[0], C, first, n, wide);
    });
}

/* dx [T,C] is dy [T,n] in columns [first, first+n) and zero elsewhere */
ROW_KERNEL(T) columns_bwd_kernel(const T *dy, T *dx, int64_t rows, int64_t C, int64_t first, int64_t n)
{
    int64_t t = my_row(), limit = t < rows ? C : 0;
    for (int64_t c = threadIdx.x; c < limit; c += blockDim.x) {
        int64_t at = c - first;
        from_f32(&dx[t * C + c], at >= 0 && at < n ? to_f32(dy[t * n + at]) : 0.0f);
    }
}

cudaError_t bsk_cuda_columns_bwd(bsk_cuda *cuda, const bsk_call *c)
{
    return by_type(cuda, c->dtype, [&](auto t) {
        using T = decltype(t);
        return issue_rows(cuda, columns_bwd_kernel<T>, c->n[0], c->n[1], (const T *)c->p[0],
                          (T *)c->p[1], c->n[0], c->n[1], c->n[2], c->n[3]);
    });
}

/* y = g[t * G + column] * x; the gate's element type G_T may differ from the rows' */
template <class T, class GT>
static __global__ void __launch_bounds__(ROW_THREADS)
    row_scale_kernel(const T *x, const GT *g, T *y, int64_t rows, int64_t C, int64_t G, int64_t column,
                     bool wide)
{
    int64_t t = my_row(), limit = t < rows ? C : 0;
    float gate = limit ? to_f32(g[t * G + column]) : 0.0f;
    scale_row(y + t * C, x + t * C, gate, limit, C, wide);
}

cudaError_t bsk_cuda_row_scale(bsk_cuda *cuda, const bsk_call *c)
{
    int64_t C = c->n[1];
    return by_type(cuda, c->dtype, [&](auto t) {
        using T = decltype(t);
        return issue_rows(cuda, row_scale_kernel<T, T>, c->n[0], C, (const T *)c->p[0],
                          (const T *)c->p[1], (T *)c->p[2], c->n[0], C, c->n[2], c->n[3],
                          rows_wide(C, c->p[0], c->p[2]));
    });
}

cudaError_t bsk_cuda_row_mul(bsk_cuda *cuda, const bsk_call *c)
{
    int64_t C = c->n[1];
    return issue_rows(cuda, row_scale_kernel<float, float>, c->n[0], C, (const float *)c->p[0],
                      (const float *)c->p[1], (float *)c->p[0], c->n[0], C, 1, 0,
                      rows_wide(C, c->p[0]));
}

/* dx = g * dy, dg = sum(x * dy) in its column and zero in the others; dx may be dy or x */
ROW_KERNEL(T)
row_scale_bwd_kernel(const T *x, const T *g, const T *dy, T *dx, T *dg, int64_t rows, int64_t C,
                     int64_t G, int64_t column, bool wide)
{
    int64_t t = my_row(), limit = t < rows ? C : 0;
    float dot = row_dot(x + t * C, dy + t * C, limit, wide);
    float gate = limit ? to_f32(g[t * G + column]) : 0.0f;
    scale_row(dx + t * C, dy + t * C, gate, limit, C, wide);
    for (int64_t i = threadIdx.x; i < (limit ? G : 0); i += blockDim.x)
        from_f32(&dg[t * G + i], i == column ? dot : 0.0f);
}

cudaError_t bsk_cuda_row_scale_bwd(bsk_cuda *cuda, const bsk_call *c)
{
    int64_t C = c->n[1];
    return by_type(cuda, c->dtype, [&](auto t) {
        using T = decltype(t);
        return issue_rows(cuda, row_scale_bwd_kernel<T>, c->n[0], C, (const T *)c->p[0],
                          (const T *)c->p[1], (const T *)c->p[2], (T *)c->p[3], (T *)c->p[4], c->n[0],
                          C, c->n[2], c->n[3], rows_wide(C, c->p[0], c->p[2], c->p[3]));
    });
}

/* ---- gather and scatter ---- */

ROW_KERNEL(T) gather_kernel(const T *x, const int32_t *index, T *y, int64_t n, int64_t C, bool wide)
{
    int64_t i = my_row(), limit = i < n ? C : 0;
    const T *from = limit ? x + (int64_t)index[i] * C : x;
    FOR_COLUMNS(c, limit)
    {
        float v[VEC];
        load_some(v, from + c, C - c, wide);
        store_some(y + i * C + c, v, C - c, wide);
    }
}

cudaError_t bsk_cuda_gather_rows(bsk_cuda *cuda, const bsk_call *c)
{
    int64_t C = c->n[1];
    return by_type(cuda, c->dtype, [&](auto t) {
        using T = decltype(t);
        return issue_rows(cuda, gather_kernel<T>, c->n[0], C, (const T *)c->p[0],
                          (const int32_t *)c->p[1], (T *)c->p[2], c->n[0], C,
                          rows_wide(C, c->p[0], c->p[2]));
    });
}

enum {
    SCAN = 8, /* index entries that a thread looks at in a step */
    SPAN = SCAN * ROW_THREADS
};

/* The places of `row` among index[from, end), in order, to list; their number. All threads call. */
static __device__ int find_row(const int32_t *index, int64_t from, int64_t end, int32_t row, int *list)
{
    __shared__ int start[ROW_THREADS / 32];
    int thread = threadIdx.x, lane = thread % 32, found = 0;
    int64_t at = from + (int64_t)thread * SCAN;
    for (int i = 0; i < SCAN; i++)
        found += at + i < end && index[at + i] == row;
    if (!__syncthreads_or(found))
        return 0;
    int sum = found; /* inclusive over the threads of a warp */
    for (int d = 1; d < 32; d *= 2) {
        int below = __shfl_up_sync(0xFFFFFFFFu, sum, d);
        sum += lane >= d ? below : 0;
    }
    if (lane == 31)
        start[thread / 32] = sum;
    __syncthreads();
    int total = 0, to = sum - found;
    for (int w = 0; w < ROW_THREADS / 32; w++) {
        to += w < thread / 32 ? start[w] : 0;
        total += start[w];
    }
    for (int i = 0; i < SCAN; i++)
        if (at + i < end && index[at + i] == row)
            list[to++] = (int)(at + i - from);
    __syncthreads();
    return total;
}

/* One block per entry of the index. The block of a row's first entry adds all entries of that row. The
   sum of a span of entries is f32 and rounded once. */
ROW_KERNEL(T)
scatter_kernel(const T *dy, const int32_t *index, T *dx, int64_t n, int64_t C, float s, bool wide)
{
    __shared__ int list[SPAN];
    int64_t first = blockIdx.x;
    int32_t row = index[first];
    int earlier = 0;
    for (int64_t j = threadIdx.x; j < first; j += ROW_THREADS)
        earlier |= index[j] == row;
    if (__syncthreads_or(earlier))
        return;
    dx += (int64_t)row * C;
    for (int64_t from = first; from < n; from += SPAN) {
        int count = find_row(index, from, n, row, list);
        for (int64_t c = (int64_t)threadIdx.x * VEC; count > 0 && c < C; c += ROW_THREADS * VEC) {
            float sum[VEC], v[VEC];
            load_some(sum, dx + c, C - c, wide);
            for (int k = 0; k < count; k++) {
                load_some(v, dy + (from + list[k]) * C + c, C - c, wide);
#pragma unroll
                for (int i = 0; i < VEC; i++)
                    sum[i] += s * v[i];
            }
            store_some(dx + c, sum, C - c, wide);
        }
        __syncthreads(); /* list is used up */
    }
}

cudaError_t bsk_cuda_scatter_rows(bsk_cuda *cuda, const bsk_call *c)
{
    int64_t n = c->n[0], C = c->n[1];
    if (n <= 0 || C <= 0)
        return cudaSuccess;
    if (n > INT32_MAX)
        return cudaErrorInvalidConfiguration;
    return by_type(cuda, c->dtype, [&](auto t) {
        using T = decltype(t);
        return issue(cuda, scatter_kernel<T>, (unsigned)n, ROW_THREADS, 0, (const T *)c->p[0],
                     (const int32_t *)c->p[1], (T *)c->p[2], n, C, (float)c->f[0],
                     rows_wide(C, c->p[0], c->p[2]));
    });
}
