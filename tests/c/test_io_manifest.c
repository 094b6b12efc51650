/* SPDX-License-Identifier: Apache-2.0 */
/* Manifest: extents, the two layouts, what the builder refuses, digest, JSON and damaged JSON. */
#include "base/base.h"
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "io/io.h"
#include "tmpdir.h"

enum { BYTES = 100000 };

static const char *data_file(const char *name)
{
    static unsigned char buf[BYTES];
    struct stat st;
    if (stat(tmpdir_file(name), &st) == 0 && st.st_size == BYTES)
        return tmpdir_file(name); /* writing it again would be a change under those who use it */
    return tmpdir_put(name, buf, sizeof buf);
}

static int tensor(bs_manifest *m, int block, const char *name, bs_dtype t, int64_t n, int file,
                  uint64_t at)
{
    int i;
    if (bs_manifest_add_tensor(m, block, name, t, 1, &n, file, at, &i) != BS_OK)
        fail_msg("%s", bs_error()->msg);
    return i;
}

/* Two files, block 0 with tensors that touch, overlap in aligned pieces and lie apart; block 1 in both.
 */
static bs_manifest *sample(void)
{
    bs_manifest *m;
    int a, b, again, i;
    assert_int_equal(bs_manifest_new(&m), BS_OK);
    assert_int_equal(bs_manifest_add_file(m, data_file("a"), &a), BS_OK);
    assert_int_equal(bs_manifest_add_file(m, data_file("b"), &b), BS_OK);
    assert_int_equal(bs_manifest_add_file(m, tmpdir_file("a"), &again), BS_OK);
    assert_int_equal(again, a);
    assert_int_equal(bs_manifest_add_block(m, "layer 0", "layer", &i), BS_OK);
    assert_int_equal(bs_manifest_add_block(m, "layer \"1\"", "mix", &i), BS_OK);
    assert_int_equal(i, 1);
    tensor(m, 0, "q", BS_DTYPE_BF16, 1001, a, 5001); /* odd address */
    tensor(m, 0, "norm", BS_DTYPE_F32, 3, a, 99988); /* the last bytes of the file */
    tensor(m, 0, "k", BS_DTYPE_F16, 1, a, 4605);
    tensor(m, 1, "x", BS_DTYPE_F32, 100, b, 0);
    tensor(m, 1, "y", BS_DTYPE_BF16, 100, a, 0);
    tensor(m, 1, "z", BS_DTYPE_BF16, 100, b, 50000);
    assert_int_equal(bs_manifest_add_row_table(m, "embed", BS_DTYPE_BF16, 10, 8, b, 7, &i), BS_OK);
    return m;
}

/* The extents by definition: every tensor inside its own, all aligned, none touching its neighbour. */
static void check_extents(const bs_manifest *m, int block, size_t align)
{
    const bs_block_info *b = bs_manifest_block(m, block);
    uint64_t end = 0;
    for (int i = 0; i < b->n_extents; i++) {
        const bsi_extent *e = bsi_manifest_extent(m, block, i),
                         *n = bsi_manifest_extent(m, block, i + 1);
        assert_int_equal(e->offset % align, 0);
        assert_int_equal(e->length % align, 0);
        assert_int_equal(e->raw_offset % 4096, 0);
        assert_true(e->raw_offset >= end);
        assert_true(e->offset + e->length < bsi_manifest_file(m, e->file)->bytes + align);
        end = e->raw_offset + e->length;
        if (n && n->file == e->file)
            assert_true(n->offset > e->offset + e->length);
    }
    assert_int_equal(b->raw_bytes, bsi_round_up(end, 4096));
    for (int i = 0; i < b->n_tensors; i++) {
        const bs_tensor_info *t = bs_manifest_tensor(m, block, i);
        const bsi_extent *e = bsi_manifest_extent(m, block, bsi_manifest_tensor_extent(m, block, i));
        assert_int_equal(e->file, t->file);
        assert_true(t->file_offset >= e->offset);
        assert_true(t->file_offset + t->bytes <= e->offset + e->length);
    }
}

