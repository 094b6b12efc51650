/* SPDX-License-Identifier: Apache-2.0 */
/*
** weight.c: weights and linears as ops see them. Made once per model; they hold (block, tensor), never
** an address: each launch asks where the block is in the current visit. What is stored in the engine's
** dtype is read where it lies. Anything else is expanded at its first use in a visit into the expand
** region, on the compute queue, so that the region may be overwritten by the next visit as soon as that
** one's launches are issued. Owner thread only.
*/
#include "tensor/weight.h"
#include "tensor/space.h"

#include <string.h>

/* ---- where a tensor is now ------------------------------------------------------------------- */

static bool is_expanded(const bsi_space *s, uint64_t offset)
{
    for (int i = 0; i < s->n_expanded; i++)
        if (s->expanded[i] == offset)
            return true;
    return false;
}

static bs_status mark_expanded(bsi_space *s, uint64_t offset)
{
    if (s->n_expanded == s->cap_expanded) {
        int cap = BSI_MAX(2 * s->cap_expanded, 32);
        uint64_t *p = bsi_realloc(BS_TAG_MISC, s->expanded, (size_t)cap * sizeof *p);
        if (!p)
            return BS_NOMEM;
        s->expanded = p;
        s->cap_expanded = cap;
    }
    s->expanded[s->n_expanded++] = offset;
    return BS_OK;
}

/* The kernel of each packing. */
static const bsk_op unpack[BS_PACKING_COUNT] = {[BS_MXFP4] = BSK_EXPAND_MXFP4};

static bs_status expand_packed(bs_engine *e, const bsi_wref *w, bsi_addr stored, bsi_addr to)
{
    const bs_packing_info *f = bs_packing_get(w->info.packing);
    size_t groups = (size_t)(w->count / f->group);
    bsi_addr scales = {stored.mem, stored.off - w->info.slot_offset + w->info.scales_offset};
    bsi_kcall c = {.op = unpack[w->info.packing],
                   .n_args = 3,
                   .n = {w->count},
                   .out = e->dtype,
                   .label = "expand"};
    c.arg[0] = (bsi_arg){stored, groups * (size_t)f->bytes, BSI_READ};
    c.arg[1] = (bsi_arg){scales, groups * (size_t)f->scale_bytes, BSI_READ};
    c.arg[2] = bsi_operand(to, e->dtype, w->count, BSI_WRITE);
    return bsi_engine_launch(e, &c);
}

static bs_status expand(bs_engine *e, const bsi_wref *w, bsi_addr stored, bsi_addr *out)
{
    bsi_space *s;
    BSI_TRY(bsi_space_get(e, &s));
    size_t bytes = (size_t)w->count * bs_dtype_size(e->dtype), end;
    if (!bsi_add_size(w->info.expand_offset, bytes, &end) || end > e->expand_bytes)
        return bsi_fail(
            BS_DEVMEM,
            "weight '%s' stored as %s expands to %zu bytes at offset %llu of its block, the "
            "expand region has %zu; open the engine with the block's expand_bytes",
            w->info.name, bs_dtype_name(w->info.dtype), bytes,
            (unsigned long long)w->info.expand_offset, e->expand_bytes);
    *out = bsi_addr_add(e->expand, w->info.expand_offset);
    /* The binding's generation changes with every visit, also of the block that was visited last: its slot may
       hold other bytes by then. */
    if (s->expand_generation != e->binding.generation || s->expand_block != w->block) {
        s->n_expanded = 0; /* the offsets of two blocks overlap */
        s->expand_generation = e->binding.generation;
        s->expand_block = w->block;
    }
    if (is_expanded(s, w->info.expand_offset))
        return BS_OK;
    if (w->info.packing) {
        BSI_TRY(expand_packed(e, w, stored, *out));
    } else {
        bsi_expand x = {.from = stored,
                        .to = *out,
                        .stored = w->info.dtype,
                        .out = e->dtype,
                        .n = w->count,
                        .scale = 1.0};
        BSI_TRY(bsi_expand_launch(e, &x, "expand"));
    }
    return mark_expanded(s, w->info.expand_offset);
}

