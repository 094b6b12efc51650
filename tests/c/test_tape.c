/* SPDX-License-Identifier: Apache-2.0 */
/* What the tape records and keeps, how gradients meet, when bytes are freed, and its errors. */
#include "tape_case.h"

/* One tensor, many consumers: add to itself (one dy, twice), scale, and an output of its own. */
static void test_several_consumers(void **state)
{
    (void)state;
    fixture f;
    float v[T * C], r[T * C], twice[T * C];
    start(&f);
    fix_seal(&f);
    fix_scope(&f, 0, true, false);
    bs_tensor *x = fix_from(&f, T, C, fix_floats(&f, v, T * C)), *s, *a, *y;
    ok(bs_tensor_want_grad(x));
    ok(bs_op_scale(x, 3.0, &s));
    ok(bs_op_add(s, s, &a)); /* 6x */
    ok(bs_op_add(a, x, &y)); /* 7x */
    bs_tensor *g = fix_from(&f, T, C, fix_floats(&f, r, T * C));
    for (int i = 0; i < T * C; i++)
        twice[i] = 2.0f * r[i];
    bs_tensor *ga = fix_from(&f, T, C, twice);
    /* y and a both lead out: 7r + 6*2r; y is given twice: + 7r */
    ok(bs_scope_backward(f.e, 3, (bs_tensor *[]){y, a, y}, (bs_tensor *[]){g, ga, g}));
    assert_grad(x, r, NULL, 26.0);
    release_all(x, s, a, y, g, ga);
    fix_close(&f);
}

/* A gradient that comes from a store is never written, and neither is a tensor that is still read. */
static void test_given_gradient_is_not_written(void **state)
{
    (void)state;
    fixture f;
    float v[T * C], r[T * C], after[T * C], slope[T * C];
    bs_tensor *s, *y;
    start(&f);
    fix_seal(&f);
    fix_scope(&f, 0, true, false);
    bs_tensor *x = fix_from(&f, T, C, fix_floats(&f, v, T * C));
    ok(bs_tensor_want_grad(x));
    ok(bs_op_add(x, x, &s));
    ok(bs_op_mul(s, x, &y)); /* 2x^2 */
    bs_tensor *place = fix_at(&f, T, C, fix_floats(&f, r, T * C));
    ok(bs_scope_backward(f.e, 2, (bs_tensor *[]){s, y}, (bs_tensor *[]){place, place}));
    fix_values(place, after);
    assert_memory_equal(after, r, sizeof r);
    for (int i = 0; i < T * C; i++)
        slope[i] = 4.0f * v[i] + 2.0f;
    assert_grad(x, r, slope, 1.0);
    release_all(x, s, y, place);
    fix_close(&f);
}

/* A sum hands one gradient to both sides. What one side adds later must not reach the other, nor the
   place or the leaf that the gradient came from. */
static void test_shared_gradient(void **state)
{
    (void)state;
    fixture f;
    float v[T * C], r[T * C], q[T * C], got[T * C], both[T * C];
    bs_tensor *z, *y;
    start(&f);
    fix_seal(&f);
    fix_floats(&f, r, T * C);
    fix_floats(&f, q, T * C);
    for (int i = 0; i < T * C; i++)
        both[i] = r[i] + 2.0f * q[i];
    for (int kind = 0; kind < 3; kind++) { /* the gradient is: of the arena, a store place, a leaf */
        fix_scope(&f, 0, true, false);
        bs_tensor *x1 = fix_from(&f, T, C, fix_floats(&f, v, T * C)), *x2 = fix_from(&f, T, C, v);
        ok(bs_tensor_want_grad(x1));
        ok(bs_tensor_want_grad(x2));
        ok(bs_op_scale(x1, 2.0, &z));
        ok(bs_op_add(x1, x2, &y));
        bs_tensor *gy = kind == 1 ? fix_at(&f, T, C, r) : fix_from(&f, T, C, r);
        bs_tensor *gz = fix_from(&f, T, C, q);
        if (kind == 2)
            ok(bs_tensor_want_grad(gy));
        ok(bs_scope_backward(f.e, 2, (bs_tensor *[]){y, z}, (bs_tensor *[]){gy, gz}));
        assert_grad(x2, r, NULL, 1.0);
        assert_grad(x1, both, NULL, 1.0);
        if (kind) {
            fix_values(gy, got);
            assert_memory_equal(got, r, sizeof r);
        }
        release_all(x1, x2, z, y, gy, gz);
        bs_scope_close(f.e);
    }
    fix_close(&f);
}

