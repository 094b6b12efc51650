/* SPDX-License-Identifier: Apache-2.0 */
/*
** head.c: loss and its gradient over vocabulary tiles, so that full logits never exist in training.
** Each tile is read once per pass: an online softmax keeps, per row and with the label's column left
** out, the maximum m, s = sum exp(l - m) and acc = sum exp(l - m) W, and picks the label's logit ly and
** its row Wy. Then
**
**   r = s e^(m - ly), loss = log(1 + r), dX = r/(1 + r) (acc/s - Wy) / count
**
** which stays exact where 1 - p(label) would cancel: for a well-learned token p(label) rounds to 1,
** and the difference, which is the whole gradient, to 0.
**
** The running maximum and sum are the online softmax of Milakov and Gimelshein (2018). The loss is
** -log(e^ly / (s e^m + e^ly)) = log(1 + r). Its gradient is sum_j p_j W_j - (1 - p(label)) Wy over
** the other entries j. Their p_j are in the proportions of acc/s and sum to 1 - p(label) = r/(1 +
** r), which gives dX. A softcap multiplies every W_j by the slope of the cap at l_j, in acc and in
** Wy.
**
** Rows are cut into chunks that depend on shapes only. Tiles come in vocabulary order, because sums
** are taken in that order and so have the same bits for any placement; a second visit (tile_grad)
** reads final m, s and ly, and may come in any order. Owner thread only; everything is issued on
** the compute queue, and only loss and logits wait.
**
** All device state is one pool region: per micro-batch X, acc, Wy, dX [capacity, channels] and m, s,
** ly, loss [capacity]; shared by all: lowest [capacity] (-inf, where m starts), logits and P
** [chunk, tile_rows], factor [chunk] and one f64 sum per micro-batch. X, P and dX have the engine's
** dtype, the rest is f32. Where the engine computes in f32, P is written over the logits and dX over
** acc, which nothing needs after finish; elsewhere there is also a place for the tile's bias in f32. X,
** m, s, ly stay for tile_grad.
*/
#include "bs/train.h"
#include "tensor/launch.h"
#include "tensor/weight.h"

#include <math.h>

enum { ALIGN = 256, CHUNK_ROWS = 256, VECTORS = 4 };

typedef struct head_micro {
    bool put, finished;
    int64_t rows;            /* of X in this pass */
    int64_t next;            /* first vocabulary entry that has not been seen */
    bsi_addr x, acc, wy, dx; /* [capacity, channels] */
    bsi_addr m, s, ly, loss; /* [capacity] */
    bs_array *logits;        /* LOGITS: host [rows, vocab] */
} head_micro;

struct bs_head {
    bs_engine *e;
    bs_batch *batch;
    bs_head_cfg cfg;
    int64_t chunk;
    bool begun;
    bs_head_mode mode;
    int64_t count;
    head_micro *micro;
    bsi_addr lowest;       /* [capacity] f32 */
    bsi_addr logits, p;    /* [chunk, tile_rows], f32 and of the engine's dtype */
    bsi_addr factor, sums; /* [chunk] f32, [micros] f64 */
    bsi_addr bias;         /* [tile_rows] f32; mem NULL: read where it is */
    double *host_sums;
};

/* ---- open ------------------------------------------------------------------------------------ */

typedef struct head_sizes { /* x, dx, p: in the engine's dtype; dx, p, bias 0: not apart */
    size_t x, dx, sum, vector, logits, p, bias, factor, sums, total;
} head_sizes;

static int64_t chunk_rows(const bs_batch_cfg *b)
{
    return BSI_MIN(b->tokens, (int64_t)CHUNK_ROWS);
}

/* False where the product or the rounding up would wrap. */
static bool padded(int64_t rows, int64_t cols, size_t item, size_t *out)
{
    size_t n;
    if (!bsi_mul_size((size_t)rows, (size_t)cols, &n) || !bsi_mul_size(n, item, &n) ||
        n > SIZE_MAX - ALIGN)
        return false;
    *out = bsi_round_up(n, ALIGN);
    return true;
}

