/* SPDX-License-Identifier: Apache-2.0 */
/* Trainable parameters: registration, sizes, initial values, host copies, norm, AdamW against f64. */
#include "train/train.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define ok(e) assert_ok((e), #e, __LINE__)
static void assert_ok(bs_status st, const char *what, int line)
{
    if (st != BS_OK)
        fail_msg("line %d: %s: %s: %s", line, what, bs_status_name(st), bs_error()->msg);
}

static void fails(bs_status got, bs_status want, const char *text)
{
    assert_string_equal(bs_status_name(got), bs_status_name(want));
    if (!strstr(bs_error()->msg, text))
        fail_msg("'%s' is not in '%s'", text, bs_error()->msg);
}

typedef struct rig {
    bs_dev *dev;
    bs_engine *e;
} rig;

static rig rig_open(const char *spec)
{
    rig r = {0};
    ok(bs_dev_open(spec, NULL, &r.dev));
    ok(bs_engine_open(&(bs_engine_cfg){.dev = r.dev, .pool_bytes = 1 << 20}, &r.e));
    return r;
}

static void rig_close(rig *r)
{
    const char *text;
    if (bs_dev_violations(r->dev, &text))
        fail_msg("%s", text);
    bs_engine_close(r->e);
    bs_dev_close(r->dev);
}

static size_t fixed(const rig *r)
{
    bs_engine_stats s;
    bs_engine_stats_get(r->e, &s);
    return s.fixed_bytes;
}

static bs_array *array(int64_t rows, int64_t cols, const float *v)
{
    bs_array *a;
    ok(bs_array_new(BS_DTYPE_F32, 2, (int64_t[]){rows, cols}, &a));
    if (v)
        memcpy(a->data, v, a->bytes);
    return a;
}

/* Values as a device would leave them in an accumulator. */
static void put_grad(const rig *r, const bs_params *p, int id, const float *v)
{
    bs_param_ref ref;
    ok(bs_params_ref(p, id, &ref));
    ok(bsi_engine_write(r->e, bsi_place_addr(&ref.grad), v,
                        (size_t)(ref.grad.rows * ref.grad.channels) * 4));
}

/* A home for a base parameter, as the streamer would hold it. */
static bs_place home_of(const rig *r, int64_t rows, int64_t cols, const float *v)
{
    bsi_addr at;
    ok(bsi_pool_region(r->e->pool, "home", (size_t)(rows * cols) * 4, &at));
    ok(bsi_engine_write(r->e, at, v, (size_t)(rows * cols) * 4));
    return bsi_place(at, BS_DTYPE_F32, rows, rows, cols);
}

