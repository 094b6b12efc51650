/* SPDX-License-Identifier: Apache-2.0 */
/* Rows that go on where an earlier walk ended: positions, cached attention against attention inside rows, the
   last tokens. */
#include "tensor_fixture.h"

enum {
    H = 4,
    K = 2,
    D = 6,
    Q = H * D,
    KV = K * D,
    ROW_A = 9,
    ROW_B = 6,
    ALL = ROW_A + ROW_B,
    TOKENS = 16
};

static const int64_t ids[TOKENS] = {1, 2, 3};

static void set_rows(fixture *f, int n, const int64_t *len, const int64_t *row_id, const int64_t *start)
{
    bs_micro m = {.n_rows = n, .row_len = len, .ids = ids, .row_id = row_id, .start = start};
    ok(bs_batch_set(f->batch, 0, &m));
    ok(bs_batch_begin(f->batch, 1));
}

static void fails(bs_status got, bs_status want, const char *text)
{
    assert_string_equal(bs_status_name(got), bs_status_name(want));
    if (!strstr(bs_error()->msg, text))
        fail_msg("'%s' is not in '%s'", text, bs_error()->msg);
}

typedef struct problem {
    float q[ALL * Q], k[ALL * KV], v[ALL * KV], o[ALL * Q];
    bs_attention_cfg cfg;
} problem;

/* One walk: the tokens [first, first + n) of the problem are rows of these lengths. */
static void step(fixture *f, const problem *p, bs_cache *cache, int64_t first, int n_rows,
                 const int64_t *len, const int64_t *row_id, const int64_t *start)
{
    int64_t n = 0;
    float got[ALL * Q];
    bs_tensor *y;
    for (int r = 0; r < n_rows; r++)
        n += len[r];
    set_rows(f, n_rows, len, row_id, start);
    fix_scope(f, 0, false, false);
    bs_tensor *q = fix_from(f, n, Q, p->q + first * Q), *k = fix_from(f, n, KV, p->k + first * KV),
              *v = fix_from(f, n, KV, p->v + first * KV);
    ok(bs_op_attention_cached(q, k, v, &p->cfg, cache, 1, &y));
    fix_values(y, got);
    for (int64_t i = 0; i < n * Q; i++)
        if (!(fabsf(got[i] - p->o[first * Q + i]) <= 2e-6f))
            fail_msg("token %lld: %g, inside the row it is %g", (long long)(first + i / Q),
                     (double)got[i], (double)p->o[first * Q + i]);
    bs_tensor_release(q);
    bs_tensor_release(k);
    bs_tensor_release(v);
    bs_tensor_release(y);
    bs_scope_close(f->e);
}

static void check_steps(const char *device, int64_t window, double softcap)
{
    fixture f;
    problem p = {
        .cfg = {.heads = H, .kv_heads = K, .head_dim = D, .window = window, .softcap = softcap}};
    const int64_t channels[] = {0, KV}, len[] = {ROW_A, ROW_B};
    bs_cache *cache;
    bs_engine_stats before, after;
    bs_tensor *y;
    fix_open(&f, device, TOKENS);
    bs_engine_stats_get(f.e, &before);
    ok(bs_cache_open(f.e, &(bs_cache_cfg){2, channels, 3, ROW_A}, &cache));
    bs_engine_stats_get(f.e, &after);
    size_t one = bsi_round_up((size_t)3 * ROW_A * KV * sizeof(float), 256);
    assert_int_equal(after.fixed_bytes - before.fixed_bytes,
                     2 * one); /* a layer without attention takes none */
    fix_seal(&f);
    fix_floats(&f, p.q, ALL * Q);
    fix_floats(&f, p.k, ALL * KV);
    fix_floats(&f, p.v, ALL * KV);
    set_rows(&f, 2, len, NULL, NULL);
    fix_scope(&f, 0, false, false);
    bs_tensor *q = fix_from(&f, ALL, Q, p.q), *k = fix_from(&f, ALL, KV, p.k),
              *v = fix_from(&f, ALL, KV, p.v);
    ok(bs_op_attention(q, k, v, &p.cfg, &y));
    fix_values(y, p.o);
    bs_tensor_release(q);
    bs_tensor_release(k);
    bs_tensor_release(v);
    bs_tensor_release(y);
    bs_scope_close(f.e);
    /* Row A in four pieces as row 2 of the cache, the last but one beside the whole of row B as row 0. */
    step(&f, &p, cache, 0, 1, (const int64_t[]){4}, (const int64_t[]){2}, NULL);
    step(&f, &p, cache, 4, 1, (const int64_t[]){1}, (const int64_t[]){2}, (const int64_t[]){4});
    step(&f, &p, cache, 5, 1, (const int64_t[]){3}, (const int64_t[]){2}, (const int64_t[]){5});
    step(&f, &p, cache, 8, 2, (const int64_t[]){1, ROW_B}, (const int64_t[]){2, 0},
         (const int64_t[]){8, 0});
    /* A row that begins anew is not disturbed by what was there. */
    step(&f, &p, cache, ROW_A, 1, (const int64_t[]){ROW_B}, (const int64_t[]){2}, NULL);
    bs_cache_close(cache);
    fix_close(&f);
}

