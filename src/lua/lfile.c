/* SPDX-License-Identifier: Apache-2.0 */
/*
** lfile.c: bs.safetensors (open files and atomic writing, at once or tensor by tensor) and bs.write_file.
*/
#include "lua/bsl.h"

#include <ctype.h>
#include <lauxlib.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void close_file(void *h)
{
    bs_safetensors_close(h);
}

static const bsl_type file_type = {"bs.safetensors", close_file, 0, 0};

static bs_safetensors *check(lua_State *L)
{
    return bsl_check(L, 1, &file_type);
}

/* A file that is absent or bad is an answer, not an error: nil, message, code. */
static int l_open(lua_State *L)
{
    const char *path = luaL_checkstring(L, 1);
    bsl_box *box = bsl_newbox(L, &file_type);
    bs_safetensors *st = NULL;
    bs_status status = bs_safetensors_open(path, &st);
    box->h = st;
    if (status == BS_IO || status == BS_FORMAT || status == BS_UNSUPPORTED) {
        lua_pushnil(L);
        bsl_pusherror(L, status, "bs.safetensors.open");
        lua_pushstring(L, bs_status_name(status));
        return 3;
    }
    bsl_try(L, status, "bs.safetensors.open");
    return 1;
}

static void push_tensor(lua_State *L, const bs_safetensors_tensor *t)
{
    lua_createtable(L, 0, 5);
    bsl_setstr(L, "name", t->name);
    bsl_setstr(L, "dtype", t->dtype == BS_DTYPE_COUNT ? t->dtype_name : bs_dtype_name(t->dtype));
    bsl_pushdims(L, t->ndim, t->dim);
    lua_setfield(L, -2, "dims");
    bsl_setint(L, "offset", (lua_Integer)t->offset);
    bsl_setint(L, "bytes", (lua_Integer)t->bytes);
}

static int l_tensors(lua_State *L)
{
    const bs_safetensors *st = check(L);
    int64_t n = bs_safetensors_count(st);
    lua_createtable(L, n < INT_MAX ? (int)n : 0, 0);
    for (int64_t i = 0; i < n; i++) {
        push_tensor(L, bs_safetensors_at(st, i));
        lua_rawseti(L, -2, i + 1);
    }
    return 1;
}

static int l_find(lua_State *L)
{
    const bs_safetensors_tensor *t = bs_safetensors_find(check(L), luaL_checkstring(L, 2));
    if (t)
        push_tensor(L, t);
    else
        lua_pushnil(L);
    return 1;
}

static int l_read(lua_State *L)
{
    bs_safetensors *st = check(L);
    const char *name = luaL_checkstring(L, 2);
    bsl_box *box = bsl_newarray(L);
    bs_array *a = NULL;
    bs_status status = bs_safetensors_read(st, name, &a);
    box->h = a;
    bsl_try(L, status, "bs.safetensors.read");
    return 1;
}

/* f:metadata() -> {key = value} of the header */
static int l_metadata(lua_State *L)
{
    const bs_safetensors *st = check(L);
    const char *key, *value;
    lua_newtable(L);
    for (int i = 0; (key = bs_safetensors_meta(st, i, &value)); i++)
        bsl_setstr(L, key, value);
    return 1;
}

static int l_path(lua_State *L)
{
    lua_pushstring(L, bs_safetensors_path(check(L)));
    return 1;
}

static int l_bytes(lua_State *L)
{
    lua_pushinteger(L, (lua_Integer)bs_safetensors_file_bytes(check(L)));
    return 1;
}

/* ---- writing ---------------------------------------------------------------------------------- */

