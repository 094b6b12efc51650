/* SPDX-License-Identifier: Apache-2.0 */
/* Loss, dX, dW and logits over vocabulary tiles against a full-vocabulary softmax in f64. */
#include "bs.h"
#include "engine/engine.h"

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

enum { C = 24, MAX_MICROS = 3, MAX_TILES = 64 };

typedef struct rig { /* a head whose tiles are blocks of one region */
    bs_dev *dev;
    bs_engine *e;
    bs_batch *batch;
    bs_params *params;
    bs_head *head;
    bs_weight *tile[MAX_TILES], *bias[MAX_TILES]; /* bias NULL: none */
    int n_tiles;
    int64_t vocab, height;
    bool trainable;
    float *w, *b; /* host [vocab, C], [vocab]; b NULL: none */
} rig;

typedef struct problem {
    const char *spec;
    int64_t vocab, height, tokens;
    int micros;
    double softcap;
    bool frozen, bias;
} problem;

static float noise(const char *stream, int64_t i)
{
    uint32_t key[2], word[4];
    bsi_philox_key(11, stream, key);
    bsi_philox((uint32_t[]){(uint32_t)i, 0, 0, 0}, key, word);
    return 2 * bsi_uniform(word[0]) - 1;
}

/* The bias of entries [first, first + n), behind all tiles. */
static void open_bias(rig *r, int64_t first, int64_t n, bs_param_ref ref)
{
    bs_tensor_info info = {.name = "bias",
                           .dtype = BS_DTYPE_F32,
                           .ndim = 1,
                           .dim = {n},
                           .bytes = (uint64_t)n * 4,
                           .slot_offset = (uint64_t)(r->vocab * C + first - first * C) * 4,
                           .expand_offset = UINT64_MAX};
    ref.grad.off += (size_t)first * 4;
    ref.grad.rows = ref.grad.capacity = n;
    ok(bs_weight_new(r->e, r->n_tiles, &info, r->trainable ? &ref : NULL, &r->bias[r->n_tiles]));
}

static void open_tiles(rig *r)
{
    bsi_addr at;
    bs_param_ref ref = {0}, bias = {0};
    int id;
    size_t bytes = (size_t)(r->vocab * C) * 4;
    ok(bsi_pool_region(r->e->pool, "weights", bytes + (size_t)r->vocab * 4, &at));
    ok(bsi_engine_write(r->e, at, r->w, bytes));
    if (r->b)
        ok(bsi_engine_write(r->e, bsi_addr_add(at, bytes), r->b, (size_t)r->vocab * 4));
    if (r->trainable) {
        ok(bs_params_open(r->e, &r->params));
        ok(bs_params_add_base(r->params, "head", r->vocab, C, &id));
        ok(bs_params_add_base(r->params, "bias", r->vocab, 1, &id));
        ok(bs_params_seal(r->params));
        ok(bs_params_ref(r->params, 0, &ref));
        ok(bs_params_ref(r->params, 1, &bias));
    }
    for (int64_t first = 0; first < r->vocab; first += r->height, r->n_tiles++) {
        int64_t n = BSI_MIN(r->height, r->vocab - first);
        bs_tensor_info info = {.name = "tile",
                               .dtype = BS_DTYPE_F32,
                               .ndim = 2,
                               .dim = {n, C},
                               .bytes = (uint64_t)(n * C) * 4,
                               .expand_offset = UINT64_MAX};
        bs_param_ref part = ref;
        part.grad.off += (size_t)(first * C) * 4;
        part.grad.rows = part.grad.capacity = n;
        assert_true(r->n_tiles < MAX_TILES);
        r->e->binding.base[r->n_tiles] = bsi_addr_add(at, (size_t)(first * C) * 4);
        ok(bs_weight_new(r->e, r->n_tiles, &info, r->trainable ? &part : NULL, &r->tile[r->n_tiles]));
        if (r->b)
            open_bias(r, first, n, bias);
    }
}

