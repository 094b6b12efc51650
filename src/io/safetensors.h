/* SPDX-License-Identifier: Apache-2.0 */
/* safetensors.h: what the reader and the writer of the format share. */
#ifndef BS_IO_SAFETENSORS_H
#define BS_IO_SAFETENSORS_H

#include "io/io.h"

/* Bytes of a header at most; the limit of the format's own reader. */
#define BSI_HEADER_LIMIT 100000000

/* An element type of the safetensors format. Pointers to them compare as the types do in size order. */
typedef struct bsi_format {
    const char *name; /* "BF16" */
    unsigned bits;
    bs_dtype dtype; /* BS_DTYPE_COUNT: none that we compute with */
} bsi_format;

const bsi_format *bsi_format_named(const char *name); /* NULL: unknown */
const bsi_format *bsi_format_of(bs_dtype t);
/* n bytes of a tensor's data from byte `at` of it on. */
bs_status bsi_safetensors_bytes(const bs_safetensors *st, const bs_safetensors_tensor *t, uint64_t at,
                                void *to, size_t n);

#endif
