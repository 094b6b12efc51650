/* SPDX-License-Identifier: Apache-2.0 */
/*
** tensor.c: values (bytes of the arena or of somebody's place) and tensors (handles with dims over
** them). Owner thread only. The size of a value is its capacity, never its rows; the arena is asked in
** issue order.
*/
#include "tensor/tensor.h"

#include <string.h>

/* ---- values ---------------------------------------------------------------------------------- */

bs_status bsi_value_take(bsi_space *s, bsi_value *v)
{
    return bsi_wrap(bsi_arena_take(s->e->pool, v->bytes, &v->at), "scope '%s'", s->scope.label->text);
}

static bs_status open_value(bsi_space *s, bs_dtype t, size_t bytes, int64_t count, bsi_value **out)
{
    bsi_value *v = bsi_record_take(s, BSI_VALUE);
    if (!v)
        return BS_NOMEM;
    v->dtype = t;
    v->bytes = bytes;
    v->count = count;
    v->owned = true;
    v->link.next = s->scope.values;
    s->scope.values = &v->link;
    *out = v;
    return BS_OK;
}

bs_status bsi_value_late(bsi_space *s, bs_dtype t, int64_t rows, int64_t capacity, int64_t row,
                         bsi_value **out)
{
    size_t bytes;
    if (!bsi_mul_size((size_t)capacity, (size_t)row, &bytes) ||
        !bsi_mul_size(bytes, bs_dtype_size(t), &bytes))
        return bsi_fail(BS_SHAPE, "scope '%s': a tensor of %lld rows of %lld elements is too large",
                        s->scope.label->text, (long long)capacity, (long long)row);
    return open_value(s, t, bytes, rows * row, out);
}

bs_status bsi_value_new(bsi_space *s, bs_dtype t, int64_t rows, int64_t capacity, int64_t row,
                        bsi_value **out)
{
    BSI_TRY(bsi_value_late(s, t, rows, capacity, row, out));
    return bsi_value_take(s, *out);
}

bs_status bsi_value_like(bsi_space *s, const bsi_value *v, bsi_value **out)
{
    BSI_TRY(open_value(s, v->dtype, v->bytes, v->count, out));
    return bsi_value_take(s, *out);
}

void bsi_value_free(bsi_space *s, bsi_value *v)
{
    if (!v->owned || v->freed)
        return;
    v->freed = true;
    if (!v->at.mem)
        return;               /* late, and never read */
    if (s->poison && s->open) /* a rule that reads it later gets NaN */
        s->poison = bsi_fill(s->e->compute, v->at, 0xFF, v->bytes) == BS_OK;
    bsi_arena_give(s->e->pool, v->at, v->bytes);
}

void bsi_value_drop(bsi_space *s, bsi_value *v)
{
    if (--v->uses == 0 && s->scope.walked && !v->leaf)
        bsi_value_free(s, v);
}

/* ---- handles --------------------------------------------------------------------------------- */

bs_status bsi_tensor_over(bsi_space *s, bsi_value *v, int ndim, const int64_t *dim, int64_t capacity,
                          bs_tensor **out)
{
    bs_tensor *t = bsi_record_take(s, BSI_TENSOR);
    if (!t)
        return BS_NOMEM;
    t->space = s;
    t->label = s->scope.label;
    t->label->refs++;
    t->value = v;
    t->refs = 2;
    t->dtype = v->dtype;
    t->ndim = ndim;
    memcpy(t->dim, dim, (size_t)ndim * sizeof *dim);
    t->capacity = capacity;
    t->link.next = s->tensors;
    s->tensors = &t->link;
    s->handles++;
    *out = t;
    return BS_OK;
}

bs_status bsi_tensor_late(bsi_space *s, int ndim, const int64_t *dim, int64_t capacity, bs_tensor **out)
{
    bsi_value *v = NULL;
    int64_t row = 1;
    for (int i = 1; i < ndim; i++)
        if (__builtin_mul_overflow(row, dim[i], &row))
            return bsi_fail(BS_SHAPE, "scope '%s': the row of a tensor has too many elements",
                            s->scope.label->text);
    BSI_TRY(bsi_value_late(s, s->e->dtype, dim[0], capacity, row, &v));
    return bsi_tensor_over(s, v, ndim, dim, capacity, out);
}