bs_status bsi_wref_stored(const bs_engine *e, const bsi_wref *w, bsi_addr *out)
{
    bsi_addr base = e->binding.base[w->block];
    if (!base.mem)
        return bsi_fail(BS_STATE, "weight '%s' is used outside a visit of its block %d (visit now: %s)",
                        w->info.name, w->block, e->binding.visit ? e->binding.visit : "none");
    *out = bsi_addr_add(base, w->info.slot_offset);
    return BS_OK;
}

bs_status bsi_wref_addr(bs_engine *e, const bsi_wref *w, bsi_addr *out)
{
    bsi_addr stored;
    BSI_TRY(bsi_wref_stored(e, w, &stored));
    if (w->info.dtype == e->dtype) {
        *out = stored;
        return BS_OK;
    }
    return expand(e, w, stored, out);
}

bs_status bsi_wref_group(bs_engine *e, const bsi_wref *first, int n_next, const bsi_wref *next,
                         bsi_addr *out, int64_t *stride)
{
    bsi_addr at;
    BSI_TRY(bsi_wref_addr(e, first, out));
    *stride = first->count;
    for (int i = 0; i < n_next; i++) {
        BSI_TRY(bsi_wref_addr(e, &next[i], &at));
        if (i == 0)
            *stride = (int64_t)((at.off - out->off) / bs_dtype_size(e->dtype));
    }
    return BS_OK;
}

/* ---- construction ---------------------------------------------------------------------------- */

static bs_status check_grad(const char *name, const bs_place *g, int64_t count)
{
    if (g->dtype != BS_DTYPE_F32 || g->rows * g->channels != count)
        return bsi_fail(
            BS_SHAPE,
            "weight '%s' has %lld elements, its gradient accumulator is %s [%lld %lld]; f32 of as "
            "many elements is expected",
            name, (long long)count, bs_dtype_name(g->dtype), (long long)g->rows,
            (long long)g->channels);
    return BS_OK;
}

static bs_status wref_init(bs_engine *e, int block, const bs_tensor_info *info,
                           const bs_param_ref *param, bsi_wref *out)
{
    if (block < 0 || block >= e->binding.n_blocks)
        return bsi_fail(BS_ARG, "weight '%s': block %d; the engine was opened for blocks 0..%d",
                        info->name, block, e->binding.n_blocks - 1);
    if (!info->packing && info->dtype != BS_DTYPE_F32 && info->dtype != BS_DTYPE_BF16 &&
        info->dtype != BS_DTYPE_F16)
        return bsi_fail(BS_DTYPE, "weight '%s' is stored as %s; ops take f32, bf16 and f16", info->name,
                        bs_dtype_name(info->dtype));
    if (info->dtype != e->dtype && info->compute != e->dtype)
        return bsi_fail(
            BS_DTYPE,
            "weight '%s' is stored as %s, the manifest lays expansions out for %s and the engine "
            "computes in %s; tell the manifest (bs_manifest_compute)",
            info->name, bs_dtype_name(info->dtype), bs_dtype_name(info->compute),
            bs_dtype_name(e->dtype));
    int64_t count = 1;
    for (int i = 0; i < info->ndim; i++)
        if (info->dim[i] < 1 || __builtin_mul_overflow(count, info->dim[i], &count))
            return bsi_fail(BS_SHAPE, "weight '%s': dim %d is %lld", info->name, i,
                            (long long)info->dim[i]);
    if (!info->packing && info->bytes != (uint64_t)count * bs_dtype_size(info->dtype))
        return bsi_fail(BS_SHAPE, "weight '%s': %lld elements of %s in %llu bytes", info->name,
                        (long long)count, bs_dtype_name(info->dtype), (unsigned long long)info->bytes);
    if (param && param->grad.mem)
        BSI_TRY(check_grad(info->name, &param->grad, count));
    char *name = bsi_strdup(BS_TAG_HEADER, info->name);
    if (!name)
        return BS_NOMEM;
    *out = (bsi_wref){.block = block, .info = *info, .count = count};
    out->info.name = name;
    if (param)
        out->grad = bsi_place_addr(&param->grad);
    return BS_OK;
}

