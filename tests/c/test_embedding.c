/* SPDX-License-Identifier: Apache-2.0 */
/* Row tables: gathered rows are the file's, predicted bytes are the read ones, bad ids and reads are
 * named. */
#include "stream_fixture.h"

enum { ROWS = 400, COLS = 24, CAP = 64, MICROS = 2, AT = 1001 };

static bs_manifest *m;
static int f32_table, bf16_table;

static int setup(void **state)
{
    int file, block, at;
    int64_t n = 8;
    if (tmpdir_open(state) != 0)
        return -1;
    fx_write(0, FX_FILE);
    OK(bs_manifest_new(&m));
    OK(bs_manifest_add_file(m, fx_path(0), &file));
    OK(bs_manifest_add_block(m, "norm", "norm", &block));
    OK(bs_manifest_add_tensor(m, block, "w", BS_DTYPE_F32, 1, &n, file, 0, &at));
    OK(bs_manifest_add_row_table(m, "embed", BS_DTYPE_F32, ROWS, COLS, file, AT, &f32_table));
    OK(bs_manifest_add_row_table(m, "embed16", BS_DTYPE_BF16, ROWS, COLS, file, AT + 50000,
                                 &bf16_table));
    OK(bs_manifest_finish(m));
    return 0;
}

static int teardown(void **state)
{
    bs_manifest_free(m);
    return tmpdir_close(state);
}

typedef struct box {
    bs_dev *dev;
    bs_engine *e;
    bs_batch *b;
    bs_store *s;
    bs_embedding *r;
    bsi_addr acc;
    int table;
    int64_t ids[MICROS][CAP];
    int64_t n[MICROS];
} box;

static void box_open_as(box *x, const char *spec, int table, bs_dtype type, bs_home home,
                        const bs_io_cfg *io)
{
    const bs_store_key key = {"h.0", COLS, type, BS_STAY_DEVICE};
    size_t store, rows, host, acc = ROWS * COLS * sizeof(float);
    memset(x, 0, sizeof *x);
    x->table = table;
    bs_batch_cfg bc = {MICROS, CAP, 4};
    bs_dev_cfg dc = {.threads = 1};
    OK(bs_dev_open(spec, &dc, &x->dev));
    OK(bs_store_bytes(&bc, 1, &key, &store, &host));
    OK(bs_embedding_bytes(m, table, home, &bc, &rows, &host));
    bs_engine_cfg ec = {
        .dev = x->dev, .pool_bytes = store + rows + bsi_round_up(acc, 256) + 8192, .n_blocks = 1};
    OK(bs_engine_open(&ec, &x->e));
    OK(bs_batch_open(x->e, &bc, &x->b));
    OK(bs_store_open(x->e, x->b, 1, &key, &x->s));
    OK(bsi_pool_region(x->e->pool, "acc", acc, &x->acc));
    bs_engine_stats before, after;
    bs_embedding_stats st;
    size_t accounted = bs_host_bytes(BS_TAG_ROWS);
    bs_engine_stats_get(x->e, &before);
    OK(bs_embedding_open(x->e, m, table, home, x->b, io, &x->r));
    bs_engine_stats_get(x->e, &after);
    bs_embedding_stats_get(x->r, &st);
    assert_int_equal(after.fixed_bytes - before.fixed_bytes, rows);
    assert_int_equal(st.host_bytes, host);
    if (x->e->props.executes)
        assert_int_equal(bs_host_bytes(BS_TAG_ROWS) - accounted, host);
}

static void box_open(box *x, const char *spec, int table, bs_home home, const bs_io_cfg *io)
{
    box_open_as(x, spec, table, BS_DTYPE_F32, home, io);
}

static void box_close(box *x)
{
    bs_embedding_close(x->r);
    bs_store_close(x->s);
    bs_batch_close(x->b);
    bs_engine_close(x->e);
    bs_dev_close(x->dev);
}

static void set_ids(box *x, int micro, int64_t n, const int64_t *ids)
{
    x->n[micro] = n;
    memcpy(x->ids[micro], ids, (size_t)n * sizeof *ids);
    OK(bs_batch_set(x->b, micro, &(bs_micro){.n_rows = 1, .row_len = &n, .ids = ids}));
}

static float stored(int table, int64_t row, int64_t col)
{
    size_t size = table == f32_table ? 4 : 2;
    size_t at = (table == f32_table ? AT : AT + 50000) + (size_t)(row * COLS + col) * size;
    unsigned char p[4] = {0};
    for (size_t i = 0; i < size; i++)
        p[i + 4 - size] = fx_byte(0, at + i); /* bf16 is the upper half of an f32 */
    float v;
    memcpy(&v, p, sizeof v);
    return v;
}

