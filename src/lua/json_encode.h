/* SPDX-License-Identifier: Apache-2.0 */
/*
** json_encode.h: what bs.json needs to write values, and the marks that reading and writing share.
*/
#ifndef BSL_JSON_ENCODE_H
#define BSL_JSON_ENCODE_H

#include "lua/bsl.h"

extern const char bsl_json_array[];   /* name of the metatable of tables that are arrays when empty */
void bsl_json_pushnull(lua_State *L); /* bs.json.null */
/* Push the text of the value at index. Raises what JSON cannot hold: status arg or nonfinite. sort: members by key;
   else in the order of the table. */
void bsl_json_encode(lua_State *L, int index, bool pretty, bool sort);

#endif
