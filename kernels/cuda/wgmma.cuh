/* SPDX-License-Identifier: Apache-2.0 */
/*
** wgmma.cuh: what sm_90a has of its own: products of a warpgroup (4 warps, 128 threads) whose operands
** lie in shared memory, copies of tiles by the tensor memory unit, barriers that count both.
**
** A tile has R rows of D bf16 and lies in shared memory as D/64 panels of [R][64], that is, of rows of
** 128 bytes, 16-byte chunk c of row r at place c ^ r % 8 ("128-byte swizzle"), which keeps the same chunk
** of 8 rows in different banks as the padding of mma.cuh does. Panels start at multiples of 1024 bytes:
** the hardware takes r % 8 from the bits of the address. The same tile is an operand either way: its
** rows are rows of A or columns of B (the sum runs over D), or the sum runs over its rows (B only).
**
** A warpgroup's product is asynchronous: from issue to wgmma_wait nobody may touch its registers, nor
** fill the tiles that it reads. Warp w of it holds rows 16w to 16w+15 of C and A, laid out as in mma.cuh.
*/
#ifndef BSK_CUDA_WGMMA_CUH
#define BSK_CUDA_WGMMA_CUH

#include "mma.cuh"

#include <cudaTypedefs.h>

enum { WARPGROUP = 128, PANEL = 64, PANEL_ROW_BYTES = 128, SWIZZLE_BYTES = 1024 };

/* ---- barriers in shared memory ---- */

/* A barrier counts arrivals and the bytes of copies; with the last of both its phase ends and the next begins.
   Phases alternate in parity. A wait names the parity of the phase that must be over, so it returns at once where
   that is the phase before the current one: on a new barrier a wait for parity 1 does. */

static __device__ inline void barrier_init(uint64_t *b, int arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(arrivals)
                 : "memory");
}

/* Makes barriers known to the copies, which may not see the threads' writes in their order; __syncthreads makes
   them known to the threads. */
static __device__ inline void barrier_init_done()
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

static __device__ inline void barrier_arrive(uint64_t *b)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(b)) : "memory");
}

/* Arrives, and the phase also waits for this many bytes of copies: it cannot end between the arrival and their
   landing. */
static __device__ inline void barrier_expect(uint64_t *b, int bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(b)),
                 "r"(bytes)
                 : "memory");
}

/* Until the phase of this parity is over. try_wait itself gives up after a time that the system chooses. */
static __device__ inline void barrier_wait(uint64_t *b, int parity)
{
    uint32_t done;
    do
        asm volatile("{\n"
                     ".reg .pred p;\n"
                     "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                     "selp.u32 %0, 1, 0, p;\n"
                     "}"
                     : "=r"(done)
                     : "r"(shared_address(b)), "r"(parity)
                     : "memory");
    while (!done);
}

/* One arrival of a warp: its products are done with a buffer. One lane speaks for all, so all must have come out
   of their wait for the products. */
static __device__ inline void barrier_release(uint64_t *empty)
{
    __syncwarp();
    if (threadIdx.x % 32 == 0)
        barrier_arrive(empty);
}

/* Barriers 1 to 15 of the block's own kind (0 is that of __syncthreads), for some of its threads: `threads` of
   them, those that wait and those that only arrive. */
static __device__ inline void named_sync(int id, int threads)
{
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

static __device__ inline void named_arrive(int id, int threads)
{
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* A ring of STAGES buffers that one side fills and the other empties: where a side stands in it. Each buffer has
   a barrier "full" and a barrier "empty"; phase is the parity of the round. The side that empties waits for
   full at `phase`, the side that fills for empty at `phase ^ 1`, which in the first round is over from the start. */
template <int STAGES> struct ring_place {
    int stage, phase;

    __device__ void next()
    {
        if (++stage == STAGES) {
            stage = 0;
            phase ^= 1;
        }
    }
};

/* ---- registers ---- */

/* A warpgroup takes or gives back registers, N a thread. The block has what its kernel was compiled for times its
   threads; those that copy give so that those that compute can hold their sums. All warps of the group must call. */

template <int N> static __device__ inline void registers_more()
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

template <int N> static __device__ inline void registers_less()
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

/* ---- copies ---- */

/* ROWS rows from `row` on of D columns from `column` on; rows that the matrix lacks are 0, and count as bytes all
   the same. One thread calls; the bytes count at `full`. The unit swizzles as it writes. */
template <int ROWS, int D>
static __device__ inline void copy_tile(bf16 *tile, const CUtensorMap *map, uint64_t *full, int column,
                                        int row)
{
#pragma unroll
    for (int p = 0; p < D / PANEL; p++)
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
                     "[%0], [%1, {%2, %3}], [%4];" ::"r"(shared_address(tile + p * ROWS * PANEL)),
                     "l"(map), "r"(column + p * PANEL), "r"(row), "r"(shared_address(full))
                     : "memory");
}

/* The box of slice e of a map of slices, PANEL columns from `column` on and as many rows as the map says. */
static __device__ inline void copy_slice(bf16 *tile, const CUtensorMap *map, uint64_t *full, int column,
                                         int row, int e)
{
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(shared_address(tile)),
                 "l"(map), "r"(column), "r"(row), "r"(e), "r"(shared_address(full))
                 : "memory");
}

