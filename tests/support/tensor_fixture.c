/* SPDX-License-Identifier: Apache-2.0 */
#include "tensor_fixture.h"

void fix_ok(bs_status st, const char *call, const char *file, int line)
{
    if (st != BS_OK) {
        print_error("%s\n  %s: %s\n", call, bs_status_name(st), bs_error()->msg);
        _fail(file, line);
    }
}

void fix_open(fixture *f, const char *spec, int64_t tokens)
{
    fix_open_as(f, spec, BS_DTYPE_F32, tokens);
}

void fix_open_as(fixture *f, const char *spec, bs_dtype compute, int64_t tokens)
{
    memset(f, 0, sizeof *f);
    f->random = 1;
    ok(bs_dev_open(spec, &(bs_dev_cfg){.threads = 2}, &f->dev));
    bs_engine_cfg cfg = {.dev = f->dev,
                         .pool_bytes = 8 << 20,
                         .expand_bytes = FIX_EXPAND_BYTES,
                         .n_blocks = 2,
                         .seed = 11,
                         .compute = compute};
    ok(bs_engine_open(&cfg, &f->e));
    ok(bs_batch_open(f->e, &(bs_batch_cfg){.micros = 2, .tokens = tokens, .rows = 4}, &f->batch));
    ok(bsi_pool_region(f->e->pool, "block", FIX_BLOCK_BYTES, &f->block));
    ok(bsi_pool_region(f->e->pool, "params", FIX_PARAM_BYTES, &f->params));
    f->e->binding.visit = "test visit";
    fix_visit(f, true);
}

void fix_seal(fixture *f)
{
    ok(bs_engine_seal(f->e));
}

void fix_close(fixture *f)
{
    const char *text = NULL;
    bs_scope_close(f->e);
    ok(bs_engine_wait_all(f->e));
    int n = bs_dev_violations(f->dev, &text);
    if (n)
        fail_msg("%d violations:\n%s", n, text);
    bs_batch_close(f->batch);
    bs_engine_close(f->e);
    bs_dev_close(f->dev);
}

void fix_rows(fixture *f, int micro, int n_rows, const int64_t *len, const int64_t *row_id)
{
    int64_t ids[256], labels[256], n = 0;
    for (int r = 0; r < n_rows; r++)
        for (int64_t t = 0; t < len[r]; t++, n++) {
            ids[n] = n % 7;
            labels[n] = t % 2 ? n % 5 : -100;
        }
    ok(bs_batch_set(
        f->batch, micro,
        &(bs_micro){.n_rows = n_rows, .row_len = len, .ids = ids, .labels = labels, .row_id = row_id}));
}

void fix_scope(fixture *f, int micro, bool tape, bool train)
{
    ok(bs_scope_open(f->e, &(bs_scope_cfg){.label = "layers.3 test, micro 0",
                                           .batch = f->batch,
                                           .micro = micro,
                                           .tape = tape,
                                           .train = train,
                                           .step = 5}));
}

void fix_visit(fixture *f, bool on)
{
    f->e->binding.base[0] = on ? f->block : (bsi_addr){0};
    f->e->binding.generation++;
}

double fix_random(fixture *f)
{
    uint32_t out[4], key[2] = {7, 9};
    bsi_philox((uint32_t[4]){(uint32_t)f->random++, 0, 0, 0}, key, out);
    return 2.0 * (double)bsi_uniform(out[0]) - 1.0;
}

float *fix_floats(fixture *f, float *v, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        v[i] = (float)fix_random(f);
    return v;
}

static void store(bs_dtype t, float *v, void *to, int64_t i)
{
    if (t == BS_DTYPE_F32) {
        ((float *)to)[i] = v[i];
    } else if (t == BS_DTYPE_BF16) {
        ((uint16_t *)to)[i] = bsi_f32_to_bf16(v[i]);
        v[i] = bsi_bf16_to_f32(((uint16_t *)to)[i]);
    } else {
        ((uint16_t *)to)[i] = bsi_f32_to_f16(v[i]);
        v[i] = bsi_f16_to_f32(((uint16_t *)to)[i]);
    }
}

bs_tensor_info fix_weight(fixture *f, const char *name, bs_dtype t, int ndim, const int64_t *dim,
                          float *v)
{
    static float bytes[1 << 14];
    int64_t n = 1;
    bs_tensor_info info = {
        .name = name, .dtype = t, .ndim = ndim, .expand_offset = UINT64_MAX, .compute = f->e->dtype};
    for (int i = 0; i < ndim; i++)
        n *= info.dim[i] = dim[i];
    info.bytes = (size_t)n * bs_dtype_size(t);
    info.slot_offset = f->block_used;
    f->block_used += bsi_round_up(info.bytes, 256);
    assert_true(f->block_used <= FIX_BLOCK_BYTES && n <= 1 << 14);
    if (t != f->e->dtype) {
        info.expand_offset = f->expand_used;
        f->expand_used += bsi_round_up((size_t)n * bs_dtype_size(f->e->dtype), 256);
    }
    for (int64_t i = 0; i < n; i++)
        store(t, v, bytes, i);
    ok(bsi_engine_write(f->e, bsi_addr_add(f->block, info.slot_offset), bytes, info.bytes));
    return info;
}

