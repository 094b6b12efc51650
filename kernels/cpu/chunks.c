/* SPDX-License-Identifier: Apache-2.0 */
/*
** chunks.c: how the CPU kernels share work among threads. The borders of the chunks depend on sizes only, never on
** the number of threads, so that a sum inside a chunk has the same order, and the same bits, everywhere.
*/
#include "cpu.h"

static void run_serial(bsk_par *self, int64_t n, void (*fn)(void *arg, int64_t i), void *arg)
{
    (void)self;
    for (int64_t i = 0; i < n; i++)
        fn(arg, i);
}

bsk_par bsk_par_serial = {run_serial, NULL};

struct chunked {
    bsk_body *body;
    const void *arg;
    int64_t n, grain;
};

static void run_chunk(void *arg, int64_t i)
{
    const struct chunked *c = arg;
    c->body(c->arg, i * c->grain, BSI_MIN((i + 1) * c->grain, c->n));
}

void bsk_chunks(bsk_par *par, int64_t n, int64_t cost, bsk_body *body, const void *arg)
{
    struct chunked c = {body, arg, n, BSI_MAX(32768 / BSI_MAX(cost, 1), 1)};
    if (n <= 0)
        return;
    if (n <= c.grain)
        body(arg, 0, n);
    else
        par->run(par, (n + c.grain - 1) / c.grain, run_chunk, &c);
}