bs_status bsi_tensor_new(bsi_space *s, int ndim, const int64_t *dim, int64_t capacity, bs_tensor **out)
{
    BSI_TRY(bsi_tensor_late(s, ndim, dim, capacity, out));
    bs_status st = bsi_value_take(s, (*out)->value);
    if (st != BS_OK)
        bs_tensor_release(*out);
    return st;
}

int64_t bsi_tensor_row(const bs_tensor *t)
{
    int64_t n = 1;
    for (int i = 1; i < t->ndim; i++)
        n *= t->dim[i];
    return n;
}

bs_status bsi_tensor_here(const bs_tensor *t, const char *what)
{
    if (!t->value)
        return bsi_fail(
            BS_STATE,
            "%s: tensor of scope '%s' is used after its scope ended; copy what must live on "
            "with store:put",
            what, t->label->text);
    return BS_OK;
}

bs_status bsi_tensor_check(const bs_tensor *t, const char *what)
{
    BSI_TRY(bsi_tensor_here(t, what));
    if (t->value->freed)
        return bsi_fail(BS_STATE, "%s: tensor of scope '%s' is used after the backward pass freed it",
                        what, t->label->text);
    return BS_OK;
}

char *bsi_shape_text(const bs_tensor *t, char text[BSI_SHAPE_TEXT])
{
    size_t n = 0;
    for (int i = 0; i < t->ndim && n < BSI_SHAPE_TEXT - 22; i++)
        n += (size_t)snprintf(text + n, BSI_SHAPE_TEXT - n, "%s%lld", i ? " " : "[",
                              (long long)t->dim[i]);
    snprintf(text + n, BSI_SHAPE_TEXT - n, "]");
    return text;
}

/* ---- public ---------------------------------------------------------------------------------- */

bool bs_tensor_alive(const bs_tensor *t)
{
    return t->value && !t->value->freed;
}

bs_dtype bs_tensor_dtype(const bs_tensor *t)
{
    return t->dtype;
}

int bs_tensor_ndim(const bs_tensor *t)
{
    return t->ndim;
}

int64_t bs_tensor_dim(const bs_tensor *t, int axis)
{
    return axis >= 0 && axis < t->ndim ? t->dim[axis] : 0;
}

int64_t bs_tensor_capacity(const bs_tensor *t)
{
    return t->capacity;
}

bs_status bs_tensor_place(bs_tensor *t, bs_place *out)
{
    BSI_TRY(bsi_tensor_check(t, "place"));
    BSI_TRY(bsi_value_ready(t->space, t->value));
    *out = bsi_place(t->value->at, t->dtype, t->dim[0], t->capacity, bsi_tensor_row(t));
    return BS_OK;
}

bs_status bs_tensor_at(bs_engine *e, const bs_place *at, bs_tensor **out)
{
    bsi_space *s;
    BSI_TRY(bsi_scope_get(e, "tensor over a place", &s));
    if (!at->mem || at->rows < 0 || at->rows > at->capacity || at->channels < 1)
        return bsi_fail(
            BS_ARG,
            "tensor over a place: %s, rows %lld, capacity %lld, channels %lld; bytes, rows within "
            "the capacity and at least one channel are expected",
            at->mem ? "bytes" : "no bytes", (long long)at->rows, (long long)at->capacity,
            (long long)at->channels);
    bsi_value *v = bsi_record_take(s, BSI_VALUE);
    if (!v)
        return BS_NOMEM;
    v->at = bsi_place_addr(at);
    v->dtype = at->dtype;
    v->count = at->rows * at->channels;
    v->bytes = (size_t)(at->capacity * at->channels) * bs_dtype_size(at->dtype);
    v->link.next = s->scope.values;
    s->scope.values = &v->link;
    return bsi_tensor_over(s, v, 2, (int64_t[]){at->rows, at->channels}, at->capacity, out);
}

