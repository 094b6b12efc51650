/* SPDX-License-Identifier: Apache-2.0 */
/*
** ltokenizer.c: bs.tokenizer. Token ids are those of the vocabulary, from 0; lines and byte positions
** are counted from 1. A tokenizer's box holds the box of its work buffers in a user value.
*/
#include "lua/bsl.h"

#include <limits.h>

static void close_tokenizer(void *h)
{
    bs_tok_close(h);
}

static void close_work(void *h)
{
    bs_tok_work_free(h);
}

static void close_stream(void *h)
{
    bs_tok_stream_free(h);
}

static void close_lines(void *h)
{
    bs_tok_lines_free(h);
}

static const bsl_type tokenizer_type = {"bs.tokenizer", close_tokenizer, 0, 1};
static const bsl_type work_type = {"bs.tokenizer.work", close_work, 1, 0};
static const bsl_type stream_type = {"bs.tokenizer.stream", close_stream, 1, 0};
static const bsl_type lines_type = {"bs.tokenizer.lines", close_lines, 1, 0};

static bs_tok *check(lua_State *L)
{
    return bsl_check(L, 1, &tokenizer_type);
}

/* The work buffers of the open tokenizer at 1. */
static bs_tok_work *work_of(lua_State *L)
{
    check(L);
    lua_getiuservalue(L, 1, 1);
    const bsl_box *box = lua_touserdata(L, -1);
    lua_pop(L, 1); /* the tokenizer keeps it */
    if (!box->h)
        luaL_argerror(L, 1, "closed bs.tokenizer");
    return box->h;
}

/* A tokenizer that is absent or not understood is an answer, not an error: nil, message, code. */
static int l_open(lua_State *L)
{
    const char *path = luaL_checkstring(L, 1);
    bsl_box *box = bsl_newbox(L, &tokenizer_type);
    int tokenizer = lua_gettop(L);
    bsl_box *work = bsl_newbox(L, &work_type);
    bsl_borrow(L, work, 0, tokenizer);
    lua_setiuservalue(L, tokenizer, 1);
    bs_tok *t = NULL;
    bs_tok_work *w = NULL;
    bs_status st = bs_tok_open(path, &t);
    box->h = t;
    if (st == BS_OK)
        st = bs_tok_work_new(t, &w);
    work->h = w;
    if (st == BS_IO || st == BS_FORMAT || st == BS_UNSUPPORTED) {
        lua_pushnil(L);
        bsl_pusherror(L, st, "bs.tokenizer.open");
        lua_pushstring(L, bs_status_name(st));
        return 3;
    }
    bsl_try(L, st, "bs.tokenizer.open");
    return 1;
}

/* ---- options -------------------------------------------------------------------------------- */

typedef struct tok_args {
    bool special, literal, offsets, continued, inside, skip_special;
    int threads;
} tok_args;

static const bsl_option encode_options[] = {
    {"special", BSL_BOOL, offsetof(tok_args, special), false},
    {"literal", BSL_BOOL, offsetof(tok_args, literal), false},
    {"offsets", BSL_BOOL, offsetof(tok_args, offsets), false},
    {"continued", BSL_BOOL, offsetof(tok_args, continued), false},
    {"inside", BSL_BOOL, offsetof(tok_args, inside), false},
    {NULL, BSL_ANY, 0, false}};
static const bsl_option file_options[] = {{"special", BSL_BOOL, offsetof(tok_args, special), false},
                                          {"literal", BSL_BOOL, offsetof(tok_args, literal), false},
                                          {"threads", BSL_INT, offsetof(tok_args, threads), false},
                                          {NULL, BSL_ANY, 0, false}};
static const bsl_option decode_options[] = {
    {"skip_special", BSL_BOOL, offsetof(tok_args, skip_special), false}, {NULL, BSL_ANY, 0, false}};

static unsigned flags_of(lua_State *L, int arg, const bsl_option *spec, int *threads)
{
    tok_args a = {0};
    bsl_options(L, arg, spec, &a);
    if (threads)
        *threads = a.threads;
    return (a.special ? BS_TOK_SPECIAL : 0u) | (a.literal ? BS_TOK_LITERAL : 0u) |
           (a.offsets ? BS_TOK_SPANS : 0u) | (a.continued ? BS_TOK_CONTINUED : 0u) |
           (a.inside ? BS_TOK_INSIDE : 0u) | (a.skip_special ? BS_TOK_SKIP_SPECIAL : 0u);
}

static void push_ids(lua_State *L, const int32_t *id, int64_t n)
{
    lua_createtable(L, n < INT_MAX ? (int)n : 0, 0);
    for (int64_t i = 0; i < n; i++) {
        lua_pushinteger(L, id[i]);
        lua_rawseti(L, -2, i + 1);
    }
}

