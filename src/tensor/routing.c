/* SPDX-License-Identifier: Apache-2.0 */
/*
** routing.c: which experts the tokens of a step go to, and their rows in the order of experts. A token is known by
** its place among those of all micro-batches, micro * capacity + token, and its i-th choice by that times chosen,
** plus i; places of tokens that a micro-batch does not have hold no choice. Regions hold one layer's routing, that
** of the layer at hand; each is written and read on the compute queue. Owner thread only.
**
** Sums are made expert by expert in f32, whatever pieces the rows come in, so that no cut into groups or pieces
** changes a bit.
*/
#include "tensor/routing.h"
#include "tensor/op.h"

struct bs_routing {
    bs_engine *e;
    const bs_batch *batch;
    int64_t experts, chosen, piece;
    int64_t routed;            /* experts of the layer at hand */
    bsi_addr id, order, place; /* i32 [micros * tokens * chosen] */
    bsi_addr offset;           /* i32 [experts + 1] */
    bsi_addr pos, row_id;      /* i32, of the rows in the order of experts */
    bsi_addr scratch;
    size_t scratch_bytes;
};

static int64_t capacity(const bs_routing *r) /* choices of one micro-batch */
{
    return r->batch->cfg.tokens * r->chosen;
}

static bsi_arg ints(bsi_addr at, int64_t n, uint8_t mode)
{
    return (bsi_arg){at, (size_t)n * sizeof(int32_t), mode};
}

/* ---- open and close -------------------------------------------------------------------------- */

static bs_status open_regions(bs_routing *r, int64_t n)
{
    bsi_addr *const at[] = {&r->id, &r->order, &r->place, &r->pos, &r->row_id};
    for (size_t i = 0; i < BSI_COUNT(at); i++)
        BSI_TRY(bsi_pool_region(r->e->pool, "routing", (size_t)n * sizeof(int32_t), at[i]));
    BSI_TRY(
        bsi_pool_region(r->e->pool, "routing", (size_t)(r->experts + 1) * sizeof(int32_t), &r->offset));
    r->scratch_bytes = bsk_sort_scratch(n, r->experts);
    return bsi_pool_region(r->e->pool, "routing", r->scratch_bytes, &r->scratch);
}

bs_status bs_routing_open(bs_engine *e, const bs_batch *b, const bs_routing_cfg *cfg, bs_routing **out)
{
    int64_t n;
    if (cfg->experts < 1 || cfg->experts > BSK_ROUTE_EXPERTS || cfg->chosen < 1 ||
        cfg->chosen > cfg->experts)
        return bsi_fail(
            BS_ARG,
            "routing: %lld experts, %lld of them chosen; 1..%d, and of those 1 at least, are "
            "expected",
            (long long)cfg->experts, (long long)cfg->chosen, BSK_ROUTE_EXPERTS);
    if (__builtin_mul_overflow(b->cfg.tokens * b->cfg.micros, cfg->chosen, &n) || n > INT32_MAX)
        return bsi_fail(BS_ARG,
                        "routing: %d micro-batches of %lld tokens with %lld experts each are too many",
                        b->cfg.micros, (long long)b->cfg.tokens, (long long)cfg->chosen);
    if (cfg->piece < 0 || cfg->piece > n)
        return bsi_fail(BS_ARG, "routing: a piece of %lld rows; 1..%lld, or 0, are expected",
                        (long long)cfg->piece, (long long)n);
    bs_routing *r = bsi_alloc(BS_TAG_MISC, sizeof *r);
    if (!r)
        return BS_NOMEM;
    *r = (bs_routing){.e = e,
                      .batch = b,
                      .experts = cfg->experts,
                      .chosen = cfg->chosen,
                      .piece = cfg->piece ? cfg->piece : b->cfg.tokens};
    bs_status st = open_regions(r, n);
    if (st != BS_OK) {
        bs_routing_close(r);
        return st;
    }
    *out = r;
    return BS_OK;
}

void bs_routing_close(bs_routing *r)
{
    bsi_free(r);
}

/* ---- the choice ------------------------------------------------------------------------------ */

