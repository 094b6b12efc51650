/* SPDX-License-Identifier: Apache-2.0 */
/*
** ltensor.c: tensors, weights, linears, rope tables and bs.op. A tensor box holds one reference and
** gives it back when its scope ends, so that dead handles never wait for a collection. Axes, columns
** and rows are counted from 1.
*/
#include "lua/bsl.h"

#include <limits.h>

static void close_linear(void *h)
{
    bs_linear_free(h);
}

static void close_rope(void *h)
{
    bs_rope_free(h);
}

static void close_cache(void *h)
{
    bs_cache_close(h);
}

static const bsl_type linear_type = {"bs.linear", close_linear, 2, 0};
static const bsl_type rope_type = {"bs.rope", close_rope, 1, 0};
static const bsl_type cache_type = {"bs.cache", close_cache, 1, 0};

/* ---- weights -------------------------------------------------------------------------------- */

static const bs_tensor_info *find_tensor(lua_State *L, int arg, const bs_manifest *m, int block,
                                         int tensor)
{
    if (block < 0 || block >= bs_manifest_blocks(m))
        luaL_argerror(L, arg, lua_pushfstring(L, "no block %d in the manifest", block));
    if (tensor < 0 || tensor >= bs_manifest_block(m, block)->n_tensors)
        luaL_argerror(L, arg, lua_pushfstring(L, "no tensor %d in block %d", tensor, block));
    return bs_manifest_tensor(m, block, tensor);
}

/* Rows [first, first + rows of the tensor) of a parameter's gradient. */
static bool part_of(bs_param_ref *ref, int64_t first, const bs_tensor_info *info)
{
    bs_place *g = &ref->grad;
    int64_t rows = info->ndim > 0 ? info->dim[0] : 1;
    if (first > g->rows || rows > g->rows - first)
        return false;
    g->off += (size_t)first * (size_t)g->channels * bs_dtype_size(g->dtype);
    g->rows = g->capacity = rows;
    return true;
}

/* bs.weight.new(engine, manifest, block, tensor [, params, id [, first [, n]]]); first: the row of the
   parameter, counted from 0, where the tensor begins when it is a part of it (tiles of the head); with n,
   the weight is rows first.. first + n of both. */
static int l_weight_new(lua_State *L)
{
    bs_engine *e = bsl_check(L, 1, &bsl_engine_type);
    const bs_manifest *m = bsl_check(L, 2, &bsl_manifest_type);
    int block = bsl_checkint(L, 3, 0, INT_MAX);
    const bs_tensor_info *info = find_tensor(L, 4, m, block, bsl_checkint(L, 4, 0, INT_MAX));
    const bs_params *p = bsl_opt(L, 5, &bsl_params_type);
    int id = p ? bsl_checkint(L, 6, 0, bs_params_count(p) - 1) : 0;
    bool rows = !lua_isnoneornil(L, 8), part = p && !lua_isnoneornil(L, 7);
    int64_t first = part || rows ? bsl_checkcount(L, 7) : 0;
    int64_t n = rows ? bsl_checkcount(L, 8) : 0;
    bs_tensor_info piece;
    bsl_box *box = bsl_newbox(L, &bsl_weight_type);
    bsl_borrow(L, box, 0, 1);
    if (p)
        bsl_borrow(L, box, 1, 5);
    bs_param_ref ref = {0};
    bs_weight *w = NULL;
    bs_status st = p ? bs_params_ref(p, id, &ref) : BS_OK;
    if (st == BS_OK && rows && (st = bs_tensor_info_rows(info, first, n, &piece)) == BS_OK)
        info = &piece;
    if (st == BS_OK && part && !part_of(&ref, first, info))
        luaL_argerror(L, 7, "the tensor reaches beyond the parameter");
    if (st == BS_OK)
        st = bs_weight_new(e, block, info, p ? &ref : NULL, &w);
    box->h = w;
    bsl_try(L, st, "bs.weight.new");
    return 1;
}

typedef struct linear_args { /* ids; -1: absent */
    int block, weight, bias, base_weight, base_bias, lora_a, lora_b;
    double scale, dropout;
    bool transposed, grouped;
    int first_expert;
    const char *name;
} linear_args;

