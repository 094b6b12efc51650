/* SPDX-License-Identifier: Apache-2.0 */
/*
** json_encode.c: a Lua value as JSON text. Done here so that numbers keep all their digits. The text grows
** in a userdata on the stack: an error of any kind leaves it to the collector.
*/
#include "lua/json_encode.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char bsl_json_array[] = "bs.json.array";
static const char null_mark; /* its address is bs.json.null */
enum { DEPTH = 1000 };

void bsl_json_pushnull(lua_State *L)
{
    lua_pushlightuserdata(L, (void *)(uintptr_t)&null_mark);
}

typedef struct writer {
    lua_State *L;
    char *data; /* a userdata at stack index `slot` */
    size_t n, capacity;
    int slot;
    bool pretty, sort;
} writer;

static void put(writer *w, const char *s, size_t n)
{
    if (n > w->capacity - w->n) {
        size_t need = w->n + n, capacity = 2 * w->capacity > need ? 2 * w->capacity : need;
        char *data = lua_newuserdatauv(w->L, capacity, 0);
        memcpy(data, w->data, w->n);
        lua_replace(w->L, w->slot);
        w->data = data;
        w->capacity = capacity;
    }
    memcpy(w->data + w->n, s, n);
    w->n += n;
}

static void put_text(writer *w, const char *s)
{
    put(w, s, strlen(s));
}

static void put_line(writer *w, int depth)
{
    if (!w->pretty)
        return;
    put(w, "\n", 1);
    for (int i = 0; i < depth; i++)
        put(w, "  ", 2);
}

static void put_string(writer *w, const char *s, size_t n)
{
    static const char plain[] = "\"\\\b\f\n\r\t", letter[] = "\"\\bfnrt";
    size_t good = bs_utf8_valid(s, n), run = 0;
    if (good < n)
        luaL_error(w->L, "bs.json.encode: arg: a string is not UTF-8 at byte %d [arg]", (int)good + 1);
    put(w, "\"", 1);
    for (size_t i = 0; i < n; i++) {
        unsigned char c = (unsigned char)s[i];
        if (c >= 0x20 && c != '"' && c != '\\')
            continue;
        const char *escape = c ? strchr(plain, c) : NULL;
        char buf[8];
        put(w, s + run, i - run);
        snprintf(buf, sizeof buf, escape ? "\\%c" : "\\u%04x", escape ? letter[escape - plain] : c);
        put_text(w, buf);
        run = i + 1;
    }
    put(w, s + run, n - run);
    put(w, "\"", 1);
}

/* The shortest of 15, 16 and 17 digits that reads back as the same number. */
static void put_number(writer *w)
{
    char buf[40];
    double d = lua_tonumber(w->L, -1);
    if (lua_isinteger(w->L, -1)) {
        snprintf(buf, sizeof buf, "%lld", (long long)lua_tointeger(w->L, -1));
    } else {
        if (!isfinite(d))
            luaL_error(w->L, "bs.json.encode: nonfinite: JSON has no %s [nonfinite]",
                       isnan(d) ? "NaN" : "infinity");
        int digits = 15;
        do
            snprintf(buf, sizeof buf, "%.*g", digits, d);
        while (strtod(buf, NULL) != d && ++digits <= 17);
        if (!strpbrk(buf, ".e"))
            strcat(buf, ".0"); /* at most 24 characters until here */
    }
    put_text(w, buf);
}

static void put_value(writer *w, int depth);

static void put_array(writer *w, lua_Integer n, int depth)
{
    put(w, "[", 1);
    for (lua_Integer i = 1; i <= n; i++) {
        if (i > 1)
            put(w, ",", 1);
        put_line(w, depth + 1);
        lua_rawgeti(w->L, -1, i);
        put_value(w, depth + 1);
        lua_pop(w->L, 1);
    }
    if (n > 0)
        put_line(w, depth);
    put(w, "]", 1);
}

typedef struct key {
    const char *s;
    size_t n;
} key;