/* node->n of a route */
enum { N_ROWS, N_EXPERTS, N_CHOSEN, N_KIND, N_GROUPS, N_KEPT, N_RENORM, N_COUNT };

static bs_status route_backward(bsi_space *s, const bsi_node *node, bsi_value *dy)
{
    const int64_t *n = node->n;
    bsi_value *dz;
    BSI_TRY(bsi_grad_open(s, node->in[0], &dz));
    bsi_kcall c = {.op = BSK_ROUTE_BWD, .n_args = 4, .f = {node->f[0]}, .label = "route backward"};
    for (int i = 0; i < N_COUNT; i++)
        c.n[i] = n[i];
    c.arg[0] = bsi_act_read(s->e, node->saved[0]->at, n[N_ROWS] * n[N_EXPERTS]);
    c.arg[1] =
        (bsi_arg){node->saved[1]->at, (size_t)(n[N_ROWS] * n[N_CHOSEN]) * sizeof(int32_t), BSI_READ};
    c.arg[2] = bsi_act_read(s->e, dy->at, n[N_ROWS] * n[N_CHOSEN]);
    c.arg[3] = bsi_act_write(s->e, dz->at, n[N_ROWS] * n[N_EXPERTS]);
    BSI_TRY(bsi_op_launch(s->e, &c));
    return bsi_grad_close(s, node->in[0], dz);
}

static const bsi_op route_op = {.name = "route", .id = 18, .backward = route_backward};

static bs_status check_route(const bs_tensor *z, const bs_route_cfg *cfg, const bs_routing *r)
{
    char text[BSI_SHAPE_TEXT];
    int64_t E = z->ndim == 2 ? z->dim[1] : 0;
    if (E < 1 || E > r->experts)
        return bsi_fail(BS_SHAPE,
                        "route: logits %s; [tokens, experts] of up to %lld experts are expected",
                        bsi_shape_text(z, text), (long long)r->experts);
    if (cfg->chosen != r->chosen || cfg->chosen > E)
        return bsi_fail(BS_ARG,
                        "route: %lld of %lld experts; the routing was opened for %lld of each token",
                        (long long)cfg->chosen, (long long)E, (long long)r->chosen);
    if (cfg->groups > 1 && (E % cfg->groups || cfg->kept < 1 || cfg->kept > cfg->groups ||
                            cfg->chosen > E / cfg->groups * cfg->kept))
        return bsi_fail(
            BS_ARG,
            "route: %lld of %lld experts from %lld of %lld groups; groups of equal size that hold as "
            "many are expected",
            (long long)cfg->chosen, (long long)E, (long long)cfg->kept, (long long)cfg->groups);
    if (cfg->bias && (cfg->bias->ref.info.ndim != 1 || cfg->bias->ref.count != E))
        return bsi_fail(BS_SHAPE, "route: bias '%s' has %lld entries, %lld are expected",
                        cfg->bias->ref.info.name, (long long)cfg->bias->ref.count, (long long)E);
    return BS_OK;
}

/* The bias as f32, whatever is computed in: as it lies, or in a value that is the caller's to free. */
static bs_status f32_bias(bsi_space *s, const bsi_wref *w, bsi_value **copy, bsi_addr *out)
{
    bsi_expand x = {.stored = w->info.dtype, .out = BS_DTYPE_F32, .n = w->count, .scale = 1.0};
    BSI_TRY(bsi_wref_stored(s->e, w, &x.from));
    *out = x.from;
    if (x.stored == BS_DTYPE_F32)
        return BS_OK;
    BSI_TRY(bsi_value_new(s, BS_DTYPE_F32, 1, 1, w->count, copy));
    *out = x.to = (*copy)->at;
    return bsi_expand_launch(s->e, &x, "expand");
}