/* ---- products ---- */

/* The matrix descriptor of the PTX ISA, all of it in units of 16 bytes: address, then at bit 16 the bytes from
   panel to panel where an operand reaches over more than one (else ignored), at bit 32 those from 8 rows to the
   next 8, at bit 62 the 128-byte swizzle. A step of 16 columns along D is 32 bytes on within the swizzled row:
   the hardware swizzles the address, not the descriptor. */
static __device__ inline uint64_t operand(const void *at, int panel)
{
    return (uint64_t)(shared_address(at) >> 4) | (uint64_t)(panel >> 4) << 16 |
           (uint64_t)(SWIZZLE_BYTES >> 4) << 32 | (uint64_t)1 << 62;
}

/* Tells the compiler that these registers change here. For it a product's registers are written where the product
   is issued; it may use or move them from there on, which is before the hardware has written them. */
template <int NT> static __device__ inline void touch(float (&d)[NT][4])
{
#pragma unroll
    for (int n = 0; n < NT; n++)
        asm volatile("" : "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])::"memory");
}

/* Before the first of a row of products whose registers (sums, or A) others have written: the products would read
   what was there before. */
static __device__ inline void wgmma_fence()
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

static __device__ inline void wgmma_commit()
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

/* Until at most LEFT of the groups are under way; d was computed by one of the others. Groups end in the order
   in which they were committed. */
template <int LEFT, int NT> static __device__ inline void wgmma_wait(float (&d)[NT][4])
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
    touch(d);
}

#define WGMMA_REGISTERS_32                                                                             \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,"  \
    "%26,%27,%28,%29,%30,%31}"
#define WGMMA_REGISTERS_64                                                                             \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,"  \
    "%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49," \
    "%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}"
#define WGMMA_REGISTERS_128                                                                            \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,"                                  \
    "%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,"                         \
    "%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,"                         \
    "%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,%64,%65,%66,%67,%68,%69,%70,%71,"                         \
    "%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,"                         \
    "%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,"                 \
    "%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,"       \
    "%126,%127}"
#define WGMMA_4(d, n)  "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
#define WGMMA_16(d, n) WGMMA_4(d, n), WGMMA_4(d, n + 1), WGMMA_4(d, n + 2), WGMMA_4(d, n + 3)
#define WGMMA_32(d)    WGMMA_16(d, 0), WGMMA_16(d, 4)
#define WGMMA_64(d)    WGMMA_16(d, 0), WGMMA_16(d, 4), WGMMA_16(d, 8), WGMMA_16(d, 12)

#define WGMMA_128(d) WGMMA_64(d), WGMMA_16(d, 16), WGMMA_16(d, 20), WGMMA_16(d, 24), WGMMA_16(d, 28)

/* d = (add ? d : 0) + a b, a [64,16] and b [16,8*NT], the sum over the columns of both tiles. The numbers behind
   the predicate: signs of a and b, then whether each is transposed. */
static __device__ inline void wgmma(float (&d)[8][4], uint64_t a, uint64_t b, int add)
{
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "setp.ne.b32 p, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " WGMMA_REGISTERS_32
                 ", %32, %33, p, 1, 1, 0, 0;\n"
                 "}"
                 : WGMMA_32(d)
                 : "l"(a), "l"(b), "r"(add));
}

static __device__ inline void wgmma(float (&d)[16][4], uint64_t a, uint64_t b, int add)
{
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "setp.ne.b32 p, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " WGMMA_REGISTERS_64
                 ", %64, %65, p, 1, 1, 0, 0;\n"
                 "}"
                 : WGMMA_64(d)
                 : "l"(a), "l"(b), "r"(add));
}

