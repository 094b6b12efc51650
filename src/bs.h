/* SPDX-License-Identifier: Apache-2.0 */
/*
** bs.h: the public C API of libbs. No Lua and no CUDA in it; valid C11 and C++17.
**
** Conventions. A fallible function returns bs_status (0 = ok); the detail of the last failure on the
** calling thread is bs_error(). Results go through the last arguments. Sizes are bytes (size_t);
** elements, rows and dimensions are int64_t. A configuration struct that is all zero asks for the
** defaults. `open`/`new` hand a new object to the caller, who ends it with `close`/`free` (NULL is
** fine); `get` borrows until the next call on that object. All calls that touch one engine are made
** by one thread, the owner. Closing in any order is fine as long as an engine is closed after the
** objects made on it.
*/
#ifndef BS_H
#define BS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define BS_VERSION "0.1.0"
#define BS_API __attribute__((visibility("default")))
#define BS_NODISCARD __attribute__((warn_unused_result))

/* ---- status --------------------------------------------------------------------------------- */

typedef enum bs_status {
    BS_OK = 0,
    BS_ARG,         /* wrong argument value */
    BS_SHAPE,       /* shapes do not fit */
    BS_DTYPE,       /* dtype not supported here */
    BS_STATE,       /* object closed, dead, or call out of order */
    BS_NOMEM,       /* host memory or the ram budget */
    BS_DEVMEM,      /* device memory or the vram budget */
    BS_IO,          /* the operating system refused a read, write or open */
    BS_FORMAT,      /* a file does not hold what it should */
    BS_DEVICE,      /* execution failed; the device is lost */
    BS_UNSUPPORTED, /* known, but not available in this build or machine */
    BS_CANCELLED,   /* bs_cancel was set while waiting */
    BS_AGAIN,       /* not done yet (only from functions that say so) */
    BS_NONFINITE,   /* NaN or infinity where a finite value is required */
    BS_INTERNAL     /* a bug of ours */
} bs_status;

typedef struct bs_errinfo {
    bs_status status;
    int sys; /* errno, or 0 */
    char msg[512];
} bs_errinfo;

/* The one-word name of a status ("io", "format", ...); never changes. */
BS_API const char *bs_status_name(bs_status st);
/* Detail of the last failure on this thread; valid until the next failure on it. Never NULL. */
BS_API const bs_errinfo *bs_error(void);
/* Version string, e.g. "0.1.0". */
BS_API const char *bs_version(void);
/* One line per optional feature: "io_uring: yes (liburing 2.3)". Static storage. */
BS_API const char *bs_build_info(void);

/* Ask every wait of libbs to end with BS_CANCELLED (async-signal-safe); false clears it. */
BS_API void bs_cancel(bool on);
BS_API bool bs_cancelled(void);

/* Log lines (fall-backs, warnings) go to fn, or to stderr when fn is NULL. Process-wide. */
typedef void (*bs_log_fn)(void *ud, const char *line);
BS_API void bs_log_to(bs_log_fn fn, void *ud);

/* ---- host memory accounting ------------------------------------------------------------------ */

typedef enum bs_tag { /* what host bytes are used for */
    BS_TAG_MISC,
    BS_TAG_HEADER,   /* parsed headers, manifests, plans */
    BS_TAG_SLOT,     /* pinned staging slots */
    BS_TAG_HOME,     /* pinned ram homes */
    BS_TAG_BOUNDARY, /* pinned boundaries */
    BS_TAG_ROWS,     /* row tables and their staging */
    BS_TAG_STAGING,  /* small pinned buffers: batches, read-back */
    BS_TAG_DEVICE,   /* device memory of the cpu device: counts against vram, not ram */
    BS_TAG_ARRAY,    /* host arrays */
    BS_TAG_COUNT
} bs_tag;

/* Live and highest bytes of a tag. */
BS_API size_t bs_host_bytes(bs_tag tag);
BS_API size_t bs_host_peak(bs_tag tag);
BS_API const char *bs_tag_name(bs_tag tag);

/* ---- dtypes ---------------------------------------------------------------------------------- */

typedef enum bs_dtype {
    BS_DTYPE_F32,
    BS_DTYPE_BF16,
    BS_DTYPE_F16,
    BS_DTYPE_I64,
    BS_DTYPE_I32,
    BS_DTYPE_U8,
    BS_DTYPE_F64,
    BS_DTYPE_COUNT
} bs_dtype;

#define BS_MAX_DIMS 8

BS_API const char *bs_dtype_name(bs_dtype t);         /* "f32", "bf16", ... */
BS_API size_t bs_dtype_size(bs_dtype t);              /* bytes of one element */
BS_API bool bs_dtype_parse(const char *s, bs_dtype *out); /* accepts "bf16" and "BF16" */

/* ---- host arrays ----------------------------------------------------------------------------- */

/* A dense row-major array in host memory: reference data, read-back, adapter files. */
typedef struct bs_array {
    bs_dtype dtype;
    int ndim;
    int64_t dim[BS_MAX_DIMS];
    size_t bytes;
    void *data; /* 64-byte aligned; owned by the array */
} bs_array;

BS_API BS_NODISCARD bs_status bs_array_new(bs_dtype t, int ndim, const int64_t *dim,
                                           bs_array **out); /* zeroed */
BS_API void bs_array_free(bs_array *a);
BS_API int64_t bs_array_count(const bs_array *a);
/* Fill an f32 array uniformly in +-bound by Philox(seed, name): the same on every machine. */
BS_API BS_NODISCARD bs_status bs_array_uniform(bs_array *a, double bound, uint64_t seed, const char *name);
/* Element i (0-based, row-major) as double; i64 beyond 2^53 loses bits. */
BS_API double bs_array_get(const bs_array *a, int64_t i);
BS_API void bs_array_set(bs_array *a, int64_t i, double v);
/* A converted copy (round to nearest even). */
BS_API BS_NODISCARD bs_status bs_array_cast(const bs_array *a, bs_dtype t, bs_array **out);
/* ||a-b|| / ||b|| in f64 (||a-b|| when b is zero); BS_SHAPE when the counts differ. A non-finite
   value on either side gives +inf. */
BS_API BS_NODISCARD bs_status bs_array_rel_err(const bs_array *a, const bs_array *b, double *out);
/* 64-bit hash of the bytes, dtype and dims; a function of the content only. */
BS_API uint64_t bs_array_hash(const bs_array *a);
BS_API uint64_t bs_hash64(const void *p, size_t n, uint64_t seed);

/* ---- safetensors (FORMAT of huggingface/safetensors) -------------------------------------------- */

typedef struct bs_st bs_st; /* an open file with its checked header */
typedef struct bs_st_tensor {
    const char *name; /* owned by the bs_st */
    const char *dtype_name; /* as in the file, e.g. "F8_E4M3" */
    bs_dtype dtype;   /* BS_DTYPE_COUNT: a dtype of the format that we do not compute with */
    int ndim;
    int64_t dim[BS_MAX_DIMS];
    uint64_t offset; /* of the first byte, from the start of the file */
    uint64_t bytes;
} bs_st_tensor;

