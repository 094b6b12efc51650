/* SPDX-License-Identifier: Apache-2.0 */
/* bs/tensor.h: weights, scopes, tensors, ops. Conventions: bs.h. */
#ifndef BS_PUBLIC_TENSOR_H
#define BS_PUBLIC_TENSOR_H

#include "bs/engine.h"
#include "bs/io.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- weights as the ops see them ------------------------------------------------------------- */

typedef struct bs_weight bs_weight; /* one tensor of a block (norm weight, bias, gate) */
typedef struct bs_linear bs_linear; /* weight, bias, adapter */
/* block, info: where the tensor is; copied. param: NULL or a zero grad when frozen. */
BS_API BS_NODISCARD bs_status bs_weight_new(bs_engine *e, int block, const bs_tensor_info *info,
                                            const bs_param_ref *param, bs_weight **out);
BS_API void bs_weight_free(bs_weight *w);
typedef struct bs_linear_cfg {
    int block;
    const bs_tensor_info *weight;        /* [out, in], or [in, out] where it is transposed */
    const bs_tensor_info *bias;          /* [out], or NULL */
    bs_param_ref base_weight, base_bias; /* grad.mem NULL: frozen */
    bs_param_ref lora_a, lora_b;         /* A [r, in], B [out, r]; value.mem NULL: no adapter */
    float scale;                         /* alpha/r or alpha/sqrt r */
    float dropout; /* probability of zeroing an input element of the adapter branch */
    bool transposed;
    /* grouped: these are the weights of expert `first_expert` and of those behind it, for scopes of routed rows. `next`
       are the tensors of the others in their order, of the same block, dtype and dims, each as far from the one
       before. No adapter, and nothing trains. */
    bool grouped;
    int first_expert, n_next;
    const bs_tensor_info *const *next, *const *next_bias;
    const char *name; /* for messages and the dropout key; copied */
} bs_linear_cfg;
BS_API BS_NODISCARD bs_status bs_linear_new(bs_engine *e, const bs_linear_cfg *cfg, bs_linear **out);
BS_API void bs_linear_free(bs_linear *l);
BS_API void bs_linear_dims(const bs_linear *l, int64_t *in, int64_t *out);

/* ---- scopes, tensors, tape ------------------------------------------------------------------- */

typedef struct bs_tensor bs_tensor;
typedef struct bs_routing bs_routing;
/* One scope per (visit, micro-batch) or (visit, piece); at most one is open per engine. At its end
   every tensor made in it is dead: any use fails with BS_STATE and the scope's label. */
typedef struct bs_scope_cfg {
    const char *label; /* "layers.3 backward, micro 0": in messages */
    const bs_batch *batch;
    int micro;
    bool tape;    /* record for bs_scope_backward */
    bool train;   /* dropout on */
    int64_t step; /* dropout counter */
    /* Instead of batch and micro: rows that were routed, [begin, begin + rows) in the order of experts; at most as many
       as a piece of the routing. */
    const bs_routing *routing;
    int64_t begin, rows;
} bs_scope_cfg;
BS_API BS_NODISCARD bs_status bs_scope_open(bs_engine *e, const bs_scope_cfg *cfg);
BS_API void bs_scope_close(bs_engine *e);
/* Hash of the op sequence issued so far (ops, shapes, weights): recompute must equal forward. */
BS_API uint64_t bs_scope_hash(const bs_engine *e);
/* Reverse pass: n pairs (output, its gradient); leaves' gradients by bs_tensor_grad. The gradient tensor
   has the output's shape. Every tensor but leaves, their gradients and store tensors is freed as the
   walk passes its last use; no op can be issued after it except store puts. */
BS_API BS_NODISCARD bs_status bs_scope_backward(bs_engine *e, int n, bs_tensor *const *out,
                                                bs_tensor *const *grad);
/* Set the open scope, which has a tape and has not been walked, aside: what its backward pass reads stays in
   the arena, everything else is freed and every handle is dead. t: n tensors that resume hands out again. Its
   weights, rotations and batch must outlive it. */
typedef struct bs_kept bs_kept;
BS_API BS_NODISCARD bs_status bs_scope_keep(bs_engine *e, int n, bs_tensor *const *t, bs_kept **out);
/* Open it again for its backward pass, while no scope is open. t: references of the caller, of tensors that
   can be outputs of the backward pass or leaves; the bytes of those that no rule reads are gone. k is spent,
   unless this fails. */
