/* SPDX-License-Identifier: Apache-2.0 */
/*
** fuzz_safetensors.c: any bytes as a safetensors file. It is refused, or every tensor lies in the file,
** is found by its name and can be read. Build and run with libFuzzer:
**   clang -g -O1 -fsanitize=fuzzer,address,undefined -D_GNU_SOURCE -DBS_HAVE_URING=0 -DBS_HAVE_BLAS=0 \
**     -Isrc $(pkg-config --cflags libcjson) tests/fuzz/fuzz_safetensors.c src/base/[a-z]*.c \
**     src/io/safetensors.c src/io/file.c src/io/name_table.c -lcjson -lm -lpthread -o fuzz_safetensors
**   ./fuzz_safetensors -max_total_time=60 corpus/
*/
#include "bs.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static void must(bool holds)
{
    if (!holds)
        abort();
}

static void check(bs_safetensors *st)
{
    uint64_t at = 0;
    for (int64_t i = 0; i < bs_safetensors_count(st); i++) {
        const bs_safetensors_tensor *t = bs_safetensors_at(st, i);
        must(bs_safetensors_find(st, t->name) == t);
        must(i == 0 || t->offset == at);
        at = t->offset + t->bytes;
        bs_array *a;
        bs_status ret = bs_safetensors_read(st, t->name, &a);
        must(ret == (t->dtype == BS_DTYPE_COUNT ? BS_DTYPE : BS_OK));
        must(ret != BS_OK || a->bytes == t->bytes);
        bs_array_free(a);
    }
    must(bs_safetensors_count(st) == 0 || at == bs_safetensors_file_bytes(st));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    static int fd = -1;
    char path[64];
    bs_safetensors *st;
    if (fd < 0)
        fd = memfd_create("fuzz", MFD_CLOEXEC);
    must(fd >= 0 && ftruncate(fd, 0) == 0 && pwrite(fd, data, n, 0) == (ssize_t)n);
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    bs_status ret = bs_safetensors_open(path, &st);
    must(ret == BS_OK || ret == BS_FORMAT);
    if (ret == BS_OK)
        check(st);
    bs_safetensors_close(st);
    must(bs_host_bytes(BS_TAG_HEADER) == 0 && bs_host_bytes(BS_TAG_ARRAY) == 0);
    return 0;
}