/* The only holder of a gradient that was given, a store place or a leaf, gets a second contribution. */
static void test_second_contribution(void **state)
{
    (void)state;
    fixture f;
    float v[T * C], r[T * C], q[T * C], got[T * C], both[T * C];
    bs_tensor *s, *w;
    start(&f);
    fix_seal(&f);
    fix_floats(&f, v, T * C);
    fix_floats(&f, r, T * C);
    fix_floats(&f, q, T * C);
    for (int i = 0; i < T * C; i++)
        both[i] = r[i] + 2.0f * q[i];
    for (int kind = 1; kind < 3; kind++) {
        fix_scope(&f, 0, true, false);
        bs_tensor *x = fix_from(&f, T, C, v), *gs;
        ok(bs_tensor_want_grad(x));
        ok(bs_op_scale(x, 1.0, &s));
        ok(bs_op_scale(s, 2.0, &w));
        gs = kind == 1 ? fix_at(&f, T, C, r) : fix_from(&f, T, C, r);
        bs_tensor *gw = fix_from(&f, T, C, q);
        if (kind == 2)
            ok(bs_tensor_want_grad(gs));
        ok(bs_scope_backward(f.e, 2, (bs_tensor *[]){s, w}, (bs_tensor *[]){gs, gw}));
        fix_values(gs, got);
        assert_memory_equal(got, r, sizeof r);
        assert_grad(x, both, NULL, 1.0);
        release_all(x, s, w, gs, gw);
        bs_scope_close(f.e);
    }
    fix_close(&f);
}

/* q, k, v style: three linears on one input; dx is their sum, in place after the first. */
static void test_linears_share_an_input(void **state)
{
    (void)state;
    fixture f;
    float w[3][C * C], v[T * C], r[T * C], got[T * C];
    bs_linear *l[3];
    bs_tensor *y[3], *g[3], *dx;
    start(&f);
    fix_seal(&f);
    for (int i = 0; i < 3; i++) {
        bs_tensor_info info =
            fix_weight(&f, "w", BS_DTYPE_F32, 2, (int64_t[]){C, C}, fix_floats(&f, w[i], C * C));
        ok(bs_linear_new(f.e, &(bs_linear_cfg){.block = 0, .weight = &info}, &l[i]));
    }
    fix_scope(&f, 0, true, false);
    bs_tensor *x = fix_from(&f, T, C, fix_floats(&f, v, T * C));
    fix_floats(&f, r, T * C);
    ok(bs_tensor_want_grad(x));
    for (int i = 0; i < 3; i++) {
        ok(bs_op_linear(x, l[i], NULL, &y[i]));
        g[i] = fix_from(&f, T, C, r);
    }
    uint64_t before = fix_launches(&f);
    ok(bs_scope_backward(f.e, 3, y, g));
    assert_int_equal(fix_launches(&f) - before, 3); /* three GEMMs, no sums beside them */
    ok(bs_tensor_grad(x, &dx));
    fix_values(dx, got);
    for (int t = 0; t < T; t++)
        for (int c = 0; c < C; c++) {
            double want = 0.0;
            for (int i = 0; i < 3; i++)
                for (int o = 0; o < C; o++)
                    want += (double)r[t * C + o] * (double)w[i][o * C + c];
            assert_true(fabs((double)got[t * C + c] - want) < 5e-6);
        }
    release_all(x, dx, y[0], y[1], y[2], g[0], g[1], g[2]);
    for (int i = 0; i < 3; i++)
        bs_linear_free(l[i]);
    fix_close(&f);
}

/* x + W glu(x, x), backward with and without a look at y: what backward does not read is not computed, and
   the gradient has the same bits. */
static void test_late(void **state)
{
    (void)state;
    fixture f;
    float w[C * C], v[T * C], r[T * C], grad[2][T * C], y_read[T * C], y_plain[T * C];
    bs_linear *l;
    bs_tensor *h, *p, *y, *dx;
    start(&f);
    fix_seal(&f);
    bs_tensor_info info =
        fix_weight(&f, "w", BS_DTYPE_F32, 2, (int64_t[]){C, C}, fix_floats(&f, w, C * C));
    ok(bs_linear_new(f.e, &(bs_linear_cfg){.block = 0, .weight = &info}, &l));
    fix_floats(&f, v, T * C);
    fix_floats(&f, r, T * C);
    for (int look = 0; look < 2; look++) {
        fix_scope(&f, 0, true, false);
        bs_tensor *x = fix_from(&f, T, C, v), *g = fix_from(&f, T, C, r);
        ok(bs_tensor_want_grad(x));
        uint64_t before = fix_launches(&f);
        ok(bs_op_glu(x, x, BS_ACT_SILU, &h));
        ok(bs_op_linear(h, l, NULL, &p));
        ok(bs_op_add(x, p, &y));
        assert_int_equal(fix_launches(&f), before);
        if (look) {
            bs_place at;
            f.dev->lost =
                true; /* what could not be computed is not there, and can be asked for again */
            for (int again = 0; again < 2; again++)
                assert_error(bs_tensor_place(y, &at), BS_DEVICE, "glu");
            f.dev->lost = false;
            before = fix_launches(&f);
            fix_values(y, y_read);
            assert_int_equal(fix_launches(&f) - before, 3);
            fix_values(y, y_read);
            assert_int_equal(fix_launches(&f) - before, 3); /* once */
        }
        before = fix_launches(&f);
        ok(bs_scope_backward(f.e, 1, &y, &g));
        assert_int_equal(fix_launches(&f) - before, 4); /* dx of linear, glu, two sums of gradients */
        ok(bs_tensor_grad(x, &dx));
        fix_values(dx, grad[look]);
        release_all(x, g, h, p, y, dx);
        bs_scope_close(f.e);
    }
    assert_memory_equal(grad[0], grad[1], sizeof grad[0]);
    fix_scope(&f, 0, false, false);
    bs_tensor *x = fix_from(&f, T, C, v);
    ok(bs_op_glu(x, x, BS_ACT_SILU, &h));
    ok(bs_op_linear(h, l, NULL, &p));
    ok(bs_op_add(x, p, &y));
    fix_values(y, y_plain);
    assert_memory_equal(y_read, y_plain, sizeof y_plain);
    release_all(x, h, p, y);
    bs_linear_free(l);
    fix_close(&f);
}