/* Open and check everything that the format demands; the error names file, tensor and rule. A file
   that is HTML, a Git LFS pointer or empty is told as such. */
BS_API BS_NODISCARD bs_status bs_st_open(const char *path, bs_st **out);
BS_API void bs_st_close(bs_st *st);
BS_API int64_t bs_st_count(const bs_st *st);
BS_API const bs_st_tensor *bs_st_at(const bs_st *st, int64_t i); /* file order */
BS_API const bs_st_tensor *bs_st_find(const bs_st *st, const char *name); /* NULL: absent */
BS_API const char *bs_st_path(const bs_st *st);
BS_API uint64_t bs_st_file_bytes(const bs_st *st);
BS_API BS_NODISCARD bs_status bs_st_read(bs_st *st, const char *name, bs_array **out);
/* The i-th key of __metadata__ and its value; NULL: there are no more. */
BS_API const char *bs_st_meta(const bs_st *st, int i, const char **value);

/* Write n arrays to path: temp file beside it, fsync, rename, fsync of the folder. The old file stays
   whole on any failure. metadata: n_meta key/value pairs, or NULL. */
BS_API BS_NODISCARD bs_status bs_st_write(const char *path, int64_t n, const char *const *names,
                                          const bs_array *const *arrays, int n_meta,
                                          const char *const *keys, const char *const *values);
/* The same file tensor by tensor, in any order, so that one at a time has to be in memory. Of the n
   descriptions name, dtype_name, ndim and dim count. */
typedef struct bs_st_writer bs_st_writer;
BS_API BS_NODISCARD bs_status bs_st_writer_open(const char *path, int64_t n, const bs_st_tensor *tensors,
                                                int n_meta, const char *const *keys,
                                                const char *const *values, bs_st_writer **out);
/* The bytes of a tensor: from an array of its dtype and dims, or as they are in another file. */
BS_API BS_NODISCARD bs_status bs_st_writer_add(bs_st_writer *w, const char *name, const bs_array *a);
BS_API BS_NODISCARD bs_status bs_st_writer_copy(bs_st_writer *w, const char *name, const bs_st *from);
/* Every tensor has been given: fsync, rename. Before it, or when it fails, path is what it was. */
BS_API BS_NODISCARD bs_status bs_st_writer_finish(bs_st_writer *w);
BS_API void bs_st_writer_close(bs_st_writer *w); /* throws away what was not finished */

/* The same discipline for any bytes (adapter_config.json, reports). */
BS_API BS_NODISCARD bs_status bs_file_write(const char *path, const void *data, size_t n);
/* Renames from[i] to to[i], one after the other with nothing between, then flushes the folder. All are in one
   folder. Nothing is renamed when a place is taken by something that is no file. */
BS_API BS_NODISCARD bs_status bs_file_replace(int n, const char *const *from, const char *const *to);

/* ---- manifest: where each block's bytes are ------------------------------------------------------ */

typedef struct bs_manifest bs_manifest;

typedef struct bs_tensor_info {
    const char *name;
    bs_dtype dtype;
    int ndim;
    int64_t dim[BS_MAX_DIMS];
    int file;
    uint64_t file_offset;
    uint64_t bytes;
    uint64_t slot_offset;   /* in the canonical device layout of its block, multiple of 256 */
    uint64_t expand_offset; /* in the expand region, UINT64_MAX when stored in the compute dtype */
    bs_dtype compute;       /* element type that the expand region is laid out for */
} bs_tensor_info;

typedef struct bs_block_info {
    const char *name;
    const char *kind; /* "layer", "mix", "experts", "norm", "tile", "embed" */
    int n_tensors;
    int n_extents;
    uint64_t payload_bytes; /* sum of tensor bytes */
    uint64_t slot_bytes;    /* canonical layout */
    uint64_t raw_bytes;     /* aligned extents: host slot and disk reads */
    uint64_t expand_bytes;  /* f32 expansion of its tensors that are not stored as f32 */
} bs_block_info;

BS_API BS_NODISCARD bs_status bs_manifest_new(bs_manifest **out);
BS_API void bs_manifest_free(bs_manifest *m);
/* Adds a file, checks that it can be read, records size and identity. Same path: same index. */
BS_API BS_NODISCARD bs_status bs_manifest_add_file(bs_manifest *m, const char *path, int *out);
BS_API BS_NODISCARD bs_status bs_manifest_add_block(bs_manifest *m, const char *name, const char *kind,
                                                    int *out);
/* A tensor (or whole rows of one) of the block, in canonical order. */
BS_API BS_NODISCARD bs_status bs_manifest_add_tensor(bs_manifest *m, int block, const char *name,
                                                     bs_dtype t, int ndim, const int64_t *dim, int file,
                                                     uint64_t file_offset, int *out);
/* A table [rows, cols] of which single rows are gathered (embedding). */
BS_API BS_NODISCARD bs_status bs_manifest_add_rows(bs_manifest *m, const char *name, bs_dtype t,
                                                   int64_t rows, int64_t cols, int file,
                                                   uint64_t file_offset, int *out);
/* The dtype that engines compute in, f32 (the default) or bf16: tensors stored otherwise get a place in
   the expand layout. Also on a finished manifest, before a weight is made from it. */
BS_API BS_NODISCARD bs_status bs_manifest_compute(bs_manifest *m, bs_dtype compute);
/* Opens the files for reading (O_DIRECT where possible), computes extents, layouts and digest; after
   it nothing can be added. */
BS_API BS_NODISCARD bs_status bs_manifest_finish(bs_manifest *m);
BS_API int bs_manifest_blocks(const bs_manifest *m);
BS_API const bs_block_info *bs_manifest_block(const bs_manifest *m, int block);
BS_API const bs_tensor_info *bs_manifest_tensor(const bs_manifest *m, int block, int tensor);
/* Rows [first, first + n) of a tensor as a tensor of the same block. */
BS_API BS_NODISCARD bs_status bs_tensor_info_rows(const bs_tensor_info *t, int64_t first, int64_t n,
                                                  bs_tensor_info *out);
BS_API int bs_manifest_find_tensor(const bs_manifest *m, int block, const char *name); /* -1: absent */
BS_API uint64_t bs_manifest_digest(const bs_manifest *m);
/* Largest alignment asked by its files (direct reads), bytes. */
BS_API size_t bs_manifest_alignment(const bs_manifest *m);
/* Manifest as JSON text (malloc'ed; free with bs_str_free) and back. */
BS_API BS_NODISCARD bs_status bs_manifest_to_json(const bs_manifest *m, char **out);
BS_API BS_NODISCARD bs_status bs_manifest_from_json(const char *text, size_t n, bs_manifest **out);
BS_API void bs_str_free(char *s);

/* ---- device ------------------------------------------------------------------------------------ */

typedef struct bs_dev bs_dev;

