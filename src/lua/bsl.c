/* SPDX-License-Identifier: Apache-2.0 */
/*
** bsl.c: boxes, option tables and errors of the bindings. Everything here runs on the thread that owns
** the lua_State. A box's finalizer closes its users first, so no order of collection, of <close>
** variables or of lua_close can end an owner before what was made on it.
*/
#include "lua/bsl.h"

#include <limits.h>
#include <string.h>

/* ---- boxes ---------------------------------------------------------------------------------- */

static void unlink_edge(bsl_edge *e)
{
    if (!e->link)
        return;
    *e->link = e->next;
    if (e->next)
        e->next->link = e->link;
    e->link = NULL;
}

/* The open scope of an engine. */
static bsl_box *open_scope(const bsl_box *engine)
{
    return engine ? engine->open : NULL;
}

/* Scopes set aside do not know which boxes they used: they end with the first that may be one of them. */
static void close_kept(bsl_box *engine)
{
    while (engine->kept)
        bsl_close(engine->kept->user);
}

void bsl_close(bsl_box *b)
{
    if (b->scope && b->type != &bsl_scope_type) {
        bsl_box *engine = b->edge[0].link ? b->edge[0].owner : NULL;
        bsl_box *scope = open_scope(engine);
        if (scope && scope->scope == b->scope)
            bsl_close(scope);
        if (engine)
            close_kept(engine);
    }
    close_kept(b);
    while (b->users)
        bsl_close(b->users->user);
    if (b->type == &bsl_scope_type && b->edge[0].link && b->edge[0].owner->open == b)
        b->edge[0].owner->open = NULL;
    for (int i = 0; i < b->type->owners; i++)
        unlink_edge(&b->edge[i]);
    void *h = b->h;
    b->h = NULL;
    if (h)
        b->type->close(h);
}

/* Method close, __close and __gc of every type. The metatable is upvalue 1: a box of another type, or
   anything else, must not reach its close function. */
static int l_close(lua_State *L)
{
    if (!lua_getmetatable(L, 1) || !lua_rawequal(L, -1, lua_upvalueindex(1))) {
        lua_getfield(L, lua_upvalueindex(1), "__name");
        return luaL_typeerror(L, 1, lua_tostring(L, -1));
    }
    bsl_close(lua_touserdata(L, 1));
    return 0;
}

static int l_tostring(lua_State *L)
{
    const bsl_box *b = lua_touserdata(L, 1);
    if (b->h)
        lua_pushfstring(L, "%s: %p", b->type->name, b->h);
    else
        lua_pushfstring(L, "%s (closed)", b->type->name);
    return 1;
}

void bsl_newtype(lua_State *L, const bsl_type *type, const luaL_Reg *methods, const luaL_Reg *meta)
{
    if (!luaL_newmetatable(L, type->name)) {
        lua_pop(L, 1);
        return;
    }
    lua_newtable(L);
    luaL_setfuncs(L, methods, 0);
    lua_pushvalue(L, -2);
    lua_pushcclosure(L, l_close, 1);
    lua_pushvalue(L, -1);
    lua_setfield(L, -3, "close");
    lua_pushvalue(L, -1);
    lua_setfield(L, -4, "__close");
    lua_setfield(L, -3, "__gc");
    lua_setfield(L, -2, "__index");
    lua_pushcfunction(L, l_tostring);
    lua_setfield(L, -2, "__tostring");
    lua_pushliteral(L, "protected");
    lua_setfield(L, -2, "__metatable");
    if (meta)
        luaL_setfuncs(L, meta, 0);
    lua_pop(L, 1);
}

bsl_box *bsl_newbox(lua_State *L, const bsl_type *type)
{
    size_t size = sizeof(bsl_box) + (size_t)type->owners * sizeof(bsl_edge);
    bsl_box *b = lua_newuserdatauv(L, size, type->owners + type->values);
    memset(b, 0, size);
    b->type = type;
    luaL_setmetatable(L, type->name);
    return b;
}

void bsl_borrow(lua_State *L, bsl_box *box, int slot, int owner)
{
    if (lua_isnoneornil(L, owner))
        return;
    bsl_box *o = lua_touserdata(L, owner);
    lua_pushvalue(L, owner);
    lua_setiuservalue(L, -2, slot + 1);
    bool kept = box->type == &bsl_kept_type && o->type == &bsl_engine_type;
    bsl_edge *e = &box->edge[slot], **list = kept ? &o->kept : &o->users;
    *e = (bsl_edge){.user = box, .owner = o, .next = *list, .link = list};
    if (*list)
        (*list)->link = &e->next;
    *list = e;
}

