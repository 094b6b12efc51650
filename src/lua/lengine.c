/* SPDX-License-Identifier: Apache-2.0 */
/*
** lengine.c: bs.device, bs.engine, its scopes, and bs.batch. A scope is an object of its own so that a
** <close> variable ends it; it also ends with its engine or batch. Micro-batches are counted from 0.
*/
#include "lua/bsl.h"

#include <limits.h>

/* ---- device --------------------------------------------------------------------------------- */

static int l_device_open(lua_State *L)
{
    static const bsl_option options[] = {
        {"threads", BSL_INT, offsetof(bs_dev_cfg, threads), false},
        {"jitter_us", BSL_UINT, offsetof(bs_dev_cfg, jitter_us), false},
        {"jitter_seed", BSL_U64, offsetof(bs_dev_cfg, jitter_seed), false},
        {"drop_wait", BSL_STR, offsetof(bs_dev_cfg, drop_wait), false},
        {"fail_call", BSL_U64, offsetof(bs_dev_cfg, fail_call), false},
        {"fail_pin", BSL_U64, offsetof(bs_dev_cfg, fail_pin), false},
        {"device_left", BSL_SIZE, offsetof(bs_dev_cfg, device_left), false},
        {"workspace_bytes", BSL_SIZE, offsetof(bs_dev_cfg, workspace_bytes), false},
        {NULL, BSL_ANY, 0, false}};
    bs_dev_cfg cfg = {0};
    const char *spec = luaL_checkstring(L, 1);
    bsl_options(L, 2, options, &cfg);
    bsl_box *box = bsl_newbox(L, &bsl_device_type);
    bs_dev *dev = NULL;
    bs_status st = bs_dev_open(spec, &cfg, &dev);
    box->h = dev;
    bsl_try(L, st, "bs.device.open");
    return 1;
}

static int l_device_props(lua_State *L)
{
    bs_dev_props p;
    const bs_dev *dev = bsl_check(L, 1, &bsl_device_type);
    bs_dev_props_get(dev, &p);
    lua_createtable(L, 0, 6);
    bsl_setstr(L, "name", p.name);
    bsl_setbool(L, "executes", p.executes);
    bsl_setbool(L, "bf16", p.bf16);
    bsl_setint(L, "alignment", (lua_Integer)p.alignment);
    bsl_setint(L, "total_bytes", (lua_Integer)p.total_bytes);
    bsl_setint(L, "workspace_bytes", (lua_Integer)p.workspace_bytes);
    bsl_setint(L, "unpinned_bytes", (lua_Integer)p.unpinned_bytes);
    return 1;
}

static int l_device_violations(lua_State *L)
{
    const char *text = NULL;
    lua_pushinteger(L, bs_dev_violations(bsl_check(L, 1, &bsl_device_type), &text));
    lua_pushstring(L, text ? text : "");
    return 2;
}

static int l_device_profile(lua_State *L)
{
    bs_dev *dev = bsl_check(L, 1, &bsl_device_type);
    const bs_profile_row *row = NULL;
    int n = 0;
    if (!lua_isnoneornil(L, 2)) {
        luaL_checktype(L, 2, LUA_TBOOLEAN);
        bsl_try(L, bs_dev_profile(dev, lua_toboolean(L, 2)), "bs.device:profile");
        return 0;
    }
    bsl_try(L, bs_dev_profile_read(dev, &row, &n), "bs.device:profile");
    lua_createtable(L, n, 0);
    for (int i = 0; i < n; i++) {
        lua_createtable(L, 0, 4);
        bsl_setstr(L, "op", row[i].op);
        bsl_setstr(L, "label", row[i].label);
        bsl_setint(L, "calls", (lua_Integer)row[i].calls);
        lua_pushnumber(L, row[i].seconds);
        lua_setfield(L, -2, "seconds");
        lua_rawseti(L, -2, i + 1);
    }
    return 1;
}

/* ---- engine --------------------------------------------------------------------------------- */

static bs_engine *check_engine(lua_State *L)
{
    return bsl_check(L, 1, &bsl_engine_type);
}