static void test_refused(void **state)
{
    (void)state;
    rig r = rig_open("cpu");
    bs_params *p;
    bs_array *out, *wrong = array(3, 2, NULL), *half;
    bs_param_ref ref;
    double norm;
    int a, b;
    bs_place home = {.dtype = BS_DTYPE_BF16, .rows = 4, .channels = 4};
    ok(bs_params_open(r.e, &p));
    fails(bs_params_add(p, "", 1, 1, &a), BS_ARG, "name");
    fails(bs_params_add(p, "x", 0, 1, &a), BS_SHAPE, "[0, 1]");
    fails(bs_params_add(p, "x", INT64_MAX, 8, &a), BS_SHAPE, "too large");
    fails(bs_params_add(p, "x", INT64_MAX / 16, 1, &a), BS_SHAPE, "too large");
    assert_int_equal(bs_params_count(p), 0);
    ok(bs_params_add(p, "a", 2, 3, &a));
    ok(bs_params_add_base(p, "b", 4, 4, &b));
    fails(bs_params_update_base(p, b, &home), BS_DTYPE, "bf16");
    home.dtype = BS_DTYPE_F32;
    fails(bs_params_update_base(p, a, &home), BS_STATE, "no base parameter");
    home.rows = 5;
    fails(bs_params_update_base(p, b, &home), BS_SHAPE, "[5, 4]");
    fails(bs_params_get(p, a, &out), BS_STATE, "sealed");
    fails(bs_params_ref(p, a, &ref), BS_STATE, "sealed");
    fails(bs_params_norm(p, &norm), BS_STATE, "sealed");
    fails(bs_params_zero_grad(p), BS_STATE, "sealed");
    ok(bs_params_seal(p));
    fails(bs_params_seal(p), BS_STATE, "already");
    fails(bs_params_add(p, "c", 1, 1, &a), BS_STATE, "sealed");
    fails(bs_params_get(p, 2, &out), BS_ARG, "2");
    fails(bs_params_get(p, -1, &out), BS_ARG, "-1");
    fails(bs_params_set(p, a, wrong), BS_SHAPE, "[2, 3]");
    ok(bs_array_new(BS_DTYPE_F16, 2, (int64_t[]){2, 3}, &half));
    fails(bs_params_set(p, a, half), BS_DTYPE, "f16");
    home.rows = 4;
    fails(bs_params_update_base(p, b, &home), BS_STATE, "after the set was sealed");
    fails(bs_params_get(p, b, &out), BS_STATE, "frozen");
    fails(bs_params_init_kaiming(p, b, 1), BS_STATE, "frozen");
    fails(bs_params_moment(p, b, 1, &out), BS_STATE, "no moments");
    fails(bs_params_moment(p, a, 3, &out), BS_ARG, "1 and 2");
    assert_null(bs_params_name(p, 7));
    bs_array_free(wrong);
    bs_array_free(half);
    bs_params_close(p);

    ok(bs_params_open(r.e, &p));
    ok(bs_params_add(p, "same", 1, 1, &a));
    ok(bs_params_add(p, "other", 1, 1, &a));
    ok(bs_params_add_base(p, "same", 1, 1, &a));
    fails(bs_params_seal(p), BS_ARG, "'same' was added twice");
    bs_params_close(p);

    fails(bs_params_open(NULL, &p), BS_ARG, "an engine is required");
    rig_close(&r);
}

/* The plan's figure, the pool's and the dry run's are one. */
static void test_bytes(void **state)
{
    (void)state;
    const char *spec[] = {"cpu", "meta"};
    const uint64_t planned = (512 + (512 + 768) + 2 * (512 + 256)) + 256;
    for (size_t i = 0; i < BSI_COUNT(spec); i++) {
        rig r = rig_open(spec[i]);
        bs_params *p;
        int id, base;
        float v[6] = {0};
        bs_place home = home_of(&r, 2, 3, v);
        ok(bs_params_open(r.e, &p));
        assert_int_equal(bs_params_device_bytes(p), 0);
        ok(bs_params_add(p, "a", 5, 7, &id));
        ok(bs_params_add_base(p, "w", 2, 3, &base));
        ok(bs_params_add(p, "b", 64, 1, &id));
        ok(bs_params_add_base(p, "frozen", 65, 1, &id));
        ok(bs_params_update_base(p, base, &home));
        assert_int_equal(bs_params_device_bytes(p), planned);
        size_t before = fixed(&r);
        ok(bs_params_seal(p));
        assert_int_equal(fixed(&r) - before, planned);
        assert_int_equal(bs_params_device_bytes(p), planned);
        bs_params_close(p);
        rig_close(&r);
    }
    rig r = rig_open("cpu"); /* an empty set is a frozen model */
    bs_params *p;
    double norm;
    size_t before = fixed(&r);
    ok(bs_params_open(r.e, &p));
    ok(bs_params_seal(p));
    assert_int_equal(fixed(&r), before);
    ok(bs_params_zero_grad(p));
    ok(bs_params_norm(p, &norm));
    assert_true(norm == 0);
    bs_params_close(p);
    rig_close(&r);
}

