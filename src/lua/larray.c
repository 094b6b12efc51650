/* SPDX-License-Identifier: Apache-2.0 */
/*
** larray.c: bs.array, dense host arrays. Elements and rows are counted from 1 in Lua. Integer arrays
** give and take Lua integers; i64 keeps all bits.
*/
#include "lua/bsl.h"

#include <limits.h>
#include <math.h>
#include <string.h>

static bs_array *check(lua_State *L, int arg)
{
    return bsl_check(L, arg, &bsl_array_type);
}

static bool is_integer(bs_dtype t)
{
    return t == BS_DTYPE_I64 || t == BS_DTYPE_I32 || t == BS_DTYPE_U8;
}

static void push_element(lua_State *L, const bs_array *a, int64_t i)
{
    if (a->dtype == BS_DTYPE_I64)
        lua_pushinteger(L, ((const int64_t *)a->data)[i]);
    else if (is_integer(a->dtype))
        lua_pushinteger(L, (lua_Integer)bs_array_get(a, i));
    else
        lua_pushnumber(L, bs_array_get(a, i));
}

/* Store the number at index; false when it is not one that the dtype can hold. */
static bool set_element(lua_State *L, bs_array *a, int64_t i, int index)
{
    int ok = lua_type(L, index) == LUA_TNUMBER;
    if (ok && is_integer(a->dtype)) {
        lua_Integer v = lua_tointegerx(L, index, &ok);
        if (a->dtype == BS_DTYPE_I64)
            ((int64_t *)a->data)[i] = v;
        else if (a->dtype == BS_DTYPE_I32 ? v < INT32_MIN || v > INT32_MAX : v < 0 || v > UINT8_MAX)
            return false;
        else
            bs_array_set(a, i, (double)v);
    } else if (ok) {
        bs_array_set(a, i, lua_tonumber(L, index));
    }
    return ok;
}

static void fill_table(lua_State *L, bs_array *a, int arg)
{
    int64_t n = bs_array_count(a);
    if ((lua_Unsigned)n != lua_rawlen(L, arg))
        luaL_argerror(L, arg,
                      lua_pushfstring(L, "%I numbers for an array of %I",
                                      (LUAI_UACINT)lua_rawlen(L, arg), (LUAI_UACINT)n));
    for (int64_t i = 0; i < n; i++) {
        lua_rawgeti(L, arg, i + 1);
        if (!set_element(L, a, i, -1))
            luaL_argerror(L, arg,
                          lua_pushfstring(L, "element %I: %s does not fit %s", (LUAI_UACINT)i + 1,
                                          luaL_tolstring(L, -1, NULL), bs_dtype_name(a->dtype)));
        lua_pop(L, 1);
    }
}

/* bs.array.new(dtype, dims [, table of numbers | string of bytes]) */
static int l_new(lua_State *L)
{
    int64_t dim[BS_MAX_DIMS] = {0};
    bs_dtype t = bsl_checkdtype(L, 1);
    int ndim = bsl_checkdims(L, 2, dim);
    int kind = lua_type(L, 3);
    size_t n = 0;
    const char *bytes = kind == LUA_TSTRING ? lua_tolstring(L, 3, &n) : NULL;
    if (!bytes && kind != LUA_TTABLE && kind > LUA_TNIL)
        return luaL_typeerror(L, 3, "table or string");
    bsl_box *box = bsl_newarray(L);
    bs_array *a = NULL;
    bs_status st = bs_array_new(t, ndim, dim, &a);
    box->h = a;
    bsl_try(L, st, "bs.array.new");
    if (bytes && n != a->bytes)
        luaL_argerror(L, 3,
                      lua_pushfstring(L, "%I bytes for an array of %I bytes", (LUAI_UACINT)n,
                                      (LUAI_UACINT)a->bytes));
    if (bytes)
        memcpy(a->data, bytes, n);
    else if (kind == LUA_TTABLE)
        fill_table(L, a, 3);
    return 1;
}

static int l_dtype(lua_State *L)
{
    lua_pushstring(L, bs_dtype_name(check(L, 1)->dtype));
    return 1;
}

