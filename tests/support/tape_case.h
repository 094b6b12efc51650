/* SPDX-License-Identifier: Apache-2.0 */
/* tape_case.h: a scope of T rows of C channels on check:cpu, and what its tests ask of gradients. */
#ifndef TAPE_CASE_H
#define TAPE_CASE_H

#include "tensor_fixture.h"

enum { T = 6, C = 8 };

static inline void assert_error(bs_status got, bs_status want, const char *part)
{
    if (got != want || !strstr(bs_error()->msg, part))
        fail_msg("status %s, message \"%s\"; expected %s with \"%s\"", bs_status_name(got),
                 bs_error()->msg, bs_status_name(want), part);
}

static inline void start(fixture *f)
{
    fix_open(f, "check:cpu", 16);
    fix_rows(f, 0, 1, (int64_t[]){T}, NULL);
}

static inline void release(int n, bs_tensor *const *t)
{
    for (int i = 0; i < n; i++)
        bs_tensor_release(t[i]);
}

#define release_all(...)                                                                               \
    do {                                                                                               \
        bs_tensor *all_[] = {__VA_ARGS__};                                                             \
        release((int)BSI_COUNT(all_), all_);                                                           \
    } while (0)

/* d(sum r*y)/dx must be k[i] * r[i] */
static inline void assert_grad(bs_tensor *x, const float *r, const float *k, double factor)
{
    bs_tensor *g;
    float got[T * C];
    ok(bs_tensor_grad(x, &g));
    assert_non_null(g);
    fix_values(g, got);
    for (int i = 0; i < T * C; i++) {
        double want = factor * (double)r[i] * (k ? (double)k[i] : 1.0);
        if (!(fabs((double)got[i] - want) <= 1e-6 * (1.0 + fabs(want))))
            fail_msg("gradient %d is %g, %g expected", i, (double)got[i], want);
    }
    bs_tensor_release(g);
}

#endif
