/* SPDX-License-Identifier: Apache-2.0 */
/*
** tape.h: what an op is to the tape, and what the tape records. Private to the layer; owner thread only. The tape
** knows no op by name: an op brings the functions that a node needs, so a new one is a bsi_op and nothing else.
**
** Late ops of a scope with tape are launched when something reads their result: a later op, a store, or what
** backward saved. A recompute so leaves out what its backward pass does not read, such as the last product of a
** layer. When they run depends on the ops issued and nothing else.
*/
#ifndef BS_TAPE_H
#define BS_TAPE_H

#include "tensor/space.h"

enum { BSI_MAX_IN = 3, BSI_MAX_SAVED = 5, BSI_NODE_REFS = 2, BSI_NODE_DIMS = 8, BSI_NODE_SCALARS = 2 };

typedef struct bsi_node bsi_node;

/* An op. It outlives the nodes that name it. */
typedef struct bsi_op {
    const char *name; /* in messages */
    int64_t id;       /* in the hash of the op sequence: of no other op */
    bool shares;      /* its result is its input's value (a view): nothing is computed */
    /* Launches the op of a late node: the inputs and the bytes of node->out are there. NULL: the op is launched
       when it is called, and only recorded for its backward pass. A forward that failed is run again by the next
       reader: it leaves nothing behind but what it has written to node->out. */
    bs_status (*forward)(bsi_space *s, const bsi_node *node);
    /* Reads dy and what the node saved, adds to the gradients of those of node->in that are wanted. NULL: the op is
       never recorded. */
    bs_status (*backward)(bsi_space *s, const bsi_node *node, bsi_value *dy);
} bsi_op;

struct bsi_node {
    bsi_link link;
    const bsi_op *op;
    bsi_value *out, *in[BSI_MAX_IN];
    bsi_value *saved[BSI_MAX_SAVED]; /* what backward reads, and no more */
    /* Beside values, what the functions of the op ask for, as the op lays it out. Objects that ref names are the
       caller's, and outlive the scope (or the kept one that it becomes). */
    const void *ref[BSI_NODE_REFS];
    int64_t n[BSI_NODE_DIMS];
    double f[BSI_NODE_SCALARS];
};

/* ---- recording ------------------------------------------------------------------------------- */

/* Start of every op: inputs are alive, activations, of one open scope that has not been walked; hashes
   the op with the dims of its inputs. Inputs of ops that are not late are computed. */
bs_status bsi_op_begin(const bsi_op *op, int n, bs_tensor *const *in, bsi_space **out);
/* Would a node be recorded for these inputs? */
bool bsi_tape_wants(const bsi_space *s, int n, bs_tensor *const *in, bool trainable);
/* Record: marks out as wanted, and as late where the op has a forward. The caller fills saved (bsi_node_save),
   ref, n and f. */
bs_status bsi_node_new(bsi_space *s, const bsi_op *op, int n, bs_tensor *const *in, bsi_value *result,
                       bsi_node **out);
void bsi_node_save(bsi_node *node, bsi_value *v);
/* The bytes of v are computed, in queue order: runs the late op behind it and those that it reads. */
bs_status bsi_value_ready(bsi_space *s, bsi_value *v);
/* Before a scope is set aside or walked: computes what rules read, frees what none of them does. */
bs_status bsi_tape_settle(bsi_space *s);

/* ---- gradients ------------------------------------------------------------------------------- */

/* Gradient buffers of backward functions: open one shaped like v, write it, close it: it is added to v's
   gradient, or freed when v wants none. */
bs_status bsi_grad_open(bsi_space *s, const bsi_value *v, bsi_value **out);
bs_status bsi_grad_close(bsi_space *s, bsi_value *v, bsi_value *grad);
/* Closes n of them, unless st is a failure already; returns it. */
bs_status bsi_grad_close_all(bs_status st, bsi_space *s, int n, bsi_value *const *v,
                             bsi_value *const *grad);
/* As open, but hands out v's present gradient where it may be added to in place (then *add). */
bs_status bsi_grad_open_add(bsi_space *s, const bsi_value *v, bsi_value **out, bool *add);
/* Pass dy on as the gradient of v without a copy. */
bs_status bsi_grad_share(bsi_space *s, bsi_value *v, bsi_value *dy);

#endif