bs_status bs_tensor_read(bs_tensor *t, bs_array **out)
{
    bs_array *a;
    BSI_TRY(bsi_tensor_check(t, "read"));
    bs_engine *e = t->space->e;
    if (!e->props.executes)
        return bsi_fail(BS_UNSUPPORTED, "read: device '%s' counts memory and holds no bytes",
                        e->props.name);
    BSI_TRY(bsi_value_ready(t->space, t->value));
    BSI_TRY(bs_array_new(t->dtype, t->ndim, t->dim, &a));
    bs_status st = a->bytes ? bsi_engine_read(e, t->value->at, a->bytes, a->data) : BS_OK;
    if (st != BS_OK) {
        bs_array_free(a);
        return st;
    }
    *out = a;
    return BS_OK;
}

static bs_status write_array(bs_engine *e, bsi_addr to, const bs_array *a)
{
    bs_array *cast = NULL;
    if (a->dtype != e->dtype)
        BSI_TRY(bs_array_cast(a, e->dtype, &cast));
    const bs_array *from = cast ? cast : a;
    bs_status st = bsi_engine_write(e, to, from->data, from->bytes);
    bs_array_free(cast);
    return st;
}

bs_status bs_tensor_from(bs_engine *e, const bs_array *a, bs_tensor **out)
{
    bsi_space *s;
    bs_tensor *t;
    BSI_TRY(bsi_scope_get(e, "tensor from an array", &s));
    if (s->scope.walked)
        return bsi_fail(BS_STATE, "tensor from an array: scope '%s' has run its backward pass",
                        s->scope.label->text);
    if (a->dtype != BS_DTYPE_F32 && a->dtype != e->dtype)
        return bsi_fail(BS_DTYPE, "tensor from an array of %s: activations are %s; cast it first",
                        bs_dtype_name(a->dtype), bs_dtype_name(e->dtype));
    if (a->ndim < 1)
        return bsi_fail(BS_SHAPE, "tensor from an array without dims: [rows, channels] is expected");
    BSI_TRY(bsi_tensor_new(s, a->ndim, a->dim, a->dim[0], &t));
    bs_status st = write_array(e, t->value->at, a);
    if (st != BS_OK) {
        bs_tensor_release(t);
        return st;
    }
    *out = t;
    return BS_OK;
}

bs_status bs_tensor_want_grad(bs_tensor *t)
{
    BSI_TRY(bsi_tensor_check(t, "want_grad"));
    const bsi_space *s = t->space;
    if (!s->scope.tape || s->scope.walked)
        return bsi_fail(BS_STATE, "want_grad: scope '%s' %s", s->scope.label->text,
                        s->scope.tape ? "has run its backward pass" : "records no tape");
    if (t->dtype != s->e->dtype)
        return bsi_fail(BS_DTYPE, "want_grad: a %s tensor has no gradient, %s is expected",
                        bs_dtype_name(t->dtype), bs_dtype_name(s->e->dtype));
    if (t->value->consumed)
        return bsi_fail(BS_STATE,
                        "want_grad: scope '%s' has used this tensor already; mark it before its use",
                        s->scope.label->text);
    t->value->leaf = t->value->wanted = true;
    return BS_OK;
}

bs_status bs_tensor_grad(bs_tensor *t, bs_tensor **out)
{
    BSI_TRY(bsi_tensor_check(t, "grad"));
    bsi_space *s = t->space;
    if (!t->value->leaf || !s->scope.walked)
        return bsi_fail(BS_STATE, "grad: in scope '%s', %s", s->scope.label->text,
                        t->value->leaf ? "backward has not run"
                                       : "the tensor is not marked by want_grad");
    *out = NULL;
    if (!t->value->grad)
        return BS_OK;
    /* Shaped like the leaf, but a gradient that was handed in may live in a buffer of another capacity.
     */
    size_t row = (size_t)bsi_tensor_row(t) * bs_dtype_size(t->dtype);
    int64_t capacity = row ? (int64_t)(t->value->grad->bytes / row) : t->capacity;
    return bsi_tensor_over(s, t->value->grad, t->ndim, t->dim, capacity, out);
}
