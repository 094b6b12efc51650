/* SPDX-License-Identifier: Apache-2.0 */
/*
** bsk.h: kernel signatures, shared by the CPU specification (kernels/cpu) and other devices.
**
** Names: T rows (tokens) in use, C channels, H query heads, K key/value heads, D head dim, V tile rows,
** R rank, N elements. All matrices are row-major and dense unless a leading dimension is given.
** Operands of several ops: pos [T], the position of each token in its row of the batch; cu [n_rows+1],
** the tokens where the rows begin in the packed batch, and T; lse [T,H], the natural log of the sum of
** e^score over the keys (and the sink) of each query and head; label [T], a row of the head's weight.
** Accumulation is f32 inside a GEMM and f64 where said. Results do not depend on the number of threads:
** work is cut into a fixed grid of tasks. Empty inputs (T = 0) are legal and do nothing.
**
** A launch passes pointers p[], sizes n[] and scalars f[]; the order for each op is in the table below.
** beta arguments are 0 (write) or 1 (add to what is there).
*/
#ifndef BSK_H
#define BSK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define BSK_MAX_ARGS    12
#define BSK_MAX_DIMS    12
#define BSK_MAX_SCALARS 8

/*
** Element types. A call carries two bs_dtype values: `dtype`, of the operands marked `a` (activations and
** resolved weights), and `out`, of those marked `o`. Unmarked operands are f32 unless the table says
** otherwise. Both are BS_DTYPE_F32 (0) on devices that compute in f32; elsewhere `dtype` may be bf16: values
** are widened, the arithmetic and every sum are f32, the result is rounded once.
**
** op                 p[] (r: read, w: written, rw)                                     n[] ; f[]
*/
typedef enum bsk_op {
    BSK_GEMM,         /* A ar, B ar, C orw, D or|absent ; ta, tb, M, N, K, lda, ldb, ldc ; alpha, beta
                         (C = alpha op(A) op(B) + beta D; D, laid out like C and no part of it, absent: C) */
    BSK_GEMM_GROUPED, /* A ar, B ar, C orw, offset r(i32) ; E, tb, M, N, K, stride, begin ; beta
                         (rows [o(e), o(e+1)) of C [M,N] = those rows of A [M,K] times op(B_e), + beta C, where
                         o(e) is offset[e] - begin, brought into [0, M]; B_e is [N,K] with tb, else [K,N], and
                         begins `stride` elements after B_(e-1); offset [E+1] never falls; all other rows of
                         C stay) */
    BSK_EXPAND,       /* src r, dst ow           ; bs_dtype of src, N ; scale */
    BSK_EXPAND_MXFP4, /* blocks r(u8), scales r(u8), dst ow ; N
                         (OCP MX: 32 values a group, byte i of its 16 holds values 2i (low nibble) and 2i+1 as e2m1,
                         times 2^(scale - 127)) */
    BSK_BIAS,         /* y arw, b ar             ; T, C            (y += b) */
    BSK_BIAS_GROUPED, /* y arw, b ar, offset r(i32) ; E, T, C, stride, begin
                         (as BSK_GEMM_GROUPED: rows of expert e += b_e, `stride` elements after b_(e-1)) */
    BSK_COLSUM,       /* x ar, sum rw            ; T, C            (sum += column sums, f64 inside) */
    BSK_RMSNORM,      /* x ar, w ar, y aw, rstd w ; T, C, one_plus ; eps */
    BSK_RMSNORM_BWD,  /* x ar, w ar, rstd r, dy ar, dx arw, dw rw|absent ; T, C, one_plus, beta */
    BSK_LAYERNORM, /* x ar, w ar, b ar, y aw, stats w ; T, C ; eps   (stats [T,2]: mean, 1/deviation) */
    BSK_LAYERNORM_BWD, /* x ar, w ar, stats r, dy ar, dx arw, dw rw|absent, db rw|absent ; T, C, beta */
    BSK_ROPE,          /* x ar, pos r(i32), freq r, y aw ; T, H, D, n_freq, style, inverse ; scaling */
    BSK_NORM_ROPE, /* x ar, w ar, pos r(i32), freq r, y aw, rstd w ; T, H, D, n_freq, style, one_plus
                         ; eps, scaling       (rmsnorm of each head, then rope; rstd [T,H]) */
    BSK_NORM_ROPE_BWD,   /* x ar, w ar, pos r(i32), freq r, rstd r, dy ar, dx arw, dw rw|absent
                         ; T, H, D, n_freq, style, one_plus, beta ; scaling */
    BSK_ATTENTION,       /* q ar, k ar, v ar, cu r(i32), o aw, lse w, scratch w, sinks ar|absent
                         ; T, H, K, D, n_rows, window, capacity ; scale, softcap
                         (sinks [H]: a score per head that takes part in the softmax and has no value) */
    BSK_ATTENTION_BWD,   /* q ar, k ar, v ar, cu r, o ar, lse r, do ar, dq aw, dk aw, dv aw, scratch w
                         ; T, H, K, D, n_rows, window, capacity ; scale, softcap */
    BSK_SINKS_BWD,       /* o ar, do ar, lse r, sinks ar, dsinks rw ; T, H, D
                         (dsinks[h] -= sum over t of exp(sinks[h] - lse[t,h]) * (do . o)[t,h], f64 inside) */
    BSK_CACHE_PUT,       /* x ar, row r(i32), pos r(i32), cache arw ; T, C, rows, capacity
                         (cache[row[t]][pos[t]] = x[t]; cache [rows, capacity, C]) */
    BSK_ATTENTION_CACHE, /* q ar, k ar, v ar, row r(i32), pos r(i32), o aw, scratch w, sinks ar|absent
                         ; T, H, K, D, rows, window, capacity ; scale, softcap
                         (query t sees keys 0..pos[t] of row[t], and no others, of k, v [rows, capacity, K*D];
                         scratch: bsk_attention_scratch of the capacity) */
    BSK_GLU,             /* g ar, u ar, y aw        ; N, act */
    BSK_GLU_BWD,         /* g ar, u ar, dy ar, dg aw, du aw ; N, act */
    BSK_GLU_CLAMPED,     /* x ar, y aw              ; T, H ; alpha, limit
                         (x [T,2H]: g at 2j, u at 2j+1, g at most limit, u in [-limit, limit];
                         y [T,H] = (u + 1) * g * sigmoid(alpha * g)) */
    BSK_GLU_CLAMPED_BWD, /* x ar, dy ar, dx aw      ; T, H ; alpha, limit   (zero beyond the limits) */
    BSK_ACT,             /* x ar, y aw              ; N, act */
    BSK_ACT_BWD,         /* x ar, dy ar, dx aw      ; N, act */
    BSK_ADD,             /* a ar, b ar, y aw        ; N */
    BSK_MUL,             /* a ar, b ar, y aw        ; N */
    BSK_AXPY,            /* x ar, y orw             ; N ; s           (y += s*x) */
    BSK_SCALE,           /* x ar, y aw              ; N ; s */
    BSK_SOFTMAX,         /* x ar, y aw              ; T, C */
    BSK_SOFTMAX_BWD,     /* y ar, dy ar, dx aw      ; T, C */
    BSK_COLUMNS,         /* x ar, y aw              ; T, C, first, n */
    BSK_COLUMNS_BWD,     /* dy ar, dx aw            ; T, C, first, n  (zero elsewhere) */
    BSK_ROW_SCALE,       /* x ar, g ar, y aw        ; T, C, columns of g, column */
    BSK_ROW_SCALE_BWD, /* x ar, g ar, dy ar, dx aw, dg aw ; T, C, columns of g, column (dg zero elsewhere) */
    BSK_GATHER_ROWS, /* x ar, index r(i32), y aw ; n, C */
    BSK_SCATTER_ROWS, /* dy ar, index r(i32), dx orw ; n, C ; s      (dx[index[i]] += s*dy[i], i in order) */
    BSK_ROUTE,     /* z ar, bias r|absent, w aw, id w(i32) ; T, E, k, kind, groups, kept, renorm ; scale
                         (k of the E experts of each row, by the largest s + bias, of equal ones the first, in
                         the order of their numbers: id [T,k]; w [T,k] their s, with renorm over the sum of them,
                         times scale. s by kind (bsk_route). Without a bias, which s never falls in, z itself is
                         compared: exact on every device. With groups > 1 only experts of the `kept` groups
                         count whose two largest s + bias have the largest sum. NaN counts as the largest, so
                         that it is seen in w) */
    BSK_ROUTE_BWD, /* z ar, id r(i32), dw ar, dz aw ; T, E, k, kind, 0, 0, renorm ; scale */
    BSK_SORT_ROWS, /* id r(i32), order w(i32), place w(i32), offset w(i32), scratch w ; n, E
                         (counting sort, stable: entry order[i] of id [n] is the i-th; place is the inverse;
                         expert e begins at offset[e], offset [E+1]. Entries outside [0, E) are left out: their
                         place is -1, and so is what is left of order. scratch: bsk_sort_scratch) */
    BSK_TAKE_ROWS, /* x ar, order r(i32), y aw ; n, C, k, rows, stride
                         (y[i] = row r of x, r = order[i] / k, or zero where order[i] < 0; x has pieces of
                         `rows` rows, `stride` elements from one to the next) */
    BSK_SUM_ROWS,  /* y ar, place r(i32), sum rw ; R, C, k, begin, n, rows, stride
                         (sum[r] += y[p] for p = place[r*k+i] - begin in [0, n), i in order; sum lies as x of
                         BSK_TAKE_ROWS does) */
    BSK_DROPOUT,   /* x ar, row r(i32), pos r(i32), y aw ; T, C, key0, key1, step ; probability
                         (element zeroed when uniform < probability, else divided by 1-probability;
                         counter = (step, row id, position, channel/4), word channel%4) */
    BSK_HEAD_TILE, /* logits r, label r(i32), m rw, s rw, ly rw, factor w, P aw
                         ; T, V, first, softcap_on ; softcap
                         (online softmax of a tile with the label's column left out; P = exp(l - m) times
                         the cap's derivative, in place of the logits when it has their address; factor[t]
                         rescales earlier sums) */
    BSK_HEAD_PICK, /* w ar, label r(i32), ly r, wy rw ; T, C, first, V, softcap_on ; softcap
                         (wy[t] = W[label - first] where the tile holds the label, times the cap's
                         derivative at ly) */
    BSK_ROW_MUL,   /* x rw, factor r          ; T, C            (rows scaled in place) */
    BSK_HEAD_FINISH,  /* m r, s r, ly r, acc r|absent, wy r|absent, loss w(f32 per row), dx aw|absent
                         ; T, C ; 1/count
                         d = log(s)+m-ly, loss = softplus(d), q = sigmoid(d), dx = q*(acc/s - wy)/count */
    BSK_HEAD_DLOGITS, /* logits r, label r(i32), m r, s r, ly r, P aw ; T, V, first, softcap_on
                         ; 1/count, softcap    (P = (p - onehot)/count, p over the full vocabulary; may
                         have the logits' address) */
    BSK_SOFTCAP,      /* x rw                    ; N ; cap */
    BSK_SUM,          /* x r, out w(f64)         ; N               (fixed order, f64) */
    BSK_SUMSQ,        /* x r, out w(f64)         ; N               (fixed order, f64) */
    BSK_ADAMW, /* p rw, g r, m rw, v rw, copy ow|absent ; N ; lr, beta1, beta2, eps, decay, bc1, bc2, gscale
                         (bc = 1 - beta^t; g is multiplied by gscale first; f64 scalars, f32 state; copy
                         is p rounded to `out`) */
    BSK_OP_COUNT
} bsk_op;