static void test_copies(void **state)
{
    (void)state;
    rig r = rig_open("check:cpu");
    bs_params *p;
    int a, b;
    float v[15], g[15], w[4] = {1, 2, 3, 4};
    for (int i = 0; i < 15; i++) {
        v[i] = (float)i + 0.5f;
        g[i] = (float)-i;
    }
    bs_place home = home_of(&r, 2, 2, w);
    ok(bs_params_open(r.e, &p));
    ok(bs_params_add(p, "a", 3, 5, &a));
    ok(bs_params_add_base(p, "b", 2, 2, &b));
    ok(bs_params_update_base(p, b, &home));
    ok(bs_params_seal(p));
    bs_array *x = array(3, 5, v), *y;
    ok(bs_params_get(p, a, &y));
    for (int i = 0; i < 15; i++)
        assert_true(bs_array_get(y, i) == 0); /* LoRA's B starts at zero */
    bs_array_free(y);
    ok(bs_params_set(p, a, x));
    ok(bs_params_get(p, a, &y));
    assert_memory_equal(y->data, v, sizeof v);
    bs_array_free(y);
    ok(bs_params_set_moment(p, a, 2, x));
    ok(bs_params_moment(p, a, 2, &y));
    assert_memory_equal(y->data, v, sizeof v);
    bs_array_free(y);
    ok(bs_params_moment(p, a, 1, &y));
    assert_true(bs_array_get(y, 14) == 0);
    bs_array_free(y);
    ok(bs_params_get(p, b, &y));
    assert_memory_equal(y->data, w, sizeof w);
    bs_array_free(y);
    put_grad(&r, p, a, g);
    put_grad(&r, p, b, g + 2);
    ok(bs_params_grad(p, b, &y));
    assert_memory_equal(y->data, g + 2, sizeof w);
    bs_array_free(y);
    ok(bs_params_grad(p, a, &y));
    assert_memory_equal(y->data, g, sizeof g);
    bs_array_free(y);
    ok(bs_params_zero_grad(p));
    for (int i = 0; i < 2; i++) {
        ok(bs_params_grad(p, i, &y));
        assert_true(bs_array_get(y, 1) == 0 && bs_array_get(y, 3) == 0);
        bs_array_free(y);
    }
    bs_param_ref ref;
    ok(bs_params_ref(p, b, &ref));
    assert_null(ref.value.mem);
    assert_string_equal(ref.name, "b");
    ok(bs_params_ref(p, a, &ref));
    assert_int_equal(ref.value.off % 256, 0);
    assert_int_equal(ref.value.rows, 3);
    assert_int_equal(ref.grad.channels, 5);
    bs_array_free(x);
    bs_params_close(p);
    rig_close(&r);
}

static void test_kaiming(void **state)
{
    (void)state;
    enum { ROWS = 37, COLS = 601, N = ROWS * COLS }; /* more than one upload, not a multiple of 4 */
    float *first = NULL, bound = (float)(1 / sqrt(COLS));
    for (int pass = 0; pass < 2; pass++) {
        rig r = rig_open("cpu");
        bs_params *p;
        bs_array *x, *y, *z;
        int a, b;
        ok(bs_params_open(r.e, &p));
        if (pass) /* another order and another neighbour give the same bits */
            ok(bs_params_add(p, "another", 3, 3, &b));
        ok(bs_params_add(p, pass ? "l.1.b" : "l.0.a", ROWS, COLS, &a));
        ok(bs_params_add(p, pass ? "l.0.a" : "l.1.b", ROWS, COLS, &b));
        ok(bs_params_seal(p));
        ok(bs_params_init_kaiming(p, b, 7));
        ok(bs_params_init_kaiming(p, a, 7));
        ok(bs_params_get(p, pass ? b : a, &x));
        ok(bs_params_get(p, pass ? a : b, &y));
        assert_memory_not_equal(x->data, y->data, x->bytes);
        const float *v = x->data;
        double sum = 0, sq = 0, top = 0, b1 = (double)bound;
        for (int i = 0; i < N; i++) {
            double e = (double)v[i];
            assert_true(e >= -b1 && e <= b1);
            sum += e;
            sq += e * e;
            top = fmax(top, fabs(e));
        }
        /* Mean 0 and variance bound^2/3 of a uniform, each within five standard errors. */
        assert_true(fabs(sum / N) < 5 * b1 / sqrt(3.0 * N));
        assert_true(fabs(sq / N / (b1 * b1) - 1.0 / 3) < 5 * sqrt(4.0 / 45 / N));
        assert_true(top > 0.999 * b1);
        if (!pass) {
            first = malloc(sizeof *first * N);
            memcpy(first, v, sizeof *first * N);
        } else {
            assert_memory_equal(v, first, sizeof *first * N);
        }
        ok(bs_params_init_kaiming(p, a, 8));
        ok(bs_params_get(p, a, &z));
        assert_memory_not_equal(z->data, (pass ? y : x)->data, z->bytes);
        bs_array_free(x);
        bs_array_free(y);
        bs_array_free(z);
        bs_params_close(p);
        rig_close(&r);
    }
    /* The definition, element by element: word i%4 of counter i/4 under the key of (seed, name). */
    uint32_t key[2], word[4];
    bsi_philox_key(7, "l.0.a", key);
    for (uint32_t i = 16381; i < 16390; i++) {
        bsi_philox((uint32_t[]){i / 4, 0, 0, 0}, key, word);
        assert_true(first[i] == (2 * bsi_uniform(word[i % 4]) - 1) * bound);
    }
    free(first);
}

