/* SPDX-License-Identifier: Apache-2.0 */
/*
** rows.c: kernels over the rows of x [T,C]: bias and its gradient, softmax, column slices, row
** gates, gather and scatter of rows, dropout. Rows are independent; where rows are summed (colsum,
** scatter) the work is cut by columns and each column walks the rows in order.
*/
#include "cpu.h"
#include "kernels.h"

enum { COLUMNS = 64 }; /* columns per item when work is cut by columns */

static int64_t column_blocks(int64_t C)
{
    return (C + COLUMNS - 1) / COLUMNS;
}

/* Operands of every kernel here; unused ones are NULL. */
struct args {
    const float *a, *b, *c;
    const int32_t *index;
    float *y, *z;
    int64_t T, C, first, n;
    float s;
};

static void bias_body(const void *arg, int64_t first, int64_t end)
{
    const struct args *p = arg;
    const float *b = p->a;
    for (int64_t t = first; t < end; t++) {
        float *y = p->y + t * p->C;
        for (int64_t c = 0; c < p->C; c++)
            y[c] += b[c];
    }
}

void bsk_bias_f32(bsk_par *par, float *y, const float *b, int64_t T, int64_t C)
{
    struct args p = {.a = b, .y = y, .C = C};
    bsk_chunks(par, T, C, bias_body, &p);
}

static void colsum_body(const void *arg, int64_t first, int64_t end)
{
    const struct args *p = arg;
    for (int64_t c0 = first * COLUMNS; c0 < BSI_MIN(end * COLUMNS, p->C); c0 += COLUMNS) {
        int n = (int)BSI_MIN(COLUMNS, p->C - c0);
        double acc[COLUMNS] = {0};
        for (int64_t t = 0; t < p->T; t++)
            for (int c = 0; c < n; c++)
                acc[c] += (double)p->a[t * p->C + c0 + c];
        for (int c = 0; c < n; c++)
            p->y[c0 + c] = (float)((double)p->y[c0 + c] + acc[c]);
    }
}

void bsk_colsum_f32(bsk_par *par, const float *x, float *sum, int64_t T, int64_t C)
{
    struct args p = {.a = x, .y = sum, .T = T, .C = C};
    if (T > 0)
        bsk_chunks(par, column_blocks(C), T * COLUMNS, colsum_body, &p);
}

BSK_WIDE static void softmax_body(const void *arg, int64_t first, int64_t end)
{
    const struct args *p = arg;
    for (int64_t t = first; t < end; t++) {
        float *y = p->y + t * p->C;
        memmove(y, p->a + t * p->C, (size_t)p->C * sizeof *y);
        double sum = bsk_exp_sum(y, p->C, bsk_max(y, p->C, -INFINITY));
        float inv = (float)(1.0 / sum);
        for (int64_t c = 0; c < p->C; c++)
            y[c] *= inv;
    }
}

void bsk_softmax_f32(bsk_par *par, const float *x, float *y, int64_t T, int64_t C)
{
    struct args p = {.a = x, .y = y, .C = C};
    bsk_chunks(par, T, 4 * C, softmax_body, &p);
}

/* dx = y * (dy - sum(y * dy)) */
static void softmax_bwd_body(const void *arg, int64_t first, int64_t end)
{
    const struct args *p = arg;
    for (int64_t t = first; t < end; t++) {
        const float *y = p->a + t * p->C, *dy = p->b + t * p->C;
        float *dx = p->y + t * p->C;
        float dot = (float)bsk_dot(y, dy, p->C);
        for (int64_t c = 0; c < p->C; c++)
            dx[c] = y[c] * (dy[c] - dot);
    }
}

void bsk_softmax_bwd_f32(bsk_par *par, const float *y, const float *dy, float *dx, int64_t T, int64_t C)
{
    struct args p = {.a = y, .b = dy, .y = dx, .C = C};
    bsk_chunks(par, T, 2 * C, softmax_bwd_body, &p);
}