static int l_engine_open(lua_State *L)
{
    typedef struct args {
        bs_engine_cfg cfg;
        const char *compute;
    } args;
    static const bsl_option spec[] = {
        {"device", BSL_ANY, 0, true},
        {"compute", BSL_STR, offsetof(args, compute), false},
        {"pool_bytes", BSL_SIZE, offsetof(args, cfg.pool_bytes), false},
        {"expand_bytes", BSL_SIZE, offsetof(args, cfg.expand_bytes), false},
        {"workspace_bytes", BSL_SIZE, offsetof(args, cfg.workspace_bytes), false},
        {"n_blocks", BSL_INT, offsetof(args, cfg.n_blocks), false},
        {"seed", BSL_U64, offsetof(args, cfg.seed), false},
        {NULL, BSL_ANY, 0, false}};
    args a = {.compute = "f32"};
    bsl_options(L, 1, spec, &a);
    if (!bs_dtype_parse(a.compute, &a.cfg.compute))
        luaL_argerror(L, 1, lua_pushfstring(L, "option 'compute': unknown dtype '%s'", a.compute));
    a.cfg.dev = bsl_optionbox(L, 1, "device", &bsl_device_type, true);
    int device = lua_gettop(L);
    bsl_box *box = bsl_newbox(L, &bsl_engine_type);
    bsl_borrow(L, box, 0, device);
    bs_engine *e = NULL;
    bs_status st = bs_engine_open(&a.cfg, &e);
    box->h = e;
    bsl_try(L, st, "bs.engine.open");
    return 1;
}

static int l_engine_stats(lua_State *L)
{
    bs_engine_stats s;
    bs_engine_stats_get(check_engine(L), &s);
    lua_createtable(L, 0, 6);
    bsl_setint(L, "pool_bytes", (lua_Integer)s.pool_bytes);
    bsl_setint(L, "fixed_bytes", (lua_Integer)s.fixed_bytes);
    bsl_setint(L, "arena_now", (lua_Integer)s.arena_now);
    bsl_setint(L, "arena_peak", (lua_Integer)s.arena_peak);
    bsl_setint(L, "peak_bytes", (lua_Integer)s.peak_bytes);
    bsl_setint(L, "launches", (lua_Integer)s.launches);
    return 1;
}

static int l_engine_wait_all(lua_State *L)
{
    bsl_try(L, bs_engine_wait_all(check_engine(L)), "bs.engine.wait_all");
    return 0;
}

static int l_engine_wait(lua_State *L)
{
    bsl_try(L, bs_engine_wait(check_engine(L)), "bs.engine.wait");
    return 0;
}

static int l_engine_seal(lua_State *L)
{
    bsl_try(L, bs_engine_seal(check_engine(L)), "bs.engine.seal");
    return 0;
}

/* ---- scope: its handle is the engine's ---------------------------------------------------------- */

static int l_engine_scope(lua_State *L)
{
    static const bsl_option spec[] = {{"label", BSL_STR, offsetof(bs_scope_cfg, label), false},
                                      {"batch", BSL_ANY, 0, false},
                                      {"routing", BSL_ANY, 0, false},
                                      {"begin", BSL_I64, offsetof(bs_scope_cfg, begin), false},
                                      {"rows", BSL_I64, offsetof(bs_scope_cfg, rows), false},
                                      {"micro", BSL_INT, offsetof(bs_scope_cfg, micro), false},
                                      {"tape", BSL_BOOL, offsetof(bs_scope_cfg, tape), false},
                                      {"train", BSL_BOOL, offsetof(bs_scope_cfg, train), false},
                                      {"step", BSL_I64, offsetof(bs_scope_cfg, step), false},
                                      {NULL, BSL_ANY, 0, false}};
    bs_scope_cfg cfg = {.label = "scope"};
    bs_engine *e = check_engine(L);
    bsl_options(L, 2, spec, &cfg);
    lua_settop(L, 2);
    if (lua_isnil(L, 2))
        lua_pushnil(L);
    else if (!(cfg.routing = bsl_optionbox(L, 2, "routing", &bsl_routing_type, false))) {
        lua_pop(L, 1);
        cfg.batch = bsl_optionbox(L, 2, "batch", &bsl_batch_type, false);
    }
    bsl_box *box = bsl_newbox(L, &bsl_scope_type);
    bsl_borrow(L, box, 0, 1);
    bsl_borrow(L, box, 1, 3);
    bsl_scope(L, 1, cfg.label);
    box->scope = ++bsl_checkbox(L, 1, &bsl_engine_type)->scope;
    bs_status st = bs_scope_open(e, &cfg);
    if (st == BS_OK) {
        box->h = e;
        bsl_checkbox(L, 1, &bsl_engine_type)->open = box;
    }
    bsl_try(L, st, "bs.engine.scope");
    return 1;
}

/* scope:keep(tensors ...): sets the scope aside for its backward pass; this handle and all tensors end. */
static int l_scope_keep(lua_State *L)
{
    bs_engine *e = bsl_check(L, 1, &bsl_scope_type);
    int n = lua_gettop(L) - 1;
    bs_tensor **t = lua_newuserdatauv(L, ((size_t)n + 1) * sizeof *t, 0);
    for (int i = 0; i < n; i++)
        t[i] = bsl_checktensor(L, 2 + i);
    lua_getiuservalue(L, 1, 1);
    lua_getiuservalue(L, 1, 2);
    bsl_box *box = bsl_newbox(L, &bsl_kept_type);
    bsl_borrow(L, box, 0, n + 3);
    bsl_borrow(L, box, 1, n + 4);
    bs_kept *kept = NULL;
    bs_status st = bs_scope_keep(e, n, t, &kept);
    box->h = kept;
    bsl_try(L, st, "bs.scope.keep");
    bsl_box *scope = bsl_checkbox(L, 1, &bsl_scope_type);
    scope->h = NULL; /* it is no longer the open one */
    bsl_close(scope);
    return 1;
}

