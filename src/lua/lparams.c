/* SPDX-License-Identifier: Apache-2.0 */
/*
** lparams.c: bs.params, the trainable parameters with their gradients and AdamW. Ids are those of bs.h:
** integers from 0 in the order of add and add_base.
*/
#include "lua/bsl.h"

#include <limits.h>

static bs_params *check(lua_State *L)
{
    return bsl_check(L, 1, &bsl_params_type);
}

static int check_id(lua_State *L, const bs_params *p)
{
    return bsl_checkint(L, 2, 0, bs_params_count(p) - 1);
}

static int l_open(lua_State *L)
{
    bs_engine *e = bsl_check(L, 1, &bsl_engine_type);
    bsl_box *box = bsl_newbox(L, &bsl_params_type);
    bsl_borrow(L, box, 0, 1);
    bs_params *p = NULL;
    bs_status st = bs_params_open(e, &p);
    box->h = p;
    bsl_try(L, st, "bs.params.open");
    return 1;
}

static int l_add(lua_State *L)
{
    bs_params *p = check(L);
    const char *name = luaL_checkstring(L, 2);
    int64_t rows = bsl_checkcount(L, 3), cols = bsl_checkcount(L, 4);
    int id = -1;
    bsl_try(L, bs_params_add(p, name, rows, cols, &id), "bs.params.add");
    lua_pushinteger(L, id);
    return 1;
}

static int l_add_base(lua_State *L)
{
    bs_params *p = check(L);
    const char *name = luaL_checkstring(L, 2);
    int64_t rows = bsl_checkcount(L, 3), cols = bsl_checkcount(L, 4);
    int id = -1;
    bsl_try(L, bs_params_add_base(p, name, rows, cols, &id), "bs.params.add_base");
    lua_pushinteger(L, id);
    return 1;
}

/* p:update_base(id, rows, cols) before seal reserves moments; p:update_base(id, stream, block, tensor) after
   it names the gpu home. */
static int l_update_base(lua_State *L)
{
    bs_params *p = check(L);
    int id = check_id(L, p);
    bs_place home = {0};
    bs_status st = BS_OK;
    if (lua_isuserdata(L, 3)) {
        const bs_stream *s = bsl_check(L, 3, &bsl_stream_type);
        int block = bsl_checkint(L, 4, 0, INT_MAX), tensor = bsl_checkint(L, 5, 0, INT_MAX);
        st = bs_stream_home(s, block, tensor, &home);
    } else {
        home.rows = home.capacity = bsl_checkcount(L, 3);
        home.channels = bsl_checkcount(L, 4);
    }
    if (st == BS_OK)
        st = bs_params_update_base(p, id, &home);
    bsl_try(L, st, "bs.params.update_base");
    return 0;
}

static int l_device_bytes(lua_State *L)
{
    lua_pushinteger(L, (lua_Integer)bs_params_device_bytes(check(L)));
    return 1;
}

static int l_freeze(lua_State *L)
{
    bsl_try(L, bs_params_freeze(check(L)), "bs.params.freeze");
    return 0;
}

static int l_seal(lua_State *L)
{
    bsl_try(L, bs_params_seal(check(L)), "bs.params.seal");
    return 0;
}

static int l_count(lua_State *L)
{
    lua_pushinteger(L, bs_params_count(check(L)));
    return 1;
}

static int l_name(lua_State *L)
{
    const bs_params *p = check(L);
    lua_pushstring(L, bs_params_name(p, check_id(L, p)));
    return 1;
}

static int l_set(lua_State *L)
{
    bs_params *p = check(L);
    int id = check_id(L, p);
    const bs_array *a = bsl_check(L, 3, &bsl_array_type);
    bsl_try(L, bs_params_set(p, id, a), "bs.params.set");
    return 0;
}

static int l_get(lua_State *L)
{
    bs_params *p = check(L);
    int id = check_id(L, p);
    bsl_box *box = bsl_newarray(L);
    bs_array *a = NULL;
    bs_status st = bs_params_get(p, id, &a);
    box->h = a;
    bsl_try(L, st, "bs.params.get");
    return 1;
}

