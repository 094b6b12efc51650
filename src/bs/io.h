/* SPDX-License-Identifier: Apache-2.0 */
/* bs/io.h: files: safetensors, whole-file writes, the manifest. Conventions: bs.h. */
#ifndef BS_PUBLIC_IO_H
#define BS_PUBLIC_IO_H

#include "bs/base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- safetensors (FORMAT of huggingface/safetensors) ----------------------------------------- */

typedef struct bs_safetensors bs_safetensors; /* an open file with its checked header */
typedef struct bs_safetensors_tensor {
    const char *name;       /* owned by the bs_safetensors */
    const char *dtype_name; /* as in the file, e.g. "F8_E4M3" */
    bs_dtype dtype;         /* BS_DTYPE_COUNT: a dtype of the format that we do not compute with */
    int ndim;
    int64_t dim[BS_MAX_DIMS];
    uint64_t offset; /* of the first byte, from the start of the file */
    uint64_t bytes;
} bs_safetensors_tensor;

/* Open and check everything that the format demands; the error names file, tensor and rule. A file
   that is HTML, a Git LFS pointer or empty is told as such. */
BS_API BS_NODISCARD bs_status bs_safetensors_open(const char *path, bs_safetensors **out);
BS_API void bs_safetensors_close(bs_safetensors *st);
BS_API int64_t bs_safetensors_count(const bs_safetensors *st);
BS_API const bs_safetensors_tensor *bs_safetensors_at(const bs_safetensors *st,
                                                      int64_t i); /* file order */
BS_API const bs_safetensors_tensor *bs_safetensors_find(const bs_safetensors *st,
                                                        const char *name); /* NULL: absent */
BS_API const char *bs_safetensors_path(const bs_safetensors *st);
BS_API uint64_t bs_safetensors_file_bytes(const bs_safetensors *st);
BS_API BS_NODISCARD bs_status bs_safetensors_read(bs_safetensors *st, const char *name, bs_array **out);
/* The i-th key of __metadata__ and its value; NULL: there are no more. */
BS_API const char *bs_safetensors_meta(const bs_safetensors *st, int i, const char **value);

/* Write n arrays to path: temp file beside it, fsync, rename, fsync of the folder. The old file stays
   whole on any failure. metadata: n_meta key/value pairs, or NULL. */
BS_API BS_NODISCARD bs_status bs_safetensors_write(const char *path, int64_t n,
                                                   const char *const *names,
                                                   const bs_array *const *arrays, int n_meta,
                                                   const char *const *keys, const char *const *values);
/* The same file tensor by tensor, in any order, so that one at a time has to be in memory. Of the n
   descriptions name, dtype_name, ndim and dim count. */
typedef struct bs_safetensors_writer bs_safetensors_writer;
BS_API BS_NODISCARD bs_status bs_safetensors_writer_open(const char *path, int64_t n,
                                                         const bs_safetensors_tensor *tensors,
                                                         int n_meta, const char *const *keys,
                                                         const char *const *values,
                                                         bs_safetensors_writer **out);
/* The bytes of a tensor: from an array of its dtype and dims, or as they are in another file. */
BS_API BS_NODISCARD bs_status bs_safetensors_writer_add(bs_safetensors_writer *w, const char *name,
                                                        const bs_array *a);
BS_API BS_NODISCARD bs_status bs_safetensors_writer_copy(bs_safetensors_writer *w, const char *name,
                                                         const bs_safetensors *from);
/* Every tensor has been given: fsync, rename. Before it, or when it fails, path is what it was. */
BS_API BS_NODISCARD bs_status bs_safetensors_writer_finish(bs_safetensors_writer *w);
BS_API void
bs_safetensors_writer_close(bs_safetensors_writer *w); /* throws away what was not finished */

/* The same discipline for any bytes (adapter_config.json, reports). */
BS_API BS_NODISCARD bs_status bs_file_write(const char *path, const void *data, size_t n);
/* Bytes of a regular file into a new one of the same discipline, in pieces. */
BS_API BS_NODISCARD bs_status bs_file_copy(const char *from, const char *to);

