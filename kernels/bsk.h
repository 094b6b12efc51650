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
    BSK_GEMM,        /* A ar, B ar, C orw, D or|absent ; ta, tb, M, N, K, lda, ldb, ldc ; alpha, beta
                         (C = alpha op(A) op(B) + beta D; D, laid out like C and no part of it, absent: C) */
    BSK_EXPAND,      /* src r, dst ow           ; bs_dtype of src, N ; scale */
    BSK_BIAS,        /* y arw, b ar             ; T, C            (y += b) */
    BSK_COLSUM,      /* x ar, sum rw            ; T, C            (sum += column sums, f64 inside) */
    BSK_RMSNORM,     /* x ar, w ar, y aw, rstd w ; T, C, one_plus ; eps */
    BSK_RMSNORM_BWD, /* x ar, w ar, rstd r, dy ar, dx arw, dw rw|absent ; T, C, one_plus, beta */
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
    BSK_DROPOUT,      /* x ar, row r(i32), pos r(i32), y aw ; T, C, key0, key1, step ; probability
                         (element zeroed when uniform < probability, else divided by 1-probability;
                         counter = (step, row id, position, channel/4), word channel%4) */
    BSK_HEAD_TILE,    /* logits r, label r(i32), m rw, s rw, ly rw, factor w, P aw
                         ; T, V, first, softcap_on ; softcap
                         (online softmax of a tile with the label's column left out; P = exp(l - m) times
                         the cap's derivative, in place of the logits when it has their address; factor[t]
                         rescales earlier sums) */
    BSK_HEAD_PICK,    /* w ar, label r(i32), ly r, wy rw ; T, C, first, V, softcap_on ; softcap
                         (wy[t] = W[label - first] where the tile holds the label, times the cap's
                         derivative at ly) */
    BSK_ROW_MUL,      /* x rw, factor r          ; T, C            (rows scaled in place) */
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