bsl_box *bsl_checkbox(lua_State *L, int arg, const bsl_type *type)
{
    return luaL_checkudata(L, arg, type->name);
}

void *bsl_check(lua_State *L, int arg, const bsl_type *type)
{
    const bsl_box *b = luaL_checkudata(L, arg, type->name);
    if (!b->h)
        luaL_argerror(L, arg, lua_pushfstring(L, "closed %s", type->name));
    return b->h;
}

void *bsl_opt(lua_State *L, int arg, const bsl_type *type)
{
    return lua_isnoneornil(L, arg) ? NULL : bsl_check(L, arg, type);
}

/* User values of an engine: the set of boxes that its scope used; a weak list of that scope's box. */
enum { USED = 2, SCOPE = 3 };
/* User value of a scope: its label. */
enum { LABEL = 3 };

void bsl_scope(lua_State *L, int arg, const char *label)
{
    lua_pushstring(L, label);
    lua_setiuservalue(L, -2, LABEL);
    if (open_scope(lua_touserdata(L, arg)))
        return; /* libbs will refuse the second one */
    lua_newtable(L);
    lua_setiuservalue(L, arg, USED);
    lua_newtable(L);
    if (luaL_newmetatable(L, "bs.weak")) {
        lua_pushliteral(L, "v");
        lua_setfield(L, -2, "__mode");
    }
    lua_setmetatable(L, -2);
    lua_pushvalue(L, -2);
    lua_rawseti(L, -2, 1);
    lua_setiuservalue(L, arg, SCOPE);
}

bsl_box *bsl_newtensor(lua_State *L, int from)
{
    const bsl_box *b = lua_touserdata(L, from);
    lua_pushvalue(L, from);
    if (b->type != &bsl_tensor_type) {
        if (b->type != &bsl_engine_type)
            lua_getiuservalue(L, -1, 1);
        if (lua_getiuservalue(L, -1, SCOPE) == LUA_TTABLE)
            lua_rawgeti(L, -1, 1);
    } else {
        lua_getiuservalue(L, -1, 1);
    }
    int scope = lua_gettop(L);
    bsl_box *box = bsl_newbox(L, &bsl_tensor_type);
    bsl_borrow(L, box, 0, scope);
    return box;
}

bs_tensor *bsl_checktensor(lua_State *L, int arg)
{
    const bsl_box *b = luaL_checkudata(L, arg, bsl_tensor_type.name);
    if (b->h)
        return b->h;
    lua_getiuservalue(L, arg, 1);
    const bsl_box *scope = lua_touserdata(L, -1);
    if (!scope || scope->h)
        luaL_argerror(L, arg, "closed bs.tensor");
    lua_getiuservalue(L, -1, LABEL);
    luaL_argerror(L, arg,
                  lua_pushfstring(L, "tensor of scope '%s', which has ended", lua_tostring(L, -1)));
    return NULL;
}

void bsl_use(lua_State *L, int arg)
{
    bsl_box *b = lua_touserdata(L, arg);
    const bsl_box *scope = open_scope(b->edge[0].owner);
    if (!scope || b->scope == scope->scope)
        return;
    lua_getiuservalue(L, arg, 1);
    lua_getiuservalue(L, -1, USED);
    lua_pushvalue(L, arg);
    lua_pushboolean(L, true);
    lua_rawset(L, -3);
    lua_pop(L, 2);
    b->scope = scope->scope;
}

void *bsl_owner(lua_State *L, int arg, int slot)
{
    lua_getiuservalue(L, arg, slot + 1);
    bsl_box *b = lua_touserdata(L, -1);
    lua_pop(L, 1); /* the box at arg keeps it */
    return b->h;
}

static void close_text(void *h)
{
    bs_str_free(h);
}

static const bsl_type text_type = {"bs.text", close_text, 0, 0};

bsl_box *bsl_newtext(lua_State *L)
{
    static const luaL_Reg none[] = {{NULL, NULL}};
    bsl_newtype(L, &text_type, none, NULL);
    return bsl_newbox(L, &text_type);
}

bsl_box *bsl_newarray(lua_State *L)
{
    return bsl_newbox(L, &bsl_array_type);
}

/* ---- status --------------------------------------------------------------------------------- */

void bsl_pusherror(lua_State *L, bs_status st, const char *what)
{
    bs_errinfo e = *bs_error(); /* a finalizer may run below and fail */
    const char *word = bs_status_name(st);
    lua_pushfstring(L, "%s: %s: %s [%s]", what, word, e.status == st ? e.msg : "no detail", word);
}