static void columns_body(const void *arg, int64_t first, int64_t end)
{
    const struct args *p = arg;
    for (int64_t t = first; t < end; t++)
        memcpy(p->y + t * p->n, p->a + t * p->C + p->first, (size_t)p->n * sizeof(float));
}

void bsk_columns_f32(bsk_par *par, const float *x, float *y, int64_t T, int64_t C, int64_t first,
                     int64_t n)
{
    struct args p = {.a = x, .y = y, .C = C, .first = first, .n = n};
    bsk_chunks(par, T, n, columns_body, &p);
}

static void columns_bwd_body(const void *arg, int64_t first, int64_t end)
{
    const struct args *p = arg;
    for (int64_t t = first; t < end; t++) {
        float *dx = p->y + t * p->C;
        memset(dx, 0, (size_t)p->C * sizeof *dx);
        memcpy(dx + p->first, p->a + t * p->n, (size_t)p->n * sizeof *dx);
    }
}

void bsk_columns_bwd_f32(bsk_par *par, const float *dy, float *dx, int64_t T, int64_t C, int64_t first,
                         int64_t n)
{
    struct args p = {.a = dy, .y = dx, .C = C, .first = first, .n = n};
    bsk_chunks(par, T, C, columns_bwd_body, &p);
}

static void row_scale_body(const void *arg, int64_t first, int64_t end)
{
    const struct args *p = arg; /* first: column, n: columns of g */
    for (int64_t t = first; t < end; t++) {
        const float *x = p->a + t * p->C;
        float *y = p->y + t * p->C, g = p->b[t * p->n + p->first];
        for (int64_t c = 0; c < p->C; c++)
            y[c] = g * x[c];
    }
}

void bsk_row_scale_f32(bsk_par *par, const float *x, const float *g, float *y, int64_t T, int64_t C,
                       int64_t G, int64_t column)
{
    struct args p = {.a = x, .b = g, .y = y, .C = C, .first = column, .n = G};
    bsk_chunks(par, T, C, row_scale_body, &p);
}

static void row_scale_bwd_body(const void *arg, int64_t first, int64_t end)
{
    const struct args *p = arg;
    for (int64_t t = first; t < end; t++) {
        const float *x = p->a + t * p->C, *dy = p->c + t * p->C;
        float *dx = p->y + t * p->C, g = p->b[t * p->n + p->first];
        float dg = (float)bsk_dot(x, dy, p->C);
        for (int64_t c = 0; c < p->C; c++)
            dx[c] = g * dy[c];
        memset(p->z + t * p->n, 0, (size_t)p->n * sizeof(float));
        p->z[t * p->n + p->first] = dg;
    }
}

void bsk_row_scale_bwd_f32(bsk_par *par, const float *x, const float *g, const float *dy, float *dx,
                           float *dg, int64_t T, int64_t C, int64_t G, int64_t column)
{
    struct args p = {.a = x, .b = g, .c = dy, .y = dx, .z = dg, .C = C, .first = column, .n = G};
    bsk_chunks(par, T, 2 * C, row_scale_bwd_body, &p);
}

void bsk_row_mul_f32(bsk_par *par, float *x, const float *factor, int64_t T, int64_t C)
{
    struct args p = {.a = x, .b = factor, .y = x, .C = C, .first = 0, .n = 1};
    bsk_chunks(par, T, C, row_scale_body, &p);
}

static void gather_body(const void *arg, int64_t first, int64_t end)
{
    const struct args *p = arg;
    for (int64_t i = first; i < end; i++)
        memcpy(p->y + i * p->C, p->a + (int64_t)p->index[i] * p->C, (size_t)p->C * sizeof(float));
}

void bsk_gather_rows_f32(bsk_par *par, const float *x, const int32_t *index, float *y, int64_t n,
                         int64_t C)
{
    struct args p = {.a = x, .index = index, .y = y, .C = C};
    bsk_chunks(par, n, C, gather_body, &p);
}