static void test_layout(void **state)
{
    (void)state;
    bs_manifest *m = sample();
    assert_int_equal(bs_manifest_finish(m), BS_OK);
    size_t align = bs_manifest_alignment(m);
    assert_true(align >= 512);
    check_extents(m, 0, align);
    check_extents(m, 1, align);
    const bs_block_info *b = bs_manifest_block(m, 0);
    assert_int_equal(b->n_extents, 2);
    assert_int_equal(bsi_manifest_tensor_extent(m, 0, 0), 0);
    assert_int_equal(bsi_manifest_tensor_extent(m, 0, 1), 1);
    assert_int_equal(bsi_manifest_tensor_extent(m, 0, 2), 0);
    assert_int_equal(b->payload_bytes, 2002 + 12 + 2);
    const bs_tensor_info *q = bs_manifest_tensor(m, 0, 0), *n = bs_manifest_tensor(m, 0, 1);
    const bs_tensor_info *k = bs_manifest_tensor(m, 0, 2);
    assert_int_equal(q->slot_offset, 0);
    assert_int_equal(n->slot_offset, 2048);
    assert_int_equal(k->slot_offset, 2304);
    assert_int_equal(b->slot_bytes, 2560);
    assert_int_equal(q->expand_offset, 0);
    assert_true(n->expand_offset == UINT64_MAX);
    assert_int_equal(k->expand_offset, 4096); /* 4004 rounded up */
    assert_int_equal(b->expand_bytes, 4352);
    assert_int_equal(bs_manifest_block(m, 1)->n_extents, 3);
    bs_tensor_info part;
    assert_int_equal(bs_tensor_info_rows(q, 2, 3, &part), BS_OK);
    assert_int_equal(part.dim[0], 3);
    assert_int_equal(part.bytes, 3 * (q->bytes / (uint64_t)q->dim[0]));
    assert_int_equal(part.slot_offset, 2 * (q->bytes / (uint64_t)q->dim[0]));
    assert_int_equal(part.expand_offset, 2 * part.slot_offset); /* bf16 rows as f32 */
    assert_int_equal(part.file_offset, q->file_offset + part.slot_offset);
    assert_int_equal(bs_tensor_info_rows(q, q->dim[0] - 1, 2, &part), BS_SHAPE);
    assert_int_equal(bs_tensor_info_rows(q, -1, 1, &part), BS_SHAPE);
    assert_int_equal(bs_tensor_info_rows(q, 0, 0, &part), BS_SHAPE);
    assert_int_equal(bs_manifest_find_tensor(m, 0, "k"), 2);
    assert_int_equal(bs_manifest_find_tensor(m, 0, "x"), -1);
    assert_int_equal(bs_manifest_find_tensor(m, 9, "x"), -1);
    assert_null(bs_manifest_block(m, 2));
    assert_null(bs_manifest_tensor(m, 0, 3));
    assert_null(bsi_manifest_extent(m, 0, 2));
    assert_null(bsi_manifest_rows(m, 1));
    assert_int_equal(bsi_manifest_rows(m, 0)->cols, 8);
    int i;
    assert_int_equal(bs_manifest_add_block(m, "late", "layer", &i), BS_STATE);
    assert_int_equal(bs_manifest_finish(m), BS_STATE);
    bs_manifest_free(m);
}