static void wref_free(bsi_wref *w)
{
    if (w->count)
        bsi_free((void *)(uintptr_t)w->info.name); /* our copy, const only through the info */
    w->count = 0;
}

bs_status bs_weight_new(bs_engine *e, int block, const bs_tensor_info *info, const bs_param_ref *param,
                        bs_weight **out)
{
    bs_weight *w = bsi_alloc(BS_TAG_HEADER, sizeof *w);
    if (!w)
        return BS_NOMEM;
    w->e = e;
    bs_status st = wref_init(e, block, info, param, &w->ref);
    if (st != BS_OK) {
        bs_weight_free(w);
        return st;
    }
    *out = w;
    return BS_OK;
}

void bs_weight_free(bs_weight *w)
{
    if (!w)
        return;
    wref_free(&w->ref);
    bsi_free(w);
}

static bs_status check_matrix(const bs_linear *l, const char *what, const bs_place *p, bs_dtype t,
                              int64_t rows, int64_t cols)
{
    if (p->dtype != t || p->rows != rows || p->channels != cols)
        return bsi_fail(BS_SHAPE, "linear '%s': %s is %s [%lld %lld], %s [%lld %lld] is expected",
                        l->name, what, bs_dtype_name(p->dtype), (long long)p->rows,
                        (long long)p->channels, bs_dtype_name(t), (long long)rows, (long long)cols);
    return BS_OK;
}

static bs_status init_adapter(bs_linear *l, const bs_linear_cfg *cfg)
{
    const bs_place *a = &cfg->lora_a.value, *b = &cfg->lora_b.value;
    if (!a->mem && !b->mem)
        return BS_OK;
    if (!a->mem || !b->mem)
        return bsi_fail(BS_ARG, "linear '%s': an adapter needs both A and B", l->name);
    if (a->rows < 1)
        return bsi_fail(BS_SHAPE, "linear '%s': an adapter of rank %lld", l->name, (long long)a->rows);
    l->rank = a->rows;
    BSI_TRY(check_matrix(l, "A", a, l->e->dtype, l->rank, l->in));
    BSI_TRY(check_matrix(l, "B", b, l->e->dtype, l->out, l->rank));
    if (cfg->lora_a.grad.mem)
        BSI_TRY(check_matrix(l, "the gradient of A", &cfg->lora_a.grad, BS_DTYPE_F32, l->rank, l->in));
    if (cfg->lora_b.grad.mem)
        BSI_TRY(check_matrix(l, "the gradient of B", &cfg->lora_b.grad, BS_DTYPE_F32, l->out, l->rank));
    if (!(cfg->dropout >= 0.0f && cfg->dropout < 1.0f))
        return bsi_fail(BS_ARG, "linear '%s': dropout %g; 0 <= dropout < 1 is expected", l->name,
                        (double)cfg->dropout);
    l->a = bsi_place_addr(a);
    l->b = bsi_place_addr(b);
    l->grad_a = bsi_place_addr(&cfg->lora_a.grad);
    l->grad_b = bsi_place_addr(&cfg->lora_b.grad);
    l->scale = (double)cfg->scale;
    l->dropout = (double)cfg->dropout;
    bsi_philox_key(l->e->seed, l->name, l->key);
    return BS_OK;
}

/* The layouts of slots and of expansions place tensors by their sizes alone, so two neighbours tell of all. */
static bs_status check_neighbours(const bs_linear *l, const bsi_wref *first, const bsi_wref *next)
{
    for (int i = 0; i < l->n_next; i++) {
        const bs_tensor_info *a = i ? &next[i - 1].info : &first->info, *b = &next[i].info;
        bool same =
            a->dtype == b->dtype && a->packing == b->packing && a->ndim == b->ndim &&
            !memcmp(a->dim, b->dim, sizeof a->dim) &&
            b->slot_offset - a->slot_offset == next[0].info.slot_offset - first->info.slot_offset &&
            b->expand_offset - a->expand_offset ==
                next[0].info.expand_offset - first->info.expand_offset;
        if (!same || b->slot_offset <= a->slot_offset)
            return bsi_fail(BS_SHAPE, "linear '%s': '%s' does not follow '%s' as experts of a group do",
                            l->name, b->name, a->name);
    }
    return BS_OK;
}

