/* SPDX-License-Identifier: Apache-2.0 */
/*
** lmanifest.c: bs.manifest. Ids of files, blocks, tensors and row tables are those of bs.h: integers
** from 0, opaque to scripts.
*/
#include "lua/bsl.h"

#include <limits.h>
#include <string.h>

static bs_manifest *check(lua_State *L)
{
    return bsl_check(L, 1, &bsl_manifest_type);
}

static int l_new(lua_State *L)
{
    bsl_box *box = bsl_newbox(L, &bsl_manifest_type);
    bs_manifest *m = NULL;
    bs_status st = bs_manifest_new(&m);
    box->h = m;
    bsl_try(L, st, "bs.manifest.new");
    return 1;
}

static int l_from_json(lua_State *L)
{
    size_t n;
    const char *text = luaL_checklstring(L, 1, &n);
    bsl_box *box = bsl_newbox(L, &bsl_manifest_type);
    bs_manifest *m = NULL;
    bs_status st = bs_manifest_from_json(text, n, &m);
    box->h = m;
    bsl_try(L, st, "bs.manifest.from_json");
    return 1;
}

static int push_id(lua_State *L, bs_status st, const char *what, int id)
{
    bsl_try(L, st, what);
    lua_pushinteger(L, id);
    return 1;
}

static int l_file(lua_State *L)
{
    bs_manifest *m = check(L);
    int id = -1;
    bs_status st = bs_manifest_add_file(m, luaL_checkstring(L, 2), &id);
    return push_id(L, st, "bs.manifest.file", id);
}

static int l_block(lua_State *L)
{
    bs_manifest *m = check(L);
    const char *name = luaL_checkstring(L, 2), *kind = luaL_checkstring(L, 3);
    int id = -1;
    bs_status st = bs_manifest_add_block(m, name, kind, &id);
    return push_id(L, st, "bs.manifest.block", id);
}

/* m:tensor(block, name, dtype, dims, file, offset) -> id */
static int l_tensor(lua_State *L)
{
    bs_manifest *m = check(L);
    int64_t dim[BS_MAX_DIMS] = {0};
    int block = bsl_checkint(L, 2, 0, INT_MAX);
    const char *name = luaL_checkstring(L, 3);
    bs_dtype t = bsl_checkdtype(L, 4);
    int ndim = bsl_checkdims(L, 5, dim);
    int file = bsl_checkint(L, 6, 0, INT_MAX), id = -1;
    uint64_t offset = (uint64_t)bsl_checkcount(L, 7);
    bs_status st = bs_manifest_add_tensor(m, block, name, t, ndim, dim, file, offset, &id);
    return push_id(L, st, "bs.manifest.tensor", id);
}

/* m:packed(block, name, packing, dims, {file, offset}, {file, offset of the scales}) -> id */
static int l_packed(lua_State *L)
{
    bs_manifest *m = check(L);
    int64_t dim[BS_MAX_DIMS] = {0};
    bs_packed p = {.name = luaL_checkstring(L, 3), .dim = dim};
    int block = bsl_checkint(L, 2, 0, INT_MAX), id = -1;
    const char *packing = luaL_checkstring(L, 4);
    for (int i = BS_PLAIN + 1; i < BS_PACKING_COUNT; i++)
        if (strcmp(bs_packing_get((bs_packing)i)->name, packing) == 0)
            p.packing = (bs_packing)i;
    luaL_argcheck(L, p.packing, 4, "unknown packing");
    p.ndim = bsl_checkdims(L, 5, dim);
    for (int i = 0; i < 2; i++) {
        luaL_checktype(L, 6 + i, LUA_TTABLE);
        lua_rawgeti(L, 6 + i, 1);
        lua_rawgeti(L, 6 + i, 2);
        int file = bsl_checkint(L, -2, 0, INT_MAX);
        uint64_t offset = (uint64_t)bsl_checkcount(L, -1);
        *(i ? &p.scales_file : &p.file) = file;
        *(i ? &p.scales_offset : &p.file_offset) = offset;
    }
    bs_status st = bs_manifest_add_packed(m, block, &p, &id);
    return push_id(L, st, "bs.manifest.packed", id);
}

/* m:row_table(name, dtype, rows, cols, file, offset) -> id */
static int l_row_table(lua_State *L)
{
    bs_manifest *m = check(L);
    const char *name = luaL_checkstring(L, 2);
    bs_dtype t = bsl_checkdtype(L, 3);
    int64_t rows = bsl_checkcount(L, 4), cols = bsl_checkcount(L, 5);
    int file = bsl_checkint(L, 6, 0, INT_MAX), id = -1;
    uint64_t offset = (uint64_t)bsl_checkcount(L, 7);
    bs_status st = bs_manifest_add_row_table(m, name, t, rows, cols, file, offset, &id);
    return push_id(L, st, "bs.manifest.row_table", id);
}

