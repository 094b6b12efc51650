/* SPDX-License-Identifier: Apache-2.0 */
/*
** open.c: opens a device by its name. The one place that knows which devices there are; whoever uses a
** device sees the contract of dev/dev.h only.
*/
#include "backend/check/check.h"
#include "backend/cpu/cpu.h"
#include "backend/cuda/cuda.h"
#include "backend/meta/meta.h"

#include <string.h>

#define MAX_THREADS 1024
#define CHECK       "check:"

/* The backend of a plain name ("cpu", "meta"), or a failure that lists the names. */
static bs_status find(const char *name, const bsi_dev_ops **out)
{
    static const bsi_dev_ops *const backend[] = {
        &bsi_dev_cpu,
        &bsi_dev_meta,
#if BS_HAVE_CUDA
        &bsi_dev_cuda,
#endif
    };
    for (size_t i = 0; i < BSI_COUNT(backend); i++) {
        if (strcmp(name, backend[i]->name) == 0) {
            *out = backend[i];
            return BS_OK;
        }
    }
    if (strcmp(name, "cuda") == 0)
        return bsi_fail(BS_UNSUPPORTED,
                        "device 'cuda' is not in this build (BS_CUDA=ON puts it there); use 'cpu'");
    return bsi_fail(
        BS_ARG, "no device is called '%s'; there are 'cpu', 'meta', 'cuda', 'check:cpu', ...", name);
}

bs_status bs_dev_open(const char *spec, const bs_dev_cfg *cfg, bs_dev **out)
{
    static const bs_dev_cfg defaults;
    const bsi_dev_ops *ops = NULL;
    *out = NULL;
    if (!spec || strlen(spec) >= sizeof((*out)->spec))
        return bsi_fail(BS_ARG, "a device needs a name such as 'cpu' (at most %zu characters)",
                        sizeof((*out)->spec) - 1);
    if (!cfg)
        cfg = &defaults;
    if (cfg->threads < 0 || cfg->threads > MAX_THREADS)
        return bsi_fail(BS_ARG, "device '%s': %d threads asked, 0 (all cores) to %d possible", spec,
                        cfg->threads, MAX_THREADS);
    bool checked = strncmp(spec, CHECK, strlen(CHECK)) == 0;
    BSI_TRY(find(checked ? spec + strlen(CHECK) : spec, &ops));
    return checked ? bsi_dev_open(spec, &bsi_dev_check, ops, cfg, out)
                   : bsi_dev_open(spec, ops, NULL, cfg, out);
}
