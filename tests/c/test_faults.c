/* SPDX-License-Identifier: Apache-2.0 */
/*
** test_faults.c: a whole training step from a checkpoint on disk, in which every host allocation and
** every device call fails once: each failure is reported as what it is, everything closes, nothing is
** left behind, and the same step then works. Refused engines leave the numbers as they are.
*/
#include "bs.h"
#include "stream/stream.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

#include "tmpdir.h"

enum {
    VOCAB = 24,
    CHANNELS = 16,
    RANK = 2,
    TOKENS = 9,
    VISITS = 3,
    LAYER = 0,
    TILE = 1,
    H0 = 0,
    H1,
    GRAD,
    KEYS
};

typedef struct job {
    bs_dev *dev;
    bs_manifest *m;
    bs_placement *placement;
    bs_engine *e;
    bs_batch *batch;
    bs_store *store;
    bs_embedding *rows;
    bs_params *params;
    bs_head *head;
    bs_weight *norm, *tile;
    bs_linear *proj;
    bs_stream *stream;
    int a, b; /* the adapter */
    double loss;
    bool applied; /* the step has changed the adapter: only its value is left to read */
} job;

static const bs_visit_spec program[VISITS] = {{.block = LAYER}, {.block = TILE}, {.block = LAYER}};
static const int64_t row_len[] = {4, 5}, ids[TOKENS] = {3, 1, 4, 1, 5, 9, 2, 6, 5};
static char model[512];

static int make_model(void **state)
{
    static const char *const name[] = {"embed", "head", "norm", "proj"};
    const int64_t dim[][2] = {
        {VOCAB, CHANNELS}, {VOCAB, CHANNELS}, {CHANNELS, 0}, {CHANNELS, CHANNELS}};
    bs_array *a[4], *wide;
    if (tmpdir_open(state) != 0)
        return -1;
    snprintf(model, sizeof model, "%s", tmpdir_file("model.safetensors"));
    for (int t = 0; t < 4; t++) {
        if (bs_array_new(BS_DTYPE_F32, dim[t][1] ? 2 : 1, dim[t], &wide) != BS_OK)
            return -1;
        for (int64_t i = 0; i < bs_array_count(wide); i++)
            bs_array_set(wide, i, (double)((i * 37 + t * 11) % 29 - 14) / 20);
        if (bs_array_cast(wide, t == 3 ? BS_DTYPE_BF16 : BS_DTYPE_F32, &a[t]) != BS_OK)
            return -1;
        bs_array_free(wide);
    }
    bs_status st = bs_safetensors_write(model, 4, name, (const bs_array *const *)a, 0, NULL, NULL);
    for (int t = 0; t < 4; t++)
        bs_array_free(a[t]);
    return st == BS_OK ? 0 : -1;
}

static bs_status add(bs_manifest *m, const bs_safetensors *st, int block, const char *name, int file)
{
    int at;
    const bs_safetensors_tensor *t = bs_safetensors_find(st, name);
    return bs_manifest_add_tensor(m, block, name, t->dtype, t->ndim, t->dim, file, t->offset, &at);
}

static bs_status open_manifest(bs_manifest **out)
{
    bs_safetensors *file = NULL;
    int f, at;
    BSI_TRY(bs_safetensors_open(model, &file));
    bs_status st = bs_manifest_new(out);
    if (st == BS_OK && (st = bs_manifest_add_file(*out, model, &f)) == BS_OK &&
        (st = bs_manifest_add_block(*out, "layer", "layer", &at)) == BS_OK &&
        (st = add(*out, file, LAYER, "norm", f)) == BS_OK &&
        (st = add(*out, file, LAYER, "proj", f)) == BS_OK &&
        (st = bs_manifest_add_block(*out, "tile", "tile", &at)) == BS_OK &&
        (st = add(*out, file, TILE, "head", f)) == BS_OK &&
        (st = bs_manifest_add_row_table(*out, "embed", BS_DTYPE_F32, VOCAB, CHANNELS, f,
                                        bs_safetensors_find(file, "embed")->offset, &at)) == BS_OK)
        st = bs_manifest_finish(*out);
    bs_safetensors_close(file);
    return st;
}

static bs_status open_params(job *j)
{
    BSI_TRY(bs_params_open(j->e, &j->params));
    BSI_TRY(bs_params_add(j->params, "a", RANK, CHANNELS, &j->a));
    BSI_TRY(bs_params_add(j->params, "b", CHANNELS, RANK, &j->b));
    BSI_TRY(bs_params_seal(j->params));
    BSI_TRY(bs_params_init_kaiming(j->params, j->a, 1));
    return bs_params_init_kaiming(j->params, j->b, 1);
}

