/* SPDX-License-Identifier: Apache-2.0 */
/*
** The element type of activations: every launch of a model's ops, once on an engine of f32 and once of bf16,
** held against the marks of bsk.h; the arena; the sizes functions; refusals. On meta, which holds no bytes:
** launches are seen by a spy between the front and the backend.
*/
#include "backend/meta/meta.h"
#include "bs.h"
#include "tensor_fixture.h"

enum { T = 8, C = 16, H = 4, D = 4, HIDDEN = 32, R = 2, VOCAB = 24, MAX_CALLS = 256 };
enum { EXPERTS = C, CHOSEN = 2 }; /* x is logits, too */

static void assert_error(bs_status got, bs_status want, const char *part)
{
    if (got != want || !strstr(bs_error()->msg, part))
        fail_msg("status %s, message \"%s\"; expected %s with \"%s\"", bs_status_name(got),
                 bs_error()->msg, bs_status_name(want), part);
}

/* ---- the spy ---- */

typedef struct trace {
    bsi_kcall call[MAX_CALLS];
    int n, expands, adamw_copies;
    size_t peak;
} trace;

static trace *seen;
static bsi_dev_ops spy;

/* Expansions differ between two engines, so they are held against their own sizes and left out. */
static bs_status spy_launch(bsi_queue *q, const bsi_kcall *c)
{
    if (c->op == BSK_EXPAND) {
        assert_int_equal(c->arg[0].bytes, (size_t)c->n[1] * bs_dtype_size((bs_dtype)c->n[0]));
        assert_int_equal(c->arg[1].bytes, (size_t)c->n[1] * bs_dtype_size(c->out));
        seen->expands++;
    } else {
        assert_true(seen->n < MAX_CALLS);
        seen->call[seen->n++] = *c;
    }
    return bsi_dev_meta.launch(q, c);
}

/* ---- a layer, the head and the optimizer, with everything that can be trained trained ---- */

static bs_tensor *held[64]; /* by the test; let go when a scope ends */
static int n_held;

static bs_tensor *hold(bs_tensor *t)
{
    assert_true(n_held < (int)BSI_COUNT(held));
    return held[n_held++] = t;
}

static void end_scope(fixture *f)
{
    bs_scope_close(f->e);
    while (n_held > 0)
        bs_tensor_release(held[--n_held]);
}

static bs_tensor *leaf(fixture *f, int64_t cols)
{
    float v[T * HIDDEN] = {0};
    bs_tensor *t = hold(fix_from(f, T, cols, v));
    ok(bs_tensor_want_grad(t));
    return t;
}

typedef struct model {
    bs_params *params;
    bs_linear *linear, *packed, *experts;
    bs_weight *norm, *shift, *tile, *tile_bias, *sinks, *correction;
    bs_routing *routing;
    bs_rope *rope;
    bs_head *head;
} model;

