/* SPDX-License-Identifier: Apache-2.0 */
/*
** space.h: the records of the tensor layer and how long they live. Private to the layer; owner thread only.
**
** Three records. A *value* is bytes: an arena range taken by capacity, or somebody else's place. A
** *tensor* is a handle: dims over a value (views share one). A *node* (tape.h) is one recorded op: it names
** values, never addresses of weights. All live in lists of the scope and go back to free lists when it
** closes, so that steady state allocates nothing.
**
** Lifetime of bytes. Before backward nothing is freed: what a script keeps or drops never moves an
** offset. Backward counts: value->uses = nodes still to run that read it + values whose gradient it
** is; at zero an owned value that is no leaf goes back to the arena. Every count is a function of the
** ops issued, never of the rows in use, so a dry run and every micro-batch replay one sequence of
** offsets.
**
** The files of the layer use only those before them: record.c, value.c, space.c; weight.c, tape.c; scope.c,
** tensor.c (the public calls); ops_*.c, cache.c.
*/
#ifndef BS_SPACE_H
#define BS_SPACE_H

#include "bs/tensor.h"
#include "engine/engine.h"

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

typedef struct bsi_scope { /* what of a scope is set aside with it */
    const bs_batch *batch;
    int micro;
    bool tape, train, walked;
    int64_t step;
    uint64_t hash;
    const bs_routing *routing; /* the scope is of routed rows: piece says which */
    bsi_micro piece;
    bsi_label *label;
    bsi_link *values, *nodes; /* newest first */
} bsi_scope;

struct bs_kept { /* a scope set aside */
    bsi_space *space;
    struct bs_kept *next, **link; /* of the space */
    bsi_scope scope;
    int n;
    bs_tensor shape[]; /* [n]: value and dims of what resume hands out; no handles */
};

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

/* ---- record.c: free lists, labels, the op hash ------------------------------------------------ */

/* A zeroed record; NULL: no memory, already reported. */
void *bsi_record_take(bsi_space *s, bsi_record kind);
void bsi_record_give(bsi_space *s, bsi_record kind, void *record);
/* All records of a list, which is empty afterwards. */
void bsi_record_give_all(bsi_space *s, bsi_record kind, bsi_link **list);
void bsi_label_drop(bsi_space *s, bsi_label *l);
/* Frees the space once its engine is closed and no handle is left. */
void bsi_space_reap(bsi_space *s);
void bsi_hash_ints(bsi_space *s, int n, const int64_t *v);
void bsi_hash_number(bsi_space *s, double v);
void bsi_hash_text(bsi_space *s, const char *text);

/* ---- value.c: bytes, and handles over them ---------------------------------------------------- */

/* A value over an arena range of capacity*row elements, of which rows*row are in use. */
bs_status bsi_value_new(bsi_space *s, bs_dtype t, int64_t rows, int64_t capacity, int64_t row,
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

/* ---- space.c: the space of an engine, and the end of scopes ----------------------------------- */

/* The engine's space, made at first use. */
bs_status bsi_space_get(bs_engine *e, bsi_space **out);
/* The open scope of an engine, or BS_STATE. */
bs_status bsi_scope_get(bs_engine *e, const char *what, bsi_space **out);
/* The rows of the scope: of its micro-batch, or routed ones, which have positions and identities alone. */
static inline const bsi_micro *bsi_scope_rows(const bsi_space *s)
{
    return s->scope.routing ? &s->scope.piece : &s->scope.batch->micro[s->scope.micro];
}
/* The same for an op; BS_STATE without one, BS_SHAPE when x does not hold a row per token. */
bs_status bsi_scope_micro(bsi_space *s, const char *op, const bs_tensor *x, const bsi_micro **out);
/* BS_STATE in a scope of routed rows: the op asks for more of a micro-batch than those have. */
bs_status bsi_scope_whole(const bsi_space *s, const char *op);
/* The scope is no longer the open one: every handle is dead. Its records are the caller's to free or keep. */
void bsi_scope_leave(bsi_space *s);
/* The open scope ends: handles die, bytes and records go back. */
void bsi_scope_end(bsi_space *s);
void bsi_kept_unlink(bs_kept *k); /* and frees k, not what its scope holds */

#endif
