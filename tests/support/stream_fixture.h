/* SPDX-License-Identifier: Apache-2.0 */
/*
** stream_fixture.h: a small model of known bytes on disk, and a walk over it that copies every tensor
** of every visited block, so that a test can compare what a visit saw with what the file holds. Any
** four bytes of the files are a finite, normal f32, so a launch that multiplies by 1 copies bits at
** any offset.
*/
#ifndef STREAM_FIXTURE_H
#define STREAM_FIXTURE_H

#include "stream/stream.h"

#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

#include "tmpdir.h"

enum { FX_BLOCKS = 5, FX_FILE = 96 * 1024, FX_TENSORS = 3, FX_SEGMENTS = 3, FX_MAX_VISITS = 32 };

#define OK(e) fx_ok((e), #e, __FILE__, __LINE__)
static inline void fx_ok(bs_status st, const char *what, const char *file, int line)
{
    if (st != BS_OK)
        print_error("%s: %s: %s\n", what, bs_status_name(st), bs_error()->msg);
    _assert_int_equal((uint64_t)st, BS_OK, file, line);
}

typedef struct fixture {
    unsigned char *bytes[2]; /* of the two files */
    bs_manifest *m;
    bs_visit_spec program[FX_MAX_VISITS];
    int n_visits;
} fixture;

static inline unsigned char fx_byte(int file, size_t i)
{
    uint64_t h = (i + 1 + (uint64_t)file * 1000003u) * 0x9E3779B97F4A7C15u;
    return (unsigned char)(1 + (h >> 40) % 0x7D);
}

static inline const char *fx_path(int file)
{
    return tmpdir_file(file ? "b.bin" : "a.bin");
}

static inline void fx_write(int file, size_t bytes)
{
    unsigned char *p = malloc(FX_FILE);
    assert_non_null(p);
    for (size_t i = 0; i < FX_FILE; i++)
        p[i] = fx_byte(file, i);
    tmpdir_put(file ? "b.bin" : "a.bin", p, bytes);
    free(p);
}

/* Blocks of unequal size at odd offsets, tensors out of file order, spread over two files; the last
   block shares a tensor with the first. */
static inline void fx_open(fixture *f)
{
    int file[2], at;
    memset(f, 0, sizeof *f);
    fx_write(0, FX_FILE);
    fx_write(1, FX_FILE - 100); /* the end is not aligned */
    OK(bs_manifest_new(&f->m));
    OK(bs_manifest_add_file(f->m, fx_path(0), &file[0]));
    OK(bs_manifest_add_file(f->m, fx_path(1), &file[1]));
    for (int b = 0; b < FX_BLOCKS; b++) {
        char name[16];
        snprintf(name, sizeof name, "layer.%d", b);
        OK(bs_manifest_add_block(f->m, name, "layer", &at));
        int64_t big = 3000 + 700 * b, small = 17 + b;
        uint64_t base = 11 + (uint64_t)b * 17000;
        OK(bs_manifest_add_tensor(f->m, b, "big", BS_DTYPE_F32, 1, &big, file[b % 2], base + 600, &at));
        OK(bs_manifest_add_tensor(f->m, b, "small", BS_DTYPE_F32, 1, &small, file[b % 2], base, &at));
        int64_t far = 1200;
        uint64_t far_at =
            b == FX_BLOCKS - 1 ? 90000 : 90000 + 200 * (uint64_t)b; /* tied: first and last */
        OK(bs_manifest_add_tensor(f->m, b, "far", BS_DTYPE_F32, 1, &far,
                                  file[b == FX_BLOCKS - 1 ? 1 : (b + 1) % 2], far_at, &at));
    }
    OK(bs_manifest_finish(f->m));
    for (int b = 0; b < FX_BLOCKS; b++)
        f->program[f->n_visits++] = (bs_visit_spec){.block = b, .kind = 1, .layer = b};
    for (int b = FX_BLOCKS - 1; b >= 0; b--)
        f->program[f->n_visits++] = (bs_visit_spec){.block = b, .kind = 2, .layer = b};
}

static inline void fx_close(fixture *f)
{
    bs_manifest_free(f->m);
}

typedef struct run_cfg {
    const char *spec;
    uint64_t seed;
    unsigned jitter_us;
    const char *drop;
    const bs_home *home;
    int dev_slots, host_slots;
    const char *io;
    size_t request;
    const bsi_aio_fault *fault;
    bool no_direct;
} run_cfg;

typedef struct run {
    bs_dev *dev;
    bs_engine *e;
    bs_placement *placement;
    bs_stream *s;
    bsi_addr seen; /* [segments][visits][slot] */
    size_t slot;
    int next; /* result place of the next visit */
} run;

static inline size_t fx_slot(const fixture *f)
{
    size_t most = 0;
    for (int b = 0; b < bs_manifest_blocks(f->m); b++)
        most = BSI_MAX(most, bs_manifest_block(f->m, b)->slot_bytes);
    return most;
}