typedef struct state64 { /* one parameter in f64 */
    int n;
    double p[32], m[32], v[32];
} state64;

/* torch.optim.AdamW, after clip_grad_norm_. */
static void reference(state64 *s, const float *g, const bs_adamw *c, double scale)
{
    double bc1 = 1 - pow(c->beta1, (double)c->step), bc2 = 1 - pow(c->beta2, (double)c->step);
    for (int i = 0; i < s->n; i++) {
        double x = (double)g[i] * scale;
        s->p[i] *= 1 - c->lr * c->weight_decay;
        s->m[i] = c->beta1 * s->m[i] + (1 - c->beta1) * x;
        s->v[i] = c->beta2 * s->v[i] + (1 - c->beta2) * x * x;
        s->p[i] -= c->lr / bc1 * s->m[i] / (sqrt(s->v[i] / bc2) + c->eps);
    }
}

static void near(bs_array *a, const double *want, double bound)
{
    for (int64_t i = 0; i < bs_array_count(a); i++)
        if (!(fabs(bs_array_get(a, i) - want[i]) <= bound * (1 + fabs(want[i]))))
            fail_msg("element %lld is %.9g, %.9g is expected", (long long)i, bs_array_get(a, i),
                     want[i]);
    bs_array_free(a);
}

/* Twelve steps with decay and a clip that holds in some steps, own and base parameters. */
static void test_adamw(void **state)
{
    (void)state;
    rig r = rig_open("check:cpu");
    bs_params *p;
    bs_array *a;
    int id[3];
    float w[6] = {1, -2, 0.5f, 3, 0, 1e-3f}, start[21], g[3][21];
    state64 s[3] = {{.n = 21}, {.n = 4}, {.n = 6}};
    uint32_t key[2], word[4];
    bsi_philox_key(3, "adamw", key);
    bs_place home = home_of(&r, 3, 2, w);
    ok(bs_params_open(r.e, &p));
    ok(bs_params_add(p, "a", 3, 7, &id[0]));
    ok(bs_params_add_base(p, "w", 3, 2, &id[2]));
    ok(bs_params_add(p, "b", 2, 2, &id[1]));
    ok(bs_params_update_base(p, id[2], &(bs_place){.rows = 3, .channels = 2}));
    fails(bs_params_update_base(p, id[2], &home), BS_STATE, "already");
    ok(bs_params_seal(p));
    bs_adamw c = {.lr = 1e-2, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8, .weight_decay = 0.1, .clip = 3};
    c.step = 1;
    fails(bs_params_apply(p, &c, 1), BS_STATE, "home");
    fails(bs_params_get(p, id[2], &a), BS_STATE, "home");
    ok(bs_params_update_base(p, id[2], &home));
    fails(bs_params_update_base(p, id[2], &home), BS_STATE, "already");
    for (int i = 0; i < 21; i++)
        s[0].p[i] = start[i] = 0.1f * (float)i - 1;
    for (int i = 0; i < 6; i++)
        s[2].p[i] = w[i];
    a = array(3, 7, start);
    ok(bs_params_set(p, id[0], a));
    bs_array_free(a);
    int clipped = 0;
    for (c.step = 1; c.step <= 12; c.step++) {
        double sum = 0, norm;
        ok(bs_params_zero_grad(p));
        for (int k = 0; k < 3; k++) {
            for (int i = 0; i < s[k].n; i++) {
                bsi_philox((uint32_t[]){(uint32_t)c.step, (uint32_t)k, (uint32_t)i, 0}, key, word);
                g[k][i] = (2 * bsi_uniform(word[0]) - 1) * (c.step % 3 ? 0.5f : 2.0f);
                sum += (double)g[k][i] * (double)g[k][i];
            }
            put_grad(&r, p, id[k], g[k]);
        }
        ok(bs_params_norm(p, &norm));
        assert_true(fabs(norm - sqrt(sum)) <= 1e-12 * norm);
        clipped += norm > c.clip;
        for (int k = 0; k < 3; k++)
            reference(&s[k], g[k], &c, norm > c.clip ? c.clip / (norm + 1e-6) : 1);
        ok(bs_params_apply(p, &c, norm));
    }
    assert_in_range(clipped, 2, 10);
    for (int k = 0; k < 3; k++) {
        ok(bs_params_get(p, id[k], &a));
        near(a, s[k].p, 1e-6); /* a few f32 roundings in each of 12 steps */
        ok(bs_params_moment(p, id[k], 1, &a));
        near(a, s[k].m, 1e-6);
        ok(bs_params_moment(p, id[k], 2, &a));
        near(a, s[k].v, 1e-6);
    }
    bs_params_close(p);
    rig_close(&r);
}