static int l_grad(lua_State *L)
{
    bs_params *p = check(L);
    int id = check_id(L, p);
    bsl_box *box = bsl_newarray(L);
    bs_array *a = NULL;
    bs_status st = bs_params_grad(p, id, &a);
    box->h = a;
    bsl_try(L, st, "bs.params.grad");
    return 1;
}

/* p:moment(id, which) and p:set_moment(id, which, array): AdamW's first (1) or second (2) moment. */
static int l_moment(lua_State *L)
{
    bs_params *p = check(L);
    int id = check_id(L, p), which = bsl_checkint(L, 3, 1, 2);
    bsl_box *box = bsl_newarray(L);
    bs_array *a = NULL;
    bs_status st = bs_params_moment(p, id, which, &a);
    box->h = a;
    bsl_try(L, st, "bs.params.moment");
    return 1;
}

static int l_set_moment(lua_State *L)
{
    bs_params *p = check(L);
    int id = check_id(L, p), which = bsl_checkint(L, 3, 1, 2);
    const bs_array *a = bsl_check(L, 4, &bsl_array_type);
    bsl_try(L, bs_params_set_moment(p, id, which, a), "bs.params.set_moment");
    return 0;
}

static int l_init_kaiming(lua_State *L)
{
    bs_params *p = check(L);
    int id = check_id(L, p);
    uint64_t seed = (uint64_t)luaL_checkinteger(L, 3);
    bsl_try(L, bs_params_init_kaiming(p, id, seed), "bs.params.init_kaiming");
    return 0;
}

static int l_zero_grad(lua_State *L)
{
    bsl_try(L, bs_params_zero_grad(check(L)), "bs.params.zero_grad");
    return 0;
}

static int l_norm(lua_State *L)
{
    double norm = 0;
    bsl_try(L, bs_params_norm(check(L), &norm), "bs.params.norm");
    lua_pushnumber(L, norm);
    return 1;
}

/* p:apply({lr =, ...}, norm) */
static int l_apply(lua_State *L)
{
    static const bsl_option spec[] = {
        {"lr", BSL_NUM, offsetof(bs_adamw, lr), true},
        {"beta1", BSL_NUM, offsetof(bs_adamw, beta1), true},
        {"beta2", BSL_NUM, offsetof(bs_adamw, beta2), true},
        {"eps", BSL_NUM, offsetof(bs_adamw, eps), true},
        {"weight_decay", BSL_NUM, offsetof(bs_adamw, weight_decay), false},
        {"clip", BSL_NUM, offsetof(bs_adamw, clip), false},
        {"step", BSL_I64, offsetof(bs_adamw, step), true},
        {NULL, BSL_ANY, 0, false}};
    bs_adamw cfg = {0};
    bs_params *p = check(L);
    bsl_options(L, 2, spec, &cfg);
    double norm = luaL_checknumber(L, 3);
    bsl_try(L, bs_params_apply(p, &cfg, norm), "bs.params.apply");
    return 0;
}

static const luaL_Reg methods[] = {{"add", l_add},
                                   {"add_base", l_add_base},
                                   {"apply", l_apply},
                                   {"count", l_count},
                                   {"device_bytes", l_device_bytes},
                                   {"freeze", l_freeze},
                                   {"get", l_get},
                                   {"grad", l_grad},
                                   {"init_kaiming", l_init_kaiming},
                                   {"moment", l_moment},
                                   {"name", l_name},
                                   {"norm", l_norm},
                                   {"seal", l_seal},
                                   {"set", l_set},
                                   {"set_moment", l_set_moment},
                                   {"update_base", l_update_base},
                                   {"zero_grad", l_zero_grad},
                                   {NULL, NULL}};
static const luaL_Reg functions[] = {{"open", l_open}, {NULL, NULL}};

void bsl_open_params(lua_State *L)
{
    bsl_newtype(L, &bsl_params_type, methods, NULL);
    luaL_newlib(L, functions);
    lua_setfield(L, -2, "params");
}
