/* SPDX-License-Identifier: Apache-2.0 */
/* Handles, scopes, places, the capacity rule and the steady state. */
#include "tensor_fixture.h"

static void assert_error(bs_status got, bs_status want, const char *part)
{
    if (got != want || !strstr(bs_error()->msg, part))
        fail_msg("status %s, message \"%s\"; expected %s with \"%s\"", bs_status_name(got),
                 bs_error()->msg, bs_status_name(want), part);
}

static void test_round_trip(void **state)
{
    (void)state;
    fixture f;
    float v[15], got[15];
    fix_open(&f, "check:cpu", 16);
    fix_seal(&f);
    fix_scope(&f, 0, false, false);
    bs_tensor *t = fix_from(&f, 5, 3, fix_floats(&f, v, 15));
    fix_values(t, got);
    assert_memory_equal(v, got, sizeof v);
    assert_int_equal(bs_tensor_ndim(t), 2);
    assert_int_equal(bs_tensor_dim(t, 0), 5);
    assert_int_equal(bs_tensor_dim(t, 1), 3);
    assert_int_equal(bs_tensor_dim(t, 2), 0);
    assert_int_equal(bs_tensor_capacity(t), 5);
    bs_place p;
    ok(bs_tensor_place(t, &p));
    assert_int_equal(p.rows, 5);
    assert_int_equal(p.channels, 3);
    bs_tensor *over;
    ok(bs_tensor_at(f.e, &p, &over));
    fix_values(over, got);
    assert_memory_equal(v, got, sizeof v);
    /* An empty tensor reads as an empty array. */
    bs_tensor *none = fix_from(&f, 0, 3, NULL);
    bs_array *a;
    ok(bs_tensor_read(none, &a));
    assert_int_equal(bs_array_count(a), 0);
    bs_array_free(a);
    p.rows = p.capacity + 1;
    assert_error(bs_tensor_at(f.e, &p, &over), BS_ARG, "rows 6, capacity 5");
    assert_error(bs_tensor_at(f.e, &(bs_place){.rows = 0}, &over), BS_ARG, "no bytes");
    ok(bs_array_new(BS_DTYPE_I32, 2, (int64_t[]){2, 2}, &a));
    assert_error(bs_tensor_from(f.e, a, &over), BS_DTYPE, "i32");
    bs_array_free(a);
    bs_tensor_release(t);
    bs_tensor_release(over);
    bs_tensor_release(none);
    fix_close(&f);
}

static void test_scope_ends_handles(void **state)
{
    (void)state;
    fixture f;
    float v[4] = {1, 2, 3, 4};
    fix_open(&f, "check:cpu", 16);
    fix_seal(&f);
    size_t before = bs_host_bytes(BS_TAG_MISC);
    fix_scope(&f, 0, false, false);
    assert_error(bs_scope_open(f.e, &(bs_scope_cfg){.label = "second"}), BS_STATE,
                 "'second' cannot open while scope 'layers.3 test, micro 0' is open");
    bs_tensor *t = fix_from(&f, 2, 2, v), *y;
    assert_true(bs_tensor_alive(t));
    bs_scope_close(f.e);
    assert_int_equal(fix_arena_now(&f), 0);
    assert_false(bs_tensor_alive(t));
    const char *why =
        "tensor of scope 'layers.3 test, micro 0' is used after its scope ended; copy what must "
        "live on with store:put";
    bs_array *a;
    bs_place p;
    assert_error(bs_op_scale(t, 2.0, &y), BS_STATE, why);
    assert_error(bs_tensor_read(t, &a), BS_STATE, why);
    assert_error(bs_tensor_place(t, &p), BS_STATE, why);
    assert_error(bs_tensor_want_grad(t), BS_STATE, why);
    /* A later scope neither revives it nor takes its label away. */
    ok(bs_scope_open(f.e, &(bs_scope_cfg){.label = "other"}));
    bs_tensor *u = fix_from(&f, 2, 2, v);
    assert_error(bs_op_add(u, t, &y), BS_STATE, why);
    bs_tensor_retain(t);
    bs_tensor_release(t);
    assert_false(bs_tensor_alive(t));
    bs_scope_close(f.e);
    bs_scope_close(f.e);
    assert_error(bs_tensor_at(f.e, &(bs_place){0}, &y), BS_STATE, "no scope is open");
    /* Handles may be released after the engine is gone. */
    bs_batch_close(f.batch);
    bs_engine_close(f.e);
    bs_dev_close(f.dev);
    assert_false(bs_tensor_alive(t));
    bs_tensor_release(t);
    bs_tensor_release(u);
    bs_tensor_release(NULL);
    assert_true(bs_host_bytes(BS_TAG_MISC) < before);
}

