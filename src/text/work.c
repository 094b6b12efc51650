/* SPDX-License-Identifier: Apache-2.0 */
/*
** work.c: the buffers of a work that more than one step of encoding writes: the text that a step makes of another,
** and the ids with their spans.
*/
#include "text/text.h"

bool bsi_work_goes_on(const bs_tok_work *w, const bsi_view *v, size_t at)
{
    return w->continued && !bsi_view_span(v, at, at + 1).first;
}

bsi_text *bsi_work_other(const bs_tok_work *w, bsi_text pair[2], const bsi_view *v)
{
    bsi_text *out = v->p == pair[0].p ? &pair[1] : &pair[0];
    out->n = 0;
    out->spans = w->spans;
    return out;
}

bs_status bsi_work_put_span(bs_tok_work *w, uint32_t id, bs_tok_span span)
{
    if (w->n == w->id_cap) {
        void *p = w->id;
        bs_status st = bsi_grow(&p, &w->id_cap, w->n + 1, sizeof *w->id);
        w->id = p;
        BSI_TRY(st);
    }
    if (w->spans) {
        void *p = w->span;
        bs_status st = bsi_grow(&p, &w->span_cap, w->n + 1, sizeof *w->span);
        w->span = p;
        BSI_TRY(st);
        w->span[w->n] = span;
    }
    w->id[w->n++] = (int32_t)id;
    return BS_OK;
}

bs_status bsi_work_put(bs_tok_work *w, uint32_t id, const bsi_view *v, size_t first, size_t end)
{
    return bsi_work_put_span(w, id, w->spans ? bsi_view_span(v, first, end) : (bs_tok_span){0});
}
