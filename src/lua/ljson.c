/* SPDX-License-Identifier: Apache-2.0 */
/*
** ljson.c: bs.json. Reading goes through cJSON, writing is done here so that numbers keep all their
** digits. null is a light userdata; an empty table is an object unless it is marked as an array.
*/
#include "lua/bsl.h"

#include <cjson/cJSON.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char array_mark[] = "bs.json.array"; /* metatable of tables that are arrays when empty */
static const char null_mark;                      /* its address is bs.json.null */
enum { DEPTH = 1000 };

static void push_null(lua_State *L)
{
    lua_pushlightuserdata(L, (void *)(uintptr_t)&null_mark);
}

/* ---- decode --------------------------------------------------------------------------------- */

static void close_tree(void *h)
{
    cJSON_Delete(h);
}

static const bsl_type tree_type = {"bs.json", close_tree, 0, 0};

static void push_value(lua_State *L, const cJSON *v)
{
    luaL_checkstack(L, 4, "json: nested too deeply");
    if (cJSON_IsNumber(v)) {
        double d = v->valuedouble;
        if (d == floor(d) && fabs(d) < 0x1p53)
            lua_pushinteger(L, (lua_Integer)d);
        else
            lua_pushnumber(L, d);
    } else if (cJSON_IsString(v)) {
        lua_pushstring(L, v->valuestring);
    } else if (cJSON_IsBool(v)) {
        lua_pushboolean(L, cJSON_IsTrue(v));
    } else if (cJSON_IsObject(v)) {
        lua_newtable(L);
        for (const cJSON *c = v->child; c; c = c->next) {
            lua_pushstring(L, c->string);
            push_value(L, c);
            lua_rawset(L, -3);
        }
    } else if (cJSON_IsArray(v)) {
        lua_Integer i = 0;
        lua_newtable(L);
        if (!v->child)
            luaL_setmetatable(L, array_mark);
        for (const cJSON *c = v->child; c; c = c->next) {
            push_value(L, c);
            lua_rawseti(L, -2, ++i);
        }
    } else {
        push_null(L);
    }
}

static int decode_error(lua_State *L, const char *text, size_t at, const char *problem)
{
    int line = 1;
    size_t start = 0;
    for (size_t i = 0; i < at; i++)
        if (text[i] == '\n') {
            line++;
            start = i + 1;
        }
    return luaL_error(L, "bs.json.decode: format: %s at line %d, column %d [format]", problem, line,
                      (int)(at - start) + 1);
}

/* cJSON ends a string at \u0000 and skips zero bytes behind the value without a word: both are
   refused. */
static void refuse_nul(lua_State *L, const char *text, size_t n)
{
    if (strlen(text) != n)
        decode_error(L, text, strlen(text), "a zero byte");
    const char *p = text, *end = text + n;
    while ((p = memchr(p, '\\', (size_t)(end - p))) != NULL && end - p >= 6) {
        if (memcmp(p, "\\u0000", 6) == 0)
            decode_error(L, text, (size_t)(p - text), "\\u0000 is not supported");
        p += 2; /* the escaped character cannot begin another escape */
    }
}

static int l_decode(lua_State *L)
{
    size_t n;
    const char *text = luaL_checklstring(L, 1, &n), *end = NULL;
    lua_settop(L, 1);
    refuse_nul(L, text, n);
    bsl_box *box = bsl_newbox(L, &tree_type);
    lua_toclose(L, 2);
    cJSON *tree = cJSON_ParseWithLengthOpts(text, n + 1, &end, 1);
    box->h = tree;
    if (!tree || end != text + n) {
        size_t at = end ? (size_t)(end - text) : 0;
        return decode_error(L, text, at > n ? n : at, at >= n ? "unexpected end" : "invalid JSON");
    }
    push_value(L, tree);
    return 1;
}

/* ---- encode --------------------------------------------------------------------------------- */

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

/* Bytes of the UTF-8 character at s, 0 when it is none. */
static size_t utf8_size(const unsigned char *s, size_t n)
{
    static const struct {
        unsigned char lead, mask, size;
        uint32_t least;
    } form[] = {
        {0x00, 0x80, 1, 0}, {0xc0, 0xe0, 2, 0x80}, {0xe0, 0xf0, 3, 0x800}, {0xf0, 0xf8, 4, 0x10000}};
    for (size_t k = 0; k < 4; k++) {
        if ((s[0] & form[k].mask) != form[k].lead)
            continue;
        uint32_t c = s[0] & (unsigned char)~form[k].mask;
        if (form[k].size > n)
            return 0;
        for (size_t i = 1; i < form[k].size; i++) {
            if ((s[i] & 0xc0) != 0x80)
                return 0;
            c = c << 6 | (s[i] & 0x3f);
        }
        return c < form[k].least || c > 0x10ffff || (c >= 0xd800 && c < 0xe000) ? 0 : form[k].size;
    }
    return 0;
}

static void put_string(writer *w, const char *s, size_t n)
{
    const unsigned char *p = (const unsigned char *)s;
    put(w, "\"", 1);
    for (size_t i = 0; i < n;) {
        static const char plain[] = "\"\\\b\f\n\r\t", letter[] = "\"\\bfnrt";
        size_t k = utf8_size(p + i, n - i);
        const char *escape = p[i] ? strchr(plain, p[i]) : NULL;
        if (k == 0)
            luaL_error(w->L, "bs.json.encode: arg: a string is not UTF-8 at byte %d [arg]", (int)i + 1);
        if (escape) {
            put(w, "\\", 1);
            put(w, letter + (escape - plain), 1);
        } else if (p[i] < 0x20) {
            char buf[8];
            snprintf(buf, sizeof buf, "\\u%04x", p[i]);
            put_text(w, buf);
        } else {
            put(w, s + i, k);
        }
        i += k;
    }
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
        luaL_getmetatable(L, array_mark);
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

/* bs.json.encode(value [, {pretty = bool, sort = bool}]) */
static int l_encode(lua_State *L)
{
    static const bsl_option spec[] = {{"pretty", BSL_BOOL, offsetof(writer, pretty), false},
                                      {"sort", BSL_BOOL, offsetof(writer, sort), false},
                                      {NULL, BSL_ANY, 0, false}};
    writer w = {.L = L, .capacity = 256, .slot = 3, .sort = true};
    luaL_checkany(L, 1);
    bsl_options(L, 2, spec, &w);
    lua_settop(L, 2);
    w.data = lua_newuserdatauv(L, w.capacity, 0);
    lua_pushvalue(L, 1);
    put_value(&w, 0);
    lua_pushlstring(L, w.data, w.n);
    return 1;
}

static int l_array(lua_State *L)
{
    luaL_checktype(L, 1, LUA_TTABLE);
    lua_settop(L, 1);
    luaL_setmetatable(L, array_mark);
    return 1;
}

static const luaL_Reg functions[] = {
    {"array", l_array}, {"decode", l_decode}, {"encode", l_encode}, {NULL, NULL}};

void bsl_open_json(lua_State *L)
{
    static const luaL_Reg none[] = {{NULL, NULL}};
    bsl_newtype(L, &tree_type, none, NULL);
    luaL_newmetatable(L, array_mark);
    lua_pop(L, 1);
    luaL_newlib(L, functions);
    push_null(L);
    lua_setfield(L, -2, "null");
    lua_setfield(L, -2, "json");
}