static rig rig_open(const problem *p)
{
    rig r = {.vocab = p->vocab, .height = p->height, .trainable = !p->frozen};
    bs_batch_cfg batch = {.micros = p->micros, .tokens = p->tokens, .rows = 4};
    bs_engine_stats before, after;
    size_t bytes;
    r.w = malloc((size_t)(p->vocab * C) * 4);
    for (int64_t i = 0; i < p->vocab * C; i++)
        r.w[i] = noise("w", i);
    if (p->bias) {
        r.b = malloc((size_t)p->vocab * 4);
        for (int64_t i = 0; i < p->vocab; i++)
            r.b[i] = 2 * noise("b", i);
    }
    ok(bs_dev_open(p->spec ? p->spec : "check:cpu", &(bs_dev_cfg){.threads = 2}, &r.dev));
    ok(bs_engine_open(&(bs_engine_cfg){.dev = r.dev, .pool_bytes = 4 << 20, .n_blocks = MAX_TILES},
                      &r.e));
    ok(bs_batch_open(r.e, &batch, &r.batch));
    bs_head_cfg cfg = {.batch = r.batch,
                       .channels = C,
                       .vocab = p->vocab,
                       .softcap = p->softcap,
                       .logits = true,
                       .tile_rows = p->height};
    bs_engine_stats_get(r.e, &before);
    ok(bs_head_open(r.e, &cfg, &r.head));
    bs_engine_stats_get(r.e, &after);
    ok(bs_head_bytes(&batch, &cfg, BS_DTYPE_F32, &bytes));
    assert_int_equal(after.fixed_bytes - before.fixed_bytes, bytes);
    open_tiles(&r);
    ok(bs_engine_seal(r.e));
    return r;
}

static void rig_close(rig *r)
{
    const char *text;
    if (bs_dev_violations(r->dev, &text))
        fail_msg("%s", text);
    for (int i = 0; i < r->n_tiles; i++) {
        bs_weight_free(r->tile[i]);
        bs_weight_free(r->bias[i]);
    }
    bs_head_close(r->head);
    bs_params_close(r->params);
    bs_batch_close(r->batch);
    bs_engine_close(r->e);
    bs_dev_close(r->dev);
    free(r->w);
    free(r->b);
}

typedef struct micro { /* one row of tokens; label[t] trains position t - 1 */
    int64_t tokens;
    int64_t label[640];
    float x[640 * C];
} micro;

typedef struct result { /* rows in the order of micro-batches */
    double loss;
    double *dx, *dw, *db; /* [labelled, C], [vocab, C], [vocab] */
} result;

static void result_free(result *r)
{
    free(r->dx);
    free(r->dw);
    free(r->db);
}

/* Every row is token t's x; the label of t + 1 is trained there. */
static void random_micro(micro *m, int64_t tokens, int64_t vocab, int64_t salt)
{
    m->tokens = tokens;
    for (int64_t t = 0; t < tokens; t++)
        m->label[t] = (int64_t)((noise("label", salt * 1000 + t) + 1) * 0.5f * (float)vocab);
    for (int64_t i = 0; i < tokens * C; i++)
        m->x[i] = noise("x", salt * 100000 + i);
}

static int64_t set_batch(const rig *r, const micro *m, int micros)
{
    int64_t count = 0;
    for (int j = 0; j < micros; j++) {
        int64_t ids[640] = {0};
        ok(bs_batch_set(
            r->batch, j,
            &(bs_micro){.n_rows = 1, .row_len = &m[j].tokens, .ids = ids, .labels = m[j].label}));
        count += bs_batch_labelled(r->batch, j);
    }
    ok(bs_batch_begin(r->batch, micros));
    return count;
}

static void scope(const rig *r, int j)
{
    ok(bs_scope_open(r->e, &(bs_scope_cfg){.label = "head", .batch = r->batch, .micro = j}));
}

static bs_tensor *rows_of(const rig *r, const micro *m)
{
    bs_array *a;
    bs_tensor *x;
    ok(bs_array_new(BS_DTYPE_F32, 2, (int64_t[]){m->tokens, C}, &a));
    memcpy(a->data, m->x, a->bytes);
    ok(bs_tensor_from(r->e, a, &x));
    bs_array_free(a);
    return x;
}