/* What one micro-batch needs, and what all share; false: too large. `sum` bounds each of the 8
   parts of a micro-batch, so with it under an eighth of SIZE_MAX their sum needs no check. */
static bool measure_parts(const bs_batch_cfg *b, const bs_head_cfg *c, bs_dtype t, head_sizes *z)
{
    size_t item = bs_dtype_size(t), each, all;
    int64_t chunk = chunk_rows(b), entries = BSI_MIN(c->tile_rows, c->vocab);
    bool apart = t != BS_DTYPE_F32;
    if (!padded(b->tokens, c->channels, item, &z->x) ||
        !padded(b->tokens, c->channels, sizeof(float), &z->sum) ||
        !padded(b->tokens, 1, sizeof(float), &z->vector) ||
        !padded(chunk, entries, sizeof(float), &z->logits) || !padded(chunk, entries, item, &z->p) ||
        !padded(1, entries, sizeof(float), &z->bias) || !padded(chunk, 1, sizeof(float), &z->factor) ||
        !padded(b->micros, 1, sizeof(double), &z->sums) || z->sum > SIZE_MAX / 8)
        return false;
    z->dx = apart ? z->x : 0;
    z->p = apart ? z->p : 0;
    z->bias = apart ? z->bias : 0;
    return bsi_mul_size(z->x + z->dx + 2 * z->sum + VECTORS * z->vector, (size_t)b->micros, &each) &&
           bsi_add_size(each, z->vector + z->factor + z->sums, &all) &&
           bsi_add_size(all, z->logits, &all) && bsi_add_size(all, z->bias, &all) &&
           bsi_add_size(all, z->p, &z->total);
}

static bs_status measure(const bs_batch_cfg *b, const bs_head_cfg *c, bs_dtype t, head_sizes *z)
{
    if (c->channels < 1 || c->vocab < 1 || c->vocab > INT32_MAX || c->tile_rows < 1)
        return bsi_fail(BS_ARG,
                        "head: channels %lld, vocab %lld, tile_rows %lld; each must be at least 1",
                        (long long)c->channels, (long long)c->vocab, (long long)c->tile_rows);
    if (!(c->softcap >= 0 && isfinite(c->softcap)))
        return bsi_fail(BS_ARG, "head: softcap %g; it is a positive bound on logits, 0 = none",
                        c->softcap);
    if (b->micros < 1 || b->tokens < 1)
        return bsi_fail(BS_ARG, "head: micros %d, tokens %lld; both must be at least 1", b->micros,
                        (long long)b->tokens);
    if (!measure_parts(b, c, t, z))
        return bsi_fail(BS_SHAPE,
                        "head: %d micro-batches of [%lld, %lld] are too large for 64-bit sizes",
                        b->micros, (long long)b->tokens, (long long)c->channels);
    return BS_OK;
}

bs_status bs_head_bytes(const bs_batch_cfg *b, const bs_head_cfg *cfg, bs_dtype compute, size_t *device)
{
    head_sizes z = {0};
    BSI_TRY(measure(b, cfg, compute, &z));
    *device = z.total;
    return BS_OK;
}

static bsi_addr cut(bsi_addr *at, size_t bytes)
{
    bsi_addr a = *at;
    at->off += bytes;
    return a;
}

static bool to_host(bs_head_mode mode)
{
    return mode == BS_HEAD_LOGITS || mode == BS_HEAD_LAST;
}

static bs_status write_lowest(bs_head *h)
{
    int64_t n = h->batch->cfg.tokens;
    /* A region that m is copied from: a fill writes one byte value, and -inf is 0xFF800000. */
    float *v = bsi_alloc(BS_TAG_STAGING, (size_t)n * sizeof *v);
    if (!v)
        return BS_NOMEM;
    for (int64_t i = 0; i < n; i++)
        v[i] = -INFINITY;
    bs_status st = bsi_engine_write(h->e, h->lowest, v, (size_t)n * sizeof *v);
    bsi_free(v);
    return st;
}