static void model_open(fixture *f, bs_dtype stored, model *m)
{
    static float v[HIDDEN * C];
    bs_array *freq;
    int id[9];
    memset(m, 0, sizeof *m);
    ok(bs_params_open(f->e, &m->params));
    ok(bs_params_add(m->params, "A", R, C, &id[0]));
    ok(bs_params_add(m->params, "B", C, R, &id[1]));
    ok(bs_params_add_base(m->params, "w", C, C, &id[2]));
    ok(bs_params_add_base(m->params, "b", 1, C, &id[3]));
    ok(bs_params_add_base(m->params, "norm", 1, C, &id[4]));
    ok(bs_params_add_base(m->params, "tile", VOCAB, C, &id[5]));
    ok(bs_params_add_base(m->params, "shift", 1, C, &id[6]));
    ok(bs_params_add_base(m->params, "tile bias", 1, VOCAB, &id[7]));
    ok(bs_params_add_base(m->params, "sinks", 1, H, &id[8]));
    ok(bs_params_seal(m->params));
    bs_tensor_info w = fix_weight(f, "w", stored, 2, (int64_t[]){C, C}, v);
    bs_tensor_info b = fix_weight(f, "b", BS_DTYPE_F32, 1, (int64_t[]){C}, v);
    bs_tensor_info n = fix_weight(f, "norm", BS_DTYPE_BF16, 1, (int64_t[]){C}, v);
    bs_tensor_info t = fix_weight(f, "tile", stored, 2, (int64_t[]){VOCAB, C}, v);
    bs_linear_cfg cfg = {.weight = &w, .bias = &b, .scale = 2, .dropout = 0.5f, .name = "linear"};
    bs_param_ref ref;
    ok(bs_params_ref(m->params, id[0], &cfg.lora_a));
    ok(bs_params_ref(m->params, id[1], &cfg.lora_b));
    ok(bs_params_ref(m->params, id[2], &cfg.base_weight));
    ok(bs_params_ref(m->params, id[3], &cfg.base_bias));
    ok(bs_linear_new(f->e, &cfg, &m->linear));
    ok(bs_params_ref(m->params, id[4], &ref));
    ok(bs_weight_new(f->e, 0, &n, &ref, &m->norm));
    ok(bs_params_ref(m->params, id[5], &ref));
    ok(bs_weight_new(f->e, 0, &t, &ref, &m->tile));
    bs_tensor_info shift = fix_weight(f, "shift", stored, 1, (int64_t[]){C}, v);
    bs_tensor_info bias = fix_weight(f, "tile bias", stored, 1, (int64_t[]){VOCAB}, v);
    ok(bs_params_ref(m->params, id[6], &ref));
    ok(bs_weight_new(f->e, 0, &shift, &ref, &m->shift));
    ok(bs_params_ref(m->params, id[7], &ref));
    ok(bs_weight_new(f->e, 0, &bias, &ref, &m->tile_bias));
    bs_tensor_info sinks = fix_weight(f, "sinks", stored, 1, (int64_t[]){H}, v);
    ok(bs_params_ref(m->params, id[8], &ref));
    ok(bs_weight_new(f->e, 0, &sinks, &ref, &m->sinks));
    bs_tensor_info packed = fix_packed(f, "packed", C, HIDDEN, v);
    ok(bs_linear_new(f->e, &(bs_linear_cfg){.weight = &packed, .name = "packed"}, &m->packed));
    bs_tensor_info shifts = fix_weight(f, "correction", BS_DTYPE_F32, 1, (int64_t[]){EXPERTS}, v);
    ok(bs_weight_new(f->e, 0, &shifts, NULL, &m->correction));
    bs_tensor_info e[4];
    for (int i = 0; i < 4; i++) /* two weights, two biases */
        e[i] = fix_weight(f, "expert", stored, 2 - i / 2, (int64_t[]){C, C}, v);
    /* as many elements apart in either type, whatever a slot aligns to */
    e[3].slot_offset = e[2].slot_offset + 64 * bs_dtype_size(stored);
    const bs_linear_cfg both = {.weight = &e[0],
                                .bias = &e[2],
                                .grouped = true,
                                .n_next = 1,
                                .next = (const bs_tensor_info *const[]){&e[1]},
                                .next_bias = (const bs_tensor_info *const[]){&e[3]},
                                .name = "experts"};
    ok(bs_linear_new(f->e, &both, &m->experts));
    const bs_routing_cfg experts = {.experts = EXPERTS, .chosen = CHOSEN};
    ok(bs_routing_open(f->e, f->batch, &experts, &m->routing));
    ok(bs_array_new(BS_DTYPE_F32, 1, (int64_t[]){D / 2}, &freq));
    ok(bs_rope_new(f->e, freq, 1.0, BS_ROPE_HALF, &m->rope));
    bs_array_free(freq);
    bs_head_cfg head = {.batch = f->batch, .channels = C, .vocab = VOCAB, .tile_rows = VOCAB};
    ok(bs_head_open(f->e, &head, &m->head));
}

static void model_close(model *m)
{
    bs_head_close(m->head);
    bs_routing_close(m->routing);
    bs_weight_free(m->correction);
    bs_linear_free(m->experts);
    bs_linear_free(m->packed);
    bs_rope_free(m->rope);
    bs_weight_free(m->sinks);
    bs_weight_free(m->tile_bias);
    bs_weight_free(m->tile);
    bs_weight_free(m->shift);
    bs_weight_free(m->norm);
    bs_linear_free(m->linear);
    bs_params_close(m->params);
}