/* The same of 256 columns. TRANSPOSED: the sum is over the rows of b's tile. */
template <int TRANSPOSED>
static __device__ inline void wgmma(float (&d)[32][4], uint64_t a, uint64_t b, int add)
{
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "setp.ne.b32 p, %130, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 " WGMMA_REGISTERS_128
                 ", %128, %129, p, 1, 1, 0, %131;\n"
                 "}"
                 : WGMMA_128(d)
                 : "l"(a), "l"(b), "r"(add), "n"(TRANSPOSED));
}

/* d += a b, a [64,16] in registers, the sum over the rows of b's tile (the last number: b is transposed). */
static __device__ inline void wgmma(float (&d)[8][4], const uint32_t (&a)[4], uint64_t b)
{
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " WGMMA_REGISTERS_32
                 ", {%32,%33,%34,%35}, %36, 1, 1, 1, 1;"
                 : WGMMA_32(d)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

static __device__ inline void wgmma(float (&d)[16][4], const uint32_t (&a)[4], uint64_t b)
{
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " WGMMA_REGISTERS_64
                 ", {%64,%65,%66,%67}, %68, 1, 1, 1, 1;"
                 : WGMMA_64(d)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

/* Issues s = rows columns^T: 64 rows of a tile of ROWS, all of a tile of 8*NT. The first product overwrites s. */
template <int D, int ROWS, int NT>
static __device__ inline void issue_product(float (&s)[NT][4], const bf16 *rows, const bf16 *columns)
{
    wgmma_fence();
#pragma unroll
    for (int d = 0; d < D; d += 16)
        wgmma(s, operand(rows + d / PANEL * ROWS * PANEL + d % PANEL, 16),
              operand(columns + d / PANEL * NT * 8 * PANEL + d % PANEL, 16), d > 0);
    wgmma_commit();
}

/* Issues sum += p columns, p [64,16*KT] in registers, columns a tile of 16*KT rows. p must not change before the
   wait either. */
template <int D, int KT>
static __device__ inline void issue_sum(float (&sum)[D / 8][4], const uint32_t (&p)[KT][4],
                                        const bf16 *columns)
{
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < KT; k++)
        wgmma(sum, p[k], operand(columns + k * 16 * PANEL, KT * 16 * PANEL_ROW_BYTES));
    wgmma_commit();
}

/* ---- on the host ---- */

/* A box is one panel wide, since the swizzle allows no more than 128 bytes. a must be aligned to 16 bytes, and so
   must rows and slices. */
static inline cudaError_t encode_map(const bsk_cuda *cuda, CUtensorMap *map, const void *a, int rank,
                                     const cuuint64_t *size, const cuuint64_t *pitch, int tile_rows)
{
    const cuuint32_t box[] = {PANEL, (cuuint32_t)tile_rows, 1}, step[] = {1, 1, 1};
    CUresult r = ((PFN_cuTensorMapEncodeTiled_v12000)cuda->encode_tensor_map)(
        map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, (cuuint32_t)rank, const_cast<void *>(a), size, pitch,
        box, step, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
        CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return r == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

/* The map of a, bf16 [rows, columns], for copy_tile of tiles of tile_rows rows. */
static inline cudaError_t tensor_map(const bsk_cuda *cuda, CUtensorMap *map, const void *a,
                                     int64_t rows, int64_t columns, int tile_rows)
{
    const cuuint64_t size[] = {(cuuint64_t)columns, (cuuint64_t)rows};
    const cuuint64_t pitch[] = {(cuuint64_t)columns * sizeof(bf16)};
    return encode_map(cuda, map, a, 2, size, pitch, tile_rows);
}

/* The map of E such matrices, `stride` elements from one to the next, for copy_slice. */
static inline cudaError_t slices_map(const bsk_cuda *cuda, CUtensorMap *map, const void *a, int64_t E,
                                     int64_t rows, int64_t columns, int64_t stride, int tile_rows)
{
    const cuuint64_t size[] = {(cuuint64_t)columns, (cuuint64_t)rows, (cuuint64_t)E};
    const cuuint64_t pitch[] = {(cuuint64_t)columns * sizeof(bf16), (cuuint64_t)stride * sizeof(bf16)};
    return encode_map(cuda, map, a, 3, size, pitch, tile_rows);
}

#endif
