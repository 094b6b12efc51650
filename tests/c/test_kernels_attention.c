/* SPDX-License-Identifier: Apache-2.0 */
/* Attention: the defining loops against finite differences, the tiled version against the loops. */
#include "kernel_test.h"

struct setup {
    bsk_attention_dims d;
    const int32_t *cu;
    float *q, *k, *v, *go; /* [T,H*D], [T,K*D], [T,K*D], [T,H*D] */
    float *o, *lse;        /* [T,H*D], [T,H] */
    float *dq, *dk, *dv;
};

static struct setup setup(const int32_t *cu, int64_t n_rows, int64_t H, int64_t K, int64_t D,
                          int64_t window, float softcap)
{
    int64_t T = cu[n_rows];
    struct setup s = {.d = {T, H, K, D, n_rows, window, T + 3, 0.5f, softcap}, .cu = cu};
    s.q = array(T * H * D, 2);
    s.k = array(T * K * D, 2);
    s.v = array(T * K * D, 1);
    s.go = array(T * H * D, 1);
    s.o = array_of(T * H * D, NAN);
    s.lse = array_of(T * H, NAN);
    s.dq = array_of(T * H * D, NAN);
    s.dk = array_of(T * K * D, NAN);
    s.dv = array_of(T * K * D, NAN);
    return s;
}

static void teardown(struct setup *s)
{
    int64_t nq = s->d.T * s->d.H * s->d.D, nk = s->d.T * s->d.K * s->d.D;
    array_free(s->q, nq);
    array_free(s->k, nk);
    array_free(s->v, nk);
    array_free(s->go, nq);
    array_free(s->o, nq);
    array_free(s->lse, s->d.T * s->d.H);
    array_free(s->dq, nq);
    array_free(s->dk, nk);
    array_free(s->dv, nk);
}

/* sum(o * go) by the loops, f64 sum of f32 outputs. */
static double objective(struct setup *s)
{
    int64_t n = s->d.T * s->d.H * s->d.D;
    float *o = array(n, 0), *lse = array(s->d.T * s->d.H, 0);
    bsk_attention_plain_f32(&s->d, s->q, s->k, s->v, s->cu, o, lse);
    double sum = 0;
    for (int64_t i = 0; i < n; i++)
        sum += (double)o[i] * (double)s->go[i];
    array_free(o, n);
    array_free(lse, s->d.T * s->d.H);
    return sum;
}

static void differences(struct setup *s, const char *what, float *x, const float *dx, int64_t n)
{
    for (int64_t i = 0; i < n; i += 3) {
        float keep = x[i], h = 1.0f / 128;
        x[i] = keep + h;
        double up = objective(s);
        x[i] = keep - h;
        double down = objective(s);
        x[i] = keep;
        near_(what, (double)dx[i], (up - down) / (2 * (double)h), 5e-4);
    }
}

static void test_plain_gradients(void **state)
{
    (void)state;
    static const int32_t cu[] = {0, 1, 6, 10};
    static const struct {
        int64_t window;
        float cap;
    } variants[] = {{0, 0}, {3, 0}, {0, 2.0f}};
    for (size_t i = 0; i < BSI_COUNT(variants); i++) {
        struct setup s = setup(cu, 3, 4, 2, 4, variants[i].window, variants[i].cap);
        bsk_attention_plain_f32(&s.d, s.q, s.k, s.v, cu, s.o, s.lse);
        bsk_attention_bwd_plain_f32(&s.d, s.q, s.k, s.v, cu, s.o, s.lse, s.go, s.dq, s.dk, s.dv);
        differences(&s, "dq", s.q, s.dq, s.d.T * 16);
        differences(&s, "dk", s.k, s.dk, s.d.T * 8);
        differences(&s, "dv", s.v, s.dv, s.d.T * 8);
        teardown(&s);
    }
}

