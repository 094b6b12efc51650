/* SPDX-License-Identifier: Apache-2.0 */
/* An engine with one block of weights bound by hand, a batch, and arrays of random numbers. */
#ifndef TENSOR_FIXTURE_H
#define TENSOR_FIXTURE_H

#include "bs/tensor.h"
#include "engine/engine.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

enum { FIX_BLOCK_BYTES = 1 << 16, FIX_EXPAND_BYTES = 1 << 17, FIX_PARAM_BYTES = 1 << 16 };

typedef struct fixture {
    bs_dev *dev;
    bs_engine *e;
    bs_batch *batch;
    bsi_addr block, params; /* regions; block 0 is bound, block 1 never */
    size_t block_used, expand_used, params_used;
    uint64_t random;
} fixture;

#define ok(call) fix_ok((call), #call, __FILE__, __LINE__)
void fix_ok(bs_status st, const char *call, const char *file, int line);

/* tokens: capacity of the two micro-batches. Not sealed: ropes can be made; call fix_seal then. */
void fix_open(fixture *f, const char *spec, int64_t tokens);
void fix_open_as(fixture *f, const char *spec, bs_dtype compute, int64_t tokens);
void fix_seal(fixture *f);
void fix_close(fixture *f); /* also: a check device has seen no violation */

/* Rows of the given lengths; every second token is labelled. */
void fix_rows(fixture *f, int micro, int n_rows, const int64_t *len, const int64_t *row_id);
void fix_scope(fixture *f, int micro, bool tape, bool train);
void fix_visit(fixture *f, bool on); /* bind block 0, or nothing, under a new generation */

/* Uniform in [-1, 1), the same sequence for the same seed. */
double fix_random(fixture *f);
float *fix_floats(fixture *f, float *v, int64_t n);

/* A tensor of block 0 stored as t; v is rounded to what is stored. */
bs_tensor_info fix_weight(fixture *f, const char *name, bs_dtype t, int ndim, const int64_t *dim,
                          float *v);
/* The same packed as MXFP4: codes and scales at random, v becomes their values. */
bs_tensor_info fix_packed(fixture *f, const char *name, int64_t rows, int64_t cols, float *v);
/* f32 place in the parameter region with these values (NULL: zero). */
bs_place fix_place(fixture *f, int64_t rows, int64_t cols, const float *v);
void fix_read(fixture *f, const bs_place *p, float *v);

bs_tensor *fix_from(fixture *f, int64_t rows, int64_t cols, const float *v);
/* A tensor over a fresh place with room for all tokens of the batch. */
bs_tensor *fix_at(fixture *f, int64_t rows, int64_t cols, const float *v);
void fix_values(bs_tensor *t, float *v); /* read all elements */
size_t fix_arena_peak(const fixture *f);
size_t fix_arena_now(const fixture *f);
uint64_t fix_launches(const fixture *f);

#endif