/* What is stored in the compute dtype needs no place; all else, f32 too, one of the compute dtype's size. */
static void test_compute(void **state)
{
    (void)state;
    bs_manifest *m = sample();
    assert_int_equal(bs_manifest_compute(m, BS_DTYPE_I32), BS_DTYPE);
    assert_non_null(strstr(bs_error()->msg, "nothing computes in i32"));
    assert_int_equal(bs_manifest_compute(m, BS_DTYPE_BF16), BS_OK);
    assert_int_equal(bs_manifest_finish(m), BS_OK);
    const bs_tensor_info *t;
    for (int pass = 0; pass < 2; pass++) {
        bs_dtype compute = pass ? BS_DTYPE_F32 : BS_DTYPE_BF16;
        uint64_t digest = bs_manifest_digest(m);
        if (pass) /* a finished one too: the same as if it had been asked for at first */
            assert_int_equal(bs_manifest_compute(m, compute), BS_OK);
        assert_true(bs_manifest_digest(m) == digest);
        for (int b = 0; b < bs_manifest_blocks(m); b++) {
            uint64_t at = 0;
            for (int i = 0; (t = bs_manifest_tensor(m, b, i)); i++) {
                assert_int_equal(t->compute, compute);
                assert_true(t->expand_offset == (t->dtype == compute ? UINT64_MAX : at));
                uint64_t bytes = t->bytes / bs_dtype_size(t->dtype) * bs_dtype_size(compute);
                at += t->dtype == compute ? 0 : (bytes + 255) / 256 * 256;
            }
            assert_int_equal(bs_manifest_block(m, b)->expand_bytes, at);
        }
    }
    bs_manifest_free(m);
}

/* Buffered files use extents of 4096, and nothing else changes. */
static void test_buffered(void **state)
{
    (void)state;
    bs_manifest *m = sample();
    assert_int_equal(bs_manifest_finish(m), BS_OK);
    uint64_t digest = bs_manifest_digest(m);
    bs_manifest_free(m);
    bsi_file_refuse_direct(true);
    m = sample();
    assert_int_equal(bs_manifest_finish(m), BS_OK);
    bsi_file_refuse_direct(false);
    assert_false(bsi_manifest_file(m, 0)->direct);
    assert_int_equal(bs_manifest_alignment(m), 4096);
    check_extents(m, 0, 4096);
    check_extents(m, 1, 4096);
    const bsi_extent *e = bsi_manifest_extent(m, 0, 0);
    assert_int_equal(e->offset, 4096);
    assert_int_equal(e->length, 4096);
    assert_true(bs_manifest_digest(m) == digest);
    bs_manifest_free(m);
}

