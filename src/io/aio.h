/* SPDX-License-Identifier: Apache-2.0 */
/*
** aio.h: what the two read engines give to aio.c. The owner thread calls every function here. aio.c
** decides what a result means; an engine only carries requests and brings back numbers, so that short
** reads, faults and order are treated once, not per engine.
*/
#ifndef BS_AIO_H
#define BS_AIO_H

#include "io/io.h"

/* One read in an engine; `depth` of them exist. Between start and its return by poll it belongs to the
   engine, which must not look at `read`. */
typedef struct bsi_request {
    int fd;
    void *buffer;
    size_t length;
    uint64_t offset;
    int64_t result; /* bytes or -errno */
    struct bsi_request *next;
    /* of aio.c */
    bsi_read *read;
    double started;
    int idle;      /* results in a row that brought nothing */
    bool buffered; /* was repeated without O_DIRECT */
} bsi_request;

typedef struct bsi_aio_engine {
    const char *name;
    void (*close)(void *e); /* nothing is in flight */
    /* Take a request; at most `depth` are ever inside. It need not reach the kernel before flush. */
    void (*start)(void *e, bsi_request *r);
    void (*flush)(void *e);
    /* Finished requests as a list in order of completion, NULL when there are none. */
    bsi_request *(*poll)(void *e);
    /* Sleep until poll may have something, a signal came, or wait_us passed. */
    void (*wait)(void *e, unsigned wait_us);
    void (*add_memory)(void *e, void *base, size_t bytes); /* may be NULL */
} bsi_aio_engine;

/* Why io_uring is refused is the recorded failure (BS_UNSUPPORTED). */
bs_status bsi_uring_open(int depth, bool refuse, const bsi_aio_engine **engine, void **e);
bs_status bsi_preads_open(int depth, int threads, const bsi_aio_engine **engine, void **e);

#endif
