/* SPDX-License-Identifier: Apache-2.0 */
/*
** bsl.h: what the binding files share. A C object lives in a box: a userdata that is closed (h NULL)
** before the object exists and after it has ended. A box that borrows from others is linked into their
** lists, so that closing an owner first closes what was made on it, newest first; user values keep the
** owners' boxes from being collected meanwhile. What a scope has used stays until that scope ends,
** since its tape names it. A binding function reads its arguments, makes closed boxes for its results,
** calls bs_* with no Lua call in between, and only then returns or raises.
*/
#ifndef BSL_H
#define BSL_H

#include "bs.h"

#include <lauxlib.h>
#include <lua.h>

typedef struct bsl_box bsl_box;
typedef struct bsl_edge bsl_edge;

struct bsl_edge { /* user borrows from an owner; in the owner's list */
    bsl_box *user, *owner;
    bsl_edge *next, **link; /* link NULL: not in a list */
};
typedef struct bsl_type {
    const char *name; /* key of the metatable; in messages */
    void (*close)(void *h);
    int owners; /* boxes that one of these may borrow from; the engine is the first */
    int values; /* user values beside those that hold the owners */
} bsl_type;
struct bsl_box {
    void *h; /* NULL: closed */
    const bsl_type *type;
    uint64_t scope; /* serial: of a scope; of an engine's last scope; of the last one that used it */
    bsl_box *open;  /* of an engine: its open scope */
    bsl_edge *users;
    /* Of an engine: the users that are scopes set aside. Whatever a scope may have used ends all of them
       when it closes, and must not have to look for them among tens of thousands of weights. */
    bsl_edge *kept;
    bsl_edge edge[]; /* [type->owners] */
};

extern const bsl_type bsl_array_type, bsl_manifest_type, bsl_placement_type, bsl_device_type,
    bsl_engine_type, bsl_batch_type, bsl_store_type, bsl_params_type, bsl_weight_type, bsl_tensor_type,
    bsl_scope_type, bsl_kept_type, bsl_stream_type, bsl_routing_type;

/* ---- boxes (box.c, types.c) ------------------------------------------------------------------ */

/* Make the metatable of a type: methods (with close added) as __index, extra metamethods or NULL. */
void bsl_newtype(lua_State *L, const bsl_type *type, const luaL_Reg *methods, const luaL_Reg *meta);
/* Push a closed box. */
bsl_box *bsl_newbox(lua_State *L, const bsl_type *type);
/* The box on the top borrows from the one at owner (nil or none: nothing); slot 0, 1, .. */
void bsl_borrow(lua_State *L, bsl_box *box, int slot, int owner);
/* Close a box and what borrows from it, as its method close does. */
void bsl_close(bsl_box *b);
/* The box at arg, open or closed; the handle of an open one. Both raise on anything else. */
bsl_box *bsl_checkbox(lua_State *L, int arg, const bsl_type *type);
void *bsl_check(lua_State *L, int arg, const bsl_type *type);
/* The same, NULL for nil. */
void *bsl_opt(lua_State *L, int arg, const bsl_type *type);
/* The box at arg, made on an engine, is used in the engine's open scope and has to outlive it. */
void bsl_use(lua_State *L, int arg);
/* The box on the top is the scope that opens on the engine at arg; what the one before used is
 * forgotten. */
void bsl_scope(lua_State *L, int arg, const char *label);
/* The handle of the box that the box at arg borrows from. */
void *bsl_owner(lua_State *L, int arg, int slot);
/* A box for text that libbs allocated, and the array of a result. */
bsl_box *bsl_newtext(lua_State *L);
bsl_box *bsl_newarray(lua_State *L);

/* ---- status (status.c) ----------------------------------------------------------------------- */

/* Raise "what: status: detail [status]" unless st is BS_OK; hand over waiting log lines. */
void bsl_try(lua_State *L, bs_status st, const char *what);
/* The same text pushed instead of raised. */
void bsl_pusherror(lua_State *L, bs_status st, const char *what);
/* Message handler: adds a traceback to a text, unless it has one already or tells what the system, a
   device or a budget refused. Other values stay as they are. */
int bsl_traceback(lua_State *L);

/* The status whose word, in brackets, ends the value at index; BS_OK: none. */
bs_status bsl_statusof(lua_State *L, int index);

/* ---- log (log.c) ----------------------------------------------------------------------------- */

/* bs.log_to: the function at 1, or nil, is the script's from here on. */
void bsl_setlog(lua_State *L);
/* Give waiting log lines to the script's function; any lua_State of the script. */
void bsl_flushlog(lua_State *L);
/* Once a state: when it ends, libbs logs to stderr again. */
void bsl_openlog(lua_State *L);

/* ---- arguments (options.c, arguments.c) ------------------------------------------------------ */