static void test_refused(void **state)
{
    (void)state;
    bs_manifest *m = sample();
    int64_t one = 1, zero = 0, huge[2] = {INT64_MAX, INT64_MAX}, many = 25001;
    int i;
    assert_int_equal(bs_manifest_add_file(m, tmpdir_file("absent"), &i), BS_IO);
    ASSERT_ERROR("absent");
    assert_int_equal(bs_manifest_add_file(m, tmpdir_path, &i), BS_IO);
    assert_int_equal(bs_manifest_add_block(m, "", "layer", &i), BS_ARG);
    assert_int_equal(bs_manifest_add_block(m, "\xFF", "layer", &i), BS_ARG);
    assert_int_equal(bs_manifest_add_tensor(m, 7, "n", BS_DTYPE_F32, 1, &one, 0, 0, &i), BS_ARG);
    assert_int_equal(bs_manifest_add_tensor(m, 0, "q", BS_DTYPE_F32, 1, &one, 0, 0, &i), BS_ARG);
    ASSERT_ERROR("has a tensor 'q' already");
    assert_int_equal(bs_manifest_add_tensor(m, 0, "n", BS_DTYPE_I64, 1, &one, 0, 0, &i), BS_DTYPE);
    ASSERT_ERROR("'n' is stored as i64");
    assert_int_equal(bs_manifest_add_tensor(m, 0, "n", BS_DTYPE_F32, 1, &zero, 0, 0, &i), BS_SHAPE);
    assert_int_equal(bs_manifest_add_tensor(m, 0, "n", BS_DTYPE_F32, 2, huge, 0, 0, &i), BS_SHAPE);
    assert_int_equal(bs_manifest_add_tensor(m, 0, "n", BS_DTYPE_F32, 9, huge, 0, 0, &i), BS_SHAPE);
    assert_int_equal(bs_manifest_add_tensor(m, 0, "n", BS_DTYPE_F32, 1, &one, 2, 0, &i), BS_ARG);
    assert_int_equal(bs_manifest_add_tensor(m, 0, "n", BS_DTYPE_F32, 1, &one, 0, BYTES - 3, &i),
                     BS_ARG);
    ASSERT_ERROR("has 100000");
    assert_int_equal(bs_manifest_add_tensor(m, 0, "n", BS_DTYPE_F32, 1, &one, 0, UINT64_MAX, &i),
                     BS_ARG);
    assert_int_equal(bs_manifest_add_tensor(m, 0, "n", BS_DTYPE_F32, 1, &many, 0, 0, &i), BS_ARG);
    assert_int_equal(bs_manifest_add_row_table(m, "r", BS_DTYPE_F32, 2, 0, 0, 0, &i), BS_SHAPE);
    assert_int_equal(bs_manifest_add_row_table(m, "r", BS_DTYPE_U8, 2, 2, 0, 0, &i), BS_DTYPE);
    char *text;
    assert_int_equal(bs_manifest_to_json(m, &text), BS_STATE);
    /* Nothing of that stuck. */
    assert_int_equal(bs_manifest_block(m, 0)->n_tensors, 3);
    assert_int_equal(truncate(tmpdir_file("b"), 50), 0);
    assert_int_equal(bs_manifest_finish(m), BS_IO);
    ASSERT_ERROR("/b' had 100000 bytes");
    bs_manifest_free(m);

    assert_int_equal(bs_manifest_new(&m), BS_OK);
    assert_int_equal(bs_manifest_add_block(m, "empty", "layer", &i), BS_OK);
    assert_int_equal(bs_manifest_finish(m), BS_ARG);
    bs_manifest_free(m);
    bs_manifest_free(NULL);
}

/* ---- packed tensors ---- */

enum { SCALES_AT = 20000 };

/* sample(), and in block 1 values [3, 64] in two groups a row. */
static bs_manifest *packed_sample(uint64_t scales_at)
{
    bs_manifest *m = sample();
    int i = -1;
    const bs_packed p = {.name = "p",
                         .packing = BS_MXFP4,
                         .ndim = 2,
                         .dim = (int64_t[]){3, 64},
                         .file = 0,
                         .scales_file = 1,
                         .file_offset = 7001,
                         .scales_offset = scales_at};
    if (bs_manifest_add_packed(m, 1, &p, &i) != BS_OK)
        fail_msg("%s", bs_error()->msg);
    assert_int_equal(i, 3);
    tensor(m, 1, "after", BS_DTYPE_BF16, 100, 0, 0);
    assert_int_equal(bs_manifest_finish(m), BS_OK);
    return m;
}