static void test_scope_arguments(void **state)
{
    (void)state;
    fixture f;
    float v[8] = {0};
    fix_open(&f, "check:cpu", 16);
    fix_seal(&f);
    assert_error(bs_scope_open(f.e, &(bs_scope_cfg){.label = "x", .batch = f.batch, .micro = 2}),
                 BS_ARG, "0..1 is expected");
    ok(bs_scope_open(f.e, &(bs_scope_cfg){.label = "bare"}));
    bs_tensor *x = fix_from(&f, 4, 2, v), *y;
    assert_error(bs_op_labelled(x, &y), BS_STATE, "no micro-batch");
    assert_error(bs_tensor_want_grad(x), BS_STATE, "records no tape");
    assert_error(bs_scope_backward(f.e, 0, NULL, NULL), BS_STATE, "records no tape");
    bs_scope_close(f.e);
    assert_error(bs_scope_backward(f.e, 0, NULL, NULL), BS_STATE, "no scope is open");
    fix_rows(&f, 0, 1, (int64_t[]){3}, NULL);
    fix_scope(&f, 0, false, false);
    bs_tensor *z = fix_from(&f, 4, 2, v);
    assert_error(bs_op_labelled(z, &y), BS_SHAPE, "4 rows, the micro-batch of scope");
    bs_tensor_release(x);
    bs_tensor_release(z);
    fix_close(&f);
}

/* ---- a small layer over all ops -------------------------------------------------------------- */

enum { C = 8, HEADS = 2, D = 4, HIDDEN = 12 };

typedef struct layer {
    bs_weight *norm;
    bs_linear *q, *up, *down;
    bs_rope *rope;
    bs_place g; /* gradient handed in: [capacity, C] */
} layer;

static bs_linear *linear(fixture *f, const char *name, bs_dtype t, int64_t out, int64_t in,
                         bool adapter)
{
    static float v[HIDDEN * HIDDEN]; /* the largest matrix of this file */
    bs_tensor_info info = fix_weight(f, name, t, 2, (int64_t[]){out, in}, fix_floats(f, v, out * in));
    bs_linear_cfg cfg = {.block = 0, .weight = &info, .name = name, .scale = 2.0f, .dropout = 0.25f};
    if (adapter) {
        cfg.lora_a = (bs_param_ref){fix_place(f, 2, in, fix_floats(f, v, 2 * in)),
                                    fix_place(f, 2, in, NULL), name};
        cfg.lora_b = (bs_param_ref){fix_place(f, out, 2, fix_floats(f, v, 2 * out)),
                                    fix_place(f, out, 2, NULL), name};
    }
    bs_linear *l;
    ok(bs_linear_new(f->e, &cfg, &l));
    return l;
}

static void layer_open(fixture *f, layer *l)
{
    float v[C];
    bs_tensor_info info = fix_weight(f, "norm", BS_DTYPE_BF16, 1, (int64_t[]){C}, fix_floats(f, v, C));
    ok(bs_weight_new(f->e, 0, &info, NULL, &l->norm));
    l->q = linear(f, "q", BS_DTYPE_F32, C, C, true);
    l->up = linear(f, "up", BS_DTYPE_BF16, HIDDEN, C, true);
    l->down = linear(f, "down", BS_DTYPE_F16, C, HIDDEN, true);
    bs_array *freq;
    ok(bs_array_new(BS_DTYPE_F32, 1, (int64_t[]){D / 2}, &freq));
    bs_array_set(freq, 0, 1.0);
    bs_array_set(freq, 1, 0.1);
    ok(bs_rope_new(f->e, freq, 1.0, BS_ROPE_HALF, &l->rope));
    bs_array_free(freq);
    l->g = fix_place(f, f->batch->cfg.tokens, C, NULL);
}

static void layer_close(layer *l)
{
    bs_weight_free(l->norm);
    bs_linear_free(l->q);
    bs_linear_free(l->up);
    bs_linear_free(l->down);
    bs_rope_free(l->rope);
}

/* Forward and, with a tape, backward over T tokens; every handle is released at once, as a collector
   might. *places: bytes handed out to tensors in order. */
