/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_thread.c: the threads of the cpu device: workers of queues and helpers of a pool. */
#include "backend/cpu/cpu.h"

bs_status bsi_cpu_thread(pthread_t *out, void *(*fn)(void *), void *arg, const char *prefix,
                         unsigned index)
{
    char name[16]; /* with the terminator: a limit of the kernel */
    snprintf(name, sizeof name, "%s%u", prefix, index % 100000);
    int err = bsi_thread_start(out, fn, arg, name);
    return err ? bsi_fail_sys(BS_NOMEM, err, "a thread of the cpu device cannot be started") : BS_OK;
}