static bs_status open_parts(bs_head *h, const head_sizes *z)
{
    bsi_addr at;
    int micros = h->batch->cfg.micros;
    BSI_TRY(bsi_pool_region(h->e->pool, "head", z->total, &at));
    h->micro = bsi_alloc(BS_TAG_MISC, (size_t)micros * sizeof *h->micro);
    h->host_sums = bsi_alloc(BS_TAG_MISC, (size_t)micros * sizeof *h->host_sums);
    if (!h->micro || !h->host_sums)
        return BS_NOMEM;
    for (int j = 0; j < micros; j++) {
        head_micro *m = &h->micro[j];
        bsi_addr *vector[VECTORS] = {&m->m, &m->s, &m->ly, &m->loss};
        m->x = cut(&at, z->x);
        m->acc = cut(&at, z->sum);
        m->wy = cut(&at, z->sum);
        m->dx = z->dx ? cut(&at, z->dx) : m->acc;
        for (int i = 0; i < VECTORS; i++)
            *vector[i] = cut(&at, z->vector);
    }
    h->lowest = cut(&at, z->vector);
    h->logits = cut(&at, z->logits);
    h->p = z->p ? cut(&at, z->p) : h->logits;
    h->bias = z->bias ? cut(&at, z->bias) : (bsi_addr){0};
    h->factor = cut(&at, z->factor);
    h->sums = cut(&at, z->sums);
    return write_lowest(h);
}

bs_status bs_head_open(bs_engine *e, const bs_head_cfg *cfg, bs_head **out)
{
    head_sizes z = {0};
    if (!cfg->batch)
        return bsi_fail(BS_ARG, "head: a batch is required");
    BSI_TRY(measure(&cfg->batch->cfg, cfg, e->dtype, &z));
    bs_head *h = bsi_alloc(BS_TAG_MISC, sizeof *h);
    if (!h)
        return BS_NOMEM;
    h->e = e;
    h->batch = cfg->batch;
    h->cfg = *cfg;
    h->cfg.tile_rows = BSI_MIN(cfg->tile_rows, cfg->vocab);
    h->chunk = chunk_rows(&cfg->batch->cfg);
    bs_status st = open_parts(h, &z);
    if (st != BS_OK) {
        bs_head_close(h);
        return st;
    }
    *out = h;
    return BS_OK;
}

static void drop_logits(bs_head *h)
{
    for (int j = 0; h->micro && j < h->batch->cfg.micros; j++) {
        bs_array_free(h->micro[j].logits);
        h->micro[j].logits = NULL;
    }
}

void bs_head_close(bs_head *h)
{
    if (!h)
        return;
    drop_logits(h);
    bsi_free(h->micro);
    bsi_free(h->host_sums);
    bsi_free(h);
}

/* ---- a pass ---------------------------------------------------------------------------------- */

bs_status bs_head_begin(bs_head *h, bs_head_mode mode, int64_t count)
{
    if (mode == BS_HEAD_LOGITS && !h->cfg.logits)
        return bsi_fail(BS_STATE, "head: logits are asked of a head that was opened without logits");
    if (!to_host(mode) && count < 1)
        return bsi_fail(BS_ARG, "head: %lld labelled tokens in the step; there is no loss to take",
                        (long long)count);
    drop_logits(h);
    for (int j = 0; j < h->batch->cfg.micros; j++) {
        h->micro[j].put = h->micro[j].finished = false;
        h->micro[j].rows = h->micro[j].next = 0;
    }
    h->mode = mode;
    h->count = count;
    h->begun = true;
    /* A micro-batch without labelled rows launches nothing, and its sum must be 0 all the same. */
    return bsi_fill(h->e->compute, h->sums, 0, (size_t)h->batch->cfg.micros * sizeof(double));
}

/* A micro-batch of the pass whose rows have been handed in. */
static bs_status find(bs_head *h, int micro, head_micro **out)
{
    if (micro < 0 || micro >= h->batch->cfg.micros)
        return bsi_fail(BS_ARG, "head: micro-batch %d of %d", micro, h->batch->cfg.micros);
    if (!h->begun)
        return bsi_fail(BS_STATE, "head: no pass has begun");
    *out = &h->micro[micro];
    return BS_OK;
}

static bs_status find_put(bs_head *h, int micro, head_micro **out)
{
    BSI_TRY(find(h, micro, out));
    return (*out)->put
               ? BS_OK
               : bsi_fail(BS_STATE, "head: micro-batch %d has not been put in this pass", micro);
}

