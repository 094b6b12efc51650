/* SPDX-License-Identifier: Apache-2.0 */
/*
** gemm.c: C = alpha op(A) op(B) + beta D, row-major, by cuBLAS; D is C where the call has none. A
** row-major matrix is the transpose of a column-major one with the same leading dimension, so cuBLAS
** computes C^T = op(B)^T op(A)^T with the operands swapped. Sums are f32 and parts of a sum are never
** rounded to bf16; f32 operands are never rounded to fewer bits.
**
** cuBLAS searches for an algorithm in every call, which takes longer than a small product. For bf16 the
** search is made once a shape and remembered; f32, which is for comparisons, and what the search finds
** nothing for take the plain way. One handle, one workspace and one stream, and a choice that depends on
** shapes, types and alignment only: the same shapes give the same bits. Products of one stream never
** overlap, so one workspace serves them all.
*/
#include "kernels.h"

#include <string.h>

static cublasOperation_t operation(int64_t transposed)
{
    return transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
}

/* ---- remembered products ---- */

/* The largest power of two that divides the address, at most 256, which is all that cuBLAS makes use of. */
static uint32_t alignment(const void *p)
{
    uintptr_t bits = (uintptr_t)p | 256;
    return (uint32_t)(bits & -bits);
}

static void forget(const bsk_cublas *blas, bsk_cuda_product *p)
{
    if (p->op)
        blas->op_destroy(p->op);
    cublasLtMatrixLayout_t layouts[] = {p->a, p->b, p->c};
    for (int i = 0; i < 3; i++)
        if (layouts[i])
            blas->layout_destroy(layouts[i]);
    memset(p, 0, sizeof *p);
}

void bsk_cuda_forget_products(bsk_cuda *cuda)
{
    for (int i = 0; cuda->products && i < BSK_CUDA_PRODUCTS; i++)
        forget(cuda->blas, &cuda->products[i]);
}

/* The operation and the layouts; cuBLAS's first operand is B, its second A. */
static bool describe(const bsk_cublas *blas, bsk_cuda_product *p, const bsk_call *c)
{
    const int64_t *n = c->n, M = n[2], N = n[3], K = n[4];
    cublasOperation_t first = operation(n[1]), second = operation(n[0]);
    uint64_t nu = (uint64_t)N, mu = (uint64_t)M, ku = (uint64_t)K;
    cudaDataType_t out = c->out == BS_DTYPE_BF16 ? CUDA_R_16BF : CUDA_R_32F;
    return !blas->op_create(&p->op, CUBLAS_COMPUTE_32F, CUDA_R_32F) &&
           !blas->op_set(p->op, CUBLASLT_MATMUL_DESC_TRANSA, &first, sizeof first) &&
           !blas->op_set(p->op, CUBLASLT_MATMUL_DESC_TRANSB, &second, sizeof second) &&
           !blas->layout_create(&p->a, CUDA_R_16BF, n[1] ? ku : nu, n[1] ? nu : ku, n[6]) &&
           !blas->layout_create(&p->b, CUDA_R_16BF, n[0] ? mu : ku, n[0] ? ku : mu, n[5]) &&
           !blas->layout_create(&p->c, out, nu, mu, n[7]);
}

/* Of C and D, which share a layout. */
static uint32_t alignment_of_sum(const bsk_call *c)
{
    uint32_t to = alignment(c->p[2]), from = alignment(c->p[3]);
    return to < from ? to : from;
}

/* The best algorithm by cuBLAS's own heuristics. It is told the alignments, because it takes operands for aligned to
   256 bytes otherwise and could choose kernels that fail at these addresses; and that the parts of a split sum are
   added in f32, because bf16 parts would lose what f32 sums are kept for. */
static bool search(const bsk_cuda *cuda, bsk_cuda_product *p, const bsk_call *c)
{
    const bsk_cublas *blas = cuda->blas;
    const size_t bytes = BSK_CUDA_BLAS_BYTES;
    const uint32_t sums = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    const uint32_t a = alignment(c->p[1]), b = alignment(c->p[0]), d = alignment_of_sum(c);
    cublasLtMatmulHeuristicResult_t found;
    cublasLtMatmulPreference_t wish = NULL;
    int count = 0;
    bool ok = !blas->wish_create(&wish) &&
              !blas->wish_set(wish, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes, sizeof bytes) &&
              !blas->wish_set(wish, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &sums, sizeof sums) &&
              !blas->wish_set(wish, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &a, sizeof a) &&
              !blas->wish_set(wish, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &b, sizeof b) &&
              !blas->wish_set(wish, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &d, sizeof d) &&
              !blas->wish_set(wish, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &d, sizeof d) &&
              !blas->search((cublasLtHandle_t)cuda->handle, p->op, p->a, p->b, p->c, p->c, wish, 1,
                            &found, &count) &&
              count == 1;
    if (wish)
        blas->wish_destroy(wish);
    if (ok)
        p->algo = found.algo;
    return ok;
}

