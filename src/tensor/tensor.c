/* SPDX-License-Identifier: Apache-2.0 */
/*
** tensor.c: what callers ask of a tensor: its shape, its place, its bytes, its gradient. Owner thread only. Whoever
** is handed bytes gets them computed: a late op behind them is launched first.
*/
#include "tensor/tape.h"

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