static int l_dims(lua_State *L)
{
    const bs_array *a = check(L, 1);
    bsl_pushdims(L, a->ndim, a->dim);
    return 1;
}

static int l_count(lua_State *L)
{
    lua_pushinteger(L, bs_array_count(check(L, 1)));
    return 1;
}

static int64_t check_index(lua_State *L, const bs_array *a, int arg)
{
    lua_Integer i = luaL_checkinteger(L, arg);
    if (i < 1 || i > bs_array_count(a))
        luaL_argerror(
            L, arg,
            lua_pushfstring(L, "element %I of %I", (LUAI_UACINT)i, (LUAI_UACINT)bs_array_count(a)));
    return i - 1;
}

static int l_get(lua_State *L)
{
    const bs_array *a = check(L, 1);
    push_element(L, a, check_index(L, a, 2));
    return 1;
}

static int l_set(lua_State *L)
{
    bs_array *a = check(L, 1);
    int64_t i = check_index(L, a, 2);
    if (!set_element(L, a, i, 3))
        return luaL_argerror(L, 3,
                             lua_pushfstring(L, "%s does not fit %s", luaL_tolstring(L, 3, NULL),
                                             bs_dtype_name(a->dtype)));
    return 0;
}

static int l_table(lua_State *L)
{
    const bs_array *a = check(L, 1);
    int64_t n = bs_array_count(a);
    lua_createtable(L, n < INT_MAX ? (int)n : 0, 0);
    for (int64_t i = 0; i < n; i++) {
        push_element(L, a, i);
        lua_rawseti(L, -2, i + 1);
    }
    return 1;
}

static int l_bytes(lua_State *L)
{
    const bs_array *a = check(L, 1);
    lua_pushlstring(L, a->data, a->bytes);
    return 1;
}

static int l_cast(lua_State *L)
{
    const bs_array *a = check(L, 1);
    bs_dtype t = bsl_checkdtype(L, 2);
    bsl_box *box = bsl_newarray(L);
    bs_array *out = NULL;
    bs_status st = bs_array_cast(a, t, &out);
    box->h = out;
    bsl_try(L, st, "bs.array.cast");
    return 1;
}

static int l_hash(lua_State *L)
{
    lua_pushinteger(L, (lua_Integer)bs_array_hash(check(L, 1)));
    return 1;
}

/* a:uniform(bound, seed, name): random numbers in +-bound; returns a */
static int l_uniform(lua_State *L)
{
    bs_array *a = check(L, 1);
    double bound = luaL_checknumber(L, 2);
    uint64_t seed = (uint64_t)luaL_checkinteger(L, 3);
    const char *name = luaL_checkstring(L, 4);
    bsl_try(L, bs_array_uniform(a, bound, seed, name), "bs.array.uniform");
    lua_settop(L, 1);
    return 1;
}

/* a:slice_rows(first, last): a copy of rows first..last of the first dim. */
static int l_slice_rows(lua_State *L)
{
    const bs_array *a = check(L, 1);
    lua_Integer first = luaL_checkinteger(L, 2), last = luaL_checkinteger(L, 3);
    int64_t dim[BS_MAX_DIMS];
    luaL_argcheck(L, a->ndim > 0, 1, "an array without dims has no rows");
    luaL_argcheck(L, first >= 1 && first <= a->dim[0] + 1, 2, "row out of range");
    luaL_argcheck(L, last >= first - 1 && last <= a->dim[0], 3, "row out of range");
    memcpy(dim, a->dim, sizeof dim);
    dim[0] = last - first + 1;
    bsl_box *box = bsl_newarray(L);
    bs_array *out = NULL;
    bs_status st = bs_array_new(a->dtype, a->ndim, dim, &out);
    box->h = out;
    bsl_try(L, st, "bs.array.slice_rows");
    if (out->bytes > 0) {
        size_t row = a->bytes / (size_t)a->dim[0];
        memcpy(out->data, (const char *)a->data + (size_t)(first - 1) * row, out->bytes);
    }
    return 1;
}