/* Scopes of one forward pass each, set aside and walked in another order: the gradients of a pass of its own. */
static void test_kept(void **state)
{
    (void)state;
    enum { N = 3 };
    fixture f;
    float w[C * C], v[N][T * C], r[T * C], want[N][T * C], got[T * C];
    bs_linear *l;
    bs_kept *kept[N];
    bs_tensor *x, *h, *y, *g, *dx, *pair[2];
    start(&f);
    fix_seal(&f);
    bs_tensor_info info =
        fix_weight(&f, "w", BS_DTYPE_F32, 2, (int64_t[]){C, C}, fix_floats(&f, w, C * C));
    ok(bs_linear_new(f.e, &(bs_linear_cfg){.block = 0, .weight = &info}, &l));
    fix_floats(&f, r, T * C);
    for (int i = 0; i < 2 * N; i++) {
        bool keep = i >= N;
        fix_scope(&f, 0, true, false);
        x = fix_at(&f, T, C, i < N ? fix_floats(&f, v[i], T * C) : v[i - N]);
        ok(bs_tensor_want_grad(x));
        ok(bs_op_act(x, BS_ACT_SILU, &h));
        ok(bs_op_linear(h, l, NULL, &y));
        ok(bs_op_mul(y, h, &g));
        release_all(y);
        y = g;
        if (keep) {
            bs_place at;
            ok(bs_tensor_place(y, &at));
            ok(bs_scope_keep(f.e, 2, (bs_tensor *[]){x, y}, &kept[i - N]));
            assert_error(bs_tensor_place(y, &at), BS_STATE, "after its scope ended");
            release_all(x, h, y);
            continue;
        }
        g = fix_from(&f, T, C, r);
        ok(bs_scope_backward(f.e, 1, &y, &g));
        ok(bs_tensor_grad(x, &dx));
        fix_values(dx, want[i]);
        release_all(x, h, y, g, dx);
        bs_scope_close(f.e);
    }
    for (int k = 0; k < 2; k++) { /* newest, then oldest; the third is never walked */
        int i = k == 0 ? N - 1 : 0;
        ok(bs_scope_resume(kept[i], pair));
        assert_error(bs_scope_resume(kept[1], (bs_tensor *[2]){0}), BS_STATE,
                     "cannot be resumed while");
        g = fix_from(&f, T, C, r);
        ok(bs_scope_backward(f.e, 1, &pair[1], &g));
        ok(bs_tensor_grad(pair[0], &dx));
        fix_values(dx, got);
        assert_memory_equal(got, want[i], sizeof got);
        release_all(pair[0], pair[1], g, dx);
        bs_scope_close(f.e);
    }
    bs_engine_stats s;
    bs_engine_stats_get(f.e, &s);
    assert_true(s.arena_now > 0);
    bs_kept_free(kept[1]);
    bs_engine_stats_get(f.e, &s);
    assert_int_equal(s.arena_now, 0);

    bs_linear_free(l);
    fix_close(&f);
}

static void test_keep_needs_a_tape(void **state)
{
    (void)state;
    fixture f;
    bs_kept *kept;
    start(&f);
    fix_seal(&f);
    fix_scope(&f, 0, false, false);
    assert_error(bs_scope_keep(f.e, 0, NULL, &kept), BS_STATE, "records no tape");
    bs_scope_close(f.e);
    assert_error(bs_scope_keep(f.e, 0, NULL, &kept), BS_STATE, "no scope is open");
    fix_close(&f);
}

/* One that is neither resumed nor freed ends with its engine. */
static void test_kept_to_the_end(void **state)
{
    (void)state;
    fixture f;
    float v[T * C];
    bs_kept *kept;
    bs_tensor *y;
    start(&f);
    fix_seal(&f);
    fix_scope(&f, 0, true, false);
    bs_tensor *x = fix_at(&f, T, C, fix_floats(&f, v, T * C));
    ok(bs_tensor_want_grad(x));
    ok(bs_op_act(x, BS_ACT_SILU, &y));
    ok(bs_scope_keep(f.e, 1, &y, &kept));
    release_all(x, y);
    fix_close(&f);
}