static const bsl_option linear_options[] = {
    {"manifest", BSL_ANY, 0, true},
    {"block", BSL_INT, offsetof(linear_args, block), true},
    {"weight", BSL_INT, offsetof(linear_args, weight), true},
    {"bias", BSL_INT, offsetof(linear_args, bias), false},
    {"params", BSL_ANY, 0, false},
    {"base_weight", BSL_INT, offsetof(linear_args, base_weight), false},
    {"base_bias", BSL_INT, offsetof(linear_args, base_bias), false},
    {"lora_a", BSL_INT, offsetof(linear_args, lora_a), false},
    {"lora_b", BSL_INT, offsetof(linear_args, lora_b), false},
    {"scale", BSL_NUM, offsetof(linear_args, scale), false},
    {"dropout", BSL_NUM, offsetof(linear_args, dropout), false},
    {"transposed", BSL_BOOL, offsetof(linear_args, transposed), false},
    {"grouped", BSL_BOOL, offsetof(linear_args, grouped), false},
    {"first_expert", BSL_INT, offsetof(linear_args, first_expert), false},
    {"next", BSL_ANY, 0, false},
    {"next_bias", BSL_ANY, 0, false},
    {"name", BSL_STR, offsetof(linear_args, name), false},
    {NULL, BSL_ANY, 0, false}};

static int check_param(lua_State *L, const bs_params *p, const char *field, int id)
{
    if (id != -1 && (!p || id < 0 || id >= bs_params_count(p)))
        luaL_argerror(
            L, 2, lua_pushfstring(L, "option '%s': %d is no parameter of option 'params'", field, id));
    return id;
}

/* The references of the parameters that are present. */
static bs_status linear_params(const bs_params *p, const linear_args *a, bs_linear_cfg *cfg)
{
    const int id[] = {a->base_weight, a->base_bias, a->lora_a, a->lora_b};
    bs_param_ref *const ref[] = {&cfg->base_weight, &cfg->base_bias, &cfg->lora_a, &cfg->lora_b};
    bs_status st = BS_OK;
    for (int i = 0; st == BS_OK && i < 4; i++)
        if (id[i] >= 0)
            st = bs_params_ref(p, id[i], ref[i]);
    return st;
}

/* The tensors of a list of ids in a field of the table at 2, as scratch that stays on the stack; absent: none. */
static const bs_tensor_info *const *tensor_list(lua_State *L, const bs_manifest *m, int block,
                                                const char *field, int *n)
{
    int64_t count = 0;
    *n = 0;
    if (lua_getfield(L, 2, field) == LUA_TNIL)
        return NULL;
    const int64_t *id = bsl_integers(L, 2, -1, field, &count);
    const bs_tensor_info **list = lua_newuserdatauv(L, ((size_t)count + 1) * sizeof *list, 0);
    for (int64_t i = 0; i < count; i++)
        list[i] = find_tensor(L, 2, m, block, id[i] < INT_MAX ? (int)id[i] : INT_MAX);
    *n = (int)count;
    return list;
}

static int l_linear_new(lua_State *L)
{
    linear_args a = {
        .bias = -1, .base_weight = -1, .base_bias = -1, .lora_a = -1, .lora_b = -1, .scale = 1};
    bs_linear_cfg cfg = {0};
    bs_engine *e = bsl_check(L, 1, &bsl_engine_type);
    bsl_options(L, 2, linear_options, &a);
    const bs_manifest *m = bsl_optionbox(L, 2, "manifest", &bsl_manifest_type, true);
    cfg.block = a.block;
    cfg.weight = find_tensor(L, 2, m, a.block, a.weight);
    cfg.bias = a.bias == -1 ? NULL : find_tensor(L, 2, m, a.block, a.bias);
    cfg.scale = (float)a.scale;
    cfg.dropout = (float)a.dropout;
    cfg.transposed = a.transposed;
    cfg.grouped = a.grouped;
    cfg.first_expert = a.first_expert;
    cfg.next = tensor_list(L, m, a.block, "next", &cfg.n_next);
    int biases = 0;
    cfg.next_bias = tensor_list(L, m, a.block, "next_bias", &biases);
    luaL_argcheck(L, biases == (cfg.bias ? cfg.n_next : 0), 2, "a bias for each of 'next', or none");
    cfg.name = a.name ? a.name : cfg.weight->name;
    const bs_params *p = bsl_optionbox(L, 2, "params", &bsl_params_type, false);
    int params = lua_gettop(L);
    check_param(L, p, "base_weight", a.base_weight);
    check_param(L, p, "base_bias", a.base_bias);
    check_param(L, p, "lora_a", a.lora_a);
    check_param(L, p, "lora_b", a.lora_b);
    bsl_box *box = bsl_newbox(L, &linear_type);
    bsl_borrow(L, box, 0, 1);
    bsl_borrow(L, box, 1, params);
    bs_linear *l = NULL;
    bs_status st = linear_params(p, &a, &cfg);
    if (st == BS_OK)
        st = bs_linear_new(e, &cfg, &l);
    box->h = l;
    bsl_try(L, st, "bs.linear.new");
    return 1;
}