/* z: logits [T,E]; w: weights [T,chosen]; id: where the choice goes. */
static bs_status launch_route(bsi_space *s, const bs_route_cfg *cfg, const int64_t *n, bsi_addr z,
                              bsi_addr w, bsi_addr id)
{
    bsi_kcall c = {.op = BSK_ROUTE, .n_args = 4, .f = {cfg->scale}, .label = "route"};
    bsi_value *copy = NULL;
    bs_status st = BS_OK;
    for (int i = 0; i < N_COUNT; i++)
        c.n[i] = n[i];
    c.arg[0] = bsi_act_read(s->e, z, n[N_ROWS] * n[N_EXPERTS]);
    if (cfg->bias) {
        st = f32_bias(s, &cfg->bias->ref, &copy, &c.arg[1].at);
        c.arg[1] = bsi_read_f32(c.arg[1].at, n[N_EXPERTS]);
    }
    c.arg[2] = bsi_act_write(s->e, w, n[N_ROWS] * n[N_CHOSEN]);
    c.arg[3] = (bsi_arg){id, (size_t)(n[N_ROWS] * n[N_CHOSEN]) * sizeof(int32_t), BSI_WRITE};
    if (st == BS_OK)
        st = bsi_op_launch(s->e, &c);
    if (copy)
        bsi_value_free(s, copy);
    return st;
}

/* The choice of the scope's micro-batch into its place; what a micro-batch has no token for is no expert. */
static bs_status put_choice(bsi_space *s, const bs_routing *r, bsi_addr from, int64_t n)
{
    bsi_addr to = bsi_addr_add(r->id, (size_t)(s->scope.micro * capacity(r)) * sizeof(int32_t));
    BSI_TRY(bsi_fill(s->e->compute, to, 0xFF, (size_t)capacity(r) * sizeof(int32_t)));
    return n ? bsi_copy(s->e->compute, to, from, (size_t)n * sizeof(int32_t)) : BS_OK;
}

bs_status bs_op_route(bs_tensor *z, const bs_route_cfg *cfg, bs_routing *r, bs_tensor **out)
{
    bsi_space *s;
    bs_tensor *w;
    bsi_value *id;
    bsi_node *node;
    const bsi_micro *m;
    BSI_TRY(bsi_op_begin(&route_op, 1, &z, &s));
    if (r->e != s->e || s->scope.routing || s->scope.batch != r->batch)
        return bsi_fail(BS_ARG, "route: scope '%s' is of no micro-batch of the routing's batch",
                        s->scope.label->text);
    BSI_TRY(bsi_scope_micro(s, "route", z, &m));
    BSI_TRY(check_route(z, cfg, r));
    const int64_t n[N_COUNT] = {z->dim[0],   z->dim[1], cfg->chosen, (int64_t)cfg->kind,
                                cfg->groups, cfg->kept, cfg->renorm};
    bsi_hash_ints(s, N_COUNT - 1, n + 1);
    bsi_hash_number(s, cfg->scale);
    BSI_TRY(bsi_tensor_new(s, 2, (int64_t[]){n[N_ROWS], cfg->chosen}, z->capacity, &w));
    bs_status st = bsi_value_new(s, BS_DTYPE_I32, n[N_ROWS], z->capacity, cfg->chosen, &id);
    if (st == BS_OK)
        st = launch_route(s, cfg, n, z->value->at, w->value->at, id->at);
    if (st == BS_OK)
        st = put_choice(s, r, id->at, n[N_ROWS] * cfg->chosen);
    r->routed = n[N_EXPERTS];
    if (st == BS_OK && bsi_tape_wants(s, 1, &z, false) &&
        (st = bsi_node_new(s, &route_op, 1, &z, w->value, &node)) == BS_OK) {
        for (int i = 0; i < N_COUNT; i++)
            node->n[i] = n[i];
        node->f[0] = cfg->scale;
        bsi_node_save(node, z->value);
        bsi_node_save(node, id);
    }
    return bsi_op_finish(st, &route_op, w, out);
}

/* ---- the order ------------------------------------------------------------------------------- */

/* to[i] = row order[i] / k of `from`. */
static bs_status take(const bs_routing *r, bsi_addr order, int64_t n, const bs_place *from,
                      int64_t stride, int64_t C, int64_t k, bsi_addr to, const char *label)
{
    bs_dtype t = from->dtype;
    int64_t rows = r->batch->cfg.tokens * (r->chosen / k);
    bsi_kcall c = {
        .op = BSK_TAKE_ROWS, .n_args = 3, .n = {n, C, k, rows, stride}, .dtype = t, .label = label};
    c.arg[0] =
        bsi_operand(bsi_place_addr(from), t, (r->batch->micros - 1) * stride + rows * C, BSI_READ);
    c.arg[1] = ints(order, n, BSI_READ);
    c.arg[2] = bsi_operand(to, t, n * C, BSI_WRITE);
    return bsi_engine_launch(r->e, &c);
}