/* A target beyond the vocabulary would be in no tile: ly would stay 0, and the loss would be wrong
   in silence. */
static bs_status check_targets(const bs_head *h, int micro)
{
    const bsi_micro *b = &h->batch->micro[micro];
    for (int64_t i = 0; i < b->labelled; i++)
        if (b->target[i] < 0 || b->target[i] >= h->cfg.vocab)
            return bsi_fail(
                BS_ARG,
                "head: the label of token %d of micro-batch %d is %lld; the vocabulary has %lld "
                "entries",
                b->position[i] + 1, micro, (long long)b->target[i], (long long)h->cfg.vocab);
    return BS_OK;
}

static size_t bytes_of(int64_t rows, int64_t cols)
{
    return (size_t)rows * (size_t)cols * sizeof(float);
}

static bs_status clear(bs_head *h, bsi_addr at, size_t bytes)
{
    return bytes ? bsi_fill(h->e->compute, at, 0, bytes) : BS_OK;
}

bs_status bs_head_put(bs_head *h, int micro, bs_tensor *x)
{
    head_micro *m = NULL;
    bs_place from;
    BSI_TRY(find(h, micro, &m));
    if (m->put)
        return bsi_fail(BS_STATE, "head: micro-batch %d is put twice in one pass", micro);
    BSI_TRY(bs_tensor_place(x, &from));
    const bsi_micro *b = &h->batch->micro[micro];
    int64_t rows = b->labelled, C = h->cfg.channels;
    const char *which = "labelled rows";
    if (h->mode == BS_HEAD_LOGITS)
        rows = b->tokens, which = "all rows";
    else if (h->mode == BS_HEAD_LAST)
        rows = b->rows, which = "the last rows";
    if (from.dtype != h->e->dtype)
        return bsi_fail(BS_DTYPE, "head: rows of micro-batch %d are %s; %s is expected", micro,
                        bs_dtype_name(from.dtype), bs_dtype_name(h->e->dtype));
    if (from.rows != rows || from.channels != C)
        return bsi_fail(BS_SHAPE, "head: micro-batch %d has [%lld, %lld], %s [%lld, %lld] are expected",
                        micro, (long long)from.rows, (long long)from.channels, which, (long long)rows,
                        (long long)C);
    size_t vector = bytes_of(rows, 1), x_bytes = (size_t)(rows * C) * bs_dtype_size(from.dtype);
    if (!to_host(h->mode)) {
        BSI_TRY(check_targets(h, micro));
        if (vector)
            BSI_TRY(bsi_copy(h->e->compute, m->m, h->lowest, vector));
        BSI_TRY(clear(h, m->s, vector));
        BSI_TRY(clear(h, m->ly, vector));
    }
    if (h->mode == BS_HEAD_TRAIN)
        BSI_TRY(clear(h, m->acc,
                      bytes_of(rows, C))); /* wy is written by the one tile that holds the label */
    if (x_bytes)
        BSI_TRY(bsi_copy(h->e->compute, m->x, bsi_place_addr(&from), x_bytes));
    if (to_host(h->mode))
        BSI_TRY(bs_array_new(BS_DTYPE_F32, 2, (int64_t[]){rows, h->cfg.vocab}, &m->logits));
    m->rows = rows;
    m->put = true;
    return BS_OK;
}

/* ---- tiles ----------------------------------------------------------------------------------- */

typedef struct tile { /* one chunk of rows against one tile of the vocabulary */
    bsi_addr w;       /* [V, channels] */
    bsi_addr bias;    /* [V] f32; mem NULL: none */
    int64_t V, first; /* entries of the vocabulary */
    int64_t row, n;   /* rows [row, row + n) of X */
} tile;

static bsi_arg rows_of(const tile *t, bsi_addr base, bs_dtype type, int64_t cols, uint8_t mode)
{
    size_t row = (size_t)cols * bs_dtype_size(type);
    return (bsi_arg){bsi_addr_add(base, (size_t)t->row * row), (size_t)t->n * row, mode};
}