typedef struct bs_dev_cfg {
    int threads;          /* cpu: compute threads; 0 = online cores */
    /* For tests: */
    unsigned jitter_us; /* a random delay of up to this before each operation */
    uint64_t jitter_seed;
    const char *drop_wait; /* check: the queue_wait site that is left out */
    uint64_t fail_call;    /* the n-th operation fails while it runs (1-based; 0: none) */
    uint64_t fail_pin;     /* page-locks are refused from the n-th on (1-based; 0: none) */
    size_t device_left;    /* device memory beyond so many bytes turns out to be taken (0: none) */
    size_t workspace_bytes; /* props.workspace_bytes are so many more */
} bs_dev_cfg;

typedef struct bs_dev_props {
    char name[64];     /* "cpu", "meta", "cuda", "check:cpu", ... */
    bool executes;     /* false: meta */
    bool bf16;         /* engines can compute in bf16 */
    size_t alignment;  /* of every device address handed out */
    size_t total_bytes; /* of memory; cuda: what is free now */
    size_t workspace_bytes; /* of an engine's pool that its kernels need for themselves; 0: none */
    size_t unpinned_bytes; /* of pinned memory in use, what could not be page-locked */
} bs_dev_props;

/* spec: "cpu", "meta", "cuda" (of builds that have it: the first GPU of CUDA_VISIBLE_DEVICES), or one of
   them behind "check:". */
BS_API BS_NODISCARD bs_status bs_dev_open(const char *spec, const bs_dev_cfg *cfg, bs_dev **out);
BS_API void bs_dev_close(bs_dev *dev);
BS_API void bs_dev_props_get(const bs_dev *dev, bs_dev_props *out);
/* check devices: number of violations found so far and their text, one per line, each naming the
   queue_wait site that would have ordered the two operations where it is known. 0 elsewhere. */
BS_API int bs_dev_violations(const bs_dev *dev, const char **text);

/* The GPU that "cuda" opens, for reports. 0 or "": not known. */
typedef struct bs_gpu {
    bool built;                    /* this build has the device "cuda"; then also: */
    char compiled[64];             /* architectures of its kernels, "sm_80 sm_90" */
    int cuda_runtime, cuda_driver; /* 13000 is 13.0; what the driver supports, 0: no driver */
    char name[96];                 /* of the GPU, with or without NVML */
    int major, minor;              /* compute capability */
    char blas[256];                /* file of the cuBLAS that is found */
    uint64_t before_bytes;         /* of its memory, in use before this process opened it first */
    uint64_t context_bytes;        /* taken by that: context, kernels, cuBLAS */

    bool nvml;                     /* NVML was found; then also: */
    char driver[32];
    uint64_t total_bytes, used_bytes, free_bytes; /* the first one also without NVML */
    int processes;                 /* that compute on it */
    uint64_t own_bytes;            /* used by this one, where NVML knows it by its id */
    uint64_t held_bytes;           /* own_bytes, else what use has grown by since before_bytes */
    double power_w, power_limit_w;
    int sm_mhz, sm_most_mhz, memory_mhz;
    int pcie_generation, pcie_width; /* of the link, now: an idle GPU may lower the first */
} bs_gpu;

BS_API void bs_gpu_get(bs_gpu *out);

typedef struct bs_profile_row { /* launches of one kernel under one label */
    const char *op, *label; /* the kernel, and what it was launched for */
    uint64_t calls;
    double seconds; /* that it ran for on the device */
} bs_profile_row;

/* Time every launch from here on (on: forgets earlier times) or no longer. Timing costs a little: it is for
   finding where a step's time goes, not for the time of a step. A device that does not execute has no rows. */
BS_API BS_NODISCARD bs_status bs_dev_profile(bs_dev *dev, bool on);
/* What was timed so far, longest first. Waits for the launches that are timed. *rows is the device's, until
   its next call. */
BS_API BS_NODISCARD bs_status bs_dev_profile_read(bs_dev *dev, const bs_profile_row **rows, int *n);

/* ---- plan: homes, slots, transfers ---------------------------------------------------------------- */

typedef enum bs_home { BS_HOME_DISK, BS_HOME_RAM, BS_HOME_GPU } bs_home;

typedef struct bs_visit_spec {
    int block;   /* manifest block */
    int kind;    /* the driver's own number, handed back untouched */
    int layer;   /* likewise */
    int stage;   /* likewise */
} bs_visit_spec;

typedef struct bs_plan_cfg {
    const bs_manifest *manifest;
    const bs_home *home; /* one per block */
    int dev_slots;       /* device slots for blocks that are not gpu homes; >= 1 */
    int host_slots;      /* staging slots for disk homes; >= 1 when any */
    const bs_visit_spec *program; /* the cyclic segment the plan is made for */
    int n_visits;
    bool cyclic;
} bs_plan_cfg;

typedef struct bs_edge_bytes { /* bytes of one segment */
    uint64_t disk_payload, disk_read; /* tensors; aligned supersets asked of the disk */
    uint64_t link;                    /* host -> device, weights */
    uint64_t loads;                   /* number of block loads into a device slot */
    uint64_t reads;                   /* number of block reads from disk */
} bs_edge_bytes;

typedef struct bs_transfer { /* how one visit gets its block */
    int block;
    int dev_slot;   /* -1: gpu home */
    int host_slot;  /* -1: no disk read into a staging slot */
    bool load;      /* false: the block is in its slot already */
    bool read;      /* disk read (into staging, or into its ram or gpu home for the first time) */
    int slot_free_after; /* visit index (negative: previous segment) whose end frees the slot */
} bs_transfer;

typedef struct bs_plan bs_plan;
/* Validates and freezes. Policy: a block stays in its slot until the slot is needed; the victim is the
   block whose next use in the (cyclic) program is farthest, never the one of the visit just before. */
BS_API BS_NODISCARD bs_status bs_plan_new(const bs_plan_cfg *cfg, bs_plan **out);
BS_API void bs_plan_free(bs_plan *p);
/* Bytes of the first (cold) or any later (warm) segment of the cyclic program. */
BS_API void bs_plan_bytes(const bs_plan *p, bool warm, bs_edge_bytes *out);
BS_API int bs_plan_visits(const bs_plan *p);
BS_API const bs_transfer *bs_plan_transfer(const bs_plan *p, bool warm, int visit);
/* Fixed device bytes (slots + gpu homes) and pinned host bytes (staging slots + ram homes). */
BS_API uint64_t bs_plan_device_bytes(const bs_plan *p);
BS_API uint64_t bs_plan_host_bytes(const bs_plan *p);
BS_API uint64_t bs_plan_slot_bytes(const bs_plan *p);      /* one device slot */
BS_API uint64_t bs_plan_host_slot_bytes(const bs_plan *p); /* one staging slot */

/* ---- engine: a device with its queues, pool, expand region and binding ------------------------------ */

typedef struct bs_engine bs_engine;

