/* SPDX-License-Identifier: Apache-2.0 */
/*
** cuda_kernels.c: times of the cuda device's kernels, through the device layer, at the sizes of a
** model of eight billion parameters. Random operands, larger than the caches. A time is the best of
** three means; TFLOP/s count a masked score once and half of a causal square; GB/s count each operand
** once.
**   bench_cuda_kernels [WORD]     only the kernels whose name holds the word
*/
#include "dev/dev.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static bs_dev *dev;
static bsi_queue *queue;
static uint64_t random_state = 1;
static const char *only = "";

static void must(bs_status st, const char *what)
{
    if (st == BS_OK)
        return;
    printf("FATAL %s: %s: %s\n", what, bs_status_name(st), bs_error()->msg);
    exit(1);
}

/* Seconds of one launch, from enough of them to fill 0.2 s. Operands lie behind each other. */
static double seconds(const char *name, bsk_op op, bs_dtype dtype, bs_dtype out, int count,
                      const size_t *bytes, const uint8_t *mode, const int64_t *n, const double *f,
                      void (*prepare)(bsi_mem *, const size_t *))
{
    bsi_kcall call = {.op = op, .n_args = count, .dtype = dtype, .out = out, .label = name};
    size_t at[BSK_MAX_ARGS], total = 0;
    bsi_mem *mem, *host;
    bs_dev_props props;
    for (int i = 0; i < count; i++) {
        at[i] = total;
        total += bsi_round_up(bytes[i], 256);
    }
    bs_dev_props_get(dev, &props);
    must(bsi_mem_alloc(dev, BSI_MEM_DEVICE, BS_TAG_DEVICE, total + props.workspace_bytes, &mem), name);
    call.workspace = (bsi_arg){{mem, total}, props.workspace_bytes, BSI_READWRITE};
    must(bsi_mem_alloc(dev, BSI_MEM_PINNED, BS_TAG_STAGING, total, &host), name);
    uint32_t *words = host->host; /* two bf16, or one f32, of about -1 to 1 */
    for (size_t i = 0; i < total / 4; i++) {
        random_state = random_state * 6364136223846793005u + 1442695040888963407u;
        words[i] = ((uint32_t)(random_state >> 32) & 0x807F807Fu) | 0x3F003F00u;
    }
    if (prepare)
        prepare(host, at);
    must(bsi_copy(queue, (bsi_addr){mem, 0}, (bsi_addr){host, 0}, total), name);
    for (int i = 0; i < count; i++)
        call.arg[i] = (bsi_arg){{mem, at[i]}, bytes[i], mode[i]};
    memcpy(call.n, n, sizeof call.n);
    memcpy(call.f, f, sizeof call.f);
    double best = 1e9;
    int rounds = 1;
    for (int pass = 0; pass < 4; pass++) {
        double start = bsi_now();
        for (int i = 0; i < rounds; i++)
            must(bsi_launch(queue, &call), name);
        must(bsi_host_wait_queue(queue), name);
        double each = (bsi_now() - start) / rounds;
        if (pass > 0)
            best = BSI_MIN(best, each);
        rounds = BSI_MAX(1, BSI_MIN(900, (int)((pass == 0 ? 0.02 : 0.2) / each)));
    }
    bsi_mem_free(mem);
    bsi_mem_free(host);
    return best;
}

enum { R = BSI_READ, W = BSI_WRITE, RW = BSI_READWRITE };

static void bench_gemm(bs_dtype dtype, bs_dtype out, int64_t M, int64_t N, int64_t K, int64_t ta,
                       int64_t tb)
{
    size_t e = bs_dtype_size(dtype);
    const size_t bytes[] = {(size_t)(M * K) * e, (size_t)(K * N) * e,
                            (size_t)(M * N) * bs_dtype_size(out)};
    const uint8_t mode[] = {R, R, RW};
    const int64_t n[BSK_MAX_DIMS] = {ta, tb, M, N, K, ta ? M : K, tb ? K : N, N};
    const double f[BSK_MAX_SCALARS] = {1.0, 0.0};
    if (!strstr("gemm", only))
        return;
    double s = seconds("gemm", BSK_GEMM, dtype, out, 3, bytes, mode, n, f, NULL);
    printf("bench gemm %s>%s %lldx%lldx%lld %s%s: %.3f ms %.1f TFLOP/s\n", bs_dtype_name(dtype),
           bs_dtype_name(out), (long long)M, (long long)N, (long long)K, ta ? "T" : "N", tb ? "T" : "N",
           s * 1e3, 2.0 * (double)M * (double)N * (double)K / s * 1e-12);
}