/* ---- folders that are put in place as a whole --------------------------------------------------- */

/* A folder whose own files belong together: names are told by n patterns of fnmatch(3), the first of which is the name
   of the file without which there is no folder of the kind. All other entries are somebody else's: they stay, whatever
   becomes of the own ones. */
typedef struct bs_folder bs_folder;
/* Makes a temporary folder for `path`, which may be absent, with its parents. What processes that ended have left of
   their own at this place is put in order. BS_IO: it cannot be written, or an own name is taken by something that is
   neither a file nor a link. */
BS_API BS_NODISCARD bs_status bs_folder_begin(const char *path, int n, const char *const *own,
                                              bs_folder **out);
/* Where the files are to be written. Owned by the folder; changes with a commit. */
BS_API const char *bs_folder_temp(const bs_folder *f);
/* The own files at `path` are those of the temporary folder, and no others: all of them or, when it fails or the
   process ends at any moment, all that were there before. Files keep the modes of those that they replace, the folder
   keeps its own. Of several processes the last has all of it. */
BS_API BS_NODISCARD bs_status bs_folder_commit(bs_folder *f);
/* Throws away what was not committed. NULL is fine. */
BS_API void bs_folder_close(bs_folder *f);
/* For whoever finds no first own file at `path`: a process may have ended while it moved files there; puts all of the
   old files or all of the new ones in place. */
BS_API BS_NODISCARD bs_status bs_folder_recover(const char *path, int n, const char *const *own);

/* ---- manifest: where each block's bytes are -------------------------------------------------- */

typedef struct bs_manifest bs_manifest;

/* How values lie in bytes: each as its dtype says, or packed in groups with a scale each, in a tensor of their own. */
typedef enum bs_packing { BS_PLAIN, BS_MXFP4, BS_PACKING_COUNT } bs_packing;
typedef struct bs_packing_info {
    const char *name;           /* "mxfp4" */
    int64_t group;              /* values of a row that share a scale */
    int64_t bytes, scale_bytes; /* of a group */
} bs_packing_info;
BS_API const bs_packing_info *bs_packing_get(bs_packing p); /* NULL for BS_PLAIN */

typedef struct bs_tensor_info {
    const char *name;
    bs_dtype dtype; /* of a packed one: u8; dim is of its values */
    int ndim;
    int64_t dim[BS_MAX_DIMS];
    int file;
    uint64_t file_offset;
    uint64_t bytes;
    uint64_t slot_offset;   /* in the canonical device layout of its block, multiple of 256 */
    uint64_t expand_offset; /* in the expand region, UINT64_MAX when stored in the compute dtype */
    bs_dtype compute;       /* element type that the expand region is laid out for */
    bs_packing packing;
    int scales;             /* of a packed one: the tensor of its block with the scales; else -1 */
    uint64_t scales_offset; /* its slot_offset */
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
/* Packed rows of values [.., columns], columns a multiple of the group, and their scales; `out` is the first of two
   tensors, NAME and NAME.scales. */
typedef struct bs_packed {
    const char *name;
    bs_packing packing;
    int ndim;
    const int64_t *dim; /* of the values */
    int file, scales_file;
    uint64_t file_offset, scales_offset;
} bs_packed;
BS_API BS_NODISCARD bs_status bs_manifest_add_packed(bs_manifest *m, int block, const bs_packed *p,
                                                     int *out);
/* A table [rows, cols] of which single rows are gathered (embedding). */
BS_API BS_NODISCARD bs_status bs_manifest_add_row_table(bs_manifest *m, const char *name, bs_dtype t,
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

/* ---- how files are read ---------------------------------------------------------------------- */

typedef struct bs_io_cfg {
    const char *engine;   /* "auto", "uring", "pool" */
    int depth;            /* requests in flight; 0 = 32 */
    int threads;          /* pool; 0 = 4 */
    size_t request_bytes; /* 0 = 2 MiB */
    bool no_direct;       /* buffered reads (tests, odd file systems) */
} bs_io_cfg;

#ifdef __cplusplus
}
#endif

#endif