static bsi_arg vec(const tile *t, bsi_addr base, uint8_t mode) /* [n] of a per-row vector, f32 */
{
    return rows_of(t, base, BS_DTYPE_F32, 1, mode);
}

static bsi_arg sum(const bs_head *h, const tile *t, bsi_addr base, uint8_t mode) /* [n, channels] f32 */
{
    return rows_of(t, base, BS_DTYPE_F32, h->cfg.channels, mode);
}

static bsi_arg act(const bs_head *h, const tile *t, bsi_addr base, uint8_t mode) /* [n, channels] */
{
    return rows_of(t, base, h->e->dtype, h->cfg.channels, mode);
}

static bsi_arg logits_arg(const bs_head *h, const tile *t, uint8_t mode) /* [n, V] f32 */
{
    return bsi_operand(h->logits, BS_DTYPE_F32, t->n * t->V, mode);
}

static bsi_arg p_arg(const bs_head *h, const tile *t, uint8_t mode) /* [n, V] */
{
    return bsi_operand(h->p, h->e->dtype, t->n * t->V, mode);
}

static bsi_arg weight_arg(const bs_head *h, const tile *t)
{
    return bsi_act_read(h->e, t->w, t->V * h->cfg.channels);
}

static bsi_arg label_arg(const bs_head *h, int micro, const tile *t) /* i32, as large as f32 */
{
    return vec(t, h->batch->micro[micro].label_id, BSI_READ);
}

/* logits[n, V] = X W^T + bias */
static bs_status tile_logits(bs_head *h, const head_micro *m, const tile *t)
{
    int64_t C = h->cfg.channels;
    bsi_kcall c = {.op = BSK_GEMM,
                   .n_args = 3,
                   .arg = {act(h, t, m->x, BSI_READ), weight_arg(h, t), logits_arg(h, t, BSI_WRITE)},
                   .n = {0, 1, t->n, t->V, C, C, C, t->V},
                   .f = {1, 0},
                   .label = "head logits"};
    bsi_kcall bias = {.op = BSK_BIAS,
                      .n_args = 2,
                      .arg = {logits_arg(h, t, BSI_READWRITE), bsi_read_f32(t->bias, t->V)},
                      .n = {t->n, t->V},
                      .label = "head bias"};
    BSI_TRY(bsi_op_launch(h->e, &c));
    return t->bias.mem ? bsi_engine_launch(h->e, &bias) : BS_OK;
}

static bs_status tile_softmax(bs_head *h, int micro, const head_micro *m, const tile *t)
{
    bsi_kcall c = {.op = BSK_HEAD_TILE,
                   .n_args = 7,
                   .arg = {logits_arg(h, t, BSI_READ),
                           label_arg(h, micro, t),
                           vec(t, m->m, BSI_READWRITE),
                           vec(t, m->s, BSI_READWRITE),
                           vec(t, m->ly, BSI_READWRITE),
                           {h->factor, bytes_of(t->n, 1), BSI_WRITE},
                           p_arg(h, t, BSI_WRITE)},
                   .n = {t->n, t->V, t->first, h->cfg.softcap > 0},
                   .f = {h->cfg.softcap},
                   .label = "head softmax"};
    return bsi_op_launch(h->e, &c);
}

/* acc = factor acc + P W, and the label's row of W where the tile holds it. */
static bs_status tile_accumulate(bs_head *h, int micro, const head_micro *m, const tile *t)
{
    int64_t C = h->cfg.channels;
    bsi_kcall scale = {
        .op = BSK_ROW_MUL,
        .n_args = 2,
        .arg = {sum(h, t, m->acc, BSI_READWRITE), {h->factor, bytes_of(t->n, 1), BSI_READ}},
        .n = {t->n, C},
        .label = "head rescale"};
    bsi_kcall gemm = {
        .op = BSK_GEMM,
        .n_args = 3,
        .arg = {p_arg(h, t, BSI_READ), weight_arg(h, t), sum(h, t, m->acc, BSI_READWRITE)},
        .n = {0, 0, t->n, C, t->V, t->V, C, C},
        .f = {1, 1},
        .label = "head sum"};
    bsi_kcall pick = {.op = BSK_HEAD_PICK,
                      .n_args = 4,
                      .arg = {weight_arg(h, t), label_arg(h, micro, t), vec(t, m->ly, BSI_READ),
                              sum(h, t, m->wy, BSI_READWRITE)},
                      .n = {t->n, C, t->first, t->V, h->cfg.softcap > 0},
                      .f = {h->cfg.softcap},
                      .label = "head label row"};
    /* factor = e^(old maximum - new one) of each row: what earlier tiles summed is relative to the
       old one, so it is rescaled before this tile is added. */
    BSI_TRY(bsi_engine_launch(h->e, &scale));
    BSI_TRY(bsi_op_launch(h->e, &gemm));
    return bsi_op_launch(h->e, &pick);
}