static int l_linear_dims(lua_State *L)
{
    int64_t in = 0, out = 0;
    bs_linear_dims(bsl_check(L, 1, &linear_type), &in, &out);
    lua_pushinteger(L, in);
    lua_pushinteger(L, out);
    return 2;
}

/* bs.rope.new(engine, inv_freq, scaling, "half" | "interleaved") */
static int l_rope_new(lua_State *L)
{
    static const char *const styles[] = {"half", "interleaved", NULL};
    bs_engine *e = bsl_check(L, 1, &bsl_engine_type);
    const bs_array *inv_freq = bsl_check(L, 2, &bsl_array_type);
    double scaling = luaL_optnumber(L, 3, 1.0);
    bs_rope_style style = (bs_rope_style)luaL_checkoption(L, 4, "half", styles);
    bsl_box *box = bsl_newbox(L, &rope_type);
    bsl_borrow(L, box, 0, 1);
    bs_rope *r = NULL;
    bs_status st = bs_rope_new(e, inv_freq, scaling, style, &r);
    box->h = r;
    bsl_try(L, st, "bs.rope.new");
    return 1;
}

/* bs.cache.open(engine, {rows =, capacity =, channels = {one a layer}}) */
static int l_cache_open(lua_State *L)
{
    static const bsl_option spec[] = {{"rows", BSL_I64, offsetof(bs_cache_cfg, rows), true},
                                      {"capacity", BSL_I64, offsetof(bs_cache_cfg, capacity), true},
                                      {"channels", BSL_ANY, 0, true},
                                      {NULL, BSL_ANY, 0, false}};
    bs_cache_cfg cfg = {0};
    int64_t layers = 0;
    bs_engine *e = bsl_check(L, 1, &bsl_engine_type);
    bsl_options(L, 2, spec, &cfg);
    lua_getfield(L, 2, "channels");
    cfg.channels = bsl_integers(L, 2, -1, "channels", &layers);
    luaL_argcheck(L, layers <= INT_MAX, 2, "too many layers");
    cfg.layers = (int)layers;
    bsl_box *box = bsl_newbox(L, &cache_type);
    bsl_borrow(L, box, 0, 1);
    bs_cache *c = NULL;
    bs_status st = bs_cache_open(e, &cfg, &c);
    box->h = c;
    bsl_try(L, st, "bs.cache.open");
    return 1;
}

/* ---- tensor methods ----------------------------------------------------------------------------- */

static int l_want_grad(lua_State *L)
{
    bsl_try(L, bs_tensor_want_grad(bsl_checktensor(L, 1)), "bs.tensor.want_grad");
    lua_settop(L, 1);
    return 1;
}

static int l_grad(lua_State *L)
{
    bs_tensor *t = bsl_checktensor(L, 1);
    bsl_box *box = bsl_newtensor(L, 1);
    bs_tensor *g = NULL;
    bs_status st = bs_tensor_grad(t, &g);
    box->h = g;
    bsl_try(L, st, "bs.tensor.grad");
    if (!g)
        lua_pushnil(L);
    return 1;
}

static int l_dims(lua_State *L)
{
    const bs_tensor *t = bsl_checktensor(L, 1);
    int n = bs_tensor_ndim(t);
    lua_createtable(L, n, 0);
    for (int i = 0; i < n; i++) {
        lua_pushinteger(L, bs_tensor_dim(t, i));
        lua_rawseti(L, -2, i + 1);
    }
    return 1;
}