bs_status bs_routing_sort(bs_routing *r)
{
    int64_t n = capacity(r) * r->batch->micros, tokens = r->batch->cfg.tokens;
    if (!r->routed)
        return bsi_fail(BS_STATE, "routing: nothing has been routed");
    bsi_kcall c = {.op = BSK_SORT_ROWS, .n_args = 5, .n = {n, r->routed}, .label = "sort rows"};
    c.arg[0] = ints(r->id, n, BSI_READ);
    c.arg[1] = ints(r->order, n, BSI_WRITE);
    c.arg[2] = ints(r->place, n, BSI_WRITE);
    c.arg[3] = ints(r->offset, r->routed + 1, BSI_WRITE);
    c.arg[4] = (bsi_arg){r->scratch, r->scratch_bytes, BSI_WRITE};
    BSI_TRY(bsi_engine_launch(r->e, &c));
    /* i32 and f32 are moved alike. */
    const bs_place pos = bsi_place(r->batch->micro[0].pos, BS_DTYPE_F32, tokens, tokens, 1),
                   id = bsi_place(r->batch->micro[0].row_id, BS_DTYPE_F32, tokens, tokens, 1);
    BSI_TRY(take(r, r->order, n, &pos, tokens, 1, r->chosen, r->pos, "take positions"));
    return take(r, r->order, n, &id, tokens, 1, r->chosen, r->row_id, "take positions");
}

bs_status bs_routing_offsets(bs_routing *r, int64_t *offset)
{
    int32_t at[BSK_ROUTE_EXPERTS + 1];
    if (!r->routed)
        return bsi_fail(BS_STATE, "routing: nothing has been routed");
    BSI_TRY(bsi_engine_read(r->e, r->offset, (size_t)(r->routed + 1) * sizeof *at, at));
    for (int64_t i = 0; i <= r->routed; i++)
        offset[i] = at[i];
    return BS_OK;
}

int64_t bs_routing_experts(const bs_routing *r)
{
    return r->routed;
}

/* ---- pieces of it ---------------------------------------------------------------------------- */

bs_status bsi_routing_check(const bs_routing *r, const bs_engine *e, int64_t begin, int64_t rows)
{
    if (r->e != e)
        return bsi_fail(BS_ARG, "scope: the routing was made on another engine");
    if (begin < 0 || rows < 1 || rows > r->piece || begin > capacity(r) * r->batch->micros - rows)
        return bsi_fail(BS_ARG, "scope: %lld routed rows from %lld on; 1..%lld of %lld are expected",
                        (long long)rows, (long long)begin, (long long)r->piece,
                        (long long)(capacity(r) * r->batch->micros));
    return BS_OK;
}

const bs_batch *bsi_routing_batch(const bs_routing *r)
{
    return r->batch;
}

void bsi_routing_piece(const bs_routing *r, int64_t begin, int64_t rows, bsi_micro *out)
{
    size_t at = (size_t)begin * sizeof(int32_t);
    *out = (bsi_micro){.tokens = rows,
                       .rows = rows,
                       .pos = bsi_addr_add(r->pos, at),
                       .row_id = bsi_addr_add(r->row_id, at)};
}

static bs_status open_piece(bs_engine *e, const char *op, bsi_space **s)
{
    BSI_TRY(bsi_scope_get(e, op, s));
    if (!(*s)->scope.routing)
        return bsi_fail(BS_STATE, "%s: scope '%s' is not of routed rows", op, (*s)->scope.label->text);
    return BS_OK;
}

bsi_arg bsi_routing_starts(const bsi_space *s, int64_t first, int64_t n)
{
    bsi_addr at = bsi_addr_add(s->scope.routing->offset, (size_t)first * sizeof(int32_t));
    return (bsi_arg){at, (size_t)(n + 1) * sizeof(int32_t), BSI_READ};
}

