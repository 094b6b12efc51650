/* SPDX-License-Identifier: Apache-2.0 */
/*
** lcore.c: opening the module; version, log, memory counters and process figures. libbs may log on any
** of its threads while it holds locks, so lines wait in a small ring and reach the script's function
** when a binding returns to Lua.
*/
#include "bslua.h"
#include "lua/bsl.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

/* ---- log ------------------------------------------------------------------------------------ */

enum { LOG_LINES = 64, LOG_WIDTH = 512 };

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

static int l_log_to(lua_State *L)
{
    if (!lua_isnoneornil(L, 1))
        luaL_checktype(L, 1, LUA_TFUNCTION);
    bsl_flushlog(L);
    lua_settop(L, 1);
    bs_log_to(lua_isnil(L, 1) ? NULL : log_line, NULL);
    lua_rawsetp(L, LUA_REGISTRYINDEX, &log_key);
    return 0;
}

/* The state that owns the log function ends: libbs must not fill the ring for nobody. */
static int l_log_end(lua_State *L)
{
    if (lua_rawgetp(L, LUA_REGISTRYINDEX, &log_key) == LUA_TFUNCTION)
        bs_log_to(NULL, NULL);
    return 0;
}

/* ---- plain functions -------------------------------------------------------------------------- */

static int l_build(lua_State *L)
{
    lua_pushstring(L, bs_build_info());
    return 1;
}

static int l_cancelled(lua_State *L)
{
    lua_pushboolean(L, bs_cancelled());
    return 1;
}

static int l_hash(lua_State *L)
{
    size_t n;
    const char *s = luaL_checklstring(L, 1, &n);
    lua_pushinteger(L, (lua_Integer)bs_hash64(s, n, (uint64_t)luaL_optinteger(L, 2, 0)));
    return 1;
}

static int l_now(lua_State *L)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    lua_pushnumber(L, (double)t.tv_sec + 1e-9 * (double)t.tv_nsec);
    return 1;
}

/* The status whose word, in brackets, ends the value at 1; BS_OK: none. */
static bs_status status_of(lua_State *L)
{
    size_t n;
    const char *s = lua_type(L, 1) == LUA_TSTRING ? lua_tolstring(L, 1, &n) : NULL;
    for (int st = BS_OK + 1; s && st <= BS_INTERNAL; st++) {
        const char *word = bs_status_name((bs_status)st);
        size_t k = strlen(word);
        if (n >= k + 2 && s[n - 1] == ']' && s[n - k - 2] == '[' && !memcmp(s + n - k - 1, word, k))
            return (bs_status)st;
    }
    return BS_OK;
}

/* The status word in the brackets that end a raised message; nil for any other value. */
static int l_code(lua_State *L)
{
    bs_status st = status_of(L);
    lua_pushstring(L, st == BS_OK ? NULL : bs_status_name(st));
    return 1;
}

int bsl_traceback(lua_State *L)
{
    lua_settop(L, 1);
    if (lua_type(L, 1) != LUA_TSTRING || strstr(lua_tostring(L, 1), "\nstack traceback:"))
        return 1;
    switch (status_of(L)) {
    case BS_NOMEM:
    case BS_DEVMEM:
    case BS_IO:
    case BS_DEVICE:
    case BS_UNSUPPORTED:
        return 1;
    default:
        luaL_traceback(L, L, lua_tostring(L, 1), 1);
        return 1;
    }
}

static bs_tag check_tag(lua_State *L, int arg)
{
    const char *s = luaL_checkstring(L, arg);
    for (int t = 0; t < BS_TAG_COUNT; t++)
        if (strcmp(bs_tag_name((bs_tag)t), s) == 0)
            return (bs_tag)t;
    return luaL_argerror(L, arg, lua_pushfstring(L, "unknown memory tag '%s' (see bs.tags)", s));
}