static void put_all(const rig *r, const micro *m, int micros, bool labelled)
{
    for (int j = 0; j < micros; j++) {
        scope(r, j);
        bs_tensor *x = rows_of(r, &m[j]), *y = NULL;
        if (labelled)
            ok(bs_op_labelled(x, &y));
        ok(bs_head_put(r->head, j, y ? y : x));
        if (y)
            bs_tensor_release(y);
        bs_tensor_release(x);
        bs_scope_close(r->e);
    }
}

static void all_tiles(const rig *r, int micros)
{
    for (int i = 0; i < r->n_tiles; i++)
        for (int j = 0; j < micros; j++)
            ok(bs_head_tile(r->head, j, r->tile[i], r->bias[i], i * r->height));
}

static double *as_double(const bs_array *a)
{
    int64_t n = bs_array_count(a);
    double *v = malloc(sizeof *v * (size_t)(n + 1));
    for (int64_t i = 0; i < n; i++)
        v[i] = bs_array_get(a, i);
    return v;
}

/* A training pass as the driver runs it. */
static result run_train(const rig *r, const micro *m, int micros)
{
    result out = {0};
    int64_t count = set_batch(r, m, micros), at = 0;
    bs_array *a;
    ok(bs_head_begin(r->head, BS_HEAD_TRAIN, count));
    put_all(r, m, micros, true);
    all_tiles(r, micros);
    out.dx = malloc((size_t)(count * C) * sizeof *out.dx);
    for (int j = 0; j < micros; j++) {
        bs_tensor *dx;
        scope(r, j);
        ok(bs_head_finish(r->head, j, &dx));
        assert_int_equal(bs_tensor_dim(dx, 0), bs_batch_labelled(r->batch, j));
        assert_int_equal(bs_tensor_dim(dx, 1), C);
        assert_int_equal(bs_tensor_capacity(dx), r->batch->cfg.tokens);
        if (bs_tensor_dim(dx, 0)) {
            ok(bs_tensor_read(dx, &a));
            for (int64_t i = 0; i < bs_array_count(a); i++)
                out.dx[at++] = bs_array_get(a, i);
            bs_array_free(a);
        }
        bs_tensor_release(dx);
        bs_scope_close(r->e);
    }
    assert_int_equal(at, count * C);
    ok(bs_head_loss(r->head, &out.loss));
    if (r->trainable) {
        ok(bs_params_zero_grad(r->params));
        for (int i = r->n_tiles; i-- > 0;) /* any order */
            for (int j = 0; j < micros; j++)
                ok(bs_head_tile_grad(r->head, j, r->tile[i], r->bias[i], i * r->height));
        ok(bs_params_grad(r->params, 0, &a));
        out.dw = as_double(a);
        bs_array_free(a);
        ok(bs_params_grad(r->params, 1, &a));
        out.db = as_double(a);
        bs_array_free(a);
    }
    return out;
}

/* Logits of one row, capped; slope[v] is the cap's derivative. */
static void row_logits(const rig *r, double cap, const float *x, double *l, double *slope)
{
    for (int64_t v = 0; v < r->vocab; v++) {
        double s = r->b ? (double)r->b[v] : 0;
        for (int c = 0; c < C; c++)
            s += (double)x[c] * (double)r->w[v * C + c];
        double t = cap > 0 ? tanh(s / cap) : 0;
        l[v] = cap > 0 ? cap * t : s;
        slope[v] = 1 - t * t;
    }
}

/* The label's p - 1 is summed from the other probabilities: exact for p near 1. */
static result reference(const rig *r, double cap, const micro *m, int micros)
{
    result out = {0};
    int64_t count = 0, at = 0;
    for (int j = 0; j < micros; j++)
        for (int64_t t = 1; t < m[j].tokens; t++)
            count += m[j].label[t] >= 0;
    double *l = calloc((size_t)r->vocab, sizeof *l), *slope = calloc((size_t)r->vocab, sizeof *l);
    out.dx = calloc((size_t)(count * C), sizeof *out.dx);
    out.dw = calloc((size_t)(r->vocab * C), sizeof *out.dw);
    out.db = calloc((size_t)r->vocab, sizeof *out.db);
    for (int j = 0; j < micros; j++) {
        for (int64_t t = 0; t + 1 < m[j].tokens; t++) {
            const float *x = m[j].x + t * C;
            int64_t y = m[j].label[t + 1];
            double odds = 0;
            if (y < 0)
                continue;
            row_logits(r, cap, x, l, slope);
            for (int64_t v = 0; v < r->vocab; v++)
                odds += v == y ? 0 : exp(l[v] - l[y]);
            out.loss += log1p(odds);
            for (int64_t v = 0; v < r->vocab; v++) {
                double p = v == y ? -odds / (1 + odds) : exp(l[v] - l[y]) / (1 + odds);
                double d = p * slope[v] / (double)count;
                out.db[v] += d;
                for (int c = 0; c < C; c++) {
                    out.dx[at * C + c] += d * (double)r->w[v * C + c];
                    out.dw[v * C + c] += d * (double)x[c];
                }
            }
            at++;
        }
    }
    out.loss /= (double)count;
    free(l);
    free(slope);
    return out;
}

