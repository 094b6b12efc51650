/* SPDX-License-Identifier: Apache-2.0 */
/*
** lrouting.c: bs.routing and bs.op.route: which experts tokens go to, and their rows in the order of experts. Keys of a
** store are counted from 0.
*/
#include "lua/bsl.h"

#include <limits.h>

static bs_routing *check(lua_State *L)
{
    return bsl_check(L, 1, &bsl_routing_type);
}

/* bs.routing.open(engine, batch, {experts =, chosen =, piece = rows of a scope, at most}) */
static int l_open(lua_State *L)
{
    static const bsl_option spec[] = {{"experts", BSL_I64, offsetof(bs_routing_cfg, experts), true},
                                      {"chosen", BSL_I64, offsetof(bs_routing_cfg, chosen), true},
                                      {"piece", BSL_I64, offsetof(bs_routing_cfg, piece), false},
                                      {NULL, BSL_ANY, 0, false}};
    bs_routing_cfg cfg = {0};
    bs_engine *e = bsl_check(L, 1, &bsl_engine_type);
    const bs_batch *b = bsl_check(L, 2, &bsl_batch_type);
    bsl_options(L, 3, spec, &cfg);
    bsl_box *box = bsl_newbox(L, &bsl_routing_type);
    bsl_borrow(L, box, 0, 1);
    bsl_borrow(L, box, 1, 2);
    bs_routing *r = NULL;
    bs_status st = bs_routing_open(e, b, &cfg, &r);
    box->h = r;
    bsl_try(L, st, "bs.routing.open");
    return 1;
}

typedef struct route_args {
    bs_route_cfg cfg;
    const char *kind;
} route_args;

/* bs.op.route(logits, routing, {chosen =, kind =, ...}) -> weights */
static int l_route(lua_State *L)
{
    static const bsl_option spec[] = {{"chosen", BSL_I64, offsetof(route_args, cfg.chosen), true},
                                      {"kind", BSL_STR, offsetof(route_args, kind), false},
                                      {"groups", BSL_I64, offsetof(route_args, cfg.groups), false},
                                      {"kept", BSL_I64, offsetof(route_args, cfg.kept), false},
                                      {"renorm", BSL_BOOL, offsetof(route_args, cfg.renorm), false},
                                      {"scale", BSL_NUM, offsetof(route_args, cfg.scale), false},
                                      {"bias", BSL_ANY, 0, false},
                                      {NULL, BSL_ANY, 0, false}};
    static const char *const kinds[] = {"softmax", "sigmoid", "chosen", NULL};
    route_args a = {.cfg = {.groups = 1, .kept = 1, .scale = 1.0}, .kind = "softmax"};
    bs_tensor *z = bsl_checktensor(L, 1), *w = NULL;
    bs_routing *r = bsl_check(L, 2, &bsl_routing_type);
    bsl_options(L, 3, spec, &a);
    a.cfg.kind = (bs_route_kind)bsl_word(L, 3, "kind", a.kind, kinds);
    a.cfg.bias = bsl_optionbox(L, 3, "bias", &bsl_weight_type, false);
    if (a.cfg.bias)
        bsl_use(L, lua_gettop(L));
    bsl_box *box = bsl_newtensor(L, 1);
    bs_status st = bs_op_route(z, &a.cfg, r, &w);
    box->h = w;
    bsl_try(L, st, "bs.op.route");
    return 1;
}

static int l_sort(lua_State *L)
{
    bsl_try(L, bs_routing_sort(check(L)), "bs.routing.sort");
    return 0;
}

/* r:offsets() -> list: entry e + 1 is where the rows of expert e begin; the last one is their number */
static int l_offsets(lua_State *L)
{
    bs_routing *r = check(L);
    int n = (int)bs_routing_experts(r) + 1;
    int64_t *at = lua_newuserdatauv(L, (size_t)n * sizeof *at, 0);
    bsl_try(L, bs_routing_offsets(r, at), "bs.routing.offsets");
    lua_createtable(L, n, 0);
    for (int i = 0; i < n; i++) {
        lua_pushinteger(L, at[i]);
        lua_rawseti(L, -2, i + 1);
    }
    return 1;
}

/* The places of all micro-batches of the key at arg + 1 of the store at arg. */
static bs_status places(lua_State *L, int arg, bs_place *out, int64_t *stride)
{
    bs_store *s = bsl_check(L, arg, &bsl_store_type);
    return bs_store_get_all(s, bsl_checkint(L, arg + 1, 0, INT_MAX), out, stride);
}

typedef bs_status take_fn(bs_engine *e, const bs_place *all, int64_t stride, bs_tensor **out);

static int take(lua_State *L, take_fn *fn, const char *what)
{
    check(L);
    bs_place all;
    int64_t stride = 0;
    bs_tensor *y = NULL;
    bs_status st = places(L, 2, &all, &stride);
    bsl_box *box = bsl_newtensor(L, 1);
    if (st == BS_OK)
        st = fn(bsl_owner(L, 1, 0), &all, stride, &y);
    box->h = y;
    bsl_try(L, st, what);
    return 1;
}

/* r:take_rows(store, key) -> [rows, channels]; r:take_weights(store, key) -> [rows, 1] */
static int l_take_rows(lua_State *L)
{
    return take(L, bs_op_take_rows, "bs.routing.take_rows");
}

static int l_take_weights(lua_State *L)
{
    return take(L, bs_op_take_weights, "bs.routing.take_weights");
}

typedef bs_status add_fn(bs_tensor *y, const bs_place *all, int64_t stride);

static int add(lua_State *L, add_fn *fn, const char *what)
{
    check(L);
    bs_place all;
    int64_t stride = 0;
    bs_tensor *y = bsl_checktensor(L, 4);
    bs_status st = places(L, 2, &all, &stride);
    bsl_try(L, st == BS_OK ? fn(y, &all, stride) : st, what);
    return 0;
}

/* r:add_rows(store, key, y), r:add_weights(store, key, y): into sums of the key */
static int l_add_rows(lua_State *L)
{
    return add(L, bs_op_add_rows, "bs.routing.add_rows");
}

static int l_add_weights(lua_State *L)
{
    return add(L, bs_op_add_weights, "bs.routing.add_weights");
}

static const luaL_Reg methods[] = {{"add_rows", l_add_rows},
                                   {"add_weights", l_add_weights},
                                   {"offsets", l_offsets},
                                   {"sort", l_sort},
                                   {"take_rows", l_take_rows},
                                   {"take_weights", l_take_weights},
                                   {NULL, NULL}};
static const luaL_Reg functions[] = {{"open", l_open}, {NULL, NULL}};

/* After bs.op is there. */
void bsl_open_routing(lua_State *L)
{
    bsl_newtype(L, &bsl_routing_type, methods, NULL);
    luaL_newlib(L, functions);
    lua_setfield(L, -2, "routing");
    lua_getfield(L, -1, "op");
    lua_pushcfunction(L, l_route);
    lua_setfield(L, -2, "route");
    lua_pop(L, 1);
}