static int64_t group_rows;
enum { EXPERTS = 128 };

/* As many rows each, but for three that give some of theirs to the next. */
static void set_offsets(bsi_mem *host, const size_t *at)
{
    int32_t *offset = (int32_t *)((char *)host->host + at[3]);
    for (int64_t e = 0; e <= EXPERTS; e++)
        offset[e] = (int32_t)(e * group_rows - (e % 40 == 20 ? 3 : 0));
}

static void bench_gemm_grouped(const char *model, int64_t K, int64_t N, int64_t rows, int64_t tb)
{
    const int64_t M = EXPERTS * rows;
    const size_t bytes[] = {(size_t)(M * K) * 2, (size_t)(EXPERTS * K * N) * 2, (size_t)(M * N) * 2,
                            (EXPERTS + 1) * 4};
    const uint8_t mode[] = {R, R, RW, R};
    const int64_t n[BSK_MAX_DIMS] = {EXPERTS, tb, M, N, K, K * N};
    const double f[BSK_MAX_SCALARS] = {0.0};
    if (!strstr("gemm_grouped", only))
        return;
    group_rows = rows;
    double s = seconds("gemm_grouped", BSK_GEMM_GROUPED, BS_DTYPE_BF16, BS_DTYPE_BF16, 4, bytes, mode,
                       n, f, set_offsets);
    printf("bench gemm_grouped %s K=%lld N=%lld %s, %d x %lld rows: %.3f ms %.1f TFLOP/s\n", model,
           (long long)K, (long long)N, tb ? "T" : "N", (int)EXPERTS, (long long)rows, s * 1e3,
           2.0 * (double)M * (double)N * (double)K / s * 1e-12);
}

static void bench_experts(void)
{
    static const struct {
        const char *model;
        int64_t channels, hidden;
    } sizes[] = {{"qwen3-30b", 2048, 768}, {"gpt-oss", 2880, 2880}, {"glm-air", 4096, 1408}};
    static const int64_t rows[] = {128, 512, 2048};
    for (size_t s = 0; s < BSI_COUNT(sizes); s++)
        for (size_t r = 0; r < BSI_COUNT(rows); r++) {
            int64_t C = sizes[s].channels, H = sizes[s].hidden;
            if (s > 0 && r != 1)
                continue;
            bench_gemm_grouped(sizes[s].model, C, 2 * H, rows[r],
                               1); /* gate_up, its dX, down, its dX */
            bench_gemm_grouped(sizes[s].model, 2 * H, C, rows[r], 0);
            bench_gemm_grouped(sizes[s].model, H, C, rows[r], 1);
            bench_gemm_grouped(sizes[s].model, C, H, rows[r], 0);
        }
}

static int64_t bench_rows, bench_tokens;
static int position_arg; /* of the operands, the positions of tokens; 0: none */

static void set_positions(bsi_mem *host, const size_t *at)
{
    int32_t *pos = (int32_t *)((char *)host->host + at[position_arg]);
    for (int64_t i = 0; i < bench_tokens; i++)
        pos[i] = (int32_t)i;
}

/* Operands of n elements each; moved: bytes in and out of memory. */
static void bench_memory(const char *name, bsk_op op, bs_dtype dtype, int count,
                         const int64_t *elements, const size_t *size, const uint8_t *mode,
                         const int64_t *n, const double *f)
{
    size_t bytes[BSK_MAX_ARGS], moved = 0;
    if (!strstr(name, only))
        return;
    for (int i = 0; i < count; i++) {
        bytes[i] = (size_t)elements[i] * size[i];
        moved += bytes[i] * (mode[i] == RW ? 2 : 1);
    }
    position_arg = op == BSK_ROPE ? 1 : op == BSK_NORM_ROPE || op == BSK_NORM_ROPE_BWD ? 2 : 0;
    bench_tokens = n[0];
    double s =
        seconds(name, op, dtype, dtype, count, bytes, mode, n, f, position_arg ? set_positions : NULL);
    printf("bench %s %s: %.3f ms %.0f GB/s\n", name, bs_dtype_name(dtype), s * 1e3,
           (double)moved / s * 1e-9);
}

