/* SPDX-License-Identifier: Apache-2.0 */
/*
** file.h: regular files for the other files of src/io: identity, and files that
** appear whole or not at all.
*/
#ifndef BS_IO_FILE_H
#define BS_IO_FILE_H

#include "io/io.h"

#include <sys/stat.h>

/* Size and identity of an open file. */
void bsi_file_identify(bsi_file *f, const struct stat *st);

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

#endif