void bsl_try(lua_State *L, bs_status st, const char *what)
{
    if (st != BS_OK)
        bsl_pusherror(L, st, what);
    bsl_flushlog(L);
    if (st != BS_OK)
        lua_error(L);
}

/* ---- options -------------------------------------------------------------------------------- */

int bsl_optionerror(lua_State *L, int arg, const char *field, const char *expected)
{
    return luaL_argerror(
        L, arg,
        lua_pushfstring(L, "option '%s': %s expected, got %s", field, expected, luaL_typename(L, -1)));
}

/* The value on the top when it is a number that is an integer (text is not converted), else not whole.
   */
static lua_Integer top_integer(lua_State *L, int *whole)
{
    *whole = 0;
    return lua_type(L, -1) == LUA_TNUMBER ? lua_tointegerx(L, -1, whole) : 0;
}

typedef struct option_at { /* an option of the table at arg; its name for messages is both texts */
    int arg;
    const char *prefix, *name;
} option_at;

static void wrong_option(lua_State *L, const option_at *at, const char *expected)
{
    lua_pushfstring(L, "%s%s", at->prefix, at->name);
    lua_insert(L, -2);
    bsl_optionerror(L, at->arg, lua_tostring(L, -2), expected);
}

static lua_Integer option_integer(lua_State *L, const option_at *at, lua_Integer min, lua_Integer max)
{
    int whole;
    lua_Integer v = top_integer(L, &whole);
    if (!whole)
        wrong_option(L, at, "integer");
    if (v < min || v > max)
        luaL_argerror(L, at->arg,
                      lua_pushfstring(L, "option '%s%s': %I is outside %I..%I", at->prefix, at->name,
                                      (LUAI_UACINT)v, (LUAI_UACINT)min, (LUAI_UACINT)max));
    return v;
}

/* Store the value on the top. */
static void store_option(lua_State *L, int arg, const char *prefix, const bsl_option *o, void *out)
{
    const option_at where = {arg, prefix, o->name};
    void *at = (char *)out + o->offset;
    switch (o->kind) {
    case BSL_INT:
        *(int *)at = (int)option_integer(L, &where, INT_MIN, INT_MAX);
        break;
    case BSL_UINT:
        *(unsigned *)at = (unsigned)option_integer(L, &where, 0, UINT_MAX);
        break;
    case BSL_I64:
        *(int64_t *)at = option_integer(L, &where, INT64_MIN, INT64_MAX);
        break;
    case BSL_U64:
        *(uint64_t *)at = (uint64_t)option_integer(L, &where, INT64_MIN, INT64_MAX);
        break;
    case BSL_SIZE:
        *(size_t *)at = (size_t)option_integer(L, &where, 0, INT64_MAX);
        break;
    case BSL_NUM:
        if (lua_type(L, -1) != LUA_TNUMBER)
            wrong_option(L, &where, "number");
        *(double *)at = lua_tonumber(L, -1);
        break;
    case BSL_BOOL:
        if (!lua_isboolean(L, -1))
            wrong_option(L, &where, "boolean");
        *(bool *)at = lua_toboolean(L, -1);
        break;
    case BSL_STR:
        if (lua_type(L, -1) != LUA_TSTRING)
            wrong_option(L, &where, "string");
        *(const char **)at = lua_tostring(L, -1);
        break;
    case BSL_ANY:
        break;
    }
}

static int unknown_option(lua_State *L, int arg, const char *name, const bsl_option *spec)
{
    luaL_Buffer b;
    luaL_buffinit(L, &b);
    luaL_addstring(&b, "unknown option '");
    luaL_addstring(&b, name);
    luaL_addstring(&b, "' (valid: ");
    for (const bsl_option *o = spec; o->name; o++) {
        luaL_addstring(&b, o->name);
        luaL_addstring(&b, o[1].name ? ", " : ")");
    }
    luaL_pushresult(&b);
    return luaL_argerror(L, arg, lua_tostring(L, -1));
}

int bsl_word(lua_State *L, int arg, const char *field, const char *s, const char *const *word)
{
    luaL_Buffer b;
    for (int i = 0; word[i]; i++)
        if (strcmp(word[i], s) == 0)
            return i;
    luaL_buffinit(L, &b);
    luaL_addstring(&b, field);
    luaL_addstring(&b, ": unknown '");
    luaL_addstring(&b, s);
    luaL_addstring(&b, "' (valid: ");
    for (int i = 0; word[i]; i++) {
        luaL_addstring(&b, word[i]);
        luaL_addstring(&b, word[i + 1] ? ", " : ")");
    }
    luaL_pushresult(&b);
    return luaL_argerror(L, arg, lua_tostring(L, -1));
}

