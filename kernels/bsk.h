/* SPDX-License-Identifier: Apache-2.0 */
/*
** bsk.h: kernel signatures, shared by the CPU specification (kernels/cpu) and other devices.
**
** Names: T rows (tokens) in use, C channels, H query heads, K key/value heads, D head dim, V tile rows,
** R rank, N elements. All matrices are row-major and dense unless a leading dimension is given.
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

#define BSK_MAX_ARGS 12
#define BSK_MAX_DIMS 12
#define BSK_MAX_SCALARS 8

/*
** op                 p[] (r: read, w: written, rw)                                     n[] ; f[]
*/
typedef enum bsk_op {
    BSK_GEMM,         /* A r, B r, C rw          ; ta, tb, M, N, K, lda, ldb, ldc ; alpha, beta */
    BSK_EXPAND,       /* src r, dst w            ; bs_dtype of src, N ; scale */
    BSK_BIAS,         /* y rw, b r               ; T, C            (y += b) */
    BSK_COLSUM,       /* x r, sum rw             ; T, C            (sum += column sums, f64 inside) */
    BSK_RMSNORM,      /* x r, w r, y w, rstd w   ; T, C, one_plus ; eps */
    BSK_RMSNORM_BWD,  /* x r, w r, rstd r, dy r, dx rw, dw rw|absent ; T, C, one_plus, beta */
    BSK_LAYERNORM,    /* x r, w r, b r, y w, stats w ; T, C ; eps   (stats [T,2]: mean, 1/deviation) */
    BSK_LAYERNORM_BWD, /* x r, w r, stats r, dy r, dx rw, dw rw|absent, db rw|absent ; T, C, beta */
    BSK_ROPE,         /* x r, pos r(i32), freq r, y w ; T, H, D, n_freq, style, inverse ; scaling */
    BSK_ATTENTION,    /* q r, k r, v r, cu r(i32), o w, lse w, scratch w
                         ; T, H, K, D, n_rows, window, capacity ; scale, softcap */
    BSK_ATTENTION_BWD, /* q r, k r, v r, cu r, o r, lse r, do r, dq w, dk w, dv w, scratch w
                         ; T, H, K, D, n_rows, window, capacity ; scale, softcap */
    BSK_GLU,          /* g r, u r, y w           ; N, act */
    BSK_GLU_BWD,      /* g r, u r, dy r, dg w, du w ; N, act */
    BSK_ACT,          /* x r, y w                ; N, act */
    BSK_ACT_BWD,      /* x r, dy r, dx w         ; N, act */
    BSK_ADD,          /* a r, b r, y w           ; N */
    BSK_MUL,          /* a r, b r, y w           ; N */
    BSK_AXPY,         /* x r, y rw               ; N ; s           (y += s*x) */
    BSK_SCALE,        /* x r, y w                ; N ; s */
    BSK_SOFTMAX,      /* x r, y w                ; T, C */
    BSK_SOFTMAX_BWD,  /* y r, dy r, dx w         ; T, C */
    BSK_COLUMNS,      /* x r, y w                ; T, C, first, n */
    BSK_COLUMNS_BWD,  /* dy r, dx w              ; T, C, first, n  (zero elsewhere) */
    BSK_ROW_SCALE,    /* x r, g r, y w           ; T, C, columns of g, column */
    BSK_ROW_SCALE_BWD, /* x r, g r, dy r, dx w, dg w ; T, C, columns of g, column (dg zero elsewhere) */
    BSK_GATHER_ROWS,  /* x r, index r(i32), y w  ; n, C */
    BSK_SCATTER_ROWS, /* dy r, index r(i32), dx rw ; n, C ; s      (dx[index[i]] += s*dy[i], i in order) */
    BSK_DROPOUT,      /* x r, row r(i32), pos r(i32), y w ; T, C, key0, key1, step ; probability
                         (element zeroed when uniform < probability, else divided by 1-probability;
                         counter = (step, row id, position, channel/4), word channel%4) */
    BSK_HEAD_TILE,    /* logits rw, label r(i32), m rw, s rw, ly rw, factor w
                         ; T, V, first, softcap_on ; softcap
                         (online softmax of a tile with the label's column left out; logits becomes
                         P (times the cap's derivative), factor[t] rescales earlier sums) */
    BSK_HEAD_PICK,    /* w r, label r(i32), ly r, wy rw ; T, C, first, V, softcap_on ; softcap
                         (wy[t] = W[label - first] where the tile holds the label, times the cap's
                         derivative at ly) */
    BSK_ROW_MUL,      /* x rw, factor r          ; T, C            (rows scaled in place) */
    BSK_HEAD_FINISH,  /* m r, s r, ly r, acc r|absent, wy r|absent, loss w(f32 per row), dx w|absent
                         ; T, C ; 1/count
                         d = log(s)+m-ly, loss = softplus(d), q = sigmoid(d), dx = q*(acc/s - wy)/count */
    BSK_HEAD_DLOGITS, /* logits rw, label r(i32), m r, s r, ly r ; T, V, first, softcap_on ; 1/count, softcap
                         (logits becomes (p - onehot)/count, p over the full vocabulary) */
    BSK_SOFTCAP,      /* x rw                    ; N ; cap */
    BSK_SUM,          /* x r, out w(f64)         ; N               (fixed order, f64) */
    BSK_SUMSQ,        /* x r, out w(f64)         ; N               (fixed order, f64) */
    BSK_ADAMW,        /* p rw, g r, m rw, v rw   ; N ; lr, beta1, beta2, eps, decay, bc1, bc2, gscale
                         (bc = 1 - beta^t; g is multiplied by gscale first; f64 scalars, f32 state) */
    BSK_OP_COUNT
} bsk_op;