/* kept:resume() -> scope, tensors ... */
static int l_kept_resume(lua_State *L)
{
    bs_kept *kept = bsl_check(L, 1, &bsl_kept_type);
    bsl_box *from = bsl_checkbox(L, 1, &bsl_kept_type);
    int n = bs_kept_count(kept);
    luaL_checkstack(L, n + 8, "tensors of a scope");
    lua_getiuservalue(L, 1, 1);
    lua_getiuservalue(L, 1, 2);
    bsl_box *engine = lua_touserdata(L, 2);
    bs_tensor **t = lua_newuserdatauv(L, ((size_t)n + 1) * sizeof *t, 0);
    bsl_box *box = bsl_newbox(L, &bsl_scope_type);
    bsl_borrow(L, box, 0, 2);
    bsl_borrow(L, box, 1, 3);
    bsl_scope(L, 2, bs_kept_label(kept));
    bsl_box **tensor = lua_newuserdatauv(L, ((size_t)n + 1) * sizeof *tensor, 0);
    for (int i = 0; i < n; i++) { /* made before: what follows cannot fail half-way */
        tensor[i] = bsl_newbox(L, &bsl_tensor_type);
        bsl_borrow(L, tensor[i], 0, 5);
    }
    box->scope = ++engine->scope;
    bsl_try(L, bs_scope_resume(kept, t), "bs.kept.resume");
    from->h = NULL;
    bsl_close(from);
    box->h = engine->h;
    engine->open = box;
    for (int i = 0; i < n; i++)
        tensor[i]->h = t[i];
    lua_remove(L, 6);
    return n + 1;
}

static int l_scope_hash(lua_State *L)
{
    lua_pushinteger(L, (lua_Integer)bs_scope_hash(bsl_check(L, 1, &bsl_scope_type)));
    return 1;
}

/* scope:backward{ {output, gradient}, ... } */
static int l_scope_backward(lua_State *L)
{
    bs_engine *e = bsl_check(L, 1, &bsl_scope_type);
    luaL_checktype(L, 2, LUA_TTABLE);
    lua_settop(L, 2);
    size_t n = lua_rawlen(L, 2);
    luaL_argcheck(L, n <= INT_MAX / 2, 2, "too many pairs");
    bs_tensor **t = lua_newuserdatauv(L, (2 * n + 1) * sizeof *t, 0);
    for (size_t i = 0; i < n; i++) {
        if (lua_rawgeti(L, 2, (lua_Integer)i + 1) != LUA_TTABLE)
            luaL_argerror(L, 2,
                          lua_pushfstring(L, "entry %d: {output, gradient} expected", (int)i + 1));
        for (size_t k = 0; k < 2; k++) {
            lua_rawgeti(L, 4, (lua_Integer)k + 1);
            const bsl_box *box = luaL_testudata(L, -1, bsl_tensor_type.name);
            if (!box || !box->h)
                luaL_argerror(L, 2,
                              lua_pushfstring(L, "entry %d: %s is not an open tensor", (int)i + 1,
                                              k == 0 ? "the output" : "the gradient"));
            else
                t[k * n + i] = box->h;
        }
        lua_settop(L, 3); /* the tables keep the tensors */
    }
    bsl_try(L, bs_scope_backward(e, (int)n, t, t + n), "bs.scope.backward");
    return 0;
}

/* ---- batch ---------------------------------------------------------------------------------- */

static bs_batch *check_batch(lua_State *L)
{
    return bsl_check(L, 1, &bsl_batch_type);
}

static int l_batch_open(lua_State *L)
{
    bs_batch_cfg cfg;
    bs_engine *e = bsl_check(L, 1, &bsl_engine_type);
    bsl_batchcfg(L, 2, &cfg);
    bsl_box *box = bsl_newbox(L, &bsl_batch_type);
    bsl_borrow(L, box, 0, 1);
    bs_batch *b = NULL;
    bs_status st = bs_batch_open(e, &cfg, &b);
    box->h = b;
    bsl_try(L, st, "bs.batch.open");
    return 1;
}