void bsl_nestedoptions(lua_State *L, int arg, int index, const char *prefix, const bsl_option *spec,
                       void *out)
{
    lua_pushnil(L);
    while (lua_next(L, index)) {
        if (lua_type(L, -2) != LUA_TSTRING)
            luaL_argerror(L, arg, "option names must be strings");
        const char *key = lua_tostring(L, -2);
        const bsl_option *o = spec;
        while (o->name && strcmp(o->name, key) != 0)
            o++;
        if (!o->name)
            unknown_option(L, arg, lua_pushfstring(L, "%s%s", prefix, key), spec);
        store_option(L, arg, prefix, o, out);
        lua_pop(L, 1);
    }
    for (const bsl_option *o = spec; o->name; o++) {
        if (o->required && lua_getfield(L, index, o->name) == LUA_TNIL)
            luaL_argerror(L, arg, lua_pushfstring(L, "option '%s%s' is missing", prefix, o->name));
        if (o->required)
            lua_pop(L, 1);
    }
}

void bsl_options(lua_State *L, int arg, const bsl_option *spec, void *out)
{
    if (lua_isnoneornil(L, arg)) {
        for (const bsl_option *o = spec; o->name; o++)
            if (o->required)
                luaL_checktype(L, arg, LUA_TTABLE);
        return;
    }
    luaL_checktype(L, arg, LUA_TTABLE);
    bsl_nestedoptions(L, arg, arg, "", spec, out);
}

void bsl_suboptions(lua_State *L, int arg, const char *field, const bsl_option *spec, void *out)
{
    int type = lua_getfield(L, arg, field);
    if (type != LUA_TNIL) {
        if (type != LUA_TTABLE)
            bsl_optionerror(L, arg, field, "table");
        const char *prefix = lua_pushfstring(L, "%s.", field);
        bsl_nestedoptions(L, arg, lua_gettop(L) - 1, prefix, spec, out);
        lua_pop(L, 1);
    }
    lua_pop(L, 1);
}

void *bsl_optionbox(lua_State *L, int arg, const char *field, const bsl_type *type, bool required)
{
    if (lua_getfield(L, arg, field) == LUA_TNIL && !required)
        return NULL;
    const bsl_box *b = luaL_testudata(L, -1, type->name);
    if (!b)
        bsl_optionerror(L, arg, field, type->name);
    else if (!b->h)
        luaL_argerror(L, arg, lua_pushfstring(L, "option '%s': closed %s", field, type->name));
    return b ? b->h : NULL;
}

/* ---- other arguments -------------------------------------------------------------------------- */

const char *const bsl_home_words[] = {"disk", "ram", "gpu", NULL};

const bsl_option bsl_io_options[] = {
    {"engine", BSL_STR, offsetof(bs_io_cfg, engine), false},
    {"depth", BSL_INT, offsetof(bs_io_cfg, depth), false},
    {"threads", BSL_INT, offsetof(bs_io_cfg, threads), false},
    {"request_bytes", BSL_SIZE, offsetof(bs_io_cfg, request_bytes), false},
    {"no_direct", BSL_BOOL, offsetof(bs_io_cfg, no_direct), false},
    {NULL, BSL_ANY, 0, false}};

int bsl_checkint(lua_State *L, int arg, int min, int max)
{
    lua_Integer v = luaL_checkinteger(L, arg);
    if (v < min || v > max)
        luaL_argerror(L, arg, lua_pushfstring(L, "%I is outside %d..%d", (LUAI_UACINT)v, min, max));
    return (int)v;
}

int64_t bsl_checkcount(lua_State *L, int arg)
{
    lua_Integer v = luaL_checkinteger(L, arg);
    if (v < 0)
        luaL_argerror(L, arg, lua_pushfstring(L, "%I is negative", (LUAI_UACINT)v));
    return v;
}

bs_dtype bsl_checkdtype(lua_State *L, int arg)
{
    bs_dtype t = BS_DTYPE_F32;
    const char *s = luaL_checkstring(L, arg);
    if (!bs_dtype_parse(s, &t))
        luaL_argerror(L, arg, lua_pushfstring(L, "unknown dtype '%s'", s));
    return t;
}

