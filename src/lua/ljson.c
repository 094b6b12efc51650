/* SPDX-License-Identifier: Apache-2.0 */
/*
** ljson.c: bs.json. Reading goes through bs_json_parse, with what cJSON takes beyond JSON; writing is json_encode.c's.
** An object with a key twice gives the last value. null is a light userdata; an empty table is an object unless it is
** marked as an array.
*/
#include "lua/json_encode.h"

#include <cjson/cJSON.h>
#include <math.h>

/* ---- decode --------------------------------------------------------------------------------- */

static void close_tree(void *h)
{
    bs_json_end(h);
}

static const bsl_type tree_type = {"bs.json", close_tree, 0, 1};

static void push_value(lua_State *L, const cJSON *v)
{
    luaL_checkstack(L, 4, "json: nested too deeply");
    if (cJSON_IsNumber(v)) {
        double d = v->valuedouble;
        if (d == floor(d) && fabs(d) < 0x1p53)
            lua_pushinteger(L, (lua_Integer)d);
        else
            lua_pushnumber(L, d);
    } else if (cJSON_IsString(v)) {
        lua_pushstring(L, v->valuestring);
    } else if (cJSON_IsBool(v)) {
        lua_pushboolean(L, cJSON_IsTrue(v));
    } else if (cJSON_IsObject(v)) {
        lua_newtable(L);
        for (const cJSON *c = v->child; c; c = c->next) {
            lua_pushstring(L, c->string);
            push_value(L, c);
            lua_rawset(L, -3);
        }
    } else if (cJSON_IsArray(v)) {
        lua_Integer i = 0;
        lua_newtable(L);
        if (!v->child)
            luaL_setmetatable(L, bsl_json_array);
        for (const cJSON *c = v->child; c; c = c->next) {
            push_value(L, c);
            lua_rawseti(L, -2, ++i);
        }
    } else {
        bsl_json_pushnull(L);
    }
}

/* decode(text [, most]): where the value may need more than `most` bytes that is an answer: nil and the message. */
static int l_decode(lua_State *L)
{
    size_t n;
    const char *text = luaL_checklstring(L, 1, &n);
    lua_Integer most = luaL_optinteger(L, 2, 0);
    luaL_argcheck(L, most >= 0, 2, "a number of bytes >= 0");
    bs_json_rules rules = {.lax = true, .tree = (size_t)most};
    lua_settop(L, 1);
    bsl_box *box = bsl_newbox(L, &tree_type);
    bs_json *tree = lua_newuserdatauv(L, sizeof *tree, 0);
    lua_setiuservalue(L, 2, 1); /* an error clears the stack before the box is closed */
    lua_toclose(L, 2);
    bs_status st = bs_json_parse(text, n, &rules, NULL, tree);
    if (st == BS_OK)
        box->h = tree;
    if (st == BS_UNSUPPORTED) {
        lua_pushnil(L);
        bsl_pusherror(L, st, "bs.json.decode");
        return 2;
    }
    bsl_try(L, st, "bs.json.decode");
    push_value(L, tree->root);
    return 1;
}

/* ---- encode --------------------------------------------------------------------------------- */

/* bs.json.encode(value [, {pretty = bool, sort = bool}]) */
static int l_encode(lua_State *L)
{
    typedef struct args {
        bool pretty, sort;
    } args;
    static const bsl_option spec[] = {{"pretty", BSL_BOOL, offsetof(args, pretty), false},
                                      {"sort", BSL_BOOL, offsetof(args, sort), false},
                                      {NULL, BSL_ANY, 0, false}};
    args a = {.sort = true};
    luaL_checkany(L, 1);
    bsl_options(L, 2, spec, &a);
    bsl_json_encode(L, 1, a.pretty, a.sort);
    return 1;
}

static int l_array(lua_State *L)
{
    luaL_checktype(L, 1, LUA_TTABLE);
    lua_settop(L, 1);
    luaL_setmetatable(L, bsl_json_array);
    return 1;
}

static const luaL_Reg functions[] = {
    {"array", l_array}, {"decode", l_decode}, {"encode", l_encode}, {NULL, NULL}};

void bsl_open_json(lua_State *L)
{
    static const luaL_Reg none[] = {{NULL, NULL}};
    bsl_newtype(L, &tree_type, none, NULL);
    luaL_newmetatable(L, bsl_json_array);
    lua_pop(L, 1);
    luaL_newlib(L, functions);
    bsl_json_pushnull(L);
    lua_setfield(L, -2, "null");
    lua_setfield(L, -2, "json");
}
