/* SPDX-License-Identifier: Apache-2.0 */
/*
** optim.c: what happens to the accumulators of a step: zeroing, the global norm, one AdamW step
** (Loshchilov and Hutter 2019) with the clipping of torch.nn.utils.clip_grad_norm_. Owner thread only;
** all on the compute queue. Whole regions are one launch each; base parameters are updated where they
** live, one launch each. Nothing is changed unless every argument has passed its check.
*/
#include "train/train.h"

#include <math.h>

static bs_status check_sealed(const bs_params *p)
{
    return p->sealed
               ? BS_OK
               : bsi_fail(BS_STATE, "the parameters have no device memory before they are sealed");
}

static bs_status check_trained(const bs_params *p)
{
    BSI_TRY(check_sealed(p));
    return p->frozen ? bsi_fail(BS_STATE, "the parameters are frozen: they have no gradients") : BS_OK;
}

bs_status bs_params_zero_grad(bs_params *p)
{
    BSI_TRY(check_trained(p));
    return p->n ? bsi_fill(p->e->compute, p->grad, 0, bsi_params_grad_bytes(p)) : BS_OK;
}

bs_status bs_params_norm(bs_params *p, double *out)
{
    double sum = 0;
    BSI_TRY(check_trained(p));
    if (p->n) {
        size_t bytes = bsi_params_grad_bytes(p);
        bsi_kcall c = {.op = BSK_SUMSQ,
                       .n_args = 2,
                       .arg = {{p->grad, bytes, BSI_READ}, {p->sum, sizeof sum, BSI_WRITE}},
                       .n = {(int64_t)(bytes / sizeof(float))},
                       .label = "gradient norm"};
        /* One launch over all: padding between parameters is zero and adds nothing. */
        BSI_TRY(bsi_engine_launch(p->e, &c));
        if (p->e->props.executes)
            BSI_TRY(bsi_engine_read(p->e, p->sum, sizeof sum, &sum));
    }
    *out = sqrt(sum);
    return BS_OK;
}

static bs_status check_adamw(const bs_adamw *c)
{
    if (c->step < 1)
        return bsi_fail(BS_ARG, "AdamW: step %lld; steps are counted from 1", (long long)c->step);
    if (!(c->beta1 >= 0 && c->beta1 < 1) || !(c->beta2 >= 0 && c->beta2 < 1))
        return bsi_fail(BS_ARG, "AdamW: betas %g, %g; both must be in [0, 1)", c->beta1, c->beta2);
    if (!(c->lr >= 0 && isfinite(c->lr)) || !(c->weight_decay >= 0 && isfinite(c->weight_decay)))
        return bsi_fail(BS_ARG, "AdamW: lr %g, weight_decay %g; both must be finite and not negative",
                        c->lr, c->weight_decay);
    if (!(c->eps > 0 && isfinite(c->eps)))
        return bsi_fail(BS_ARG, "AdamW: eps %g; it must be positive: a zero gradient would give NaN",
                        c->eps);
    if (!(c->clip >= 0 && isfinite(c->clip)))
        return bsi_fail(BS_ARG, "AdamW: clip %g; it is a global norm, 0 = off", c->clip);
    return BS_OK;
}

bs_status bs_params_apply(bs_params *p, const bs_adamw *cfg, double norm)
{
    BSI_TRY(check_trained(p));
    BSI_TRY(check_adamw(cfg));
    /* Everything that can be refused is refused before the first launch: a step changes all
       parameters or none. */
    if (!(norm >= 0) || !isfinite(norm))
        return bsi_fail(BS_NONFINITE, "AdamW step %lld: the gradient norm is %g; nothing was changed",
                        (long long)cfg->step, norm);
    for (int i = 0; i < p->n; i++)
        if (p->param[i].update && !p->param[i].home.mem)
            return bsi_fail(BS_STATE, "parameter '%s' has not been told its home; nothing was changed",
                            p->param[i].name);
    /* clip_grad_norm_ of PyTorch, with its 1e-6: where the quotient is not below 1 the factor is
       exactly 1, which leaves every bit of the gradient. The kernel multiplies as it reads, so the
       accumulators stay as they are. */
    double scale = cfg->clip > 0 ? fmin(1.0, cfg->clip / (norm + 1e-6)) : 1.0;
    /* Bias corrections 1 - beta^t (Kingma and Ba 2015) in f64: for beta near 1 and small t the
       difference cancels, and f32 would lose several of its digits. */
    bsi_kcall c = {.op = BSK_ADAMW,
                   .n_args = 5,
                   .f = {cfg->lr, cfg->beta1, cfg->beta2, cfg->eps, cfg->weight_decay,
                         1.0 - pow(cfg->beta1, (double)cfg->step),
                         1.0 - pow(cfg->beta2, (double)cfg->step), scale},
                   .label = "adamw"};
    if (p->own) { /* one offset in every region (train.h), so one launch for all own parameters */
        c.arg[0] = (bsi_arg){p->value, p->own, BSI_READWRITE};
        c.arg[1] = (bsi_arg){p->grad, p->own, BSI_READ};
        c.arg[2] = (bsi_arg){p->m, p->own, BSI_READWRITE};
        c.arg[3] = (bsi_arg){p->v, p->own, BSI_READWRITE};
        c.arg[4] = (bsi_arg){p->copy, bsi_params_copy_bytes(p), BSI_WRITE};
        c.n[0] = (int64_t)(p->own / sizeof(float));
        c.out = p->dtype;
        BSI_TRY(bsi_engine_launch(p->e, &c));
    }
    c.arg[4].bytes = 0; /* a base weight is expanded when it is used */
    c.out = BS_DTYPE_F32;
    for (int i = 0; i < p->n; i++) {
        const bsi_param *q = &p->param[i];
        if (!q->update)
            continue;
        size_t at = bsi_param_moment_off(p, q);
        c.arg[0] = (bsi_arg){bsi_place_addr(&q->home), q->bytes, BSI_READWRITE};
        c.arg[1] = (bsi_arg){bsi_param_grad(p, q), q->bytes, BSI_READ};
        c.arg[2] = (bsi_arg){bsi_addr_add(p->m, at), q->bytes, BSI_READWRITE};
        c.arg[3] = (bsi_arg){bsi_addr_add(p->v, at), q->bytes, BSI_READWRITE};
        c.n[0] = (int64_t)(q->bytes / sizeof(float));
        BSI_TRY(bsi_engine_launch(p->e, &c));
    }
    return BS_OK;
}