static void test_view(void **state)
{
    (void)state;
    fixture f;
    float v[T * C], r[T * C], k[T * C];
    bs_tensor *y, *h, *back, *bad;
    bs_place px, ph;
    start(&f);
    fix_seal(&f);
    fix_scope(&f, 0, true, false);
    bs_tensor *x = fix_at(&f, T, C, fix_floats(&f, v, T * C));
    ok(bs_tensor_want_grad(x));
    ok(bs_op_view(x, 2, (int64_t[]){2 * T, C / 2}, &h));
    ok(bs_tensor_place(x, &px));
    ok(bs_tensor_place(h, &ph));
    assert_int_equal(px.off, ph.off);
    assert_int_equal(bs_tensor_capacity(h), 32);
    ok(bs_op_mul(h, h, &y));
    ok(bs_op_view(y, 3, (int64_t[]){T, 2, C / 2}, &back));
    assert_int_equal(bs_tensor_capacity(back), 16);
    assert_error(bs_op_view(x, 2, (int64_t[]){T, C + 1}, &bad), BS_SHAPE, "view: [6 8] as [6 9]");
    assert_error(bs_op_view(x, 2, (int64_t[]){4, 12}, &bad), BS_SHAPE, "multiple or divisor");
    assert_error(bs_op_view(x, 2, (int64_t[]){-T, -C}, &bad), BS_SHAPE, "[-6 -8]");
    bs_tensor *g2 = fix_from(&f, T, C, fix_floats(&f, r, T * C)), *g;
    ok(bs_op_view(g2, 3, (int64_t[]){T, 2, C / 2}, &g));
    ok(bs_scope_backward(f.e, 1, &back, &g));
    for (int i = 0; i < T * C; i++)
        k[i] = 2.0f * v[i];
    assert_grad(x, r, k, 1.0);
    release_all(x, h, y, back, g, g2);
    fix_close(&f);
}

/* The gradient of a residual is that of the result, without a launch; a result that nobody reads is never
   computed. */
static void test_residual(void **state)
{
    (void)state;
    fixture f;
    float v[T * C], w[C * C], same[T * C];
    bs_linear *l;
    bs_tensor *y, *grad;
    fix_open(&f, "check:cpu", T);
    fix_seal(&f);
    bs_tensor_info info =
        fix_weight(&f, "w", BS_DTYPE_F32, 2, (int64_t[]){C, C}, fix_floats(&f, w, C * C));
    bs_linear_cfg cfg = {.block = 0, .weight = &info, .scale = 1.0f};
    cfg.lora_a = (bs_param_ref){fix_place(&f, 2, C, w), fix_place(&f, 2, C, NULL), "a"};
    cfg.lora_b = (bs_param_ref){fix_place(&f, C, 2, w), fix_place(&f, C, 2, NULL), "b"};
    ok(bs_linear_new(f.e, &cfg, &l));
    fix_scope(&f, 0, true, false);
    bs_tensor *x = fix_from(&f, T, C, fix_floats(&f, v, T * C)), *r = fix_from(&f, T, C, v),
              *dy = fix_from(&f, T, C, v);
    ok(bs_tensor_want_grad(r));
    uint64_t before = fix_launches(&f);
    ok(bs_op_linear(x, l, r, &y));
    ok(bs_scope_backward(f.e, 1, &y, &dy));
    assert_int_equal(fix_launches(&f) - before, 1 + 3); /* x A^T; dB, u, dA */
    ok(bs_tensor_grad(r, &grad));
    fix_values(grad, same);
    assert_memory_equal(same, v, sizeof same);
    release_all(x, r, y, dy, grad);
    bs_scope_close(f.e);
    bs_linear_free(l);
    fix_close(&f);
}

/* A frozen linear, and one of the same weight with a trained adapter. */
typedef struct frozen {
    fixture f;
    bs_linear *frozen, *adapted;
    float w[C * C], v[T * C];
} frozen;

static void frozen_open(frozen *z)
{
    fixture *f = &z->f;
    start(f);
    fix_seal(f);
    bs_tensor_info info =
        fix_weight(f, "w", BS_DTYPE_F32, 2, (int64_t[]){C, C}, fix_floats(f, z->w, C * C));
    bs_linear_cfg cfg = {.block = 0, .weight = &info, .scale = 1.0f};
    ok(bs_linear_new(f->e, &cfg, &z->frozen));
    cfg.lora_a = (bs_param_ref){fix_place(f, 2, C, z->w), fix_place(f, 2, C, NULL), "a"};
    cfg.lora_b = (bs_param_ref){fix_place(f, C, 2, z->w), fix_place(f, C, 2, NULL), "b"};
    ok(bs_linear_new(f->e, &cfg, &z->adapted));
    fix_floats(f, z->v, T * C);
}

static void frozen_close(frozen *z)
{
    bs_linear_free(z->frozen);
    bs_linear_free(z->adapted);
    fix_close(&z->f);
}

/* Frozen inputs: no node, no gradient launch, nothing kept. */
static void test_frozen_records_nothing(void **state)
{
    (void)state;
    frozen z;
    bs_tensor *y, *gated, *grad;
    frozen_open(&z);
    fix_scope(&z.f, 0, true, false);
    bs_tensor *x = fix_from(&z.f, T, C, z.v), *g = fix_from(&z.f, T, C, z.v);
    ok(bs_op_linear(x, z.frozen, NULL, &y));
    ok(bs_op_glu(y, x, BS_ACT_SILU, &gated));
    uint64_t before = fix_launches(&z.f);
    ok(bs_scope_backward(z.f.e, 1, &gated, &g));
    assert_int_equal(fix_launches(&z.f), before);
    assert_int_equal(fix_arena_now(&z.f), 0); /* no node: all of it is free at once */
    assert_error(bs_tensor_grad(x, &grad), BS_STATE, "after the backward pass freed it");
    release_all(x, g, y, gated);
    frozen_close(&z);
}

