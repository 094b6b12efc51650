/* SPDX-License-Identifier: Apache-2.0 */
/*
** engine.c: a device with its three queues (compute, copy-in, copy-out), its pool, the expand region
** and the binding table of the current visit. Owner thread only. Small host <-> device transfers
** (batches, scalars, parameters) go through two pinned staging buffers on the compute queue, so that
** they are in order with the launches that use them.
*/
#include "engine/engine.h"

#include <string.h>

enum { STAGING_BYTES = 1 << 20 };

typedef struct staging {
    bsi_mem *mem;
    bsi_event *done; /* of the last copy that used it */
} staging;

typedef struct engine_box { /* the public part first */
    bs_engine e;
    staging up[2], down;
    int next_up;
    bsi_event *tail;
} engine_box;

static engine_box *box_of(bs_engine *e)
{
    return (engine_box *)e;
}

static void pump_engine(void *ud)
{
    bs_engine *e = ud;
    if (e->pump)
        e->pump(e->pump_ud);
}

static bs_status open_staging(bs_engine *e, staging *s)
{
    BSI_TRY(bsi_mem_alloc(e->dev, BSI_MEM_PINNED, BS_TAG_STAGING, STAGING_BYTES, &s->mem));
    return bsi_event_open(e->dev, &s->done);
}

static bs_status open_parts(engine_box *b, const bs_engine_cfg *cfg)
{
    bs_engine *e = &b->e;
    BSI_TRY(bsi_queue_open(e->dev, "compute", &e->compute));
    BSI_TRY(bsi_queue_open(e->dev, "copy-in", &e->copy_in));
    BSI_TRY(bsi_queue_open(e->dev, "copy-out", &e->copy_out));
    BSI_TRY(bsi_event_open(e->dev, &b->tail));
    BSI_TRY(open_staging(e, &b->up[0]));
    BSI_TRY(open_staging(e, &b->up[1]));
    BSI_TRY(open_staging(e, &b->down));
    BSI_TRY(bsi_pool_open(e->dev, cfg->pool_bytes, &e->pool));
    size_t workspace = cfg->workspace_bytes ? cfg->workspace_bytes : e->props.workspace_bytes;
    if (workspace) {
        e->workspace = (bsi_arg){.bytes = workspace, .mode = BSI_READWRITE};
        BSI_TRY(bsi_pool_region(e->pool, "workspace", workspace, &e->workspace.at));
    }
    if (cfg->expand_bytes)
        BSI_TRY(bsi_pool_region(e->pool, "expand", cfg->expand_bytes, &e->expand));
    e->expand_bytes = cfg->expand_bytes;
    e->binding.n_blocks = cfg->n_blocks;
    e->binding.base = bsi_alloc(BS_TAG_HEADER, (size_t)BSI_MAX(cfg->n_blocks, 1) * sizeof(bsi_addr));
    if (!e->binding.base)
        return BS_NOMEM;
    e->binding.visit = "none";
    return BS_OK;
}

/* The one place that decides what can be computed in: everything else follows e->dtype. */
static bs_status check_dtype(const bs_dev_props *props, bs_dtype t)
{
    if (t == BS_DTYPE_F32 || (t == BS_DTYPE_BF16 && props->bf16))
        return BS_OK;
    return bsi_fail(BS_DTYPE, "engine: compute dtype %s; the %s device computes in f32%s",
                    bs_dtype_name(t), props->name, props->bf16 ? " or bf16" : "");
}

bs_status bs_engine_open(const bs_engine_cfg *cfg, bs_engine **out)
{
    bs_dev_props props;
    if (!cfg->dev || cfg->n_blocks < 0)
        return bsi_fail(BS_ARG, "engine: a device and a number of blocks >= 0 are required");
    bs_dev_props_get(cfg->dev, &props);
    BSI_TRY(check_dtype(&props, cfg->compute));
    engine_box *b = bsi_alloc(BS_TAG_MISC, sizeof *b);
    if (!b)
        return BS_NOMEM;
    b->e.dev = cfg->dev;
    b->e.props = props;
    b->e.dtype = cfg->compute;
    b->e.seed = cfg->seed;
    bs_status st = open_parts(b, cfg);
    if (st != BS_OK) {
        bs_engine_close(&b->e);
        return bsi_wrap(st, "engine");
    }
    /* Last, so that no wait of the device pumps an engine that is not complete. */
    bsi_dev_pump_set(cfg->dev, pump_engine, &b->e);
    *out = &b->e;
    return BS_OK;
}

static void close_staging(staging *s)
{
    bsi_event_close(s->done);
    bsi_mem_free(s->mem);
}