/* ---- text and ids ------------------------------------------------------------------------------ */

/* t:encode(text [, {special =, literal =, offsets =, continued =, inside =}]) -> ids [, first, last]: with offsets,
   text:sub(first[i], last[i]) is what ids[i] stands for. */
static int l_encode(lua_State *L)
{
    size_t n;
    bs_tok_work *w = work_of(L);
    const char *text = luaL_checklstring(L, 2, &n);
    unsigned flags = flags_of(L, 3, encode_options, NULL);
    bs_tok_ids ids = {0};
    bsl_try(L, bs_tok_encode(w, text, n, flags, &ids), "bs.tokenizer.encode");
    push_ids(L, ids.id, ids.n);
    if (!ids.span)
        return 1;
    int size = ids.n < INT_MAX ? (int)ids.n : 0;
    lua_createtable(L, size, 0);
    lua_createtable(L, size, 0);
    for (int64_t i = 0; i < ids.n; i++) {
        lua_pushinteger(L, (lua_Integer)ids.span[i].first + 1);
        lua_rawseti(L, -3, i + 1);
        lua_pushinteger(L, ids.span[i].end);
        lua_rawseti(L, -2, i + 1);
    }
    return 3;
}

static int32_t check_id(lua_State *L, int arg)
{
    return bsl_checkint(L, arg, 0, INT32_MAX);
}

/* t:decode(ids [, {skip_special =}]) -> text */
static int l_decode(lua_State *L)
{
    int64_t n = 0;
    size_t size = 0;
    const char *text = NULL;
    bs_tok_work *w = work_of(L);
    unsigned flags = flags_of(L, 3, decode_options, NULL);
    const int64_t *v = bsl_integers(L, 2, 2, "ids", &n);
    int32_t *id = lua_newuserdatauv(L, ((size_t)n + 1) * sizeof *id, 0);
    for (int64_t i = 0; i < n; i++) {
        if (v[i] < 0 || v[i] > INT32_MAX)
            luaL_argerror(L, 2,
                          lua_pushfstring(L, "'ids'[%I]: %I is no token id", (LUAI_UACINT)i + 1,
                                          (LUAI_UACINT)v[i]));
        id[i] = (int32_t)v[i];
    }
    bsl_try(L, bs_tok_decode(w, id, n, flags, &text, &size), "bs.tokenizer.decode");
    lua_pushlstring(L, text, size);
    return 1;
}

static int l_vocab_size(lua_State *L)
{
    lua_pushinteger(L, bs_tok_vocab_size(check(L)));
    return 1;
}

/* An id, or nil for -1. */
static int push_id(lua_State *L, int32_t id)
{
    if (id < 0)
        lua_pushnil(L);
    else
        lua_pushinteger(L, id);
    return 1;
}

static int l_id(lua_State *L)
{
    size_t n;
    const bs_tok *t = check(L);
    const char *piece = luaL_checklstring(L, 2, &n);
    return push_id(L, bs_tok_id(t, piece, n));
}

static int l_piece(lua_State *L)
{
    size_t n = 0;
    const bs_tok *t = check(L);
    const char *piece = bs_tok_piece(t, check_id(L, 2), &n);
    if (piece)
        lua_pushlstring(L, piece, n);
    else
        lua_pushnil(L);
    return 1;
}

/* t:special("eos") -> id or nil */
static int l_special(lua_State *L)
{
    const bs_tok *t = check(L);
    return push_id(L, bs_tok_special(t, luaL_checkstring(L, 2)));
}

/* t:specials() -> {name = id} */
static int l_specials(lua_State *L)
{
    const bs_tok *t = check(L);
    int n = bs_tok_special_count(t);
    lua_createtable(L, 0, n);
    for (int i = 0; i < n; i++) {
        int32_t id = -1;
        const char *name = bs_tok_special_at(t, i, &id);
        if (id >= 0)
            bsl_setint(L, name, id);
    }
    return 1;
}

/* t:stops() -> the ids that end generation */
static int l_stops(lua_State *L)
{
    const int32_t *id = NULL;
    int n = bs_tok_stops(check(L), &id);
    push_ids(L, id, n);
    return 1;
}

/* t:around() -> the ids that special = true puts before and after a text */
static int l_around(lua_State *L)
{
    const int32_t *before, *after;
    int n_before, n_after;
    bs_tok_around(check(L), &before, &n_before, &after, &n_after);
    push_ids(L, before, n_before);
    push_ids(L, after, n_after);
    return 2;
}