/* One output of every op; each gets its own gradient. sums: an f32 place, as a store of sums has. */
static void run_ops(fixture *f, const model *m, const bs_place *sums)
{
    enum { OUT = 19 };
    bs_tensor *y[OUT], *g[OUT], *sum, *act;
    int n = 0;
    const bs_attention_cfg attention = {.heads = H, .kv_heads = H, .head_dim = D, .sinks = m->sinks};
    const bs_route_cfg route = {.chosen = CHOSEN, .scale = 1, .bias = m->correction};
    fix_scope(f, 0, true, true);
    bs_tensor *x = leaf(f, C), *z = leaf(f, C);
    ok(bs_op_rmsnorm(x, m->norm, 1e-6, false, &y[n++]));
    ok(bs_op_layernorm(x, m->norm, m->shift, 1e-6, &y[n++]));
    ok(bs_op_linear(x, m->linear, NULL, &y[n++]));
    ok(bs_op_linear(x, m->linear, z, &y[n++]));
    ok(bs_op_rope(x, m->rope, H, &y[n++]));
    ok(bs_op_norm_rope(x, m->norm, 1e-6, false, m->rope, 1, &y[n++]));
    ok(bs_op_attention(x, z, x, &attention, &y[n++]));
    ok(bs_op_glu(x, z, BS_ACT_SILU, &y[n++]));
    ok(bs_op_act(x, BS_ACT_RELU, &y[n++]));
    ok(bs_op_add(x, z, &y[n++]));
    ok(bs_op_mul(x, z, &y[n++]));
    ok(bs_op_scale(x, 2.0, &y[n++]));
    ok(bs_op_softmax(x, &y[n++]));
    ok(bs_op_columns(x, 1, 3, &y[n++]));
    ok(bs_op_row_scale(x, z, 1, &y[n++]));
    ok(bs_op_labelled(x, &y[n++]));
    ok(bs_op_glu_clamped(x, 1.7, 7, &y[n++]));
    ok(bs_op_linear(leaf(f, HIDDEN), m->packed, NULL, &y[n++]));
    ok(bs_op_route(x, &route, m->routing, &y[n++]));
    ok(bs_tensor_at(f->e, sums, &sum));
    ok(bs_op_accumulate(hold(sum), y[0]));
    ok(bs_op_activation(sum, &act));
    hold(act);
    assert_int_equal(bs_tensor_dtype(act), f->e->dtype);
    assert_int_equal(act == sum, f->e->dtype == BS_DTYPE_F32);
    for (int i = 0; i < n; i++) {
        static float zero[T * C];
        bs_place computed; /* late ops are launched when somebody asks where their bytes are */
        ok(bs_tensor_place(y[i], &computed));
        assert_int_equal(bs_tensor_dtype(y[i]), f->e->dtype);
        g[i] = hold(fix_from(f, bs_tensor_dim(hold(y[i]), 0), bs_tensor_dim(y[i], 1), zero));
    }
    ok(bs_scope_backward(f->e, n, y, g));
    ok(bs_tensor_grad(x, &act));
    assert_int_equal(bs_tensor_dtype(hold(act)), f->e->dtype);
    assert_int_equal(bs_tensor_capacity(act), T);
    end_scope(f);
}

/* Rows of one expert, and what is added to those that they come from. rows, weights: of all micro-batches. */
static void run_routed(fixture *f, const model *m, const bs_place *rows, const bs_place *weights,
                       const bs_place *sums)
{
    bs_tensor *x, *w, *y;
    bs_place at;
    ok(bs_batch_begin(f->batch, 1));
    ok(bs_routing_sort(m->routing));
    ok(bs_scope_open(f->e, &(bs_scope_cfg){.label = "rows", .routing = m->routing, .rows = T}));
    ok(bs_op_take_rows(f->e, rows, T * C, &x));
    ok(bs_op_take_weights(f->e, weights, T * CHOSEN, &w));
    assert_int_equal(bs_tensor_dtype(hold(x)), f->e->dtype);
    assert_int_equal(bs_tensor_dtype(hold(w)), f->e->dtype);
    ok(bs_op_linear(x, m->experts, NULL, &y));
    ok(bs_tensor_place(hold(y), &at));
    ok(bs_op_add_rows(y, sums, T * C));
    ok(bs_op_add_weights(w, sums, T * CHOSEN));
    end_scope(f);
}