static void set_cu(bsi_mem *host, const size_t *at)
{
    int32_t *cu = (int32_t *)((char *)host->host + at[3]);
    for (int64_t r = 0; r <= bench_rows; r++)
        cu[r] = (int32_t)(bench_tokens * r / bench_rows);
}

static void bench_attention(bs_dtype dtype, int64_t T, int64_t H, int64_t K, int64_t D, int64_t rows,
                            int64_t window)
{
    size_t e = bs_dtype_size(dtype), q = (size_t)(T * H * D) * e, kv = (size_t)(T * K * D) * e,
           per = (size_t)(T * H) * 4;
    size_t cu = (size_t)(rows + 1) * 4;
    double length = (double)T / (double)rows;
    double pairs =
        window && (double)window < length ? (double)T * (double)window : (double)T * length / 2;
    double flop = 4.0 * pairs * (double)(H * D);
    const int64_t n[BSK_MAX_DIMS] = {T, H, K, D, rows, window, T};
    const double f[BSK_MAX_SCALARS] = {1.0 / sqrt((double)D), 0.0};
    const size_t fwd[] = {q, kv, kv, cu, q, per, bsk_attention_scratch(T, H, K, D)};
    const size_t bwd[] = {q, kv, kv, cu, q, per, q, q, kv, kv, bsk_attention_bwd_scratch(T, H, K, D)};
    const uint8_t fwd_mode[] = {R, R, R, R, W, W, W}, bwd_mode[] = {R, R, R, R, R, R, R, W, W, W, W};
    if (!strstr("attention", only))
        return;
    bench_rows = rows;
    bench_tokens = T;
    double s = seconds("attention", BSK_ATTENTION, dtype, dtype, 7, fwd, fwd_mode, n, f, set_cu);
    double b =
        seconds("attention_bwd", BSK_ATTENTION_BWD, dtype, dtype, 11, bwd, bwd_mode, n, f, set_cu);
    printf("bench attention %s T=%lld H=%lld K=%lld D=%lld rows=%lld window=%lld: forward %.3f ms %.1f "
           "TFLOP/s, "
           "backward %.3f ms %.1f TFLOP/s\n",
           bs_dtype_name(dtype), (long long)T, (long long)H, (long long)K, (long long)D,
           (long long)rows, (long long)window, s * 1e3, flop / s * 1e-12, b * 1e3,
           2.5 * flop / b * 1e-12);
}

static void set_index(bsi_mem *host, const size_t *at)
{
    int32_t *index = (int32_t *)((char *)host->host + at[1]);
    for (int64_t i = 0; i < bench_tokens; i++)
        index[i] = (int32_t)(i * 7919 % bench_tokens);
}

static void set_labels(bsi_mem *host, const size_t *at)
{
    int32_t *label = (int32_t *)((char *)host->host + at[1]);
    for (int64_t i = 0; i < bench_tokens; i++)
        label[i] = (int32_t)(i * 7919 % 128000);
}