static inline void run_open(run *r, const fixture *f, const run_cfg *c)
{
    memset(r, 0, sizeof *r);
    bs_dev_cfg dc = {
        .threads = 1, .jitter_us = c->jitter_us, .jitter_seed = c->seed, .drop_wait = c->drop};
    OK(bs_dev_open(c->spec, &dc, &r->dev));
    bs_placement_cfg pc = {.manifest = f->m,
                           .home = c->home,
                           .dev_slots = c->dev_slots,
                           .host_slots = c->host_slots,
                           .program = f->program,
                           .n_visits = f->n_visits,
                           .cyclic = true};
    OK(bs_placement_new(&pc, &r->placement));
    r->slot = fx_slot(f);
    size_t results = r->slot * (size_t)f->n_visits * FX_SEGMENTS;
    bs_engine_cfg ec = {.dev = r->dev,
                        .pool_bytes = results + bs_placement_device_bytes(r->placement),
                        .n_blocks = bs_manifest_blocks(f->m)};
    OK(bs_engine_open(&ec, &r->e));
    OK(bsi_pool_region(r->e->pool, "results", results, &r->seen));
    bs_engine_stats before, after;
    bs_engine_stats_get(r->e, &before);
    bs_stream_cfg sc = {.engine = r->e,
                        .placement = r->placement,
                        .io = {.engine = c->io,
                               .depth = 8,
                               .threads = 2,
                               .request_bytes = c->request,
                               .no_direct = c->no_direct}};
    OK(bsi_stream_open_fault(&sc, c->fault, &r->s));
    bs_engine_stats_get(r->e, &after);
    assert_int_equal(after.fixed_bytes - before.fixed_bytes, bs_placement_device_bytes(r->placement));
}

static inline void run_close(run *r)
{
    bs_stream_close(r->s);
    bs_engine_close(r->e);
    bs_placement_free(r->placement);
    bs_dev_close(r->dev);
}

/* One visit: every tensor of its block, through the binding, to the visit's place. */
static inline bs_status run_visit(run *r, const fixture *f, bs_visit *v)
{
    BSI_TRY(bs_stream_next(r->s, v));
    bsi_addr base = r->e->binding.base[v->spec.block];
    assert_non_null(base.mem);
    assert_int_equal(base.off % 256, 0);
    for (int t = 0; t < FX_TENSORS; t++) {
        const bs_tensor_info *info = bs_manifest_tensor(f->m, v->spec.block, t);
        bsi_kcall call = {.op = BSK_SCALE, .n_args = 2, .label = "test: copy"};
        size_t at = r->slot * (size_t)r->next + info->slot_offset;
        call.arg[0] = (bsi_arg){bsi_addr_add(base, info->slot_offset), info->bytes, BSI_READ};
        call.arg[1] = (bsi_arg){bsi_addr_add(r->seen, at), info->bytes, BSI_WRITE};
        call.n[0] = (int64_t)(info->bytes / 4);
        call.f[0] = 1;
        BSI_TRY(bsi_engine_launch(r->e, &call));
    }
    r->next++;
    return BS_OK;
}

static inline bs_status run_segment(run *r, const fixture *f)
{
    BSI_TRY(bs_stream_push(r->s, f->program, f->n_visits, true));
    for (int i = 0; i < f->n_visits; i++) {
        bs_visit v;
        BSI_TRY(run_visit(r, f, &v));
        assert_int_equal(v.spec.block, f->program[i].block);
        assert_int_equal(v.spec.kind, f->program[i].kind);
    }
    return bs_stream_end_visit(r->s);
}

/* Number of visits whose bytes differ from the files'. */
static inline int run_wrong(run *r, const fixture *f)
{
    int wrong = 0;
    unsigned char *got = malloc(r->slot);
    assert_non_null(got);
    for (int i = 0; i < r->next; i++) {
        int block = f->program[i % f->n_visits].block;
        bool same = true;
        OK(bsi_engine_read(r->e, bsi_addr_add(r->seen, r->slot * (size_t)i), r->slot, got));
        for (int t = 0; t < FX_TENSORS; t++) {
            const bs_tensor_info *info = bs_manifest_tensor(f->m, block, t);
            for (size_t k = 0; k < info->bytes; k++)
                same = same && got[info->slot_offset + k] == fx_byte(info->file, info->file_offset + k);
        }
        wrong += !same;
    }
    free(got);
    return wrong;
}

static inline void assert_moved(const bs_stream_stats *a, const bs_stream_stats *b,
                                const bs_edge_bytes *want)
{
    assert_int_equal(b->disk_payload - a->disk_payload, want->disk_payload);
    assert_int_equal((b->disk_read - b->disk_reread) - (a->disk_read - a->disk_reread),
                     want->disk_read);
    assert_int_equal(b->link_bytes - a->link_bytes, want->link);
    assert_int_equal(b->loads - a->loads, want->loads);
    assert_int_equal(b->reads - a->reads, want->reads);
}

/* Three segments; bytes of each equal the prediction; every visit saw the file's bytes. Returns the
   number of violations that a check device found. */
static inline int fx_run(const fixture *f, const run_cfg *c, const char **text)
{
    static char kept[4096];
    run r;
    run_open(&r, f, c);
    for (int k = 0; k < FX_SEGMENTS; k++) {
        bs_stream_stats before, after;
        bs_edge_bytes want;
        bs_stream_stats_get(r.s, &before);
        OK(run_segment(&r, f));
        bs_stream_stats_get(r.s, &after);
        bs_placement_bytes(r.placement, k > 0, &want);
        assert_moved(&before, &after, &want);
        assert_int_equal(after.hits - before.hits, (uint64_t)f->n_visits - want.loads);
    }
    if (!c->drop)
        assert_int_equal(run_wrong(&r, f), 0);
    OK(bs_engine_wait_all(r.e));
    bs_stream_stats end;
    bsi_stream_pump(r.s); /* the memory of a placement without host slots is given back here */
    bs_stream_stats_get(r.s, &end);
    assert_int_equal(end.host_bytes, bs_placement_host_bytes(r.placement));
    const char *t = "";
    int n = bs_dev_violations(r.dev, &t);
    snprintf(kept, sizeof kept, "%s", t ? t : "");
    *text = kept;
    run_close(&r);
    return n;
}

#endif
