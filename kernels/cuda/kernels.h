/* SPDX-License-Identifier: Apache-2.0 */
/*
** kernels.h: what the cuda backend and its kernels share. A launcher reads a bsk_call as bsk.h lays it
** out and issues kernels on cuda->stream; it never waits, allocates or copies to the host. Shapes were
** checked above; what a launcher refuses is an element type or a size that it has no kernel for.
**
** Results are a function of shapes and inputs only: no atomics, every sum has one fixed order.
*/
#ifndef BSK_CUDA_KERNELS_H
#define BSK_CUDA_KERNELS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cublasLt.h>
#include <cublas_v2.h>
#include <cuda_runtime_api.h>

#include "bs/base.h"

#ifdef __cplusplus
extern "C" {
#endif

#include "bsk.h"

enum {
    BSK_CUDA_PARTIALS = 1024,       /* f64 values that sums may leave between two kernels */
    BSK_CUDA_BLAS_BYTES = 16 << 20, /* workspace of the BLAS */
    BSK_CUDA_WORKSPACE_BYTES = BSK_CUDA_BLAS_BYTES + BSK_CUDA_PARTIALS * 8, /* that and the partials */
    BSK_CUDA_PRODUCTS = 1024, /* shapes of products that are remembered */
    BSK_CUDA_MAX_HEAD_DIM = 256
};

/* The functions of cuBLAS that are used; the library is loaded when a device is opened. */
typedef struct bsk_cublas {
    cublasStatus_t (*create)(cublasHandle_t *handle);
    cublasStatus_t (*destroy)(cublasHandle_t handle);
    cublasStatus_t (*set_stream)(cublasHandle_t handle, cudaStream_t stream);
    cublasStatus_t (*set_workspace)(cublasHandle_t handle, void *workspace, size_t bytes);
    cublasStatus_t (*set_math_mode)(cublasHandle_t handle, cublasMath_t mode);
    cublasStatus_t (*gemm)(cublasHandle_t handle, cublasOperation_t ta, cublasOperation_t tb, int64_t m,
                           int64_t n, int64_t k, const void *alpha, const void *a,
                           cudaDataType_t a_type, int64_t lda, const void *b, cudaDataType_t b_type,
                           int64_t ldb, const void *beta, void *c, cudaDataType_t c_type, int64_t ldc,
                           cublasComputeType_t compute, cublasGemmAlgo_t algo);
    const char *(*status_text)(cublasStatus_t status);
    cublasStatus_t (*op_create)(cublasLtMatmulDesc_t *op, cublasComputeType_t compute,
                                cudaDataType_t scale);
    cublasStatus_t (*op_set)(cublasLtMatmulDesc_t op, cublasLtMatmulDescAttributes_t which,
                             const void *value, size_t bytes);
    cublasStatus_t (*op_destroy)(cublasLtMatmulDesc_t op);
    cublasStatus_t (*layout_create)(cublasLtMatrixLayout_t *layout, cudaDataType_t type, uint64_t rows,
                                    uint64_t cols, int64_t ld);
    cublasStatus_t (*layout_destroy)(cublasLtMatrixLayout_t layout);
    cublasStatus_t (*wish_create)(cublasLtMatmulPreference_t *wish);
    cublasStatus_t (*wish_set)(cublasLtMatmulPreference_t wish,
                               cublasLtMatmulPreferenceAttributes_t which, const void *value,
                               size_t bytes);
    cublasStatus_t (*wish_destroy)(cublasLtMatmulPreference_t wish);
    cublasStatus_t (*search)(cublasLtHandle_t handle, cublasLtMatmulDesc_t op, cublasLtMatrixLayout_t a,
                             cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c,
                             cublasLtMatrixLayout_t d, cublasLtMatmulPreference_t wish, int most,
                             cublasLtMatmulHeuristicResult_t *found, int *count);
    cublasStatus_t (*matmul)(cublasLtHandle_t handle, cublasLtMatmulDesc_t op, const void *alpha,
                             const void *a, cublasLtMatrixLayout_t a_layout, const void *b,
                             cublasLtMatrixLayout_t b_layout, const void *beta, const void *c,
                             cublasLtMatrixLayout_t c_layout, void *d, cublasLtMatrixLayout_t d_layout,
                             const cublasLtMatmulAlgo_t *algo, void *workspace, size_t bytes,
                             cudaStream_t stream);
} bsk_cublas;

/* How cuBLAS computes products of one shape: searched for once (gemm.c). */
typedef struct bsk_cuda_product {
    int64_t key[9]; /* n[] of the call, then types and alignments; 0: none yet */
    cublasLtMatmulDesc_t op;
    cublasLtMatrixLayout_t a, b, c; /* NULL with op: no algorithm was found */
    cublasLtMatmulAlgo_t algo;
} bsk_cuda_product;

typedef struct bsk_cuda {
    cudaStream_t stream;
    const bsk_cublas *blas;
    cublasHandle_t handle;      /* bound to stream and workspace */
    void *workspace;            /* [BSK_CUDA_BLAS_BYTES], device; of the call, like the partials */
    bsk_cuda_product *products; /* [BSK_CUDA_PRODUCTS] by the hash of their key */
    double *partials;           /* [BSK_CUDA_PARTIALS], device */
    int capability;             /* of the device: 10 major + minor */
    int processors;             /* multiprocessors */
    void *encode_tensor_map;    /* the driver's cuTensorMapEncodeTiled, or NULL */
    const char *note; /* of a launcher that fails: what CUDA's own text does not say; static */
} bsk_cuda;

/* cudaErrorNotSupported: refused, nothing was issued, note says why. */
typedef cudaError_t bsk_cuda_fn(bsk_cuda *cuda, const bsk_call *c);

typedef struct bsk_cuda_entry {
    const char *name;
    bsk_cuda_fn *fn;
    bool workspace; /* uses the BLAS or the partials */
} bsk_cuda_entry;

extern const bsk_cuda_entry bsk_cuda_table[BSK_OP_COUNT];

/* cudaErrorNoKernelImageForDevice: the current device is of an architecture that was not compiled. */
cudaError_t bsk_cuda_probe(void);
/* Tests: the stream stands still for this long. */
void bsk_cuda_delay(cudaStream_t s, uint64_t nanoseconds);

bsk_cuda_fn bsk_cuda_gemm, bsk_cuda_gemm_grouped, bsk_cuda_bias_grouped, bsk_cuda_expand,
    bsk_cuda_expand_mxfp4, bsk_cuda_bias, bsk_cuda_colsum, bsk_cuda_rmsnorm, bsk_cuda_rmsnorm_bwd,
    bsk_cuda_layernorm, bsk_cuda_layernorm_bwd, bsk_cuda_rope, bsk_cuda_norm_rope,
    bsk_cuda_norm_rope_bwd, bsk_cuda_attention, bsk_cuda_attention_bwd, bsk_cuda_sinks_bwd,
    bsk_cuda_cache_put, bsk_cuda_attention_cache, bsk_cuda_glu, bsk_cuda_glu_bwd, bsk_cuda_glu_clamped,
    bsk_cuda_glu_clamped_bwd, bsk_cuda_act, bsk_cuda_act_bwd, bsk_cuda_add, bsk_cuda_mul, bsk_cuda_axpy,
    bsk_cuda_scale, bsk_cuda_softmax, bsk_cuda_softmax_bwd, bsk_cuda_columns, bsk_cuda_columns_bwd,
    bsk_cuda_row_scale, bsk_cuda_row_scale_bwd, bsk_cuda_gather_rows, bsk_cuda_scatter_rows,
    bsk_cuda_route, bsk_cuda_route_bwd, bsk_cuda_sort_rows, bsk_cuda_take_rows, bsk_cuda_sum_rows,
    bsk_cuda_dropout, bsk_cuda_head_tile, bsk_cuda_head_pick, bsk_cuda_row_mul, bsk_cuda_head_finish,
    bsk_cuda_head_dlogits, bsk_cuda_softcap, bsk_cuda_sum, bsk_cuda_sumsq, bsk_cuda_adamw;
/* Ends what the remembered products hold. */
void bsk_cuda_forget_products(bsk_cuda *cuda);
/* C [M,N] with leading dimension ldc becomes beta C: a product over nothing. */
cudaError_t bsk_cuda_scale_matrix(bsk_cuda *cuda, void *C, int dtype, int64_t M, int64_t N, int64_t ldc,
                                  float beta);

/* gemm_grouped*.cu: the versions that table.c chooses from; the first takes everything. */
bsk_cuda_fn bsk_cuda_gemm_grouped_plain, bsk_cuda_gemm_grouped_sm90;
bool bsk_cuda_gemm_grouped_on_sm90(const bsk_cuda *cuda, const bsk_call *c); /* it takes this call */

/* attention_*.cu: the versions that table.c chooses from. */
bool bsk_cuda_attention_tiled(int64_t D); /* the tensor cores have a kernel for this head dim */
bsk_cuda_fn bsk_cuda_attention_mma, bsk_cuda_attention_bwd_mma, bsk_cuda_attention_plain,
    bsk_cuda_attention_bwd_plain;
/* For compute capability 9.0 and no other, where that is compiled: BSK_CUDA_SM90. */
bool bsk_cuda_attention_on_sm90(const bsk_cuda *cuda, int64_t D); /* they have this head dim */
bsk_cuda_fn bsk_cuda_attention_sm90, bsk_cuda_attention_bwd_sm90;

#ifdef __cplusplus
}
#endif

#endif
