/* SPDX-License-Identifier: Apache-2.0 */
/*
** thread.c: threads of libbs's own. They begin with all signals blocked: signals are for the owner,
** whose handlers may be Lua's. Their stacks have one size, whatever the shell's limit for that of the main thread is:
** kernels hold tiles on it.
*/
#include "base/base.h"

#include <signal.h>

#define STACK ((size_t)2 << 20)

int bsi_thread_start(pthread_t *out, void *(*fn)(void *arg), void *arg, const char *name)
{
    sigset_t all, before;
    pthread_attr_t attr;
    int err = pthread_attr_init(&attr);
    if (err != 0)
        return err;
    pthread_attr_setstacksize(&attr, STACK); /* refused only below PTHREAD_STACK_MIN */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    err = pthread_create(out, &attr, fn, arg);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attr);
    if (err == 0)
        pthread_setname_np(*out, name);
    return err;
}
