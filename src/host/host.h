/* SPDX-License-Identifier: Apache-2.0 */
/*
** host.h: the parts of the program bslua. All of it runs on the main thread.
*/
#ifndef BSL_HOST_H
#define BSL_HOST_H

#include <lua.h>

/* streams.c: fill standard streams that are closed, and let writes to them fail as the program wants it. First. */
void host_streams(void);

/* signal.c: run a function as lua_pcall does while SIGINT can interrupt it. */
int host_call(lua_State *L, int n_args, int n_results);
/* The signal that interrupted the script or that it was told of; 0: none. */
int host_signal(void);
/* Module "bs.host". */
int host_open(lua_State *L);

/* modules.c: package.searchers finds BSLUA_HOME (NULL: unset) and the embedded files. */
void host_modules(lua_State *L, const char *home);

#endif