/* Columns [first, first + V) of the host logits. */
static bs_status tile_read(bs_head *h, const head_micro *m, const tile *t)
{
    bsi_kcall cap = {.op = BSK_SOFTCAP,
                     .n_args = 1,
                     .arg = {logits_arg(h, t, BSI_READWRITE)},
                     .n = {t->n * t->V},
                     .f = {h->cfg.softcap},
                     .label = "head softcap"};
    if (h->cfg.softcap > 0)
        BSI_TRY(bsi_engine_launch(h->e, &cap));
    if (!h->e->props.executes)
        return BS_OK;
    float *to = (float *)m->logits->data + t->row * h->cfg.vocab + t->first;
    /* Row by row: on the device rows of a tile are V apart, on the host a vocabulary apart. */
    for (int64_t i = 0; i < t->n; i++)
        BSI_TRY(bsi_engine_read(h->e, bsi_addr_add(h->logits, bytes_of(i, t->V)), bytes_of(1, t->V),
                                to + i * h->cfg.vocab));
    return BS_OK;
}

static bs_status check_tile(const bs_head *h, int micro, const bs_weight *w, const bs_weight *bias,
                            int64_t first, int64_t *rows)
{
    const bs_tensor_info *i = &w->ref.info;
    *rows = i->ndim == 2 ? i->dim[0] : 0;
    if (*rows < 1 || *rows > h->cfg.tile_rows || i->dim[1] != h->cfg.channels)
        return bsi_fail(BS_SHAPE,
                        "head: tile '%s' has %d dims, [%lld, %lld]; 1..%lld rows of %lld are expected",
                        i->name, i->ndim, (long long)i->dim[0], (long long)i->dim[1],
                        (long long)h->cfg.tile_rows, (long long)h->cfg.channels);
    if (first < 0 || first > h->cfg.vocab - *rows)
        return bsi_fail(
            BS_ARG, "head: tile of entries %lld..%lld for micro-batch %d; the vocabulary has %lld",
            (long long)first, (long long)(first + *rows - 1), micro, (long long)h->cfg.vocab);
    if (bias && (bias->ref.count != *rows || bias->ref.block != w->ref.block))
        return bsi_fail(
            BS_SHAPE,
            "head: bias '%s' [%lld] of block %d with tile '%s' of block %d; %lld elements of "
            "the tile's block are expected",
            bias->ref.info.name, (long long)bias->ref.count, bias->ref.block, i->name, w->ref.block,
            (long long)*rows);
    return BS_OK;
}

/* Where the tile's weights are in the current visit; nothing is asked for an empty micro-batch. */
static bs_status resolve(bs_head *h, const head_micro *m, const bs_weight *w, const bs_weight *bias,
                         tile *t)
{
    if (!m->rows)
        return BS_OK;
    BSI_TRY(bsi_weight_addr(w, &t->w));
    if (!bias)
        return BS_OK;
    BSI_TRY(bsi_weight_addr(bias, &t->bias));
    if (!h->bias.mem)
        return BS_OK;
    /* It is added to logits, which are f32. */
    bsi_expand x = {.from = t->bias,
                    .to = h->bias,
                    .stored = h->e->dtype,
                    .out = BS_DTYPE_F32,
                    .n = t->V,
                    .scale = 1.0};
    t->bias = h->bias;
    return bsi_expand_launch(h->e, &x, "head bias");
}

