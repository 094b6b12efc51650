/* SPDX-License-Identifier: Apache-2.0 */
/*
** array.c: dense row-major arrays in host memory: reference data, read-back, adapter files. Any thread
** may use an array that no other thread is using. Data is 64-byte aligned and accounted as
** BS_TAG_ARRAY; bytes == count * element size always holds.
*/
#include "base/base.h"

#include <math.h>
#include <string.h>

bs_status bs_array_new(bs_dtype t, int ndim, const int64_t *dim, bs_array **out)
{
    *out = NULL;
    if ((unsigned)t >= BS_DTYPE_COUNT)
        return bsi_fail(BS_DTYPE, "array: %d is not a dtype", (int)t);
    if (ndim < 0 || ndim > BS_MAX_DIMS || (ndim && !dim))
        return bsi_fail(BS_SHAPE, "array: %d dimensions given, 0 to %d are possible", ndim,
                        BS_MAX_DIMS);
    size_t bytes = bs_dtype_size(t);
    bool empty = false, fits = true;
    for (int i = 0; i < ndim; i++) {
        if (dim[i] < 0)
            return bsi_fail(BS_SHAPE, "array: dimension %d is %lld, must not be negative", i + 1,
                            (long long)dim[i]);
        if (dim[i] == 0)
            empty = true;
        else
            fits = fits && bsi_mul_size(bytes, (size_t)dim[i], &bytes);
    }
    if (!fits || bytes > PTRDIFF_MAX)
        return bsi_fail(BS_SHAPE, "array: the product of its %d dimensions is too large to address",
                        ndim);

    bs_array *a = bsi_alloc(BS_TAG_ARRAY, sizeof *a);
    if (!a)
        return BS_NOMEM;
    a->dtype = t;
    a->ndim = ndim;
    for (int i = 0; i < ndim; i++)
        a->dim[i] = dim[i];
    a->bytes = empty ? 0 : bytes;
    a->data = bsi_alloc(BS_TAG_ARRAY, a->bytes);
    if (!a->data) {
        bsi_free(a);
        return BS_NOMEM;
    }
    *out = a;
    return BS_OK;
}

void bs_array_free(bs_array *a)
{
    if (a)
        bsi_free(a->data);
    bsi_free(a);
}

bs_status bs_array_uniform(bs_array *a, double bound, uint64_t seed, const char *name)
{
    uint32_t key[2];
    if (a->dtype != BS_DTYPE_F32)
        return bsi_fail(BS_DTYPE, "array: %s cannot be filled at random; f32 is expected, cast it then",
                        bs_dtype_name(a->dtype));
    bsi_philox_key(seed, name, key);
    bsi_fill_uniform(a->data, 0, bs_array_count(a), (float)bound, key);
    return BS_OK;
}

int64_t bs_array_count(const bs_array *a)
{
    return (int64_t)(a->bytes / bs_dtype_size(a->dtype));
}

double bs_array_get(const bs_array *a, int64_t i)
{
    const void *p = a->data;
    switch (a->dtype) {
    case BS_DTYPE_F32:
        return (double)((const float *)p)[i];
    case BS_DTYPE_BF16:
        return (double)bsi_bf16_to_f32(((const uint16_t *)p)[i]);
    case BS_DTYPE_F16:
        return (double)bsi_f16_to_f32(((const uint16_t *)p)[i]);
    case BS_DTYPE_I64:
        return (double)((const int64_t *)p)[i];
    case BS_DTYPE_I32:
        return (double)((const int32_t *)p)[i];
    case BS_DTYPE_U8:
        return (double)((const uint8_t *)p)[i];
    case BS_DTYPE_F64:
        return ((const double *)p)[i];
    case BS_DTYPE_COUNT:
        break;
    }
    return (double)NAN;
}

/* f64 -> f32 rounded to odd: the sticky last bit makes a second rounding to 11 or 8 bits of mantissa
   the same as one rounding from f64. */
static float to_odd(double v)
{
    float f = (float)v;
    if (!isfinite(v) || (double)f == v)
        return f;
    if (fabs((double)f) > fabs(v))
        f = nextafterf(f, 0.0f);
    uint32_t u;
    memcpy(&u, &f, 4);
    u |= 1u;
    if (f == 0.0f && v < 0) /* nextafter gives +0 */
        u |= 0x80000000u;
    memcpy(&f, &u, 4);
    return f;
}