/* The ops of walks without a tape. */
static void run_walk(fixture *f, bs_cache *cache)
{
    static const float zero[T * C];
    const bs_attention_cfg attention = {.heads = H, .kv_heads = H, .head_dim = D};
    bs_tensor *y;
    fix_scope(f, 0, false, false);
    bs_tensor *x = hold(fix_from(f, T, C, zero));
    ok(bs_op_attention_cached(x, x, x, &attention, cache, 0, &y));
    assert_int_equal(bs_tensor_dtype(hold(y)), f->e->dtype);
    ok(bs_op_last(x, &y));
    assert_int_equal(bs_tensor_dtype(hold(y)), f->e->dtype);
    end_scope(f);
}

static void run_head(fixture *f, const model *m)
{
    static const float zero[T * C];
    bs_tensor *dx;
    fix_scope(f, 0, false, true);
    int64_t labelled = bs_batch_labelled(f->batch, 0);
    ok(bs_head_begin(m->head, BS_HEAD_TRAIN, labelled));
    ok(bs_head_put(m->head, 0, hold(fix_from(f, labelled, C, zero))));
    ok(bs_head_tile(m->head, 0, m->tile, m->tile_bias, 0));
    ok(bs_head_tile_grad(m->head, 0, m->tile, m->tile_bias, 0));
    ok(bs_head_finish(m->head, 0, &dx));
    assert_int_equal(bs_tensor_dtype(hold(dx)), f->e->dtype);
    end_scope(f);
}

static void run_optimizer(const model *m)
{
    bs_array *a;
    double norm;
    ok(bs_array_new(BS_DTYPE_F32, 2, (int64_t[]){R, C}, &a));
    ok(bs_params_set(m->params, 0, a));
    ok(bs_params_init_kaiming(m->params, 1, 3));
    ok(bs_params_norm(m->params, &norm));
    ok(bs_params_apply(m->params, &(bs_adamw){.lr = 1, .eps = 1, .step = 1}, norm));
    bs_array_free(a);
}

static void record(bs_dtype compute, bs_dtype stored, trace *t)
{
    fixture f;
    model m;
    bsi_addr at;
    seen = t;
    memset(t, 0, sizeof *t);
    fix_open_as(&f, "meta", compute, T);
    ok(bsi_pool_region(f.e->pool, "sums", T * C * sizeof(float), &at));
    bs_place sums = bsi_place(at, BS_DTYPE_F32, T, T, C);
    ok(bsi_pool_region(f.e->pool, "rows", T * C * sizeof(float), &at));
    bs_place rows = bsi_place(at, compute, T, T, C), weights = bsi_place(at, compute, T, T, CHOSEN);
    model_open(&f, stored, &m);
    bs_cache *cache;
    ok(bs_cache_open(f.e, &(bs_cache_cfg){1, (const int64_t[]){C}, 2, T}, &cache));
    fix_seal(&f);
    fix_rows(&f, 0, 2, (int64_t[]){5, 3}, NULL);
    spy = *f.dev->ops;
    spy.launch = spy_launch;
    f.dev->ops = &spy;
    run_ops(&f, &m, &sums);
    t->peak = fix_arena_peak(&f);
    run_head(&f, &m);
    run_walk(&f, cache);
    run_routed(&f, &m, &rows, &weights, &sums);
    bs_cache_close(cache);
    run_optimizer(&m);
    model_close(&m);
    fix_close(&f);
}

/* ---- the marks of bsk.h: a, o; f f32, i i32, d f64, x bytes that the op defines ---- */

