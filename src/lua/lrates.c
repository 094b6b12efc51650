/* SPDX-License-Identifier: Apache-2.0 */
/*
** lrates.c: bs.rates, the speed of a machine's parts, each measured alone: copy, gemm, read.
*/
#include "lua/bsl.h"

#include <limits.h>

/* bs.rates.copy(device, {bytes =, n =, out =}) -> seconds of one copy */
static int l_copy(lua_State *L)
{
    typedef struct args {
        size_t bytes;
        int n;
        bool out;
    } args;
    static const bsl_option spec[] = {{"bytes", BSL_SIZE, offsetof(args, bytes), true},
                                      {"n", BSL_INT, offsetof(args, n), false},
                                      {"out", BSL_BOOL, offsetof(args, out), false},
                                      {NULL, BSL_ANY, 0, false}};
    args a = {.n = 1};
    double seconds = 0;
    bs_dev *dev = bsl_check(L, 1, &bsl_device_type);
    bsl_options(L, 2, spec, &a);
    bsl_try(L, bs_rate_copy(dev, a.out, a.bytes, a.n, &seconds), "bs.rates.copy");
    lua_pushnumber(L, seconds);
    return 1;
}

/* bs.rates.gemm(device, {dtype =, m =, n =, k =, repeat =}) -> seconds of y [m,n] = x [m,k] w [n,k]^T */
static int l_gemm(lua_State *L)
{
    typedef struct args {
        const char *dtype;
        int64_t m, n, k;
        int repeat;
    } args;
    static const bsl_option spec[] = {{"dtype", BSL_STR, offsetof(args, dtype), false},
                                      {"m", BSL_I64, offsetof(args, m), true},
                                      {"n", BSL_I64, offsetof(args, n), true},
                                      {"k", BSL_I64, offsetof(args, k), true},
                                      {"repeat", BSL_INT, offsetof(args, repeat), false},
                                      {NULL, BSL_ANY, 0, false}};
    args a = {.dtype = "f32", .repeat = 1};
    bs_dtype t = BS_DTYPE_F32;
    double seconds = 0;
    bs_dev *dev = bsl_check(L, 1, &bsl_device_type);
    bsl_options(L, 2, spec, &a);
    if (!bs_dtype_parse(a.dtype, &t))
        luaL_argerror(L, 2, lua_pushfstring(L, "option 'dtype': unknown dtype '%s'", a.dtype));
    bsl_try(L, bs_rate_gemm(dev, t, a.m, a.n, a.k, a.repeat, &seconds), "bs.rates.gemm");
    lua_pushnumber(L, seconds);
    return 1;
}

/* bs.rates.read(device, manifest, {block, ...} [, io]) -> {bytes =, seconds =, io =} */
static int l_read(lua_State *L)
{
    int64_t n = 0;
    bs_io_cfg io = {0};
    bs_read_rate r = {0};
    bs_dev *dev = bsl_check(L, 1, &bsl_device_type);
    const bs_manifest *m = bsl_check(L, 2, &bsl_manifest_type);
    bsl_options(L, 4, bsl_io_options, &io);
    const int64_t *list = bsl_integers(L, 3, 3, "blocks", &n);
    luaL_argcheck(L, n < INT_MAX, 3, "too many blocks");
    int *block = lua_newuserdatauv(L, ((size_t)n + 1) * sizeof *block, 0);
    for (int64_t i = 0; i < n; i++) {
        luaL_argcheck(L, list[i] >= 0 && list[i] < bs_manifest_blocks(m), 3,
                      "no such block in the manifest");
        block[i] = (int)list[i];
    }
    bsl_try(L, bs_rate_read(dev, m, (int)n, block, &io, &r), "bs.rates.read");
    lua_createtable(L, 0, 3);
    bsl_setint(L, "bytes", (lua_Integer)r.bytes);
    bsl_setnum(L, "seconds", r.seconds);
    bsl_setstr(L, "io", r.io);
    return 1;
}

void bsl_open_rates(lua_State *L)
{
    static const luaL_Reg functions[] = {
        {"copy", l_copy}, {"gemm", l_gemm}, {"read", l_read}, {NULL, NULL}};
    luaL_newlib(L, functions);
    lua_setfield(L, -2, "rates");
}
