/* SPDX-License-Identifier: Apache-2.0 */
/*
** modules.c: where `require` looks first: package.preload, then the folder BSLUA_HOME, then the Lua
** files inside the program, then what stock Lua does. An error in an embedded file names it as
** bs/name.lua.
*/
#include "bslua.h"
#include "host/host.h"
#include "lua/bsl.h"

#include <lualib.h>
#include <string.h>

/* Upvalues: the search path of BSLUA_HOME or nil, package.searchpath. */
static int search(lua_State *L)
{
    const char *name = luaL_checkstring(L, 1);
    if (lua_isstring(L, lua_upvalueindex(1))) {
        lua_pushvalue(L, lua_upvalueindex(2));
        lua_pushvalue(L, 1);
        lua_pushvalue(L, lua_upvalueindex(1));
        lua_call(L, 2, 1);
        if (!lua_isnil(L, -1)) {
            const char *path = lua_tostring(L, -1);
            if (luaL_loadfile(L, path) != LUA_OK)
                return luaL_error(L, "error loading module '%s' from file '%s':\n\t%s", name, path,
                                  lua_tostring(L, -1));
            lua_pushvalue(L, -2);
            return 2;
        }
    }
    for (const bsl_embedded *f = bsl_embedded_files; f->name; f++) {
        if (strcmp(f->name, name) != 0)
            continue;
        int status = luaL_loadbufferx(L, (const char *)f->data, f->size, f->chunk, "t");
        if (status == LUA_ERRMEM)
            return lua_error(L); /* its text is known for what it is */
        if (status != LUA_OK)
            return luaL_error(L, "error loading embedded module '%s':\n\t%s", name,
                              lua_tostring(L, -1));
        lua_pushstring(L, f->chunk);
        return 2;
    }
    lua_pushfstring(L, "no embedded module '%s'", name);
    return 1;
}

void host_modules(lua_State *L, const char *home)
{
    luaL_getsubtable(L, LUA_REGISTRYINDEX, LUA_PRELOAD_TABLE);
    lua_pushcfunction(L, luaopen_bs_core);
    lua_setfield(L, -2, "bs.core");
    lua_pushcfunction(L, host_open);
    lua_setfield(L, -2, "bs.host");
    lua_getglobal(L, LUA_LOADLIBNAME);
    lua_getfield(L, -1, "searchers");
    for (lua_Integer i = luaL_len(L, -1); i >= 2; i--) {
        lua_rawgeti(L, -1, i);
        lua_rawseti(L, -2, i + 1);
    }
    if (home && *home) {
        lua_pushstring(L, home);
        lua_setfield(L, -3, "home"); /* package.home: also where families are looked for */
        lua_pushfstring(L, "%s/?.lua;%s/?/init.lua", home, home);
    } else {
        lua_pushnil(L);
    }
    lua_getfield(L, -3, "searchpath");
    lua_pushcclosure(L, search, 2);
    lua_rawseti(L, -2, 2);
    lua_pop(L, 3);
}
