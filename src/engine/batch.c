/* SPDX-License-Identifier: Apache-2.0 */
/*
** batch.c: the micro-batches of a step. A micro-batch is rows of any lengths laid end to end; it keeps
** its ids and targets on the host (row tables, messages) and position, row identity, row starts, ids
** and targets on the device, in regions of fixed capacity. Labels are shifted here, once: the label of
** token t trains position t-1 of the same row. Owner thread only; uploads are in order on the compute
** queue.
*/
#include "engine/engine.h"

#include <string.h>

enum {
    DEVICE_ARRAYS = 3, /* dev_ids, label_at, label_id */
    NO_LOSS = -100     /* a label that trains nothing */
};

/* Positions and row identities of all micro-batches are one array each, cfg.tokens entries a micro-batch: routed
   rows are taken from all of them at once. */
static bs_status open_rows(bs_batch *b)
{
    bsi_addr pos, row_id;
    size_t bytes = (size_t)b->cfg.tokens * sizeof(int32_t);
    BSI_TRY(bsi_pool_region(b->e->pool, "batch", bytes * (size_t)b->cfg.micros, &pos));
    BSI_TRY(bsi_pool_region(b->e->pool, "batch", bytes * (size_t)b->cfg.micros, &row_id));
    for (int j = 0; j < b->cfg.micros; j++) {
        b->micro[j].pos = bsi_addr_add(pos, (size_t)j * bytes);
        b->micro[j].row_id = bsi_addr_add(row_id, (size_t)j * bytes);
    }
    return BS_OK;
}

static bs_status open_micro(bs_batch *b, bsi_micro *m)
{
    size_t bytes = (size_t)b->cfg.tokens * sizeof(int32_t);
    bsi_addr *at[DEVICE_ARRAYS] = {&m->dev_ids, &m->label_at, &m->label_id};
    for (int i = 0; i < DEVICE_ARRAYS; i++)
        BSI_TRY(bsi_pool_region(b->e->pool, "batch", bytes, at[i]));
    BSI_TRY(bsi_pool_region(b->e->pool, "batch", (size_t)(b->cfg.rows + 1) * sizeof(int32_t), &m->cu));
    BSI_TRY(bsi_pool_region(b->e->pool, "batch", (size_t)b->cfg.rows * sizeof(int32_t), &m->last_at));
    m->ids = bsi_alloc(BS_TAG_STAGING, (size_t)b->cfg.tokens * sizeof *m->ids);
    m->target = bsi_alloc(BS_TAG_STAGING, (size_t)b->cfg.tokens * sizeof *m->target);
    m->position = bsi_alloc(BS_TAG_STAGING, (size_t)b->cfg.tokens * sizeof *m->position);
    return m->ids && m->target && m->position ? BS_OK : BS_NOMEM;
}

bs_status bs_batch_open(bs_engine *e, const bs_batch_cfg *cfg, bs_batch **out)
{
    if (cfg->micros < 1 || cfg->tokens < 1 || cfg->rows < 1 || cfg->tokens > INT32_MAX ||
        cfg->rows > cfg->tokens)
        return bsi_fail(
            BS_ARG,
            "batch: micros %d, tokens %lld, rows %lld; each must be at least 1, and rows at "
            "most tokens",
            cfg->micros, (long long)cfg->tokens, (long long)cfg->rows);
    bs_batch *b = bsi_alloc(BS_TAG_MISC, sizeof *b);
    if (!b)
        return BS_NOMEM;
    b->e = e;
    b->cfg = *cfg;
    b->micro = bsi_alloc(BS_TAG_MISC, (size_t)cfg->micros * sizeof *b->micro);
    bs_status st = b->micro ? open_rows(b) : BS_NOMEM;
    for (int j = 0; st == BS_OK && j < cfg->micros; j++)
        st = open_micro(b, &b->micro[j]);
    if (st != BS_OK) {
        bs_batch_close(b);
        return st;
    }
    *out = b;
    return BS_OK;
}

void bs_batch_close(bs_batch *b)
{
    if (!b)
        return;
    for (int j = 0; b->micro && j < b->cfg.micros; j++) {
        bsi_free(b->micro[j].ids);
        bsi_free(b->micro[j].target);
        bsi_free(b->micro[j].position);
    }
    bsi_free(b->micro);
    bsi_free(b);
}

static bs_status check_rows(const bs_batch *b, int micro, const bs_micro *d, int64_t *tokens)
{
    if (micro < 0 || micro >= b->cfg.micros)
        return bsi_fail(BS_ARG, "batch: micro-batch %d of %d", micro, b->cfg.micros);
    if (d->n_rows < 1 || d->n_rows > b->cfg.rows)
        return bsi_fail(BS_ARG, "batch: micro-batch %d has %lld rows, 1..%lld fit", micro,
                        (long long)d->n_rows, (long long)b->cfg.rows);
    *tokens = 0;
    for (int64_t r = 0; r < d->n_rows; r++) {
        if (d->row_len[r] < 1 || d->row_len[r] > b->cfg.tokens - *tokens)
            return bsi_fail(
                BS_ARG,
                "batch: row %lld of micro-batch %d has %lld tokens; it holds 1..%lld, %lld are "
                "taken",
                (long long)r, micro, (long long)d->row_len[r], (long long)b->cfg.tokens,
                (long long)*tokens);
        /* Positions are i32 on the device. */
        if (d->start && (d->start[r] < 0 || d->start[r] > INT32_MAX - d->row_len[r]))
            return bsi_fail(BS_ARG, "batch: row %lld of micro-batch %d starts at position %lld",
                            (long long)r, micro, (long long)d->start[r]);
        /* So are identities of rows. */
        if (d->row_id && (d->row_id[r] < INT32_MIN || d->row_id[r] > INT32_MAX))
            return bsi_fail(
                BS_ARG, "batch: row %lld of micro-batch %d has the id %lld, which 32 bits do not hold",
                (long long)r, micro, (long long)d->row_id[r]);
        *tokens += d->row_len[r];
    }
    return BS_OK;
}

