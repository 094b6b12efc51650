/* SPDX-License-Identifier: Apache-2.0 */
/*
** lsystem.c: the few facts and actions of the operating system that recipes need and Lua lacks: files and
** folders, memory, the process.
*/
#include "lua/bsl.h"

#include <dirent.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static int fail_path(lua_State *L, const char *what, const char *path, int err)
{
    return luaL_error(L, "%s '%s': io: %s [io]", what, path, strerror(err));
}

/* mkdir(path): the folder and its parents; one that exists is fine. */
static int l_mkdir(lua_State *L)
{
    size_t n;
    const char *path = luaL_checklstring(L, 1, &n);
    char *copy = lua_newuserdatauv(L, n + 1, 0);
    struct stat st;
    memcpy(copy, path, n + 1);
    for (size_t i = 1; i <= n; i++) {
        if (copy[i] != '/' && copy[i] != '\0')
            continue;
        char kept = copy[i];
        copy[i] = '\0';
        if (mkdir(copy, 0777) != 0 && errno != EEXIST)
            return fail_path(L, "bs.mkdir", copy, errno);
        copy[i] = kept;
    }
    if (stat(path, &st) != 0)
        return fail_path(L, "bs.mkdir", path, errno);
    if (!S_ISDIR(st.st_mode))
        return fail_path(L, "bs.mkdir", path, ENOTDIR);
    return 0;
}

/* is_file(path): it is a regular file. Unlike io.open this never waits for the writer of a pipe. */
static int l_is_file(lua_State *L)
{
    struct stat st;
    lua_pushboolean(L, stat(luaL_checkstring(L, 1), &st) == 0 && S_ISREG(st.st_mode));
    return 1;
}

/* same_file(a, b): both paths are there and lead to one file or folder. */
static int l_same_file(lua_State *L)
{
    struct stat a, b;
    const char *x = luaL_checkstring(L, 1), *y = luaL_checkstring(L, 2);
    lua_pushboolean(L, stat(x, &a) == 0 && stat(y, &b) == 0 && a.st_dev == b.st_dev &&
                           a.st_ino == b.st_ino);
    return 1;
}

/* real_path(path) -> it without links, from the root; nil where there is nothing. */
static int l_real_path(lua_State *L)
{
    char *real = realpath(luaL_checkstring(L, 1), NULL);
    lua_pushstring(L, real); /* NULL: nil. Memory that is all gone loses one path */
    free(real);
    return 1;
}

/* list_folder(path) -> sorted names in it, without "." and ".."; nil and a message when it cannot be read. */
static int l_list_folder(lua_State *L)
{
    struct dirent **entry;
    const char *path = luaL_checkstring(L, 1);
    lua_newtable(L);
    int n = scandir(path, &entry, NULL, alphasort);
    if (n < 0) {
        lua_pushnil(L);
        lua_pushfstring(L, "bs.list_folder '%s': io: %s [io]", path, strerror(errno));
        return 2;
    }
    lua_Integer at = 0;
    for (int i = 0; i < n; i++) { /* names are short: only memory that is all gone can raise here */
        const char *name = entry[i]->d_name;
        if (strcmp(name, ".") != 0 && strcmp(name, "..") != 0) {
            lua_pushstring(L, name);
            lua_rawseti(L, -2, ++at);
        }
        free(entry[i]);
    }
    free(entry);
    return 1;
}

/* check_folder(path): it can be written, or made: said before hours of work and not after. One that was not
   there is not left behind. */
static int l_check_folder(lua_State *L)
{
    const char *path = luaL_checkstring(L, 1);
    bool there = access(path, F_OK) == 0;
    lua_pushcfunction(L, l_mkdir);
    lua_pushvalue(L, 1);
    lua_call(L, 1, 0);
    int no = access(path, W_OK | X_OK) == 0 ? 0 : errno;
    if (!there)
        rmdir(path);
    return no ? fail_path(L, "bs.check_folder", path, no) : 0;
}

/* memory_available() -> bytes that new allocations may take without swapping. */
static int l_memory_available(lua_State *L)
{
    uint64_t bytes;
    bsl_try(L, bs_memory_available(&bytes), "bs.memory_available");
    lua_pushinteger(L, (lua_Integer)bytes);
    return 1;
}

/* rss() -> resident bytes of this process, and the most that were. */
static int l_rss(lua_State *L)
{
    uint64_t now, peak;
    bsl_try(L, bs_process_memory(&now, &peak), "bs.rss");
    lua_pushinteger(L, (lua_Integer)now);
    lua_pushinteger(L, (lua_Integer)peak);
    return 2;
}

/* io_bytes() -> bytes that storage has delivered to this process; nil where they are not counted. */
static int l_io_bytes(lua_State *L)
{
    uint64_t bytes;
    if (bs_process_read_bytes(&bytes))
        lua_pushinteger(L, (lua_Integer)bytes);
    else
        lua_pushnil(L);
    return 1;
}

static int l_pid(lua_State *L)
{
    lua_pushinteger(L, (lua_Integer)getpid());
    return 1;
}

/* printable(text [, running]) -> text: see bs_printable. */
static int l_printable(lua_State *L)
{
    size_t n;
    const char *s = luaL_checklstring(L, 1, &n);
    bool running = lua_toboolean(L, 2);
    size_t made = bs_printable(s, n, running, NULL, 0);
    luaL_Buffer b;
    bs_printable(s, n, running, luaL_buffinitsize(L, &b, made), made);
    luaL_pushresultsize(&b, made);
    return 1;
}

/* is_terminal(stream): "stdin", "stdout" or "stderr". */
static int l_is_terminal(lua_State *L)
{
    static const char *const name[] = {"stdin", "stdout", "stderr", NULL};
    lua_pushboolean(L, isatty(luaL_checkoption(L, 1, NULL, name)));
    return 1;
}

void bsl_open_system(lua_State *L)
{
    static const luaL_Reg functions[] = {{"mkdir", l_mkdir},
                                         {"check_folder", l_check_folder},
                                         {"io_bytes", l_io_bytes},
                                         {"is_file", l_is_file},
                                         {"is_terminal", l_is_terminal},
                                         {"list_folder", l_list_folder},
                                         {"memory_available", l_memory_available},
                                         {"pid", l_pid},
                                         {"printable", l_printable},
                                         {"real_path", l_real_path},
                                         {"rss", l_rss},
                                         {"same_file", l_same_file},
                                         {NULL, NULL}};
    luaL_setfuncs(L, functions, 0);
}
