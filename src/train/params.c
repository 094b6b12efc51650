/* SPDX-License-Identifier: Apache-2.0 */
/*
** params.c: trainable parameters: registration, their device regions (train.h), initial values, host
** copies in and out, references for the ops. Owner thread only. Everything that touches device memory
** goes through the compute queue, so it is in order with the launches that read or add to it; only the
** functions that return a host array wait. Before seal a set is only a list.
*/
#include "train/train.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { PAD = 256, INIT_CHUNK = 1 << 14 };

bs_status bs_params_open(bs_engine *e, bs_params **out)
{
    if (!e)
        return bsi_fail(BS_ARG, "parameters: an engine is required");
    bs_params *p = bsi_alloc(BS_TAG_MISC, sizeof *p);
    if (!p)
        return BS_NOMEM;
    p->e = e;
    p->dtype = e->dtype;
    *out = p;
    return BS_OK;
}

void bs_params_close(bs_params *p)
{
    if (!p)
        return;
    for (int i = 0; i < p->n; i++)
        bsi_free(p->param[i].name);
    bsi_free(p->param);
    bsi_free(p);
}

bs_status bs_params_freeze(bs_params *p)
{
    if (p->sealed || p->base)
        return bsi_fail(BS_STATE, "parameters are frozen before they are sealed, and only own ones");
    p->frozen = true;
    return BS_OK;
}

/* ---- registration ---------------------------------------------------------------------------- */

static bs_status reserve(bs_params *p)
{
    if (p->n < p->cap)
        return BS_OK;
    int cap = BSI_MAX(2 * p->cap, 64);
    bsi_param *q = bsi_realloc(BS_TAG_MISC, p->param, (size_t)cap * sizeof *q);
    if (!q)
        return BS_NOMEM;
    p->param = q;
    p->cap = cap;
    return BS_OK;
}

static bs_status add(bs_params *p, const char *name, int64_t rows, int64_t cols, bool base, int *out)
{
    size_t bytes, end, *total = base ? &p->base : &p->own;
    if (!name || !*name)
        return bsi_fail(BS_ARG, "a parameter needs a name");
    if (p->sealed)
        return bsi_fail(BS_STATE, "parameter '%s' is added after the set was sealed", name);
    if (p->frozen && base)
        return bsi_fail(BS_STATE, "parameter '%s' of the base is added to a frozen set", name);
    if (rows < 1 || cols < 1)
        return bsi_fail(BS_SHAPE, "parameter '%s' is [%lld, %lld]; both must be at least 1", name,
                        (long long)rows, (long long)cols);
    /* All regions together are at most 4.5 own + 3 base (value, copy of half the size, grad, two
       moments): with both under an eighth of SIZE_MAX no later sum of sizes wraps. */
    if (p->n == INT32_MAX / 2 || !bsi_mul_size((size_t)rows, (size_t)cols, &bytes) ||
        !bsi_mul_size(bytes, sizeof(float), &bytes) || !bsi_add_size(bytes, PAD, &end) ||
        !bsi_add_size(*total, end, &end) || end > SIZE_MAX / 8)
        return bsi_fail(BS_SHAPE,
                        "parameter '%s' [%lld, %lld] makes the set too large for 64-bit sizes", name,
                        (long long)rows, (long long)cols);
    BSI_TRY(reserve(p));
    char *own_name = bsi_strdup(BS_TAG_MISC, name);
    if (!own_name)
        return BS_NOMEM;
    p->param[p->n] = (bsi_param){
        .name = own_name, .rows = rows, .cols = cols, .bytes = bytes, .base = base, .off = *total};
    *total += bsi_round_up(bytes, PAD);
    *out = p->n++;
    return BS_OK;
}

bs_status bs_params_add(bs_params *p, const char *name, int64_t rows, int64_t cols, int *out)
{
    return add(p, name, rows, cols, false, out);
}

bs_status bs_params_add_base(bs_params *p, const char *name, int64_t rows, int64_t cols, int *out)
{
    return add(p, name, rows, cols, true, out);
}

