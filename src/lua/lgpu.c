/* SPDX-License-Identifier: Apache-2.0 */
/*
** lgpu.c: bs.gpu.status, what there is to say about the machine's GPU.
*/
#include "lua/bsl.h"

static void set_integer(lua_State *L, const char *field, uint64_t v)
{
    if (v)
        bsl_setint(L, field, (lua_Integer)v);
}

static void set_text(lua_State *L, const char *field, const char *s)
{
    if (*s)
        bsl_setstr(L, field, s);
}

static void set_number(lua_State *L, const char *field, double v)
{
    if (v > 0)
        bsl_setnum(L, field, v);
}

/* 13.0 of 13000 */
static void set_version(lua_State *L, const char *field, int v)
{
    if (v > 0) {
        lua_pushfstring(L, "%d.%d", v / 1000, v % 1000 / 10);
        lua_setfield(L, -2, field);
    }
}

/* bs.gpu.status() -> the fields of bs_gpu; what is not known is absent */
static int l_status(lua_State *L)
{
    bs_gpu g;
    bs_gpu_get(&g);
    lua_createtable(L, 0, 24);
    bsl_setbool(L, "built", g.built);
    bsl_setbool(L, "nvml", g.nvml);
    set_text(L, "compiled", g.compiled);
    set_version(L, "cuda_runtime", g.cuda_runtime);
    set_version(L, "cuda_driver", g.cuda_driver);
    if (g.major) {
        lua_pushfstring(L, "%d.%d", g.major, g.minor);
        lua_setfield(L, -2, "capability");
    }
    set_text(L, "blas", g.blas);
    set_text(L, "name", g.name);
    set_text(L, "driver", g.driver);
    set_integer(L, "before_bytes", g.before_bytes);
    set_integer(L, "context_bytes", g.context_bytes);
    set_integer(L, "total_bytes", g.total_bytes);
    set_integer(L, "used_bytes", g.used_bytes);
    set_integer(L, "free_bytes", g.free_bytes);
    set_integer(L, "own_bytes", g.own_bytes);
    set_integer(L, "held_bytes", g.held_bytes);
    set_integer(L, "processes", (uint64_t)g.processes);
    set_number(L, "power_w", g.power_w);
    set_number(L, "power_limit_w", g.power_limit_w);
    set_integer(L, "sm_mhz", (uint64_t)g.sm_mhz);
    set_integer(L, "sm_most_mhz", (uint64_t)g.sm_most_mhz);
    set_integer(L, "memory_mhz", (uint64_t)g.memory_mhz);
    set_integer(L, "pcie_generation", (uint64_t)g.pcie_generation);
    set_integer(L, "pcie_width", (uint64_t)g.pcie_width);
    return 1;
}

void bsl_open_gpu(lua_State *L)
{
    static const luaL_Reg functions[] = {{"status", l_status}, {NULL, NULL}};
    luaL_newlib(L, functions);
    lua_setfield(L, -2, "gpu");
}