/* Below the lowest trainable op nothing flows: dA, dB and u, but no dx and no linear before it. */
static void test_nothing_flows_below_the_lowest_adapter(void **state)
{
    (void)state;
    frozen z;
    bs_tensor *below, *middle, *above;
    frozen_open(&z);
    fix_scope(&z.f, 0, true, false);
    bs_tensor *x = fix_from(&z.f, T, C, z.v), *g = fix_from(&z.f, T, C, z.v);
    ok(bs_op_linear(x, z.frozen, NULL, &below));
    ok(bs_op_linear(below, z.adapted, NULL, &middle));
    ok(bs_op_linear(middle, z.frozen, NULL, &above));
    uint64_t before = fix_launches(&z.f);
    ok(bs_scope_backward(z.f.e, 1, &above, &g));
    assert_int_equal(fix_launches(&z.f) - before, 1 + 3); /* dmiddle; dB, u, dA */
    release_all(x, g, below, middle, above);
    frozen_close(&z);
}

/* Without a tape an adapter's forward is three GEMMs and nothing is kept but the outputs. */
static void test_adapter_without_tape(void **state)
{
    (void)state;
    frozen z;
    bs_tensor *y;
    frozen_open(&z);
    fix_scope(&z.f, 0, false, false);
    bs_tensor *x = fix_from(&z.f, T, C, z.v);
    uint64_t before = fix_launches(&z.f);
    ok(bs_op_linear(x, z.adapted, NULL, &y));
    assert_int_equal(fix_launches(&z.f) - before, 3);
    assert_int_equal(fix_arena_now(&z.f), 2 * 256); /* x and y, 192 bytes each */
    release_all(x, y);
    frozen_close(&z);
}

/* A tape that nothing asks anything of keeps no by-products of norm and attention. */
static void test_by_products_of_nothing_trained(void **state)
{
    (void)state;
    frozen z;
    float one[C];
    bs_weight *norm;
    bs_tensor *normed, *attended;
    frozen_open(&z);
    bs_tensor_info vec =
        fix_weight(&z.f, "norm", BS_DTYPE_F32, 1, (int64_t[]){C}, fix_floats(&z.f, one, C));
    ok(bs_weight_new(z.f.e, 0, &vec, NULL, &norm));
    fix_scope(&z.f, 0, true, false);
    bs_tensor *x = fix_from(&z.f, T, C, z.v);
    ok(bs_op_rmsnorm(x, norm, 1e-6, false, &normed));
    ok(bs_op_attention(normed, normed, normed,
                       &(bs_attention_cfg){.heads = 2, .kv_heads = 2, .head_dim = 4}, &attended));
    assert_int_equal(fix_arena_now(&z.f), 3 * 256);
    release_all(x, normed, attended);
    bs_weight_free(norm);
    frozen_close(&z);
}

/* What no node reads is freed when backward starts; after it leaves and their gradients remain. */
static void test_backward_frees(void **state)
{
    (void)state;
    fixture f;
    float v[T * C], r[T * C];
    bs_tensor *a, *b, *c, *y, *z, *dx;
    start(&f);
    fix_seal(&f);
    fix_scope(&f, 0, true, false);
    bs_tensor *x = fix_from(&f, T, C, fix_floats(&f, v, T * C));
    bs_tensor *place = fix_at(&f, T, C, v);
    ok(bs_tensor_want_grad(x));
    ok(bs_op_scale(x, 2.0, &a)); /* read by the act */
    ok(bs_op_act(a, BS_ACT_SILU, &b));
    ok(bs_op_scale(b, 0.5, &c));
    ok(bs_op_add(c, place, &y));
    ok(bs_op_mul(y, y, &z)); /* two gradients of one tensor: the second is freed once it is added */
    bs_tensor *g = fix_from(&f, T, C, fix_floats(&f, r, T * C));
    /* x, a, b, c, g of 6 rows; y and z have the capacity of the place, 16 rows */
    assert_int_equal(fix_arena_now(&f), 5 * 256 + 2 * 512);
    ok(bs_scope_backward(f.e, 1, &z, &g));
    assert_int_equal(fix_arena_now(&f), 2 * 256); /* x and its gradient */
    assert_true(bs_tensor_alive(x) && bs_tensor_alive(place));
    assert_false(bs_tensor_alive(a) || bs_tensor_alive(b) || bs_tensor_alive(y) || bs_tensor_alive(g));
    bs_place p;
    assert_error(bs_tensor_place(b, &p), BS_STATE, "after the backward pass freed it");
    bs_tensor *more;
    assert_error(bs_op_scale(x, 1.0, &more), BS_STATE, "has run its backward pass");
    bs_array *arr;
    ok(bs_array_new(BS_DTYPE_F32, 2, (int64_t[]){1, 1}, &arr));
    assert_error(bs_tensor_from(f.e, arr, &more), BS_STATE, "has run its backward pass");
    bs_array_free(arr);
    ok(bs_tensor_grad(x, &dx));
    /* Gradients go on into a store: place += dx */
    float got[T * C], dxv[T * C];
    fix_values(dx, dxv);
    ok(bs_op_accumulate(place, dx));
    fix_values(place, got);
    for (int i = 0; i < T * C; i++)
        assert_true(got[i] == v[i] + dxv[i]);
    release_all(x, place, a, b, c, y, z, g, dx);
    fix_close(&f);
}

