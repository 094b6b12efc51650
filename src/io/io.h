/* SPDX-License-Identifier: Apache-2.0 */
/*
** io.h: files and asynchronous reads. One interface, two engines: io_uring (requests are submitted and
** reaped by the owner thread) and a pool of pread threads. Knows nothing of devices.
*/
#ifndef BS_IO_H
#define BS_IO_H

#include "base/base.h"
#include "bs/io.h"

/* ---- files ----------------------------------------------------------------------------------- */

typedef struct bsi_file {
    char *path;
    int fd; /* O_DIRECT when direct, else buffered */
    bool direct;
    uint64_t bytes; /* size when it was opened */
    size_t align;   /* of offset, length and memory of a direct read (statx, else 4096); 1 when buffered
                        reads could do with less: extents still use 4096 then */
    uint64_t ino, dev;
    int64_t mtime_ns;
} bsi_file;

/* no_direct: do not try. Falls back to buffered reads (logged once per file system) on EINVAL. */
bs_status bsi_file_open(const char *path, bool no_direct, bsi_file *out);
void bsi_file_close(bsi_file *f);
/* BS_IO naming the file when size, inode or time changed since open. */
bs_status bsi_file_check(const bsi_file *f);

/* ---- asynchronous reads ---------------------------------------------------------------------- */

typedef struct bsi_read {
    const bsi_file *file;
    uint64_t offset; /* aligned to file->align */
    size_t length;   /* aligned; may pass the end of the file by less than the alignment */
    void *buffer;    /* aligned; owned by the caller, untouched until done */
    void *user;
    /* results, valid once reaped */
    bs_status status; /* BS_OK: every byte up to min(length, file end - offset) is there */
    bs_errinfo error; /* when not ok: names file, offset, expected and got bytes */
    uint64_t reread;  /* bytes asked again after short results */
    /* private to the engines */
    size_t done;
    struct bsi_read *next;
    int state;
} bsi_read;

typedef struct bsi_aio bsi_aio;

/* Tests: what an engine pretends a read returned. result: bytes >= 0 or -errno. */
typedef struct bsi_aio_fault {
    int64_t (*result)(void *ud, const bsi_read *r, int64_t real);
    bool reverse;       /* deliver completions of one reap in reverse order */
    unsigned delay_us;  /* each read completes at least this late */
    bool refuse_uring;  /* io_uring_setup "fails" with EPERM */
    bool refuse_direct; /* open(O_DIRECT) "fails" with EINVAL */
    void *ud;
} bsi_aio_fault;

/* cfg->engine "auto": io_uring, else the pool (the reason is logged once). */
bs_status bsi_aio_open(const bs_io_cfg *cfg, const bsi_aio_fault *fault, bsi_aio **out);
/* Drains first. */
void bsi_aio_close(bsi_aio *a);
/* "uring" or "pool" */
const char *bsi_aio_name(const bsi_aio *a);
/* Take a read; never blocks; kept in order of submission when the depth is reached. */
bs_status bsi_aio_submit(bsi_aio *a, bsi_read *r);
/* The next finished read, or NULL. wait_us > 0: wait up to that long for one. Short results are
   continued and EINTR/EAGAIN repeated inside. */
bsi_read *bsi_aio_reap(bsi_aio *a, unsigned wait_us);
int bsi_aio_in_flight(const bsi_aio *a); /* submitted, not yet reaped */
/* Optional: register the memory that reads go into (io_uring fixed buffers); failure is not an error.
   Before that memory is given back while the engine stays open: bytes 0 forgets the region at base. */
void bsi_aio_register(bsi_aio *a, void *base, size_t bytes);
/* Process-wide test switch used by bsi_file_open. */
void bsi_file_refuse_direct(bool on);

/* ---- manifest internals ---------------------------------------------------------------------- */

typedef struct bsi_extent { /* one aligned piece of a file that holds tensors of a block */
    int file;
    uint64_t offset,
        length; /* aligned to the file's alignment when it is direct, else to 4096; the last may
                                pass the end of the file by less than that */
    uint64_t raw_offset; /* in a host slot; a multiple of 4096 and of the file's alignment */
} bsi_extent;

const bsi_file *bsi_manifest_file(const bs_manifest *m, int file);
const bsi_extent *bsi_manifest_extent(const bs_manifest *m, int block, int extent);
/* Extent that holds a tensor. */
int bsi_manifest_tensor_extent(const bs_manifest *m, int block, int tensor);
/* Offset of a tensor's first byte in the raw bytes of its block, as a host slot holds them. */
uint64_t bsi_manifest_raw_offset(const bs_manifest *m, int block, int tensor);
/* What one read of the block asks of the disk: its extents (raw_bytes may have gaps between them). */
uint64_t bsi_manifest_read_bytes(const bs_manifest *m, int block);

typedef struct bsi_row_table {
    const char *name;
    bs_dtype dtype;
    int64_t rows, cols;
    int file;
    uint64_t file_offset;
} bsi_row_table;
const bsi_row_table *bsi_manifest_rows(const bs_manifest *m, int rows);

#endif