static void bench_norms(bs_dtype d)
{
    const int64_t T = 8192, C = 4096, TC = T * C, H = 32, D = 128;
    const double f[BSK_MAX_SCALARS] = {1e-5, 1.0};
    size_t e = bs_dtype_size(d);
    const size_t fwd[] = {e, e, e, 4}, bwd[] = {e, e, 4, e, e, 4}, turn[] = {e, e, 4, 4, e, 4},
                 back[] = {e, e, 4, 4, 4, e, e, 4};
    const uint8_t fwd_mode[] = {R, R, W, W}, bwd_mode[] = {R, R, R, R, W, W},
                  add_mode[] = {R, R, R, R, RW, RW}, turn_mode[] = {R, R, R, R, W, W},
                  back_mode[] = {R, R, R, R, R, R, W, W};
    bench_memory("rmsnorm 8192x4096", BSK_RMSNORM, d, 4, (int64_t[]){TC, C, TC, T}, fwd, fwd_mode,
                 (int64_t[BSK_MAX_DIMS]){T, C, 0}, f);
    bench_memory("rmsnorm 4096x4096", BSK_RMSNORM, d, 4, (int64_t[]){TC / 2, C, TC / 2, T / 2}, fwd,
                 fwd_mode, (int64_t[BSK_MAX_DIMS]){T / 2, C, 0}, f);
    bench_memory("rmsnorm 262144x128", BSK_RMSNORM, d, 4, (int64_t[]){TC, D, TC, T * H}, fwd, fwd_mode,
                 (int64_t[BSK_MAX_DIMS]){T * H, D, 0}, f);
    bench_memory("rmsnorm_bwd 8192x4096", BSK_RMSNORM_BWD, d, 6, (int64_t[]){TC, C, T, TC, TC, 0}, bwd,
                 bwd_mode, (int64_t[BSK_MAX_DIMS]){T, C, 0, 0}, f);
    bench_memory("rmsnorm_bwd added", BSK_RMSNORM_BWD, d, 6, (int64_t[]){TC, C, T, TC, TC, 0}, bwd,
                 add_mode, (int64_t[BSK_MAX_DIMS]){T, C, 0, 1}, f);
    bench_memory("rmsnorm_bwd with dw", BSK_RMSNORM_BWD, d, 6, (int64_t[]){TC, C, T, TC, TC, C}, bwd,
                 add_mode, (int64_t[BSK_MAX_DIMS]){T, C, 0, 0}, f);
    for (int64_t h = H; h > 1; h /= 4)
        bench_memory(h == H   ? "norm_rope 32 heads"
                     : h == 8 ? "norm_rope 8 heads"
                              : "norm_rope 2 heads",
                     BSK_NORM_ROPE, d, 6, (int64_t[]){T * h * D, D, T, D / 2, T * h * D, T * h}, turn,
                     turn_mode, (int64_t[BSK_MAX_DIMS]){T, h, D, D / 2, BSK_ROPE_HALF, 0}, f);
    bench_memory("norm_rope_bwd 32 heads", BSK_NORM_ROPE_BWD, d, 8,
                 (int64_t[]){TC, D, T, D / 2, T * H, TC, TC, 0}, back, back_mode,
                 (int64_t[BSK_MAX_DIMS]){T, H, D, D / 2, BSK_ROPE_HALF, 0, 0},
                 (double[BSK_MAX_SCALARS]){1.0});
}

static void bench_elementwise(bs_dtype d)
{
    const int64_t T = 8192, C = 4096, I12 = 12288, N = T * I12, TC = T * C;
    const double f[BSK_MAX_SCALARS] = {1e-5};
    size_t e = bs_dtype_size(d);
    bench_memory("glu 8192x12288", BSK_GLU, d, 3, (int64_t[]){N, N, N}, (size_t[]){e, e, e},
                 (uint8_t[]){R, R, W}, (int64_t[BSK_MAX_DIMS]){N, BSK_SILU}, f);
    bench_memory("glu_bwd 8192x12288", BSK_GLU_BWD, d, 5, (int64_t[]){N, N, N, N, N},
                 (size_t[]){e, e, e, e, e}, (uint8_t[]){R, R, R, W, W},
                 (int64_t[BSK_MAX_DIMS]){N, BSK_SILU}, f);
    bench_memory("add 8192x12288", BSK_ADD, d, 3, (int64_t[]){N, N, N}, (size_t[]){e, e, e},
                 (uint8_t[]){R, R, W}, (int64_t[BSK_MAX_DIMS]){N}, f);
    bench_memory("colsum 8192x4096", BSK_COLSUM, d, 2, (int64_t[]){TC, C}, (size_t[]){e, 4},
                 (uint8_t[]){R, RW}, (int64_t[BSK_MAX_DIMS]){T, C}, f);
    bench_memory("softmax 8192x128", BSK_SOFTMAX, d, 2, (int64_t[]){T * 128, T * 128}, (size_t[]){e, e},
                 (uint8_t[]){R, W}, (int64_t[BSK_MAX_DIMS]){T, 128}, f);
    bench_memory("rope 8192x32x128", BSK_ROPE, d, 4, (int64_t[]){TC, T, 64, TC}, (size_t[]){e, 4, 4, e},
                 (uint8_t[]){R, R, R, W}, (int64_t[BSK_MAX_DIMS]){T, 32, 128, 64, BSK_ROPE_HALF, 0},
                 (double[BSK_MAX_SCALARS]){1.0});
    bench_memory("dropout 8192x4096", BSK_DROPOUT, d, 4, (int64_t[]){TC, T, T, TC},
                 (size_t[]){e, 4, 4, e}, (uint8_t[]){R, R, R, W},
                 (int64_t[BSK_MAX_DIMS]){T, C, 1, 2, 3}, (double[BSK_MAX_SCALARS]){0.1});
}

