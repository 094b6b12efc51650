/* SPDX-License-Identifier: Apache-2.0 */
/*
** trial.h: what a kernel trial is: an op with operands of every kind, made up or given, and their image in
** memory. Included by one file of a program; a failure of the machinery itself ends the program.
*/
#ifndef TRIAL_H
#define TRIAL_H

#include "dev/dev.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { GUARD = 512, GUARD_BYTE = 0xA5 };

/* Kinds of operands: a and o as in bsk.h, f32, i32, f64, bytes that nobody compares. */
typedef enum kind { A, O, F, I, D, SCRATCH } kind;

typedef struct operand {
    kind kind;
    uint8_t mode;
    int64_t n;    /* elements; 0: absent */
    void *value;  /* float, int32_t or double [n]; owned */
    int cpu_same; /* 1 + the operand whose place this one takes on the CPU; 0: none */
} operand;

typedef struct trial {
    bsk_op op;
    char name[96];
    int count;
    operand p[BSK_MAX_ARGS];
    int64_t n[BSK_MAX_DIMS];
    double f[BSK_MAX_SCALARS];
    bs_dtype dtype, out;
    int shift;    /* operands start this many elements past an aligned address */
    double bound; /* of the relative error */
    double floor; /* root mean square below which a result counts as this large */
} trial;

static uint64_t random_state = 1;

static void *must_alloc(size_t bytes)
{
    void *p = calloc(1, bytes ? bytes : 1);
    if (!p) {
        printf("FATAL no memory\n");
        exit(1);
    }
    return p;
}

static double uniform(void) /* [-1, 1) */
{
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (double)(random_state >> 40) * 0x1p-23 - 1.0;
}

/* ---- trials ---- */

static trial trial_of(bsk_op op, const char *name, bs_dtype dtype)
{
    trial t = {.op = op, .dtype = dtype, .out = dtype};
    t.bound = dtype == BS_DTYPE_BF16 ? 4e-3 : 1e-5;
    t.floor = 1e-3;
    snprintf(t.name, sizeof t.name, "%s", name);
    return t;
}

static void note(trial *t, const char *what, int64_t value)
{
    size_t at = strlen(t->name);
    snprintf(t->name + at, sizeof t->name - at, " %s%lld", what, (long long)value);
}

static operand *put(trial *t, kind k, uint8_t mode, int64_t n)
{
    operand *o = &t->p[t->count++];
    *o = (operand){.kind = k, .mode = mode, .n = n};
    o->value = must_alloc((size_t)n * 8);
    return o;
}

static float *numbers(trial *t, kind k, uint8_t mode, int64_t n, double scale)
{
    float *v = put(t, k, mode, n)->value;
    for (int64_t i = 0; i < n; i++)
        v[i] = (float)(scale * uniform());
    return v;
}

static void written(trial *t, kind k, int64_t n)
{
    put(t, k, BSI_WRITE, n);
}

static void absent(trial *t, kind k)
{
    put(t, k, BSI_WRITE, 0);
}

/* ints of [0, below) */
static int32_t *ints(trial *t, int64_t n, int64_t below)
{
    int32_t *v = put(t, I, BSI_READ, n)->value;
    for (int64_t i = 0; i < n; i++)
        v[i] = (int32_t)((uniform() + 1.0) / 2 * (double)below);
    return v;
}

static void sizes(trial *t, int count, const int64_t *n)
{
    memcpy(t->n, n, (size_t)count * sizeof *n);
}

#define SIZES(t, ...)                                                                                  \
    sizes(t, (int)(sizeof((int64_t[]){__VA_ARGS__}) / sizeof(int64_t)), (int64_t[]){__VA_ARGS__})

/* ---- layout: operands one behind the other, with guards between ---- */

static size_t element(const trial *t, kind k)
{
    switch (k) {
    case A:
        return t->dtype == BS_DTYPE_BF16 ? 2 : 4;
    case O:
        return t->out == BS_DTYPE_BF16 ? 2 : 4;
    case D:
        return 8;
    case SCRATCH:
        return 1;
    default:
        return 4;
    }
}

static bool narrow(const trial *t, kind k)
{
    return (k == A || k == O) && element(t, k) == 2;
}

/* Inputs as the device will see them. */
static void round_inputs(trial *t)
{
    for (int i = 0; i < t->count; i++) {
        float *v = t->p[i].value;
        if (!narrow(t, t->p[i].kind) || t->op == BSK_EXPAND)
            continue;
        for (int64_t j = 0; j < t->p[i].n; j++)
            v[j] = bsi_bf16_to_f32(bsi_f32_to_bf16(v[j]));
    }
}

typedef struct layout {
    size_t at[BSK_MAX_ARGS], bytes;
} layout;

static layout lay_out(const trial *t)
{
    layout l = {.bytes = GUARD};
    for (int i = 0; i < t->count; i++) {
        size_t e = element(t, t->p[i].kind);
        l.at[i] = l.bytes + (t->p[i].kind == SCRATCH || t->p[i].kind == D ? 0 : (size_t)t->shift * e);
        l.bytes = bsi_round_up(l.at[i] + (size_t)t->p[i].n * e, 256) + GUARD;
    }
    return l;
}

static void encode(const trial *t, const layout *l, unsigned char *image)
{
    memset(image, GUARD_BYTE, l->bytes);
    for (int i = 0; i < t->count; i++) {
        const operand *o = &t->p[i];
        size_t e = element(t, o->kind), bytes = (size_t)o->n * e;
        unsigned char *to = image + l->at[i];
        if (!(o->mode & BSI_READ)) {
            memset(to, o->kind == I ? 0x77 : 0xFF, bytes); /* NaN, and no number that is meant */
        } else if (narrow(t, o->kind)) {
            for (int64_t j = 0; j < o->n; j++) {
                uint16_t v = bsi_f32_to_bf16(((float *)o->value)[j]);
                memcpy(to + 2 * j, &v, 2);
            }
        } else {
            memcpy(to, o->value, bytes);
        }
    }
}

/* Bytes outside of the operands. */
static int64_t touched(const trial *t, const layout *l, const unsigned char *image)
{
    unsigned char *inside = must_alloc(l->bytes);
    int64_t bad = 0;
    for (int i = 0; i < t->count; i++)
        memset(inside + l->at[i], 1, (size_t)t->p[i].n * element(t, t->p[i].kind));
    for (size_t b = 0; b < l->bytes; b++)
        bad += !inside[b] && image[b] != GUARD_BYTE;
    free(inside);
    return bad;
}

#endif