/* What must not be applied changes nothing. */
static void test_apply_refused(void **state)
{
    (void)state;
    rig r = rig_open("cpu");
    bs_params *p;
    bs_array *a;
    int id;
    double norm;
    float v[4] = {1, 2, 3, 4}, g[4] = {1, 1, NAN, 1};
    const bs_adamw good = {.lr = 1, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .step = 1};
    const bs_adamw bad[] = {
        {.lr = 1, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .step = 0},
        {.lr = NAN, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .step = 1},
        {.lr = 1, .beta1 = 1, .beta2 = 0.999, .eps = 1e-8, .step = 1},
        {.lr = 1, .beta1 = 0.9, .beta2 = -0.1, .eps = 1e-8, .step = 1},
        {.lr = 1, .beta1 = 0.9, .beta2 = 0.999, .eps = 0, .step = 1},
        {.lr = 1, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = -1, .step = 1},
        {.lr = 1, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .clip = -1, .step = 1},
    };
    ok(bs_params_open(r.e, &p));
    fails(bs_params_apply(p, &good, 1), BS_STATE, "sealed");
    ok(bs_params_add(p, "a", 2, 2, &id));
    ok(bs_params_seal(p));
    a = array(2, 2, v);
    ok(bs_params_set(p, id, a));
    bs_array_free(a);
    put_grad(&r, p, id, g);
    ok(bs_params_norm(p, &norm));
    assert_true(isnan(norm));
    fails(bs_params_apply(p, &good, norm), BS_NONFINITE, "nan");
    fails(bs_params_apply(p, &good, INFINITY), BS_NONFINITE, "inf");
    for (size_t i = 0; i < BSI_COUNT(bad); i++)
        fails(bs_params_apply(p, &bad[i], 1), BS_ARG, "AdamW");
    g[2] = INFINITY;
    put_grad(&r, p, id, g);
    ok(bs_params_norm(p, &norm));
    assert_true(isinf(norm));
    ok(bs_params_get(p, id, &a));
    assert_memory_equal(a->data, v, sizeof v);
    bs_array_free(a);
    for (int which = 1; which <= 2; which++) {
        ok(bs_params_moment(p, id, which, &a));
        for (int i = 0; i < 4; i++)
            assert_true(bs_array_get(a, i) == 0);
        bs_array_free(a);
    }
    bs_params_close(p);
    rig_close(&r);
}