typedef enum bsk_act { BSK_SILU, BSK_GELU_TANH, BSK_GELU_ERF, BSK_RELU } bsk_act;
enum { BSK_ROUTE_EXPERTS = 1024 }; /* of a layer at most */
/* softmax over all; sigmoid; softmax over those that are chosen (by z) */
typedef enum bsk_route { BSK_ROUTE_SOFTMAX, BSK_ROUTE_SIGMOID, BSK_ROUTE_CHOSEN } bsk_route;
typedef enum bsk_rope_style { BSK_ROPE_HALF, BSK_ROPE_INTERLEAVED } bsk_rope_style;

/* Runs fn(arg, i) for i in [0, n) on the threads of the compute queue; returns when all are done. */
typedef struct bsk_par {
    void (*run)(struct bsk_par *self, int64_t n, void (*fn)(void *arg, int64_t i), void *arg);
    void *impl;
} bsk_par;

typedef struct bsk_call {
    void *p[BSK_MAX_ARGS];
    int64_t n[BSK_MAX_DIMS];
    double f[BSK_MAX_SCALARS];
    int dtype, out; /* bs_dtype */
    bsk_par *par;
} bsk_call;

typedef struct bsk_entry {
    const char *name;
    void (*fn)(const bsk_call *c);
} bsk_entry;

