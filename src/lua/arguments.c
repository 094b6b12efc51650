/* SPDX-License-Identifier: Apache-2.0 */
/*
** arguments.c: arguments that are no option tables: integers, dims, lists of integers and of visits.
*/
#include "lua/bsl.h"

#include <limits.h>

const char *const bsl_home_words[] = {"disk", "ram", "gpu", NULL};

const bsl_option bsl_io_options[] = {
    {"engine", BSL_STR, offsetof(bs_io_cfg, engine), false},
    {"depth", BSL_INT, offsetof(bs_io_cfg, depth), false},
    {"threads", BSL_INT, offsetof(bs_io_cfg, threads), false},
    {"request_bytes", BSL_SIZE, offsetof(bs_io_cfg, request_bytes), false},
    {"no_direct", BSL_BOOL, offsetof(bs_io_cfg, no_direct), false},
    {NULL, BSL_ANY, 0, false}};

int bsl_checkint(lua_State *L, int arg, int min, int max)
{
    lua_Integer v = luaL_checkinteger(L, arg);
    if (v < min || v > max)
        luaL_argerror(L, arg, lua_pushfstring(L, "%I is outside %d..%d", (LUAI_UACINT)v, min, max));
    return (int)v;
}

int64_t bsl_checkcount(lua_State *L, int arg)
{
    lua_Integer v = luaL_checkinteger(L, arg);
    if (v < 0)
        luaL_argerror(L, arg, lua_pushfstring(L, "%I is negative", (LUAI_UACINT)v));
    return v;
}

bs_dtype bsl_checkdtype(lua_State *L, int arg)
{
    bs_dtype t = BS_DTYPE_F32;
    const char *s = luaL_checkstring(L, arg);
    if (!bs_dtype_parse(s, &t))
        luaL_argerror(L, arg, lua_pushfstring(L, "unknown dtype '%s'", s));
    return t;
}

int bsl_checkdims(lua_State *L, int arg, int64_t dim[BS_MAX_DIMS])
{
    luaL_checktype(L, arg, LUA_TTABLE);
    size_t n = lua_rawlen(L, arg);
    if (n > BS_MAX_DIMS)
        luaL_argerror(L, arg, lua_pushfstring(L, "at most %d dims", BS_MAX_DIMS));
    for (size_t i = 0; i < n; i++) {
        int whole;
        lua_rawgeti(L, arg, (lua_Integer)i + 1);
        dim[i] = bsl_toint(L, &whole);
        if (!whole || dim[i] < 0)
            luaL_argerror(L, arg, "dims must be integers >= 0");
        lua_pop(L, 1);
    }
    return (int)n;
}

void bsl_pushdims(lua_State *L, int ndim, const int64_t *dim)
{
    lua_createtable(L, ndim, 0);
    for (int i = 0; i < ndim; i++) {
        lua_pushinteger(L, dim[i]);
        lua_rawseti(L, -2, i + 1);
    }
}

const int64_t *bsl_integers(lua_State *L, int arg, int index, const char *name, int64_t *n)
{
    index = lua_absindex(L, index);
    const bsl_box *box = luaL_testudata(L, index, bsl_array_type.name);
    if (box) {
        const bs_array *a = box->h;
        if (!a || a->dtype != BS_DTYPE_I64)
            luaL_argerror(L, arg, lua_pushfstring(L, "'%s': the array is not an open i64 one", name));
        *n = bs_array_count(a);
        lua_pushvalue(L, index);
        return a->data;
    }
    if (!lua_istable(L, index)) {
        lua_pushvalue(L, index);
        bsl_optionerror(L, arg, name, "table or i64 array");
    }
    size_t count = lua_rawlen(L, index);
    int64_t *v = lua_newuserdatauv(L, (count + 1) * sizeof *v, 0);
    for (size_t i = 0; i < count; i++) {
        int whole;
        lua_rawgeti(L, index, (lua_Integer)i + 1);
        v[i] = bsl_toint(L, &whole);
        if (!whole)
            luaL_argerror(L, arg,
                          lua_pushfstring(L, "'%s'[%I]: integer expected, got %s", name,
                                          (LUAI_UACINT)i + 1, luaL_typename(L, -1)));
        lua_pop(L, 1);
    }
    *n = (int64_t)count;
    return v;
}

static int visit_field(lua_State *L, int arg, int i, const char *field, bool required)
{
    int whole, type = lua_getfield(L, -1, field);
    lua_Integer v = bsl_toint(L, &whole);
    if ((type != LUA_TNIL || required) && (!whole || v < INT_MIN || v > INT_MAX))
        luaL_argerror(L, arg,
                      lua_pushfstring(L, "visit %d: '%s': integer expected, got %s", i + 1, field,
                                      luaL_typename(L, -1)));
    lua_pop(L, 1);
    return (int)v;
}

bs_visit_spec *bsl_visits(lua_State *L, int arg, int index, int *n)
{
    index = lua_absindex(L, index);
    if (!lua_istable(L, index))
        luaL_argerror(L, arg, "the program must be a list of visits");
    size_t count = lua_rawlen(L, index);
    if (count > INT_MAX)
        luaL_argerror(L, arg, "too many visits");
    bs_visit_spec *v = lua_newuserdatauv(L, (count + 1) * sizeof *v, 0);
    for (int i = 0; i < (int)count; i++) {
        if (lua_rawgeti(L, index, i + 1) != LUA_TTABLE)
            luaL_argerror(L, arg, lua_pushfstring(L, "visit %d is not a table", i + 1));
        v[i].block = visit_field(L, arg, i, "block", true);
        v[i].kind = visit_field(L, arg, i, "kind", false);
        v[i].layer = visit_field(L, arg, i, "layer", false);
        v[i].stage = visit_field(L, arg, i, "stage", false);
        lua_pop(L, 1);
    }
    *n = (int)count;
    return v;
}

void bsl_batchcfg(lua_State *L, int arg, bs_batch_cfg *out)
{
    static const bsl_option spec[] = {{"micros", BSL_INT, offsetof(bs_batch_cfg, micros), true},
                                      {"tokens", BSL_I64, offsetof(bs_batch_cfg, tokens), true},
                                      {"rows", BSL_I64, offsetof(bs_batch_cfg, rows), true},
                                      {NULL, BSL_ANY, 0, false}};
    *out = (bs_batch_cfg){0};
    bsl_options(L, arg, spec, out);
}