static int l_dtype(lua_State *L)
{
    lua_pushstring(L, bs_dtype_name(bs_tensor_dtype(bsl_checktensor(L, 1))));
    return 1;
}

static int l_capacity(lua_State *L)
{
    lua_pushinteger(L, bs_tensor_capacity(bsl_checktensor(L, 1)));
    return 1;
}

static int l_read(lua_State *L)
{
    bs_tensor *t = bsl_checktensor(L, 1);
    bsl_box *box = bsl_newarray(L);
    bs_array *a = NULL;
    bs_status st = bs_tensor_read(t, &a);
    box->h = a;
    bsl_try(L, st, "bs.tensor.read");
    return 1;
}

/* false for a closed box and when the scope has ended. */
static int l_alive(lua_State *L)
{
    const bsl_box *box = bsl_checkbox(L, 1, &bsl_tensor_type);
    lua_pushboolean(L, box->h && bs_tensor_alive(box->h));
    return 1;
}

static int l_tostring(lua_State *L)
{
    const bs_tensor *t = bsl_checkbox(L, 1, &bsl_tensor_type)->h;
    luaL_Buffer b;
    if (!t) {
        lua_pushliteral(L, "bs.tensor (closed)");
        return 1;
    }
    luaL_buffinit(L, &b);
    lua_pushfstring(L, "bs.tensor %s [", bs_dtype_name(bs_tensor_dtype(t)));
    luaL_addvalue(&b);
    for (int i = 0; i < bs_tensor_ndim(t); i++) {
        lua_pushfstring(L, i > 0 ? " %I" : "%I", (LUAI_UACINT)bs_tensor_dim(t, i));
        luaL_addvalue(&b);
    }
    luaL_addchar(&b, ']');
    luaL_pushresult(&b);
    return 1;
}

/* ---- ops ------------------------------------------------------------------------------------ */

/* Phase four of every op: box is on the top. */
static int finish(lua_State *L, bsl_box *box, bs_tensor *t, bs_status st, const char *what)
{
    box->h = t;
    bsl_try(L, st, what);
    return 1;
}

/* linear(x, w [, residual]) */
static int l_linear(lua_State *L)
{
    bs_tensor *x = bsl_checktensor(L, 1), *y = NULL;
    bs_linear *w = bsl_check(L, 2, &linear_type);
    bs_tensor *r = lua_isnoneornil(L, 3) ? NULL : bsl_checktensor(L, 3);
    bsl_use(L, 2);
    bsl_box *box = bsl_newtensor(L, 1);
    bs_status st = bs_op_linear(x, w, r, &y);
    return finish(L, box, y, st, "bs.op.linear");
}

/* rmsnorm(x, w, eps [, one_plus]) */
static int l_rmsnorm(lua_State *L)
{
    bs_tensor *x = bsl_checktensor(L, 1), *y = NULL;
    bs_weight *w = bsl_check(L, 2, &bsl_weight_type);
    double eps = luaL_checknumber(L, 3);
    bool one_plus = lua_toboolean(L, 4);
    bsl_use(L, 2);
    bsl_box *box = bsl_newtensor(L, 1);
    bs_status st = bs_op_rmsnorm(x, w, eps, one_plus, &y);
    return finish(L, box, y, st, "bs.op.rmsnorm");
}

/* layernorm(x, w, b, eps) */
static int l_layernorm(lua_State *L)
{
    bs_tensor *x = bsl_checktensor(L, 1), *y = NULL;
    bs_weight *w = bsl_check(L, 2, &bsl_weight_type), *b = bsl_check(L, 3, &bsl_weight_type);
    double eps = luaL_checknumber(L, 4);
    bsl_use(L, 2);
    bsl_use(L, 3);
    bsl_box *box = bsl_newtensor(L, 1);
    bs_status st = bs_op_layernorm(x, w, b, eps, &y);
    return finish(L, box, y, st, "bs.op.layernorm");
}

