/* SPDX-License-Identifier: Apache-2.0 */
/*
** main.c: the program bslua: the command line of lua with libbs inside. Exit status: bslua_exit; n when the
** script raised {bs_exit = n, message = text} or called os.exit(n); after an interruption the signal is
** raised again once everything is closed, so that the shell sees it.
*/
#include "bs.h"
#include "bslua.h"
#include "host/host.h"
#include "lua/bsl.h"

#include <lauxlib.h>
#include <lualib.h>
#include <malloc.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char help[] =
    "usage: bslua [options] [script [args]]\n"
    "  -e stat    run the string 'stat'\n"
    "  -l mod     require 'mod' into the global 'mod'\n"
    "  -l g=mod   require 'mod' into the global 'g'\n"
    "  -v         print the version\n"
    "  -E         ignore environment variables\n"
    "  -W         turn warnings on\n"
    "  --         end of the options\n"
    "  -          run standard input\n"
    "  --help     print this\n"
    "  --version  print the version and what is built in\n"
    "  --doctor   say what this machine has, what is missing and how fast it is;\n"
    "             then dir=FOLDER, json=FILE, help\n"
    "Exit status: 0 done, 1 error, 2 usage, n as the script says.\n"
    "BSLUA_HOME=DIR is searched for modules before those inside the program.\n";

typedef struct options {
    int script; /* index in argv; argc: none */
    bool ran;   /* -e or -v */
    bool version, long_version, help, doctor, no_env, warn;
} options;

static int usage(const char *word, const char *problem)
{
    char text[512];
    snprintf(text, sizeof text, "%s%s%s", word, *word ? ": " : "", problem);
    bs_tell(text, strlen(text), false);
    fputs("try 'bslua --help'\n", stderr);
    return BSLUA_EXIT_USAGE;
}

/* Report what a failed call left on the top, pop it, give the exit status. one_line: whatever names it holds; so
   are a message of bs.fail and what the system refused. A programmer's error has more lines, its traceback. */
static int report(lua_State *L, bool one_line)
{
    int code = BSLUA_EXIT_ERROR;
    size_t n = 0;
    const char *text;
    if (lua_istable(L, -1) && lua_getfield(L, -1, "bs_exit") != LUA_TNIL) {
        one_line = true;
        code = (int)lua_tointeger(L, -1);
        lua_getfield(L, -2, "message");
    } else if (bsl_statusof(L, -1) != BS_OK) {
        one_line = true;
    }
    text = lua_tolstring(L, -1, &n);
    fflush(stdout);
    if (n > 0)
        bs_tell(text, n, !one_line);
    return code;
}

static int run(lua_State *L, int load_status, int n_args)
{
    if (load_status != LUA_OK)
        return report(L, true);
    return host_call(L, n_args, 0) == LUA_OK ? BSLUA_EXIT_DONE : report(L, false);
}

static int run_string(lua_State *L, const char *text, const char *name)
{
    return run(L, luaL_loadbuffer(L, text, strlen(text), name), 0);
}

/* A script by its name. Of what is there only regular files: nothing is waited for, or read without an end. */
static int load_file(lua_State *L, const char *name)
{
    int fd = -1;
    if (name && bs_file_open(name, &fd) != BS_OK && bs_error()->sys == 0) {
        lua_pushfstring(L, "%s; the word - runs standard input", bs_error()->msg);
        return LUA_ERRFILE;
    }
    if (fd >= 0)
        close(fd);
    return luaL_loadfile(L, name);
}

/* LUA_INIT, as lua does it: text, or @file. */
static int run_init(lua_State *L)
{
    const char *name = "=LUA_INIT_" LUA_VERSION_MAJOR "_" LUA_VERSION_MINOR;
    const char *text = getenv(name + 1);
    if (!text) {
        name = "=LUA_INIT";
        text = getenv(name + 1);
    }
    if (!text)
        return BSLUA_EXIT_DONE;
    return text[0] == '@' ? run(L, load_file(L, text + 1), 0) : run_string(L, text, name);
}