/* A list of n integers from a field of the table at arg; NULL when it is optional and absent. */
static const int64_t *list_field(lua_State *L, const char *field, bool required, int64_t n)
{
    int64_t got = 0;
    if (lua_getfield(L, 3, field) == LUA_TNIL && !required)
        return NULL;
    const int64_t *v = bsl_integers(L, 3, -1, field, &got);
    if (got != n)
        luaL_argerror(L, 3,
                      lua_pushfstring(L, "'%s' has %I entries, %I expected", field, (LUAI_UACINT)got,
                                      (LUAI_UACINT)n));
    return v;
}

/* b:set(j, {row_len =, ids =, labels =, row_id =, start =}): lists, or i64 arrays. */
static int l_batch_set(lua_State *L)
{
    static const bsl_option spec[] = {{"row_len", BSL_ANY, 0, true}, {"ids", BSL_ANY, 0, true},
                                      {"labels", BSL_ANY, 0, false}, {"row_id", BSL_ANY, 0, false},
                                      {"start", BSL_ANY, 0, false},  {NULL, BSL_ANY, 0, false}};
    bs_batch *b = check_batch(L);
    int j = bsl_checkint(L, 2, 0, INT_MAX);
    bs_micro m = {0};
    int64_t total = 0;
    bsl_options(L, 3, spec, &m);
    lua_getfield(L, 3, "row_len");
    m.row_len = bsl_integers(L, 3, -1, "row_len", &m.n_rows);
    for (int64_t i = 0; i < m.n_rows; i++)
        if (m.row_len[i] < 0 || __builtin_add_overflow(total, m.row_len[i], &total))
            luaL_argerror(L, 3, "'row_len': a row of negative or absurd length");
    m.ids = list_field(L, "ids", true, total);
    m.labels = list_field(L, "labels", false, total);
    m.row_id = list_field(L, "row_id", false, m.n_rows);
    m.start = list_field(L, "start", false, m.n_rows);
    bsl_try(L, bs_batch_set(b, j, &m), "bs.batch.set");
    return 0;
}

static int l_batch_begin(lua_State *L)
{
    bs_batch *b = check_batch(L);
    bsl_try(L, bs_batch_begin(b, bsl_checkint(L, 2, 0, INT_MAX)), "bs.batch.begin");
    return 0;
}

static int l_batch_tokens(lua_State *L)
{
    const bs_batch *b = check_batch(L);
    lua_pushinteger(L, bs_batch_tokens(b, bsl_checkint(L, 2, 0, INT_MAX)));
    return 1;
}

static int l_batch_longest(lua_State *L)
{
    const bs_batch *b = check_batch(L);
    lua_pushinteger(L, bs_batch_longest(b, bsl_checkint(L, 2, 0, INT_MAX)));
    return 1;
}

static int l_batch_labelled(lua_State *L)
{
    const bs_batch *b = check_batch(L);
    lua_pushinteger(L, bs_batch_labelled(b, bsl_checkint(L, 2, 0, INT_MAX)));
    return 1;
}

/* ---- modules ---------------------------------------------------------------------------------- */

static const luaL_Reg device_methods[] = {{"props", l_device_props},
                                          {"violations", l_device_violations},
                                          {"profile", l_device_profile},
                                          {NULL, NULL}};
static const luaL_Reg engine_methods[] = {{"scope", l_engine_scope}, {"seal", l_engine_seal},
                                          {"stats", l_engine_stats}, {"wait_all", l_engine_wait_all},
                                          {"wait", l_engine_wait},   {NULL, NULL}};
static const luaL_Reg scope_methods[] = {
    {"backward", l_scope_backward}, {"hash", l_scope_hash}, {"keep", l_scope_keep}, {NULL, NULL}};
static const luaL_Reg kept_methods[] = {{"resume", l_kept_resume}, {NULL, NULL}};
static const luaL_Reg batch_methods[] = {{"begin", l_batch_begin},     {"labelled", l_batch_labelled},
                                         {"longest", l_batch_longest}, {"set", l_batch_set},
                                         {"tokens", l_batch_tokens},   {NULL, NULL}};

static void add_module(lua_State *L, const char *name, lua_CFunction open)
{
    lua_createtable(L, 0, 1);
    lua_pushcfunction(L, open);
    lua_setfield(L, -2, "open");
    lua_setfield(L, -2, name);
}

void bsl_open_engine(lua_State *L)
{
    bsl_newtype(L, &bsl_device_type, device_methods, NULL);
    bsl_newtype(L, &bsl_engine_type, engine_methods, NULL);
    bsl_newtype(L, &bsl_scope_type, scope_methods, NULL);
    bsl_newtype(L, &bsl_kept_type, kept_methods, NULL);
    bsl_newtype(L, &bsl_batch_type, batch_methods, NULL);
    add_module(L, "device", l_device_open);
    add_module(L, "engine", l_engine_open);
    add_module(L, "batch", l_batch_open);
}