static void test_steps(void **state)
{
    (void)state;
    check_steps("cpu", 0, 0);
    check_steps("check:cpu", 3, 0);
    check_steps("cpu", 0, 1.5);
    check_steps("check:cpu", 5, 2.5);
}

static void test_positions(void **state)
{
    (void)state;
    fixture f;
    float x[ALL * Q], whole[ALL * Q], part[ALL * Q], freq[] = {1.0f, 0.3f};
    bs_array *a;
    bs_rope *r;
    bs_tensor *t, *y;
    fix_open(&f, "check:cpu", TOKENS);
    ok(bs_array_new(BS_DTYPE_F32, 1, (int64_t[]){2}, &a));
    memcpy(a->data, freq, sizeof freq);
    ok(bs_rope_new(f.e, a, 1.0, BS_ROPE_HALF, &r));
    bs_array_free(a);
    fix_seal(&f);
    fix_floats(&f, x, ALL * Q);
    for (int i = 0; i < 2; i++) { /* a row of ALL tokens, then its tail alone */
        int64_t first = i ? 11 : 0, n = ALL - first;
        set_rows(&f, 1, &n, NULL, i ? &first : NULL);
        assert_int_equal(bs_batch_longest(f.batch, 0), ALL);
        fix_scope(&f, 0, false, false);
        t = fix_from(&f, n, Q, x + first * Q);
        ok(bs_op_rope(t, r, H, &y));
        fix_values(y, i ? part : whole);
        bs_tensor_release(t);
        bs_tensor_release(y);
        bs_scope_close(f.e);
    }
    assert_memory_equal(part, whole + 11 * Q, 4 * Q * sizeof(float));
    int64_t n = 3, bad[] = {-1, INT32_MAX};
    for (int i = 0; i < 2; i++) {
        bs_micro m = {.n_rows = 1, .row_len = &n, .ids = ids, .start = &bad[i]};
        fails(bs_batch_set(f.batch, 0, &m), BS_ARG, "starts at position");
    }
    bs_rope_free(r);
    fix_close(&f);
}

static void test_last(void **state)
{
    (void)state;
    fixture f;
    float x[ALL * KV], y[3 * KV];
    const int64_t len[] = {5, 1, 9}, ends[] = {4, 5, 14};
    bs_tensor *t, *last;
    fix_open(&f, "check:cpu", TOKENS);
    fix_seal(&f);
    fix_floats(&f, x, ALL * KV);
    set_rows(&f, 3, len, NULL, NULL);
    fix_scope(&f, 0, false, false);
    t = fix_from(&f, ALL, KV, x);
    ok(bs_op_last(t, &last));
    assert_int_equal(bs_tensor_dim(last, 0), 3);
    assert_int_equal(bs_tensor_capacity(last), bs_tensor_capacity(t));
    fix_values(last, y);
    for (int r = 0; r < 3; r++)
        assert_memory_equal(y + r * KV, x + ends[r] * KV, KV * sizeof(float));
    bs_tensor_release(last);
    bs_tensor_release(t);
    bs_scope_close(f.e);
    fix_scope(&f, 0, true, false);
    t = fix_from(&f, ALL, KV, x);
    ok(bs_tensor_want_grad(t));
    fails(bs_op_last(t, &last), BS_UNSUPPORTED, "no gradient");
    bs_tensor_release(t);
    fix_close(&f);
}