bs_status bs_head_tile(bs_head *h, int micro, bs_weight *w, bs_weight *bias, int64_t first)
{
    head_micro *m = NULL;
    tile t = {.first = first};
    BSI_TRY(find_put(h, micro, &m));
    BSI_TRY(check_tile(h, micro, w, bias, first, &t.V));
    if (first != m->next)
        return bsi_fail(BS_STATE,
                        "head: a tile starts at entry %lld, entry %lld of micro-batch %d is next",
                        (long long)first, (long long)m->next, micro);
    BSI_TRY(resolve(h, m, w, bias, &t));
    /* All chunks share one buffer of logits, P and factors. The queue is in order, so a chunk
       overwrites it only after the one before has used it. */
    for (; t.row < m->rows; t.row += h->chunk) {
        t.n = BSI_MIN(h->chunk, m->rows - t.row);
        BSI_TRY(tile_logits(h, m, &t));
        if (to_host(h->mode)) {
            BSI_TRY(tile_read(h, m, &t));
            continue;
        }
        BSI_TRY(tile_softmax(h, micro, m, &t));
        if (h->mode == BS_HEAD_TRAIN)
            BSI_TRY(tile_accumulate(h, micro, m, &t));
    }
    m->next = first + t.V;
    return BS_OK;
}

/* A micro-batch for which the whole vocabulary has been seen. */
static bs_status find_complete(bs_head *h, int micro, head_micro **out)
{
    BSI_TRY(find_put(h, micro, out));
    if ((*out)->next != h->cfg.vocab)
        return bsi_fail(BS_STATE, "head: micro-batch %d has seen %lld of %lld vocabulary entries",
                        micro, (long long)(*out)->next, (long long)h->cfg.vocab);
    return BS_OK;
}

bs_status bs_head_finish(bs_head *h, int micro, bs_tensor **dx)
{
    head_micro *m = NULL;
    BSI_TRY(find_complete(h, micro, &m));
    if (to_host(h->mode))
        return bsi_fail(BS_STATE, "head: a pass for logits has no loss to finish");
    if (m->finished)
        return bsi_fail(BS_STATE, "head: micro-batch %d is finished twice in one pass", micro);
    bool train = h->mode == BS_HEAD_TRAIN;
    tile t = {.n = m->rows};
    /* 1 / count is of the whole step: losses and gradients of micro-batches then add up as they
       are. */
    bsi_arg none = {{NULL, 0}, 0, BSI_READ};
    bsi_kcall c = {.op = BSK_HEAD_FINISH,
                   .n_args = 7,
                   .arg = {vec(&t, m->m, BSI_READ), vec(&t, m->s, BSI_READ), vec(&t, m->ly, BSI_READ),
                           train ? sum(h, &t, m->acc, BSI_READ) : none,
                           train ? sum(h, &t, m->wy, BSI_READ) : none, vec(&t, m->loss, BSI_WRITE),
                           train ? act(h, &t, m->dx, BSI_WRITE) : none},
                   .n = {m->rows, h->cfg.channels},
                   .f = {1.0 / (double)h->count},
                   .label = "head loss"};
    bsi_kcall total = {
        .op = BSK_SUM,
        .n_args = 2,
        .arg = {vec(&t, m->loss, BSI_READ),
                {bsi_addr_add(h->sums, (size_t)micro * sizeof(double)), sizeof(double), BSI_WRITE}},
        .n = {m->rows},
        .label = "head loss sum"};
    if (m->rows) {
        BSI_TRY(bsi_op_launch(h->e, &c));
        BSI_TRY(bsi_engine_launch(h->e, &total));
    }
    m->finished = true;
    if (!train) {
        if (dx)
            *dx = NULL;
        return BS_OK;
    }
    /* In f32 dx lies over acc: the kernel has read acc[t] when it writes dx[t], and a second
       finish, which would read it again, is refused above. */
    bs_place at = bsi_place(m->dx, h->e->dtype, m->rows, h->batch->cfg.tokens, h->cfg.channels);
    return bs_tensor_at(h->e, &at, dx);
}