static void assert_gathered(box *x, int micro, float scale)
{
    bs_array *a;
    OK(bs_store_read(x->s, 0, micro, &a));
    assert_int_equal(a->dim[0], x->n[micro]);
    const float *got = a->data;
    for (int64_t t = 0; t < x->n[micro]; t++)
        for (int64_t c = 0; c < COLS; c++) {
            float want = stored(x->table, x->ids[micro][t], c) * scale;
            if (memcmp(&got[t * COLS + c], &want, sizeof want) != 0)
                fail_msg("token %lld, column %lld", (long long)t, (long long)c);
        }
    bs_array_free(a);
}

static void gather_rounds(const char *spec, int table, bs_home home, const bs_io_cfg *io)
{
    box x;
    uint32_t seed = 3;
    box_open(&x, spec, table, home, io);
    for (int round = 0; round < 6; round++) {
        int64_t ids[CAP];
        int micro = round % MICROS, n = round == 4 ? CAP : 1 + round * 9;
        uint64_t payload, read;
        for (int t = 0; t < n; t++, seed = seed * 1664525u + 1013904223u)
            ids[t] = t == 0 ? ROWS - 1 : round == 3 ? 7 : (int64_t)(seed >> 8) % ROWS;
        set_ids(&x, micro, n, ids);
        bs_embedding_stats before, after;
        OK(bs_embedding_predict(x.r, micro, &payload, &read));
        bs_embedding_stats_get(x.r, &before);
        OK(bs_embedding_gather(x.r, x.s, 0, micro, round ? 2.5 : 1.0));
        bs_embedding_stats_get(x.r, &after);
        assert_int_equal(after.payload - before.payload, payload);
        assert_int_equal(after.read - before.read, read);
        assert_int_equal(payload > 0, home == BS_HOME_DISK);
        if (round == 3) /* the last row and one other, however often */
            assert_true(home == BS_HOME_RAM ||
                        payload ==
                            2 * COLS *
                                bs_dtype_size(x.table == f32_table ? BS_DTYPE_F32 : BS_DTYPE_BF16));
        if (x.e->props.executes)
            assert_gathered(&x, micro, round ? 2.5f : 1.0f);
    }
    const char *text = "";
    if (bs_dev_violations(x.dev, &text))
        fail_msg("%s", text);
    box_close(&x);
}

static void test_gather(void **state)
{
    (void)state;
    const bs_io_cfg io[] = {{.engine = "pool", .threads = 2, .request_bytes = 4096},
                            {.engine = "auto", .depth = 3},
                            {.engine = "pool", .no_direct = true}};
    for (size_t i = 0; i < BSI_COUNT(io); i++)
        for (int home = BS_HOME_DISK; home <= BS_HOME_RAM; home++) {
            gather_rounds("check:cpu", f32_table, (bs_home)home, &io[i]);
            gather_rounds("cpu", bf16_table, (bs_home)home, &io[i]);
        }
    gather_rounds("meta", f32_table, BS_HOME_DISK, NULL);
    gather_rounds("meta", f32_table, BS_HOME_RAM, NULL);
}

static void test_bad_ids(void **state)
{
    (void)state;
    box x;
    uint64_t payload, read;
    box_open(&x, "cpu", f32_table, BS_HOME_DISK, NULL);
    set_ids(&x, 1, 3, (const int64_t[]){0, ROWS, 2});
    assert_int_equal(bs_embedding_gather(x.r, x.s, 0, 1, 1), BS_ARG);
    ASSERT_ERROR("micro-batch 1, token 1: id 400 is outside the table 'embed' of 400 rows");
    assert_int_equal(bs_embedding_predict(x.r, 1, &payload, &read), BS_ARG);
    assert_int_equal(bs_embedding_gather(x.r, x.s, 0, MICROS, 1), BS_ARG);
    assert_int_equal(bs_embedding_gather(x.r, x.s, 1, 0, 1), BS_ARG);
    set_ids(&x, 1, 1, (const int64_t[]){5});
    OK(bs_embedding_gather(x.r, x.s, 0, 1, 1)); /* usable afterwards */
    assert_gathered(&x, 1, 1);
    bs_embedding *none;
    assert_int_equal(bs_embedding_open(x.e, m, 9, BS_HOME_RAM, x.b, NULL, &none), BS_ARG);
    assert_int_equal(bs_embedding_open(x.e, m, f32_table, BS_HOME_GPU, x.b, NULL, &none), BS_ARG);
    ASSERT_ERROR("'embed'");
    box_close(&x);
}

static void test_changed_file(void **state)
{
    (void)state;
    box x;
    box_open(&x, "cpu", bf16_table, BS_HOME_DISK, NULL);
    set_ids(&x, 0, 1, (const int64_t[]){ROWS - 1});
    OK(bs_embedding_gather(x.r, x.s, 0, 0, 1));
    assert_int_equal(truncate(fx_path(0), 20000), 0);
    assert_int_equal(bs_embedding_gather(x.r, x.s, 0, 0, 1), BS_IO);
    ASSERT_ERROR(fx_path(0));
    box_close(&x);
    bs_manifest_free(m);
    fx_write(0, FX_FILE); /* for whoever comes next */
    m = NULL;
}