static void scatter_body(const void *arg, int64_t first, int64_t end)
{
    const struct args *p = arg;
    int64_t c0 = first * COLUMNS, c1 = BSI_MIN(end * COLUMNS, p->C);
    for (int64_t i = 0; i < p->n; i++) {
        const float *dy = p->a + i * p->C;
        float *dx = p->y + (int64_t)p->index[i] * p->C;
        for (int64_t c = c0; c < c1; c++)
            dx[c] += p->s * dy[c];
    }
}

void bsk_scatter_rows_f32(bsk_par *par, const float *dy, const int32_t *index, float *dx, int64_t n,
                          int64_t C, float s)
{
    struct args p = {.a = dy, .index = index, .y = dx, .C = C, .n = n, .s = s};
    bsk_chunks(par, column_blocks(C), n * COLUMNS, scatter_body, &p);
}

struct dropout {
    const float *x;           /* [T,C] */
    const int32_t *row, *pos; /* [T] */
    float *y;                 /* [T,C] */
    int64_t C;
    uint32_t key[2], step;
    float probability, keep;
};

enum { GROUPS = 32 }; /* counters that are worked on side by side */

/* bsi_philox of GROUPS counters {step, row, pos, group + l}; word[i][l] is word i of counter l. */
BSK_INLINE void philox_groups(const struct dropout *p, uint32_t row, uint32_t pos, uint32_t group,
                              uint32_t word[4][GROUPS])
{
    uint32_t k0 = p->key[0], k1 = p->key[1];
    for (uint32_t l = 0; l < GROUPS; l++) {
        word[0][l] = p->step;
        word[1][l] = row;
        word[2][l] = pos;
        word[3][l] = group + l;
    }
    for (int round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u)
        for (int l = 0; l < GROUPS; l++) {
            uint64_t a = (uint64_t)0xD2511F53u * word[0][l], b = (uint64_t)0xCD9E8D57u * word[2][l];
            word[0][l] = (uint32_t)(b >> 32) ^ word[1][l] ^ k0;
            word[2][l] = (uint32_t)(a >> 32) ^ word[3][l] ^ k1;
            word[1][l] = (uint32_t)b;
            word[3][l] = (uint32_t)a;
        }
}

/* The word of an element is a function of (key, step, row, position, channel), so no tiling, order of
   rows or placement of the micro-batch changes the mask, and the backward applies the same one. */
BSK_WIDE static void dropout_body(const void *arg, int64_t first, int64_t end)
{
    const struct dropout *p = arg;
    for (int64_t t = first; t < end; t++)
        for (int64_t c0 = 0; c0 < p->C; c0 += 4 * GROUPS) {
            uint32_t word[4][GROUPS];
            philox_groups(p, (uint32_t)p->row[t], (uint32_t)p->pos[t], (uint32_t)(c0 / 4), word);
            int n = (int)BSI_MIN(4 * GROUPS, p->C - c0);
            const float *x = p->x + t * p->C + c0;
            float *y = p->y + t * p->C + c0;
            float u[4 * GROUPS];
            for (int l = 0; l < GROUPS; l++)
                for (int i = 0; i < 4; i++)
                    u[4 * l + i] = bsi_uniform(word[i][l]);
            for (int c = 0; c < n; c++)
                y[c] = u[c] < p->probability ? 0.0f : x[c] / p->keep;
        }
}

void bsk_dropout_f32(bsk_par *par, const float *x, const int32_t *row, const int32_t *pos, float *y,
                     int64_t T, int64_t C, uint32_t key0, uint32_t key1, uint32_t step,
                     float probability)
{
    struct dropout p = {x, row, pos, y, C, {key0, key1}, step, probability, 1.0f - probability};
    bsk_chunks(par, T, 8 * C, dropout_body, &p);
}
