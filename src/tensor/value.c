/* SPDX-License-Identifier: Apache-2.0 */
/*
** value.c: values (bytes of the arena or of somebody's place) and the handles over them. Owner thread only. The size
** of a value is its capacity, never its rows; the arena is asked in issue order.
*/
#include "tensor/space.h"

#include <string.h>

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

static bs_status value_late(bsi_space *s, bs_dtype t, int64_t rows, int64_t capacity, int64_t row,
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
    BSI_TRY(value_late(s, t, rows, capacity, row, out));
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
    v->freed = true; /* first: whatever fails below, the bytes are not given twice */
    if (!v->at.mem)
        return;               /* late, and never read */
    if (s->poison && s->open) /* a rule that reads it later gets NaN */
        s->poison = bsi_fill(s->e->compute, v->at, 0xFF, v->bytes) == BS_OK;
    bsi_arena_give(s->e->pool, v->at, v->bytes);
}

/* Before the walk nothing is freed here: offsets depend on the ops issued, not on what a script dropped. */
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

void bs_tensor_retain(bs_tensor *t)
{
    if (t)
        t->refs++;
}

void bs_tensor_release(bs_tensor *t)
{
    if (!t || --t->refs > 0)
        return;
    bsi_space *s = t->space;
    bsi_label_drop(s, t->label);
    bsi_record_give(s, BSI_TENSOR, t);
    s->handles--;
    bsi_space_reap(s);
}

bs_status bsi_tensor_late(bsi_space *s, int ndim, const int64_t *dim, int64_t capacity, bs_tensor **out)
{
    bsi_value *v = NULL;
    int64_t row = 1;
    for (int i = 1; i < ndim; i++)
        if (__builtin_mul_overflow(row, dim[i], &row))
            return bsi_fail(BS_SHAPE, "scope '%s': the row of a tensor has too many elements",
                            s->scope.label->text);
    BSI_TRY(value_late(s, s->e->dtype, dim[0], capacity, row, &v));
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