static void test_grad(void **state)
{
    (void)state;
    static float dy[4 * COLS], got[ROWS * COLS];
    const int64_t ids[] = {3, 9, 3, ROWS - 1};
    box x;
    box_open(&x, "check:cpu", f32_table, BS_HOME_RAM, NULL);
    set_ids(&x, 0, 4, ids);
    for (int i = 0; i < 4 * COLS; i++)
        dy[i] = (float)(i + 1);
    OK(bsi_fill(x.e->compute, x.acc, 0, sizeof got));
    OK(bs_store_zero(x.s, 0, 0));
    bs_place at, acc = bsi_place(x.acc, BS_DTYPE_F32, ROWS, ROWS, COLS);
    OK(bs_store_get(x.s, 0, 0, &at));
    OK(bsi_engine_write(x.e, bsi_place_addr(&at), dy, sizeof dy));
    for (int step = 0; step < 2; step++)
        OK(bs_embedding_grad(x.r, x.s, 0, 0, 0.5, &acc));
    OK(bsi_engine_read(x.e, x.acc, sizeof got, got));
    for (int64_t row = 0; row < ROWS; row++)
        for (int c = 0; c < COLS; c++) {
            float want = 0;
            for (int t = 0; t < 4; t++)
                want += ids[t] == row ? dy[t * COLS + c] : 0; /* two steps of one half */
            assert_true(got[row * COLS + c] == want);
        }
    acc.rows = ROWS - 1;
    assert_int_equal(bs_embedding_grad(x.r, x.s, 0, 0, 0.5, &acc), BS_SHAPE);
    assert_int_equal(bs_dev_violations(x.dev, NULL), 0);
    box_close(&x);
}

/* A key of bf16 gets rounded rows; its gradient is scattered by devices that compute in bf16. */
static void test_bf16_key(void **state)
{
    (void)state;
    const int64_t ids[] = {3, 0, ROWS - 1, 3};
    for (int k = 0; k < 2; k++) {
        box x;
        bs_array *a;
        box_open_as(&x, "check:cpu", k ? bf16_table : f32_table, BS_DTYPE_BF16, BS_HOME_RAM, NULL);
        set_ids(&x, 0, 4, ids);
        OK(bs_batch_begin(x.b, 1));
        OK(bs_embedding_gather(x.r, x.s, 0, 0, 0.75));
        OK(bs_store_read(x.s, 0, 0, &a));
        const float *got = a->data;
        for (int i = 0; i < 4 * COLS; i++) {
            uint16_t want = bsi_f32_to_bf16(0.75f * stored(x.table, ids[i / COLS], i % COLS));
            assert_int_equal(bsi_f32_to_bf16(got[i]), want);
        }
        bs_array_free(a);
        bs_place acc = bsi_place(x.acc, BS_DTYPE_F32, ROWS, ROWS, COLS);
        assert_int_equal(bs_embedding_grad(x.r, x.s, 0, 0, 1, &acc), BS_UNSUPPORTED);
        assert_non_null(strstr(bs_error()->msg, "'scatter_rows' takes f32, not bf16"));
        assert_int_equal(bs_dev_violations(x.dev, NULL), 0);
        box_close(&x);
    }
    box x;
    box_open_as(&x, "cpu", f32_table, BS_DTYPE_F16, BS_HOME_RAM, NULL);
    set_ids(&x, 0, 4, ids);
    assert_int_equal(bs_embedding_gather(x.r, x.s, 0, 0, 1), BS_SHAPE);
    assert_non_null(strstr(bs_error()->msg, "gives f32 or bf16, key 'h.0' holds f16"));
    box_close(&x);
}

static void test_no_memory(void **state)
{
    (void)state;
    bs_dev *dev;
    bs_engine *e;
    bs_batch *b;
    bs_batch_cfg bc = {MICROS, CAP, 4};
    OK(bs_dev_open("cpu", NULL, &dev));
    bs_engine_cfg ec = {.dev = dev, .pool_bytes = 4 << 20};
    OK(bs_engine_open(&ec, &e));
    OK(bs_batch_open(e, &bc, &b));
    for (int home = BS_HOME_DISK; home <= BS_HOME_RAM; home++) {
        bs_status st = BS_NOMEM;
        for (uint64_t n = 1; st != BS_OK; n++) {
            bs_embedding *r;
            bsi_alloc_fail_nth(n);
            st = bs_embedding_open(e, m, f32_table, (bs_home)home, b, &(bs_io_cfg){.engine = "pool"},
                                   &r);
            bsi_alloc_fail_nth(0);
            if (st == BS_OK)
                bs_embedding_close(r);
            else
                assert_int_equal(st, BS_NOMEM);
        }
    }
    bs_batch_close(b);
    bs_engine_close(e);
    bs_dev_close(dev);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gather),    cmocka_unit_test(test_bad_ids),
        cmocka_unit_test(test_grad),      cmocka_unit_test(test_bf16_key),
        cmocka_unit_test(test_no_memory), cmocka_unit_test(test_changed_file)};
    return cmocka_run_group_tests(tests, setup, teardown);
}