static double rel_err(const double *a, const double *b, int64_t n)
{
    double d = 0, s = 0;
    for (int64_t i = 0; i < n; i++) {
        d += (a[i] - b[i]) * (a[i] - b[i]);
        s += b[i] * b[i];
    }
    return sqrt(d / s);
}

/* f32 sums over C and the vocabulary: some 1e-7 each. */
static const double BOUND = 2e-6;

static void same(const rig *r, const result *got, const result *want, int64_t count, double bound)
{
    if (!(fabs(got->loss - want->loss) <= bound * want->loss))
        fail_msg("height %lld: loss %.9g, %.9g is expected", (long long)r->height, got->loss,
                 want->loss);
    double dx = rel_err(got->dx, want->dx, count * C);
    if (!(dx <= bound))
        fail_msg("height %lld: dX is off by %g", (long long)r->height, dx);
    if (!got->dw)
        return;
    double dw = rel_err(got->dw, want->dw, r->vocab * C);
    if (!(dw <= bound))
        fail_msg("height %lld: dW is off by %g", (long long)r->height, dw);
    double db = r->b ? rel_err(got->db, want->db, r->vocab) : 0;
    if (!(db <= bound))
        fail_msg("height %lld: db is off by %g", (long long)r->height, db);
}

static void check(const problem *p, const micro *m, double bound)
{
    rig r = rig_open(p);
    result want = reference(&r, p->softcap, m, p->micros), got = run_train(&r, m, p->micros);
    int64_t count = 0;
    for (int j = 0; j < p->micros; j++)
        count += bs_batch_labelled(r.batch, j);
    same(&r, &got, &want, count, bound);
    result again = run_train(&r, m, p->micros); /* a pass leaves nothing to the next one */
    assert_true(again.loss == got.loss);
    assert_memory_equal(again.dx, got.dx, (size_t)(count * C) * sizeof(double));
    assert_memory_equal(again.dw, got.dw, (size_t)(r.vocab * C) * sizeof(double));
    result_free(&want);
    result_free(&got);
    result_free(&again);
    rig_close(&r);
}

static void test_heights(void **state)
{
    (void)state;
    const int64_t height[] = {1, 3, 8, 20, 41, 100};
    micro *m = calloc(1, sizeof *m);
    random_micro(m, 23, 41, 0);
    for (size_t i = 0; i < BSI_COUNT(height); i++)
        for (int k = 0; k < 4; k++)
            check(&(problem){.vocab = 41,
                             .height = height[i],
                             .tokens = 24,
                             .micros = 1,
                             .softcap = k & 1 ? 2.5 : 0,
                             .bias = k & 2},
                  m, BOUND);
    free(m);
}

/* The label in the first and in the last row of every tile, in the last entry, and rows without loss.
 */
static void test_label_borders(void **state)
{
    (void)state;
    const int64_t label[] = {-100, 0, 7, 8, 15, 16, 23, 24, -100, 31, 32, 39, 40, 40, 0, -100};
    micro *m = calloc(1, sizeof *m);
    random_micro(m, BSI_COUNT(label), 41, 1);
    memcpy(m->label, label, sizeof label);
    check(&(problem){.vocab = 41, .height = 8, .tokens = 16, .micros = 1}, m, BOUND);
    check(&(problem){.vocab = 41, .height = 1, .tokens = 16, .micros = 1, .softcap = 3}, m, BOUND);
    free(m);
}