static int by_text(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* Keys of the table at arg, sorted, so that the same content gives the same file; one value pushed. */
static const char **sorted_keys(lua_State *L, int arg, int *n)
{
    *n = 0;
    lua_pushnil(L);
    while (lua_next(L, arg)) {
        luaL_argcheck(L, *n < INT_MAX, arg, "too many entries");
        luaL_argcheck(L, lua_type(L, -2) == LUA_TSTRING, arg, "names must be strings");
        ++*n;
        lua_pop(L, 1);
    }
    const char **key = lua_newuserdatauv(L, ((size_t)*n + 1) * sizeof *key, 0);
    int i = 0;
    lua_pushnil(L);
    while (lua_next(L, arg)) {
        size_t len = 0;
        key[i] = lua_tolstring(L, -2, &len);
        luaL_argcheck(L, strlen(key[i]) == len, arg, "a name holds a zero byte");
        i++;
        lua_pop(L, 1);
    }
    qsort(key, (size_t)*n, sizeof *key, by_text);
    return key;
}

/* The arrays and the strings that the keys map to; the table keeps them. One value pushed. */
static const bs_array **array_values(lua_State *L, int arg, const char *const *key, int n)
{
    const bs_array **list = lua_newuserdatauv(L, ((size_t)n + 1) * sizeof *list, 0);
    for (int i = 0; i < n; i++) {
        lua_pushstring(L, key[i]);
        lua_rawget(L, arg);
        const bsl_box *box = luaL_testudata(L, -1, bsl_array_type.name);
        if (!box || !box->h)
            luaL_argerror(L, arg,
                          lua_pushfstring(L, "'%s': %s expected, got %s", key[i], bsl_array_type.name,
                                          box ? "a closed one" : luaL_typename(L, -1)));
        else
            list[i] = box->h;
        lua_pop(L, 1);
    }
    return list;
}

static const char **string_values(lua_State *L, int arg, const char *const *key, int n)
{
    const char **list = lua_newuserdatauv(L, ((size_t)n + 1) * sizeof *list, 0);
    for (int i = 0; i < n; i++) {
        lua_pushstring(L, key[i]);
        if (lua_rawget(L, arg) != LUA_TSTRING)
            luaL_argerror(
                L, arg,
                lua_pushfstring(L, "'%s': string expected, got %s", key[i], luaL_typename(L, -1)));
        list[i] = lua_tostring(L, -1);
        lua_pop(L, 1);
    }
    return list;
}

/* bs.safetensors.write(path, {name = array} [, {key = string}]) */
static int l_write(lua_State *L)
{
    const char *path = luaL_checkstring(L, 1);
    int n = 0, n_meta = 0;
    luaL_checktype(L, 2, LUA_TTABLE);
    lua_settop(L, 3);
    if (lua_isnil(L, 3)) {
        lua_newtable(L);
        lua_replace(L, 3);
    }
    luaL_checktype(L, 3, LUA_TTABLE);
    const char **name = sorted_keys(L, 2, &n);
    const bs_array **array = array_values(L, 2, name, n);
    const char **key = sorted_keys(L, 3, &n_meta);
    const char **value = string_values(L, 3, key, n_meta);
    bs_status st = bs_safetensors_write(path, n, name, array, n_meta, key, value);
    bsl_try(L, st, "bs.safetensors.write");
    return 0;
}

/* ---- writing tensor by tensor ------------------------------------------------------------------- */

static void close_writer(void *h)
{
    bs_safetensors_writer_close(h);
}

static const bsl_type writer_type = {"bs.safetensors.writer", close_writer, 0, 0};

static bs_safetensors_writer *check_writer(lua_State *L)
{
    return bsl_check(L, 1, &writer_type);
}

/* The description at the top, as bs.safetensors' tensors() gives it; what it points to stays in the table
   or on the stack (one value pushed). */
static void read_description(lua_State *L, bs_safetensors_tensor *t)
{
    char upper[32];
    luaL_argcheck(L, lua_istable(L, -1), 2, "a list of {name =, dtype =, dims =} expected");
    int at = lua_gettop(L);
    if (lua_getfield(L, at, "dims") != LUA_TTABLE)
        bsl_optionerror(L, 2, "dims", "table");
    t->ndim = bsl_checkdims(L, lua_gettop(L), t->dim);
    lua_pop(L, 1);
    if (lua_getfield(L, at, "name") != LUA_TSTRING)
        bsl_optionerror(L, 2, "name", "string");
    t->name = lua_tostring(L, -1);
    lua_pop(L, 1);
    if (lua_getfield(L, at, "dtype") != LUA_TSTRING)
        bsl_optionerror(L, 2, "dtype", "string");
    const char *dtype = lua_tostring(L, -1);
    size_t n = 0;
    for (; dtype[n] && n < sizeof upper - 1; n++)
        upper[n] = (char)toupper((unsigned char)dtype[n]);
    upper[n] = '\0';
    lua_pop(L, 1);
    t->dtype_name = lua_pushstring(L, upper);
}

/* bs.safetensors.writer(path, {{name =, dtype =, dims =}, ...} [, {key = string}]) */
static int l_writer(lua_State *L)
{
    const char *path = luaL_checkstring(L, 1);
    int n_meta = 0;
    luaL_checktype(L, 2, LUA_TTABLE);
    lua_settop(L, 3);
    if (lua_isnil(L, 3)) {
        lua_newtable(L);
        lua_replace(L, 3);
    }
    luaL_checktype(L, 3, LUA_TTABLE);
    const char **key = sorted_keys(L, 3, &n_meta);
    const char **value = string_values(L, 3, key, n_meta);
    size_t n = lua_rawlen(L, 2);
    luaL_argcheck(L, n <= INT_MAX / 2, 2, "too many tensors");
    bs_safetensors_tensor *t = lua_newuserdatauv(L, (n + 1) * sizeof *t, 0);
    memset(t, 0, (n + 1) * sizeof *t);
    lua_createtable(L, (int)n, 0); /* keeps the dtypes' names */
    int names = lua_gettop(L);
    for (size_t i = 0; i < n; i++) {
        lua_rawgeti(L, 2, (lua_Integer)i + 1);
        read_description(L, &t[i]);
        lua_rawseti(L, names, (lua_Integer)i + 1);
        lua_pop(L, 1);
    }
    bsl_box *box = bsl_newbox(L, &writer_type);
    bs_safetensors_writer *w = NULL;
    bs_status st = bs_safetensors_writer_open(path, (int64_t)n, t, n_meta, key, value, &w);
    box->h = w;
    bsl_try(L, st, "bs.safetensors.writer");
    return 1;
}

static int l_writer_add(lua_State *L)
{
    bs_safetensors_writer *w = check_writer(L);
    const char *name = luaL_checkstring(L, 2);
    const bs_array *a = bsl_check(L, 3, &bsl_array_type);
    bsl_try(L, bs_safetensors_writer_add(w, name, a), "bs.safetensors.writer.add");
    return 0;
}

/* w:copy(name, file) */
static int l_writer_copy(lua_State *L)
{
    bs_safetensors_writer *w = check_writer(L);
    const char *name = luaL_checkstring(L, 2);
    const bs_safetensors *from = bsl_check(L, 3, &file_type);
    bsl_try(L, bs_safetensors_writer_copy(w, name, from), "bs.safetensors.writer.copy");
    return 0;
}

static int l_writer_finish(lua_State *L)
{
    bsl_try(L, bs_safetensors_writer_finish(check_writer(L)), "bs.safetensors.writer.finish");
    return 0;
}

/* bs.read_file(path [, most]): an absent or bad file is an answer: nil, message, code. */
static int l_read_file(lua_State *L)
{
    const char *path = luaL_checkstring(L, 1);
    lua_Integer most = luaL_optinteger(L, 2, 0);
    luaL_argcheck(L, most >= 0, 2, "a number of bytes >= 0");
    bsl_box *box = bsl_newtext(L);
    char *text = NULL;
    size_t n;
    bs_status status = bs_file_read(path, (size_t)most, &text, &n);
    box->h = text;
    if (status == BS_IO || status == BS_FORMAT) {
        lua_pushnil(L);
        bsl_pusherror(L, status, "bs.read_file");
        lua_pushstring(L, bs_status_name(status));
        return 3;
    }
    bsl_try(L, status, "bs.read_file");
    lua_pushlstring(L, text, n);
    bsl_close(box);
    return 1;
}

static int close_stream(lua_State *L)
{
    luaL_Stream *s = luaL_checkudata(L, 1, LUA_FILEHANDLE);
    return luaL_fileresult(L, fclose(s->f) == 0, NULL);
}

/* bs.open_file(path): a file of Lua's io library, for reading; an absent or bad file is an answer: nil, message,
   code. io.open would wait for the writer of a pipe. */
static int l_open_file(lua_State *L)
{
    const char *path = luaL_checkstring(L, 1);
    luaL_Stream *s = lua_newuserdatauv(L, sizeof *s, 0);
    s->closef = NULL; /* closed, for its collector */
    luaL_setmetatable(L, LUA_FILEHANDLE);
    int fd;
    bs_status status = bs_file_open(path, &fd);
    if (status == BS_IO) {
        lua_pushnil(L);
        bsl_pusherror(L, status, "bs.open_file");
        lua_pushstring(L, bs_status_name(status));
        return 3;
    }
    bsl_try(L, status, "bs.open_file");
    if (!(s->f = fdopen(fd, "rb"))) {
        close(fd);
        return luaL_error(L, "bs.open_file: nomem: no memory for '%s' [nomem]", path);
    }
    s->closef = close_stream;
    return 1;
}

static int l_write_file(lua_State *L)
{
    size_t n;
    const char *path = luaL_checkstring(L, 1);
    const char *data = luaL_checklstring(L, 2, &n);
    bsl_try(L, bs_file_write(path, data, n), "bs.write_file");
    return 0;
}

static const luaL_Reg methods[] = {{"bytes", l_bytes}, {"find", l_find}, {"metadata", l_metadata},
                                   {"path", l_path},   {"read", l_read}, {"tensors", l_tensors},
                                   {NULL, NULL}};
static const luaL_Reg writer_methods[] = {
    {"add", l_writer_add}, {"copy", l_writer_copy}, {"finish", l_writer_finish}, {NULL, NULL}};
static const luaL_Reg functions[] = {
    {"open", l_open}, {"write", l_write}, {"writer", l_writer}, {NULL, NULL}};

void bsl_open_file(lua_State *L)
{
    bsl_newtype(L, &file_type, methods, NULL);
    bsl_newtype(L, &writer_type, writer_methods, NULL);
    luaL_newlib(L, functions);
    lua_setfield(L, -2, "safetensors");
    lua_pushcfunction(L, l_read_file);
    lua_setfield(L, -2, "read_file");
    lua_pushcfunction(L, l_open_file);
    lua_setfield(L, -2, "open_file");
    lua_pushcfunction(L, l_write_file);
    lua_setfield(L, -2, "write_file");
}
