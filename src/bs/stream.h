/* SPDX-License-Identifier: Apache-2.0 */
/* bs/stream.h: transfers, the streamer, boundaries, embedding rows, rates. Conventions: bs.h. */
#ifndef BS_PUBLIC_STREAM_H
#define BS_PUBLIC_STREAM_H

#include "bs/engine.h"
#include "bs/io.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- placement: homes, slots, transfers ----------------------------------------------------------- */

typedef enum bs_home { BS_HOME_DISK, BS_HOME_RAM, BS_HOME_GPU } bs_home;

typedef struct bs_visit_spec {
    int block; /* manifest block */
    int kind;  /* the caller's own number, handed back untouched */
    int layer; /* likewise */
    int stage; /* likewise */
} bs_visit_spec;

typedef struct bs_placement_cfg {
    const bs_manifest *manifest;
    const bs_home *home;          /* one per block */
    int dev_slots;                /* device slots for blocks that are not gpu homes; >= 1 */
    int host_slots;               /* for disk homes; >= 1 when any */
    const bs_visit_spec *program; /* the cyclic segment it is made for */
    int n_visits;
    bool cyclic;
} bs_placement_cfg;

typedef struct bs_edge_bytes {        /* bytes of one segment */
    uint64_t disk_payload, disk_read; /* tensors; aligned supersets asked of the disk */
    uint64_t link;                    /* host -> device, weights */
    uint64_t loads;                   /* number of block loads into a device slot */
    uint64_t reads;                   /* number of block reads from disk */
} bs_edge_bytes;

typedef struct bs_transfer { /* how one visit gets its block */
    int block;
    int dev_slot;        /* -1: gpu home */
    int host_slot;       /* -1: no disk read into a host slot */
    bool load;           /* false: the block is in its slot already */
    bool read;           /* disk read (into a host slot, or into its ram home for the first time) */
    int slot_free_after; /* visit index (negative: previous segment) whose end frees the slot;
                            INT_MIN: it was never used */
} bs_transfer;

typedef struct bs_placement bs_placement;
/* Validates and freezes. Policy: a block stays in its slot until the slot is needed; the victim is the
   block whose next use in the (cyclic) program is farthest, never the one of the visit just before. */
BS_API BS_NODISCARD bs_status bs_placement_new(const bs_placement_cfg *cfg, bs_placement **out);
BS_API void bs_placement_free(bs_placement *p);
/* Bytes of the first (cold) or any later (warm) segment of the cyclic program. */
BS_API void bs_placement_bytes(const bs_placement *p, bool warm, bs_edge_bytes *out);
BS_API int bs_placement_visits(const bs_placement *p);
BS_API const bs_transfer *bs_placement_transfer(const bs_placement *p, bool warm, int visit);
/* Fixed device bytes (slots + gpu homes) and pinned host bytes (host slots + ram homes). */
BS_API uint64_t bs_placement_device_bytes(const bs_placement *p);
BS_API uint64_t bs_placement_host_bytes(const bs_placement *p);
BS_API uint64_t bs_placement_slot_bytes(const bs_placement *p);      /* one device slot */
BS_API uint64_t bs_placement_host_slot_bytes(const bs_placement *p); /* one host slot */

/* ---- streamer -------------------------------------------------------------------------------- */

typedef struct bs_stream bs_stream;
typedef struct bs_stream_cfg {
    bs_engine *engine;
    const bs_placement *placement;
    bs_io_cfg io;
} bs_stream_cfg;
typedef struct bs_visit {
    bs_visit_spec spec;
    int64_t serial; /* 0, 1, ... over the life of the stream */
} bs_visit;
typedef struct bs_stream_stats {
    uint64_t disk_payload, disk_read, disk_reread, link_bytes; /* cumulative */
    uint64_t loads, reads, hits; /* block loads into slots, block reads, visits without a load */
    uint64_t wasted;             /* bytes fetched into pushed visits that were dropped */
    double disk_busy_s;          /* time with at least one read in flight */
    double stall_disk_s, stall_pinned_s, stall_copy_s, stall_compute_s; /* owner waits by cause */
    uint64_t requests, fallbacks;
    char io[32];                        /* "uring+direct", "pool+buffered", ... */
    int resident_device, resident_host; /* blocks */
    size_t host_bytes;                  /* pinned, now */
} bs_stream_stats;

