/* SPDX-License-Identifier: Apache-2.0 */
/*
** bslua.h: embedding libbs in a Lua 5.4 host. Both openers give the same table; the second name lets
** lua/bs/init.lua, which is module "bs", reach the C part as "bs.core".
*/
#ifndef BSLUA_H
#define BSLUA_H

#include <lua.h>

#define BSLUA_API __attribute__((visibility("default")))

BSLUA_API int luaopen_bs(lua_State *L);
BSLUA_API int luaopen_bs_core(lua_State *L);

#endif