static const char *const marks[BSK_OP_COUNT] = {
    [BSK_GEMM] = "aaoo",
    [BSK_GEMM_GROUPED] = "aaoi",
    [BSK_BIAS_GROUPED] = "aai",
    [BSK_EXPAND_MXFP4] = "xxo",
    [BSK_BIAS] = "aa",
    [BSK_COLSUM] = "af",
    [BSK_RMSNORM] = "aaaf",
    [BSK_RMSNORM_BWD] = "aafaaf",
    [BSK_LAYERNORM] = "aaaaf",
    [BSK_LAYERNORM_BWD] = "aafaaff",
    [BSK_ROPE] = "aifa",
    [BSK_NORM_ROPE] = "aaifaf",
    [BSK_NORM_ROPE_BWD] = "aaiffaaf",
    [BSK_ATTENTION] = "aaaiafxa",
    [BSK_ATTENTION_BWD] = "aaaiafaaaax",
    [BSK_CACHE_PUT] = "aiia",
    [BSK_SINKS_BWD] = "aafaf",
    [BSK_ATTENTION_CACHE] = "aaaiiaxa",
    [BSK_GLU] = "aaa",
    [BSK_GLU_BWD] = "aaaaa",
    [BSK_GLU_CLAMPED] = "aa",
    [BSK_GLU_CLAMPED_BWD] = "aaa",
    [BSK_ACT] = "aa",
    [BSK_ACT_BWD] = "aaa",
    [BSK_ADD] = "aaa",
    [BSK_MUL] = "aaa",
    [BSK_AXPY] = "ao",
    [BSK_SCALE] = "aa",
    [BSK_SOFTMAX] = "aa",
    [BSK_SOFTMAX_BWD] = "aaa",
    [BSK_COLUMNS] = "aa",
    [BSK_COLUMNS_BWD] = "aa",
    [BSK_ROW_SCALE] = "aaa",
    [BSK_ROW_SCALE_BWD] = "aaaaa",
    [BSK_GATHER_ROWS] = "aia",
    [BSK_SCATTER_ROWS] = "aio",
    [BSK_ROUTE] = "afai",
    [BSK_ROUTE_BWD] = "aiaa",
    [BSK_SORT_ROWS] = "iiiix",
    [BSK_TAKE_ROWS] = "aia",
    [BSK_SUM_ROWS] = "aif",
    [BSK_DROPOUT] = "aiia",
    [BSK_HEAD_TILE] = "fiffffa",
    [BSK_HEAD_PICK] = "aiff",
    [BSK_ROW_MUL] = "ff",
    [BSK_HEAD_FINISH] = "ffffffa",
    [BSK_HEAD_DLOGITS] = "fifffa",
    [BSK_SUM] = "fd",
    [BSK_SUMSQ] = "fd",
    [BSK_ADAMW] = "ffffo",
};

/* Not held here: expansions, by their own sizes (spy_launch); the cap of logits, of that mode of the head alone. */
static bool launched_elsewhere(int op)
{
    return op == BSK_EXPAND || op == BSK_SOFTCAP;
}

/* Results that are f32 sums whatever is computed in. */
static bool sums_f32(const char *label)
{
    static const char *const list[] = {
        "gradient of weight", "gradient of lora A", "gradient of lora B",  "accumulate",
        "head logits",        "head sum",           "head weight gradient"};
    for (size_t i = 0; i < BSI_COUNT(list); i++)
        if (strcmp(label, list[i]) == 0)
            return true;
    return false;
}