static uint64_t layer_run(fixture *f, layer *l, int64_t T, bool tape, size_t *offsets, int *n_offsets)
{
    bs_place in = l->g;
    bs_tensor *x, *h, *q, *a, *r, *u, *g, *y, *t;
    in.rows = T;
    fix_scope(f, 0, tape, true);
    ok(bs_tensor_at(f->e, &in, &x));
    if (tape)
        ok(bs_tensor_want_grad(x));
    ok(bs_op_rmsnorm(x, l->norm, 1e-6, false, &h));
    ok(bs_op_linear(h, l->q, NULL, &q));
    ok(bs_op_rope(q, l->rope, HEADS, &r));
    ok(bs_op_attention(r, r, q, &(bs_attention_cfg){.heads = HEADS, .kv_heads = HEADS, .head_dim = D},
                       &a));
    ok(bs_op_add(x, a, &t));
    ok(bs_op_linear(t, l->up, NULL, &u));
    ok(bs_op_glu(u, u, BS_ACT_SILU, &g));
    ok(bs_op_linear(g, l->down, NULL, &y));
    bs_tensor *all[] = {h, q, r, a, t, u, g, y};
    *n_offsets = BSI_COUNT(all);
    for (size_t i = 0; i < BSI_COUNT(all); i++) {
        bs_place p;
        ok(bs_tensor_place(all[i], &p));
        assert_int_equal(p.capacity, f->batch->cfg.tokens);
        offsets[i] = p.off;
    }
    uint64_t hash = bs_scope_hash(f->e);
    if (tape) {
        bs_tensor *grad, *dx;
        ok(bs_tensor_at(f->e, &in, &grad));
        ok(bs_scope_backward(f->e, 1, &y, &grad));
        ok(bs_tensor_grad(x, &dx));
        assert_non_null(dx);
        bs_tensor_release(grad);
        bs_tensor_release(dx);
    }
    for (size_t i = 0; i < BSI_COUNT(all); i++)
        bs_tensor_release(all[i]);
    bs_tensor_release(x);
    bs_scope_close(f->e);
    assert_int_equal(fix_arena_now(f), 0);
    return hash;
}

/* The offsets and the peak are a function of the ops and the capacity, not of the rows; a dry run on
   the meta device gives the peak of the real one as an equality. */
static void test_capacity_rule(void **state)
{
    (void)state;
    enum { CAPACITY = 23 };
    const int64_t rows[] = {1, 7, CAPACITY, 2};
    size_t peak[2][BSI_COUNT(rows)], first[8], offsets[8];
    const char *spec[] = {"cpu", "meta"};
    int n;
    for (int d = 0; d < 2; d++)
        for (size_t i = 0; i < BSI_COUNT(rows); i++) {
            fixture f;
            layer l;
            fix_open(&f, spec[d], CAPACITY);
            layer_open(&f, &l);
            fix_seal(&f);
            fix_rows(&f, 0, 1, &rows[i], NULL);
            layer_run(&f, &l, rows[i], true, offsets, &n);
            peak[d][i] = fix_arena_peak(&f);
            if (d == 0 && i == 0)
                memcpy(first, offsets, sizeof first);
            assert_memory_equal(first, offsets, sizeof first);
            assert_int_equal(peak[d][i], peak[0][0]);
            layer_close(&l);
            fix_close(&f);
        }
    assert_true(peak[0][0] > CAPACITY * C * sizeof(float));
}

/* The same where the peak is scratch of one op: a wide linear with dropout, forward, and backward with
   a gradient that is there already. */
static void test_scratch_by_capacity(void **state)
{
    (void)state;
    const int64_t rows[] = {23, 1, 7};
    const char *spec[] = {"cpu", "meta"};
    size_t peak[2] = {0};
    for (int d = 0; d < 2; d++)
        for (size_t i = 0; i < BSI_COUNT(rows); i++)
            for (int twice = 0; twice < 2; twice++) {
                fixture f;
                bs_tensor *x, *y[2], *g[2];
                fix_open(&f, spec[d], 23);
                bs_linear *l = linear(&f, "wide", BS_DTYPE_F32, 1, 64, true);
                bs_place in = fix_place(&f, 23, 64, NULL), out = fix_place(&f, 23, 1, NULL);
                fix_seal(&f);
                fix_rows(&f, 0, 1, &rows[i], NULL);
                in.rows = out.rows = rows[i];
                fix_scope(&f, 0, twice == 1, true);
                ok(bs_tensor_at(f.e, &in, &x));
                if (twice)
                    ok(bs_tensor_want_grad(x));
                for (int k = 0; k < 2; k++) {
                    ok(bs_op_linear(x, l, NULL, &y[k]));
                    ok(bs_tensor_at(f.e, &out, &g[k]));
                }
                if (twice)
                    ok(bs_scope_backward(f.e, 2, y, g));
                peak[twice] = peak[twice] ? peak[twice] : fix_arena_peak(&f);
                assert_int_equal(fix_arena_peak(&f), peak[twice]);
                bs_tensor *all[] = {x, y[0], y[1], g[0], g[1]};
                for (size_t k = 0; k < BSI_COUNT(all); k++)
                    bs_tensor_release(all[k]);
                bs_linear_free(l);
                fix_close(&f);
            }
    assert_true(peak[0] >= 23 * 64 * sizeof(float));
}