/* p(label) from 0.999 to 1 - 2e-8: where 1 - p in f32 would be noise or zero. */
static void test_well_learned(void **state)
{
    (void)state;
    const double gap[] = {14, 22, 40};
    micro *m = calloc(1, sizeof *m);
    problem p = {.vocab = 41, .height = 8, .tokens = 12, .micros = 1};
    for (size_t i = 0; i < BSI_COUNT(gap); i++) {
        rig r = rig_open(&p);
        random_micro(m, 12, 41, 2);
        for (int64_t t = 0; t + 1 < m->tokens; t++) {
            const float *w = r.w + m->label[t + 1] * C;
            double norm = 0;
            for (int c = 0; c < C; c++)
                norm += (double)w[c] * (double)w[c];
            for (int c = 0; c < C; c++)
                m->x[t * C + c] = (float)(gap[i] * (double)w[c] / norm) + 0.01f * m->x[t * C + c];
        }
        result want = reference(&r, 0, m, 1), got = run_train(&r, m, 1);
        assert_true(want.loss < 2e-3 && want.loss > 1e-9);
        /* A logit of 40 is rounded by 40 * 6e-8, which is the relative error of 1 - p. */
        same(&r, &got, &want, m->tokens - 1, 1e-5);
        result_free(&want);
        result_free(&got);
        rig_close(&r);
    }
    free(m);
}

/* More rows than one chunk. */
static void test_chunks(void **state)
{
    (void)state;
    micro *m = calloc(1, sizeof *m);
    random_micro(m, 600, 13, 3);
    for (int64_t t = 0; t < 600; t += 11)
        m->label[t] = -100;
    check(&(problem){.vocab = 13, .height = 5, .tokens = 640, .micros = 1}, m, BOUND);
    check(&(problem){.vocab = 13, .height = 5, .tokens = 640, .micros = 1, .bias = true}, m, BOUND);
    free(m);
}

/* One micro-batch without a trained token among three; the three together equal the reference. */
static void test_micros(void **state)
{
    (void)state;
    micro *m = calloc(MAX_MICROS, sizeof *m);
    random_micro(&m[0], 9, 41, 4);
    random_micro(&m[1], 5, 41, 5);
    random_micro(&m[2], 14, 41, 6);
    for (int t = 0; t < 5; t++)
        m[1].label[t] = -100;
    check(&(problem){.vocab = 41, .height = 16, .tokens = 16, .micros = 3}, m, BOUND);

    /* The rows of 0 and 2 in one micro-batch: the label of a row's first token trains nothing. */
    micro *one = calloc(1, sizeof *one);
    one->tokens = 23;
    memcpy(one->label, m[0].label, 9 * sizeof *one->label);
    memcpy(one->label + 9, m[2].label, 14 * sizeof *one->label);
    one->label[9] = -100;
    memcpy(one->x, m[0].x, 9 * C * sizeof *one->x);
    memcpy(one->x + 9 * C, m[2].x, 14 * C * sizeof *one->x);
    rig a = rig_open(&(problem){.vocab = 41, .height = 16, .tokens = 16, .micros = 3});
    rig b = rig_open(&(problem){.vocab = 41, .height = 16, .tokens = 23, .micros = 1});
    result ra = run_train(&a, m, 3), rb = run_train(&b, one, 1);
    same(&a, &ra, &rb, 21, 1e-6);
    result_free(&ra);
    result_free(&rb);
    rig_close(&a);
    rig_close(&b);
    free(one);
    free(m);
}

enum { ENTRIES = 41 }; /* of the vocabulary of the tests below */

/* A head over nine entries a tile, with a soft-cap and a bias, and two micro-batches of 300 and 4 tokens. */
static const problem capped = {
    .vocab = ENTRIES, .height = 9, .tokens = 300, .micros = 2, .softcap = 1.5, .bias = true};

static micro *capped_micros(void)
{
    micro *m = calloc(2, sizeof *m);
    random_micro(&m[0], 300, ENTRIES, 7);
    random_micro(&m[1], 4, ENTRIES, 8);
    return m;
}

