/* SPDX-License-Identifier: Apache-2.0 */
/*
** cache.c: keys and values of earlier tokens, and the attention that reads them. A layer's keys and values
** are two regions of the pool, [rows, capacity, channels] each; the micro-batch says which row and position a
** token has (row_id, start). Content is defined for positions that were put: the owner hands in
** the tokens of a row in order. Owner thread only; all in order on the compute queue.
*/
#include "tensor/op.h"

#include <math.h>

typedef struct layer {
    int64_t channels;
    bsi_addr k, v;
} layer;

struct bs_cache {
    bs_engine *e;
    int layers;
    int64_t rows, capacity;
    layer *layer;
};

static bs_status open_layer(bs_cache *c, int i, int64_t channels)
{
    size_t n;
    layer *l = &c->layer[i];
    if (channels < 0 || !bsi_mul_size((size_t)c->rows, (size_t)c->capacity, &n) ||
        !bsi_mul_size(n, (size_t)channels, &n) || !bsi_mul_size(n, bs_dtype_size(c->e->dtype), &n) ||
        n > INT64_MAX)
        return bsi_fail(BS_SHAPE, "cache: layer %d has %lld rows of %lld positions of %lld channels", i,
                        (long long)c->rows, (long long)c->capacity, (long long)channels);
    l->channels = channels;
    if (!n)
        return BS_OK;
    BSI_TRY(bsi_pool_region(c->e->pool, "cached keys", n, &l->k));
    return bsi_pool_region(c->e->pool, "cached values", n, &l->v);
}

bs_status bs_cache_open(bs_engine *e, const bs_cache_cfg *cfg, bs_cache **out)
{
    if (cfg->layers < 1 || cfg->rows < 1 || cfg->rows > INT32_MAX || cfg->capacity < 1 ||
        cfg->capacity > INT32_MAX)
        return bsi_fail(BS_ARG, "cache: layers %d, rows %lld, capacity %lld; each must be at least 1",
                        cfg->layers, (long long)cfg->rows, (long long)cfg->capacity);
    bs_cache *c = bsi_alloc(BS_TAG_MISC, sizeof *c);
    if (!c)
        return BS_NOMEM;
    *c = (bs_cache){.e = e, .layers = cfg->layers, .rows = cfg->rows, .capacity = cfg->capacity};
    c->layer = bsi_alloc(BS_TAG_MISC, (size_t)cfg->layers * sizeof *c->layer);
    bs_status st = c->layer ? BS_OK : BS_NOMEM;
    for (int i = 0; st == BS_OK && i < cfg->layers; i++)
        st = open_layer(c, i, cfg->channels[i]);
    if (st != BS_OK) {
        bs_cache_close(c);
        return st;
    }
    *out = c;
    return BS_OK;
}

void bs_cache_close(bs_cache *c)
{
    if (!c)
        return;
    bsi_free(c->layer);
    bsi_free(c);
}

static const bsi_op cached_op = {.name = "attention_cached", .id = 16};

static bs_status check(const bs_cache *c, int i, const bs_attention_cfg *a, const bsi_space *s,
                       const bsi_micro *m)
{
    if (c->e != s->e)
        return bsi_fail(BS_ARG, "attention_cached: the cache was made on another engine");
    if (i < 0 || i >= c->layers || c->layer[i].channels != (int64_t)a->kv_heads * a->head_dim)
        return bsi_fail(BS_SHAPE, "attention_cached: layer %d of a cache of %d, with %d kv_heads of %d",
                        i, c->layers, a->kv_heads, a->head_dim);
    if (m->least_id < 0 || m->most_id >= c->rows)
        return bsi_fail(BS_ARG, "attention_cached: rows %lld..%lld; the cache has rows 0..%lld",
                        (long long)m->least_id, (long long)m->most_id, (long long)c->rows - 1);
    if (m->longest > c->capacity)
        return bsi_fail(BS_ARG, "attention_cached: position %lld; the cache has room for %lld",
                        (long long)m->longest - 1, (long long)c->capacity);
    return BS_OK;
}