static int l_host_bytes(lua_State *L)
{
    lua_pushinteger(L, (lua_Integer)bs_host_bytes(check_tag(L, 1)));
    return 1;
}

static int l_host_peak(lua_State *L)
{
    lua_pushinteger(L, (lua_Integer)bs_host_peak(check_tag(L, 1)));
    return 1;
}

static int l_tags(lua_State *L)
{
    lua_createtable(L, BS_TAG_COUNT, 0);
    for (int t = 0; t < BS_TAG_COUNT; t++) {
        lua_pushstring(L, bs_tag_name((bs_tag)t));
        lua_rawseti(L, -2, t + 1);
    }
    return 1;
}

/* The number after `key` in a file of /proc/self; -1: absent. */
static long long proc_number(const char *path, const char *key)
{
    char line[256];
    long long v = -1;
    FILE *f = fopen(path, "re");
    while (f && v < 0 && fgets(line, sizeof line, f))
        if (strncmp(line, key, strlen(key)) == 0)
            (void)sscanf(line + strlen(key), "%lld", &v); /* no number: stays -1 */
    if (f)
        fclose(f);
    return v;
}

static int l_rss(lua_State *L)
{
    long long now = proc_number("/proc/self/status", "VmRSS:");
    long long peak = proc_number("/proc/self/status", "VmHWM:");
    if (now < 0 || peak < 0)
        return luaL_error(L, "bs.rss: /proc/self/status cannot be read");
    lua_pushinteger(L, now * 1024);
    lua_pushinteger(L, peak * 1024);
    return 2;
}

static int l_io_bytes(lua_State *L)
{
    long long n = proc_number("/proc/self/io", "read_bytes:");
    if (n < 0)
        lua_pushnil(L);
    else
        lua_pushinteger(L, n);
    return 1;
}

/* ---- module ----------------------------------------------------------------------------------- */

static const luaL_Reg functions[] = {{"build", l_build},
                                     {"cancelled", l_cancelled},
                                     {"code", l_code},
                                     {"hash", l_hash},
                                     {"host_bytes", l_host_bytes},
                                     {"host_peak", l_host_peak},
                                     {"io_bytes", l_io_bytes},
                                     {"log_to", l_log_to},
                                     {"now", l_now},
                                     {"rss", l_rss},
                                     {"tags", l_tags},
                                     {"traceback", bsl_traceback},
                                     {NULL, NULL}};

void bsl_open_core(lua_State *L)
{
    luaL_setfuncs(L, functions, 0);
    lua_pushstring(L, bs_version());
    lua_setfield(L, -2, "version");
    lua_newuserdatauv(L, 0, 0);
    lua_createtable(L, 0, 1);
    lua_pushcfunction(L, l_log_end);
    lua_setfield(L, -2, "__gc");
    lua_setmetatable(L, -2);
    lua_rawsetp(L, LUA_REGISTRYINDEX, &ring);
}

int luaopen_bs(lua_State *L)
{
    static const char module_key;
    luaL_checkversion(L);
    if (lua_rawgetp(L, LUA_REGISTRYINDEX, &module_key) == LUA_TTABLE)
        return 1;
    lua_newtable(L);
    bsl_open_core(L);
    bsl_open_json(L);
    bsl_open_system(L);
    bsl_open_array(L);
    bsl_open_file(L);
    bsl_open_manifest(L);
    bsl_open_placement(L);
    bsl_open_engine(L);
    bsl_open_store(L);
    bsl_open_params(L);
    bsl_open_tensor(L);
    bsl_open_head(L);
    bsl_open_stream(L);
    bsl_open_embedding(L);
    bsl_open_rates(L);
    bsl_open_gpu(L);
    bsl_open_tokenizer(L);
    lua_pushvalue(L, -1);
    lua_rawsetp(L, LUA_REGISTRYINDEX, &module_key);
    return 1;
}

int luaopen_bs_core(lua_State *L)
{
    return luaopen_bs(L);
}