/* a:argmax_rows(): per row of the first dim, the first column (from 1) of the largest element, and the
   distance to the second largest. A NaN is never the largest. */
static int l_argmax_rows(lua_State *L)
{
    const bs_array *a = check(L, 1);
    luaL_argcheck(L, a->ndim > 0, 1, "an array without dims has no rows");
    int64_t rows = a->dim[0], cols = rows > 0 ? bs_array_count(a) / rows : 0;
    luaL_argcheck(L, rows == 0 || cols > 0, 1, "rows without columns");
    lua_createtable(L, rows < INT_MAX ? (int)rows : 0, 0);
    lua_createtable(L, rows < INT_MAX ? (int)rows : 0, 0);
    for (int64_t r = 0; r < rows; r++) {
        int64_t best = 0;
        double top = -INFINITY, second = -INFINITY;
        for (int64_t c = 0; c < cols; c++) {
            double v = bs_array_get(a, r * cols + c);
            if (v > top) {
                second = top;
                top = v;
                best = c;
            } else if (v > second) {
                second = v;
            }
        }
        lua_pushinteger(L, best + 1);
        lua_rawseti(L, -3, r + 1);
        lua_pushnumber(L, top - second);
        lua_rawseti(L, -2, r + 1);
    }
    return 2;
}

static int l_is_finite(lua_State *L)
{
    lua_pushboolean(L, bs_array_is_finite(check(L, 1)));
    return 1;
}

static int l_rel_err(lua_State *L)
{
    const bs_array *a = check(L, 1), *b = check(L, 2);
    double e = 0;
    bsl_try(L, bs_array_rel_err(a, b, &e), "bs.array.rel_err");
    lua_pushnumber(L, e);
    return 1;
}

/* bs.array.merge(w, a, b, scale [, threads]): w += scale b a, in place; bs_lora_merge. */
static int l_merge(lua_State *L)
{
    bs_array *w = check(L, 1);
    const bs_array *a = check(L, 2), *b = check(L, 3);
    double scale = luaL_checknumber(L, 4);
    int threads = lua_isnoneornil(L, 5) ? 0 : bsl_checkint(L, 5, 0, INT_MAX);
    bsl_try(L, bs_lora_merge(w, a, b, scale, threads), "bs.array.merge");
    return 0;
}

static int l_tostring(lua_State *L)
{
    const bs_array *a = bsl_checkbox(L, 1, &bsl_array_type)->h;
    luaL_Buffer b;
    if (!a) {
        lua_pushliteral(L, "bs.array (closed)");
        return 1;
    }
    luaL_buffinit(L, &b);
    lua_pushfstring(L, "bs.array %s [", bs_dtype_name(a->dtype));
    luaL_addvalue(&b);
    for (int i = 0; i < a->ndim; i++) {
        lua_pushfstring(L, i > 0 ? " %I" : "%I", (LUAI_UACINT)a->dim[i]);
        luaL_addvalue(&b);
    }
    luaL_addchar(&b, ']');
    luaL_pushresult(&b);
    return 1;
}

static const luaL_Reg methods[] = {{"argmax_rows", l_argmax_rows},
                                   {"bytes", l_bytes},
                                   {"cast", l_cast},
                                   {"count", l_count},
                                   {"dims", l_dims},
                                   {"dtype", l_dtype},
                                   {"get", l_get},
                                   {"hash", l_hash},
                                   {"is_finite", l_is_finite},
                                   {"set", l_set},
                                   {"slice_rows", l_slice_rows},
                                   {"table", l_table},
                                   {"uniform", l_uniform},
                                   {NULL, NULL}};
static const luaL_Reg meta[] = {{"__len", l_count}, {"__tostring", l_tostring}, {NULL, NULL}};
static const luaL_Reg functions[] = {
    {"merge", l_merge}, {"new", l_new}, {"rel_err", l_rel_err}, {NULL, NULL}};

void bsl_open_array(lua_State *L)
{
    bsl_newtype(L, &bsl_array_type, methods, meta);
    luaL_newlib(L, functions);
    lua_setfield(L, -2, "array");
}