static void test_packed(void **state)
{
    (void)state;
    bs_manifest *m = packed_sample(SCALES_AT), *moved = packed_sample(SCALES_AT + 1);
    assert_string_equal(bs_packing_get(BS_MXFP4)->name, "mxfp4");
    assert_null(bs_packing_get(BS_PLAIN));
    assert_null(bs_packing_get(BS_PACKING_COUNT));
    const bs_tensor_info *p = bs_manifest_tensor(m, 1, 3), *s = bs_manifest_tensor(m, 1, 4);
    assert_string_equal(s->name, "p.scales");
    assert_int_equal(bs_manifest_find_tensor(m, 1, "p.scales"), 4);
    assert_true(p->packing == BS_MXFP4 && p->dtype == BS_DTYPE_U8 && p->ndim == 2);
    assert_true(p->dim[0] == 3 && p->dim[1] == 64 && p->bytes == 3 * 2 * 16);
    assert_true(s->packing == BS_PLAIN && s->dtype == BS_DTYPE_U8 && s->ndim == 2);
    assert_true(s->dim[0] == 3 && s->dim[1] == 2 && s->bytes == 6 && s->scales == -1);
    assert_int_equal(bs_manifest_tensor(m, 1, 0)->scales, -1);
    assert_int_equal(p->scales, 4);
    assert_int_equal(p->scales_offset, s->slot_offset);
    assert_true(s->slot_offset > p->slot_offset && s->slot_offset % 256 == 0);
    check_extents(m, 1, bs_manifest_alignment(m));
    assert_int_equal(bs_manifest_block(m, 1)->payload_bytes, 400 + 3 * 200 + 96 + 6);
    for (int pass = 0; pass < 2; pass++) { /* f32, bf16: y and z, or x before it */
        uint64_t size = pass ? 2 : 4, before = pass ? 512 : 2 * 512;
        assert_int_equal(bs_manifest_compute(m, pass ? BS_DTYPE_BF16 : BS_DTYPE_F32), BS_OK);
        assert_int_equal(p->expand_offset, pass ? 256 : before);
        assert_true(s->expand_offset == UINT64_MAX);
        const bs_tensor_info *after = bs_manifest_tensor(m, 1, 5);
        if (!pass)
            assert_int_equal(after->expand_offset, before + bsi_round_up(3 * 64 * size, 256));
        assert_int_equal(bs_manifest_block(m, 1)->expand_bytes,
                         pass ? 256 + bsi_round_up(3 * 64 * size, 256)
                              : before + bsi_round_up(3 * 64 * size, 256) + 512);
    }
    assert_true(bs_manifest_digest(m) != bs_manifest_digest(moved));
    bs_tensor_info part;
    assert_int_equal(bs_tensor_info_rows(p, 0, 1, &part), BS_UNSUPPORTED);
    ASSERT_ERROR("'p' is packed");
    bs_manifest_free(moved);
    bs_manifest_free(m);
}

static void test_packed_refused(void **state)
{
    (void)state;
    bs_manifest *m = sample();
    char longest[600];
    memset(longest, 'n', sizeof longest - 1);
    longest[sizeof longest - 1] = '\0';
    const struct {
        bs_packed p;
        bs_status st;
        const char *why;
    } c[] = {
        {{"n", BS_MXFP4, 2, (int64_t[]){2, 48}, 0, 0, 0, 0}, BS_SHAPE, "groups of 32"},
        {{"n", BS_MXFP4, 2, (int64_t[]){2, 0}, 0, 0, 0, 0}, BS_SHAPE, "groups of 32"},
        {{"n", BS_MXFP4, 0, NULL, 0, 0, 0, 0}, BS_SHAPE, "groups of 32"},
        {{"n", BS_PLAIN, 1, (int64_t[]){32}, 0, 0, 0, 0}, BS_SHAPE, "'n' is packed"},
        {{"n", BS_PACKING_COUNT, 1, (int64_t[]){32}, 0, 0, 0, 0}, BS_SHAPE, "'n' is packed"},
        {{"n", BS_MXFP4, 2, (int64_t[]){-1, 32}, 0, 0, 0, 0}, BS_SHAPE, "at least 1"},
        {{"n", BS_MXFP4, 2, (int64_t[]){INT64_MAX, 32}, 0, 0, 0, 0}, BS_SHAPE, "'n'"},
        {{"n", BS_MXFP4, 1, (int64_t[]){32}, 0, 0, BYTES - 15, 0}, BS_ARG, "has 16 bytes at 99985"},
        {{"n", BS_MXFP4, 1, (int64_t[]){64}, 0, 1, 0, BYTES - 1}, BS_ARG, "'n.scales' has 2 bytes"},
        {{"n", BS_MXFP4, 1, (int64_t[]){32}, 9, 0, 0, 0}, BS_ARG, "file 9"},
        {{"n", BS_MXFP4, 1, (int64_t[]){32}, 0, -1, 0, 0}, BS_ARG, "file -1"},
        {{"q", BS_MXFP4, 1, (int64_t[]){32}, 0, 0, 0, 0}, BS_ARG, "has a tensor 'q' already"},
        {{"taken", BS_MXFP4, 1, (int64_t[]){32}, 0, 0, 0, 0}, BS_ARG, "'taken.scales' already"},
        {{longest, BS_MXFP4, 1, (int64_t[]){32}, 0, 0, 0, 0}, BS_ARG, "has 599 bytes"},
        {{NULL, BS_MXFP4, 1, (int64_t[]){32}, 0, 0, 0, 0}, BS_ARG, "name"},
    };
    int i;
    tensor(m, 0, "taken.scales", BS_DTYPE_F32, 1, 0, 0);
    for (size_t k = 0; k < BSI_COUNT(c); k++) {
        if (bs_manifest_add_packed(m, 0, &c[k].p, &i) != c[k].st)
            fail_msg("case %zu: %s", k, bs_error()->msg);
        ASSERT_ERROR(c[k].why);
        assert_int_equal(bs_manifest_block(m, 0)->n_tensors, 4); /* neither values nor scales stuck */
    }
    assert_int_equal(bs_manifest_add_packed(m, 7, &c[7].p, &i), BS_ARG);
    assert_int_equal(bs_manifest_finish(m), BS_OK);
    assert_int_equal(bs_manifest_add_packed(m, 0, &c[7].p, &i), BS_STATE);
    bs_manifest_free(m);
}