static void bench_indexed(bs_dtype d)
{
    const int64_t T = 8192, C = 4096, TC = T * C;
    const double f[BSK_MAX_SCALARS] = {1e-5};
    size_t e = bs_dtype_size(d);
    if (!strstr("scatter_rows head_tile", only))
        return;
    const size_t rows[] = {(size_t)TC * e, (size_t)T * 4, (size_t)TC * e};
    bench_tokens = T;
    double s = seconds("scatter_rows", BSK_SCATTER_ROWS, d, d, 3, rows, (uint8_t[]){R, R, RW},
                       (int64_t[BSK_MAX_DIMS]){T, C}, (double[BSK_MAX_SCALARS]){0.0}, set_index);
    printf("bench scatter_rows 8192x4096 %s: %.3f ms %.0f GB/s\n", bs_dtype_name(d), s * 1e3,
           (double)(3 * rows[0]) / s * 1e-9);
    int64_t V = 16384, HT = 2048;
    const size_t tile[] = {(size_t)(HT * V) * 4, (size_t)HT * 4, (size_t)HT * 4,      (size_t)HT * 4,
                           (size_t)HT * 4,       (size_t)HT * 4, (size_t)(HT * V) * e};
    bench_tokens = HT;
    s = seconds("head_tile", BSK_HEAD_TILE, d, d, 7, tile, (uint8_t[]){R, R, RW, RW, RW, W, W},
                (int64_t[BSK_MAX_DIMS]){HT, V, 0, 0}, f, set_labels);
    printf("bench head_tile 2048x16384 %s: %.3f ms %.0f GB/s\n", bs_dtype_name(d), s * 1e3,
           (double)(tile[0] + tile[6]) / s * 1e-9);
}

enum { ROUTED = 32768, CHOSEN = 8, ENTRIES = ROUTED * CHOSEN };

/* Experts of each row's choices in the order of their numbers. */
static void set_experts(void *operand)
{
    int32_t *id = operand;
    for (int64_t i = 0; i < ENTRIES; i++)
        id[i] =
            (int32_t)(i % CHOSEN * (EXPERTS / CHOSEN) + i / CHOSEN * 7919 % 4093 % (EXPERTS / CHOSEN));
}

static void set_sorted(bsi_mem *host, const size_t *at)
{
    set_experts((char *)host->host + at[0]);
}

static void set_chosen(bsi_mem *host, const size_t *at)
{
    set_experts((char *)host->host + at[1]);
}

/* order, or place, at[1]: that of the experts of set_experts */
static void set_order(bsi_mem *host, const size_t *at, bool inverse)
{
    int32_t *to = (int32_t *)((char *)host->host + at[1]), *id = calloc(ENTRIES, sizeof *id), next = 0;
    if (!id)
        exit(1);
    set_experts(id);
    for (int32_t e = 0; e < EXPERTS; e++)
        for (int32_t i = e / (EXPERTS / CHOSEN); i < ENTRIES; i += CHOSEN)
            if (id[i] == e) {
                to[inverse ? i : next] = inverse ? next : i;
                next++;
            }
    free(id);
}

