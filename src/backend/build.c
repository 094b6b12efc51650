/* SPDX-License-Identifier: Apache-2.0 */
/*
** build.c: which optional parts this build has, and for OpenBLAS, which is loaded when the program
** runs, whether the machine has it. Any thread.
*/
#include "dev/dev.h"

#include <string.h>

#if BS_HAVE_URING
#define URING "yes (liburing)"
#else
#define URING "no (pread threads)"
#endif
#if BS_HAVE_BLAS
#define NO_BLAS "plain loops (slow; OpenBLAS is used where libopenblas.so.0 is installed)"
#else
#define NO_BLAS "plain loops (slow)"
#endif
#if BS_HAVE_CUDA
#define CUDA "yes (" BS_CUDA_ARCHS ")"
#else
#define CUDA "no"
#endif
#if BS_HAVE_PCRE2
#define PATTERNS "yes (PCRE2)"
#else
#define PATTERNS "no (most tokenizer.json files are refused)"
#endif
#if BS_HAVE_UTF8PROC
#define NORMAL_FORMS "yes (utf8proc)"
#else
#define NORMAL_FORMS "no (NFC and NFKC are refused)"
#endif

#define INFO(gemm)                                                                                     \
    "io_uring: " URING "\ngemm: " gemm "\ncuda: " CUDA "\ntokenizer patterns: " PATTERNS               \
    "\nunicode normalisation: " NORMAL_FORMS "\n"

void bs_features_get(bs_features *out)
{
    *out = (bs_features){.io_uring = BS_HAVE_URING,
                         .openblas = strcmp(bsk_cpu_gemm_name(), "openblas") == 0,
                         .cuda = BS_HAVE_CUDA,
                         .pcre2 = BS_HAVE_PCRE2,
                         .utf8proc = BS_HAVE_UTF8PROC};
}

const char *bs_build_info(void)
{
    bs_features have;
    bs_features_get(&have);
    return have.openblas ? INFO("OpenBLAS") : INFO(NO_BLAS);
}