/* text with `from` replaced is refused, for a reason. */
static void refuse_text(const char *text, const char *from, const char *to, const char *why)
{
    char bad[8192];
    bs_manifest *back;
    const char *at = strstr(text, from);
    assert_non_null(at);
    snprintf(bad, sizeof bad, "%.*s%s%s", (int)(at - text), text, to, at + strlen(from));
    if (bs_manifest_from_json(bad, strlen(bad), &back) == BS_OK)
        fail_msg("accepted: %s", to);
    assert_null(back);
    ASSERT_ERROR(why);
}

static void test_packed_json(void **state)
{
    (void)state;
    bs_manifest *m = packed_sample(SCALES_AT), *back;
    char *text, *again;
    assert_int_equal(bs_manifest_to_json(m, &text), BS_OK);
    if (bs_manifest_from_json(text, strlen(text), &back) != BS_OK)
        fail_msg("%s", bs_error()->msg);
    assert_true(bs_manifest_digest(back) == bs_manifest_digest(m));
    const bs_tensor_info *p = bs_manifest_tensor(back, 1, 3), *q = bs_manifest_tensor(m, 1, 3);
    assert_true(p->packing == BS_MXFP4 && p->scales == 4 && p->scales_offset == q->scales_offset &&
                p->slot_offset == q->slot_offset && p->expand_offset == q->expand_offset);
    assert_int_equal(bs_manifest_to_json(back, &again), BS_OK);
    assert_string_equal(again, text);
    bs_manifest_free(back);
    refuse_text(text, "\"mxfp4\"", "\"mxfp5\"", "unknown dtype 'mxfp5'");
    refuse_text(text, "\"mxfp4\"", "\"u8\"", "stored as u8");
    refuse_text(text, "[3,64]", "[3,65]", "groups of 32");
    refuse_text(text, "p.scales", "s.scales", "does not hold the scales of 'p'");
    refuse_text(text, "[3,2]", "[2,3]", "does not hold the scales of 'p'");
    refuse_text(text, "\"dtype\":\"u8\",\"shape\":[3,2]", "\"dtype\":\"i32\",\"shape\":[3,2]",
                "does not hold the scales");
    refuse_text(text, "\"embed\",\"dtype\":\"bf16\"", "\"embed\",\"dtype\":\"mxfp4\"",
                "'embed' is packed");
    char *cut = strstr(text, ",\n{\"name\":\"p.scales\"");
    assert_non_null(cut);
    const char *end = strstr(cut, "]}"); /* of the block */
    memmove(cut, end, strlen(end) + 1);
    assert_int_equal(bs_manifest_from_json(text, strlen(text), &back), BS_FORMAT);
    ASSERT_ERROR("the scales of 'p' are missing");
    bs_str_free(again);
    bs_str_free(text);
    bs_manifest_free(m);
}