/* b is the call a of the engine of f32, which gives the elements of each operand, on one of bf16. */
static void check_call(const bsi_kcall *a, const bsi_kcall *b)
{
    /* Two activation kernels run in f32, too: one adds to logits, one moves what is i32. */
    const char *mark = strcmp(b->label, "head bias") == 0        ? "ff"
                       : strcmp(b->label, "take positions") == 0 ? "fif"
                                                                 : marks[a->op];
    assert_non_null(mark);
    /* without a residual a product has an operand less */
    assert_int_equal(strlen(mark), (size_t)a->n_args + (a->op == BSK_GEMM && a->n_args == 3));
    assert_true(a->op == b->op && a->n_args == b->n_args && a->dtype == BS_DTYPE_F32 &&
                a->out == BS_DTYPE_F32);
    assert_memory_equal(a->n, b->n, sizeof a->n);
    bs_dtype want_out = sums_f32(b->label) ? BS_DTYPE_F32 : BS_DTYPE_BF16;
    for (int i = 0; i < a->n_args; i++) {
        size_t n = a->arg[i].bytes, want = n;
        if (mark[i] == 'f')
            assert_true((a->op != BSK_BIAS && a->op != BSK_TAKE_ROWS) || b->dtype == BS_DTYPE_F32);
        if (mark[i] == 'a') {
            assert_int_equal(b->dtype, BS_DTYPE_BF16);
            want = n / 2;
        } else if (mark[i] == 'o') {
            assert_int_equal(b->out, want_out);
            want = a->op == BSK_ADAMW ? (size_t)a->n[0] * 2 : b->out == BS_DTYPE_BF16 ? n / 2 : n;
        }
        if (b->arg[i].bytes != want)
            fail_msg("%s, operand %d: %zu bytes in f32, %zu in bf16, expected %zu", b->label, i, n,
                     b->arg[i].bytes, want);
        assert_true(a->op == BSK_ADAMW || a->arg[i].mode == b->arg[i].mode);
    }
}

static void test_marks(void **state)
{
    (void)state;
    static trace f32, bf16;
    bool met[BSK_OP_COUNT] = {0};
    record(BS_DTYPE_F32, BS_DTYPE_F32, &f32);
    record(BS_DTYPE_BF16, BS_DTYPE_BF16, &bf16);
    assert_int_equal(f32.n, bf16.n);
    for (int i = 0; i < f32.n; i++) {
        check_call(&f32.call[i], &bf16.call[i]);
        met[f32.call[i].op] = true;
    }
    for (int op = 0; op < BSK_OP_COUNT; op++)
        if (!met[op] && !launched_elsewhere(op))
            fail_msg("op %d was never launched", op);
    /* f32: the norm, in forward and backward one visit. bf16: the f32 bias, the copies of A and B, the sum
       that becomes an activation, the head's bias once a pass. */
    assert_int_equal(f32.expands, 1);
    assert_int_equal(bf16.expands, 6);
}

/* In f32 the results go over what they are made of; elsewhere they lie apart. */
static void test_in_place(void **state)
{
    (void)state;
    static trace t;
    for (int bf16 = 0; bf16 < 2; bf16++) {
        record(bf16 ? BS_DTYPE_BF16 : BS_DTYPE_F32, BS_DTYPE_F32, &t);
        int found = 0;
        for (int i = 0; i < t.n; i++) {
            const bsi_kcall *c = &t.call[i];
            int to = c->op == BSK_HEAD_TILE ? 6 : c->op == BSK_HEAD_DLOGITS ? 5 : 0;
            int from = 0;
            if (c->op == BSK_HEAD_FINISH) {
                from = 3;
                to = 6;
            }
            if (!to)
                continue;
            found++;
            assert_int_equal(c->arg[to].at.off == c->arg[from].at.off, !bf16);
        }
        assert_int_equal(found, 3);
    }
}

/* ---- memory ---- */

static size_t chain_peak(bs_dtype compute)
{
    fixture f;
    float v[T * HIDDEN] = {0};
    fix_open_as(&f, "meta", compute, T);
    fix_seal(&f);
    fix_scope(&f, 0, true, false);
    bs_tensor *x = leaf(&f, HIDDEN), *y = x, *g;
    for (int i = 0; i < 5; i++) {
        ok(bs_op_mul(y, x, &y));
        hold(y);
    }
    g = hold(fix_from(&f, T, HIDDEN, v));
    ok(bs_scope_backward(f.e, 1, &y, &g));
    size_t peak = fix_arena_peak(&f);
    end_scope(&f);
    fix_close(&f);
    return peak;
}