static void test_accumulate(void **state)
{
    (void)state;
    fixture f;
    float v[T * C];
    bs_tensor *y;
    start(&f);
    fix_seal(&f);
    fix_scope(&f, 0, true, false);
    bs_tensor *x = fix_from(&f, T, C, fix_floats(&f, v, T * C)), *acc = fix_at(&f, T, C, v);
    bs_tensor *leaf = fix_at(&f, T, C, v), *narrow = fix_at(&f, T, C - 1, v);
    assert_error(bs_op_accumulate(x, acc), BS_STATE, "must come from a store");
    assert_error(bs_op_accumulate(narrow, x), BS_SHAPE, "[6 7] with [6 8]");
    ok(bs_tensor_want_grad(leaf));
    assert_error(bs_op_accumulate(leaf, x), BS_STATE, "not be on the tape");
    ok(bs_op_mul(leaf, acc, &y)); /* acc is read by the backward of leaf */
    assert_error(bs_op_accumulate(acc, x), BS_STATE, "not be on the tape");
    release_all(x, acc, leaf, narrow, y);
    fix_close(&f);
}

/* A linear "q" of one block and a norm, whose names are in messages. */
typedef struct named {
    fixture f;
    bs_linear *linear;
    bs_weight *norm;
    float w[C * C], v[T * C];
} named;

static void named_open(named *z)
{
    start(&z->f);
    fix_seal(&z->f);
    bs_tensor_info info = fix_weight(&z->f, "layers.3.q.weight", BS_DTYPE_F32, 2, (int64_t[]){C, C},
                                     fix_floats(&z->f, z->w, C * C));
    bs_tensor_info vec =
        fix_weight(&z->f, "layers.3.norm.weight", BS_DTYPE_BF16, 1, (int64_t[]){C}, z->w);
    ok(bs_linear_new(z->f.e, &(bs_linear_cfg){.block = 0, .weight = &info, .name = "q"}, &z->linear));
    ok(bs_weight_new(z->f.e, 0, &vec, NULL, &z->norm));
    fix_floats(&z->f, z->v, T * C);
}

static void named_close(named *z)
{
    bs_linear_free(z->linear);
    bs_weight_free(z->norm);
    fix_close(&z->f);
}

static void test_shapes_that_do_not_fit(void **state)
{
    (void)state;
    named z;
    bs_tensor *y;
    named_open(&z);
    fix_scope(&z.f, 0, true, false);
    bs_tensor *x = fix_from(&z.f, T, C, z.v), *thin = fix_from(&z.f, T, C - 3, z.v);
    assert_error(bs_op_add(x, thin, &y), BS_SHAPE, "add: [6 8] with [6 5]");
    assert_error(bs_op_linear(thin, z.linear, NULL, &y), BS_SHAPE,
                 "linear 'q': x [6 5] does not meet weight [8 8]");
    assert_error(bs_op_linear(x, z.linear, thin, &y), BS_SHAPE,
                 "linear 'q': residual [6 5]; [6 8], like the");
    assert_error(bs_op_rmsnorm(thin, z.norm, 1e-6, false, &y), BS_SHAPE, "'layers.3.norm.weight' [8]");
    assert_error(bs_op_columns(x, 6, 3, &y), BS_SHAPE, "3 columns from 6 on of x [6 8]");
    assert_error(bs_op_row_scale(x, thin, 5, &y), BS_SHAPE, "column 5 of g [6 5]");
    assert_error(bs_op_act(x, (bs_act)9, &y), BS_ARG, "activation 9");
    assert_error(
        bs_op_attention(x, x, thin, &(bs_attention_cfg){.heads = 2, .kv_heads = 2, .head_dim = 4}, &y),
        BS_SHAPE, "q [6 8], k [6 8], v [6 5]");
    assert_error(
        bs_op_attention(x, x, x, &(bs_attention_cfg){.heads = 3, .kv_heads = 2, .head_dim = 4}, &y),
        BS_ARG, "heads 3, kv_heads 2");
    release_all(x, thin);
    named_close(&z);
}

static void test_gradients_out_of_order(void **state)
{
    (void)state;
    named z;
    bs_tensor *y, *normed, *grad;
    named_open(&z);
    fix_scope(&z.f, 0, true, false);
    bs_tensor *x = fix_from(&z.f, T, C, z.v), *thin = fix_from(&z.f, T, C - 3, z.v);
    ok(bs_tensor_want_grad(x));
    assert_error(bs_tensor_grad(x, &grad), BS_STATE, "backward has not run");
    ok(bs_op_linear(x, z.linear, NULL, &y));
    ok(bs_op_rmsnorm(y, z.norm, 1e-6, false, &normed));
    assert_error(bs_tensor_want_grad(y), BS_STATE, "has used this tensor already");
    assert_error(bs_scope_backward(z.f.e, 1, &normed, &thin), BS_SHAPE,
                 "output [6 8] with gradient [6 5]");
    release_all(x, thin, y, normed);
    named_close(&z);
}

