/* SPDX-License-Identifier: Apache-2.0 */
/*
** lstore.c: bs.store. Keys are positions from 0 in the list that open was given; micro-batches are
** counted from 0.
*/
#include "lua/bsl.h"

#include <limits.h>

static bs_store *check(lua_State *L)
{
    return bsl_check(L, 1, &bsl_store_type);
}

static int check_id(lua_State *L, int arg)
{
    return bsl_checkint(L, arg, 0, INT_MAX);
}

/* The key list at arg as scratch that stays on the stack; the names belong to the list. */
static bs_store_key *read_keys(lua_State *L, int arg, int *n)
{
    struct item {
        bs_store_key key;
        const char *dtype, *stay;
    };
    static const bsl_option spec[] = {{"name", BSL_STR, offsetof(struct item, key.name), true},
                                      {"channels", BSL_I64, offsetof(struct item, key.channels), true},
                                      {"dtype", BSL_STR, offsetof(struct item, dtype), false},
                                      {"stay", BSL_STR, offsetof(struct item, stay), true},
                                      {NULL, BSL_ANY, 0, false}};
    static const char *const stays[] = {"pass", "device", "host", NULL};
    luaL_checktype(L, arg, LUA_TTABLE);
    size_t count = lua_rawlen(L, arg);
    luaL_argcheck(L, count < INT_MAX, arg, "too many keys");
    bs_store_key *list = lua_newuserdatauv(L, (count + 1) * sizeof *list, 0);
    for (int i = 0; i < (int)count; i++) {
        struct item k = {.dtype = "f32"};
        const char *prefix = lua_pushfstring(L, "key %d: ", i);
        if (lua_rawgeti(L, arg, i + 1) != LUA_TTABLE)
            luaL_argerror(L, arg, lua_pushfstring(L, "%stable expected", prefix));
        bsl_nestedoptions(L, arg, lua_gettop(L), prefix, spec, &k);
        if (!bs_dtype_parse(k.dtype, &k.key.dtype))
            luaL_argerror(L, arg, lua_pushfstring(L, "%sunknown dtype '%s'", prefix, k.dtype));
        k.key.stay = (bs_stay)bsl_word(L, arg, "stay", k.stay, stays);
        list[i] = k.key;
        lua_pop(L, 2);
    }
    *n = (int)count;
    return list;
}

/* bs.store.open(engine, batch, keys) */
static int l_open(lua_State *L)
{
    bs_engine *e = bsl_check(L, 1, &bsl_engine_type);
    const bs_batch *b = bsl_check(L, 2, &bsl_batch_type);
    int n = 0;
    const bs_store_key *keys = read_keys(L, 3, &n);
    bsl_box *box = bsl_newbox(L, &bsl_store_type);
    bsl_borrow(L, box, 0, 1);
    bsl_borrow(L, box, 1, 2);
    bs_store *s = NULL;
    bs_status st = bs_store_open(e, b, n, keys, &s);
    box->h = s;
    bsl_try(L, st, "bs.store.open");
    return 1;
}

/* bs.store.bytes({micros =, tokens =, rows =}, keys) -> device, host */
static int l_bytes(lua_State *L)
{
    bs_batch_cfg cfg;
    int n = 0;
    size_t device = 0, host = 0;
    bsl_batchcfg(L, 1, &cfg);
    const bs_store_key *keys = read_keys(L, 2, &n);
    bsl_try(L, bs_store_bytes(&cfg, n, keys, &device, &host), "bs.store.bytes");
    lua_pushinteger(L, (lua_Integer)device);
    lua_pushinteger(L, (lua_Integer)host);
    return 2;
}

static int l_put(lua_State *L)
{
    bs_store *s = check(L);
    int key = check_id(L, 2), micro = check_id(L, 3);
    bs_tensor *t = bsl_checktensor(L, 4);
    bs_place from;
    bs_status st = bs_tensor_place(t, &from);
    if (st == BS_OK)
        st = bs_store_put(s, key, micro, &from);
    bsl_try(L, st, "bs.store.put");
    return 0;
}

/* The stored rows as a tensor of the open scope. */
static int l_get(lua_State *L)
{
    bs_store *s = check(L);
    int key = check_id(L, 2), micro = check_id(L, 3);
    bs_engine *e = bsl_owner(L, 1, 0);
    bsl_box *box = bsl_newtensor(L, 1);
    bs_place at;
    bs_tensor *t = NULL;
    bs_status st = bs_store_get(s, key, micro, &at);
    if (st == BS_OK)
        st = bs_tensor_at(e, &at, &t);
    box->h = t;
    bsl_try(L, st, "bs.store.get");
    return 1;
}

static int l_zero(lua_State *L)
{
    bs_store *s = check(L);
    int key = check_id(L, 2), micro = check_id(L, 3);
    bsl_try(L, bs_store_zero(s, key, micro), "bs.store.zero");
    return 0;
}

static int l_fetch(lua_State *L)
{
    bs_store *s = check(L);
    bsl_try(L, bs_store_fetch(s, check_id(L, 2)), "bs.store.fetch");
    return 0;
}

static int l_read(lua_State *L)
{
    bs_store *s = check(L);
    int key = check_id(L, 2), micro = check_id(L, 3);
    bsl_box *box = bsl_newarray(L);
    bs_array *a = NULL;
    bs_status st = bs_store_read(s, key, micro, &a);
    box->h = a;
    bsl_try(L, st, "bs.store.read");
    return 1;
}

static int l_stats(lua_State *L)
{
    bs_store_stats s;
    bs_store_stats_get(check(L), &s);
    lua_createtable(L, 0, 4);
    bsl_setint(L, "out_bytes", (lua_Integer)s.out_bytes);
    bsl_setint(L, "back_bytes", (lua_Integer)s.back_bytes);
    bsl_setint(L, "device_bytes", (lua_Integer)s.device_bytes);
    bsl_setint(L, "host_bytes", (lua_Integer)s.host_bytes);
    return 1;
}

static const luaL_Reg methods[] = {{"fetch", l_fetch}, {"get", l_get},     {"put", l_put},
                                   {"read", l_read},   {"stats", l_stats}, {"zero", l_zero},
                                   {NULL, NULL}};
static const luaL_Reg functions[] = {{"bytes", l_bytes}, {"open", l_open}, {NULL, NULL}};

void bsl_open_store(lua_State *L)
{
    bsl_newtype(L, &bsl_store_type, methods, NULL);
    luaL_newlib(L, functions);
    lua_setfield(L, -2, "store");
}