int64_t bsi_routing_begin(const bsi_space *s)
{
    const bs_routing *r = s->scope.routing;
    return (int64_t)(s->scope.piece.pos.off - r->pos.off) / (int64_t)sizeof(int32_t);
}

/* y [n, C]; k: rows of `all` are tokens (chosen), or choices (1). */
static bs_status take_piece(bs_engine *e, const char *op, const bs_place *all, int64_t stride,
                            int64_t C, int64_t k, bs_tensor **out)
{
    bsi_space *s;
    BSI_TRY(open_piece(e, op, &s));
    const bs_routing *r = s->scope.routing;
    if (all->dtype != e->dtype)
        return bsi_fail(BS_DTYPE, "%s: rows are %s, activations are %s", op, bs_dtype_name(all->dtype),
                        bs_dtype_name(e->dtype));
    int64_t n = s->scope.piece.tokens;
    BSI_TRY(bsi_tensor_new(s, 2, (int64_t[]){n, C}, r->piece, out));
    bsi_addr order = bsi_addr_add(r->order, (size_t)bsi_routing_begin(s) * sizeof(int32_t));
    bs_status st = take(r, order, n, all, stride, C, k, (*out)->value->at, "take rows");
    if (st != BS_OK)
        bs_tensor_release(*out);
    return bsi_wrap(st, "%s", op);
}

bs_status bs_op_take_rows(bs_engine *e, const bs_place *all, int64_t stride, bs_tensor **out)
{
    bsi_space *s;
    BSI_TRY(open_piece(e, "take_rows", &s));
    return take_piece(e, "take_rows", all, stride, all->channels, s->scope.routing->chosen, out);
}

bs_status bs_op_take_weights(bs_engine *e, const bs_place *all, int64_t stride, bs_tensor **out)
{
    return take_piece(e, "take_weights", all, stride, 1, 1, out);
}

/* k as above. Rows of no token have no place, so that all of a micro-batch's capacity may be looked at. */
static bs_status add_piece(bs_tensor *y, const char *op, const bs_place *all, int64_t stride, int64_t k)
{
    char text[BSI_SHAPE_TEXT];
    bsi_space *s;
    BSI_TRY(bsi_tensor_check(y, op));
    BSI_TRY(open_piece(y->space->e, op, &s));
    BSI_TRY(bsi_value_ready(s, y->value));
    const bs_routing *r = s->scope.routing;
    int64_t n = s->scope.piece.tokens, C = bsi_tensor_row(y),
            rows = r->batch->cfg.tokens * (r->chosen / k);
    int64_t R = rows * r->batch->micros;
    if (y->dim[0] != n || (k == 1 ? C != 1 : C != all->channels) || all->dtype != BS_DTYPE_F32)
        return bsi_fail(BS_SHAPE, "%s: %s of %lld routed rows to %s rows of %lld", op,
                        bsi_shape_text(y, text), (long long)n, bs_dtype_name(all->dtype),
                        (long long)all->channels);
    bsi_kcall c = {.op = BSK_SUM_ROWS,
                   .n_args = 3,
                   .n = {R, C, k, bsi_routing_begin(s), n, rows, stride},
                   .dtype = y->dtype,
                   .label = "add rows"};
    c.arg[0] = bsi_operand(y->value->at, y->dtype, n * C, BSI_READ);
    c.arg[1] = ints(r->place, R * k, BSI_READ);
    c.arg[2] = bsi_operand(bsi_place_addr(all), BS_DTYPE_F32,
                           (r->batch->micros - 1) * stride + rows * C, BSI_READWRITE);
    return bsi_wrap(bsi_engine_launch(r->e, &c), "%s", op);
}

bs_status bs_op_add_rows(bs_tensor *y, const bs_place *all, int64_t stride)
{
    bsi_space *s;
    BSI_TRY(bsi_tensor_check(y, "add_rows"));
    BSI_TRY(open_piece(y->space->e, "add_rows", &s));
    return add_piece(y, "add_rows", all, stride, s->scope.routing->chosen);
}

bs_status bs_op_add_weights(bs_tensor *y, const bs_place *all, int64_t stride)
{
    return add_piece(y, "add_weights", all, stride, 1);
}