typedef struct bs_engine_cfg {
    bs_dev *dev;          /* borrowed; closed after the engine */
    size_t pool_bytes;    /* the whole device pool; 0 on a device that does not execute: unbounded */
    size_t expand_bytes;  /* region for weights that are not stored in `compute`: the largest block's */
    size_t workspace_bytes; /* region for kernels; 0: props.workspace_bytes. Of a dry run: the real device's */
    int n_blocks;         /* blocks of the manifest: size of the binding table */
    uint64_t seed;        /* of dropout */
    bs_dtype compute;     /* of activations and of weights in use: f32, or bf16 where props.bf16 */
} bs_engine_cfg;

typedef struct bs_engine_stats {
    size_t pool_bytes;    /* reserved */
    size_t fixed_bytes;   /* regions taken so far */
    size_t arena_now;     /* live bytes of the arena */
    size_t arena_peak;    /* high-water offset of the arena */
    size_t peak_bytes;    /* fixed + arena_peak */
    uint64_t launches;
} bs_engine_stats;

BS_API BS_NODISCARD bs_status bs_engine_open(const bs_engine_cfg *cfg, bs_engine **out);
BS_API void bs_engine_close(bs_engine *e);
BS_API void bs_engine_stats_get(const bs_engine *e, bs_engine_stats *out);
BS_API bs_dtype bs_engine_compute(const bs_engine *e);
/* Wait until everything issued has run; pumps attached streams; BS_CANCELLED or BS_DEVICE possible. */
BS_API BS_NODISCARD bs_status bs_engine_sync(bs_engine *e);
/* The same for the ops alone; blocks that are on their way stay so. */
BS_API BS_NODISCARD bs_status bs_engine_wait(bs_engine *e);
/* After this no region can be added and the arena, which is what the regions leave, starts. */
BS_API BS_NODISCARD bs_status bs_engine_seal(bs_engine *e);

/* A place in device memory that holds rows of channels: how stores, parameters and tensors hand data to
   each other. Plain data; valid as long as its owner says. at == NULL: nothing. */
typedef struct bs_place {
    void *mem; /* opaque */
    size_t off;
    bs_dtype dtype;
    int64_t rows, capacity, channels;
} bs_place;
/* A trainable parameter as ops see it: its value and its gradient accumulator. */
typedef struct bs_param_ref {
    bs_place value; /* in the compute dtype; mem NULL: the value is the block's own tensor */
    bs_place grad;  /* f32; mem NULL: frozen */
    const char *name;
} bs_param_ref;

/* ---- micro-batches of a step --------------------------------------------------------------------- */

typedef struct bs_batch bs_batch;
typedef struct bs_batch_cfg {
    int micros;      /* micro-batches of a step at most */
    int64_t tokens;  /* capacity of one micro-batch */
    int64_t rows;    /* rows (sequences) of one micro-batch at most */
} bs_batch_cfg;
typedef struct bs_micro {
    int64_t n_rows;
    const int64_t *row_len;   /* [n_rows] tokens of each row */
    const int64_t *ids;       /* [sum row_len] token ids */
    const int64_t *labels;    /* [sum row_len] unshifted: the label of token t trains position t-1 of
                                 the same row; -100 = no loss; NULL: none */
    const int64_t *row_id;    /* [n_rows] identity of each row (dropout, cache); NULL: 0,1,.. */
    const int64_t *start;     /* [n_rows] position of each row's first token; NULL: 0 */
} bs_micro;

BS_API BS_NODISCARD bs_status bs_batch_open(bs_engine *e, const bs_batch_cfg *cfg, bs_batch **out);
BS_API void bs_batch_close(bs_batch *b);
BS_API BS_NODISCARD bs_status bs_batch_set(bs_batch *b, int micro, const bs_micro *data);
/* Number of micro-batches that the coming step uses (<= micros). */
BS_API BS_NODISCARD bs_status bs_batch_begin(bs_batch *b, int micros);
BS_API int64_t bs_batch_tokens(const bs_batch *b, int micro);
BS_API int64_t bs_batch_longest(const bs_batch *b, int micro);  /* highest position + 1 */
BS_API int64_t bs_batch_labelled(const bs_batch *b, int micro); /* trained positions */

/* ---- boundaries: tensors that outlive a (visit, micro-batch) ---------------------------------------- */

typedef struct bs_tensor bs_tensor;
typedef struct bs_store bs_store;
typedef enum bs_keep {
    BS_KEEP_PASS,    /* device, alive until two later PASS/HOST keys have been put */
    BS_KEEP_DEVICE,  /* device slot of its own per micro-batch */
    BS_KEEP_HOST     /* as PASS on the device, and copied to pinned memory; fetched back on demand */
} bs_keep;
typedef struct bs_store_key {
    const char *name;   /* "h.0", "g", "moe.y" */
    int64_t channels;
    bs_dtype dtype;
    bs_keep keep;
} bs_store_key;
typedef struct bs_store_stats {
    uint64_t out_bytes, back_bytes; /* device -> host and back, cumulative */
    size_t device_bytes, host_bytes;
} bs_store_stats;

BS_API BS_NODISCARD bs_status bs_store_open(bs_engine *e, const bs_batch *b, int n_keys,
                                            const bs_store_key *keys, bs_store **out);
BS_API void bs_store_close(bs_store *s);
/* Device and pinned bytes that such a store takes, without making it. */
BS_API BS_NODISCARD bs_status bs_store_bytes(const bs_batch_cfg *b, int n_keys, const bs_store_key *keys,
                                             size_t *device, size_t *host);
/* Copy from [rows, channels] into key for a micro-batch (device copy; HOST keys also start the copy
   out). */
BS_API BS_NODISCARD bs_status bs_store_put(bs_store *s, int key, int micro, const bs_place *from);
/* The stored bytes; a HOST key that left the device must have been fetched. Valid until the next put
   that may take the place (see bs_keep). */
BS_API BS_NODISCARD bs_status bs_store_get(bs_store *s, int key, int micro, bs_place *out);
/* Zero a key (rows of the micro-batch) before accumulation. */
BS_API BS_NODISCARD bs_status bs_store_zero(bs_store *s, int key, int micro);
/* Start bringing a HOST key back for all micro-batches of the step; get waits for it. */
BS_API BS_NODISCARD bs_status bs_store_fetch(bs_store *s, int key);
/* Read back to the host (waits): [rows, channels] f32. */
BS_API BS_NODISCARD bs_status bs_store_read(bs_store *s, int key, int micro, bs_array **out);
BS_API void bs_store_stats_get(const bs_store *s, bs_store_stats *out);

/* ---- trainable parameters ---------------------------------------------------------------------------- */

typedef struct bs_params bs_params;
BS_API BS_NODISCARD bs_status bs_params_open(bs_engine *e, bs_params **out);
/* A set without an engine, of which only the bytes are asked. */
BS_API BS_NODISCARD bs_status bs_params_measure(bs_dtype compute, bs_params **out);
BS_API void bs_params_close(bs_params *p);
/* Values only, no accumulators and no moments: an adapter that is used and not trained. Before seal. */
BS_API BS_NODISCARD bs_status bs_params_freeze(bs_params *p);
/* A parameter with f32 master, gradient accumulator and moments (an adapter matrix); on an engine that
   does not compute in f32 also with a copy in its dtype, which ops read. */
