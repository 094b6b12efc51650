/* SPDX-License-Identifier: Apache-2.0 */
/*
** signal.c: Ctrl-C, and the other signals that end a run. The handler only stores numbers, sets libbs's cancel flag and
** calls lua_sethook, which is the one function of Lua that a signal may call. The interruption is sticky: the hook
** stays and every bs call fails until the script has unwound, so that pcall in a loop cannot swallow it. A second
** signal takes the default action. A coroutine has no hook: in one that never calls bs only the second signal helps.
**
** A script that wants to end in its own time holds the signals (module "bs.host"): then the first one is only noted,
** with a line on stderr, and the next one acts as said above. What has not ended some seconds later is ended by force:
** a library may wait for ever where nothing looks at the flag.
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
#include <string.h>
#include <unistd.h>

static const char hold_type[] = "bs.host.hold", interrupted_type[] = "bs.host.interrupted";

/* Seconds that a script has to unwind once a second signal has come. */
#define PATIENCE 3

/* What ends a run. `meant`: a second one is meant as such; the others are repeated by the system: a closed terminal is
   told by kernel and shell, a pipe at every write, processor time every second. `optional`: left alone where the
   program was started with it ignored, as under nohup. */
static const struct ending {
    int sig;
    bool meant, optional;
    const char *name, *cause; /* behind "bslua: " */
} ending[] = {
    {SIGINT, true, false, "INT", ""},
    {SIGTERM, true, true, "TERM", ""},
    {SIGHUP, false, true, "HUP", "the terminal is gone; "},
    {SIGPIPE, false, false, "PIPE", "nobody reads the output any more; "},
    {SIGXCPU, false, true, "XCPU", "the limit of processor time is reached; "},
};

enum { ENDINGS = sizeof ending / sizeof *ending };

static lua_State *main_state; /* both are set before the handler is installed */
static pthread_t main_thread;
static volatile sig_atomic_t noted, held, acted;
static struct sigaction before[ENDINGS]; /* what a hold has replaced */

static const struct ending *ending_of(int sig)
{
    const struct ending *e = ending;
    while (e->sig != sig)
        e++;
    return e;
}

static int interrupted_text(lua_State *L)
{
    lua_getfield(L, 1, "message");
    return 1;
}

/* The error that ends the script: one line, without a traceback. */
static void interrupt(lua_State *L, lua_Debug *ar)
{
    (void)ar;
    lua_createtable(L, 0, 2);
    lua_pushinteger(L, 128 + noted);
    lua_setfield(L, -2, "bs_exit");
    lua_pushliteral(L, "interrupted!");
    lua_setfield(L, -2, "message");
    if (luaL_newmetatable(L, interrupted_type)) {
        lua_pushcfunction(L, interrupted_text);
        lua_setfield(L, -2, "__tostring");
    }
    lua_setmetatable(L, -2);
    lua_error(L);
}

static void install(int sig, void (*handler)(int))
{
    struct sigaction sa = {.sa_handler = handler, .sa_flags = SA_RESTART};
    sigemptyset(&sa.sa_mask);
    sigaction(sig, &sa, NULL); /* fails only for a signal number that does not exist */
}

/* Callable from a signal handler. */
static void tell(const char *text)
{
    int kept = errno;
    if (write(STDERR_FILENO, text, strlen(text)) < 0)
        errno = kept;
}

static void tell_held(const struct ending *e)
{
    tell("bslua: ");
    tell(e->cause);
    tell(e->meant ? "stopping at the next good place; the same again stops at once\n"
                  : "stopping at the next good place\n");
}

/* SIGALRM, some seconds after the signal that should have ended the script. */
static void end_by_force(int sig)
{
    (void)sig;
    install(noted, SIG_DFL);
    kill(getpid(), noted);
}

static void act(void)
{
    acted = 1;
    for (int i = 0; i < ENDINGS; i++)
        if (ending[i].meant)
            install(ending[i].sig, SIG_DFL);
    bs_cancel(true);
    /* Not on calls and returns: a <close> method in C must run before the hook raises again. */
    lua_sethook(main_state, interrupt, LUA_MASKCOUNT, 1);
}

static void on_signal(int sig)
{
    /* Threads of other libraries (a BLAS) do not block signals as ours do. */
    if (!pthread_equal(pthread_self(), main_thread)) {
        pthread_kill(main_thread, sig);
        return;
    }
    const struct ending *e = ending_of(sig);
    if (noted && !e->meant)
        return;
    bool first = noted == 0;
    noted = sig;
    if (held && first) {
        tell_held(e);
        return;
    }
    if (!first) {
        install(SIGALRM, end_by_force);
        alarm(PATIENCE);
    }
    act();
}

static int traceback(lua_State *L)
{
    if (lua_type(L, 1) == LUA_TSTRING)
        return acted ? 1 : bsl_traceback(L);
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

static int l_release(lua_State *L)
{
    bool *open = luaL_checkudata(L, 1, hold_type);
    if (*open && --held == 0)
        for (int i = 0; i < ENDINGS; i++)
            if (ending[i].sig != SIGINT)
                sigaction(ending[i].sig, &before[i], NULL);
    *open = false;
    return 0;
}

/* All but SIGINT, which host_call has. */
static void take_signals(void)
{
    for (int i = 0; i < ENDINGS; i++) {
        if (ending[i].sig == SIGINT)
            continue;
        sigaction(ending[i].sig, NULL, &before[i]);
        if (!ending[i].optional || before[i].sa_handler != SIG_IGN)
            install(ending[i].sig, on_signal);
    }
}

/* hold(): until the result is closed, the first signal that would end the program is only noted. */
static int l_hold(lua_State *L)
{
    bool *open = lua_newuserdatauv(L, sizeof *open, 0);
    *open = false;
    luaL_setmetatable(L, hold_type);
    if (held++ == 0)
        take_signals();
    *open = true;
    return 1;
}

/* interrupted(): the name of the signal that has come ("INT", "TERM", ...), else nil. The program ends by it. */
static int l_interrupted(lua_State *L)
{
    if (noted == 0)
        lua_pushnil(L);
    else
        lua_pushstring(L, ending_of(noted)->name);
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