static void test_digest(void **state)
{
    (void)state;
    bs_manifest *m = sample(), *n = sample();
    assert_int_equal(bs_manifest_finish(m), BS_OK);
    tensor(n, 1, "more", BS_DTYPE_F32, 1, 0, 0);
    assert_int_equal(bs_manifest_finish(n), BS_OK);
    assert_true(bs_manifest_digest(m) != bs_manifest_digest(n));
    assert_true(bs_manifest_digest(m) != 0);
    bs_manifest_free(n);
    bs_manifest_free(m);
}

static void test_json(void **state)
{
    (void)state;
    bs_manifest *m = sample(), *back;
    char *text, *again;
    assert_int_equal(bs_manifest_finish(m), BS_OK);
    assert_int_equal(bs_manifest_to_json(m, &text), BS_OK);
    if (bs_manifest_from_json(text, strlen(text), &back) != BS_OK)
        fail_msg("%s", bs_error()->msg);
    assert_true(bs_manifest_digest(back) == bs_manifest_digest(m));
    assert_string_equal(bs_manifest_block(back, 1)->name, "layer \"1\"");
    assert_int_equal(bs_manifest_tensor(back, 0, 1)->file_offset, 99988);
    assert_int_equal(bs_manifest_to_json(back, &again), BS_OK);
    assert_string_equal(again, text);
    bs_str_free(again);
    bs_manifest_free(back);

    static const struct {
        const char *from, *to, *why;
    } c[] = {
        {"{\"bslua_manifest\":1", "{\"bslua_manifest\":2", "version 2"},
        {"\"rows\":", "\"rowz\":", "key 'rowz' is unknown"},
        {"\"kind\":\"mix\",", "", "key 'kind' is missing"},
        {"\"file\":0", "\"file\":0,\"file\":0", "given twice"},
        {"\"file\":0", "\"file\":9", "is in file 9"},
        {"\"offset\":5001", "\"offset\":5003", "it was edited"},
        {"\"offset\":5001", "\"offset\":99999", "has 2002 bytes at 99999"},
        {"\"offset\":5001", "\"offset\":-1", "non-negative integers"},
        {"\"offset\":5001", "\"offset\":\"x\"", "'offset' is not an integer"},
        {"\"dtype\":\"f16\"", "\"dtype\":\"f12\"", "unknown dtype 'f12'"},
        {"\"dtype\":\"f16\"", "\"dtype\":\"u8\"", "stored as u8"},
        {"\"shape\":[3]", "\"shape\":3", "'shape' is not an array"},
        {"\"shape\":[3]", "\"shape\":[1,1,1,1,1,1,1,1,3]", "more than 8"},
        {"\"shape\":[10,8]", "\"shape\":[80]", "2 are needed"},
        {"\"bytes\":100000", "\"bytes\":100001", "had 100001 bytes and has 100000"},
        {"/b\"", "/a\"", "given twice"},
        {"/b\"", "/c\"", "cannot be opened"},
        {"]}\n", "]", "not valid JSON"},
    };
    for (size_t i = 0; i < BSI_COUNT(c); i++)
        refuse_text(text, c[i].from, c[i].to, c[i].why);
    bs_str_free(text);
    bs_manifest_free(m);
}

/* Every byte of the text damaged in turn: refused or, where it is only white space, the same content.
 */
