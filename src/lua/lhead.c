/* SPDX-License-Identifier: Apache-2.0 */
/*
** lhead.c: bs.head, the loss over vocabulary tiles. Vocabulary entries and micro-batches are counted
** from 0.
*/
#include "lua/bsl.h"

#include <limits.h>

static void close_head(void *h)
{
    bs_head_close(h);
}

static const bsl_type head_type = {"bs.head", close_head, 2, 0};

static const bsl_option options[] = {{"batch", BSL_ANY, 0, false},
                                     {"channels", BSL_I64, offsetof(bs_head_cfg, channels), true},
                                     {"vocab", BSL_I64, offsetof(bs_head_cfg, vocab), true},
                                     {"softcap", BSL_NUM, offsetof(bs_head_cfg, softcap), false},
                                     {"tile_rows", BSL_I64, offsetof(bs_head_cfg, tile_rows), true},
                                     {"logits", BSL_BOOL, offsetof(bs_head_cfg, logits), false},
                                     {NULL, BSL_ANY, 0, false}};

static bs_head *check(lua_State *L)
{
    return bsl_check(L, 1, &head_type);
}

static int check_micro(lua_State *L)
{
    return bsl_checkint(L, 2, 0, INT_MAX);
}

static int l_open(lua_State *L)
{
    bs_head_cfg cfg = {0};
    bs_engine *e = bsl_check(L, 1, &bsl_engine_type);
    luaL_checktype(L, 2, LUA_TTABLE);
    bsl_options(L, 2, options, &cfg);
    cfg.batch = bsl_optionbox(L, 2, "batch", &bsl_batch_type, true);
    int batch = lua_gettop(L);
    bsl_box *box = bsl_newbox(L, &head_type);
    bsl_borrow(L, box, 0, 1);
    bsl_borrow(L, box, 1, batch);
    bs_head *h = NULL;
    bs_status st = bs_head_open(e, &cfg, &h);
    box->h = h;
    bsl_try(L, st, "bs.head.open");
    return 1;
}

/* bs.head.bytes({micros =, tokens =, rows =}, options of open [, the engine's dtype]) -> bytes */
static int l_bytes(lua_State *L)
{
    bs_batch_cfg batch;
    bs_head_cfg cfg = {0};
    size_t device = 0;
    bsl_batchcfg(L, 1, &batch);
    bsl_options(L, 2, options, &cfg);
    bs_dtype compute = lua_isnoneornil(L, 3) ? BS_DTYPE_F32 : bsl_checkdtype(L, 3);
    bsl_try(L, bs_head_bytes(&batch, &cfg, compute, &device), "bs.head.bytes");
    lua_pushinteger(L, (lua_Integer)device);
    return 1;
}

/* h:begin("train" | "loss" | "logits" | "last", labelled tokens of the step) */
static int l_begin(lua_State *L)
{
    static const char *const modes[] = {"train", "loss", "logits", "last", NULL};
    bs_head *h = check(L);
    bs_head_mode mode = (bs_head_mode)luaL_checkoption(L, 2, NULL, modes);
    int64_t count = bsl_checkcount(L, 3);
    bsl_try(L, bs_head_begin(h, mode, count), "bs.head.begin");
    return 0;
}

static int l_put(lua_State *L)
{
    bs_head *h = check(L);
    int micro = check_micro(L);
    bsl_try(L, bs_head_put(h, micro, bsl_checktensor(L, 3)), "bs.head.put");
    return 0;
}

/* h:tile(micro, tile, first [, bias]) */
static int l_tile(lua_State *L)
{
    bs_head *h = check(L);
    int micro = check_micro(L);
    bs_weight *w = bsl_check(L, 3, &bsl_weight_type);
    int64_t first = bsl_checkcount(L, 4);
    bs_weight *bias = bsl_opt(L, 5, &bsl_weight_type);
    bsl_try(L, bs_head_tile(h, micro, w, bias, first), "bs.head.tile");
    return 0;
}

static int l_tile_grad(lua_State *L)
{
    bs_head *h = check(L);
    int micro = check_micro(L);
    bs_weight *w = bsl_check(L, 3, &bsl_weight_type);
    int64_t first = bsl_checkcount(L, 4);
    bs_weight *bias = bsl_opt(L, 5, &bsl_weight_type);
    bsl_try(L, bs_head_tile_grad(h, micro, w, bias, first), "bs.head.tile_grad");
    return 0;
}

/* The gradient of the rows put, as a tensor of the open scope; nil when not training. */
static int l_finish(lua_State *L)
{
    bs_head *h = check(L);
    int micro = check_micro(L);
    bsl_box *box = bsl_newtensor(L, 1);
    bs_tensor *dx = NULL;
    bs_status st = bs_head_finish(h, micro, &dx);
    box->h = dx;
    bsl_try(L, st, "bs.head.finish");
    if (!dx)
        lua_pushnil(L);
    return 1;
}

static int l_loss(lua_State *L)
{
    double loss = 0;
    bsl_try(L, bs_head_loss(check(L), &loss), "bs.head.loss");
    lua_pushnumber(L, loss);
    return 1;
}

static int l_logits(lua_State *L)
{
    bs_head *h = check(L);
    int micro = check_micro(L);
    bsl_box *box = bsl_newarray(L);
    bs_array *a = NULL;
    bs_status st = bs_head_logits(h, micro, &a);
    box->h = a;
    bsl_try(L, st, "bs.head.logits");
    return 1;
}

static const luaL_Reg methods[] = {
    {"begin", l_begin}, {"finish", l_finish}, {"logits", l_logits},       {"loss", l_loss},
    {"put", l_put},     {"tile", l_tile},     {"tile_grad", l_tile_grad}, {NULL, NULL}};
static const luaL_Reg functions[] = {{"bytes", l_bytes}, {"open", l_open}, {NULL, NULL}};

void bsl_open_head(lua_State *L)
{
    bsl_newtype(L, &head_type, methods, NULL);
    luaL_newlib(L, functions);
    lua_setfield(L, -2, "head");
}