/* A row of one token attends to itself alone; window 1 makes every token such a row. */
static void test_plain_self(void **state)
{
    (void)state;
    static const int32_t cu[] = {0, 5};
    struct setup s = setup(cu, 1, 2, 1, 3, 1, 0);
    bsk_attention_plain_f32(&s.d, s.q, s.k, s.v, cu, s.o, s.lse);
    for (int t = 0; t < 5; t++)
        for (int h = 0; h < 2; h++) {
            double score = 0;
            for (int c = 0; c < 3; c++) {
                assert_true(s.o[(t * 2 + h) * 3 + c] == s.v[t * 3 + c]);
                score += (double)s.q[(t * 2 + h) * 3 + c] * (double)s.k[t * 3 + c];
            }
            near_("lse", (double)s.lse[t * 2 + h], 0.5 * score, 1e-6);
        }
    teardown(&s);
}

static void compare(const char *what, const float *got, const float *want, int64_t n, double tol)
{
    for (int64_t i = 0; i < n; i++)
        near_(what, (double)got[i], (double)want[i], tol);
}

/* Tiled on 1, 2, 3 threads: equal bits, near the loops. Outputs and scratch start as NaN. */
static void check_tiled(struct setup *s)
{
    int64_t T = s->d.T, H = s->d.H, K = s->d.K, D = s->d.D, nq = T * H * D, nk = T * K * D;
    float *o = array(nq, 0), *lse = array(T * H, 0);
    float *dq = array(nq, 0), *dk = array(nk, 0), *dv = array(nk, 0);
    bsk_attention_plain_f32(&s->d, s->q, s->k, s->v, s->cu, o, lse);
    bsk_attention_bwd_plain_f32(&s->d, s->q, s->k, s->v, s->cu, o, lse, s->go, dq, dk, dv);
    int64_t nf = (int64_t)(bsk_attention_scratch(s->d.capacity, H, K, D) / sizeof(float));
    int64_t nb = (int64_t)(bsk_attention_bwd_scratch(s->d.capacity, H, K, D) / sizeof(float));
    for (int p = 0; p < 3; p++) {
        float *sf = array_of(nf, NAN), *sb = array_of(nb, NAN);
        struct setup other = setup(s->cu, s->d.n_rows, H, K, D, s->d.window, s->d.softcap);
        bsk_attention_f32(pars[p], &s->d, s->q, s->k, s->v, s->cu, other.o, other.lse, sf);
        bsk_attention_bwd_f32(pars[p], &s->d, s->q, s->k, s->v, s->cu, other.o, other.lse, s->go,
                              other.dq, other.dk, other.dv, sb);
        array_free(sf, nf);
        array_free(sb, nb);
        if (p == 0) {
            compare("o", other.o, o, nq, 3e-6);
            compare("lse", other.lse, lse, T * H, 3e-6);
            compare("dq", other.dq, dq, nq, 3e-5);
            compare("dk", other.dk, dk, nk, 3e-5);
            compare("dv", other.dv, dv, nk, 3e-5);
            memcpy(s->o, other.o, (size_t)nq * 4);
            memcpy(s->lse, other.lse, (size_t)(T * H) * 4);
            memcpy(s->dq, other.dq, (size_t)nq * 4);
            memcpy(s->dk, other.dk, (size_t)nk * 4);
            memcpy(s->dv, other.dv, (size_t)nk * 4);
        }
        same_bits("o", other.o, s->o, nq);
        same_bits("lse", other.lse, s->lse, T * H);
        same_bits("dq", other.dq, s->dq, nq);
        same_bits("dk", other.dk, s->dk, nk);
        same_bits("dv", other.dv, s->dv, nk);
        teardown(&other);
    }
    array_free(o, nq);
    array_free(lse, T * H);
    array_free(dq, nq);
    array_free(dk, nk);
    array_free(dv, nk);
}

/* A sink takes part in the softmax and adds nothing: o shrinks by what it takes, lse has it in. Sinks far above
   and below the scores, and the gradient by finite differences. */
