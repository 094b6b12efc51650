/* SPDX-License-Identifier: Apache-2.0 */
/*
** types.c: the types of boxes that more than one file of the bindings handles, and how each ends. A file's own types
** are in it.
*/
#include "lua/bsl.h"

static void close_array(void *h)
{
    bs_array_free(h);
}

static void close_manifest(void *h)
{
    bs_manifest_free(h);
}

static void close_placement(void *h)
{
    bs_placement_free(h);
}

static void close_device(void *h)
{
    bs_dev_close(h);
}

static void close_engine(void *h)
{
    bs_engine_close(h);
}

static void close_scope(void *h)
{
    bs_scope_close(h);
}

static void close_kept(void *h)
{
    bs_kept_free(h);
}

static void close_batch(void *h)
{
    bs_batch_close(h);
}

static void close_tensor(void *h)
{
    bs_tensor_release(h);
}

static void close_weight(void *h)
{
    bs_weight_free(h);
}

static void close_params(void *h)
{
    bs_params_close(h);
}

static void close_store(void *h)
{
    bs_store_close(h);
}

static void close_routing(void *h)
{
    bs_routing_close(h);
}

static void close_stream(void *h)
{
    bs_stream_close(h);
}

const bsl_type bsl_array_type = {"bs.array", close_array, 0, 0};
const bsl_type bsl_manifest_type = {"bs.manifest", close_manifest, 0, 0};
const bsl_type bsl_placement_type = {"bs.placement", close_placement, 1, 0};
const bsl_type bsl_device_type = {"bs.device", close_device, 0, 0};
const bsl_type bsl_engine_type = {"bs.engine", close_engine, 1, 2};
const bsl_type bsl_scope_type = {"bs.scope", close_scope, 2, 1};
const bsl_type bsl_kept_type = {"bs.kept", close_kept, 2, 0};
const bsl_type bsl_batch_type = {"bs.batch", close_batch, 1, 0};
const bsl_type bsl_tensor_type = {"bs.tensor", close_tensor, 1, 0};
const bsl_type bsl_weight_type = {"bs.weight", close_weight, 2, 0};
const bsl_type bsl_params_type = {"bs.params", close_params, 1, 0};
const bsl_type bsl_store_type = {"bs.store", close_store, 2, 0};
const bsl_type bsl_routing_type = {"bs.routing", close_routing, 2, 0};
const bsl_type bsl_stream_type = {"bs.stream", close_stream, 2, 0};