/* rope(x, r, heads) */
static int l_rope(lua_State *L)
{
    bs_tensor *x = bsl_checktensor(L, 1), *y = NULL;
    bs_rope *r = bsl_check(L, 2, &rope_type);
    int heads = bsl_checkint(L, 3, 1, INT_MAX);
    bsl_use(L, 2);
    bsl_box *box = bsl_newtensor(L, 1);
    bs_status st = bs_op_rope(x, r, heads, &y);
    return finish(L, box, y, st, "bs.op.rope");
}

/* norm_rope(x, w, eps, one_plus, r, heads) */
static int l_norm_rope(lua_State *L)
{
    bs_tensor *x = bsl_checktensor(L, 1), *y = NULL;
    bs_weight *w = bsl_check(L, 2, &bsl_weight_type);
    double eps = luaL_checknumber(L, 3);
    luaL_checktype(L, 4, LUA_TBOOLEAN);
    bs_rope *r = bsl_check(L, 5, &rope_type);
    int heads = bsl_checkint(L, 6, 1, INT_MAX);
    bsl_use(L, 2);
    bsl_use(L, 5);
    bsl_box *box = bsl_newtensor(L, 1);
    bs_status st = bs_op_norm_rope(x, w, eps, lua_toboolean(L, 4), r, heads, &y);
    return finish(L, box, y, st, "bs.op.norm_rope");
}

/* attention(q, k, v, {heads =, kv_heads =, head_dim =, scale =, window =, softcap =, sinks =} [, cache, layer]):
   inside the rows of the micro-batch, or against the layer (from 0) of a cache, which takes k and v. */
static int l_attention(lua_State *L)
{
    static const bsl_option spec[] = {{"heads", BSL_INT, offsetof(bs_attention_cfg, heads), true},
                                      {"kv_heads", BSL_INT, offsetof(bs_attention_cfg, kv_heads), true},
                                      {"head_dim", BSL_INT, offsetof(bs_attention_cfg, head_dim), true},
                                      {"scale", BSL_NUM, offsetof(bs_attention_cfg, scale), false},
                                      {"window", BSL_I64, offsetof(bs_attention_cfg, window), false},
                                      {"softcap", BSL_NUM, offsetof(bs_attention_cfg, softcap), false},
                                      {"sinks", BSL_ANY, 0, false},
                                      {NULL, BSL_ANY, 0, false}};
    bs_attention_cfg cfg = {0};
    bs_tensor *q = bsl_checktensor(L, 1), *k = bsl_checktensor(L, 2), *v = bsl_checktensor(L, 3),
              *y = NULL;
    bsl_options(L, 4, spec, &cfg);
    lua_settop(L, 6);
    cfg.sinks = bsl_optionbox(L, 4, "sinks", &bsl_weight_type, false);
    if (cfg.sinks)
        bsl_use(L, 7);
    bs_cache *cache = bsl_opt(L, 5, &cache_type);
    int layer = cache ? bsl_checkint(L, 6, 0, INT_MAX) : 0;
    if (cache)
        bsl_use(L, 5);
    bsl_box *box = bsl_newtensor(L, 1);
    bs_status st = cache ? bs_op_attention_cached(q, k, v, &cfg, cache, layer, &y)
                         : bs_op_attention(q, k, v, &cfg, &y);
    return finish(L, box, y, st, "bs.op.attention");
}

static const char *const act_words[] = {"silu", "gelu_tanh", "gelu_erf", "relu", NULL};

/* glu(gate, up, act) */
/* glu_clamped(x, alpha, limit) */
static int l_glu_clamped(lua_State *L)
{
    bs_tensor *x = bsl_checktensor(L, 1), *y = NULL;
    double alpha = luaL_checknumber(L, 2), limit = luaL_checknumber(L, 3);
    bsl_box *box = bsl_newtensor(L, 1);
    bs_status st = bs_op_glu_clamped(x, alpha, limit, &y);
    return finish(L, box, y, st, "bs.op.glu_clamped");
}

static int l_glu(lua_State *L)
{
    bs_tensor *g = bsl_checktensor(L, 1), *u = bsl_checktensor(L, 2), *y = NULL;
    bs_act act = (bs_act)luaL_checkoption(L, 3, NULL, act_words);
    bsl_box *box = bsl_newtensor(L, 1);
    bs_status st = bs_op_glu(g, u, act, &y);
    return finish(L, box, y, st, "bs.op.glu");
}

