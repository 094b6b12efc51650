/* SPDX-License-Identifier: Apache-2.0 */
/*
** private.h: what the files of src/io share among themselves: opening and reading plain files, files
** that appear whole or not at all, and name lookup.
*/
#ifndef BS_IO_PRIVATE_H
#define BS_IO_PRIVATE_H

#include "io/io.h"

#include <sys/stat.h>

#define BSI_HEADER_LIMIT                                                                               \
    100000000                 /* bytes of a safetensors header; that of the format's own reader   \
                                    */
#define BSI_EXTENT_ALIGN 4096 /* of extents of files that are read through the page cache */

/* open(2) for reading with `flags` added; refuses what is not a regular file. Never blocks on a FIFO.
   sys (may be NULL): errno when open itself failed, else 0. */
bs_status bsi_open_regular(const char *path, int flags, struct stat *st, int *fd, int *sys);
/* Size and identity of an open file. */
void bsi_file_identify(bsi_file *f, const struct stat *st);
/* All n bytes at offset, or BS_IO with file, offset, expected and got. */
bs_status bsi_read_all(int fd, const char *path, void *buf, size_t n, uint64_t offset);

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

/* A file that replaces `path` when it is complete: written beside it, then renamed. Zero is closed. */
typedef struct bsi_out {
    const char *path; /* the caller's */
    char *temp;
    int fd;
} bsi_out;

bs_status bsi_out_open(bsi_out *o, const char *path);
bs_status bsi_out_write(bsi_out *o, const void *data, size_t n, uint64_t offset);
/* fsync, rename, fsync of the folder. Closes o whatever happens. */
bs_status bsi_out_commit(bsi_out *o);
/* Removes the temporary file. Fine on a closed o. */
void bsi_out_abort(bsi_out *o);

/* Names -> numbers: open addressing, at most half full. Keys are the caller's and must stay. */
typedef struct bsi_names {
    struct bsi_name {
        const char *key; /* NULL: empty */
        uint64_t hash;   /* compared first: most other keys are never touched */
        int64_t value;
    } * at;
    size_t cap; /* a power of two */
} bsi_names;

bs_status bsi_names_init(bsi_names *t, size_t n); /* room for n names */
void bsi_names_free(bsi_names *t);
/* False when the key is there already. */
bool bsi_names_add(bsi_names *t, const char *key, int64_t value);
int64_t bsi_names_find(const bsi_names *t, const char *key); /* -1: absent */

#endif