BS_API BS_NODISCARD bs_status bs_params_add(bs_params *p, const char *name, int64_t rows, int64_t cols,
                                            int *out);
/* A base weight: gradient accumulator only; its value is the block's tensor. */
BS_API BS_NODISCARD bs_status bs_params_add_base(bs_params *p, const char *name, int64_t rows,
                                                 int64_t cols, int *out);
/* Makes a base parameter updatable: home is its f32 bytes in a gpu home. Before seal, because of the
   moments; a home that is not known by then has mem NULL and is named by a second call after seal. */
BS_API BS_NODISCARD bs_status bs_params_update_base(bs_params *p, int id, const bs_place *home);
/* Fixed device bytes that these parameters take (the plan asks before it opens an engine). */
BS_API uint64_t bs_params_device_bytes(const bs_params *p);
/* Allocates the regions; nothing can be added after it. */
BS_API BS_NODISCARD bs_status bs_params_seal(bs_params *p);
BS_API int bs_params_count(const bs_params *p);
BS_API const char *bs_params_name(const bs_params *p, int id);
BS_API BS_NODISCARD bs_status bs_params_set(bs_params *p, int id, const bs_array *value); /* f32 master */
BS_API BS_NODISCARD bs_status bs_params_get(bs_params *p, int id, bs_array **out);
BS_API BS_NODISCARD bs_status bs_params_grad(bs_params *p, int id, bs_array **out);
/* AdamW moments for checkpoints; which: 1 = first, 2 = second. BS_STATE for a parameter without them. */
BS_API BS_NODISCARD bs_status bs_params_moment(bs_params *p, int id, int which, bs_array **out);
BS_API BS_NODISCARD bs_status bs_params_set_moment(bs_params *p, int id, int which, const bs_array *value);
/* Kaiming-uniform with a = sqrt 5 (uniform in +-1/sqrt cols) by Philox(seed, name). */
BS_API BS_NODISCARD bs_status bs_params_init_kaiming(bs_params *p, int id, uint64_t seed);
BS_API BS_NODISCARD bs_status bs_params_zero_grad(bs_params *p);
/* For bs_linear_cfg, bs_weight_new and bs_rows_grad; valid until bs_params_close. After seal only. */
BS_API BS_NODISCARD bs_status bs_params_ref(const bs_params *p, int id, bs_param_ref *out);
typedef struct bs_adamw {
    double lr, beta1, beta2, eps, weight_decay; /* decay is decoupled: p *= 1 - lr*weight_decay first */
    double clip;    /* global norm; 0 = off */
    int64_t step;   /* 1, 2, ... */
} bs_adamw;
/* Global L2 norm of the accumulators (waits). */
BS_API BS_NODISCARD bs_status bs_params_norm(bs_params *p, double *out);
/* One AdamW step over all parameters; norm is the value of bs_params_norm of this step. */
BS_API BS_NODISCARD bs_status bs_params_apply(bs_params *p, const bs_adamw *cfg, double norm);

/* W [out, in] += scale B A on the host, computed in f32 and rounded once to W's dtype (f32, bf16, f16); A
   [r, in] and B [out, r] are f32. threads: 0 = the online cores; they change no bits. */
BS_API BS_NODISCARD bs_status bs_lora_merge(bs_array *w, const bs_array *a, const bs_array *b, double scale,
                                            int threads);

/* ---- weights as the ops see them ------------------------------------------------------------------------ */

typedef struct bs_weight bs_weight; /* one tensor of a block (norm weight, bias, gate) */
typedef struct bs_linear bs_linear; /* weight, bias, adapter */
/* block, info: where the tensor is; copied. param: NULL or a zero grad when frozen. */
BS_API BS_NODISCARD bs_status bs_weight_new(bs_engine *e, int block, const bs_tensor_info *info,
                                            const bs_param_ref *param, bs_weight **out);
BS_API void bs_weight_free(bs_weight *w);
typedef struct bs_linear_cfg {
    int block;
    const bs_tensor_info *weight; /* [out, in] */
    const bs_tensor_info *bias;   /* [out], or NULL */
    bs_param_ref base_weight, base_bias; /* grad.mem NULL: frozen */
    bs_param_ref lora_a, lora_b;  /* A [r, in], B [out, r]; value.mem NULL: no adapter */
    float scale;                  /* alpha/r or alpha/sqrt r */
    float dropout;                /* probability of zeroing an input element of the adapter branch */
    const char *name;             /* for messages and the dropout key; copied */
} bs_linear_cfg;
BS_API BS_NODISCARD bs_status bs_linear_new(bs_engine *e, const bs_linear_cfg *cfg, bs_linear **out);
BS_API void bs_linear_free(bs_linear *l);
BS_API void bs_linear_dims(const bs_linear *l, int64_t *in, int64_t *out);

/* ---- scopes, tensors, tape --------------------------------------------------------------------------------- */

/* One scope per (visit, micro-batch); at most one is open per engine. At its end every tensor made in
   it is dead: any use fails with BS_STATE and the scope's label. */
typedef struct bs_scope_cfg {
    const char *label;  /* "layers.3 backward, micro 0": in messages */
    const bs_batch *batch;
    int micro;
    bool tape;          /* record for bs_scope_backward */
    bool train;         /* dropout on */
    int64_t step;       /* dropout counter */
} bs_scope_cfg;
BS_API BS_NODISCARD bs_status bs_scope_open(bs_engine *e, const bs_scope_cfg *cfg);
BS_API void bs_scope_close(bs_engine *e);
/* Hash of the op sequence issued so far (ops, shapes, weights): recompute must equal forward. */
BS_API uint64_t bs_scope_hash(const bs_engine *e);
/* Reverse pass: n pairs (output, its gradient); leaves' gradients by bs_tensor_grad. The gradient tensor
   has the output's shape. Every tensor but leaves, their gradients and store tensors is freed as the
   walk passes its last use; no op can be issued after it except store puts. */
BS_API BS_NODISCARD bs_status bs_scope_backward(bs_engine *e, int n, bs_tensor *const *out,
                                                bs_tensor *const *grad);
/* Set the open scope, which has a tape and has not been walked, aside: what its backward pass reads stays in
   the arena, everything else is freed and every handle is dead. t: n tensors that resume hands out again. Its
   weights, rotations and batch must outlive it. */
typedef struct bs_kept bs_kept;
BS_API BS_NODISCARD bs_status bs_scope_keep(bs_engine *e, int n, bs_tensor *const *t, bs_kept **out);
/* Open it again for its backward pass, while no scope is open. t: references of the caller, of tensors that
   can be outputs of the backward pass or leaves; the bytes of those that no rule reads are gone. k is spent,
   unless this fails. */