BS_API BS_NODISCARD bs_status bs_scope_resume(bs_kept *k, bs_tensor **t);
BS_API int bs_kept_count(const bs_kept *k);         /* n */
BS_API const char *bs_kept_label(const bs_kept *k); /* of its scope */
/* Free a scope that is not resumed, before its engine is closed. */
BS_API void bs_kept_free(bs_kept *k);
/* Mark a tensor of the scope as a leaf whose gradient is wanted (before its use). */
BS_API BS_NODISCARD bs_status bs_tensor_want_grad(bs_tensor *t);
/* The gradient of a leaf after backward; NULL when nothing flowed to it. */
BS_API BS_NODISCARD bs_status bs_tensor_grad(bs_tensor *t, bs_tensor **out);

BS_API void bs_tensor_retain(bs_tensor *t);
BS_API void bs_tensor_release(bs_tensor *t);
BS_API bool bs_tensor_alive(const bs_tensor *t);
BS_API bs_dtype bs_tensor_dtype(const bs_tensor *t);
BS_API int bs_tensor_ndim(const bs_tensor *t);
BS_API int64_t bs_tensor_dim(const bs_tensor *t, int axis); /* 0-based; dim 0 = rows in use */
BS_API int64_t bs_tensor_capacity(const bs_tensor *t);      /* rows that dim 0 is allocated for */
/* The bytes of a tensor [rows, channels], and a tensor of the open scope over bytes (a store place; a
   weight of the current visit): not owned, alive until the scope ends. */
BS_API BS_NODISCARD bs_status bs_tensor_place(bs_tensor *t, bs_place *out);
BS_API BS_NODISCARD bs_status bs_tensor_at(bs_engine *e, const bs_place *at, bs_tensor **out);
/* Copy to the host in the tensor's dtype (waits). */
BS_API BS_NODISCARD bs_status bs_tensor_read(bs_tensor *t, bs_array **out);
/* A tensor of the scope from host data, f32 [rows, cols...], in the compute dtype; capacity = rows. */
BS_API BS_NODISCARD bs_status bs_tensor_from(bs_engine *e, const bs_array *a, bs_tensor **out);

/* ---- ops: activations have the engine's compute dtype, [rows, channels] ---------------------- */

/* y = x W^T + b + scale * (drop(x) A^T) B^T + r, what w has of it. r: a residual [rows, out] that the product
   is added to as it is computed, or NULL. */
BS_API BS_NODISCARD bs_status bs_op_linear(bs_tensor *x, bs_linear *w, bs_tensor *r, bs_tensor **out);
/* y = x / rms(x) * (w + one_plus), over the last `channels(w)` entries: a row of x may hold several
   heads, each normalised alone. Zhang & Sennrich 2019. */
BS_API BS_NODISCARD bs_status bs_op_rmsnorm(bs_tensor *x, bs_weight *w, double eps, bool one_plus,
                                            bs_tensor **out);
/* y = (x - mean(x)) / sqrt(var(x) + eps) * w + b, over the last `channels(w)` entries, as above. w and b
   are of one block. Ba et al. 2016. */
BS_API BS_NODISCARD bs_status bs_op_layernorm(bs_tensor *x, bs_weight *w, bs_weight *b, double eps,
                                              bs_tensor **out);
typedef enum bs_rope_style { BS_ROPE_HALF, BS_ROPE_INTERLEAVED } bs_rope_style;
/* Rotates the first 2*n_freq entries of each head of x [T, heads*head_dim] by position * inv_freq
   (Su et al. 2021); cos and sin are multiplied by `scaling`. inv_freq: host array f32 [n_freq]. */
typedef struct bs_rope bs_rope;
BS_API BS_NODISCARD bs_status bs_rope_new(bs_engine *e, const bs_array *inv_freq, double scaling,
                                          bs_rope_style style, bs_rope **out);