static bs_status init_group(bs_linear *l, const bs_linear_cfg *cfg)
{
    l->grouped = cfg->grouped;
    l->first_expert = cfg->first_expert;
    if (!cfg->grouped)
        return BS_OK;
    if (cfg->lora_a.value.mem || l->weight.grad.mem || l->bias.grad.mem)
        return bsi_fail(BS_UNSUPPORTED,
                        "linear '%s': a group of experts has no adapter and does not train", l->name);
    int kinds = cfg->bias ? 2 : 1;
    l->next = bsi_alloc(BS_TAG_HEADER, (size_t)(kinds * cfg->n_next) * sizeof *l->next);
    if (!l->next)
        return BS_NOMEM;
    l->n_next = cfg->n_next;
    for (int i = 0; i < cfg->n_next; i++) {
        BSI_TRY(wref_init(l->e, cfg->block, cfg->next[i], NULL, &l->next[i]));
        if (cfg->bias)
            BSI_TRY(wref_init(l->e, cfg->block, cfg->next_bias[i], NULL, &l->next[cfg->n_next + i]));
    }
    if (!l->n_next)
        return BS_OK;
    BSI_TRY(check_neighbours(l, &l->weight, l->next));
    return cfg->bias ? check_neighbours(l, &l->bias, l->next + cfg->n_next) : BS_OK;
}

static bs_status init_linear(bs_linear *l, const bs_linear_cfg *cfg)
{
    const bs_tensor_info *w = cfg->weight, *b = cfg->bias;
    l->name = bsi_strdup(BS_TAG_HEADER, cfg->name ? cfg->name : w->name);
    if (!l->name)
        return BS_NOMEM;
    if (w->ndim != 2)
        return bsi_fail(BS_SHAPE, "linear '%s': weight '%s' has %d dims, [out, in] is expected",
                        l->name, w->name, w->ndim);
    l->transposed = cfg->transposed;
    l->out = w->dim[l->transposed ? 1 : 0];
    l->in = w->dim[l->transposed ? 0 : 1];
    BSI_TRY(wref_init(l->e, cfg->block, w, &cfg->base_weight, &l->weight));
    if (b) {
        if (b->ndim != 1 || b->dim[0] != l->out)
            return bsi_fail(
                BS_SHAPE, "linear '%s': bias '%s' has %d dims and %lld entries, [%lld] is expected",
                l->name, b->name, b->ndim, (long long)(b->ndim ? b->dim[0] : 0), (long long)l->out);
        BSI_TRY(wref_init(l->e, cfg->block, b, &cfg->base_bias, &l->bias));
    }
    BSI_TRY(init_group(l, cfg));
    return init_adapter(l, cfg);
}

bs_status bs_linear_new(bs_engine *e, const bs_linear_cfg *cfg, bs_linear **out)
{
    if (!cfg->weight)
        return bsi_fail(BS_ARG, "linear '%s': no weight", cfg->name ? cfg->name : "unnamed");
    bs_linear *l = bsi_alloc(BS_TAG_HEADER, sizeof *l);
    if (!l)
        return BS_NOMEM;
    l->e = e;
    bs_status st = init_linear(l, cfg);
    if (st != BS_OK) {
        bs_linear_free(l);
        return st;
    }
    *out = l;
    return BS_OK;
}

void bs_linear_free(bs_linear *l)
{
    if (!l)
        return;
    for (int i = 0; l->next && i < l->n_next * (l->bias.count ? 2 : 1); i++)
        wref_free(&l->next[i]);
    wref_free(&l->weight);
    wref_free(&l->bias);
    bsi_free(l->next);
    bsi_free(l->name);
    bsi_free(l);
}

void bs_linear_dims(const bs_linear *l, int64_t *in, int64_t *out)
{
    *in = l->in;
    *out = l->out;
}
