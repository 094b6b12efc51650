/* SPDX-License-Identifier: Apache-2.0 */
/*
** kernels.h: typed CPU kernels that only the table calls; shapes and meaning as in bsk.h, operands
** in its order. An output may be the same pointer as an input of the same shape unless said
** otherwise.
*/
#ifndef BSK_CPU_KERNELS_H
#define BSK_CPU_KERNELS_H

#include "bsk.h"

/* rows.c */
void bsk_bias_f32(bsk_par *par, float *y, const float *b, int64_t T, int64_t C);
void bsk_colsum_f32(bsk_par *par, const float *x, float *sum, int64_t T, int64_t C);
void bsk_softmax_f32(bsk_par *par, const float *x, float *y, int64_t T, int64_t C);
void bsk_softmax_bwd_f32(bsk_par *par, const float *y, const float *dy, float *dx, int64_t T,
                         int64_t C);
/* x [T,C] -> y [T,n]; not in place */
void bsk_columns_f32(bsk_par *par, const float *x, float *y, int64_t T, int64_t C, int64_t first,
                     int64_t n);
/* dy [T,n] -> dx [T,C]; not in place */
void bsk_columns_bwd_f32(bsk_par *par, const float *dy, float *dx, int64_t T, int64_t C, int64_t first,
                         int64_t n);
/* g, dg [T,G] */
void bsk_row_scale_f32(bsk_par *par, const float *x, const float *g, float *y, int64_t T, int64_t C,
                       int64_t G, int64_t column);
void bsk_row_scale_bwd_f32(bsk_par *par, const float *x, const float *g, const float *dy, float *dx,
                           float *dg, int64_t T, int64_t C, int64_t G, int64_t column);
void bsk_row_mul_f32(bsk_par *par, float *x, const float *factor, int64_t T, int64_t C);
void bsk_gather_rows_f32(bsk_par *par, const float *x, const int32_t *index, float *y, int64_t n,
                         int64_t C);
void bsk_scatter_rows_f32(bsk_par *par, const float *dy, const int32_t *index, float *dx, int64_t n,
                          int64_t C, float s);
void bsk_dropout_f32(bsk_par *par, const float *x, const int32_t *row, const int32_t *pos, float *y,
                     int64_t T, int64_t C, uint32_t key0, uint32_t key1, uint32_t step,
                     float probability);

/* route.c */
typedef struct bsk_routing {
    int64_t E, k;
    int kind; /* bsk_route */
    int64_t groups, kept;
    bool renorm;
    float scale;
} bsk_routing;
void bsk_route_f32(bsk_par *par, const bsk_routing *r, const float *z, const float *bias, float *w,
                   int32_t *id, int64_t T);
void bsk_route_bwd_f32(bsk_par *par, const bsk_routing *r, const float *z, const int32_t *id,
                       const float *dw, float *dz, int64_t T);
void bsk_sort_rows(const int32_t *id, int32_t *order, int32_t *place, int32_t *offset, int64_t n,
                   int64_t E);
void bsk_take_rows_f32(bsk_par *par, const float *x, const int32_t *order, float *y, int64_t n,
                       int64_t C, int64_t k, int64_t rows, int64_t stride);
typedef struct bsk_pieces {
    int64_t k, begin, n, rows, stride;
} bsk_pieces;
void bsk_sum_rows_f32(bsk_par *par, const float *y, const int32_t *place, float *sum, int64_t R,
                      int64_t C, const bsk_pieces *to);

/* elementwise.c */
void bsk_glu_f32(bsk_par *par, const float *g, const float *u, float *y, int64_t N, int act);
void bsk_glu_bwd_f32(bsk_par *par, const float *g, const float *u, const float *dy, float *dg,
                     float *du, int64_t N, int act);
/* N: T * H, elements of y */
void bsk_glu_clamped_f32(bsk_par *par, const float *x, float *y, int64_t N, float alpha, float limit);
void bsk_glu_clamped_bwd_f32(bsk_par *par, const float *x, const float *dy, float *dx, int64_t N,
                             float alpha, float limit);
void bsk_activation_f32(bsk_par *par, const float *x, float *y, int64_t N, int act);
void bsk_activation_bwd_f32(bsk_par *par, const float *x, const float *dy, float *dx, int64_t N,
                            int act);
void bsk_add_f32(bsk_par *par, const float *a, const float *b, float *y, int64_t N);
void bsk_mul_f32(bsk_par *par, const float *a, const float *b, float *y, int64_t N);
void bsk_axpy_f32(bsk_par *par, const float *x, float *y, int64_t N, float s);
void bsk_scale_f32(bsk_par *par, const float *x, float *y, int64_t N, float s);
void bsk_softcap_f32(bsk_par *par, float *x, int64_t N, float cap);

/* head.c; cap 0: no soft-cap */
/* P may be the logits themselves. */
void bsk_head_tile_f32(bsk_par *par, const float *logits, const int32_t *label, float *m, float *s,
                       float *ly, float *factor, float *P, int64_t T, int64_t V, int64_t first,
                       float cap);
void bsk_head_pick_f32(bsk_par *par, const float *w, const int32_t *label, const float *ly, float *wy,
                       int64_t T, int64_t C, int64_t first, int64_t V, float cap);
void bsk_head_finish_f32(bsk_par *par, const float *m, const float *s, const float *ly,
                         const float *acc, const float *wy, float *loss, float *dx, int64_t T,
                         int64_t C, float inv_count);
void bsk_head_dlogits_f32(bsk_par *par, const float *logits, const int32_t *label, const float *m,
                          const float *s, const float *ly, float *P, int64_t T, int64_t V,
                          int64_t first, float cap, float inv_count);

/* optim.c */
void bsk_sum_f32(bsk_par *par, const float *x, double *out, int64_t N);
void bsk_sumsq_f32(bsk_par *par, const float *x, double *out, int64_t N);
/* f: lr, beta1, beta2, eps, decay, bc1, bc2, gscale */
void bsk_adamw_f32(bsk_par *par, float *p, const float *g, float *m, float *v, int64_t N,
                   const double f[8]);

#endif
