/* SPDX-License-Identifier: Apache-2.0 */
/*
** box.c: boxes, what they borrow, and which of them a scope has used. Everything here runs on the thread that owns
** the lua_State. A box's finalizer closes its users first, so no order of collection, of <close> variables or of
** lua_close can end an owner before what was made on it.
*/
#include "lua/bsl.h"

#include <string.h>

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

/* Scopes set aside do not know which boxes they used: they end with the first that may be one of them. Too early
   for some is safe; too late for one is a tape that names freed memory. */
static void close_kept(bsl_box *engine)
{
    while (engine->kept)
        bsl_close(engine->kept->user);
}

/* The order is what libbs asks of any C program: what was made on an object ends before it, and what a tape names
   ends after the scope. Closing twice is nothing: h is NULL, and no edge is left. Nothing here calls Lua, so a
   finalizer that runs while another box closes finds every list whole. */
void bsl_close(bsl_box *b)
{
    /* Used in a scope: its engine's open scope ends first if that is the one, and every one that was set aside. */
    if (b->scope && b->type != &bsl_scope_type) {
        bsl_box *engine = b->edge[0].link ? b->edge[0].owner : NULL;
        bsl_box *scope = open_scope(engine);
        if (scope && scope->scope == b->scope)
            bsl_close(scope);
        if (engine)
            close_kept(engine);
    }
    close_kept(b);
    while (b->users) /* newest first; each unlinks itself */
        bsl_close(b->users->user);
    if (b->type == &bsl_scope_type && b->edge[0].link && b->edge[0].owner->open == b)
        b->edge[0].owner->open = NULL;
    for (int i = 0; i < b->type->owners; i++)
        unlink_edge(&b->edge[i]);
    void *h = b->h;
    b->h = NULL; /* before the call: whatever it leads to sees a closed box */
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

/* User values of an engine: the set of boxes that its scope used, which keeps them from being collected while the
   tape names them; a weak list of that scope's box, weak because a scope that the script drops shall be collected,
   and so closed. */
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

/* A tensor borrows from the box of its scope, so that it is closed, and its reference given back, with the scope.
   The scope is found through what the caller has at hand: another tensor of it, the engine, or a box made on the
   engine, whose first user value is the engine's. */
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
        return; /* the serial says that it is in the set already: most uses cost no table */
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
