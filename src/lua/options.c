/* SPDX-License-Identifier: Apache-2.0 */
/*
** options.c: option tables of the bindings: a struct is filled from a table, and what is unknown, missing or of
** another type is refused with the names that are valid.
*/
#include "lua/bsl.h"

#include <limits.h>
#include <string.h>

int bsl_optionerror(lua_State *L, int arg, const char *field, const char *expected)
{
    return luaL_argerror(
        L, arg,
        lua_pushfstring(L, "option '%s': %s expected, got %s", field, expected, luaL_typename(L, -1)));
}

lua_Integer bsl_toint(lua_State *L, int *whole)
{
    *whole = 0;
    return lua_type(L, -1) == LUA_TNUMBER ? lua_tointegerx(L, -1, whole) : 0;
}

typedef struct option_at { /* an option of the table at arg; its name for messages is both texts */
    int arg;
    const char *prefix, *name;
} option_at;

static void wrong_option(lua_State *L, const option_at *at, const char *expected)
{
    lua_pushfstring(L, "%s%s", at->prefix, at->name);
    lua_insert(L, -2);
    bsl_optionerror(L, at->arg, lua_tostring(L, -2), expected);
}

static lua_Integer option_integer(lua_State *L, const option_at *at, lua_Integer min, lua_Integer max)
{
    int whole;
    lua_Integer v = bsl_toint(L, &whole);
    if (!whole)
        wrong_option(L, at, "integer");
    if (v < min || v > max)
        luaL_argerror(L, at->arg,
                      lua_pushfstring(L, "option '%s%s': %I is outside %I..%I", at->prefix, at->name,
                                      (LUAI_UACINT)v, (LUAI_UACINT)min, (LUAI_UACINT)max));
    return v;
}

/* Store the value on the top. */
static void store_option(lua_State *L, int arg, const char *prefix, const bsl_option *o, void *out)
{
    const option_at where = {arg, prefix, o->name};
    void *at = (char *)out + o->offset;
    switch (o->kind) {
    case BSL_INT:
        *(int *)at = (int)option_integer(L, &where, INT_MIN, INT_MAX);
        break;
    case BSL_UINT:
        *(unsigned *)at = (unsigned)option_integer(L, &where, 0, UINT_MAX);
        break;
    case BSL_I64:
        *(int64_t *)at = option_integer(L, &where, INT64_MIN, INT64_MAX);
        break;
    case BSL_U64:
        *(uint64_t *)at = (uint64_t)option_integer(L, &where, INT64_MIN, INT64_MAX);
        break;
    case BSL_SIZE:
        *(size_t *)at = (size_t)option_integer(L, &where, 0, INT64_MAX);
        break;
    case BSL_NUM:
        if (lua_type(L, -1) != LUA_TNUMBER)
            wrong_option(L, &where, "number");
        *(double *)at = lua_tonumber(L, -1);
        break;
    case BSL_BOOL:
        if (!lua_isboolean(L, -1))
            wrong_option(L, &where, "boolean");
        *(bool *)at = lua_toboolean(L, -1);
        break;
    case BSL_STR:
        if (lua_type(L, -1) != LUA_TSTRING)
            wrong_option(L, &where, "string");
        *(const char **)at = lua_tostring(L, -1);
        break;
    case BSL_ANY:
        break;
    }
}

static int unknown_option(lua_State *L, int arg, const char *name, const bsl_option *spec)
{
    luaL_Buffer b;
    luaL_buffinit(L, &b);
    luaL_addstring(&b, "unknown option '");
    luaL_addstring(&b, name);
    luaL_addstring(&b, "' (valid: ");
    for (const bsl_option *o = spec; o->name; o++) {
        luaL_addstring(&b, o->name);
        luaL_addstring(&b, o[1].name ? ", " : ")");
    }
    luaL_pushresult(&b);
    return luaL_argerror(L, arg, lua_tostring(L, -1));
}

int bsl_word(lua_State *L, int arg, const char *field, const char *s, const char *const *word)
{
    luaL_Buffer b;
    for (int i = 0; word[i]; i++)
        if (strcmp(word[i], s) == 0)
            return i;
    luaL_buffinit(L, &b);
    luaL_addstring(&b, field);
    luaL_addstring(&b, ": unknown '");
    luaL_addstring(&b, s);
    luaL_addstring(&b, "' (valid: ");
    for (int i = 0; word[i]; i++) {
        luaL_addstring(&b, word[i]);
        luaL_addstring(&b, word[i + 1] ? ", " : ")");
    }
    luaL_pushresult(&b);
    return luaL_argerror(L, arg, lua_tostring(L, -1));
}

void bsl_nestedoptions(lua_State *L, int arg, int index, const char *prefix, const bsl_option *spec,
                       void *out)
{
    lua_pushnil(L);
    while (lua_next(L, index)) {
        if (lua_type(L, -2) != LUA_TSTRING)
            luaL_argerror(L, arg, "option names must be strings");
        const char *key = lua_tostring(L, -2);
        const bsl_option *o = spec;
        while (o->name && strcmp(o->name, key) != 0)
            o++;
        if (!o->name)
            unknown_option(L, arg, lua_pushfstring(L, "%s%s", prefix, key), spec);
        store_option(L, arg, prefix, o, out);
        lua_pop(L, 1);
    }
    for (const bsl_option *o = spec; o->name; o++) {
        if (o->required && lua_getfield(L, index, o->name) == LUA_TNIL)
            luaL_argerror(L, arg, lua_pushfstring(L, "option '%s%s' is missing", prefix, o->name));
        if (o->required)
            lua_pop(L, 1);
    }
}

void bsl_options(lua_State *L, int arg, const bsl_option *spec, void *out)
{
    if (lua_isnoneornil(L, arg)) {
        for (const bsl_option *o = spec; o->name; o++)
            if (o->required)
                luaL_checktype(L, arg, LUA_TTABLE);
        return;
    }
    luaL_checktype(L, arg, LUA_TTABLE);
    bsl_nestedoptions(L, arg, arg, "", spec, out);
}

void bsl_suboptions(lua_State *L, int arg, const char *field, const bsl_option *spec, void *out)
{
    int type = lua_getfield(L, arg, field);
    if (type != LUA_TNIL) {
        if (type != LUA_TTABLE)
            bsl_optionerror(L, arg, field, "table");
        const char *prefix = lua_pushfstring(L, "%s.", field);
        bsl_nestedoptions(L, arg, lua_gettop(L) - 1, prefix, spec, out);
        lua_pop(L, 1);
    }
    lua_pop(L, 1);
}

void *bsl_optionbox(lua_State *L, int arg, const char *field, const bsl_type *type, bool required)
{
    if (lua_getfield(L, arg, field) == LUA_TNIL && !required)
        return NULL;
    const bsl_box *b = luaL_testudata(L, -1, type->name);
    if (!b)
        bsl_optionerror(L, arg, field, type->name);
    else if (!b->h)
        luaL_argerror(L, arg, lua_pushfstring(L, "option '%s': closed %s", field, type->name));
    return b ? b->h : NULL;
}
