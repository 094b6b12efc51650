/* SPDX-License-Identifier: Apache-2.0 */
/*
** lembedding.c: bs.embedding, tables of which single rows are gathered (embeddings). Keys and micro-batches are
** counted from 0.
*/
#include "lua/bsl.h"

#include <limits.h>

static void close_embedding(void *h)
{
    bs_embedding_close(h);
}

static const bsl_type embedding_type = {"bs.embedding", close_embedding, 3, 0};

static bs_embedding *check(lua_State *L)
{
    return bsl_check(L, 1, &embedding_type);
}

static int l_open(lua_State *L)
{
    struct args {
        int rows;
        const char *home;
    };
    static const bsl_option spec[] = {{"manifest", BSL_ANY, 0, true},
                                      {"rows", BSL_INT, offsetof(struct args, rows), true},
                                      {"home", BSL_STR, offsetof(struct args, home), true},
                                      {"batch", BSL_ANY, 0, true},
                                      {"io", BSL_ANY, 0, false},
                                      {NULL, BSL_ANY, 0, false}};
    struct args a = {0};
    bs_io_cfg io = {0};
    bs_engine *e = bsl_check(L, 1, &bsl_engine_type);
    bsl_options(L, 2, spec, &a);
    bs_home home = (bs_home)bsl_word(L, 2, "option 'home'", a.home, bsl_home_words);
    bsl_suboptions(L, 2, "io", bsl_io_options, &io);
    const bs_manifest *m = bsl_optionbox(L, 2, "manifest", &bsl_manifest_type, true);
    const bs_batch *b = bsl_optionbox(L, 2, "batch", &bsl_batch_type, true);
    int batch = lua_gettop(L);
    bsl_box *box = bsl_newbox(L, &embedding_type);
    bsl_borrow(L, box, 0, 1);
    bsl_borrow(L, box, 1, batch - 1);
    bsl_borrow(L, box, 2, batch);
    bs_embedding *r = NULL;
    bs_status st = bs_embedding_open(e, m, a.rows, home, b, &io, &r);
    box->h = r;
    bsl_try(L, st, "bs.embedding.open");
    return 1;
}

/* bs.embedding.bytes(manifest, rows, home, {micros =, tokens =, rows =}) -> device, host */
static int l_bytes(lua_State *L)
{
    bs_batch_cfg batch;
    size_t device = 0, host = 0;
    const bs_manifest *m = bsl_check(L, 1, &bsl_manifest_type);
    int rows = bsl_checkint(L, 2, 0, INT_MAX);
    bs_home home = (bs_home)luaL_checkoption(L, 3, NULL, bsl_home_words);
    bsl_batchcfg(L, 4, &batch);
    bsl_try(L, bs_embedding_bytes(m, rows, home, &batch, &device, &host), "bs.embedding.bytes");
    lua_pushinteger(L, (lua_Integer)device);
    lua_pushinteger(L, (lua_Integer)host);
    return 2;
}

/* r:gather(store, key, j, scale) */
static int l_gather(lua_State *L)
{
    bs_embedding *r = check(L);
    bs_store *s = bsl_check(L, 2, &bsl_store_type);
    int key = bsl_checkint(L, 3, 0, INT_MAX), micro = bsl_checkint(L, 4, 0, INT_MAX);
    double scale = luaL_optnumber(L, 5, 1.0);
    bsl_try(L, bs_embedding_gather(r, s, key, micro, scale), "bs.embedding.gather");
    return 0;
}

static int l_predict(lua_State *L)
{
    bs_embedding *r = check(L);
    uint64_t payload = 0, read = 0;
    bsl_try(L, bs_embedding_predict(r, bsl_checkint(L, 2, 0, INT_MAX), &payload, &read),
            "bs.embedding.predict");
    lua_pushinteger(L, (lua_Integer)payload);
    lua_pushinteger(L, (lua_Integer)read);
    return 2;
}

/* r:grad(store, key, j, scale, params, id) */
static int l_grad(lua_State *L)
{
    bs_embedding *r = check(L);
    bs_store *s = bsl_check(L, 2, &bsl_store_type);
    int key = bsl_checkint(L, 3, 0, INT_MAX), micro = bsl_checkint(L, 4, 0, INT_MAX);
    double scale = luaL_checknumber(L, 5);
    const bs_params *p = bsl_check(L, 6, &bsl_params_type);
    int id = bsl_checkint(L, 7, 0, bs_params_count(p) - 1);
    bs_param_ref ref;
    bs_status st = bs_params_ref(p, id, &ref);
    if (st == BS_OK)
        st = bs_embedding_grad(r, s, key, micro, scale, &ref.grad);
    bsl_try(L, st, "bs.embedding.grad");
    return 0;
}

static int l_stats(lua_State *L)
{
    bs_embedding_stats s;
    bs_embedding_stats_get(check(L), &s);
    lua_createtable(L, 0, 3);
    bsl_setint(L, "payload", (lua_Integer)s.payload);
    bsl_setint(L, "read", (lua_Integer)s.read);
    bsl_setint(L, "host_bytes", (lua_Integer)s.host_bytes);
    return 1;
}

static const luaL_Reg methods[] = {
    {"gather", l_gather}, {"grad", l_grad}, {"predict", l_predict}, {"stats", l_stats}, {NULL, NULL}};
static const luaL_Reg functions[] = {{"bytes", l_bytes}, {"open", l_open}, {NULL, NULL}};

void bsl_open_embedding(lua_State *L)
{
    bsl_newtype(L, &embedding_type, methods, NULL);
    luaL_newlib(L, functions);
    lua_setfield(L, -2, "embedding");
}