/* m:compute(dtype): what engines compute in */
static int l_compute(lua_State *L)
{
    bs_manifest *m = check(L);
    bsl_try(L, bs_manifest_compute(m, bsl_checkdtype(L, 2)), "bs.manifest.compute");
    return 0;
}

static int l_finish(lua_State *L)
{
    bsl_try(L, bs_manifest_finish(check(L)), "bs.manifest.finish");
    return 0;
}

static int l_blocks(lua_State *L)
{
    lua_pushinteger(L, bs_manifest_blocks(check(L)));
    return 1;
}

static int check_block(lua_State *L, const bs_manifest *m, int arg)
{
    return bsl_checkint(L, arg, 0, bs_manifest_blocks(m) - 1);
}

static int l_block_info(lua_State *L)
{
    const bs_manifest *m = check(L);
    const bs_block_info *b = bs_manifest_block(m, check_block(L, m, 2));
    lua_createtable(L, 0, 8);
    bsl_setstr(L, "name", b->name);
    bsl_setstr(L, "kind", b->kind);
    bsl_setint(L, "n_tensors", b->n_tensors);
    bsl_setint(L, "n_extents", b->n_extents);
    bsl_setint(L, "payload", (lua_Integer)b->payload_bytes);
    bsl_setint(L, "slot_bytes", (lua_Integer)b->slot_bytes);
    bsl_setint(L, "raw_bytes", (lua_Integer)b->raw_bytes);
    bsl_setint(L, "expand_bytes", (lua_Integer)b->expand_bytes);
    return 1;
}

static int l_tensor_info(lua_State *L)
{
    const bs_manifest *m = check(L);
    int block = check_block(L, m, 2);
    int tensor = bsl_checkint(L, 3, 0, bs_manifest_block(m, block)->n_tensors - 1);
    const bs_tensor_info *t = bs_manifest_tensor(m, block, tensor);
    lua_createtable(L, 0, 8);
    bsl_setstr(L, "name", t->name);
    bsl_setstr(L, "dtype", bs_dtype_name(t->dtype));
    bsl_pushdims(L, t->ndim, t->dim);
    lua_setfield(L, -2, "dims");
    bsl_setint(L, "file", t->file);
    bsl_setint(L, "offset", (lua_Integer)t->file_offset);
    bsl_setint(L, "bytes", (lua_Integer)t->bytes);
    bsl_setint(L, "slot_offset", (lua_Integer)t->slot_offset);
    if (t->expand_offset != UINT64_MAX)
        bsl_setint(L, "expand_offset", (lua_Integer)t->expand_offset);
    return 1;
}

static int l_find(lua_State *L)
{
    const bs_manifest *m = check(L);
    int id = bs_manifest_find_tensor(m, check_block(L, m, 2), luaL_checkstring(L, 3));
    if (id < 0)
        lua_pushnil(L);
    else
        lua_pushinteger(L, id);
    return 1;
}

static int l_digest(lua_State *L)
{
    lua_pushinteger(L, (lua_Integer)bs_manifest_digest(check(L)));
    return 1;
}

static int l_alignment(lua_State *L)
{
    lua_pushinteger(L, (lua_Integer)bs_manifest_alignment(check(L)));
    return 1;
}

static int l_json(lua_State *L)
{
    const bs_manifest *m = check(L);
    bsl_box *box = bsl_newtext(L);
    char *text = NULL;
    bs_status st = bs_manifest_to_json(m, &text);
    box->h = text;
    bsl_try(L, st, "bs.manifest.json");
    lua_pushstring(L, text);
    return 1;
}

static const luaL_Reg methods[] = {{"alignment", l_alignment},
                                   {"block", l_block},
                                   {"block_info", l_block_info},
                                   {"blocks", l_blocks},
                                   {"compute", l_compute},
                                   {"digest", l_digest},
                                   {"file", l_file},
                                   {"find", l_find},
                                   {"finish", l_finish},
                                   {"json", l_json},
                                   {"packed", l_packed},
                                   {"row_table", l_row_table},
                                   {"tensor", l_tensor},
                                   {"tensor_info", l_tensor_info},
                                   {NULL, NULL}};
static const luaL_Reg functions[] = {{"from_json", l_from_json}, {"new", l_new}, {NULL, NULL}};

void bsl_open_manifest(lua_State *L)
{
    bsl_newtype(L, &bsl_manifest_type, methods, NULL);
    luaL_newlib(L, functions);
    lua_setfield(L, -2, "manifest");
}