static void set_taken(bsi_mem *host, const size_t *at)
{
    set_order(host, at, false);
}

static void set_summed(bsi_mem *host, const size_t *at)
{
    set_order(host, at, true);
}

/* A memory-bound kernel whose indices are prepared; moved: bytes in and out of memory. */
static void bench_routed(const char *name, bsk_op op, bs_dtype d, int count, const size_t *bytes,
                         const uint8_t *mode, const int64_t *n, size_t moved,
                         void (*prepare)(bsi_mem *, const size_t *))
{
    if (!strstr(name, only))
        return;
    double s =
        seconds(name, op, d, d, count, bytes, mode, n, (double[BSK_MAX_SCALARS]){1.702, 7.0}, prepare);
    printf("bench %s %s: %.4f ms %.0f GB/s\n", name, bs_dtype_name(d), s * 1e3,
           (double)moved / s * 1e-9);
}

static void bench_routing(bs_dtype d)
{
    const int64_t C = 2048, H = 2880;
    size_t e = bs_dtype_size(d), z = ROUTED * EXPERTS * e, w = ENTRIES * e, id = ENTRIES * 4,
           offset = (EXPERTS + 1) * 4, x = (size_t)(ROUTED * C) * e, y = (size_t)(ENTRIES * C) * e,
           sum = (size_t)(ROUTED * C) * 4, gate = (size_t)(ROUTED * H) * e;
    bench_routed(
        "route 32768x128 k=8", BSK_ROUTE, d, 4, (size_t[]){z, 0, w, id}, (uint8_t[]){R, R, W, W},
        (int64_t[BSK_MAX_DIMS]){ROUTED, EXPERTS, CHOSEN, BSK_ROUTE_SOFTMAX, 1, 1, 1}, z + w + id, NULL);
    bench_routed("route 32768x128 k=8 biased", BSK_ROUTE, d, 4, (size_t[]){z, EXPERTS * 4, w, id},
                 (uint8_t[]){R, R, W, W},
                 (int64_t[BSK_MAX_DIMS]){ROUTED, EXPERTS, CHOSEN, BSK_ROUTE_SIGMOID, 8, 4, 1},
                 z + w + id, NULL);
    bench_routed("route_bwd 32768x128 k=8", BSK_ROUTE_BWD, d, 4, (size_t[]){z, id, w, z},
                 (uint8_t[]){R, R, R, W},
                 (int64_t[BSK_MAX_DIMS]){ROUTED, EXPERTS, CHOSEN, BSK_ROUTE_SOFTMAX, 0, 0, 1},
                 2 * z + w + id, set_chosen);
    bench_routed("sort_rows 262144 of 128", BSK_SORT_ROWS, d, 5,
                 (size_t[]){id, id, id, offset, bsk_sort_scratch(ENTRIES, EXPERTS)},
                 (uint8_t[]){R, W, W, W, W}, (int64_t[BSK_MAX_DIMS]){ENTRIES, EXPERTS}, 3 * id,
                 set_sorted);
    bench_routed("take_rows 262144x2048", BSK_TAKE_ROWS, d, 3, (size_t[]){x, id, y},
                 (uint8_t[]){R, R, W}, (int64_t[BSK_MAX_DIMS]){ENTRIES, C, CHOSEN, ROUTED, 0}, 2 * y,
                 set_taken);
    bench_routed(
        "sum_rows 32768x2048 k=8", BSK_SUM_ROWS, d, 3, (size_t[]){y, id, sum}, (uint8_t[]){R, R, RW},
        (int64_t[BSK_MAX_DIMS]){ROUTED, C, CHOSEN, 0, ENTRIES, ROUTED, 0}, y + 2 * sum, set_summed);
    bench_routed("sum_rows window of an eighth", BSK_SUM_ROWS, d, 3, (size_t[]){y / 8, id, sum},
                 (uint8_t[]){R, R, RW},
                 (int64_t[BSK_MAX_DIMS]){ROUTED, C, CHOSEN, ENTRIES / 2, ENTRIES / 8, ROUTED, 0},
                 y / 8 + 2 * sum, set_summed);
    bench_routed("glu_clamped 32768x2880", BSK_GLU_CLAMPED, d, 2, (size_t[]){2 * gate, gate},
                 (uint8_t[]){R, W}, (int64_t[BSK_MAX_DIMS]){ROUTED, H}, 3 * gate, NULL);
    bench_routed("glu_clamped_bwd 32768x2880", BSK_GLU_CLAMPED_BWD, d, 3,
                 (size_t[]){2 * gate, gate, 2 * gate}, (uint8_t[]){R, R, W},
                 (int64_t[BSK_MAX_DIMS]){ROUTED, H}, 5 * gate, NULL);
}