/* Row `row` of the logits is what the reference gives for x. */
static void assert_logits(const rig *r, const bs_array *logits, int64_t row, const float *x)
{
    double want[ENTRIES], slope[ENTRIES];
    row_logits(r, capped.softcap, x, want, slope);
    for (int v = 0; v < ENTRIES; v++)
        if (!(fabs(bs_array_get(logits, row * ENTRIES + v) - want[v]) <= 2e-6))
            fail_msg("logit %d of row %lld", v, (long long)row);
}

static void test_loss_is_that_of_training(void **state)
{
    (void)state;
    double loss;
    micro *m = capped_micros();
    rig r = rig_open(&capped);
    result train = run_train(&r, m, 2);
    ok(bs_head_begin(r.head, BS_HEAD_LOSS, set_batch(&r, m, 2)));
    put_all(&r, m, 2, true);
    all_tiles(&r, 2);
    for (int j = 0; j < 2; j++)
        ok(bs_head_finish(r.head, j, NULL));
    ok(bs_head_loss(r.head, &loss));
    assert_true(loss == train.loss);
    result_free(&train);
    rig_close(&r);
    free(m);
}

static void test_logits_of_all_rows(void **state)
{
    (void)state;
    bs_array *a, *none;
    micro *m = capped_micros();
    rig r = rig_open(&capped);
    set_batch(&r, m, 2);
    ok(bs_head_begin(r.head, BS_HEAD_LOGITS, 0));
    put_all(&r, m, 2, false);
    fails(bs_head_logits(r.head, 0, &a), BS_STATE, "0 of 41");
    all_tiles(&r, 2);
    for (int j = 0; j < 2; j++) {
        ok(bs_head_logits(r.head, j, &a));
        assert_int_equal(a->dim[0], m[j].tokens);
        assert_int_equal(a->dim[1], ENTRIES);
        for (int64_t t = 0; t < m[j].tokens; t++)
            assert_logits(&r, a, t, m[j].x + t * C);
        fails(bs_head_logits(r.head, j, &none), BS_STATE, "taken already");
        bs_array_free(a);
    }
    fails(bs_head_finish(r.head, 0, NULL), BS_STATE, "logits");
    rig_close(&r);
    free(m);
}

static void test_logits_of_last_rows(void **state)
{
    (void)state;
    bs_array *a;
    micro *m = capped_micros();
    rig r = rig_open(&capped);
    set_batch(&r, m, 2);
    ok(bs_head_begin(r.head, BS_HEAD_LAST, 0));
    for (int j = 0; j < 2; j++) {
        scope(&r, j);
        bs_tensor *x = rows_of(&r, &m[j]), *y;
        fails(bs_head_put(r.head, j, x), BS_SHAPE, "the last rows");
        ok(bs_op_last(x, &y));
        ok(bs_head_put(r.head, j, y));
        bs_tensor_release(y);
        bs_tensor_release(x);
        bs_scope_close(r.e);
    }
    all_tiles(&r, 2);
    for (int j = 0; j < 2; j++) {
        ok(bs_head_logits(r.head, j, &a));
        assert_int_equal(a->dim[0], 1);
        assert_logits(&r, a, 0, m[j].x + (m[j].tokens - 1) * C);
        bs_array_free(a);
    }
    rig_close(&r);
    free(m);
}

/* Three tiles of at most 16 entries, frozen, and two micro-batches of 6 tokens. */
static rig open_frozen(micro **m, int64_t *count)
{
    *m = calloc(2, sizeof **m);
    random_micro(&(*m)[0], 6, ENTRIES, 9);
    random_micro(&(*m)[1], 6, ENTRIES, 10);
    rig r = rig_open(&(problem){
        .vocab = ENTRIES, .height = 16, .tokens = 8, .micros = 2, .frozen = true, .bias = true});
    *count = set_batch(&r, *m, 2);
    return r;
}

/* The labelled rows of a micro-batch, in the open scope. */
static bs_tensor *labelled_rows(const rig *r, const micro *m)
{
    bs_tensor *x = rows_of(r, m), *y;
    ok(bs_op_labelled(x, &y));
    bs_tensor_release(x);
    return y;
}