static void test_sinks(void **state)
{
    (void)state;
    static const int32_t cu[] = {0, 3, 70};
    const float sinks[] = {0.5f, -30.0f, 2.0f, 12.0f};
    float moved[4], dsinks[4] = {1, 1, 1, 1};
    struct setup s = setup(cu, 2, 4, 2, 8, 0, 0);
    int64_t T = 70, n = T * 32;
    float *o = array(n, 0), *lse = array(T * 4, 0);
    bsk_attention_plain_f32(&s.d, s.q, s.k, s.v, cu, o, lse);
    s.d.sinks = sinks;
    check_tiled(&s);
    for (int64_t i = 0; i < T * 4; i++) {
        double with = (double)s.lse[i], without = (double)lse[i], sink = (double)sinks[i % 4];
        near_("lse", with, fmax(without, sink) + log1p(exp(-fabs(without - sink))), 3e-6);
        for (int64_t c = 0; c < 8; c++)
            near_("o", (double)s.o[i * 8 + c], (double)o[i * 8 + c] * exp(without - with), 3e-6);
    }
    bsk_sinks_bwd_f32(s.o, s.go, s.lse, sinks, dsinks, T, 4, 8);
    s.d.sinks = moved;
    for (int h = 0; h < 4; h++) {
        double up, down, step = 1e-2;
        memcpy(moved, sinks, sizeof moved);
        moved[h] = sinks[h] + (float)step;
        up = objective(&s);
        moved[h] = sinks[h] - (float)step;
        down = objective(&s);
        near_("dsinks", (double)dsinks[h], 1.0 + (up - down) / (2 * step), 2e-3);
    }
    array_free(o, n);
    array_free(lse, T * 4);
    teardown(&s);
}

/* A sink that is more above the scores than an exponential can hold. */
static void test_high_sinks(void **state)
{
    (void)state;
    static const int32_t cu[] = {0, 3, 270};
    const float sinks[] = {2000.0f, 0.5f, 800.0f, 100.0f};
    for (int v = 0; v < 2; v++) {
        struct setup s = setup(cu, 2, 4, 2, 8, v ? 100 : 0, v ? 3.0f : 0);
        s.d.sinks = sinks;
        check_tiled(&s);
        for (int64_t i = 0; i < 270 * 4; i++)
            if (i % 4 != 1)
                assert_true(s.lse[i] == sinks[i % 4]);
        teardown(&s);
    }
}

static void test_tiled(void **state)
{
    (void)state;
    /* rows of 1, 2, a tile, a tile and a bit, and more than a block of keys; an empty one */
    static const int32_t few[] = {0, 1, 3, 67, 67, 137}, one[] = {0, 331}, tiny[] = {0, 1};
    static const struct {
        const int32_t *cu;
        int64_t n_rows, H, K, D, window;
        float cap;
    } c[] = {
        {few, 5, 4, 1, 8, 0, 0},    {few, 5, 4, 2, 16, 7, 0},   {few, 5, 2, 2, 5, 1, 0},
        {few, 5, 4, 2, 8, 66, 0},   {few, 5, 4, 4, 8, 0, 3.0f}, {few, 5, 2, 1, 8, 7, 3.0f},
        {one, 1, 2, 1, 32, 0, 0},   {one, 1, 2, 2, 16, 100, 0}, {one, 1, 2, 1, 16, 300, 5.0f},
        {one, 1, 1, 1, 8, 1000, 0}, {tiny, 1, 4, 2, 4, 0, 0},
    };
    for (size_t i = 0; i < BSI_COUNT(c); i++) {
        struct setup s = setup(c[i].cu, c[i].n_rows, c[i].H, c[i].K, c[i].D, c[i].window, c[i].cap);
        check_tiled(&s);
        teardown(&s);
    }
}

/* The last key block of a long row has much larger scores: the running maximum must carry over. */
static void test_tiled_scores(void **state)
{
    (void)state;
    static const int32_t cu[] = {0, 330};
    struct setup s = setup(cu, 1, 1, 1, 8, 0, 0);
    for (int i = 0; i < 330 * 8; i++) {
        s.k[i] *= i < 256 * 8 ? 0.1f : 12.0f;
        s.q[i] *= 4.0f;
    }
    int64_t n = (int64_t)(bsk_attention_scratch(s.d.capacity, 1, 1, 8) / sizeof(float));
    float *scratch = array_of(n, NAN), *o = array(330 * 8, 0), *lse = array(330, 0);
    bsk_attention_plain_f32(&s.d, s.q, s.k, s.v, cu, o, lse);
    bsk_attention_f32(&team2, &s.d, s.q, s.k, s.v, cu, s.o, s.lse, scratch);
    compare("lse", s.lse, lse, 330, 1e-6);
    compare("o", s.o, o, 330 * 8, 3e-5); /* scores of +-200: their f32 rounding is 1e-5 */
    array_free(scratch, n);
    array_free(o, 330 * 8);
    array_free(lse, 330);
    teardown(&s);
}