void bs_engine_close(bs_engine *e)
{
    if (!e)
        return;
    engine_box *b = box_of(e);
    /* First: what the pump advances may be closed already, and the closes below may wait. An engine that could not be
       opened has none, and the device may have another engine's. */
    bsi_dev_pump_end(e->dev, e);
    if (e->tensors_free) /* first: an open scope gives its ranges back to the pool */
        e->tensors_free(e->tensors);
    bsi_queue_close(e->copy_out); /* queues before memory: their close drains what uses it */
    bsi_queue_close(e->copy_in);
    bsi_queue_close(e->compute);
    bsi_event_close(b->tail);
    close_staging(&b->up[0]);
    close_staging(&b->up[1]);
    close_staging(&b->down);
    bsi_pool_close(e->pool);
    bsi_free(e->binding.base);
    bsi_free(b);
}

void bs_engine_stats_get(const bs_engine *e, bs_engine_stats *out)
{
    bsi_pool_stats s;
    bsi_pool_stats_get(e->pool, &s);
    *out = (bs_engine_stats){
        s.pool_bytes, s.fixed_bytes, s.arena_now, s.arena_peak, s.fixed_bytes + s.arena_peak,
        e->launches};
}

bs_status bs_engine_seal(bs_engine *e)
{
    if (e->sealed)
        return bsi_fail(BS_STATE, "engine: sealed already");
    BSI_TRY(bsi_pool_seal(e->pool, 0));
    e->sealed = true;
    return BS_OK;
}

bs_status bs_engine_wait_all(bs_engine *e)
{
    BSI_TRY(bsi_host_wait_queue(e->compute));
    BSI_TRY(bsi_host_wait_queue(e->copy_in));
    return bsi_host_wait_queue(e->copy_out);
}

bs_status bs_engine_wait(bs_engine *e)
{
    engine_box *b = box_of(e);
    BSI_TRY(bsi_event_record(b->tail, e->compute));
    return bsi_host_wait(b->tail);
}

bs_status bsi_engine_launch(bs_engine *e, const bsi_kcall *call)
{
    bsi_kcall with = *call;
    with.workspace = e->workspace;
    e->launches++;
    BSI_TRY(bsi_launch(e->compute, &with));
    pump_engine(e); /* after each launch: transfers go on while the host is busy issuing a layer */
    return BS_OK;
}

bs_status bsi_expand_launch(bs_engine *e, const bsi_expand *x, const char *label)
{
    bsi_kcall c = {.op = BSK_EXPAND,
                   .n_args = 2,
                   .n = {x->stored, x->n},
                   .f = {x->scale},
                   .out = x->out,
                   .label = label};
    c.arg[0] = bsi_operand(x->from, x->stored, x->n, BSI_READ);
    c.arg[1] = bsi_operand(x->to, x->out, x->n, BSI_WRITE);
    return bsi_engine_launch(e, &c);
}

bs_status bsi_engine_read(bs_engine *e, bsi_addr from, size_t bytes, void *to)
{
    staging *s = &box_of(e)->down;
    char *dst = to;
    if (!e->props.executes)
        return bsi_fail(BS_UNSUPPORTED, "device '%s' holds no bytes to read", e->props.name);
    /* The host copies a piece out before the next one is issued, so one buffer is enough. A wait
       that was cancelled leaves its copy in flight; the next read queues behind that copy and waits
       for its own. */
    for (size_t done = 0; done < bytes;) {
        size_t n = BSI_MIN(bytes - done, (size_t)STAGING_BYTES);
        BSI_TRY(bsi_copy(e->compute, (bsi_addr){s->mem, 0}, bsi_addr_add(from, done), n));
        BSI_TRY(bsi_event_record(s->done, e->compute));
        BSI_TRY(bsi_host_wait(s->done));
        memcpy(dst + done, s->mem->host, n);
        done += n;
    }
    return BS_OK;
}

/* Two buffers in turn: one is filled while the copy out of the other runs. A buffer is not touched
   before its last copy has been seen done (C4), and its turn is passed on before that wait: the
   wait pumps, and may fail. */
bs_status bsi_engine_write(bs_engine *e, bsi_addr to, const void *from, size_t bytes)
{
    engine_box *b = box_of(e);
    const char *src = from;
    if (!e->props.executes)
        return BS_OK;
    for (size_t done = 0; done < bytes;) {
        staging *s = &b->up[b->next_up];
        size_t n = BSI_MIN(bytes - done, (size_t)STAGING_BYTES);
        b->next_up ^= 1;
        BSI_TRY(bsi_host_wait(s->done));
        memcpy(s->mem->host, src + done, n);
        BSI_TRY(bsi_copy(e->compute, bsi_addr_add(to, done), (bsi_addr){s->mem, 0}, n));
        BSI_TRY(bsi_event_record(s->done, e->compute));
        done += n;
    }
    return BS_OK;
}