static void test_json_damage(void **state)
{
    (void)state;
    bs_manifest *m = packed_sample(SCALES_AT), *back;
    char *text;
    size_t before = bs_host_bytes(BS_TAG_HEADER);
    assert_int_equal(bs_manifest_to_json(m, &text), BS_OK);
    size_t n = strlen(text), live = bs_host_bytes(BS_TAG_HEADER);
    for (size_t i = 0; i < n; i++) {
        char old = text[i];
        text[i] ^= 1;
        if (bs_manifest_from_json(text, n, &back) == BS_OK) {
            assert_true(bs_manifest_digest(back) == bs_manifest_digest(m));
            bs_manifest_free(back);
        }
        text[i] = old;
        bool whole = i == n - 1; /* all but the last newline */
        assert_true((bs_manifest_from_json(text, i, &back) == BS_OK) == whole);
        if (whole)
            bs_manifest_free(back);
    }
    assert_int_equal(bs_host_bytes(BS_TAG_HEADER), live);
    bs_str_free(text);
    bs_manifest_free(m);
    assert_true(bs_host_bytes(BS_TAG_HEADER) < before);
}

static void test_no_memory(void **state)
{
    (void)state;
    bs_manifest *m = packed_sample(SCALES_AT), *back;
    char *text = NULL;
    for (uint64_t n = 1;; n++) {
        bsi_alloc_fail_nth(n);
        bs_status ret = bs_manifest_to_json(m, &text);
        bsi_alloc_fail_nth(0);
        if (ret == BS_OK)
            break;
        assert_int_equal(ret, BS_NOMEM);
    }
    size_t live = bs_host_bytes(BS_TAG_HEADER);
    int fds = tmpdir_fds();
    uint64_t n = 1;
    for (;; n++) {
        bsi_alloc_fail_nth(n);
        bs_status ret = bs_manifest_from_json(text, strlen(text), &back);
        bsi_alloc_fail_nth(0);
        if (ret == BS_OK)
            break;
        assert_int_equal(ret, BS_NOMEM);
        assert_int_equal(bs_host_bytes(BS_TAG_HEADER), live);
        assert_int_equal(tmpdir_fds(), fds);
    }
    assert_true(n > 20);
    bs_manifest_free(back);
    bs_str_free(text);
    bs_manifest_free(m);
}

/* A name of a file is bytes; JSON is UTF-8. */
static void test_path_of_bytes(void **state)
{
    (void)state;
    bs_manifest *m;
    char *text;
    int file, i;
    assert_int_equal(bs_manifest_new(&m), BS_OK);
    assert_int_equal(bs_manifest_add_file(m, data_file("a\xFF"), &file), BS_OK);
    assert_int_equal(bs_manifest_add_block(m, "b\xFF", "layer", &i), BS_ARG);
    assert_int_equal(bs_manifest_add_block(m, "b", "layer", &i), BS_OK);
    tensor(m, 0, "x", BS_DTYPE_F32, 4, file, 0);
    assert_int_equal(bs_manifest_finish(m), BS_OK);
    assert_int_equal(bs_manifest_to_json(m, &text), BS_UNSUPPORTED);
    ASSERT_ERROR("is not UTF-8");
    assert_null(text);
    bs_manifest_free(m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_path_of_bytes),  cmocka_unit_test(test_layout),
        cmocka_unit_test(test_compute),        cmocka_unit_test(test_buffered),
        cmocka_unit_test(test_refused),        cmocka_unit_test(test_packed),
        cmocka_unit_test(test_packed_refused), cmocka_unit_test(test_packed_json),
        cmocka_unit_test(test_digest),         cmocka_unit_test(test_json),
        cmocka_unit_test(test_json_damage),    cmocka_unit_test(test_no_memory)};
    return cmocka_run_group_tests(tests, tmpdir_open, tmpdir_close);
}
