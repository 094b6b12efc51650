/* SPDX-License-Identifier: Apache-2.0 */
/*
** mma.cuh: tiles of bf16 in shared memory and the tensor cores' instructions on them (sm_80 and on).
** A tile has rows of D elements with PAD elements after each. A row is then an odd number of 16-byte
** chunks long for every D that is a multiple of 16, and the 8 rows that one step of ldmatrix reads
** start in different banks. Without the padding all 8 would start in the same bank for D = 64 or 128.
**
** m16n8k16: a warp multiplies A [16,16] by B [16,8] and adds to C [16,8]. What lane l holds (PTX ISA,
** "Matrix Fragments for mma.m16n8k16"), with r = l / 4 and c = 2 (l % 4), two elements a register:
**   A  a[0] row r, columns c and c+1; a[1] row r+8; a[2] row r, columns c+8 and c+9; a[3] row r+8 of those
**   B  b0 rows c and c+1 of column r; b1 rows c+8 and c+9
**   C  c[0], c[1] row r, columns c and c+1; c[2], c[3] row r+8
** So four neighbouring lanes share a row of C, and a reduction along a row is two shuffles. Two
** neighbouring C tiles, rounded, are an A operand as they lie: scores become the left side of the next
** product without leaving the registers.
*/
#ifndef BSK_CUDA_MMA_CUH
#define BSK_CUDA_MMA_CUH

#include "elements.cuh"

enum { PAD = 8, MMA_THREADS = 128 };

static __device__ inline uint32_t shared_address(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

/* Four 8x8 matrices. Lanes 8i to 8i+7 give the addresses of the rows of matrix i, lane l gets from each the
   elements 2(l%4) and the next of row l/4. */
static __device__ inline void ldmatrix(uint32_t (&r)[4], const bf16 *p)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(p))
                 : "memory");
}

/* The same of the transposed matrices: elements of rows 2(l%4) and the next in column l/4. */
static __device__ inline void ldmatrix_trans(uint32_t (&r)[4], const bf16 *p)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(p))
                 : "memory");
}

static __device__ inline void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

static __device__ inline uint32_t pack(float low, float high)
{
    __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<uint32_t *>(&v);
}

/* NT neighbouring C tiles, rounded, as NT / 2 A operands. */
template <int NT>
static __device__ inline void round_operand(uint32_t (&p)[NT / 2][4], const float (&s)[NT][4])
{
#pragma unroll
    for (int k = 0; k < NT / 2; k++) {
        p[k][0] = pack(s[2 * k][0], s[2 * k][1]);
        p[k][1] = pack(s[2 * k][2], s[2 * k][3]);
        p[k][2] = pack(s[2 * k + 1][0], s[2 * k + 1][1]);
        p[k][3] = pack(s[2 * k + 1][2], s[2 * k + 1][3]);
    }
}

/* Where a lane points ldmatrix, from the first element of [16,16] of a tile. Matrices in the order (rows 0-7,
   columns 0-7), (8-15, 0-7), (0-7, 8-15), (8-15, 8-15): the registers of an A operand; with ldmatrix_trans, where
   the tile's rows are those of B, the B operands {0,1} of columns 0-7 and {2,3} of columns 8-15. */
static __device__ inline int at_rows(int lane, int stride)
{
    return lane % 16 * stride + lane / 16 * 8;
}

/* The same where the tile's rows are the columns of B. The two middle matrices change places, so that {0,1}
   are both halves of the sum for columns 0-7 and {2,3} for columns 8-15. */
static __device__ inline int at_columns(int lane, int stride)
{
    return (lane % 8 + lane / 16 * 8) * stride + lane / 8 % 2 * 8;
}

/* Copies past the registers. What is not there is not read, but its address must be valid all the same. cg, past
   the first level cache, which a tile read once has no use for, exists for 16 bytes only. */
static __device__ inline void cp_async(void *to, const void *from, int bytes, bool there)
{
    int n = there ? bytes : 0; /* the rest is filled with zeros */
    if (bytes == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)),
                     "l"(from), "r"(n)
                     : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to)),
                     "l"(from), "r"(n)
                     : "memory");
}

/* Ends a group of this thread's copies. A group may be empty: kernels commit one in every step, so that the
   number of later groups that a wait lets pass is the same in the last steps as in the others. */
static __device__ inline void cp_commit()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Until all but the last N groups of this thread have landed. Of the other threads' copies it says nothing:
   a __syncthreads must follow before a tile is read. */
template <int N> static __device__ inline void cp_wait()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

/* Starts the copy of rows [row0, row0 + ROWS) of x, of leading dimension ld; rows from `end` on are 0.
 */
template <int ROWS, int D>
static __device__ inline void load_tile(bf16 *tile, const bf16 *x, int64_t ld, int row0, int end)
{
    enum { CHUNKS = D / 8 };
#pragma unroll
    for (int i = threadIdx.x; i < ROWS * CHUNKS; i += MMA_THREADS) {
        int r = i / CHUNKS, c = i % CHUNKS * 8;
        bool there = row0 + r < end;
        cp_async(tile + r * (D + PAD) + c, x + (there ? (row0 + r) * ld + c : 0), 16, there);
    }
}

/* 16 rows of C, f32 in registers, times factor (of rows l/4 and l/4+8) to rows of `tile`, which the
   warp owns, and from there to rows [row0, min(row0+16, end)) of y. By way of the tile because a lane holds
   4 bytes here and 4 bytes there of a row: written from registers, every store would fill half of the
   32-byte sectors that it touches. */
template <int D>
static __device__ inline void store_rows(bf16 *y, int64_t ld, int row0, int end, bf16 *tile,
                                         const float (&c)[D / 8][4], float factor, float factor8)
{
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < D / 8; n++) {
        bf16 *at = tile + lane / 4 * (D + PAD) + n * 8 + lane % 4 * 2;
        *reinterpret_cast<uint32_t *>(at) = pack(c[n][0] * factor, c[n][1] * factor);
        *reinterpret_cast<uint32_t *>(at + 8 * (D + PAD)) = pack(c[n][2] * factor8, c[n][3] * factor8);
    }
    __syncwarp(); /* lanes read what other lanes wrote */
#pragma unroll
    for (int i = lane; i < 16 * (D / 8); i += 32) {
        int r = i / (D / 8), col = i % (D / 8) * 8;
        if (row0 + r < end)
            *reinterpret_cast<uint4 *>(y + (row0 + r) * ld + col) =
                *reinterpret_cast<const uint4 *>(tile + r * (D + PAD) + col);
    }
    __syncwarp(); /* the next call may write the same rows */
}

#endif