typedef enum bsl_kind {
    BSL_INT,  /* int */
    BSL_UINT, /* unsigned */
    BSL_I64,  /* int64_t */
    BSL_U64,  /* uint64_t, any integer */
    BSL_SIZE, /* size_t */
    BSL_NUM,  /* double */
    BSL_BOOL, /* bool */
    BSL_STR,  /* const char *, valid while the table lives */
    BSL_ANY   /* only known; the caller reads it */
} bsl_kind;
typedef struct bsl_option {
    const char *name;
    bsl_kind kind;
    size_t offset; /* in the struct that is filled */
    bool required;
} bsl_option;
/* Fill the struct at out from the option table at arg (nil or none: empty); an unknown key is an error
   that lists the valid ones. spec ends with a NULL name. Nothing is pushed. */
void bsl_options(lua_State *L, int arg, const bsl_option *spec, void *out);
/* The same for a table at an index, inside argument arg; prefix: put before the names in messages. */
void bsl_nestedoptions(lua_State *L, int arg, int index, const char *prefix, const bsl_option *spec,
                       void *out);
/* The same for the table in a field of the one at arg; absent: nothing is filled. */
void bsl_suboptions(lua_State *L, int arg, const char *field, const bsl_option *spec, void *out);
/* Push field of the table at arg and check that it is an open box of the type; its handle. */
void *bsl_optionbox(lua_State *L, int arg, const char *field, const bsl_type *type, bool required);
/* The place of s in a NULL-ended list of words; an error about `field` that lists them otherwise. */
int bsl_word(lua_State *L, int arg, const char *field, const char *s, const char *const *word);

/* The value on the top when it is a number that is an integer (text is not converted), else not whole. */
lua_Integer bsl_toint(lua_State *L, int *whole);
int bsl_checkint(lua_State *L, int arg, int min, int max);
int64_t bsl_checkcount(lua_State *L, int arg); /* >= 0 */
bs_dtype bsl_checkdtype(lua_State *L, int arg);
/* Integers of the table at arg into dim; their number. */
int bsl_checkdims(lua_State *L, int arg, int64_t dim[BS_MAX_DIMS]);
void bsl_pushdims(lua_State *L, int ndim, const int64_t *dim);
/* Integers of a table or an i64 array at index, as scratch that stays on the stack (one value pushed).
   name: for messages. */
const int64_t *bsl_integers(lua_State *L, int arg, int index, const char *name, int64_t *n);
/* The visits of the list at index, as scratch that stays on the stack. */
bs_visit_spec *bsl_visits(lua_State *L, int arg, int index, int *n);
bs_tensor *bsl_checktensor(lua_State *L, int arg);
/* A closed tensor box of the open scope; at `from` is a tensor of it, its engine, or an object made on
   that engine. It ends with the scope. */
bsl_box *bsl_newtensor(lua_State *L, int from);
void bsl_batchcfg(lua_State *L, int arg, bs_batch_cfg *out);

/* Raise "option 'field': expected X, got Y" about the value on the top. */
int bsl_optionerror(lua_State *L, int arg, const char *field, const char *expected);

extern const char *const bsl_home_words[]; /* in the order of bs_home */
extern const bsl_option bsl_io_options[];  /* of bs_io_cfg */

static inline void bsl_setint(lua_State *L, const char *field, lua_Integer v)
{
    lua_pushinteger(L, v);
    lua_setfield(L, -2, field);
}
static inline void bsl_setnum(lua_State *L, const char *field, double v)
{
    lua_pushnumber(L, v);
    lua_setfield(L, -2, field);
}
static inline void bsl_setstr(lua_State *L, const char *field, const char *v)
{
    lua_pushstring(L, v);
    lua_setfield(L, -2, field);
}
static inline void bsl_setbool(lua_State *L, const char *field, bool v)
{
    lua_pushboolean(L, v);
    lua_setfield(L, -2, field);
}

/* ---- modules: each adds its tables and types to the module table on the top ------------------ */

void bsl_open_json(lua_State *L);
void bsl_open_system(lua_State *L);
void bsl_open_array(lua_State *L);
void bsl_open_file(lua_State *L);
void bsl_open_folder(lua_State *L);
void bsl_open_manifest(lua_State *L);
void bsl_open_routing(lua_State *L);
void bsl_open_placement(lua_State *L);
void bsl_open_engine(lua_State *L);
void bsl_open_store(lua_State *L);
void bsl_open_params(lua_State *L);
void bsl_open_tensor(lua_State *L);
void bsl_open_head(lua_State *L);
void bsl_open_stream(lua_State *L);
void bsl_open_embedding(lua_State *L);
void bsl_open_rates(lua_State *L);
void bsl_open_gpu(lua_State *L);
void bsl_open_tokenizer(lua_State *L);

/* ---- Lua files inside the program (cmake/embed_lua.cmake) ------------------------------------ */

typedef struct bsl_embedded {
    const char *name, *chunk;
    const unsigned char *data;
    size_t size;
} bsl_embedded;
extern const bsl_embedded bsl_embedded_files[]; /* ends with a NULL name */

#endif
