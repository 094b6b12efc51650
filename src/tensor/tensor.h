/* SPDX-License-Identifier: Apache-2.0 */
/*
** tensor.h: private to the tensor layer; train may use the section on weights. Owner thread only.
**
** Three records. A *value* is bytes: an arena range taken by capacity, or somebody else's place. A
** tensor* is a handle: dims over a value (views share one). A *node* is one recorded op: it names
** values, never addresses of weights. All live in lists of the scope and go back to free lists when it
** closes, so that steady state allocates nothing.
**
** Lifetime of bytes. Before backward nothing is freed: what a script keeps or drops never moves an
** offset. Backward counts: value->uses = nodes still to run that read it + values whose gradient it
** is; at zero an owned value that is no leaf goes back to the arena. Every count is a function of the
** ops issued, never of the rows in use, so a dry run and every micro-batch replay one sequence of
** offsets.
**
** Late ops (linear, add, glu) of a scope with tape are launched when something reads their result: a
** later op, a store, or what backward saved. A recompute so leaves out what its backward pass does not
** read, such as the last product of a layer. When they run depends on the ops issued and nothing else.
*/
#ifndef BS_TENSOR_H
#define BS_TENSOR_H

#include "bs/tensor.h"
#include "engine/engine.h"

typedef enum bsi_op {
    BSI_OP_LINEAR,
    BSI_OP_RMSNORM,
    BSI_OP_LAYERNORM,
    BSI_OP_ROPE,
    BSI_OP_NORM_ROPE,
    BSI_OP_ATTENTION,
    BSI_OP_GLU,
    BSI_OP_ACT,
    BSI_OP_ADD,
    BSI_OP_MUL,
    BSI_OP_SCALE,
    BSI_OP_SOFTMAX,
    BSI_OP_COLUMNS,
    BSI_OP_ROW_SCALE,
    BSI_OP_LABELLED,
    BSI_OP_LAST, /* never nodes: they have no gradient */
    BSI_OP_ATTENTION_CACHED,
    BSI_OP_VIEW, /* never a node: a view shares value and gradient */
    BSI_OP_COUNT
} bsi_op;

enum { BSI_MAX_IN = 3, BSI_MAX_SAVED = 5, BSI_NODE_DIMS = 8, BSI_NODE_SCALARS = 2 };

typedef struct bsi_link { /* first member of every record that a free list holds */
    struct bsi_link *next;
} bsi_link;

typedef enum bsi_record { BSI_TENSOR, BSI_VALUE, BSI_NODE, BSI_LABEL, BSI_RECORD_COUNT } bsi_record;

typedef struct bsi_label { /* a scope's name; outlives it in dead handles */
    bsi_link link;
    int refs;
    char text[128];
} bsi_label;

typedef struct bsi_value {
    bsi_link link;
    bsi_addr at;
    bs_dtype dtype; /* the engine's, or f32: statistics of an op, sums of a store */
    size_t bytes;   /* reserved, by capacity */
    int64_t count;  /* elements in use */
    int uses;
    bool owned;    /* an arena range of the scope */
    bool freed;    /* given back by backward */
    bool wanted;   /* a gradient flows to it */
    bool leaf;     /* bs_tensor_want_grad: it and its gradient live until the scope ends */
    bool consumed; /* some op has read it */
    struct bsi_value *grad;
    struct bsi_node *late; /* has still to compute it; it has no bytes yet */
} bsi_value;

typedef struct bsi_space bsi_space;

struct bs_tensor {
    bsi_link link;
    bsi_space *space;
    bsi_label *label;
    bsi_value *value; /* NULL: its scope has ended */
    int refs;         /* of callers, and one of the open scope */
    bs_dtype dtype;   /* its value's */
    int ndim;
    int64_t dim[BS_MAX_DIMS];
    int64_t capacity; /* rows that dim 0 is allocated for */
};

typedef struct bsi_node {
    bsi_link link;
    bsi_op op;
    bsi_value *out, *in[BSI_MAX_IN];
    bsi_value *saved[BSI_MAX_SAVED]; /* what backward reads, and no more */
    const void *ref;                 /* bs_linear, bs_weight (of a norm; the sinks of an attention) */
    const bs_weight *bias;           /* of a layernorm */
    const bs_rope *rope;
    int64_t n[BSI_NODE_DIMS];
    double f[BSI_NODE_SCALARS];
} bsi_node;

typedef struct bsi_scope { /* what of a scope is set aside with it */
    const bs_batch *batch;
    int micro;
    bool tape, train, walked;
    int64_t step;
    uint64_t hash;
    bsi_label *label;
    bsi_link *values, *nodes; /* newest first */
} bsi_scope;