static int l_act(lua_State *L)
{
    bs_tensor *x = bsl_checktensor(L, 1), *y = NULL;
    bs_act act = (bs_act)luaL_checkoption(L, 2, NULL, act_words);
    bsl_box *box = bsl_newtensor(L, 1);
    bs_status st = bs_op_act(x, act, &y);
    return finish(L, box, y, st, "bs.op.act");
}

static int l_add(lua_State *L)
{
    bs_tensor *a = bsl_checktensor(L, 1), *b = bsl_checktensor(L, 2), *y = NULL;
    bsl_box *box = bsl_newtensor(L, 1);
    bs_status st = bs_op_add(a, b, &y);
    return finish(L, box, y, st, "bs.op.add");
}

static int l_mul(lua_State *L)
{
    bs_tensor *a = bsl_checktensor(L, 1), *b = bsl_checktensor(L, 2), *y = NULL;
    bsl_box *box = bsl_newtensor(L, 1);
    bs_status st = bs_op_mul(a, b, &y);
    return finish(L, box, y, st, "bs.op.mul");
}

static int l_scale(lua_State *L)
{
    bs_tensor *x = bsl_checktensor(L, 1), *y = NULL;
    double s = luaL_checknumber(L, 2);
    bsl_box *box = bsl_newtensor(L, 1);
    bs_status st = bs_op_scale(x, s, &y);
    return finish(L, box, y, st, "bs.op.scale");
}

/* The operator *: two tensors, or a tensor and a number on either side. */
static int l_times(lua_State *L)
{
    if (lua_type(L, 1) == LUA_TNUMBER)
        lua_insert(L, 1);
    return lua_type(L, 2) == LUA_TNUMBER ? l_scale(L) : l_mul(L);
}

static int l_softmax(lua_State *L)
{
    bs_tensor *x = bsl_checktensor(L, 1), *y = NULL;
    bsl_box *box = bsl_newtensor(L, 1);
    bs_status st = bs_op_softmax(x, &y);
    return finish(L, box, y, st, "bs.op.softmax");
}

/* columns(x, first, n): n columns from the first-th on, counted from 1 */
static int l_columns(lua_State *L)
{
    bs_tensor *x = bsl_checktensor(L, 1), *y = NULL;
    int64_t first = bsl_checkcount(L, 2), n = bsl_checkcount(L, 3);
    luaL_argcheck(L, first >= 1, 2, "columns are counted from 1");
    bsl_box *box = bsl_newtensor(L, 1);
    bs_status st = bs_op_columns(x, first - 1, n, &y);
    return finish(L, box, y, st, "bs.op.columns");
}

/* row_scale(x, g, column): row t of x times g[t][column], counted from 1 */
static int l_row_scale(lua_State *L)
{
    bs_tensor *x = bsl_checktensor(L, 1), *g = bsl_checktensor(L, 2), *y = NULL;
    int64_t column = bsl_checkcount(L, 3);
    luaL_argcheck(L, column >= 1, 3, "columns are counted from 1");
    bsl_box *box = bsl_newtensor(L, 1);
    bs_status st = bs_op_row_scale(x, g, column - 1, &y);
    return finish(L, box, y, st, "bs.op.row_scale");
}

static int l_labelled(lua_State *L)
{
    bs_tensor *x = bsl_checktensor(L, 1), *y = NULL;
    bsl_box *box = bsl_newtensor(L, 1);
    bs_status st = bs_op_labelled(x, &y);
    return finish(L, box, y, st, "bs.op.labelled");
}

static int l_last(lua_State *L)
{
    bs_tensor *x = bsl_checktensor(L, 1), *y = NULL;
    bsl_box *box = bsl_newtensor(L, 1);
    bs_status st = bs_op_last(x, &y);
    return finish(L, box, y, st, "bs.op.last");
}

static int l_view(lua_State *L)
{
    int64_t dim[BS_MAX_DIMS] = {0};
    bs_tensor *x = bsl_checktensor(L, 1), *y = NULL;
    int ndim = bsl_checkdims(L, 2, dim);
    bsl_box *box = bsl_newtensor(L, 1);
    bs_status st = bs_op_view(x, ndim, dim, &y);
    return finish(L, box, y, st, "bs.op.view");
}