BS_API BS_NODISCARD bs_status bs_stream_open(const bs_stream_cfg *cfg, bs_stream **out);
BS_API void bs_stream_close(bs_stream *s);
/* Append visits; the streamer runs ahead into what has been pushed, never further. cyclic: the policy
   may assume that the same segment follows. */
BS_API BS_NODISCARD bs_status bs_stream_push(bs_stream *s, const bs_visit_spec *v, int n, bool cyclic);
/* End the current visit, begin the next one: its block is on the device (or its copy is ordered before
   the compute queue) and bound. BS_STATE when nothing is pushed. */
BS_API BS_NODISCARD bs_status bs_stream_next(bs_stream *s, bs_visit *out);
/* End the current visit (all its ops have been issued). */
BS_API BS_NODISCARD bs_status bs_stream_end_visit(bs_stream *s);
/* Drop everything pushed and not begun; drain what is in flight; usable again afterwards. */
BS_API BS_NODISCARD bs_status bs_stream_abort(bs_stream *s);
BS_API void bs_stream_stats_get(const bs_stream *s, bs_stream_stats *out);
/* Where a block is now: "gpu", "ram", "disk", "slot", "loading". */
BS_API const char *bs_stream_where(const bs_stream *s, int block);
/* The bytes of a tensor in the gpu home of its block, for bs_params_update_base: [rows, last dim],
   valid until the stream is closed. BS_STATE when the block's home is another, or before it has
   arrived. */
BS_API BS_NODISCARD bs_status bs_stream_home(const bs_stream *s, int block, int tensor, bs_place *out);

/* ---- boundaries: tensors that outlive a (visit, micro-batch) --------------------------------- */

typedef struct bs_store bs_store;
typedef enum bs_stay {
    BS_STAY_PASS,   /* device, alive until two later PASS/HOST keys have been put */
    BS_STAY_DEVICE, /* device slot of its own per micro-batch */
    BS_STAY_HOST    /* as PASS on the device, and copied to pinned memory; fetched back on demand */
} bs_stay;
typedef struct bs_store_key {
    const char *name; /* "h.0", "g", "moe.y" */
    int64_t channels;
    bs_dtype dtype;
    bs_stay stay;
} bs_store_key;
typedef struct bs_store_stats {
    uint64_t out_bytes, back_bytes; /* device -> host and back, cumulative */
    size_t device_bytes, host_bytes;
} bs_store_stats;

BS_API BS_NODISCARD bs_status bs_store_open(bs_engine *e, const bs_batch *b, int n_keys,
                                            const bs_store_key *keys, bs_store **out);
BS_API void bs_store_close(bs_store *s);
/* Device and pinned bytes that such a store takes, without making it. */
BS_API BS_NODISCARD bs_status bs_store_bytes(const bs_batch_cfg *b, int n_keys,
                                             const bs_store_key *keys, size_t *device, size_t *host);
/* Copy from [rows, channels] into key for a micro-batch (device copy; HOST keys also start the copy
   out). */
BS_API BS_NODISCARD bs_status bs_store_put(bs_store *s, int key, int micro, const bs_place *from);
/* The stored bytes; a HOST key that left the device must have been fetched. Valid until the next put
   that may take the place (see bs_stay). */
BS_API BS_NODISCARD bs_status bs_store_get(bs_store *s, int key, int micro, bs_place *out);
/* Those of all micro-batches of the step, of a DEVICE key: the place of the first, and how many elements each begins
   after the one before. */