/* t:notes() -> lines on what the files of the tokenizer contradict each other in */
static int l_notes(lua_State *L)
{
    const bs_tok *t = check(L);
    int n = bs_tok_note_count(t);
    lua_createtable(L, n, 0);
    for (int i = 0; i < n; i++) {
        lua_pushstring(L, bs_tok_note_at(t, i));
        lua_rawseti(L, -2, i + 1);
    }
    return 1;
}

/* ---- decoding one id after the other ---------------------------------------------------------- */

static int l_stream(lua_State *L)
{
    const bs_tok *t = check(L);
    unsigned flags = flags_of(L, 2, decode_options, NULL);
    bsl_box *box = bsl_newbox(L, &stream_type);
    bsl_borrow(L, box, 0, 1);
    bs_tok_stream *s = NULL;
    bs_status st = bs_tok_stream_new(t, flags, &s);
    box->h = s;
    bsl_try(L, st, "bs.tokenizer.stream");
    return 1;
}

static int l_stream_push(lua_State *L)
{
    const char *text = NULL;
    size_t n = 0;
    bs_tok_stream *s = bsl_check(L, 1, &stream_type);
    bsl_try(L, bs_tok_stream_push(s, check_id(L, 2), &text, &n), "bs.tokenizer.stream.push");
    lua_pushlstring(L, text, n);
    return 1;
}

static int l_stream_finish(lua_State *L)
{
    const char *text = NULL;
    size_t n = 0;
    bs_tok_stream *s = bsl_check(L, 1, &stream_type);
    bsl_try(L, bs_tok_stream_finish(s, &text, &n), "bs.tokenizer.stream.finish");
    lua_pushlstring(L, text, n);
    return 1;
}

/* ---- lines of a file ----------------------------------------------------------------------------- */

/* t:encode_file(path [, {special =, literal =, threads =}]) -> lines */
static int l_encode_file(lua_State *L)
{
    int threads = 0;
    const bs_tok *t = check(L);
    const char *path = luaL_checkstring(L, 2);
    unsigned flags = flags_of(L, 3, file_options, &threads);
    bsl_box *box = bsl_newbox(L, &lines_type);
    bsl_borrow(L, box, 0, 1);
    bs_tok_lines *l = NULL;
    bs_status st = bs_tok_encode_file(t, path, threads, flags, &l);
    box->h = l;
    bsl_try(L, st, "bs.tokenizer.encode_file");
    return 1;
}

static int l_lines_count(lua_State *L)
{
    lua_pushinteger(L, bs_tok_lines_count(bsl_check(L, 1, &lines_type)));
    return 1;
}

/* The number of ids of all lines together. */
static int l_lines_ids(lua_State *L)
{
    lua_pushinteger(L, bs_tok_lines_ids(bsl_check(L, 1, &lines_type)));
    return 1;
}

/* lines:get(i) -> ids of line i */
static int l_lines_get(lua_State *L)
{
    const int32_t *id = NULL;
    int64_t n = 0;
    const bs_tok_lines *l = bsl_check(L, 1, &lines_type);
    lua_Integer i = luaL_checkinteger(L, 2);
    luaL_argcheck(L, i >= 1 && i <= bs_tok_lines_count(l), 2, "line out of range");
    bsl_try(L, bs_tok_lines_get(l, i - 1, &id, &n), "bs.tokenizer.lines.get");
    push_ids(L, id, n);
    return 1;
}

static const luaL_Reg none[] = {{NULL, NULL}};
static const luaL_Reg methods[] = {{"around", l_around},
                                   {"decode", l_decode},
                                   {"encode", l_encode},
                                   {"encode_file", l_encode_file},
                                   {"id", l_id},
                                   {"notes", l_notes},
                                   {"piece", l_piece},
                                   {"special", l_special},
                                   {"specials", l_specials},
                                   {"stops", l_stops},
                                   {"stream", l_stream},
                                   {"vocab_size", l_vocab_size},
                                   {NULL, NULL}};
static const luaL_Reg stream_methods[] = {
    {"finish", l_stream_finish}, {"push", l_stream_push}, {NULL, NULL}};
static const luaL_Reg lines_methods[] = {
    {"count", l_lines_count}, {"get", l_lines_get}, {"ids", l_lines_ids}, {NULL, NULL}};
static const luaL_Reg lines_meta[] = {{"__len", l_lines_count}, {NULL, NULL}};
static const luaL_Reg functions[] = {{"open", l_open}, {NULL, NULL}};

void bsl_open_tokenizer(lua_State *L)
{
    bsl_newtype(L, &tokenizer_type, methods, NULL);
    bsl_newtype(L, &work_type, none, NULL);
    bsl_newtype(L, &stream_type, stream_methods, NULL);
    bsl_newtype(L, &lines_type, lines_methods, lines_meta);
    luaL_newlib(L, functions);
    lua_setfield(L, -2, "tokenizer");
}