BS_API void bs_rope_free(bs_rope *r);
BS_API BS_NODISCARD bs_status bs_op_rope(bs_tensor *x, bs_rope *r, int heads, bs_tensor **out);
/* rmsnorm of each head of x [T, heads*channels(w)], then rope: nothing is stored, or rounded, between them. */
BS_API BS_NODISCARD bs_status bs_op_norm_rope(bs_tensor *x, bs_weight *w, double eps, bool one_plus,
                                              bs_rope *r, int heads, bs_tensor **out);
typedef struct bs_attention_cfg {
    int heads, kv_heads, head_dim;
    double scale;     /* 0: head_dim^-0.5 */
    int64_t window;   /* key j is seen by query i iff 0 <= i-j < window; 0: no window */
    double softcap;   /* 0: none; else cap*tanh(s/cap) */
    bs_weight *sinks; /* [heads] scores that take part in the softmax without a value; or NULL */
} bs_attention_cfg;
/* Causal attention inside each row of the micro-batch. q [T, heads*D], k and v [T, kv_heads*D]. */
BS_API BS_NODISCARD bs_status bs_op_attention(bs_tensor *q, bs_tensor *k, bs_tensor *v,
                                              const bs_attention_cfg *cfg, bs_tensor **out);
/* Keys and values of earlier tokens for walks without a tape: for each layer [rows, capacity, channels] in the
   engine's dtype, a region of the pool. A row of the cache is a row identity of the batch. */
typedef struct bs_cache bs_cache;
typedef struct bs_cache_cfg {
    int layers;
    const int64_t *channels; /* [layers] kv_heads * head_dim; 0: the layer has no attention */
    int64_t rows, capacity;  /* positions of a row */
} bs_cache_cfg;
BS_API BS_NODISCARD bs_status bs_cache_open(bs_engine *e, const bs_cache_cfg *cfg, bs_cache **out);
BS_API void bs_cache_close(bs_cache *c);
/* Attention of new tokens: k and v are put into the cache at their rows and positions, then each query sees
   positions 0.. up to its own of its row. Tokens of a row come in order and positions are not left out. */
BS_API BS_NODISCARD bs_status bs_op_attention_cached(bs_tensor *q, bs_tensor *k, bs_tensor *v,
                                                     const bs_attention_cfg *cfg, bs_cache *cache,
                                                     int layer, bs_tensor **out);
typedef enum bs_act { BS_ACT_SILU, BS_ACT_GELU_TANH, BS_ACT_GELU_ERF, BS_ACT_RELU } bs_act;
/* act(gate) * up */
BS_API BS_NODISCARD bs_status bs_op_glu(bs_tensor *gate, bs_tensor *up, bs_act act, bs_tensor **out);
/* y [T,H] of x [T,2H], gate and up in turn: g = min(gate, limit), u = up brought into [-limit, limit],
   y = (u + 1) g sigmoid(alpha g). */
BS_API BS_NODISCARD bs_status bs_op_glu_clamped(bs_tensor *x, double alpha, double limit,
                                                bs_tensor **out);
BS_API BS_NODISCARD bs_status bs_op_act(bs_tensor *x, bs_act act, bs_tensor **out);
BS_API BS_NODISCARD bs_status bs_op_add(bs_tensor *a, bs_tensor *b, bs_tensor **out);
BS_API BS_NODISCARD bs_status bs_op_mul(bs_tensor *a, bs_tensor *b, bs_tensor **out);
BS_API BS_NODISCARD bs_status bs_op_scale(bs_tensor *a, double s, bs_tensor **out);
BS_API BS_NODISCARD bs_status bs_op_softmax(bs_tensor *x, bs_tensor **out); /* over the last dim */
/* Columns [first, first+n) of x, a copy. */
BS_API BS_NODISCARD bs_status bs_op_columns(bs_tensor *x, int64_t first, int64_t n, bs_tensor **out);
/* x [T,C] with every row t multiplied by g[t, column]. */
BS_API BS_NODISCARD bs_status bs_op_row_scale(bs_tensor *x, bs_tensor *g, int64_t column,
                                              bs_tensor **out);
/* Rows of w [vocab, C] at the token ids of the scope's micro-batch. Never on the tape: the gradient of w
   is bs_embedding_grad's. */
