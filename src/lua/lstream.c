/* SPDX-License-Identifier: Apache-2.0 */
/*
** lstream.c: bs.stream, the block streamer as the driver calls it. kind, layer and stage of a visit are
** the driver's own integers.
*/
#include "lua/bsl.h"

#include <limits.h>

static bs_stream *check(lua_State *L)
{
    return bsl_check(L, 1, &bsl_stream_type);
}

static int l_open(lua_State *L)
{
    static const bsl_option spec[] = {{"engine", BSL_ANY, 0, true},
                                      {"placement", BSL_ANY, 0, true},
                                      {"io", BSL_ANY, 0, false},
                                      {NULL, BSL_ANY, 0, false}};
    bs_stream_cfg cfg = {0};
    bsl_options(L, 1, spec, &cfg);
    bsl_suboptions(L, 1, "io", bsl_io_options, &cfg.io);
    cfg.engine = bsl_optionbox(L, 1, "engine", &bsl_engine_type, true);
    cfg.placement = bsl_optionbox(L, 1, "placement", &bsl_placement_type, true);
    int placement = lua_gettop(L);
    bsl_box *box = bsl_newbox(L, &bsl_stream_type);
    bsl_borrow(L, box, 0, placement - 1);
    bsl_borrow(L, box, 1, placement);
    bs_stream *s = NULL;
    bs_status st = bs_stream_open(&cfg, &s);
    box->h = s;
    bsl_try(L, st, "bs.stream.open");
    return 1;
}

/* s:push(visits, cyclic) */
static int l_push(lua_State *L)
{
    int n = 0;
    bs_stream *s = check(L);
    bool cyclic = lua_toboolean(L, 3);
    const bs_visit_spec *v = bsl_visits(L, 2, 2, &n);
    bsl_try(L, bs_stream_push(s, v, n, cyclic), "bs.stream.push");
    return 0;
}

static int l_next(lua_State *L)
{
    bs_visit v = {0};
    bsl_try(L, bs_stream_next(check(L), &v), "bs.stream.next");
    lua_createtable(L, 0, 5);
    bsl_setint(L, "block", v.spec.block);
    bsl_setint(L, "kind", v.spec.kind);
    bsl_setint(L, "layer", v.spec.layer);
    bsl_setint(L, "stage", v.spec.stage);
    bsl_setint(L, "serial", v.serial);
    return 1;
}

static int l_end_visit(lua_State *L)
{
    bsl_try(L, bs_stream_end_visit(check(L)), "bs.stream.end_visit");
    return 0;
}

static int l_abort(lua_State *L)
{
    bsl_try(L, bs_stream_abort(check(L)), "bs.stream.abort");
    return 0;
}

static int l_stats(lua_State *L)
{
    bs_stream_stats s;
    bs_stream_stats_get(check(L), &s);
    lua_createtable(L, 0, 19);
    bsl_setint(L, "disk_payload", (lua_Integer)s.disk_payload);
    bsl_setint(L, "disk_read", (lua_Integer)s.disk_read);
    bsl_setint(L, "disk_reread", (lua_Integer)s.disk_reread);
    bsl_setint(L, "link_bytes", (lua_Integer)s.link_bytes);
    bsl_setint(L, "loads", (lua_Integer)s.loads);
    bsl_setint(L, "reads", (lua_Integer)s.reads);
    bsl_setint(L, "hits", (lua_Integer)s.hits);
    bsl_setint(L, "wasted", (lua_Integer)s.wasted);
    bsl_setnum(L, "disk_busy_s", s.disk_busy_s);
    bsl_setnum(L, "stall_disk_s", s.stall_disk_s);
    bsl_setnum(L, "stall_pinned_s", s.stall_pinned_s);
    bsl_setnum(L, "stall_copy_s", s.stall_copy_s);
    bsl_setnum(L, "stall_compute_s", s.stall_compute_s);
    bsl_setint(L, "requests", (lua_Integer)s.requests);
    bsl_setint(L, "fallbacks", (lua_Integer)s.fallbacks);
    bsl_setstr(L, "io", s.io);
    bsl_setint(L, "resident_device", s.resident_device);
    bsl_setint(L, "resident_host", s.resident_host);
    bsl_setint(L, "host_bytes", (lua_Integer)s.host_bytes);
    return 1;
}

static int l_where(lua_State *L)
{
    const bs_stream *s = check(L);
    lua_pushstring(L, bs_stream_where(s, bsl_checkint(L, 2, 0, INT_MAX)));
    return 1;
}

static const luaL_Reg methods[] = {{"abort", l_abort}, {"end_visit", l_end_visit}, {"next", l_next},
                                   {"push", l_push},   {"stats", l_stats},         {"where", l_where},
                                   {NULL, NULL}};
static const luaL_Reg functions[] = {{"open", l_open}, {NULL, NULL}};

void bsl_open_stream(lua_State *L)
{
    bsl_newtype(L, &bsl_stream_type, methods, NULL);
    luaL_newlib(L, functions);
    lua_setfield(L, -2, "stream");
}