static bs_status find(const bs_params *p, int id, const bsi_param **out)
{
    if (id < 0 || id >= p->n)
        return bsi_fail(BS_ARG, "parameter %d of a set of %d", id, p->n);
    *out = &p->param[id];
    return BS_OK;
}

static bs_status find_sealed(const bs_params *p, int id, const bsi_param **out)
{
    BSI_TRY(find(p, id, out));
    if (!p->sealed)
        return bsi_fail(BS_STATE, "parameter '%s': the set has no device memory before it is sealed",
                        (*out)->name);
    return BS_OK;
}

static bs_status check_home(const bsi_param *q, const bs_place *home)
{
    if (!q->base)
        return bsi_fail(BS_STATE, "parameter '%s' is no base parameter: it has a master of its own",
                        q->name);
    if (home->dtype != BS_DTYPE_F32)
        return bsi_fail(BS_DTYPE,
                        "parameter '%s' is stored as %s; only f32 weights can be updated in place",
                        q->name, bs_dtype_name(home->dtype));
    /* A vector may be given as one row. */
    if (home->rows * home->channels != q->rows * q->cols || (home->rows > 1 && home->rows != q->rows))
        return bsi_fail(BS_SHAPE, "parameter '%s' is [%lld, %lld], its home [%lld, %lld]", q->name,
                        (long long)q->rows, (long long)q->cols, (long long)home->rows,
                        (long long)home->channels);
    return BS_OK;
}

bs_status bs_params_update_base(bs_params *p, int id, const bs_place *home)
{
    const bsi_param *found = NULL;
    BSI_TRY(find(p, id, &found));
    bsi_param *q = &p->param[id];
    BSI_TRY(check_home(q, home));
    if (q->home.mem || (q->update && !p->sealed))
        return bsi_fail(BS_STATE, "parameter '%s' is updatable already", q->name);
    if (p->sealed && !q->update)
        return bsi_fail(BS_STATE, "parameter '%s' is made updatable after the set was sealed", q->name);
    q->home = *home;
    if (q->update)
        return BS_OK;
    /* The moments of base parameters come in the order of these calls. After the seal the regions
       have their size, so a home can be named then, but no moments added. */
    q->update = true;
    q->moment = p->moments;
    p->moments += bsi_round_up(q->bytes, PAD);
    return BS_OK;
}

uint64_t bs_params_device_bytes(const bs_params *p)
{
    return p->own + bsi_round_up(bsi_params_copy_bytes(p), PAD) + bsi_params_grad_bytes(p) +
           2 * bsi_params_moment_bytes(p) + (p->n ? PAD : 0);
}

/* ---- seal ------------------------------------------------------------------------------------ */