static void test_rows_alone(void **state)
{
    (void)state;
    /* A row gives the same bits alone and among others. */
    static const int32_t cu[] = {0, 70, 170}, alone[] = {0, 100};
    struct setup s = setup(cu, 2, 2, 1, 8, 0, 0), a = setup(alone, 1, 2, 1, 8, 0, 0);
    int64_t n = (int64_t)(bsk_attention_scratch(s.d.capacity, 2, 1, 8) / sizeof(float));
    float *scratch = array(n, 1);
    bsk_attention_f32(&team2, &s.d, s.q, s.k, s.v, cu, s.o, s.lse, scratch);
    bsk_attention_f32(&team2, &a.d, s.q + 70 * 16, s.k + 70 * 8, s.v + 70 * 8, alone, a.o, a.lse,
                      scratch);
    same_bits("row", a.o, s.o + 70 * 16, 100 * 16);
    array_free(scratch, n);
    teardown(&s);
    teardown(&a);
}

static void test_scratch(void **state)
{
    (void)state;
    /* Forward bounded; backward at most that, or 4 bytes a head and token and 4 more. */
    assert_true(bsk_attention_scratch(8192, 32, 8, 128) == bsk_attention_scratch(1 << 20, 32, 8, 128));
    assert_true(bsk_attention_bwd_scratch(8192, 32, 8, 128) <= (size_t)8 << 20);
    assert_true(bsk_attention_bwd_scratch(1 << 20, 32, 8, 128) == ((size_t)1 << 20) * 4 * 33);
    assert_true(bsk_attention_scratch(1, 1, 1, 1) > 0);
    int32_t cu[] = {0};
    bsk_attention_dims d = {.T = 0, .H = 2, .K = 1, .D = 4, .n_rows = 0, .capacity = 8, .scale = 1};
    bsk_attention_f32(&team2, &d, NULL, NULL, NULL, cu, NULL, NULL, NULL);
    bsk_attention_bwd_f32(&team2, &d, NULL, NULL, NULL, cu, NULL, NULL, NULL, NULL, NULL, NULL, NULL);
}

static void test_table(void **state)
{
    (void)state;
    static const int32_t cu[] = {0, 4, 9};
    int32_t starts[] = {0, 4, 9};
    struct setup s = setup(cu, 2, 4, 2, 4, 3, 2.0f), b = setup(cu, 2, 4, 2, 4, 3, 2.0f);
    int64_t n = (int64_t)(bsk_attention_bwd_scratch(12, 4, 2, 4) / sizeof(float));
    float *scratch = array(n, 1);
    bsk_attention_f32(&team2, &s.d, s.q, s.k, s.v, cu, s.o, s.lse, scratch);
    bsk_attention_bwd_f32(&team2, &s.d, s.q, s.k, s.v, cu, s.o, s.lse, s.go, s.dq, s.dk, s.dv, scratch);
    bsk_call c = {.p = {s.q, s.k, s.v, starts, b.o, b.lse, scratch},
                  .n = {9, 4, 2, 4, 2, 3, 12},
                  .f = {0.5, 2.0}};
    launch(BSK_ATTENTION, c, &team3);
    bsk_call g = {.p = {s.q, s.k, s.v, starts, b.o, b.lse, s.go, b.dq, b.dk, b.dv, scratch},
                  .n = {9, 4, 2, 4, 2, 3, 12},
                  .f = {0.5, 2.0}};
    launch(BSK_ATTENTION_BWD, g, &team3);
    same_bits("o", s.o, b.o, 9 * 16);
    same_bits("lse", s.lse, b.lse, 9 * 4);
    same_bits("dq", s.dq, b.dq, 9 * 16);
    same_bits("dk", s.dk, b.dk, 9 * 8);
    same_bits("dv", s.dv, b.dv, 9 * 8);
    array_free(scratch, n);
    teardown(&s);
    teardown(&b);
}

/* Two rows of a batch whose keys and values lie in rows 2 and 0 of a cache: any of their queries, alone or in
   runs, give what attention inside the rows gives. What was never put is NaN and must not be read. */