static void test_meta_reads_nothing(void **state)
{
    (void)state;
    fixture f;
    float v[4] = {0};
    bs_array *a;
    fix_open(&f, "meta", 16);
    fix_seal(&f);
    fix_scope(&f, 0, false, false);
    bs_tensor *t = fix_from(&f, 2, 2, v);
    assert_error(bs_tensor_read(t, &a), BS_UNSUPPORTED, "holds no bytes");
    bs_tensor_release(t);
    fix_close(&f);
}

static void test_hash(void **state)
{
    (void)state;
    fixture f;
    layer l;
    size_t off[8];
    int n;
    fix_open(&f, "cpu", 16);
    layer_open(&f, &l);
    fix_seal(&f);
    fix_rows(&f, 0, 2, (int64_t[]){3, 4}, NULL);
    uint64_t with = layer_run(&f, &l, 7, true, off, &n), without = layer_run(&f, &l, 7, false, off, &n);
    assert_true(with == without); /* recompute with a tape is the forward without one */
    fix_rows(&f, 0, 1, (int64_t[]){8}, NULL);
    assert_true(layer_run(&f, &l, 8, false, off, &n) != with);
    bs_linear *q = l.q;
    fix_rows(&f, 0, 2, (int64_t[]){3, 4}, NULL);
    l.q = linear(&f, "q2", BS_DTYPE_F32, C, C, true); /* same shape, another weight */
    assert_true(layer_run(&f, &l, 7, false, off, &n) != with);
    bs_linear_free(q);
    uint64_t h[3];
    for (int i = 0; i < 3; i++) { /* a scalar counts too */
        float v[2] = {1, 2};
        bs_tensor *y;
        fix_scope(&f, 0, false, false);
        bs_tensor *x = fix_from(&f, 1, 2, v);
        ok(bs_op_scale(x, i == 1 ? 2.0 : 3.0, &y));
        h[i] = bs_scope_hash(f.e);
        bs_tensor_release(x);
        bs_tensor_release(y);
        bs_scope_close(f.e);
    }
    assert_true(h[0] == h[2] && h[0] != h[1]);
    layer_close(&l);
    fix_close(&f);
}

/* After two rounds a hundred more allocate nothing: on meta literally (an allocation would fail), on
   the cpu device, whose queues keep what is in flight, by the counters at rest. */
static void steady(const char *spec, bool executes)
{
    fixture f;
    layer l;
    size_t off[8], host[BS_TAG_COUNT], peak = 0;
    int n;
    fix_open(&f, spec, 16);
    layer_open(&f, &l);
    fix_seal(&f);
    fix_rows(&f, 0, 2, (int64_t[]){3, 4}, NULL);
    for (int i = 0; i < 102; i++) {
        if (i % 10 == 0)
            fix_visit(&f, true);
        layer_run(&f, &l, 7, true, off, &n);
        ok(bs_engine_wait_all(f.e));
        if (i == 1) {
            peak = fix_arena_peak(&f);
            for (int t = 0; t < BS_TAG_COUNT; t++)
                host[t] = bs_host_bytes((bs_tag)t);
            bsi_alloc_fail_nth(executes ? 0 : 1);
        }
    }
    bsi_alloc_fail_nth(0);
    for (int t = 0; t < BS_TAG_COUNT; t++)
        assert_int_equal(bs_host_bytes((bs_tag)t), host[t]);
    assert_int_equal(fix_arena_peak(&f), peak);
    layer_close(&l);
    fix_close(&f);
}

static void test_steady_state(void **state)
{
    (void)state;
    steady("cpu", true);
    steady("meta", false);
}

/* Every host allocation of a first run fails once; the scope closes clean and a second attempt works.
 */
