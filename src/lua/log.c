/* SPDX-License-Identifier: Apache-2.0 */
/*
** log.c: log lines of libbs on their way to a script's function. libbs may log on any of its threads while it holds
** locks, so lines wait in a small ring and reach the function when a binding returns to Lua.
*/
#include "lua/bsl.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

enum { LOG_LINES = 64, LOG_WIDTH = 1024 };

static struct {
    pthread_mutex_t lock;
    atomic_bool waiting; /* any line or loss, read without the lock */
    int first, n;
    unsigned long lost;
    char line[LOG_LINES][LOG_WIDTH];
} ring = {.lock = PTHREAD_MUTEX_INITIALIZER};

static const char log_key; /* registry: the script's function */

static void log_line(void *ud, const char *line)
{
    (void)ud; /* the ring is process-wide, as bs_log_to is */
    pthread_mutex_lock(&ring.lock);
    if (ring.n == LOG_LINES)
        ring.lost++;
    else
        snprintf(ring.line[(ring.first + ring.n++) % LOG_LINES], LOG_WIDTH, "%s", line);
    atomic_store(&ring.waiting, true);
    pthread_mutex_unlock(&ring.lock);
}

/* Move one line to buf; false when none is left. */
static bool take_line(char buf[LOG_WIDTH])
{
    bool got = true;
    pthread_mutex_lock(&ring.lock);
    if (ring.n > 0) {
        memcpy(buf, ring.line[ring.first], LOG_WIDTH);
        ring.first = (ring.first + 1) % LOG_LINES;
        ring.n--;
    } else if (ring.lost > 0) {
        snprintf(buf, LOG_WIDTH, "%lu log lines were lost", ring.lost);
        ring.lost = 0;
    } else {
        got = false;
        atomic_store(&ring.waiting, false);
    }
    pthread_mutex_unlock(&ring.lock);
    return got;
}

static int call_log(lua_State *L)
{
    lua_rawgetp(L, LUA_REGISTRYINDEX, &log_key);
    lua_pushstring(L, lua_touserdata(L, 1));
    lua_call(L, 1, 0);
    return 0;
}

void bsl_flushlog(lua_State *L)
{
    char buf[LOG_WIDTH];
    if (!atomic_load(&ring.waiting) || !lua_checkstack(L, 4))
        return;
    while (take_line(buf)) {
        lua_pushcfunction(L, call_log);
        lua_pushlightuserdata(L, buf);
        if (lua_pcall(L, 1, 0, 0) != LUA_OK) { /* a failing log function must not fail the call */
            lua_warning(L, "error in the function of bs.log_to: ", 1);
            lua_warning(L, lua_isstring(L, -1) ? lua_tostring(L, -1) : luaL_typename(L, -1), 0);
            lua_pop(L, 1);
        }
    }
}

void bsl_setlog(lua_State *L)
{
    if (!lua_isnoneornil(L, 1))
        luaL_checktype(L, 1, LUA_TFUNCTION);
    bsl_flushlog(L);
    lua_settop(L, 1);
    bs_log_to(lua_isnil(L, 1) ? NULL : log_line, NULL);
    lua_rawsetp(L, LUA_REGISTRYINDEX, &log_key);
}

/* The state that owns the log function ends: libbs must not fill the ring for nobody. */
static int log_end(lua_State *L)
{
    if (lua_rawgetp(L, LUA_REGISTRYINDEX, &log_key) == LUA_TFUNCTION)
        bs_log_to(NULL, NULL);
    return 0;
}

/* The guard ends with the state. */
void bsl_openlog(lua_State *L)
{
    lua_newuserdatauv(L, 0, 0);
    lua_createtable(L, 0, 1);
    lua_pushcfunction(L, log_end);
    lua_setfield(L, -2, "__gc");
    lua_setmetatable(L, -2);
    lua_rawsetp(L, LUA_REGISTRYINDEX, &ring);
}
