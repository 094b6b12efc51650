/* SPDX-License-Identifier: Apache-2.0 */
/*
** fake_calls.h: system calls that change files, counted, and one of them ended by a kill or a failure.
** Only calls on paths that have FAKE_CALLS_UNDER in them count. Linked into a test program, which sets
** the state, or preloaded, where the environment does:
**   FAKE_CALLS_UNDER   a part of the paths that count; without it nothing does
**   FAKE_CALLS_KILL    the process is killed where the call of this number would be
**   FAKE_CALLS_FAIL    the call of this number fails ...
**   FAKE_CALLS_ERRNO   ... with this
**   FAKE_CALLS_PLAIN   1: renameat2 fails with EINVAL
**   FAKE_CALLS_COUNT   a file that gets the number of calls at exit
*/
#ifndef FAKE_CALLS_H
#define FAKE_CALLS_H

typedef struct fake_calls {
    char under[1024];
    int kill_at, fail_at, error, plain, count;
} fake_calls;
extern fake_calls fake_calls_state;

#endif