static void check_cached(int64_t H, int64_t K, int64_t D, int64_t window, float softcap, float *sinks)
{
    enum { ROWS = 3, CAPACITY = 310, TOKENS = 370 };
    static const int32_t cu[] = {0, 70, TOKENS};
    int64_t C = K * D, size = ROWS * CAPACITY * C, n = 0;
    struct setup s = setup(cu, 2, H, K, D, window, softcap);
    s.d.sinks = sinks;
    bsk_attention_plain_f32(&s.d, s.q, s.k, s.v, cu, s.o, s.lse);
    float *kc = array_of(size, NAN), *vc = array_of(size, NAN), *q = array(TOKENS * H * D, 1);
    int32_t row[TOKENS], pos[TOKENS], token[TOKENS];
    for (int32_t t = 0; t < TOKENS; t++) {
        row[t] = t < 70 ? 2 : 0;
        pos[t] = t < 70 ? t : t - 70;
    }
    bsk_cache_put_f32(&team2, s.k, row, pos, kc, TOKENS, C, CAPACITY);
    bsk_cache_put_f32(&team2, s.v, row, pos, vc, TOKENS, C, CAPACITY);
    for (int32_t t = 0; t < TOKENS; t++) /* runs of many lengths, across the rows, and single tokens */
        if (t < 40 || t == 69 || (t > 69 && t < 72) || (t > 80 && t < 200) || t % 7 == 0) {
            row[n] = t < 70 ? 2 : 0;
            pos[n] = t < 70 ? t : t - 70;
            memcpy(q + n * H * D, s.q + t * H * D, (size_t)(H * D) * sizeof *q);
            token[n++] = t;
        }
    bsk_attention_dims d = s.d;
    d.T = n;
    d.n_rows = ROWS;
    d.capacity = CAPACITY;
    int64_t floats = (int64_t)(bsk_attention_scratch(CAPACITY, H, K, D) / sizeof(float));
    float *scratch = array_of(floats, NAN), *one = array_of(n * H * D, NAN),
          *two = array_of(n * H * D, NAN);
    bsk_attention_cache_f32(&bsk_par_serial, &d, q, kc, vc, row, pos, one, scratch);
    for (int64_t i = 0; i < n; i++)
        compare("cached o", one + i * H * D, s.o + token[i] * H * D, H * D, 2e-5);
    bsk_call c = {.p = {q, kc, vc, row, pos, two, scratch, sinks},
                  .n = {n, H, K, D, ROWS, window, CAPACITY},
                  .f = {(double)d.scale, (double)softcap}};
    launch(BSK_ATTENTION_CACHE, c, &team3);
    same_bits("cached o", one, two, n * H * D);
    array_free(kc, size);
    array_free(vc, size);
    array_free(q, TOKENS * H * D);
    array_free(scratch, floats);
    array_free(one, n * H * D);
    array_free(two, n * H * D);
    teardown(&s);
}

static void test_cached(void **state)
{
    (void)state;
    check_cached(4, 2, 8, 0, 0, NULL);
    check_cached(3, 3, 5, 0, 1.5f, NULL);
    check_cached(6, 1, 16, 40, 0, NULL);
    check_cached(2, 1, 4, 1, 0, NULL);
    check_cached(2, 2, 4, 260, 3.0f, NULL);
    check_cached(2, 1, 8, 30, 0, (float[]){0.3f, 2.0f});
    check_cached(2, 1, 8, 0, 0, (float[]){900.0f, 2.0f});
    bsk_attention_dims d = {.T = 0, .H = 2, .K = 1, .D = 4, .n_rows = 1, .capacity = 8, .scale = 1};
    bsk_attention_cache_f32(&team2, &d, NULL, NULL, NULL, NULL, NULL, NULL, NULL);
    bsk_cache_put_f32(&team2, NULL, NULL, NULL, NULL, 0, 4, 8);
}

int main(void)
{
    if (!bsk_cpu_init(4))
        return 1;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_plain_self), cmocka_unit_test(test_plain_gradients),
        cmocka_unit_test(test_tiled),      cmocka_unit_test(test_sinks),
        cmocka_unit_test(test_high_sinks), cmocka_unit_test(test_tiled_scores),
        cmocka_unit_test(test_rows_alone), cmocka_unit_test(test_scratch),
        cmocka_unit_test(test_table),      cmocka_unit_test(test_cached),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
