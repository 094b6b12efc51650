/* SPDX-License-Identifier: Apache-2.0 */
/*
** attention_prepare.cu: what every backward of attention needs per query: delta = rowsum(dO O), and the
** first key that the query sees.
*/
#include "attention.cuh"
#include "row_groups.cuh"

template <class T>
static __global__ void __launch_bounds__(ROW_THREADS)
    prepare_kernel(attention_args a, float *delta, int32_t *first, bool wide)
{
    int64_t row = my_row(), rows = (int64_t)a.T * a.H, limit = row < rows ? a.D : 0;
    float sum = row_dot((const T *)a.o_in + row * a.D, (const T *)a.grad_o + row * a.D, limit, wide);
    if (threadIdx.x != 0 || !limit)
        return;
    delta[row] = sum;
    if (row % a.H == 0)
        first[row / a.H] = first_key(a, (int)(row / a.H));
}

cudaError_t bsk_cuda_attention_prepare(bsk_cuda *cuda, const attention_args *a, int dtype)
{
    return by_type(cuda, dtype, [&](auto t) {
        return issue_rows(cuda, prepare_kernel<decltype(t)>, (int64_t)a->T * a->H, a->D, *a,
                          const_cast<float *>(a->delta), const_cast<int32_t *>(a->first),
                          rows_wide(a->D, a->o_in, a->grad_o));
    });
}