int bsl_checkdims(lua_State *L, int arg, int64_t dim[BS_MAX_DIMS])
{
    luaL_checktype(L, arg, LUA_TTABLE);
    size_t n = lua_rawlen(L, arg);
    if (n > BS_MAX_DIMS)
        luaL_argerror(L, arg, lua_pushfstring(L, "at most %d dims", BS_MAX_DIMS));
    for (size_t i = 0; i < n; i++) {
        int whole;
        lua_rawgeti(L, arg, (lua_Integer)i + 1);
        dim[i] = top_integer(L, &whole);
        if (!whole || dim[i] < 0)
            luaL_argerror(L, arg, "dims must be integers >= 0");
        lua_pop(L, 1);
    }
    return (int)n;
}

void bsl_pushdims(lua_State *L, int ndim, const int64_t *dim)
{
    lua_createtable(L, ndim, 0);
    for (int i = 0; i < ndim; i++) {
        lua_pushinteger(L, dim[i]);
        lua_rawseti(L, -2, i + 1);
    }
}

const int64_t *bsl_integers(lua_State *L, int arg, int index, const char *name, int64_t *n)
{
    index = lua_absindex(L, index);
    const bsl_box *box = luaL_testudata(L, index, bsl_array_type.name);
    if (box) {
        const bs_array *a = box->h;
        if (!a || a->dtype != BS_DTYPE_I64)
            luaL_argerror(L, arg, lua_pushfstring(L, "'%s': the array is not an open i64 one", name));
        *n = bs_array_count(a);
        lua_pushvalue(L, index);
        return a->data;
    }
    if (!lua_istable(L, index)) {
        lua_pushvalue(L, index);
        bsl_optionerror(L, arg, name, "table or i64 array");
    }
    size_t count = lua_rawlen(L, index);
    int64_t *v = lua_newuserdatauv(L, (count + 1) * sizeof *v, 0);
    for (size_t i = 0; i < count; i++) {
        int whole;
        lua_rawgeti(L, index, (lua_Integer)i + 1);
        v[i] = top_integer(L, &whole);
        if (!whole)
            luaL_argerror(L, arg,
                          lua_pushfstring(L, "'%s'[%I]: integer expected, got %s", name,
                                          (LUAI_UACINT)i + 1, luaL_typename(L, -1)));
        lua_pop(L, 1);
    }
    *n = (int64_t)count;
    return v;
}

static int visit_field(lua_State *L, int arg, int i, const char *field, bool required)
{
    int whole, type = lua_getfield(L, -1, field);
    lua_Integer v = top_integer(L, &whole);
    if ((type != LUA_TNIL || required) && (!whole || v < INT_MIN || v > INT_MAX))
        luaL_argerror(L, arg,
                      lua_pushfstring(L, "visit %d: '%s': integer expected, got %s", i + 1, field,
                                      luaL_typename(L, -1)));
    lua_pop(L, 1);
    return (int)v;
}

bs_visit_spec *bsl_visits(lua_State *L, int arg, int index, int *n)
{
    index = lua_absindex(L, index);
    if (!lua_istable(L, index))
        luaL_argerror(L, arg, "the program must be a list of visits");
    size_t count = lua_rawlen(L, index);
    if (count > INT_MAX)
        luaL_argerror(L, arg, "too many visits");
    bs_visit_spec *v = lua_newuserdatauv(L, (count + 1) * sizeof *v, 0);
    for (int i = 0; i < (int)count; i++) {
        if (lua_rawgeti(L, index, i + 1) != LUA_TTABLE)
            luaL_argerror(L, arg, lua_pushfstring(L, "visit %d is not a table", i + 1));
        v[i].block = visit_field(L, arg, i, "block", true);
        v[i].kind = visit_field(L, arg, i, "kind", false);
        v[i].layer = visit_field(L, arg, i, "layer", false);
        v[i].stage = visit_field(L, arg, i, "stage", false);
        lua_pop(L, 1);
    }
    *n = (int)count;
    return v;
}

void bsl_batchcfg(lua_State *L, int arg, bs_batch_cfg *out)
{
    static const bsl_option spec[] = {{"micros", BSL_INT, offsetof(bs_batch_cfg, micros), true},
                                      {"tokens", BSL_I64, offsetof(bs_batch_cfg, tokens), true},
                                      {"rows", BSL_I64, offsetof(bs_batch_cfg, rows), true},
                                      {NULL, BSL_ANY, 0, false}};
    *out = (bs_batch_cfg){0};
    bsl_options(L, arg, spec, out);
}