static bs_status open_weights(job *j)
{
    bs_linear_cfg c = {
        .block = LAYER, .weight = bs_manifest_tensor(j->m, LAYER, 1), .scale = 1, .name = "proj"};
    BSI_TRY(bs_params_ref(j->params, j->a, &c.lora_a));
    BSI_TRY(bs_params_ref(j->params, j->b, &c.lora_b));
    BSI_TRY(bs_weight_new(j->e, LAYER, bs_manifest_tensor(j->m, LAYER, 0), NULL, &j->norm));
    BSI_TRY(bs_linear_new(j->e, &c, &j->proj));
    return bs_weight_new(j->e, TILE, bs_manifest_tensor(j->m, TILE, 0), NULL, &j->tile);
}

static bs_status job_open(job *j, const bs_dev_cfg *dev, const bsi_aio_fault *fault)
{
    static const bs_home home[] = {BS_HOME_DISK, BS_HOME_DISK};
    static const bs_store_key key[KEYS] = {{"h.0", CHANNELS, BS_DTYPE_F32, BS_STAY_DEVICE},
                                           {"h.1", CHANNELS, BS_DTYPE_F32, BS_STAY_HOST},
                                           {"g", CHANNELS, BS_DTYPE_F32, BS_STAY_DEVICE}};
    bs_batch_cfg bc = {.micros = 1, .tokens = TOKENS, .rows = 2};
    memset(j, 0, sizeof *j);
    BSI_TRY(open_manifest(&j->m));
    BSI_TRY(bs_dev_open("check:cpu", dev, &j->dev));
    bs_placement_cfg pc = {j->m, home, 1, 1, program, VISITS, true};
    BSI_TRY(bs_placement_new(&pc, &j->placement));
    bs_engine_cfg ec = {.dev = j->dev, .pool_bytes = 1 << 20, .n_blocks = 2, .seed = 1};
    ec.expand_bytes = bs_manifest_block(j->m, LAYER)->expand_bytes;
    BSI_TRY(bs_engine_open(&ec, &j->e));
    BSI_TRY(bs_batch_open(j->e, &bc, &j->batch));
    BSI_TRY(bs_store_open(j->e, j->batch, KEYS, key, &j->store));
    bs_io_cfg io = {.engine = fault && fault->refuse_uring ? "auto" : "pool", .threads = 1};
    BSI_TRY(bs_embedding_open(j->e, j->m, 0, BS_HOME_DISK, j->batch, &io, &j->rows));
    BSI_TRY(open_params(j));
    bs_head_cfg hc = {.batch = j->batch, .channels = CHANNELS, .vocab = VOCAB, .tile_rows = VOCAB};
    BSI_TRY(bs_head_open(j->e, &hc, &j->head));
    BSI_TRY(open_weights(j));
    bs_stream_cfg sc = {.engine = j->e, .placement = j->placement, .io = io};
    BSI_TRY(bsi_stream_open_fault(&sc, fault, &j->stream));
    return bs_engine_seal(j->e);
}

static void job_close(job *j)
{
    bs_stream_close(j->stream);
    bs_linear_free(j->proj);
    bs_weight_free(j->norm);
    bs_weight_free(j->tile);
    bs_head_close(j->head);
    bs_params_close(j->params);
    bs_embedding_close(j->rows);
    bs_store_close(j->store);
    bs_batch_close(j->batch);
    bs_engine_close(j->e);
    bs_placement_free(j->placement);
    bs_manifest_free(j->m);
    bs_dev_close(j->dev);
}

/* ---- one step ---------------------------------------------------------------------------------- */

static bs_status scope(job *j, bool tape)
{
    bs_scope_cfg c = {.label = "faults", .batch = j->batch, .tape = tape, .train = true};
    return bs_scope_open(j->e, &c);
}

static bs_status stored(job *j, int key, bs_tensor **out)
{
    bs_place at;
    BSI_TRY(bs_store_get(j->store, key, 0, &at));
    return bs_tensor_at(j->e, &at, out);
}

static bs_status put(job *j, int key, bs_tensor *t)
{
    bs_place at;
    BSI_TRY(bs_tensor_place(t, &at));
    return bs_store_put(j->store, key, 0, &at);
}