static void test_arena(void **state)
{
    (void)state;
    size_t f32 = chain_peak(BS_DTYPE_F32);
    assert_true(f32 >= 7 * T * HIDDEN * sizeof(float));
    assert_int_equal(2 * chain_peak(BS_DTYPE_BF16), f32);
}

static void test_sizes(void **state)
{
    (void)state;
    for (int k = 0; k < 2; k++) {
        bs_dtype compute = k ? BS_DTYPE_BF16 : BS_DTYPE_F32;
        for (int64_t c = 5; c < 80; c += 37) {
            fixture f;
            bs_params *p;
            bs_head *h;
            bs_store *s;
            bs_engine_stats a, b;
            size_t want, host;
            int id;
            fix_open_as(&f, "meta", compute, 7);
            bs_engine_stats_get(f.e, &a);
            bs_head_cfg cfg = {.batch = f.batch, .channels = c, .vocab = 99, .tile_rows = 31};
            ok(bs_head_bytes(&f.batch->cfg, &cfg, compute, &want));
            ok(bs_head_open(f.e, &cfg, &h));
            bs_engine_stats_get(f.e, &b);
            assert_int_equal(b.fixed_bytes - a.fixed_bytes, want);
            const bs_store_key key[] = {{"h", c, compute, BS_STAY_HOST},
                                        {"y", c, BS_DTYPE_F32, BS_STAY_DEVICE}};
            ok(bs_store_bytes(&f.batch->cfg, 2, key, &want, &host));
            ok(bs_store_open(f.e, f.batch, 2, key, &s));
            bs_engine_stats_get(f.e, &a);
            assert_int_equal(a.fixed_bytes - b.fixed_bytes, want);
            ok(bs_params_open(f.e, &p));
            ok(bs_params_add(p, "a", 3, c, &id));
            ok(bs_params_add(p, "b", c, 1, &id));
            ok(bs_params_add_base(p, "w", c, c, &id));
            want = bs_params_device_bytes(p);
            ok(bs_params_seal(p));
            bs_engine_stats_get(f.e, &b);
            assert_int_equal(b.fixed_bytes - a.fixed_bytes, want);
            assert_int_equal(bs_params_device_bytes(p), want);
            bs_param_ref one, two; /* values as ops read them: copies where there are any */
            ok(bs_params_ref(p, 0, &one));
            ok(bs_params_ref(p, 1, &two));
            assert_int_equal(one.value.dtype, compute);
            assert_int_equal(one.grad.dtype, BS_DTYPE_F32);
            assert_int_equal(two.value.off - one.value.off,
                             bsi_round_up((size_t)(3 * c) * 4, 256) / 4 * bs_dtype_size(compute));
            bs_params_close(p);
            bs_store_close(s);
            bs_head_close(h);
            fix_close(&f);
        }
    }
}

/* ---- refusals ---- */

static void test_engine_refuses(void **state)
{
    (void)state;
    static const char *const spec[] = {"cpu", "check:cpu", "meta", "check:meta"};
    for (size_t i = 0; i < BSI_COUNT(spec); i++) {
        bs_dev *dev;
        bs_engine *e = NULL;
        bs_dev_props props;
        bool meta = strstr(spec[i], "meta") != NULL;
        ok(bs_dev_open(spec[i], &(bs_dev_cfg){.threads = 1}, &dev));
        bs_dev_props_get(dev, &props);
        assert_int_equal(props.bf16, meta);
        bs_engine_cfg cfg = {.dev = dev, .pool_bytes = 1 << 16, .compute = BS_DTYPE_BF16};
        bs_status st = bs_engine_open(&cfg, &e);
        if (meta) {
            ok(st);
            assert_int_equal(e->dtype, BS_DTYPE_BF16);
            bs_engine_close(e);
        } else {
            char text[64];
            snprintf(text, sizeof text, "the %s device computes in f32", spec[i]);
            assert_error(st, BS_DTYPE, text);
        }
        cfg.compute = BS_DTYPE_F16;
        assert_error(bs_engine_open(&cfg, &e), BS_DTYPE, "compute dtype f16");
        bs_dev_close(dev);
    }
}

