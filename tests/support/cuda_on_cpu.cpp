/* SPDX-License-Identifier: Apache-2.0 */
/*
** cuda_on_cpu.cpp: the threads of a block as contexts of one thread of the CPU. See cuda_on_cpu.h. A context is
** begun by ucontext and then left and entered by _setjmp and _longjmp, which ask the system nothing.
*/
#include "cuda_on_cpu.h"

#include "cuda/kernels.h"

#include <cstdio>
#include <cstdlib>
#include <vector>

#include <csetjmp>

#include <ucontext.h>

dim3 threadIdx, blockIdx, blockDim, gridDim;
void *cpu_dynamic_shared;

enum { STACK = 64 << 10, MOST_THREADS = 1024, LANES = 32 };
enum state { RUNS, WAITS_FOR_WARP, WAITS_FOR_BLOCK, ENDED };

struct context {
    ucontext_t begin;
    jmp_buf at;
    bool begun;
    state now;
    std::vector<char> stack;
};

static context threads[MOST_THREADS];
static ucontext_t unused;
static jmp_buf scheduler;
static int current;
static double lanes[MOST_THREADS];
static const std::function<void()> *body;

static void enter()
{
    (*body)();
    threads[current].now = ENDED;
    _longjmp(scheduler, 1);
}

static void go_on(context &t)
{
    if (_setjmp(scheduler))
        return;
    if (t.begun)
        _longjmp(t.at, 1);
    t.begun = true;
    swapcontext(&unused, &t.begin);
}

static void wait(state why)
{
    threads[current].now = why;
    if (!_setjmp(threads[current].at))
        _longjmp(scheduler, 1);
}

void cpu_wait_for_block()
{
    wait(WAITS_FOR_BLOCK);
}

void cpu_wait_for_warp()
{
    wait(WAITS_FOR_WARP);
}

double *cpu_lanes()
{
    return &lanes[current / LANES * LANES];
}

/* Threads [first, end) go on if all of them that have not ended wait for the same. */
static bool release(int first, int end, state what)
{
    bool any = false;
    for (int i = first; i < end; i++) {
        if (threads[i].now != what && threads[i].now != ENDED)
            return false;
        any = any || threads[i].now == what;
    }
    for (int i = first; i < end; i++)
        if (threads[i].now == what)
            threads[i].now = RUNS;
    return any;
}

static bool coin()
{
    static unsigned random = 1;
    random = random * 1664525u + 1013904223u;
    return random >> 31;
}

/* A warp goes on until all of it waits for the block or has ended. */
static void run_warp(int first, int end)
{
    do {
        bool downwards = coin();
        for (int k = first; k < end; k++) {
            int i = downwards ? first + end - 1 - k : k;
            if (threads[i].now != RUNS)
                continue;
            current = i;
            threadIdx = dim3(i % blockDim.x, i / blockDim.x % blockDim.y, i / blockDim.x / blockDim.y);
            go_on(threads[i]);
        }
    } while (release(first, end, WAITS_FOR_WARP));
}

static void run_block(int n)
{
    for (int i = 0; i < n; i++) {
        context &t = threads[i];
        t.stack.resize(STACK);
        getcontext(&t.begin);
        t.begin.uc_stack.ss_sp = t.stack.data();
        t.begin.uc_stack.ss_size = STACK;
        makecontext(&t.begin, enter, 0);
        t.begun = false;
        t.now = RUNS;
    }
    int warps = (n + LANES - 1) / LANES;
    do {
        bool downwards = coin();
        for (int k = 0; k < warps; k++) {
            int w = downwards ? warps - 1 - k : k;
            run_warp(w * LANES, std::min((w + 1) * (int)LANES, n));
        }
    } while (release(0, n, WAITS_FOR_BLOCK));
    for (int i = 0; i < n; i++)
        if (threads[i].now != ENDED) {
            printf("FATAL threads of block %u,%u wait for each other for ever\n", blockIdx.x,
                   blockIdx.y);
            exit(1);
        }
}

void cpu_run(dim3 grid, dim3 block, size_t bytes, const std::function<void()> &thread)
{
    int n = (int)(block.x * block.y * block.z);
    std::vector<double> shared((bytes + 7) / 8, std::nan("")); /* what nobody wrote is not zero */
    if (n < 1 || n > MOST_THREADS || grid.x < 1 || grid.y < 1 || grid.y > 65535 || grid.z != 1) {
        printf("FATAL a grid of %u,%u,%u blocks of %d threads\n", grid.x, grid.y, grid.z, n);
        exit(1);
    }
    cpu_dynamic_shared = shared.data();
    body = &thread;
    gridDim = grid;
    blockDim = block;
    for (unsigned y = 0; y < grid.y; y++)
        for (unsigned x = 0; x < grid.x; x++) {
            blockIdx = dim3(x, y, 0);
            run_block(n);
        }
}

/* ---- what has no version here ---- */

extern "C" {
bool bsk_cuda_attention_tiled(int64_t)
{
    return false; /* so that attention without tensor cores runs */
}

cudaError_t bsk_cuda_gemm(bsk_cuda *cuda, const bsk_call *)
{
    cuda->note = "products are the library's";
    return cudaErrorNotSupported;
}

cudaError_t bsk_cuda_attention_mma(bsk_cuda *, const bsk_call *)
{
    abort();
}

cudaError_t bsk_cuda_attention_bwd_mma(bsk_cuda *, const bsk_call *)
{
    abort();
}
}