bs_tensor_info fix_packed(fixture *f, const char *name, int64_t rows, int64_t cols, float *v)
{
    static const float value[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
    uint8_t blocks[1 << 10], scales[1 << 6];
    int64_t n = rows * cols, groups = n / 32;
    bs_tensor_info info = {.name = name,
                           .dtype = BS_DTYPE_U8,
                           .ndim = 2,
                           .dim = {rows, cols},
                           .bytes = (uint64_t)n / 2,
                           .slot_offset = f->block_used,
                           .expand_offset = f->expand_used,
                           .compute = f->e->dtype,
                           .packing = BS_MXFP4};
    assert_true(cols % 32 == 0 && n / 2 <= (int64_t)sizeof blocks);
    info.scales_offset = info.slot_offset + bsi_round_up(info.bytes, 256);
    f->block_used = info.scales_offset + 256;
    f->expand_used += bsi_round_up((size_t)n * bs_dtype_size(f->e->dtype), 256);
    for (int64_t g = 0; g < groups; g++)
        scales[g] = (uint8_t)(125 + (int)(2.0 * (fix_random(f) + 1.0))); /* a quarter to two */
    memset(blocks, 0, sizeof blocks);
    for (int64_t i = 0; i < n; i++) {
        int code = (int)(8.0 * (fix_random(f) + 1.0));
        blocks[i / 2] = (uint8_t)(blocks[i / 2] | code << (i % 2 * 4));
        v[i] = ldexpf(code & 8 ? -value[code & 7] : value[code & 7], scales[i / 32] - 127);
    }
    ok(bsi_engine_write(f->e, bsi_addr_add(f->block, info.slot_offset), blocks, info.bytes));
    ok(bsi_engine_write(f->e, bsi_addr_add(f->block, info.scales_offset), scales, (size_t)groups));
    return info;
}

bs_place fix_place(fixture *f, int64_t rows, int64_t cols, const float *v)
{
    static const float zero[1 << 12];
    size_t bytes = (size_t)(rows * cols) * sizeof(float);
    bsi_addr at = bsi_addr_add(f->params, f->params_used);
    f->params_used += bsi_round_up(bytes, 256);
    assert_true(f->params_used <= FIX_PARAM_BYTES && bytes <= sizeof zero);
    if (bytes)
        ok(bsi_engine_write(f->e, at, v ? v : zero, bytes));
    return bsi_place(at, BS_DTYPE_F32, rows, rows, cols);
}

void fix_read(fixture *f, const bs_place *p, float *v)
{
    ok(bsi_engine_read(f->e, bsi_place_addr(p), (size_t)(p->rows * p->channels) * sizeof(float), v));
}

bs_tensor *fix_from(fixture *f, int64_t rows, int64_t cols, const float *v)
{
    bs_array *a;
    bs_tensor *t;
    ok(bs_array_new(BS_DTYPE_F32, 2, (int64_t[]){rows, cols}, &a));
    if (a->bytes)
        memcpy(a->data, v, a->bytes);
    ok(bs_tensor_from(f->e, a, &t));
    bs_array_free(a);
    return t;
}

bs_tensor *fix_at(fixture *f, int64_t rows, int64_t cols, const float *v)
{
    bs_tensor *t;
    bs_place p = fix_place(f, f->batch->cfg.tokens, cols, NULL);
    p.rows = rows;
    if (rows)
        ok(bsi_engine_write(f->e, bsi_place_addr(&p), v, (size_t)(rows * cols) * sizeof(float)));
    ok(bs_tensor_at(f->e, &p, &t));
    return t;
}

void fix_values(bs_tensor *t, float *v)
{
    bs_array *a;
    ok(bs_tensor_read(t, &a));
    memcpy(v, a->data, a->bytes);
    bs_array_free(a);
}

size_t fix_arena_peak(const fixture *f)
{
    bs_engine_stats s;
    bs_engine_stats_get(f->e, &s);
    return s.arena_peak;
}

size_t fix_arena_now(const fixture *f)
{
    bs_engine_stats s;
    bs_engine_stats_get(f->e, &s);
    return s.arena_now;
}

uint64_t fix_launches(const fixture *f)
{
    bs_engine_stats s;
    bs_engine_stats_get(f->e, &s);
    return s.launches;
}