/* h.1 = proj(norm(h.0)); with g, its gradients instead. */
static bs_status layer(job *j, bool backward)
{
    bs_tensor *x = NULL, *n = NULL, *y = NULL, *g = NULL;
    bs_status st = scope(j, backward);
    if (st == BS_OK && (st = stored(j, H0, &x)) == BS_OK &&
        (st = bs_op_rmsnorm(x, j->norm, 1e-6, false, &n)) == BS_OK &&
        (st = bs_op_linear(n, j->proj, NULL, &y)) == BS_OK) {
        if (!backward)
            st = put(j, H1, y);
        else if ((st = stored(j, GRAD, &g)) == BS_OK)
            st = bs_scope_backward(j->e, 1, &y, &g);
    }
    bs_scope_close(j->e);
    bs_tensor_release(x);
    bs_tensor_release(n);
    bs_tensor_release(y);
    bs_tensor_release(g);
    return st;
}

static bs_status give_head(job *j)
{
    bs_tensor *x = NULL, *l = NULL;
    BSI_TRY(bs_head_begin(j->head, BS_HEAD_TRAIN, bs_batch_labelled(j->batch, 0)));
    bs_status st = scope(j, false);
    if (st == BS_OK && (st = stored(j, H1, &x)) == BS_OK && (st = bs_op_labelled(x, &l)) == BS_OK)
        st = bs_head_put(j->head, 0, l);
    bs_scope_close(j->e);
    bs_tensor_release(x);
    bs_tensor_release(l);
    return st;
}

static bs_status take_head(job *j)
{
    bs_tensor *x = NULL, *l = NULL, *dl = NULL, *dx = NULL;
    bs_status st = scope(j, true);
    if (st == BS_OK && (st = stored(j, H1, &x)) == BS_OK && (st = bs_tensor_want_grad(x)) == BS_OK &&
        (st = bs_op_labelled(x, &l)) == BS_OK && (st = bs_head_finish(j->head, 0, &dl)) == BS_OK &&
        (st = bs_scope_backward(j->e, 1, &l, &dl)) == BS_OK && (st = bs_tensor_grad(x, &dx)) == BS_OK)
        st = put(j, GRAD, dx);
    bs_scope_close(j->e);
    bs_tensor_release(x);
    bs_tensor_release(l);
    bs_tensor_release(dl);
    bs_tensor_release(dx);
    return st;
}

static bs_status train(job *j)
{
    bs_visit v;
    double norm;
    bs_micro d = {.n_rows = 2, .row_len = row_len, .ids = ids, .labels = ids};
    BSI_TRY(bs_params_zero_grad(j->params));
    BSI_TRY(bs_batch_set(j->batch, 0, &d));
    BSI_TRY(bs_batch_begin(j->batch, 1));
    BSI_TRY(bs_stream_push(j->stream, program, VISITS, true));
    BSI_TRY(bs_embedding_gather(j->rows, j->store, H0, 0, 1));
    BSI_TRY(bs_stream_next(j->stream, &v));
    BSI_TRY(layer(j, false));
    BSI_TRY(bs_stream_next(j->stream, &v));
    BSI_TRY(give_head(j));
    BSI_TRY(bs_head_tile(j->head, 0, j->tile, NULL, 0));
    BSI_TRY(take_head(j));
    BSI_TRY(bs_stream_next(j->stream, &v));
    BSI_TRY(layer(j, true));
    BSI_TRY(bs_stream_end_visit(j->stream));
    BSI_TRY(bs_head_loss(j->head, &j->loss));
    BSI_TRY(bs_params_norm(j->params, &norm));
    bs_adamw o = {.lr = 1e-2, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .clip = 1, .step = 1};
    return bs_params_apply(j->params, &o, norm);
}

/* A step; the hash of the adapter after it. */
static bs_status step(job *j, uint64_t *hash)
{
    bs_array *value = NULL;
    if (!j->applied)
        BSI_TRY(train(j));
    j->applied = true;
    BSI_TRY(bs_params_get(j->params, j->a, &value));
    *hash = bs_hash64(&j->loss, sizeof j->loss, bs_array_hash(value));
    bs_array_free(value);
    return BS_OK;
}

/* ---- tests ------------------------------------------------------------------------------------- */

typedef struct held { /* what must be the same before and after */
    size_t bytes[BS_TAG_COUNT];
    int fds;
} held;

static held snapshot(void)
{
    held h = {.fds = tmpdir_fds()};
    for (int t = 0; t < BS_TAG_COUNT; t++)
        h.bytes[t] = bs_host_bytes((bs_tag)t);
    return h;
}

static void assert_same(const held *before)
{
    held now = snapshot();
    assert_int_equal(now.fds, before->fds);
    for (int t = 0; t < BS_TAG_COUNT; t++)
        if (now.bytes[t] != before->bytes[t])
            fail_msg("%zu bytes of '%s' are left, %zu before", now.bytes[t], bs_tag_name((bs_tag)t),
                     before->bytes[t]);
}