/* x's rows go to (row_id, pos) of each token. The whole region is declared as updated: which rows a launch touches is
   on the device, so a later launch is ordered behind all of it. */
static bs_status put(bsi_space *s, const bs_cache *c, const bsi_micro *m, int64_t C, bs_tensor *x,
                     bsi_addr to)
{
    size_t tokens = (size_t)m->tokens * sizeof(int32_t);
    bsi_kcall k = {.op = BSK_CACHE_PUT,
                   .n_args = 4,
                   .arg = {bsi_act_read(s->e, x->value->at, m->tokens * C),
                           {m->row_id, tokens, BSI_READ},
                           {m->pos, tokens, BSI_READ},
                           bsi_act_update(s->e, to, c->rows * c->capacity * C)},
                   .n = {m->tokens, C, c->rows, c->capacity},
                   .label = "cache put"};
    return bsi_op_launch(s->e, &k);
}

/* The scratch is sized by the cache's capacity, not by what is in use: one size for every step of a walk. It is given
   back when the launch is issued: whoever takes those bytes next writes them behind it on the same queue. */
static bs_status attend(bsi_space *s, const bs_cache *c, const layer *l, const bsi_micro *m,
                        const bs_attention_cfg *a, bs_tensor *q, bsi_addr o)
{
    int64_t n = m->tokens * a->heads * a->head_dim, cached = c->rows * c->capacity * l->channels;
    size_t tokens = (size_t)m->tokens * sizeof(int32_t);
    size_t bytes = bsk_attention_scratch(c->capacity, a->heads, a->kv_heads, a->head_dim);
    bsi_addr scratch;
    BSI_TRY(bsi_arena_take(s->e->pool, bytes, &scratch));
    bsi_kcall k = {
        .op = BSK_ATTENTION_CACHE,
        .n_args = 8,
        .arg = {bsi_act_read(s->e, q->value->at, n),
                bsi_act_read(s->e, l->k, cached),
                bsi_act_read(s->e, l->v, cached),
                {m->row_id, tokens, BSI_READ},
                {m->pos, tokens, BSI_READ},
                bsi_act_write(s->e, o, n),
                {scratch, bytes, BSI_WRITE}},
        .n = {m->tokens, a->heads, a->kv_heads, a->head_dim, c->rows, a->window, c->capacity},
        .f = {a->scale != 0.0 ? a->scale : 1.0 / sqrt(a->head_dim), a->softcap},
        .label = "cached attention"};
    bs_status st = bsi_attention_sinks(s, a->sinks, &k.arg[7]);
    if (st == BS_OK)
        st = bsi_op_launch(s->e, &k);
    bsi_arena_give(s->e->pool, scratch, bytes);
    return st;
}

bs_status bs_op_attention_cached(bs_tensor *q, bs_tensor *k, bs_tensor *v, const bs_attention_cfg *a,
                                 bs_cache *cache, int layer_index, bs_tensor **out)
{
    bsi_space *s;
    bs_tensor *y, *in[] = {q, k, v};
    const bsi_micro *m;
    BSI_TRY(bsi_op_begin(&cached_op, 3, in, &s));
    BSI_TRY(bsi_attention_check(a, in));
    if (bsi_tape_wants(s, 3, in, false))
        return bsi_fail(BS_UNSUPPORTED,
                        "attention_cached: it has no gradient; it is for walks without a tape");
    BSI_TRY(bsi_scope_whole(s, "attention_cached"));
    BSI_TRY(bsi_scope_micro(s, "attention_cached", q, &m));
    BSI_TRY(check(cache, layer_index, a, s, m));
    const layer *l = &cache->layer[layer_index];
    BSI_TRY(
        bsi_tensor_new(s, 2, (int64_t[]){m->tokens, (int64_t)a->heads * a->head_dim}, q->capacity, &y));
    /* Keys and values first: a token attends to itself. */
    bs_status st = put(s, cache, m, l->channels, k, l->k);
    if (st == BS_OK)
        st = put(s, cache, m, l->channels, v, l->v);
    if (st == BS_OK)
        st = attend(s, cache, l, m, a, q, y->value->at);
    return bsi_op_finish(st, &cached_op, y, out);
}