static void test_calls_outside_a_pass(void **state)
{
    (void)state;
    micro *m;
    int64_t count;
    double loss;
    rig r = open_frozen(&m, &count);
    fails(bs_head_tile(r.head, 0, r.tile[0], NULL, 0), BS_STATE, "no pass");
    fails(bs_head_loss(r.head, &loss), BS_STATE, "no micro-batch");
    fails(bs_head_begin(r.head, BS_HEAD_TRAIN, 0), BS_ARG, "0 labelled");
    rig_close(&r);
    free(m);
}

static void test_refused_rows(void **state)
{
    (void)state;
    micro *m;
    int64_t count;
    rig r = open_frozen(&m, &count);
    ok(bs_head_begin(r.head, BS_HEAD_TRAIN, count));
    scope(&r, 0);
    bs_tensor *x = rows_of(&r, &m[0]), *y = labelled_rows(&r, &m[0]);
    fails(bs_head_put(r.head, 0, x), BS_SHAPE, "[6, 24]");
    ok(bs_head_put(r.head, 0, y));
    fails(bs_head_put(r.head, 0, y), BS_STATE, "twice");
    bs_scope_close(r.e);
    fails(bs_head_put(r.head, 1, y), BS_STATE, "");
    bs_tensor_release(x);
    bs_tensor_release(y);
    m[1].label[3] = ENTRIES;
    set_batch(&r, m, 2);
    scope(&r, 1);
    y = labelled_rows(&r, &m[1]);
    fails(bs_head_put(r.head, 1, y), BS_ARG, "token 3 of micro-batch 1 is 41");
    bs_tensor_release(y);
    bs_scope_close(r.e);
    rig_close(&r);
    free(m);
}

static void test_refused_tiles(void **state)
{
    (void)state;
    micro *m;
    int64_t count;
    double loss;
    bs_tensor *dx;
    rig r = open_frozen(&m, &count);
    ok(bs_head_begin(r.head, BS_HEAD_TRAIN, count));
    fails(bs_head_tile(r.head, 2, r.tile[0], NULL, 0), BS_ARG, "2 of 2");
    fails(bs_head_tile(r.head, 0, r.tile[0], NULL, 0), BS_STATE, "has not been put");
    put_all(&r, m, 1, true);
    fails(bs_head_tile(r.head, 0, r.tile[1], NULL, 16), BS_STATE, "entry 0");
    fails(bs_head_tile(r.head, 0, r.tile[0], NULL, 26), BS_ARG, "26..41");
    fails(bs_head_tile(r.head, 0, r.tile[0], r.bias[1], 0), BS_SHAPE, "'bias' [16] of block 1");
    fails(bs_head_tile(r.head, 0, r.tile[2], r.bias[0], 0), BS_SHAPE, "9 elements");
    ok(bs_head_tile(r.head, 0, r.tile[0], NULL, 0));
    fails(bs_head_tile(r.head, 0, r.tile[0], NULL, 0), BS_STATE, "entry 16");
    fails(bs_head_finish(r.head, 0, &dx), BS_STATE, "16 of 41");
    ok(bs_head_tile(r.head, 0, r.tile[1], NULL, 16));
    ok(bs_head_tile(r.head, 0, r.tile[2], NULL, 32));
    fails(bs_head_loss(r.head, &loss), BS_STATE, "not been finished");
    fails(bs_head_tile_grad(r.head, 0, r.tile[0], NULL, 0), BS_STATE, "frozen");
    scope(&r, 0);
    ok(bs_head_finish(r.head, 0, &dx));
    fails(bs_head_finish(r.head, 0, &dx), BS_STATE, "twice");
    bs_tensor_release(dx);
    bs_scope_close(r.e);
    rig_close(&r);
    free(m);
}

static void test_refused_settings(void **state)
{
    (void)state;
    micro *m;
    int64_t count;
    bs_head *h;
    size_t bytes;
    rig r = open_frozen(&m, &count);
    bs_head_cfg cfg = {.batch = r.batch, .channels = C, .vocab = ENTRIES, .tile_rows = 0};
    fails(bs_head_bytes(&r.batch->cfg, &cfg, BS_DTYPE_F32, &bytes), BS_ARG, "tile_rows 0");
    cfg.tile_rows = 1;
    cfg.softcap = -1;
    fails(bs_head_open(r.e, &cfg, &h), BS_ARG, "softcap -1");
    cfg.softcap = 0;
    cfg.channels = INT64_MAX / 2;
    fails(bs_head_bytes(&r.batch->cfg, &cfg, BS_DTYPE_F32, &bytes), BS_SHAPE, "too large");
    cfg.channels = C;
    fails(bs_head_open(r.e, &cfg, &h), BS_STATE, "sealed");
    rig_close(&r);
    free(m);
}