static int l_accumulate(lua_State *L)
{
    bs_tensor *acc = bsl_checktensor(L, 1), *x = bsl_checktensor(L, 2);
    bsl_try(L, bs_op_accumulate(acc, x), "bs.op.accumulate");
    return 0;
}

/* embed(engine, w): rows of w at the token ids of the scope's micro-batch */
static int l_embed(lua_State *L)
{
    bs_engine *e = bsl_check(L, 1, &bsl_engine_type);
    bs_weight *w = bsl_check(L, 2, &bsl_weight_type);
    bsl_use(L, 2);
    bsl_box *box = bsl_newtensor(L, 1);
    bs_tensor *y = NULL;
    bs_status st = bs_op_embed(e, w, &y);
    return finish(L, box, y, st, "bs.op.embed");
}

/* activation(x): x as ops take it */
static int l_activation(lua_State *L)
{
    bs_tensor *x = bsl_checktensor(L, 1), *y = NULL;
    bsl_box *box = bsl_newtensor(L, 1);
    bs_status st = bs_op_activation(x, &y);
    return finish(L, box, y, st, "bs.op.activation");
}

/* from_array(engine, array) */
static int l_from_array(lua_State *L)
{
    bs_engine *e = bsl_check(L, 1, &bsl_engine_type);
    const bs_array *a = bsl_check(L, 2, &bsl_array_type);
    bsl_box *box = bsl_newtensor(L, 1);
    bs_tensor *y = NULL;
    bs_status st = bs_tensor_from(e, a, &y);
    return finish(L, box, y, st, "bs.op.from_array");
}

/* ---- modules ---------------------------------------------------------------------------------- */

static const luaL_Reg none[] = {{NULL, NULL}};
static const luaL_Reg linear_methods[] = {{"dims", l_linear_dims}, {NULL, NULL}};
static const luaL_Reg tensor_methods[] = {
    {"alive", l_alive}, {"capacity", l_capacity}, {"dims", l_dims},           {"dtype", l_dtype},
    {"grad", l_grad},   {"read", l_read},         {"want_grad", l_want_grad}, {NULL, NULL}};
static const luaL_Reg tensor_meta[] = {
    {"__add", l_add}, {"__mul", l_times}, {"__tostring", l_tostring}, {NULL, NULL}};
static const luaL_Reg ops[] = {{"accumulate", l_accumulate},
                               {"act", l_act},
                               {"activation", l_activation},
                               {"add", l_add},
                               {"attention", l_attention},
                               {"columns", l_columns},
                               {"embed", l_embed},
                               {"from_array", l_from_array},
                               {"glu", l_glu},
                               {"glu_clamped", l_glu_clamped},
                               {"labelled", l_labelled},
                               {"last", l_last},
                               {"layernorm", l_layernorm},
                               {"linear", l_linear},
                               {"mul", l_mul},
                               {"rmsnorm", l_rmsnorm},
                               {"norm_rope", l_norm_rope},
                               {"rope", l_rope},
                               {"row_scale", l_row_scale},
                               {"scale", l_scale},
                               {"softmax", l_softmax},
                               {"view", l_view},
                               {NULL, NULL}};

static void add_module(lua_State *L, const char *name, lua_CFunction make)
{
    lua_createtable(L, 0, 1);
    lua_pushcfunction(L, make);
    lua_setfield(L, -2, "new");
    lua_setfield(L, -2, name);
}

void bsl_open_tensor(lua_State *L)
{
    bsl_newtype(L, &bsl_tensor_type, tensor_methods, tensor_meta);
    bsl_newtype(L, &bsl_weight_type, none, NULL);
    bsl_newtype(L, &linear_type, linear_methods, NULL);
    bsl_newtype(L, &rope_type, none, NULL);
    bsl_newtype(L, &cache_type, none, NULL);
    add_module(L, "weight", l_weight_new);
    add_module(L, "linear", l_linear_new);
    add_module(L, "rope", l_rope_new);
    lua_createtable(L, 0, 1);
    lua_pushcfunction(L, l_cache_open);
    lua_setfield(L, -2, "open");
    lua_setfield(L, -2, "cache");
    luaL_newlib(L, ops);
    lua_setfield(L, -2, "op");
}