static int by_name(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* Two parameters of one name would share their random stream and their entry in a checkpoint. */
static bs_status check_names(const bs_params *p)
{
    bs_status st = BS_OK;
    const char **name = bsi_alloc(BS_TAG_MISC, (size_t)p->n * sizeof *name);
    if (!name)
        return BS_NOMEM;
    for (int i = 0; i < p->n; i++)
        name[i] = p->param[i].name;
    qsort(name, (size_t)p->n, sizeof *name, by_name);
    for (int i = 1; st == BS_OK && i < p->n; i++)
        if (!strcmp(name[i - 1], name[i]))
            st = bsi_fail(BS_ARG, "parameter '%s' was added twice", name[i]);
    bsi_free(name);
    return st;
}

/* Zero from the start, padding included: the norm and AdamW run over whole regions, and would
   otherwise read what was in the memory before. */
static bs_status take(bs_params *p, const char *name, size_t bytes, bsi_addr *out)
{
    if (!bytes)
        return BS_OK;
    BSI_TRY(bsi_pool_region(p->e->pool, name, bytes, out));
    return bsi_fill(p->e->compute, *out, 0, bytes);
}

bs_status bs_params_seal(bs_params *p)
{
    if (p->sealed)
        return bsi_fail(BS_STATE, "the parameters are sealed already");
    BSI_TRY(check_names(p));
    BSI_TRY(take(p, "parameters", p->own, &p->value));
    BSI_TRY(take(p, "compute copies of parameters", bsi_params_copy_bytes(p), &p->copy));
    BSI_TRY(take(p, "gradient accumulators", bsi_params_grad_bytes(p), &p->grad));
    BSI_TRY(take(p, "first moments", bsi_params_moment_bytes(p), &p->m));
    BSI_TRY(take(p, "second moments", bsi_params_moment_bytes(p), &p->v));
    BSI_TRY(take(p, "gradient norm", p->n ? PAD : 0, &p->sum));
    p->sealed = true;
    return BS_OK;
}

int bs_params_count(const bs_params *p)
{
    return p->n;
}

const char *bs_params_name(const bs_params *p, int id)
{
    return id >= 0 && id < p->n ? p->param[id].name : NULL;
}

static bsi_addr copy_at(const bs_params *p, const bsi_param *q)
{
    return bsi_addr_add(p->copy, q->off / sizeof(float) * bs_dtype_size(p->dtype));
}

bs_status bs_params_ref(const bs_params *p, int id, bs_param_ref *out)
{
    const bsi_param *q = NULL;
    BSI_TRY(find_sealed(p, id, &q));
    *out = (bs_param_ref){.name = q->name};
    if (!p->frozen)
        out->grad = bsi_place(bsi_param_grad(p, q), BS_DTYPE_F32, q->rows, q->rows, q->cols);
    if (!q->base)
        out->value = bsi_place(p->copy.mem ? copy_at(p, q) : bsi_addr_add(p->value, q->off), p->dtype,
                               q->rows, q->rows, q->cols);
    return BS_OK;
}

/* ---- host copies ----------------------------------------------------------------------------- */

static bs_status write_f32(bs_params *p, const bsi_param *q, bsi_addr to, const bs_array *a)
{
    if (a->dtype != BS_DTYPE_F32)
        return bsi_fail(BS_DTYPE, "parameter '%s' is set from %s; f32 is expected", q->name,
                        bs_dtype_name(a->dtype));
    if (a->ndim != 2 || a->dim[0] != q->rows || a->dim[1] != q->cols)
        return bsi_fail(
            BS_SHAPE, "parameter '%s' is [%lld, %lld], its new value has %d dims, [%lld, %lld]",
            q->name, (long long)q->rows, (long long)q->cols, a->ndim,
            (long long)(a->ndim > 0 ? a->dim[0] : 0), (long long)(a->ndim > 1 ? a->dim[1] : 0));
    return bsi_engine_write(p->e, to, a->data, q->bytes);
}

static bs_status read_f32(bs_params *p, const bsi_param *q, bsi_addr from, bs_array **out)
{
    bs_array *a;
    BSI_TRY(bs_array_new(BS_DTYPE_F32, 2, (int64_t[]){q->rows, q->cols}, &a));
    bs_status st = bsi_engine_read(p->e, from, q->bytes, a->data);
    if (st != BS_OK) {
        bs_array_free(a);
        return bsi_wrap(st, "parameter '%s'", q->name);
    }
    *out = a;
    return BS_OK;
}

/* Where the value of a parameter is, when it is ours to read or write: a master of the set, or a
   base weight in its gpu home. A base weight that is not updated belongs to its file. */
static bs_status value_at(const bs_params *p, const bsi_param *q, bsi_addr *out)
{
    if (q->base && !q->update)
        return bsi_fail(
            BS_STATE, "parameter '%s' is a frozen block's tensor: it has no value of its own", q->name);
    if (q->base && !q->home.mem)
        return bsi_fail(BS_STATE, "parameter '%s' has not been told its home yet", q->name);
    *out = q->base ? bsi_place_addr(&q->home) : bsi_addr_add(p->value, q->off);
    return BS_OK;
}

/* After a master was written: ops read the copy, and would go on with the old value. AdamW rewrites
   both together. */
static bs_status refresh_copy(bs_params *p, const bsi_param *q)
{
    if (q->base || !p->copy.mem)
        return BS_OK;
    bsi_expand x = {.from = bsi_addr_add(p->value, q->off),
                    .to = copy_at(p, q),
                    .stored = BS_DTYPE_F32,
                    .out = p->dtype,
                    .n = q->rows * q->cols,
                    .scale = 1.0};
    return bsi_expand_launch(p->e, &x, "compute copy");
}

bs_status bs_params_set(bs_params *p, int id, const bs_array *value)
{
    const bsi_param *q = NULL;
    bsi_addr at = {0};
    BSI_TRY(find_sealed(p, id, &q));
    BSI_TRY(value_at(p, q, &at));
    BSI_TRY(write_f32(p, q, at, value));
    return refresh_copy(p, q);
}

bs_status bs_params_get(bs_params *p, int id, bs_array **out)
{
    const bsi_param *q = NULL;
    bsi_addr at = {0};
    BSI_TRY(find_sealed(p, id, &q));
    BSI_TRY(value_at(p, q, &at));
    return read_f32(p, q, at, out);
}

static bs_status check_trained(const bsi_param *q, const bs_params *p)
{
    return p->frozen ? bsi_fail(BS_STATE, "parameter '%s' is frozen: it has a value only", q->name)
                     : BS_OK;
}

bs_status bs_params_grad(bs_params *p, int id, bs_array **out)
{
    const bsi_param *q = NULL;
    BSI_TRY(find_sealed(p, id, &q));
    BSI_TRY(check_trained(q, p));
    return read_f32(p, q, bsi_param_grad(p, q), out);
}

static bs_status moment_at(const bs_params *p, int id, int which, const bsi_param **q, bsi_addr *out)
{
    BSI_TRY(find_sealed(p, id, q));
    BSI_TRY(check_trained(*q, p));
    if (which != 1 && which != 2)
        return bsi_fail(BS_ARG, "parameter '%s' has moments 1 and 2, not %d", (*q)->name, which);
    if ((*q)->base && !(*q)->update)
        return bsi_fail(BS_STATE, "parameter '%s' has no moments: it is not updated", (*q)->name);
    *out = bsi_addr_add(which == 1 ? p->m : p->v, bsi_param_moment_off(p, *q));
    return BS_OK;
}

bs_status bs_params_moment(bs_params *p, int id, int which, bs_array **out)
{
    const bsi_param *q = NULL;
    bsi_addr at = {0};
    BSI_TRY(moment_at(p, id, which, &q, &at));
    return read_f32(p, q, at, out);
}

bs_status bs_params_set_moment(bs_params *p, int id, int which, const bs_array *value)
{
    const bsi_param *q = NULL;
    bsi_addr at = {0};
    BSI_TRY(moment_at(p, id, which, &q, &at));
    return write_f32(p, q, at, value);
}

bs_status bs_params_init_kaiming(bs_params *p, int id, uint64_t seed)
{
    const bsi_param *q = NULL;
    bsi_addr at = {0};
    uint32_t key[2];
    BSI_TRY(find_sealed(p, id, &q));
    BSI_TRY(value_at(p, q, &at));
    float *chunk = bsi_alloc(BS_TAG_STAGING, INIT_CHUNK * sizeof *chunk);
    if (!chunk)
        return BS_NOMEM;
    bsi_philox_key(seed, q->name, key);
    /* kaiming_uniform_ with a = sqrt(5), what PEFT and nn.Linear use: gain sqrt(2 / (1 + a^2)) =
       sqrt(1/3), bound gain * sqrt(3 / fan_in) = 1 / sqrt(fan_in) (He et al. 2015). */
    float bound = (float)(1.0 / sqrt((double)q->cols));
    bs_status st = BS_OK;
    int64_t count = q->rows * q->cols;
    for (int64_t i = 0; st == BS_OK && i < count; i += INIT_CHUNK) {
        int64_t n = BSI_MIN(count - i, (int64_t)INIT_CHUNK);
        /* Element i is a function of seed, name and i alone, so the order of parameters changes
           nothing. INIT_CHUNK is a multiple of the 4 numbers that one Philox block gives. */
        bsi_fill_uniform(chunk, i, n, bound, key);
        st = bsi_engine_write(p->e, bsi_addr_add(at, (size_t)i * sizeof *chunk), chunk,
                              (size_t)n * sizeof *chunk);
    }
    bsi_free(chunk);
    return st == BS_OK ? refresh_copy(p, q) : st;
}
