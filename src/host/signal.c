/* SPDX-License-Identifier: Apache-2.0 */
/*
** signal.c: Ctrl-C. The handler only stores numbers, sets libbs's cancel flag and calls lua_sethook,
** which is the one function of Lua that a signal may call. The interruption is sticky: the hook stays
** and every bs call fails until the script has unwound, so that pcall in a loop cannot swallow it. A
** second signal takes the default action. A coroutine has no hook: in one that never calls bs only the
** second signal helps.
**
** A script that wants to end in its own time holds the signals (module "bs.host"): then the first one
** is only noted, with a line on stderr, and the next ones act as said above.
*/
#include "host/host.h"

#include "bs.h"
#include "lua/bsl.h"

#include <errno.h>
#include <lauxlib.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <unistd.h>

static lua_State *main_state; /* both are set before the handler is installed */
static pthread_t main_thread;
static volatile sig_atomic_t noted, held, acted;

static void interrupt(lua_State *L, lua_Debug *ar)
{
    (void)ar;
    luaL_where(L, 0);
    lua_pushliteral(L, "interrupted!");
    lua_concat(L, 2);
    lua_error(L);
}

static void install(int sig, void (*handler)(int))
{
    struct sigaction sa = {.sa_handler = handler, .sa_flags = SA_RESTART};
    sigemptyset(&sa.sa_mask);
    sigaction(sig, &sa, NULL); /* fails only for a signal number that does not exist */
}

/* Callable from a signal handler. */
static void tell_held(void)
{
    static const char text[] = "bslua: stopping at the next good place; the same again stops at once\n";
    int kept = errno;
    if (write(STDERR_FILENO, text, sizeof text - 1) < 0)
        errno = kept;
}

static void on_signal(int sig)
{
    /* Threads of other libraries (a BLAS) do not block signals as ours do. */
    if (!pthread_equal(pthread_self(), main_thread)) {
        pthread_kill(main_thread, sig);
        return;
    }
    bool first = noted == 0;
    noted = sig;
    if (held && first) {
        tell_held();
        return;
    }
    acted = 1;
    install(sig, SIG_DFL);
    bs_cancel(true);
    /* Not on calls and returns: a <close> method in C must run before the hook raises again. */
    lua_sethook(main_state, interrupt, LUA_MASKCOUNT, 1);
}

static int traceback(lua_State *L)
{
    if (lua_type(L, 1) == LUA_TSTRING)
        return bsl_traceback(L);
    if (lua_istable(L, 1) && lua_getfield(L, 1, "bs_exit") != LUA_TNIL) {
        lua_settop(L, 1);
        return 1;
    }
    if (luaL_callmeta(L, 1, "__tostring") && lua_type(L, -1) == LUA_TSTRING)
        return 1;
    luaL_traceback(L, L, lua_pushfstring(L, "(error object is a %s value)", luaL_typename(L, 1)), 1);
    return 1;
}

int host_call(lua_State *L, int n_args, int n_results)
{
    int base = lua_gettop(L) - n_args;
    lua_pushcfunction(L, traceback);
    lua_insert(L, base);
    main_state = L;
    main_thread = pthread_self();
    install(SIGINT, on_signal);
    int status = lua_pcall(L, n_args, n_results, base);
    install(SIGINT, SIG_DFL);
    lua_remove(L, base);
    if (acted) {
        lua_sethook(L, NULL, 0, 0);
        bs_cancel(false);
        acted = 0;
    }
    return status;
}

int host_signal(void)
{
    return noted;
}

/* ---- module "bs.host" --------------------------------------------------------------------------- */

static const char hold_type[] = "bs.host.hold";

static int l_release(lua_State *L)
{
    bool *open = luaL_checkudata(L, 1, hold_type);
    if (*open && --held == 0)
        install(SIGTERM, SIG_DFL);
    *open = false;
    return 0;
}

/* hold(): until the result is closed, the first SIGINT or SIGTERM is only noted. */
static int l_hold(lua_State *L)
{
    bool *open = lua_newuserdatauv(L, sizeof *open, 0);
    *open = false;
    luaL_setmetatable(L, hold_type);
    if (held++ == 0)
        install(SIGTERM, on_signal);
    *open = true;
    return 1;
}

/* interrupted(): "INT" or "TERM" when a signal has come, else nil. The program ends by that signal. */
static int l_interrupted(lua_State *L)
{
    int sig = noted;
    if (sig == 0)
        lua_pushnil(L);
    else
        lua_pushstring(L, sig == SIGTERM ? "TERM" : "INT");
    return 1;
}

int host_open(lua_State *L)
{
    static const luaL_Reg functions[] = {
        {"hold", l_hold}, {"interrupted", l_interrupted}, {NULL, NULL}};
    if (luaL_newmetatable(L, hold_type)) {
        lua_pushcfunction(L, l_release);
        lua_setfield(L, -2, "__close");
        lua_pushcfunction(L, l_release);
        lua_setfield(L, -2, "__gc");
        lua_newtable(L);
        lua_pushcfunction(L, l_release);
        lua_setfield(L, -2, "close");
        lua_setfield(L, -2, "__index");
    }
    luaL_newlib(L, functions);
    return 1;
}