/* kernels/cpu/table.c; indexed by bsk_op. */
extern const bsk_entry bsk_cpu[BSK_OP_COUNT];
/* Runs every task on the calling thread. */
extern bsk_par bsk_par_serial;
/* Chooses what products are computed by: OpenBLAS where there is one with room for its buffers, else plain loops, told
   in a log line where room was the reason. Call it before so many threads compute products. The choice is made once;
   false, with the failure recorded: it was OpenBLAS, and there is no room for more threads. */
bool bsk_cpu_init(int threads);
/* "openblas" or "plain": what products are computed by. */
const char *bsk_cpu_gemm_name(void);

/* Bytes of the scratch operand: a function of shapes and capacity only (never of threads). */
size_t bsk_attention_scratch(int64_t capacity, int64_t H, int64_t K, int64_t D);
size_t bsk_sort_scratch(int64_t n, int64_t E);
enum { BSK_SORT_CHUNK = 2048 }; /* entries whose experts are counted together there */
size_t bsk_attention_bwd_scratch(int64_t capacity, int64_t H, int64_t K, int64_t D);

/* ---- typed CPU functions: the specification, tested directly --------------------------------------------- */

/* C[M,N] = alpha * op(A)[M,K] op(B)[K,N] + beta * C */
void bsk_gemm_f32(bsk_par *par, bool ta, bool tb, int64_t M, int64_t N, int64_t K, float alpha,
                  const float *A, int64_t lda, const float *B, int64_t ldb, float beta, float *C,
                  int64_t ldc);