bs_status bs_head_tile_grad(bs_head *h, int micro, bs_weight *w, bs_weight *bias, int64_t first)
{
    head_micro *m = NULL;
    tile t = {.first = first};
    int64_t C = h->cfg.channels;
    BSI_TRY(find_complete(h, micro, &m));
    if (h->mode != BS_HEAD_TRAIN)
        return bsi_fail(BS_STATE, "head: gradients of a tile are asked in a pass that does not train");
    BSI_TRY(check_tile(h, micro, w, bias, first, &t.V));
    if (!w->ref.grad.mem)
        return bsi_fail(BS_STATE, "head: tile '%s' is frozen: it has no accumulator", w->ref.info.name);
    BSI_TRY(resolve(h, m, w, bias, &t));
    for (; t.row < m->rows; t.row += h->chunk) {
        t.n = BSI_MIN(h->chunk, m->rows - t.row);
        bsi_kcall d = {.op = BSK_HEAD_DLOGITS,
                       .n_args = 6,
                       .arg = {logits_arg(h, &t, BSI_READ), label_arg(h, micro, &t),
                               vec(&t, m->m, BSI_READ), vec(&t, m->s, BSI_READ),
                               vec(&t, m->ly, BSI_READ), p_arg(h, &t, BSI_WRITE)},
                       .n = {t.n, t.V, first, h->cfg.softcap > 0},
                       .f = {1.0 / (double)h->count, h->cfg.softcap},
                       .label = "head dlogits"};
        bsi_kcall gemm = {.op = BSK_GEMM,
                          .n_args = 3,
                          .arg = {p_arg(h, &t, BSI_READ),
                                  act(h, &t, m->x, BSI_READ),
                                  {w->ref.grad, bytes_of(t.V, C), BSI_READWRITE}},
                          .n = {1, 0, t.V, C, t.n, t.V, C, C},
                          .f = {1, 1},
                          .label = "head weight gradient"};
        bsi_kcall columns = {
            .op = BSK_COLSUM,
            .n_args = 2,
            .arg = {p_arg(h, &t, BSI_READ), {{NULL, 0}, bytes_of(1, t.V), BSI_READWRITE}},
            .n = {t.n, t.V},
            .label = "head bias gradient"};
        /* The logits are computed a second time, because keeping them would need [rows, vocab]. The
           product adds to the accumulator: chunks and micro-batches sum up in the order of these
           calls. */
        BSI_TRY(tile_logits(h, m, &t));
        BSI_TRY(bsi_op_launch(h->e, &d));
        BSI_TRY(bsi_op_launch(h->e, &gemm));
        if (bias && bias->ref.grad.mem) {
            columns.arg[1].at = bias->ref.grad;
            BSI_TRY(bsi_op_launch(h->e, &columns));
        }
    }
    return BS_OK;
}

/* ---- results --------------------------------------------------------------------------------- */

bs_status bs_head_loss(bs_head *h, double *out)
{
    int done = 0, micros = h->batch->cfg.micros;
    double sum = 0;
    for (int j = 0; j < micros; j++) {
        if (h->micro[j].put && !h->micro[j].finished)
            return bsi_fail(BS_STATE, "head: micro-batch %d has not been finished", j);
        done += h->micro[j].finished;
    }
    if (!done)
        return bsi_fail(BS_STATE, "head: no micro-batch of this pass has been finished");
    if (h->e->props.executes)
        BSI_TRY(bsi_engine_read(h->e, h->sums, (size_t)micros * sizeof(double), h->host_sums));
    /* In f64 and in the order of micro-batches. Those of this pass that were not finished have 0
       from begin. */
    for (int j = 0; j < micros; j++)
        sum += h->host_sums[j];
    *out = sum / (double)h->count;
    return BS_OK;
}

bs_status bs_head_logits(bs_head *h, int micro, bs_array **out)
{
    head_micro *m = NULL;
    BSI_TRY(find_complete(h, micro, &m));
    if (!m->logits)
        return bsi_fail(BS_STATE,
                        "head: the logits of micro-batch %d were taken already, or the pass is not "
                        "for logits",
                        micro);
    *out = m->logits;
    m->logits = NULL;
    return BS_OK;
}