static void bench_flat(void)
{
    const double f[BSK_MAX_SCALARS] = {1e-5};
    const int64_t M = 1 << 26;
    bench_memory("adamw 67M", BSK_ADAMW, BS_DTYPE_F32, 5, (int64_t[]){M, M, M, M, 0},
                 (size_t[]){4, 4, 4, 4, 4}, (uint8_t[]){RW, R, RW, RW, W}, (int64_t[BSK_MAX_DIMS]){M},
                 (double[BSK_MAX_SCALARS]){1e-3, 0.9, 0.95, 1e-8, 0.1, 0.3, 0.2, 1.0});
    bench_memory("sumsq 67M", BSK_SUMSQ, BS_DTYPE_F32, 2, (int64_t[]){M, 1}, (size_t[]){4, 8},
                 (uint8_t[]){R, W}, (int64_t[BSK_MAX_DIMS]){M}, f);
    bench_memory("expand bf16 to bf16 67M", BSK_EXPAND, BS_DTYPE_BF16, 2, (int64_t[]){M, M},
                 (size_t[]){2, 2}, (uint8_t[]){R, W}, (int64_t[BSK_MAX_DIMS]){BS_DTYPE_BF16, M},
                 (double[BSK_MAX_SCALARS]){1.0});
}

static void bench_all(void)
{
    bench_attention(BS_DTYPE_BF16, 8192, 32, 8, 128, 1, 0);
    bench_attention(BS_DTYPE_BF16, 8192, 32, 8, 128, 8, 0);
    bench_attention(BS_DTYPE_BF16, 8192, 32, 8, 64, 1, 0);
    bench_attention(BS_DTYPE_BF16, 8192, 64, 8, 64, 1, 128);
    bench_attention(BS_DTYPE_BF16, 8192, 16, 8, 256, 1, 0);
    bench_attention(BS_DTYPE_F32, 2048, 32, 8, 128, 1, 0);
    bench_gemm(BS_DTYPE_BF16, BS_DTYPE_BF16, 8192, 4096, 4096, 0, 1);
    bench_gemm(BS_DTYPE_BF16, BS_DTYPE_BF16, 8192, 12288, 4096, 0, 1);
    bench_gemm(BS_DTYPE_BF16, BS_DTYPE_BF16, 8192, 4096, 12288, 0, 0);
    bench_gemm(BS_DTYPE_BF16, BS_DTYPE_F32, 4096, 4096, 8192, 1, 0);
    bench_gemm(BS_DTYPE_BF16, BS_DTYPE_BF16, 8192, 16, 4096, 0, 1);
    bench_gemm(BS_DTYPE_F32, BS_DTYPE_F32, 4096, 4096, 4096, 0, 1);
    bench_experts();
    for (int v = 0; v < 2; v++) {
        bs_dtype d = v ? BS_DTYPE_F32 : BS_DTYPE_BF16;
        bench_norms(d);
        bench_elementwise(d);
        bench_indexed(d);
        bench_routing(d);
    }
    bench_flat();
}

int main(int argc, char **argv)
{
    bs_status st = bs_dev_open("cuda", NULL, &dev);
    if (st != BS_OK) {
        printf("no cuda device: %s\n", bs_error()->msg);
        return st == BS_UNSUPPORTED ? 77 : 1;
    }
    must(bsi_queue_open(dev, "compute", &queue), "queue");
    only = argc > 1 ? argv[1] : "";
    setvbuf(stdout, NULL, _IOLBF, 0);
    bench_all();
    bsi_queue_close(queue);
    bs_dev_close(dev);
    return 0;
}