struct bsi_space { /* e->tensors: the open scope and the free lists */
    bs_engine *e;  /* NULL: closed; the last handle frees the space */
    int handles;   /* tensors that are not in the free list */
    bool poison;   /* check devices: freed bytes are overwritten, in queue order */
    bool open;
    bsi_scope scope;      /* the open one */
    bsi_link *tensors;    /* its handles, newest first */
    struct bs_kept *kept; /* scopes set aside */
    bsi_link *idle[BSI_RECORD_COUNT];

    /* Tensors whose copy is in the expand region: valid for one block of one visit. */
    uint64_t *expanded;
    int n_expanded, cap_expanded, expand_block;
    uint64_t expand_generation;
};

/* ---- scope.c ---------------------------------------------------------------------------------------
 */

/* The engine's space, made at first use. */
bs_status bsi_space_get(bs_engine *e, bsi_space **out);
/* A zeroed record; NULL: no memory, already reported. */
void *bsi_record_take(bsi_space *s, bsi_record kind);
void bsi_record_give(bsi_space *s, bsi_record kind, void *record);
/* Before a scope is set aside or walked: computes what rules read, frees what none of them does. */
bs_status bsi_tape_settle(bsi_space *s);
/* The open scope of an engine, or BS_STATE. */
bs_status bsi_scope_get(bs_engine *e, const char *what, bsi_space **out);
/* The micro-batch of the scope; BS_STATE without one, BS_SHAPE when x does not hold a row per token. */
bs_status bsi_scope_micro(bsi_space *s, const char *op, const bs_tensor *x, const bsi_micro **out);
void bsi_hash_ints(bsi_space *s, int n, const int64_t *v);
void bsi_hash_number(bsi_space *s, double v);
void bsi_hash_text(bsi_space *s, const char *text);

/* ---- tensor.c --------------------------------------------------------------------------------------
 */

/* A value over an arena range of capacity*row elements, of which rows*row are in use. */
bs_status bsi_value_new(bsi_space *s, bs_dtype t, int64_t rows, int64_t capacity, int64_t row,
                        bsi_value **out);
/* The same without bytes: a late op takes them when it runs. */
bs_status bsi_value_late(bsi_space *s, bs_dtype t, int64_t rows, int64_t capacity, int64_t row,
                         bsi_value **out);
bs_status bsi_value_take(bsi_space *s, bsi_value *v); /* the bytes of a late value */
/* The same bytes, type and count as v. */
bs_status bsi_value_like(bsi_space *s, const bsi_value *v, bsi_value **out);
void bsi_value_free(bsi_space *s, bsi_value *v); /* back to the arena, if it is owned */
/* One use less; during backward the last one frees. */
void bsi_value_drop(bsi_space *s, bsi_value *v);
/* A handle over a value: one reference is the scope's, one the caller's. */
bs_status bsi_tensor_over(bsi_space *s, bsi_value *v, int ndim, const int64_t *dim, int64_t capacity,
                          bs_tensor **out);
/* Handle and value for the result of an op, in the engine's dtype; late: without bytes. */
bs_status bsi_tensor_new(bsi_space *s, int ndim, const int64_t *dim, int64_t capacity, bs_tensor **out);
bs_status bsi_tensor_late(bsi_space *s, int ndim, const int64_t *dim, int64_t capacity,
                          bs_tensor **out);
int64_t bsi_tensor_row(const bs_tensor *t); /* elements of one row: product of all dims but the first */
/* BS_STATE with the reason unless its scope is open; unless its bytes can be used, too. */
bs_status bsi_tensor_here(const bs_tensor *t, const char *what);
bs_status bsi_tensor_check(const bs_tensor *t, const char *what);
/* "[7 64]"; returns text. */
enum { BSI_SHAPE_TEXT = 96 };
char *bsi_shape_text(const bs_tensor *t, char text[BSI_SHAPE_TEXT]);

/* ---- tape.c ----------------------------------------------------------------------------------------
 */

/* Start of every op: inputs are alive, activations, of one open scope that has not been walked; hashes
   the op with the dims of its inputs. Inputs of ops that are not late are computed. */
bs_status bsi_op_begin(bsi_op op, int n, bs_tensor *const *in, bsi_space **out);
const char *bsi_op_name(bsi_op op);
/* Would a node be recorded for these inputs? */
bool bsi_tape_wants(const bsi_space *s, int n, bs_tensor *const *in, bool trainable);
/* Record: marks out as wanted. The caller fills saved (bsi_node_save), ref, n and f. */
bs_status bsi_node_new(bsi_space *s, bsi_op op, int n, bs_tensor *const *in, bsi_value *result,
                       bsi_node **out);
void bsi_node_save(bsi_node *node, bsi_value *v);
/* The bytes of v are computed, in queue order: runs the late op behind it and those that it reads. */
bs_status bsi_value_ready(bsi_space *s, bsi_value *v);
/* Gradient buffers of backward rules: open one shaped like v, write it, close it: it is added to v's
   gradient, or freed when v wants none. */