/* The visit has ended: neither backward nor an op may use its addresses. */
static void test_weights_outside_their_visit(void **state)
{
    (void)state;
    named z;
    bs_tensor *y, *normed;
    named_open(&z);
    fix_scope(&z.f, 0, true, false);
    bs_tensor *x = fix_from(&z.f, T, C, z.v), *g = fix_from(&z.f, T, C, z.v);
    ok(bs_tensor_want_grad(x));
    ok(bs_op_linear(x, z.linear, NULL, &y));
    ok(bs_op_rmsnorm(y, z.norm, 1e-6, false, &normed));
    fix_visit(&z.f, false);
    assert_error(
        bs_scope_backward(z.f.e, 1, &normed, &g), BS_STATE,
        "backward of rmsnorm in scope 'layers.3 test, micro 0': weight 'layers.3.norm.weight' is used "
        "outside a visit of its block 0");
    assert_error(bs_scope_backward(z.f.e, 1, &normed, &g), BS_STATE, "has run it already");
    bs_scope_close(z.f.e);
    assert_int_equal(fix_arena_now(&z.f), 0);
    release_all(x, y, normed, g);
    fix_scope(&z.f, 0, true, false);
    x = fix_from(&z.f, T, C, z.v);
    assert_error(bs_op_linear(x, z.linear, NULL, &y), BS_STATE,
                 "weight 'layers.3.q.weight' is used outside a visit");
    bs_tensor_release(x);
    named_close(&z);
}

/* A lost device refuses every launch: ops and backward say so, and the scope still closes clean. */
static void test_lost_device(void **state)
{
    (void)state;
    fixture f;
    float v[T * C], w[C * C];
    bs_tensor *y, *z;
    start(&f);
    fix_seal(&f);
    bs_tensor_info info =
        fix_weight(&f, "w", BS_DTYPE_BF16, 2, (int64_t[]){C, C}, fix_floats(&f, w, C * C));
    bs_linear_cfg cfg = {.block = 0, .weight = &info, .name = "q", .scale = 1.0f, .dropout = 0.5f};
    bs_linear *l;
    cfg.lora_a = (bs_param_ref){fix_place(&f, 2, C, w), fix_place(&f, 2, C, NULL), "a"};
    cfg.lora_b = (bs_param_ref){fix_place(&f, C, 2, w), fix_place(&f, C, 2, NULL), "b"};
    ok(bs_linear_new(f.e, &cfg, &l));
    for (int where = 0; where < 3; where++) { /* lost before the linear, the attention, the backward */
        const bs_attention_cfg a = {.heads = 2, .kv_heads = 2, .head_dim = 4};
        bs_status st = BS_OK;
        y = z = NULL;
        fix_scope(&f, 0, true, true);
        bs_tensor *x = fix_from(&f, T, C, fix_floats(&f, v, T * C)), *g = fix_from(&f, T, C, v);
        ok(bs_tensor_want_grad(x));
        f.dev->lost = where == 0;
        st = bs_op_linear(x, l, NULL, &y);
        f.dev->lost = where <= 1;
        if (st == BS_OK)
            st = bs_op_attention(y, y, x, &a, &z);
        f.dev->lost = true;
        if (st == BS_OK)
            st = bs_scope_backward(f.e, 1, &z, &g);
        const char *said[] = {"linear 'q'", "attention", "backward of attention"};
        assert_error(st, BS_DEVICE, said[where]);
        bs_scope_close(f.e);
        f.dev->lost = false;
        assert_int_equal(fix_arena_now(&f), 0);
        release_all(x, g, y, z);
    }
    bs_linear_free(l);
    fix_close(&f);
}

static void test_weight_arguments(void **state)
{
    (void)state;
    fixture f;
    float w[C * C] = {0};
    bs_weight *n;
    bs_linear *l;
    start(&f);
    fix_seal(&f);
    bs_tensor_info info = fix_weight(&f, "w", BS_DTYPE_F32, 2, (int64_t[]){4, C}, w), bad = info;
    assert_error(bs_weight_new(f.e, 2, &info, NULL, &n), BS_ARG,
                 "block 2; the engine was opened for blocks 0..1");
    bad.dtype = BS_DTYPE_U8;
    assert_error(bs_weight_new(f.e, 0, &bad, NULL, &n), BS_DTYPE, "stored as u8");
    bad = info;
    bad.bytes--;
    assert_error(bs_weight_new(f.e, 0, &bad, NULL, &n), BS_SHAPE, "32 elements of f32 in 127 bytes");
    bad = info;
    bad.dim[0] = INT64_MAX;
    assert_error(bs_weight_new(f.e, 0, &bad, NULL, &n), BS_SHAPE, "dim 1");
    bs_param_ref grad = {.grad = fix_place(&f, 3, C, NULL)};
    assert_error(bs_weight_new(f.e, 0, &info, &grad, &n), BS_SHAPE,
                 "its gradient accumulator is f32 [3 8]");
    bs_tensor_info vec = fix_weight(&f, "b", BS_DTYPE_F32, 1, (int64_t[]){5}, w);
    bs_linear_cfg cfg = {.block = 0, .weight = &vec, .name = "q"};
    assert_error(bs_linear_new(f.e, &cfg, &l), BS_SHAPE, "has 1 dims, [out, in] is expected");
    cfg.weight = NULL;
    assert_error(bs_linear_new(f.e, &cfg, &l), BS_ARG, "no weight");
    cfg.weight = &info;
    cfg.bias = &vec;
    assert_error(bs_linear_new(f.e, &cfg, &l), BS_SHAPE, "1 dims and 5 entries, [4] is expected");
    cfg.bias = NULL;
    cfg.lora_a.value = fix_place(&f, 2, C, NULL);
    assert_error(bs_linear_new(f.e, &cfg, &l), BS_ARG, "both A and B");
    cfg.lora_b.value = fix_place(&f, 4, 3, NULL);
    assert_error(bs_linear_new(f.e, &cfg, &l), BS_SHAPE, "B is f32 [4 3], f32 [4 2] is expected");
    cfg.lora_b.value = fix_place(&f, 4, 2, NULL);
    cfg.dropout = 1.0f;
    assert_error(bs_linear_new(f.e, &cfg, &l), BS_ARG, "dropout 1");
    fix_close(&f);
}