BS_API BS_NODISCARD bs_status bs_scope_resume(bs_kept *k, bs_tensor **t);
BS_API int bs_kept_count(const bs_kept *k);          /* n */
BS_API const char *bs_kept_label(const bs_kept *k); /* of its scope */
/* Free a scope that is not resumed, before its engine is closed. */
BS_API void bs_kept_free(bs_kept *k);
/* Mark a tensor of the scope as a leaf whose gradient is wanted (before its use). */
BS_API BS_NODISCARD bs_status bs_tensor_want_grad(bs_tensor *t);
/* The gradient of a leaf after backward; NULL when nothing flowed to it. */
BS_API BS_NODISCARD bs_status bs_tensor_grad(bs_tensor *t, bs_tensor **out);

BS_API void bs_tensor_retain(bs_tensor *t);
BS_API void bs_tensor_release(bs_tensor *t);
BS_API bool bs_tensor_alive(const bs_tensor *t);
BS_API bs_dtype bs_tensor_dtype(const bs_tensor *t);
BS_API int bs_tensor_ndim(const bs_tensor *t);
BS_API int64_t bs_tensor_dim(const bs_tensor *t, int axis); /* 0-based; dim 0 = rows in use */
BS_API int64_t bs_tensor_capacity(const bs_tensor *t);      /* rows that dim 0 is allocated for */
/* The bytes of a tensor [rows, channels], and a tensor of the open scope over bytes (a store place; a
   weight of the current visit): not owned, alive until the scope ends. */
BS_API BS_NODISCARD bs_status bs_tensor_place(bs_tensor *t, bs_place *out);
BS_API BS_NODISCARD bs_status bs_tensor_at(bs_engine *e, const bs_place *at, bs_tensor **out);
/* Copy to the host in the tensor's dtype (waits). */
BS_API BS_NODISCARD bs_status bs_tensor_read(bs_tensor *t, bs_array **out);
/* A tensor of the scope from host data, f32 [rows, cols...], in the compute dtype; capacity = rows. */
BS_API BS_NODISCARD bs_status bs_tensor_from(bs_engine *e, const bs_array *a, bs_tensor **out);

/* ---- ops: activations have the engine's compute dtype, [rows, channels] -------------------------- */

/* y = x W^T + b + scale * (drop(x) A^T) B^T + r, what w has of it. r: a residual [rows, out] that the product
   is added to as it is computed, or NULL. */
BS_API BS_NODISCARD bs_status bs_op_linear(bs_tensor *x, bs_linear *w, bs_tensor *r, bs_tensor **out);
/* y = x / rms(x) * (w + one_plus), over the last `channels(w)` entries: a row of x may hold several
   heads, each normalised alone. Zhang & Sennrich 2019. */
BS_API BS_NODISCARD bs_status bs_op_rmsnorm(bs_tensor *x, bs_weight *w, double eps, bool one_plus,
                                            bs_tensor **out);
/* y = (x - mean(x)) / sqrt(var(x) + eps) * w + b, over the last `channels(w)` entries, as above. w and b
   are of one block. Ba et al. 2016. */
BS_API BS_NODISCARD bs_status bs_op_layernorm(bs_tensor *x, bs_weight *w, bs_weight *b, double eps,
                                              bs_tensor **out);
typedef enum bs_rope_style { BS_ROPE_HALF, BS_ROPE_INTERLEAVED } bs_rope_style;
/* Rotates the first 2*n_freq entries of each head of x [T, heads*head_dim] by position * inv_freq
   (Su et al. 2021); cos and sin are multiplied by `scaling`. inv_freq: host array f32 [n_freq]. */
typedef struct bs_rope bs_rope;
BS_API BS_NODISCARD bs_status bs_rope_new(bs_engine *e, const bs_array *inv_freq, double scaling,
                                          bs_rope_style style, bs_rope **out);
BS_API void bs_rope_free(bs_rope *r);
BS_API BS_NODISCARD bs_status bs_op_rope(bs_tensor *x, bs_rope *r, int heads, bs_tensor **out);
/* rmsnorm of each head of x [T, heads*channels(w)], then rope: nothing is stored, or rounded, between them. */
BS_API BS_NODISCARD bs_status bs_op_norm_rope(bs_tensor *x, bs_weight *w, double eps, bool one_plus,
                                              bs_rope *r, int heads, bs_tensor **out);
typedef struct bs_attention_cfg {
    int heads, kv_heads, head_dim;
    double scale;    /* 0: head_dim^-0.5 */
    int64_t window;  /* key j is seen by query i iff 0 <= i-j < window; 0: no window */
    double softcap;  /* 0: none; else cap*tanh(s/cap) */
    bs_weight *sinks; /* [heads], or NULL: a score per head that takes part in the softmax and has no value */
} bs_attention_cfg;
/* Causal attention inside each row of the micro-batch. q [T, heads*D], k and v [T, kv_heads*D]. */
BS_API BS_NODISCARD bs_status bs_op_attention(bs_tensor *q, bs_tensor *k, bs_tensor *v,
                                              const bs_attention_cfg *cfg, bs_tensor **out);
/* Keys and values of earlier tokens for walks without a tape: for each layer [rows, capacity, channels] in the
   engine's dtype, a region of the pool. A row of the cache is a row identity of the batch. */
typedef struct bs_cache bs_cache;
typedef struct bs_cache_cfg {
    int layers;
    const int64_t *channels; /* [layers] kv_heads * head_dim; 0: the layer has no attention */
    int64_t rows, capacity;  /* positions of a row */
} bs_cache_cfg;
BS_API BS_NODISCARD bs_status bs_cache_open(bs_engine *e, const bs_cache_cfg *cfg, bs_cache **out);
BS_API void bs_cache_close(bs_cache *c);
/* Attention of new tokens: k and v are put into the cache at their rows and positions, then each query sees
   positions 0.. up to its own of its row. Tokens of a row come in order and positions are not left out. */
BS_API BS_NODISCARD bs_status bs_op_attention_cached(bs_tensor *q, bs_tensor *k, bs_tensor *v,
                                                     const bs_attention_cfg *cfg, bs_cache *cache,
                                                     int layer, bs_tensor **out);
typedef enum bs_act { BS_ACT_SILU, BS_ACT_GELU_TANH, BS_ACT_GELU_ERF, BS_ACT_RELU } bs_act;
/* act(gate) * up */
BS_API BS_NODISCARD bs_status bs_op_glu(bs_tensor *gate, bs_tensor *up, bs_act act, bs_tensor **out);
BS_API BS_NODISCARD bs_status bs_op_act(bs_tensor *x, bs_act act, bs_tensor **out);
BS_API BS_NODISCARD bs_status bs_op_add(bs_tensor *a, bs_tensor *b, bs_tensor **out);
BS_API BS_NODISCARD bs_status bs_op_mul(bs_tensor *a, bs_tensor *b, bs_tensor **out);
BS_API BS_NODISCARD bs_status bs_op_scale(bs_tensor *a, double s, bs_tensor **out);
BS_API BS_NODISCARD bs_status bs_op_softmax(bs_tensor *x, bs_tensor **out); /* over the last dim */
/* Columns [first, first+n) of x, a copy. */
BS_API BS_NODISCARD bs_status bs_op_columns(bs_tensor *x, int64_t first, int64_t n, bs_tensor **out);
/* x [T,C] with every row t multiplied by g[t, column]. */
BS_API BS_NODISCARD bs_status bs_op_row_scale(bs_tensor *x, bs_tensor *g, int64_t column, bs_tensor **out);
/* Rows of w [vocab, C] at the token ids of the scope's micro-batch. Never on the tape: the gradient of w
   is bs_rows_grad's. */
