/* SPDX-License-Identifier: Apache-2.0 */
/* trial_on_device.h: kernel trials on a device, through the device layer. */
#ifndef TRIAL_ON_DEVICE_H
#define TRIAL_ON_DEVICE_H

#include "trial.h"

enum { SHORT = 0 }; /* trials may be large */

static bs_dev *dev;
static bsi_queue *queue;
static bsi_arg workspace;

static void must(bs_status st, const char *what)
{
    if (st == BS_OK)
        return;
    printf("FATAL %s: %s: %s\n", what, bs_status_name(st), bs_error()->msg);
    exit(1);
}

static bs_status open_device(const char *spec)
{
    BSI_TRY(bs_dev_open(spec, NULL, &dev));
    must(bsi_queue_open(dev, "compute", &queue), "queue");
    bs_dev_props props;
    bs_dev_props_get(dev, &props);
    workspace.bytes = props.workspace_bytes;
    workspace.mode = BSI_READWRITE;
    if (workspace.bytes)
        must(bsi_mem_alloc(dev, BSI_MEM_DEVICE, BS_TAG_DEVICE, workspace.bytes, &workspace.at.mem),
             "workspace");
    return BS_OK;
}

static void close_device(void)
{
    bsi_queue_close(queue);
    bsi_mem_free(workspace.at.mem);
    bs_dev_close(dev);
}

static bool run_device(const trial *t, const layout *l, unsigned char *image)
{
    bsi_mem *host, *mem;
    bsi_kcall call = {.op = t->op,
                      .n_args = t->count,
                      .dtype = t->dtype,
                      .out = t->out,
                      .workspace = workspace,
                      .label = t->name};
    must(bsi_mem_alloc(dev, BSI_MEM_PINNED, BS_TAG_STAGING, l->bytes, &host), "pinned memory");
    must(bsi_mem_alloc(dev, BSI_MEM_DEVICE, BS_TAG_DEVICE, l->bytes, &mem), "device memory");
    memcpy(host->host, image, l->bytes);
    for (int i = 0; i < t->count; i++)
        call.arg[i] =
            (bsi_arg){{mem, l->at[i]}, (size_t)t->p[i].n * element(t, t->p[i].kind), t->p[i].mode};
    memcpy(call.n, t->n, sizeof call.n);
    memcpy(call.f, t->f, sizeof call.f);
    must(bsi_copy(queue, (bsi_addr){mem, 0}, (bsi_addr){host, 0}, l->bytes), t->name);
    must(bsi_launch(queue, &call), t->name);
    must(bsi_copy(queue, (bsi_addr){host, 0}, (bsi_addr){mem, 0}, l->bytes), t->name);
    must(bsi_host_wait_queue(queue), t->name);
    memcpy(image, host->host, l->bytes);
    bsi_mem_free(host);
    bsi_mem_free(mem);
    return true;
}

#endif