static bs_status check_ids(const bs_micro *d, int micro, int64_t tokens)
{
    for (int64_t t = 0; t < tokens; t++) {
        if (d->ids[t] < 0 || d->ids[t] > INT32_MAX)
            return bsi_fail(BS_ARG, "batch: token %lld of micro-batch %d is %lld, not a token id",
                            (long long)t, micro, (long long)d->ids[t]);
        if (d->labels && d->labels[t] < 0 && d->labels[t] != NO_LOSS)
            return bsi_fail(
                BS_ARG,
                "batch: the label of token %lld of micro-batch %d is %lld; -100 or a token id is expected",
                (long long)t, micro, (long long)d->labels[t]);
    }
    return BS_OK;
}

static bs_status upload(bs_batch *b, bsi_addr to, const int32_t *v, int64_t n)
{
    return n ? bsi_engine_write(b->e, to, v, (size_t)n * sizeof *v) : BS_OK;
}

bs_status bs_batch_set(bs_batch *b, int micro, const bs_micro *d)
{
    int64_t tokens = 0, longest = 0, least = INT64_MAX, most = INT64_MIN, at = 0, n = 0;
    BSI_TRY(check_rows(b, micro, d, &tokens));
    BSI_TRY(check_ids(d, micro, tokens)); /* before anything of the micro-batch changes */
    bsi_micro *m = &b->micro[micro];
    /* Four arrays of `tokens`, rows + 1 starts and rows ends. Host memory that may go at the end of
       the call: an upload copies it into staging. */
    int32_t *tmp = bsi_alloc(BS_TAG_STAGING, (size_t)(4 * tokens + 2 * d->n_rows + 1) * sizeof *tmp);
    if (!tmp)
        return BS_NOMEM;
    int32_t *pos = tmp, *row = pos + tokens, *ids = row + tokens, *lab = ids + tokens,
            *cu = lab + tokens, *last = cu + d->n_rows + 1;
    bs_status st = BS_OK;
    cu[0] = 0;
    for (int64_t r = 0; r < d->n_rows; at += d->row_len[r], r++) {
        int64_t start = d->start ? d->start[r] : 0, id_of_row = d->row_id ? d->row_id[r] : r;
        for (int64_t t = 0; t < d->row_len[r]; t++) {
            int64_t id = d->ids[at + t];
            pos[at + t] = (int32_t)(start + t);
            row[at + t] = (int32_t)id_of_row;
            ids[at + t] = (int32_t)id;
            m->ids[at + t] = id;
            /* The logits at t - 1 predict token t. The first label of a row has no such place:
               position t - 1 is of the row before. Labels above INT32_MAX are refused later by the
               head, which knows the vocabulary and looks at the 64-bit target. */
            if (d->labels && t > 0 && d->labels[at + t] >= 0) {
                m->position[n] = (int32_t)(at + t - 1);
                m->target[n] = d->labels[at + t];
                lab[n] = (int32_t)d->labels[at + t];
                n++;
            }
        }
        cu[r + 1] = (int32_t)(at + d->row_len[r]);
        last[r] = cu[r + 1] - 1;
        longest = BSI_MAX(longest, start + d->row_len[r]);
        least = BSI_MIN(least, id_of_row);
        most = BSI_MAX(most, id_of_row);
    }
    m->tokens = tokens;
    m->longest = longest;
    m->least_id = least;
    m->most_id = most;
    m->rows = d->n_rows;
    m->labelled = n;
    /* On the compute queue: ops of an earlier use of this micro-batch that are still queued read
       the old values. */
    if ((st = upload(b, m->pos, pos, tokens)) == BS_OK &&
        (st = upload(b, m->row_id, row, tokens)) == BS_OK &&
        (st = upload(b, m->dev_ids, ids, tokens)) == BS_OK &&
        (st = upload(b, m->label_at, m->position, n)) == BS_OK &&
        (st = upload(b, m->label_id, lab, n)) == BS_OK &&
        (st = upload(b, m->last_at, last, d->n_rows)) == BS_OK)
        st = upload(b, m->cu, cu, d->n_rows + 1);
    bsi_free(tmp);
    return st;
}

bs_status bs_batch_begin(bs_batch *b, int micros)
{
    if (micros < 1 || micros > b->cfg.micros)
        return bsi_fail(BS_ARG, "batch: a step of %d micro-batches, 1..%d are planned", micros,
                        b->cfg.micros);
    b->micros = micros;
    return BS_OK;
}

int64_t bs_batch_tokens(const bs_batch *b, int micro)
{
    return micro >= 0 && micro < b->cfg.micros ? b->micro[micro].tokens : 0;
}

int64_t bs_batch_longest(const bs_batch *b, int micro)
{
    return micro >= 0 && micro < b->cfg.micros ? b->micro[micro].longest : 0;
}

int64_t bs_batch_labelled(const bs_batch *b, int micro)
{
    return micro >= 0 && micro < b->cfg.micros ? b->micro[micro].labelled : 0;
}
