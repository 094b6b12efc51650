/* SPDX-License-Identifier: Apache-2.0 */
/*
** engine.h: what tensor, stream and train share: a device with its queues, pool, binding, and the
** micro-batches of the step. Includes dev; knows nothing of tensors, files or slots.
*/
#ifndef BS_ENGINE_H
#define BS_ENGINE_H

#include "bs/engine.h"
#include "dev/dev.h"

/* Where the blocks of the current visit are: the streamer fills it when a visit begins and clears
   it when it ends; ops resolve weights through it. So stream and tensor meet without knowing each
   other. */
typedef struct bs_binding {
    int n_blocks;
    bsi_addr *base;      /* canonical layout of the block; mem NULL: not bound */
    uint64_t generation; /* of the visit: expanded copies of an older one are stale */
    const char *visit;   /* label for messages */
} bs_binding;

struct bs_engine {
    bs_dev *dev;
    bs_dev_props props;
    bsi_queue *compute, *copy_in, *copy_out;
    bsi_pool *pool;
    bs_binding binding;
    bs_dtype dtype; /* of activations and of weights as ops read them */
    uint64_t seed;
    uint64_t launches;
    bool sealed;

    bsi_addr expand; /* region for copies of the visit's tensors that are not stored in dtype */
    size_t expand_bytes;
    bsi_arg workspace; /* region that every launch is given */

    void *tensors; /* state of the tensor layer (open scope, handle pool), freed by tensors_free */
    void (*tensors_free)(void *state);
    /* Streams register here; every blocking wait and every launch advances them. */
    void (*pump)(void *ud);
    void *pump_ud;
};

/* Operands of n elements: in the engine's dtype, and in f32 whatever it is. */
static inline bsi_arg bsi_operand(bsi_addr at, bs_dtype t, int64_t n, uint8_t mode)
{
    return (bsi_arg){at, (size_t)n * bs_dtype_size(t), mode};
}
static inline bsi_arg bsi_act_read(const bs_engine *e, bsi_addr at, int64_t n)
{
    return bsi_operand(at, e->dtype, n, BSI_READ);
}
static inline bsi_arg bsi_act_write(const bs_engine *e, bsi_addr at, int64_t n)
{
    return bsi_operand(at, e->dtype, n, BSI_WRITE);
}
static inline bsi_arg bsi_act_update(const bs_engine *e, bsi_addr at, int64_t n)
{
    return bsi_operand(at, e->dtype, n, BSI_READWRITE);
}
static inline bsi_arg bsi_read_f32(bsi_addr at, int64_t n)
{
    return bsi_operand(at, BS_DTYPE_F32, n, BSI_READ);
}
static inline bsi_arg bsi_write_f32(bsi_addr at, int64_t n)
{
    return bsi_operand(at, BS_DTYPE_F32, n, BSI_WRITE);
}
static inline bsi_arg bsi_update_f32(bsi_addr at, int64_t n)
{
    return bsi_operand(at, BS_DTYPE_F32, n, BSI_READWRITE);
}

/* Launch on the compute queue and pump. */
bs_status bsi_engine_launch(bs_engine *e, const bsi_kcall *call);
typedef struct bsi_expand { /* to = from * scale, from one element type to another */
    bsi_addr from, to;
    bs_dtype stored, out;
    int64_t n;
    double scale;
} bsi_expand;
bs_status bsi_expand_launch(bs_engine *e, const bsi_expand *x, const char *label);
/* Small pinned read-back buffer: copy n bytes from device, wait, deliver. */
bs_status bsi_engine_read(bs_engine *e, bsi_addr from, size_t bytes, void *to);
/* Copy host bytes to the device through a pinned staging buffer, on the compute queue; waits only for
   the staging buffer's previous use. */
bs_status bsi_engine_write(bs_engine *e, bsi_addr to, const void *from, size_t bytes);

static inline bsi_addr bsi_place_addr(const bs_place *p)
{
    return (bsi_addr){(bsi_mem *)p->mem, p->off};
}
static inline bs_place bsi_place(bsi_addr a, bs_dtype t, int64_t rows, int64_t cap, int64_t channels)
{
    return (bs_place){a.mem, a.off, t, rows, cap, channels};
}

/* What a batch keeps per micro-batch: host copies, and device arrays of fixed capacity. */
typedef struct bsi_micro {
    int64_t tokens, rows, labelled;
    int64_t longest;           /* highest position + 1 */
    int64_t least_id, most_id; /* of row identities */
    int64_t *ids;              /* host [tokens] */
    int64_t *target;           /* host [labelled] token ids */
    int32_t *position;         /* host [labelled] token index of each trained position */
    bsi_addr pos;              /* device i32 [capacity]: position of each token in its row */
    bsi_addr row_id;           /* device i32 [capacity]: identity of each token's row */
    bsi_addr cu;               /* device i32 [rows + 1]: row starts */
    bsi_addr dev_ids;          /* device i32 [capacity] */
    bsi_addr last_at;          /* device i32 [rows]: token index of each row's last token */
    bsi_addr label_at;         /* device i32 [capacity]: token index of the i-th trained position */
    bsi_addr label_id;         /* device i32 [capacity]: its target id */
} bsi_micro;

struct bs_batch {
    bs_engine *e;
    bs_batch_cfg cfg;
    int micros; /* of the coming step */
    bsi_micro *micro;
};

#endif