/* Every host allocation that fails is reported and leaves nothing behind. */
static void test_no_memory(void **state)
{
    (void)state;
    size_t live = bs_host_bytes(BS_TAG_MISC);
    rig r = rig_open("cpu");
    for (uint64_t n = 1; n <= 6; n++) {
        bs_params *p = NULL;
        bs_array *a = NULL;
        int id;
        bsi_alloc_fail_nth(n);
        bs_status st = bs_params_open(r.e, &p);
        if (st == BS_OK)
            st = bs_params_add(p, "a", 4, 4, &id);
        if (st == BS_OK)
            st = bs_params_seal(p);
        if (st == BS_OK)
            st = bs_params_init_kaiming(p, id, 1);
        if (st == BS_OK)
            st = bs_params_get(p, id, &a);
        bsi_alloc_fail_nth(0);
        assert_int_equal(st, BS_NOMEM);
        bs_array_free(a);
        bs_params_close(p);
    }
    rig_close(&r);
    assert_int_equal(bs_host_bytes(BS_TAG_MISC), live);
}

/* An adapter that is only used: its values, and nothing else that would take memory. */
static void test_frozen(void **state)
{
    (void)state;
    rig r = rig_open("check:cpu");
    bs_params *p, *trained;
    bs_param_ref ref;
    int a, b;
    double norm;
    bs_array *v = array(4, 8, NULL), *got;
    for (int64_t i = 0; i < 32; i++)
        bs_array_set(v, i, (double)i);
    ok(bs_params_open(r.e, &trained));
    ok(bs_params_add(trained, "a", 4, 8, &a));
    ok(bs_params_open(r.e, &p));
    ok(bs_params_freeze(p));
    ok(bs_params_add(p, "a", 4, 8, &a));
    ok(bs_params_add(p, "b", 8, 4, &b));
    fails(bs_params_add_base(p, "w", 8, 8, &b), BS_STATE, "frozen set");
    assert_int_equal(bs_params_device_bytes(p), 2 * 256 + 256);
    assert_int_equal(bs_params_device_bytes(trained), 4 * 256 + 256);
    size_t before = fixed(&r);
    ok(bs_params_seal(p));
    assert_int_equal(fixed(&r) - before, bs_params_device_bytes(p));
    fails(bs_params_freeze(trained->sealed ? trained : p), BS_STATE, "before they are sealed");
    ok(bs_params_set(p, a, v));
    ok(bs_params_get(p, a, &got));
    assert_memory_equal(v->data, got->data, v->bytes);
    ok(bs_params_ref(p, a, &ref));
    assert_non_null(ref.value.mem);
    assert_null(ref.grad.mem);
    fails(bs_params_grad(p, a, &v), BS_STATE, "frozen");
    fails(bs_params_moment(p, a, 1, &v), BS_STATE, "frozen");
    fails(bs_params_zero_grad(p), BS_STATE, "frozen");
    fails(bs_params_norm(p, &norm), BS_STATE, "frozen");
    fails(bs_params_apply(p, &(bs_adamw){.lr = 1, .eps = 1, .step = 1}, 0), BS_STATE, "frozen");
    bs_array_free(got);
    bs_array_free(v);
    bs_params_close(p);
    bs_params_close(trained);
    rig_close(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_frozen),

        cmocka_unit_test(test_refused),  cmocka_unit_test(test_bytes),
        cmocka_unit_test(test_copies),   cmocka_unit_test(test_kaiming),
        cmocka_unit_test(test_adamw),    cmocka_unit_test(test_apply_refused),
        cmocka_unit_test(test_no_memory)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
