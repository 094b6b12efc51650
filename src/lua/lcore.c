/* SPDX-License-Identifier: Apache-2.0 */
/*
** lcore.c: opening the module, the one place that knows all parts of it; version, log and memory counters.
*/
#include "bslua.h"
#include "lua/bsl.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

/* ---- functions -------------------------------------------------------------------------------- */

static int l_build(lua_State *L)
{
    lua_pushstring(L, bs_build_info());
    return 1;
}

static int l_features(lua_State *L)
{
    bs_features have;
    bs_features_get(&have);
    lua_createtable(L, 0, 5);
    bsl_setbool(L, "io_uring", have.io_uring);
    bsl_setbool(L, "openblas", have.openblas);
    bsl_setbool(L, "cuda", have.cuda);
    bsl_setbool(L, "pcre2", have.pcre2);
    bsl_setbool(L, "utf8proc", have.utf8proc);
    return 1;
}

static int l_cancelled(lua_State *L)
{
    lua_pushboolean(L, bs_cancelled());
    return 1;
}

static int l_log(lua_State *L)
{
    bs_log(luaL_checkstring(L, 1));
    bsl_flushlog(L);
    return 0;
}

static int l_log_to(lua_State *L)
{
    bsl_setlog(L);
    return 0;
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

/* The status word in the brackets that end a raised message; nil for any other value. */
static int l_code(lua_State *L)
{
    bs_status st = bsl_statusof(L, 1);
    lua_pushstring(L, st == BS_OK ? NULL : bs_status_name(st));
    return 1;
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

/* ---- module ----------------------------------------------------------------------------------- */

static const luaL_Reg functions[] = {{"build", l_build},
                                     {"features", l_features},
                                     {"cancelled", l_cancelled},
                                     {"code", l_code},
                                     {"hash", l_hash},
                                     {"host_bytes", l_host_bytes},
                                     {"host_peak", l_host_peak},
                                     {"log", l_log},
                                     {"log_to", l_log_to},
                                     {"now", l_now},
                                     {"tags", l_tags},
                                     {"traceback", bsl_traceback},
                                     {NULL, NULL}};

static void open_core(lua_State *L)
{
    luaL_setfuncs(L, functions, 0);
    lua_createtable(L, 0, 7);
    bsl_setint(L, "done", BSLUA_EXIT_DONE);
    bsl_setint(L, "error", BSLUA_EXIT_ERROR);
    bsl_setint(L, "usage", BSLUA_EXIT_USAGE);
    bsl_setint(L, "plan", BSLUA_EXIT_PLAN);
    bsl_setint(L, "data", BSLUA_EXIT_DATA);
    bsl_setint(L, "nonfinite", BSLUA_EXIT_NONFINITE);
    bsl_setint(L, "selftest", BSLUA_EXIT_SELFTEST);
    lua_setfield(L, -2, "exit");
    lua_pushstring(L, bs_version());
    lua_setfield(L, -2, "version");
    bsl_openlog(L);
}

int luaopen_bs(lua_State *L)
{
    static const char module_key;
    luaL_checkversion(L);
    if (lua_rawgetp(L, LUA_REGISTRYINDEX, &module_key) == LUA_TTABLE)
        return 1;
    lua_newtable(L);
    open_core(L);
    bsl_open_json(L);
    bsl_open_system(L);
    bsl_open_array(L);
    bsl_open_file(L);
    bsl_open_folder(L);
    bsl_open_manifest(L);
    bsl_open_placement(L);
    bsl_open_engine(L);
    bsl_open_store(L);
    bsl_open_params(L);
    bsl_open_tensor(L);
    bsl_open_routing(L);
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