bs_status bsi_grad_open(bsi_space *s, const bsi_value *v, bsi_value **out);
bs_status bsi_grad_close(bsi_space *s, bsi_value *v, bsi_value *grad);
/* As open, but hands out v's present gradient where it may be added to in place (then *add). */
bs_status bsi_grad_open_add(bsi_space *s, const bsi_value *v, bsi_value **out, bool *add);
/* Pass dy on as the gradient of v without a copy. */
bs_status bsi_grad_share(bsi_space *s, bsi_value *v, bsi_value *dy);

/* ---- grad.c, ops_linear.c, ops_rows.c -------------------------------------------------------- */

/* Backward rule of an op: reads dy, adds to the gradients of node->in that are wanted. */
typedef bs_status (*bsi_rule)(bsi_space *s, const bsi_node *node, bsi_value *dy);
extern const bsi_rule bsi_rules[BSI_OP_COUNT];
bs_status bsi_linear_backward(bsi_space *s, const bsi_node *node, bsi_value *dy);
/* The launches of late ops: inputs and the bytes of node->out are there. */
bs_status bsi_linear_forward(bsi_space *s, const bsi_node *node);
bs_status bsi_binary_forward(bsi_space *s, const bsi_node *node);

struct bs_rope {
    bs_engine *e;
    bsi_addr freq; /* f32 [n_freq], a region */
    int64_t n_freq;
    double scaling;
    bs_rope_style style;
    uint64_t id; /* hash of the frequencies, for the op hash */
};
/* Heads, window, scale of an attention and the shapes of its q, k, v. */
bs_status bsi_attention_check(const bs_attention_cfg *a, bs_tensor *const in[3]);
/* Operands 0..3 and the sizes of both norm_rope kernels. n: T, H, D, one_plus */
bs_status bsi_norm_rope_call(bsi_space *s, const bs_weight *w, const bs_rope *r, const int64_t n[4],
                             bsi_addr x, bsi_kcall *c);
/* The operand of kernels; absent when sinks is NULL. */
bs_status bsi_attention_sinks(bsi_space *s, const bs_weight *sinks, bsi_arg *out);
/* thd: tokens, heads, head dim. y = x rotated by the scope's positions; inverse: the other way. */
bs_status bsi_rope_launch(bsi_space *s, const bs_rope *r, const int64_t thd[3], bool inverse,
                          bsi_addr x, bsi_addr y);

/* ---- weight.c: weights, resolved through the visit's binding at each launch ------------------ */

typedef struct bsi_wref { /* one tensor of a block */
    int block;
    bs_tensor_info info; /* name owned */
    int64_t count;
    bsi_addr grad; /* f32 accumulator; mem NULL: frozen */
} bsi_wref;

struct bs_weight {
    bs_engine *e;
    bsi_wref ref;
};

struct bs_linear {
    bs_engine *e;
    char *name;
    int64_t in, out, rank;   /* rank 0: no adapter */
    bsi_wref weight, bias;   /* bias.count 0: none */
    bsi_addr a, b;           /* A [rank,in], B [out,rank] */
    bsi_addr grad_a, grad_b; /* mem NULL: frozen */
    double scale, dropout;
    uint32_t key[2];
};

/* The tensor in the current visit, in the engine's dtype: expanded first when it is stored otherwise.
   Valid until the visit's next weight of another block is asked for. */
bs_status bsi_wref_addr(bs_engine *e, const bsi_wref *w, bsi_addr *out);
static inline bs_status bsi_weight_addr(const bs_weight *w, bsi_addr *out)
{
    return bsi_wref_addr(w->e, &w->ref, out);
}

/* ---- launches -------------------------------------------------------------------------------- */

/* Launch on activations: the operands that bsk.h marks `a` have the engine's dtype. What it marks `o`
   is f32 unless call->out says otherwise. */
static inline bs_status bsi_op_launch(bs_engine *e, bsi_kcall *call)
{
    call->dtype = e->dtype;
    return bsi_engine_launch(e, call);
}

typedef struct bsi_gemm { /* C[M,N] = alpha op(A)[M,K] op(B)[K,N] + beta D, all dense */
    bool ta, tb;
    bool sums; /* C is an f32 accumulator, else an activation */
    int64_t M, N, K;
    double alpha, beta;
    bsi_addr a, b, c, d; /* d.mem NULL: C */
} bsi_gemm;
bs_status bsi_gemm_launch(bs_engine *e, const bsi_gemm *g, const char *label);
/* y += s*x over n elements of activations. */
bs_status bsi_axpy_launch(bs_engine *e, bsi_addr x, bsi_addr y, int64_t n, double s);

#endif
