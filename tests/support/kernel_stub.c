/* SPDX-License-Identifier: Apache-2.0 */
/* Weak stand-ins so that device tests link in a tree without kernels/cpu; real kernels win over them.
 */
#include "bsk.h"

static void serial(struct bsk_par *self, int64_t n, void (*fn)(void *arg, int64_t i), void *arg)
{
    (void)self;
    for (int64_t i = 0; i < n; i++)
        fn(arg, i);
}

__attribute__((weak)) const bsk_entry bsk_cpu[BSK_OP_COUNT];
__attribute__((weak)) bsk_par bsk_par_serial = {serial, NULL};
__attribute__((weak)) void bsk_cpu_init(void) {}
