/* SPDX-License-Identifier: Apache-2.0 */
/*
** gemm.c: C = alpha op(A) op(B) + beta C, row-major, by cuBLAS. A row-major matrix is the transpose
** of a column-major one with the same leading dimension, so cuBLAS computes C^T = op(B)^T op(A)^T
** with the operands swapped. Sums are f32; f32 operands are never rounded to fewer bits. One handle,
** one workspace and one stream: the same shapes give the same bits.
*/
#include "kernels.h"

static cublasOperation_t operation(int64_t transposed)
{
    return transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
}

cudaError_t bsk_cuda_gemm(bsk_cuda *x, const bsk_call *c)
{
    const int64_t *n = c->n, M = n[2], N = n[3], K = n[4];
    const float alpha = (float)c->f[0], beta = (float)c->f[1];
    bool narrow = c->dtype == BS_DTYPE_BF16, narrow_out = c->out == BS_DTYPE_BF16;
    if (M <= 0 || N <= 0)
        return cudaSuccess;
    if ((!narrow && c->dtype != BS_DTYPE_F32) || (!narrow_out && c->out != BS_DTYPE_F32) ||
        (narrow_out && !narrow)) {
        x->note = "a product takes f32 operands to f32, or bf16 operands to f32 or bf16";
        return cudaErrorNotSupported;
    }
    if (K <= 0)
        return bsk_cuda_scale_matrix(x, c->p[2], c->out, M, N, n[7], beta);
    cudaDataType_t type = narrow ? CUDA_R_16BF : CUDA_R_32F;
    cublasStatus_t st =
        x->blas->gemm(x->handle, operation(n[1]), operation(n[0]), N, M, K, &alpha, c->p[1], type, n[6],
                      c->p[0], type, n[5], &beta, c->p[2], narrow_out ? CUDA_R_16BF : CUDA_R_32F, n[7],
                      narrow ? CUBLAS_COMPUTE_32F : CUBLAS_COMPUTE_32F_PEDANTIC, CUBLAS_GEMM_DEFAULT);
    if (st == CUBLAS_STATUS_SUCCESS)
        return cudaSuccess;
    x->note = x->blas->status_text(st);
    return cudaErrorUnknown;
}
