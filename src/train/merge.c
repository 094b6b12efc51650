/* SPDX-License-Identifier: Apache-2.0 */
/*
** merge.c: adds an adapter to a weight on the host: W += scale B A, in f32, rounded once to W's dtype. W is
** cut into pieces of whole rows whose size depends on shapes only; threads take pieces in turn, so
** their number changes no bits. Beside W, A and B it takes one f32 piece per thread. Any thread calls it.
*/
#include "base/base.h"
#include "bs/train.h"
#include "bsk.h"

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

enum { PIECE = 1 << 18, MOST_THREADS = 64 };

typedef struct merge {
    bs_array *w;              /* [out, in] */
    const bs_array *a, *b;    /* f32 [r, in], [out, r] */
    int64_t out, in, r, step; /* step: rows of a piece */
    float scale;
    atomic_llong next; /* piece */
} merge;

typedef struct worker {
    merge *m;
    float *piece; /* [step, in] */
    pthread_t thread;
    bool started;
} worker;

static void round_to(bs_dtype t, const float *from, void *to, int64_t n)
{
    uint16_t *half = to;
    if (t == BS_DTYPE_F32)
        memcpy(to, from, (size_t)n * sizeof *from);
    else if (t == BS_DTYPE_BF16)
        for (int64_t i = 0; i < n; i++)
            half[i] = bsi_f32_to_bf16(from[i]);
    else
        for (int64_t i = 0; i < n; i++)
            half[i] = bsi_f32_to_f16(from[i]);
}

static void *run(void *arg)
{
    worker *k = arg;
    merge *m = k->m;
    const float *a = m->a->data, *b = m->b->data;
    size_t row = (size_t)m->in * bs_dtype_size(m->w->dtype);
    for (;;) {
        int64_t first = (int64_t)atomic_fetch_add(&m->next, 1) * m->step;
        int64_t n = BSI_MIN(m->step, m->out - first);
        if (n <= 0)
            return NULL;
        char *w = (char *)m->w->data + (size_t)first * row;
        bsk_expand_f32(&bsk_par_serial, (int)m->w->dtype, w, k->piece, n * m->in, 1.0f);
        bsk_gemm_f32(&bsk_par_serial, false, false, n, m->in, m->r, m->scale, b + first * m->r, m->r, a,
                     m->in, 1.0f, k->piece, m->in);
        round_to(m->w->dtype, k->piece, w, n * m->in);
    }
}

static bs_status check(const bs_array *w, const bs_array *a, const bs_array *b)
{
    if (w->dtype != BS_DTYPE_F32 && w->dtype != BS_DTYPE_BF16 && w->dtype != BS_DTYPE_F16)
        return bsi_fail(BS_DTYPE, "merge: a weight of %s; f32, bf16 and f16 are supported",
                        bs_dtype_name(w->dtype));
    if (a->dtype != BS_DTYPE_F32 || b->dtype != BS_DTYPE_F32)
        return bsi_fail(BS_DTYPE, "merge: A of %s and B of %s; f32 is expected",
                        bs_dtype_name(a->dtype), bs_dtype_name(b->dtype));
    if (w->ndim != 2 || a->ndim != 2 || b->ndim != 2 || a->dim[1] != w->dim[1] ||
        b->dim[0] != w->dim[0] || a->dim[0] != b->dim[1])
        return bsi_fail(BS_SHAPE, "merge: W [%lld, %lld], A [%lld, %lld], B [%lld, %lld] do not fit",
                        (long long)w->dim[0], (long long)w->dim[1], (long long)a->dim[0],
                        (long long)a->dim[1], (long long)b->dim[0], (long long)b->dim[1]);
    return BS_OK;
}

bs_status bs_lora_merge(bs_array *w, const bs_array *a, const bs_array *b, double scale, int threads)
{
    BSI_TRY(check(w, a, b));
    merge m = {.w = w, .a = a, .b = b, .out = w->dim[0], .in = w->dim[1], .r = a->dim[0]};
    worker k[MOST_THREADS] = {0};
    m.scale = (float)scale;
    m.step = BSI_MAX(PIECE / BSI_MAX(m.in, 1), 1);
    int64_t pieces = (m.out + m.step - 1) / m.step;
    long cores = threads > 0 ? threads : sysconf(_SC_NPROCESSORS_ONLN);
    int n = (int)BSI_MAX(BSI_MIN(BSI_MIN((int64_t)cores, pieces), (int64_t)MOST_THREADS), 1);
    bs_status st = bsk_cpu_init(n) ? BS_OK : BS_NOMEM;
    for (int i = 0; i < n && st == BS_OK; i++) {
        k[i].m = &m;
        k[i].piece = bsi_alloc(BS_TAG_STAGING, (size_t)(m.step * m.in) * sizeof(float));
        st = k[i].piece ? BS_OK : BS_NOMEM;
    }
    if (st == BS_OK) {
        for (int i = 1; i < n; i++) /* a thread that does not start leaves its pieces to the others */
            k[i].started = bsi_thread_start(&k[i].thread, run, &k[i], "bs-merge") == 0;
        run(&k[0]);
    }
    for (int i = 0; i < n; i++) {
        if (k[i].started)
            pthread_join(k[i].thread, NULL);
        bsi_free(k[i].piece);
    }
    return st;
}