BS_API BS_NODISCARD bs_status bs_op_embed(bs_engine *e, bs_weight *w, bs_tensor **out);
/* Rows of x at the labelled positions of the scope's micro-batch (capacity of x is kept). */
BS_API BS_NODISCARD bs_status bs_op_labelled(bs_tensor *x, bs_tensor **out);
/* The last row of x of each row of the micro-batch (capacity of x is kept); outside the tape. */
BS_API BS_NODISCARD bs_status bs_op_last(bs_tensor *x, bs_tensor **out);
/* Same elements, other dims; dim 0 must stay a multiple or divisor of the rows. Shares storage. */
BS_API BS_NODISCARD bs_status bs_op_view(bs_tensor *x, int ndim, const int64_t *dim, bs_tensor **out);
/* acc += x, in place, outside the tape: acc comes from a store (expert sums), in f32 or x's dtype. */
BS_API BS_NODISCARD bs_status bs_op_accumulate(bs_tensor *acc, bs_tensor *x);
/* x as ops take it, outside the tape: x itself if it has the compute dtype, else a copy (f32 sums). */
BS_API BS_NODISCARD bs_status bs_op_activation(bs_tensor *x, bs_tensor **out);

/* ---- head: loss over vocabulary tiles --------------------------------------------------------------------------- */

typedef struct bs_head bs_head;
/* LOGITS: of every token; LAST: of the last token of each row. */
typedef enum bs_head_mode { BS_HEAD_TRAIN, BS_HEAD_LOSS, BS_HEAD_LOGITS, BS_HEAD_LAST } bs_head_mode;
typedef struct bs_head_cfg {
    bs_batch *batch;
    int64_t channels, vocab;
    double softcap;   /* 0: none */
    bool logits;      /* LOGITS may be asked: each pass takes [tokens, vocab] f32 of host memory */
    int64_t tile_rows; /* largest tile */
} bs_head_cfg;
BS_API BS_NODISCARD bs_status bs_head_open(bs_engine *e, const bs_head_cfg *cfg, bs_head **out);
BS_API void bs_head_close(bs_head *h);
BS_API BS_NODISCARD bs_status bs_head_bytes(const bs_batch_cfg *b, const bs_head_cfg *cfg,
                                            bs_dtype compute, size_t *device);
/* Start a pass. count: labelled tokens of the whole step (the divisor of loss and gradient). */
BS_API BS_NODISCARD bs_status bs_head_begin(bs_head *h, bs_head_mode mode, int64_t count);
/* Hand in the normed rows of a micro-batch: labelled (TRAIN, LOSS), all (LOGITS) or last ones (LAST). */
BS_API BS_NODISCARD bs_status bs_head_put(bs_head *h, int micro, bs_tensor *x);
/* Consume one tile [rows, channels], vocabulary entries first.. (its block's visit is current). bias:
   [rows], added to the logits, of the same block; or NULL. */
BS_API BS_NODISCARD bs_status bs_head_tile(bs_head *h, int micro, bs_weight *tile, bs_weight *bias,
                                           int64_t first);
/* After the last tile: sum of losses (waits for nothing; bs_head_loss reads it) and, in TRAIN, dX as a
   tensor of the current scope, already divided by count. */
BS_API BS_NODISCARD bs_status bs_head_finish(bs_head *h, int micro, bs_tensor **dx);
/* Mean loss of the pass (waits). */
BS_API BS_NODISCARD bs_status bs_head_loss(bs_head *h, double *out);
/* Second visit of a tile when the head is trainable: dW of the tile and db of the bias that it was
   consumed with into their accumulators; the bias may be frozen. */
BS_API BS_NODISCARD bs_status bs_head_tile_grad(bs_head *h, int micro, bs_weight *tile, bs_weight *bias,
                                                int64_t first);
/* LOGITS, LAST: [rows handed in, vocab] of a micro-batch on the host (waits). */
BS_API BS_NODISCARD bs_status bs_head_logits(bs_head *h, int micro, bs_array **out);

/* ---- streamer ---------------------------------------------------------------------------------------------------- */