static int by_bytes(const void *a, const void *b)
{
    const key *x = a, *y = b;
    int c = memcmp(x->s, y->s, x->n < y->n ? x->n : y->n);
    return c != 0 ? c : (x->n > y->n) - (x->n < y->n);
}

/* Keys of the table on the top as scratch pushed above it. */
static key *read_keys(writer *w, size_t n)
{
    lua_State *L = w->L;
    int table = lua_gettop(L);
    key *k = lua_newuserdatauv(L, (n + 1) * sizeof *k, 0);
    size_t i = 0;
    lua_pushnil(L);
    while (lua_next(L, table)) {
        if (lua_type(L, -2) != LUA_TSTRING)
            luaL_error(L, "bs.json.encode: arg: a key of type %s in an object [arg]",
                       luaL_typename(L, -2));
        k[i].s = lua_tolstring(L, -2, &k[i].n);
        i++;
        lua_pop(L, 1);
    }
    if (w->sort)
        qsort(k, n, sizeof *k, by_bytes);
    return k;
}

static void put_object(writer *w, size_t n, int depth)
{
    lua_State *L = w->L;
    const key *k = read_keys(w, n);
    put(w, "{", 1);
    for (size_t i = 0; i < n; i++) {
        if (i > 0)
            put(w, ",", 1);
        put_line(w, depth + 1);
        put_string(w, k[i].s, k[i].n);
        put_text(w, w->pretty ? ": " : ":");
        lua_pushlstring(L, k[i].s, k[i].n);
        lua_rawget(L, -3);
        put_value(w, depth + 1);
        lua_pop(L, 1);
    }
    if (n > 0)
        put_line(w, depth);
    put(w, "}", 1);
    lua_pop(L, 1);
}

static void put_table(writer *w, int depth)
{
    lua_State *L = w->L;
    lua_Unsigned length = lua_rawlen(L, -1), n = 0;
    bool array = length > 0;
    if (depth >= DEPTH)
        luaL_error(L, "bs.json.encode: arg: nested deeper than %d (a cycle?) [arg]", DEPTH);
    if (!array && lua_getmetatable(L, -1)) {
        luaL_getmetatable(L, bsl_json_array);
        array = lua_rawequal(L, -1, -2);
        lua_pop(L, 2);
    }
    lua_pushnil(L);
    while (lua_next(L, -2)) {
        n++;
        lua_pop(L, 1);
    }
    if (array && n != length)
        luaL_error(L, "bs.json.encode: arg: a table with list entries and other keys [arg]");
    if (array)
        put_array(w, (lua_Integer)length, depth);
    else
        put_object(w, (size_t)n, depth);
}

/* Write the value on the top; the stack is as before afterwards. */
static void put_value(writer *w, int depth)
{
    lua_State *L = w->L;
    size_t n;
    luaL_checkstack(L, 8, "json: nested too deeply");
    switch (lua_type(L, -1)) {
    case LUA_TBOOLEAN:
        put_text(w, lua_toboolean(L, -1) ? "true" : "false");
        break;
    case LUA_TNUMBER:
        put_number(w);
        break;
    case LUA_TSTRING: {
        const char *s = lua_tolstring(L, -1, &n);
        put_string(w, s, n);
        break;
    }
    case LUA_TTABLE:
        put_table(w, depth);
        break;
    case LUA_TLIGHTUSERDATA:
        if (lua_touserdata(L, -1) == &null_mark) {
            put_text(w, "null");
            break;
        } /* fall through */
    default:
        luaL_error(L, "bs.json.encode: arg: a %s cannot be written [arg]", luaL_typename(L, -1));
    }
}

void bsl_json_encode(lua_State *L, int index, bool pretty, bool sort)
{
    index = lua_absindex(L, index);
    writer w = {.L = L, .capacity = 256, .pretty = pretty, .sort = sort};
    w.data = lua_newuserdatauv(L, w.capacity, 0);
    w.slot = lua_gettop(L);
    lua_pushvalue(L, index);
    put_value(&w, 0);
    lua_pushlstring(L, w.data, w.n);
    lua_replace(L, w.slot);
    lua_settop(L, w.slot);
}