/* Round to nearest even and clamp; NaN becomes 0. lo and hi are exact in f64 or one beyond. */
static int64_t to_int(double v, int64_t lo, int64_t hi)
{
    double r = rint(v);
    if (isnan(r))
        return 0;
    return r <= (double)lo ? lo : r >= (double)hi ? hi : (int64_t)r;
}

void bs_array_set(bs_array *a, int64_t i, double v)
{
    void *p = a->data;
    switch (a->dtype) {
    case BS_DTYPE_F32:
        ((float *)p)[i] = (float)v;
        break;
    case BS_DTYPE_BF16:
        ((uint16_t *)p)[i] = bsi_f32_to_bf16(to_odd(v));
        break;
    case BS_DTYPE_F16:
        ((uint16_t *)p)[i] = bsi_f32_to_f16(to_odd(v));
        break;
    case BS_DTYPE_I64:
        ((int64_t *)p)[i] = to_int(v, INT64_MIN, INT64_MAX);
        break;
    case BS_DTYPE_I32:
        ((int32_t *)p)[i] = (int32_t)to_int(v, INT32_MIN, INT32_MAX);
        break;
    case BS_DTYPE_U8:
        ((uint8_t *)p)[i] = (uint8_t)to_int(v, 0, UINT8_MAX);
        break;
    case BS_DTYPE_F64:
        ((double *)p)[i] = v;
        break;
    case BS_DTYPE_COUNT:
        break;
    }
}

bs_status bs_array_cast(const bs_array *a, bs_dtype t, bs_array **out)
{
    BSI_TRY(bs_array_new(t, a->ndim, a->dim, out));
    int64_t n = bs_array_count(a);
    if (t == a->dtype)
        memcpy((*out)->data, a->data, a->bytes);
    else
        for (int64_t i = 0; i < n; i++)
            bs_array_set(*out, i, bs_array_get(a, i));
    return BS_OK;
}

bs_status bs_array_rel_err(const bs_array *a, const bs_array *b, double *out)
{
    int64_t n = bs_array_count(a);
    double diff = 0, norm = 0;
    if (n != bs_array_count(b))
        return bsi_fail(BS_SHAPE, "arrays to compare have %lld and %lld elements", (long long)n,
                        (long long)bs_array_count(b));
    for (int64_t i = 0; i < n; i++) {
        double x = bs_array_get(a, i), y = bs_array_get(b, i);
        diff += (x - y) * (x - y);
        norm += y * y;
    }
    *out = norm > 0 ? sqrt(diff) / sqrt(norm) : sqrt(diff);
    if (!isfinite(diff) || !isfinite(norm))
        *out = (double)INFINITY;
    return BS_OK;
}

/* In halves the exponent alone tells. */
static bool halves_finite(const uint16_t *p, int64_t n, unsigned exponent)
{
    bool finite = true;
    for (int64_t i = 0; i < n; i++)
        finite &= (p[i] & exponent) != exponent;
    return finite;
}

bool bs_array_is_finite(const bs_array *a)
{
    bool finite = true;
    int64_t n = bs_array_count(a);
    if (a->dtype == BS_DTYPE_BF16 || a->dtype == BS_DTYPE_F16)
        return halves_finite(a->data, n, a->dtype == BS_DTYPE_F16 ? 0x7c00 : 0x7f80);
    if (a->dtype == BS_DTYPE_F32)
        for (int64_t i = 0; i < n; i++)
            finite &= isfinite(((const float *)a->data)[i]) != 0;
    else if (a->dtype == BS_DTYPE_F64)
        for (int64_t i = 0; i < n; i++)
            finite &= isfinite(((const double *)a->data)[i]) != 0;
    return finite;
}

uint64_t bs_array_hash(const bs_array *a)
{
    int64_t head[2 + BS_MAX_DIMS] = {(int64_t)a->dtype, a->ndim};
    for (int i = 0; i < a->ndim; i++)
        head[2 + i] = a->dim[i];
    return bs_hash64(a->data, a->bytes, bs_hash64(head, sizeof head, 0));
}
