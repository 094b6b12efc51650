/* SPDX-License-Identifier: Apache-2.0 */
/*
** op.c: the beginnings and ends that ops have in common.
*/
#include "tensor/op.h"

bs_status bsi_op_same_shape(const char *op, const bs_tensor *a, const bs_tensor *b)
{
    char ta[BSI_SHAPE_TEXT], tb[BSI_SHAPE_TEXT];
    bool same = a->ndim == b->ndim;
    for (int i = 0; same && i < a->ndim; i++)
        same = a->dim[i] == b->dim[i];
    if (!same)
        return bsi_fail(BS_SHAPE, "%s: %s with %s; the shapes must be equal", op, bsi_shape_text(a, ta),
                        bsi_shape_text(b, tb));
    return BS_OK;
}

bs_status bsi_op_need_channels(const char *op, const bs_tensor *x)
{
    char text[BSI_SHAPE_TEXT];
    if (x->ndim < 2 || bsi_tensor_row(x) < 1)
        return bsi_fail(BS_SHAPE, "%s: x %s; rows of channels are expected", op,
                        bsi_shape_text(x, text));
    return BS_OK;
}

bs_status bsi_op_like(bsi_space *s, const bs_tensor *a, const bs_tensor *b, bs_tensor **out)
{
    return bsi_tensor_new(s, a->ndim, a->dim, BSI_MAX(a->capacity, b->capacity), out);
}

bs_status bsi_op_finish(bs_status st, const bsi_op *op, bs_tensor *y, bs_tensor **out)
{
    if (st != BS_OK) {
        bs_tensor_release(y);
        return bsi_wrap(st, "%s", op->name);
    }
    *out = y;
    return BS_OK;
}
