/* SPDX-License-Identifier: Apache-2.0 */
/*
** status.c: failures of libbs as Lua errors, and back: the text of an error ends with its status in brackets.
*/
#include "lua/bsl.h"

#include <string.h>

void bsl_pusherror(lua_State *L, bs_status st, const char *what)
{
    bs_errinfo e = *bs_error(); /* a finalizer may run below and fail */
    const char *word = bs_status_name(st);
    lua_pushfstring(L, "%s: %s: %s [%s]", what, word, e.status == st ? e.msg : "no detail", word);
}

void bsl_try(lua_State *L, bs_status st, const char *what)
{
    if (st != BS_OK)
        bsl_pusherror(L, st, what);
    bsl_flushlog(L);
    if (st != BS_OK)
        lua_error(L);
}

/* The status whose word, in brackets, ends the value at index; BS_OK: none. */
bs_status bsl_statusof(lua_State *L, int index)
{
    size_t n;
    const char *s = lua_type(L, index) == LUA_TSTRING ? lua_tolstring(L, index, &n) : NULL;
    for (int st = BS_OK + 1; s && st <= BS_INTERNAL; st++) {
        const char *word = bs_status_name((bs_status)st);
        size_t k = strlen(word);
        if (n >= k + 2 && s[n - 1] == ']' && s[n - k - 2] == '[' && !memcmp(s + n - k - 1, word, k))
            return (bs_status)st;
    }
    return BS_OK;
}

int bsl_traceback(lua_State *L)
{
    lua_settop(L, 1);
    if (lua_type(L, 1) != LUA_TSTRING || strstr(lua_tostring(L, 1), "\nstack traceback:"))
        return 1;
    if (strcmp(lua_tostring(L, 1), "not enough memory") == 0) /* Lua's own */
        return 1;
    switch (bsl_statusof(L, 1)) {
    case BS_NOMEM:
    case BS_DEVMEM:
    case BS_IO:
    case BS_FORMAT:
    case BS_DEVICE:
    case BS_UNSUPPORTED:
    case BS_CANCELLED:
        return 1;
    default:
        luaL_traceback(L, L, lua_tostring(L, 1), 1);
        return 1;
    }
}
