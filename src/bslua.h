/* SPDX-License-Identifier: Apache-2.0 */
/*
** bslua.h: embedding libbs in a Lua 5.4 host. Both openers give the same table; the second name lets
** lua/bs/init.lua, which is module "bs", reach the C part as "bs.core".
*/
#ifndef BSLUA_H
#define BSLUA_H

#include <lua.h>

#define BSLUA_API __attribute__((visibility("default")))

/* Exit statuses of programs: of bslua itself, and the words of bs.exit, which scripts end with. 130 is a shell's for a
   program that SIGINT ended. */
typedef enum bslua_exit {
    BSLUA_EXIT_DONE = 0,
    BSLUA_EXIT_ERROR = 1,
    BSLUA_EXIT_USAGE = 2,     /* the command line or a setting */
    BSLUA_EXIT_PLAN = 3,      /* no plan fits the budgets */
    BSLUA_EXIT_DATA = 4,      /* refused by the data check */
    BSLUA_EXIT_NONFINITE = 5, /* a step that is not finite */
    BSLUA_EXIT_SELFTEST = 6   /* a saved adapter that failed its test */
} bslua_exit;

BSLUA_API int luaopen_bs(lua_State *L);
BSLUA_API int luaopen_bs_core(lua_State *L);

#endif