/* Stored halves are expanded once per visit, again after another block's, and never beyond the region.
 */
static void test_expand(void **state)
{
    (void)state;
    fixture f;
    float v[C], w[C], x32[T * C];
    bs_tensor *y[4];
    start(&f);
    fix_seal(&f);
    f.e->binding.base[1] = f.block;
    bs_tensor_info one = fix_weight(&f, "one", BS_DTYPE_BF16, 1, (int64_t[]){C}, fix_floats(&f, v, C));
    bs_tensor_info two = fix_weight(&f, "two", BS_DTYPE_F16, 1, (int64_t[]){C}, fix_floats(&f, w, C));
    bs_weight *a, *b, *far;
    ok(bs_weight_new(f.e, 0, &one, NULL, &a));
    two.expand_offset = one.expand_offset; /* of another block: the same place */
    ok(bs_weight_new(f.e, 1, &two, NULL, &b));
    fix_scope(&f, 0, false, false);
    bs_tensor *x = fix_from(&f, T, C, fix_floats(&f, x32, T * C));
    uint64_t before = fix_launches(&f);
    ok(bs_op_rmsnorm(x, a, 1e-6, false, &y[0]));
    ok(bs_op_rmsnorm(x, a, 1e-6, false, &y[1]));
    assert_int_equal(fix_launches(&f) - before, 3); /* one expansion, two norms */
    ok(bs_op_rmsnorm(x, b, 1e-6, false, &y[2]));
    ok(bs_op_rmsnorm(x, a, 1e-6, false, &y[3]));
    assert_int_equal(fix_launches(&f) - before, 7); /* each expanded again */
    float got[4][T * C];
    for (int i = 0; i < 4; i++)
        fix_values(y[i], got[i]);
    assert_memory_equal(got[0], got[1], sizeof got[0]);
    assert_memory_equal(got[0], got[3], sizeof got[0]);
    for (int i = 0; i < T * C; i++)
        assert_true(fabs((double)(got[2][i] * v[i % C] - got[0][i] * w[i % C])) < 1e-6);
    release_all(y[0], y[1], y[2], y[3]);
    fix_visit(&f, true);
    before = fix_launches(&f);
    ok(bs_op_rmsnorm(x, a, 1e-6, false, &y[0]));
    assert_int_equal(fix_launches(&f) - before, 2); /* a new visit: stale copies are not used */
    release_all(y[0]);
    one.expand_offset = FIX_EXPAND_BYTES - 16;
    ok(bs_weight_new(f.e, 0, &one, NULL, &far));
    assert_error(bs_op_rmsnorm(x, far, 1e-6, false, &y[0]), BS_DEVMEM,
                 "expands to 32 bytes at offset 131056 of its block, the expand region has 131072");
    one.expand_offset = UINT64_MAX;
    bs_weight_free(far);
    ok(bs_weight_new(f.e, 0, &one, NULL, &far));
    assert_error(bs_op_rmsnorm(x, far, 1e-6, false, &y[0]), BS_DEVMEM, "the expand region has 131072");
    bs_tensor_release(x);
    bs_weight_free(a);
    bs_weight_free(b);
    bs_weight_free(far);
    fix_close(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_residual),
                                       cmocka_unit_test(test_several_consumers),
                                       cmocka_unit_test(test_given_gradient_is_not_written),
                                       cmocka_unit_test(test_shared_gradient),
                                       cmocka_unit_test(test_second_contribution),
                                       cmocka_unit_test(test_linears_share_an_input),
                                       cmocka_unit_test(test_late),
                                       cmocka_unit_test(test_kept),
                                       cmocka_unit_test(test_keep_needs_a_tape),
                                       cmocka_unit_test(test_kept_to_the_end),
                                       cmocka_unit_test(test_view),
                                       cmocka_unit_test(test_frozen_records_nothing),
                                       cmocka_unit_test(test_nothing_flows_below_the_lowest_adapter),
                                       cmocka_unit_test(test_adapter_without_tape),
                                       cmocka_unit_test(test_by_products_of_nothing_trained),
                                       cmocka_unit_test(test_backward_frees),
                                       cmocka_unit_test(test_accumulate),
                                       cmocka_unit_test(test_shapes_that_do_not_fit),
                                       cmocka_unit_test(test_gradients_out_of_order),
                                       cmocka_unit_test(test_weights_outside_their_visit),
                                       cmocka_unit_test(test_lost_device),
                                       cmocka_unit_test(test_weight_arguments),
                                       cmocka_unit_test(test_expand)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
