/* SPDX-License-Identifier: Apache-2.0 */
/*
** kernel_trial.h: one launch of a kernel on a device against the same launch of the CPU's, for the tests
** of device kernels: which trials are run, the comparison, a line of output each. Compiled with BSK_ON_CPU
** the device is the source of the cuda kernels on the CPU (trial_on_cpu.h). Included by one file of a program.
*/
#ifndef KERNEL_TRIAL_H
#define KERNEL_TRIAL_H

#include "trial.h"

#ifdef BSK_ON_CPU
#include "trial_on_cpu.h"
#else
#include "trial_on_device.h"
#endif

#include <math.h>

static int passed, failed;
static const char *only; /* NULL: all */
static unsigned every = 1, seen;

static void run_cpu(trial *t)
{
    bsk_call c = {.par = &bsk_par_serial};
    for (int i = 0; i < t->count; i++)
        c.p[i] = t->p[i].n == 0     ? NULL
                 : t->p[i].cpu_same ? t->p[t->p[i].cpu_same - 1].value
                                    : t->p[i].value;
    memcpy(c.n, t->n, sizeof c.n);
    memcpy(c.f, t->f, sizeof c.f);
    bsk_cpu[t->op].fn(&c);
}

static double read_back(const trial *t, const layout *l, const unsigned char *image, int i, int64_t j)
{
    const unsigned char *from = image + l->at[i];
    uint16_t half;
    float single;
    int32_t number;
    double d;
    if (narrow(t, t->p[i].kind)) {
        memcpy(&half, from + 2 * j, 2);
        return (double)bsi_bf16_to_f32(half);
    }
    if (t->p[i].kind == D) {
        memcpy(&d, from + 8 * j, 8);
        return d;
    }
    if (t->p[i].kind == I) {
        memcpy(&number, from + 4 * j, 4);
        return (double)number;
    }
    memcpy(&single, from + 4 * j, 4);
    return (double)single;
}

/* Relative error of operand i: root mean square of the difference over that of the expected values. */
static double distance(const trial *t, const layout *l, const unsigned char *image, int i)
{
    const operand *o = &t->p[i];
    const void *want = o->cpu_same ? t->p[o->cpu_same - 1].value : o->value;
    double error = 0, norm = 0;
    for (int64_t j = 0; j < o->n; j++) {
        double w = o->kind == D   ? ((const double *)want)[j]
                   : o->kind == I ? (double)((const int32_t *)want)[j]
                                  : (double)((const float *)want)[j];
        double g = read_back(t, l, image, i, j);
        if (w == g || (isnan(w) && isnan(g))) /* infinities, and what neither writes */
            w = g = isfinite(w) ? w : 0.0;
        error += (g - w) * (g - w);
        norm += w * w;
    }
    double n = (double)o->n;
    return sqrt(error / n) / fmax(sqrt(norm / n), t->floor);
}

static bool chosen(const trial *t)
{
    bool listed = !only;
    for (const char *name = only; name && !listed; name = strchr(name, ',')) {
        name += *name == ',';
        size_t n = strcspn(name, ",");
        listed = n > 0 && strncmp(t->name, name, n) == 0;
    }
    return listed && (seen++ * 2654435761u >> 8) % every == 0; /* scattered: trials come in patterns */
}

static void release(trial *t)
{
    for (int i = 0; i < t->count; i++)
        free(t->p[i].value);
}

static void run(trial *t)
{
    if (!chosen(t)) {
        release(t);
        return;
    }
    round_inputs(t);
    layout l = lay_out(t);
    unsigned char *image = must_alloc(l.bytes), *again = must_alloc(l.bytes);
    char errors[160] = "";
    bool ok = true;
    encode(t, &l, image);
    memcpy(again, image, l.bytes);
    if (!run_device(t, &l, image)) { /* an op that is not there */
        release(t);
        free(image);
        free(again);
        return;
    }
    run_device(t, &l, again);
    for (int i = 0; i < t->count; i++)
        if (!(t->p[i].mode & BSI_READ) && t->p[i].kind != SCRATCH) /* the CPU may leave some, too */
            for (int64_t j = 0; j < t->p[i].n && t->p[i].kind != D; j++)
                ((float *)t->p[i].value)[j] = NAN;
    run_cpu(t);
    for (int i = 0; i < t->count; i++) {
        if (!(t->p[i].mode & BSI_WRITE) || t->p[i].kind == SCRATCH || t->p[i].n == 0)
            continue;
        bool coarse = narrow(t, t->p[i].kind) || t->dtype == BS_DTYPE_BF16;
        double bound = t->p[i].kind == I ? 0.0 : coarse ? t->bound : fmin(t->bound, 1e-4);
        double e = distance(t, &l, image, i);
        size_t at = strlen(errors);
        snprintf(errors + at, sizeof errors - at, " p%d %.1e", i, e);
        ok = ok && e <= bound; /* false for NaN */
        size_t bytes = (size_t)t->p[i].n * element(t, t->p[i].kind);
        if (memcmp(image + l.at[i], again + l.at[i], bytes) != 0) {
            ok = false;
            snprintf(errors + strlen(errors), sizeof errors - strlen(errors), " DIFFERS");
        }
    }
    int64_t bad = touched(t, &l, image);
    printf("%s %s %s%s%s:%s (bound %.0e)%s\n", ok && !bad ? "ok  " : "FAIL", t->name,
           bs_dtype_name(t->dtype), t->out != t->dtype ? ">" : "",
           t->out != t->dtype ? bs_dtype_name(t->out) : "", errors, t->bound,
           bad ? " WRITES OUTSIDE" : "");
    passed += ok && !bad;
    failed += !(ok && !bad);
    release(t);
    free(image);
    free(again);
}

#endif