/* The same by plain loops; every output element is one chain of f32 multiply-adds over K in order, so
   a row's bits do not depend on the other rows. */
void bsk_gemm_plain_f32(bsk_par *par, bool ta, bool tb, int64_t M, int64_t N, int64_t K, float alpha,
                        const float *A, int64_t lda, const float *B, int64_t ldb, float beta, float *C,
                        int64_t ldc);
/* Groups of rows, each by a matrix of its own: see BSK_GEMM_GROUPED. */
typedef struct bsk_grouped {
    bool tb;
    int64_t E, M, N, K, stride, begin;
    float beta;
    const int32_t *offset; /* [E+1] */
} bsk_grouped;
void bsk_bias_grouped_f32(bsk_par *par, const bsk_grouped *g, float *y, const float *b);
void bsk_gemm_grouped_f32(bsk_par *par, const bsk_grouped *g, const float *A, const float *B, float *C);
void bsk_expand_mxfp4(bsk_par *par, int out, const uint8_t *blocks, const uint8_t *scales, void *dst,
                      int64_t N);
void bsk_expand_f32(bsk_par *par, int dtype, const void *src, float *dst, int64_t N, float scale);
/* The same rounded to bf16, nearest even. */
void bsk_expand_bf16(bsk_par *par, int dtype, const void *src, uint16_t *dst, int64_t N, float scale);
void bsk_rmsnorm_f32(bsk_par *par, const float *x, const float *w, float *y, float *rstd, int64_t T,
                     int64_t C, bool one_plus, float eps);
