/* SPDX-License-Identifier: Apache-2.0 */
/*
** thread.c: threads of libbs's own. They begin with all signals blocked: signals are for the owner,
** whose handlers may be Lua's.
*/
#include "base/base.h"

#include <signal.h>

int bsi_thread_start(pthread_t *out, void *(*fn)(void *arg), void *arg, const char *name)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int err = pthread_create(out, NULL, fn, arg);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (err == 0)
        pthread_setname_np(*out, name);
    return err;
}