/* A dry run issues the same calls and takes the same bytes. */
static void test_meta(void **state)
{
    (void)state;
    micro *m = calloc(1, sizeof *m);
    size_t fixed[2], launches[2];
    random_micro(m, 12, 41, 11);
    for (int i = 0; i < 2; i++) {
        rig r = rig_open(&(problem){
            .spec = i ? "meta" : "cpu", .vocab = 41, .height = 16, .tokens = 16, .micros = 1});
        bs_tensor *dx;
        bs_engine_stats s;
        double loss;
        bs_array *a;
        ok(bs_head_begin(r.head, BS_HEAD_TRAIN, set_batch(&r, m, 1)));
        put_all(&r, m, 1, true);
        all_tiles(&r, 1);
        scope(&r, 0);
        ok(bs_head_finish(r.head, 0, &dx));
        bs_tensor_release(dx);
        bs_scope_close(r.e);
        ok(bs_head_loss(r.head, &loss));
        ok(bs_head_tile_grad(r.head, 0, r.tile[0], NULL, 0));
        ok(bs_params_norm(r.params, &loss));
        ok(bs_head_begin(r.head, BS_HEAD_LOGITS, 1));
        put_all(&r, m, 1, false);
        all_tiles(&r, 1);
        ok(bs_head_logits(r.head, 0, &a));
        bs_array_free(a);
        bs_engine_stats_get(r.e, &s);
        fixed[i] = s.fixed_bytes;
        launches[i] = s.launches;
        rig_close(&r);
    }
    assert_int_equal(fixed[0], fixed[1]);
    assert_int_equal(launches[0], launches[1]);
    free(m);
}

/* Every host allocation of open that fails is reported and leaves nothing behind. */
static void test_no_memory(void **state)
{
    (void)state;
    rig r = rig_open(&(problem){.spec = "meta", .vocab = 41, .height = 16, .tokens = 16, .micros = 1});
    bs_engine *e;
    bs_batch *batch;
    ok(bs_engine_open(&(bs_engine_cfg){.dev = r.dev}, &e));
    ok(bs_batch_open(e, &r.batch->cfg, &batch));
    bs_head_cfg cfg = {.batch = batch, .channels = C, .vocab = 41, .logits = true, .tile_rows = 16};
    size_t misc = bs_host_bytes(BS_TAG_MISC), staging = bs_host_bytes(BS_TAG_STAGING);
    uint64_t n = 1;
    for (;; n++) {
        bs_head *h = NULL;
        bsi_alloc_fail_nth(n);
        bs_status st = bs_head_open(e, &cfg, &h);
        bsi_alloc_fail_nth(0);
        bs_head_close(h);
        assert_int_equal(bs_host_bytes(BS_TAG_MISC), misc);
        assert_int_equal(bs_host_bytes(BS_TAG_STAGING), staging);
        if (st == BS_OK)
            break;
        assert_int_equal(st, BS_NOMEM);
    }
    assert_int_equal(n, 5); /* four allocations */
    bs_batch_close(batch);
    bs_engine_close(e);
    rig_close(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_heights),
                                       cmocka_unit_test(test_label_borders),
                                       cmocka_unit_test(test_well_learned),
                                       cmocka_unit_test(test_chunks),
                                       cmocka_unit_test(test_micros),
                                       cmocka_unit_test(test_loss_is_that_of_training),
                                       cmocka_unit_test(test_logits_of_all_rows),
                                       cmocka_unit_test(test_logits_of_last_rows),
                                       cmocka_unit_test(test_calls_outside_a_pass),
                                       cmocka_unit_test(test_refused_rows),
                                       cmocka_unit_test(test_refused_tiles),
                                       cmocka_unit_test(test_refused_settings),
                                       cmocka_unit_test(test_meta),
                                       cmocka_unit_test(test_no_memory)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
