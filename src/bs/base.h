/* SPDX-License-Identifier: Apache-2.0 */
/* bs/base.h: status, host memory, what the system says, JSON, element types, host arrays.
   Conventions: bs.h. */
#ifndef BS_PUBLIC_BASE_H
#define BS_PUBLIC_BASE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define BS_VERSION   "0.1.0"
#define BS_API       __attribute__((visibility("default")))
#define BS_NODISCARD __attribute__((warn_unused_result))

/* ---- status ---------------------------------------------------------------------------------- */

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

/* Frees text that a function here has made. */
BS_API void bs_str_free(char *s);
/* Bytes of the well-formed UTF-8 that s begins with: n where all of it is. */
BS_API size_t bs_utf8_valid(const char *s, size_t n);

/* Text of unknown origin for people to read: control characters (C0, DEL, C1), marks that turn the direction of
   writing, characters without width, separators of lines and bytes that are no UTF-8 become \n, \t, \x1B, \u{202E};
   all else stays. running: text of several lines, in which line ends, tabs and the joiners of scripts stay as well.
   Writes at most room bytes to out (no zero at the end) and returns how many the whole has. */
BS_API size_t bs_printable(const char *s, size_t n, bool running, char *out, size_t room);
/* One line on stderr, "bslua: " and the text made printable. Needs no memory; any thread. */
BS_API void bs_tell(const char *text, size_t n, bool running);

/* Ask every wait of libbs to end with BS_CANCELLED (async-signal-safe); false clears it. */
BS_API void bs_cancel(bool on);
BS_API bool bs_cancelled(void);

/* Log lines (fall-backs, warnings) go to fn, or to stderr when fn is NULL. Process-wide. */
typedef void (*bs_log_fn)(void *ud, const char *line);
BS_API void bs_log_to(bs_log_fn fn, void *ud);
BS_API void bs_log(const char *line);

/* ---- host memory accounting ------------------------------------------------------------------ */

/* What host bytes are used for. */
typedef enum bs_tag {
    BS_TAG_MISC,
    BS_TAG_HEADER,   /* parsed headers, manifests, plans */
    BS_TAG_SLOT,     /* pinned host slots */
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

/* ---- what the system says -------------------------------------------------------------------- */

/* Bytes that new allocations may take without swapping; bytes of this process that are resident, and the most that
   were. Where /proc cannot be read: what system calls know, which is less: free memory without the caches, and the most
   resident bytes as both. BS_IO where they fail as well. */
BS_API BS_NODISCARD bs_status bs_memory_available(uint64_t *out);
BS_API BS_NODISCARD bs_status bs_process_memory(uint64_t *now, uint64_t *peak);
/* Bytes that storage has delivered to this process; false where the system does not count them. */
BS_API bool bs_process_read_bytes(uint64_t *out);

/* A descriptor of a regular file, for reading; the caller closes it. BS_IO: it cannot be opened, or is a folder,
   device, pipe or socket (none of them is waited for). */
BS_API BS_NODISCARD bs_status bs_file_open(const char *path, int *fd);
/* All of a regular file, a zero after it (not counted): free with bs_str_free. limit: the most bytes it may have; 0:
   any. BS_IO: as for bs_file_open, or it cannot be read; BS_FORMAT: it is larger. */
BS_API BS_NODISCARD bs_status bs_file_read(const char *path, size_t limit, char **text, size_t *n);

/* ---- JSON text from outside ------------------------------------------------------------------ */

struct cJSON; /* <cjson/cJSON.h> */

#define BS_JSON_DEPTH 1000 /* the deepest nesting of arrays and objects that any rules allow */

/* What a text may be. In every text zero bytes and \u0000 are refused: cJSON's strings end there. Members of an
   object that have one key are all in the tree; whether that is an error is the caller's to say. */
typedef struct bs_json_rules {
    size_t limit; /* longest text in bytes; 0: any */
    size_t tree;  /* most bytes of memory that the tree may need, found before it is made; 0: any */
    int depth;    /* deepest nesting; 0: BS_JSON_DEPTH */
    bool counts;  /* outside strings only non-negative integers, arrays and objects */
    /* Accept what cJSON does beyond JSON: bytes that are not UTF-8 and control characters in strings, control
       characters as white space, a byte order mark at the beginning. Else they are refused. */
    bool lax;
} bs_json_rules;

typedef struct bs_json {
    struct cJSON *root;
    size_t
        reserved; /* bytes accounted for the tree (BS_TAG_HEADER): an upper bound, known before the parse */
} bs_json;

/* Parse n bytes (no zero at the end needed), which hold one value and white space. The tree keeps nothing of text.
   what: names the text at the beginning of messages; NULL: nothing does. BS_FORMAT says byte, line and column;
   BS_NOMEM: there is no memory for the tree; BS_UNSUPPORTED: it may need more than the rules allow. */
BS_API BS_NODISCARD bs_status bs_json_parse(const char *text, size_t n, const bs_json_rules *rules,
                                            const char *what, bs_json *out);
BS_API void bs_json_end(bs_json *j); /* zero, or ended before: fine */

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

BS_API const char *bs_dtype_name(bs_dtype t);             /* "f32", "bf16", ... */
BS_API size_t bs_dtype_size(bs_dtype t);                  /* bytes of one element */
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
BS_API BS_NODISCARD bs_status bs_array_uniform(bs_array *a, double bound, uint64_t seed,
                                               const char *name);
/* Element i (0-based, row-major) as double; i64 beyond 2^53 loses bits. */
BS_API double bs_array_get(const bs_array *a, int64_t i);
BS_API void bs_array_set(bs_array *a, int64_t i, double v);
/* A converted copy (round to nearest even). */
BS_API BS_NODISCARD bs_status bs_array_cast(const bs_array *a, bs_dtype t, bs_array **out);
/* ||a-b|| / ||b|| in f64 (||a-b|| when b is zero); BS_SHAPE when the counts differ. A non-finite
   value on either side gives +inf. */
BS_API BS_NODISCARD bs_status bs_array_rel_err(const bs_array *a, const bs_array *b, double *out);
/* No element is NaN or infinity. */
BS_API bool bs_array_is_finite(const bs_array *a);
/* 64-bit hash of the bytes, dtype and dims; a function of the content only. */
BS_API uint64_t bs_array_hash(const bs_array *a);
BS_API uint64_t bs_hash64(const void *p, size_t n, uint64_t seed);

#ifdef __cplusplus
}
#endif

#endif