typedef struct bs_stream bs_stream;
typedef struct bs_io_cfg {
    const char *engine;    /* "auto", "uring", "pool" */
    int depth;             /* requests in flight; 0 = 32 */
    int threads;           /* pool; 0 = 4 */
    size_t request_bytes;  /* 0 = 2 MiB */
    bool no_direct;        /* buffered reads (tests, odd file systems) */
} bs_io_cfg;
typedef struct bs_stream_cfg {
    bs_engine *engine;
    const bs_plan *plan;
    bs_io_cfg io;
} bs_stream_cfg;
typedef struct bs_visit {
    bs_visit_spec spec;
    int64_t serial; /* 0, 1, ... over the life of the stream */
} bs_visit;
typedef struct bs_stream_stats {
    uint64_t disk_payload, disk_read, disk_reread, link_bytes; /* cumulative */
    uint64_t loads, reads, hits;        /* block loads into slots, block reads, visits without a load */
    uint64_t wasted;                    /* bytes fetched into pushed visits that were dropped */
    double disk_busy_s;                 /* time with at least one read in flight */
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
BS_API BS_NODISCARD bs_status bs_stream_end(bs_stream *s);
/* Drop everything pushed and not begun; wait for what is in flight; usable again afterwards. */
BS_API BS_NODISCARD bs_status bs_stream_abort(bs_stream *s);
/* Advance reads and copies without blocking (called by every wait and visit by itself). */
BS_API BS_NODISCARD bs_status bs_stream_pump(bs_stream *s);
BS_API void bs_stream_stats_get(const bs_stream *s, bs_stream_stats *out);
/* Where a block is now: "gpu", "ram", "disk", "slot", "loading". */
BS_API const char *bs_stream_where(const bs_stream *s, int block);
/* The bytes of a tensor in the gpu home of its block, for bs_params_update_base: [rows, last dim], valid
   until the stream is closed. BS_STATE when the block's home is another, or before it has arrived. */
BS_API BS_NODISCARD bs_status bs_stream_home(const bs_stream *s, int block, int tensor, bs_place *out);

/* Row tables: embedding rows gathered on the host side. home: BS_HOME_RAM (whole table read once) or
   BS_HOME_DISK (rows read per batch). */
typedef struct bs_rows bs_rows;
typedef struct bs_rows_stats {
    uint64_t payload, read; /* cumulative bytes */
    size_t host_bytes;
} bs_rows_stats;
BS_API BS_NODISCARD bs_status bs_rows_open(bs_engine *e, const bs_manifest *m, int rows, bs_home home,
                                           const bs_batch *b, const bs_io_cfg *io, bs_rows **out);
BS_API void bs_rows_close(bs_rows *r);
/* Device and pinned bytes that it takes. */
BS_API BS_NODISCARD bs_status bs_rows_bytes(const bs_manifest *m, int rows, bs_home home,
                                            const bs_batch_cfg *b, size_t *device, size_t *host);
/* Gather the rows of a micro-batch into a store key (f32 or bf16), times scale. An id beyond the table
   fails with the position. */
BS_API BS_NODISCARD bs_status bs_rows_gather(bs_rows *r, bs_store *s, int key, int micro, double scale);
/* Bytes that gathering this micro-batch will ask of the disk: predicted from the ids. */
BS_API BS_NODISCARD bs_status bs_rows_predict(bs_rows *r, int micro, uint64_t *payload, uint64_t *read);
/* Trainable embedding: acc[id] += scale * grad row, in token order (acc: f32 sums [vocab, C]). */
BS_API BS_NODISCARD bs_status bs_rows_grad(bs_rows *r, bs_store *s, int key, int micro, double scale,
                                           const bs_place *acc);
BS_API void bs_rows_stats_get(const bs_rows *r, bs_rows_stats *out);

/* ---- rates of a machine: the copies, products and reads of a step, each alone ----------------- */

/* Seconds of one copy of `bytes` from pinned to device memory (out: back), n in a row. */
BS_API BS_NODISCARD bs_status bs_rate_copy(bs_dev *dev, bool out, size_t bytes, int n, double *seconds);
/* Seconds of one product y [M,N] = x [M,K] w [N,K]^T in f32 or bf16, n in a row. */
BS_API BS_NODISCARD bs_status bs_rate_gemm(bs_dev *dev, bs_dtype t, int64_t M, int64_t N, int64_t K, int n,
                                           double *seconds);
typedef struct bs_read_rate {
    uint64_t bytes;
    double seconds;
    char io[32]; /* as in bs_stream_stats */
} bs_read_rate;
/* Reads all extents of some blocks into pinned memory, as the streamer does, and drops them; the files are
   as the manifest opened them (io->no_direct is not looked at). */
BS_API BS_NODISCARD bs_status bs_rate_read(bs_dev *dev, const bs_manifest *m, int n_blocks,
                                           const int *block, const bs_io_cfg *io, bs_read_rate *out);

/* ---- tokenizer: the tokenizer.json of Hugging Face ------------------------------------------- */

typedef struct bs_tok bs_tok;           /* never changes after open: any number of threads may use it */
typedef struct bs_tok_work bs_tok_work; /* the buffers of one thread */
typedef struct bs_tok_stream bs_tok_stream; /* decodes one id after the other */
typedef struct bs_tok_lines bs_tok_lines;   /* the ids of every line of a file */

/* Flags; 0 is none. */
enum {
    BS_TOK_SPECIAL = 1,     /* encode: what the post-processor puts around the text (BOS) */
    BS_TOK_LITERAL = 2,     /* encode: tokens marked special are plain text when the text holds them */
    BS_TOK_SPANS = 4,       /* encode: also say which bytes of the text each id stands for */
    BS_TOK_SKIP_SPECIAL = 8 /* decode: leave out tokens marked special */
};
typedef struct bs_tok_span {
    uint32_t first, end; /* bytes [first, end), whole characters; empty for ids around the text */
} bs_tok_span;
typedef struct bs_tok_ids {
    const int32_t *id;
    const bs_tok_span *span; /* NULL without BS_TOK_SPANS */
    int64_t n;
} bs_tok_ids;

/* path: a folder with tokenizer.json, or the file. tokenizer_config.json and generation_config.json
   beside it are read for special ids when they are there. A part of the file that is not known is
   refused by name. */
BS_API BS_NODISCARD bs_status bs_tok_open(const char *path, bs_tok **out);
BS_API void bs_tok_close(bs_tok *t); /* after its works, streams and lines */
/* One more than the highest id. */
BS_API int64_t bs_tok_vocab_size(const bs_tok *t);
/* The id of a piece as the file writes it; -1: absent. */
BS_API int32_t bs_tok_id(const bs_tok *t, const char *piece, size_t n);
/* The piece of an id; NULL: the id has none. */
BS_API const char *bs_tok_piece(const bs_tok *t, int32_t id, size_t *n);
/* Special ids by the name that tokenizer_config.json gives them without "_token": "bos", "eos", "pad",
   ... -1: not named there, or named with a text that is no token. */
BS_API int32_t bs_tok_special(const bs_tok *t, const char *name);
BS_API int bs_tok_special_count(const bs_tok *t);
BS_API const char *bs_tok_special_at(const bs_tok *t, int i, int32_t *id);
/* The ids that end generation: eos_token_id of generation_config.json, else "eos"; their number. */
BS_API int bs_tok_stops(const bs_tok *t, const int32_t **ids);

BS_API BS_NODISCARD bs_status bs_tok_work_new(const bs_tok *t, bs_tok_work **out);
BS_API void bs_tok_work_free(bs_tok_work *w);
/* Ids of the text, valid until the next call with the same work. Bytes that are not UTF-8 are encoded
   as U+FFFD. */
BS_API BS_NODISCARD bs_status bs_tok_encode(bs_tok_work *w, const char *text, size_t n, unsigned flags,
                                            bs_tok_ids *out);
/* Text of the ids (with a zero behind it), valid until the next call with the same work. An id without
   a piece gives nothing; a negative one is an error. */
BS_API BS_NODISCARD bs_status bs_tok_decode(bs_tok_work *w, const int32_t *ids, int64_t n,
                                            unsigned flags, const char **text, size_t *text_n);

/* What an id adds to the text: the pieces put together are what bs_tok_decode gives. Bytes of a
   character that is not complete are held back. finish gives the rest and starts anew. */
BS_API BS_NODISCARD bs_status bs_tok_stream_new(const bs_tok *t, unsigned flags, bs_tok_stream **out);
BS_API void bs_tok_stream_free(bs_tok_stream *s);
BS_API BS_NODISCARD bs_status bs_tok_stream_push(bs_tok_stream *s, int32_t id, const char **text,
                                                 size_t *text_n);
BS_API BS_NODISCARD bs_status bs_tok_stream_finish(bs_tok_stream *s, const char **text, size_t *text_n);

/* Encode every line of a file (without its newline) in `threads` threads (0: the online cores). */
BS_API BS_NODISCARD bs_status bs_tok_encode_file(const bs_tok *t, const char *path, int threads,
                                                 unsigned flags, bs_tok_lines **out);
BS_API void bs_tok_lines_free(bs_tok_lines *l);
BS_API int64_t bs_tok_lines_count(const bs_tok_lines *l);
BS_API int64_t bs_tok_lines_ids(const bs_tok_lines *l); /* of all lines together */
/* Line i, 0-based; borrowed from l. */
BS_API BS_NODISCARD bs_status bs_tok_lines_get(const bs_tok_lines *l, int64_t i, const int32_t **ids,
                                               int64_t *n);

#ifdef __cplusplus
}
#endif

#endif