BS_API BS_NODISCARD bs_status bs_store_get_all(bs_store *s, int key, bs_place *out, int64_t *stride);
/* Zero a key (rows of the micro-batch) before accumulation. */
BS_API BS_NODISCARD bs_status bs_store_zero(bs_store *s, int key, int micro);
/* Start bringing a HOST key back for all micro-batches of the step; get waits for it. */
BS_API BS_NODISCARD bs_status bs_store_fetch(bs_store *s, int key);
/* Read back to the host (waits): [rows, channels] f32. */
BS_API BS_NODISCARD bs_status bs_store_read(bs_store *s, int key, int micro, bs_array **out);
BS_API void bs_store_stats_get(const bs_store *s, bs_store_stats *out);

/* ---- embedding rows: rows of a table, gathered as a step needs them -------------------------- */

/* Row tables: embedding rows gathered on the host side. home: BS_HOME_RAM (whole table read once) or
   BS_HOME_DISK (rows read per batch). */
typedef struct bs_embedding bs_embedding;
typedef struct bs_embedding_stats {
    uint64_t payload, read; /* cumulative bytes */
    size_t host_bytes;
} bs_embedding_stats;
BS_API BS_NODISCARD bs_status bs_embedding_open(bs_engine *e, const bs_manifest *m, int rows,
                                                bs_home home, const bs_batch *b, const bs_io_cfg *io,
                                                bs_embedding **out);
BS_API void bs_embedding_close(bs_embedding *r);
/* Device and pinned bytes that it takes. */
BS_API BS_NODISCARD bs_status bs_embedding_bytes(const bs_manifest *m, int rows, bs_home home,
                                                 const bs_batch_cfg *b, size_t *device, size_t *host);
/* Gather the rows of a micro-batch into a store key (f32 or bf16), times scale. An id beyond the table
   fails with the position. */
BS_API BS_NODISCARD bs_status bs_embedding_gather(bs_embedding *r, bs_store *s, int key, int micro,
                                                  double scale);
/* Bytes that gathering this micro-batch will ask of the disk: predicted from the ids. */
BS_API BS_NODISCARD bs_status bs_embedding_predict(bs_embedding *r, int micro, uint64_t *payload,
                                                   uint64_t *read);
/* Trainable embedding: acc[id] += scale * grad row, in token order (acc: f32 sums [vocab, C]). */
BS_API BS_NODISCARD bs_status bs_embedding_grad(bs_embedding *r, bs_store *s, int key, int micro,
                                                double scale, const bs_place *acc);
BS_API void bs_embedding_stats_get(const bs_embedding *r, bs_embedding_stats *out);

/* ---- rates of a machine: the copies, products and reads of a step, each alone ---------------- */

/* Seconds of one copy of `bytes` from pinned to device memory (out: back), n in a row. */
BS_API BS_NODISCARD bs_status bs_rate_copy(bs_dev *dev, bool out, size_t bytes, int n, double *seconds);
/* Seconds of one product y [M,N] = x [M,K] w [N,K]^T in f32 or bf16, n in a row. */
BS_API BS_NODISCARD bs_status bs_rate_gemm(bs_dev *dev, bs_dtype t, int64_t M, int64_t N, int64_t K,
                                           int n, double *seconds);
typedef struct bs_read_rate {
    uint64_t bytes;
    double seconds;
    char io[32]; /* as in bs_stream_stats */
} bs_read_rate;
/* Reads all extents of some blocks into pinned memory, as the streamer does, and drops them; the files
   are as the manifest opened them (io->no_direct is not looked at). */
BS_API BS_NODISCARD bs_status bs_rate_read(bs_dev *dev, const bs_manifest *m, int n_blocks,
                                           const int *block, const bs_io_cfg *io, bs_read_rate *out);

#ifdef __cplusplus
}
#endif

#endif