BS_API BS_NODISCARD bs_status bs_op_embed(bs_engine *e, bs_weight *w, bs_tensor **out);
/* Rows of x at the labelled positions of the scope's micro-batch (capacity of x is kept). */
BS_API BS_NODISCARD bs_status bs_op_labelled(bs_tensor *x, bs_tensor **out);
/* The last row of x of each row of the micro-batch (capacity of x is kept); outside the tape. */
BS_API BS_NODISCARD bs_status bs_op_last(bs_tensor *x, bs_tensor **out);
/* Where the tokens of a step go in the layer at hand: for every token `chosen` of `experts`, of all micro-batches
   together, in regions of the pool. */
typedef struct bs_routing_cfg {
    int64_t experts, chosen; /* of a layer, and of a token, at most */
    int64_t piece; /* routed rows of a scope, at most; 0: as many as a micro-batch has tokens */
} bs_routing_cfg;
BS_API BS_NODISCARD bs_status bs_routing_open(bs_engine *e, const bs_batch *b,
                                              const bs_routing_cfg *cfg, bs_routing **out);
BS_API void bs_routing_close(bs_routing *r);
typedef enum bs_route_kind {
    BS_ROUTE_SOFTMAX, /* weights are a softmax over all logits */
    BS_ROUTE_SIGMOID, /* the sigmoid of each */
    BS_ROUTE_CHOSEN   /* a softmax over the chosen ones */
} bs_route_kind;
typedef struct bs_route_cfg {
    bs_route_kind kind;
    int64_t
        chosen; /* experts of a token, those with the largest weight (+ bias); of equal ones the first */
    int64_t groups,
        kept; /* with groups > 1: only experts of the `kept` groups whose two best have the largest sum */
    bool renorm;     /* divided by their sum */
    double scale;    /* then multiplied by this */
    bs_weight *bias; /* [experts] for the choice only, as f32 whatever is computed in; or NULL */
} bs_route_cfg;
/* Weights [T, chosen] of the experts of each token of the scope's micro-batch, in the order of the experts'
   numbers. The choice is in r. The gradient goes to the logits [T, experts]. */
BS_API BS_NODISCARD bs_status bs_op_route(bs_tensor *logits, const bs_route_cfg *cfg, bs_routing *r,
                                          bs_tensor **out);
/* Once every micro-batch of the step is routed: brings the rows of each expert together. Rows of an expert keep the
   order of tokens. */
BS_API BS_NODISCARD bs_status bs_routing_sort(bs_routing *r);
BS_API int64_t bs_routing_experts(const bs_routing *r); /* of the layer that was routed last */
/* Where each expert's rows begin in that order, [experts + 1] (waits for the sort). */
BS_API BS_NODISCARD bs_status bs_routing_offsets(bs_routing *r, int64_t *offset);
/* Ops of a scope of routed rows [n]. `all`, `stride`: of bs_store_get_all. take_rows: y [n, channels], the
   tokens' rows of all [T, channels]. take_weights: y [n, 1] of all [T, chosen]. Both are leaves. add_rows, outside
   the tape: y is added to the tokens' rows of all, which is f32, expert by expert; add_weights: y [n, 1] to their
   places. */
BS_API BS_NODISCARD bs_status bs_op_take_rows(bs_engine *e, const bs_place *all, int64_t stride,
                                              bs_tensor **out);
BS_API BS_NODISCARD bs_status bs_op_take_weights(bs_engine *e, const bs_place *all, int64_t stride,
                                                 bs_tensor **out);
BS_API BS_NODISCARD bs_status bs_op_add_rows(bs_tensor *y, const bs_place *all, int64_t stride);
BS_API BS_NODISCARD bs_status bs_op_add_weights(bs_tensor *y, const bs_place *all, int64_t stride);
/* Same elements, other dims; dim 0 must stay a multiple or divisor of the rows. Shares storage. */
BS_API BS_NODISCARD bs_status bs_op_view(bs_tensor *x, int ndim, const int64_t *dim, bs_tensor **out);
/* acc += x, in place, outside the tape: acc comes from a store (expert sums), in f32 or x's dtype. */
BS_API BS_NODISCARD bs_status bs_op_accumulate(bs_tensor *acc, bs_tensor *x);
/* x as ops take it, outside the tape: x itself if it has the compute dtype, else a copy (f32 sums). */
BS_API BS_NODISCARD bs_status bs_op_activation(bs_tensor *x, bs_tensor **out);

#ifdef __cplusplus
}
#endif

#endif
