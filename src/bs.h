/* SPDX-License-Identifier: Apache-2.0 */
/*
** bs.h: the public C API of libbs. No Lua and no CUDA in it; valid C11 and C++17.
**
** Conventions. A fallible function returns bs_status (0 = ok); the detail of the last failure on the
** calling thread is bs_error(). Results go through the last arguments. Sizes are bytes (size_t);
** elements, rows and dimensions are int64_t. A configuration struct that is all zero asks for the
** defaults. `open`/`new` hand a new object to the caller, who ends it with `close`/`free` (NULL is
** fine); `get` borrows until the next call on that object. All calls that touch one engine are made
** by one thread, the owner. Closing in any order is fine as long as an engine is closed after the
** objects made on it.
*/
#ifndef BS_H
#define BS_H

#include "bs/base.h"
#include "bs/dev.h"
#include "bs/engine.h"
#include "bs/io.h"
#include "bs/stream.h"
#include "bs/tensor.h"
#include "bs/text.h"
#include "bs/train.h"

#endif