static void test_ops_refuse(void **state)
{
    (void)state;
    fixture f;
    float v[T * C] = {0};
    bs_array *half, *ints;
    bs_tensor *y, *from;
    bs_weight *w;
    fix_open_as(&f, "meta", BS_DTYPE_BF16, T);
    bs_tensor_info stored = fix_weight(&f, "w", BS_DTYPE_F32, 1, (int64_t[]){C}, v);
    fix_seal(&f);
    stored.compute = BS_DTYPE_F32;
    assert_error(bs_weight_new(f.e, 0, &stored, NULL, &w), BS_DTYPE,
                 "'w' is stored as f32, the manifest lays expansions out for f32 and the engine "
                 "computes in bf16");
    fix_scope(&f, 0, true, false);
    bs_tensor *sum = hold(fix_at(&f, T, C, v)), *x = hold(fix_from(&f, T, C, v));
    assert_int_equal(bs_tensor_dtype(sum), BS_DTYPE_F32);
    assert_error(bs_op_add(x, sum, &y), BS_DTYPE, "input 2 is f32, activations are bf16");
    assert_error(bs_tensor_want_grad(sum), BS_DTYPE, "a f32 tensor has no gradient, bf16 is expected");
    assert_error(bs_op_accumulate(x, sum), BS_DTYPE, "bf16 += f32");
    ok(bs_op_accumulate(sum, sum));
    ok(bs_tensor_want_grad(x));
    ok(bs_op_scale(x, 2.0, &y));
    hold(y);
    assert_error(bs_scope_backward(f.e, 1, &y, &sum), BS_DTYPE, "output bf16 with gradient f32");
    ok(bs_array_new(BS_DTYPE_BF16, 2, (int64_t[]){2, C}, &half));
    ok(bs_array_new(BS_DTYPE_I32, 2, (int64_t[]){2, C}, &ints));
    ok(bs_tensor_from(f.e, half, &from));
    hold(from);
    assert_error(bs_tensor_from(f.e, ints, &from), BS_DTYPE, "i32: activations are bf16");
    bs_array_free(half);
    bs_array_free(ints);
    end_scope(&f);
    fix_close(&f);
}

static void test_cpu_refuses(void **state)
{
    (void)state;
    fixture f;
    float v[T * C] = {0};
    fix_open(&f, "check:cpu", T);
    fix_seal(&f);
    fix_scope(&f, 0, false, false);
    bs_place at;
    ok(bs_tensor_place(hold(fix_from(&f, T, C, v)), &at));
    bsi_addr x = bsi_place_addr(&at);
    bsi_kcall c = {
        .op = BSK_SCALE, .n_args = 2, .n = {8}, .f = {1}, .dtype = BS_DTYPE_BF16, .label = "test"};
    c.arg[0] = bsi_operand(x, BS_DTYPE_BF16, 8, BSI_READ);
    c.arg[1] = bsi_operand(bsi_addr_add(x, 64), BS_DTYPE_BF16, 8, BSI_WRITE);
    assert_error(bsi_engine_launch(f.e, &c), BS_UNSUPPORTED,
                 "test: the cpu kernel 'scale' takes f32, not bf16");
    c.op = BSK_AXPY;
    c.dtype = BS_DTYPE_F32;
    c.out = BS_DTYPE_BF16;
    assert_error(bsi_engine_launch(f.e, &c), BS_UNSUPPORTED,
                 "test: the cpu kernel 'axpy' gives f32, not bf16");
    c.op = BSK_EXPAND;
    c.out = BS_DTYPE_F16;
    assert_error(bsi_engine_launch(f.e, &c), BS_UNSUPPORTED, "'expand' gives f32 or bf16, not f16");
    ok(bs_engine_wait_all(f.e)); /* nothing was issued: the device is not lost */
    end_scope(&f);
    fix_close(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_marks),          cmocka_unit_test(test_in_place),
        cmocka_unit_test(test_arena),          cmocka_unit_test(test_sizes),
        cmocka_unit_test(test_engine_refuses), cmocka_unit_test(test_ops_refuse),
        cmocka_unit_test(test_cpu_refuses),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