static void test_allocation_failures(void **state)
{
    (void)state;
    bool done = false;
    size_t misc = bs_host_bytes(BS_TAG_MISC), header = bs_host_bytes(BS_TAG_HEADER);
    for (uint64_t k = 1; !done && k < 500; k++) {
        fixture f;
        layer l;
        bs_tensor *x = NULL, *h = NULL, *u = NULL, *dx = NULL, *g = NULL;
        fix_open(&f, "meta", 16);
        layer_open(&f, &l);
        fix_seal(&f);
        bs_place in = l.g;
        in.rows = 7;
        bs_scope_cfg cfg = {.label = "fails", .batch = f.batch, .tape = true, .train = true};
        fix_rows(&f, 0, 1, (int64_t[]){7}, NULL);
        bsi_alloc_fail_nth(k);
        bs_status st = bs_scope_open(f.e, &cfg);
        if (st == BS_OK && (st = bs_tensor_at(f.e, &in, &x)) == BS_OK &&
            (st = bs_tensor_want_grad(x)) == BS_OK &&
            (st = bs_op_rmsnorm(x, l.norm, 1e-6, false, &h)) == BS_OK &&
            (st = bs_op_linear(h, l.q, NULL, &u)) == BS_OK &&
            (st = bs_tensor_at(f.e, &in, &g)) == BS_OK &&
            (st = bs_scope_backward(f.e, 1, &u, &g)) == BS_OK)
            st = bs_tensor_grad(x, &dx);
        bsi_alloc_fail_nth(0);
        done = st == BS_OK;
        if (!done)
            assert_int_equal(st, BS_NOMEM);
        bs_scope_close(f.e);
        assert_int_equal(fix_arena_now(&f), 0);
        bs_tensor *held[] = {x, h, u, g, dx};
        for (size_t i = 0; i < BSI_COUNT(held); i++)
            bs_tensor_release(held[i]);
        size_t off[8];
        int n;
        layer_run(&f, &l, 7, true, off, &n);
        layer_close(&l);
        fix_close(&f);
        assert_int_equal(bs_host_bytes(BS_TAG_MISC), misc);
        assert_int_equal(bs_host_bytes(BS_TAG_HEADER), header);
    }
    assert_true(done);
}

static void test_arena_full(void **state)
{
    (void)state;
    fixture f;
    bs_tensor *x, *y;
    fix_open(&f, "cpu", 16);
    bs_place p = fix_place(&f, 16, 16, NULL);
    fix_seal(&f);
    fix_scope(&f, 0, false, false);
    ok(bs_tensor_at(f.e, &p, &x));
    bs_status st = BS_OK;
    for (int i = 0; st == BS_OK && i < 100000; i++) {
        st = bs_op_scale(x, 1.0, &y);
        if (st == BS_OK)
            bs_tensor_release(y);
    }
    assert_error(st, BS_DEVMEM, "scope 'layers.3 test, micro 0'");
    bs_scope_close(f.e);
    assert_int_equal(fix_arena_now(&f), 0);
    bs_tensor_release(x);
    fix_close(&f);
}

/* The kernels' workspace is a region of the pool, and every launch of the engine has it. */
static void test_workspace(void **state)
{
    (void)state;
    bs_dev *dev;
    bs_engine *e;
    bs_engine_stats s;
    bsi_addr x;
    const char *text;
    ok(bs_dev_open("check:meta", NULL, &dev));
    ok(bs_engine_open(&(bs_engine_cfg){.dev = dev, .workspace_bytes = 1000}, &e));
    bs_engine_stats_get(e, &s);
    assert_int_equal(s.fixed_bytes, 1024);
    ok(bsi_pool_region(e->pool, "x", 64, &x));
    bsi_kcall call = {
        .op = BSK_SCALE, .n_args = 1, .arg = {{x, 64, BSI_READWRITE}}, .n = {16}, .label = "scale"};
    ok(bsi_engine_launch(e, &call));
    ok(bsi_fill(e->copy_in, bsi_addr_add(e->workspace.at, 999), 0, 1));
    assert_int_equal(bs_dev_violations(dev, &text), 1);
    assert_non_null(strstr(text, "'scale' (writes, queue 'compute') and then 'fill'"));
    bs_engine_close(e);
    bs_dev_close(dev);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_round_trip),
                                       cmocka_unit_test(test_scope_ends_handles),
                                       cmocka_unit_test(test_scope_arguments),
                                       cmocka_unit_test(test_capacity_rule),
                                       cmocka_unit_test(test_scratch_by_capacity),
                                       cmocka_unit_test(test_meta_reads_nothing),
                                       cmocka_unit_test(test_hash),
                                       cmocka_unit_test(test_steady_state),
                                       cmocka_unit_test(test_allocation_failures),
                                       cmocka_unit_test(test_arena_full),
                                       cmocka_unit_test(test_workspace)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