/* A module that is not there is the command line's fault; any other error is the module's. */
static int report_require(lua_State *L, const char *module)
{
    const char *text = lua_tostring(L, -1);
    const char *missing = lua_pushfstring(L, "module '%s' not found:", module);
    if (!text || strncmp(text, missing, strlen(missing)) != 0) {
        lua_pop(L, 1);
        return report(L, false);
    }
    lua_pushfstring(
        L,
        "-l: %s nothing of that name in BSLUA_HOME, in the program, on package.path and package.cpath",
        missing);
    return report(L, true);
}

/* -l mod or -l g=mod */
static int run_require(lua_State *L, const char *word)
{
    const char *eq = strchr(word, '=');
    const char *module = eq ? eq + 1 : word;
    lua_getglobal(L, "require");
    lua_pushstring(L, module);
    if (host_call(L, 1, 1) != LUA_OK)
        return report_require(L, module);
    if (eq)
        lua_pushlstring(L, word, (size_t)(eq - word));
    else
        lua_pushstring(L, word);
    lua_insert(L, -2);
    lua_pushglobaltable(L);
    lua_insert(L, -3);
    lua_settable(L, -3);
    lua_pop(L, 1);
    return BSLUA_EXIT_DONE;
}

/* The value of -e or -l at argv[i]: glued to it or the next word (then *used). NULL: missing. */
static const char *value_of(char **argv, int i, int *used)
{
    *used = argv[i][2] == '\0';
    return *used ? argv[i + 1] : argv[i] + 2;
}

/* Check the command line without running anything. */
static int collect(int argc, char **argv, options *o)
{
    int i, used;
    for (i = 1; i < argc && argv[i][0] == '-' && argv[i][1]; i++) {
        const char *w = argv[i];
        if (strcmp(w, "--") == 0) {
            i++;
            break;
        }
        if (strcmp(w, "--doctor") == 0) {
            o->doctor = true; /* the words that follow are its own */
            i++;
            break;
        }
        if (strcmp(w, "--help") == 0)
            o->help = true;
        else if (strcmp(w, "--version") == 0)
            o->long_version = true;
        else if (w[1] == 'e' || w[1] == 'l') {
            if (!value_of(argv, i, &used))
                return usage(w, "an argument is missing");
            o->ran = o->ran || w[1] == 'e';
            i += used;
        } else if (strcmp(w, "-v") == 0)
            o->version = o->ran = true;
        else if (strcmp(w, "-E") == 0)
            o->no_env = true;
        else if (strcmp(w, "-W") == 0)
            o->warn = true;
        else if (strcmp(w, "-i") == 0)
            return usage(w, "no REPL in this build");
        else
            return usage(w, "unknown option");
    }
    o->script = i;
    return BSLUA_EXIT_DONE;
}

/* Run the -e and -l options in order. */
static int run_options(lua_State *L, char **argv, int end)
{
    int status = BSLUA_EXIT_DONE, used;
    for (int i = 1; status == BSLUA_EXIT_DONE && i < end; i++) {
        if (argv[i][1] != 'e' && argv[i][1] != 'l')
            continue;
        const char *value = value_of(argv, i, &used);
        status = argv[i][1] == 'e' ? run_string(L, value, "=(command line)") : run_require(L, value);
        i += used;
    }
    return status;
}

/* Global `arg`: the script at 0, its arguments after it, everything before it at negative places. */
static void make_arg(lua_State *L, int argc, char **argv, int script)
{
    if (script == argc)
        script = 0;
    lua_createtable(L, argc - script, script + 1);
    for (int i = 0; i < argc; i++) {
        lua_pushstring(L, argv[i]);
        lua_rawseti(L, -2, i - script);
    }
    lua_setglobal(L, "arg");
}

static int run_script(lua_State *L, int argc, char **argv, int script)
{
    const char *name = argv[script];
    bool dashes = strcmp(argv[script - 1], "--") == 0;
    int status = load_file(L, strcmp(name, "-") == 0 && !dashes ? NULL : name);
    luaL_checkstack(L, argc - script, "too many arguments");
    for (int i = script + 1; status == LUA_OK && i < argc; i++)
        lua_pushstring(L, argv[i]);
    return run(L, status, status == LUA_OK ? argc - script - 1 : 0);
}