/* The entry of a call's shape, made now when it is new; it may take the place of another, which the next call of
   that shape searches for again, with the same result. Where the search fails the entry keeps its key and no op, so
   that it is not repeated. The key is all that the search looks at; it is never 0, which an entry without one has. */
static bsk_cuda_product *product_of(bsk_cuda *cuda, const bsk_call *c)
{
    int64_t key[9];
    uint64_t hash = 0;
    memcpy(key, c->n, 8 * sizeof *key);
    key[8] = 1 + c->out + ((int64_t)alignment(c->p[0]) << 8) + ((int64_t)alignment(c->p[1]) << 20) +
             ((int64_t)alignment_of_sum(c) << 32);
    for (int i = 0; i < 9; i++) {
        hash = (hash ^ (uint64_t)key[i]) * 0x9E3779B97F4A7C15u;
        hash ^= hash >> 32;
    }
    bsk_cuda_product *p = &cuda->products[hash % BSK_CUDA_PRODUCTS];
    if (memcmp(p->key, key, sizeof key) == 0)
        return p;
    forget(cuda->blas, p);
    if (!describe(cuda->blas, p, c) || !search(cuda, p, c))
        forget(cuda->blas, p);
    memcpy(p->key, key, sizeof key);
    return p;
}

/* ---- the launcher ---- */

/* C = D, ahead of a product that adds to C only: cublasGemmEx has no fourth operand. */
static cudaError_t copy_addend(const bsk_cuda *cuda, const bsk_call *c)
{
    size_t size = c->out == BS_DTYPE_BF16 ? 2 : 4, pitch = (size_t)c->n[7] * size;
    return c->p[3] ? cudaMemcpy2DAsync(c->p[2], pitch, c->p[3], pitch, (size_t)c->n[3] * size,
                                       (size_t)c->n[2], cudaMemcpyDeviceToDevice, cuda->stream)
                   : cudaSuccess;
}

static cublasStatus_t launch(bsk_cuda *cuda, const bsk_call *c, bool narrow)
{
    const int64_t *n = c->n, M = n[2], N = n[3], K = n[4];
    const float alpha = (float)c->f[0], beta = (float)c->f[1];
    const bsk_cuda_product *p = narrow ? product_of(cuda, c) : NULL;
    if (p && p->op)
        return cuda->blas->matmul((cublasLtHandle_t)cuda->handle, p->op, &alpha, c->p[1], p->a, c->p[0],
                                  p->b, &beta, c->p[3] ? c->p[3] : c->p[2], p->c, c->p[2], p->c,
                                  &p->algo, cuda->workspace, BSK_CUDA_BLAS_BYTES, cuda->stream);
    if (copy_addend(cuda, c) != cudaSuccess)
        return CUBLAS_STATUS_EXECUTION_FAILED;
    cudaDataType_t type = narrow ? CUDA_R_16BF : CUDA_R_32F;
    return cuda->blas->gemm(
        cuda->handle, operation(n[1]), operation(n[0]), N, M, K, &alpha, c->p[1], type, n[6], c->p[0],
        type, n[5], &beta, c->p[2], c->out == BS_DTYPE_BF16 ? CUDA_R_16BF : CUDA_R_32F, n[7],
        /* pedantic: else f32 operands may be rounded to tf32 */
        narrow ? CUBLAS_COMPUTE_32F : CUBLAS_COMPUTE_32F_PEDANTIC, CUBLAS_GEMM_DEFAULT);
}

cudaError_t bsk_cuda_gemm(bsk_cuda *cuda, const bsk_call *c)
{
    const int64_t *n = c->n, M = n[2], N = n[3], K = n[4];
    bool narrow = c->dtype == BS_DTYPE_BF16, narrow_out = c->out == BS_DTYPE_BF16;
    if (M <= 0 || N <= 0)
        return cudaSuccess;
    if ((!narrow && c->dtype != BS_DTYPE_F32) || (!narrow_out && c->out != BS_DTYPE_F32) ||
        (narrow_out && !narrow)) {
        cuda->note = "a product takes f32 operands to f32, or bf16 operands to f32 or bf16";
        return cudaErrorNotSupported;
    }
    if (K <= 0) { /* no element of A and B: C = beta D */
        cudaError_t e = copy_addend(cuda, c);
        return e == cudaSuccess
                   ? bsk_cuda_scale_matrix(cuda, c->p[2], c->out, M, N, n[7], (float)c->f[1])
                   : e;
    }
    cublasStatus_t st = launch(cuda, c, narrow);
    if (st == CUBLAS_STATUS_SUCCESS)
        return cudaSuccess;
    cuda->note = cuda->blas->status_text(st);
    return cudaErrorUnknown;
}