/* The numbers of a step in which nothing fails. */
static uint64_t plain(const bsi_aio_fault *fault)
{
    job j;
    uint64_t hash = 0;
    const char *text = "";
    bs_dev_cfg dev = {.threads = 1};
    if (job_open(&j, &dev, fault) != BS_OK || step(&j, &hash) != BS_OK)
        fail_msg("%s", bs_error()->msg);
    if (bs_dev_violations(j.dev, &text))
        fail_msg("%s", text);
    job_close(&j);
    return hash;
}

static void test_allocations(void **state)
{
    (void)state;
    uint64_t want = plain(NULL), hash = 0, n = 0;
    held before = snapshot();
    bs_dev_cfg dev = {.threads = 1};
    for (bs_status st = BS_NOMEM; st != BS_OK;) {
        job j;
        assert_true(++n < 5000);
        bsi_alloc_fail_nth(n);
        st = job_open(&j, &dev, NULL);
        bool opened = st == BS_OK;
        if (opened)
            st = step(&j, &hash);
        bsi_alloc_fail_nth(0);
        if (st != BS_OK) {
            assert_true(st == BS_NOMEM || st == BS_DEVMEM);
            ASSERT_ERROR("not available");
        }
        if (st != BS_OK && opened) { /* the job that ran out of memory in a step works again */
            assert_int_equal(bs_stream_abort(j.stream), BS_OK);
            assert_int_equal(step(&j, &hash), BS_OK);
        }
        if (opened)
            assert_int_equal(hash, want);
        job_close(&j);
        assert_same(&before);
    }
    assert_true(n > 100);
    assert_int_equal(plain(NULL), want);
}

static void test_device_calls(void **state)
{
    (void)state;
    uint64_t want = plain(NULL), hash = 0;
    held before = snapshot();
    bs_dev_cfg dev = {.threads = 1};
    for (bs_status st = BS_DEVICE; st != BS_OK;) {
        job j;
        assert_true(++dev.fail_call < 5000);
        if ((st = job_open(&j, &dev, NULL)) == BS_OK && (st = step(&j, &hash)) == BS_OK)
            st = bs_engine_wait_all(j.e); /* a copy for the next step may have failed */
        if (st != BS_OK) {
            assert_int_equal(st, BS_DEVICE);
            ASSERT_ERROR("(injected)");
        }
        if (st != BS_OK && j.stream) { /* lost until it is closed */
            assert_int_equal(step(&j, &hash), BS_DEVICE);
            ASSERT_ERROR("(injected)");
        }
        job_close(&j);
        assert_same(&before);
    }
    assert_true(dev.fail_call > 50);
    assert_int_equal(hash, want);
    assert_int_equal(plain(NULL), want);
}

static int64_t no_data(void *ud, const bsi_read *r, int64_t real)
{
    (void)r;
    (void)real;
    return --*(int *)ud == 0 ? -EIO : real;
}

/* A read that the system refuses fails the step; the next one reads again. */
static void test_reads(void **state)
{
    (void)state;
    uint64_t want = plain(NULL), hash;
    held before = snapshot();
    for (int n = 1; n <= VISITS; n++) {
        job j;
        int left = n;
        bsi_aio_fault fault = {.result = no_data, .ud = &left};
        bs_dev_cfg dev = {.threads = 1};
        assert_int_equal(job_open(&j, &dev, &fault), BS_OK);
        if (step(&j, &hash) == BS_OK) { /* fewer reads than visits: the layer may still be there */
            assert_true(left > 0);
        } else {
            assert_int_equal(bs_error()->status, BS_IO);
            ASSERT_ERROR("block '");
            ASSERT_ERROR(model);
            ASSERT_ERROR(" at ");
            assert_int_equal(bs_stream_abort(j.stream), BS_OK);
            assert_int_equal(step(&j, &hash), BS_OK);
        }
        assert_int_equal(hash, want);
        job_close(&j);
        assert_same(&before);
    }
}

static void test_refused_engines(void **state)
{
    (void)state;
    uint64_t want = plain(NULL);
    held before = snapshot();
    bsi_aio_fault uring = {.refuse_uring = true};
    assert_int_equal(plain(&uring), want);
    bsi_file_refuse_direct(true);
    assert_int_equal(plain(NULL), want);
    bsi_file_refuse_direct(false);
    assert_same(&before);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_allocations), cmocka_unit_test(test_device_calls),
        cmocka_unit_test(test_reads), cmocka_unit_test(test_refused_engines)};
    return cmocka_run_group_tests(tests, make_model, tmpdir_close);
}