static int run_doctor(lua_State *L, int argc, char **argv, int first)
{
    lua_getglobal(L, "require");
    lua_pushliteral(L, "bs.cli.doctor");
    if (host_call(L, 1, 1) != LUA_OK)
        return report(L, false);
    lua_getfield(L, -1, "main");
    lua_createtable(L, argc - first, 0);
    for (int i = first; i < argc; i++) {
        lua_pushstring(L, argv[i]);
        lua_rawseti(L, -2, i - first + 1);
    }
    return run(L, LUA_OK, 1);
}

/* Everything that may raise: argc, argv and the options as light userdata; returns the exit status. */
static int protected_main(lua_State *L)
{
    int argc = (int)lua_tointeger(L, 1);
    char **argv = lua_touserdata(L, 2);
    const options *o = lua_touserdata(L, 3);
    int status = BSLUA_EXIT_DONE;
    luaL_checkversion(L);
    if (o->no_env) { /* package.path and cpath then ignore the environment too */
        lua_pushboolean(L, 1);
        lua_setfield(L, LUA_REGISTRYINDEX, "LUA_NOENV");
    }
    luaL_openlibs(L);
    host_modules(L, o->no_env ? NULL : getenv("BSLUA_HOME"));
    make_arg(L, argc, argv, o->script);
    lua_gc(L, LUA_GCGEN, 0, 0);
    if (o->warn)
        lua_warning(L, "@on", 0);
    if (!o->no_env)
        status = run_init(L);
    if (status == BSLUA_EXIT_DONE)
        status = run_options(L, argv, o->script);
    if (status == BSLUA_EXIT_DONE && o->doctor)
        status = run_doctor(L, argc, argv, o->script);
    else if (status == BSLUA_EXIT_DONE && o->script < argc)
        status = run_script(L, argc, argv, o->script);
    else if (status == BSLUA_EXIT_DONE && !o->ran) {
        if (isatty(STDIN_FILENO))
            status = usage("", "no script given, and no REPL in this build");
        else
            status = run(L, luaL_loadfile(L, NULL), 0);
    }
    lua_pushinteger(L, status);
    return 1;
}

/* Large blocks go back to the system when they are freed. Left alone the limit rises with the first ones and
   holes between aligned blocks then keep many times what is in use. */
static void give_back_memory(void)
{
#ifdef M_MMAP_THRESHOLD
    mallopt(M_MMAP_THRESHOLD, 1 << 20);
#endif
}

int main(int argc, char **argv)
{
    options o = {0};
    host_streams();
    give_back_memory();
    int status = collect(argc, argv, &o);
    if (status != BSLUA_EXIT_DONE)
        return status;
    if (o.help || o.long_version) {
        if (o.help)
            fputs(help, stdout);
        else
            printf("bslua %s (%s)\n%s", bs_version(), LUA_RELEASE, bs_build_info());
        return fflush(stdout) == 0 ? BSLUA_EXIT_DONE : BSLUA_EXIT_ERROR;
    }
    if (o.version)
        printf("bslua %s  %s\n", bs_version(), LUA_COPYRIGHT);
    lua_State *L = luaL_newstate();
    if (!L) {
        fputs("bslua: not enough memory\n", stderr);
        return BSLUA_EXIT_ERROR;
    }
    lua_pushcfunction(L, protected_main);
    lua_pushinteger(L, argc);
    lua_pushlightuserdata(L, argv);
    lua_pushlightuserdata(L, &o);
    if (lua_pcall(L, 3, 1, 0) == LUA_OK)
        status = (int)lua_tointeger(L, -1);
    else
        status = report(L, false);
    lua_close(L);
    if (host_signal() != 0) {
        fflush(NULL);
        signal(host_signal(), SIG_DFL);
        raise(host_signal());
    }
    return status;
}