typedef enum bsk_act { BSK_SILU, BSK_GELU_TANH, BSK_GELU_ERF, BSK_RELU } bsk_act;

/* Runs fn(arg, i) for i in [0, n) on the threads of the compute queue; returns when all are done. */
typedef struct bsk_par {
    void (*run)(struct bsk_par *self, int64_t n, void (*fn)(void *arg, int64_t i), void *arg);
    void *impl;
} bsk_par;

typedef struct bsk_call {
    void *p[BSK_MAX_ARGS];
    int64_t n[BSK_MAX_DIMS];
    double f[BSK_MAX_SCALARS];
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
/* "openblas" or "plain". bsk_cpu_init makes a BLAS of several threads single-threaded. */
const char *bsk_cpu_gemm_name(void);
void bsk_cpu_init(void);

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
typedef struct bsk_attention_dims {
    int64_t T, H, K, D, n_rows, window, capacity;
    float scale, softcap;
} bsk_attention_dims;
void bsk_attention_f32(bsk_par *par, const bsk_attention_dims *d, const float *q, const float *k,
                       const float *v, const int32_t *cu, float *o, float *lse, void *scratch);
void bsk_attention_bwd_f32(bsk_par *par, const bsk_attention_dims *d, const float *q, const float *k,
                           const float *v, const int32_t *cu, const float *o, const float *lse,
                           const float *grad_o, float *dq, float *dk, float *dv, void *scratch);
/* The loops that define attention; the functions above must agree with them. */
void bsk_attention_plain_f32(const bsk_attention_dims *d, const float *q, const float *k,
                             const float *v, const int32_t *cu, float *o, float *lse);
void bsk_attention_bwd_plain_f32(const bsk_attention_dims *d, const float *q, const float *k,
                                 const float *v, const int32_t *cu, const float *o, const float *lse,
                                 const float *grad_o, float *dq, float *dk, float *dv);
float bsk_act_f32(float x, int act);
float bsk_act_grad_f32(float x, int act);

#endif
