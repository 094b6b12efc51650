/* SPDX-License-Identifier: Apache-2.0 */
/*
** lplacement.c: bs.placement. A placement is data that a script hands down: a home per block and the program of
** visits; libbs checks and freezes it. Blocks and visits are counted from 0 as in bs.h.
*/
#include "lua/bsl.h"

static bs_placement *check(lua_State *L)
{
    return bsl_check(L, 1, &bsl_placement_type);
}

static bs_home check_home(lua_State *L, int block)
{
    const char *field = lua_pushfstring(L, "homes[%d]", block);
    if (lua_type(L, -2) != LUA_TSTRING)
        luaL_argerror(L, 1,
                      lua_pushfstring(L, "%s: string expected, got %s", field, luaL_typename(L, -2)));
    bs_home home = (bs_home)bsl_word(L, 1, field, lua_tostring(L, -2), bsl_home_words);
    lua_pop(L, 1);
    return home;
}

/* The homes of all blocks from option "homes", as scratch that stays on the stack. */
static const bs_home *read_homes(lua_State *L, int blocks)
{
    if (lua_getfield(L, 1, "homes") != LUA_TTABLE)
        bsl_optionerror(L, 1, "homes", "table");
    bs_home *home = lua_newuserdatauv(L, ((size_t)blocks + 1) * sizeof *home, 0);
    for (int i = 0; i < blocks; i++) {
        lua_rawgeti(L, -2, i);
        home[i] = check_home(L, i);
        lua_pop(L, 1);
    }
    lua_pushnil(L);
    while (lua_next(L, -3)) {
        lua_Integer block = lua_isinteger(L, -2) ? lua_tointeger(L, -2) : -1;
        if (block < 0 || block >= blocks)
            luaL_argerror(L, 1,
                          lua_pushfstring(L, "homes[%s]: not one of the %d blocks",
                                          luaL_tolstring(L, -2, NULL), blocks));
        lua_pop(L, 1);
    }
    return home;
}

static int l_new(lua_State *L)
{
    static const bsl_option spec[] = {
        {"manifest", BSL_ANY, 0, true},
        {"homes", BSL_ANY, 0, true},
        {"dev_slots", BSL_INT, offsetof(bs_placement_cfg, dev_slots), false},
        {"host_slots", BSL_INT, offsetof(bs_placement_cfg, host_slots), false},
        {"program", BSL_ANY, 0, true},
        {"cyclic", BSL_BOOL, offsetof(bs_placement_cfg, cyclic), false},
        {NULL, BSL_ANY, 0, false}};
    bs_placement_cfg cfg = {0};
    bsl_options(L, 1, spec, &cfg);
    cfg.manifest = bsl_optionbox(L, 1, "manifest", &bsl_manifest_type, true);
    int manifest = lua_gettop(L);
    cfg.home = read_homes(L, bs_manifest_blocks(cfg.manifest));
    lua_getfield(L, 1, "program");
    cfg.program = bsl_visits(L, 1, -1, &cfg.n_visits);
    bsl_box *box = bsl_newbox(L, &bsl_placement_type);
    bsl_borrow(L, box, 0, manifest);
    bs_placement *p = NULL;
    bs_status st = bs_placement_new(&cfg, &p);
    box->h = p;
    bsl_try(L, st, "bs.placement.new");
    return 1;
}

static int l_bytes(lua_State *L)
{
    bs_edge_bytes b;
    const bs_placement *p = check(L);
    bs_placement_bytes(p, lua_toboolean(L, 2), &b);
    lua_createtable(L, 0, 5);
    bsl_setint(L, "disk_payload", (lua_Integer)b.disk_payload);
    bsl_setint(L, "disk_read", (lua_Integer)b.disk_read);
    bsl_setint(L, "link", (lua_Integer)b.link);
    bsl_setint(L, "loads", (lua_Integer)b.loads);
    bsl_setint(L, "reads", (lua_Integer)b.reads);
    return 1;
}

static int l_transfers(lua_State *L)
{
    const bs_placement *p = check(L);
    bool warm = lua_toboolean(L, 2);
    int n = bs_placement_visits(p);
    lua_createtable(L, n, 0);
    for (int i = 0; i < n; i++) {
        const bs_transfer *t = bs_placement_transfer(p, warm, i);
        lua_createtable(L, 0, 6);
        bsl_setint(L, "block", t->block);
        bsl_setint(L, "dev_slot", t->dev_slot);
        bsl_setint(L, "host_slot", t->host_slot);
        bsl_setbool(L, "load", t->load);
        bsl_setbool(L, "read", t->read);
        bsl_setint(L, "slot_free_after", t->slot_free_after);
        lua_rawseti(L, -2, i + 1);
    }
    return 1;
}

static int l_device_bytes(lua_State *L)
{
    lua_pushinteger(L, (lua_Integer)bs_placement_device_bytes(check(L)));
    return 1;
}

static int l_host_bytes(lua_State *L)
{
    lua_pushinteger(L, (lua_Integer)bs_placement_host_bytes(check(L)));
    return 1;
}

static int l_slot_bytes(lua_State *L)
{
    lua_pushinteger(L, (lua_Integer)bs_placement_slot_bytes(check(L)));
    return 1;
}

static int l_host_slot_bytes(lua_State *L)
{
    lua_pushinteger(L, (lua_Integer)bs_placement_host_slot_bytes(check(L)));
    return 1;
}

static const luaL_Reg methods[] = {{"bytes", l_bytes},
                                   {"device_bytes", l_device_bytes},
                                   {"host_bytes", l_host_bytes},
                                   {"host_slot_bytes", l_host_slot_bytes},
                                   {"slot_bytes", l_slot_bytes},
                                   {"transfers", l_transfers},
                                   {NULL, NULL}};
static const luaL_Reg functions[] = {{"new", l_new}, {NULL, NULL}};

void bsl_open_placement(lua_State *L)
{
    bsl_newtype(L, &bsl_placement_type, methods, NULL);
    luaL_newlib(L, functions);
    lua_setfield(L, -2, "placement");
}
