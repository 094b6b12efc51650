/* SPDX-License-Identifier: Apache-2.0 */
/*
** kernel_test.h: what the kernel tests share: a bsk_par of real threads, reproducible numbers, and
** the distance of two arrays. Included by one test program each.
*/
#ifndef BS_KERNEL_TEST_H
#define BS_KERNEL_TEST_H

#include "base/base.h"
#include "bsk.h"

#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

struct team {
    void (*fn)(void *arg, int64_t i);
    void *arg;
    int64_t n;
    _Atomic int64_t next;
};

static void *team_work(void *p)
{
    struct team *t = p;
    for (int64_t i; (i = atomic_fetch_add(&t->next, 1)) < t->n;)
        t->fn(t->arg, i);
    return NULL;
}

/* impl: the number of threads, as a pointer-sized integer. */
static void team_run(bsk_par *self, int64_t n, void (*fn)(void *arg, int64_t i), void *arg)
{
    struct team t = {fn, arg, n, 0};
    pthread_t th[8];
    int helpers = (int)(intptr_t)self->impl - 1;
    for (int i = 0; i < helpers; i++)
        assert_int_equal(pthread_create(&th[i], NULL, team_work, &t), 0);
    team_work(&t);
    for (int i = 0; i < helpers; i++)
        pthread_join(th[i], NULL);
}

/* Serial, two and three threads: every kernel must give the same bits on all. */
static bsk_par team2 = {team_run, (void *)2}, team3 = {team_run, (void *)3};
static bsk_par *const pars[3] = {&bsk_par_serial, &team2, &team3};

static uint32_t rng_count;

static inline double uniform(void) /* [-1, 1) */
{
    uint32_t out[4];
    const uint32_t counter[4] = {rng_count++, 0, 0, 0}, key[2] = {17, 0};
    bsi_philox(counter, key, out);
    return 2.0 * (double)bsi_uniform(out[0]) - 1.0;
}

/* n floats of [-scale, scale), followed by a guard word that array_free checks. */
static inline float *array(int64_t n, double scale)
{
    float *p = malloc(((size_t)n + 1) * sizeof *p);
    assert_non_null(p);
    for (int64_t i = 0; i < n; i++)
        p[i] = (float)(scale * uniform());
    p[n] = 12345.0f;
    return p;
}

static inline float *array_of(int64_t n, float value)
{
    float *p = array(n, 0);
    for (int64_t i = 0; i < n; i++)
        p[i] = value;
    return p;
}

static inline float *array_copy(const float *from, int64_t n)
{
    float *p = array(n, 0);
    memcpy(p, from, (size_t)n * sizeof *p);
    return p;
}

static inline void array_free(float *p, int64_t n)
{
    assert_true(p[n] == 12345.0f);
    free(p);
}

/* |got - want| <= tol * (1 + |want|), element by element; a NaN fails. */
static inline void near_(const char *what, double got, double want, double tol)
{
    if (!(fabs(got - want) <= tol * (1.0 + fabs(want))))
        fail_msg("%s: got %.9g, want %.9g, tolerance %g", what, got, want, tol);
}

static inline void same_bits(const char *what, const float *a, const float *b, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        if (memcmp(a + i, b + i, sizeof *a) != 0)
            fail_msg("%s: element %lld: %.9g and %.9g differ in bits", what, (long long)i, (double)a[i],
                     (double)b[i]);
}

/* Launch through the table: what the device does. */
static inline void launch(bsk_op op, bsk_call c, bsk_par *par)
{
    c.par = par;
    assert_non_null(bsk_cpu[op].fn);
    bsk_cpu[op].fn(&c);
}

#endif