void bsk_rmsnorm_bwd_f32(bsk_par *par, const float *x, const float *w, const float *rstd,
                         const float *dy, float *dx, float *dw, int64_t T, int64_t C, bool one_plus,
                         bool add);
void bsk_layernorm_f32(bsk_par *par, const float *x, const float *w, const float *b, float *y,
                       float *stats, int64_t T, int64_t C, float eps);
void bsk_layernorm_bwd_f32(bsk_par *par, const float *x, const float *w, const float *stats,
                           const float *dy, float *dx, float *dw, float *db, int64_t T, int64_t C,
                           bool add);
void bsk_rope_f32(bsk_par *par, const float *x, const int32_t *pos, const float *freq, float *y,
                  int64_t T, int64_t H, int64_t D, int64_t n_freq, int style, bool inverse,
                  float scaling);
/* Heads of up to BSK_NORM_ROPE_HEAD entries. */
enum { BSK_NORM_ROPE_HEAD = 512 };
typedef struct bsk_norm_rope {
    int64_t T, H, D, n_freq;
    int style;
    bool one_plus;
    float eps, scaling;
    const int32_t *pos; /* [T] */
    const float *freq;  /* [n_freq] */
} bsk_norm_rope;
void bsk_norm_rope_f32(bsk_par *par, const bsk_norm_rope *a, const float *x, const float *w, float *y,
                       float *rstd);
void bsk_norm_rope_bwd_f32(bsk_par *par, const bsk_norm_rope *a, const float *x, const float *w,
                           const float *rstd, const float *dy, float *dx, float *dw, bool add);
typedef struct bsk_attention_dims {
    int64_t T, H, K, D, n_rows, window, capacity;
    float scale, softcap;
    const float *sinks; /* [H], or NULL */
} bsk_attention_dims;
void bsk_attention_f32(bsk_par *par, const bsk_attention_dims *d, const float *q, const float *k,
                       const float *v, const int32_t *cu, float *o, float *lse, void *scratch);
/* d->n_rows and d->capacity are those of the cache. */
void bsk_cache_put_f32(bsk_par *par, const float *x, const int32_t *row, const int32_t *pos,
                       float *cache, int64_t T, int64_t C, int64_t capacity);
void bsk_attention_cache_f32(bsk_par *par, const bsk_attention_dims *d, const float *q, const float *k,
                             const float *v, const int32_t *row, const int32_t *pos, float *o,
                             void *scratch);
void bsk_attention_bwd_f32(bsk_par *par, const bsk_attention_dims *d, const float *q, const float *k,
                           const float *v, const int32_t *cu, const float *o, const float *lse,
                           const float *grad_o, float *dq, float *dk, float *dv, void *scratch);
void bsk_sinks_bwd_f32(const float *o, const float *grad_o, const float *lse, const float *sinks,
                       float *dsinks, int64_t T, int64_t H, int64_t D);
/* The loops that define attention; the functions above must agree with them. */
void bsk_attention_plain_f32(const bsk_attention_dims *d, const float *q, const float *k,
                             const float *v, const int32_t *cu, float *o, float *lse);
void bsk_attention_bwd_plain_f32(const bsk_attention_dims *d, const float *q, const float *k,
                                 const float *v, const int32_t *cu, const float *o, const float *lse,
                                 const float *grad_o, float *dq, float *dk, float *dv);
float bsk_act_f32(float x, int act);
float bsk_act_grad_f32(float x, int act);

#endif
