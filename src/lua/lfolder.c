/* SPDX-License-Identifier: Apache-2.0 */
/*
** lfolder.c: bs.folder, folders that are put in place as a whole, and bs.copy_file.
*/
#include "lua/bsl.h"

enum { MOST = 1 << 16 }; /* patterns */

static void close_folder(void *h)
{
    bs_folder_close(h);
}

static const bsl_type folder_type = {"bs.folder", close_folder, 0, 0};

static bs_folder *check(lua_State *L)
{
    return bsl_check(L, 1, &folder_type);
}

/* The list of patterns at arg; the table keeps them, one value pushed. */
static const char **check_patterns(lua_State *L, int arg, int *n)
{
    luaL_checktype(L, arg, LUA_TTABLE);
    size_t count = lua_rawlen(L, arg);
    luaL_argcheck(L, count >= 1 && count <= MOST, arg, "a list of 1 to 65536 names expected");
    const char **list = lua_newuserdatauv(L, count * sizeof *list, 0);
    for (size_t i = 0; i < count; i++) {
        luaL_argcheck(L, lua_rawgeti(L, arg, (lua_Integer)i + 1) == LUA_TSTRING, arg,
                      "a list of names expected");
        list[i] = lua_tostring(L, -1);
        lua_pop(L, 1);
    }
    *n = (int)count;
    return list;
}

/* bs.folder.begin(path, own) */
static int l_begin(lua_State *L)
{
    int n = 0;
    const char *path = luaL_checkstring(L, 1);
    const char **own = check_patterns(L, 2, &n);
    bsl_box *box = bsl_newbox(L, &folder_type);
    bs_folder *f = NULL;
    bs_status st = bs_folder_begin(path, n, own, &f);
    box->h = f;
    bsl_try(L, st, "bs.folder.begin");
    return 1;
}

/* bs.folder.recover(path, own) */
static int l_recover(lua_State *L)
{
    int n = 0;
    const char *path = luaL_checkstring(L, 1);
    const char **own = check_patterns(L, 2, &n);
    bsl_try(L, bs_folder_recover(path, n, own), "bs.folder.recover");
    return 0;
}

static int l_temp(lua_State *L)
{
    lua_pushstring(L, bs_folder_temp(check(L)));
    return 1;
}

static int l_commit(lua_State *L)
{
    bsl_try(L, bs_folder_commit(check(L)), "bs.folder.commit");
    return 0;
}

static int l_copy_file(lua_State *L)
{
    const char *from = luaL_checkstring(L, 1), *to = luaL_checkstring(L, 2);
    bsl_try(L, bs_file_copy(from, to), "bs.copy_file");
    return 0;
}

static const luaL_Reg methods[] = {{"commit", l_commit}, {"temp", l_temp}, {NULL, NULL}};
static const luaL_Reg functions[] = {{"begin", l_begin}, {"recover", l_recover}, {NULL, NULL}};

void bsl_open_folder(lua_State *L)
{
    bsl_newtype(L, &folder_type, methods, NULL);
    luaL_newlib(L, functions);
    lua_setfield(L, -2, "folder");
    lua_pushcfunction(L, l_copy_file);
    lua_setfield(L, -2, "copy_file");
}