static void test_refused(void **state)
{
    (void)state;
    fixture f, other;
    float x[ALL * Q] = {0};
    const int64_t channels[] = {KV, 0}, len[] = {4};
    bs_attention_cfg cfg = {.heads = H, .kv_heads = K, .head_dim = D};
    bs_cache *cache, *none;
    bs_tensor *y;
    fix_open(&f, "cpu", TOKENS);
    fix_open(&other, "cpu", TOKENS);
    fails(bs_cache_open(f.e, &(bs_cache_cfg){2, channels, 0, 8}, &none), BS_ARG, "rows 0");
    fails(bs_cache_open(f.e, &(bs_cache_cfg){2, channels, 1, 0}, &none), BS_ARG, "capacity 0");
    fails(bs_cache_open(f.e, &(bs_cache_cfg){0, channels, 1, 1}, &none), BS_ARG, "layers 0");
    fails(bs_cache_open(f.e, &(bs_cache_cfg){1, (const int64_t[]){INT64_MAX}, 9, 9}, &none), BS_SHAPE,
          "layer 0");
    size_t misc = bs_host_bytes(BS_TAG_MISC);
    for (int n = 1; n <= 2; n++) {
        bsi_alloc_fail_nth((uint64_t)n);
        assert_int_equal(bs_cache_open(f.e, &(bs_cache_cfg){2, channels, 2, 8}, &none), BS_NOMEM);
        bsi_alloc_fail_nth(0);
        assert_int_equal(bs_host_bytes(BS_TAG_MISC), misc);
    }
    ok(bs_cache_open(f.e, &(bs_cache_cfg){2, channels, 2, 8}, &cache));
    fix_seal(&f);
    fix_seal(&other);
    static const struct {
        int64_t row, start;
        int layer;
        bs_status st;
        const char *text;
    } cases[] = {{2, 0, 0, BS_ARG, "rows 2..2; the cache has rows 0..1"},
                 {-1, 0, 0, BS_ARG, "rows -1..-1"},
                 {0, 5, 0, BS_ARG, "position 8; the cache has room for 8"},
                 {0, 0, 1, BS_SHAPE, "layer 1 of a cache of 2"},
                 {0, 0, 2, BS_SHAPE, "layer 2 of a cache of 2"}};
    for (size_t i = 0; i < BSI_COUNT(cases); i++) {
        set_rows(&f, 1, len, &cases[i].row, &cases[i].start);
        fix_scope(&f, 0, false, false);
        bs_tensor *q = fix_from(&f, 4, Q, x), *k = fix_from(&f, 4, KV, x);
        fails(bs_op_attention_cached(q, k, k, &cfg, cache, cases[i].layer, &y), cases[i].st,
              cases[i].text);
        bs_tensor_release(q);
        bs_tensor_release(k);
        bs_scope_close(f.e);
    }
    set_rows(&other, 1, len, NULL, NULL);
    fix_scope(&other, 0, false, false);
    bs_tensor *q = fix_from(&other, 4, Q, x), *k = fix_from(&other, 4, KV, x);
    fails(bs_op_attention_cached(q, k, k, &cfg, cache, 0, &y), BS_ARG, "another engine");
    bs_tensor_release(q);
    bs_tensor_release(k);
    set_rows(&f, 1, len, NULL, NULL);
    fix_scope(&f, 0, true, false);
    q = fix_from(&f, 4, Q, x), k = fix_from(&f, 4, KV, x);
    ok(bs_tensor_want_grad(q));
    fails(bs_op_attention_cached(q, k, k, &cfg, cache, 0, &y), BS_UNSUPPORTED, "no gradient");
    bs_tensor_release(q);
    bs_tensor_release(k);
    bs_cache_close(cache);
    fix_close(&other);
    fix_close(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_steps), cmocka_unit_test(test_positions),
                                       cmocka_unit_test(test_last), cmocka_unit_test(test_refused)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
